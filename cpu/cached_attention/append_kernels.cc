// SPDX-License-Identifier: Apache-2.0
// RMS norm and rotary embedding of new queries and keys; appends keys and values to the KV cache, quantized where the
// cache is.
#include <cstdint>
#include <cstring>

#include "cpu/cached_attention/append.h"
#include "cpu/cached_attention/head_row.h"
#include "cpu/kernel_table.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/quantized.h"
#include "cpu/simd/simd.h"

namespace stof {
namespace cpu {
namespace {

// x / sqrt(mean(x^2) + epsilon) * weight
inline void Normalize(const HeadRow& weight, int64_t size, float epsilon, HeadRow* row) {
  V squares = Simd::Set1(0.0f);
  for (int64_t d = 0; d < size; d += kWidth) {
    const V x = Simd::Load(row->x + d);
    squares = Simd::Fma(x, x, squares);
  }
  const float mean = Simd::ReduceAdd(squares) / static_cast<float>(size);
  const V factor = Simd::Set1(1.0f / __builtin_sqrtf(mean + epsilon));
  for (int64_t d = 0; d < size; d += kWidth) {
    Simd::Store(row->x + d, Simd::Mul(Simd::Mul(Simd::Load(row->x + d), factor), Simd::Load(weight.x + d)));
  }
}

// Rotates 2 * half elements from `offset` on: element i with element i + half, or neighbours where interleaved.
inline void Rotate(const HeadRow& cos, const HeadRow& sin, int64_t offset, int64_t half, bool is_interleaved,
                   HeadRow* row) {
  float* const x = row->x + offset;
  if (is_interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = Simd::Fms(a, cos.x[i], b * sin.x[i]);
      x[2 * i + 1] = Simd::Fma(b, cos.x[i], a * sin.x[i]);
    }
    return;
  }
  int64_t i = 0;
  for (; i + kWidth <= half; i += kWidth) {
    const V a = Simd::Load(x + i), b = Simd::Load(x + half + i);
    const V c = Simd::Load(cos.x + i), s = Simd::Load(sin.x + i);
    Simd::Store(x + i, Simd::Fms(a, c, Simd::Mul(b, s)));
    Simd::Store(x + half + i, Simd::Fma(b, c, Simd::Mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = Simd::Fms(a, cos.x[i], b * sin.x[i]);
    x[half + i] = Simd::Fma(b, cos.x[i], a * sin.x[i]);
  }
}

// Transforms and appends the tokens of one worker.
class Appender {
 public:
  explicit Appender(const AppendProblem& problem)
      : problem_(problem),
        args_(*problem.args),
        item_size_(SizeOf(args_.dtype)),
        row_size_(args_.D * item_size_),
        stored_size_(args_.D * SizeOf(CacheType(args_))) {
    if (args_.transform.query_norm != nullptr) query_weight_.Load(args_.transform.query_norm, args_.dtype, args_.D);
    if (args_.transform.key_norm != nullptr) key_weight_.Load(args_.transform.key_norm, args_.dtype, args_.D);
  }

  void Append(int64_t b, int64_t i) {
    const TokenRows rows = problem_.slots != nullptr ? PagedRows(i) : CachedRows(b, i);
    if (args_.transform.cos != nullptr) LoadRotation(rows.position);
    if (args_.rotated_query != nullptr) {
      for (int64_t h = 0; h < args_.H; ++h) {
        Transform(At(args_.query, args_.query_stride, b, h, i),
                  args_.transform.query_norm != nullptr ? &query_weight_ : nullptr,
                  static_cast<char*>(args_.rotated_query) + (rows.query + h * rows.query_step) * row_size_);
      }
    }
    if (rows.cache < 0) return;
    for (int64_t g = 0; g < args_.G; ++g) {
      const int64_t at = (rows.cache + g * rows.cache_step) * stored_size_;
      char* const key = static_cast<char*>(problem_.key) + at;
      char* const value = static_cast<char*>(problem_.value) + at;
      const char* const new_key = At(args_.key, args_.key_stride, b, g, i);
      const char* const new_value = At(args_.value, args_.value_stride, b, g, i);
      const HeadRow* const weight = args_.transform.key_norm != nullptr ? &key_weight_ : nullptr;
      if (IsQuantized(CacheType(args_))) {
        Transform(new_key, weight, reinterpret_cast<char*>(rounded_));
        Quantize(reinterpret_cast<const char*>(rounded_), args_.key_scale, g, key);
        Quantize(new_value, args_.value_scale, g, value);
      } else {
        Transform(new_key, weight, key);
        std::memcpy(value, new_value, static_cast<size_t>(row_size_));
      }
    }
  }

 private:
  const char* At(const void* base, const Strides& stride, int64_t b, int64_t head, int64_t i) const {
    return static_cast<const char*>(base) + (b * stride.b + head * stride.h + i * stride.s) * item_size_;
  }

  // The rows of D elements that a token's heads take in rotated_query and in the cache.
  struct TokenRows {
    int64_t position;
    int64_t query, query_step;  // of head 0, and between heads
    int64_t cache, cache_step;  // likewise; cache -1: the token is not stored
  };
  TokenRows CachedRows(int64_t b, int64_t i) const {
    const CacheStep& step = problem_.steps[b];
    const int64_t to = step.first_row + i;
    const bool is_stored = i < step.tokens && to >= 0;
    return {args_.transform.position_ids != nullptr ? args_.transform.position_ids[b * args_.S + i] : step.past + i,
            b * args_.H * args_.S + i, args_.S, is_stored ? b * args_.G * problem_.capacity + to : -1,
            problem_.capacity};
  }
  TokenRows PagedRows(int64_t i) const {
    const int64_t slot = problem_.slots[i];
    return {args_.transform.position_ids[i], i * args_.H, 1, slot < 0 ? -1 : slot * args_.G, 1};
  }

  // Loads cos and sin of a position. Those of padding may be any number: reads stay in the table.
  void LoadRotation(int64_t position) {
    position = position < 0 ? 0 : position >= args_.transform.rotary_rows ? args_.transform.rotary_rows - 1 : position;
    const int64_t half = args_.transform.rotary_size / 2, at = position * half * item_size_;
    cos_.Load(static_cast<const char*>(args_.transform.cos) + at, args_.dtype, half);
    sin_.Load(static_cast<const char*>(args_.transform.sin) + at, args_.dtype, half);
  }

  void Transform(const char* from, const HeadRow* weight, char* to) {
    if (weight == nullptr && args_.transform.cos == nullptr) {
      std::memcpy(to, from, static_cast<size_t>(row_size_));
      return;
    }
    row_.Load(from, args_.dtype, args_.D);
    if (weight != nullptr) Normalize(*weight, args_.D, args_.transform.epsilon, &row_);
    if (args_.transform.cos != nullptr)
      Rotate(cos_, sin_, args_.transform.rotary_offset, args_.transform.rotary_size / 2, args_.transform.is_interleaved,
             &row_);
    FromFloats(row_.x, args_.dtype, args_.D, to);
  }

  // Quantizes a row of type dtype of KV head g.
  void Quantize(const char* from, const KvScale& scale, int64_t g, char* to) {
    for (int64_t d = 0; d < args_.D; ++d) {
      inverse_.x[d] = InverseScale(scale.data[g * scale.stride_g + d * scale.stride_d]);
    }
    row_.Load(from, args_.dtype, args_.D);
    QuantizeRow(row_.x, inverse_.x, args_.cache_dtype, args_.D, to);
  }

  const AppendProblem& problem_;
  const CacheAppendArgs& args_;
  const int64_t item_size_, row_size_;  // of a new token
  const int64_t stored_size_;           // of a row of the cache
  HeadRow query_weight_, key_weight_, cos_, sin_, row_, inverse_;
  alignas(64) float rounded_[kLargestHead];  // a key of type dtype
};

void Append(const AppendProblem& problem, int64_t first, int64_t last) {
  Appender appender(problem);
  const int64_t rows = problem.args->S;
  for (int64_t t = first; t < last; ++t) appender.Append(t / rows, t % rows);
}

}  // namespace

STOF_EXPORT_KERNELS(AppendKernels, append) = {Append};

}  // namespace cpu
}  // namespace stof
