// SPDX-License-Identifier: Apache-2.0
// Sums of down rows, weighted by hidden values.
//
// A part's sum adds the active neurons of the part one by one, in their order, and the output adds the parts. So a
// token's result depends neither on threads nor on other tokens.
#ifndef STOF_CPU_SPARSE_MLP_DOWN_H_
#define STOF_CPU_SPARSE_MLP_DOWN_H_

#include "cpu/sparse_mlp/elements.h"

namespace stof {
namespace cpu {
namespace {

// fp32 rows are read in place, as are fp16 and bf16 rows where one tile has all tokens. Few tokens add kDownRows whole
// rows at a time, others kPieceColumns columns of kGroupRows rows, which stay in the L1 cache for all tokens.
constexpr int kDownRows = 8;
constexpr int64_t kFewTokens = 4, kGroupRows = 16, kPieceColumns = 256;
// The sums of all tokens stay in the L2 cache: so many bytes of them, but kLeastColumns columns, since short pieces of
// rows come from memory more slowly.
constexpr int64_t kSumBytes = 1 << 20, kLeastColumns = 1024;
// Other rows are converted once for all tokens, kMostGroupRows at a time: a 64-bit word has a bit for each.
constexpr int64_t kMostGroupRows = 64, kConvertedColumns = 512;
constexpr int kDownVectors = 2;  // of a tile of columns and tokens
constexpr int kDownTokens = Simd::kDownTokens;
constexpr int kNeededVectors = 8;  // of a token's sums: as many independent chains of FMAs
// If more percent of the tokens need the rows of a group, adding them to all tokens is faster. Rows in place are always
// added to all of few tokens: it takes no longer than the rows take to arrive. A single token has no tile.
constexpr int64_t kDensePercent = 45, kDenseConvertedPercent = 60;
constexpr int64_t kAlwaysDenseTokens = kWidth >= 16 ? 16 : 8, kLeastDenseTokens = 2;
static_assert(kMlpTokens == 64 && kMostGroupRows <= 64, "tokens and rows are bits of a word");

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
  Copy(sums + n, sums + columns, rest);
  V sum = Simd::Load(rest);
  for (int i = 0; i < kCount; ++i) sum = Simd::Fma(factor[i], LoadFirst<E>(rows[i] + n, columns - n), sum);
  Simd::Store(rest, sum);
  Copy(rest, rest + (columns - n), sums + n);
}

template <typename E, int kCount = kDownRows>
void AddSomeRows(int64_t count, const typename E::T* const* rows, const float* h, int64_t columns, float* sums) {
  if constexpr (kCount > 1) {
    if (count < kCount) return AddSomeRows<E, kCount - 1>(count, rows, h, columns, sums);
  }
  AddRows<E, kCount>(rows, h, columns, sums);
}

// Adds `count` rows to the sums of kTokens tokens: kDownVectors vectors of columns stay in registers. h: the first
// token's hidden value of the first row; h_stride leads to the next row's. A piece of each next[i], from byte next_at
// on, is prefetched: the columns of a tile lie in kTileLines cache lines.
template <typename E, int kTokens>
void AddTile(const typename E::T* const* rows, int64_t count, const float* h, int64_t h_stride, int64_t n, float* sums,
             int64_t sums_stride, const char* const* next, int64_t next_at) {
  constexpr int kTileLines = (kDownVectors * kWidth * sizeof(typename E::T) + 63) / 64;
  V sum[kTokens][kDownVectors];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kDownVectors; ++v) sum[t][v] = Simd::Load(sums + t * sums_stride + n + v * kWidth);
  }
  for (int64_t i = 0; i < count; ++i) {
    V row[kDownVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kDownVectors; ++v) row[v] = E::Load(rows[i] + n + v * kWidth);
#pragma GCC unroll 2
    for (int line = 0; line < kTileLines; ++line) __builtin_prefetch(next[i] + next_at + line * 64, 0, 2);
#if defined(STOF_NEON)
    AddStep(h + i * h_stride, row, sum);
#else
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const V factor = Simd::Set1(h[i * h_stride + t]);
#pragma GCC unroll 2
      for (int v = 0; v < kDownVectors; ++v) sum[t][v] = Simd::Fma(factor, row[v], sum[t][v]);
    }
#endif
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kDownVectors; ++v) Simd::Store(sums + t * sums_stride + n + v * kWidth, sum[t][v]);
  }
}

template <typename E, int kTokens = kDownTokens>
void AddSomeTile(int64_t tokens, const typename E::T* const* rows, int64_t count, const float* h, int64_t h_stride,
                 int64_t n, float* sums, int64_t sums_stride, const char* const* next, int64_t next_at) {
  if constexpr (kTokens > 1) {
    if (tokens < kTokens) {
      return AddSomeTile<E, kTokens - 1>(tokens, rows, count, h, h_stride, n, sums, sums_stride, next, next_at);
    }
  }
  AddTile<E, kTokens>(rows, count, h, h_stride, n, sums, sums_stride, next, next_at);
}

// Active neurons of a part, kMostGroupRows at most, and columns of their rows.
class DownGroup {
 public:
  // Neurons [first, last) of the list; those before `end` come next. The group is dense where more than dense_percent
  // of its pairs of a row and a token are needed, or all of them.
  DownGroup(const MlpBlock& block, float* sums, int64_t first, int64_t last, int64_t end, int64_t dense_percent)
      : b_(block), sums_(sums), first_(first), count_(last - first), end_(end) {
    const int64_t all = count_ * b_.tokens, pairs = CountPairs(b_.list_masks + first, count_);
    is_dense_ = b_.tokens >= kLeastDenseTokens && (pairs == all || 100 * pairs > dense_percent * all);
    has_added_idle_ = is_dense_ && pairs < all;
  }

  // Whether rows were added to tokens that do not need them.
  bool has_added_idle() const { return has_added_idle_; }

  // The rows are read where they are.
  template <typename E>
  void AddInPlace(int64_t n, int64_t columns) {
    const int64_t piece = b_.tokens <= kFewTokens ? columns : kPieceColumns;
    for (int64_t i = 0; i < count_; ++i) PrefetchStart(NextRow(i, n));
    for (int64_t c = 0; c < columns; c += piece) {
      const typename E::T* rows[kMostGroupRows];
      const bool is_last = c + piece >= columns;
      for (int64_t i = 0; i < count_; ++i) {
        rows[i] = reinterpret_cast<const typename E::T*>(Row(first_ + i, n + c));
        next_[i] = is_last ? NextRow(i, n) : Row(first_ + i, n + c + piece);
      }
      const int64_t some = Min(piece, columns - c);
      is_dense_ ? AddDense<E>(rows, n + c, some) : AddNeededInPlace<E>(rows, n + c, some);
    }
  }

  // The rows are converted first, at most kConvertedColumns of them, to `converted`.
  void AddConverted(int64_t n, int64_t columns, float* converted) {
    const float* rows[kMostGroupRows];
    // Pieces of rows are too short for the hardware to prefetch.
    if (!is_dense_) AddNext(n, BytesOf(b_.down, columns));
    for (int64_t i = 0; i < count_; ++i) {
      LoadDownRow(b_.down, b_.neurons[first_ + i], n, columns, converted + i * kConvertedStride);
      rows[i] = converted + i * kConvertedStride;
      next_[i] = NextRow(i, n);
    }
    is_dense_ ? AddDense<Fp32Element>(rows, n, columns) : AddNeeded(converted, n, columns);
  }

  // Rows of a multiple of 4 KiB would share cache sets.
  static constexpr int64_t kConvertedStride = kConvertedColumns + 16;

 private:
  // Pieces of the rows that come next, as many as the queue takes.
  void AddNext(int64_t n, int64_t bytes) {
    const int64_t next = first_ + count_;
    for (int64_t i = next; i < Min(end_, next + count_); ++i) ahead_.Add(Row(i, n), 0, 1, bytes);
  }

  const char* Row(int64_t i, int64_t n) const {
    return b_.down.data + b_.neurons[i] * b_.down.stride + BytesOf(b_.down, n);
  }
  // Row i of the group that comes next; of the last group some row.
  const char* NextRow(int64_t i, int64_t n) const { return Row(Min(first_ + count_ + i, end_ - 1), n); }

  // Adds all rows to all tokens, kDownTokens at a time. The hidden value of a token that does not need a row is 0,
  // which changes no sum of finite weights. A sum of -0 may become 0; Finish makes it 0 always.
  template <typename E>
  void AddDense(const typename E::T* const* rows, int64_t n, int64_t columns) {
    const float* const h = b_.hidden + first_ * b_.tokens;
    constexpr int64_t kStep = kDownVectors * kWidth;
    const int64_t whole = columns / kStep * kStep, tiles = (b_.tokens + kDownTokens - 1) / kDownTokens;
    for (int64_t c = 0; c < whole; c += kStep) {
      for (int64_t i = 0; i < tiles; ++i) {  // of as many tokens each, give or take one
        const int64_t t = b_.tokens * i / tiles;
        AddSomeTile<E>(b_.tokens * (i + 1) / tiles - t, rows, count_, h + t, b_.tokens, c,
                       sums_ + t * b_.sums_stride + n, b_.sums_stride, next_, BytesOf(b_.down, c));
      }
    }
    if (whole == columns) return;
    const typename E::T* rest[kMostGroupRows];
    for (int64_t i = 0; i < count_; ++i) rest[i] = rows[i] + whole;
    for (int64_t t = 0; t < b_.tokens; ++t) {
      float factors[kMostGroupRows];
      for (int64_t i = 0; i < count_; ++i) factors[i] = h[i * b_.tokens + t];
      AddEach<E>(count_, rest, factors, columns - whole, sums_ + t * b_.sums_stride + n + whole);
    }
  }

  template <typename E>
  static void AddEach(int64_t count, const typename E::T* const* rows, const float* h, int64_t columns, float* sums) {
    for (int64_t i = 0; i < count; i += kDownRows) {
      AddSomeRows<E>(Min(kDownRows, count - i), rows + i, h + i, columns, sums);
    }
  }

  // Adds to each token the rows that it needs. rows: fp32, kConvertedStride apart.
  void AddNeeded(const float* rows, int64_t n, int64_t columns) {
    uint64_t needed[kMlpTokens];  // by token, a bit for each row
    Fill(needed, needed + kMlpTokens, uint64_t{0});
    Copy(b_.list_masks + first_, b_.list_masks + first_ + count_, needed);
    TransposeBits(needed);
    constexpr int64_t kStep = kNeededVectors * kWidth;
    const int64_t whole = columns / kStep * kStep;
    const int64_t lines = ahead_.lines() * kStep / Max(kStep, columns) / b_.tokens + 1;
    for (int64_t c = 0; c < whole; c += kStep) {
      for (int64_t t = 0; t < b_.tokens; ++t) {
        if (needed[t] == 0) continue;
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
      const float* rest[kMostGroupRows];
      float h[kMostGroupRows];
      int64_t count = 0;
      for (uint64_t left = needed[t]; left != 0; left &= left - 1) {
        const int64_t i = __builtin_ctzll(left);
        rest[count] = rows + i * kConvertedStride + whole;
        h[count++] = b_.hidden[(first_ + i) * b_.tokens + t];
      }
      AddEach<Fp32Element>(count, rest, h, columns - whole, sums_ + t * b_.sums_stride + n + whole);
    }
  }

  // The same for rows of any element type, wherever they lie.
  template <typename E>
  void AddNeededInPlace(const typename E::T* const* rows, int64_t n, int64_t columns) {
    for (int64_t t = 0; t < b_.tokens; ++t) {
      const typename E::T* needed[kMostGroupRows];
      float h[kMostGroupRows];
      int64_t count = 0;
      for (int64_t i = 0; i < count_; ++i) {
        if ((b_.list_masks[first_ + i] >> t & 1) == 0) continue;
        needed[count] = rows[i];
        h[count++] = b_.hidden[(first_ + i) * b_.tokens + t];
      }
      AddEach<E>(count, needed, h, columns, sums_ + t * b_.sums_stride + n);
    }
  }

  const MlpBlock& b_;
  float* const sums_;
  const int64_t first_, count_, end_;
  bool is_dense_, has_added_idle_;
  const char* next_[kMostGroupRows];  // the place that is read after the current piece of each row
  PrefetchQueueOf<kMostGroupRows> ahead_;
};

// Columns [begin, end) of the sums of a part. adds_idle: rows may be added to tokens that do not need them, with hidden
// values of 0. Returns whether this happened.
inline bool AddPart(const MlpBlock& b, int64_t part, int64_t begin, int64_t end, bool adds_idle) {
  const int64_t first = b.part_begin[part], last = b.part_begin[part + 1], count = last - first;
  float* const sums = b.sums + part * b.tokens * b.sums_stride;
  for (int64_t t = 0; t < b.tokens; ++t) {
    Fill(sums + t * b.sums_stride + begin, sums + t * b.sums_stride + end, 0.0f);
  }
  // Rows of other types are converted once where several tiles read them.
  const bool is_in_place = b.down.bits == 0 && (b.down.dtype == DType::kF32 || b.tokens <= kDownTokens);
  const int64_t in_place_percent = b.tokens <= kAlwaysDenseTokens ? 0 : kDensePercent;
  const int64_t dense_percent = !adds_idle ? 100 : is_in_place ? in_place_percent : kDenseConvertedPercent;
  const bool has_few_tokens = b.tokens <= kFewTokens;
  // Whole rows come from memory faster than pieces of them.
  const int64_t in_l2 = kSumBytes / (b.tokens * static_cast<int64_t>(sizeof(float))) / kPieceColumns * kPieceColumns;
  const int64_t step = !is_in_place ? kConvertedColumns : Max(kLeastColumns, in_l2);
  const int64_t rows = !is_in_place ? kMostGroupRows : has_few_tokens ? kDownRows : kGroupRows;
  const int64_t groups = (count + rows - 1) / rows;
  bool has_added_idle = false;
  alignas(64) float converted[kMostGroupRows * DownGroup::kConvertedStride];
  for (int64_t n = begin; n < end; n += step) {
    const int64_t columns = Min(step, end - n);
    for (int64_t g = 0; g < groups; ++g) {  // of as many rows each, give or take one
      DownGroup group(b, sums, first + count * g / groups, first + count * (g + 1) / groups, last, dense_percent);
      if (is_in_place) {
        WithElement(b.down.dtype, [&](auto element) { group.template AddInPlace<decltype(element)>(n, columns); });
      } else {
        group.AddConverted(n, columns, converted);
      }
      has_added_idle |= group.has_added_idle();
    }
  }
  return has_added_idle;
}

inline bool AreFinite(const float* x, int64_t count) {
  const V zero = Simd::Set1(0.0f);
  V sum = zero;  // infinity times 0 is NaN
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) sum = Simd::Fma(Simd::Load(x + i), zero, sum);
  if (i < count) sum = Simd::Fma(LoadFirst<Fp32Element>(x + i, count - i), zero, sum);
  return Simd::ReduceAdd(sum) == 0.0f;
}

// Whether columns [begin, end) of all tokens' sums of a part are finite.
inline bool AreSumsFinite(const MlpBlock& b, int64_t part, int64_t begin, int64_t end) {
  const float* const sums = b.sums + part * b.tokens * b.sums_stride + begin;
  for (int64_t t = 0; t < b.tokens; ++t) {
    if (!AreFinite(sums + t * b.sums_stride, end - begin)) return false;
  }
  return true;
}

// Columns [begin, end) of the sums of a part, token by token.
inline void DownTokens(const MlpBlock& b, int64_t part, int64_t begin, int64_t end) {
  // A row that is not finite makes the sums of tokens that do not need it NaN: they are added again, without it.
  if (AddPart(b, part, begin, end, true) && !AreSumsFinite(b, part, begin, end)) AddPart(b, part, begin, end, false);
}

// y[t * kColumns + i] = the sum of all parts of column begin + i, at most kColumns of them.
template <int64_t kColumns>
void SumTokens(const MlpBlock& b, int64_t begin, int64_t end, float* y) {
  for (int64_t t = 0; t < b.tokens; ++t, y += kColumns) {
    const float* const sums = b.sums + t * b.sums_stride;
    Copy(sums + begin, sums + end, y);
    for (int64_t part = 1; part < kMlpParts; ++part) {
      const float* const more = sums + part * b.tokens * b.sums_stride + begin;
      for (int64_t i = 0; i < end - begin; ++i) y[i] += more[i];
    }
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOWN_H_
