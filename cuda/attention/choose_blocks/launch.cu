// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/attention/choose_blocks/estimate.cuh"
#include "cuda/attention/choose_blocks/layout.h"
#include "cuda/attention/choose_blocks/order.cuh"
#include "cuda/attention/choose_blocks/params.h"
#include "cuda/attention/choose_blocks/pooling.cuh"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {
namespace {

constexpr int kMostSharedBytes = 227 * 1024;  // of a CTA at 9.0; what a launch needs depends on the number of keys

template <typename T, int kSize, bool kSoftcap>
int Launch(const BlockChoiceParams& p, int sm_count, void* stream) {
  using Shape = choose::ChooseShape<kSize, kSoftcap>;
  const AttentionParams& a = p.attention;
  const int64_t heads = int64_t{a.B} * a.G, pooled = heads * (int64_t{p.query_rows} + p.key_rows);
  constexpr int64_t kPooledRows = choose::kPoolingThreads / (kSize / choose::kItems);  // of a CTA
  int error = LaunchKernel<BlockChoiceParams, choose::PoolQueriesAndKeys<T, kSize>>(
      p, static_cast<unsigned>(CeilDiv(pooled, kPooledRows)), choose::kPoolingThreads, 0, stream, true);
  if (error != 0) return error;
  const int64_t items = heads * CeilDiv(int64_t{p.row_blocks} * (a.H / a.G), Shape::kUnits);
  const auto bytes = static_cast<int>(choose::SharedBytes<Shape>(p.key_blocks));
  error = LoadKernel<BlockChoiceParams, choose::ChooseBlocks<Shape, T>>(kMostSharedBytes);
  if (error != 0) return error;
  error = LaunchKernel<BlockChoiceParams, choose::ChooseBlocks<Shape, T>>(
      p, static_cast<unsigned>(std::min<int64_t>(items, sm_count)), Shape::kThreads, bytes, stream, true);
  if (error != 0) return error;
  return LaunchKernel<BlockChoiceParams, choose::OrderRows>(p, static_cast<unsigned>(a.B * a.H), choose::kOrderThreads,
                                                            0, stream, true);
}

template <typename T, bool kSoftcap>
int LaunchOfSize(const BlockChoiceParams& p, int sm_count, void* stream) {
  if (p.pooled_size == 64) return Launch<T, 64, kSoftcap>(p, sm_count, stream);
  return p.pooled_size == 128 ? Launch<T, 128, kSoftcap>(p, sm_count, stream)
                              : Launch<T, 256, kSoftcap>(p, sm_count, stream);
}

template <typename T>
int LaunchOfType(const BlockChoiceParams& p, int sm_count, void* stream) {
  return p.attention.softcap > 0.0f ? LaunchOfSize<T, true>(p, sm_count, stream)
                                    : LaunchOfSize<T, false>(p, sm_count, stream);
}

}  // namespace

bool CanChooseBlocks(int64_t pooled_size, int64_t key_blocks, int shared_bytes) {
  const int64_t bytes = pooled_size == 64    ? choose::SharedBytes<choose::ChooseShape<64, false>>(key_blocks)
                        : pooled_size == 128 ? choose::SharedBytes<choose::ChooseShape<128, false>>(key_blocks)
                                             : choose::SharedBytes<choose::ChooseShape<256, false>>(key_blocks);
  return bytes <= std::min(shared_bytes, kMostSharedBytes);
}

int LaunchChooseBlocks(bool bf16, const BlockChoiceParams& params, int sm_count, void* stream) {
  return bf16 ? LaunchOfType<__nv_bfloat16>(params, sm_count, stream) : LaunchOfType<__half>(params, sm_count, stream);
}

}  // namespace cuda
}  // namespace stof
