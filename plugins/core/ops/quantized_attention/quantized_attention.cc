// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/quantized_attention/quantized_attention.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/contract/dim_rule.h"
#include "plugins/core/contract/quantized_attention.h"
#include "plugins/core/contract/workspace_counter.h"
#include "plugins/core/host/quoted.h"
#include "plugins/core/mask/block_mask_cache.h"
#include "plugins/core/ops/attention_op.h"
#include "plugins/core/ops/attention_operands.h"

namespace stof {
namespace {

using Limits = QuantizedAttentionLimits;

constexpr const char* kScale = "_scale";
constexpr const char* kZeroPoint = "_zero_point";

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}
bool IsCode(DType dtype) { return dtype == DType::kI8 || dtype == DType::kU8; }

// A scalar operand by role; nullptr: none.
const Tensor* Find(const Tables& given, const std::string& role) {
  for (const auto& [name, tensor] : given) {
    if (name == role) return &tensor;
  }
  return nullptr;
}

// One rounding, or the codes of a tensor of type `codes` (kUndefined: the zero point's type is that of the codes).
class QuantizationBinder {
 public:
  explicit QuantizationBinder(const Tables& given) : given_(given) {}

  Status Bind(const std::string& name, DType codes, Quantization* bound) const {
    const Tensor* const scale = Find(given_, name + kScale);
    if (scale == nullptr) return Status();  // the attributes are checked
    STOF_RETURN_IF_ERROR(CheckScalar(name + kScale, *scale, scale->dtype == DType::kF32, "fp32"));
    const Tensor* const zero = Find(given_, name + kZeroPoint);
    bound->is_signed = codes == DType::kI8;
    if (zero != nullptr) {
      const bool is_right = codes == DType::kUndefined ? IsCode(zero->dtype) : zero->dtype == codes;
      STOF_RETURN_IF_ERROR(
          CheckScalar(name + kZeroPoint, *zero, is_right,
                      codes == DType::kUndefined ? "int8 or uint8" : "data type " + TypeText(codes) + " of " + name));
      bound->is_signed = zero->dtype == DType::kI8;
    }
    bound->scale = 1.0f;
    if (scale->data == UnreadData()) return Status();  // of a plan
    bound->scale = *static_cast<const float*>(scale->data);
    if (!(bound->scale > 0.0f) || !std::isfinite(bound->scale)) {
      return Status::Error(name + kScale + " is " + PrintFloat(bound->scale) + ", expected a finite number above 0");
    }
    if (zero == nullptr || zero->data == UnreadData()) return Status();
    bound->zero_point = bound->is_signed ? int32_t{*static_cast<const int8_t*>(zero->data)}
                                         : int32_t{*static_cast<const uint8_t*>(zero->data)};
    return Status();
  }

 private:
  static Status CheckScalar(const std::string& role, const Tensor& tensor, bool has_type, const std::string& expected) {
    const bool is_scalar = tensor.rank == 0 || (tensor.rank == 1 && tensor.dims[0] == 1);
    if (has_type && is_scalar) return Status();
    return ReportWrongTensor(role, tensor, "[] or [1] and " + expected);
  }

  const Tables& given_;
};

struct QuantizedAttentionAttributes {
  AttentionAttributes attention;
  bool has_dynamic_weights = false;
};

// Roles that need each other, and attributes of StofAttention that no kernel of this operator computes.
Status CheckAttributes(const QuantizedAttentionAttributes& parsed) {
  const AttentionAttributes& a = parsed.attention;
  const auto has = [&](const std::string& role) {
    return std::find(a.operands.begin(), a.operands.end(), role) != a.operands.end();
  };
  for (const char* name : {"query", "key", "value", "weight"}) {
    const bool is_wanted = !parsed.has_dynamic_weights || std::string(name) != "weight";
    if (has(std::string(name) + kScale) == is_wanted) continue;
    if (!is_wanted) return Status::Error("attribute operands has weight_scale, expected none: weight_range is dynamic");
    return Status::Error("attribute operands lacks " + std::string(name) + kScale + ", expected it in every node");
  }
  for (const std::string& role : a.operands) {
    if (!EndsWith(role, kZeroPoint)) continue;
    const std::string scale = role.substr(0, role.size() - std::string(kZeroPoint).size()) + kScale;
    if (!has(scale)) return Status::Error("attribute operands has " + role + " without " + scale);
  }
  if (a.scale.has_value() && !(*a.scale > 0.0f)) {
    return Status::Error("attribute scale is " + PrintFloat(*a.scale) + ", expected more than 0");
  }
  const auto refuse = [](const std::string& name) {
    return Status::Error("attribute " + name + " is given, expected none: quantized attention does not compute it");
  };
  if (a.softcap != 0.0f) return refuse("softcap");
  if (a.skip_threshold != 0.0f) return refuse("skip_threshold");
  if (a.block_threshold != 0.0f) return refuse("block_threshold");
  return a.lse ? refuse("results") : Status();
}

class QuantizedAttentionOp final : public Op {
 public:
  explicit QuantizedAttentionOp(QuantizedAttentionAttributes attributes)
      : attributes_(std::move(attributes.attention)),
        has_dynamic_weights_(attributes.has_dynamic_weights),
        rules_(OutputRules(attributes_)),
        mask_(attributes_.mask) {}

  Status Prepare(const Tensor* inputs, int input_count) override {
    STOF_RETURN_IF_ERROR(CheckCount(input_count));
    Tables tables;
    for (size_t i = 0; i < attributes_.operands.size(); ++i) {
      const Tensor& tensor = inputs[kTypedInputs + i];
      if (attributes_.operands[i].compare(0, 5, "table") != 0) continue;
      if (tensor.dtype == DType::kUndefined) return Status();  // not constant: parsed in each run
      tables.emplace_back(attributes_.operands[i], tensor);
    }
    return mask_.Fix(tables);
  }

  int InputCount() const override { return kTypedInputs + static_cast<int>(attributes_.operands.size()); }

  Status InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const override {
    AttentionArgs args;
    STOF_RETURN_IF_ERROR(BindTensors(inputs, input_count, &args));
    if (output_count != 1) return Status::Error("has " + std::to_string(output_count) + " outputs, expected 1");
    outputs[0] = TensorByRules(DType::kF32, rules_, inputs);
    return Status();
  }

  bool IsTypeAllowed(int index, DType dtype, DType /*typed*/) const override {
    if (index < 0 || index >= InputCount()) return false;
    if (index < kTypedInputs) return IsCode(dtype);
    const std::string& role = attributes_.operands[static_cast<size_t>(index - kTypedInputs)];
    if (role == "unused") return true;
    if (EndsWith(role, kZeroPoint)) return IsCode(dtype);
    if (role == "pad") return IsPadType(dtype);
    if (role == "bias" || EndsWith(role, kScale)) return dtype == DType::kF32;
    const bool integer = dtype == DType::kI32 || dtype == DType::kI64;
    return integer || (IsTableName(role) && (dtype == DType::kBool || dtype == DType::kU8));
  }

  Status CheckTarget(Target target) const override {
    if (target == Target::kCpu) return Status();
    return Status::Error(std::string("has no kernels for ") + kTargetNames[static_cast<int>(target)] +
                         ": quantized attention runs on the CPU");
  }

  Status PlanDevice(const Tensor* /*inputs*/, int /*input_count*/, DevicePlan* /*plan*/) const override {
    return CheckTarget(Target::kCuda);
  }

  Status Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
             const RunContext& context) const override {
    if (context.on_cuda) return CheckTarget(Target::kCuda);
    Tensor expected;
    STOF_RETURN_IF_ERROR(InferOutputs(inputs, input_count, &expected, output_count));
    STOF_RETURN_IF_ERROR(CheckTensor("output", outputs[0], expected));
    STOF_RETURN_IF_ERROR(Named(inputs).CheckData([&](int i) { return Named(inputs).Name(i) != "unused"; }));
    Problem problem;
    STOF_RETURN_IF_ERROR(Bind(inputs, input_count, context, &problem));
    if (expected.Elements() == 0) return Status();
    if (outputs[0].data == nullptr) return Status::Error("output has no data");
    problem.args.attention.output.data = outputs[0].data;
    return RunOnCpu(context, &problem);
  }

  Status PlanHost(const Tensor* inputs, int input_count, int threads, size_t* workspace) const override {
    *workspace = 0;
    std::vector<Tensor> given(inputs, inputs + std::max(0, input_count));
    for (Tensor& tensor : given) tensor.data = tensor.data == nullptr ? UnreadData() : tensor.data;
    Problem problem;
    STOF_RETURN_IF_ERROR(CheckCount(input_count));
    RunContext unread;
    unread.on_cuda = true;  // where nothing reads operands on the host
    STOF_RETURN_IF_ERROR(Bind(given.data(), input_count, unread, &problem));
    const AttentionShape& shape = problem.args.attention.shape;
    if (shape.B == 0 || shape.H == 0 || shape.S == 0) return Status();
    const bool has_pad = problem.mask->parts.pad;
    if (has_pad) problem.args.attention.mask.pad = static_cast<const uint8_t*>(UnreadData());
    const CpuQuantizedAttentionConfig config = ChooseCpuQuantizedAttention(problem.args);
    *workspace = CpuQuantizedAttentionWorkspace(problem.args, config, threads) +
                 static_cast<size_t>(has_pad ? shape.B * shape.T : 0);
    return Status();
  }

 private:
  struct Problem {
    QuantizedAttentionArgs args;
    Tables given;
    std::shared_ptr<const AttentionMask> mask;
    ExprSizes sizes;
  };

  NamedInputs Named(const Tensor* inputs) const {
    const auto name = [](const void* self, int input) -> std::string {
      const auto& roles = static_cast<const QuantizedAttentionOp*>(self)->attributes_.operands;
      return input < kTypedInputs ? kTensorNames[input] : roles[static_cast<size_t>(input - kTypedInputs)];
    };
    return NamedInputs(inputs, InputCount(), {name, this});
  }

  Status CheckCount(int input_count) const {
    if (input_count == InputCount()) return Status();
    return Status::Error("has " + std::to_string(input_count) + " inputs, expected query, key, value and the " +
                         std::to_string(attributes_.operands.size()) + " of attribute operands");
  }

  // Shapes and strides of query, key and value, whose elements are bytes.
  Status BindTensors(const Tensor* inputs, int input_count, AttentionArgs* args) const {
    STOF_RETURN_IF_ERROR(CheckCount(input_count));
    for (int i = 0; i < kTypedInputs; ++i) {
      if (IsCode(inputs[i].dtype)) continue;
      return Status::Error(std::string(kTensorNames[i]) + " has data type " + TypeText(inputs[i].dtype) +
                           ", expected int8 or uint8");
    }
    // As tensors of fp32 without data: what is checked is the same.
    std::vector<Tensor> sized(inputs, inputs + input_count);
    for (int i = 0; i < kTypedInputs; ++i)
      sized[static_cast<size_t>(i)].dtype = DType::kF32, sized[static_cast<size_t>(i)].data = nullptr;
    STOF_RETURN_IF_ERROR(BindQueryKeyValue(attributes_, sized.data(), input_count, args));
    TensorView* const views[] = {&args->query, &args->key, &args->value};
    for (int i = 0; i < kTypedInputs; ++i) {
      const int64_t size = i == 2 ? args->shape.Dv : args->shape.D;
      const auto* const data = static_cast<const uint8_t*>(inputs[i].data);
      const bool has_elements = data != nullptr && HasElements(inputs[i]);
      views[i]->data = has_elements ? data + attributes_.packed[static_cast<size_t>(i)].first * size : data;
    }
    return Status();
  }

  Status Bind(const Tensor* inputs, int input_count, const RunContext& context, Problem* problem) const {
    QuantizedAttentionArgs& args = problem->args;
    args.has_dynamic_weights = has_dynamic_weights_;
    STOF_RETURN_IF_ERROR(BindTensors(inputs, input_count, &args.attention));
    for (size_t i = 0; i < attributes_.operands.size(); ++i) {
      problem->given.emplace_back(attributes_.operands[i], inputs[kTypedInputs + i]);
    }
    const QuantizationBinder binder(problem->given);
    STOF_RETURN_IF_ERROR(binder.Bind("query", inputs[0].dtype, &args.query));
    STOF_RETURN_IF_ERROR(binder.Bind("key", inputs[1].dtype, &args.key));
    STOF_RETURN_IF_ERROR(binder.Bind("value", inputs[2].dtype, &args.value));
    STOF_RETURN_IF_ERROR(binder.Bind("score", DType::kUndefined, &args.score));
    STOF_RETURN_IF_ERROR(binder.Bind("scaled_score", DType::kUndefined, &args.scaled_score));
    STOF_RETURN_IF_ERROR(binder.Bind("biased_score", DType::kUndefined, &args.biased_score));
    STOF_RETURN_IF_ERROR(binder.Bind("weight", DType::kUndefined, &args.weight));
    STOF_RETURN_IF_ERROR(mask_.Get(problem->given, &problem->mask));
    const AttentionShape& shape = args.attention.shape;
    problem->sizes = {shape.B, shape.H, shape.S, shape.T, attributes_.query_offset ? shape.T - shape.S : 0};
    if (problem->sizes.P < 0) {
      return Status::Error("query_offset is 1 with S = " + std::to_string(shape.S) +
                           " > T = " + std::to_string(shape.T));
    }
    const Tensor* pad = nullptr;
    return BindOperands(problem->mask->parts, &problem->given, context, &args.attention, &pad);
  }

  static Status RunOnCpu(const RunContext& context, Problem* problem) {
    AttentionArgs& args = problem->args.attention;
    const CpuQuantizedAttentionConfig config = ChooseCpuQuantizedAttention(problem->args);
    const MaskExpr& fixed = problem->mask->parts.fixed;
    const MaskExpr& dynamic = problem->mask->parts.dynamic;
    std::shared_ptr<const BlockMask> shared;
    BlockMask direct;
    std::unique_ptr<BoundDynamicMask> elements, bound;
    if (args.shape.T > 0 && !fixed.empty()) {
      const BlockMask* blocks = &direct;
      Status status;
      if (args.shape.S <= kUncachedRows) {
        status = BuildBlockMask(fixed, problem->sizes, config.m, config.n, &direct, kCpuBlockMaskBounds);
      } else {
        status = BlockMaskCache::Global().Get(fixed, problem->mask->fixed_hash, problem->sizes, config.m, config.n,
                                              kCpuBlockMaskBounds, &shared);
        blocks = shared.get();
      }
      if (!status.ok() && !status.too_large()) return status;
      if (status.too_large()) blocks = nullptr;
      const bool has_all_bits = blocks != nullptr && blocks->left == 0;
      if (!has_all_bits) STOF_RETURN_IF_ERROR(BoundDynamicMask::Make(fixed, problem->sizes, {}, &elements));
      args.mask.fixed = StaticMask::OfBlocks(blocks, has_all_bits ? nullptr : elements->view());
    }
    if (args.shape.T > 0 && !dynamic.empty()) {
      STOF_RETURN_IF_ERROR(BoundDynamicMask::Make(dynamic, problem->sizes, problem->given, &bound));
      args.mask.dynamic = bound->view();
    }
    void* workspace = nullptr;
    STOF_RETURN_IF_ERROR(
        context.Allocate(CpuQuantizedAttentionWorkspace(problem->args, config, context.parallel.threads), &workspace));
    STOF_RETURN_IF_ERROR(CpuQuantizedAttention(problem->args, config, workspace, context.parallel));
    if (elements != nullptr) STOF_RETURN_IF_ERROR(elements->status());
    return bound == nullptr ? Status() : bound->status();
  }

  AttentionAttributes attributes_;
  bool has_dynamic_weights_;
  std::vector<DimRule> rules_;
  AttentionMaskSource mask_;
};

Status Parse(const AttributeReader& attributes, QuantizedAttentionAttributes* parsed) {
  const AttentionRoles roles = {Limits::kRoles, Limits::kMostOperands};
  std::string range = "static";
  attributes.String("weight_range", &range);
  STOF_RETURN_IF_ERROR(ParseAttention(attributes, &parsed->attention, roles));
  if (range != "static" && range != "dynamic") {
    return Status::Error("attribute weight_range is " + Quote(range, 64) + ", expected static or dynamic");
  }
  parsed->has_dynamic_weights = range == "dynamic";
  return CheckAttributes(*parsed);
}

Status Create(const AttributeReader& attributes, std::unique_ptr<Op>* op) {
  QuantizedAttentionAttributes parsed;
  STOF_RETURN_IF_ERROR(Parse(attributes, &parsed));
  *op = std::make_unique<QuantizedAttentionOp>(std::move(parsed));
  return Status();
}

std::vector<DimRule> ShapeRule(const AttributeReader& attributes, const int* ranks, int rank_count, int index) {
  QuantizedAttentionAttributes parsed;
  if (index != 0 || rank_count < kTypedInputs || !Parse(attributes, &parsed).ok()) return {};
  for (size_t i = 0; i < kTypedInputs; ++i) {
    if (ranks[i] != (parsed.attention.layout[i] == TensorLayout::kBSN ? 3 : 4)) return {};
  }
  return OutputRules(parsed.attention);
}

std::vector<OpLimit> ListLimits(Target target, DType dtype) {
  return ListAttentionLimits(target, dtype, {"most_quantized_operands", Limits::kMostOperands});
}

}  // namespace

const OpDescription* QuantizedAttentionDescription() {
  static constexpr AttributeDescription kAttributes[] = {
      {"mask", AttributeType::kString},        {"mask_id", AttributeType::kInt},
      {"scale", AttributeType::kFloat},        {"layout", AttributeType::kString},
      {"num_heads", AttributeType::kInt},      {"kv_num_heads", AttributeType::kInt},
      {"packed", AttributeType::kInts},        {"query_offset", AttributeType::kInt},
      {"empty_rows", AttributeType::kString},  {"operands", AttributeType::kString},
      {"weight_range", AttributeType::kString}};
  static constexpr OpDescription description = [] {
    OpDescription d;
    d.name = "StofQuantizedAttention";
    d.untyped_inputs = kTypedInputs;
    d.optional_inputs = Limits::kMostOperands;
    d.types = Limits::kTypes;
    d.has_tensorrt_plugin = false;
    d.attributes = kAttributes;
    d.roles = Limits::kRoles;
    d.limits = ListLimits;
    d.create = Create;
    d.shape_rule = ShapeRule;
    return d;
  }();
  return &description;
}

}  // namespace stof
