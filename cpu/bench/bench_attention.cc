// SPDX-License-Identifier: Apache-2.0
// The CPU attention kernel alone: GFLOP/s on the pairs that the mask allows and on the tiles that hold one, beside the
// FMA rate of the same run. Rows of a KV cache go round as many layers as a memory cache does not hold. Rounds of all
// rows are interleaved with the FMA loop; the figures are minima. Rows named cold have blocks of keys that hardly
// count, of which rows named skip leave out what the threshold allows. Rows named choose estimate which blocks matter.
//   bench_attention [--rows ROW[,ROW]] [--threads N] [--rounds N] [--tile MxN] [--isa NAME] [--matmuls NAME]
//   [--cpu-time]
// --isa: an instruction set of plugins/core/base/cpu_isas.h. --matmuls: fp32, bf16 (AttentionArgs::allow_bf16), or
// both, which are interleaved.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "plugins/core/c_api/c_api.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/host/thread_pool.h"
#include "plugins/core/mask/block_mask_builder.h"
#include "plugins/core/mask/cached_mask.h"
#include "plugins/core/mask/expr.h"
#include "plugins/core/ops/attention_relative.h"

namespace stof {
namespace {

struct Case {
  const char* name;
  const char* mask;  // empty: dense
  int64_t B, H, G, S, T, D;
  bool bshd;       // heads between positions: rows stride H * D, as exporters' projections leave them
  int layers = 1;  // more: attention over KV caches, each run over the next one's; the mask is in absolute positions
  // Rows of relative tables that are multiplied with queries and with keys; empty: none.
  const char *relative_key = "", *relative_query = "";
  int64_t relative_rows = 0;
  // Skip by score: the threshold, and the share of blocks of kColdKeys keys whose scores lie far below the others'.
  float skip_threshold = 0.0f;
  double cold = 0;
  float block_threshold = 0.0f;  // choose blocks
};

constexpr int64_t kColdKeys = 128;

constexpr char kDistance[] = "k - q + S - 1";
// 512 logarithmic buckets, exact up to distances of 128: DeBERTa v3.
constexpr char kBucket[] = "table0[max(0, min(2 * T - 2, q - k + T - 1))]";
constexpr char kGridRow[] = "q // 64 - k // 64 + 63", kGridColumn[] = "q % 64 - k % 64 + 63";

constexpr int kLayers = 8;

constexpr Case kCases[] = {
    {"dense", "", 1, 12, 12, 4096, 4096, 64, false},
    {"dense-bshd", "", 1, 12, 12, 4096, 4096, 64, true},
    {"dense128", "", 1, 6, 6, 4096, 4096, 128, false},
    {"dense80", "", 1, 6, 6, 2048, 2048, 80, false},
    {"dense256", "", 1, 3, 3, 4096, 4096, 256, false},
    {"dense-gqa", "", 1, 12, 2, 2048, 2048, 64, true},
    {"s128", "", 1, 12, 12, 128, 128, 64, false},
    {"s512", "", 1, 12, 12, 512, 512, 64, false},
    {"s2048", "", 1, 12, 12, 2048, 2048, 64, false},
    {"w256", "abs(q - k) <= 256", 1, 12, 12, 4096, 4096, 64, false},
    {"w256-bshd", "abs(q - k) <= 256", 1, 12, 12, 4096, 4096, 64, true},
    {"w64", "abs(q - k) <= 64", 1, 12, 12, 4096, 4096, 64, false},
    {"w64-bshd", "abs(q - k) <= 64", 1, 12, 12, 4096, 4096, 64, true},
    {"w64-s512", "abs(q - k) <= 64", 1, 12, 12, 512, 512, 64, true},
    {"causal", "k <= q", 1, 12, 12, 4096, 4096, 64, false},
    {"longformer", "abs(q - k) <= 64 or q < 64 or k < 64", 1, 12, 12, 4096, 4096, 64, false},
    {"skip0", "", 1, 12, 12, 4096, 4096, 64, false, 1, "", "", 0, 0.01f, 0},
    {"cold", "", 1, 12, 12, 4096, 4096, 64, false, 1, "", "", 0, 0, 0.75},
    {"skip", "", 1, 12, 12, 4096, 4096, 64, false, 1, "", "", 0, 0.01f, 0.75},
    {"skip0-causal", "k <= q", 1, 12, 12, 4096, 4096, 64, false, 1, "", "", 0, 0.01f, 0},
    {"cold-causal", "k <= q", 1, 12, 12, 4096, 4096, 64, false, 1, "", "", 0, 0, 0.75},
    {"skip-causal", "k <= q", 1, 12, 12, 4096, 4096, 64, false, 1, "", "", 0, 0.01f, 0.75},
    {"long", "", 1, 4, 4, 8192, 8192, 64, false},
    {"long128", "", 1, 2, 2, 8192, 8192, 128, false},
    {"long-causal", "k <= q", 1, 4, 4, 8192, 8192, 64, false},
    {"long128-causal", "k <= q", 1, 2, 2, 8192, 8192, 128, false},
    {"choose0", "", 1, 4, 4, 8192, 8192, 64, false, 1, "", "", 0, 0, 0, 1e-30f},
    {"choose", "", 1, 4, 4, 8192, 8192, 64, false, 1, "", "", 0, 0, 0.75, 0.01f},
    {"choose128", "", 1, 2, 2, 8192, 8192, 128, false, 1, "", "", 0, 0, 0.75, 0.01f},
    {"choose0-causal", "k <= q", 1, 4, 4, 8192, 8192, 64, false, 1, "", "", 0, 0, 0, 1e-30f},
    {"choose-causal", "k <= q", 1, 4, 4, 8192, 8192, 64, false, 1, "", "", 0, 0, 0.75, 0.01f},
    {"choose128-causal", "k <= q", 1, 2, 2, 8192, 8192, 128, false, 1, "", "", 0, 0, 0.75, 0.01f},
    {"decode", "", 1, 12, 12, 1, 32768, 64, false},
    {"decode-gqa", "", 1, 32, 8, 1, 32768, 128, false},
    {"decode-small", "", 1, 12, 12, 1, 1024, 64, false},
    {"cache", "k <= q", 1, 32, 8, 1, 16384, 128, false, kLayers},
    {"skip0-cache", "k <= q", 1, 32, 8, 1, 16384, 128, false, kLayers, "", "", 0, 0.01f, 0},
    {"cold-cache", "k <= q", 1, 32, 8, 1, 16384, 128, false, kLayers, "", "", 0, 0, 0.75},
    {"skip-cache", "k <= q", 1, 32, 8, 1, 16384, 128, false, kLayers, "", "", 0, 0.01f, 0.75},
    {"cache-g1", "k <= q", 1, 32, 1, 1, 16384, 128, false, kLayers},
    {"cache-g32", "k <= q", 1, 32, 32, 1, 16384, 128, false, kLayers},
    {"cache-d64", "k <= q", 1, 32, 8, 1, 16384, 64, false, kLayers},
    {"cache-s4", "k <= q", 1, 32, 8, 4, 16384, 128, false, kLayers},
    {"cache-s16", "k <= q", 1, 32, 8, 16, 16384, 128, false, kLayers},
    {"cache-w1024", "k <= q and q - k < 1024", 1, 32, 8, 1, 16384, 128, false, kLayers},
    {"cache-1k", "k <= q", 1, 32, 8, 1, 1024, 128, false, kLayers},
    {"cache-prefill", "k <= q and q - k < 1024", 1, 32, 8, 8192, 8192, 128, false, 2},
    {"cache-chunk", "k <= q", 1, 32, 8, 256, 8192, 128, false, 2},
    {"rel512", "", 1, 12, 12, 512, 512, 64, false, 1, kDistance, "", 1023},
    {"rel4096", "", 1, 12, 12, 4096, 4096, 64, false, 1, kDistance, "", 8191},
    {"rel-query512", "", 1, 12, 12, 512, 512, 64, false, 1, "", kDistance, 1023},
    {"rel-both512", "", 1, 12, 12, 512, 512, 64, false, 1, kDistance, kDistance, 1023},
    {"rel-bucket128", "", 1, 12, 12, 128, 128, 64, false, 1, kBucket, "", 512},
    {"rel-bucket512", "", 1, 12, 12, 512, 512, 64, false, 1, kBucket, "", 512},
    {"rel-bucket4096", "", 1, 12, 12, 4096, 4096, 64, false, 1, kBucket, "", 512},
    {"rel-bucket-query512", "", 1, 12, 12, 512, 512, 64, false, 1, "", kBucket, 512},
    {"rel-bucket-both512", "", 1, 12, 12, 512, 512, 64, false, 1, kBucket, kBucket, 512},
    {"rel-bucket-both4096", "", 1, 12, 12, 4096, 4096, 64, false, 1, kBucket, kBucket, 512},
    {"rel-w128", "abs(q - k) <= 128", 1, 12, 12, 4096, 4096, 64, false, 1, "k - q + 128", "", 257},
    {"rel-decode-small", "", 1, 12, 12, 1, 1024, 64, false, 1, kBucket, "", 512},
    {"rel-decode-both-small", "", 1, 12, 12, 1, 1024, 64, false, 1, kBucket, kBucket, 512},
    {"rel-grid4096", "", 1, 12, 12, 4096, 4096, 64, false, 1, kGridRow, "", 127},
    {"rel-grid-columns4096", "", 1, 12, 12, 4096, 4096, 64, false, 1, kGridColumn, "", 127},
};

// --cpu-time: CPU seconds of the process, for a machine that others use, too; with one thread they are those of a run.
bool counts_cpu_time = false;
double Now() {
  if (counts_cpu_time) return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void* AllocateAligned(size_t bytes) { return std::aligned_alloc(64, (bytes / 64 + 1) * 64); }

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, Free>;

Buffer Random(int64_t count, uint32_t seed) {
  Buffer buffer(AllocateAligned(static_cast<size_t>(count) * 4));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  float* const values = static_cast<float*>(buffer.get());
  constexpr int64_t kDrawn = int64_t{1} << 20;  // more repeat these
  for (int64_t i = 0; i < count; ++i) values[i] = i < kDrawn ? normal(random) : values[i - kDrawn];
  return buffer;
}

struct Row {
  const Case* what = nullptr;
  AttentionArgs args;
  CpuAttentionConfig config;
  BlockMask mask;
  MaskExpr expr;
  std::vector<int32_t> first, ends;  // of a KV cache
  std::unique_ptr<BoundCachedMask> cached;
  int layer = 0;
  Buffer query, key, value, output, workspace;
  std::shared_ptr<const RelativeRowArrays> relative_key, relative_query;
  Buffer key_table, query_table;
  double pairs = 0, tile_pairs = 0, keys = 0, best = 1e9;
  SkipCounts skip_counts;
  double read = 1e9;  // seconds that a plain sum over the keys and values of a layer takes, of a KV cache

  void TakeNextLayer() {
    const int64_t elements =
        args.shape.B * args.shape.G * args.shape.T * args.shape.D * (layer = (layer + 1) % what->layers);
    args.key.data = static_cast<float*>(key.get()) + elements;
    args.value.data = static_cast<float*>(value.get()) + elements;
  }
};

// Adds up the keys and values of each head that a query of the row may attend, as 64-bit words.
void Sum(Row* row, const Parallel& parallel) {
  struct Job {
    const Row* row;
    std::atomic<int64_t> next{0};
    std::atomic<uint64_t> total{0};
  } job{row};
  const auto work = [](void* user, size_t) {
    Job& j = *static_cast<Job*>(user);
    const AttentionArgs& a = j.row->args;
    const int64_t words = static_cast<int64_t>(j.row->keys) * a.shape.D / 2, heads = a.shape.B * a.shape.G, pieces = 16;
    for (int64_t i = j.next++; i < 2 * heads * pieces; i = j.next++) {
      const int64_t head = i / pieces % heads, first = words * (i % pieces) / pieces / 8 * 8;
      const int64_t last = words * (i % pieces + 1) / pieces / 8 * 8;
      const void* base = i < heads * pieces ? a.key.data : a.value.data;
      const auto* from = static_cast<const uint64_t*>(base) + (head + 1) * a.shape.T * a.shape.D / 2 - words;
      uint64_t sums[8] = {};
      for (int64_t w = first; w < last; w += 8) {
        for (int l = 0; l < 8; ++l) sums[l] += from[w + l];
      }
      for (const uint64_t sum : sums) j.total += sum;
    }
  };
  const double begin = Now();
  parallel.run(parallel.self, work, static_cast<size_t>(parallel.threads), &job);
  row->read = std::min(row->read, Now() - begin);
}

void Exit(const char* row, const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", row, status.message().c_str());
  std::exit(1);
}

// Every query row's keys, counted one by one. GCC 12 warns of a vector's memory where it inlines this.
__attribute__((noinline)) void BindCache(const Case& what, Row* row) {
  AttentionArgs& a = row->args;
  Exit(what.name, MaskExpr::Parse(what.mask, {}, &row->expr));
  row->first.assign(static_cast<size_t>(what.B), static_cast<int32_t>(what.T - what.S));
  row->ends.assign(static_cast<size_t>(what.B), static_cast<int32_t>(what.T));
  const ExprSizes sizes = {what.B, what.H, what.S, what.T, 0};
  Exit(what.name, BoundCachedMask::Make(row->expr, sizes, row->first.data(), row->ends.data(), &row->cached));
  a.mask.fixed = StaticMask::OfElements(row->cached->view());
  a.kv.key_ends = row->ends.data();
  ExprSizes own = sizes;
  own.P = row->first[0];
  ExprEvaluator evaluator(row->expr, own, {});
  const auto keys = static_cast<size_t>(what.T);
  std::vector<uint8_t> allowed(keys, 0);
  std::vector<uint8_t> any(keys, 0);
  row->pairs = 0;
  for (int64_t i = 0; i < what.S; ++i) {
    evaluator.Row(0, 0, own.P + i, 0, what.T, allowed.data());
    for (size_t k = 0; k < keys; ++k) row->pairs += allowed[k], any[k] |= allowed[k];
  }
  row->tile_pairs = row->pairs;
  row->keys = 0;
  for (const uint8_t one : any) row->keys += one;
}

// Buckets of distances: exact ones, then as many again up to 512, by the logarithm.
std::vector<int32_t> Buckets(int64_t T, int64_t rows) {
  std::vector<int32_t> table;
  const int64_t middle = rows / 4;
  for (int64_t d = 1 - T; d < T; ++d) {
    const auto far = static_cast<double>(std::abs(d)), exact = static_cast<double>(middle);
    const double bucket =
        std::abs(d) <= middle ? far : std::ceil(std::log(far / exact) / std::log(511 / exact) * (exact - 1)) + exact;
    table.push_back(static_cast<int32_t>((d < 0 ? -bucket : bucket) + static_cast<double>(rows / 2)));
  }
  return table;
}

void BindRelative(const Case& what, const char* index, uint32_t seed, RelativeTable* table, Buffer* data,
                  std::shared_ptr<const RelativeRowArrays>* rows) {
  if (index[0] == 0) return;
  std::vector<int32_t> buckets = Buckets(what.T, what.relative_rows);
  Tensor tensor = TensorOfShape(DType::kI32, {static_cast<int64_t>(buckets.size())});
  tensor.data = buckets.data();
  MaskExpr expr;
  Exit(what.name, MaskExpr::ParseInteger(index, {{"table0", tensor}}, &expr));
  SeparatedExpr separated;
  if (!SeparatedExpr::Make(expr, &separated)) Exit(what.name, Status::Error("no function of one difference"));
  const ExprSizes sizes = {1, 1, what.S, what.T, what.T - what.S};
  Exit(what.name, RelativeRowArrays::Make("relative_key", separated, sizes, what.relative_rows, rows));
  *data = Random(what.H * what.relative_rows * what.D, seed);
  *table = {data->get(), DType::kF32, what.relative_rows, what.D, what.relative_rows * what.D, (*rows)->view()};
}

// Queries and keys with a common direction, against which the keys of cold blocks point: each score of those is about
// 50 below the others.
void CoolKeys(const Case& what, Row* row) {
  if (what.cold == 0) return;
  float* const query = static_cast<float*>(row->query.get());
  float* const key = static_cast<float*>(row->key.get());
  const int64_t queries = what.B * what.H * what.S, keys = what.layers * what.B * what.G * what.T;
  for (int64_t i = 0; i < queries; ++i) query[i * what.D] = 20.0f;
  const int64_t blocks = what.T / kColdKeys;
  for (int64_t i = 0; i < keys; ++i) {
    // Evenly spread over blocks, with another first one in each head.
    const int64_t block = i % what.T / kColdKeys + i / what.T * 7 % blocks;
    const auto before = static_cast<int64_t>(what.cold * static_cast<double>(block));
    const bool is_cold = static_cast<int64_t>(what.cold * static_cast<double>(block + 1)) > before;
    key[i * what.D] = is_cold ? -10.0f : 10.0f;
  }
}

void Prepare(const Case& what, int threads, int m, int n, CpuIsa isa, bool allow_bf16, Row* row) {
  row->what = &what;
  AttentionArgs& a = row->args;
  a.allow_bf16 = allow_bf16;
  a.shape = {what.B, what.H, what.G, what.S, what.T, what.D, what.D};
  a.scores.scale = 0.125f;
  a.scores.skip_threshold = what.skip_threshold;
  a.scores.block_threshold = what.block_threshold;
  a.scores.diagonal.first = what.T - what.S;
  const auto strides = [&](int64_t heads, int64_t length) {
    const int64_t all = heads * length * what.D;
    return what.bshd ? Strides{all, what.D, heads * what.D} : Strides{all, length * what.D, what.D};
  };
  a.query.stride = a.output.stride = strides(what.H, what.S);
  a.key.stride = a.value.stride = strides(what.G, what.T);
  row->query = Random(what.B * what.H * what.S * what.D, 1);
  row->key = Random(what.layers * what.B * what.G * what.T * what.D, 2);
  row->value = Random(what.layers * what.B * what.G * what.T * what.D, 3);
  row->output.reset(AllocateAligned(static_cast<size_t>(what.B * what.H * what.S * what.D) * 4));
  a.query.data = row->query.get(), a.key.data = row->key.get(), a.value.data = row->value.get(),
  a.output.data = row->output.get();
  CoolKeys(what, row);
  BindRelative(what, what.relative_key, 4, &a.scores.relative_key[0], &row->key_table, &row->relative_key);
  BindRelative(what, what.relative_query, 5, &a.scores.relative_query, &row->query_table, &row->relative_query);
  row->config = ChooseCpuAttention(a, threads);
  if (m > 0) row->config.m = m;
  if (n > 0) row->config.n = n;
  row->config.isa = isa;
  row->pairs = row->tile_pairs = static_cast<double>(what.S) * static_cast<double>(what.T);
  row->keys = static_cast<double>(what.T);
  if (what.layers > 1) {
    BindCache(what, row);
  } else if (what.mask[0] != 0) {
    MaskExpr& expr = row->expr;
    ExprSizes sizes;
    sizes.B = what.B, sizes.H = what.H, sizes.S = what.S, sizes.T = what.T, sizes.P = what.T - what.S;
    Status status = MaskExpr::Parse(what.mask, {}, &expr);
    if (status.ok()) status = BuildBlockMask(expr, sizes, row->config.m, row->config.n, &row->mask);
    Exit(what.name, status);
    a.mask.fixed = StaticMask::OfBlocks(&row->mask);
    row->pairs = 0;
    const int64_t words = int64_t{row->mask.m} * row->mask.n / 32;
    for (const int32_t id : row->mask.bits_id) {
      for (int64_t w = 0; id >= 0 && w < words; ++w) row->pairs += __builtin_popcount(row->mask.bits[id * words + w]);
    }
    for (size_t r = 0; r < row->mask.full_begin.size(); ++r) {
      const int64_t rows = std::min<int64_t>(row->mask.m, what.S - static_cast<int64_t>(r) * row->mask.m);
      row->pairs += static_cast<double>(row->mask.row_ptr[r + 1] - row->mask.full_begin[r]) * rows * row->mask.n;
    }
    row->tile_pairs = static_cast<double>(row->mask.key_tile.size()) * row->mask.m * row->mask.n;
  }
  row->workspace.reset(AllocateAligned(CpuAttentionWorkspace(a, row->config, threads)));
}

int Main(int argc, char** argv) {
  std::string rows;
  int threads = 1, rounds = 5, m = 0, n = 0;
  CpuIsa isa = BestCpuIsa();
  std::string matmuls = "fp32";
  if (argc % 2 == 0 && std::strcmp(argv[argc - 1], "--cpu-time") == 0) counts_cpu_time = true;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--rows") == 0) rows = "," + std::string(argv[i + 1]) + ",";
    if (std::strcmp(argv[i], "--matmuls") == 0) matmuls = argv[i + 1];
    if (std::strcmp(argv[i], "--threads") == 0) threads = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--rounds") == 0) rounds = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--tile") == 0) std::sscanf(argv[i + 1], "%dx%d", &m, &n);
    if (std::strcmp(argv[i], "--isa") == 0) {
      if (!FindCpuIsa(argv[i + 1], &isa) || !IsCpuIsaSupported(isa)) {
        std::fprintf(stderr, "--isa %s: no instruction set of this machine\n", argv[i + 1]);
        return 1;
      }
    }
  }
  std::vector<std::unique_ptr<Row>> table;
  for (const Case& what : kCases) {
    if (!rows.empty() && rows.find("," + std::string(what.name) + ",") == std::string::npos) continue;
    for (const bool allow_bf16 : {false, true}) {
      if (matmuls == (allow_bf16 ? "fp32" : "bf16")) continue;
      table.push_back(std::make_unique<Row>());
      Prepare(what, threads, m, n, isa, allow_bf16, table.back().get());
    }
  }
  ThreadPool pool(threads);
  double fma = 0;
  for (int round = 0; round < rounds; ++round) {
    fma = std::max(fma, stof_fma_rate(threads, 0.05));
    for (auto& row : table) {
      // Short ones in a loop of about 20 ms, so that a wake-up or a page fault does not decide.
      int repeats = round == 0 ? 1 : std::max(1, std::min(1000, static_cast<int>(0.02 / row->best)));
      for (; repeats > 0; --repeats) {
        ResetSkipCounts();
        const double begin = Now();
        const Status status = CpuAttention(row->args, row->config, row->workspace.get(), pool.view());
        row->best = std::min(row->best, Now() - begin);
        row->skip_counts = ReadSkipCounts();
        Exit(row->what->name, status);
        row->TakeNextLayer();
        if (row->what->layers == 1) continue;
        Sum(row.get(), pool.view());
        row->TakeNextLayer();
      }
    }
  }
  const double bandwidth = stof_read_bandwidth(threads, size_t{256} << 20, 0.2);
  std::printf("threads %d, FMA %.1f GFLOP/s, read %.1f GB/s\n", threads, fma, bandwidth);
  std::printf("%-20s %-8s %10s %9s %9s %8s %8s %7s %7s %9s\n", "row", "tile", "ms", "useful", "on tiles", "% of FMA",
              "% tiles", "GB/s", "% read", "% skipped");
  for (const auto& row : table) {
    const double heads = static_cast<double>(row->args.shape.B * row->args.shape.H);
    const double flop = 4.0 * heads * static_cast<double>(row->args.shape.D) / row->best * 1e-9;
    const double bytes =
        8.0 * static_cast<double>(row->args.shape.B * row->args.shape.G * row->args.shape.D) * row->keys;
    char tile[24];
    std::snprintf(tile, sizeof(tile), "%dx%d", row->config.m, row->config.n);
    const std::string name = std::string(row->what->name) + (row->args.allow_bf16 ? " bf16" : "");
    std::printf("%-20s %-8s %10.3f %9.1f %9.1f %8.1f %8.1f %7.1f %7.1f %9.1f\n", name.c_str(), tile, row->best * 1e3,
                flop * row->pairs, flop * row->tile_pairs, 100 * flop * row->pairs / fma,
                100 * flop * row->tile_pairs / fma, bytes / row->best * 1e-9,
                row->read < 1e9 ? 100 * row->read / row->best : 0.0,
                100.0 * static_cast<double>(row->skip_counts.skipped) /
                    static_cast<double>(std::max<uint64_t>(1, row->skip_counts.scored)));
  }
  return 0;
}

}  // namespace
}  // namespace stof

int main(int argc, char** argv) { return stof::Main(argc, argv); }
