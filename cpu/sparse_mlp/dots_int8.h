// SPDX-License-Identifier: Apache-2.0
// Dot products of quantized rows and tokens that are quantized to int8, for accuracy_level 4.
//
// In a block: scale of the row * scale of the token * (sum of q * x - zero point * sum of x), the sums in int32. A lane
// of a vector holds the sum of a part of a block; vectors are added in fp32, in their order, in slabs of kInt8Depth
// values. A dot product has this one order, whatever else is computed beside it.
#ifndef STOF_CPU_SPARSE_MLP_DOTS_INT8_H_
#define STOF_CPU_SPARSE_MLP_DOTS_INT8_H_

#include "cpu/sparse_mlp/dots_int8_vectors.h"

namespace stof {
namespace cpu {
namespace {

constexpr int64_t kInt8Depth = 4096;
constexpr int64_t kInt8Blocks = kInt8Depth / 16;
constexpr int64_t kInt8Rows = 8;    // that are multiplied by the same tokens in turn
constexpr int64_t kInt8Tokens = 8;  // of which the rows find the values in a L1 cache
constexpr int kInt8Together = 4;    // sums at a time

// The row that is prefetched while row i is multiplied.
inline int64_t RowAhead(const DotProblem& p, int64_t i) { return Min(i + kInt8Rows, p.count - 1); }

// A slab of kInt8Rows rows at most, and sums of it that wait for others.
class Int8Slab {
 public:
  Int8Slab(const DotProblem& problem, int64_t first_row, int64_t rows, int64_t first_block, float* out,
           int64_t row_stride, int64_t token_stride)
      : p_(problem),
        first_row_(first_row),
        first_block_(first_block),
        blocks_(Min(kInt8Depth >> problem.rows.block_shift, problem.rows.blocks - first_block)),
        zero_(static_cast<float>((problem.rows.bits == 4 ? 8 : 128) - Int8Offset(problem.rows.bits))),
        has_zeros_(problem.rows.zero_points != nullptr || zero_ != 0.0f),
        out_(out),
        row_stride_(row_stride),
        token_stride_(token_stride) {
    for (int64_t r = 0; r < rows; ++r) LoadRow(r);
  }

  // Tokens of `mask` and a row. Two or fewer wait for those of other rows.
  void AddRow(int64_t r, uint64_t mask) {
    while (__builtin_popcountll(mask) > 2) {
      Int8Operands operands[kInt8Together];
      float* sums[kInt8Together];
      int count = 0;
      for (; count < kInt8Together && mask != 0; mask &= mask - 1, ++count) {
        Place(r, __builtin_ctzll(mask), &operands[count], &sums[count]);
      }
      Multiply(operands, sums, count, true);
    }
    for (; mask != 0; mask &= mask - 1) {
      Place(r, __builtin_ctzll(mask), &waiting_[waiting_count_], &waiting_sums_[waiting_count_]);
      if (++waiting_count_ == kInt8Together) Flush();
    }
  }

  void Flush() {
    Multiply(waiting_, waiting_sums_, waiting_count_, false);
    waiting_count_ = 0;
  }

 private:
  void LoadRow(int64_t r) {
    const NeuronRows& rows = p_.rows;
    const int64_t neuron = NeuronOf(p_, first_row_ + r), ahead = NeuronOf(p_, RowAhead(p_, first_row_ + r));
    const int64_t item = SizeOf(rows.dtype);
    const auto* const slab = reinterpret_cast<const uint8_t*>(rows.data) + first_block_ * rows.block * rows.bits / 8;
    q_[r] = slab + neuron * rows.stride, next_[r] = slab + ahead * rows.stride;
    float* const scales = scales_[r];
    if (rows.has_row_scales) {
      Fill(scales, scales + blocks_, ToFloat(rows.scales, rows.dtype, neuron));
    } else {
      ToFloats(rows.scales + (neuron * rows.blocks + first_block_) * item, rows.dtype, blocks_, scales);
    }
    Fill(scales + blocks_, scales + blocks_ + kInt8LaneBlocks, 0.0f);
    if (!has_zeros_) return;
    float* const zeros = zeros_[r];
    Fill(zeros + blocks_, zeros + (blocks_ + kInt8SumPadding - 1) / kInt8SumPadding * kInt8SumPadding, 0.0f);
    if (rows.zero_points == nullptr) {
      for (int64_t n = 0; n < blocks_; ++n) zeros[n] = scales[n] * zero_;
      return;
    }
    const uint8_t* const points = rows.zero_points + neuron * ((rows.blocks * rows.bits + 7) / 8);
    for (int64_t n = 0; n < blocks_; ++n) {
      const int point = QuantizedAt(points, rows.bits, first_block_ + n) - Int8Offset(rows.bits);
      zeros[n] = scales[n] * static_cast<float>(point);
    }
  }

  void Place(int64_t r, int t, Int8Operands* operands, float** sum) const {
    const int64_t value = first_block_ * p_.rows.block;
    operands->q = q_[r], operands->next = next_[r];
    operands->row_scales = scales_[r];
    operands->x = p_.x_int8 + t * p_.x_int8_stride + value;
    operands->lane_scales = p_.x_scales + t * p_.x_scales_stride + value / LaneValues(p_.rows.bits);
    operands->zeros = zeros_[r];
    operands->sums = p_.x_sums + t * p_.x_sums_stride + first_block_;
    *sum = out_ + r * row_stride_ + t * token_stride_;
  }

  void Multiply(const Int8Operands* operands, float* const* sums, int count, bool is_one_row) const {
    float dots[kInt8Together];
    MultiplyRows(p_.rows, blocks_, has_zeros_, count, is_one_row, operands, dots);
    for (int i = 0; i < count; ++i) {
      *sums[i] = first_block_ == 0 ? dots[i] : *sums[i] + dots[i];
    }
  }

  const DotProblem& p_;
  const int64_t first_row_, first_block_, blocks_;
  const float zero_;
  const bool has_zeros_;
  float* const out_;
  const int64_t row_stride_, token_stride_;
  const uint8_t *q_[kInt8Rows], *next_[kInt8Rows];
  float scales_[kInt8Rows][kInt8Blocks + kInt8LaneBlocks];
  float zeros_[kInt8Rows][kInt8Blocks];  // scale * zero point
  Int8Operands waiting_[kInt8Together];
  float* waiting_sums_[kInt8Together];
  int waiting_count_ = 0;
};

// The scales of the row behind row i; the row itself is prefetched between multiplications.
inline void PrefetchScales(const DotProblem& p, int64_t i) {
  constexpr int64_t kLine = 64;
  const int64_t bytes = (p.rows.has_row_scales ? 1 : p.rows.blocks) * SizeOf(p.rows.dtype);
  const char* const scales = p.rows.scales + NeuronOf(p, RowAhead(p, i)) * bytes;
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(scales + at, 0, 2);
}

inline void DotsInt8(const DotProblem& p, int64_t first, int64_t last, float* out, int64_t row_stride,
                     int64_t token_stride) {
  const uint64_t all = BitsOfTokens(p.tokens);
  const int64_t blocks_of_slab = kInt8Depth >> p.rows.block_shift;
  for (int64_t i = first; i < last; i += kInt8Rows) {
    const int64_t count = Min(kInt8Rows, last - i);
    float* const to = out + (i - first) * row_stride;
    uint64_t masks[kInt8Rows];
    for (int64_t r = 0; r < count; ++r) {
      masks[r] = p.masks == nullptr ? all : p.masks[i + r];
      if (p.rows.blocks > 0) continue;
      for (uint64_t left = masks[r]; left != 0; left &= left - 1)
        to[r * row_stride + __builtin_ctzll(left) * token_stride] = 0.0f;
    }
    for (int64_t block = 0; block < p.rows.blocks; block += blocks_of_slab) {
      Int8Slab slab(p, i, count, block, to, row_stride, token_stride);
      for (int64_t t = 0; t < p.tokens; t += kInt8Tokens) {
        const uint64_t some = ((uint64_t{1} << kInt8Tokens) - 1) << t;
        for (int64_t r = 0; r < count; ++r) {
          if (t == 0 && block == 0) PrefetchScales(p, i + r);
          slab.AddRow(r, masks[r] & some);
        }
      }
      slab.Flush();
    }
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOTS_INT8_H_
