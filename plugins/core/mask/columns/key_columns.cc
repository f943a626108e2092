// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/mask/columns/key_columns.h"

#include <algorithm>
#include <set>
#include <utility>

#include "plugins/core/base/integers.h"
#include "plugins/core/mask/attention_mask.h"
#include "plugins/core/mask/columns/expr_rewrite.h"
#include "plugins/core/mask/expr_eval.h"
#include "plugins/core/mask/expr_operate.h"

namespace stof {
namespace {

// The words of all lists together, and the table of packed columns, stay within this many bytes.
constexpr int64_t kMostBytes = int64_t{64} << 20;
// Columns pay where the tiles that hold them have this many times as many keys.
constexpr int64_t kSparse = 2;
// Values of terms in h that AreHeadsAlike evaluates, and elements of tables that it compares.
constexpr int64_t kMostValues = int64_t{1} << 20, kMostCompared = int64_t{1} << 26;
// The name of the table of packed columns: one that no operator's operand has.
constexpr char kColumnTable[] = "table9999";

// Calls visit(i) for a node and all below it.
template <typename Visit>
void ForEachBelow(const MaskExpr& expr, int root, const Visit& visit) {
  std::vector<int> pending = {root};
  while (!pending.empty()) {
    const int at = pending.back();
    pending.pop_back();
    visit(expr.nodes()[static_cast<size_t>(at)]);
    const ExprNode& node = expr.nodes()[static_cast<size_t>(at)];
    for (int c = 0; c < node.arity; ++c) pending.push_back(node.child[c]);
  }
}

// Whether a condition reads k, and beside it at most h and tables.
bool IsOfKeys(const MaskExpr& expr, int root) {
  bool reads_key = false, reads_others = false;
  ForEachBelow(expr, root, [&](const ExprNode& node) {
    reads_key = reads_key || node.op == ExprOp::kK;
    reads_others = reads_others || node.op == ExprOp::kB || node.op == ExprOp::kQ || node.op == ExprOp::kS ||
                   node.op == ExprOp::kT || node.op == ExprOp::kP ||
                   (node.op == ExprOp::kLookup && !expr.operands()[static_cast<size_t>(node.operand)]->table);
  });
  return reads_key && !reads_others;
}

std::vector<int> Operands(const MaskExpr& expr, int root, ExprOp op) {
  std::vector<int> found, pending = {root};
  while (!pending.empty()) {
    const int at = pending.back();
    pending.pop_back();
    const ExprNode& node = expr.nodes()[static_cast<size_t>(at)];
    if (node.op == op) {
      pending.push_back(node.child[1]);
      pending.push_back(node.child[0]);
    } else {
      found.push_back(at);
    }
  }
  return found;
}

std::string TextOf(const MaskExpr& expr, int node) { return expr.Restrict({node}).Print(); }

// `or` of conjunctions, as nodes of expr.
using Disjuncts = std::vector<std::vector<int>>;

// Splits the `or` at a node. base: texts of the conditions beside it. Conditions that all disjuncts share are added to
// `shared`.
void SplitOr(const MaskExpr& expr, int root, const std::set<std::string>& base, Disjuncts* rest, Disjuncts* columns,
             std::vector<int>* shared) {
  Disjuncts disjuncts;
  std::vector<std::set<std::string>> texts;
  for (const int disjunct : Operands(expr, root, ExprOp::kOr)) {
    disjuncts.emplace_back();
    texts.emplace_back();
    for (const int conjunct : Operands(expr, disjunct, ExprOp::kAnd)) {
      std::string text = TextOf(expr, conjunct);
      if (base.count(text) > 0 || !texts.back().insert(std::move(text)).second) continue;
      disjuncts.back().push_back(conjunct);
    }
  }
  const std::vector<int> first = disjuncts.front();
  for (const int conjunct : first) {
    const std::string text = TextOf(expr, conjunct);
    if (!std::all_of(texts.begin(), texts.end(), [&](const auto& one) { return one.count(text) > 0; })) continue;
    shared->push_back(conjunct);
    for (std::vector<int>& one : disjuncts) {
      one.erase(std::remove_if(one.begin(), one.end(), [&](int c) { return TextOf(expr, c) == text; }), one.end());
    }
  }
  for (const std::vector<int>& one : disjuncts) {
    const bool is_column =
        !one.empty() && std::all_of(one.begin(), one.end(), [&](int c) { return IsOfKeys(expr, c); });
    (is_column ? columns : rest)->push_back(one);
  }
}

// The conjunction of `conjuncts` and, unless it is empty, the `or` of disjuncts.
MaskExpr Join(const MaskExpr& expr, const std::vector<int>& conjuncts, const Disjuncts& disjuncts) {
  ExprBuilder builder;
  for (const auto& operand : expr.operands()) builder.AddOperand(operand);
  const std::vector<int> placed = CopyNodes(expr, &builder, CopyNode);
  const auto all = [&](const std::vector<int>& nodes, int root) {
    for (const int node : nodes) {
      const int at = placed[static_cast<size_t>(node)];
      root = root < 0 ? at : builder.Add(ExprOp::kAnd, {root, at});
    }
    return root;
  };
  int any = -1;
  for (const std::vector<int>& disjunct : disjuncts) {
    const int one = disjunct.empty() ? builder.Add(ExprOp::kTrue) : all(disjunct, -1);
    any = any < 0 ? one : builder.Add(ExprOp::kOr, {any, one});
  }
  int root = all(conjuncts, -1);
  if (any >= 0) root = root < 0 ? any : builder.Add(ExprOp::kAnd, {root, any});
  if (root < 0) return MaskExpr();
  const MaskExpr joined = builder.Build(root);
  return joined.Restrict({joined.root()});
}

}  // namespace

bool SplitColumns(const MaskExpr& expr, ColumnSplit* split) {
  if (expr.empty()) return false;
  const std::vector<int> conjuncts = expr.Conjuncts();
  if (conjuncts.size() > 64) return false;
  // An `or` that mixes both kinds; else conditions of keys alone are the columns, of queries that attend no others.
  for (const int candidate : conjuncts) {
    if (expr.nodes()[static_cast<size_t>(candidate)].op != ExprOp::kOr) continue;
    if (Operands(expr, candidate, ExprOp::kOr).size() > 64) continue;
    std::vector<int> base;
    std::set<std::string> texts;
    for (const int other : conjuncts) {
      if (other == candidate) continue;
      base.push_back(other);
      texts.insert(TextOf(expr, other));
    }
    Disjuncts rest, columns;
    SplitOr(expr, candidate, texts, &rest, &columns, &base);
    if (columns.empty() || rest.empty()) continue;
    split->base = Join(expr, base, {});
    split->rest = Join(expr, {}, rest);
    split->columns = Join(expr, {}, columns);
    split->base_and_rest = Join(expr, base, rest);
    return true;
  }
  std::vector<int> base, columns;
  for (const int conjunct : conjuncts) (IsOfKeys(expr, conjunct) ? columns : base).push_back(conjunct);
  if (columns.empty()) return false;
  split->base = Join(expr, base, {});
  split->rest = split->base_and_rest = MaskExpr();
  split->columns = Join(expr, columns, {});
  return true;
}

namespace {

// What AreHeadsAlike knows of a node.
struct HeadTerm {
  bool is_alike = true;         // it has one value for all heads of a group, whatever b, q and k are
  bool is_of_heads = false;     // it reads h, and nothing else but constants
  std::vector<int64_t> values;  // is_of_heads: its value for each head
};

bool HaveGroupsOneValue(const std::vector<int64_t>& values, int64_t group) {
  for (size_t h = 0; h < values.size(); ++h) {
    if (values[h] != values[h - h % static_cast<size_t>(group)]) return false;
  }
  return true;
}

// Whether the slices of a table that the heads of each group read along `axis` are equal.
bool AreSlicesAlike(const ExprOperand& table, int axis, const std::vector<int64_t>& index, int64_t group,
                    int64_t* left) {
  const int64_t dim = table.dims[axis];
  if (std::any_of(index.begin(), index.end(), [dim](int64_t i) { return i < 0 || i >= dim; })) return false;
  int64_t outer = 1, inner = 1;
  for (int i = 0; i < axis; ++i) outer *= table.dims[i];
  for (int i = axis + 1; i < table.rank; ++i) inner *= table.dims[i];
  for (size_t h = 0; h < index.size(); ++h) {
    const int64_t a = index[h], b = index[h - h % static_cast<size_t>(group)];
    if (a == b) continue;
    if ((*left -= outer * inner) < 0) return false;
    for (int64_t o = 0; o < outer; ++o) {
      for (int64_t i = 0; i < inner; ++i) {
        if (table.At((o * dim + a) * inner + i) != table.At((o * dim + b) * inner + i)) return false;
      }
    }
  }
  return true;
}

}  // namespace

bool AreHeadsAlike(const MaskExpr& expr, int64_t heads, int64_t group) {
  if (group <= 1 || !expr.Uses(ExprOp::kH)) return true;
  const auto count = static_cast<size_t>(heads);
  std::vector<HeadTerm> terms(expr.nodes().size());
  int64_t values_left = kMostValues, compared_left = kMostCompared;
  for (size_t i = 0; i < terms.size(); ++i) {
    const ExprNode& node = expr.nodes()[i];
    HeadTerm& term = terms[i];
    if (node.op == ExprOp::kH || node.op == ExprOp::kConst) {
      if ((values_left -= heads) < 0) return false;
      term.is_of_heads = true;
      term.values.resize(count, node.value);
      for (size_t h = 0; node.op == ExprOp::kH && h < count; ++h) term.values[h] = static_cast<int64_t>(h);
      term.is_alike = node.op == ExprOp::kConst;
      continue;
    }
    if (node.op == ExprOp::kLookup) {
      const ExprOperand& operand = *expr.operands()[static_cast<size_t>(node.operand)];
      for (int c = 0; c < node.arity; ++c) {
        const HeadTerm& index = terms[static_cast<size_t>(node.child[c])];
        if (index.is_alike) continue;
        const bool broadcasts =
            operand.table && operand.dims[c] == 1 && expr.nodes()[static_cast<size_t>(node.child[c])].op == ExprOp::kH;
        term.is_alike =
            term.is_alike && (broadcasts || (operand.table && index.is_of_heads &&
                                             AreSlicesAlike(operand, c, index.values, group, &compared_left)));
      }
      continue;
    }
    bool are_of_heads = node.arity > 0;
    for (int c = 0; c < node.arity; ++c) {
      const HeadTerm& child = terms[static_cast<size_t>(node.child[c])];
      term.is_alike = term.is_alike && child.is_alike;
      are_of_heads = are_of_heads && child.is_of_heads;
    }
    if (!are_of_heads || (values_left -= heads) < 0) continue;
    const std::vector<int64_t>& left = terms[static_cast<size_t>(node.child[0])].values;
    const std::vector<int64_t>& right = terms[static_cast<size_t>(node.child[node.arity - 1])].values;
    // Sums may leave int64 only in expressions that MaskExpr::Check refuses. They are then of no meaning here.
    constexpr int64_t kMost = int64_t{1} << 31;
    const auto is_small = [](int64_t x) { return x > -kMost && x < kMost; };
    if (!std::all_of(left.begin(), left.end(), is_small) || !std::all_of(right.begin(), right.end(), is_small))
      continue;
    term.is_of_heads = true;
    term.values.resize(count);
    for (size_t h = 0; h < count; ++h) term.values[h] = Operate(node.op, left[h], right[h]);
    term.is_alike = HaveGroupsOneValue(term.values, group);
  }
  return terms[static_cast<size_t>(expr.root())].is_alike;
}

int64_t KeyColumns::packed() const { return RoundUp(most_, kAlign); }

Status KeyColumns::Make(const MaskExpr& columns, int64_t heads, int64_t kv_heads, int64_t length,
                        std::shared_ptr<const KeyColumns>* made) {
  made->reset();
  const int64_t group = heads / kv_heads, lists = columns.Uses(ExprOp::kH) ? kv_heads : 1;
  const int64_t words = CeilDiv(length, kTile);
  if (lists * words * 8 > kMostBytes) return Status();
  std::vector<ExprBinding> bindings(columns.operands().size());
  const ExprSizes sizes = {1, heads, 1, length, 0};
  STOF_RETURN_IF_ERROR(columns.Check(sizes, &bindings));
  auto found = std::make_shared<KeyColumns>();
  found->length_ = length;
  found->word_count_ = words;
  found->words_.assign(static_cast<size_t>(lists * words), 0);
  ExprEvaluator evaluator(columns, sizes, bindings);
  std::vector<uint32_t> bits(static_cast<size_t>(2 * words));
  int64_t total = 0, tiles = 0;
  for (int64_t list = 0; list < lists; ++list) {
    evaluator.Classify({0, 0, list * group, list * group, 0, 0, 0, length - 1});
    std::fill(bits.begin(), bits.end(), 0u);
    evaluator.Tile(0, list * group, 0, 0, 1, length, 2 * words, bits.data());
    std::vector<int32_t> keys;
    for (int64_t w = 0; w < words; ++w) {
      const auto at = static_cast<size_t>(2 * w);
      uint64_t word = bits[at] | uint64_t{bits[at + 1]} << 32;
      found->words_[static_cast<size_t>(list * words + w)] = word;
      tiles += word != 0 ? 1 : 0;
      for (; word != 0; word &= word - 1) keys.push_back(static_cast<int32_t>(kTile * w + __builtin_ctzll(word)));
    }
    total += static_cast<int64_t>(keys.size());
    found->most_ = std::max(found->most_, static_cast<int64_t>(keys.size()));
    found->keys_.push_back(std::move(keys));
  }
  found->total_ = total;
  found->tile_keys_ = kTile * tiles;
  found->are_sparse_ = total > 0 && kSparse * total <= kTile * tiles && lists * found->packed() * 8 <= kMostBytes;
  *made = std::move(found);
  return Status();
}

bool MakeGatheredMask(const ColumnSplit& split, const KeyColumns& columns, int64_t group, int64_t keys,
                      MaskExpr* mask) {
  const int64_t packed = columns.packed(), length = columns.length();
  std::vector<int32_t> table(static_cast<size_t>(columns.lists() * packed), static_cast<int32_t>(length));
  for (int64_t list = 0; list < columns.lists(); ++list) {
    const std::vector<int32_t>& from = columns.keys(list);
    std::copy(from.begin(), from.end(), table.begin() + static_cast<std::ptrdiff_t>(list * packed));
  }
  Tensor tensor = {};
  tensor.dtype = DType::kI32;
  tensor.rank = 2;
  tensor.dims[0] = columns.lists(), tensor.dims[1] = packed;
  tensor.data = table.data();
  std::shared_ptr<const ExprOperand> operand;
  if (!MakeTable(kColumnTable, tensor, &operand).ok()) return false;

  ExprBuilder builder;
  const int column_table = builder.AddOperand(operand);
  bool fits = true;
  // Copies a part with k replaced by a node, and gives its root; -1 of an empty part.
  const auto copy = [&](const MaskExpr& part, int key) {
    if (part.empty()) return -1;
    const int first = static_cast<int>(builder.operands().size());
    for (const auto& one : part.operands()) {
      fits = fits && one->name != kColumnTable;
      builder.AddOperand(one);
    }
    const std::vector<int> placed = CopyNodes(part, &builder, [&](ExprNode node, ExprBuilder* to) {
      if (node.op == ExprOp::kK) return key;
      if (node.op == ExprOp::kT && keys >= 0) return to->AddConstant(keys);
      if (node.op == ExprOp::kLookup) node.operand += first;
      return CopyNode(node, to);
    });
    const int root = placed[static_cast<size_t>(part.root())];
    fits = fits && root >= 0;
    return root;
  };
  const auto both = [&](int a, int b) { return a < 0 ? b : b < 0 ? a : builder.Add(ExprOp::kAnd, {a, b}); };
  // Where a part reads tables, indices of the other half must not leave them.
  const bool reads_tables = !split.base.operands().empty() || !split.rest.operands().empty();

  // Columns.
  const int position = builder.Add(ExprOp::kK);
  const int in_columns = builder.Add(ExprOp::kMin, {position, builder.AddConstant(packed - 1)});
  int list = builder.AddConstant(0);
  if (columns.lists() > 1) {
    list = builder.Add(ExprOp::kH);
    if (group > 1) list = builder.Add(ExprOp::kDiv, {list, builder.AddConstant(group)});
  }
  const int indices[4] = {list, in_columns, -1, -1};
  const int column = list < 0 || in_columns < 0 ? -1 : builder.AddLookup(column_table, indices, 2);
  if (column < 0) return false;
  const int key = reads_tables ? builder.Add(ExprOp::kMin, {column, builder.AddConstant(length - 1)}) : column;
  int columns_allow = builder.Add(ExprOp::kLt, {position, builder.AddConstant(packed)});
  columns_allow = both(columns_allow, builder.Add(ExprOp::kLt, {column, builder.AddConstant(length)}));
  columns_allow = both(columns_allow, copy(split.base, key));
  if (!split.rest.empty()) columns_allow = both(columns_allow, builder.Add(ExprOp::kNot, {copy(split.rest, key)}));
  // Keys.
  int root = columns_allow;
  if (!split.rest.empty()) {
    int behind = builder.Add(ExprOp::kSub, {position, builder.AddConstant(packed)});
    int keys_allow = builder.Add(ExprOp::kGe, {position, builder.AddConstant(packed)});
    if (reads_tables) behind = builder.Add(ExprOp::kMax, {behind, builder.AddConstant(0)});
    keys_allow = both(keys_allow, both(copy(split.base, behind), copy(split.rest, behind)));
    root = builder.Add(ExprOp::kOr, {columns_allow, keys_allow});
  }
  if (!fits || root < 0 || builder.size() >= MaskExpr::kMaxAnyNodes) return false;
  *mask = builder.Build(root);
  return true;
}

std::shared_ptr<const ColumnSource::Gathered> ColumnSource::Get(int64_t heads, int64_t kv_heads, int64_t length,
                                                                int64_t keys) const {
  {
    const auto known = known_.Lock();
    const auto found = std::find_if(known->begin(), known->end(), [&](const auto& one) {
      return one->heads == heads && one->kv_heads == kv_heads && one->length == length && one->keys == keys;
    });
    if (found != known->end()) {
      std::rotate(known->begin(), found, found + 1);
      return known->front();
    }
  }
  auto made = std::make_shared<Gathered>();
  made->heads = heads, made->kv_heads = kv_heads, made->length = length, made->keys = keys;
  const int64_t group = heads / kv_heads;
  if (has_columns_ && length > 0 && AreHeadsAlike(split_.columns, heads, group)) {
    // What cannot be evaluated for so many keys has no columns: the mask itself may hold fewer, or reports the error.
    const bool is_legal = KeyColumns::Make(split_.columns, heads, kv_heads, length, &made->columns).ok();
    MaskExpr mask;
    if (is_legal && made->columns != nullptr && made->columns->are_sparse() &&
        MakeGatheredMask(split_, *made->columns, group, keys, &mask)) {
      made->mask = MakeAttentionMask(mask, false);
    }
  }
  std::shared_ptr<const Gathered> dropped;  // freed after the lock: its device memory may have to wait
  const auto known = known_.Lock();
  if (known->size() == kMostKnown) {
    dropped = std::move(known->back());
    known->pop_back();
  }
  known->insert(known->begin(), made);
  return made;
}

}  // namespace stof
