// SPDX-License-Identifier: Apache-2.0
// The entry points of attention on the CPU: chooses the tile, lays out the workspace and distributes the work among
// threads.
#include "cpu/attention/attention.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/kernel_table.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/contract/attention_limits.h"

namespace stof {
namespace {

constexpr int64_t kLine = 64;

// Few queries: their rows of all heads of a group share a pass over the keys, which are split along their length. More
// are only few beside many keys.
constexpr int64_t kFewRows = 4, kMostFewRows = 16, kManyKeys = 256;
// Up to this many rows are not worth packing the keys for: packing moves each key once more.
constexpr int64_t kInPlaceRows = 8;
constexpr int64_t kMostPackedRows = 512;
// Keys of a KV split: enough to make the few hundred bytes of a partial result cheap, few enough to keep threads busy.
// Where the heads of a group pass over the keys one by one, a split stays in L2 (512 keys × 64 × 2 × 4 B = 256 KiB).
constexpr int64_t kLeastSplitKeys = 256, kMostSplitKeys = 2048, kSharedSplitKeys = 512;
// So many items are worth longer splits.
constexpr int64_t kManyItems = 256;

// Where every row's key tiles fit half an L2, each worker packs the tiles that it meets. A packed copy of all keys
// would go through memory, which costs more (107 cycles a key on Zen 3) than packing in the cache (about 20).
constexpr int64_t kRingBytes = 512 << 10;

// Bytes of element masks that a worker evaluates and keeps for the other heads of the same rows.
constexpr int64_t kElementBytes = 2 << 20;
// Tile rows whose key tiles are counted to choose the size of a ring.
constexpr int64_t kSampledRows = 64;
// Bytes of the partial results of split-KV rows.
constexpr int64_t kPartialBytes = 64 << 20;

int64_t KeyCount(const AttentionArgs& args, int64_t b) {
  return args.key_counts == nullptr ? args.T : args.key_counts[b];
}

bool HasRuns(const AttentionArgs& args) {
  return args.mask == nullptr && args.elements != nullptr && args.elements->runs != nullptr;
}

// A call as the kernels see it, and what that refers to.
class Plan {
 public:
  Plan(const AttentionArgs& args, const CpuAttentionConfig& config) : args_(args) {
    problem_.args = &args;
    problem_.m = config.m;
    problem_.n = config.n;
    problem_.tile_rows = CeilDiv(args.S, config.m);
    problem_.key_tiles = CeilDiv(args.T, config.n);
    if (args.elements != nullptr) {
      const int64_t tile_bytes = int64_t{config.m} * config.n / 8;
      problem_.element_slots =
          std::clamp<int64_t>(kElementBytes / tile_bytes, 1, std::max<int64_t>(1, problem_.key_tiles));
    }
    // Rows that are not dense use few sets of the L1 cache: a quarter of them at 12 heads × 64 × 4 B. Loads that cross
    // a cache line take twice as long.
    problem_.pack_values = args.dtype != DType::kF32 || args.Dv % cpu::kPanel != 0 || args.value_stride.s != args.Dv ||
                           reinterpret_cast<uintptr_t>(args.value) % kLine != 0;
    if (HasRuns(args)) runs_.resize(static_cast<size_t>(problem_.key_tiles));
    sequences_.resize(static_cast<size_t>(args.B));
    for (int64_t b = 0; b < args.B; ++b) FindTiles(b, &sequences_[static_cast<size_t>(b)]);
    problem_.few_queries =
        args.S <= config.m && (args.S <= kFewRows || (args.S <= kMostFewRows && args.T >= kManyKeys));
    problem_.few_queries ? PlanFewQueries() : PlanTileRows();
    problem_.sequences = sequences_.data();
  }

  cpu::AttentionProblem* problem() { return &problem_; }
  int64_t Items() const { return problem_.few_queries ? split_items_ : args_.B * args_.H * problem_.tile_rows; }

 private:
  // Calls visit(run) for the key tiles in [first, last) that rows of one head may attend.
  template <typename Visit>
  void ForEachRun(int64_t b, int64_t h, int64_t row0, int64_t rows, const Visit& visit) {
    const DynamicMask& mask = *args_.elements;
    const int64_t count =
        mask.runs(mask.self, b, h, row0, static_cast<int>(rows), problem_.n, 0, problem_.key_tiles, runs_.data());
    for (int64_t i = 0; i < count; ++i) visit(runs_[static_cast<size_t>(i)]);
  }

  // The key tiles that a sequence's queries may attend: all that exist where that is not known cheaply.
  void FindTiles(int64_t b, cpu::SequenceTiles* sequence) {
    sequence->last = CeilDiv(KeyCount(args_, b), problem_.n);
    const bool all_keys = args_.empty_rows == EmptyRows::kAll || args_.empty_rows == EmptyRows::kMean;
    if (!HasRuns(args_) || args_.elements->by_head || all_keys) return;
    int64_t first = sequence->last, last = 0;
    ForEachRun(b, 0, 0, args_.S, [&](const KeyTileRun& run) {
      first = std::min<int64_t>(first, run.first);
      last = std::max<int64_t>(last, run.last);
    });
    sequence->first = std::min(first, last);
    sequence->last = last;
  }

  // Heads whose rows go together: as many of a group as have the same mask, and few enough for a worker's memory.
  int64_t PackedHeads() const {
    const bool by_head = (args_.mask != nullptr && args_.mask->layout_h > 1) ||
                         (args_.dynamic != nullptr && args_.dynamic->by_head) ||
                         (args_.elements != nullptr && args_.elements->by_head);
    if (by_head) return 1;
    const int64_t group = args_.H / args_.G;
    int64_t heads = std::min(group, std::max<int64_t>(1, kMostPackedRows / args_.S));
    while (group % heads != 0) --heads;
    return heads;
  }

  void PlanFewQueries() {
    problem_.packed_heads = PackedHeads();
    problem_.in_place = problem_.packed_heads * args_.S <= kInPlaceRows;
    const bool shares = problem_.packed_heads < args_.H / args_.G;  // items go through their keys more than once
    problem_.partial_stride = RoundUp(2 + args_.Dv, kLine / 4);
    // The tiles of each sequence; where lists of runs are short, those that are attended.
    std::vector<int64_t> counts;
    int64_t total = 0;
    for (int64_t b = 0; b < args_.B; ++b) {
      const cpu::SequenceTiles& sequence = sequences_[static_cast<size_t>(b)];
      counts.push_back(sequence.last - sequence.first);
      if (HasRuns(args_) && !args_.elements->by_head) {
        counts.back() = 0;
        ForEachRun(b, 0, 0, args_.S, [&](const KeyTileRun& run) { counts.back() += run.last - run.first; });
      }
      total += counts.back();
    }
    // The length of a split must not depend on the number of threads, so that results do not.
    int64_t length =
        std::clamp(total * args_.G / kManyItems, kLeastSplitKeys / problem_.n, kMostSplitKeys / problem_.n);
    if (shares) length = std::min(length, kSharedSplitKeys / problem_.n);
    const int64_t most =
        kPartialBytes / std::max<int64_t>(1, args_.B * args_.H * args_.S * problem_.partial_stride * 4);
    length = std::max(length, problem_.key_tiles / std::max<int64_t>(1, most) + 1);
    for (int64_t b = 0; b < args_.B; ++b) Split(b, counts[static_cast<size_t>(b)], length);
    for (cpu::SequenceTiles& sequence : sequences_) {
      sequence.split_begin = split_begins_.data() + sequence.first_item;
      sequence.first_item = split_items_;
      split_items_ += args_.G * sequence.splits;
      problem_.most_splits = std::max(problem_.most_splits, sequence.splits);
    }
    if (!problem_.in_place) problem_.ring_tiles = shares ? length : 1;
  }

  // Cuts the `count` tiles of a sequence into splits of equal length; first_item is their place in split_begins_.
  void Split(int64_t b, int64_t count, int64_t length) {
    cpu::SequenceTiles& sequence = sequences_[static_cast<size_t>(b)];
    sequence.splits = std::max<int64_t>(1, CeilDiv(count, length));
    sequence.first_item = static_cast<int64_t>(split_begins_.size());
    split_begins_.push_back(static_cast<int32_t>(sequence.first));
    int64_t seen = 0, next = 1;  // tiles before, and the split that begins next
    const auto pass = [&](int64_t first, int64_t last) {
      for (; next < sequence.splits && next * count / sequence.splits < seen + last - first; ++next) {
        split_begins_.push_back(static_cast<int32_t>(first + next * count / sequence.splits - seen));
      }
      seen += last - first;
    };
    if (HasRuns(args_) && !args_.elements->by_head) {
      ForEachRun(b, 0, 0, args_.S, [&](const KeyTileRun& run) { pass(run.first, run.last); });
    } else {
      pass(sequence.first, sequence.last);
    }
    split_begins_.push_back(static_cast<int32_t>(sequence.last));
  }

  void PlanTileRows() {
    int64_t tiles = 0;
    for (const cpu::SequenceTiles& sequence : sequences_) tiles = std::max(tiles, sequence.last - sequence.first);
    problem_.panels = CeilDiv(std::min(tiles * problem_.n, args_.T), cpu::kPanel);
    const int64_t most = MostTiles();
    const int64_t packed = args_.D + (problem_.pack_values ? args_.Dv : 0);
    if (most * problem_.n * packed * 4 <= kRingBytes) problem_.ring_tiles = std::max<int64_t>(1, most);
  }

  // The most key tiles of a tile row; where runs are listed, of some of them.
  int64_t MostTiles() {
    int64_t most = 0;
    if (args_.empty_rows == EmptyRows::kAll) return problem_.key_tiles;
    if (args_.mask != nullptr) {
      const std::vector<int32_t>& row_ptr = args_.mask->row_ptr;
      for (size_t r = 0; r + 1 < row_ptr.size(); ++r) most = std::max<int64_t>(most, row_ptr[r + 1] - row_ptr[r]);
      return most;
    }
    if (!HasRuns(args_)) return problem_.key_tiles;
    const int64_t rows = args_.B * args_.H * problem_.tile_rows, samples = std::min(rows, kSampledRows);
    for (int64_t i = 0; i < samples; ++i) {
      const int64_t item = rows - 1 - i * rows / samples, head = item / problem_.tile_rows;
      int64_t tiles = 0;
      ForEachRun(head / args_.H, head % args_.H, item % problem_.tile_rows * problem_.m, problem_.m,
                 [&](const KeyTileRun& run) { tiles += run.last - run.first; });
      most = std::max(most, tiles);
    }
    return most;
  }

  const AttentionArgs& args_;
  cpu::AttentionProblem problem_;
  std::vector<KeyTileRun> runs_;
  std::vector<cpu::SequenceTiles> sequences_;
  std::vector<int32_t> split_begins_;
  int64_t split_items_ = 0;
};

struct Layout {
  int64_t pad = 0, order = 0, keys = 0, values = 0, partial = 0, scratch = 0, total = 0;  // byte offsets
  int64_t scratch_each = 0;
};

Layout MakeLayout(const cpu::AttentionProblem& problem, int64_t items, const cpu::AttentionKernels& kernels,
                  int threads) {
  const AttentionArgs& args = *problem.args;
  Layout layout;
  const auto take = [&layout](int64_t bytes) {
    const int64_t at = layout.total;
    layout.total += RoundUp(bytes, kLine);
    return at;
  };
  if (args.pad != nullptr) layout.pad = take(args.B * problem.key_tiles * problem.n / 8);
  if (problem.few_queries) {
    if (problem.most_splits > 1) {
      layout.partial = take(args.B * args.H * args.S * problem.most_splits * problem.partial_stride * 4);
    }
  } else {
    layout.order = take(items * 4);
    if (problem.ring_tiles == 0) {
      const int64_t keys = args.B * args.G * problem.panels * cpu::kPanel;
      layout.keys = take(keys * args.D * 4);
      if (problem.pack_values) layout.values = take(keys * RoundUp(args.Dv, cpu::kPanel) * 4);
    }
  }
  layout.scratch_each = RoundUp(static_cast<int64_t>(kernels.scratch_bytes(problem)), kLine);
  layout.scratch = take(layout.scratch_each * threads);
  return layout;
}

void FillPadBits(const cpu::AttentionProblem& problem, uint32_t* bits) {
  const AttentionArgs& args = *problem.args;
  const int64_t words = problem.key_tiles * problem.n / 32;
  for (int64_t b = 0; b < args.B; ++b) {
    const uint8_t* pad = args.pad + b * args.T;
    const int64_t keys = KeyCount(args, b);
    for (int64_t w = 0; w < words; ++w) {
      uint32_t word = 0;
      for (int64_t k = 32 * w; k < std::min(32 * w + 32, keys); ++k) word |= uint32_t{pad[k] != 0} << (k - 32 * w);
      bits[b * words + w] = word;
    }
  }
}

// Orders items so that heads of the same rows are neighbours: they share the element masks that a worker evaluates. The
// last rows, which are the longest of a causal mask, go first.
void RowsOutermost(const cpu::AttentionProblem& problem, uint32_t* order) {
  const int64_t heads = problem.args->B * problem.args->H;
  for (int64_t row = problem.tile_rows; row-- > 0;) {
    for (int64_t head = 0; head < heads; ++head) *order++ = static_cast<uint32_t>(head * problem.tile_rows + row);
  }
}

// Orders items by falling cost (LPT), so that the longest do not start last. Equal ones keep their order, so that
// neighbours find keys and values in the cache. A counting sort: 64 classes of cost suffice.
void SortItems(const cpu::AttentionProblem& problem, uint32_t* order) {
  const AttentionArgs& args = *problem.args;
  const int64_t count = args.B * args.H * problem.tile_rows;
  if (args.mask == nullptr) {
    for (int64_t i = 0; i < count; ++i) order[i] = static_cast<uint32_t>(i);
    return;
  }
  const BlockMask& mask = *args.mask;
  const int64_t words = problem.n / 32;
  const auto present = [&](int64_t b, int64_t tile) {
    if (problem.pad_bits == nullptr) return true;
    const uint32_t* bits = problem.pad_bits + (b * problem.key_tiles + tile) * words;
    return std::any_of(bits, bits + words, [](uint32_t word) { return word != 0; });
  };
  const auto cost = [&](int64_t item) {
    const int64_t h = item / problem.tile_rows % args.H;
    const int64_t b = item / problem.tile_rows / args.H;
    const int64_t row = int64_t{mask.TableOf(b, h)} * mask.rows + item % problem.tile_rows;
    // A partial tile leaves out the panels without a pair: on average half as much work.
    int64_t sum = 0;
    if (problem.pad_bits == nullptr) {
      sum = mask.row_ptr[row + 1] - mask.row_ptr[row] + mask.row_ptr[row + 1] - mask.full_begin[row];
    } else {
      for (int64_t i = mask.row_ptr[row]; i < mask.row_ptr[row + 1]; ++i) {
        if (present(b, mask.key_tile[i])) sum += i < mask.full_begin[row] ? 1 : 2;
      }
    }
    return sum;
  };
  constexpr int64_t kClasses = 64;
  const int64_t unit = 2 * problem.key_tiles / kClasses + 1;
  int64_t begin[kClasses + 1] = {};
  const auto slot = [&](int64_t item) { return kClasses - 1 - std::min(kClasses - 1, cost(item) / unit); };
  for (int64_t i = 0; i < count; ++i) ++begin[slot(i) + 1];
  for (int64_t c = 0; c < kClasses; ++c) begin[c + 1] += begin[c];
  for (int64_t i = 0; i < count; ++i) order[begin[slot(i)]++] = static_cast<uint32_t>(i);
}

// One pass over count items, taken in steps from a counter that all workers share. The result of an item does not
// depend on its worker.
struct Job {
  const cpu::AttentionProblem& problem;
  const cpu::AttentionKernels& kernels;
  char* scratch;
  int64_t scratch_each;
  const uint32_t* order;
  int64_t count = 0;
  int64_t step = 1;
  void (*work)(const Job& job, int64_t first, int64_t last, void* scratch) = nullptr;
  std::atomic<int64_t> next{0};
};

void RunWorker(void* user, size_t worker) {
  Job& job = *static_cast<Job*>(user);
  void* scratch = job.scratch + static_cast<int64_t>(worker) * job.scratch_each;
  int64_t first = job.next.fetch_add(job.step, std::memory_order_relaxed);
  if (first >= job.count) return;
  job.kernels.prepare(job.problem, scratch);
  for (; first < job.count; first = job.next.fetch_add(job.step, std::memory_order_relaxed)) {
    job.work(job, first, std::min(job.count, first + job.step), scratch);
  }
}

void Run(Job* job, int64_t count, int64_t step, const Parallel& parallel,
         void (*work)(const Job& job, int64_t first, int64_t last, void* scratch)) {
  job->count = count;
  job->step = step;
  job->work = work;
  job->next = 0;
  const int64_t workers = std::min<int64_t>(std::max(1, parallel.threads), CeilDiv(count, step));
  if (workers <= 1 || parallel.run == nullptr) {
    if (workers > 0) RunWorker(job, 0);
  } else {
    parallel.run(parallel.self, RunWorker, static_cast<size_t>(workers), job);
  }
}

void Pack(const Job& job, int64_t first, int64_t last, void* scratch) {
  job.kernels.pack(job.problem, first, last, scratch);
}
void AttendTileRows(const Job& job, int64_t first, int64_t last, void* scratch) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t next = i + 1 < last ? int64_t{job.order[i + 1]} : -1;
    job.kernels.attend_tile_row(job.problem, job.order[i], next, scratch);
  }
}
void AttendSplits(const Job& job, int64_t first, int64_t last, void* scratch) {
  for (int64_t i = first; i < last; ++i) job.kernels.attend_split(job.problem, i, scratch);
}
void CombineSplits(const Job& job, int64_t first, int64_t last, void* scratch) {
  for (int64_t i = first; i < last; ++i) job.kernels.combine_splits(job.problem, i, scratch);
}

Status Check(const AttentionArgs& args, const CpuAttentionConfig& config) {
  if (!IsCpuIsaSupported(config.isa)) return Status::Error("this machine lacks the instruction set of the config");
  if (config.m < 1 || config.n < 32 || config.n % 32 != 0 || config.n > cpu::kMaxTileKeys) {
    return Status::Error("no kernel for tiles of " + std::to_string(config.m) + " x " + std::to_string(config.n));
  }
  if (!IsFloat(args.dtype) || (args.bias != nullptr && !IsFloat(args.bias_dtype))) {
    return Status::Error("the CPU kernel takes fp32, fp16 and bf16");
  }
  const HeadSizes sizes = AttentionLimits::HeadSizesOf(Target::kCpu, args.dtype);
  if (!sizes.Has(args.D) || !sizes.Has(args.Dv)) {
    return Status::Error("head sizes are 1 to " + std::to_string(sizes.largest));
  }
  if (args.B < 0 || args.S < 0 || args.T < 0 || args.G < 1 || args.H % args.G != 0) {
    return Status::Error("H must be a multiple of G, and sizes not negative");
  }
  if (args.B * args.H * CeilDiv(args.S, config.m) >= int64_t{1} << 32) return Status::Error("too many rows");
  if (args.mask != nullptr &&
      (args.mask->m != config.m || args.mask->n != config.n || args.mask->S != args.S || args.mask->T != args.T)) {
    return Status::Error("the block mask was built for another tile or other sizes");
  }
  for (int64_t b = 0; args.key_counts != nullptr && b < args.B; ++b) {
    if (args.mask == nullptr && args.key_counts[b] >= 0 && args.key_counts[b] <= args.T) continue;
    return Status::Error("sequence " + std::to_string(b) + " has " + std::to_string(args.key_counts[b]) +
                         " keys, expected 0 to " + std::to_string(args.T) + " and no block mask");
  }
  return Status();
}

}  // namespace

CpuAttentionConfig ChooseCpuAttention(const AttentionArgs& args, int threads) {
  CpuAttentionConfig config;
  config.isa = BestCpuIsa();
  config.n = 64;
  if (args.S <= kFewRows || (args.S <= kMostFewRows && args.T >= kManyKeys)) {
    config.m = static_cast<int>(std::max<int64_t>(1, args.S));
    return config;
  }
  // Outputs are read and written once per key tile, so tiles are long; longer ones would evict the keys from L1.
  if (args.T > config.n) config.n = 128;
  // Whole strips; fewer rows where threads would get less than four items each.
  config.m = 96;
  while (config.m > 24 && args.B * args.H * CeilDiv(args.S, config.m) < 4 * int64_t{threads}) config.m /= 2;
  return config;
}

size_t CpuAttentionWorkspace(const AttentionArgs& args, const CpuAttentionConfig& config, int threads) {
  if (!Check(args, config).ok()) return 0;
  Plan plan(args, config);
  const cpu::AttentionKernels& kernels = *cpu::KernelsOf(config.isa).attention;
  return static_cast<size_t>(MakeLayout(*plan.problem(), plan.Items(), kernels, std::max(1, threads)).total);
}

Status CpuAttention(const AttentionArgs& args, const CpuAttentionConfig& config, void* workspace,
                    const Parallel& parallel) {
  STOF_RETURN_IF_ERROR(Check(args, config));
  if (args.B == 0 || args.H == 0 || args.S == 0) return Status();
  const cpu::AttentionKernels& kernels = *cpu::KernelsOf(config.isa).attention;
  Plan plan(args, config);
  cpu::AttentionProblem& problem = *plan.problem();
  const int64_t items = plan.Items();
  const int threads = std::max(1, parallel.threads);
  const Layout layout = MakeLayout(problem, items, kernels, threads);
  char* base = static_cast<char*>(workspace);
  if (args.pad != nullptr) {
    uint32_t* bits = reinterpret_cast<uint32_t*>(base + layout.pad);
    FillPadBits(problem, bits);
    problem.pad_bits = bits;
  }
  uint32_t* order = reinterpret_cast<uint32_t*>(base + layout.order);
  Job job{problem, kernels, base + layout.scratch, layout.scratch_each, order};
  if (problem.few_queries) {
    if (problem.most_splits > 1) problem.partial = reinterpret_cast<float*>(base + layout.partial);
    Run(&job, items, 1, parallel, AttendSplits);
    if (problem.most_splits > 1) Run(&job, args.B * args.H * args.S, 1, parallel, CombineSplits);
    return Status();
  }
  args.elements != nullptr ? RowsOutermost(problem, order) : SortItems(problem, order);
  if (problem.ring_tiles == 0) {
    problem.packed_keys = reinterpret_cast<float*>(base + layout.keys);
    problem.packed_values = reinterpret_cast<float*>(base + layout.values);
    const int64_t panels = args.B * args.G * problem.panels;
    Run(&job, panels, std::clamp<int64_t>(panels / (4 * int64_t{threads}), 1, 64), parallel, Pack);
  }
  // Long steps: neighbours share keys, and each prefetches for the next one. But the last steps must be short.
  Run(&job, items, std::clamp<int64_t>(items / (16 * int64_t{threads}), 1, 8), parallel, AttendTileRows);
  return Status();
}

}  // namespace stof
