// SPDX-License-Identifier: Apache-2.0
// Runs StofPagedAttention: the append step, then attention over the pages.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/contract/workspace_counter.h"
#include "plugins/core/ops/kv_attention.h"
#include "plugins/core/ops/paged_attention/paged_attention.h"

namespace stof {
namespace {

// The workspace of gathered keys and values, unless one sequence alone needs more.
constexpr int64_t kGatheredBytes = int64_t{512} << 20;

// Allocates `elements` of `size` bytes, a product of sizes that a model gives.
template <typename T>
Status AllocateFor(const RunContext& context, const std::vector<int64_t>& sizes, T** pointer) {
  int64_t bytes = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return Status::Error("a workspace of more than 2^63 bytes");
  }
  void* memory = nullptr;
  STOF_RETURN_IF_ERROR(context.Allocate(static_cast<size_t>(bytes), &memory));
  *pointer = static_cast<T*>(memory);
  return Status();
}

// Sequences [first, first + count) with equally many new tokens, which run as one batch.
struct Batch {
  int64_t first = 0, count = 0, tokens = 0;
};

std::vector<Batch> FindBatches(const PagedAppendArgs& args) {
  std::vector<Batch> batches;
  for (int64_t b = 0; b < args.B; ++b) {
    const int64_t tokens = args.cumulative[b + 1] - args.cumulative[b];
    if (!batches.empty() && batches.back().tokens == tokens) {
      ++batches.back().count;
    } else {
      batches.push_back({b, 1, tokens});
    }
  }
  const auto is_idle = [](const Batch& batch) { return batch.tokens == 0; };
  batches.erase(std::remove_if(batches.begin(), batches.end(), is_idle), batches.end());
  return batches;
}

const char* Advance(const void* from, int64_t elements, DType dtype) {
  return static_cast<const char*>(from) + elements * SizeOf(dtype);
}

// The attention of B sequences of S queries each over at most T keys. Its queries, keys and output are not bound.
// first_rows: [B], the keys at the positions of their queries 0.
AttentionArgs ArgsOf(const PagedRun& run, int64_t B, int64_t S, int64_t T, const int32_t* first_rows) {
  const CacheAppendArgs& a = run.append.tokens;
  AttentionArgs args;
  args.shape = {B, a.H, a.G, S, T, a.D, a.D, a.dtype};
  args.scores = run.scores;
  args.scores.diagonal.first_rows = first_rows;
  args.allow_bf16 = run.allow_bf16;
  args.kernel = run.kernel;
  return args;
}

// The same over the pages.
AttentionArgs PagedArgsOf(const PagedRun& run, int64_t B, int64_t S, int64_t T, const int32_t* first_rows) {
  const CacheAppendArgs& a = run.append.tokens;
  AttentionArgs args = ArgsOf(run, B, S, T, first_rows);
  const Strides rows = {0, a.D, a.G * a.D};
  args.key = {a.present_key, rows};
  args.value = {a.present_value, rows};
  return args;
}

// The attention of one batch on the CPU.
struct BatchRun {
  AttentionArgs args;
  std::unique_ptr<BoundCachedMask> mask;
  CpuAttentionConfig config;
};
Status BindBatch(const CachedMask& mask, const PagedRun& run, const PagedStep& step, const Batch& batch, int threads,
                 BatchRun* bound) {
  const PagedAppendArgs& p = run.append;
  const CacheAppendArgs& a = p.tokens;
  const int64_t S = batch.tokens, first_token = p.cumulative[batch.first];
  const int32_t* const ends = step.key_ends.data() + batch.first;
  AttentionArgs& args = bound->args;
  args = PagedArgsOf(run, batch.count, S, *std::max_element(ends, ends + batch.count), p.past + batch.first);
  const int64_t stride = run.has_query_copy ? a.H * a.D : a.query_stride.s;
  args.query.data = Advance(run.has_query_copy ? a.rotated_query : a.query, first_token * stride, a.dtype);
  args.query.stride = {S * stride, a.D, stride};
  args.output.data = const_cast<char*>(Advance(run.output, first_token * a.H * a.D, a.dtype));
  args.output.stride = {S * a.H * a.D, a.D, a.H * a.D};
  args.kv.pages = p.pages;
  if (!step.table.empty()) args.kv.pages.table = step.table.data() + batch.first * step.columns;
  args.kv.pages.columns = step.columns;
  args.kv.key_ends = ends;
  const ExprSizes sizes = {args.shape.B, args.shape.H, args.shape.S, args.shape.T, 0};
  STOF_RETURN_IF_ERROR(BoundCachedMask::Make(mask.expr, sizes, p.past + batch.first, ends, &bound->mask));
  args.mask.fixed = StaticMask::OfElements(bound->mask->view());
  bound->config = ChooseCpuAttention(args, threads);
  return Status();
}

// The attention of all sequences on the CPU, and the memory of the run.
struct HostRun {
  std::vector<BatchRun> batches;
  void* workspace = nullptr;
};
Status PrepareOnCpu(const CachedMask& mask, const RunContext& context, const PagedStep& step, PagedRun* run,
                    HostRun* host) {
  CacheAppendArgs& a = run->append.tokens;
  if (run->has_query_copy) {
    STOF_RETURN_IF_ERROR(AllocateFor(context, {a.S, a.H, a.D, SizeOf(a.dtype)}, &a.rotated_query));
  }
  const int threads = std::max(1, context.parallel.threads);
  size_t bytes = 0;
  for (const Batch& batch : FindBatches(run->append)) {
    BatchRun bound;
    STOF_RETURN_IF_ERROR(BindBatch(mask, *run, step, batch, threads, &bound));
    bytes = std::max(bytes, CpuAttentionWorkspace(bound.args, bound.config, threads));
    host->batches.push_back(std::move(bound));
  }
  return context.Allocate(bytes, &host->workspace);
}

// The lengths of a step whose sequences share N tokens as evenly as possible, and fill their rows of the block table.
struct LongestStep {
  explicit LongestStep(const PagedAppendArgs& p) {
    const int64_t rows = p.rows_of_table();
    cumulative.push_back(0);
    for (int64_t b = 0; b < p.B; ++b) {
      const int64_t tokens = p.tokens.S / p.B + (b < p.tokens.S % p.B ? 1 : 0);
      cumulative.push_back(static_cast<int32_t>(cumulative.back() + tokens));
      past.push_back(static_cast<int32_t>(std::max<int64_t>(0, rows - tokens)));
      step.key_ends.push_back(static_cast<int32_t>(past.back() + tokens));
    }
    step.columns = p.pages.columns;
  }
  std::vector<int32_t> cumulative, past;
  PagedStep step;
};

}  // namespace

Status PlanPagedOnCpu(const CachedMask& mask, const RunContext& context, PagedRun* run) {
  PagedAppendArgs& p = run->append;
  HostRun host;
  PagedStep step;
  const bool has_slots = p.slot_mapping != UnreadData();
  if (p.cumulative != nullptr && p.past != nullptr && p.pages.table != nullptr && has_slots) {
    STOF_RETURN_IF_ERROR(CheckPagedStep(p, &step));
    return PrepareOnCpu(mask, context, step, run, &host);
  }
  const LongestStep longest(p);
  p.cumulative = longest.cumulative.data();
  p.past = longest.past.data();
  p.pages.table = static_cast<const int32_t*>(UnreadData());
  return PrepareOnCpu(mask, context, longest.step, run, &host);
}

Status RunPagedOnCpu(const CachedMask& mask, const RunContext& context, PagedRun* run) {
  PagedAppendArgs& p = run->append;
  const CacheAppendArgs& a = p.tokens;
  PagedStep step;
  STOF_RETURN_IF_ERROR(CheckPagedStep(p, &step));
  HostRun host;  // all memory before the first change of the cache
  STOF_RETURN_IF_ERROR(PrepareOnCpu(mask, context, step, run, &host));
  const auto cache_bytes = static_cast<size_t>(a.capacity * a.G * a.D * SizeOf(a.dtype));
  if (a.present_key != p.from_key && cache_bytes > 0) {
    std::memcpy(a.present_key, p.from_key, cache_bytes);
    std::memcpy(a.present_value, p.from_value, cache_bytes);
  }
  STOF_RETURN_IF_ERROR(CpuAppendToPages(p, step, context.parallel));
  const int64_t row = a.H * a.D * SizeOf(a.dtype), tokens = p.cumulative[p.B];
  if (a.S > tokens) {  // padding
    std::memset(static_cast<char*>(run->output) + tokens * row, 0, static_cast<size_t>((a.S - tokens) * row));
  }
  for (const BatchRun& bound : host.batches) {
    STOF_RETURN_IF_ERROR(CpuAttention(bound.args, bound.config, host.workspace, context.parallel));
    STOF_RETURN_IF_ERROR(bound.mask->status());
  }
  return Status();
}

namespace {

// Sets the bounds on tokens and keys of a sequence: those of attention_metadata, else the lengths themselves, else what
// the shapes allow.
Status FindBounds(const CudaBackend& backend, const RunContext& context, PagedRun* run) {
  PagedAppendArgs& p = run->append;
  const int64_t N = p.tokens.S, rows = p.rows_of_table();
  int64_t queries = run->most_queries, keys = run->most_keys;
  const bool is_unknown = queries == 0 || keys == 0;
  if (is_unknown && p.B > 0 && !backend.is_capturing(context.stream)) {
    std::vector<int32_t> cumulative(static_cast<size_t>(p.B + 1)), past(static_cast<size_t>(p.B));
    const auto& paged = backend.paged_attention;
    STOF_RETURN_IF_ERROR(paged.read_counts(p.cumulative, p.B + 1, cumulative.data(), context));
    STOF_RETURN_IF_ERROR(paged.read_counts(p.past, p.B, past.data(), context));
    queries = keys = 0;
    for (size_t b = 0; b < past.size(); ++b) {
      const int64_t tokens = int64_t{cumulative[b + 1]} - cumulative[b], end = past[b] + tokens;
      if (tokens < 0 || tokens > N || past[b] < 0 || end > rows) continue;  // illegal: the device finds it
      queries = std::max(queries, tokens);
      if (tokens > 0) keys = std::max(keys, end);
    }
  } else {
    queries = queries == 0 ? N : queries;
    keys = keys == 0 ? rows : keys;
  }
  p.most_queries = std::min(queries, N);
  p.most_keys = std::min(keys, rows);
  return Status();
}

// The queries and the output of a run on a device: rows of `most_queries` for each sequence.
struct PaddedRows {
  void* query = nullptr;   // [B, H, S, D]
  void* output = nullptr;  // [B, S, H, D]
};

// Binds the rows of the sequences from `first` on.
void BindPadded(const PaddedRows& padded, int64_t first, AttentionArgs* args) {
  const auto& [B, H, G, S, T, D, Dv, dtype, kv_dtype] = args->shape;
  const int64_t begin = first * S * H * D;
  args->query = {Advance(padded.query, begin, dtype), {H * S * D, S * D, D}};
  args->output.data = const_cast<char*>(Advance(padded.output, begin, dtype));
  args->output.stride = {S * H * D, D, H * D};
}

// Attention by gathered keys and values, for as many sequences at a time as the workspace holds.
Status RunGathered(const CudaBackend& backend, const CachedMask& mask, const RunContext& context, const PagedRun& run,
                   const PaddedRows& padded) {
  const PagedAppendArgs& p = run.append;
  const CacheAppendArgs& a = p.tokens;
  const int64_t T = p.most_keys, item = SizeOf(a.dtype), row = a.G * T * a.D;
  const int64_t count = std::clamp<int64_t>(kGatheredBytes / std::max<int64_t>(1, 2 * row * item), 1, p.B);
  void* gathered[2];
  for (void*& memory : gathered) STOF_RETURN_IF_ERROR(AllocateFor(context, {count, row, item}, &memory));
  for (int64_t b = 0; b < p.B; b += count) {
    PagedGatherArgs g;
    g.B = std::min(count, p.B - b), g.G = a.G, g.T = T, g.D = a.D, g.dtype = a.dtype;
    g.pages = p.pages;
    g.pages.table += b * p.pages.columns;
    g.cache[0] = a.present_key, g.cache[1] = a.present_value;
    g.to[0] = gathered[0], g.to[1] = gathered[1];
    g.first_rows = p.first_rows + b, g.key_ends = p.key_ends + b;
    g.window_left = p.window_left;
    STOF_RETURN_IF_ERROR(backend.paged_attention.gather(g, context));
    AttentionArgs args = ArgsOf(run, g.B, p.most_queries, T, g.first_rows);
    args.scores.block_threshold = 0.0f;  // padding of queries holds anything, and would be part of pooled queries
    const Strides dense = {row, T * a.D, a.D};
    args.key = {gathered[0], dense};
    args.value = {gathered[1], dense};
    BindPadded(padded, b, &args);
    STOF_RETURN_IF_ERROR(RunOnDevice(backend, args, *mask.on_device, p.first_rows + b, context));
  }
  return Status();
}

}  // namespace

Status RunPagedOnCuda(const CachedMask& mask, const CudaBackend& backend, const RunContext& context, PagedRun* run) {
  PagedAppendArgs& p = run->append;
  CacheAppendArgs& a = p.tokens;
  STOF_RETURN_IF_ERROR(FindBounds(backend, context, run));
  for (int32_t** counts : {&p.first_rows, &p.key_ends, &p.is_invalid}) {
    STOF_RETURN_IF_ERROR(AllocateFor(context, {std::max<int64_t>(p.B, 1), 4}, counts));
  }
  PaddedRows padded;
  for (void** rows : {&padded.query, &padded.output}) {
    STOF_RETURN_IF_ERROR(AllocateFor(context, {p.B, p.most_queries, a.H, a.D, SizeOf(a.dtype)}, rows));
  }
  a.rotated_query = padded.query;
  AttentionArgs args = PagedArgsOf(*run, p.B, p.most_queries, p.most_keys, p.first_rows);
  BindPadded(padded, 0, &args);
  STOF_RETURN_IF_ERROR(CheckCudaAttention(args));  // before the cache changes
  STOF_RETURN_IF_ERROR(backend.paged_attention.append(p, context));
  const bool has_pairs = p.B > 0 && p.most_queries > 0 && p.most_keys > 0;
  if (has_pairs && !CanReadPages(args)) {
    STOF_RETURN_IF_ERROR(RunGathered(backend, mask, context, *run, padded));
  } else if (has_pairs) {
    args.kv.pages = p.pages;
    args.kv.key_ends = p.key_ends;
    if (mask.is_range) args.mask.fixed = StaticMask::OfWindow({p.first_rows, mask.window_left});
    STOF_RETURN_IF_ERROR(RunOnDevice(backend, args, *mask.on_device, p.first_rows, context));
  }
  return backend.paged_attention.unpad(p, padded.output, run->output, context);
}

}  // namespace stof
