// SPDX-License-Identifier: Apache-2.0
// Sums of down rows, weighted by hidden values. Included once per instruction set.
//
// An element of a part's sum adds the active neurons of the part one by one, in their order; the output adds the parts.
// So a token's result depends neither on threads nor on other tokens.
#ifndef STOF_CPU_SPARSE_MLP_DOWN_H_
#define STOF_CPU_SPARSE_MLP_DOWN_H_

#include "cpu/sparse_mlp/down_int8.h"
#include "cpu/sparse_mlp/elements.h"

namespace stof {
namespace cpu {
namespace STOF_ISA::sparse_mlp {

constexpr int kDownRows = 8;
constexpr int64_t kDownColumns = 512;  // kDownRows pieces of them fit a first-level cache

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

// Up to kDownRows active neurons of a part, and columns of their rows.
class DownGroup {
 public:
  // Neurons [first, last) of the list; those before `end` come next.
  DownGroup(const MlpBlock& block, float* sums, int64_t first, int64_t last, int64_t end)
      : b_(block), sums_(sums), first_(first), count_(last - first), end_(end) {}

  // The rows are read where they are.
  template <typename E>
  void AddInPlace(int64_t n, int64_t columns) {
    const typename E::T* rows[kDownRows];
    for (int64_t i = 0; i < count_; ++i) {
      rows[i] = reinterpret_cast<const typename E::T*>(Row(first_ + i, n));
      PrefetchStart(Row(std::min(first_ + count_ + i, end_ - 1), n));
    }
    AddTokens<E>(rows, n, columns);
  }

  // The rows are converted first, at most kDownColumns of them.
  void AddConverted(int64_t n, int64_t columns) {
    const float* rows[kDownRows];
    // Pieces of rows are too short for the hardware to prefetch.
    const int64_t bytes = b_.down.bits > 0 ? columns * b_.down.bits / 8 : columns * SizeOf(b_.down.dtype);
    for (int64_t i = first_ + count_; i < std::min(end_, first_ + 2 * count_); ++i) ahead_.Add(Row(i, n), 0, 1, bytes);
    for (int64_t i = 0; i < count_; ++i) {
      LoadDownRow(b_.down, b_.neurons[first_ + i], n, columns, converted_ + i * kDownColumns);
      rows[i] = converted_ + i * kDownColumns;
    }
    AddTokens<Fp32Element>(rows, n, columns);
  }

 private:
  const char* Row(int64_t i, int64_t n) const {
    const int64_t bytes = b_.down.bits > 0 ? n * b_.down.bits / 8 : n * SizeOf(b_.down.dtype);
    return b_.down.data + b_.neurons[i] * b_.down.stride + bytes;
  }

  template <typename E>
  void AddTokens(const typename E::T* const* rows, int64_t n, int64_t columns) {
    const int64_t lines = ahead_.lines() / b_.tokens + 1;
    for (int64_t t = 0; t < b_.tokens; ++t) {
      const typename E::T* needed[kDownRows];
      float h[kDownRows];
      int64_t count = 0;
      for (int64_t i = 0; i < count_; ++i) {
        if ((b_.list_masks[first_ + i] >> t & 1) == 0) continue;
        needed[count] = rows[i];
        h[count++] = b_.hidden[(first_ + i) * b_.tokens + t];
      }
      ahead_.Fetch(lines);
      if (count == 0) continue;
      AddSomeRows<E>(count, needed, h, columns, sums_ + t * b_.args->N + n);
    }
  }

  const MlpBlock& b_;
  float* const sums_;
  const int64_t first_, count_, end_;
  PrefetchQueue ahead_;
  alignas(64) float converted_[kDownRows * kDownColumns];
};

inline void Down(const MlpBlock& b, int64_t part, int64_t begin, int64_t end) {
  if (b.down.bits > 0 && b.args->accuracy_level == 4) return DownInt8(b, part, begin, end);
  const int64_t N = b.args->N, first = b.part_begin[part], last = b.part_begin[part + 1], count = last - first;
  float* const sums = b.sums + part * b.tokens * N;
  for (int64_t t = 0; t < b.tokens; ++t) std::fill(sums + t * N + begin, sums + t * N + end, 0.0f);
  // Whole rows come from memory faster. What many tokens read is copied in pieces that fit the caches: rows of a
  // multiple of 4 KiB would share cache sets.
  const bool is_in_place = b.down.bits == 0 && b.tokens <= (b.down.dtype == DType::kF32 ? 8 : 2);
  const int64_t step = is_in_place ? std::max<int64_t>(1, end - begin) : kDownColumns;
  const int64_t groups = (count + kDownRows - 1) / kDownRows;
  for (int64_t n = begin; n < end; n += step) {
    const int64_t columns = std::min(step, end - n);
    for (int64_t g = 0; g < groups; ++g) {  // of as many rows each, give or take one
      DownGroup group(b, sums, first + count * g / groups, first + count * (g + 1) / groups, last);
      if (is_in_place) {
        WithElement(b.down.dtype, [&](auto element) { group.template AddInPlace<decltype(element)>(n, columns); });
      } else {
        group.AddConverted(n, columns);
      }
    }
  }
}

inline void Finish(const MlpBlock& b, int64_t token, int64_t begin, int64_t end) {
  const SparseMlpArgs& a = *b.args;
  float* const y = b.sums + token * a.N;
  for (int64_t part = 1; part < kMlpParts; ++part) {
    const float* const more = y + part * b.tokens * a.N;
    for (int64_t n = begin; n < end; ++n) y[n] += more[n];
  }
  if (a.down_bias != nullptr) {
    for (int64_t n = begin; n < end; ++n) y[n] += ToFloat(a.down_bias, a.dtype, n);
  }
  FromFloats(y + begin, a.dtype, end - begin, b.output + (token * a.N + begin) * SizeOf(a.dtype));
}

}  // namespace STOF_ISA::sparse_mlp
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOWN_H_
