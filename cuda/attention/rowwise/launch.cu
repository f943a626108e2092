// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/rowwise/kernel.cuh"

namespace stof {
namespace cuda {
namespace {

template <typename T, int kLanes, int kChunks>
Launch Find(bool score_mod) {
  return score_mod ? LaunchRowwise<T, kLanes, kChunks, true> : LaunchRowwise<T, kLanes, kChunks, false>;
}

template <typename T>
Launch Find16Bit(int head_size, bool score_mod) {
  if (head_size <= 64) return Find<T, 8, 1>(score_mod);
  if (head_size <= 128) return Find<T, 16, 1>(score_mod);
  return head_size <= 256 ? Find<T, 32, 1>(score_mod) : nullptr;
}

Launch FindFloats(int head_size, bool score_mod) {
  if (head_size <= 64) return Find<float, 16, 1>(score_mod);
  if (head_size <= 128) return Find<float, 32, 1>(score_mod);
  return head_size <= 256 ? Find<float, 32, 2>(score_mod) : nullptr;
}

}  // namespace

Launch FindRowwise(DType dtype, int head_size, bool score_mod) {
  if (dtype == DType::kF32) return FindFloats(head_size, score_mod);
  if (dtype == DType::kBF16) return Find16Bit<__nv_bfloat16>(head_size, score_mod);
  return Find16Bit<__half>(head_size, score_mod);
}

}  // namespace cuda
}  // namespace stof
