// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "cuda/attention/relative/expand.cuh"
#include "cuda/attention/relative/expand.h"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostCtas = int64_t{1} << 20;  // then each takes several of its items

struct ExpandTables {
  ExpandParams table[kMostExpanded];
  int ctas[kMostExpanded];  // in front of those of the table behind it
};

// CTAs of a head take kThreads fragments each.
int64_t CountExpandCtas(const ExpandParams& p) {
  return int64_t{p.heads} * ((CountFragments(p) + kThreads - 1) / kThreads);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) ExpandKernel(const __grid_constant__ ExpandTables tables) {
  LetNextStart();
  const int cta = static_cast<int>(blockIdx.x);
  const int i = cta < tables.ctas[0] ? 0 : cta < tables.ctas[1] ? 1 : 2;
  const ExpandParams& p = tables.table[i];
  const int own = i == 0 ? cta : cta - tables.ctas[i - 1], fragments = CountFragments(p);
  const int ctas = (fragments + kThreads - 1) / kThreads;
  const int fragment = own % ctas * kThreads + static_cast<int>(threadIdx.x);
  if (fragment < fragments) ExpandFragment<T>(p, own / ctas, fragment);
}

constexpr int kRowsOfCta = kThreads / 32 * 16;  // 16 of a warp

template <typename T>
__global__ void __launch_bounds__(kThreads) PartProductKernel(const __grid_constant__ PartProductParams p) {
  LetNextStart();
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

int LaunchExpand(const ExpandParams* tables, int count, DType dtype, void* stream) {
  ExpandTables all;
  int64_t ctas = 0;
  for (int i = 0; i < kMostExpanded; ++i) {
    if (i < count) {
      all.table[i] = tables[i];
      ctas += CountExpandCtas(tables[i]);
    }
    if (ctas > std::numeric_limits<int>::max()) return static_cast<int>(cudaErrorInvalidConfiguration);
    all.ctas[i] = static_cast<int>(ctas);
  }
  if (ctas == 0) return 0;
  const auto grid = static_cast<unsigned>(ctas);
  return dtype == DType::kBF16 ? LaunchKernel<ExpandTables, ExpandKernel<__nv_bfloat16>>(all, grid, kThreads, 0, stream)
                               : LaunchKernel<ExpandTables, ExpandKernel<__half>>(all, grid, kThreads, 0, stream);
}

int LaunchPartProducts(const PartProductParams& params, DType dtype, void* stream) {
  const int64_t ctas = int64_t{params.B} * params.H * ((params.N + kRowsOfCta - 1) / kRowsOfCta);
  return dtype == DType::kBF16 ? Launch<PartProductParams, PartProductKernel<__nv_bfloat16>>(params, ctas, stream)
                               : Launch<PartProductParams, PartProductKernel<__half>>(params, ctas, stream);
}

}  // namespace cuda
}  // namespace stof
