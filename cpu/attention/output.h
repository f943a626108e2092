// SPDX-License-Identifier: Apache-2.0
// The end of a row tile: output rows, fully masked rows, LSE.
#ifndef STOF_CPU_ATTENTION_OUTPUT_H_
#define STOF_CPU_ATTENTION_OUTPUT_H_

#include <cstdint>

#include "cpu/attention/attention_worker.h"

namespace stof {
namespace cpu {
namespace {

template <bool kInPlace>
void AttentionWorker<kInPlace>::Finish() {
  bool all = false;
  FinishOutput();
  for (int r = 0; r < rows_; ++r) {
    const float sum = Simd::ReduceAdd(Simd::Load(scratch_.sum + r * kWidth));
    scratch_.empty[r] = sum == 0.0f;
    if (args_.output.lse != nullptr) StoreLogSum(r, sum);
    if (sum != 0.0f) {
      WriteRow(r, 1.0f / (sum + SinkWeight(r)));
    } else if (args_.mask.empty_rows == EmptyRows::kAll && key_end_ > 0) {
      all = true;
    } else {
      WriteEmptyRow(r);
    }
  }
  if (!all) return;
  Clear();
  AttendTiles(0, problem_.key_tiles, true);
  FinishOutput();
  for (int r = 0; r < rows_; ++r) {
    if (!scratch_.empty[r]) continue;
    const float sum = Simd::ReduceAdd(Simd::Load(scratch_.sum + r * kWidth));
    WriteRow(r, sum == 0.0f ? __builtin_nanf("") : 1.0f / sum);  // 0 where every bias is -inf, as the softmax of that
  }
}

template <bool kInPlace>
void AttentionWorker<kInPlace>::StoreLogSum(int r, float sum) const {
  const float max = sum == 0.0f ? -kInf : scratch_.max[r];
  const float sink =
      args_.scores.sink.data == nullptr ? -kInf : ToFloat(args_.scores.sink.data, args_.scores.sink.dtype, HeadOf(r));
  const float top = max > sink ? max : sink;  // the logarithm is small beside it, wherever the scores lie
  float lse = top;
  if (sum != 0.0f) lse += __builtin_logf(Simd::Fma(sum, ExpScalar(max - top), ExpScalar(sink - top)));
  args_.output.lse[b_ * args_.output.lse_stride_b + HeadOf(r) * args_.output.lse_stride_h + row0_ + QueryOf(r)] = lse;
}

template <bool kInPlace>
inline void AttentionWorker<kInPlace>::WriteRow(int r, float factor) const {
  const V scale = Simd::Set1(factor);
  const bool plain = args_.shape.dtype == DType::kF32 && args_.shape.Dv % kPanel == 0;
  float* to = plain ? reinterpret_cast<float*>(OutputRow(r)) : scratch_.row;
  for (int64_t d = 0; d < scratch_.ldo; d += kWidth) {
    Simd::Store(to + d, Simd::Mul(Simd::Load(scratch_.o + r * scratch_.ldo + d), scale));
  }
  if (args_.kv.value_scale.data != nullptr) ScaleRow(args_.kv.value_scale, g_, args_.shape.Dv, to);
  if (!plain) FromFloats(scratch_.row, args_.shape.dtype, args_.shape.Dv, OutputRow(r));
}

template <bool kInPlace>
inline void AttentionWorker<kInPlace>::WriteEmptyRow(int r) {
  if (args_.mask.empty_rows == EmptyRows::kMean && key_end_ > 0) {
    FindMean();
    const float* mean = scratch_.mean;
    if constexpr (!kInPlace) {
      if (HasRowWeights()) mean = AddMeanRowValues(r);
    }
    FromFloats(mean, args_.shape.dtype, args_.shape.Dv, OutputRow(r));
    return;
  }
  const float value = args_.mask.empty_rows == EmptyRows::kNan ? __builtin_nanf("") : 0.0f;
  for (int64_t d = 0; d < args_.shape.Dv; ++d) scratch_.row[d] = value;
  FromFloats(scratch_.row, args_.shape.dtype, args_.shape.Dv, OutputRow(r));
}

template <bool kInPlace>
inline void AttentionWorker<kInPlace>::FindMean() {
  if (*scratch_.mean_of == group_) return;
  *scratch_.mean_of = group_;
  const Rows rows = RowsOfHead(args_, values_, args_.value.stride.s, b_);
  for (int64_t d = 0; d < args_.shape.Dv; ++d) scratch_.mean[d] = 0.0f;
  // In blocks, so that the rounding of a long sum stays near that of a short one.
  for (int64_t first = 0; first < key_end_; first += 256) {
    for (int64_t d = 0; d < args_.shape.Dv; ++d) scratch_.o[d] = 0.0f;
    for (int64_t k = first; k < Min(first + 256, key_end_); ++k) {
      ToFloats(rows.At(k), args_.shape.dtype, args_.shape.Dv, scratch_.row);
      for (int64_t d = 0; d < args_.shape.Dv; ++d) scratch_.o[d] += scratch_.row[d];
    }
    for (int64_t d = 0; d < args_.shape.Dv; ++d) scratch_.mean[d] += scratch_.o[d];
  }
  for (int64_t d = 0; d < args_.shape.Dv; ++d) scratch_.mean[d] /= static_cast<float>(key_end_);
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_OUTPUT_H_
