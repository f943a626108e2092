// SPDX-License-Identifier: Apache-2.0
// Dot products of weight rows and many tokens: tiles of kDotPanels panels of kPanelTokens tokens, and pairs.
//
// Where most tokens need the rows of a group, a tile is a dense matmul: it also computes tokens that do not need a row,
// and a dot product adds its terms one by one, in their order. Elsewhere each pair of a row and a token that needs it
// is computed alone.
#ifndef STOF_CPU_SPARSE_MLP_DOTS_MANY_TOKENS_H_
#define STOF_CPU_SPARSE_MLP_DOTS_MANY_TOKENS_H_

#include "cpu/sparse_mlp/dots.h"
#include "cpu/sparse_mlp/sparse_mlp_bf16.h"

namespace stof {
namespace cpu {
namespace {

constexpr int kDotPanels = Simd::kDotPanels;
constexpr int kPanelVectors = kPanelTokens / kWidth;
static_assert(kPanelTokens % kWidth == 0, "a panel is whole vectors");
constexpr int64_t kSlabRows = 12;                              // whose slabs are read at a time
constexpr int64_t kPanelDepth = 256 / ((kDotPanels + 1) / 2);  // panels of a tile stay in the L1 cache
constexpr int64_t kPrefetchDepth = 16;  // values of a row between two prefetches: a cache line of fp32
constexpr int64_t kPairRows = 24;
// The same for panels. With more tokens, multiplications take more of the time and waiting for rows less, so pairs that
// are not needed cost more.
constexpr int64_t kPanelPercent = 45;
constexpr int64_t kPanelPercentOfFewer = kWidth >= 16 ? 25 : 45, kFewerTokens = 48;
// The same for panels in bf16, whose dense tiles take half of the time or less. Pairs are multiplied in fp32.
constexpr int64_t kBf16DensePercent = 15;
static_assert(kMlpNeurons % kPairRows == 0, "the rows of a task are whole groups");

// Rows of a tile. Its rows * panels * kPanelVectors accumulators fit the registers: AVX-512 12 * 2 or 6 * 4, AVX2 6 *
// 2, NEON 6 * 4, portable 2 * 4.
constexpr int RowsOfTile(int panels) { return kDotPanels > 1 && panels <= 2 ? 12 : Simd::kPanelRows; }

// sums[i * kMlpTokens + t] += w[i] · token t. Meanwhile next[i] is prefetched, next_step bytes for kPrefetchDepth
// values.
template <int kPanels>
void PanelTile(const float* const* w, const float* x, int64_t panel_stride, int64_t depth, const char* const* next,
               int64_t next_step, float* sums) {
  constexpr int kRows = RowsOfTile(kPanels), kVectors = kPanels * kPanelVectors;
  V sum[kRows][kVectors];
  const float* row[kRows];
  int64_t next_at = 0;
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    row[i] = w[i];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[i][v] = Simd::Load(sums + i * kMlpTokens + v * kWidth);
  }
  for (int64_t k0 = 0; k0 < depth; k0 += kPrefetchDepth, next_at += next_step) {
    for (int i = 0; i < kRows; ++i) __builtin_prefetch(next[i] + next_at, 0, 2);
    const int64_t end = Min(depth, k0 + kPrefetchDepth);
    int64_t k = k0;
#if defined(STOF_NEON)
    for (; k + 4 <= end; k += 4) {
      AddFourSteps([&](int i) { return Simd::Load(row[i] + k); },
                   [&](int step, int v) {
                     return Simd::Load(x + v / kPanelVectors * panel_stride + (k + step) * kPanelTokens +
                                       v % kPanelVectors * kWidth);
                   },
                   sum);
    }
#endif
    for (; k < end; ++k) {
      V y[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        y[v] = Simd::Load(x + v / kPanelVectors * panel_stride + k * kPanelTokens + v % kPanelVectors * kWidth);
      }
#pragma GCC unroll 12
      for (int i = 0; i < kRows; ++i) {
        const V value = Simd::Set1(row[i][k]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[i][v] = Simd::Fma(value, y[v], sum[i][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) Simd::Store(sums + i * kMlpTokens + v * kWidth, sum[i][v]);
  }
}

// Multiplies kSlabRows rows by `panels` panels, kPanels of them at a time.
template <int kPanels = kDotPanels>
void PanelTiles(int64_t panels, const float* const* w, const float* x, int64_t panel_stride, int64_t depth,
                const char* const* next, int64_t next_step, float* sums) {
  if constexpr (kPanels > 1) {
    if (panels < kPanels) {
      return PanelTiles<kPanels - 1>(panels, w, x, panel_stride, depth, next, next_step, sums);
    }
  }
  for (int64_t i = 0; i < kSlabRows; i += RowsOfTile(kPanels)) {
    PanelTile<kPanels>(w + i, x, panel_stride, depth, next + i, next_step, sums + i * kMlpTokens);
  }
  if (panels > kPanels) {
    PanelTiles(panels - kPanels, w, x + kPanels * panel_stride, panel_stride, depth, next, next_step,
               sums + kPanels * kPanelTokens);
  }
}

// Queues what is read after a slab of rows [first, first + count): their next slab, or, after the last one, the first
// slab of the next `count` rows.
template <typename Queue>
void AddNextSlabs(const DotProblem& problem, int64_t first, int64_t count, int64_t k0, int64_t depth, Queue* queue) {
  const NeuronRows& rows = problem.rows;
  const bool is_last = k0 + depth == rows.size;
  const int64_t next = is_last ? 0 : k0 + depth;
  for (int64_t i = first; i < first + count; ++i) {
    const int64_t row = is_last ? i + count : i;
    if (row >= problem.count) break;
    queue->Add(rows.data + NeuronOf(problem, row) * rows.stride + BytesOf(rows, next), 0, 1,
               BytesOf(rows, Min(kDotDepth, rows.size - next)));
  }
}

// Values [k0, k0 + depth) of row i in fp32: in place where the weight is fp32, else converted to a buffer.
inline const float* RowSlab(const DotProblem& problem, int64_t i, int64_t k0, int64_t depth, float* buffer) {
  const NeuronRows& rows = problem.rows;
  const int64_t neuron = NeuronOf(problem, i);
  if (rows.bits == 0 && rows.dtype == DType::kF32) {
    return reinterpret_cast<const float*>(rows.data + neuron * rows.stride) + k0;
  }
  LoadRow(rows, neuron, k0, depth, buffer);
  return buffer;
}

// Dense: rows [first, last), at most kSlabRows of them, and all tokens.
class PanelGroup {
 public:
  PanelGroup(const DotProblem& problem, int64_t first, int64_t last)
      : p_(problem), first_(first), count_(last - first) {}

  void Run(float* out, int64_t row_stride, int64_t token_stride) {
    const int64_t size = p_.rows.size, panels = (p_.tokens + kPanelTokens - 1) / kPanelTokens;
    Fill(sums_, sums_ + kSlabRows * kMlpTokens, 0.0f);
    const float* w[kSlabRows];
    for (int64_t k0 = 0; k0 < size; k0 += kDotDepth) {
      const int64_t depth = Min(kDotDepth, size - k0);
      for (int64_t i = 0; i < kSlabRows; ++i) {  // rows that are missing repeat the last one
        w[i] = i < count_ ? RowSlab(p_, first_ + i, k0, depth, slab_ + i * kSlabStride) : w[i - 1];
      }
      const char* next[kSlabRows];  // the slab that is read after this one
      const bool is_last = k0 + depth == size;
      for (int64_t i = 0; i < kSlabRows; ++i) {
        const int64_t row = Min(is_last ? first_ + count_ + i : first_ + Min(i, count_ - 1), p_.count - 1);
        next[i] = p_.rows.data + NeuronOf(p_, row) * p_.rows.stride + BytesOf(p_.rows, is_last ? 0 : k0 + depth);
      }
      for (int64_t k = 0; k < depth; k += kPanelDepth) {
        const float* some[kSlabRows];
        const char* some_next[kSlabRows];
        for (int64_t i = 0; i < kSlabRows; ++i) some[i] = w[i] + k, some_next[i] = next[i] + BytesOf(p_.rows, k);
        PanelTiles(panels, some, p_.x_panels + (k0 + k) * kPanelTokens, size * kPanelTokens,
                   Min(kPanelDepth, depth - k), some_next, BytesOf(p_.rows, kPrefetchDepth), sums_);
      }
    }
    if (row_stride == 1) {  // token by token: tokens a multiple of 4 KiB apart share cache sets
      for (int64_t t = 0; t < p_.tokens; ++t) {
        for (int64_t i = 0; i < count_; ++i) out[i + t * token_stride] = sums_[i * kMlpTokens + t];
      }
      return;
    }
    for (int64_t i = 0; i < count_; ++i) {
      for (int64_t t = 0; t < p_.tokens; ++t) out[i * row_stride + t * token_stride] = sums_[i * kMlpTokens + t];
    }
  }

 private:
  const DotProblem& p_;
  const int64_t first_, count_;
  alignas(64) float sums_[kSlabRows * kMlpTokens];
  alignas(64) float slab_[kSlabRows * kSlabStride];
};

// Sparse: rows [first, last), at most kPairRows of them, and the tokens that need each. A piece of a row stays in
// registers while it is multiplied with its tokens, and the same piece of all tokens stays in the L1 cache.
class PairGroup {
 public:
  PairGroup(const DotProblem& problem, int64_t first, int64_t last)
      : p_(problem),
        first_(first),
        count_(last - first),
        pair_count_(CountPairs(problem.masks + first, last - first)) {}

  void Run(float* out, int64_t row_stride, int64_t token_stride) {
    Fill(sums_, sums_ + pair_count_, Simd::Set1(0.0f));
    const int64_t size = p_.rows.size;
    for (int64_t k0 = 0; k0 < size; k0 += kDotDepth) RunSlab(k0, Min(kDotDepth, size - k0));
    const V* sum = sums_;
    for (int64_t i = 0; i < count_; ++i) {
      for (uint64_t left = p_.masks[first_ + i]; left != 0; left &= left - 1) {
        out[i * row_stride + __builtin_ctzll(left) * token_stride] = Simd::ReduceAdd(*sum++);
      }
    }
  }

 private:
  static constexpr int kVectors = Simd::kPairVectors;  // of a piece of a row

  void RunSlab(int64_t k0, int64_t depth) {
    const float* w[kPairRows];
    for (int64_t i = 0; i < count_; ++i) w[i] = RowSlab(p_, first_ + i, k0, depth, slab_ + i * kSlabStride);
    ahead_.Clear();
    AddNextSlabs(p_, first_, count_, k0, depth, &ahead_);
    constexpr int64_t kPiece = kVectors * kWidth;
    const int64_t lines = ahead_.lines() * kPiece / (depth * count_) + 1;
    int64_t k = 0;
    for (; k + kPiece <= depth; k += kPiece) AddPieces<kVectors>(w, k, k0 + k, lines);
    for (; k + kWidth <= depth; k += kWidth) AddPieces<1>(w, k, k0 + k, lines);
    if (k == depth) return;
    alignas(64) float rest[kPairRows][kWidth];  // the ends of rows, which in place have no padding
    const float* ends[kPairRows];
    for (int64_t i = 0; i < count_; ++i) {
      Simd::Store(rest[i], LoadFirst<Fp32Element>(w[i] + k, depth - k));
      ends[i] = rest[i];
    }
    AddPieces<1>(ends, 0, k0 + k, lines);
  }

  // Vectors k ... of each w, values x_k ... of the tokens.
  template <int kCount>
  void AddPieces(const float* const* w, int64_t k, int64_t x_k, int64_t lines) {
    const float* const x = p_.x + x_k;
    V* at = sums_;
    for (int64_t i = 0; i < count_; ++i) {
      ahead_.Fetch(lines);
      V piece[kCount];
#pragma GCC unroll 16
      for (int v = 0; v < kCount; ++v) piece[v] = Simd::Load(w[i] + k + v * kWidth);
      for (uint64_t left = p_.masks[first_ + i]; left != 0; left &= left - 1) {
        const float* const token = x + __builtin_ctzll(left) * p_.x_stride;
        V sum = *at;
#pragma GCC unroll 16
        for (int v = 0; v < kCount; ++v) sum = Simd::Fma(piece[v], Simd::Load(token + v * kWidth), sum);
        *at++ = sum;
      }
    }
  }

  const DotProblem& p_;
  const int64_t first_, count_, pair_count_;
  PrefetchQueueOf<kPairRows> ahead_;
  V sums_[kPairRows * kMlpTokens];  // of the pairs, in their order
  alignas(64) float slab_[kPairRows * kSlabStride];
};

// Whether so many tokens need the rows of a group that computing all of them is faster.
inline bool IsDenseGroup(const DotProblem& problem, int64_t first, int64_t last) {
  if (problem.masks == nullptr) return true;
  const int64_t pairs = CountPairs(problem.masks + first, last - first);
  const int64_t percent = problem.x_bf16 != nullptr        ? kBf16DensePercent
                          : problem.tokens <= kFewerTokens ? kPanelPercentOfFewer
                                                           : kPanelPercent;
  return 100 * pairs > percent * (last - first) * problem.tokens;
}

// Dense groups that lie together are multiplied by instructions for bf16, pairs in fp32. All have tokens in bf16.
inline void DotsOfBf16Tokens(const DotProblem& problem, int64_t first, int64_t last, float* out, int64_t row_stride,
                             int64_t token_stride) {
  int64_t dense = first;  // the first row that is not multiplied yet
  const auto multiply_before = [&](int64_t end) {
    if (dense == end) return;
    problem.bf16->dots(problem, dense, end, out + (dense - first) * row_stride, row_stride, token_stride);
  };
  for (int64_t i = first; i < last; i += kPairRows) {
    const int64_t end = Min(last, i + kPairRows);
    if (IsDenseGroup(problem, i, end)) continue;
    multiply_before(i);
    PairGroup(problem, i, end).Run(out + (i - first) * row_stride, row_stride, token_stride);
    dense = end;
  }
  multiply_before(last);
}

inline void DotsFp32(const DotProblem& problem, int64_t first, int64_t last, float* out, int64_t row_stride,
                     int64_t token_stride) {
  if (problem.x_bf16 != nullptr) return DotsOfBf16Tokens(problem, first, last, out, row_stride, token_stride);
  if (problem.x_panels == nullptr) return DotRowGroups(problem, first, last, out, row_stride, token_stride);
  static_assert(kPairRows % kSlabRows == 0, "rows of pairs are rows of panels");
  for (int64_t i = first; i < last; i += kPairRows) {
    const int64_t end = Min(last, i + kPairRows);
    if (!IsDenseGroup(problem, i, end)) {
      PairGroup(problem, i, end).Run(out + (i - first) * row_stride, row_stride, token_stride);
      continue;
    }
    for (int64_t j = i; j < end; j += kSlabRows) {
      PanelGroup group(problem, j, Min(end, j + kSlabRows));
      group.Run(out + (j - first) * row_stride, row_stride, token_stride);
    }
  }
}

// panel[k, t] = x[t, k], 0 for tokens that are missing.
inline void FillPanel(const float* x, int64_t stride, int64_t tokens, int64_t size, float* panel) {
  for (int64_t k = 0; k < size; ++k) {
    float* const to = panel + k * kPanelTokens;
    for (int64_t t = 0; t < tokens; ++t) to[t] = x[t * stride + k];
    for (int64_t t = tokens; t < kPanelTokens; ++t) to[t] = 0.0f;
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOTS_MANY_TOKENS_H_
