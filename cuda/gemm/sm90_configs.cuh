// SPDX-License-Identifier: Apache-2.0
// The tiles that are compiled.
#ifndef STOF_CUDA_GEMM_SM90_CONFIGS_CUH_
#define STOF_CUDA_GEMM_SM90_CONFIGS_CUH_

#include "cuda/gemm/sm90.cuh"

namespace stof {
namespace cuda {
namespace gemm90 {

// The costs are those of the model (docs/design/gemm.md says how they were fitted). The named ones are those of tiles
// that both layouts of b have.
constexpr KernelCosts kCosts128x256 = {StepUs{0.647f}, TileUs{1.71f}, GeluUs{2.09f}, ResidualUs{2.64f}};
constexpr KernelCosts kCosts128x128PingPong = {StepUs{0.385f}, TileUs{0.43f}, GeluUs{1.02f}, ResidualUs{1.96f}};
constexpr KernelCosts kCosts64x64 = {StepUs{0.228f}, TileUs{0.00f}, GeluUs{0.29f}, ResidualUs{0.00f}};
constexpr KernelCosts kCosts128x128NoCluster = {StepUs{0.494f}, TileUs{0.00f}, GeluUs{0.38f}, ResidualUs{0.00f}};

template <typename T>
constexpr GemmKernelEntry kGemmSingles[] = {
    MakeKernel<T, Warpgroups<2>, Columns<256>, Matmuls<1>, Stages<4>, Cluster<2, 1>, CtasPerSm<1>>(kCosts128x256),
    MakeKernel<T, Warpgroups<2>, Columns<128>, Matmuls<1>, Stages<3>, Cluster<2, 1>, CtasPerSm<2>>(
        {StepUs{0.420f}, TileUs{0.03f}, GeluUs{1.69f}, ResidualUs{1.79f}}),
    MakeKernel<T, Warpgroups<2>, Columns<192>, Matmuls<1>, Stages<4>, Cluster<2, 1>, CtasPerSm<1>>(
        {StepUs{0.492f}, TileUs{1.27f}, GeluUs{1.80f}, ResidualUs{1.67f}}),
    MakeKernel<T, Warpgroups<1>, Columns<64>, Matmuls<1>, Stages<6>, Cluster<1, 1>, CtasPerSm<2>>(kCosts64x64),
    MakeKernel<T, Warpgroups<2>, Columns<128>, Matmuls<1>, Stages<3>, Cluster<1, 1>, CtasPerSm<2>>(
        kCosts128x128NoCluster),
    MakeKernel<T, Warpgroups<1>, Columns<192>, Matmuls<1>, Stages<4>, Cluster<1, 1>, CtasPerSm<1>>(
        {StepUs{0.375f}, TileUs{0.28f}, GeluUs{1.52f}, ResidualUs{0.00f}}),
    MakeKernel<T, Warpgroups<2>, Columns<128>, Matmuls<1>, Stages<6>, Cluster<2, 1>, CtasPerSm<1>, PingPongBlocks<2>>(
        kCosts128x128PingPong),
    MakeKernel<T, Warpgroups<2>, Columns<192>, Matmuls<1>, Stages<5>, Cluster<2, 1>, CtasPerSm<1>, PingPongBlocks<2>>(
        {StepUs{0.533f}, TileUs{0.71f}, GeluUs{2.09f}, ResidualUs{5.52f}}),
};

template <typename T>
constexpr GemmKernelEntry kGemmPairs[] = {
    MakeKernel<T, Warpgroups<2>, Columns<128>, Matmuls<2>, Stages<4>, Cluster<2, 1>, CtasPerSm<1>>(
        {StepUs{0.699f}, TileUs{0.65f}, GeluUs{0.65f}, ResidualUs{0.00f}}),
    MakeKernel<T, Warpgroups<2>, Columns<64>, Matmuls<2>, Stages<3>, Cluster<2, 1>, CtasPerSm<2>>(
        {StepUs{0.449f}, TileUs{0.00f}, GeluUs{0.00f}, ResidualUs{0.00f}}),
    MakeKernel<T, Warpgroups<1>, Columns<64>, Matmuls<2>, Stages<4>, Cluster<1, 1>, CtasPerSm<2>>(
        {StepUs{0.326f}, TileUs{0.00f}, GeluUs{0.00f}, ResidualUs{0.00f}}),
    MakeKernel<T, Warpgroups<2>, Columns<64>, Matmuls<2>, Stages<3>, Cluster<1, 1>, CtasPerSm<2>>(
        {StepUs{0.471f}, TileUs{0.00f}, GeluUs{0.00f}, ResidualUs{0.00f}}),
    MakeKernel<T, Warpgroups<2>, Columns<64>, Matmuls<2>, Stages<5>, Cluster<2, 1>, CtasPerSm<1>, PingPongBlocks<3>>(
        {StepUs{0.623f}, TileUs{0.04f}, GeluUs{0.06f}, ResidualUs{0.36f}}),
};

// b0 is [N, K]. Other tiles were not tried. The costs were fitted with a b0 of [K, N].
template <typename T>
constexpr GemmKernelEntry kGemmTransposed[] = {
    MakeKernel<T, Warpgroups<2>, Columns<256>, Matmuls<1>, Stages<4>, Cluster<2, 1>, CtasPerSm<1>, PingPongBlocks<0>,
               TransposedB<true>>(kCosts128x256),
    MakeKernel<T, Warpgroups<2>, Columns<128>, Matmuls<1>, Stages<6>, Cluster<2, 1>, CtasPerSm<1>, PingPongBlocks<2>,
               TransposedB<true>>(kCosts128x128PingPong),
    MakeKernel<T, Warpgroups<1>, Columns<64>, Matmuls<1>, Stages<6>, Cluster<1, 1>, CtasPerSm<2>, PingPongBlocks<0>,
               TransposedB<true>>(kCosts64x64),
    MakeKernel<T, Warpgroups<2>, Columns<128>, Matmuls<1>, Stages<3>, Cluster<1, 1>, CtasPerSm<2>, PingPongBlocks<0>,
               TransposedB<true>>(kCosts128x128NoCluster),
};

// A pair has no transposed b.
template <typename T>
GemmKernelTable FindKernels(bool pair, bool is_b_transposed) {
  if (is_b_transposed) return pair ? GemmKernelTable() : GemmKernelTable(kGemmTransposed<T>);
  return pair ? GemmKernelTable(kGemmPairs<T>) : GemmKernelTable(kGemmSingles<T>);
}

}  // namespace gemm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_SM90_CONFIGS_CUH_
