// SPDX-License-Identifier: Apache-2.0
// Relative terms in the sm_80 kernel. A member function of Sm80Attention; kernel.cuh includes this file behind the
// class.
#ifndef STOF_CUDA_ATTENTION_SM80_RELATIVE_CUH_
#define STOF_CUDA_ATTENTION_SM80_RELATIVE_CUH_

#include "cuda/attention/relative/mma_products.cuh"
#include "cuda/attention/sm80/kernel.cuh"

namespace stof {
namespace cuda {

template <int kHead, typename T, bool kScoreMod, int kRows, bool kRelative>
__device__ __forceinline__ void Sm80Attention<kHead, T, kScoreMod, kRows, kRelative>::AddRelativeTerms(
    int tile, uint32_t keys, float (&s)[S::kBlocks][kColumns][4]) {
  // What depends on the lane is computed for each tile again: registers do not suffice to keep it.
  int lane = lane_;
  asm volatile("" : "+r"(lane));
  const RelativeScores<S::kBlocks> scores(p_, b_, h_, row0_ + warp_ * S::kBlocks * 16, tile * S::kN, lane);
  const int first = scores.First();
  const auto read_queries = [this](int k, uint32_t (&q)[S::kBlocks][4]) {
    if constexpr (S::kQueriesInRegisters) {
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) q[i][e] = q_[k][i][e];
      }
    } else {
      ReadQueries(k, q);
    }
  };
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const RelativeTerm& term = this->relative.key[i];
    if (term.band.rows != nullptr) {
      const uint32_t* const rows = WindowRows<kHead / 32>(term.band, h_, first, lane);
      const float* const column = WindowColumn(term.band, h_, first);
      scores.AddQueryBand(
          [&](int u, float (&x)[S::kBlocks][2][4]) {
            MultiplyQueries<T, kHead, S::kBlocks>(rows, column, u, lane, read_queries, x);
          },
          s);
    }
    if (term.part.products != nullptr) scores.AddParts(term.part, false, 1.0f, s);
  }
  const RelativeTerm& term = this->relative.query;
  if (term.band.rows != nullptr) {
    const uint32_t* const rows = WindowRows<kHead / 32>(term.band, h_, first, lane);
    const float* const column = WindowColumn(term.band, h_, first);
    const uint32_t from = keys + 2 * SwizzledOffset<kHead>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const auto read_keys = [from](int k, int j, uint32_t (&b)[4]) {
      LoadMatrix4(b, ChunkAddress<kHead>(from, 2 * k) + 2 * 8 * j * kHead);
    };
    scores.AddKeyBand(
        [&](int j, float (&z)[S::kBlocks + 1][2][4]) {
          MultiplyKeys<T, kHead, S::kBlocks>(rows, column, j, lane, read_keys, z);
        },
        s);
  }
  if (term.part.products != nullptr) scores.AddParts(term.part, true, 1.0f, s);
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_RELATIVE_CUH_
