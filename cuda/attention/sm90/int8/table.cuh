// SPDX-License-Identifier: Apache-2.0
// The tables of kernels with 8-bit operands. Their costs are predictions (docs/design/attention-8bit.md): there is one
// kernel for a head size, so that nothing is chosen by them.
#ifndef STOF_CUDA_ATTENTION_SM90_INT8_TABLE_CUH_
#define STOF_CUDA_ATTENTION_SM90_INT8_TABLE_CUH_

#include "cuda/attention/sm90/launch.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// Stages: of the kernels with values in fp8, and in 16 bits.
template <typename Head_, int kFp8Stages, int kInt8Stages>
struct Int8Kernels {
  template <typename T, int kStages, Operands kOperands>
  static constexpr KernelEntry kTable[] = {
      MakeKernel<T, Head_, Tile<128, kInt8TileKeys>, Stages<kStages>, QueryStages<2>, Pipelines<1>, Splits<1>,
                 ScoreMod::kNone, kPingPong, false, false, kOperands>(RowNs{2500}, FullNs{1100}, PartialNs{1240})};

  static KernelTable Find(const KernelProblem& problem) {
    const bool bf16 = problem.dtype == DType::kBF16;
    if (problem.precision == AttentionPrecision::kInt8Fp8) {
      return bf16 ? kTable<__nv_bfloat16, kFp8Stages, Operands::kInt8Fp8>
                  : kTable<__half, kFp8Stages, Operands::kInt8Fp8>;
    }
    return bf16 ? kTable<__nv_bfloat16, kInt8Stages, Operands::kInt8> : kTable<__half, kInt8Stages, Operands::kInt8>;
  }
};

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_INT8_TABLE_CUH_
