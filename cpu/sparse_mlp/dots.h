// SPDX-License-Identifier: Apache-2.0
// Dot products of weight rows and tokens.
//
// A dot product has one order of additions, whichever function here computes it: slabs of kDotDepth values, each summed
// by one vector accumulator. So the result of a token among few does not depend on the others.
#ifndef STOF_CPU_SPARSE_MLP_DOTS_H_
#define STOF_CPU_SPARSE_MLP_DOTS_H_

#include "cpu/sparse_mlp/elements.h"

namespace stof {
namespace cpu {
namespace {

constexpr int64_t kDotDepth = 1024;
constexpr int kDotRows = 4;
// A dense tile is used where more than this percentage of its (row, token) pairs is needed: of two tokens, and from
// kManyTileTokens on. Between these it always is: it ends before the next rows arrive from memory.
constexpr int64_t kTilePercentOfTwo = 50, kTilePercentOfMany = kWidth >= 16 ? 15 : 40;
constexpr int64_t kManyTileTokens = kWidth >= 16 ? 20 : 16;
constexpr int kDotTokens = Simd::kDotTokens;
constexpr int64_t kSlabStride = kDotDepth + 16;  // rows of a multiple of 4 KiB would share cache sets

// sums[i] += w[i] · x[i].
template <typename E>
void DotPairs(const typename E::T* const (&w)[kDotRows], const float* const (&x)[kDotRows], int64_t depth,
              float (&sums)[kDotRows]) {
  V sum[kDotRows];
#pragma GCC unroll 4
  for (int i = 0; i < kDotRows; ++i) sum[i] = Simd::Set1(0.0f);
  int64_t k = 0;
  for (; k + kWidth <= depth; k += kWidth) {
#pragma GCC unroll 4
    for (int i = 0; i < kDotRows; ++i) sum[i] = Simd::Fma(E::Load(w[i] + k), Simd::Load(x[i] + k), sum[i]);
  }
  if (k < depth) {
    for (int i = 0; i < kDotRows; ++i) {
      sum[i] = Simd::Fma(LoadFirst<E>(w[i] + k, depth - k), Simd::Load(x[i] + k), sum[i]);
    }
  }
  for (int i = 0; i < kDotRows; ++i) sums[i] += Simd::ReduceAdd(sum[i]);
}

// GCC for x86-64 unrolls short loops by itself. For AArch64 it does not, and stores all sums in each step then.
#if defined(STOF_NEON)
#define STOF_UNROLL_SUMS _Pragma("GCC unroll 8")
#else
#define STOF_UNROLL_SUMS
#endif

// sums[i * kMlpTokens + t] += w[i] · (x + t * stride), kTokens of them. Meanwhile next[i] is prefetched, next_step
// bytes for each vector: prefetched at once, so many lines would stall the loads.
template <typename E, int kTokens>
void DotTile(const typename E::T* const (&w)[kDotRows], const float* x, int64_t stride, int64_t depth,
             const char* const (&next)[kDotRows], int64_t next_step, float* sums) {
  V sum[kDotRows][kTokens];
#pragma GCC unroll 4
  for (int i = 0; i < kDotRows; ++i) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) sum[i][t] = Simd::Set1(0.0f);
  }
  int64_t k = 0, next_at = 0;
  for (; k + kWidth <= depth; k += kWidth, next_at += next_step) {
    V y[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) y[t] = Simd::Load(x + t * stride + k);
#pragma GCC unroll 4
    for (int i = 0; i < kDotRows; ++i) __builtin_prefetch(next[i] + next_at, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < kDotRows; ++i) {
      const V row = E::Load(w[i] + k);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) sum[i][t] = Simd::Fma(row, y[t], sum[i][t]);
    }
  }
  if (k < depth) {
    STOF_UNROLL_SUMS
    for (int i = 0; i < kDotRows; ++i) {
      const V row = LoadFirst<E>(w[i] + k, depth - k);
      STOF_UNROLL_SUMS
      for (int t = 0; t < kTokens; ++t) sum[i][t] = Simd::Fma(row, Simd::Load(x + t * stride + k), sum[i][t]);
    }
  }
  STOF_UNROLL_SUMS
  for (int i = 0; i < kDotRows; ++i) {
    STOF_UNROLL_SUMS
    for (int t = 0; t < kTokens; ++t) sums[i * kMlpTokens + t] += Simd::ReduceAdd(sum[i][t]);
  }
}

#undef STOF_UNROLL_SUMS

template <typename E, int kTokens = kDotTokens>
void DotSomeTokens(int64_t tokens, const typename E::T* const (&w)[kDotRows], const float* x, int64_t stride,
                   int64_t depth, const char* const (&next)[kDotRows], int64_t next_step, float* sums) {
  if constexpr (kTokens > 1) {
    if (tokens < kTokens) return DotSomeTokens<E, kTokens - 1>(tokens, w, x, stride, depth, next, next_step, sums);
  }
  DotTile<E, kTokens>(w, x, stride, depth, next, next_step, sums);
}

// kDotRows rows and the tokens that need them.
class RowGroup {
 public:
  RowGroup(const DotProblem& problem, int64_t first, int64_t last) : p_(problem), count_(Min(kDotRows, last - first)) {
    for (int i = 0; i < kDotRows; ++i) {
      // Rows that are missing repeat the last one.
      neuron_[i] = NeuronOf(p_, Min(first + i, last - 1));
      const int64_t after = Min(first + kDotRows + i, p_.count - 1);
      next_[i] = p_.rows.data + NeuronOf(p_, after) * p_.rows.stride;
      PrefetchStart(next_[i]);
    }
    const uint64_t all = BitsOfTokens(p_.tokens);
    uint64_t masks[kDotRows] = {};
    for (int64_t i = 0; i < count_; ++i) masks[i] = p_.masks == nullptr ? all : p_.masks[first + i];
    // Neighbours in the list have different rows, so that several rows are read at a time.
    for (bool is_done = false; !is_done;) {
      is_done = true;
      for (int64_t i = 0; i < count_; ++i) {
        if (masks[i] == 0) continue;
        pairs_[pair_count_++] = {static_cast<uint8_t>(i), static_cast<uint8_t>(__builtin_ctzll(masks[i]))};
        masks[i] &= masks[i] - 1;
        is_done = false;
      }
    }
  }

  void Run(float* out, int64_t row_stride, int64_t token_stride) {
    if (pair_count_ == 0) return;
    // A tile computes what nobody needs, too, at a higher rate.
    const int64_t percent = p_.tokens == 2 ? kTilePercentOfTwo : p_.tokens < kManyTileTokens ? 0 : kTilePercentOfMany;
    const bool is_tile = p_.tokens > 1 && 100 * pair_count_ > percent * kDotRows * p_.tokens;
    Fill(sums_, sums_ + kDotRows * kMlpTokens, 0.0f);
    int64_t k0 = 0;
    do {
      const int64_t depth = Min(kDotDepth, p_.rows.size - k0);
      if (is_tile) {
        RunTile(k0, depth);
      } else {
        RunPairs(k0, depth);
      }
      k0 += kDotDepth;
    } while (k0 < p_.rows.size);
    if (is_tile) {
      for (int64_t i = 0; i < count_; ++i) {
        for (int64_t t = 0; t < p_.tokens; ++t) out[i * row_stride + t * token_stride] = sums_[i * kMlpTokens + t];
      }
      return;
    }
    for (int64_t n = 0; n < pair_count_; ++n) {
      out[pairs_[n].row * row_stride + pairs_[n].token * token_stride] = sums_[n];
    }
  }

 private:
  struct Pair {
    uint8_t row, token;
  };

  // The slab of each row: in place where it is fp32, else converted to a buffer.
  void LoadSlab(int64_t k0, int64_t depth, const float* (&w)[kDotRows]) {
    for (int64_t i = 0; i < kDotRows; ++i) {
      if (p_.rows.bits == 0 && p_.rows.dtype == DType::kF32) {
        w[i] = reinterpret_cast<const float*>(p_.rows.data + neuron_[i] * p_.rows.stride) + k0;
        continue;
      }
      w[i] = slab_ + Min(i, count_ - 1) * kSlabStride;
      if (i < count_) LoadRow(p_.rows, neuron_[i], k0, depth, slab_ + i * kSlabStride);
    }
  }

  // Slabs of the next rows, to be prefetched between dot products; their cache lines.
  int64_t Ahead(int64_t k0, int64_t depth) {
    ahead_.Clear();
    for (const char* row : next_) ahead_.Add(row + BytesOf(p_.rows, k0), 0, 1, BytesOf(p_.rows, depth));
    return ahead_.lines();
  }

  // The slab of each row where it lies, of a type that is converted on the way.
  template <typename E>
  void FindSlab(int64_t k0, const typename E::T* (&w)[kDotRows]) const {
    for (int64_t i = 0; i < kDotRows; ++i) {
      w[i] = reinterpret_cast<const typename E::T*>(p_.rows.data + neuron_[i] * p_.rows.stride) + k0;
    }
  }

  void RunTile(int64_t k0, int64_t depth) {
    // A single tile reads each value once: converting to a buffer first would cost a pass.
    if (p_.rows.bits == 0 && p_.tokens <= kDotTokens) {
      return WithElement(p_.rows.dtype, [&](auto element) {
        using E = decltype(element);
        const typename E::T* w[kDotRows];
        FindSlab<E>(k0, w);
        MultiplyTiles<E>(w, k0, depth);
      });
    }
    const float* w[kDotRows];
    LoadSlab(k0, depth, w);
    MultiplyTiles<Fp32Element>(w, k0, depth);
  }

  template <typename E>
  void MultiplyTiles(const typename E::T* const (&w)[kDotRows], int64_t k0, int64_t depth) {
    // The slab that is read after this one, each tile its part of it.
    const bool is_last = k0 + depth == p_.rows.size;
    const int64_t next_k = is_last ? 0 : k0 + depth;
    const int64_t bytes = BytesOf(p_.rows, Min(kDotDepth, p_.rows.size - next_k));
    const int64_t tiles = (p_.tokens + kDotTokens - 1) / kDotTokens;
    const int64_t next_step = bytes * kWidth / Max(1, tiles * depth) + 1;
    for (int64_t i = 0; i < tiles; ++i) {  // of as many tokens each, give or take one
      const int64_t t = p_.tokens * i / tiles, tokens = p_.tokens * (i + 1) / tiles - t;
      const char* next[kDotRows];
      for (int64_t r = 0; r < kDotRows; ++r) {
        const char* const row = is_last ? next_[r] : p_.rows.data + neuron_[r] * p_.rows.stride;
        next[r] = row + BytesOf(p_.rows, next_k) + bytes * i / tiles;
      }
      DotSomeTokens<E>(tokens, w, p_.x + t * p_.x_stride + k0, p_.x_stride, depth, next, next_step, sums_ + t);
    }
  }

  void RunPairs(int64_t k0, int64_t depth) {
    // A row that one token needs is converted on the way.
    if (p_.rows.bits == 0 && (p_.rows.dtype == DType::kF32 || pair_count_ <= count_)) {
      return WithElement(p_.rows.dtype, [&](auto element) {
        using E = decltype(element);
        const typename E::T* rows[kDotRows];
        FindSlab<E>(k0, rows);
        Multiply<E>(rows, k0, depth);
      });
    }
    const float* w[kDotRows];
    LoadSlab(k0, depth, w);
    Multiply<Fp32Element>(w, k0, depth);
  }

  template <typename E>
  void Multiply(const typename E::T* const (&rows)[kDotRows], int64_t k0, int64_t depth) {
    const int64_t lines = pair_count_ > count_ ? Ahead(k0, depth) * kDotRows / pair_count_ + 1 : 0;
    for (int64_t n = 0; n < pair_count_; n += kDotRows) {
      ahead_.Fetch(lines);
      const typename E::T* w[kDotRows];
      const float* x[kDotRows];
      float sums[kDotRows];
      for (int i = 0; i < kDotRows; ++i) {
        const Pair& pair = pairs_[Min(n + i, pair_count_ - 1)];
        w[i] = rows[pair.row];
        x[i] = p_.x + pair.token * p_.x_stride + k0;
        sums[i] = sums_[n + i];
      }
      DotPairs<E>(w, x, depth, sums);
      for (int i = 0; i < kDotRows; ++i) sums_[n + i] = sums[i];
    }
  }

  const DotProblem& p_;
  const int64_t count_;
  int64_t neuron_[kDotRows];
  const char* next_[kDotRows];
  PrefetchQueue ahead_;
  Pair pairs_[kDotRows * kMlpTokens];
  int64_t pair_count_ = 0;
  float sums_[kDotRows * kMlpTokens];
  alignas(64) float slab_[kDotRows * kSlabStride];
};

inline void DotRowGroups(const DotProblem& problem, int64_t first, int64_t last, float* out, int64_t row_stride,
                         int64_t token_stride) {
  for (int64_t i = first; i < last; i += kDotRows) {
    RowGroup group(problem, i, last);
    group.Run(out + (i - first) * row_stride, row_stride, token_stride);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOTS_H_
