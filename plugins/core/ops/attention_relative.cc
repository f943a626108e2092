// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/attention_relative.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/host/quoted.h"
#include "plugins/core/ops/attention.h"

namespace stof {
namespace {

constexpr int64_t kMostDifferences = int64_t{1} << 23;
// Evaluations of nodes for one table: some seconds, which a run cannot interrupt.
constexpr int64_t kMostEvaluations = int64_t{1} << 30;

std::string_view Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\n");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1);
}

bool Has(const std::vector<std::string>& roles, const char* role) {
  return std::find(roles.begin(), roles.end(), role) != roles.end();
}

int FindRole(std::string_view role) {
  const auto* const found = std::find(std::begin(kRelativeRoles), std::end(kRelativeRoles), role);
  return found == std::end(kRelativeRoles) ? -1 : static_cast<int>(found - std::begin(kRelativeRoles));
}

Status CheckReads(const std::string& role, const MaskExpr& expr) {
  std::string other;
  for (const ExprNode& node : expr.nodes()) {
    if (node.op == ExprOp::kB || node.op == ExprOp::kH) other = Symbol(node.op);
    if (node.op != ExprOp::kLookup) continue;
    const ExprOperand& operand = *expr.operands()[static_cast<size_t>(node.operand)];
    if (!operand.table) other = operand.name;
  }
  if (other.empty()) return Status();
  return Status::Error("relative_index of " + role + " reads " + other + ", expected q, k, S, T, P and tables");
}

Status ParseExpression(const std::string& role, const std::string& text, const Tables& tables,
                       std::shared_ptr<const SeparatedExpr>* separated) {
  MaskExpr expr;
  const Status status = MaskExpr::ParseInteger(text, tables, &expr);
  if (!status.ok()) return Status::Error("relative_index of " + role + ": " + status.message());
  STOF_RETURN_IF_ERROR(CheckReads(role, expr));
  auto made = std::make_shared<SeparatedExpr>();
  if (!SeparatedExpr::Make(expr, made.get())) {
    return Status::Error("relative_index of " + role + " is no function of one difference A(k) - C(q)");
  }
  *separated = std::move(made);
  return Status();
}

// The least of some values, and how far above it the largest is.
void Measure(const std::vector<int64_t>& values, int64_t* least, uint64_t* span) {
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  *least = *low;
  *span = static_cast<uint64_t>(*high) - static_cast<uint64_t>(*low);
}

std::vector<int32_t> Narrow(const std::vector<int64_t>& values, int64_t least, int64_t more) {
  std::vector<int32_t> narrow;
  narrow.reserve(values.size() + static_cast<size_t>(more));
  for (const int64_t value : values) narrow.push_back(static_cast<int32_t>(value - least));
  narrow.insert(narrow.end(), static_cast<size_t>(more), narrow.back());
  return narrow;
}

RelativeTable* TableOf(int role, AttentionArgs* args) {
  switch (role) {
    case 0:
      return &args->scores.relative_key[0];
    case 1:
      return &args->scores.relative_key[1];
    case 2:
      return &args->scores.relative_query;
    default:
      return &args->relative_value;
  }
}

// The rows that are alive anywhere in the process: the layers of a model share them.
Status FindRows(const std::string& role, const SeparatedExpr& separated, const ExprSizes& sizes, int64_t rows,
                std::shared_ptr<const RelativeRowArrays>* found) {
  using Known = std::vector<std::weak_ptr<const RelativeRowArrays>>;
  static ProcessWide<ForkSafe<Known>> all;
  const auto find = [&](Known* known) {
    for (size_t i = 0; i < known->size();) {
      if (const auto alive = (*known)[i].lock()) {
        if (alive->Suits(separated.expr(), sizes, rows)) {
          *found = alive;
          return true;
        }
        ++i;
      } else {
        (*known)[i] = known->back();
        known->pop_back();
      }
    }
    return false;
  };
  {
    const auto known = all.Get().Lock();
    if (find(&*known)) return Status();
  }
  // Without the lock: rows of long inputs take a while, and other nodes may have theirs.
  std::shared_ptr<const RelativeRowArrays> made;
  STOF_RETURN_IF_ERROR(RelativeRowArrays::Make(role, separated, sizes, rows, &made));
  const auto known = all.Get().Lock();
  if (find(&*known)) return Status();
  known->push_back(made);
  *found = std::move(made);
  return Status();
}

}  // namespace

bool IsRelativeRole(const std::string& role) { return FindRole(role) >= 0; }

Status ParseRelativeIndex(const std::string& text, AttentionAttributes* parsed) {
  const std::vector<std::string>& roles = parsed->operands;
  if (Has(roles, "relative_bias_factor") && !Has(roles, "relative_bias")) {
    return Status::Error("attribute operands names relative_bias_factor, expected relative_bias beside it");
  }
  if (Has(roles, "relative_key1") && !Has(roles, "relative_key")) {
    return Status::Error("attribute operands names relative_key1, expected relative_key beside it");
  }
  std::string_view rest = text;
  for (bool is_last = Trim(text).empty(); !is_last;) {
    const size_t end = rest.find(';');
    is_last = end == std::string_view::npos;
    const std::string_view entry = rest.substr(0, end);
    rest = is_last ? std::string_view() : rest.substr(end + 1);
    const size_t colon = entry.find(':');
    const std::string role(Trim(entry.substr(0, colon)));
    const int i = FindRole(role);
    if (colon == std::string_view::npos || i < 0) {
      return Status::Error("attribute relative_index has entry " + Quote(std::string(Trim(entry)), kMostQuoted) +
                           ", expected one of relative_key, relative_key1, relative_query and relative_value, a colon "
                           "and an integer expression");
    }
    std::string& to = parsed->relative_index[static_cast<size_t>(i)];
    if (!to.empty()) return Status::Error("attribute relative_index has two entries for " + role);
    if (!Has(roles, kRelativeRoles[i])) {
      return Status::Error("attribute relative_index has an entry for " + role +
                           ", expected none: attribute operands does not name it");
    }
    to = Trim(entry.substr(colon + 1));
    if (to.empty()) return Status::Error("attribute relative_index has no expression for " + role);
  }
  for (int i = 0; i < kRelativeRoleCount; ++i) {
    if (!Has(roles, kRelativeRoles[i]) || !parsed->relative_index[static_cast<size_t>(i)].empty()) continue;
    return Status::Error(std::string("attribute relative_index has no entry for ") + kRelativeRoles[i] +
                         ", which attribute operands names");
  }
  return Status();
}

bool RelativeRowArrays::Suits(const MaskExpr& expr, const ExprSizes& sizes, int64_t rows) const {
  return sizes_.S == sizes.S && sizes_.T == sizes.T && sizes_.P == sizes.P && rows_ == rows &&
         operands_ == expr.operands() && text_ == expr.Print();
}

Status RelativeRowArrays::Make(const std::string& role, const SeparatedExpr& separated, const ExprSizes& sizes,
                               int64_t rows, std::shared_ptr<const RelativeRowArrays>* made) {
  const MaskExpr& expr = separated.expr();
  std::vector<ExprBinding> none(expr.operands().size());
  const ExprSizes one = {1, 1, sizes.S, sizes.T, sizes.P};
  const Status status = expr.Check(one, &none);
  if (!status.ok()) return Status::Error("relative_index of " + role + ": " + status.message());
  auto arrays = std::make_shared<RelativeRowArrays>();
  arrays->text_ = expr.Print();
  arrays->operands_ = expr.operands();
  arrays->sizes_ = one;
  arrays->rows_ = rows;
  int64_t first = 0;
  const auto nodes = static_cast<int64_t>(expr.nodes().size());
  const auto check_work = [&](int64_t count, const char* what) {
    if (nodes * count <= kMostEvaluations) return Status();
    return Status::Error("relative_index of " + role + " has " + std::to_string(nodes) + " nodes for " +
                         std::to_string(count) + what + ", expected at most 2^30 of both together");
  };
  STOF_RETURN_IF_ERROR(check_work(sizes.S + sizes.T, " positions"));
  STOF_RETURN_IF_ERROR(arrays->FillParts(role, separated, &first));
  STOF_RETURN_IF_ERROR(check_work(arrays->view_.count, " differences"));
  arrays->FillRows(separated, first);
  arrays->view_.on_device = &arrays->on_device_;
  *made = std::move(arrays);
  return Status();
}

// first: the least difference, as the expression has it.
Status RelativeRowArrays::FillParts(const std::string& role, const SeparatedExpr& separated, int64_t* first) {
  view_.query_position = sizes_.P;
  if (separated.is_distance()) {
    *first = view_.low = 1 - sizes_.S - sizes_.P;
    view_.count = sizes_.T + sizes_.S - 1;
    return Status();
  }
  std::vector<int64_t> key_part, query_part;
  separated.EvaluateParts(sizes_, &key_part, &query_part);
  int64_t least_key = 0, least_query = 0;
  uint64_t key_span = 0, query_span = 0;
  Measure(key_part, &least_key, &key_span);
  Measure(query_part, &least_query, &query_span);
  constexpr auto kMost = static_cast<uint64_t>(kMostDifferences);
  if (key_span >= kMost || query_span >= kMost || key_span + query_span >= kMost) {
    return Status::Error("relative_index of " + role + " has differences A(k) - C(q) that span " +
                         std::to_string(key_span + query_span + 1) + " values, expected at most 2^23");
  }
  key_part_ = Narrow(key_part, least_key, RelativeRows::kMargin);
  query_part_ = Narrow(query_part, least_query, 0);
  view_.key_part = key_part_.data();
  view_.query_part = query_part_.data();
  view_.low = -static_cast<int64_t>(query_span);
  view_.count = static_cast<int64_t>(key_span + query_span) + 1;
  *first = static_cast<int64_t>(static_cast<uint64_t>(least_key) - static_cast<uint64_t>(least_query) - query_span);
  return Status();
}

void RelativeRowArrays::FillRows(const SeparatedExpr& separated, int64_t first) {
  std::vector<int64_t> named;
  separated.EvaluateRows(sizes_, first, view_.count, &named);
  const auto at = [&](size_t i) { return static_cast<int32_t>(std::clamp<int64_t>(named[i], 0, rows_ - 1)); };
  const auto count = named.size(), margin = static_cast<size_t>(RelativeRows::kMargin);
  bool falls = true, rises = true, rises_by_one = true, falls_by_one = true;
  for (size_t i = 1; i < count; ++i) {
    const int32_t step = at(i) - at(i - 1);
    rises &= step == 0 || step == 1, falls &= step == 0 || step == -1;
    rises_by_one &= step == 1, falls_by_one &= step == -1;
  }
  view_.is_reversed = !rises && falls;
  view_.is_stepwise = rises || falls;
  view_.is_linear = rises_by_one || falls_by_one;
  row_.resize(count + 2 * margin);
  view_.first_row = std::numeric_limits<int32_t>::max();
  view_.last_row = 0;
  for (size_t i = 0; i < count; ++i) {
    const int32_t row = view_.is_reversed ? static_cast<int32_t>(rows_ - 1) - at(i) : at(i);
    row_[margin + i] = row;
    view_.first_row = std::min(view_.first_row, row);
    view_.last_row = std::max(view_.last_row, row);
  }
  std::fill_n(row_.begin(), margin, row_[margin]);
  std::fill_n(row_.end() - RelativeRows::kMargin, margin, row_[margin + count - 1]);
  view_.row = row_.data() + margin;
}

Status RelativeIndices::Parse(const Tables& tables, Separated* separated) const {
  for (size_t i = 0; i < texts_.size(); ++i) {
    if (texts_[i].empty()) continue;
    STOF_RETURN_IF_ERROR(ParseExpression(kRelativeRoles[i], texts_[i], tables, &(*separated)[i]));
  }
  return Status();
}

Status RelativeIndices::Fix(const Tables& tables) {
  is_fixed_ = true;
  return Parse(tables, &fixed_);
}

Status RelativeIndices::Get(const Tables& given, Separated* separated) const {
  if (is_fixed_) {
    *separated = fixed_;
    return Status();
  }
  *separated = *last_.Lock();
  bool is_known = true;
  for (size_t i = 0; i < texts_.size() && is_known; ++i) {
    if (texts_[i].empty()) continue;
    is_known = (*separated)[i] != nullptr;
    if (!is_known) break;
    const ExprOperands& operands = (*separated)[i]->expr().operands();
    is_known = std::all_of(operands.begin(), operands.end(), [&given](const auto& table) {
      return std::any_of(given.begin(), given.end(), [&table](const auto& entry) {
        return entry.first == table->name && TableHolds(*table, entry.second);
      });
    });
  }
  if (is_known) return Status();
  *separated = Separated();
  STOF_RETURN_IF_ERROR(Parse(given, separated));
  *last_.Lock() = *separated;
  return Status();
}

Status RelativeIndices::Bind(const Tables& given, const ExprSizes& sizes, AttentionArgs* args, Rows* rows) const {
  Separated separated;
  STOF_RETURN_IF_ERROR(Get(given, &separated));
  *rows = *last_rows_.Lock();
  for (int role = 0; role < kRelativeRoleCount; ++role) {
    const auto i = static_cast<size_t>(role);
    if (separated[i] == nullptr) continue;
    RelativeTable* const table = TableOf(role, args);
    if (sizes.S == 0 || sizes.T == 0) {
      *table = RelativeTable();
      continue;
    }
    if ((*rows)[i] == nullptr || !(*rows)[i]->Suits(separated[i]->expr(), sizes, table->rows)) {
      STOF_RETURN_IF_ERROR(FindRows(kRelativeRoles[role], *separated[i], sizes, table->rows, &(*rows)[i]));
    }
    table->index = (*rows)[i]->view();
  }
  *last_rows_.Lock() = *rows;
  return Status();
}

}  // namespace stof
