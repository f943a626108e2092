// SPDX-License-Identifier: Apache-2.0
// Relative terms in the sm_80 kernel. A member function of Sm80Attention; kernel.cuh includes this file behind the
// class.
#ifndef STOF_CUDA_ATTENTION_SM80_RELATIVE_CUH_
#define STOF_CUDA_ATTENTION_SM80_RELATIVE_CUH_

#include "cuda/attention/relative/mma_products.cuh"
#include "cuda/attention/sm80/kernel.cuh"

namespace stof {
namespace cuda {

// The rows come with the keys. A tile that follows the one before it shares all but its last rows.
template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
__device__ __forceinline__ void Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::FetchRelativeRows(
    int tile, bool follows) const {
  if (tile < 0) return;
  const int first = BandBegin(row0_ + S::kM - kBandQueries, tile * S::kN, p_.S);
  uint32_t ring = base_ + R::RingsBegin();
  const auto fetch = [&](const BandTerm& term, auto in_ring) {
    if (term.rows == nullptr) return;
    FetchRelativeRows<in_ring.value>(term, first, follows ? S::kM : 0, ring);
    if constexpr (in_ring.value) ring += R::kRingBytes;
  };
  fetch(this->relative.key[0].band, std::bool_constant<R::HasRing(false)>());
  fetch(this->relative.key[1].band, std::bool_constant<R::HasRing(true)>());
  fetch(this->relative.query.band, std::bool_constant<R::HasRing(false)>());
}

// Rows from first + from on, to the ring. Without one, and of columns: copies of 4 bytes of each sector, through L1,
// to memory that is not read. Loads then may find them in L1.
template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
template <bool kInRing>
__device__ __forceinline__ void Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::FetchRelativeRows(
    const BandTerm& term, int first, int from, uint32_t ring) const {
  constexpr int kRowBytes = 2 * kHead, kSector = 32, kWindow = R::kRingRows;
  const int thread = static_cast<int>(threadIdx.x);
  const uint32_t unread = base_ + R::PrefetchBegin(stages_) + 4 * threadIdx.x;
  const char* const rows = static_cast<const char*>(term.rows) + h_ * term.row_stride_h + int64_t{first} * kRowBytes;
#pragma unroll 1
  for (int row = from; row < kWindow; row += S::kN) {
    if constexpr (kInRing) {
      constexpr int kBytes = S::kN * kRowBytes;
      const uint32_t pair = RingPair<kWindow / kBandQueries>(first + row);
      const uint32_t to = ring + pair * (kBandQueries * kRowBytes) + 16 * threadIdx.x;
#pragma unroll
      for (int i = 0; i < kBytes / (16 * S::kThreads); ++i) {
        CopyAsync16(to + 16 * i * S::kThreads, rows + row * kRowBytes + 16 * (i * S::kThreads + thread));
      }
    } else {
#pragma unroll
      for (int i = 0; i < S::kN * kRowBytes / (S::kThreads * kSector); ++i) {
        CopyAsync4(unread, rows + row * kRowBytes + (i * S::kThreads + thread) * kSector);
      }
    }
  }
  if (term.row_bias == nullptr) return;
  const int at = from + thread * (kSector / 4);
  if (at < kWindow) CopyAsync4(unread, term.row_bias + h_ * term.row_bias_stride_h + first + at);
}

// The rows of a window that begins with expanded row `first`.
template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
template <bool kInRing>
__device__ __forceinline__ auto Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::RelativeRows(const BandTerm& term,
                                                                                                 int first, int lane,
                                                                                                 uint32_t ring) const {
  if constexpr (kInRing) {
    return RingWindow<kHead, R::kRingRows / kBandQueries>(ring, first, lane);
  } else {
    return GlobalWindow<kHead>(WindowRows<kHead / 32>(term, h_, first, lane));
  }
}

// Gives whether it has added Q Kᵀ, too: with products of keys, whose operands it reads.
template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
__device__ __forceinline__ bool Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::AddRelativeTerms(
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
  const auto add_queries = [&](const auto& rows) {
    scores.AddQueryBand(
        [&](int u, float (&x)[S::kBlocks][2][4]) { MultiplyQueries<T, kHead, S::kBlocks>(rows, u, read_queries, x); },
        s);
  };
  uint32_t ring = base_ + R::RingsBegin();
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const RelativeTerm& term = this->relative.key[i];
    if (term.band.rows != nullptr) {
      if (R::HasRing(true) == R::HasRing(false) || i == 0) {
        add_queries(RelativeRows<R::HasRing(false)>(term.band, first, lane, ring));
        if constexpr (R::HasRing(false)) ring += R::kRingBytes;
      } else {
        add_queries(RelativeRows<false>(term.band, first, lane, ring));
      }
    }
    if (term.band.row_bias != nullptr) scores.AddRowBias(WindowRowBias(term.band, h_, first), s);
    if (term.part.products != nullptr) scores.AddParts(term.part, false, 1.0f, s);
  }
  const RelativeTerm& term = this->relative.query;
  if (term.part.products != nullptr) scores.AddParts(term.part, true, 1.0f, s);
  if (term.band.row_bias != nullptr) scores.AddRowBias(WindowRowBias(term.band, h_, first), s);
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
  const auto rows = RelativeRows<R::HasRing(false)>(term.band, first, lane, ring);
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
