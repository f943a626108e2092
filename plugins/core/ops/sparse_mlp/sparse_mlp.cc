// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/sparse_mlp/sparse_mlp.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/base/integers.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/contract/sparse_mlp_limits.h"
#include "plugins/core/ops/named_inputs.h"
#include "plugins/core/ops/sparse_mlp/hot_rows.h"
#include "plugins/core/ops/sparse_mlp/rounded_weight.h"

namespace stof {
namespace {

namespace in = sparse_mlp_input;
using Limits = SparseMlpLimits;

constexpr char kNoData = 0;  // where a tensor without elements is

// The weights of one kind, with what belongs to them.
struct WeightInputs {
  int weight, bias, scales, zero_points;
};
constexpr WeightInputs kGateInputs = {in::kGateWeight, in::kGateBias, in::kGateScales, in::kGateZeroPoints};
constexpr WeightInputs kUpInputs = {in::kUpWeight, in::kUpBias, in::kUpScales, in::kUpZeroPoints};
constexpr WeightInputs kDownInputs = {in::kDownWeight, in::kDownBias, in::kDownScales, in::kDownZeroPoints};

// Checks the inputs of a node, and fills the arguments of a run.
class Binder {
 public:
  Binder(const SparseMlpAttributes& attributes, const Tensor* inputs, int count)
      : attributes_(attributes), inputs_(inputs, count, in::kNames) {}

  Status Bind(SparseMlpArgs* args) {
    SparseMlpArgs& a = *args;
    a.activation = attributes_.activation, a.selection = attributes_.selection;
    a.bits = static_cast<int>(attributes_.bits), a.block_size = attributes_.block_size;
    a.accuracy_level = static_cast<int>(attributes_.accuracy_level);
    a.has_predictor_relu = attributes_.has_predictor_relu;
    STOF_RETURN_IF_ERROR(BindTokens(args));
    STOF_RETURN_IF_ERROR(BindDown(args));
    STOF_RETURN_IF_ERROR(BindRows(kGateInputs, a, &a.gate_weight, &a.gate_bias));
    STOF_RETURN_IF_ERROR(BindRows(kUpInputs, a, &a.up_weight, &a.up_bias));
    return BindSelection(args);
  }

  // An error where a tensor that is read has no data.
  Status CheckData() const {
    const bool reads_input = Has(in::kGateWeight) || Has(in::kUpWeight);
    return inputs_.CheckData([&](int i) { return i != in::kInput || reads_input; });
  }

 private:
  bool Has(int i) const { return inputs_.Has(i); }
  const void* At(int i) const { return inputs_[i].data != nullptr ? inputs_[i].data : &kNoData; }

  static bool IsSize(int64_t size) { return size >= 0 && size <= Limits::kMostSize; }

  Status BindTokens(SparseMlpArgs* args) const {
    if (!Has(in::kInput)) return inputs_.ReportMissing(in::kInput, "always");
    const Tensor& input = inputs_[in::kInput];
    if (!IsFloat(input.dtype) || input.rank < 1) {
      return inputs_.ReportWrong(in::kInput, "fp32, fp16 or bf16 and [..., K]");
    }
    args->dtype = input.dtype;
    int64_t tokens = 1;
    for (int i = 0; i < input.rank; ++i) {
      const bool is_last = i == input.rank - 1;
      if (!IsSize(input.dims[i]) || (!is_last && __builtin_mul_overflow(tokens, input.dims[i], &tokens)) ||
          !IsSize(tokens)) {
        return inputs_.ReportWrong(in::kInput, "sizes of 0 or more, and at most 2^31 - 1 tokens");
      }
    }
    args->T = tokens;
    args->K = input.dims[input.rank - 1];
    args->input = At(in::kInput);
    return Status();
  }

  // The down weight decides F and N.
  Status BindDown(SparseMlpArgs* args) const {
    if (!Has(in::kDownWeight)) return inputs_.ReportMissing(in::kDownWeight, "always");
    const Tensor& down = inputs_[in::kDownWeight];
    if (down.rank != 2 || !IsSize(down.dims[0]) || !IsSize(down.dims[1])) {
      return inputs_.ReportWrong(in::kDownWeight, "[F, N], each at most 2^31 - 1");
    }
    args->F = down.dims[0];
    args->N = down.dims[1];
    args->down_weight.data = At(in::kDownWeight);
    if (attributes_.bits == 0) {
      STOF_RETURN_IF_ERROR(inputs_.Check(in::kDownWeight, args->dtype, {args->F, args->N}));
      STOF_RETURN_IF_ERROR(CheckNotQuantized(kDownInputs));
    } else {
      if (!Has(in::kDownScales)) return inputs_.ReportMissing(in::kDownScales, "with attribute bits");
      const Tensor& scales = inputs_[in::kDownScales];
      if (scales.rank != 2 || !IsSize(scales.dims[1])) {
        return inputs_.ReportWrong(in::kDownScales, "[ceil(F / block_size), N]");
      }
      args->N = scales.dims[1];
      const int64_t groups = CeilDiv(args->F, attributes_.block_size);
      STOF_RETURN_IF_ERROR(
          inputs_.Check(in::kDownWeight, DType::kU8, {args->F, CeilDiv(args->N * attributes_.bits, 8)}));
      STOF_RETURN_IF_ERROR(inputs_.Check(in::kDownScales, args->dtype, {groups, args->N}));
      args->down_weight.scales = At(in::kDownScales);
      if (Has(in::kDownZeroPoints)) {
        STOF_RETURN_IF_ERROR(inputs_.Check(in::kDownZeroPoints, DType::kU8, {groups, args->N}));
        args->down_weight.zero_points = At(in::kDownZeroPoints);
      }
    }
    if (!Has(in::kDownBias)) return Status();
    args->down_bias = At(in::kDownBias);
    return inputs_.Check(in::kDownBias, args->dtype, {args->N});
  }

  Status CheckNotQuantized(const WeightInputs& names) const {
    for (const int i : {names.scales, names.zero_points}) {
      if (Has(i)) return inputs_.ReportSuperfluous(i, "as attribute bits is 0");
    }
    return Status();
  }

  // A gate or up weight.
  Status BindRows(const WeightInputs& names, const SparseMlpArgs& a, SparseMlpWeight* weight, const void** bias) const {
    if (!Has(names.weight)) {
      for (const int i : {names.bias, names.scales, names.zero_points}) {
        if (Has(i)) return inputs_.ReportSuperfluous(i, "without " + std::string(in::kNames[names.weight]));
      }
      return Status();
    }
    weight->data = At(names.weight);
    if (attributes_.bits == 0) {
      STOF_RETURN_IF_ERROR(inputs_.Check(names.weight, a.dtype, {a.F, a.K}));
      STOF_RETURN_IF_ERROR(CheckNotQuantized(names));
    } else {
      const int64_t b = attributes_.block_size, blocks = CeilDiv(a.K, b);
      STOF_RETURN_IF_ERROR(inputs_.Check(names.weight, DType::kU8, {a.F, blocks, b * attributes_.bits / 8}));
      if (!Has(names.scales)) return inputs_.ReportMissing(names.scales, "with attribute bits");
      STOF_RETURN_IF_ERROR(inputs_.Check(names.scales, a.dtype, {a.F, blocks}));
      weight->scales = At(names.scales);
      if (Has(names.zero_points)) {
        STOF_RETURN_IF_ERROR(
            inputs_.Check(names.zero_points, DType::kU8, {a.F, CeilDiv(blocks * attributes_.bits, 8)}));
        weight->zero_points = At(names.zero_points);
      }
    }
    if (!Has(names.bias)) return Status();
    *bias = At(names.bias);
    return inputs_.Check(names.bias, a.dtype, {a.F});
  }

  Status BindSelection(SparseMlpArgs* args) const {
    SparseMlpArgs& a = *args;
    const std::string selection = kSparseMlpSelections[static_cast<int>(a.selection)];
    const std::string with = "with selection = " + selection;
    const bool has_predictor = a.selection == SparseMlpSelection::kPredictor;
    for (const int i : {in::kGateWeight, in::kPredictorDown, in::kPredictorUp}) {
      if (has_predictor && !Has(i)) return inputs_.ReportMissing(i, with);
      if (!has_predictor && Has(i)) return inputs_.ReportSuperfluous(i, with);
    }
    for (const int i : {in::kPredictorDownScales, in::kPredictorUpScales}) {
      if (!has_predictor && Has(i)) return inputs_.ReportSuperfluous(i, with);
    }
    if (has_predictor && Has(in::kGate)) return inputs_.ReportSuperfluous(in::kGate, with);
    if (!has_predictor) {
      if (!Has(in::kGate)) return inputs_.ReportMissing(in::kGate, with);
      const Tensor& input = inputs_[in::kInput];
      std::vector<int64_t> dims(input.dims, input.dims + input.rank);
      dims.back() = a.F;
      STOF_RETURN_IF_ERROR(inputs_.Check(in::kGate, a.dtype, dims));
      a.gate = At(in::kGate);
    } else {
      const Tensor& down = inputs_[in::kPredictorDown];
      if (down.rank != 2 || !IsSize(down.dims[0])) return inputs_.ReportWrong(in::kPredictorDown, "[R, K]");
      a.R = down.dims[0];
      const auto padded = [](int64_t size) { return RoundUp(size, Limits::kPredictorMultiple); };
      STOF_RETURN_IF_ERROR(inputs_.CheckPair(in::kPredictorDownScales, in::kPredictorUpScales));
      if (Has(in::kPredictorDownScales)) {
        STOF_RETURN_IF_ERROR(inputs_.Check(in::kPredictorDown, DType::kU8, {a.R, padded(a.K)}));
        STOF_RETURN_IF_ERROR(inputs_.Check(in::kPredictorUp, DType::kU8, {a.F, padded(a.R)}));
        STOF_RETURN_IF_ERROR(inputs_.Check(in::kPredictorDownScales, a.dtype, {a.R}));
        STOF_RETURN_IF_ERROR(inputs_.Check(in::kPredictorUpScales, a.dtype, {a.F}));
        a.predictor_down.scales = At(in::kPredictorDownScales);
        a.predictor_up.scales = At(in::kPredictorUpScales);
      } else {
        STOF_RETURN_IF_ERROR(inputs_.Check(in::kPredictorDown, a.dtype, {a.R, a.K}));
        STOF_RETURN_IF_ERROR(inputs_.Check(in::kPredictorUp, a.dtype, {a.F, a.R}));
      }
      a.predictor_down.data = At(in::kPredictorDown);
      a.predictor_up.data = At(in::kPredictorUp);
    }
    if (a.selection == SparseMlpSelection::kNonzero) {
      return Has(in::kThreshold) ? inputs_.ReportSuperfluous(in::kThreshold, with) : Status();
    }
    if (!Has(in::kThreshold)) return inputs_.ReportMissing(in::kThreshold, with);
    const Tensor& threshold = inputs_[in::kThreshold];
    const bool has_one = threshold.rank == 1 && threshold.dims[0] == 1;
    if (threshold.dtype != DType::kF32 || threshold.rank != 1 || (!has_one && threshold.dims[0] != a.F)) {
      return inputs_.ReportWrong(in::kThreshold, "[1] or [" + std::to_string(a.F) + "] and " + TypeText(DType::kF32));
    }
    a.threshold = static_cast<const float*>(threshold.data);
    a.threshold_stride = has_one ? 0 : 1;
    return Status();
  }

  const SparseMlpAttributes& attributes_;
  const NamedInputs inputs_;
};

class SparseMlpOp final : public Op {
 public:
  explicit SparseMlpOp(const SparseMlpAttributes& attributes) : attributes_(attributes) {}

  Status Prepare(const Tensor* inputs, int input_count) override {
    STOF_RETURN_IF_ERROR(CheckCounts(input_count, 1));
    for (const int i : {in::kGateWeight, in::kUpWeight, in::kDownWeight}) {
      if (i >= input_count) continue;
      const bool is_rounded = attributes_.allow_bf16 && rounded_[i - in::kGateWeight].Round(inputs[i]);
      if (!is_rounded) hot_rows_.Read(inputs[i], attributes_.hot_neurons);
    }
    return Status();
  }
  int InputCount() const override { return in::kDownWeight + 1; }
  bool IsTypeAllowed(int index, DType dtype, DType typed) const override {
    const bool is_quantized = attributes_.bits != 0;
    if (index == in::kThreshold) return dtype == DType::kF32;
    for (const int i : {in::kGateZeroPoints, in::kUpZeroPoints, in::kDownZeroPoints}) {
      if (index == i) return dtype == DType::kU8;
    }
    if (is_quantized && index >= in::kGateWeight && index <= in::kDownWeight) return dtype == DType::kU8;
    if ((index == in::kPredictorDown || index == in::kPredictorUp) && dtype == DType::kU8) return true;
    return index >= 0 && index < in::kCount && dtype == typed;
  }

  Status InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const override {
    SparseMlpArgs args;
    STOF_RETURN_IF_ERROR(CheckCounts(input_count, output_count));
    STOF_RETURN_IF_ERROR(Binder(attributes_, inputs, input_count).Bind(&args));
    outputs[0] = OutputOf(inputs, args);
    return Status();
  }

  Status PlanDevice(const Tensor* inputs, int input_count, DevicePlan* plan) const override {
    SparseMlpArgs args;
    STOF_RETURN_IF_ERROR(CheckCounts(input_count, 1));
    STOF_RETURN_IF_ERROR(Binder(attributes_, inputs, input_count).Bind(&args));
    *plan = DevicePlan();
    plan->runs_several_kernels = true;
    const CudaBackend* backend = FindCudaBackend();  // engines are built without kernels, too
    if (backend == nullptr || args.T == 0 || args.N == 0) return Status();
    return backend->sparse_mlp.plan_workspace(args, &plan->workspace);
  }

  Status PlanHost(const Tensor* inputs, int input_count, int, size_t* workspace) const override {
    *workspace = 0;
    SparseMlpArgs args;
    STOF_RETURN_IF_ERROR(CheckCounts(input_count, 1));
    STOF_RETURN_IF_ERROR(Binder(attributes_, inputs, input_count).Bind(&args));
    FindRounded(inputs, &args);
    if (args.T > 0 && args.N > 0) *workspace = CpuSparseMlpWorkspace(args, BestCpuIsa());
    return Status();
  }

  Status Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
             const RunContext& context) const override {
    SparseMlpArgs args;
    STOF_RETURN_IF_ERROR(CheckCounts(input_count, output_count));
    Binder binder(attributes_, inputs, input_count);
    STOF_RETURN_IF_ERROR(binder.Bind(&args));
    STOF_RETURN_IF_ERROR(binder.CheckData());
    const Tensor expected = OutputOf(inputs, args);
    const Tensor& output = outputs[0];
    STOF_RETURN_IF_ERROR(CheckTensor("y", output, expected));
    if (args.T == 0 || args.N == 0) return Status();
    if (output.data == nullptr) return Status::Error("y has no data");
    args.output = output.data;
    if (context.on_cuda) {
      const CudaBackend* backend = FindCudaBackend();
      if (backend == nullptr) return Status::Error(kNoCudaKernels);
      return backend->sparse_mlp.run(args, context);
    }
    FindRounded(inputs, &args);
    void* workspace = nullptr;
    const CpuIsa isa = BestCpuIsa();
    STOF_RETURN_IF_ERROR(context.Allocate(CpuSparseMlpWorkspace(args, isa), &workspace));
    CpuSparseMlp(args, isa, workspace, context.parallel);
    return Status();
  }

 private:
  void FindRounded(const Tensor* inputs, SparseMlpArgs* args) const {
    SparseMlpWeight* const weights[] = {&args->gate_weight, &args->up_weight, &args->down_weight};
    for (int i = 0; i < 3; ++i) {
      if (weights[i]->data != nullptr) weights[i]->rounded = rounded_[i].Find(inputs[in::kGateWeight + i]);
    }
  }

  static Status CheckCounts(int inputs, int outputs) {
    STOF_RETURN_IF_ERROR(NamedInputs(nullptr, inputs, in::kNames).CheckCount(in::kDownWeight + 1, in::kCount));
    if (outputs == 1) return Status();
    return Status::Error("has " + std::to_string(outputs) + " outputs, expected 1");
  }
  static Tensor OutputOf(const Tensor* inputs, const SparseMlpArgs& args) {
    Tensor output = inputs[in::kInput];
    output.data = nullptr;
    output.dims[output.rank - 1] = args.N;
    return output;
  }

  const SparseMlpAttributes attributes_;
  HotRows hot_rows_;
  RoundedWeight rounded_[3];  // gate, up and down
};

Status CreateSparseMlp(const AttributeReader& attributes, std::unique_ptr<Op>* op) {
  SparseMlpAttributes parsed;
  STOF_RETURN_IF_ERROR(ParseSparseMlp(attributes, &parsed));
  *op = std::make_unique<SparseMlpOp>(parsed);
  return Status();
}

std::vector<OpLimit> ListLimits(Target, DType) {
  return {{"most_size", Limits::kMostSize},
          {"smallest_block_size", Limits::kSmallestBlock},
          {"largest_block_size", Limits::kLargestBlock},
          {"predictor_multiple_of", Limits::kPredictorMultiple},
          {"most_accuracy_level", Limits::kMostAccuracyLevel}};
}

}  // namespace

const OpDescription* SparseMlpDescription() {
  static constexpr AttributeDescription kAttributes[] = {
      {"activation", AttributeType::kString},  {"selection", AttributeType::kString},
      {"bits", AttributeType::kInt},           {"block_size", AttributeType::kInt},
      {"accuracy_level", AttributeType::kInt}, {"hot_neurons", AttributeType::kInt},
      {"mlp_id", AttributeType::kInt},         {"predictor_activation", AttributeType::kString},
      {"allow_bf16", AttributeType::kInt}};
  static constexpr OpDescription description = [] {
    OpDescription d;
    d.name = "StofSparseMLP";
    d.typed_inputs = 1;
    d.optional_inputs = in::kCount - 1;
    d.types = Limits::kTypes;
    d.cuda_types = Limits::kTypes;
    d.has_tensorrt_plugin = false;
    d.attributes = kAttributes;
    d.has_activation = true;
    d.limits = ListLimits;
    d.create = CreateSparseMlp;
    return d;
  }();
  return &description;
}

}  // namespace stof
