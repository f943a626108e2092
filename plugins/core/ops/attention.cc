// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/attention.h"

#include <algorithm>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/contract/dim_rule.h"
#include "plugins/core/mask/block_mask_cache.h"
#include "plugins/core/mask/cached_mask.h"
#include "plugins/core/ops/attention_op.h"
#include "plugins/core/ops/attention_operands.h"

namespace stof {

Status AttentionOp::Prepare(const Tensor* inputs, int input_count) {
  if (input_count != kTypedInputs + static_cast<int>(attributes_.operands.size())) {
    return Status::Error("has " + std::to_string(input_count) + " inputs, expected query, key, value and the " +
                         std::to_string(attributes_.operands.size()) + " of attribute operands");
  }
  Tables tables;
  for (size_t i = 0; i < attributes_.operands.size(); ++i) {
    const Tensor& tensor = inputs[kTypedInputs + i];
    if (attributes_.operands[i].compare(0, 5, "table") != 0) continue;
    if (tensor.dtype == DType::kUndefined) return Status();  // not constant: parsed in each run
    tables.emplace_back(attributes_.operands[i], tensor);
  }
  STOF_RETURN_IF_ERROR(relative_.Fix(tables));
  return mask_.Fix(tables);
}

Status AttentionOp::InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const {
  STOF_RETURN_IF_ERROR(CheckOutputCount(output_count));
  AttentionArgs args;
  STOF_RETURN_IF_ERROR(BindQueryKeyValue(attributes_, inputs, input_count, &args));
  for (int i = 0; i < output_count; ++i) outputs[i] = OutputOf(inputs, i);
  return Status();
}

Status AttentionOp::Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
                        const RunContext& context) const {
  Problem problem;
  STOF_RETURN_IF_ERROR(BindQueryKeyValue(attributes_, inputs, input_count, &problem.args));
  AttentionArgs& args = problem.args;
  STOF_RETURN_IF_ERROR(CheckOutputCount(output_count));
  const Tensor expected = OutputOf(inputs, 0);
  STOF_RETURN_IF_ERROR(CheckTensor("output", outputs[0], expected));
  if (output_count > 1) {
    STOF_RETURN_IF_ERROR(CheckTensor("lse", outputs[1], OutputOf(inputs, 1)));
    args.output.lse = static_cast<float*>(outputs[1].data);
    args.output.lse_stride_b = args.shape.H * args.shape.S, args.output.lse_stride_h = args.shape.S;
  }
  STOF_RETURN_IF_ERROR(context.on_cuda ? problem.copies.Bind(attributes_, inputs, &args)
                                       : problem.sequences.Read(attributes_, inputs, &args));
  STOF_RETURN_IF_ERROR(Complete(inputs, context.on_cuda, &problem));
  if (expected.Elements() == 0) return Status();
  STOF_RETURN_IF_ERROR(CheckData(inputs, outputs[0], context.on_cuda));
  Tables& given = problem.given;
  const Tensor* pad = nullptr;
  STOF_RETURN_IF_ERROR(BindOperands(problem.mask->parts, &given, context, &args, &pad));
  STOF_RETURN_IF_ERROR(relative_.Bind(given, problem.sizes, &args, &problem.relative_rows));
  args.output.data = outputs[0].data;
  if (problem.sequences.given()) {
    problem.sequences.ClearRest(args);
    if (problem.sequences.has_no_query()) return Status();
    STOF_RETURN_IF_ERROR(problem.sequences.Bind(context, &args));
  }
  problem.Split();
  const std::shared_ptr<const AttentionMask>& mask = problem.mask;
  const ExprSizes& sizes = problem.sizes;
  // Nothing masks a key: a row whose scores are all -inf gets the result of their softmax, NaN. Packed keys without
  // packed queries are a mask: their rows may have no key.
  const SequenceRoles& packed = attributes_.sequences;
  const bool masked = mask->parts.pad || !mask->parts.fixed.empty() || !mask->parts.dynamic.empty() ||
                      (packed.given() && !packed.has_queries);
  if (!masked && args.scores.bias.data == nullptr && args.scores.relative_bias.table == nullptr &&
      args.scores.sink.data == nullptr) {
    args.mask.empty_rows = EmptyRows::kNan;
  }
  if (context.on_cuda) return RunOnCuda(pad, context, &problem);
  if (sizes.T == 0) args.mask.empty_rows = EmptyRows::kZero;  // an empty sum is 0, whatever fully masked rows give
  std::unique_ptr<BoundDynamicMask> dynamic;
  if (args.shape.T > 0 && !mask->parts.dynamic.empty()) {
    const MaskShift shift = problem.sequences.shift();
    STOF_RETURN_IF_ERROR(BoundDynamicMask::Make(mask->parts.dynamic, sizes, given, &dynamic, 1, shift));
    args.mask.dynamic = dynamic->view();
  }
  STOF_RETURN_IF_ERROR(RunOnCpu(*mask, sizes, prepared_, problem.sequences.shift(), context, args));
  return dynamic == nullptr ? Status() : dynamic->status();
}

bool AttentionOp::IsTypeAllowed(int index, DType dtype, DType typed) const {
  if (index < 0 || index >= InputCount()) return false;
  if (index < kTypedInputs) return dtype == typed;
  const std::string& role = attributes_.operands[static_cast<size_t>(index - kTypedInputs)];
  if (role == "unused") return true;
  if (role == "pad") return IsPadType(dtype);
  if (role == "bias" || role == "sink" || role == "relative_bias_factor" || IsRelativeRole(role))
    return dtype == typed || dtype == DType::kF32;
  if (role == "relative_bias") return dtype == DType::kF32;
  if (IsSequenceRole(role)) return dtype == DType::kI32;
  const bool integer = dtype == DType::kI32 || dtype == DType::kI64;
  return integer || (IsTableName(role) && (dtype == DType::kBool || dtype == DType::kU8));
}

Status AttentionOp::CheckTarget(Target target) const {
  if (target != Target::kTensorRt) return Status();
  for (const std::string& role : attributes_.operands) {
    if (role != "relative_bias_factor" && !IsRelativeRole(role)) continue;
    return Status::Error("attribute operands names " + role + ", which TensorRT does not take: it is for ONNX Runtime");
  }
  if (!attributes_.sequences.given()) return Status();
  return Status::Error("attribute operands names " +
                       attributes_.operands[static_cast<size_t>(attributes_.sequences.cumulative)] +
                       ", expected none of packed sequences on TensorRT: they are for ONNX Runtime");
}

NamedInputs AttentionOp::Named(const Tensor* inputs, int input_count) const {
  const auto name = [](const void* self, int input) -> std::string {
    const auto& roles = static_cast<const AttentionOp*>(self)->attributes_.operands;
    return input < kTypedInputs ? kTensorNames[input] : roles[static_cast<size_t>(input - kTypedInputs)];
  };
  return NamedInputs(inputs, input_count, {name, this});
}

Tensor AttentionOp::OutputOf(const Tensor* inputs, int index) const {
  return index == 0 ? TensorByRules(inputs[0].dtype, output_rules_, inputs)
                    : TensorByRules(DType::kF32, lse_rules_, inputs);
}

Status AttentionOp::CheckOutputCount(int count) const {
  if (count >= 1 && count <= OutputCount()) return Status();
  return Status::Error("has " + std::to_string(count) + " outputs, expected " +
                       (attributes_.lse ? "output and lse" : "output alone: attribute results asks for no other"));
}

Status AttentionOp::CheckData(const Tensor* inputs, const Tensor& output, bool on_cuda) const {
  const NamedInputs all = Named(inputs, InputCount());
  const auto is_read = [&](int i) {
    const std::string role = all.Name(i);
    return role != "unused" && !(on_cuda && mask_.is_fixed() && IsTableName(role));
  };
  STOF_RETURN_IF_ERROR(all.CheckData(is_read));
  return output.data == nullptr ? Status::Error("output has no data") : Status();
}

Status AttentionOp::Complete(const Tensor* inputs, bool on_cuda, Problem* problem) const {
  for (size_t i = 0; i < attributes_.operands.size(); ++i) {
    problem->given.emplace_back(attributes_.operands[i], inputs[kTypedInputs + i]);
  }
  if (on_cuda && !mask_.is_fixed()) {
    return Status::Error("the tables of the mask are no constants, which the CUDA kernels need them to be");
  }
  STOF_RETURN_IF_ERROR(mask_.Get(problem->given, &problem->mask));
  const AttentionShape& shape = problem->args.shape;
  problem->sizes = {shape.B, shape.H, shape.S, shape.T, attributes_.query_offset ? shape.T - shape.S : 0};
  if (problem->sizes.P < 0) {
    return Status::Error("query_offset is 1 with S = " + std::to_string(shape.S) + " > T = " + std::to_string(shape.T));
  }
  ScoreArgs& scores = problem->args.scores;
  scores.relative_bias.query_position = scores.diagonal.first = problem->sizes.P;
  if (!problem->mask->parts.dynamic.empty()) scores.block_threshold = 0.0f;  // every block is computed
  return Status();
}

Status AttentionOp::RunOnCuda(const Tensor* pad, const RunContext& context, Problem* problem) const {
  const CudaBackend* backend = FindCudaBackend();
  if (backend == nullptr) return Status::Error(kNoCudaKernels);
  RunContext own = context;
  if (own.keeper == nullptr) own.keeper = &keeper_;
  const PaddedCopies& copies = problem->copies;
  if (copies.given()) {
    STOF_RETURN_IF_ERROR(problem->copies.Allocate(problem->is_pad_alone(), context, &problem->args, &pad));
    STOF_RETURN_IF_ERROR(copies.Unpack(backend->packed_sequences, context));
  }
  // Without a sequence nothing is attended, but packed rows still become 0.
  if (problem->args.shape.B > 0 && problem->args.shape.S > 0) {
    STOF_RETURN_IF_ERROR(
        backend->attention.run(problem->args, pad, *problem->mask, problem->sizes, problem->given, own));
  }
  return copies.given() ? copies.Pack(backend->packed_sequences, context) : Status();
}

bool AttentionOp::CanGatherColumns(const AttentionMask& mask, const AttentionArgs& args,
                                   std::shared_ptr<const ColumnSource::Gathered>* gathered) {
  if (mask.columns == nullptr || args.sequences.given() || args.shape.S <= kUncachedRows || args.shape.T == 0 ||
      args.mask.pad != nullptr || args.scores.bias.data != nullptr || args.scores.relative_bias.table != nullptr ||
      args.mask.dynamic != nullptr || AttendsAllKeys(args.mask.empty_rows) || args.scores.has_relative_tables() ||
      args.relative_value.given()) {
    return false;
  }
  *gathered = mask.columns->Get(args.shape.H, args.shape.G, args.shape.T, args.shape.T);
  const KeyColumns* columns = (*gathered)->columns.get();
  return (*gathered)->mask != nullptr && args.shape.T + columns->packed() <= MaskExpr::kMaxSize;
}

Status AttentionOp::RunOnCpu(const AttentionMask& mask, const ExprSizes& sizes, const PreparedMask& prepared,
                             const MaskShift& shift, const RunContext& context, const AttentionArgs& unmasked) {
  const int threads = std::max(1, context.parallel.threads);
  AttentionArgs args = unmasked;
  const CpuAttentionConfig config = ChooseCpuAttention(args, threads);
  std::shared_ptr<const ColumnSource::Gathered> gathered;
  if (CanGatherColumns(mask, args, &gathered)) {
    args.kv.columns = gathered->columns.get();
    args.shape.T += args.kv.columns->packed();
    ExprSizes axis = sizes;
    axis.T = args.shape.T;
    return RunOnCpu(*gathered->mask, axis, prepared, shift, context, args);
  }
  const MaskExpr& fixed = mask.parts.fixed;
  std::shared_ptr<const BlockMask> shared;
  BlockMask direct;
  std::unique_ptr<BoundDynamicMask> elements;
  if (args.shape.T > 0 && !fixed.empty()) {
    Status status;
    const BlockMask* blocks = &direct;
    // A mask of distances is the same for sequences that begin at other positions.
    const bool is_moved = shift.keys != nullptr && (shift.rows == nullptr || !IsOfDistances(fixed));
    if (is_moved) {
      blocks = nullptr;
    } else if (sizes.S <= kUncachedRows) {
      status = BuildBlockMask(fixed, sizes, config.m, config.n, &direct, kCpuBlockMaskBounds);
    } else if (prepared.Suits(mask.fixed_hash, sizes, config)) {
      blocks = prepared.mask.get();
    } else {
      status =
          BlockMaskCache::Global().Get(fixed, mask.fixed_hash, sizes, config.m, config.n, kCpuBlockMaskBounds, &shared);
      blocks = shared.get();
    }
    if (status.too_large()) {
      blocks = nullptr;
    } else {
      STOF_RETURN_IF_ERROR(status);
    }
    const bool has_all_bits = blocks != nullptr && blocks->left == 0;
    if (!has_all_bits) {
      const MaskShift own = is_moved ? shift : MaskShift();
      STOF_RETURN_IF_ERROR(BoundDynamicMask::Make(fixed, sizes, {}, &elements, 1, own));
    }
    args.mask.fixed = StaticMask::OfBlocks(blocks, has_all_bits ? nullptr : elements->view());
  }
  const size_t bytes = CpuAttentionWorkspace(args, config, threads);
  void* workspace = nullptr;
  STOF_RETURN_IF_ERROR(context.Allocate(bytes, &workspace));
  STOF_RETURN_IF_ERROR(CpuAttention(args, config, workspace, context.parallel));
  return elements == nullptr ? Status() : elements->status();
}

namespace {

Status CreateAttention(const AttributeReader& attributes, std::unique_ptr<Op>* op) {
  AttentionAttributes parsed;
  STOF_RETURN_IF_ERROR(ParseAttention(attributes, &parsed));
  *op = std::make_unique<AttentionOp>(std::move(parsed));
  return Status();
}

std::vector<OpLimit> ListLimits(Target target, DType dtype) {
  std::vector<OpLimit> limits = ListAttentionLimits(target, dtype, {"most_operands", AttentionLimits::kMostOperands});
  const int64_t tables = AttentionLimits::RelativeTablesOf(target);
  limits.push_back({"relative_tables", tables});
  if (tables > 3) limits.push_back({"most_relative_value_rows", AttentionLimits::kMostRelativeValueRows});
  return limits;
}

}  // namespace

std::vector<OpLimit> ListAttentionLimits(Target target, DType dtype, const OpLimit& own) {
  const HeadSizes sizes = AttentionLimits::HeadSizesOf(target, dtype);
  return {{"largest_head_size", sizes.largest},
          {"head_size_multiple_of", sizes.multiple_of},
          {"most_heads", AttentionLimits::kMostHeads},
          {"most_length", AttentionLimits::kMostLength},
          own};
}

const OpDescription* AttentionDescription() {
  static constexpr AttributeDescription kAttributes[] = {{"mask", AttributeType::kString},
                                                         {"mask_id", AttributeType::kInt},
                                                         {"scale", AttributeType::kFloat},
                                                         {"softcap", AttributeType::kFloat},
                                                         {"layout", AttributeType::kString},
                                                         {"num_heads", AttributeType::kInt},
                                                         {"kv_num_heads", AttributeType::kInt},
                                                         {"packed", AttributeType::kInts},
                                                         {"query_offset", AttributeType::kInt},
                                                         {"empty_rows", AttributeType::kString},
                                                         {"operands", AttributeType::kString},
                                                         {"results", AttributeType::kString},
                                                         {"allow_tf32", AttributeType::kInt},
                                                         {"precision", AttributeType::kString, false},
                                                         {"allow_bf16", AttributeType::kInt, false},
                                                         {"kernel", AttributeType::kString},
                                                         {"tile", AttributeType::kString},
                                                         {"relative_index", AttributeType::kString},
                                                         {"skip_threshold", AttributeType::kFloat, false},
                                                         {"block_threshold", AttributeType::kFloat, false}};
  static constexpr OpDescription description = [] {
    OpDescription d;
    d.name = "StofAttention";
    d.typed_inputs = kTypedInputs;
    d.optional_inputs = AttentionLimits::kMostOperands;
    d.optional_outputs = 1;
    d.optional_type = DType::kF32;
    d.types = AttentionLimits::kTypes;
    d.cuda_types = AttentionLimits::kTypes;
    d.attributes = kAttributes;
    d.roles = AttentionLimits::kRoles;
    d.limits = ListLimits;
    d.skips_scores = AttentionLimits::SkipsScores;
    d.chooses_blocks = AttentionLimits::ChoosesBlocks;
    d.create = CreateAttention;
    d.shape_rule = AttentionOutputShape;
    return d;
  }();
  return &description;
}

}  // namespace stof
