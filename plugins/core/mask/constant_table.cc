// SPDX-License-Identifier: Apache-2.0
// Constant operands of mask expressions. The layers of a model share their tables, and so do they here.
#include <algorithm>
#include <map>

#include "plugins/core/host/fork_guard.h"
#include "plugins/core/host/hash.h"
#include "plugins/core/mask/expr.h"

namespace stof {
namespace {

Status CheckShape(const std::string& name, const Tensor& tensor) {
  if (tensor.rank < 1 || tensor.rank > 4) {
    return Status::Error(name + " has rank " + std::to_string(tensor.rank) + ", expected 1 to 4");
  }
  int64_t count = 1;
  for (int i = 0; i < tensor.rank; ++i) {
    const int64_t dim = tensor.dims[i];
    if (dim < 1 || dim > MaskExpr::kMaxSize || count > (int64_t{1} << 32) / dim) {
      return Status::Error(name + " has a dimension of " + std::to_string(dim) +
                           ", expected 1 to 2^22 and at most 2^32 elements");
    }
    count *= dim;
  }
  if (tensor.data == nullptr) return Status::Error(name + " has no data");
  return Status();
}

Status CopyData(const Tensor& tensor, int64_t count, ExprOperand* operand) {
  switch (tensor.dtype) {
    case DType::kBool:
    case DType::kU8: {
      const auto* data = static_cast<const uint8_t*>(tensor.data);
      operand->bytes.assign(data, data + count);
      if (operand->boolean) {
        for (uint8_t& value : operand->bytes) value = value != 0;
      }
      return Status();
    }
    case DType::kI32: {
      const auto* data = static_cast<const int32_t*>(tensor.data);
      operand->wide.assign(data, data + count);
      return Status();
    }
    case DType::kI64: {
      const auto* data = static_cast<const int64_t*>(tensor.data);
      operand->wide.assign(data, data + count);
      return Status();
    }
    default:
      return Status::Error(operand->name + " has data type " + TypeText(tensor.dtype) +
                           ", expected bool, uint8, int32 or int64");
  }
}

template <typename T>
void Summarize(const std::vector<T>& values, ExprOperand* operand) {
  const auto block = static_cast<size_t>(ExprOperand::kBlock);
  for (size_t i = 0; i < values.size(); i += block) {
    const auto end = values.begin() + static_cast<std::ptrdiff_t>(std::min(values.size(), i + block));
    const auto [low, high] = std::minmax_element(values.begin() + static_cast<std::ptrdiff_t>(i), end);
    operand->block_min.push_back(*low);
    operand->block_max.push_back(*high);
  }
}

bool Equal(const ExprOperand& a, const ExprOperand& b) {
  return a.name == b.name && a.boolean == b.boolean && a.rank == b.rank &&
         std::equal(a.dims, a.dims + a.rank, b.dims) && a.bytes == b.bytes && a.wide == b.wide;
}

std::shared_ptr<const ExprOperand> Share(std::shared_ptr<const ExprOperand> made) {
  static ProcessWide<ForkSafe<std::multimap<uint64_t, std::weak_ptr<const ExprOperand>>>> tables;
  const auto known = tables.Get().Lock();
  for (auto it = known->begin(); it != known->end();) it = it->second.expired() ? known->erase(it) : std::next(it);
  const auto [begin, end] = known->equal_range(made->hash);
  for (auto it = begin; it != end; ++it) {
    std::shared_ptr<const ExprOperand> other = it->second.lock();
    if (other != nullptr && Equal(*other, *made)) return other;
  }
  known->emplace(made->hash, made);
  return made;
}

}  // namespace

bool IsTableName(std::string_view name) {
  if (name.substr(0, 5) != "table" || name.size() < 6 || name.size() > 9) return false;
  return std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool TableHolds(const ExprOperand& table, const Tensor& tensor) {
  if (tensor.data == nullptr || tensor.rank != table.rank || (tensor.dtype == DType::kBool) != table.boolean ||
      !std::equal(table.dims, table.dims + table.rank, tensor.dims)) {
    return false;
  }
  switch (tensor.dtype) {
    case DType::kBool:
      return std::equal(table.bytes.begin(), table.bytes.end(), static_cast<const uint8_t*>(tensor.data),
                        [](uint8_t known, uint8_t given) { return known == (given != 0 ? 1 : 0); });
    case DType::kU8:
      return !table.bytes.empty() &&
             std::equal(table.bytes.begin(), table.bytes.end(), static_cast<const uint8_t*>(tensor.data));
    case DType::kI32:
      return !table.wide.empty() &&
             std::equal(table.wide.begin(), table.wide.end(), static_cast<const int32_t*>(tensor.data));
    case DType::kI64:
      return !table.wide.empty() &&
             std::equal(table.wide.begin(), table.wide.end(), static_cast<const int64_t*>(tensor.data));
    default:
      return false;
  }
}

uint64_t HashTable(const ExprOperand& table, uint64_t seed) {
  uint64_t hash = HashBytes(table.name.data(), table.name.size(), seed ^ (table.boolean ? 1 : 0));
  hash = HashBytes(table.dims, sizeof table.dims, hash);
  hash = HashBytes(table.bytes.data(), table.bytes.size(), hash);
  return HashBytes(table.wide.data(), table.wide.size() * sizeof(int64_t), hash);
}

Status MakeTable(const std::string& name, const Tensor& tensor, std::shared_ptr<const ExprOperand>* table) {
  STOF_RETURN_IF_ERROR(CheckShape(name, tensor));
  auto made = std::make_shared<ExprOperand>();
  made->name = name;
  made->table = true;
  made->boolean = tensor.dtype == DType::kBool;
  made->rank = tensor.rank;
  std::copy(tensor.dims, tensor.dims + tensor.rank, made->dims);
  STOF_RETURN_IF_ERROR(CopyData(tensor, tensor.Elements(), made.get()));
  if (made->wide.empty()) {
    Summarize(made->bytes, made.get());
  } else {
    Summarize(made->wide, made.get());
  }
  made->lo = *std::min_element(made->block_min.begin(), made->block_min.end());
  made->hi = *std::max_element(made->block_max.begin(), made->block_max.end());
  made->hash = HashTable(*made, 0);
  *table = Share(std::move(made));
  return Status();
}

}  // namespace stof
