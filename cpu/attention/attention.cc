// SPDX-License-Identifier: Apache-2.0
// The entry points of attention on the CPU: chooses the tile, lays out the workspace and distributes the work among
// threads.
#include "cpu/attention/attention.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/attention/bf16_kernels.h"
#include "cpu/attention/plan.h"
#include "cpu/attention/red_zone.h"
#include "cpu/isa.h"
#include "cpu/kernel_table.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/mask/columns/key_columns.h"

namespace stof {
namespace {

constexpr int64_t kLine = 64;
constexpr size_t kTableCount = 4;  // of relative positions

struct Layout {
  // Byte offsets.
  int64_t pad = 0, order = 0, keys = 0, values = 0, partial = 0, scratch = 0, column_keys = 0, column_values = 0,
          pooled_keys = 0, pooled_keys_found = 0, total = 0;
  int64_t scratch_each = 0;
  std::vector<int64_t> ends;  // of parts, where red zones follow
  int64_t table_rows[kTableCount] = {}, table_row_bias[kTableCount] = {};
};

template <typename Tables>
auto ListTables(Tables* tables) {
  return std::array{&tables->key[0], &tables->key[1], &tables->query, &tables->value};
}

Layout MakeLayout(const cpu::AttentionProblem& problem, int64_t items, const cpu::AttentionKernels& kernels,
                  int threads) {
  const AttentionArgs& args = *problem.args;
  Layout layout;
  const auto take = [&layout](int64_t bytes) {
    const int64_t at = layout.total;
    if (cpu::kRedZone > 0) layout.ends.push_back(at + bytes);
    layout.total += RoundUp(bytes, kLine) + cpu::kRedZone;
    return at;
  };
  if (args.mask.pad != nullptr) layout.pad = take(args.shape.B * problem.key_tiles * problem.n / 8);
  if (problem.column_tiles > 0) {
    const int64_t rows = args.shape.B * args.shape.G * problem.column_tiles * problem.n * SizeOf(KvType(args.shape));
    layout.column_keys = take(rows * args.shape.D);
    layout.column_values = take(rows * args.shape.Dv);
  }
  if (problem.few_queries) {
    if (problem.most_splits > 1) {
      layout.partial =
          take(args.shape.B * args.shape.H * args.shape.S * problem.most_splits * problem.partial_stride * 4);
    }
  } else {
    layout.order = take(items * 4);
    if (problem.ring_tiles == 0) {
      const int64_t keys = args.shape.G * problem.panels * cpu::kPanel;
      layout.keys = take(keys * cpu::PackedKeyBytes(problem));
      if (problem.pack_values) layout.values = take(keys * cpu::PackedValueBytes(problem));
    }
  }
  if (problem.chooses_blocks) {
    layout.pooled_keys = take(args.shape.G * problem.pooled_panels * cpu::kPanel * args.shape.D * 4);
    layout.pooled_keys_found = take(problem.pooled_panels * 4);
  }
  for (size_t i = 0; problem.relative != nullptr && i < kTableCount; ++i) {
    const cpu::PackedTable& table = *ListTables(problem.relative)[i];
    if (table.table == nullptr) continue;
    layout.table_rows[i] = take(table.SharedHeads() * table.stride_h * 4);
    layout.table_row_bias[i] = take(table.SharedHeads() * table.RowBiasStride() * 4);
  }
  layout.scratch_each = RoundUp(static_cast<int64_t>(kernels.scratch_bytes(problem)), kLine);
  layout.scratch = take(layout.scratch_each * threads);
  return layout;
}

// Red zones behind the parts of a workspace, until the call ends.
class RedZones {
 public:
  RedZones(char* base, const Layout& layout) : base_(base), bytes_(layout.total) {
    for (const int64_t end : layout.ends) {
      cpu::ForbidAccess(base + end, RoundUp(end, kLine) - end + cpu::kRedZone);
    }
  }
  ~RedZones() { cpu::AllowAccess(base_, bytes_); }
  RedZones(const RedZones&) = delete;
  RedZones& operator=(const RedZones&) = delete;

 private:
  char* base_;
  int64_t bytes_;
};

void FillPadBits(const cpu::AttentionProblem& problem, uint32_t* bits) {
  const AttentionArgs& args = *problem.args;
  const int64_t words = problem.key_tiles * problem.n / 32;
  for (int64_t b = 0; b < args.shape.B; ++b) {
    const uint8_t* pad = args.mask.pad + b * args.shape.T;
    const int64_t keys = cpu::EndOfKeys(args, b);
    for (int64_t w = 0; w < words; ++w) {
      uint32_t word = 0;
      for (int64_t k = 32 * w; k < std::min(32 * w + 32, keys); ++k) word |= uint32_t{pad[k] != 0} << (k - 32 * w);
      bits[b * words + w] = word;
    }
  }
}

// Whether a worker keeps something of relative tables for the other tile rows of a head.
bool KeepsTables(const cpu::AttentionProblem& problem) {
  if (problem.relative == nullptr) return false;
  const auto tables = ListTables(problem.relative);
  return std::any_of(tables.begin(), tables.end(),
                     [](const cpu::PackedTable* table) { return table->is_own || table->keeps_products; });
}

// Orders items so that heads of the same rows are neighbours: they share the element masks that a worker evaluates. The
// last rows, which are the longest of a causal mask, go first.
void RowsOutermost(const cpu::AttentionProblem& problem, uint32_t* order) {
  const AttentionArgs& args = *problem.args;
  for (int64_t row = problem.tile_rows; row-- > 0;) {
    for (int64_t b = 0; b < args.shape.B; ++b) {
      if (row * problem.m >= cpu::EndOfQueries(args, b)) continue;
      for (int64_t h = 0; h < args.shape.H; ++h) {
        *order++ = static_cast<uint32_t>((b * args.shape.H + h) * problem.tile_rows + row);
      }
    }
  }
}

// Calls visit(item) for each tile row that exists.
template <typename Visit>
void ForEachItem(const cpu::AttentionProblem& problem, const Visit& visit) {
  const AttentionArgs& args = *problem.args;
  for (int64_t b = 0; b < args.shape.B; ++b) {
    const int64_t rows = CeilDiv(cpu::EndOfQueries(args, b), problem.m);
    for (int64_t head = b * args.shape.H; head < (b + 1) * args.shape.H; ++head) {
      for (int64_t row = 0; row < rows; ++row) visit(head * problem.tile_rows + row);
    }
  }
}

// Orders items by falling cost (LPT), so that the longest do not start last. Equal ones keep their order, so that
// neighbours find keys and values in the cache. A counting sort: 64 classes of cost suffice.
void SortItems(const cpu::AttentionProblem& problem, uint32_t* order) {
  const AttentionArgs& args = *problem.args;
  const bool is_packed = args.sequences.given();
  if (args.mask.fixed.blocks() == nullptr && !is_packed) {
    int64_t count = 0;
    ForEachItem(problem, [&](int64_t item) { order[count++] = static_cast<uint32_t>(item); });
    return;
  }
  const int64_t words = problem.n / 32;
  const auto present = [&](int64_t b, int64_t tile) {
    if (problem.pad_bits == nullptr) return true;
    if (tile >= problem.key_tiles) return false;  // of a longer mask than packed sequences need
    const uint32_t* bits = problem.pad_bits + (b * problem.key_tiles + tile) * words;
    return std::any_of(bits, bits + words, [](uint32_t word) { return word != 0; });
  };
  const auto tiles = [&](int64_t b, int64_t item) {
    const int64_t h = item / problem.tile_rows % args.shape.H;
    const BlockMask& mask = *args.mask.fixed.blocks();
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
  // The tile rows of a packed sequence stay together, the last one included: they share packed keys.
  const auto cost = [&](int64_t item) {
    const int64_t b = item / problem.tile_rows / args.shape.H;
    if (!is_packed) return tiles(b, item);
    const int64_t keys = cpu::EndOfKeys(args, b);
    return args.mask.fixed.blocks() == nullptr ? keys : std::min(keys, tiles(b, item) * problem.n / 2);
  };
  constexpr int64_t kClasses = 64;
  const int64_t most = is_packed ? args.shape.T : 2 * problem.key_tiles;
  const int64_t unit = most / kClasses + 1;
  int64_t begin[kClasses + 1] = {};
  const auto slot = [&](int64_t item) { return kClasses - 1 - std::min(kClasses - 1, cost(item) / unit); };
  ForEachItem(problem, [&](int64_t item) { ++begin[slot(item) + 1]; });
  for (int64_t c = 0; c < kClasses; ++c) begin[c + 1] += begin[c];
  ForEachItem(problem, [&](int64_t item) { order[begin[slot(item)]++] = static_cast<uint32_t>(item); });
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
  if (!cpu::CountsPairs(job.problem)) return;
  const uint64_t* const counts = job.kernels.skip_counts(job.problem, scratch);
  AddSkipCounts({counts[0], counts[1]});
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

// Gathers the columns of KV heads [first, last) of B * G. Of a tile that holds some, the other rows become zeros: their
// weights are 0, which a NaN would not stay.
void GatherColumns(const Job& job, int64_t first, int64_t last, void* /*scratch*/) {
  const cpu::AttentionProblem& problem = job.problem;
  const AttentionArgs& args = *problem.args;
  const int64_t item = SizeOf(KvType(args.shape)), rows = problem.column_tiles * problem.n;
  const auto gather = [&](const void* from, const Strides& stride, int64_t size, int64_t at,
                          const std::vector<int32_t>& keys, int64_t count, const char* to) {
    char* out = const_cast<char*>(to) + item * size * rows * at;  // a part of the workspace
    const char* head =
        static_cast<const char*>(from) + item * (at / args.shape.G * stride.b + at % args.shape.G * stride.h);
    const auto bytes = static_cast<size_t>(item * size);
    for (int64_t i = 0; i < count; ++i, out += bytes) {
      std::memcpy(out, head + item * stride.s * keys[static_cast<size_t>(i)], bytes);
    }
    std::memset(out, 0, bytes * static_cast<size_t>(RoundUp(count, problem.n) - count));
  };
  for (int64_t at = first; at < last; ++at) {
    const std::vector<int32_t>& keys = args.kv.columns->keys(args.kv.columns->ListOf(at % args.shape.G));
    const int64_t end = cpu::EndOfKeys(args, at / args.shape.G) - rows;  // of the keys behind the columns
    const int64_t count = std::lower_bound(keys.begin(), keys.end(), end) - keys.begin();
    gather(args.key.data, args.key.stride, args.shape.D, at, keys, count, problem.column_keys);
    gather(args.value.data, args.value.stride, args.shape.Dv, at, keys, count, problem.column_values);
  }
}
void Pack(const Job& job, int64_t first, int64_t last, void* scratch) {
  job.kernels.pack(job.problem, first, last, scratch);
}
void PackPooledKeys(const Job& job, int64_t first, int64_t last, void* scratch) {
  job.kernels.pack_pooled_keys(job.problem, first, last, scratch);
}
void PackTables(const Job& job, int64_t first, int64_t last, void* scratch) {
  job.kernels.pack_tables(job.problem, first, last, scratch);
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

Status CheckForCpu(const AttentionArgs& args, const CpuAttentionConfig& config) {
  STOF_RETURN_IF_ERROR(Check(args));
  if (args.mask.fixed.window() != nullptr || args.kv.seqlens != nullptr || args.kv.is_invalid != nullptr) {
    return Status::Error("causal windows, and what a device says of sequences, are for devices");
  }
  for (const RelativeTable* table : {&args.scores.relative_key[0], &args.scores.relative_key[1],
                                     &args.scores.relative_query, &args.relative_value}) {
    if (table->given() && table->index.row == nullptr) return Status::Error("a relative table without rows of pairs");
  }
  if (args.relative_value.rows > AttentionLimits::kMostRelativeValueRows) {
    return Status::Error("weights multiply a table of at most 1024 rows");
  }
  if (!IsCpuIsaSupported(config.isa)) return Status::Error("this machine lacks the instruction set of the config");
  if (config.m < 1 || config.n < 32 || config.n % 32 != 0 || config.n > cpu::kMaxTileKeys) {
    return Status::Error("no kernel for tiles of " + std::to_string(config.m) + " x " + std::to_string(config.n));
  }
  const HeadSizes sizes = AttentionLimits::HeadSizesOf(Target::kCpu, args.shape.dtype);
  if (!sizes.Has(args.shape.D) || !sizes.Has(args.shape.Dv)) {
    return Status::Error("head sizes are 1 to " + std::to_string(sizes.largest));
  }
  if (args.shape.B * args.shape.H * CeilDiv(args.shape.S, config.m) >= int64_t{1} << 32)
    return Status::Error("too many rows");
  const BlockMask* const blocks = args.mask.fixed.blocks();
  if (blocks != nullptr && (blocks->m != config.m || blocks->n != config.n)) {
    return Status::Error("the block mask was built for another tile or other sizes");
  }
  for (int64_t b = 0; args.kv.key_ends != nullptr && b < args.shape.B; ++b) {
    if (args.kv.key_ends[b] >= 0 && args.kv.key_ends[b] <= args.shape.T) continue;
    return Status::Error("sequence " + std::to_string(b) + " has " + std::to_string(args.kv.key_ends[b]) +
                         " keys, expected 0 to " + std::to_string(args.shape.T));
  }
  if (args.kv.columns != nullptr && args.kv.columns->packed() % config.n != 0) {
    return Status::Error("gathered columns fill whole tiles");
  }
  const PackedSequences& sequences = args.sequences;
  for (int64_t b = 0; sequences.given() && b < args.shape.B; ++b) {
    const int64_t begin = sequences.starts[b], length = sequences.starts[b + 1] - begin;
    if (begin >= 0 && length == args.kv.key_ends[b] && (!sequences.has_queries || length <= args.shape.S)) continue;
    return Status::Error("packed sequence " + std::to_string(b) + " begins at row " + std::to_string(begin) +
                         " and has " + std::to_string(length) + " rows, expected those of its keys");
  }
  return Status();
}

// The number of tile rows of m queries in all heads.
int64_t CountTileRows(const AttentionArgs& args, int64_t m) {
  if (!args.sequences.has_queries) return args.shape.B * args.shape.H * CeilDiv(args.shape.S, m);
  int64_t rows = 0;
  for (int64_t b = 0; b < args.shape.B; ++b) rows += CeilDiv(cpu::EndOfQueries(args, b), m);
  return rows * args.shape.H;
}

}  // namespace

CpuAttentionConfig ChooseCpuAttention(const AttentionArgs& args, int threads) {
  CpuAttentionConfig config;
  config.isa = BestCpuIsa();
  config.n = FewQueriesTile(args.kv.choice);
  if (cpu::HasFewQueries(args)) {
    config.m = static_cast<int>(std::max<int64_t>(1, args.shape.S));
    return config;
  }
  // Outputs are read and written once per key tile, so tiles are long; longer ones would evict the keys from L1.
  if (args.shape.T > config.n) config.n = 128;
  // Whole strips, of 6 rows or of the 16 of a tile register, or, where blocks are chosen, parts of a block; fewer rows
  // where threads would get less than four items each.
  const bool chooses = ChoosesBlocks(args) && args.shape.T > kBlockKeys;
  const bool has_tiles = args.allow_bf16 && IsaOfBf16Kernels(config.isa) == CpuIsa::kAmxBf16;
  const int least = chooses || has_tiles ? 32 : 24;
  config.m = 4 * least;
  while (config.m > least && CountTileRows(args, config.m) < 4 * int64_t{threads}) config.m /= 2;
  return config;
}

size_t CpuAttentionWorkspace(const AttentionArgs& args, const CpuAttentionConfig& config, int threads) {
  if (!CheckForCpu(args, config).ok()) return 0;
  const cpu::AttentionKernels* const bf16 = cpu::Bf16KernelsOf(args, config);
  cpu::AttentionPlan plan(args, config, std::max(1, threads), bf16 != nullptr);
  const cpu::AttentionKernels& kernels = plan.problem()->rounds_to_bf16 ? *bf16 : *cpu::KernelsOf(config.isa).attention;
  return static_cast<size_t>(MakeLayout(*plan.problem(), plan.Items(), kernels, std::max(1, threads)).total);
}

Status CpuAttention(const AttentionArgs& args, const CpuAttentionConfig& config, void* workspace,
                    const Parallel& parallel) {
  STOF_RETURN_IF_ERROR(CheckForCpu(args, config));
  if (args.shape.B == 0 || args.shape.H == 0 || args.shape.S == 0) return Status();
  const cpu::AttentionKernels* const bf16 = cpu::Bf16KernelsOf(args, config);
  const int threads = std::max(1, parallel.threads);
  cpu::AttentionPlan plan(args, config, threads, bf16 != nullptr);
  cpu::AttentionProblem& problem = *plan.problem();
  const cpu::AttentionKernels& kernels = problem.rounds_to_bf16 ? *bf16 : *cpu::KernelsOf(config.isa).attention;
  const int64_t items = plan.Items();
  const Layout layout = MakeLayout(problem, items, kernels, threads);
  char* base = static_cast<char*>(workspace);
  const RedZones red_zones(base, layout);
  if (args.mask.pad != nullptr) {
    uint32_t* bits = reinterpret_cast<uint32_t*>(base + layout.pad);
    FillPadBits(problem, bits);
    problem.pad_bits = bits;
  }
  uint32_t* order = reinterpret_cast<uint32_t*>(base + layout.order);
  Job job{problem, kernels, base + layout.scratch, layout.scratch_each, order};
  if (problem.column_tiles > 0) {
    problem.column_keys = base + layout.column_keys;
    problem.column_values = base + layout.column_values;
    Run(&job, args.shape.B * args.shape.G, 1, parallel, GatherColumns);
  }
  if (problem.few_queries) {
    if (problem.most_splits > 1) problem.partial = reinterpret_cast<float*>(base + layout.partial);
    Run(&job, items, 1, parallel, AttendSplits);
    if (problem.most_splits > 1) Run(&job, args.shape.B * args.shape.H * args.shape.S, 1, parallel, CombineSplits);
    return Status();
  }
  args.mask.fixed.elements() != nullptr ? RowsOutermost(problem, order) : SortItems(problem, order);
  if (problem.ring_tiles == 0) {
    problem.packed_keys = base + layout.keys;
    problem.packed_values = base + layout.values;
    const int64_t panels = args.shape.G * problem.panels;
    Run(&job, panels, std::clamp<int64_t>(panels / (4 * int64_t{threads}), 1, 64), parallel, Pack);
  }
  if (problem.chooses_blocks) {
    problem.pooled_keys = reinterpret_cast<float*>(base + layout.pooled_keys);
    problem.pooled_keys_found = reinterpret_cast<uint32_t*>(base + layout.pooled_keys_found);
    const int64_t panels = args.shape.G * problem.pooled_panels;
    Run(&job, panels, std::clamp<int64_t>(panels / (4 * int64_t{threads}), 1, 64), parallel, PackPooledKeys);
  }
  if (problem.relative != nullptr) {
    int64_t panels = 0;
    for (size_t i = 0; i < kTableCount; ++i) {
      cpu::PackedTable& table = *ListTables(plan.relative())[i];
      if (table.SharedHeads() == 0) continue;
      table.data = reinterpret_cast<float*>(base + layout.table_rows[i]);
      if (table.RowBiasStride() > 0) table.row_bias = reinterpret_cast<float*>(base + layout.table_row_bias[i]);
      panels += table.SharedHeads() * table.rows / cpu::kPanel;
    }
    Run(&job, panels, std::clamp<int64_t>(panels / (4 * int64_t{threads}), 1, 64), parallel, PackTables);
  }
  // Long steps: neighbours share keys, and each prefetches for the next one. But the last steps must be short.
  int64_t step = std::clamp<int64_t>(items / (16 * int64_t{threads}), 1, 8);
  if (KeepsTables(problem) && items / problem.tile_rows >= 2 * int64_t{threads}) step = problem.tile_rows;
  Run(&job, items, step, parallel, AttendTileRows);
  return Status();
}

}  // namespace stof
