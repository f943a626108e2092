// SPDX-License-Identifier: Apache-2.0
// Queries, and the scores of a strip of rows in a key tile: its mask, QK^T, softcap and bias.
#ifndef STOF_CPU_ATTENTION_SCORES_H_
#define STOF_CPU_ATTENTION_SCORES_H_

#include <cstdint>

#include "cpu/attention/attention_worker.h"

namespace stof {
namespace cpu {
namespace {

constexpr float kNoStart[kStripRows] = {};

template <bool kInPlace>
void AttentionWorker<kInPlace>::LoadQueries() {
  const char* query =
      static_cast<const char*>(args_.query.data) + item_size_ * BeginOfQueries(args_, args_.query.stride, b_);
  const V factor = Simd::Set1(args_.scores.scale);
  const bool plain = args_.shape.dtype == DType::kF32 && args_.shape.D % kPanel == 0;
  for (int r = 0; r < PaddedRows(); ++r) {
    float* to = scratch_.q + r * scratch_.ldq;
    const float* from = to;
    int64_t d = 0;
    if (r < rows_) {
      const char* row =
          query + item_size_ * (HeadOf(r) * args_.query.stride.h + (row0_ + QueryOf(r)) * args_.query.stride.s);
      if (plain) {
        from = reinterpret_cast<const float*>(row);
      } else {
        ToFloats(row, args_.shape.dtype, args_.shape.D, to);
      }
      d = args_.shape.D;
    }
    for (; d < scratch_.ldq; ++d) to[d] = 0.0f;
    for (d = 0; d < scratch_.ldq; d += kWidth) Simd::Store(to + d, Simd::Mul(Simd::Load(from + d), factor));
    if (args_.kv.key_scale.data != nullptr && r < rows_) ScaleRow(args_.kv.key_scale, g_, args_.shape.D, to);
  }
}

// Queries as matmuls in bf16 take them: scale comes after the matmul.
template <bool kInPlace>
void AttentionWorker<kInPlace>::RoundQueries() {
  const char* query =
      static_cast<const char*>(args_.query.data) + item_size_ * BeginOfQueries(args_, args_.query.stride, b_);
  const int64_t size = args_.shape.D, padded = PackedKeySize(size);
  const bool has_scale = args_.kv.key_scale.data != nullptr;
  for (int r = 0; r < PaddedRows(); ++r) {
    Bf16* const to = scratch_.rounded_q + r * padded;
    int64_t d = 0;
    if (r < rows_) {
      const char* const row =
          query + item_size_ * (HeadOf(r) * args_.query.stride.h + (row0_ + QueryOf(r)) * args_.query.stride.s);
      if (has_scale) {
        ToFloats(row, args_.shape.dtype, size, scratch_.converted_row);
        ScaleRow(args_.kv.key_scale, g_, size, scratch_.converted_row);
        RoundToBf16(scratch_.converted_row, size, to);
      } else {
        ToBf16(row, args_.shape.dtype, size, scratch_.converted_row, to);
      }
      d = size;
    }
    for (; d < padded; ++d) to[d] = 0;
  }
}

template <bool kInPlace>
inline bool AttentionWorker<kInPlace>::FindMask(int64_t tile, const uint32_t* bits, bool unmasked) {
  const int64_t count = problem_.n / 32;
  const uint32_t* sources[3];
  int64_t strides[3];
  int used = 0;
  if (bits != nullptr) {
    sources[used] = bits;
    strides[used++] = count;
  }
  const int64_t keys = key_end_ - tile * problem_.n;
  if (problem_.pad_bits != nullptr && !unmasked) {
    const uint32_t* pad = problem_.pad_bits + (b_ * problem_.key_tiles + tile) * count;
    uint32_t any = 0, all = ~0u;
    for (int64_t w = 0; w < count; ++w) {
      any |= pad[w];
      all &= pad[w];
    }
    if (any == 0) return false;
    if (all != ~0u) {
      sources[used] = pad;
      strides[used++] = 0;
    }
  } else if (keys < problem_.n && (bits == nullptr || args_.sequences.given())) {
    FillTailWords(keys, count, scratch_.words_tail);
    sources[used] = scratch_.words_tail;
    strides[used++] = 0;
  }
  if (args_.mask.dynamic != nullptr && !unmasked) {
    const DynamicMask& dynamic = *args_.mask.dynamic;
    const int kind =
        dynamic.tile(dynamic.self, b_, h_, row0_, tile * problem_.n, problem_.m, problem_.n, scratch_.words_dynamic);
    if (kind == 0) return false;
    if (kind == 1) {
      sources[used] = scratch_.words_dynamic;
      strides[used++] = count;
    }
  }
  words_ = used == 0 ? nullptr : sources[0];
  word_stride_ = used == 0 ? 0 : strides[0];
  if (used < 2) return true;
  for (int64_t r = 0; r < queries_; ++r) {
    for (int64_t w = 0; w < count; ++w) {
      uint32_t word = sources[0][r * strides[0] + w] & sources[1][r * strides[1] + w];
      if (used == 3) word &= sources[2][r * strides[2] + w];
      scratch_.words_combined[r * count + w] = word;
    }
  }
  words_ = scratch_.words_combined;
  word_stride_ = count;
  return true;
}

template <bool kInPlace>
bool AttentionWorker<kInPlace>::FindElements(int64_t tile, const uint32_t** bits) const {
  const DynamicMask& elements = *args_.mask.fixed.elements();
  const int64_t head =
      (elements.by_batch ? b_ : 0) * args_.shape.H + (elements.by_head ? h_ / elements.alike_heads : 0);
  const int64_t wanted = (head * problem_.tile_rows + row0_ / problem_.m) * problem_.key_tiles + tile;
  // Other heads of the same rows come next: see RowsOutermost in attention.cc.
  const int64_t slot = tile % problem_.element_slots;
  uint32_t* const words = scratch_.elements + slot * problem_.m * (problem_.n / 32);
  if (scratch_.elements_of[slot] != wanted) {
    scratch_.elements_kind[slot] = static_cast<uint8_t>(
        elements.tile(elements.self, b_, h_, row0_, tile * problem_.n, problem_.m, problem_.n, words));
    scratch_.elements_of[slot] = wanted;
  }
  *bits = scratch_.elements_kind[slot] == 1 ? words : nullptr;
  return scratch_.elements_kind[slot] != 0;
}

template <bool kInPlace>
void AttentionWorker<kInPlace>::FindPanels(int keys, Strip* strip) const {
  const int panels = (keys + kPanel - 1) / kPanel;
  strip->partial = 0;
  if (words_ == nullptr) {
    strip->active = (1u << panels) - 1u;
    strip->run_count = 1;
    strip->runs[0].first = 0;
    strip->runs[0].last = keys;
    return;
  }
  strip->active = 0;
  const int last = static_cast<int>(Min(strip->row + kRows, rows_));
  for (int w = 0; w < problem_.n / 32; ++w) {
    uint32_t any = 0, all = ~0u;
    for (int r = strip->row; r < last; ++r) {
      const uint32_t word = words_[QueryOf(r) * word_stride_ + w];
      any |= word;
      all &= word;
    }
    strip->active |= ((any & 0xffffu) != 0 ? 1u : 0u) << (2 * w) | ((any >> 16) != 0 ? 2u : 0u) << (2 * w);
    strip->partial |= ((all & 0xffffu) != 0xffffu ? 1u : 0u) << (2 * w) | ((all >> 16) != 0xffffu ? 2u : 0u) << (2 * w);
  }
  strip->partial &= strip->active;
  strip->run_count = 0;
  for (int p = 0; p < panels;) {
    if ((strip->active >> p & 1u) == 0) {
      ++p;
      continue;
    }
    Run* run = &strip->runs[strip->run_count++];
    run->first = p * kPanel;
    while (p < panels && (strip->active >> p & 1u) != 0) ++p;
    run->last = static_cast<int>(Min(p * kPanel, keys));
  }
}

// The packed keys of a tile; with a ring, its values are packed with them.
template <bool kInPlace>
inline const Packed* AttentionWorker<kInPlace>::PackedTile(int64_t tile) const {
  const int64_t panels = problem_.n / kPanel, size = PackedKeySize(args_.shape.D) * kPanel;
  if (problem_.ring_tiles == 0) {
    return static_cast<const Packed*>(problem_.packed_keys) +
           (FirstPanel() + (tile - problem_.sequences[b_].first) * panels) * size;
  }
  const int64_t slot = tile % problem_.ring_tiles, wanted = group_ * problem_.key_tiles + tile;
  Packed* const keys = scratch_.ring + slot * panels * size;
  if (scratch_.ring_of[slot] == wanted) return keys;
  scratch_.ring_of[slot] = wanted;
  const int64_t key0 = tile * problem_.n, count = Min(problem_.n, key_end_ - key0);
  const Rows rows = KeyRows(tile);
  for (int64_t p = 0; p * kPanel < count; ++p) {
    PackKeys(rows.From(p * kPanel), Min(kPanel, count - p * kPanel), args_, scratch_, keys + p * size);
  }
  if (problem_.pack_values) {
    PackValues(ValueRows(tile), count, args_, scratch_, scratch_.ring_values + slot * problem_.n * scratch_.ldo);
  }
  return keys;
}

template <bool kInPlace>
inline const Packed* AttentionWorker<kInPlace>::PackedValues(int64_t tile) const {
  const int64_t size = problem_.n * scratch_.ldo;
  if (problem_.ring_tiles > 0) return scratch_.ring_values + tile % problem_.ring_tiles * size;
  const int64_t first = problem_.sequences[b_].first;
  return static_cast<const Packed*>(problem_.packed_values) + FirstPanel() * kPanel * scratch_.ldo +
         (tile - first) * size;
}

template <bool kInPlace>
template <int kBlock>
inline void AttentionWorker<kInPlace>::StripScores(int rows, const float* q, int64_t ldq, int64_t size,
                                                   const float* keys, int64_t stride, const float* start, float* s,
                                                   int64_t lds) {
  if (rows > 4) return Scores<kStrip, kBlock>(q, ldq, size, keys, stride, start, s, lds);
  if (rows > 2) return Scores<4, kBlock>(q, ldq, size, keys, stride, start, s, lds);
  Scores<2, kBlock>(q, ldq, size, keys, stride, start, s, lds);
}

// Scores of a strip with the keys of kBlock vectors of fp32, or kBlock panels of bf16.
template <bool kInPlace>
template <int kBlock>
inline void AttentionWorker<kInPlace>::BlockScores(const Strip& strip, const Packed* keys, float* s) const {
  const int64_t size = args_.shape.D, padded = PackedKeySize(size), stride = padded * kPanel, lds = problem_.n;
  const float* const start = args_.scores.softcap > 0.0f ? kNoStart : scratch_.start + strip.row;
  const int rows = rows_ - strip.row;
  if constexpr (!kRoundsToBf16) {
    StripScores<kBlock>(rows, scratch_.q + strip.row * scratch_.ldq, scratch_.ldq, size, keys, stride, start, s, lds);
  } else {
    const Bf16* const q = scratch_.rounded_q + strip.row * padded;
    const int64_t depth = RoundUp(size, kDepth);
    const float scale = args_.scores.scale;
    if (kHasTiles || rows > 4) {
      return Bf16Scores<kRows, kBlock>(q, padded, depth, keys, stride, scale, start, s, lds);
    }
    if constexpr (!kHasTiles) {
      if (rows > 2) return Bf16Scores<4, kBlock>(q, padded, depth, keys, stride, scale, start, s, lds);
      Bf16Scores<2, kBlock>(q, padded, depth, keys, stride, scale, start, s, lds);
    }
  }
}

template <bool kInPlace>
inline void AttentionWorker<kInPlace>::PackedScores(const Strip* strips, int begin, int end, const Packed* keys) const {
  const int64_t stride = PackedKeySize(args_.shape.D) * kPanel, lds = problem_.n;
  constexpr int kRegisterKeys = kVectors * kWidth;
  uint32_t any = 0;
  for (int i = begin; i < end; ++i) any |= strips[i].active;
  // Blocks of panels from the first one that a strip needs; every strip reads a block before the next is fetched.
  while (any != 0) {
    const int p = __builtin_ctz(any);
    const int length = __builtin_ctz(~(any >> p));
    // A block of one panel has too few accumulators to hide the latency of an FMA: five are three and two.
    const int block =
        length == kBlockPanels + 1 && kBlockPanels > 2 ? kBlockPanels - 1 : static_cast<int>(Min(length, kBlockPanels));
    const uint32_t here = (1u << block) - 1u;
    any &= ~(here << p);
    for (int i = begin; i < end; ++i) {
      uint32_t active = strips[i].active >> p & here;
      while (active != 0) {
        const int at = __builtin_ctz(active);
        const int run = __builtin_ctz(~(active >> at));
        active &= ~(((1u << run) - 1u) << at);
        const Packed* from = keys + (p + at) * stride;
        float* to = scratch_.s + i * kRows * lds + (p + at) * kPanel;
        if constexpr (kBlockPanels == 1) {
          for (int c = 0; c < kPanel; c += kRegisterKeys) {
            BlockScores<kVectors>(strips[i], from + c, to + c);
          }
        } else {
          if (run == 4) BlockScores<4>(strips[i], from, to);
          if (run == 3) BlockScores<3>(strips[i], from, to);
          if (run == 2) BlockScores<2>(strips[i], from, to);
          if (run == 1) BlockScores<1>(strips[i], from, to);
        }
      }
    }
  }
}

template <bool kInPlace>
template <typename Stored>
inline void AttentionWorker<kInPlace>::InPlaceScores(const Strip& strip, const Stored* keys, int64_t ldk,
                                                     const Rows& ahead) const {
  const float* q = scratch_.q + strip.row * scratch_.ldq;
  const float* start = args_.scores.softcap > 0.0f ? kNoStart : scratch_.start + strip.row;
  const int64_t lds = problem_.n, stride = stored_size_ * ahead.stride, bytes = stored_size_ * args_.shape.Dv;
  const int64_t size = RoundUp(args_.shape.D, kWidth);
  const int rows = rows_ - strip.row;
  const auto block = [&](int k, auto count) {
    constexpr int kKeys = decltype(count)::value;
    if (ahead.data != nullptr) {
      for (int j = 0; j < kKeys; ++j) Prefetch(ahead.At(0) + (k + j) * stride, bytes);
    }
    const Stored* key = keys + k * ldk;
    if (rows > 2) return DotRows<4, kKeys>(q, scratch_.ldq, size, key, ldk, start, scratch_.s + k, lds);
    if (rows > 1) return DotRows<2, kKeys>(q, scratch_.ldq, size, key, ldk, start, scratch_.s + k, lds);
    DotRows<1, kKeys>(q, scratch_.ldq, size, key, ldk, start, scratch_.s + k, lds);
  };
  for (int i = 0; i < strip.run_count; ++i) {
    int k = strip.runs[i].first;
    const int last = strip.runs[i].last;
    if (rows > 2) {
      if constexpr (Simd::kKeysOfFourRows > 2) {
        for (; k + Simd::kKeysOfFourRows <= last; k += Simd::kKeysOfFourRows)
          block(k, Constant<Simd::kKeysOfFourRows>());
      }
      for (; k + 2 <= last; k += 2) block(k, Constant<2>());
    } else if (rows > 1) {
      for (; k + 4 <= last; k += 4) block(k, Constant<4>());
    } else {
      for (; k + 8 <= last; k += 8) block(k, Constant<8>());
    }
    for (; k < last; ++k) block(k, Constant<1>());
    for (; k % kPanel != 0; ++k) {
      for (int r = 0; r < (rows > 2 ? 4 : rows); ++r) scratch_.s[r * lds + k] = -kInf;
    }
  }
}

// Relative tables, softcap, bias and mask.
template <bool kInPlace>
void AttentionWorker<kInPlace>::Adjust(const Strip& strip, float* s, int64_t key0, int keys) const {
  const V forbidden = Simd::Set1(-kInf);
  const int rows = static_cast<int>(Min(kRows, rows_ - strip.row));
  if constexpr (!kInPlace) {
    if (problem_.relative != nullptr) AddRelativeProducts(strip, s, key0);
  }
  if (args_.scores.softcap > 0.0f) {
    const V cap = Simd::Set1(args_.scores.softcap), argument = Simd::Set1(2.0f * kLog2E / args_.scores.softcap);
    for (int r = 0; r < rows; ++r) {
      const V start = Simd::Set1(scratch_.start[strip.row + r]);
      ForEachVector(strip, s + r * problem_.n, [&](float* at, int) {
        Simd::Store(at, Simd::Fma(cap, TanhFromExponent(Simd::Mul(argument, Simd::Load(at))), start));
      });
    }
  }
  if (args_.scores.bias.data != nullptr || args_.scores.relative_bias.table != nullptr) {
    for (int r = 0; r < rows; ++r) {
      LoadBias(strip.row + r, key0, keys);
      ForEachVector(strip, s + r * problem_.n, [&](float* at, int column) {
        const V x = Simd::Load(at), bias = Simd::Load(scratch_.bias + column);
        Simd::Store(at, Simd::WhereEqual(bias, forbidden, forbidden, Simd::Add(x, bias)));
      });
    }
  }
  for (uint32_t left = strip.partial; left != 0; left &= left - 1u) {
    const int column = __builtin_ctz(left) * kPanel;
    for (int r = 0; r < rows; ++r) {
      const uint32_t word = words_[QueryOf(strip.row + r) * word_stride_ + column / 32] >> (column % 32);
      float* at = s + r * problem_.n + column;
      for (int c = 0; c < kPanel; c += kWidth)
        Simd::Store(at + c, Simd::Where(word >> c, Simd::Load(at + c), forbidden));
    }
  }
}

template <bool kInPlace>
template <typename F>
inline void AttentionWorker<kInPlace>::ForEachVector(const Strip& strip, float* s, F f) const {
  for (int i = 0; i < strip.run_count; ++i) {
    for (int c = strip.runs[i].first; c < strip.runs[i].last; c += kWidth) f(s + c, c);
  }
}

// The sum of the biases of row r.
template <bool kInPlace>
inline void AttentionWorker<kInPlace>::LoadBias(int r, int64_t key0, int keys) const {
  const int64_t h = HeadOf(r), row = row0_ + QueryOf(r);
  if (args_.scores.bias.data != nullptr) {
    LoadPairs(h, row, key0, keys);
  } else {
    for (int k = 0; k < keys; ++k) scratch_.bias[k] = 0.0f;
  }
  if (args_.scores.relative_bias.table != nullptr) AddRelative(h, row, key0, keys);
  for (int k = keys; k % kPanel != 0; ++k) scratch_.bias[k] = 0.0f;
}

template <bool kInPlace>
inline void AttentionWorker<kInPlace>::AddRelative(int64_t h, int64_t row, int64_t key0, int keys) const {
  const RelativeBias& bias = args_.scores.relative_bias;
  const float* table = bias.table + h * bias.stride_h;
  const int64_t size = bias.size;
  // The entry of key 0, before it is clamped.
  const int64_t first = key_position_ + key0 - (bias.query_position + query_position_ + row) + size / 2;
  const int low = static_cast<int>(Clamp(-first, 0, keys)), high = static_cast<int>(Clamp(size - first, low, keys));
  float* to = scratch_.bias;
  if (bias.factor != nullptr) {
    const int64_t at = b_ * bias.factor_stride_b + h * bias.factor_stride_h + query_position_ + row;
    const float factor = ToFloat(bias.factor, bias.factor_dtype, at);
    for (int k = 0; k < keys; ++k) to[k] += factor * table[Clamp(first + k, 0, size - 1)];
    return;
  }
  for (int k = 0; k < low; ++k) to[k] += table[0];
  for (int k = low; k < high; ++k) to[k] += table[first + k];
  for (int k = high; k < keys; ++k) to[k] += table[size - 1];
}

template <bool kInPlace>
inline void AttentionWorker<kInPlace>::LoadPairs(int64_t h, int64_t row, int64_t key0, int keys) const {
  const PairBias& bias = args_.scores.bias;
  const int64_t at = b_ * bias.stride_b + h * bias.stride_h + (query_position_ + row) * bias.stride_q +
                     (key_position_ + key0) * bias.stride_k;
  float* to = scratch_.bias;
  if (bias.stride_k == 1) {
    ToFloats(static_cast<const char*>(bias.data) + at * SizeOf(bias.dtype), bias.dtype, keys, to);
  } else {
    for (int k = 0; k < keys; ++k) to[k] = ToFloat(bias.data, bias.dtype, at + k * bias.stride_k);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_SCORES_H_
