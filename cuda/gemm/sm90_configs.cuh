// SPDX-License-Identifier: Apache-2.0
// The tiles that are compiled.
#ifndef STOF_CUDA_GEMM_SM90_CONFIGS_CUH_
#define STOF_CUDA_GEMM_SM90_CONFIGS_CUH_

#include "cuda/gemm/sm90.cuh"

namespace stof {
namespace cuda {

// With what the model takes them to cost (microseconds; docs/design/gemm.md says how it was fitted): a step of 64 of K,
// a tile, a tile's GELU and its residual.
template <typename T>
constexpr GemmSm90Kernel kGemmSingles[] = {
    gemm90::Describe<T, gemm90::GemmSm90Shape<2, 256, 1, 4, 2, 1, 1>>(0.647f, 1.71f, 2.09f, 2.64f),
    gemm90::Describe<T, gemm90::GemmSm90Shape<2, 128, 1, 3, 2, 1, 2>>(0.420f, 0.03f, 1.69f, 1.79f),
    gemm90::Describe<T, gemm90::GemmSm90Shape<2, 192, 1, 4, 2, 1, 1>>(0.492f, 1.27f, 1.80f, 1.67f),
    gemm90::Describe<T, gemm90::GemmSm90Shape<1, 64, 1, 6, 1, 1, 2>>(0.228f, 0.00f, 0.29f, 0.00f),
    gemm90::Describe<T, gemm90::GemmSm90Shape<2, 128, 1, 3, 1, 1, 2>>(0.494f, 0.00f, 0.38f, 0.00f),
    gemm90::Describe<T, gemm90::GemmSm90Shape<1, 192, 1, 4, 1, 1, 1>>(0.375f, 0.28f, 1.52f, 0.00f),
    gemm90::Describe<T, gemm90::GemmSm90Shape<2, 128, 1, 6, 2, 1, 1, 2>>(0.385f, 0.43f, 1.02f, 1.96f),
    gemm90::Describe<T, gemm90::GemmSm90Shape<2, 192, 1, 5, 2, 1, 1, 2>>(0.533f, 0.71f, 2.09f, 5.52f),
    {},
};

template <typename T>
constexpr GemmSm90Kernel kGemmPairs[] = {
    gemm90::Describe<T, gemm90::GemmSm90Shape<2, 128, 2, 4, 2, 1, 1>>(0.699f, 0.65f, 0.65f, 0.00f),
    gemm90::Describe<T, gemm90::GemmSm90Shape<2, 64, 2, 3, 2, 1, 2>>(0.449f, 0.00f, 0.00f, 0.00f),
    gemm90::Describe<T, gemm90::GemmSm90Shape<1, 64, 2, 4, 1, 1, 2>>(0.326f, 0.00f, 0.00f, 0.00f),
    gemm90::Describe<T, gemm90::GemmSm90Shape<2, 64, 2, 3, 1, 1, 2>>(0.471f, 0.00f, 0.00f, 0.00f),
    gemm90::Describe<T, gemm90::GemmSm90Shape<2, 64, 2, 5, 2, 1, 1, 3>>(0.623f, 0.04f, 0.06f, 0.36f),
    {},
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_SM90_CONFIGS_CUH_
