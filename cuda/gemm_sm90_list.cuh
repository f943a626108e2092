// SPDX-License-Identifier: Apache-2.0
// The tiles that are compiled.
#ifndef STOF_CUDA_GEMM_SM90_LIST_CUH_
#define STOF_CUDA_GEMM_SM90_LIST_CUH_

#include "cuda/gemm_sm90.cuh"

namespace stof {
namespace cuda {

template <typename T>
constexpr GemmSm90Kernel kGemmSingles[] = {
    gemm90::Describe<T, gemm90::Shape<2, 256, 1, 4, 2, 1, 1>>(),
    gemm90::Describe<T, gemm90::Shape<2, 128, 1, 3, 2, 1, 2>>(),
    gemm90::Describe<T, gemm90::Shape<2, 128, 1, 3, 2, 2, 2>>(),
    gemm90::Describe<T, gemm90::Shape<2, 192, 1, 4, 2, 1, 1>>(),
    gemm90::Describe<T, gemm90::Shape<1, 64, 1, 6, 1, 1, 2>>(),
    {},
};

template <typename T>
constexpr GemmSm90Kernel kGemmPairs[] = {
    gemm90::Describe<T, gemm90::Shape<2, 128, 2, 4, 2, 1, 1>>(),
    gemm90::Describe<T, gemm90::Shape<2, 64, 2, 3, 2, 1, 2>>(),
    gemm90::Describe<T, gemm90::Shape<2, 64, 2, 3, 2, 2, 2>>(),
    gemm90::Describe<T, gemm90::Shape<3, 64, 2, 4, 2, 1, 1>>(),
    gemm90::Describe<T, gemm90::Shape<1, 64, 2, 4, 1, 1, 2>>(),
    {},
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_SM90_LIST_CUH_
