// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/chain.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/contract/workspace_counter.h"
#include "plugins/core/host/fork_guard.h"
#include "plugins/core/ops/named_inputs.h"

namespace stof {
namespace {

Status ParseAttributes(const AttributeReader& attributes, Chain* chain) {
  std::string text;
  const bool found = attributes.String("chain", &text);
  int64_t id = 0;
  attributes.Int("chain_id", &id);
  STOF_RETURN_IF_ERROR(attributes.CheckTypes());
  if (!found) return Status::Error("attribute chain is missing, expected the description of a chain");
  return ParseChain(text, chain);
}

// A chain bound to the types and shapes of its inputs, and the program for them.
struct BoundToShapes {
  std::vector<int64_t> key;
  BoundChain bound;

  // The first run that needs one of these makes it; others wait.
  std::shared_ptr<const cpu::ChainProgram> Program(const Chain& chain, int threads) {
    const auto program = program_.Lock();
    if (*program == nullptr) *program = CompileCpuChain(chain, bound, BestCpuIsa(), threads);
    return *program;
  }
  DeviceChain* State(const ChainBackend& backend) {
    const auto state = state_.Lock();
    if (*state == nullptr) *state = backend.make_state();
    return state->get();
  }

 private:
  ForkSafe<std::shared_ptr<const cpu::ChainProgram>> program_;
  ForkSafe<std::unique_ptr<DeviceChain>> state_;
};

class StofChainOp final : public Op {
 public:
  explicit StofChainOp(Chain chain) : chain_(std::move(chain)) {}

  Status Prepare(const Tensor*, int input_count) override {
    if (input_count < chain_.inputs) {
      return Status::Error("has " + std::to_string(input_count) + " inputs, but the chain names x" +
                           std::to_string(chain_.inputs - 1));
    }
    return Status();
  }

  int InputCount() const override { return std::max(1, chain_.inputs); }
  int OutputCount() const override { return static_cast<int>(chain_.outputs.size()); }
  bool IsTypeAllowed(int, DType dtype, DType) const override { return IsFloat(dtype); }
  Status PlanDevice(const Tensor* inputs, int input_count, DevicePlan* plan) const override {
    *plan = DevicePlan();
    std::shared_ptr<BoundToShapes> bound;
    return Bind(inputs, input_count, &bound);
  }
  Status PrepareDevice(const Tensor* inputs, int input_count, int) const override {
    const CudaBackend* backend = FindCudaBackend();
    if (backend == nullptr) return Status();
    std::shared_ptr<BoundToShapes> bound;
    STOF_RETURN_IF_ERROR(Bind(inputs, input_count, &bound));
    return backend->chain.prepare(chain_, bound->bound, bound->State(backend->chain));
  }

  // Makes the kernel of a node whose shapes are all known; errors are left to the run.
  Status PrepareNode(const Tensor* inputs, int input_count, bool on_cuda, int) override {
    if (!on_cuda || input_count < chain_.inputs) return Status();
    for (int i = 0; i < input_count; ++i) {
      const bool known = std::all_of(inputs[i].dims, inputs[i].dims + inputs[i].rank, [](int64_t d) { return d >= 0; });
      if (inputs[i].dtype == DType::kUndefined || !known) return Status();
    }
    (void)PrepareDevice(inputs, input_count, 0);
    return Status();
  }

  void SetOutputTypes(const DType* types, int count) override {
    for (size_t i = 0; i < std::min(chain_.outputs.size(), static_cast<size_t>(count)); ++i) {
      if (IsFloat(types[i])) chain_.outputs[i].type = types[i];
    }
  }

  Status InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const override {
    std::shared_ptr<BoundToShapes> bound;
    STOF_RETURN_IF_ERROR(Bind(inputs, input_count, &bound));
    STOF_RETURN_IF_ERROR(CheckOutputCount(output_count));
    // A node may have more outputs than the chain: all calls of a model's function have one signature. Nobody reads the
    // others, but where they have names (for TensorRT's parser) ONNX Runtime may convert them.
    for (int i = static_cast<int>(chain_.outputs.size()); i < output_count; ++i)
      outputs[i] = TensorOfShape(DType::kF32, {0});
    for (int i = 0; i < static_cast<int>(chain_.outputs.size()); ++i) {
      const BoundOutput& output = bound->bound.outputs[static_cast<size_t>(i)];
      outputs[i].dtype = output.dtype;
      outputs[i].rank = output.rank;
      std::copy(output.dims, output.dims + output.rank, outputs[i].dims);
    }
    return Status();
  }

  Status Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
             const RunContext& context) const override {
    STOF_RETURN_IF_ERROR(CheckOutputCount(output_count));
    std::shared_ptr<BoundToShapes> bound;
    STOF_RETURN_IF_ERROR(Bind(inputs, input_count, &bound));
    const auto count = static_cast<int>(chain_.outputs.size());
    for (int i = 0; i < count; ++i) {
      STOF_RETURN_IF_ERROR(CheckOutput(outputs[i], bound->bound.outputs[static_cast<size_t>(i)], i));
    }
    // An empty output may have other axes of any length: their rows must not be visited.
    const auto is_empty = [](const Tensor& output) { return output.Elements() == 0; };
    if (std::all_of(outputs, outputs + count, is_empty)) return Status();
    const void* from[kChainMostInputs] = {};
    void* to[kChainMostOutputs] = {};
    for (int i = 0; i < std::min(input_count, kChainMostInputs); ++i) from[i] = inputs[i].data;
    for (int i = 0; i < count; ++i) to[i] = outputs[i].data;
    const auto is_read = [&reads = bound->bound.reads](int input) {
      return std::any_of(reads.begin(), reads.end(), [&](const BoundRead& r) { return r.input == input && !r.never; });
    };
    STOF_RETURN_IF_ERROR(NamedInputs(inputs, input_count, {NameOf, nullptr}).CheckData(is_read));
    if (context.on_cuda) {
      const CudaBackend* backend = FindCudaBackend();
      if (backend == nullptr) return Status::Error(kNoCudaKernels);
      return backend->chain.run(chain_, bound->bound, from, to, bound->State(backend->chain), context);
    }
    std::shared_ptr<const cpu::ChainProgram> program;
    void* workspace = nullptr;
    STOF_RETURN_IF_ERROR(PrepareCpu(context, bound.get(), &program, &workspace));
    CpuChain({from, to}, *program, workspace, context.parallel);
    return Status();
  }

  Status PlanHost(const Tensor* inputs, int input_count, int threads, size_t* workspace) const override {
    *workspace = 0;
    std::shared_ptr<BoundToShapes> bound;
    STOF_RETURN_IF_ERROR(Bind(inputs, input_count, &bound));
    const std::vector<BoundOutput>& outputs = bound->bound.outputs;
    const auto is_empty = [](const BoundOutput& output) {
      return std::find(output.dims, output.dims + output.rank, 0) != output.dims + output.rank;
    };
    if (std::all_of(outputs.begin(), outputs.end(), is_empty)) return Status();
    WorkspaceCounter counter;
    std::shared_ptr<const cpu::ChainProgram> program;
    void* unread = nullptr;
    STOF_RETURN_IF_ERROR(PrepareCpu(counter.MakeContext(threads), bound.get(), &program, &unread));
    *workspace = counter.bytes();
    return Status();
  }

 private:
  static constexpr size_t kKept = 4;

  static std::string NameOf(const void*, int input) { return "input x" + std::to_string(input); }
  Status CheckOutputCount(int count) const {
    if (count >= static_cast<int>(chain_.outputs.size())) return Status();
    return Status::Error("has " + std::to_string(count) + " outputs, but the chain gives " +
                         std::to_string(chain_.outputs.size()));
  }
  static Status CheckOutput(const Tensor& tensor, const BoundOutput& bound, int index) {
    const std::string name = "output y" + std::to_string(index);
    if (tensor.dtype != bound.dtype) {
      return Status::Error(name + " has data type " + TypeText(tensor.dtype) + ", but the chain gives " +
                           TypeText(bound.dtype));
    }
    if (tensor.rank != bound.rank || !std::equal(bound.dims, bound.dims + bound.rank, tensor.dims)) {
      return Status::Error(name + " has another shape than the chain gives");
    }
    if (tensor.data == nullptr && tensor.Elements() > 0) return Status::Error(name + " has no data");
    return Status();
  }

  // The program of a run, and its memory.
  Status PrepareCpu(const RunContext& context, BoundToShapes* bound, std::shared_ptr<const cpu::ChainProgram>* program,
                    void** workspace) const {
    const int threads = std::max(1, context.parallel.threads);
    *program = bound->Program(chain_, threads);
    return context.Allocate(CpuChainWorkspace(**program, threads), workspace);
  }

  // The chain bound to these shapes: one of the last few, or a new one.
  Status Bind(const Tensor* inputs, int input_count, std::shared_ptr<BoundToShapes>* bound) const {
    std::vector<int64_t> key;
    for (int i = 0; i < input_count; ++i) {
      key.push_back(static_cast<int64_t>(inputs[i].dtype) << 8 | inputs[i].rank);
      key.insert(key.end(), inputs[i].dims, inputs[i].dims + inputs[i].rank);
    }
    {
      const auto kept = kept_.Lock();
      for (size_t i = 0; i < kept->size(); ++i) {
        if ((*kept)[i]->key != key) continue;
        std::rotate(kept->begin(), kept->begin() + static_cast<std::ptrdiff_t>(i),
                    kept->begin() + static_cast<std::ptrdiff_t>(i) + 1);
        *bound = kept->front();
        return Status();
      }
    }
    auto made = std::make_shared<BoundToShapes>();
    made->key = std::move(key);
    STOF_RETURN_IF_ERROR(BindChain(chain_, inputs, input_count, &made->bound));
    const auto kept = kept_.Lock();
    if (kept->size() == kKept) kept->pop_back();
    kept->insert(kept->begin(), made);
    *bound = std::move(made);
    return Status();
  }

  Chain chain_;
  mutable ForkSafe<std::vector<std::shared_ptr<BoundToShapes>>> kept_;  // the most recently used one first
};

std::vector<DimRule> OutputShape(const AttributeReader& attributes, const int* ranks, int rank_count, int index) {
  Chain chain;
  if (!ParseAttributes(attributes, &chain).ok() || index >= static_cast<int>(chain.outputs.size())) return {};
  std::vector<DimRule> rules;
  for (const std::vector<int>& dim : chain.outputs[static_cast<size_t>(index)].dims) {
    DimRule rule = {-1, 0, 1, 1, 1};
    for (int which : dim) {
      const ChainAxis& axis = chain.axes[static_cast<size_t>(which)];
      if (axis.input < 0) {
        (rule.input < 0 ? rule.value : rule.times) *= axis.value;
        if (rule.value > kChainMostInteger || rule.times > kChainMostInteger) return {};
        continue;
      }
      if (axis.input >= rank_count || axis.dim >= ranks[axis.input]) return {};
      if (rule.input < 0) {
        rule = {axis.input, axis.dim, -1, rule.value, axis.over};
      } else if (rule.by_input < 0 && axis.over == 1) {
        rule.by_input = axis.input, rule.by_axis = axis.dim;
      } else {
        return {};  // a rule has room for two inputs, and for a divisor of the first
      }
    }
    rules.push_back(rule);
  }
  return rules;
}

DType OutputType(const AttributeReader& attributes, int index) {
  Chain chain;
  if (!ParseAttributes(attributes, &chain).ok() || index >= static_cast<int>(chain.outputs.size())) {
    return DType::kUndefined;
  }
  return chain.outputs[static_cast<size_t>(index)].type;
}

Status CreateChain(const AttributeReader& attributes, std::unique_ptr<Op>* op) {
  Chain chain;
  STOF_RETURN_IF_ERROR(ParseAttributes(attributes, &chain));
  *op = std::make_unique<StofChainOp>(std::move(chain));
  return Status();
}

}  // namespace

const OpDescription* ChainDescription() {
  static constexpr DType kTypes[] = {DType::kUndefined};
  static constexpr AttributeDescription kAttributes[] = {{"chain", AttributeType::kString},
                                                         {"chain_id", AttributeType::kInt}};
  static constexpr OpDescription description = [] {
    OpDescription d;
    d.name = "StofChain";
    d.is_variadic = true;
    d.outputs = kChainMostOutputs;
    d.types = kTypes;
    d.cuda_types = kTypes;
    d.output_type = OutputType;
    d.attributes = kAttributes;
    d.create = CreateChain;
    d.shape_rule = OutputShape;
    return d;
  }();
  return &description;
}

}  // namespace stof
