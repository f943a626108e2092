// SPDX-License-Identifier: Apache-2.0
// One worker of the attention kernel. It attends query rows of one head, or a few of several heads of a group, to the
// key tiles that their mask keeps. tile_order.h defines its members that list tiles, choose.h those that choose
// them, scores.h, relative.h, skip.h and weights.h those for one tile, output.h those that write rows.
#ifndef STOF_CPU_ATTENTION_ATTENTION_WORKER_H_
#define STOF_CPU_ATTENTION_ATTENTION_WORKER_H_

#include <cstdint>

#include "cpu/attention/attention.h"
#include "cpu/attention/bf16_block.h"
#include "cpu/attention/register_block.h"
#include "cpu/attention/scratch.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/prefetch.h"
#include "plugins/core/contract/skip_distance.h"

namespace stof {
namespace cpu {
namespace {

template <bool kInPlace>
class AttentionWorker {
  static constexpr int kRows = kInPlace ? kInPlaceStrip : kStripRows;  // of a strip
  static constexpr int kStrips = kInPlace ? 1 : kStripsPerPass;
  // Panels of packed keys whose scores a block of accumulators holds.
  static constexpr int kBlockPanels = kVectors * kWidth > kPanel ? kVectors * kWidth / kPanel : 1;

 public:
  AttentionWorker(const AttentionProblem& problem, void* scratch)
      : problem_(problem),
        args_(*problem.args),
        scratch_(problem, scratch),
        item_size_(SizeOf(args_.shape.dtype)),
        stored_size_(SizeOf(KvType(args_.shape))) {}

  // Queries [row0, row0 + rows) of heads [h, h + heads) of one group. Row r is query row0 + r % rows of head
  // h + r / rows.
  void Begin(int64_t b, int64_t h, int64_t heads, int64_t row0, int64_t rows) {
    b_ = b;
    h_ = h;
    g_ = h / (args_.shape.H / args_.shape.G);
    row0_ = row0;
    queries_ = static_cast<int>(rows);
    rows_ = static_cast<int>(heads * rows);
    key_end_ = EndOfKeys(args_, b);
    skips_ = args_.scores.skip_threshold > 0.0f;
    is_last_skipped_ = false;
    if (skips_) {
      skip_distance_ = SkipDistance(args_.scores.skip_threshold, key_end_ - problem_.column_tiles * problem_.n);
    }
    keys_ = static_cast<const char*>(args_.key.data) +
            stored_size_ * (BeginOfKeys(args_, args_.key.stride, b) + g_ * args_.key.stride.h);
    values_ = static_cast<const char*>(args_.value.data) +
              stored_size_ * (BeginOfKeys(args_, args_.value.stride, b) + g_ * args_.value.stride.h);
    key_position_ = args_.sequences.first_positions == nullptr ? 0 : args_.sequences.first_positions[b];
    query_position_ = args_.sequences.has_queries ? key_position_ : 0;
    group_ = b * args_.shape.G + g_;
    prefetch_.Clear();
    if (!kRoundsToBf16 || problem_.relative != nullptr) LoadQueries();
    if constexpr (kRoundsToBf16) RoundQueries();
    Clear();
    if constexpr (!kInPlace) {
      if (problem_.relative != nullptr) BeginRelative();
      if (problem_.chooses_blocks) ChooseBlocks();
    }
  }

  // Queues prefetches for the next item, which begins at row0: what it reads and writes, and this item does not.
  void QueuePrefetch(int64_t b, int64_t h, int64_t row0) {
    const int64_t g = h / (args_.shape.H / args_.shape.G), rows = Min(problem_.m, EndOfQueries(args_, b) - row0);
    const auto row = [](const void* base, int64_t item, const Strides& stride, int64_t begin, int64_t head,
                        int64_t position) {
      return static_cast<const char*>(base) + item * (begin + head * stride.h + position * stride.s);
    };
    const Strides &query = args_.query.stride, &output = args_.output.stride;
    prefetch_.Add(row(args_.query.data, item_size_, query, BeginOfQueries(args_, query, b), h, row0),
                  item_size_ * query.s, rows, item_size_ * args_.shape.D);
    prefetch_.Add(row(args_.output.data, item_size_, output, BeginOfQueries(args_, output, b), h, row0),
                  item_size_ * output.s, rows, item_size_ * args_.shape.Dv);
    int64_t first = 0, last = 0, tiles = problem_.key_tiles;
    if (args_.mask.fixed.blocks() != nullptr) {
      const int64_t here = MaskRow(b_, h_, row0_), there = MaskRow(b, h, row0);
      tiles = problem_.mask.row_ptr[here + 1] - problem_.mask.row_ptr[here];
      TileRange(here, &first, &last);
      if (b == b_ && g == g_ && problem_.ring_tiles > 0) {
        int64_t from = 0, to = 0;
        TileRange(there, &from, &to);
        if (from < problem_.column_tiles) from = problem_.column_tiles;
        for (int64_t tile = from > last ? from : last; tile < to && tile < last + 2; ++tile) {
          const int64_t keys = Min(problem_.n, key_end_ - tile * problem_.n);
          if (keys <= 0) break;  // of a longer packed sequence
          const int64_t key0 = (tile - problem_.column_tiles) * problem_.n;
          const Strides &key = args_.key.stride, &value = args_.value.stride;
          prefetch_.Add(row(args_.key.data, stored_size_, key, BeginOfKeys(args_, key, b), g, key0),
                        stored_size_ * key.s, keys, stored_size_ * args_.shape.D);
          prefetch_.Add(row(args_.value.data, stored_size_, value, BeginOfKeys(args_, value, b), g, key0),
                        stored_size_ * value.s, keys, stored_size_ * args_.shape.Dv);
        }
      }
    }
    if (problem_.chooses_blocks) tiles = scratch_.chosen_of[1];
    const int64_t steps = tiles * ((rows_ + kRows - 1) / kRows);
    lines_per_step_ = steps > 0 ? (prefetch_.lines() + steps - 1) / steps : 0;
  }

  // Key tiles [first, last) that the mask keeps. unmasked: all of them, every key.
  void AttendTiles(int64_t first, int64_t last, bool unmasked) {
    last = Min(last, KeyTiles());
    if (unmasked) skips_ = false;  // few rows, whose strips have others among them
    if (!skips_) return AttendRange(first, last, unmasked);
    int64_t own_first = 0, own_last = 0;
    OwnTiles(&own_first, &own_last);
    own_first = Clamp(own_first, first, last), own_last = Clamp(own_last, own_first, last);
    AttendRange(own_first, own_last, unmasked);
    AttendRange(first, own_first, unmasked);
    AttendRange(own_last, last, unmasked);
  }

  // Writes the rows; fully masked ones by the policy of empty_rows.
  __attribute__((noinline)) void Finish();

  // Few queries: one row's maximum, sum and output, not divided.
  void StorePartial(int r, float* to) {
    to[0] = scratch_.max[r];
    to[1] = Simd::ReduceAdd(Simd::Load(scratch_.sum + r * kWidth));
    for (int64_t d = 0; d < args_.shape.Dv; ++d) to[2 + d] = scratch_.o[r * scratch_.ldo + d];
  }
  // Few queries: combines partial results into the state of row 0, in their order.
  void CombinePartials(const float* partials, int64_t count, int64_t stride) {
    float max = -kInf;
    for (int64_t i = 0; i < count; ++i) max = partials[i * stride] > max ? partials[i * stride] : max;
    for (int64_t i = 0; i < count; ++i) {
      const float* partial = partials + i * stride;
      // A partial result without a maximum holds zeros, or NaN, which has to stay.
      const float scale = partial[0] == -kInf || partial[0] == max ? 1.0f : ExpScalar(partial[0] - max);
      scratch_.sum[0] = Simd::Fma(partial[1], scale, scratch_.sum[0]);
      const V factor = Simd::Set1(scale);
      int64_t d = 0;
      for (; d + kWidth <= args_.shape.Dv; d += kWidth) {
        Simd::Store(scratch_.o + d, Simd::Fma(Simd::Load(partial + 2 + d), factor, Simd::Load(scratch_.o + d)));
      }
      for (; d < args_.shape.Dv; ++d) scratch_.o[d] = Simd::Fma(partial[2 + d], scale, scratch_.o[d]);
    }
    scratch_.max[0] = max;
  }

 private:
  int64_t KeyTiles() const { return (key_end_ + problem_.n - 1) / problem_.n; }  // of the sequence
  int64_t HeadOf(int r) const { return r < queries_ ? h_ : h_ + r / queries_; }
  int QueryOf(int r) const { return r < queries_ ? r : r % queries_; }  // counted from row0_

  int64_t MaskRow(int64_t b, int64_t h, int64_t row0) const {
    const BlockMaskArrays& mask = problem_.mask;
    const int64_t table = mask.layout[(mask.layout_b == 1 ? 0 : b) * mask.layout_h + (mask.layout_h == 1 ? 0 : h)];
    return table * mask.rows + row0 / problem_.m;
  }
  // The first key tile of a row of the block mask and the one after its last.
  void TileRange(int64_t row, int64_t* first, int64_t* last) const {
    const BlockMaskArrays& mask = problem_.mask;
    const int64_t begin = mask.row_ptr[row], full = mask.full_begin[row], end = mask.row_ptr[row + 1];
    *first = *last = 0;
    if (begin == end) return;
    *first = mask.key_tile[begin < full ? begin : full];
    if (full < end) *first = Min(*first, mask.key_tile[full]);
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
  static float ExpScalar(float x) {
    float lanes[kWidth];
    Simd::Store(lanes, ExpOfScore(Simd::Set1(x)));
    return lanes[0];
  }

  // The sink's part of a row sum. Clamped at e^88, where all other weights vanish beside it.
  float SinkWeight(int r) const {
    if (args_.scores.sink.data == nullptr) return 0.0f;
    const float x = ToFloat(args_.scores.sink.data, args_.scores.sink.dtype, HeadOf(r)) - scratch_.max[r];
    return ExpScalar(x > kMostExponent ? kMostExponent : x);
  }

  // Stores the log-sum-exp of a row, the sink included; -inf without keys and sink.
  __attribute__((noinline)) void StoreLogSum(int r, float sum) const;

  int PaddedRows() const { return (rows_ + kRows - 1) / kRows * kRows; }

  void Clear() {
    const V zero = Simd::Set1(0.0f);
    for (int r = 0; r < PaddedRows(); ++r) {
      scratch_.max[r] = -kInf;
      scratch_.start[r] = 0.0f;
      if (skips_) scratch_.top[r] = -kInf;
      Simd::Store(scratch_.sum + r * kWidth, zero);
      for (int64_t d = 0; d < scratch_.ldo; d += kWidth) Simd::Store(scratch_.o + r * scratch_.ldo + d, zero);
    }
    if (!HasRowWeights()) return;
    const int64_t size = PaddedRows() * problem_.relative->value.WeightStride();
    for (int64_t i = 0; i < size; ++i) scratch_.row_weights[i] = 0.0f;
  }
  bool HasRowWeights() const {
    return !kInPlace && problem_.relative != nullptr && problem_.relative->value.table != nullptr;
  }
  void FinishOutput() {
    if constexpr (!kInPlace) {
      for (int r = 0; r < rows_ && HasRowWeights(); ++r) AddRowValues(r, scratch_.o + r * scratch_.ldo);
    }
  }

  Rows KeyRows(int64_t tile) const {
    return RowsOfTile(problem_, keys_, args_.key.stride.s, problem_.column_keys, args_.shape.D, b_, g_, tile);
  }
  Rows ValueRows(int64_t tile) const {
    return RowsOfTile(problem_, values_, args_.value.stride.s, problem_.column_values, args_.shape.Dv, b_, g_, tile);
  }
  static constexpr Rows kNoRows = {};
  // Whether the rows of a tile that is read next shall be prefetched: it has n keys, and they are not copied first.
  bool CanPrefetch(int64_t tile, bool is_copied) const {
    return tile >= 0 && !is_copied && (tile + 1) * problem_.n <= key_end_;
  }

  // A strip of rows in a key tile.
  struct Strip {
    int row = 0;  // first of its rows in the row tile
    int run_count = 0;
    uint32_t active = 0;   // panels in which one of its rows may attend a key
    uint32_t partial = 0;  // panels in which not all of its rows may attend all keys
    Run runs[kMaxTileKeys / kPanel / 2 + 1];
  };

  // ---- a tile ----
  // What the matmuls of a tile read. Rows in place have the type of keys and values; copied ones are floats.
  struct TileRows {
    int64_t key0 = 0;
    int keys = 0;
    const Packed* packed = nullptr;  // keys, not in place
    const void* keys_in_place = nullptr;
    DType key_type = DType::kF32, value_type = DType::kF32;
    const void* values = nullptr;
    int64_t ldk = 0, ldv = 0;
    Rows value_rows, ahead;  // ahead: rows to prefetch while scores are computed
  };
  enum class Outcome { kWeights, kSkipped, kLostBits };

  void Tile(int64_t tile, const uint32_t* bits, bool unmasked) {
    const bool chooses = !kInPlace && problem_.chooses_blocks;
    if (chooses && scratch_.choices[tile] != kChosen) return CountLeftOut(tile);
    if (!FindMask(tile, bits, unmasked)) return;
    if (chooses && !skips_) scratch_.skip_counts[0] += PairsOf(tile);
    TileRows t;
    t.key0 = tile * problem_.n;
    t.keys = static_cast<int>(Min(problem_.n, key_end_ - t.key0));
    t.value_rows = ValueRows(tile);
    FindKeys(tile, &t);
    if (!kInPlace && problem_.pack_values) {
      t.values = PackedValues(tile);
      t.ldv = scratch_.ldo;
    } else {
      t.values = t.value_rows.At(0);
      t.ldv = t.value_rows.stride;
      t.value_type = KvType(args_.shape);
    }
    if constexpr (!kInPlace) {
      if (problem_.relative != nullptr && problem_.relative->query.table != nullptr)
        KeyProducts(t.key0, t.keys, t.packed);
    }
    bool are_values_copied = !scratch_.copy_values, is_skipped = true;
    for (int first = 0; first < rows_; first += kStrips * kRows) {
      Strip strips[kStrips];
      int count = 0;
      for (int row = first; row < rows_ && row < first + kStrips * kRows; row += kRows) {
        strips[count].row = row;
        FindPanels(t.keys, &strips[count]);
        count += strips[count].active != 0;
      }
      if (count == 0) continue;
      t.ahead = first == 0 ? RowsAhead(tile, t) : kNoRows;
      if (!MakeWeights(strips, count, t)) continue;
      is_skipped = false;
      if (!are_values_copied) {
        CopyValues(t.value_rows, t.keys, args_, scratch_.ldo, scratch_.values);
        t.values = scratch_.values;
        t.ldv = scratch_.ldo;
        t.value_type = DType::kF32;
        are_values_copied = true;
      }
      // While values are added, the keys of the next tile are prefetched, in the order of their addresses.
      const char* const ahead = first == 0 && IsNextPrefetched() ? KeyRows(next_).At(0) : nullptr;
      if constexpr (kInPlace) {
        AsStored(t.values, t.value_type, [&](const auto* stored) { Values(strips, count, stored, t.ldv, ahead); });
      } else if constexpr (kRoundsToBf16) {
        AddRoundedValues(strips, count, static_cast<const Packed*>(t.values));
      } else {
        Values(strips, count, static_cast<const float*>(t.values), t.ldv, ahead);
      }
    }
    is_last_skipped_ = is_skipped;
  }
  void FindKeys(int64_t tile, TileRows* t) const {
    if constexpr (!kInPlace) {
      t->packed = PackedTile(tile);
    } else {
      const Rows rows = KeyRows(tile);
      t->keys_in_place = rows.At(0);
      t->ldk = rows.stride;
      t->key_type = KvType(args_.shape);
      if (!scratch_.copy_keys) return;
      CopyRows(rows, KvType(args_.shape), t->keys, args_.shape.D, scratch_.ldq, scratch_.keys);
      t->keys_in_place = scratch_.keys;
      t->ldk = scratch_.ldq;
      t->key_type = DType::kF32;
    }
  }
  // Whether the keys of the next tile are prefetched, which are read in place.
  bool IsNextPrefetched() const {
    return kInPlace && args_.key.stride.s == args_.shape.D && CanPrefetch(next_, scratch_.copy_keys);
  }
  // In place: what is brought to L2 while the scores of a tile are computed. Its values; the next tile's keys where the
  // tile before was skipped, as its neighbour may be.
  Rows RowsAhead(int64_t tile, const TileRows& t) const {
    if constexpr (!kInPlace) return kNoRows;
    if (is_last_skipped_) return IsNextPrefetched() && args_.shape.D == args_.shape.Dv ? KeyRows(next_) : kNoRows;
    return CanPrefetch(tile, scratch_.copy_values) ? t.value_rows : kNoRows;
  }
  // Computes the weights of strips in a tile. A strip that is skipped has no runs afterwards. Whether one is not.
  bool MakeWeights(Strip* strips, int count, const TileRows& t) {
    if constexpr (kInPlace) {
      ScoresInPlace(strips[0], t.keys_in_place, t.key_type, t.ldk, t.ahead);
    } else {
      PackedScores(strips, 0, count, t.packed);
    }
    bool any = false;
    for (int i = 0; i < count; ++i) {
      float* s = scratch_.s + i * kRows * static_cast<int64_t>(problem_.n);
      Adjust(strips[i], s, t.key0, t.keys);
      Outcome outcome = Softmax(strips[i], s);
      if (__builtin_expect(outcome == Outcome::kLostBits, 0)) {
        if constexpr (kInPlace) {
          ScoresInPlace(strips[i], t.keys_in_place, t.key_type, t.ldk, kNoRows);
        } else {
          PackedScores(strips, i, i + 1, t.packed);
        }
        Adjust(strips[i], s, t.key0, t.keys);
        outcome = Softmax(strips[i], s);
      }
      const bool is_skipped = outcome == Outcome::kSkipped;
      if (skips_) CountSkip(strips[i], t.keys, is_skipped);
      if (is_skipped) strips[i].run_count = 0;
      any |= !is_skipped;
      if constexpr (!kInPlace) {
        if (HasRowWeights() && !is_skipped) AddRowWeights(strips[i], s, t.key0);
      }
      prefetch_.Fetch(lines_per_step_);
    }
    return any;
  }
  void ScoresInPlace(const Strip& strip, const void* keys, DType dtype, int64_t ldk, const Rows& ahead) const {
    AsStored(keys, dtype, [&](const auto* stored) { InPlaceScores(strip, stored, ldk, ahead); });
  }

  // ---- cpu/attention/scores.h ----
  __attribute__((noinline)) void LoadQueries();
  __attribute__((noinline)) void RoundQueries();
  int64_t FirstPanel() const {
    const SequenceTiles& sequence = problem_.sequences[b_];
    return sequence.first_panel * args_.shape.G + g_ * sequence.panels;
  }
  // The element mask of a tile without stored bits, nullptr where it is full; false: the tile is empty.
  __attribute__((noinline)) bool FindElements(int64_t tile, const uint32_t** bits) const;
  // words_ and word_stride_ (0: the same for all rows) of the tile. False: nothing is allowed; words_ nullptr:
  // everything.
  bool FindMask(int64_t tile, const uint32_t* bits, bool unmasked);
  __attribute__((noinline)) void FindPanels(int keys, Strip* strip) const;
  const Packed* PackedTile(int64_t tile) const;
  const Packed* PackedValues(int64_t tile) const;
  template <int kBlock>
  static void StripScores(int rows, const float* q, int64_t ldq, int64_t size, const float* keys, int64_t stride,
                          const float* start, float* s, int64_t lds);
  template <int kBlock>
  void BlockScores(const Strip& strip, const Packed* keys, float* s) const;
  void PackedScores(const Strip* strips, int begin, int end, const Packed* keys) const;
  template <typename Stored>
  void InPlaceScores(const Strip& strip, const Stored* keys, int64_t ldk, const Rows& ahead) const;
  __attribute__((noinline)) void Adjust(const Strip& strip, float* s, int64_t key0, int keys) const;
  template <typename F>
  void ForEachVector(const Strip& strip, float* s, F f) const;
  void LoadBias(int r, int64_t key0, int keys) const;
  void AddRelative(int64_t h, int64_t row, int64_t key0, int keys) const;
  void LoadPairs(int64_t h, int64_t row, int64_t key0, int keys) const;

  // ---- cpu/attention/relative.h ----
  static int64_t RingStride(const PackedTable& table) { return (table.capacity + 1) * kPanel; }
  struct HeadTable {
    const float *rows, *row_bias;
  };
  __attribute__((noinline)) void BeginRelative();
  void PackOwnTables() const;
  HeadTable TableOfHead(const PackedTable& table, int number) const;
  void PanelScores(int rows, const float* q, int64_t ldq, const float* keys, int panels, const float* start, float* s,
                   int64_t lds) const;
  __attribute__((noinline)) void FillRing(int term, int row, int64_t first, int64_t last) const;
  __attribute__((noinline)) void AddDistanceProducts(int term, const Strip& strip, float* s, int64_t key0) const;
  __attribute__((noinline)) void AddAnyProducts(int term, const Strip& strip, float* s, int64_t key0) const;
  __attribute__((noinline)) void KeyProducts(int64_t key0, int keys, const Packed* packed) const;
  const float* BlockProducts(int64_t first, int64_t last, int64_t key0, int keys, const float* packed) const;
  void RowProducts(int64_t row, int count, int keys, const float* packed, float* to) const;
  __attribute__((noinline)) void DistanceKeyProducts(int first, int last, int64_t key0, int keys, const float* packed,
                                                     float* to) const;
  __attribute__((noinline)) void AnyKeyProducts(int first, int last, int64_t key0, int keys, const float* packed,
                                                float* to) const;
  __attribute__((noinline)) void AddRelativeProducts(const Strip& strip, float* s, int64_t key0) const;
  __attribute__((noinline)) void AddRowWeights(const Strip& strip, const float* p, int64_t key0) const;
  __attribute__((noinline)) void AddRowValues(int r, float* to) const;
  __attribute__((noinline)) const float* AddMeanRowValues(int r) const;

  // ---- cpu/attention/tile_order.h ----
  void AttendRange(int64_t first, int64_t last, bool unmasked);
  void AttendRuns(int64_t first, int64_t last);
  const KeyTileRun* FindRuns(int64_t first, int64_t last, int64_t* count) const;
  void OwnTiles(int64_t* first, int64_t* last) const;

  // ---- cpu/attention/choose.h ----
  __attribute__((noinline)) void ChooseBlocks();
  void FindCandidates(int64_t row0, int64_t rows) const;
  void EstimateBlocks(int64_t pooled, float* max_estimates) const;
  void CapEstimates(int64_t count, float* estimates) const;
  static float MaxOfBlock(const float* estimates, uint64_t found, float* max_estimate);
  uint64_t PairsOf(int64_t tile) const {
    return static_cast<uint64_t>(rows_) * static_cast<uint64_t>(Min(problem_.n, key_end_ - tile * problem_.n));
  }
  __attribute__((noinline)) void CountLeftOut(int64_t tile) const;

  // ---- cpu/attention/skip.h ----
  __attribute__((noinline)) bool CanSkip(const Strip& strip, int rows, const V* high, const float* s) const;
  bool HasNan(const Strip& strip, int rows, const float* s) const;
  __attribute__((noinline)) void RaiseTops(const Strip& strip, int rows, const V* high);
  void CountSkip(const Strip& strip, int keys, bool is_skipped);

  // ---- cpu/attention/weights.h ----
  __attribute__((noinline)) Outcome Softmax(const Strip& strip, float* s);
  template <bool kHasOffset>
  void Weights(const Strip& strip, int rows, const float* bases, float* s);
  __attribute__((noinline)) bool ClearStarts(const Strip& strip, int rows, const V* high);
  __attribute__((noinline)) void Rescale(const Strip& strip, int rows, const V* high);
  template <typename Stored>
  void Values(const Strip* strips, int count, const Stored* values, int64_t ldv, const char* ahead) const;
  template <int kHeight, int kBlock, typename Stored>
  void AddBlock(int64_t left, const float* p, const Strip& strip, const Stored* v, int64_t ldv, float* o,
                const char* ahead) const;

  void AddRoundedValues(const Strip* strips, int count, const Packed* values) const;
  template <int kBlock>
  void AddRoundedBlock(int64_t left, const Strip& strip, const Packed* p, const Packed* v, float* o) const;

  // ---- cpu/attention/output.h ----
  char* OutputRow(int r) const {
    return static_cast<char*>(args_.output.data) +
           item_size_ * (BeginOfQueries(args_, args_.output.stride, b_) + HeadOf(r) * args_.output.stride.h +
                         (row0_ + QueryOf(r)) * args_.output.stride.s);
  }
  void WriteRow(int r, float factor) const;
  void WriteEmptyRow(int r);
  // Its scratch is the output of row 0, which has been written by now or is itself empty.
  void FindMean();

  const AttentionProblem& problem_;
  const AttentionArgs& args_;
  Scratch scratch_;
  const int64_t item_size_, stored_size_;  // of query and output, of key and value
  int64_t b_ = 0, h_ = 0, g_ = 0, row0_ = 0;
  int rows_ = 0, queries_ = 0;    // rows of all heads, of one head
  int64_t key_end_ = 0;           // the number of keys of the sequence
  bool skips_ = false;            // whether ScoreArgs::skip_threshold counts
  bool is_last_skipped_ = false;  // of the tile that was visited last
  float skip_distance_ = 0.0f;
  int64_t query_position_ = 0, key_position_ = 0;  // of a packed sequence: of row 0 in biases
  int64_t next_ = -1;                              // the key tile after the current one, as far as it is known
  const char* keys_ = nullptr;
  const char* values_ = nullptr;
  int64_t group_ = 0;  // b * G + g
  const uint32_t* words_ = nullptr;
  int64_t word_stride_ = 0;
  PrefetchQueue prefetch_;
  int64_t lines_per_step_ = 0;  // cache lines to prefetch after each strip of a tile
};

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_ATTENTION_WORKER_H_
