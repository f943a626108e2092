// SPDX-License-Identifier: Apache-2.0
// The attention kernel: one tile row of queries against the key tiles that its mask lists, with an online softmax in base 2.
// Included once per instruction set, after its Simd.
#ifndef STOF_CPU_ATTENTION_KERNEL_H_
#define STOF_CPU_ATTENTION_KERNEL_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/attention_block.h"
#include "cpu/convert.h"

namespace stof {
namespace cpu {
namespace STOF_ISA {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// The running maximum is raised only when it grows by more than this (in powers of 2): most tiles skip the rescale,
// and exponents stay far below overflow.
constexpr float kLazy = 8.0f;
constexpr int kColumns = kVectors * kWidth;  // of a register block

inline int64_t ValueStride(const Problem& p) { return RoundUp(p.args->Dv, kColumns); }
inline int64_t PaddedRows(const Problem& p) { return RoundUp(p.m, kStrip); }
// Values are read in place when their rows are fp32 and a whole number of register blocks wide.
inline bool ValuesInPlace(const Problem& p) {
  return p.args->dtype == DType::kF32 && p.args->Dv % kColumns == 0;
}

// Scratch memory of one worker, cut from one block.
struct Scratch {
  float* query;      // [m, D], scaled
  float* scores;     // [kStrip, n]
  float* output;     // [m, Dv rounded up]
  float* spare;      // [m, Dv rounded up], for EmptyRows::kAll
  float* maximum;    // [m]
  float* sum;        // [m]
  float* value;      // [n, Dv rounded up], when values are not read in place
  float* row;        // [max(n, D, Dv)]
  uint32_t* bits;    // [m, n / 32]
  uint32_t* dynamic; // [m, max(1, n / 32)]
};

inline size_t CutScratch(const Problem& p, void* memory, Scratch* scratch) {
  size_t used = 0;
  auto* base = static_cast<char*>(memory);
  const auto cut = [&](int64_t floats) {
    void* at = base + used;
    used += static_cast<size_t>(RoundUp(floats * 4, 64));
    return at;
  };
  const int64_t rows = PaddedRows(p);
  const AttentionArgs& a = *p.args;
  scratch->query = static_cast<float*>(cut(rows * a.D));
  scratch->scores = static_cast<float*>(cut(kStrip * int64_t{p.n}));
  scratch->output = static_cast<float*>(cut(rows * ValueStride(p)));
  scratch->spare = static_cast<float*>(cut(a.empty_rows == EmptyRows::kAll ? rows * ValueStride(p) : 0));
  scratch->maximum = static_cast<float*>(cut(rows));
  scratch->sum = static_cast<float*>(cut(rows));
  scratch->value = static_cast<float*>(cut(ValuesInPlace(p) ? 0 : p.n * ValueStride(p)));
  scratch->row = static_cast<float*>(cut(std::max<int64_t>({p.n, a.D, ValueStride(p), 32})));
  scratch->bits = static_cast<uint32_t*>(cut(rows * p.n / 32));
  scratch->dynamic = static_cast<uint32_t*>(cut(rows * p.n / 32));
  return used;
}

inline size_t ScratchBytes(const Problem& p) {
  Scratch scratch;
  return CutScratch(p, nullptr, &scratch);
}

inline const void* RowOf(const void* base, DType dtype, const Strides& stride, int64_t b, int64_t h, int64_t s) {
  return static_cast<const char*>(base) + (b * stride.b + h * stride.h + s * stride.s) * SizeOf(dtype);
}

inline void Pack(const Problem& p, int64_t first, int64_t last, void* memory) {
  const AttentionArgs& a = *p.args;
  Scratch scratch;
  CutScratch(p, memory, &scratch);
  for (int64_t i = first; i < last; ++i) {
    const int64_t panel = i % p.panels;
    const int64_t g = i / p.panels % a.G;
    const int64_t b = i / p.panels / a.G;
    const int64_t key = panel * kPanel;
    const int64_t count = Least(kPanel, a.T - key);
    float* to = p.packed_keys + i * a.D * kPanel;
    if (a.dtype == DType::kF32) {
      PackPanel(static_cast<const float*>(RowOf(a.key, a.dtype, a.key_stride, b, g, key)), a.key_stride.s, count, a.D,
                to);
      continue;
    }
    for (int64_t j = 0; j < kPanel; ++j) {
      if (j < count) {
        ToFloats(RowOf(a.key, a.dtype, a.key_stride, b, g, key + j), a.dtype, a.D, scratch.row);
      } else {
        std::fill(scratch.row, scratch.row + a.D, 0.0f);
      }
      for (int64_t d = 0; d < a.D; ++d) to[d * kPanel + j] = scratch.row[d];
    }
  }
}

// Marks in place of bits: a tile of which every pair may attend, and one that need not be visited. Never read through.
constexpr uint32_t kFullMark = 0;
constexpr const uint32_t* kFull = &kFullMark;
constexpr const uint32_t* kNothing = nullptr;

// One tile row of one head.
class TileRow {
 public:
  TileRow(const Problem& p, int64_t item, void* memory) : p_(p), a_(*p.args) {
    CutScratch(p, memory, &scratch_);
    tile_row_ = item % p.tile_rows;
    h_ = item / p.tile_rows % a_.H;
    b_ = item / p.tile_rows / a_.H;
    g_ = h_ / (a_.H / a_.G);
    row0_ = tile_row_ * p.m;
    rows_ = Least(p.m, a_.S - row0_);
    strips_ = RoundUp(rows_, kStrip) / kStrip;
    stride_ = ValueStride(p);
  }

  void Compute() {
    LoadQuery();
    Attend(false, scratch_.output);
    const bool empty = std::any_of(scratch_.maximum, scratch_.maximum + rows_, IsEmpty);
    if (empty) FillEmpty();
    Store(scratch_.output, scratch_.sum, [](int64_t) { return true; });
    if (empty && a_.empty_rows == EmptyRows::kAll) AttendAll();
  }

 private:
  static bool IsEmpty(float maximum) { return maximum == kMinusInfinity; }

  // Scaled so that the softmax can work in powers of 2; with a softcap, so that the tanh can.
  void LoadQuery() {
    const float factor = a_.softcap > 0 ? 2.0f * kLog2E * a_.scale / a_.softcap : kLog2E * a_.scale;
    for (int64_t r = 0; r < strips_ * kStrip; ++r) {
      float* to = scratch_.query + r * a_.D;
      if (r >= rows_) {
        std::fill(to, to + a_.D, 0.0f);
        continue;
      }
      ToFloats(RowOf(a_.query, a_.dtype, a_.query_stride, b_, h_, row0_ + r), a_.dtype, a_.D, to);
      for (int64_t d = 0; d < a_.D; ++d) to[d] *= factor;
    }
  }

  // `all`: every key, whatever mask and pad say.
  void Attend(bool all, float* output) {
    std::fill(output, output + strips_ * kStrip * stride_, 0.0f);
    std::fill(scratch_.maximum, scratch_.maximum + strips_ * kStrip, kMinusInfinity);
    std::fill(scratch_.sum, scratch_.sum + strips_ * kStrip, 0.0f);
    if (all || a_.mask == nullptr) {
      for (int64_t t = 0; t < p_.key_tiles; ++t) Tile(t, nullptr, all, output);
      return;
    }
    const BlockMask& mask = *a_.mask;
    const int64_t row = int64_t{mask.TableOf(b_, h_)} * mask.rows + tile_row_;
    const int64_t words = int64_t{p_.m} * p_.n / 32;
    for (int64_t e = mask.row_ptr[row]; e < mask.row_ptr[row + 1]; ++e) {
      const uint32_t* bits = mask.bits_id[e] < 0 ? nullptr : mask.bits.data() + mask.bits_id[e] * words;
      Tile(mask.key_tile[e], bits, false, output);
    }
  }

  void Tile(int64_t tile, const uint32_t* bits, bool all, float* output) {
    const int64_t key0 = tile * p_.n;
    const int64_t keys = Least(p_.n, a_.T - key0);
    if (!all) {
      bits = WithDynamic(key0, bits);
      if (bits == kNothing) return;
      bits = WithPad(tile, bits);
      if (bits == kNothing) return;
    }
    const float* value = LoadValues(key0, keys);
    for (int64_t s = 0; s < strips_; ++s) Strip(s * kStrip, tile, keys, bits, all, value, output);
  }

  const uint32_t* WithDynamic(int64_t key0, const uint32_t* bits) {
    return a_.dynamic == nullptr ? Keep(bits) : Combine(key0, bits);
  }

  const uint32_t* Keep(const uint32_t* bits) const { return bits == nullptr ? kFull : bits; }

  const uint32_t* Combine(int64_t key0, const uint32_t* bits) {
    const int kind = a_.dynamic->tile(a_.dynamic->self, b_, h_, row0_, key0, p_.m, p_.n, scratch_.dynamic);
    if (kind == 0) return kNothing;
    if (kind == 2) return Keep(bits);
    if (bits == nullptr) return scratch_.dynamic;
    const int64_t words = int64_t{p_.m} * p_.n / 32;
    for (int64_t w = 0; w < words; ++w) scratch_.dynamic[w] &= bits[w];
    return scratch_.dynamic;
  }

  const uint32_t* WithPad(int64_t tile, const uint32_t* bits) {
    if (p_.pad_bits == nullptr) return bits;
    const int width = p_.n / 32;
    const uint32_t* pad = p_.pad_bits + (b_ * p_.key_tiles + tile) * width;
    const int64_t keys = Least(p_.n, a_.T - tile * p_.n);
    uint32_t any = 0;
    bool every = true;
    for (int w = 0; w < width; ++w) {
      any |= pad[w];
      const int64_t rest = keys - 32 * w;
      const uint32_t full = rest >= 32 ? ~0u : rest > 0 ? (1u << rest) - 1 : 0u;
      every = every && pad[w] == full;
    }
    if (any == 0) return kNothing;
    if (every) return bits;
    for (int64_t r = 0; r < rows_; ++r) {
      for (int w = 0; w < width; ++w) {
        scratch_.bits[r * width + w] = pad[w] & (bits == kFull ? ~0u : bits[r * width + w]);
      }
    }
    return scratch_.bits;
  }

  const float* LoadValues(int64_t key0, int64_t keys) {
    const void* from = RowOf(a_.value, a_.dtype, a_.value_stride, b_, g_, key0);
    if (ValuesInPlace(p_)) {
      value_stride_ = a_.value_stride.s;
      return static_cast<const float*>(from);
    }
    value_stride_ = stride_;
    for (int64_t k = 0; k < keys; ++k) {
      float* to = scratch_.value + k * stride_;
      ToFloats(RowOf(a_.value, a_.dtype, a_.value_stride, b_, g_, key0 + k), a_.dtype, a_.Dv, to);
      std::fill(to + a_.Dv, to + stride_, 0.0f);
    }
    return scratch_.value;
  }

  // First and last + 1 panel that some row of the strip needs.
  Run Panels(int64_t row, int64_t keys, const uint32_t* bits) const {
    const int count = static_cast<int>((keys + kPanel - 1) / kPanel);
    if (bits == kFull) return {0, count};
    const int width = p_.n / 32;
    Run run = {count, 0};
    for (int w = 0; w < width; ++w) {
      uint32_t any = 0;
      for (int64_t r = row; r < std::min(row + kStrip, rows_); ++r) any |= bits[r * width + w];
      for (int half = 0; half < 2; ++half) {
        if (((any >> (16 * half)) & 0xffffu) == 0) continue;
        run.first = std::min(run.first, 2 * w + half);
        run.last = std::max(run.last, 2 * w + half + 1);
      }
    }
    run.last = std::min(run.last, count);
    return run;
  }

  void Strip(int64_t row, int64_t tile, int64_t keys, const uint32_t* bits, bool all, const float* value,
             float* output) {
    if (all) bits = kFull;
    const Run panels = Panels(row, keys, bits);
    if (panels.first >= panels.last) return;
    const int first = panels.first * kPanel;
    // Panels per register block: scores are computed in whole blocks, from the first panel on.
    constexpr int kBlockPanels = std::max(1, kColumns / kPanel);
    const int64_t panel0 = tile * (p_.n / kPanel);
    const float* packed = p_.packed_keys + ((b_ * a_.G + g_) * p_.panels + panel0) * a_.D * kPanel;
    const int64_t panel_stride = a_.D * kPanel;
    const float* query = scratch_.query + row * a_.D;
    int panel = panels.first;
    for (; panel + kBlockPanels <= panels.last; panel += kBlockPanels) {
      Scores<kBlockPanels * kPanel / kWidth>(query, a_.D, a_.D, packed + panel * panel_stride, panel_stride,
                                             scratch_.scores + panel * kPanel, p_.n);
    }
    for (; panel < panels.last; ++panel) {
      Scores<kPanel / kWidth>(query, a_.D, a_.D, packed + panel * panel_stride, panel_stride,
                              scratch_.scores + panel * kPanel, p_.n);
    }
    const int last = panels.last * kPanel;
    bool some = false;
    for (int64_t r = 0; r < kStrip; ++r) {
      const bool live = row + r < rows_;
      some |= Softmax(row + r, tile, first, last, keys, live ? bits : kFull, live && !all, scratch_.scores + r * p_.n,
                      output);
    }
    if (!some) return;
    const Run run = {first, static_cast<int>(std::min<int64_t>(last, keys))};
    for (int64_t c = 0; c < stride_; c += kColumns) {
      AddValues<kStrip, kVectors>(scratch_.scores, p_.n, &run, 1, value + c, value_stride_, output + row * stride_ + c,
                                  stride_);
    }
  }

  // Scores of one row to weights, in place; raises the running maximum. False when every weight is 0.
  bool Softmax(int64_t row, int64_t tile, int first, int last, int64_t keys, const uint32_t* bits, bool masked, float* s,
               float* output) {
    if (a_.softcap > 0) Softcap(first, last, s);
    if (a_.bias != nullptr && row < rows_) AddBias(row, tile * p_.n, first, Least(last, keys), masked, s);
    const int width = p_.n / 32;
    const V minus = Simd::Set1(kMinusInfinity);
    if (bits != kFull) {
      const uint32_t* words = bits + row * width;
      for (int k = first; k < last; k += kWidth) {
        const uint32_t lanes = words[k / 32] >> (k % 32);
        Simd::Store(s + k, Simd::Where(lanes, Simd::Load(s + k), minus));
      }
    }
    for (int64_t k = keys; k < last; ++k) s[k] = kMinusInfinity;  // beyond T
    V top = minus;
    for (int k = first; k < last; k += kWidth) top = Simd::Max(Simd::Load(s + k), top);
    const float maximum = Simd::ReduceMax(top);
    float& running = scratch_.maximum[row];
    if (maximum > running + kLazy || (running == kMinusInfinity && maximum > running)) {
      if (running != kMinusInfinity) Rescale(row, std::exp2(running - maximum), output);
      running = maximum;
    }
    // Nothing allowed so far: the weights become 0, unless a score is NaN.
    const V shift = Simd::Set1(running == kMinusInfinity ? 0.0f : running);
    V sum = Simd::Set1(0.0f);
    for (int k = first; k < last; k += kWidth) {
      const V weight = Exp2(Simd::Sub(Simd::Load(s + k), shift));
      sum = Simd::Add(sum, weight);
      Simd::Store(s + k, weight);
    }
    const float total = Simd::ReduceAdd(sum);
    scratch_.sum[row] += total;
    if (std::isnan(total) && running == kMinusInfinity) running = 0.0f;  // a NaN row is not an empty one
    return !(total == 0.0f);
  }

  void Softcap(int first, int last, float* s) const {
    const V cap = Simd::Set1(a_.softcap * kLog2E);
    for (int k = first; k < last; k += kWidth) Simd::Store(s + k, Simd::Mul(cap, TanhFromExponent(Simd::Load(s + k))));
  }

  // `masked` is false when EmptyRows::kAll looks at every key: a forbidding bias then counts as none.
  void AddBias(int64_t row, int64_t key0, int64_t first, int64_t last, bool masked, float* s) const {
    const int64_t base = b_ * a_.bias_stride_b + h_ * a_.bias_stride_h + (row0_ + row) * a_.bias_stride_q;
    for (int64_t k = first; k < last; ++k) {
      const float bias = ToFloat(a_.bias, a_.bias_dtype, base + (key0 + k) * a_.bias_stride_k);
      if (masked || bias != kMinusInfinity) s[k] += bias * kLog2E;
    }
  }

  void Rescale(int64_t row, float factor, float* output) {
    scratch_.sum[row] *= factor;
    const V f = Simd::Set1(factor);
    float* o = output + row * stride_;
    for (int64_t c = 0; c < stride_; c += kWidth) Simd::Store(o + c, Simd::Mul(Simd::Load(o + c), f));
  }

  // Output rows that `chosen` names, divided by their sums.
  template <typename Chosen>
  void Store(float* output, const float* sums, Chosen chosen) {
    for (int64_t r = 0; r < rows_; ++r) {
      if (!chosen(r)) continue;
      float* o = output + r * stride_;
      const float scale = 1.0f / sums[r];
      for (int64_t c = 0; c < a_.Dv; ++c) o[c] *= scale;
      void* to = const_cast<void*>(RowOf(a_.output, a_.dtype, a_.output_stride, b_, h_, row0_ + r));
      FromFloats(o, a_.dtype, a_.Dv, to);
    }
  }

  // Rows without a key get their answer in `output` with a sum of 1.
  void FillEmpty() {
    float* mean = scratch_.row;
    if (a_.empty_rows == EmptyRows::kMean) Mean(mean);
    for (int64_t r = 0; r < rows_; ++r) {
      if (!IsEmpty(scratch_.maximum[r])) continue;
      float* o = scratch_.output + r * stride_;
      scratch_.sum[r] = 1.0f;
      const float fill = a_.empty_rows == EmptyRows::kNan ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
      for (int64_t c = 0; c < a_.Dv; ++c) o[c] = a_.empty_rows == EmptyRows::kMean ? mean[c] : fill;
    }
  }

  void Mean(float* mean) {
    std::fill(mean, mean + a_.Dv, 0.0f);
    // Sums of at most n values at a time, so that the error does not grow with T.
    for (int64_t key0 = 0; key0 < a_.T; key0 += p_.n) {
      const int64_t keys = Least(p_.n, a_.T - key0);
      const float* value = LoadValues(key0, keys);
      for (int64_t c = 0; c < a_.Dv; ++c) {
        float sum = 0.0f;
        for (int64_t k = 0; k < keys; ++k) sum += value[k * value_stride_ + c];
        mean[c] += sum;
      }
    }
    for (int64_t c = 0; c < a_.Dv; ++c) mean[c] /= static_cast<float>(a_.T);
  }

  // Empty rows under EmptyRows::kAll: once more over every key, then only they are stored.
  void AttendAll() {
    uint32_t* flags = scratch_.dynamic;  // free: no dynamic mask is asked when every key counts
    for (int64_t r = 0; r < rows_; ++r) flags[r] = IsEmpty(scratch_.maximum[r]) ? 1u : 0u;
    Attend(true, scratch_.spare);
    Store(scratch_.spare, scratch_.sum, [flags](int64_t r) { return flags[r] != 0; });
  }

  const Problem& p_;
  const AttentionArgs& a_;
  Scratch scratch_;
  int64_t tile_row_ = 0, h_ = 0, b_ = 0, g_ = 0, row0_ = 0, rows_ = 0, strips_ = 0;
  int64_t stride_ = 0;        // of output rows
  int64_t value_stride_ = 0;  // of value rows
};

inline void RunTileRow(const Problem& p, int64_t item, void* memory) { TileRow(p, item, memory).Compute(); }

}  // namespace STOF_ISA
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_KERNEL_H_
