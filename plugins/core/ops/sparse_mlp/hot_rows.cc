// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/sparse_mlp/hot_rows.h"

#include <algorithm>
#include <atomic>

#include "plugins/core/host/environment.h"

namespace stof {
namespace {

constexpr int64_t kPage = 4096;  // or less than the system's: each page is read

int64_t BoundOfProcess() { return ReadVariableOr(Variable::kMlpHotMb, int64_t{0}) << 20; }

// The bytes that nodes may still read.
std::atomic<int64_t>& BytesLeft() {
  static std::atomic<int64_t> left{BoundOfProcess()};
  return left;
}

// Takes at most this many bytes of the bound.
int64_t Take(int64_t wanted) {
  std::atomic<int64_t>& left = BytesLeft();
  int64_t found = left.load();
  while (found > 0 && !left.compare_exchange_weak(found, found - std::min(found, wanted))) {
  }
  return std::min(std::max<int64_t>(found, 0), wanted);
}

}  // namespace

HotRows::~HotRows() {
  if (bytes_ > 0) BytesLeft().fetch_add(bytes_);
}

void HotRows::Read(const Tensor& weight, int64_t rows) {
  if (weight.data == nullptr || weight.rank < 1 || weight.dims[0] <= 0 || rows <= 0) return;
  const int64_t size = weight.Elements() * SizeOf(weight.dtype);
  const int64_t row = size / weight.dims[0];
  const int64_t taken = Take(std::min(rows, weight.dims[0]) * row);
  bytes_ += taken;
  const volatile char* data = static_cast<const volatile char*>(weight.data);
  for (int64_t at = 0; at < taken; at += kPage) (void)data[at];
  if (taken > 0) (void)data[taken - 1];
}

}  // namespace stof
