// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/attention/relative/expand.cuh"
#include "cuda/attention/relative/expand.h"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostCtas = int64_t{1} << 20;  // then each takes several of its items

template <typename T>
__global__ void __launch_bounds__(kThreads) ExpandKernel(const __grid_constant__ ExpandParams p) {
  const int64_t all = p.expanded / 8 * p.pairs * 32 * p.heads;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < all; at += int64_t{gridDim.x} * kThreads) {
    ExpandFragment<T>(p, at);
  }
}

constexpr int kRowsOfCta = kThreads / 32 * 16;  // 16 of a warp

template <typename T>
__global__ void __launch_bounds__(kThreads) PartProductKernel(const __grid_constant__ PartProductParams p) {
  const int ctas = (p.N + kRowsOfCta - 1) / kRowsOfCta;
  const int64_t items = int64_t{p.B} * p.H * ctas;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    MultiplyPartRows<T>(p, item / ctas, static_cast<int>(item % ctas) * kRowsOfCta + warp * 16, lane);
  }
}

template <typename Params, void (*kKernel)(const Params)>
int Launch(const Params& params, int64_t ctas, void* stream) {
  if (ctas == 0) return 0;
  return LaunchKernel<Params, kKernel>(params, static_cast<unsigned>(std::min(ctas, kMostCtas)), kThreads, 0, stream);
}

}  // namespace

int LaunchExpand(const ExpandParams& params, DType dtype, void* stream) {
  const int64_t ctas = (params.expanded / 8 * params.pairs * 32 * params.heads + kThreads - 1) / kThreads;
  return dtype == DType::kBF16 ? Launch<ExpandParams, ExpandKernel<__nv_bfloat16>>(params, ctas, stream)
                               : Launch<ExpandParams, ExpandKernel<__half>>(params, ctas, stream);
}

int LaunchPartProducts(const PartProductParams& params, DType dtype, void* stream) {
  const int64_t ctas = int64_t{params.B} * params.H * ((params.N + kRowsOfCta - 1) / kRowsOfCta);
  return dtype == DType::kBF16 ? Launch<PartProductParams, PartProductKernel<__nv_bfloat16>>(params, ctas, stream)
                               : Launch<PartProductParams, PartProductKernel<__half>>(params, ctas, stream);
}

}  // namespace cuda
}  // namespace stof
