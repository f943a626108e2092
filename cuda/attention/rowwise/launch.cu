// SPDX-License-Identifier: Apache-2.0
// The tables of the row-wise kernels: one kernel for each head size, type and score modification.
#include "cuda/attention/rowwise/api.h"
#include "cuda/attention/rowwise/kernel.cuh"

namespace stof {
namespace cuda {
namespace {

template <typename T, int kLanes, int kChunks, bool kScoreMod>
constexpr RowwiseCode kCode(LaunchRowwise<T, kLanes, kChunks, kScoreMod>);

template <int kHead, typename T, int kLanes, int kChunks, bool kScoreMod>
constexpr KernelEntry MakeRowwiseKernel() {
  KernelEntry kernel;
  kernel.name = "rows";
  kernel.head_size = kHead;
  kernel.rows = kernel.keys = kRowwiseTile;
  kernel.code = &kCode<T, kLanes, kChunks, kScoreMod>;
  return kernel;
}

template <int kHead, typename T, int kLanes, int kChunks, bool kScoreMod>
constexpr KernelEntry kRowwiseKernels[] = {MakeRowwiseKernel<kHead, T, kLanes, kChunks, kScoreMod>()};

// kLanes lanes of a warp share a key, of which each reads kChunks times 16 bytes.
template <int kHead, typename T, int kLanes, int kChunks>
KernelTable FindShape(const KernelProblem& problem) {
  return problem.has_softcap_or_bias ? kRowwiseKernels<kHead, T, kLanes, kChunks, true>
                                     : kRowwiseKernels<kHead, T, kLanes, kChunks, false>;
}

template <typename T>
constexpr HeadSizeTable kTables16Bit[] = {
    {64, FindShape<64, T, 8, 1>}, {128, FindShape<128, T, 16, 1>}, {256, FindShape<256, T, 32, 1>}};

constexpr HeadSizeTable kTablesFp32[] = {
    {64, FindShape<64, float, 16, 1>}, {128, FindShape<128, float, 32, 1>}, {256, FindShape<256, float, 32, 2>}};

}  // namespace

KernelTable FindRowwise(const KernelProblem& problem) {
  if (problem.dtype == DType::kF32) return FindByHeadSize(kTablesFp32, problem);
  if (problem.dtype == DType::kBF16) return FindByHeadSize(kTables16Bit<__nv_bfloat16>, problem);
  return FindByHeadSize(kTables16Bit<__half>, problem);
}

}  // namespace cuda
}  // namespace stof
