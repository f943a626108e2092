// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/mask/attention_mask.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <random>

#include "plugins/core/base/integers.h"
#include "plugins/core/host/hash.h"
#include "plugins/core/mask/dilation.h"

namespace stof {
namespace {

// All models of a process find their block masks in one cache by a hash alone. A secret seed keeps a table from being
// made to collide with another model's mask.
uint64_t SeedOfProcess() {
  static ProcessWide<const uint64_t> seed;
  return seed.Get([] {
    static const char own = 0;  // anywhere
    const auto now = static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
    uint64_t made = MixHash(now, reinterpret_cast<uintptr_t>(&own));
    try {
      std::random_device device;
      for (int i = 0; i < 4; ++i) made = MixHash(made, device());
    } catch (const std::exception&) {  // without such a device
    }
    return made | 2;  // not 0
  });
}

}  // namespace

std::shared_ptr<const AttentionMask> MakeAttentionMask(const MaskExpr& expr, bool has_columns) {
  auto made = std::make_shared<AttentionMask>();
  made->parts = SplitMask(expr);
  made->fixed_hash = made->parts.fixed.Hash(SeedOfProcess());
  for (const auto& operand : expr.operands()) {
    if (operand->table) made->tables.push_back(operand);
  }
  if (!made->parts.pad && made->parts.dynamic.empty()) {
    const ResidueMask residues = FindResidues(made->parts.fixed);
    if (residues.modulus > 1) {
      made->modulus = residues.modulus;
      made->of_residue = MakeAttentionMask(residues.expr, has_columns);
    }
    if (has_columns) {
      auto columns = std::make_shared<const ColumnSource>(made->parts.fixed);
      if (columns->has_columns()) made->columns = std::move(columns);
    }
  }
  return made;
}

Status MakeAttentionMask(const std::string& text, const Tables& tables, std::shared_ptr<const AttentionMask>* mask) {
  MaskExpr expr;
  STOF_RETURN_IF_ERROR(MaskExpr::Parse(text, tables, &expr));
  *mask = MakeAttentionMask(expr);
  return Status();
}

Status AttentionMaskSource::Fix(const Tables& tables) { return MakeAttentionMask(text_, tables, &fixed_); }

Status AttentionMaskSource::Get(const Tables& given, std::shared_ptr<const AttentionMask>* mask) const {
  if (fixed_ != nullptr) {
    *mask = fixed_;
    return Status();
  }
  *mask = *last_.Lock();
  const auto same = [&given](const auto& table) {
    return std::any_of(given.begin(), given.end(), [&table](const auto& entry) {
      return entry.first == table->name && TableHolds(*table, entry.second);
    });
  };
  if (*mask != nullptr && std::all_of((*mask)->tables.begin(), (*mask)->tables.end(), same)) return Status();
  STOF_RETURN_IF_ERROR(MakeAttentionMask(text_, given, mask));
  *last_.Lock() = *mask;
  return Status();
}

Status FindOperand(const ExprOperand& operand, const Tables& given, const Tensor** found) {
  const auto entry =
      std::find_if(given.begin(), given.end(), [&](const auto& one) { return one.first == operand.name; });
  if (entry == given.end()) {
    return Status::Error("the mask reads " + operand.name + ", but no operand has that role");
  }
  const Tensor& tensor = entry->second;
  if (tensor.rank != operand.rank) {
    return Status::Error(operand.name + " has rank " + std::to_string(tensor.rank) + ", expected " +
                         std::to_string(operand.rank));
  }
  if (!operand.table && !operand.boolean && tensor.dtype != DType::kI32 && tensor.dtype != DType::kI64) {
    return Status::Error(operand.name + " has data type " + TypeText(tensor.dtype) + ", expected int32 or int64");
  }
  *found = &tensor;
  return Status();
}

Status BoundDynamicMask::Make(const MaskExpr& expr, const ExprSizes& sizes, const Tables& given,
                              std::unique_ptr<BoundDynamicMask>* bound, int64_t alike_heads, const MaskShift& shift) {
  std::vector<ExprBinding> bindings(expr.operands().size());
  for (size_t i = 0; i < bindings.size(); ++i) {
    const ExprOperand& operand = *expr.operands()[i];
    if (operand.table) continue;
    const Tensor* found = nullptr;
    STOF_RETURN_IF_ERROR(FindOperand(operand, given, &found));
    const Tensor& tensor = *found;
    bindings[i].data = tensor.data;
    bindings[i].dtype = tensor.dtype;
    bindings[i].rank = tensor.rank;
    std::copy(tensor.dims, tensor.dims + tensor.rank, bindings[i].dims);
  }
  STOF_RETURN_IF_ERROR(expr.Check(sizes, &bindings));
  bound->reset(new BoundDynamicMask(expr, sizes, std::move(bindings), alike_heads, shift));
  return Status();
}

std::unique_ptr<ExprEvaluator> BoundDynamicMask::Take() const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!stock_.empty()) {
      auto evaluator = std::move(stock_.back());
      stock_.pop_back();
      return evaluator;
    }
  }
  return std::make_unique<ExprEvaluator>(expr_, sizes_, bindings_);
}

void BoundDynamicMask::Return(std::unique_ptr<ExprEvaluator> evaluator) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  stock_.push_back(std::move(evaluator));
}

int BoundDynamicMask::Tile(const void* self, int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n,
                           uint32_t* bits) {
  const auto& bound = *static_cast<const BoundDynamicMask*>(self);
  try {
    return bound.Evaluate(b, h, row0, key0, m, n, bits);
  } catch (const std::bad_alloc&) {
    bound.failed_.store(true, std::memory_order_relaxed);
    return 0;
  }
}

int64_t BoundDynamicMask::Runs(const void* self, int64_t b, int64_t h, int64_t row0, int m, int n, int64_t first,
                               int64_t last, KeyTileRun* runs) {
  const auto& bound = *static_cast<const BoundDynamicMask*>(self);
  try {
    return bound.List(b, h, row0, m, n, first, last, runs);
  } catch (const std::bad_alloc&) {
    bound.failed_.store(true, std::memory_order_relaxed);
    return 0;
  }
}

Status BoundDynamicMask::status() const {
  return failed_.load(std::memory_order_relaxed) ? Status::Error("out of memory for the mask's values") : Status();
}

int BoundDynamicMask::Evaluate(int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n, uint32_t* bits) const {
  row0 += RowShift(b), key0 += KeyShift(b);
  const int64_t rows = std::min<int64_t>(m, sizes_.S - row0);
  const int64_t keys = std::min<int64_t>(n, sizes_.T - key0);
  if (rows <= 0 || keys <= 0) return 0;
  auto evaluator = Take();
  const ExprBox box = {b, b, h, h, sizes_.P + row0, sizes_.P + row0 + rows - 1, key0, key0 + keys - 1};
  const Verdict verdict = evaluator->Classify(box);
  int result = verdict == Verdict::kNone ? 0 : 2;
  if (verdict == Verdict::kMixed || (verdict == Verdict::kAll && keys < n)) {
    std::fill(bits, bits + static_cast<size_t>(m) * static_cast<size_t>(n) / 32, 0u);
    const int64_t ones = evaluator->Tile(b, h, sizes_.P + row0, key0, rows, keys, n / 32, bits);
    result = ones == 0 ? 0 : ones == rows * n ? 2 : 1;
  }
  Return(std::move(evaluator));
  return result;
}

int64_t BoundDynamicMask::List(int64_t b, int64_t h, int64_t row0, int m, int n, int64_t first, int64_t last,
                               KeyTileRun* runs) const {
  row0 += RowShift(b);
  const int64_t rows = std::min<int64_t>(m, sizes_.S - row0), q0 = sizes_.P + row0, k0 = KeyShift(b);
  last = std::min(last, CeilDiv(sizes_.T - k0, n));
  if (first >= last || rows <= 0) return 0;
  auto evaluator = Take();
  int64_t count = 0;
  const auto add = [&](int64_t begin, int64_t end, bool is_full) {
    KeyTileRun* const before = count > 0 ? &runs[count - 1] : nullptr;
    if (before != nullptr && before->last == begin && before->is_full == is_full) {
      before->last = static_cast<int32_t>(end);
    } else {
      runs[count++] = {static_cast<int32_t>(begin), static_cast<int32_t>(end), is_full};
    }
  };
  // Bisection: pending holds the ends of the ranges that were split, each at most half of the one before.
  int64_t pending[64];
  int depth = 0;
  int64_t begin = first, end = last;
  for (;;) {
    const ExprBox box = {b, b, h, h, q0, q0 + rows - 1, k0 + begin * n, std::min(k0 + end * n, sizes_.T) - 1};
    const Verdict verdict = evaluator->Classify(box);
    if (verdict == Verdict::kMixed && end - begin > 1) {
      pending[depth++] = end;
      end = (begin + end) / 2;
      continue;
    }
    if (verdict != Verdict::kNone) add(begin, end, verdict == Verdict::kAll);
    if (depth == 0) break;
    begin = end;
    end = pending[--depth];
  }
  Return(std::move(evaluator));
  return count;
}

}  // namespace stof
