// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/cached_attention/cached_attention.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/contract/cached_attention.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/contract/workspace_counter.h"
#include "plugins/core/host/fork_guard.h"
#include "plugins/core/mask/cached_mask.h"
#include "plugins/core/ops/attention.h"
#include "plugins/core/ops/attribute_checks.h"
#include "plugins/core/ops/cached_attention/columns.h"
#include "plugins/core/ops/cached_attention/new_tokens.h"
#include "plugins/core/ops/cached_attention/page_bounds.h"
#include "plugins/core/ops/kv_attention.h"
#include "plugins/core/ops/named_inputs.h"

namespace stof {
namespace {

namespace in = cached_input;
using Limits = AttentionLimits;

constexpr KvResults kResults = {{"output", "present_key", "present_value"}, kCachedNames, in::kPastKey};
constexpr int kOutputs = KvResults::kCount;
constexpr int kPresentBounds = kOutputs;  // the result behind these, which nodes that choose pages have

using Inputs = NamedInputs;
constexpr TokenInputs kTokenInputs = {in::kQuery, in::kKey,       in::kValue,  in::kCos,
                                      in::kSin,   in::kQueryNorm, in::kKeyNorm};

// What one run is given: the arguments of the append step, and those parts of attention over the cache that do not
// depend on it.
struct Step {
  CacheAppendArgs append;
  ScoreArgs scores;
  void* output = nullptr;
  int64_t total = 0;
};

// The host does not know the lengths: a step of several tokens is staged whether it drops rows or not.
int64_t CudaStagingRows(const CacheAppendArgs& args) {
  return args.sliding_window > 0 && args.S > 1 ? args.past_capacity + args.S : 0;
}

class CachedAttentionOp final : public Op {
 public:
  explicit CachedAttentionOp(CachedAttentionAttributes attributes) : attributes_(std::move(attributes)) {}

  Status Prepare(const Tensor* inputs, int input_count) override;
  Status InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const override;
  Status Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
             const RunContext& context) const override;
  Status PlanHost(const Tensor* inputs, int input_count, int threads, size_t* workspace) const override;
  int InputCount() const override { return in::kTotal + 1; }
  int OutputCount() const override { return attributes_.chosen_pages > 0 ? kPresentBounds + 1 : kOutputs; }

 private:
  // Checks every input, and fills sizes, strides and addresses.
  Status Bind(const Inputs& inputs, Step* step) const;
  // The same, and the types and shapes of the outputs.
  Status BindOutputs(const Inputs& inputs, int output_count, Step* step, Tensor* outputs) const;
  Status BindCache(const Inputs& inputs, Step* step) const;
  Status MakeMask(const Inputs& inputs, std::shared_ptr<const CachedMask>* mask) const;
  // The attention over `keys` keys that the append step leaves. Its memory is allocated.
  AttentionArgs AttentionOf(const Step& step, int64_t keys) const;
  // The parts of a run on the CPU that depend on neither caches nor outputs' contents, and its memory.
  struct HostRun {
    HostMask mask;
    AttentionArgs args;
    HostChoice choice;
    CpuAttentionConfig config;
    void* workspace = nullptr;
  };
  // first_row of the append step is filled. B and S are at least 1. *run must stay where it is. is_plan: its memory is
  // counted alone.
  Status PrepareOnCpu(const CachedMask& mask, const RunContext& context, const Step& step, bool is_plan,
                      HostRun* run) const;
  Status RunOnCpu(const CachedMask& mask, const RunContext& context, Step* step) const;
  Status RunOnCuda(const CachedMask& mask, const RunContext& context, Step* step) const;

  CachedAttentionAttributes attributes_;
  std::shared_ptr<const CachedMask> mask_;  // nullptr: its tables are not constant
  mutable Keeper keeper_;
};

Status CachedAttentionOp::Prepare(const Tensor* inputs, int input_count) {
  const Inputs all(inputs, input_count, in::kNames);
  STOF_RETURN_IF_ERROR(all.CheckCount(in::kTotal + 1, in::kCount));
  return BindMask(all, in::kTables, [&](auto* mask) { return MakeMask(all, mask); }, &mask_);
}

Status CachedAttentionOp::MakeMask(const Inputs& inputs, std::shared_ptr<const CachedMask>* mask) const {
  const Tables tables = MaskTables(inputs, in::kTables);
  auto made = std::make_shared<CachedMask>();
  STOF_RETURN_IF_ERROR(MakeCachedMask(attributes_.mask, tables, attributes_.sliding_window, made.get()));
  if (attributes_.sliding_window > 0 && !IsOfDistances(made->expr)) {
    return Status::Error("attribute mask is not one of distances (q - k) alone, which a sliding-window cache demands");
  }
  STOF_RETURN_IF_ERROR(CompareHeads(attributes_.num_heads, attributes_.kv_num_heads, made.get()));
  *mask = std::move(made);
  return Status();
}

Status CachedAttentionOp::BindCache(const Inputs& inputs, Step* step) const {
  CacheAppendArgs& a = step->append;
  STOF_RETURN_IF_ERROR(inputs.Check(in::kSeqlens, DType::kI32, {a.B}));
  a.seqlens = static_cast<const int32_t*>(inputs[in::kSeqlens].data);
  if (!inputs.Has(in::kTotal)) return Status::Error("total_sequence_length is missing");
  const Tensor& total = inputs[in::kTotal];
  if (total.dtype != DType::kI32 || total.rank > 1 || total.Elements() != 1) {
    return inputs.ReportWrong(in::kTotal, "one int32");
  }
  if (total.data == nullptr) return Status::Error("total_sequence_length has no data in host memory");
  step->total = *static_cast<const int32_t*>(total.data);
  if (step->total < a.S || step->total > Limits::kMostLength) {
    return Status::Error("total_sequence_length is " + std::to_string(step->total) + ", expected " +
                         std::to_string(a.S) + " (the length of query) to 2^22");
  }
  a.is_first_prompt = step->total == a.S;
  STOF_RETURN_IF_ERROR(inputs.CheckPair(in::kPastKey, in::kPastValue));
  a.sliding_window = attributes_.sliding_window;
  if (inputs.Has(in::kPastKey)) {
    const Tensor& past = inputs[in::kPastKey];
    a.cache_dtype = past.dtype;
    if ((past.dtype != a.dtype && !IsQuantized(past.dtype)) || past.rank != 4 || past.dims[0] != a.B ||
        past.dims[1] != a.G || past.dims[3] != a.D || past.dims[2] > Limits::kMostLength) {
      return inputs.ReportWrong(in::kPastKey, "[" + std::to_string(a.B) + ", " + std::to_string(a.G) + ", capacity, " +
                                                  std::to_string(a.D) + "] and data type " + TypeText(a.dtype) +
                                                  ", int8 or fp8 e4m3fn");
    }
    a.past_capacity = past.dims[2];
    STOF_RETURN_IF_ERROR(inputs.Check(in::kPastValue, a.cache_dtype, {a.B, a.G, a.past_capacity, a.D}));
    if (a.past_capacity > 0) {
      a.past_key = past.data;
      a.past_value = inputs[in::kPastValue].data;
    }
    if (a.sliding_window > a.past_capacity) {
      return inputs.ReportWrong(in::kPastKey, "a capacity of at least the window of attribute sliding_window_cache, " +
                                                  std::to_string(a.sliding_window));
    }
  } else if (a.sliding_window > 0) {
    return Status::Error("past_key is missing, expected it beside attribute sliding_window_cache");
  }
  a.capacity = a.sliding_window > 0 ? a.past_capacity : std::max(a.past_capacity, step->total);
  const auto given = [&inputs](int i) { return inputs.Has(i) ? &inputs[i] : nullptr; };
  STOF_RETURN_IF_ERROR(BindScales(given(in::kKeyScale), given(in::kValueScale), &a));
  return BindPageBounds(inputs, attributes_, &a);
}

Status CachedAttentionOp::Bind(const Inputs& inputs, Step* step) const {
  STOF_RETURN_IF_ERROR(inputs.CheckCount(in::kTotal + 1, in::kCount));
  STOF_RETURN_IF_ERROR(inputs.CheckAbsent({in::kQuerySeqlens}));
  CacheAppendArgs& a = step->append;
  STOF_RETURN_IF_ERROR(BindTokens(inputs, kTokenInputs, attributes_, true, &a));
  STOF_RETURN_IF_ERROR(BindCache(inputs, step));
  STOF_RETURN_IF_ERROR(BindTransforms(inputs, kTokenInputs, attributes_, 0, &a));
  if (attributes_.do_rotary && inputs.Has(in::kPositions)) {
    STOF_RETURN_IF_ERROR(inputs.Check(in::kPositions, DType::kI64, {a.B, a.S}));
    a.transform.position_ids = static_cast<const int64_t*>(inputs[in::kPositions].data);
  }
  if (a.sliding_window > 0 && inputs.Has(in::kBias)) {
    return Status::Error("attention_bias is given, expected none beside attribute sliding_window_cache");
  }
  return Status();
}

Status CachedAttentionOp::BindOutputs(const Inputs& inputs, int output_count, Step* step, Tensor* outputs) const {
  // A node that shares its function with others that choose may have their output, without a name.
  if (output_count < OutputCount() || output_count > kPresentBounds + 1) {
    return Status::Error("has " + std::to_string(output_count) + " outputs, expected output, present_key" +
                         (attributes_.chosen_pages > 0
                              ? ", present_value and present_page_bounds, as attribute chosen_pages is given"
                              : " and present_value"));
  }
  STOF_RETURN_IF_ERROR(Bind(inputs, step));
  const CacheAppendArgs& a = step->append;
  outputs[0] = TensorOfShape(a.dtype, {a.B, a.S, a.H * a.D});
  outputs[1] = outputs[2] = TensorOfShape(CacheType(a), {a.B, a.G, a.capacity, a.D});
  if (a.page_bounds.given()) outputs[kPresentBounds] = PresentBoundsOf(a);
  return Status();
}

Status CachedAttentionOp::InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const {
  Step step;
  return BindOutputs(Inputs(inputs, input_count, in::kNames), output_count, &step, outputs);
}

AttentionArgs CachedAttentionOp::AttentionOf(const Step& step, int64_t keys) const {
  const CacheAppendArgs& a = step.append;
  AttentionArgs args;
  args.shape = {a.B, a.H, a.G, a.S, keys, a.D, a.D, a.dtype};
  if (IsQuantized(CacheType(a))) {
    args.shape.kv_dtype = a.cache_dtype;
    args.kv.key_scale = a.key_scale, args.kv.value_scale = a.value_scale;
  } else {  // quantized caches become 16-bit numbers where many queries read them, in full precision
    args.precision = attributes_.precision;
  }
  args.query = {a.query, a.query_stride};
  if (a.transform.given()) args.query = {a.rotated_query, {a.H * a.S * a.D, a.S * a.D, a.D}};
  const bool is_staged = a.staging_capacity > 0;
  const int64_t rows = is_staged ? a.staging_capacity : a.capacity;
  const Strides dense = {a.G * rows * a.D, rows * a.D, a.D};
  args.key = {is_staged ? a.staging_key : a.present_key, dense};
  args.value = {is_staged ? a.staging_value : a.present_value, dense};
  args.scores = step.scores;
  args.scores.diagonal.first_rows = a.first_row;
  args.output.data = step.output;
  args.output.stride = {a.S * a.H * a.D, a.D, a.H * a.D};
  args.allow_bf16 = attributes_.allow_bf16;
  args.kernel = attributes_.kernel.c_str();
  return args;
}

// Allocates the memory of the append step.
Status Allocate(const RunContext& context, CacheAppendArgs* append) {
  CacheAppendArgs& a = *append;
  const auto allocate = [&context](int64_t bytes, auto** pointer) {
    void* memory = nullptr;
    STOF_RETURN_IF_ERROR(context.Allocate(static_cast<size_t>(bytes), &memory));
    *pointer = static_cast<std::remove_pointer_t<decltype(pointer)>>(memory);
    return Status();
  };
  STOF_RETURN_IF_ERROR(allocate(a.B * 4, &a.first_row));
  if (context.on_cuda) STOF_RETURN_IF_ERROR(allocate(a.B * 4, &a.is_invalid));
  if (a.transform.given()) STOF_RETURN_IF_ERROR(allocate(a.B * a.H * a.S * a.D * SizeOf(a.dtype), &a.rotated_query));
  // A step of several tokens may drop rows that its first tokens attend.
  a.staging_capacity = context.on_cuda ? CudaStagingRows(a) : CpuCacheStagingRows(a);
  if (a.staging_capacity == 0) return Status();
  int64_t bytes = 0;
  if (__builtin_mul_overflow(a.B * a.G * a.D * SizeOf(CacheType(a)), a.staging_capacity, &bytes)) {
    return Status::Error("the staging buffer of a sliding-window cache is too large");
  }
  STOF_RETURN_IF_ERROR(allocate(bytes, &a.staging_key));
  return allocate(bytes, &a.staging_value);
}

Status CachedAttentionOp::Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
                              const RunContext& context) const {
  const Inputs all(inputs, input_count, in::kNames);
  Step step;
  Tensor expected[kPresentBounds + 1];
  STOF_RETURN_IF_ERROR(BindOutputs(all, output_count, &step, expected));
  STOF_RETURN_IF_ERROR(CheckResults(kResults, outputs, expected));
  std::shared_ptr<const CachedMask> mask = mask_;
  if (mask == nullptr) STOF_RETURN_IF_ERROR(MakeMask(all, &mask));
  if (expected[0].Elements() == 0 && expected[1].Elements() == 0) return Status();
  STOF_RETURN_IF_ERROR(CheckBuffers(kResults, all, outputs));
  CacheAppendArgs& a = step.append;
  if (a.page_bounds.given()) {
    STOF_RETURN_IF_ERROR(BindPresentBounds(all, outputs[kPresentBounds], &a));
    const Target target = context.on_cuda ? Target::kCuda : Target::kCpu;
    if (!Limits::ChoosesPages(target)) {
      return UnexpectedAttribute("chosen_pages", attributes_.chosen_pages,
                                 std::string("0: no pages are chosen on ") + kTargetNames[static_cast<int>(target)]);
    }
  }
  if (a.past_key != nullptr && a.past_key == outputs[1].data && a.capacity > a.past_capacity) {
    return Status::Error("total_sequence_length is " + std::to_string(step.total) +
                         ", expected at most the capacity of past_key, " + std::to_string(a.past_capacity) +
                         ", which is the buffer of present_key, too");
  }
  step.output = outputs[0].data;
  a.present_key = outputs[1].data;
  a.present_value = outputs[2].data;
  const AttentionShape shape = {a.B, a.H, a.G, a.S, step.total, a.D, a.D, a.dtype};
  step.scores = ScoresOf(attributes_, a.D);
  STOF_RETURN_IF_ERROR(BindBias(all, in::kBias, shape, &step.scores));
  STOF_RETURN_IF_ERROR(BindSink(all, in::kSink, shape, &step.scores));
  STOF_RETURN_IF_ERROR(Allocate(context, &a));
  const CachedMask& used = a.S == 1 && mask->of_one_token != nullptr ? *mask->of_one_token : *mask;
  return context.on_cuda ? RunOnCuda(used, context, &step) : RunOnCpu(used, context, &step);
}

// Checks the lengths of the sequences, which the CPU reads.
Status CheckLengths(const CacheAppendArgs& a, int64_t total) {
  for (int64_t b = 0; b < a.B; ++b) {
    const int64_t keys = int64_t{a.seqlens[b]} + 1;
    const int64_t least = a.is_first_prompt ? 1 : a.S;
    if (keys < least || keys > total) {
      return Status::Error("seqlens_k[" + std::to_string(b) + "] is " + std::to_string(a.seqlens[b]) + ", expected " +
                           std::to_string(least - 1) + " to " + std::to_string(total - 1) +
                           ", as total_sequence_length is " + std::to_string(total));
    }
    const int64_t past = a.is_first_prompt ? 0 : keys - a.S;
    if (a.sliding_window == 0 && past > a.past_capacity) {
      return Status::Error("seqlens_k[" + std::to_string(b) + "] is " + std::to_string(a.seqlens[b]) + ": " +
                           std::to_string(past) + " keys of the past, expected at most the capacity of past_key, " +
                           std::to_string(a.past_capacity));
    }
  }
  return Status();
}

Status CachedAttentionOp::RunOnCpu(const CachedMask& mask, const RunContext& context, Step* step) const {
  CacheAppendArgs& a = step->append;
  STOF_RETURN_IF_ERROR(CheckLengths(a, step->total));
  STOF_RETURN_IF_ERROR(CpuAppendToCache(a, context.parallel));
  if (a.B == 0 || a.S == 0) return Status();
  HostRun run;
  STOF_RETURN_IF_ERROR(PrepareOnCpu(mask, context, *step, false, &run));
  STOF_RETURN_IF_ERROR(CpuAttention(run.args, run.config, run.workspace, context.parallel));
  return run.mask.mask->status();
}

Status CachedAttentionOp::PrepareOnCpu(const CachedMask& mask, const RunContext& context, const Step& step,
                                       bool is_plan, HostRun* run) const {
  const CacheAppendArgs& a = step.append;
  std::vector<int32_t> ends(static_cast<size_t>(a.B));
  for (int64_t b = 0; b < a.B; ++b) {
    // Padding of a first prompt has no keys.
    const int64_t tokens = a.is_first_prompt ? int64_t{a.seqlens[b]} + 1 : a.S;
    ends[static_cast<size_t>(b)] = static_cast<int32_t>(a.first_row[b] + tokens);
  }
  HostMask& bound = run->mask;
  const PageChoice choice = ChoiceOf(a, attributes_.chosen_pages);
  const bool may_leave_out = MayLeaveOut(a, choice, ends.data());
  const bool can_gather = step.scores.bias.data == nullptr && !may_leave_out;
  STOF_RETURN_IF_ERROR(BindMaskOnCpu(mask, a, can_gather, std::move(ends), &bound));
  run->args = AttentionOf(step, bound.keys);
  run->args.mask.fixed = StaticMask::OfElements(bound.mask->view());
  run->args.kv.key_ends = bound.ends.data();
  run->args.kv.columns = bound.columns;
  if (may_leave_out) STOF_RETURN_IF_ERROR(ChooseOnCpu(a, choice, is_plan, context, &run->args, &run->choice));
  const int threads = std::max(1, context.parallel.threads);
  run->config = ChooseCpuAttention(run->args, threads);
  return context.Allocate(CpuAttentionWorkspace(run->args, run->config, threads), &run->workspace);
}

Status CachedAttentionOp::PlanHost(const Tensor* inputs, int input_count, int threads, size_t* workspace) const {
  *workspace = 0;
  std::vector<Tensor> given(inputs, inputs + std::max(0, input_count));
  const Inputs all(given.data(), input_count, in::kNames);
  STOF_RETURN_IF_ERROR(all.CheckCount(in::kTotal + 1, in::kCount));
  std::shared_ptr<const CachedMask> mask = mask_;
  if (mask == nullptr) {
    STOF_RETURN_IF_ERROR(CheckTableData(all, in::kTables));
    STOF_RETURN_IF_ERROR(MakeMask(all, &mask));
  }
  // Lengths that no data says are the longest: those of a full cache.
  const Tensor &query = given[in::kQuery], &past = given[in::kPastKey];
  const int64_t S = query.rank > 1 ? query.dims[1] : 0, rows = past.rank == 4 ? past.dims[2] : 0;
  auto total = static_cast<int32_t>(std::min(S, Limits::kMostLength) + std::min(rows, Limits::kMostLength));
  total = std::min(total, static_cast<int32_t>(Limits::kMostLength));
  if (all.Has(in::kTotal) && given[in::kTotal].data == nullptr) given[in::kTotal].data = &total;
  for (Tensor& tensor : given) {
    if (&tensor != &given[in::kSeqlens] && tensor.data == nullptr) tensor.data = UnreadData();
  }
  Step step;
  STOF_RETURN_IF_ERROR(Bind(all, &step));
  CacheAppendArgs& a = step.append;
  if (a.B == 0 || a.S == 0) return Status();
  std::vector<int32_t> seqlens(static_cast<size_t>(a.B), static_cast<int32_t>(step.total - 1));
  if (a.seqlens == nullptr) a.seqlens = seqlens.data();
  STOF_RETURN_IF_ERROR(CheckLengths(a, step.total));
  a.present_key = a.present_value = step.output = a.page_bounds.present = UnreadData();
  step.scores = ScoresOf(attributes_, a.D);
  const AttentionShape shape = {a.B, a.H, a.G, a.S, step.total, a.D, a.D, a.dtype};
  STOF_RETURN_IF_ERROR(BindBias(all, in::kBias, shape, &step.scores));
  STOF_RETURN_IF_ERROR(BindSink(all, in::kSink, shape, &step.scores));
  WorkspaceCounter counter;
  const RunContext context = counter.MakeContext(threads);
  STOF_RETURN_IF_ERROR(Allocate(context, &a));
  std::vector<int32_t> first_rows(static_cast<size_t>(a.B));
  a.first_row = first_rows.data();
  CpuFindFirstRows(a);
  HostRun run;
  STOF_RETURN_IF_ERROR(PrepareOnCpu(*mask, context, step, true, &run));
  *workspace = counter.bytes();
  return Status();
}

Status CachedAttentionOp::RunOnCuda(const CachedMask& mask, const RunContext& context, Step* step) const {
  CacheAppendArgs& a = step->append;
  const CudaBackend* backend = nullptr;
  RunContext own;
  STOF_RETURN_IF_ERROR(FindDevice(mask_ != nullptr, context, &keeper_, &backend, &own));
  const int64_t rows = a.staging_capacity > 0 ? a.staging_capacity : a.capacity;
  AttentionArgs args = AttentionOf(*step, a.sliding_window > 0 ? std::min(step->total, rows) : step->total);
  args.kv.is_invalid = a.is_invalid;
  args.kv.choice = ChoiceOf(a, attributes_.chosen_pages);
  std::shared_ptr<const ColumnSource::Gathered> columns;
  STOF_RETURN_IF_ERROR(BindWindow(mask, a, backend->attention, own, &args, &columns));
  // Where past and present are one buffer of all positions, the append step writes new rows alone.
  const bool is_in_place = a.past_key != nullptr && a.past_key == a.present_key;
  const bool has_window = args.mask.fixed.window() != nullptr;
  if (has_window && is_in_place && a.sliding_window == 0 && !a.is_first_prompt) args.kv.seqlens = a.seqlens;
  STOF_RETURN_IF_ERROR(CheckCudaAttention(args));  // before the cache changes
  // 8-bit kernels quantize whole caches, so they need each sequence's number of keys. Decode kernels, those of key
  // ranges among them, compute in full precision.
  if (args.precision != AttentionPrecision::kFull && !IsLimitedToKeyRange(args)) {
    void* memory = nullptr;
    STOF_RETURN_IF_ERROR(context.Allocate(static_cast<size_t>(a.B * 4), &memory));
    args.kv.key_ends = a.key_ends = static_cast<int32_t*>(memory);
  }
  a.most_keys = step->total;
  if (!IsLimitedToKeyRange(args)) a.clear_end = args.shape.T;
  if (ChoosesPages(args) && a.page_bounds.past_pages > 0 && a.page_bounds.past == a.page_bounds.present) {
    // One kernel less: attention computes the key bounds of pages with new rows while it scores the others.
    args.kv.choice.lacks_new_bounds = true;
    a.page_bounds = PageBounds();
  }
  STOF_RETURN_IF_ERROR(backend->cached_attention.append(a, context));
  if (a.B == 0 || a.S == 0) return Status();
  // The mask of a first prompt is constant: its block mask is made once, and kernels with a tile schedule take it.
  if (a.is_first_prompt) return RunOnDevice(*backend, args, *mask.of_first_prompt, nullptr, own);
  const bool is_packed = PackGroups(mask, &args);
  return RunOnDevice(*backend, args, is_packed ? *mask.of_groups : *mask.on_device, a.first_row, own);
}

Status CreateCachedAttention(const AttributeReader& attributes, std::unique_ptr<Op>* op) {
  CachedAttentionAttributes parsed;
  STOF_RETURN_IF_ERROR(ParseCachedAttention(attributes, &parsed));
  *op = std::make_unique<CachedAttentionOp>(std::move(parsed));
  return Status();
}

std::vector<OpLimit> ListLimits(Target target, DType dtype) {
  return ListAttentionLimits(target, dtype, {"most_tables", in::kMostTables});
}

}  // namespace

const OpDescription* CachedAttentionDescription() {
  static constexpr AttributeDescription kAttributes[] = {
      {"mask", AttributeType::kString},           {"mask_id", AttributeType::kInt},
      {"scale", AttributeType::kFloat},           {"softcap", AttributeType::kFloat},
      {"num_heads", AttributeType::kInt},         {"kv_num_heads", AttributeType::kInt},
      {"do_rotary", AttributeType::kInt},         {"rotary_interleaved", AttributeType::kInt},
      {"qk_norm_epsilon", AttributeType::kFloat}, {"sliding_window_cache", AttributeType::kInt},
      {"kernel", AttributeType::kString},         {"skip_threshold", AttributeType::kFloat},
      {"chosen_pages", AttributeType::kInt},      {"page_rows", AttributeType::kInt},
      {"block_threshold", AttributeType::kFloat}, {"allow_bf16", AttributeType::kInt},
      {"precision", AttributeType::kString}};
  static constexpr OpDescription description = [] {
    OpDescription d;
    d.name = "StofCachedAttention";
    d.typed_inputs = 1;
    d.optional_inputs = in::kCount - 1;
    d.outputs = kOutputs;
    d.optional_outputs = 1;
    d.types = Limits::kTypes;
    d.cuda_types = Limits::kTypes;
    d.storage_inputs = uint64_t{3} << in::kPastKey;
    d.storage_outputs = uint64_t{3} << 1;
    d.storage_types = kQuantizedTypes;
    d.host_inputs = uint64_t{1} << in::kTotal;
    d.has_tensorrt_plugin = false;
    d.attributes = kAttributes;
    d.limits = ListLimits;
    d.skips_scores = Limits::SkipsScores;
    d.chooses_blocks = Limits::ChoosesBlocks;
    d.chooses_pages = Limits::ChoosesPages;
    d.create = CreateCachedAttention;
    return d;
  }();
  return &description;
}

}  // namespace stof
