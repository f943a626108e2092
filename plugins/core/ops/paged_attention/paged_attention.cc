// SPDX-License-Identifier: Apache-2.0
// Checks the inputs of StofPagedAttention, and binds the arguments of a run.
#include "plugins/core/ops/paged_attention/paged_attention.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/contract/workspace_counter.h"
#include "plugins/core/ops/attention.h"
#include "plugins/core/ops/attribute_checks.h"
#include "plugins/core/ops/cached_attention/cached_attention.h"
#include "plugins/core/ops/cached_attention/new_tokens.h"
#include "plugins/core/ops/kv_attention.h"
#include "plugins/core/ops/named_inputs.h"

namespace stof {
namespace {

namespace in = paged_input;
using Limits = AttentionLimits;
using Inputs = NamedInputs;
constexpr TokenInputs kTokenInputs = {in::kQuery, in::kKey,       in::kValue,  in::kCos,
                                      in::kSin,   in::kQueryNorm, in::kKeyNorm};

constexpr int kLeastInputs = in::kBlockTable + 1;
constexpr KvResults kResults = {{"output", "key_cache_out", "value_cache_out"},
                                {{"key_cache", "value_cache"}, {"key_cache_out", "value_cache_out"}},
                                in::kKeyCache};
constexpr int kOutputs = KvResults::kCount;
constexpr int64_t kLeastBlock = 16, kMostBlock = int64_t{1} << 20;
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

struct PagedAttributes {
  CachedAttentionAttributes common;
  int64_t rotary_offset = 0;
};

Status ParsePagedAttention(const AttributeReader& attributes, PagedAttributes* parsed) {
  STOF_RETURN_IF_ERROR(ParseCachedAttention(attributes, &parsed->common));
  attributes.Int("rotary_offset", &parsed->rotary_offset);
  STOF_RETURN_IF_ERROR(attributes.CheckTypes());
  if (parsed->common.sliding_window != 0) {
    return Status::Error("attribute sliding_window_cache is given, expected none: the block table makes a ring");
  }
  if (parsed->common.chosen_pages != 0) {
    return UnexpectedAttribute("chosen_pages", parsed->common.chosen_pages, "0: only StofCachedAttention has it");
  }
  if (parsed->common.precision != AttentionPrecision::kFull) {
    std::string found;
    attributes.String("precision", &found);
    return UnexpectedAttribute("precision", Quote(found, kMostQuoted),
                               "nothing: no kernel over pages has 8-bit operands");
  }
  if (parsed->rotary_offset < 0 || parsed->rotary_offset % 8 != 0 || parsed->rotary_offset > Limits::kLargestHeadSize) {
    return UnexpectedAttribute("rotary_offset", parsed->rotary_offset, "a multiple of 8 below the head size");
  }
  return Status();
}

class PagedAttentionOp final : public Op {
 public:
  explicit PagedAttentionOp(PagedAttributes attributes) : attributes_(std::move(attributes)) {}

  Status Prepare(const Tensor* inputs, int input_count) override;
  Status InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const override;
  Status Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
             const RunContext& context) const override;
  Status PlanHost(const Tensor* inputs, int input_count, int threads, size_t* workspace) const override;
  int InputCount() const override { return kLeastInputs; }
  int OutputCount() const override { return kOutputs; }

 private:
  // Checks every input, and fills sizes, strides and addresses.
  Status Bind(const Inputs& inputs, PagedRun* run) const;
  Status BindCache(const Inputs& inputs, PagedRun* run) const;
  Status BindMetadata(const Inputs& inputs, PagedRun* run) const;
  // Binds the attention behind the append step, whose arguments are bound.
  Status BindAttention(const Inputs& inputs, const CachedMask& mask, PagedRun* run) const;
  Status MakeMask(const Inputs& inputs, std::shared_ptr<const CachedMask>* mask) const;

  PagedAttributes attributes_;
  std::shared_ptr<const CachedMask> mask_;  // nullptr: its tables are not constant
  mutable Keeper keeper_;
};

Status PagedAttentionOp::Prepare(const Tensor* inputs, int input_count) {
  const Inputs all(inputs, input_count, in::kNames);
  STOF_RETURN_IF_ERROR(all.CheckCount(kLeastInputs, in::kCount));
  return BindMask(all, in::kTables, [&](auto* mask) { return MakeMask(all, mask); }, &mask_);
}

Status PagedAttentionOp::MakeMask(const Inputs& inputs, std::shared_ptr<const CachedMask>* mask) const {
  const Tables tables = MaskTables(inputs, in::kTables);
  auto made = std::make_shared<CachedMask>();
  STOF_RETURN_IF_ERROR(MakeCachedMask(attributes_.common.mask, tables, 0, made.get()));
  for (const auto& [op, name] : {std::pair(ExprOp::kB, "b"), std::pair(ExprOp::kS, "S")}) {
    if (!made->expr.Uses(op)) continue;
    return Status::Error(std::string("the mask reads ") + name +
                         ", expected h, q, k, P and tables: sequences change places and lengths from step to step");
  }
  *mask = std::move(made);
  return Status();
}

Status PagedAttentionOp::BindCache(const Inputs& inputs, PagedRun* run) const {
  PagedAppendArgs& p = run->append;
  CacheAppendArgs& a = p.tokens;
  if (!inputs.Has(in::kPast)) return Status::Error("past_seqlens is missing");
  const Tensor& past = inputs[in::kPast];
  if (past.dtype != DType::kI32 || past.rank != 1 || past.dims[0] > Limits::kMostLength) {
    return inputs.ReportWrong(in::kPast, "int32 and [sequences], at most 2^22");
  }
  p.B = past.dims[0];
  p.past = static_cast<const int32_t*>(past.data);
  STOF_RETURN_IF_ERROR(inputs.Check(in::kCumulative, DType::kI32, {p.B + 1}));
  p.cumulative = static_cast<const int32_t*>(inputs[in::kCumulative].data);
  if (!inputs.Has(in::kKeyCache)) return Status::Error("key_cache is missing");
  const Tensor& cache = inputs[in::kKeyCache];
  const int64_t rows = cache.rank == 4 ? cache.dims[1] : 0;
  if (cache.dtype != a.dtype || cache.rank != 4 || rows < kLeastBlock || rows > kMostBlock ||
      (rows & (rows - 1)) != 0 || cache.dims[0] > kMostBlocks || cache.dims[2] != a.G || cache.dims[3] != a.D) {
    return inputs.ReportWrong(in::kKeyCache,
                              "[blocks, block size, " + std::to_string(a.G) + ", " + std::to_string(a.D) +
                                  "] with a power of two from 16 on as block size, and data type " + TypeText(a.dtype));
  }
  STOF_RETURN_IF_ERROR(inputs.Check(in::kValueCache, a.dtype, {cache.dims[0], rows, a.G, a.D}));
  p.from_key = cache.data;
  p.from_value = inputs[in::kValueCache].data;
  a.capacity = cache.dims[0] * rows;
  if (!inputs.Has(in::kBlockTable)) return Status::Error("block_table is missing");
  const Tensor& table = inputs[in::kBlockTable];
  if (table.dtype != DType::kI32 || table.rank != 2 || table.dims[0] != p.B || table.dims[1] > kMostBlocks) {
    return inputs.ReportWrong(in::kBlockTable, "int32 and [" + std::to_string(p.B) + ", blocks of a sequence]");
  }
  p.pages.table = static_cast<const int32_t*>(table.data);
  p.pages.columns = table.dims[1];
  p.pages.pages = cache.dims[0];
  while (int64_t{1} << p.pages.shift < rows) ++p.pages.shift;
  p.pages.stride = rows * a.G * a.D;
  if (inputs.Has(in::kSlots)) {
    STOF_RETURN_IF_ERROR(inputs.Check(in::kSlots, DType::kI32, {a.S}));
    p.slot_mapping = static_cast<const int32_t*>(inputs[in::kSlots].data);
  }
  return Status();
}

Status PagedAttentionOp::BindMetadata(const Inputs& inputs, PagedRun* run) const {
  if (!inputs.Has(in::kMetadata)) return Status();
  const Tensor& metadata = inputs[in::kMetadata];
  if (metadata.dtype != DType::kI32 || metadata.rank != 1 || metadata.dims[0] < 2 || metadata.dims[0] > 3) {
    return inputs.ReportWrong(in::kMetadata, "int32 and [2] or [3]");
  }
  const auto* bounds = static_cast<const int32_t*>(metadata.data);
  if (bounds == nullptr) return Status();
  for (int i = 0; i < 2; ++i) {
    if (bounds[i] >= 0) continue;
    return Status::Error("attention_metadata[" + std::to_string(i) + "] is " + std::to_string(bounds[i]) +
                         ", expected 0 or more");
  }
  run->most_queries = bounds[0];
  run->most_keys = bounds[1];
  return Status();
}

Status PagedAttentionOp::Bind(const Inputs& inputs, PagedRun* run) const {
  STOF_RETURN_IF_ERROR(inputs.CheckCount(kLeastInputs, in::kCount));
  STOF_RETURN_IF_ERROR(inputs.CheckAbsent({in::kKeyScale, in::kValueScale}));
  CacheAppendArgs& a = run->append.tokens;
  STOF_RETURN_IF_ERROR(BindTokens(inputs, kTokenInputs, attributes_.common, false, &a));
  STOF_RETURN_IF_ERROR(BindCache(inputs, run));
  STOF_RETURN_IF_ERROR(BindTransforms(inputs, kTokenInputs, attributes_.common, attributes_.rotary_offset, &a));
  run->has_query_copy = a.transform.query_norm != nullptr || attributes_.common.do_rotary;
  return BindMetadata(inputs, run);
}

Status PagedAttentionOp::InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const {
  if (output_count != kOutputs) {
    return Status::Error("has " + std::to_string(output_count) +
                         " outputs, expected output, key_cache_out and value_cache_out");
  }
  PagedRun run;
  STOF_RETURN_IF_ERROR(Bind(Inputs(inputs, input_count, in::kNames), &run));
  const CacheAppendArgs& a = run.append.tokens;
  outputs[0] = TensorOfShape(a.dtype, {a.S, a.H * a.D});
  for (int i = 1; i < kOutputs; ++i) {
    outputs[i] = inputs[in::kKeyCache];
    outputs[i].data = nullptr;
  }
  return Status();
}

Status PagedAttentionOp::Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
                             const RunContext& context) const {
  const Inputs all(inputs, input_count, in::kNames);
  PagedRun run;
  Tensor expected[kOutputs];
  STOF_RETURN_IF_ERROR(InferOutputs(inputs, input_count, expected, output_count));
  STOF_RETURN_IF_ERROR(Bind(all, &run));
  STOF_RETURN_IF_ERROR(CheckResults(kResults, outputs, expected));
  std::shared_ptr<const CachedMask> mask = mask_;
  if (mask == nullptr) STOF_RETURN_IF_ERROR(MakeMask(all, &mask));
  if (expected[0].Elements() == 0 && expected[1].Elements() == 0) return Status();
  STOF_RETURN_IF_ERROR(CheckBuffers(kResults, all, outputs));
  PagedAppendArgs& p = run.append;
  p.tokens.present_key = outputs[1].data;
  p.tokens.present_value = outputs[2].data;
  run.output = outputs[0].data;
  STOF_RETURN_IF_ERROR(BindAttention(all, *mask, &run));
  if (!context.on_cuda) return RunPagedOnCpu(*mask, context, &run);
  const CudaBackend* backend = nullptr;
  RunContext own;
  STOF_RETURN_IF_ERROR(FindDevice(mask_ != nullptr, context, &keeper_, &backend, &own));
  return RunPagedOnCuda(*mask, *backend, own, &run);
}

Status PagedAttentionOp::BindAttention(const Inputs& inputs, const CachedMask& mask, PagedRun* run) const {
  if (mask.is_range) run->append.window_left = mask.window_left;
  run->allow_bf16 = attributes_.common.allow_bf16;
  run->kernel = attributes_.common.kernel.c_str();
  const CacheAppendArgs& a = run->append.tokens;
  run->scores = ScoresOf(attributes_.common, a.D);
  // Sinks depend on neither batch nor lengths.
  return BindSink(inputs, in::kSink, {1, a.H, a.G, 1, 1, a.D, a.D, a.dtype}, &run->scores);
}

Status PagedAttentionOp::PlanHost(const Tensor* inputs, int input_count, int threads, size_t* workspace) const {
  *workspace = 0;
  std::vector<Tensor> given(inputs, inputs + std::max(0, input_count));
  const Inputs all(given.data(), input_count, in::kNames);
  STOF_RETURN_IF_ERROR(all.CheckCount(kLeastInputs, in::kCount));
  std::shared_ptr<const CachedMask> mask = mask_;
  if (mask == nullptr) {
    STOF_RETURN_IF_ERROR(CheckTableData(all, in::kTables));
    STOF_RETURN_IF_ERROR(MakeMask(all, &mask));
  }
  for (int i = 0; i < input_count; ++i) {
    const bool is_read = i == in::kCumulative || i == in::kPast || i == in::kBlockTable || i == in::kMetadata;
    if (!is_read && all.Has(i) && given[static_cast<size_t>(i)].data == nullptr) {
      given[static_cast<size_t>(i)].data = UnreadData();
    }
  }
  PagedRun run;
  STOF_RETURN_IF_ERROR(Bind(all, &run));
  CacheAppendArgs& a = run.append.tokens;
  if (a.S == 0 || run.append.B == 0) return Status();
  a.present_key = a.present_value = run.output = UnreadData();
  STOF_RETURN_IF_ERROR(BindAttention(all, *mask, &run));
  WorkspaceCounter counter;
  STOF_RETURN_IF_ERROR(PlanPagedOnCpu(*mask, counter.MakeContext(threads), &run));
  *workspace = counter.bytes();
  return Status();
}

Status CreatePagedAttention(const AttributeReader& attributes, std::unique_ptr<Op>* op) {
  PagedAttributes parsed;
  STOF_RETURN_IF_ERROR(ParsePagedAttention(attributes, &parsed));
  *op = std::make_unique<PagedAttentionOp>(std::move(parsed));
  return Status();
}

std::vector<OpLimit> ListLimits(Target target, DType dtype) {
  return ListAttentionLimits(target, dtype, {"most_tables", in::kMostTables});
}

}  // namespace

const OpDescription* PagedAttentionDescription() {
  static constexpr AttributeDescription kAttributes[] = {
      {"mask", AttributeType::kString},           {"mask_id", AttributeType::kInt},
      {"scale", AttributeType::kFloat},           {"softcap", AttributeType::kFloat},
      {"num_heads", AttributeType::kInt},         {"kv_num_heads", AttributeType::kInt},
      {"do_rotary", AttributeType::kInt},         {"rotary_interleaved", AttributeType::kInt},
      {"rotary_offset", AttributeType::kInt},     {"qk_norm_epsilon", AttributeType::kFloat},
      {"kernel", AttributeType::kString},         {"skip_threshold", AttributeType::kFloat},
      {"block_threshold", AttributeType::kFloat}, {"allow_bf16", AttributeType::kInt}};
  static constexpr OpDescription description = [] {
    OpDescription d;
    d.name = "StofPagedAttention";
    d.typed_inputs = 1;
    d.optional_inputs = in::kCount - 1;
    d.outputs = kOutputs;
    d.types = Limits::kTypes;
    d.cuda_types = Limits::kTypes;
    d.host_inputs = uint64_t{1} << in::kMetadata;
    d.has_tensorrt_plugin = false;
    d.attributes = kAttributes;
    d.limits = ListLimits;
    d.skips_scores = AttentionLimits::SkipsScores;
    d.chooses_blocks = AttentionLimits::ChoosesBlocksOfPages;
    d.create = CreatePagedAttention;
    return d;
  }();
  return &description;
}

}  // namespace stof
