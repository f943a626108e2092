// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/mask/cached_mask.h"

#include <algorithm>
#include <cstring>

#include "plugins/core/host/hash.h"
#include "plugins/core/mask/columns/expr_rewrite.h"
#include "plugins/core/mask/expr_affine.h"

namespace stof {
namespace {

bool IsCausal(const MaskExpr& expr, int conjunct) {
  const ExprNode& node = expr.nodes()[static_cast<size_t>(conjunct)];
  if (node.op != ExprOp::kLe) return false;
  return expr.nodes()[static_cast<size_t>(node.child[0])].op == ExprOp::kK &&
         expr.nodes()[static_cast<size_t>(node.child[1])].op == ExprOp::kQ;
}

Status TooLong() { return Status::Error("the mask has more than 4096 nodes"); }

// expr and the condition that `add` appends; of blank text, which is parsed as True, the condition alone.
template <typename Add>
Status AddConjunct(const MaskExpr& expr, Add add, MaskExpr* sum) {
  const bool allows_all = expr.empty() || expr.nodes()[static_cast<size_t>(expr.root())].op == ExprOp::kTrue;
  ExprBuilder builder;
  for (const auto& operand : expr.operands()) builder.AddOperand(operand);
  int root = -1;
  if (!allows_all) root = CopyNodes(expr, &builder, CopyNode)[static_cast<size_t>(expr.root())];
  const int condition = add(&builder);
  root = allows_all ? condition : builder.Add(ExprOp::kAnd, {root, condition});
  if (root < 0) return TooLong();
  *sum = builder.Build(root);
  return Status();
}

int AddCausal(ExprBuilder* to) {
  const int key = to->Add(ExprOp::kK);
  return to->Add(ExprOp::kLe, {key, to->Add(ExprOp::kQ)});
}

int AddWindow(int64_t window, ExprBuilder* to) {
  const int query = to->Add(ExprOp::kQ);
  const int distance = to->Add(ExprOp::kSub, {query, to->Add(ExprOp::kK)});
  return to->Add(ExprOp::kLt, {distance, to->AddConstant(window)});
}

// Reads the positions of queries from a run-time operand: `replace(node, position, to)` copies a node, where position
// adds the position of query 0 of the sequence.
template <typename Replace>
Status MoveQueries(const MaskExpr& expr, const Replace& replace, MaskExpr* moved) {
  ExprBuilder builder;
  for (const auto& operand : expr.operands()) builder.AddOperand(operand);
  auto first = std::make_shared<ExprOperand>();
  first->name = kFirstPositions;
  first->rank = 1;
  first->hash = HashBytes(kFirstPositions, std::strlen(kFirstPositions), 0);
  const int operand = builder.AddOperand(std::move(first));
  const auto position = [operand](ExprBuilder* to) {
    const int indices[4] = {to->Add(ExprOp::kB), -1, -1, -1};
    return indices[0] < 0 ? -1 : to->AddLookup(operand, indices, 1);
  };
  const std::vector<int> placed =
      CopyNodes(expr, &builder, [&](const ExprNode& node, ExprBuilder* to) { return replace(node, position, to); });
  const int root = placed[static_cast<size_t>(expr.root())];
  if (root < 0) return TooLong();
  *moved = builder.Build(root);
  return Status();
}

// Rewrites absolute q as the first position of the sequence plus q counted from 0.
Status CountQueriesFromZero(const MaskExpr& expr, MaskExpr* moved) {
  const auto replace = [](const ExprNode& node, const auto& position, ExprBuilder* to) {
    if (node.op == ExprOp::kP) return position(to);
    if (node.op == ExprOp::kQ) {
      const int at = position(to);
      return to->Add(ExprOp::kAdd, {at, to->Add(ExprOp::kQ)});
    }
    return CopyNode(node, to);
  };
  return MoveQueries(expr, replace, moved);
}

// Finds the window of a mask whose conjuncts all bound q - k. False: it is another mask.
bool FindRange(const MaskExpr& expr, int64_t* window_left) {
  const std::vector<ExprNode>& nodes = expr.nodes();
  for (const ExprOp op : {ExprOp::kS, ExprOp::kT, ExprOp::kP}) {
    if (expr.Uses(op)) return false;
  }
  const ExprSizes any = {1, 1, 1, 1, 0};
  std::vector<Affine> forms(nodes.size());
  std::vector<uint8_t> is_affine(nodes.size(), 0);
  for (size_t i = 0; i < nodes.size(); ++i) {
    const Affine* arguments[2] = {nullptr, nullptr};
    for (int c = 0; c < std::min<int>(nodes[i].arity, 2); ++c) {
      const auto child = static_cast<size_t>(nodes[i].child[c]);
      if (is_affine[child] != 0) arguments[c] = &forms[child];
    }
    is_affine[i] = CombineAffine(nodes[i], arguments[0], arguments[1], any, &forms[i]) ? 1 : 0;
  }
  int64_t least = -1, most = -1;  // of q - k; -1: none
  for (const int conjunct : expr.Conjuncts()) {
    const ExprNode& node = nodes[static_cast<size_t>(conjunct)];
    const Affine& form = forms[static_cast<size_t>(conjunct)];  // left minus right
    const bool is_less = node.op == ExprOp::kLt || node.op == ExprOp::kLe;
    const bool is_greater = node.op == ExprOp::kGt || node.op == ExprOp::kGe;
    if ((!is_less && !is_greater) || is_affine[static_cast<size_t>(conjunct)] == 0) return false;
    if (form.b != 0 || form.h != 0 || form.q + form.k != 0 || (form.q != 1 && form.q != -1)) return false;
    const int64_t strict = node.op == ExprOp::kLt || node.op == ExprOp::kGt ? 1 : 0;
    // is_less: form.q (q - k) + constant <= -strict.
    if (is_less == (form.q == 1)) {
      const int64_t bound = -form.q * form.constant - strict;
      most = most < 0 ? bound : std::min(most, bound);
      if (bound < 0) return false;
    } else {
      const int64_t bound = -form.q * form.constant + strict;
      if (bound > 0) return false;
      least = std::max(least, bound);
    }
  }
  *window_left = most;
  return least == 0;
}

// A sum of blocks of positions: q times q / block, k times k / block, and a constant.
struct BlockForm {
  int64_t q = 0, k = 0, constant = 0;
  int64_t block = 0;  // 0: no block was read yet
};

// Adds factor times the integer expression of a node. False: it is no such sum, or its blocks differ in size.
bool AddBlockForm(const std::vector<ExprNode>& nodes, int index, int64_t factor, BlockForm* form) {
  const ExprNode& node = nodes[static_cast<size_t>(index)];
  switch (node.op) {
    case ExprOp::kConst:
      return !__builtin_mul_overflow(node.value, factor, &factor) &&
             !__builtin_add_overflow(form->constant, factor, &form->constant);
    case ExprOp::kAdd:
    case ExprOp::kSub:
      return AddBlockForm(nodes, node.child[0], factor, form) &&
             AddBlockForm(nodes, node.child[1], node.op == ExprOp::kSub ? -factor : factor, form);
    case ExprOp::kDiv: {
      const ExprNode& position = nodes[static_cast<size_t>(node.child[0])];
      const ExprNode& block = nodes[static_cast<size_t>(node.child[1])];
      if (block.op != ExprOp::kConst || block.value < 1 || (form->block != 0 && form->block != block.value))
        return false;
      if (position.op != ExprOp::kQ && position.op != ExprOp::kK) return false;
      form->block = block.value;
      (position.op == ExprOp::kQ ? form->q : form->k) += factor;
      return true;
    }
    default:
      return false;
  }
}

// Finds the window of a causal mask whose only other conjunct bounds q / block - k / block: its keys begin at
// q - q % block - window_left. False: it is another mask.
bool FindBlockRange(const MaskExpr& expr, int64_t* window_left, int64_t* block) {
  constexpr int64_t kLargest = int64_t{1} << 24;
  const std::vector<ExprNode>& nodes = expr.nodes();
  bool is_causal = false, has_window = false;
  for (const int conjunct : expr.Conjuncts()) {
    if (IsCausal(expr, conjunct)) {
      is_causal = true;
      continue;
    }
    const ExprNode& node = nodes[static_cast<size_t>(conjunct)];
    const bool is_less = node.op == ExprOp::kLt || node.op == ExprOp::kLe;
    const bool is_greater = node.op == ExprOp::kGt || node.op == ExprOp::kGe;
    BlockForm form;  // of the smaller side minus the larger one
    if (has_window || (!is_less && !is_greater) || !AddBlockForm(nodes, node.child[0], is_less ? 1 : -1, &form) ||
        !AddBlockForm(nodes, node.child[1], is_less ? -1 : 1, &form) || form.q != 1 || form.k != -1) {
      return false;
    }
    const int64_t strict = node.op == ExprOp::kLt || node.op == ExprOp::kGt ? 1 : 0;
    if (form.constant < -kLargest || form.constant > kLargest || form.block > kLargest) return false;
    const int64_t most = -form.constant - strict;  // of q / block - k / block
    if (most < 0) return false;
    has_window = true;
    *window_left = most * form.block;
    *block = form.block;
  }
  return is_causal && has_window && *window_left <= kLargest;
}

// Folds `and`, `or` and `not` of a constant; other nodes are copied.
int CopyFolded(const ExprNode& node, ExprBuilder* to) {
  const auto is = [&](int c, ExprOp op) { return to->node(node.child[c]).op == op; };
  if (node.op == ExprOp::kAnd || node.op == ExprOp::kOr) {
    const bool is_and = node.op == ExprOp::kAnd;
    const ExprOp neutral = is_and ? ExprOp::kTrue : ExprOp::kFalse, deciding = is_and ? ExprOp::kFalse : ExprOp::kTrue;
    for (const int c : {0, 1}) {
      if (is(c, deciding) || is(1 - c, neutral)) return node.child[c];
    }
  }
  if (node.op == ExprOp::kNot && is(0, ExprOp::kTrue)) return to->Add(ExprOp::kFalse);
  if (node.op == ExprOp::kNot && is(0, ExprOp::kFalse)) return to->Add(ExprOp::kTrue);
  return CopyNode(node, to);
}

bool Compare(ExprOp op, int64_t difference) {
  switch (op) {
    case ExprOp::kLt:
      return difference < 0;
    case ExprOp::kLe:
      return difference <= 0;
    case ExprOp::kGt:
      return difference > 0;
    case ExprOp::kGe:
      return difference >= 0;
    case ExprOp::kEq:
      return difference == 0;
    default:
      return difference != 0;
  }
}

// The text of a mask in a step of one token: S is 1, and P is the query's position. Comparisons of these alone are
// folded: `q >= P + S - 128` is true. Empty: the text would be too long.
std::string TextOfOneToken(const MaskExpr& expr) {
  ExprBuilder builder;
  for (const auto& operand : expr.operands()) builder.AddOperand(operand);
  const ExprSizes any = {1, 1, 1, 1, 0};
  std::vector<Affine> forms;  // of the new nodes
  std::vector<uint8_t> is_affine;
  const auto copy = [&](const ExprNode& given, ExprBuilder* to) {
    ExprNode node = given;
    if (node.op == ExprOp::kP) node.op = ExprOp::kQ;
    if (node.op == ExprOp::kS) node.op = ExprOp::kConst, node.value = 1;
    const Affine* arguments[2] = {nullptr, nullptr};
    for (int c = 0; c < std::min<int>(node.arity, 2); ++c) {
      const auto child = static_cast<size_t>(node.child[c]);
      if (is_affine[child] != 0) arguments[c] = &forms[child];
    }
    Affine form;
    const bool has_form = CombineAffine(node, arguments[0], arguments[1], any, &form);
    const bool is_comparison = node.op >= ExprOp::kLt && node.op <= ExprOp::kNe;
    const int index = has_form && is_comparison && IsConstant(form)
                          ? to->Add(Compare(node.op, form.constant) ? ExprOp::kTrue : ExprOp::kFalse)
                          : CopyFolded(node, to);
    if (index == static_cast<int>(forms.size())) {
      forms.push_back(form);
      is_affine.push_back(has_form && !is_comparison ? 1 : 0);
    }
    return index;
  };
  const int root = CopyNodes(expr, &builder, copy)[static_cast<size_t>(expr.root())];
  return root < 0 ? std::string() : builder.Build(root).Print();
}

}  // namespace

Status MakeCachedMask(const std::string& text, const Tables& tables, int64_t window, CachedMask* mask) {
  MaskExpr given, moved;
  STOF_RETURN_IF_ERROR(MaskExpr::Parse(text, tables, &given));
  if (given.Uses(ExprOp::kT)) {
    return Status::Error("the mask reads T, expected positions and P: sequences have different numbers of keys");
  }
  if (given.UsesRuntime()) {
    return Status::Error("the mask reads a run-time operand, expected positions and tables");
  }
  const std::vector<int> conjuncts = given.empty() ? std::vector<int>() : given.Conjuncts();
  const auto is_causal = [&given](int conjunct) { return IsCausal(given, conjunct); };
  mask->expr = given;
  if (std::none_of(conjuncts.begin(), conjuncts.end(), is_causal)) {
    STOF_RETURN_IF_ERROR(AddConjunct(given, AddCausal, &mask->expr));
  }
  int64_t reach = -1;
  const bool has_reach = FindRange(mask->expr, &reach) && reach >= 0;
  if (window > 0 && (!has_reach || reach >= window)) {
    const MaskExpr causal = mask->expr;
    const auto add = [window](ExprBuilder* to) { return AddWindow(window, to); };
    STOF_RETURN_IF_ERROR(AddConjunct(causal, add, &mask->expr));
  }
  STOF_RETURN_IF_ERROR(CountQueriesFromZero(mask->expr, &moved));
  mask->on_device = MakeAttentionMask(moved);
  mask->of_first_prompt = MakeAttentionMask(mask->expr);
  mask->is_range = FindRange(mask->expr, &mask->window_left);
  auto columns = std::make_shared<const ColumnSource>(mask->expr);
  mask->columns = columns->has_columns() ? std::move(columns) : nullptr;
  if (mask->columns != nullptr && !mask->columns->split().rest.empty()) {
    const ColumnSplit& split = mask->columns->split();
    int64_t base = 0, range = 0, block = 1;
    if (FindRange(split.base, &base) && base < 0 &&
        (FindRange(split.base_and_rest, &range) || FindBlockRange(split.base_and_rest, &range, &block))) {
      mask->column_window = range;
      mask->column_block = block;
    }
  }
  if (!mask->expr.Uses(ExprOp::kS)) return Status();
  const std::string of_one_token = TextOfOneToken(mask->expr);
  if (of_one_token.empty()) return Status();
  mask->of_one_token = std::make_shared<CachedMask>();
  return MakeCachedMask(of_one_token, tables, window, mask->of_one_token.get());
}

Status CompareHeads(int64_t heads, int64_t kv_heads, CachedMask* mask) {
  if (mask->of_one_token != nullptr) STOF_RETURN_IF_ERROR(CompareHeads(heads, kv_heads, mask->of_one_token.get()));
  const MaskExpr& expr = mask->expr;
  const int64_t group = heads / kv_heads;
  if (!AreHeadsAlike(expr, heads, group)) return Status();
  mask->alike_heads = group;
  // An axis of size 1 takes every h, but no product of it.
  const bool broadcasts = std::any_of(expr.nodes().begin(), expr.nodes().end(), [&expr](const ExprNode& node) {
    for (int c = 0; node.op == ExprOp::kLookup && c < node.arity; ++c) {
      if (expr.nodes()[static_cast<size_t>(node.child[c])].op == ExprOp::kH &&
          expr.operands()[static_cast<size_t>(node.operand)]->dims[c] == 1) {
        return true;
      }
    }
    return false;
  });
  if (group == 1 || !expr.Uses(ExprOp::kH) || broadcasts) return Status();
  const auto replace = [group](const ExprNode& node, const auto& position, ExprBuilder* to) {
    if (node.op == ExprOp::kP || node.op == ExprOp::kQ) return position(to);
    if (node.op == ExprOp::kS) return to->AddConstant(1);
    if (node.op == ExprOp::kH) {
      const int head = to->Add(ExprOp::kH);
      return to->Add(ExprOp::kMul, {head, to->AddConstant(group)});
    }
    return CopyNode(node, to);
  };
  MaskExpr moved;
  STOF_RETURN_IF_ERROR(MoveQueries(expr, replace, &moved));
  mask->of_groups = MakeAttentionMask(moved);
  return Status();
}

bool IsOfDistances(const MaskExpr& expr) {
  // A shift of all positions keeps the value of a node whose affine form, or each of whose arguments, it keeps.
  const std::vector<ExprNode>& nodes = expr.nodes();
  const ExprSizes any = {1, 1, 1, 1, 0};
  std::vector<Affine> forms(nodes.size());
  std::vector<uint8_t> is_affine(nodes.size(), 0), reads_sizes(nodes.size(), 0), stays(nodes.size(), 0);
  for (size_t i = 0; i < nodes.size(); ++i) {
    const ExprNode& node = nodes[i];
    const Affine* arguments[2] = {nullptr, nullptr};
    bool all_stay = true;
    reads_sizes[i] = node.op == ExprOp::kP || node.op == ExprOp::kT ? 1 : 0;
    for (int c = 0; c < node.arity; ++c) {
      const auto child = static_cast<size_t>(node.child[c]);
      if (c < 2 && is_affine[child] != 0) arguments[c] = &forms[child];
      all_stay = all_stay && stays[child] != 0;
      reads_sizes[i] |= reads_sizes[child];
    }
    is_affine[i] = CombineAffine(node, arguments[0], arguments[1], any, &forms[i]) ? 1 : 0;
    stays[i] = reads_sizes[i] == 0 && (is_affine[i] != 0 ? forms[i].q + forms[i].k == 0 : all_stay) ? 1 : 0;
  }
  return expr.empty() || stays[static_cast<size_t>(expr.root())] != 0;
}

Status BoundCachedMask::Make(const MaskExpr& expr, const ExprSizes& sizes, const int32_t* first, const int32_t* ends,
                             std::unique_ptr<BoundCachedMask>* bound, int64_t alike_heads, const ColumnSplit* split,
                             const KeyColumns* columns) {
  std::unique_ptr<BoundCachedMask> made(
      new BoundCachedMask(sizes, expr.Uses(ExprOp::kH), alike_heads, split == nullptr ? nullptr : columns));
  for (int64_t b = 0; b < sizes.B; ++b) {
    ExprSizes own = sizes;
    own.P = first[b];
    own.T = ends[b];
    made->keys_.push_back(own.T);
    const auto bind = [&own](const MaskExpr& part, auto* to) {
      to->emplace_back();
      return BoundDynamicMask::Make(part, own, {}, &to->back());
    };
    STOF_RETURN_IF_ERROR(bind(expr, &made->sequence_));
    if (made->columns_ == nullptr) continue;
    STOF_RETURN_IF_ERROR(bind(split->base, &made->base_));
    STOF_RETURN_IF_ERROR(bind(split->base_and_rest, &made->base_and_rest_));
    if (split->rest.empty()) made->base_and_rest_.back().reset();
  }
  *bound = std::move(made);
  return Status();
}

Status BoundCachedMask::status() const {
  for (const auto* masks : {&sequence_, &base_, &base_and_rest_}) {
    for (const auto& mask : *masks) {
      if (mask != nullptr) STOF_RETURN_IF_ERROR(mask->status());
    }
  }
  return Status();
}

int BoundCachedMask::Tile(const void* self, int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n,
                          uint32_t* bits) {
  const auto& bound = *static_cast<const BoundCachedMask*>(self);
  const auto at = static_cast<size_t>(b);
  if (key0 >= bound.keys_[at] || row0 >= bound.sizes_.S) return 0;
  const DynamicMask* mask = bound.sequence_[at]->view();
  return mask->tile(mask->self, b, h, row0, key0, m, n, bits);
}

int64_t BoundCachedMask::Runs(const void* self, int64_t b, int64_t h, int64_t row0, int m, int n, int64_t first,
                              int64_t last, KeyTileRun* runs) {
  const auto& bound = *static_cast<const BoundCachedMask*>(self);
  const auto at = static_cast<size_t>(b);
  if (bound.keys_[at] == 0 || row0 >= bound.sizes_.S) return 0;
  if (bound.columns_ != nullptr && n % KeyColumns::kTile == 0) {
    return bound.ListByColumns(b, h, row0, m, n, first, last, runs);
  }
  const DynamicMask* mask = bound.sequence_[at]->view();
  return mask->runs(mask->self, b, h, row0, m, n, first, last, runs);
}

namespace {

// Walks the runs of a part of a mask tile by tile.
class RunReader {
 public:
  // mask nullptr: no tile is allowed.
  RunReader(const DynamicMask* mask, int64_t b, int64_t h, int64_t row0, int m, int n, int64_t first, int64_t last) {
    if (mask == nullptr || first >= last) return;
    runs_.resize(static_cast<size_t>(last - first));
    count_ = mask->runs(mask->self, b, h, row0, m, n, first, last, runs_.data());
  }
  // Tiles have to be asked for in ascending order.
  Verdict Of(int64_t tile) {
    while (at_ < count_ && runs_[static_cast<size_t>(at_)].last <= tile) ++at_;
    if (at_ == count_ || runs_[static_cast<size_t>(at_)].first > tile) return Verdict::kNone;
    return runs_[static_cast<size_t>(at_)].is_full ? Verdict::kAll : Verdict::kMixed;
  }

 private:
  std::vector<KeyTileRun> runs_;
  int64_t count_ = 0, at_ = 0;
};

}  // namespace

int64_t BoundCachedMask::ListByColumns(int64_t b, int64_t h, int64_t row0, int m, int n, int64_t first, int64_t last,
                                       KeyTileRun* runs) const {
  const auto at = static_cast<size_t>(b);
  last = std::min(last, (keys_[at] + n - 1) / n);
  const DynamicMask* rest = base_and_rest_[at] == nullptr ? nullptr : base_and_rest_[at]->view();
  RunReader base(base_[at]->view(), b, h, row0, m, n, first, last), others(rest, b, h, row0, m, n, first, last);
  const int64_t list = columns_->lists() == 1 ? 0 : h / (sizes_.H / columns_->lists());
  const uint64_t* words = columns_->words(list);
  const int64_t tile_words = n / KeyColumns::kTile;
  int64_t count = 0;
  for (int64_t tile = first; tile < last; ++tile) {
    uint64_t any = 0, all = ~uint64_t{0};
    for (int64_t w = tile * tile_words; w < (tile + 1) * tile_words; ++w) {
      const uint64_t word = w < columns_->word_count() ? words[w] : 0;
      any |= word;
      all &= word;
    }
    const Verdict outer = any == 0 ? Verdict::kNone : base.Of(tile), inner = others.Of(tile);
    if (outer == Verdict::kNone && inner == Verdict::kNone) continue;
    const bool is_full = inner == Verdict::kAll || (outer == Verdict::kAll && all == ~uint64_t{0});
    if (count > 0 && runs[count - 1].last == tile && runs[count - 1].is_full == is_full) {
      ++runs[count - 1].last;
    } else {
      runs[count++] = {static_cast<int32_t>(tile), static_cast<int32_t>(tile + 1), is_full};
    }
  }
  return count;
}

}  // namespace stof
