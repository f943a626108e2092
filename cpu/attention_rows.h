// SPDX-License-Identifier: Apache-2.0
// One worker of the attention kernel: a tile of query rows of one head against the key tiles that its mask keeps.
#ifndef STOF_CPU_ATTENTION_ROWS_H_
#define STOF_CPU_ATTENTION_ROWS_H_

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cpu/ahead.h"
#include "cpu/attention.h"
#include "cpu/attention_block.h"
#include "cpu/convert.h"

namespace stof {
namespace cpu {
namespace STOF_ISA {

constexpr float kInf = __builtin_inff();
// Strips that share one pass over a key tile: their queries, scores and outputs (6 KiB each at D = 64) and a panel of
// keys (4 KiB) fit the 32 KiB L1, so that keys and values come from L2 once per 24 rows instead of once per 6.
constexpr int kGroup = 4;
// The running maximum is raised only when a score exceeds it by 2^8; weights stay below 256, and the output is rescaled
// a few times per row instead of at every new maximum.
constexpr float kSlack = 8.0f;
// Scores start at minus the running maximum, which saves a subtraction from each. Not where that maximum lies far below
// scores that may follow, as a bias of -10000 leaves it: they would lose their low bits.
constexpr float kLowestStart = -16.0f, kHighestStart = 1e30f;
constexpr float kNoStart[kStrip] = {};

// The memory of one worker.
struct Scratch {
  Scratch(const Problem& problem, void* base) : bytes_(reinterpret_cast<char*>(base)) {
    const AttentionArgs& args = *problem.args;
    const int64_t rows = problem.direct ? problem.m : RoundUp(problem.m, kStrip);
    const int64_t words = problem.n / 32;
    ldq = RoundUp(args.D, kPanel);
    ldo = RoundUp(args.Dv, kPanel);
    mean_of = Take<int64_t>(1);
    ring_of = Take<int64_t>(problem.ring_tiles);
    ring = Take<float>(problem.ring_tiles * problem.n * args.D);
    ring_values = Take<float>(problem.pack_values ? problem.ring_tiles * problem.n * ldo : 0);
    q = Take<float>(rows * ldq);
    o = Take<float>(rows * ldo);
    s = Take<float>((problem.direct ? 1 : kGroup * kStrip) * static_cast<int64_t>(problem.n));
    max = Take<float>(rows);
    start = Take<float>(rows);
    sum = Take<float>(rows * kWidth);
    bias = Take<float>(problem.n);
    row = Take<float>(ldo);
    mean = Take<float>(ldo);
    empty = Take<uint8_t>(rows);
    words_joined = Take<uint32_t>(problem.m * words);
    words_dynamic = Take<uint32_t>(problem.m * words);
    words_tail = Take<uint32_t>(words);
    copy_values = problem.direct && (args.dtype != DType::kF32 || args.Dv % kWidth != 0);
    copy_keys = problem.direct && (args.dtype != DType::kF32 || args.D % kWidth != 0);
    values = Take<float>(copy_values ? problem.n * ldo : 0);
    keys = Take<float>(copy_keys ? problem.n * ldq : args.dtype != DType::kF32 ? kPanel * ldq : 0);
    size = static_cast<size_t>(bytes_ - reinterpret_cast<char*>(base));
  }

  int64_t ldq, ldo;
  int64_t* mean_of;  // b * G + g of the values whose mean is in `mean`, or -1
  int64_t* ring_of;  // (b * G + g) * key_tiles + tile of the packed keys in a slot of the ring, or -1
  float *ring, *ring_values, *q, *o, *s, *max, *start, *sum, *bias, *row, *mean, *values, *keys;
  uint8_t* empty;
  uint32_t *words_joined, *words_dynamic, *words_tail;
  bool copy_values, copy_keys;
  size_t size;

 private:
  template <typename T>
  T* Take(int64_t count) {
    T* result = reinterpret_cast<T*>(bytes_);
    bytes_ += RoundUp(count * static_cast<int64_t>(sizeof(T)), 64);
    return result;
  }
  char* bytes_;
};

// The keys that exist in the last key tile.
inline void FillTailWords(const Problem& problem, uint32_t* words) {
  const int64_t tail = problem.args->T - (problem.key_tiles - 1) * problem.n;
  for (int64_t w = 0; w < problem.n / 32; ++w) {
    const int64_t keys = tail - 32 * w;
    words[w] = keys >= 32 ? ~0u : keys <= 0 ? 0u : (1u << keys) - 1u;
  }
}

inline void CopyRows(const char* from, DType dtype, int64_t stride, int64_t rows, int64_t size, int64_t ld, float* to) {
  for (int64_t i = 0; i < rows; ++i) {
    ToFloats(from + i * stride * SizeOf(dtype), dtype, size, to + i * ld);
    for (int64_t d = size; d < ld; ++d) to[i * ld + d] = 0.0f;
  }
}

// One panel of a head.
inline void PackKeys(const char* head, int64_t panel, const AttentionArgs& args, const Scratch& scratch, float* to) {
  const int64_t key0 = panel * kPanel, count = Least(kPanel, args.T - key0);
  const char* from = head + SizeOf(args.dtype) * key0 * args.key_stride.s;
  if (args.dtype == DType::kF32) {
    PackPanel(reinterpret_cast<const float*>(from), args.key_stride.s, count, args.D, to);
  } else {
    CopyRows(from, args.dtype, args.key_stride.s, count, args.D, scratch.ldq, scratch.keys);
    PackPanel(scratch.keys, scratch.ldq, count, args.D, to);
  }
}

// Values of up to `rows` keys from key0 on, as floats with rows of ldo.
inline void CopyValues(const char* head, int64_t key0, int64_t rows, const AttentionArgs& args, int64_t ldo,
                       float* to) {
  CopyRows(head + SizeOf(args.dtype) * key0 * args.value_stride.s, args.dtype, args.value_stride.s,
           Least(rows, args.T - key0), args.Dv, ldo, to);
}

template <bool kDirect>
class Worker {
  static constexpr int kRows = kDirect ? 1 : kStrip;  // of a strip
  static constexpr int kStrips = kDirect ? 1 : kGroup;

 public:
  Worker(const Problem& problem, void* scratch)
      : problem_(problem), args_(*problem.args), scratch_(problem, scratch), item_size_(SizeOf(args_.dtype)) {}

  void Begin(int64_t b, int64_t h, int64_t row0, int64_t rows) {
    b_ = b;
    h_ = h;
    g_ = h / (args_.H / args_.G);
    row0_ = row0;
    rows_ = static_cast<int>(rows);
    keys_ = static_cast<const char*>(args_.key) + item_size_ * (b * args_.key_stride.b + g_ * args_.key_stride.h);
    values_ =
        static_cast<const char*>(args_.value) + item_size_ * (b * args_.value_stride.b + g_ * args_.value_stride.h);
    group_ = b * args_.G + g_;
    ahead_.Clear();
    LoadQueries();
    Clear();
  }

  // What the item of these rows will read and write, as far as this one does not bring it into the cache.
  void LookAhead(int64_t b, int64_t h, int64_t row0) {
    const int64_t g = h / (args_.H / args_.G), rows = Least(problem_.m, args_.S - row0);
    const auto row = [this](const void* base, const Strides& stride, int64_t batch, int64_t head, int64_t position) {
      return static_cast<const char*>(base) + item_size_ * (batch * stride.b + head * stride.h + position * stride.s);
    };
    ahead_.Add(row(args_.query, args_.query_stride, b, h, row0), item_size_ * args_.query_stride.s, rows,
               item_size_ * args_.D);
    ahead_.Add(row(args_.output, args_.output_stride, b, h, row0), item_size_ * args_.output_stride.s, rows,
               item_size_ * args_.Dv);
    int64_t first = 0, last = 0, tiles = problem_.key_tiles;
    if (args_.mask != nullptr) {
      const int64_t here = MaskRow(b_, h_, row0_), there = MaskRow(b, h, row0);
      tiles = args_.mask->row_ptr[here + 1] - args_.mask->row_ptr[here];
      TileRange(here, &first, &last);
      if (b == b_ && g == g_ && problem_.ring_tiles > 0) {
        int64_t from = 0, to = 0;
        TileRange(there, &from, &to);
        for (int64_t tile = from > last ? from : last; tile < to && tile < last + 2; ++tile) {
          const int64_t key0 = tile * problem_.n, keys = Least(problem_.n, args_.T - key0);
          ahead_.Add(row(args_.key, args_.key_stride, b, g, key0), item_size_ * args_.key_stride.s, keys,
                     item_size_ * args_.D);
          ahead_.Add(row(args_.value, args_.value_stride, b, g, key0), item_size_ * args_.value_stride.s, keys,
                     item_size_ * args_.Dv);
        }
      }
    }
    const int64_t steps = tiles * ((rows_ + kRows - 1) / kRows);
    fetch_ = steps > 0 ? (ahead_.lines() + steps - 1) / steps : 0;
  }

  // Key tiles [first, last) that the mask keeps. unmasked: all of them, every key.
  void Sweep(int64_t first, int64_t last, bool unmasked) {
    const BlockMask* mask = args_.mask;
    if (mask == nullptr || unmasked) {
      for (int64_t tile = first; tile < last; ++tile) Tile(tile, nullptr, unmasked);
      return;
    }
    const int64_t row = MaskRow(b_, h_, row0_);
    const int32_t* tiles = mask->key_tile.data();
    const int64_t words = static_cast<int64_t>(problem_.m) * (problem_.n / 32);
    const int64_t full = mask->full_begin[row], end = mask->row_ptr[row + 1];
    for (int64_t i = LowerBound(tiles, mask->row_ptr[row], full, first); i < full && tiles[i] < last; ++i) {
      Tile(tiles[i], mask->bits.data() + mask->bits_id[i] * words, false);
    }
    for (int64_t i = LowerBound(tiles, full, end, first); i < end && tiles[i] < last; ++i)
      Tile(tiles[i], nullptr, false);
  }

  // Writes the rows; those without a key by the policy.
  __attribute__((noinline)) void Finish() {
    bool all = false;
    for (int r = 0; r < rows_; ++r) {
      const float sum = Simd::ReduceAdd(Simd::Load(scratch_.sum + r * kWidth));
      scratch_.empty[r] = sum == 0.0f;
      const float divisor = sum == 0.0f ? 0.0f : sum + SinkWeight(r);
      if (args_.lse != nullptr) StoreLogSum(r, divisor);
      if (sum != 0.0f) {
        WriteRow(r, 1.0f / divisor);
      } else if (args_.empty_rows == EmptyRows::kAll) {
        all = true;
      } else {
        WriteEmptyRow(r);
      }
    }
    if (!all) return;
    Clear();
    Sweep(0, problem_.key_tiles, true);
    for (int r = 0; r < rows_; ++r) {
      if (!scratch_.empty[r]) continue;
      const float sum = Simd::ReduceAdd(Simd::Load(scratch_.sum + r * kWidth));
      WriteRow(r, sum == 0.0f ? 0.0f : 1.0f / sum);  // 0 only without any key at all
    }
  }

  // Direct: one row's maximum, sum and output, not divided.
  void StorePartial(int r, float* to) {
    to[0] = scratch_.max[r];
    to[1] = Simd::ReduceAdd(Simd::Load(scratch_.sum + r * kWidth));
    for (int64_t d = 0; d < args_.Dv; ++d) to[2 + d] = scratch_.o[r * scratch_.ldo + d];
  }
  // Direct: the state of row 0 from the parts, in their order.
  void JoinPartials(const float* parts, int64_t count, int64_t stride) {
    float max = -kInf;
    for (int64_t i = 0; i < count; ++i) max = parts[i * stride] > max ? parts[i * stride] : max;
    for (int64_t i = 0; i < count; ++i) {
      const float* part = parts + i * stride;
      // A part without a maximum holds zeros, or NaN, which has to stay.
      const float scale = part[0] == -kInf || part[0] == max ? 1.0f : Exp2Scalar(part[0] - max);
      scratch_.sum[0] += part[1] * scale;
      for (int64_t d = 0; d < args_.Dv; ++d) scratch_.o[d] += part[2 + d] * scale;
    }
    scratch_.max[0] = max;
  }

 private:
  int64_t MaskRow(int64_t b, int64_t h, int64_t row0) const {
    return static_cast<int64_t>(args_.mask->TableOf(b, h)) * args_.mask->rows + row0 / problem_.m;
  }
  // The first key tile of a row of the block mask and the one after its last.
  void TileRange(int64_t row, int64_t* first, int64_t* last) const {
    const BlockMask& mask = *args_.mask;
    const int64_t begin = mask.row_ptr[row], full = mask.full_begin[row], end = mask.row_ptr[row + 1];
    *first = *last = 0;
    if (begin == end) return;
    *first = mask.key_tile[begin < full ? begin : full];
    if (full < end) *first = Least(*first, mask.key_tile[full]);
    if (begin < full) *last = mask.key_tile[full - 1] + 1;
    if (full < end && mask.key_tile[end - 1] >= *last) *last = mask.key_tile[end - 1] + 1;
  }
  static int64_t LowerBound(const int32_t* tiles, int64_t first, int64_t last, int64_t tile) {
    while (first < last) {
      const int64_t middle = (first + last) / 2;
      if (tiles[middle] < tile) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first;
  }
  static float Exp2Scalar(float x) {
    float lanes[kWidth];
    Simd::Store(lanes, Exp2(Simd::Set1(x)));
    return lanes[0];
  }

  // The share of the sink in a row's sum. Beyond 2^127 weights vanish beside it as well as at it.
  float SinkWeight(int r) const {
    if (args_.sink == nullptr) return 0.0f;
    const float x = ToFloat(args_.sink, args_.sink_dtype, h_) * kLog2E - scratch_.max[r];
    return Exp2Scalar(x > 127.0f ? 127.0f : x);
  }

  // The natural logarithm of a row's divisor, its sink's logit where that is all there is or far above all scores.
  __attribute__((noinline)) void StoreLogSum(int r, float divisor) const {
    constexpr float kLn2 = 0.693147180559945309417f;
    float sum = divisor == 0.0f ? -kInf : (scratch_.max[r] + __builtin_log2f(divisor)) * kLn2;
    if (args_.sink != nullptr) {
      const float sink = ToFloat(args_.sink, args_.sink_dtype, h_);
      if (sum < sink) sum = sink;  // NaN stays
    }
    args_.lse[b_ * args_.lse_stride_b + h_ * args_.lse_stride_h + row0_ + r] = sum;
  }

  int PaddedRows() const { return (rows_ + kRows - 1) / kRows * kRows; }

  __attribute__((noinline)) void LoadQueries() {
    // Scores come out in units of log2, or for softcap as 2 log2(e) times the argument of tanh.
    const float scale = args_.softcap > 0.0f ? args_.scale / args_.softcap * (2.0f * kLog2E) : args_.scale * kLog2E;
    const char* query =
        static_cast<const char*>(args_.query) + item_size_ * (b_ * args_.query_stride.b + h_ * args_.query_stride.h);
    const V factor = Simd::Set1(scale);
    const bool plain = args_.dtype == DType::kF32 && args_.D % kPanel == 0;
    for (int r = 0; r < PaddedRows(); ++r) {
      float* to = scratch_.q + r * scratch_.ldq;
      const float* from = to;
      int64_t d = 0;
      if (r < rows_) {
        const char* row = query + item_size_ * (row0_ + r) * args_.query_stride.s;
        if (plain) {
          from = reinterpret_cast<const float*>(row);
        } else {
          ToFloats(row, args_.dtype, args_.D, to);
        }
        d = args_.D;
      }
      for (; d < scratch_.ldq; ++d) to[d] = 0.0f;
      for (d = 0; d < scratch_.ldq; d += kWidth) Simd::Store(to + d, Simd::Mul(Simd::Load(from + d), factor));
    }
  }

  void Clear() {
    const V zero = Simd::Set1(0.0f);
    for (int r = 0; r < PaddedRows(); ++r) {
      scratch_.max[r] = -kInf;
      scratch_.start[r] = 0.0f;
      Simd::Store(scratch_.sum + r * kWidth, zero);
      for (int64_t d = 0; d < scratch_.ldo; d += kWidth) Simd::Store(scratch_.o + r * scratch_.ldo + d, zero);
    }
  }

  // ---- masks ----
  // words_ and word_stride_ (0: the same for all rows) of the tile. False: nothing is allowed; words_ nullptr:
  // everything.
  bool FindMask(int64_t tile, const uint32_t* bits, bool unmasked) {
    const int64_t count = problem_.n / 32;
    const uint32_t* sources[3];
    int64_t strides[3];
    int used = 0;
    if (bits != nullptr) {
      sources[used] = bits;
      strides[used++] = count;
    }
    const bool beyond = (tile + 1) * problem_.n > args_.T;
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
    } else if (beyond && bits == nullptr) {
      sources[used] = scratch_.words_tail;
      strides[used++] = 0;
    }
    if (args_.dynamic != nullptr && !unmasked) {
      const int kind = args_.dynamic->tile(args_.dynamic->self, b_, h_, row0_, tile * problem_.n, problem_.m,
                                           problem_.n, scratch_.words_dynamic);
      if (kind == 0) return false;
      if (kind == 1) {
        sources[used] = scratch_.words_dynamic;
        strides[used++] = count;
      }
    }
    words_ = used == 0 ? nullptr : sources[0];
    word_stride_ = used == 0 ? 0 : strides[0];
    if (used < 2) return true;
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t w = 0; w < count; ++w) {
        uint32_t word = sources[0][r * strides[0] + w] & sources[1][r * strides[1] + w];
        if (used == 3) word &= sources[2][r * strides[2] + w];
        scratch_.words_joined[r * count + w] = word;
      }
    }
    words_ = scratch_.words_joined;
    word_stride_ = count;
    return true;
  }

  // What a strip does in a tile.
  struct Strip {
    int row = 0;  // first of its rows in the row tile
    int run_count = 0;
    uint32_t active = 0;   // panels in which one of its rows may attend a key
    uint32_t partial = 0;  // panels in which not all of its rows may attend all keys
    Run runs[kMaxTileKeys / kPanel / 2 + 1];
  };

  __attribute__((noinline)) void FindPanels(int keys, Strip* strip) const {
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
    const int last = static_cast<int>(Least(strip->row + kRows, rows_));
    for (int w = 0; w < problem_.n / 32; ++w) {
      uint32_t any = 0, all = ~0u;
      for (int r = strip->row; r < last; ++r) {
        const uint32_t word = words_[r * word_stride_ + w];
        any |= word;
        all &= word;
      }
      strip->active |= ((any & 0xffffu) != 0 ? 1u : 0u) << (2 * w) | ((any >> 16) != 0 ? 2u : 0u) << (2 * w);
      strip->partial |= ((all & 0xffffu) != 0xffffu ? 1u : 0u) << (2 * w) | ((all >> 16) != 0xffffu ? 2u : 0u)
                                                                                << (2 * w);
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
      run->last = static_cast<int>(Least(p * kPanel, keys));
    }
  }

  // ---- a tile ----
  void Tile(int64_t tile, const uint32_t* bits, bool unmasked) {
    if (!FindMask(tile, bits, unmasked)) return;
    const int64_t key0 = tile * problem_.n;
    const int keys = static_cast<int>(Least(problem_.n, args_.T - key0));
    const float* values = reinterpret_cast<const float*>(values_) + key0 * args_.value_stride.s;
    int64_t ldv = args_.value_stride.s;
    const float* packed = kDirect ? nullptr : PackedTile(tile);
    if (scratch_.copy_values) {
      CopyValues(values_, key0, keys, args_, scratch_.ldo, scratch_.values);
      values = scratch_.values;
      ldv = scratch_.ldo;
    } else if (!kDirect && problem_.pack_values) {
      values = PackedValues(tile);
      ldv = scratch_.ldo;
    }
    const float* direct_keys = reinterpret_cast<const float*>(keys_) + key0 * args_.key_stride.s;
    int64_t ldk = args_.key_stride.s;
    if (kDirect && scratch_.copy_keys) {
      CopyRows(keys_ + item_size_ * key0 * args_.key_stride.s, args_.dtype, args_.key_stride.s, keys, args_.D,
               scratch_.ldq, scratch_.keys);
      direct_keys = scratch_.keys;
      ldk = scratch_.ldq;
    }
    for (int first = 0; first < rows_; first += kStrips * kRows) {
      Strip strips[kStrips];
      int count = 0;
      for (int row = first; row < rows_ && row < first + kStrips * kRows; row += kRows) {
        strips[count].row = row;
        FindPanels(keys, &strips[count]);
        count += strips[count].active != 0;
      }
      if (count == 0) continue;
      if (kDirect) {
        DirectScores(strips[0], direct_keys, ldk);
      } else {
        PackedScores(strips, count, packed);
      }
      for (int i = 0; i < count; ++i) {
        float* s = scratch_.s + i * kRows * static_cast<int64_t>(problem_.n);
        Adjust(strips[i], s, key0, keys, unmasked);
        Softmax(strips[i], s);
        ahead_.Fetch(fetch_);
      }
      Values(strips, count, values, ldv);
    }
  }

  // The packed keys of a tile; with a ring, its values are packed with them.
  const float* PackedTile(int64_t tile) const {
    const int64_t panels = problem_.n / kPanel, size = args_.D * kPanel;
    if (problem_.ring_tiles == 0) return problem_.packed_keys + (group_ * problem_.panels + tile * panels) * size;
    const int64_t slot = tile % problem_.ring_tiles, wanted = group_ * problem_.key_tiles + tile;
    float* const keys = scratch_.ring + slot * panels * size;
    if (scratch_.ring_of[slot] == wanted) return keys;
    scratch_.ring_of[slot] = wanted;
    const int64_t first = tile * panels, end = Least(first + panels, problem_.panels);
    for (int64_t p = first; p < end; ++p) PackKeys(keys_, p, args_, scratch_, keys + (p - first) * size);
    if (problem_.pack_values) {
      CopyValues(values_, tile * problem_.n, problem_.n, args_, scratch_.ldo,
                 scratch_.ring_values + slot * problem_.n * scratch_.ldo);
    }
    return keys;
  }
  const float* PackedValues(int64_t tile) const {
    const int64_t size = problem_.n * scratch_.ldo;
    if (problem_.ring_tiles > 0) return scratch_.ring_values + tile % problem_.ring_tiles * size;
    return problem_.packed_values + group_ * problem_.panels * kPanel * scratch_.ldo + tile * size;
  }

  template <int kBlock>
  static void StripScores(int rows, const float* q, int64_t ldq, int64_t size, const float* keys, int64_t stride,
                          const float* start, float* s, int64_t lds) {
    if (rows > 4) return Scores<kStrip, kBlock>(q, ldq, size, keys, stride, start, s, lds);
    if (rows > 2) return Scores<4, kBlock>(q, ldq, size, keys, stride, start, s, lds);
    Scores<2, kBlock>(q, ldq, size, keys, stride, start, s, lds);
  }

  void PackedScores(const Strip* strips, int count, const float* keys) const {
    const int64_t stride = args_.D * kPanel;
    const int64_t ldq = scratch_.ldq, lds = problem_.n, size = args_.D;
    constexpr int kBlockKeys = kVectors * kWidth;
    constexpr int kBlockPanels = kBlockKeys > kPanel ? kBlockKeys / kPanel : 1;
    uint32_t any = 0;
    for (int i = 0; i < count; ++i) any |= strips[i].active;
    // Blocks of panels from the first one that a strip needs; every strip reads a block before the next is fetched.
    while (any != 0) {
      const int p = __builtin_ctz(any);
      const int length = __builtin_ctz(~(any >> p));
      // A block of one panel has too few accumulators to hide the latency of an FMA: five are three and two.
      const int block = length == kBlockPanels + 1 && kBlockPanels > 2 ? kBlockPanels - 1
                                                                       : static_cast<int>(Least(length, kBlockPanels));
      const uint32_t here = (1u << block) - 1u;
      any &= ~(here << p);
      for (int i = 0; i < count; ++i) {
        uint32_t active = strips[i].active >> p & here;
        const float* q = scratch_.q + strips[i].row * ldq;
        const float* start = args_.softcap > 0.0f ? kNoStart : scratch_.start + strips[i].row;
        const int rows = rows_ - strips[i].row;
        while (active != 0) {
          const int at = __builtin_ctz(active);
          const int run = __builtin_ctz(~(active >> at));
          active &= ~(((1u << run) - 1u) << at);
          const float* from = keys + (p + at) * stride;
          float* to = scratch_.s + i * kRows * lds + (p + at) * kPanel;
          if constexpr (kBlockPanels == 1) {
            for (int c = 0; c < kPanel; c += kBlockKeys) {
              StripScores<kVectors>(rows, q, ldq, size, from + c, stride, start, to + c, lds);
            }
          } else {
            if (run == 4) StripScores<4>(rows, q, ldq, size, from, stride, start, to, lds);
            if (run == 3) StripScores<3>(rows, q, ldq, size, from, stride, start, to, lds);
            if (run == 2) StripScores<2>(rows, q, ldq, size, from, stride, start, to, lds);
            if (run == 1) StripScores<1>(rows, q, ldq, size, from, stride, start, to, lds);
          }
        }
      }
    }
  }

  void DirectScores(const Strip& strip, const float* keys, int64_t ldk) const {
    const float* q = scratch_.q + strip.row * scratch_.ldq;
    const float start = args_.softcap > 0.0f ? 0.0f : scratch_.start[strip.row];
    const int64_t size = RoundUp(args_.D, kWidth);
    for (int i = 0; i < strip.run_count; ++i) {
      int k = strip.runs[i].first;
      for (; k + 8 <= strip.runs[i].last; k += 8) {
        V sum[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) sum[j] = Simd::Set1(0.0f);
        for (int64_t d = 0; d < size; d += kWidth) {
          const V x = Simd::Load(q + d);
#pragma GCC unroll 8
          for (int j = 0; j < 8; ++j) sum[j] = Simd::Fma(x, Simd::Load(keys + (k + j) * ldk + d), sum[j]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) scratch_.s[k + j] = start + Simd::ReduceAdd(sum[j]);
      }
      for (; k < strip.runs[i].last; ++k) {
        V sum = Simd::Set1(0.0f);
        for (int64_t d = 0; d < size; d += kWidth)
          sum = Simd::Fma(Simd::Load(q + d), Simd::Load(keys + k * ldk + d), sum);
        scratch_.s[k] = start + Simd::ReduceAdd(sum);
      }
      for (; k % kPanel != 0; ++k) scratch_.s[k] = -kInf;
    }
  }

  // Softcap, bias and mask.
  __attribute__((noinline)) void Adjust(const Strip& strip, float* s, int64_t key0, int keys, bool unmasked) const {
    const V forbidden = Simd::Set1(-kInf);
    const int rows = static_cast<int>(Least(kRows, rows_ - strip.row));
    if (args_.softcap > 0.0f) {
      const V cap = Simd::Set1(args_.softcap * kLog2E);
      for (int r = 0; r < rows; ++r) {
        const V start = Simd::Set1(scratch_.start[strip.row + r]);
        ForEachVector(strip, s + r * problem_.n, [&](float* at, int) {
          Simd::Store(at, Simd::Fma(cap, TanhFromExponent(Simd::Load(at)), start));
        });
      }
    }
    if (args_.bias != nullptr || args_.relative_bias != nullptr) {
      const V lowest = Simd::Set1(-FLT_MAX), log2e = Simd::Set1(kLog2E);
      for (int r = 0; r < rows; ++r) {
        LoadBias(row0_ + strip.row + r, key0, keys);
        ForEachVector(strip, s + r * problem_.n, [&](float* at, int column) {
          const V x = Simd::Load(at), bias = Simd::Load(scratch_.bias + column);
          // The lowest finite value is a bias, not a mask: it must not become -inf in units of log2.
          const V sum = Simd::Add(x, Simd::Max(lowest, Simd::Mul(bias, log2e)));
          Simd::Store(at, Simd::WhereEqual(bias, forbidden, unmasked ? x : forbidden, sum));
        });
      }
    }
    for (uint32_t left = strip.partial; left != 0; left &= left - 1u) {
      const int column = __builtin_ctz(left) * kPanel;
      for (int r = 0; r < rows; ++r) {
        const uint32_t word = words_[(strip.row + r) * word_stride_ + column / 32] >> (column % 32);
        float* at = s + r * problem_.n + column;
        for (int c = 0; c < kPanel; c += kWidth)
          Simd::Store(at + c, Simd::Where(word >> c, Simd::Load(at + c), forbidden));
      }
    }
  }

  template <typename F>
  void ForEachVector(const Strip& strip, float* s, F f) const {
    for (int i = 0; i < strip.run_count; ++i) {
      for (int c = strip.runs[i].first; c < strip.runs[i].last; c += kWidth) f(s + c, c);
    }
  }

  // The sum of a row's biases.
  void LoadBias(int64_t row, int64_t key0, int keys) const {
    if (args_.bias != nullptr) {
      LoadPairs(row, key0, keys);
    } else {
      for (int k = 0; k < keys; ++k) scratch_.bias[k] = 0.0f;
    }
    if (args_.relative_bias != nullptr) AddRelative(row, key0, keys);
    for (int k = keys; k % kPanel != 0; ++k) scratch_.bias[k] = 0.0f;
  }

  void AddRelative(int64_t row, int64_t key0, int keys) const {
    const float* table = args_.relative_bias + h_ * args_.relative_bias_stride_h;
    const int64_t size = args_.relative_bias_size;
    const int64_t first = key0 - (args_.query_position + row) + size / 2;  // entry of key 0, before it is clamped
    const int low = static_cast<int>(Clamp(-first, 0, keys)), high = static_cast<int>(Clamp(size - first, low, keys));
    float* to = scratch_.bias;
    for (int k = 0; k < low; ++k) to[k] += table[0];
    for (int k = low; k < high; ++k) to[k] += table[first + k];
    for (int k = high; k < keys; ++k) to[k] += table[size - 1];
  }
  static int64_t Clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

  void LoadPairs(int64_t row, int64_t key0, int keys) const {
    const int64_t at =
        b_ * args_.bias_stride_b + h_ * args_.bias_stride_h + row * args_.bias_stride_q + key0 * args_.bias_stride_k;
    float* to = scratch_.bias;
    if (args_.bias_stride_k == 1) {
      ToFloats(static_cast<const char*>(args_.bias) + at * SizeOf(args_.bias_dtype), args_.bias_dtype, keys, to);
    } else {
      for (int k = 0; k < keys; ++k) to[k] = ToFloat(args_.bias, args_.bias_dtype, at + k * args_.bias_stride_k);
    }
  }

  // Scores become weights; sums, and where the maximum grows much, the state of the strip's rows follow. Whole panels:
  // what lies beyond T in the last one is forbidden by the mask.
  __attribute__((noinline)) void Softmax(const Strip& strip, float* s) {
    constexpr int kParts = kPanel / kWidth;
    const int64_t lds = problem_.n;
    const int runs = strip.run_count;
    const float* max = scratch_.max + strip.row;
    float* start = scratch_.start + strip.row;
    const int rows = static_cast<int>(Least(kRows, rows_ - strip.row));
    V high[kRows] = {};
    auto exceeded = Simd::Greater(Simd::Set1(0.0f), Simd::Set1(0.0f));
    for (int r = 0; r < rows; ++r) {
      V x[kParts];
#pragma GCC unroll 4
      for (int j = 0; j < kParts; ++j) x[j] = Simd::Set1(-kInf);
      for (int i = 0; i < runs; ++i) {
        const float* at = s + r * lds + strip.runs[i].first;
        const float* const end = s + r * lds + strip.runs[i].last;
        for (; at < end; at += kPanel) {
#pragma GCC unroll 4
          for (int j = 0; j < kParts; ++j) x[j] = Simd::Max(x[j], Simd::Load(at + j * kWidth));
        }
      }
#pragma GCC unroll 4
      for (int j = 1; j < kParts; ++j) x[0] = Simd::Max(x[0], x[j]);
      high[r] = x[0];
      exceeded = Simd::Or(exceeded, Simd::Greater(x[0], Simd::Set1(max[r] + start[r] + kSlack)));
    }
    const bool raised = Simd::Any(exceeded);
    if (raised) Rescale(strip, rows, high);
    float base[kRows] = {};  // what these scores still exceed their distance to the maximum by
    bool apart = false;
    for (int r = 0; r < rows; ++r) {
      base[r] = max[r] == -kInf ? 0.0f : max[r] + start[r];
      apart |= base[r] != 0.0f;
    }
    if (apart) {
      Weights<true>(strip, rows, base, s);
    } else {
      Weights<false>(strip, rows, base, s);
    }
    if (!raised) return;
    for (int r = 0; r < rows; ++r) start[r] = max[r] >= kLowestStart && max[r] <= kHighestStart ? -max[r] : 0.0f;
  }

  template <bool kApart>
  void Weights(const Strip& strip, int rows, const float* bases, float* s) {
    constexpr int kParts = kPanel / kWidth;
    for (int r = 0; r < rows; ++r) {
      float* sum_at = scratch_.sum + (strip.row + r) * kWidth;
      const V base = Simd::Set1(bases[r]);
      V sum = Simd::Load(sum_at);
      for (int i = 0; i < strip.run_count; ++i) {
        float* at = s + r * problem_.n + strip.runs[i].first;
        const float* const end = s + r * problem_.n + strip.runs[i].last;
        for (; at < end; at += kPanel) {
#pragma GCC unroll 4
          for (int j = 0; j < kParts; ++j) {
            V x = Simd::Load(at + j * kWidth);
            if constexpr (kApart) x = Simd::Sub(x, base);
            const V p = Exp2(x);
            Simd::Store(at + j * kWidth, p);
            sum = Simd::Add(sum, p);
          }
        }
      }
      Simd::Store(sum_at, sum);
    }
  }

  __attribute__((noinline)) void Rescale(const Strip& strip, int rows, const V* high) {
    for (int r = 0; r < rows; ++r) {
      float* max = scratch_.max + strip.row + r;
      const float old = *max, now = Simd::ReduceMax(high[r]) - scratch_.start[strip.row + r];
      if (!(now > old + kSlack)) continue;
      *max = now;
      if (old == -kInf) continue;  // sum and output hold zeros, or NaN, which has to stay
      const V scale = Simd::Set1(Exp2Scalar(old - now));
      float* sum = scratch_.sum + (strip.row + r) * kWidth;
      Simd::Store(sum, Simd::Mul(Simd::Load(sum), scale));
      float* o = scratch_.o + (strip.row + r) * scratch_.ldo;
      for (int64_t d = 0; d < scratch_.ldo; d += kWidth) Simd::Store(o + d, Simd::Mul(Simd::Load(o + d), scale));
    }
  }

  void Values(const Strip* strips, int count, const float* values, int64_t ldv) const {
    const int64_t size = RoundUp(args_.Dv, kWidth) / kWidth;
    constexpr int kBlock = kDirect ? 8 : kVectors;
    for (int64_t d = 0; d < size; d += kBlock) {
      const int64_t left = Least(kBlock, size - d);
      for (int i = 0; i < count; ++i) {
        const float* p = scratch_.s + i * kRows * static_cast<int64_t>(problem_.n);
        float* o = scratch_.o + strips[i].row * scratch_.ldo + d * kWidth;
        if (kDirect || rows_ - strips[i].row > 4) {
          AddBlock<kRows, kBlock>(left, p, strips[i], values + d * kWidth, ldv, o);
        } else if (rows_ - strips[i].row > 2) {
          AddBlock<4, kBlock>(left, p, strips[i], values + d * kWidth, ldv, o);
        } else {
          AddBlock<2, kBlock>(left, p, strips[i], values + d * kWidth, ldv, o);
        }
      }
    }
  }
  template <int kHeight, int kBlock>
  void AddBlock(int64_t left, const float* p, const Strip& strip, const float* v, int64_t ldv, float* o) const {
    if (left == kBlock) {
      AddValues<kHeight, kBlock>(p, problem_.n, strip.runs, strip.run_count, v, ldv, o, scratch_.ldo);
    } else if constexpr (kBlock > 1) {
      AddBlock<kHeight, kBlock - 1>(left, p, strip, v, ldv, o);
    }
  }

  // ---- output ----
  char* OutputRow(int r) const {
    return static_cast<char*>(args_.output) +
           item_size_ * (b_ * args_.output_stride.b + h_ * args_.output_stride.h + (row0_ + r) * args_.output_stride.s);
  }
  void WriteRow(int r, float factor) const {
    const V scale = Simd::Set1(factor);
    const bool plain = args_.dtype == DType::kF32 && args_.Dv % kPanel == 0;
    float* to = plain ? reinterpret_cast<float*>(OutputRow(r)) : scratch_.row;
    for (int64_t d = 0; d < scratch_.ldo; d += kWidth) {
      Simd::Store(to + d, Simd::Mul(Simd::Load(scratch_.o + r * scratch_.ldo + d), scale));
    }
    if (!plain) FromFloats(scratch_.row, args_.dtype, args_.Dv, OutputRow(r));
  }
  void WriteEmptyRow(int r) {
    if (args_.empty_rows == EmptyRows::kMean && args_.T > 0) {
      FindMean();
      FromFloats(scratch_.mean, args_.dtype, args_.Dv, OutputRow(r));
      return;
    }
    const float value = args_.empty_rows == EmptyRows::kNan ? __builtin_nanf("") : 0.0f;
    for (int64_t d = 0; d < args_.Dv; ++d) scratch_.row[d] = value;
    FromFloats(scratch_.row, args_.dtype, args_.Dv, OutputRow(r));
  }
  // Its scratch is the output of row 0, which has been written by now or is itself empty.
  void FindMean() {
    if (*scratch_.mean_of == group_) return;
    *scratch_.mean_of = group_;
    for (int64_t d = 0; d < args_.Dv; ++d) scratch_.mean[d] = 0.0f;
    // In blocks, so that the rounding of a long sum stays near that of a short one.
    for (int64_t first = 0; first < args_.T; first += 256) {
      for (int64_t d = 0; d < args_.Dv; ++d) scratch_.o[d] = 0.0f;
      for (int64_t k = first; k < Least(first + 256, args_.T); ++k) {
        ToFloats(values_ + item_size_ * k * args_.value_stride.s, args_.dtype, args_.Dv, scratch_.row);
        for (int64_t d = 0; d < args_.Dv; ++d) scratch_.o[d] += scratch_.row[d];
      }
      for (int64_t d = 0; d < args_.Dv; ++d) scratch_.mean[d] += scratch_.o[d];
    }
    for (int64_t d = 0; d < args_.Dv; ++d) scratch_.mean[d] /= static_cast<float>(args_.T);
  }

  const Problem& problem_;
  const AttentionArgs& args_;
  Scratch scratch_;
  const int64_t item_size_;
  int64_t b_ = 0, h_ = 0, g_ = 0, row0_ = 0;
  int rows_ = 0;
  const char* keys_ = nullptr;
  const char* values_ = nullptr;
  int64_t group_ = 0;  // b * G + g
  const uint32_t* words_ = nullptr;
  int64_t word_stride_ = 0;
  Ahead ahead_;
  int64_t fetch_ = 0;  // lines at a time
};

}  // namespace STOF_ISA
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_ROWS_H_
