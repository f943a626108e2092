// SPDX-License-Identifier: Apache-2.0
// The tiles that are compiled.
#ifndef STOF_CUDA_GEMM_SM90_LIST_CUH_
#define STOF_CUDA_GEMM_SM90_LIST_CUH_

#include "cuda/gemm_sm90.cuh"

namespace stof {
namespace cuda {

// With what the model takes them to cost (microseconds; docs/gemm-kernel.md says how it was fitted): a step of 64 of K,
// a tile, and a tile's GELU.
template <typename T>
constexpr GemmSm90Kernel kGemmSingles[] = {
    gemm90::Describe<T, gemm90::Shape<2, 256, 1, 4, 2, 1, 1>>(0.671f, 2.41f, 1.85f),
    gemm90::Describe<T, gemm90::Shape<2, 128, 1, 3, 2, 1, 2>>(0.417f, 1.31f, 0.85f),
    gemm90::Describe<T, gemm90::Shape<2, 128, 1, 3, 2, 2, 2>>(0.431f, 0.71f, 1.82f),
    gemm90::Describe<T, gemm90::Shape<2, 192, 1, 4, 2, 1, 1>>(0.533f, 1.98f, 1.71f),
    gemm90::Describe<T, gemm90::Shape<1, 64, 1, 6, 1, 1, 2>>(0.200f, 0.30f, 0.40f),
    {},
};

template <typename T>
constexpr GemmSm90Kernel kGemmPairs[] = {
    gemm90::Describe<T, gemm90::Shape<2, 128, 2, 4, 2, 1, 1>>(0.763f, 0.10f, 0.41f),
    gemm90::Describe<T, gemm90::Shape<2, 64, 2, 3, 2, 1, 2>>(0.440f, 0.00f, 0.05f),
    gemm90::Describe<T, gemm90::Shape<2, 64, 2, 3, 2, 2, 2>>(0.441f, 0.00f, 0.01f),
    gemm90::Describe<T, gemm90::Shape<3, 64, 2, 4, 2, 1, 1>>(0.650f, 0.10f, 0.20f),
    gemm90::Describe<T, gemm90::Shape<1, 64, 2, 4, 1, 1, 2>>(0.200f, 0.00f, 0.20f),
    {},
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_SM90_LIST_CUH_
