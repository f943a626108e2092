// SPDX-License-Identifier: Apache-2.0
// Sums of down rows, weighted by hidden values. Included once per instruction set.
//
// Each element of the output adds its active neurons one by one, in their order. So a token's result depends neither on
// threads, which have columns of their own, nor on other tokens.
#ifndef STOF_CPU_SPARSE_MLP_DOWN_H_
#define STOF_CPU_SPARSE_MLP_DOWN_H_

#include "cpu/sparse_mlp/elements.h"

namespace stof {
namespace cpu {
namespace STOF_ISA::sparse_mlp {

constexpr int kDownRows = 8;
constexpr int64_t kDownColumns = 512;  // kDownRows pieces of them fit a first-level cache

// sums[n] += h[0] * rows[0][n], then h[1] * rows[1][n] ...; prefetches next[kDownRows] where it is not nullptr.
template <typename E, int kCount>
void AddRows(const typename E::T* const* rows, const float* h, int64_t columns, const char* const* next, float* sums) {
  V factor[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) factor[i] = Simd::Set1(h[i]);
  constexpr int64_t kPerLine = std::max<int64_t>(kWidth, kLine / static_cast<int64_t>(sizeof(typename E::T)));
  const auto add = [&](int64_t n) {
    V sum = Simd::Load(sums + n);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum = Simd::Fma(factor[i], E::Load(rows[i] + n), sum);
    Simd::Store(sums + n, sum);
  };
  int64_t n = 0;
  if (next != nullptr) {
    for (; n + kPerLine <= columns; n += kPerLine) {
#pragma GCC unroll 8
      for (int i = 0; i < kDownRows; ++i) {
        __builtin_prefetch(next[i] + n * static_cast<int64_t>(sizeof(typename E::T)), 0, 2);
      }
#pragma GCC unroll 16
      for (int64_t j = 0; j < kPerLine; j += kWidth) add(n + j);
    }
  }
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
void AddSomeRows(int64_t count, const typename E::T* const* rows, const float* h, int64_t columns,
                 const char* const* next, float* sums) {
  if constexpr (kCount > 1) {
    if (count < kCount) return AddSomeRows<E, kCount - 1>(count, rows, h, columns, next, sums);
  }
  AddRows<E, kCount>(rows, h, columns, next, sums);
}

// kDownRows active neurons, and columns of their rows.
class DownGroup {
 public:
  DownGroup(const MlpBlock& block, int64_t first)
      : b_(block), first_(first), count_(std::min<int64_t>(kDownRows, block.count - first)) {}

  // The group's rows are read where they are. All columns of one token are summed in one go.
  template <typename E>
  void AddInPlace(int64_t begin, int64_t end) {
    const auto at = [&](int64_t i, int64_t n) {
      return b_.down.data + b_.neurons[i] * b_.down.stride + n * static_cast<int64_t>(sizeof(typename E::T));
    };
    const int64_t step = b_.tokens == 1 ? end - begin : kDownColumns;
    for (int64_t n = begin; n < end; n += step) {
      const typename E::T* rows[kDownRows];
      const char* next[kDownRows];
      for (int64_t i = 0; i < kDownRows; ++i) {
        rows[i] = reinterpret_cast<const typename E::T*>(at(first_ + std::min(i, count_ - 1), n));
        next[i] = at(std::min(first_ + kDownRows + i, b_.count - 1), n);
      }
      AddTokens<E>(rows, n, std::min(step, end - n), next);
    }
  }

  // The group's rows are converted first.
  void AddConverted(int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += kDownColumns) {
      const int64_t columns = std::min(kDownColumns, end - n);
      const float* rows[kDownRows];
      for (int64_t i = 0; i < count_; ++i) {
        const int64_t after = b_.neurons[std::min(first_ + kDownRows + i, b_.count - 1)];
        const int64_t bytes = b_.down.bits > 0 ? n * b_.down.bits / 8 : n * SizeOf(b_.down.dtype);
        LoadDownRow(b_.down, b_.neurons[first_ + i], n, columns, b_.down.data + after * b_.down.stride + bytes,
                    converted_ + i * kDownColumns);
        rows[i] = converted_ + i * kDownColumns;
      }
      AddTokens<F32>(rows, n, columns, nullptr);
    }
  }

 private:
  template <typename E>
  void AddTokens(const typename E::T* const* rows, int64_t n, int64_t columns, const char* const* next) {
    for (int64_t t = 0; t < b_.tokens; ++t) {
      const typename E::T* needed[kDownRows];
      float h[kDownRows];
      int64_t count = 0;
      for (int64_t i = 0; i < count_; ++i) {
        if ((b_.masks[first_ + i] >> t & 1) == 0) continue;
        needed[count] = rows[i];
        h[count++] = b_.hidden[(first_ + i) * b_.tokens + t];
      }
      if (count == 0) continue;
      AddSomeRows<E>(count, needed, h, columns, next, b_.sums + t * b_.args->N + n);
      next = nullptr;
    }
  }

  const MlpBlock& b_;
  const int64_t first_, count_;
  alignas(64) float converted_[kDownRows * kDownColumns];
};

inline void Down(const MlpBlock& b, int64_t begin, int64_t end) {
  const int64_t N = b.args->N;
  for (int64_t t = 0; t < b.tokens; ++t) std::fill(b.sums + t * N + begin, b.sums + t * N + end, 0.0f);
  const bool is_in_place = b.down.bits == 0 && (b.down.dtype == DType::kF32 || b.tokens <= 2);
  for (int64_t i = 0; i < b.count; i += kDownRows) {
    DownGroup group(b, i);
    if (is_in_place) {
      WithElement(b.down.dtype, [&](auto element) { group.template AddInPlace<decltype(element)>(begin, end); });
    } else {
      group.AddConverted(begin, end);
    }
  }
  const DType dtype = b.args->dtype;
  const int64_t size = SizeOf(dtype);
  for (int64_t t = 0; t < b.tokens; ++t) {
    float* const sums = b.sums + t * N;
    if (b.args->down_bias != nullptr) {
      for (int64_t n = begin; n < end; ++n) sums[n] += ToFloat(b.args->down_bias, dtype, n);
    }
    if (dtype != DType::kF32) FromFloats(sums + begin, dtype, end - begin, b.output + (t * N + begin) * size);
  }
}

}  // namespace STOF_ISA::sparse_mlp
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOWN_H_
