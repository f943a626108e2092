// SPDX-License-Identifier: Apache-2.0
// Dot products of weight rows and tokens. Included once per instruction set, with STOF_DOT_TOKENS tokens in a tile.
//
// A dot product has one order of additions, whichever function computes it: slabs of kDotDepth values, each summed by
// one vector accumulator. So a token's result does not depend on the other tokens.
#ifndef STOF_CPU_SPARSE_MLP_DOTS_H_
#define STOF_CPU_SPARSE_MLP_DOTS_H_

#include "cpu/sparse_mlp/elements.h"

namespace stof {
namespace cpu {
namespace STOF_ISA::sparse_mlp {

constexpr int64_t kDotDepth = 1024;
constexpr int kDotRows = 4;
constexpr int kDotTokens = STOF_DOT_TOKENS;
constexpr int64_t kSlabStride = kDotDepth + 16;  // rows of a multiple of 4 KiB would share cache sets

// sums[i] += w[i] · x[i], and prefetches next[i]. Addresses beyond the weights do no harm to a prefetch.
template <typename E>
void DotPairs(const typename E::T* const (&w)[kDotRows], const float* const (&x)[kDotRows], int64_t depth,
              const char* const (&next)[kDotRows], float (&sums)[kDotRows]) {
  V sum[kDotRows];
#pragma GCC unroll 4
  for (int i = 0; i < kDotRows; ++i) sum[i] = Simd::Set1(0.0f);
  constexpr int64_t kPerLine = std::max<int64_t>(kWidth, kLine / static_cast<int64_t>(sizeof(typename E::T)));
  int64_t k = 0;
  for (; k + kPerLine <= depth; k += kPerLine) {
#pragma GCC unroll 4
    for (int i = 0; i < kDotRows; ++i) {
      __builtin_prefetch(next[i] + k * static_cast<int64_t>(sizeof(typename E::T)), 0, 2);
    }
#pragma GCC unroll 16
    for (int64_t j = 0; j < kPerLine; j += kWidth) {
#pragma GCC unroll 4
      for (int i = 0; i < kDotRows; ++i) {
        sum[i] = Simd::Fma(E::Load(w[i] + k + j), Simd::Load(x[i] + k + j), sum[i]);
      }
    }
  }
  for (; k + kWidth <= depth; k += kWidth) {
    for (int i = 0; i < kDotRows; ++i) sum[i] = Simd::Fma(E::Load(w[i] + k), Simd::Load(x[i] + k), sum[i]);
  }
  if (k < depth) {
    for (int i = 0; i < kDotRows; ++i) {
      sum[i] = Simd::Fma(LoadFirst<E>(w[i] + k, depth - k), Simd::Load(x[i] + k), sum[i]);
    }
  }
  for (int i = 0; i < kDotRows; ++i) sums[i] += Simd::ReduceAdd(sum[i]);
}

// sums[i * kMlpTokens + t] += w[i] · (x + t * stride), kTokens of them; prefetches next.
template <int kTokens>
void DotTile(const float* const (&w)[kDotRows], const float* x, int64_t stride, int64_t depth, const char* const* next,
             float* sums) {
  V sum[kDotRows][kTokens];
#pragma GCC unroll 4
  for (int i = 0; i < kDotRows; ++i) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) sum[i][t] = Simd::Set1(0.0f);
  }
  int64_t k = 0;
  for (; k + kWidth <= depth; k += kWidth) {
    if (next != nullptr) {
#pragma GCC unroll 4
      for (int i = 0; i < kDotRows; ++i) __builtin_prefetch(next[i] + k * 4, 0, 2);
    }
    V y[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) y[t] = Simd::Load(x + t * stride + k);
#pragma GCC unroll 4
    for (int i = 0; i < kDotRows; ++i) {
      const V row = Simd::Load(w[i] + k);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) sum[i][t] = Simd::Fma(row, y[t], sum[i][t]);
    }
  }
  if (k < depth) {
    for (int i = 0; i < kDotRows; ++i) {
      const V row = LoadFirst<F32>(w[i] + k, depth - k);
      for (int t = 0; t < kTokens; ++t) sum[i][t] = Simd::Fma(row, Simd::Load(x + t * stride + k), sum[i][t]);
    }
  }
  for (int i = 0; i < kDotRows; ++i) {
    for (int t = 0; t < kTokens; ++t) sums[i * kMlpTokens + t] += Simd::ReduceAdd(sum[i][t]);
  }
}

template <int kTokens = kDotTokens>
void DotSomeTokens(int64_t tokens, const float* const (&w)[kDotRows], const float* x, int64_t stride, int64_t depth,
                   const char* const* next, float* sums) {
  if constexpr (kTokens > 1) {
    if (tokens < kTokens) return DotSomeTokens<kTokens - 1>(tokens, w, x, stride, depth, next, sums);
  }
  DotTile<kTokens>(w, x, stride, depth, next, sums);
}

// kDotRows rows and the tokens that need them.
class RowGroup {
 public:
  RowGroup(const DotProblem& problem, int64_t first, int64_t last)
      : p_(problem), count_(std::min<int64_t>(kDotRows, last - first)) {
    for (int i = 0; i < kDotRows; ++i) {
      // Rows that are missing repeat the last one; what comes after the last rows is not prefetched.
      neuron_[i] = NeuronOf(std::min(first + i, last - 1));
      const int64_t after = std::min(first + kDotRows + i, p_.count - 1);
      next_[i] = p_.rows.data + NeuronOf(after) * p_.rows.stride;
    }
    const uint64_t all = p_.tokens == kMlpTokens ? ~uint64_t{0} : (uint64_t{1} << p_.tokens) - 1;
    for (int64_t i = 0; i < count_; ++i) {
      for (uint64_t mask = p_.masks == nullptr ? all : p_.masks[first + i]; mask != 0; mask &= mask - 1) {
        pairs_[pair_count_++] = {static_cast<uint8_t>(i), static_cast<uint8_t>(__builtin_ctzll(mask))};
      }
    }
  }

  void Run(float* out, int64_t row_stride, int64_t token_stride) {
    if (pair_count_ == 0) return;
    // A tile computes what nobody needs, too, at nearly twice the rate.
    const bool is_tile = p_.tokens > 2 && 2 * pair_count_ > kDotRows * p_.tokens;
    std::fill(sums_, sums_ + kDotRows * kMlpTokens, 0.0f);
    int64_t k0 = 0;
    do {
      const int64_t depth = std::min(kDotDepth, p_.rows.size - k0);
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
  int64_t NeuronOf(int64_t i) const { return p_.neurons != nullptr ? p_.neurons[i] : i; }
  int64_t BytesTo(int64_t k) const { return p_.rows.bits > 0 ? k * p_.rows.bits / 8 : k * SizeOf(p_.rows.dtype); }

  // The slab of each row in fp32: in the weight, or in the buffer.
  void LoadSlab(int64_t k0, int64_t depth, const float* (&w)[kDotRows], const char* (&next)[kDotRows]) {
    for (int i = 0; i < kDotRows; ++i) {
      next[i] = next_[i] + BytesTo(k0);
      if (p_.rows.bits == 0 && p_.rows.dtype == DType::kF32) {
        w[i] = reinterpret_cast<const float*>(p_.rows.data + neuron_[i] * p_.rows.stride) + k0;
        continue;
      }
      w[i] = slab_ + std::min<int64_t>(i, count_ - 1) * kSlabStride;
      if (i < count_) LoadRow(p_.rows, neuron_[i], k0, depth, next[i], slab_ + i * kSlabStride);
    }
  }

  void RunTile(int64_t k0, int64_t depth) {
    const float* w[kDotRows];
    const char* next[kDotRows];
    LoadSlab(k0, depth, w, next);
    const bool is_read_here = p_.rows.bits == 0 && p_.rows.dtype == DType::kF32;
    for (int64_t t = 0; t < p_.tokens; t += kDotTokens) {
      DotSomeTokens(std::min<int64_t>(kDotTokens, p_.tokens - t), w, p_.x + t * p_.x_stride + k0, p_.x_stride, depth,
                    is_read_here && t == 0 ? next : nullptr, sums_ + t);
    }
  }

  void RunPairs(int64_t k0, int64_t depth) {
    // A row that one token needs is converted on the way.
    if (p_.rows.bits == 0 && (p_.rows.dtype == DType::kF32 || pair_count_ <= count_)) {
      return WithElement(p_.rows.dtype, [&](auto element) {
        using E = decltype(element);
        const typename E::T* rows[kDotRows];
        const char* next[kDotRows];
        for (int i = 0; i < kDotRows; ++i) {
          rows[i] = reinterpret_cast<const typename E::T*>(p_.rows.data + neuron_[i] * p_.rows.stride) + k0;
          next[i] = next_[i] + BytesTo(k0);
        }
        Multiply<E>(rows, k0, depth, next);
      });
    }
    const float* w[kDotRows];
    const char* next[kDotRows];
    LoadSlab(k0, depth, w, next);
    Multiply<F32>(w, k0, depth, nullptr);
  }

  template <typename E>
  void Multiply(const typename E::T* const (&rows)[kDotRows], int64_t k0, int64_t depth, const char* const* ahead) {
    for (int64_t n = 0; n < pair_count_; n += kDotRows) {
      const typename E::T* w[kDotRows];
      const float* x[kDotRows];
      const char* next[kDotRows];
      float sums[kDotRows];
      for (int i = 0; i < kDotRows; ++i) {
        const Pair& pair = pairs_[std::min(n + i, pair_count_ - 1)];
        w[i] = rows[pair.row];
        x[i] = p_.x + pair.token * p_.x_stride + k0;
        sums[i] = sums_[n + i];
        // Those of the next group once; afterwards what is in the cache already.
        next[i] = n == 0 && ahead != nullptr ? ahead[i] : reinterpret_cast<const char*>(w[i]);
      }
      DotPairs<E>(w, x, depth, next, sums);
      for (int i = 0; i < kDotRows; ++i) sums_[n + i] = sums[i];
    }
  }

  const DotProblem& p_;
  const int64_t count_;
  int64_t neuron_[kDotRows];
  const char* next_[kDotRows];
  Pair pairs_[kDotRows * kMlpTokens];
  int64_t pair_count_ = 0;
  float sums_[kDotRows * kMlpTokens];
  alignas(64) float slab_[kDotRows * kSlabStride];
};

inline void Dots(const DotProblem& problem, int64_t first, int64_t last, float* out, int64_t row_stride,
                 int64_t token_stride) {
  for (int64_t i = first; i < last; i += kDotRows) {
    RowGroup group(problem, i, last);
    group.Run(out + (i - first) * row_stride, row_stride, token_stride);
  }
}

}  // namespace STOF_ISA::sparse_mlp
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOTS_H_
