// SPDX-License-Identifier: Apache-2.0
// Softmax of a strip of rows in a key tile: scores become weights, and weights times values are added to the output.
#ifndef STOF_CPU_ATTENTION_WEIGHTS_H_
#define STOF_CPU_ATTENTION_WEIGHTS_H_

#include <cstdint>

#include "cpu/attention/attention_worker.h"

namespace stof {
namespace cpu {
namespace {

// Conditional rescaling: the row max is raised only when a score exceeds it by this much. Weights stay below
// e^5.5 = 245, and the output is rescaled a few times per row instead of at every new maximum.
constexpr float kRescaleThreshold = 5.5f;
// The accumulators of QK^T start at minus the row max, which saves a subtraction from each. Not where later scores may
// be far from the row max: they would lose their low bits. A bias of -10000 leaves the max far below them, large scores
// far above.
constexpr float kLowestStart = -16.0f, kHighestStart = 128.0f;

// Turns scores into weights and updates row sums; rescales the rows whose max has grown much. Works on whole panels:
// keys beyond T are masked. kLostBits: nothing is done, since scores are so large that they lost low bits to their
// start. The start is 0 now, and they have to be computed again. kSkipped: nothing is done, since the strip can do
// without them.
template <bool kInPlace>
typename AttentionWorker<kInPlace>::Outcome AttentionWorker<kInPlace>::Softmax(const Strip& strip, float* s) {
  constexpr int kVectorsPerPanel = kPanel / kWidth;
  const int64_t lds = problem_.n;
  const int runs = strip.run_count;
  const float* max = scratch_.max + strip.row;
  float* start = scratch_.start + strip.row;
  const int rows = static_cast<int>(Min(kRows, rows_ - strip.row));
  V high[kRows] = {};
  auto exceeded = Simd::Greater(Simd::Set1(0.0f), Simd::Set1(0.0f));
  for (int r = 0; r < rows; ++r) {
    V x[kVectorsPerPanel];
#pragma GCC unroll 4
    for (int j = 0; j < kVectorsPerPanel; ++j) x[j] = Simd::Set1(-kInf);
    for (int i = 0; i < runs; ++i) {
      const float* at = s + r * lds + strip.runs[i].first;
      const float* const end = s + r * lds + strip.runs[i].last;
      for (; at < end; at += kPanel) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectorsPerPanel; ++j) x[j] = Simd::Max(x[j], Simd::Load(at + j * kWidth));
      }
    }
#pragma GCC unroll 4
    for (int j = 1; j < kVectorsPerPanel; ++j) x[0] = Simd::Max(x[0], x[j]);
    high[r] = x[0];
    exceeded = Simd::Or(exceeded, Simd::Greater(x[0], Simd::Set1(max[r] + start[r] + kRescaleThreshold)));
  }
  const bool raised = Simd::Any(exceeded);
  if (skips_ && !raised && CanSkip(strip, rows, high, s)) return Outcome::kSkipped;
  if (raised && ClearStarts(strip, rows, high)) return Outcome::kLostBits;
  if (skips_) RaiseTops(strip, rows, high);
  if (raised) Rescale(strip, rows, high);
  float offset[kRows] = {};  // to subtract from the scores: row max + start, 0 where the start is minus the row max
  bool has_offset = false;
  for (int r = 0; r < rows; ++r) {
    offset[r] = max[r] == -kInf ? 0.0f : max[r] + start[r];
    has_offset |= offset[r] != 0.0f;
  }
  if (has_offset) {
    Weights<true>(strip, rows, offset, s);
  } else {
    Weights<false>(strip, rows, offset, s);
  }
  if (!raised) return Outcome::kWeights;
  for (int r = 0; r < rows; ++r) start[r] = max[r] >= kLowestStart && max[r] <= kHighestStart ? -max[r] : 0.0f;
  return Outcome::kWeights;
}

template <bool kInPlace>
template <bool kHasOffset>
inline void AttentionWorker<kInPlace>::Weights(const Strip& strip, int rows, const float* offsets, float* s) {
  constexpr int kVectorsPerPanel = kPanel / kWidth;
  for (int r = 0; r < rows; ++r) {
    float* sum_at = scratch_.sum + (strip.row + r) * kWidth;
    const V offset = Simd::Set1(offsets[r]);
    V sum = Simd::Set1(0.0f);  // of the tile, as in AddValues
    [[maybe_unused]] Bf16* const rounded = scratch_.rounded_p + (s - scratch_.s) + r * problem_.n;
    [[maybe_unused]] const bool has_floats = !kRoundsToBf16 || HasRowWeights();
    for (int i = 0; i < strip.run_count; ++i) {
      float* at = s + r * problem_.n + strip.runs[i].first;
      const float* const end = s + r * problem_.n + strip.runs[i].last;
      for (; at < end; at += kPanel) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectorsPerPanel; ++j) {
          V x = Simd::Load(at + j * kWidth);
          if constexpr (kHasOffset) x = Simd::Sub(x, offset);
          const V p = ExpOfScore(x);
          if constexpr (kRoundsToBf16) StoreRounded(p, rounded + (at - (s + r * problem_.n)) + j * kWidth);
          if (has_floats) Simd::Store(at + j * kWidth, p);
          sum = Simd::Add(sum, p);
        }
      }
    }
    Simd::Store(sum_at, Simd::Add(Simd::Load(sum_at), sum));
  }
}

// Sets the starts of rows to 0 whose scores exceed them by far. Whether there is such a row.
template <bool kInPlace>
bool AttentionWorker<kInPlace>::ClearStarts(const Strip& strip, int rows, const V* high) {
  bool any = false;
  for (int r = 0; r < rows; ++r) {
    float& start = scratch_.start[strip.row + r];
    if (start == 0.0f || !(Simd::ReduceMax(high[r]) > kHighestStart)) continue;
    start = 0.0f;
    any = true;
  }
  return any;
}

template <bool kInPlace>
void AttentionWorker<kInPlace>::Rescale(const Strip& strip, int rows, const V* high) {
  for (int r = 0; r < rows; ++r) {
    float* max = scratch_.max + strip.row + r;
    const float old = *max, now = Simd::ReduceMax(high[r]) - scratch_.start[strip.row + r];
    if (!(now > old + kRescaleThreshold)) continue;
    *max = now;
    if (old == -kInf) continue;  // sum and output hold zeros, or NaN, which has to stay
    const V scale = Simd::Set1(ExpScalar(old - now));
    float* sum = scratch_.sum + (strip.row + r) * kWidth;
    Simd::Store(sum, Simd::Mul(Simd::Load(sum), scale));
    float* o = scratch_.o + (strip.row + r) * scratch_.ldo;
    for (int64_t d = 0; d < scratch_.ldo; d += kWidth) Simd::Store(o + d, Simd::Mul(Simd::Load(o + d), scale));
    if (!HasRowWeights()) continue;
    const int64_t size = problem_.relative->value.WeightStride();
    float* w = scratch_.row_weights + (strip.row + r) * size;
    for (int64_t i = 0; i < size; i += kWidth) Simd::Store(w + i, Simd::Mul(Simd::Load(w + i), scale));
  }
}

template <bool kInPlace>
template <typename Stored>
inline void AttentionWorker<kInPlace>::Values(const Strip* strips, int count, const Stored* values, int64_t ldv,
                                              const char* ahead) const {
  constexpr int64_t kStored = sizeof(Stored);
  const int64_t size = RoundUp(args_.shape.Dv, kWidth) / kWidth;
  const int rows = rows_ - strips[0].row;
  // In place few rows leave registers for more columns.
  const int block = !kInPlace ? kVectors : rows > 2 ? kVectors : rows > 1 ? 4 : 8;
  for (int64_t d = 0; d < size; d += block) {
    const int64_t left = Min(block, size - d);
    const char* next = ahead == nullptr ? nullptr : ahead + d * kWidth * kStored * problem_.n;
    for (int i = 0; i < count; ++i) {
      if (strips[i].run_count == 0) continue;  // skipped
      const float* p = scratch_.s + i * kRows * static_cast<int64_t>(problem_.n);
      float* o = scratch_.o + strips[i].row * scratch_.ldo + d * kWidth;
      const Stored* v = values + d * kWidth;
      if constexpr (kInPlace) {
        if (rows > 2) {
          AddBlock<4, kVectors>(left, p, strips[i], v, ldv, o, next);
        } else if (rows > 1) {
          AddBlock<2, 4>(left, p, strips[i], v, ldv, o, next);
        } else {
          AddBlock<1, 8>(left, p, strips[i], v, ldv, o, next);
        }
      } else if (rows_ - strips[i].row > 4) {
        AddBlock<kRows, kVectors>(left, p, strips[i], v, ldv, o, nullptr);
      } else if (rows_ - strips[i].row > 2) {
        AddBlock<4, kVectors>(left, p, strips[i], v, ldv, o, nullptr);
      } else {
        AddBlock<2, kVectors>(left, p, strips[i], v, ldv, o, nullptr);
      }
    }
  }
}

// PV of weights and values in bf16.
template <bool kInPlace>
inline void AttentionWorker<kInPlace>::AddRoundedValues(const Strip* strips, int count, const Packed* values) const {
  if constexpr (kRoundsToBf16) {
    const int64_t vectors = scratch_.ldo / kWidth;
    for (int64_t d = 0; d < vectors; d += kVectors) {
      for (int i = 0; i < count; ++i) {
        if (strips[i].run_count == 0) continue;  // skipped
        AddRoundedBlock<kVectors>(Min(kVectors, vectors - d), strips[i],
                                  scratch_.rounded_p + i * kRows * static_cast<int64_t>(problem_.n),
                                  values + d * kWidth * kDepth, scratch_.o + strips[i].row * scratch_.ldo + d * kWidth);
      }
    }
  }
}

template <bool kInPlace>
template <int kBlock>
inline void AttentionWorker<kInPlace>::AddRoundedBlock(int64_t left, const Strip& strip, const Packed* p,
                                                       const Packed* v, float* o) const {
  if (left != kBlock) {
    if constexpr (kBlock > 1) AddRoundedBlock<kBlock - 1>(left, strip, p, v, o);
    return;
  }
  const int rows = rows_ - strip.row;
  const int64_t ldp = problem_.n, ldo = scratch_.ldo, ldv = kDepth * ldo;
  if (kHasTiles || rows > 4) return AddBf16Values<kRows, kBlock>(p, ldp, strip.runs, strip.run_count, v, ldv, o, ldo);
  if constexpr (!kHasTiles) {
    if (rows > 2) return AddBf16Values<4, kBlock>(p, ldp, strip.runs, strip.run_count, v, ldv, o, ldo);
    AddBf16Values<2, kBlock>(p, ldp, strip.runs, strip.run_count, v, ldv, o, ldo);
  }
}

template <bool kInPlace>
template <int kHeight, int kBlock, typename Stored>
inline void AttentionWorker<kInPlace>::AddBlock(int64_t left, const float* p, const Strip& strip, const Stored* v,
                                                int64_t ldv, float* o, const char* ahead) const {
  if (left != kBlock) {
    if constexpr (kBlock > 1) AddBlock<kHeight, kBlock - 1>(left, p, strip, v, ldv, o, ahead);
    return;
  }
  if constexpr (kInPlace) {
    if (ahead != nullptr) {
      return AddValues<kHeight, kBlock, true>(p, problem_.n, strip.runs, strip.run_count, v, ldv, o, scratch_.ldo,
                                              ahead);
    }
  }
  AddValues<kHeight, kBlock, false>(p, problem_.n, strip.runs, strip.run_count, v, ldv, o, scratch_.ldo);
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_WEIGHTS_H_
