// SPDX-License-Identifier: Apache-2.0
// Relative terms in the fp32 kernel. A member function of Fp32Attention; kernel.cuh includes this file behind the
// class.
#ifndef STOF_CUDA_ATTENTION_FP32_RELATIVE_CUH_
#define STOF_CUDA_ATTENTION_FP32_RELATIVE_CUH_

#include "cuda/attention/fp32/kernel.cuh"
#include "cuda/attention/relative/split_products.cuh"

namespace stof {
namespace cuda {

// Scores have been scaled.
template <int kHead, int kPlanes, int kTile, bool kScoreMod, bool kRelative>
__device__ __forceinline__ void Fp32Attention<kHead, kPlanes, kTile, kScoreMod, kRelative>::AddRelativeTerms(
    int tile, const char* stage, float (&s)[S::kBlocks][kColumns][4]) {
  static_assert(!kRelative || (kPlanes == 2 && kScoreMod), "scores are not in units of log2");
  // What depends on the lane is computed for each tile again: registers do not suffice to keep it.
  int lane = lane_;
  asm volatile("" : "+r"(lane));
  const RelativeScores<S::kBlocks> scores(p_, b_, h_, row0_ + warp_ * S::kBlocks * 16, tile * S::kN, lane);
  const int first = scores.First();
  const auto scale_of = [&](const BandTerm& term) {
    return BandScale{WindowFactor(term, h_, first), WindowRowBias(term, h_, first), p_.scale};
  };
  const int row = warp_ * S::kBlocks * 16 + lane % 16;
  const uint32_t query = SharedAddress(Queries() + SwizzledOffset<kHead>(row, lane / 16));
  const auto read_queries = [query](int k, uint32_t (&high)[S::kBlocks][4], uint32_t (&low)[S::kBlocks][4]) {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
      const uint32_t at = ChunkAddress<kHead>(query, 2 * k) + 2 * 16 * i * kHead;
      LoadMatrix4(high[i], at);
      LoadMatrix4(low[i], at + 2 * S::kM * kHead);
    }
  };
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const RelativeTerm& term = this->relative.key[i];
    if (term.band.rows != nullptr) {
      const uint32_t* const rows = WindowRows<kHead / 32 * 2>(term.band, h_, first, lane);
      const BandScale by = scale_of(term.band);
      scores.AddQueryBand(
          [&](int u, float (&x)[S::kBlocks][2][4]) {
            MultiplySplitQueries<__half, kHead, S::kBlocks>(rows, by, u, lane, scale_, read_queries, x);
          },
          s);
    }
    if (term.part.products != nullptr) scores.AddParts(term.part, false, p_.scale, s);
  }
  const RelativeTerm& term = this->relative.query;
  if (term.band.rows != nullptr) {
    const uint32_t* const rows = WindowRows<kHead / 32 * 2>(term.band, h_, first, lane);
    const BandScale by = scale_of(term.band);
    const auto* const factors = reinterpret_cast<const float*>(stage + S::kValueBytes);
    const uint32_t from = SharedAddress(stage) + 2 * SwizzledOffset<kHead>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const auto read_keys = [from](int k, int j, uint32_t (&high)[4], uint32_t (&low)[4]) {
      const uint32_t at = ChunkAddress<kHead>(from, 2 * k) + 2 * 8 * j * kHead;
      LoadMatrix4(high, at);
      LoadMatrix4(low, at + 2 * S::kPlane);
    };
    scores.AddKeyBand(
        [&](int j, float (&z)[S::kBlocks + 1][2][4]) {
          MultiplySplitKeys<__half, kHead, S::kBlocks>(rows, by, j, lane, factors, read_keys, z);
        },
        s);
  }
  if (term.part.products != nullptr) scores.AddParts(term.part, true, p_.scale, s);
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_RELATIVE_CUH_
