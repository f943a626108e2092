// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/rowwise/kernel.cuh"

namespace stof {
namespace cuda {
namespace {

template <typename T, int kLanes, int kChunks>
Launch Find(bool extras) {
  return extras ? LaunchRows<T, kLanes, kChunks, true> : LaunchRows<T, kLanes, kChunks, false>;
}

template <typename T>
Launch FindHalves(int head_size, bool extras) {
  if (head_size <= 64) return Find<T, 8, 1>(extras);
  if (head_size <= 128) return Find<T, 16, 1>(extras);
  return head_size <= 256 ? Find<T, 32, 1>(extras) : nullptr;
}

Launch FindFloats(int head_size, bool extras) {
  if (head_size <= 64) return Find<float, 16, 1>(extras);
  if (head_size <= 128) return Find<float, 32, 1>(extras);
  return head_size <= 256 ? Find<float, 32, 2>(extras) : nullptr;
}

}  // namespace

Launch FindRows(DType dtype, int head_size, bool extras) {
  if (dtype == DType::kF32) return FindFloats(head_size, extras);
  if (dtype == DType::kBF16) return FindHalves<__nv_bfloat16>(head_size, extras);
  return FindHalves<__half>(head_size, extras);
}

}  // namespace cuda
}  // namespace stof
