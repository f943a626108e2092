// SPDX-License-Identifier: Apache-2.0
// Relative terms in the sm_80 kernel. A member function of Sm80Attention; kernel.cuh includes this file behind the
// class.
#ifndef STOF_CUDA_ATTENTION_SM80_RELATIVE_CUH_
#define STOF_CUDA_ATTENTION_SM80_RELATIVE_CUH_

#include "cuda/attention/relative/mma_products.cuh"
#include "cuda/attention/sm80/kernel.cuh"

namespace stof {
namespace cuda {

// The rows come with the keys: copies of 4 bytes of each sector, through L1, to memory that is not read. Loads then
// find them in L1. A tile that follows the one before it shares all but its last rows.
template <int kHead, typename T, bool kScoreMod, int kRows, bool kRelative>
__device__ __forceinline__ void Sm80Attention<kHead, T, kScoreMod, kRows, kRelative>::PrefetchRelativeRows(
    int tile, bool follows) const {
  if (tile < 0) return;
  constexpr int kSector = 32, kWindow = S::kM + S::kN;  // bytes, expanded rows
  const int shared_rows = follows ? S::kM : 0;
  const int first = BandBegin(row0_ + S::kM - kBandQueries, tile * S::kN, p_.S);
  const uint32_t to = base_ + S::SharedBytes(S::kLargeHead ? stages_ : S::kStages) + 4 * threadIdx.x;
  const auto prefetch = [&](const BandTerm& term) {
    if (term.rows == nullptr) return;
    const char* const rows = static_cast<const char*>(term.rows) + h_ * term.row_stride_h + int64_t{first} * kHead * 2;
#pragma unroll 1
    for (int row = shared_rows; row < kWindow; row += S::kN) {
#pragma unroll
      for (int i = 0; i < 2 * S::kN * kHead / (S::kThreads * kSector); ++i) {
        CopyAsync4(to, rows + row * kHead * 2 + (i * S::kThreads + static_cast<int>(threadIdx.x)) * kSector);
      }
    }
    if (term.column == nullptr) return;
    const int at = shared_rows + static_cast<int>(threadIdx.x) * (kSector / 4);
    if (at < kWindow) CopyAsync4(to, term.column + h_ * term.column_stride_h + first + at);
  };
  prefetch(this->relative.key[0].band);
  prefetch(this->relative.key[1].band);
  prefetch(this->relative.query.band);
}

// Gives whether it has added Q Kᵀ, too: with products of keys, whose operands it reads.
template <int kHead, typename T, bool kScoreMod, int kRows, bool kRelative>
__device__ __forceinline__ bool Sm80Attention<kHead, T, kScoreMod, kRows, kRelative>::AddRelativeTerms(
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
      scores.AddQueryBand(
          [&](int u, float (&x)[S::kBlocks][2][4]) { MultiplyQueries<T, kHead, S::kBlocks>(rows, u, read_queries, x); },
          s);
    }
    if (term.band.column != nullptr) scores.AddColumn(WindowColumn(term.band, h_, first), s);
    if (term.part.products != nullptr) scores.AddParts(term.part, false, 1.0f, s);
  }
  const RelativeTerm& term = this->relative.query;
  if (term.part.products != nullptr) scores.AddParts(term.part, true, 1.0f, s);
  if (term.band.column != nullptr) scores.AddColumn(WindowColumn(term.band, h_, first), s);
  if (term.band.rows == nullptr) return false;
  const uint32_t from = keys + 2 * SwizzledOffset<kHead>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const auto read_keys = [from](int k, int j, uint32_t (&b)[4]) {
    LoadMatrix4(b, ChunkAddress<kHead>(from, 2 * k) + 2 * 8 * j * kHead);
  };
  const auto multiply_queries = [&](int k, int j, const uint32_t (&b)[4]) {
    uint32_t q[S::kBlocks][4];
    read_queries(k, q);
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
      Mma<T>(s[i][j], q[i], b[0], b[1]);
      Mma<T>(s[i][j + 1], q[i], b[2], b[3]);
    }
  };
  const uint32_t* const rows = WindowRows<kHead / 32>(term.band, h_, first, lane);
  scores.AddKeyBand(
      [&](int j, float (&z)[S::kBlocks + 1][2][4]) {
        MultiplyKeys<T, kHead, S::kBlocks>(rows, j, read_keys, multiply_queries, z);
      },
      s);
  return true;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_RELATIVE_CUH_
