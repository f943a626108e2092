// SPDX-License-Identifier: Apache-2.0
// Key bounds of a page, and page scores: upper bounds of the scores of its keys.
#include <cstdint>

#include "cpu/cached_attention/head_row.h"
#include "cpu/cached_attention/pages.h"
#include "cpu/kernel_table.h"
#include "cpu/simd/algorithms.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/simd.h"

namespace stof {
namespace cpu {
namespace {

constexpr float kInf = __builtin_inff();
constexpr int kQueryRows = 4;  // that share a pass over the key bounds of a page

void FindBounds(const void* keys, DType dtype, int64_t rows, int64_t D, void* to) {
  HeadRow row, least, most;
  const int64_t bytes = D * SizeOf(dtype);
  for (int64_t d = 0; d < D; d += kWidth) {
    Simd::Store(least.x + d, Simd::Set1(kInf));
    Simd::Store(most.x + d, Simd::Set1(-kInf));
  }
  for (int64_t r = 0; r < rows; ++r) {
    row.Load(static_cast<const char*>(keys) + r * bytes, dtype, D);
    for (int64_t d = 0; d < D; d += kWidth) {
      // Min and Max give x where either is NaN: a NaN that is already there has to stay.
      const V x = Simd::Load(row.x + d), low = Simd::Load(least.x + d), high = Simd::Load(most.x + d);
      Simd::Store(least.x + d, Simd::WhereEqual(low, low, Simd::Min(low, x), low));
      Simd::Store(most.x + d, Simd::WhereEqual(high, high, Simd::Max(high, x), high));
    }
  }
  FromFloats(least.x, dtype, D, to);
  FromFloats(most.x, dtype, D, static_cast<char*>(to) + bytes);
}

// A NaN where either is one.
inline float Larger(float a, float b) { return a != a || a >= b ? a : b; }

// Four queries, times scale: their positive elements, which take the maxima of keys, and their negative ones,
// which take the minima.
struct Queries {
  HeadRow positive[kQueryRows], negative[kQueryRows];
  void Load(int r, const void* from, DType dtype, int64_t D, float scale) {
    positive[r].Load(from, dtype, D);
    const V zero = Simd::Set1(0.0f), factor = Simd::Set1(scale);
    for (int64_t d = 0; d < D; d += kWidth) {
      const V x = Simd::Mul(Simd::Load(positive[r].x + d), factor);
      Simd::Store(positive[r].x + d, Simd::Max(zero, x));  // a NaN stays
      Simd::Store(negative[r].x + d, Simd::Min(zero, x));
    }
  }
  // The largest of the four scores, or a NaN.
  float Score(const float* least, const float* most, int64_t D) const {
    V up[kQueryRows], down[kQueryRows];
    for (int r = 0; r < kQueryRows; ++r) up[r] = down[r] = Simd::Set1(0.0f);
    for (int64_t d = 0; d < D; d += kWidth) {
      const V low = Simd::Load(least + d), high = Simd::Load(most + d);
      for (int r = 0; r < kQueryRows; ++r) {
        up[r] = Simd::Fma(Simd::Load(positive[r].x + d), high, up[r]);
        down[r] = Simd::Fma(Simd::Load(negative[r].x + d), low, down[r]);
      }
    }
    float score = -kInf;
    for (int r = 0; r < kQueryRows; ++r) score = Larger(score, Simd::ReduceAdd(Simd::Add(up[r], down[r])));
    return score;
  }
};

void Score(const AttentionArgs& args, int64_t b, int64_t g, int64_t first, int64_t last, float* scores) {
  const AttentionShape& shape = args.shape;
  const PageChoice& choice = args.kv.choice;
  const int64_t item = SizeOf(shape.dtype), D = shape.D, group = shape.H / shape.G, rows = group * shape.S;
  const bool is_plain = shape.dtype == DType::kF32 && D % kWidth == 0;
  const char* const bounds =
      static_cast<const char*>(choice.bounds) + item * (b * choice.stride_b + g * choice.stride_g);
  const Strides& stride = args.query.stride;
  const char* const query = static_cast<const char*>(args.query.data) + item * (b * stride.b + g * group * stride.h);
  Queries queries;
  HeadRow least, most;
  for (int64_t row = 0; row < rows; row += kQueryRows) {
    for (int r = 0; r < kQueryRows; ++r) {
      const int64_t at = Min(row + r, rows - 1);  // the last ones once more
      queries.Load(r, query + item * (at / shape.S * stride.h + at % shape.S * stride.s), shape.dtype, D,
                   args.scores.scale);
    }
    for (int64_t page = first; page < last; ++page) {
      const char* const low = bounds + item * page * choice.stride_page;
      const float* own[2] = {reinterpret_cast<const float*>(low), reinterpret_cast<const float*>(low + item * D)};
      if (!is_plain) {
        least.Load(low, shape.dtype, D);
        most.Load(low + item * D, shape.dtype, D);
        own[0] = least.x, own[1] = most.x;
      }
      const float score = queries.Score(own[0], own[1], D);
      scores[page] = row == 0 ? score : Larger(scores[page], score);
    }
  }
}

}  // namespace

STOF_EXPORT_KERNELS(PagesKernels, pages) = {FindBounds, Score};

}  // namespace cpu
}  // namespace stof
