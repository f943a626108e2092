// SPDX-License-Identifier: Apache-2.0
// Sums of quantized down rows with hidden values that are quantized to int8, for accuracy_level 4.
//
// Neurons that share a scale are a group. A token's hidden values of a group have one scale of their own, as in
// ONNX Runtime's MatMulNBits. An output adds scale * hidden scale * (sum of q * h - zero point * sum of h) for each
// group in which the token has active neurons, in their order. The sums are integers: rows may be added in any order,
// and idle ones as zeros.
#ifndef STOF_CPU_SPARSE_MLP_DOWN_INT8_H_
#define STOF_CPU_SPARSE_MLP_DOWN_INT8_H_

#include "cpu/sparse_mlp/down_int8_vectors.h"

namespace stof {
namespace cpu {
namespace {

static_assert(kColumnUnit % kInt8Step == 0, "a thread's columns begin where a step may begin");

// The active neurons of a group, and the tokens that need them.
class Int8Group {
 public:
  // Neurons [first, last) of the list; the next group's are [last, end_of_next).
  Int8Group(const MlpBlock& block, int64_t first, int64_t last, int64_t end_of_next, float* sums)
      : b_(block), first_(first), count_(last - first), sums_(sums) {
    const NeuronRows& down = b_.down;
    group_ = b_.neurons[first] >> down.block_shift;
    for (int64_t i = 0; i < count_; ++i) {
      rows_[i] = reinterpret_cast<const uint8_t*>(down.data) + b_.neurons[first + i] * down.stride;
    }
    next_.count = end_of_next - last;
    if (next_.count == 0) return;
    for (int64_t i = 0; i < next_.count; ++i) next_.rows[i] = down.data + b_.neurons[last + i] * down.stride;
    next_.scale_size = SizeOf(down.dtype);
    next_.scales = down.scales + (b_.neurons[last] >> down.block_shift) * b_.args->N * next_.scale_size;
  }

  // Adds columns [begin, end), piece by piece; begin is a multiple of kInt8Step.
  void Add(int64_t begin, int64_t end) {
    if (b_.tokens == 1) return AddSingleToken(begin, end);
    for (int64_t t = 0; t < b_.tokens; ++t) QuantizeToken(t);
    if (shared_count_ > 0) AddShared(begin, end);
    for (int64_t t = 0; t < b_.tokens; ++t) {
      if (own_count_[t] > 0) AddOwn(t, begin, end);
    }
  }

 private:
  // A token with few of the group's neurons reads their rows by itself. The others share the rows' copies.
  void QuantizeToken(int64_t t) {
    float h[kMostGroup];
    uint8_t index[kMostGroup];
    int64_t count = 0;
    for (int64_t i = 0; i < count_; ++i) {
      if ((b_.list_masks[first_ + i] >> t & 1) == 0) continue;
      index[count] = static_cast<uint8_t>(i);
      h[count++] = b_.hidden[(first_ + i) * b_.tokens + t];
    }
    own_count_[t] = 0;
    if (count == 0) return;
    TokenHidden& token = tokens_[t];
    int8_t values[kMostGroup];
    QuantizeHidden(h, count, values, &token);
    if (kSharesRows && b_.tokens >= kLeastShared && 2 * count >= count_) {
      int8_t all[kMostGroup] = {};
      for (int64_t i = 0; i < count; ++i) all[index[i]] = values[i];
      PackHidden(all, count_, token.factors);
      shared_[shared_count_++] = static_cast<uint8_t>(t);
      return;
    }
    PackHidden(values, count, token.factors);
    own_count_[t] = count;
    Copy(index, index + count, own_index_[t]);
  }

  // Hidden values in int8, and their scale and sum.
  static void QuantizeHidden(const float* h, int64_t count, int8_t* values, TokenHidden* token) {
    float inverse = 0.0f;
    ScaleToInt8(h, count, &token->scale, &inverse);
    int32_t sum = 0;
    if (inverse > 0.0f) {
      sum = RoundToInt8(h, count, inverse, values);
    } else {
      Fill(values, values + count, int8_t{0});
    }
    token->sum = static_cast<float>(sum);
  }

  // The only token needs every row of the list.
  void AddSingleToken(int64_t begin, int64_t end) {
    TokenHidden& token = tokens_[0];
    int8_t values[kMostGroup];
    QuantizeHidden(b_.hidden + first_, count_, values, &token);
    PackHidden(values, count_, token.factors);
    const NextGroup* const next = is_prefetched_ ? nullptr : &next_;
    is_prefetched_ = true;
    WithElement(b_.down.dtype, [&](auto element) {
      AddOwnRows(rows_, count_, b_.down.bits, token, Scales<decltype(element)>(), begin, end, next, sums_);
    });
  }

  template <typename E>
  GroupScales<E> Scales() const {
    const NeuronRows& down = b_.down;
    const int64_t first = group_ * b_.args->N;
    return {reinterpret_cast<const typename E::T*>(down.scales) + first,
            down.zero_points == nullptr ? nullptr : down.zero_points + first, down.bits == 4 ? 8.0f : 128.0f};
  }

  void AddOwn(int64_t t, int64_t begin, int64_t end) {
    const uint8_t* rows[kMostGroup];
    for (int64_t i = 0; i < own_count_[t]; ++i) rows[i] = rows_[own_index_[t][i]];
    const NextGroup* const next = is_prefetched_ ? nullptr : &next_;
    is_prefetched_ = true;
    WithElement(b_.down.dtype, [&](auto element) {
      AddOwnRows(rows, own_count_[t], b_.down.bits, tokens_[t], Scales<decltype(element)>(), begin, end, next,
                 sums_ + t * b_.sums_stride);
    });
  }

  void AddShared(int64_t begin, int64_t end) {
    alignas(64) uint8_t packed[2 * kPackedBytes];
    const int bits = b_.down.bits;
    const int64_t piece = PackedColumns(count_, bits), whole = begin + (end - begin) / kInt8Step * kInt8Step;
    WithElement(b_.down.dtype, [&](auto element) {
      const auto scales = Scales<decltype(element)>();
      for (int64_t n = begin; n < whole; n += piece) {
        const int64_t columns = Min(piece, whole - n);
        for (int64_t c = n; c < n + columns && !is_prefetched_; c += kInt8Step) {
          next_.PrefetchScales(c), next_.PrefetchRows(0, kMostGroup, c, bits);
        }
        PackRows(rows_, count_, bits, n, columns, packed);
        AddPacked(packed, count_, bits, tokens_, shared_, shared_count_, scales, n, columns, sums_, b_.sums_stride);
      }
      for (int64_t i = 0; i < shared_count_; ++i) {
        AddColumnsOneByOne(rows_, count_, bits, tokens_[shared_[i]], scales, whole, end,
                           sums_ + shared_[i] * b_.sums_stride);
      }
    });
    is_prefetched_ = true;
  }

  const MlpBlock& b_;
  const int64_t first_, count_;
  float* const sums_;
  int64_t group_ = 0;
  const uint8_t* rows_[kMostGroup];
  NextGroup next_;
  bool is_prefetched_ = false;
  int64_t own_count_[kMlpTokens];
  uint8_t own_index_[kMlpTokens][kMostGroup];
  TokenHidden tokens_[kMlpTokens];
  uint8_t shared_[kMlpTokens];
  int64_t shared_count_ = 0;
};

inline void DownInt8(const MlpBlock& b, int64_t part, int64_t begin, int64_t end) {
  const int64_t last = b.part_begin[part + 1];
  float* const sums = b.sums + part * b.tokens * b.sums_stride;
  for (int64_t t = 0; t < b.tokens; ++t) Fill(sums + t * b.sums_stride + begin, sums + t * b.sums_stride + end, 0.0f);
  const auto end_of_group = [&](int64_t i) {
    const int64_t group = i < last ? b.neurons[i] >> b.down.block_shift : 0;
    while (i < last && b.neurons[i] >> b.down.block_shift == group) ++i;
    return i;
  };
  // The sums of all tokens stay in the L2 cache.
  const int64_t step = Max(kInt8Columns, kInt8SumBytes / 4 / b.tokens / kInt8Columns * kInt8Columns);
  for (int64_t n = begin; n < end; n += step) {
    int64_t behind = end_of_group(b.part_begin[part]);
    for (int64_t first = b.part_begin[part]; first < last;) {
      const int64_t end_of_next = end_of_group(behind);
      Int8Group(b, first, behind, end_of_next, sums).Add(n, Min(end, n + step));
      first = behind, behind = end_of_next;
    }
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOWN_INT8_H_
