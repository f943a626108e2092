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

// The arguments of attention of one batch. Its mask is not bound.
AttentionArgs ArgsOf(const PagedRun& run, const PagedStep& step, const Batch& batch) {
  const PagedAppendArgs& p = run.append;
  const CacheAppendArgs& a = p.tokens;
  AttentionArgs t = run.attention;
  const int64_t S = batch.tokens, first_token = p.cumulative[batch.first];
  t.B = batch.count, t.S = S;
  const int64_t stride = run.has_query_copy ? a.H * a.D : a.query_stride.s;
  t.query = Advance(run.has_query_copy ? a.rotated_query : a.query, first_token * stride, a.dtype);
  t.query_stride = {S * stride, a.D, stride};
  t.output = const_cast<char*>(Advance(t.output, first_token * a.H * a.D, a.dtype));
  t.output_stride = {S * a.H * a.D, a.D, a.H * a.D};
  t.key = a.present_key, t.value = a.present_value;
  t.key_stride = t.value_stride = {0, a.D, a.G * a.D};
  t.pages = p.pages;
  t.pages.table = step.table.data() + batch.first * step.columns;
  t.pages.columns = step.columns;
  t.first_rows = p.past + batch.first;
  t.key_ends = step.key_ends.data() + batch.first;
  t.T = *std::max_element(t.key_ends, t.key_ends + t.B);
  return t;
}

}  // namespace

Status RunPagedOnCpu(const CachedMask& mask, const RunContext& context, PagedRun* run) {
  PagedAppendArgs& p = run->append;
  CacheAppendArgs& a = p.tokens;
  PagedStep step;
  STOF_RETURN_IF_ERROR(CheckPagedStep(p, &step));
  // All memory before the first change of the cache.
  if (run->has_query_copy) {
    STOF_RETURN_IF_ERROR(AllocateFor(context, {a.S, a.H, a.D, SizeOf(a.dtype)}, &a.rotated_query));
  }
  struct Part {
    AttentionArgs args;
    std::unique_ptr<BoundCachedMask> mask;
    CpuAttentionConfig config;
  };
  std::vector<Part> parts;
  const int threads = std::max(1, context.parallel.threads);
  size_t bytes = 0;
  for (const Batch& batch : FindBatches(p)) {
    Part part;
    part.args = ArgsOf(*run, step, batch);
    const AttentionArgs& t = part.args;
    const ExprSizes sizes = {t.B, t.H, t.S, t.T, 0};
    STOF_RETURN_IF_ERROR(BoundCachedMask::Make(mask.expr, sizes, t.first_rows, t.key_ends, &part.mask));
    part.args.elements = part.mask->view();
    part.config = ChooseCpuAttention(part.args, threads);
    bytes = std::max(bytes, CpuAttentionWorkspace(part.args, part.config, threads));
    parts.push_back(std::move(part));
  }
  void* workspace = nullptr;
  STOF_RETURN_IF_ERROR(context.Allocate(bytes, &workspace));
  const auto cache_bytes = static_cast<size_t>(a.capacity * a.G * a.D * SizeOf(a.dtype));
  if (a.present_key != p.from_key && cache_bytes > 0) {
    std::memcpy(a.present_key, p.from_key, cache_bytes);
    std::memcpy(a.present_value, p.from_value, cache_bytes);
  }
  STOF_RETURN_IF_ERROR(CpuAppendToPages(p, step, context.parallel));
  const int64_t row = a.H * a.D * SizeOf(a.dtype), tokens = p.cumulative[p.B];
  if (a.S > tokens) {  // padding
    std::memset(static_cast<char*>(run->attention.output) + tokens * row, 0, static_cast<size_t>((a.S - tokens) * row));
  }
  for (const Part& part : parts) {
    STOF_RETURN_IF_ERROR(CpuAttention(part.args, part.config, workspace, context.parallel));
    STOF_RETURN_IF_ERROR(part.mask->status());
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

// Attention by gathered keys and values, for as many sequences at a time as the workspace holds.
Status RunGathered(const CudaBackend& backend, const CachedMask& mask, const Tables& given, const RunContext& context,
                   const PagedAppendArgs& p, const AttentionArgs& whole) {
  const CacheAppendArgs& a = p.tokens;
  const int64_t item = SizeOf(a.dtype), row = a.G * whole.T * a.D;
  const int64_t count = std::clamp<int64_t>(kGatheredBytes / std::max<int64_t>(1, 2 * row * item), 1, p.B);
  void* gathered[2];
  for (void*& memory : gathered) STOF_RETURN_IF_ERROR(AllocateFor(context, {count, row, item}, &memory));
  for (int64_t b = 0; b < p.B; b += count) {
    PagedGatherArgs g;
    g.B = std::min(count, p.B - b), g.G = a.G, g.T = whole.T, g.D = a.D, g.dtype = a.dtype;
    g.pages = p.pages;
    g.pages.table += b * p.pages.columns;
    g.cache[0] = a.present_key, g.cache[1] = a.present_value;
    g.to[0] = gathered[0], g.to[1] = gathered[1];
    g.first_rows = p.first_rows + b, g.key_ends = p.key_ends + b;
    g.window_left = p.window_left;
    STOF_RETURN_IF_ERROR(backend.paged_attention.gather(g, context));
    AttentionArgs t = whole;
    t.B = g.B;
    t.query = Advance(whole.query, b * whole.query_stride.b, a.dtype);
    t.output = const_cast<char*>(Advance(whole.output, b * whole.output_stride.b, a.dtype));
    t.key = gathered[0], t.value = gathered[1];
    t.key_stride = t.value_stride = {row, whole.T * a.D, a.D};
    Tables operands = given;
    operands.emplace_back(kFirstPositions, TensorOfShape(DType::kI32, {t.B}));
    operands.back().second.data = p.first_rows + b;
    const ExprSizes sizes = {t.B, t.H, t.S, t.T, 0};
    STOF_RETURN_IF_ERROR(backend.attention.run(t, nullptr, *mask.on_device, sizes, operands, context));
  }
  return Status();
}

}  // namespace

Status RunPagedOnCuda(const CachedMask& mask, const Tables& given, const RunContext& context, PagedRun* run) {
  const CudaBackend* backend = FindCudaBackend();
  if (backend == nullptr) return Status::Error(kNoCudaKernels);
  PagedAppendArgs& p = run->append;
  CacheAppendArgs& a = p.tokens;
  STOF_RETURN_IF_ERROR(FindBounds(*backend, context, run));
  for (int32_t** counts : {&p.first_rows, &p.key_ends, &p.is_invalid}) {
    STOF_RETURN_IF_ERROR(AllocateFor(context, {std::max<int64_t>(p.B, 1), 4}, counts));
  }
  AttentionArgs t = run->attention;
  t.B = p.B, t.S = p.most_queries, t.T = p.most_keys;
  void* padded = nullptr;
  const std::vector<int64_t> sizes_of_rows = {t.B, t.S, t.H, t.D, SizeOf(a.dtype)};
  STOF_RETURN_IF_ERROR(AllocateFor(context, sizes_of_rows, &a.rotated_query));
  STOF_RETURN_IF_ERROR(AllocateFor(context, sizes_of_rows, &padded));
  t.query = a.rotated_query;
  t.query_stride = {t.H * t.S * t.D, t.S * t.D, t.D};
  t.output = padded;
  t.output_stride = {t.S * t.H * t.D, t.D, t.H * t.D};
  t.key = a.present_key, t.value = a.present_value;
  t.key_stride = t.value_stride = {0, t.D, t.G * t.D};
  STOF_RETURN_IF_ERROR(CheckCudaAttention(t));  // before the cache changes
  STOF_RETURN_IF_ERROR(backend->paged_attention.append(p, context));
  if (t.B > 0 && t.S > 0 && t.T > 0) {
    if (!CanReadPages(t)) {
      STOF_RETURN_IF_ERROR(RunGathered(*backend, mask, given, context, p, t));
    } else {
      t.pages = p.pages;
      t.key_ends = p.key_ends;
      t.is_key_range = mask.is_range;
      t.window_left = mask.window_left;
      if (mask.is_range) t.first_rows = p.first_rows;
      Tables operands = given;
      operands.emplace_back(kFirstPositions, TensorOfShape(DType::kI32, {t.B}));
      operands.back().second.data = p.first_rows;
      const ExprSizes sizes = {t.B, t.H, t.S, t.T, 0};
      STOF_RETURN_IF_ERROR(backend->attention.run(t, nullptr, *mask.on_device, sizes, operands, context));
    }
  }
  return backend->paged_attention.unpad(p, padded, run->attention.output, context);
}

}  // namespace stof
