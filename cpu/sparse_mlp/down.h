// SPDX-License-Identifier: Apache-2.0
// Sums of down rows, weighted by hidden values. Included once per instruction set.
//
// A part's sum adds the active neurons of the part one by one, in their order, and the output adds the parts. So a
// token's result depends neither on threads nor on other tokens.
#ifndef STOF_CPU_SPARSE_MLP_DOWN_H_
#define STOF_CPU_SPARSE_MLP_DOWN_H_

#include <type_traits>

#include "cpu/sparse_mlp/down_int8.h"
#include "cpu/sparse_mlp/elements.h"

namespace stof {
namespace cpu {
namespace STOF_ISA::sparse_mlp {

constexpr int kDownRows = 8;
constexpr int64_t kFewTokens = 8;             // whose rows are read in place, kDownRows at a time
constexpr int64_t kRowsOfSeveralTokens = 16;  // of more tokens: their sums leave the L1 cache
constexpr int64_t kDownColumns = 512;         // of a piece of converted rows
constexpr int64_t kConvertedRows = 64;        // sums are loaded and stored once for so many rows; a bit each of a word
constexpr int kDownVectors = 2;               // of a tile of columns and tokens
constexpr int kDownTokens = STOF_DOWN_TOKENS;
constexpr int kNeededVectors = 8;  // of a token's sums: as many independent chains of FMAs
// If more percent of the tokens need a row, adding it to all of them is faster.
constexpr int64_t kDensePercent = 55;
constexpr int64_t kLeastDenseTokens = 3;  // of a block: fewer are added one by one
static_assert(kMlpTokens == 64 && kConvertedRows <= 64, "tokens and rows are bits of a word");

// Transposes 64 words of 64 bits: bit i of word t becomes bit t of word i. Blocks off the diagonal change places, from
// 32 x 32 bits down to single bits.
inline void TransposeBits(uint64_t* bits) {
  uint64_t low = ~uint64_t{0} >> 32;
  for (int width = 32; width > 0; width /= 2, low ^= low << width) {
    for (int i = 0; i < 64; ++i) {
      if ((i & width) != 0) continue;
      const uint64_t moved = (bits[i] >> width ^ bits[i + width]) & low;
      bits[i + width] ^= moved;
      bits[i] ^= moved << width;
    }
  }
}

// sums[n] += h[0] * rows[0][n], then h[1] * rows[1][n] ...
template <typename E, int kCount>
void AddRows(const typename E::T* const* rows, const float* h, int64_t columns, float* sums) {
  V factor[kCount];
  const typename E::T* row[kCount];  // local: stores to sums cannot change them
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) factor[i] = Simd::Set1(h[i]), row[i] = rows[i];
  const auto add = [&](int64_t n) {
    V sum = Simd::Load(sums + n);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum = Simd::Fma(factor[i], E::Load(row[i] + n), sum);
    Simd::Store(sums + n, sum);
  };
  int64_t n = 0;
  for (; n + kWidth <= columns; n += kWidth) add(n);
  if (n == columns) return;
  float rest[kWidth] = {};
  std::copy(sums + n, sums + columns, rest);
  V sum = Simd::Load(rest);
  for (int i = 0; i < kCount; ++i) sum = Simd::Fma(factor[i], LoadFirst<E>(rows[i] + n, columns - n), sum);
  Simd::Store(rest, sum);
  std::copy(rest, rest + (columns - n), sums + n);
}

template <typename E, int kCount = kDownRows>
void AddSomeRows(int64_t count, const typename E::T* const* rows, const float* h, int64_t columns, float* sums) {
  if constexpr (kCount > 1) {
    if (count < kCount) return AddSomeRows<E, kCount - 1>(count, rows, h, columns, sums);
  }
  AddRows<E, kCount>(rows, h, columns, sums);
}

// The same for kTokens tokens that need all of `count` rows: kDownVectors vectors of columns stay in registers. h[t] is
// the first hidden value of a token, and h_stride leads to the next row's.
template <typename E, int kTokens>
void AddTile(const typename E::T* const* rows, int64_t count, const float* const* h, int64_t h_stride, int64_t n,
             float* const* sums) {
  V sum[kTokens][kDownVectors];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kDownVectors; ++v) sum[t][v] = Simd::Load(sums[t] + n + v * kWidth);
  }
  const float* of[kTokens];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) of[t] = h[t];
  for (int64_t i = 0; i < count; ++i) {
    V row[kDownVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kDownVectors; ++v) row[v] = E::Load(rows[i] + n + v * kWidth);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const V factor = Simd::Set1(of[t][i * h_stride]);
#pragma GCC unroll 2
      for (int v = 0; v < kDownVectors; ++v) sum[t][v] = Simd::Fma(factor, row[v], sum[t][v]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kDownVectors; ++v) Simd::Store(sums[t] + n + v * kWidth, sum[t][v]);
  }
}

template <typename E, int kTokens = kDownTokens>
void AddSomeTile(int64_t tokens, const typename E::T* const* rows, int64_t count, const float* const* h,
                 int64_t h_stride, int64_t n, float* const* sums) {
  if constexpr (kTokens > 1) {
    if (tokens < kTokens) return AddSomeTile<E, kTokens - 1>(tokens, rows, count, h, h_stride, n, sums);
  }
  AddTile<E, kTokens>(rows, count, h, h_stride, n, sums);
}

// Active neurons of a part, kConvertedRows at most, and columns of their rows.
class DownGroup {
 public:
  // Neurons [first, last) of the list; those before `end` come next.
  DownGroup(const MlpBlock& block, float* sums, int64_t first, int64_t last, int64_t end)
      : b_(block), sums_(sums), first_(first), count_(last - first), end_(end) {}

  // The rows are read where they are.
  template <typename E>
  void AddInPlace(int64_t n, int64_t columns) {
    const typename E::T* rows[kConvertedRows];
    for (int64_t i = 0; i < count_; ++i) {
      rows[i] = reinterpret_cast<const typename E::T*>(Row(first_ + i, n));
      PrefetchStart(Row(std::min(first_ + count_ + i, end_ - 1), n));
    }
    AddTokens<E>(rows, n, columns, false);
  }

  // The rows are converted first, at most kDownColumns of them, to `converted`.
  void AddConverted(int64_t n, int64_t columns, float* converted) {
    const float* rows[kConvertedRows];
    // Pieces of rows are too short for the hardware to prefetch.
    AddNext(n, BytesOf(b_.down, columns));
    for (int64_t i = 0; i < count_; ++i) {
      LoadDownRow(b_.down, b_.neurons[first_ + i], n, columns, converted + i * kConvertedStride);
      rows[i] = converted + i * kConvertedStride;
    }
    AddTokens<Fp32Element>(rows, n, columns, true);
  }

  // Rows of a multiple of 4 KiB would share cache sets.
  static constexpr int64_t kConvertedStride = kDownColumns + 16;

 private:
  // Pieces of the rows that come next, as many as the queue takes.
  void AddNext(int64_t n, int64_t bytes) {
    const int64_t next = first_ + count_;
    for (int64_t i = next; i < std::min(end_, next + count_); ++i) ahead_.Add(Row(i, n), 0, 1, bytes);
  }

  const char* Row(int64_t i, int64_t n) const {
    return b_.down.data + b_.neurons[i] * b_.down.stride + BytesOf(b_.down, n);
  }

  // The tokens to which all rows are added: those that need all of them. Where most pairs of a row and a token are
  // needed, these are all tokens: hidden values of the others are 0, which changes no sum of finite weights. A sum of
  // -0 may become 0; Finish makes it 0 always.
  template <typename E>
  uint64_t DenseTokens(const typename E::T* const* rows, int64_t columns, bool is_converted) const {
    const uint64_t every = BitsOfTokens(b_.tokens);
    uint64_t all = every;
    int64_t pairs = 0;
    for (int64_t i = 0; i < count_; ++i) {
      all &= b_.list_masks[first_ + i];
      pairs += __builtin_popcountll(b_.list_masks[first_ + i]);
    }
    // Rows of a few tokens would come to the caches twice.
    const bool is_dense =
        (is_converted || b_.tokens > kFewTokens) && all != every && 100 * pairs > kDensePercent * count_ * b_.tokens;
    return is_dense && AreFinite<E>(rows, columns) ? every : all;
  }

  template <typename E>
  bool AreFinite(const typename E::T* const* rows, int64_t columns) const {
    const V zero = Simd::Set1(0.0f);
    V sum = zero;  // infinity times 0 is NaN
    for (int64_t i = 0; i < count_; ++i) {
      int64_t n = 0;
      for (; n + kWidth <= columns; n += kWidth) sum = Simd::Fma(E::Load(rows[i] + n), zero, sum);
      if (n < columns) sum = Simd::Fma(LoadFirst<E>(rows[i] + n, columns - n), zero, sum);
    }
    return Simd::ReduceAdd(sum) == 0.0f;
  }

  // Adds all rows to some tokens, kDownTokens at a time. Returns these tokens as bits.
  template <typename E>
  uint64_t AddDense(const typename E::T* const* rows, int64_t n, int64_t columns, bool is_converted) {
    if (b_.tokens < kLeastDenseTokens) return 0;
    const uint64_t all = DenseTokens<E>(rows, columns, is_converted);
    if ((all & (all - 1)) == 0) return 0;  // no token, or one: a tile would read the rows for it alone
    const float* h[kMlpTokens];
    float* sums[kMlpTokens];
    int64_t count = 0;
    for (uint64_t left = all; left != 0; left &= left - 1) {
      const int t = __builtin_ctzll(left);
      h[count] = b_.hidden + first_ * b_.tokens + t;
      sums[count++] = sums_ + t * b_.sums_stride + n;
    }
    constexpr int64_t kStep = kDownVectors * kWidth;
    const int64_t whole = columns / kStep * kStep, tiles = (count + kDownTokens - 1) / kDownTokens;
    const int64_t lines = whole > 0 ? ahead_.lines() * kStep / whole + 1 : 0;
    for (int64_t c = 0; c < whole; c += kStep) {
      ahead_.Fetch(lines);
      for (int64_t i = 0; i < tiles; ++i) {  // of as many tokens each, give or take one
        const int64_t t = count * i / tiles;
        AddSomeTile<E>(count * (i + 1) / tiles - t, rows, count_, h + t, b_.tokens, c, sums + t);
      }
    }
    if (whole == columns) return all;
    const typename E::T* rest[kConvertedRows];
    for (int64_t i = 0; i < count_; ++i) rest[i] = rows[i] + whole;
    for (int64_t t = 0; t < count; ++t) {
      float factors[kConvertedRows];
      for (int64_t i = 0; i < count_; ++i) factors[i] = h[t][i * b_.tokens];
      AddEach<E>(count_, rest, factors, columns - whole, sums[t] + whole);
    }
    return all;
  }

  template <typename E>
  static void AddEach(int64_t count, const typename E::T* const* rows, const float* h, int64_t columns, float* sums) {
    for (int64_t i = 0; i < count; i += kDownRows) {
      AddSomeRows<E>(std::min<int64_t>(kDownRows, count - i), rows + i, h + i, columns, sums);
    }
  }

  // Adds to each token the rows that it needs, except to the tokens `done`. rows: fp32, kConvertedStride apart.
  void AddNeeded(const float* rows, uint64_t done, int64_t n, int64_t columns) {
    uint64_t needed[kMlpTokens];  // by token, a bit for each row
    std::fill(needed, needed + kMlpTokens, uint64_t{0});
    std::copy(b_.list_masks + first_, b_.list_masks + first_ + count_, needed);
    TransposeBits(needed);
    constexpr int64_t kStep = kNeededVectors * kWidth;
    const int64_t whole = columns / kStep * kStep;
    const int64_t lines = ahead_.lines() * kStep / std::max(kStep, columns) / b_.tokens + 1;
    for (int64_t c = 0; c < whole; c += kStep) {
      for (int64_t t = 0; t < b_.tokens; ++t) {
        if ((done >> t & 1) != 0 || needed[t] == 0) continue;
        ahead_.Fetch(lines);
        float* const sums = sums_ + t * b_.sums_stride + n + c;
        const float* const h = b_.hidden + first_ * b_.tokens + t;
        V sum[kNeededVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kNeededVectors; ++v) sum[v] = Simd::Load(sums + v * kWidth);
        for (uint64_t left = needed[t]; left != 0; left &= left - 1) {
          const int64_t i = __builtin_ctzll(left);
          const V factor = Simd::Set1(h[i * b_.tokens]);
          const float* const row = rows + i * kConvertedStride + c;
#pragma GCC unroll 8
          for (int v = 0; v < kNeededVectors; ++v) sum[v] = Simd::Fma(factor, Simd::Load(row + v * kWidth), sum[v]);
        }
#pragma GCC unroll 8
        for (int v = 0; v < kNeededVectors; ++v) Simd::Store(sums + v * kWidth, sum[v]);
      }
    }
    for (int64_t t = 0; t < b_.tokens && whole < columns; ++t) {
      if ((done >> t & 1) != 0) continue;
      const float* rest[kConvertedRows];
      float h[kConvertedRows];
      int64_t count = 0;
      for (uint64_t left = needed[t]; left != 0; left &= left - 1) {
        const int64_t i = __builtin_ctzll(left);
        rest[count] = rows + i * kConvertedStride + whole;
        h[count++] = b_.hidden[(first_ + i) * b_.tokens + t];
      }
      AddEach<Fp32Element>(count, rest, h, columns - whole, sums_ + t * b_.sums_stride + n + whole);
    }
  }

  template <typename E>
  void AddTokens(const typename E::T* const* rows, int64_t n, int64_t columns, bool is_converted) {
    const uint64_t done = AddDense<E>(rows, n, columns, is_converted);
    if constexpr (std::is_same_v<E, Fp32Element>) {
      if (is_converted) return AddNeeded(rows[0], done, n, columns);
    }
    const int64_t lines = ahead_.lines() / b_.tokens + 1;
    for (int64_t t = 0; t < b_.tokens; ++t) {
      if ((done >> t & 1) != 0) continue;
      const typename E::T* needed[kConvertedRows];
      float h[kConvertedRows];
      int64_t count = 0;
      for (int64_t i = 0; i < count_; ++i) {
        if ((b_.list_masks[first_ + i] >> t & 1) == 0) continue;
        needed[count] = rows[i];
        h[count++] = b_.hidden[(first_ + i) * b_.tokens + t];
      }
      ahead_.Fetch(lines);
      AddEach<E>(count, needed, h, columns, sums_ + t * b_.sums_stride + n);
    }
  }

  const MlpBlock& b_;
  float* const sums_;
  const int64_t first_, count_, end_;
  PrefetchQueueOf<kConvertedRows> ahead_;
};

inline void Down(const MlpBlock& b, int64_t part, int64_t begin, int64_t end) {
  if (b.down.bits > 0 && b.args->accuracy_level == 4) return DownInt8(b, part, begin, end);
  const int64_t first = b.part_begin[part], last = b.part_begin[part + 1], count = last - first;
  float* const sums = b.sums + part * b.tokens * b.sums_stride;
  for (int64_t t = 0; t < b.tokens; ++t) {
    std::fill(sums + t * b.sums_stride + begin, sums + t * b.sums_stride + end, 0.0f);
  }
  // Rows are read in place where there are not many tokens: whole rows come from memory faster. Many tokens read pieces
  // of rows that are converted to a buffer in the caches: rows of a multiple of 4 KiB would share cache sets.
  const bool is_in_place = b.down.bits == 0 && b.tokens < (b.down.dtype == DType::kF32 ? kManyTokens : 3);
  const int64_t step = is_in_place ? std::max<int64_t>(1, end - begin) : kDownColumns;
  const int64_t rows = !is_in_place ? kConvertedRows : b.tokens > kFewTokens ? kRowsOfSeveralTokens : kDownRows;
  const int64_t groups = (count + rows - 1) / rows;
  alignas(64) float converted[kConvertedRows * DownGroup::kConvertedStride];
  for (int64_t n = begin; n < end; n += step) {
    const int64_t columns = std::min(step, end - n);
    for (int64_t g = 0; g < groups; ++g) {  // of as many rows each, give or take one
      DownGroup group(b, sums, first + count * g / groups, first + count * (g + 1) / groups, last);
      if (is_in_place) {
        WithElement(b.down.dtype, [&](auto element) { group.template AddInPlace<decltype(element)>(n, columns); });
      } else {
        group.AddConverted(n, columns, converted);
      }
    }
  }
}

inline void Finish(const MlpBlock& b, int64_t token, int64_t begin, int64_t end) {
  const SparseMlpArgs& a = *b.args;
  float* const y = b.sums + token * b.sums_stride;
  for (int64_t part = 1; part < kMlpParts; ++part) {
    const float* const more = y + part * b.tokens * b.sums_stride;
    for (int64_t n = begin; n < end; ++n) y[n] += more[n];
  }
  for (int64_t n = begin; n < end; ++n) y[n] += 0.0f;  // -0, where all terms underflow, becomes 0
  if (a.down_bias != nullptr) {
    for (int64_t n = begin; n < end; ++n) y[n] += ToFloat(a.down_bias, a.dtype, n);
  }
  FromFloats(y + begin, a.dtype, end - begin, b.output + (token * a.N + begin) * SizeOf(a.dtype));
}

}  // namespace STOF_ISA::sparse_mlp
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOWN_H_
