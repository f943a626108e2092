// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention/plan.h"

#include <algorithm>

#include "plugins/core/base/integers.h"
#include "plugins/core/mask/columns/key_columns.h"

namespace stof {
namespace cpu {
namespace {

constexpr int64_t kLine = 64;

// Up to kFewRows queries take the path of few queries (GQA packing, KV splits); up to kMostFewRows do with kManyKeys
// keys or more.
constexpr int64_t kFewRows = 4, kMostFewRows = 16, kManyKeys = 256;
// Up to this many rows read keys in place: packing, which moves each key once more, does not pay.
constexpr int64_t kInPlaceRows = 8;
constexpr int64_t kMostPackedRows = 512;
// Keys of a KV split: enough to make the few hundred bytes of a partial result cheap, few enough to keep threads busy.
// Where the heads of a group pass over the keys one by one, a split stays in L2 (512 keys × 64 × 2 × 4 B = 256 KiB).
constexpr int64_t kLeastSplitKeys = 256, kMostSplitKeys = 2048, kSharedSplitKeys = 512;
// With a skip threshold: each split has a row max of its own, and keeps at least the first tile.
constexpr int64_t kLeastSkippingSplitKeys = 1024;
// With more items than this, splits may be longer.
constexpr int64_t kManyItems = 256;

// Where every row's key tiles fit half an L2, each worker packs the tiles that it meets. A packed copy of all keys
// would go through memory, which costs more (107 cycles a key on Zen 3) than packing in the cache (about 20).
constexpr int64_t kRingBytes = 512 << 10;

// Bytes of element masks that a worker evaluates and keeps for the other heads of the same rows.
constexpr int64_t kElementBytes = 2 << 20;
// Tile rows whose key tiles are counted to choose the size of a ring.
constexpr int64_t kSampledRows = 64;
// Panels of products of queries and a relative table that a strip keeps: all of up to 1024 rows.
constexpr int64_t kMostRingPanels = 64;
// Bytes of the products of keys that a worker keeps for the other tile rows of a head: half an L2.
constexpr int64_t kKeptBytes = (1 << 20) + (64 << 10);
// Bytes of a table of one head that each worker packs for itself: with keys and values it fits an L2.
constexpr int64_t kOwnTableBytes = 256 << 10;
// Bytes of the partial results of split-KV rows.
constexpr int64_t kPartialBytes = 64 << 20;

}  // namespace

bool HasFewQueries(const AttentionArgs& args) {
  if (args.sequences.has_queries || args.scores.has_relative_tables() || args.relative_value.given()) return false;
  return args.shape.S <= kFewRows ||
         (args.shape.S <= kMostFewRows && (args.shape.T >= kManyKeys || args.kv.choice.given()));
}

AttentionPlan::AttentionPlan(const AttentionArgs& args, const CpuAttentionConfig& config, int threads, bool has_bf16)
    : args_(args), has_bf16_(has_bf16) {
  problem_.args = &args;
  if (const BlockMask* const blocks = args.mask.fixed.blocks()) {
    const BlockMask& mask = *blocks;
    problem_.mask = {mask.rows,           mask.layout_b,          mask.layout_h,        mask.layout.data(),
                     mask.row_ptr.data(), mask.full_begin.data(), mask.key_tile.data(), mask.bits_id.data(),
                     mask.bits.data()};
  }
  problem_.m = config.m;
  problem_.n = config.n;
  problem_.tile_rows = CeilDiv(args.shape.S, config.m);
  problem_.key_tiles = CeilDiv(args.shape.T, config.n);
  if (args.kv.columns != nullptr) problem_.column_tiles = args.kv.columns->packed() / config.n;
  if (args.mask.fixed.elements() != nullptr) {
    const int64_t tile_bytes = int64_t{config.m} * config.n / 8;
    problem_.element_slots =
        std::clamp<int64_t>(kElementBytes / tile_bytes, 1, std::max<int64_t>(1, problem_.key_tiles));
  }
  problem_.has_short_pages = args.kv.pages.given() && (int64_t{1} << args.kv.pages.shift) < config.n;
  // Rows that are not dense use few sets of the L1 cache: a quarter of them at 12 heads × 64 × 4 B. Loads that cross
  // a cache line take twice as long.
  problem_.pack_values = KvType(args.shape) != DType::kF32 || args.shape.Dv % kPanel != 0 ||
                         args.value.stride.s != args.shape.Dv ||
                         reinterpret_cast<uintptr_t>(args.value.data) % kLine != 0 || problem_.has_short_pages;
  if (HasRuns()) runs_.resize(static_cast<size_t>(problem_.key_tiles));
  sequences_.resize(static_cast<size_t>(args.shape.B));
  for (int64_t b = 0; b < args.shape.B; ++b) FindTiles(b, &sequences_[static_cast<size_t>(b)]);
  problem_.few_queries = args.shape.S <= config.m && HasFewQueries(args);
  problem_.chooses_blocks = CanChooseBlocks();
  problem_.few_queries ? PlanFewQueries() : PlanTileRows();
  problem_.sequences = sequences_.data();
  PlanRelativeTables(threads);
}

void AttentionPlan::RoundToBf16() { problem_.rounds_to_bf16 = problem_.pack_values = true; }

bool AttentionPlan::CanChooseBlocks() const {
  const StaticMask& mask = args_.mask.fixed;
  return ChoosesBlocks(args_) && !problem_.few_queries && args_.kv.columns == nullptr && problem_.n == kBlockKeys &&
         kBlockQueries % problem_.m == 0 && problem_.key_tiles > 1 &&
         (mask.elements() == nullptr || mask.blocks() != nullptr || mask.elements()->runs != nullptr);
}

void AttentionPlan::PlanRelativeTables(int threads) {
  const ScoreArgs& scores = args_.scores;
  if (!scores.has_relative_tables() && !args_.relative_value.given()) return;
  // One worker gets all rows of a head, and no other sequence needs its tables: they are packed where they are read, in
  // the cache.
  const bool are_heads_whole = threads == 1 || (args_.shape.H >= 2 * threads && args_.shape.H % threads == 0);
  const bool are_heads_together = args_.shape.B == 1 && are_heads_whole && args_.mask.fixed.blocks() == nullptr &&
                                  args_.mask.fixed.elements() == nullptr;
  const auto plan = [&](const RelativeTable& table, PackedTable* packed) {
    if (!table.given()) return;
    packed->table = &table;
    packed->heads = table.stride_h == 0 ? 1 : args_.shape.H;
    packed->first = table.index.first_row / kPanel * kPanel;
    packed->rows = RoundUp(table.index.last_row + 1 - packed->first, kPanel);
    packed->ld = packed->is_value ? RoundUp(args_.shape.Dv, kPanel) : args_.shape.D;
    packed->stride_h = (packed->rows + (packed->is_panels || packed->is_value ? 0 : kStrip)) * packed->ld;
    // All panels where pairs of several key tiles name them, else those of one key tile. Capacities are powers of two.
    const int64_t panels = packed->rows / kPanel, at_once = problem_.n / kPanel + 3;
    const bool is_met_once = table.index.IsStepwiseByKey() && (table.index.is_linear || panels > kMostRingPanels);
    const int64_t most = std::min(panels, is_met_once ? at_once : kMostRingPanels);
    for (packed->capacity = 1; packed->capacity < most;) packed->capacity *= 2;
    packed->is_own = are_heads_together && packed->heads > 1 && packed->rows * packed->ld * 4 <= kOwnTableBytes;
  };
  relative_.key[0].is_panels = relative_.key[1].is_panels = true;
  relative_.value.is_value = true;
  plan(scores.relative_key[0], &relative_.key[0]);
  plan(scores.relative_key[1], &relative_.key[1]);
  plan(scores.relative_query, &relative_.query);
  plan(args_.relative_value, &relative_.value);
  PackedTable& query = relative_.query;
  if (query.table != nullptr && query.table->index.IsStepwiseByKey() && !query.table->index.is_linear) {
    const int64_t bytes = CountKeyBlocks(problem_) * query.KeptStride() * kKeyBlock * 4;
    query.keeps_products = bytes <= kKeptBytes && args_.shape.S > problem_.m;
  }
  problem_.relative = &relative_;
}

bool AttentionPlan::HasRuns() const {
  const DynamicMask* const elements = args_.mask.fixed.elements();
  return args_.mask.fixed.blocks() == nullptr && elements != nullptr && elements->runs != nullptr;
}

template <typename Visit>
void AttentionPlan::ForEachRun(int64_t b, int64_t h, int64_t row0, int64_t rows, const Visit& visit) {
  const DynamicMask& mask = *args_.mask.fixed.elements();
  const int64_t count =
      mask.runs(mask.self, b, h, row0, static_cast<int>(rows), problem_.n, 0, problem_.key_tiles, runs_.data());
  for (int64_t i = 0; i < count; ++i) visit(runs_[static_cast<size_t>(i)]);
}

void AttentionPlan::FindTiles(int64_t b, SequenceTiles* sequence) {
  sequence->last = CeilDiv(EndOfKeys(args_, b), problem_.n);
  if (!HasCommonRuns() || AttendsAllKeys(args_.mask.empty_rows)) return;
  int64_t first = sequence->last, last = 0;
  ForEachRun(b, 0, 0, args_.shape.S, [&](const KeyTileRun& run) {
    first = std::min<int64_t>(first, run.first);
    last = std::max<int64_t>(last, run.last);
  });
  sequence->first = std::min(first, last);
  sequence->last = last;
}

bool AttentionPlan::HasGroupRuns() const {
  return HasRuns() && (!args_.mask.fixed.elements()->by_head ||
                       args_.mask.fixed.elements()->alike_heads == args_.shape.H / args_.shape.G);
}

int64_t AttentionPlan::PackedHeads() const {
  const int64_t group = args_.shape.H / args_.shape.G;
  int64_t alike = group;
  const BlockMask* const blocks = args_.mask.fixed.blocks();
  const DynamicMask* const elements = args_.mask.fixed.elements();
  if (blocks != nullptr && blocks->layout_h > 1) {
    // Where bits are missing, heads with one table may differ.
    if (blocks->left > 0 && (elements == nullptr || elements->by_head)) alike = 1;
    for (int64_t b = 0; b < blocks->layout_b; ++b) {
      for (int64_t h = 0; h < args_.shape.H; ++h) {
        if (blocks->TableOf(b, h) != blocks->TableOf(b, h - h % group)) alike = 1;
      }
    }
  }
  for (const DynamicMask* mask : {args_.mask.dynamic, elements}) {
    if (mask != nullptr && mask->by_head && mask->alike_heads != group) alike = 1;
  }
  int64_t heads = std::min(alike, std::max<int64_t>(1, kMostPackedRows / args_.shape.S));
  while (group % heads != 0) --heads;
  return heads;
}

void AttentionPlan::ListRuns() {
  const int64_t lists = args_.mask.fixed.elements()->by_head ? args_.shape.G : 1;
  group_run_begin_.push_back(0);
  for (int64_t b = 0; b < args_.shape.B; ++b) {
    for (int64_t list = 0; list < lists; ++list) {
      ForEachRun(b, list * (args_.shape.H / args_.shape.G), 0, args_.shape.S,
                 [this](const KeyTileRun& run) { group_runs_.push_back(run); });
      group_run_begin_.push_back(static_cast<int64_t>(group_runs_.size()));
    }
  }
  problem_.runs = group_runs_.data();
  problem_.run_begin = group_run_begin_.data();
  problem_.run_lists = lists;
}

void AttentionPlan::PlanFewQueries() {
  problem_.packed_heads = PackedHeads();
  problem_.in_place = problem_.packed_heads * args_.shape.S <= kInPlaceRows;
  const bool rereads_keys = problem_.packed_heads < args_.shape.H / args_.shape.G;  // several items read the same keys
  problem_.partial_stride = RoundUp(2 + args_.shape.Dv, kLine / 4);
  if (HasGroupRuns()) ListRuns();
  // The runs of a KV head, and the number of its tiles; without lists all tiles of its sequence.
  const auto runs_of = [this](int64_t b, int64_t g, KeyTileRun* all, int64_t* count) -> const KeyTileRun* {
    if (problem_.runs == nullptr) {
      const SequenceTiles& sequence = sequences_[static_cast<size_t>(b)];
      *all = {static_cast<int32_t>(sequence.first), static_cast<int32_t>(sequence.last)};
      *count = 1;
      return all;
    }
    const auto list = static_cast<size_t>(b * problem_.run_lists + (problem_.run_lists == 1 ? 0 : g));
    *count = group_run_begin_[list + 1] - group_run_begin_[list];
    return group_runs_.data() + group_run_begin_[list];
  };
  std::vector<int64_t> tiles;  // [B, G]
  int64_t total = 0;
  for (int64_t b = 0; b < args_.shape.B; ++b) {
    for (int64_t g = 0; g < args_.shape.G; ++g) {
      KeyTileRun all;
      int64_t count = 0;
      const KeyTileRun* runs = runs_of(b, g, &all, &count);
      tiles.push_back(0);
      for (int64_t i = 0; i < count; ++i) tiles.back() += runs[i].last - runs[i].first;
      total += tiles.back();
    }
  }
  // The length of a split must not depend on the number of threads, so that results do not.
  const int64_t least = args_.scores.skip_threshold > 0.0f ? kLeastSkippingSplitKeys : kLeastSplitKeys;
  int64_t length = std::clamp(total / kManyItems, least / problem_.n, kMostSplitKeys / problem_.n);
  // Nor on which pages are chosen, so that memory is known before they are.
  if (args_.kv.choice.given()) length = least / problem_.n;
  if (rereads_keys) length = std::min(length, kSharedSplitKeys / problem_.n);
  const int64_t most =
      kPartialBytes / std::max<int64_t>(1, args_.shape.B * args_.shape.H * args_.shape.S * problem_.partial_stride * 4);
  length = std::max(length, problem_.key_tiles / std::max<int64_t>(1, most) + 1);
  std::vector<size_t> begins;
  for (int64_t b = 0; b < args_.shape.B; ++b) {
    for (int64_t g = 0; g < args_.shape.G; ++g) {
      KeyTileRun all;
      int64_t count = 0;
      const KeyTileRun* runs = runs_of(b, g, &all, &count);
      const int64_t own = tiles[static_cast<size_t>(b * args_.shape.G + g)];
      KvSplits splits;
      splits.first_item = split_items_;
      splits.count = std::max<int64_t>(1, CeilDiv(own, length));
      split_items_ += splits.count;
      problem_.most_splits = std::max(problem_.most_splits, splits.count);
      begins.push_back(split_begins_.size());
      Split(runs, count, own, splits.count);
      kv_splits_.push_back(splits);
    }
  }
  for (size_t i = 0; i < begins.size(); ++i) kv_splits_[i].begin = split_begins_.data() + begins[i];
  problem_.kv_splits = kv_splits_.data();
  if (problem_.in_place) return;
  problem_.ring_tiles = rereads_keys ? length : 1;
  if (has_bf16_) RoundToBf16();
}

void AttentionPlan::Split(const KeyTileRun* runs, int64_t run_count, int64_t tiles, int64_t count) {
  split_begins_.push_back(run_count == 0 ? 0 : runs[0].first);
  int64_t seen = 0, next = 1;  // tiles that were passed, and the number of the next split
  for (int64_t i = 0; i < run_count; ++i) {
    const int64_t own = runs[i].last - runs[i].first;
    for (; next < count && next * tiles / count < seen + own; ++next) {
      split_begins_.push_back(static_cast<int32_t>(runs[i].first + next * tiles / count - seen));
    }
    seen += own;
  }
  split_begins_.push_back(run_count == 0 ? 0 : runs[run_count - 1].last);
}

void AttentionPlan::PlanTileRows() {
  if (has_bf16_) RoundToBf16();
  for (int64_t b = 0; b < args_.shape.B; ++b) {
    SequenceTiles& sequence = sequences_[static_cast<size_t>(b)];
    const int64_t keys = std::min(sequence.last * problem_.n, EndOfKeys(args_, b)) - sequence.first * problem_.n;
    sequence.first_panel = problem_.panels;
    sequence.panels = CeilDiv(std::max<int64_t>(0, keys), kPanel);
    problem_.panels += sequence.panels;
    if (problem_.chooses_blocks) {
      sequence.first_pooled_panel = problem_.pooled_panels;
      sequence.pooled_panels = CeilDiv(std::max<int64_t>(0, keys), kPooledKeys * kPanel);
      problem_.pooled_panels += sequence.pooled_panels;
    }
    tile_items_ += args_.shape.H * CeilDiv(EndOfQueries(args_, b), problem_.m);
  }
  const int64_t most = MostTiles();
  const int64_t packed = PackedKeyBytes(problem_) + (problem_.pack_values ? PackedValueBytes(problem_) : 0);
  if (most * problem_.n * packed <= kRingBytes) problem_.ring_tiles = std::max<int64_t>(1, most);
}

int64_t AttentionPlan::MostTiles() {
  int64_t most = 0;
  if (args_.mask.empty_rows == EmptyRows::kAll) return problem_.key_tiles;
  if (const BlockMask* const blocks = args_.mask.fixed.blocks()) {
    const std::vector<int32_t>& row_ptr = blocks->row_ptr;
    for (size_t r = 0; r + 1 < row_ptr.size(); ++r) most = std::max<int64_t>(most, row_ptr[r + 1] - row_ptr[r]);
    return std::min(most, problem_.key_tiles);
  }
  if (!HasRuns() || args_.sequences.has_queries) return problem_.key_tiles;
  const int64_t rows = args_.shape.B * args_.shape.H * problem_.tile_rows, samples = std::min(rows, kSampledRows);
  for (int64_t i = 0; i < samples; ++i) {
    const int64_t item = rows - 1 - i * rows / samples, head = item / problem_.tile_rows;
    int64_t tiles = 0;
    ForEachRun(head / args_.shape.H, head % args_.shape.H, item % problem_.tile_rows * problem_.m, problem_.m,
               [&](const KeyTileRun& run) { tiles += run.last - run.first; });
    most = std::max(most, tiles);
  }
  return most;
}

}  // namespace cpu
}  // namespace stof
