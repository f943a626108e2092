// SPDX-License-Identifier: Apache-2.0
// Skip by score: whether a strip of rows can do without a key tile, whose exponentials and values are then left out.
// docs/reference/operators.md has the definition.
#ifndef STOF_CPU_ATTENTION_SKIP_H_
#define STOF_CPU_ATTENTION_SKIP_H_

#include <cstdint>

#include "cpu/attention/attention_worker.h"

namespace stof {
namespace cpu {
namespace {

constexpr float kLowestScore = -__FLT_MAX__;

// Whether each row's scores lie below its bound: SkipDistance below the largest score so far. Without such a score any
// finite one keeps the tile. high: the maxima of each row's scores, which count from the row's start.
template <bool kInPlace>
bool AttentionWorker<kInPlace>::CanSkip(const Strip& strip, int rows, const V* high, const float* s) const {
  for (int r = 0; r < rows; ++r) {
    const float top = scratch_.top[strip.row + r];
    float bound = kLowestScore;
    if (top > -kInf && top < kInf) {
      const float below = top - skip_distance_ + scratch_.start[strip.row + r];
      bound = below > kLowestScore ? below : kLowestScore;
    }
    if (Simd::Any(Simd::GreaterEqual(high[r], Simd::Set1(bound)))) return false;
  }
  return !HasNan(strip, rows, s);
}

// Maxima do not show a NaN: it is replaced by the next score. A sum shows it. It would also show +inf beside -inf, but
// a row with +inf keeps its tile, as does, without need, one whose sum exceeds fp32.
template <bool kInPlace>
bool AttentionWorker<kInPlace>::HasNan(const Strip& strip, int rows, const float* s) const {
  const V zero = Simd::Set1(0.0f), one = Simd::Set1(1.0f);
  V found = zero;
  for (int r = 0; r < rows; ++r) {
    V sum = zero;
    for (int i = 0; i < strip.run_count; ++i) {
      const float* at = s + r * problem_.n + strip.runs[i].first;
      const float* const end = s + r * problem_.n + strip.runs[i].last;
      for (; at < end; at += kWidth) sum = Simd::Add(sum, Simd::Load(at));
    }
    found = Simd::WhereEqual(sum, sum, found, one);
  }
  return Simd::Any(Simd::Greater(found, zero));
}

template <bool kInPlace>
void AttentionWorker<kInPlace>::RaiseTops(const Strip& strip, int rows, const V* high) {
  float* const top = scratch_.top + strip.row;
  const float* const start = scratch_.start + strip.row;
  auto raised = Simd::Greater(Simd::Set1(0.0f), Simd::Set1(0.0f));
  for (int r = 0; r < rows; ++r) raised = Simd::Or(raised, Simd::Greater(high[r], Simd::Set1(top[r] + start[r])));
  if (!Simd::Any(raised)) return;
  for (int r = 0; r < rows; ++r) {
    const float now = Simd::ReduceMax(high[r]) - start[r];
    if (now > top[r]) top[r] = now;
  }
}

template <bool kInPlace>
void AttentionWorker<kInPlace>::CountSkip(const Strip& strip, int keys, bool is_skipped) {
  const auto pairs = static_cast<uint64_t>(Min(kRows, rows_ - strip.row)) * static_cast<uint64_t>(keys);
  scratch_.skip_counts[0] += pairs;
  if (is_skipped) scratch_.skip_counts[1] += pairs;
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_SKIP_H_
