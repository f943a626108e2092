// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/gemm/gemm.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/contract/workspace_counter.h"
#include "plugins/core/gemm/gemm.h"
#include "plugins/core/ops/attribute_checks.h"
#include "plugins/core/ops/gemm/gemm_limits.h"
#include "plugins/core/ops/gemm/gemm_weights.h"
#include "plugins/core/ops/named_inputs.h"

namespace stof {
namespace {

constexpr int64_t kMostOnDevice = std::numeric_limits<int32_t>::max() - 256;
constexpr int kFurtherInputs = kChainMostInputs - 1;

Status ParseAttributes(const AttributeReader& attributes, GemmEpilogue* epilogue, bool* allow_bf16) {
  std::string text;
  int64_t pair = 0, id = 0;
  attributes.String("epilogue", &text);
  attributes.Int("pair", &pair);
  attributes.Int("gemm_id", &id);
  STOF_RETURN_IF_ERROR(ParseFlag(attributes, "allow_bf16", allow_bf16));
  STOF_RETURN_IF_ERROR(attributes.CheckTypes());
  return ParseGemm(text, pair, epilogue);
}

struct Sizes {
  int64_t M = 0, N = 0, K = 0;
};

class StofGemmOp final : public Op {
 public:
  StofGemmOp(GemmEpilogue epilogue, bool allow_bf16)
      : epilogue_(std::move(epilogue)), weights_(epilogue_, allow_bf16) {}

  Status Prepare(const Tensor* inputs, int input_count) override {
    STOF_RETURN_IF_ERROR(CheckInputCount(input_count));
    weights_.Pack(inputs);
    return Status();
  }
  int InputCount() const override {
    return 1 + epilogue_.weights() + std::max(0, epilogue_.chain.inputs - epilogue_.products());
  }
  bool IsTypeAllowed(int index, DType dtype, DType typed) const override {
    return index == 0 ? IsFloat(dtype) : dtype == typed;
  }

  Status InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const override {
    Sizes sizes;
    STOF_RETURN_IF_ERROR(CheckInputs(inputs, input_count, &sizes));
    if (output_count != 1) return Status::Error("has " + std::to_string(output_count) + " outputs, expected 1");
    outputs[0] = OutputOf(inputs[0], sizes);
    return Status();
  }

  Status Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
             const RunContext& context) const override {
    Tensor expected;
    Sizes sizes;
    STOF_RETURN_IF_ERROR(InferOutputs(inputs, input_count, &expected, output_count));
    STOF_RETURN_IF_ERROR(CheckInputs(inputs, input_count, &sizes));
    const Tensor& output = outputs[0];
    if (output.dtype != expected.dtype || output.rank != expected.rank ||
        !std::equal(expected.dims, expected.dims + expected.rank, output.dims)) {
      return Status::Error("the output has shape " + ShapeText(output) + " or another type, expected " +
                           ShapeText(expected) + " of a's type");
    }
    if (sizes.M == 0 || sizes.N == 0) return Status();
    STOF_RETURN_IF_ERROR(
        NamedInputs(inputs, InputCount(), {NameOf, this}).CheckData([this](int i) { return Needs(i); }));
    if (output.data == nullptr) return Status::Error("the output has no data");
    if (!context.on_cuda) return RunCpu(inputs, output, sizes, context);
    STOF_RETURN_IF_ERROR(CheckDevice(inputs, sizes));
    const CudaBackend* backend = FindCudaBackend();
    if (backend == nullptr) return Status::Error(kNoCudaKernels);
    GemmArgs args = ArgsOf(inputs, sizes);
    args.output = output.data;
    args.may_wait = may_wait_;
    return backend->gemm.run(args, context);
  }

  Status PlanDevice(const Tensor* inputs, int input_count, DevicePlan* plan) const override {
    Sizes sizes;
    STOF_RETURN_IF_ERROR(CheckInputs(inputs, input_count, &sizes));
    STOF_RETURN_IF_ERROR(CheckDevice(inputs, sizes));
    *plan = DevicePlan();
    const CudaBackend* backend = FindCudaBackend();  // engines are built without kernels, too
    if (backend != nullptr) STOF_RETURN_IF_ERROR(backend->gemm.plan_workspace(ArgsOf(inputs, sizes), &plan->workspace));
    plan->workspace = std::max(plan->workspace, kGemmWorkspace);
    return Status();
  }
  Status PlanHost(const Tensor* inputs, int input_count, int threads, size_t* workspace) const override {
    *workspace = 0;
    Sizes sizes;
    STOF_RETURN_IF_ERROR(CheckInputs(inputs, input_count, &sizes));
    if (sizes.M == 0 || sizes.N == 0) return Status();
    // Runtimes give constant weights to Prepare.
    const bool will_pack = weights_.CanPack(inputs) || weights_.IsPacked(inputs[0].dtype, sizes.N, sizes.K);
    WorkspaceCounter counter;
    CpuRun run;
    STOF_RETURN_IF_ERROR(PrepareCpu(inputs, sizes, will_pack, counter.MakeContext(threads), &run));
    *workspace = counter.bytes();
    return Status();
  }
  // A runtime that prepares nodes allows the first run of a shape to take its time.
  Status PrepareNode(const Tensor*, int, bool on_cuda, int) override {
    may_wait_ = on_cuda;
    return Status();
  }

 private:
  Status CheckInputCount(int count) const {
    if (count >= InputCount()) return Status();
    return Status::Error("has " + std::to_string(count) + " inputs, but weights and epilogue ask for " +
                         std::to_string(InputCount()));
  }
  // An input with what the epilogue calls it, for messages.
  static std::string NameOf(const void* self, int input) {
    const GemmEpilogue& epilogue = static_cast<const StofGemmOp*>(self)->epilogue_;
    const std::string name = "input " + std::to_string(input);
    if (input == 0) return name + " (a)";
    if (input <= epilogue.weights()) return name + (input == 1 ? " (b)" : " (b1)");
    return name + " (x" + std::to_string(input - 1 - epilogue.weights() + epilogue.products()) + ")";
  }
  std::string NameOf(int input) const { return NameOf(this, input); }
  // Whether the epilogue reads this input of the node.
  bool Needs(int input) const {
    if (input <= epilogue_.weights()) return true;
    const auto number = static_cast<size_t>(input - 1 - epilogue_.weights() + epilogue_.products());
    return epilogue_.reads[number] != GemmRead::kUnused;
  }

  static Tensor OutputOf(const Tensor& a, const Sizes& sizes) {
    Tensor output = a;
    output.data = nullptr;
    output.dims[a.rank - 1] = sizes.N;
    return output;
  }

  Status CheckInputs(const Tensor* inputs, int input_count, Sizes* sizes) const {
    STOF_RETURN_IF_ERROR(CheckInputCount(input_count));
    const Tensor &a = inputs[0], &b = inputs[1];
    if (!IsFloat(a.dtype)) {
      return Status::Error(NameOf(0) + " has data type " + TypeText(a.dtype) + ", expected fp32, fp16 or bf16");
    }
    if (a.rank < 2) return Status::Error(NameOf(0) + " has shape " + ShapeText(a) + ", expected [..., M, K]");
    int64_t count = 0;
    STOF_RETURN_IF_ERROR(CountGemmElements(a, "input 0 (a)", &count));
    sizes->K = a.dims[a.rank - 1];
    sizes->M = 1;
    for (int i = 0; i + 1 < a.rank; ++i) sizes->M = a.dims[i] == 0 ? 0 : sizes->M * a.dims[i];
    for (int w = 1; w <= epilogue_.weights(); ++w) {
      const std::string name = NameOf(w);
      const Tensor& weight = inputs[w];
      if (weight.dtype != a.dtype) return Status::Error(name + " is of another type than a, expected the same");
      STOF_RETURN_IF_ERROR(CountGemmElements(weight, name.c_str(), &count));
      if (weight.rank != 2 || weight.dims[0] != sizes->K || (w == 2 && weight.dims[1] != b.dims[1])) {
        return Status::Error(name + " has shape " + ShapeText(weight) +
                             ", expected [K, N] with K = " + std::to_string(sizes->K) +
                             (w == 2 ? " and N = " + std::to_string(b.dims[1]) : std::string()));
      }
    }
    sizes->N = b.dims[1];
    if (epilogue_.pair == GemmPair::kHalves) {
      if (sizes->N % 2 != 0) {
        return Status::Error("input 1 (b) has shape " + ShapeText(b) + ", expected two halves of columns");
      }
      sizes->N /= 2;
    }
    const Tensor output = OutputOf(a, *sizes);
    STOF_RETURN_IF_ERROR(CountGemmElements(output, "the output", &count));
    for (int number = epilogue_.products(); number < epilogue_.chain.inputs; ++number) {
      STOF_RETURN_IF_ERROR(CheckFurther(inputs[epilogue_.InputOf(number)], number, output, *sizes));
    }
    return Status();
  }

  Status CheckFurther(const Tensor& tensor, int number, const Tensor& output, const Sizes& sizes) const {
    const GemmRead read = epilogue_.reads[static_cast<size_t>(number)];
    if (read == GemmRead::kUnused) return Status();
    const std::string name = NameOf(epilogue_.InputOf(number));
    if (tensor.dtype == DType::kUndefined) return Status::Error(name + " is missing, but the epilogue reads it");
    if (!IsFloat(tensor.dtype)) {
      return Status::Error(name + " has data type " + TypeText(tensor.dtype) + ", expected fp32, fp16 or bf16");
    }
    int64_t count = 0;
    STOF_RETURN_IF_ERROR(CountGemmElements(tensor, name.c_str(), &count));
    const int64_t last = tensor.rank > 0 ? tensor.dims[tensor.rank - 1] : 1;
    const int lead = output.rank - 1;
    const bool leads = tensor.rank >= lead && std::equal(output.dims, output.dims + lead, tensor.dims);
    bool right = false;
    const char* expected = "";
    switch (read) {
      case GemmRead::kMatrix:
        right = last == sizes.N &&
                ((tensor.rank == output.rank && leads) || (tensor.rank == 2 && tensor.dims[0] == sizes.M));
        expected = "the output's shape ";
        break;
      case GemmRead::kColumns:
        right = tensor.rank > 0 && last == sizes.N && count == sizes.N;
        expected = "one element for each column of ";
        break;
      case GemmRead::kRows:
        right = leads && (tensor.rank == lead || (tensor.rank == output.rank && last == 1));
        expected = "one element for each row of ";
        break;
      default:
        right = count == 1;
        expected = "one element beside ";
        break;
    }
    if (right) return Status();
    return Status::Error(name + " has shape " + ShapeText(tensor) + ", expected " + expected + ShapeText(output));
  }

  // A further input without the dimensions that make no difference here.
  Tensor Flat(const Tensor& from, GemmRead read, const Sizes& sizes) const {
    Tensor tensor = from;
    tensor.rank = read == GemmRead::kMatrix ? 2 : read == GemmRead::kScalar ? 0 : 1;
    tensor.dims[0] = read == GemmRead::kColumns ? sizes.N : sizes.M;
    tensor.dims[1] = sizes.N;
    return tensor;
  }

  Status CheckDevice(const Tensor* inputs, const Sizes& sizes) const {
    if (!epilogue_.has_form) return Status::Error(epilogue_.why_not);
    const DType dtype = inputs[0].dtype;
    if (dtype != DType::kF16 && dtype != DType::kBF16) {
      return Status::Error("the CUDA kernels of StofGemm take fp16 and bf16: leave products of fp32 to the runtime");
    }
    if (std::max({sizes.M, sizes.N, sizes.K}) > kMostOnDevice) {
      return Status::Error("M, N and K must be at most " + std::to_string(kMostOnDevice) + " on CUDA");
    }
    for (int number = epilogue_.products(); number < epilogue_.chain.inputs; ++number) {
      const int input = epilogue_.InputOf(number);
      if (Needs(input) && inputs[input].dtype != dtype) {
        return Status::Error("input " + std::to_string(input) + " is of another type than a, which the CUDA kernels " +
                             "of StofGemm do not take");
      }
    }
    return Status();
  }

  GemmArgs ArgsOf(const Tensor* inputs, const Sizes& sizes) const {
    const GemmForm& form = epilogue_.form;
    GemmArgs args;
    args.M = sizes.M, args.N = sizes.N, args.K = sizes.K;
    args.dtype = inputs[0].dtype;
    args.a = inputs[0].data;
    args.b0 = inputs[1].data;
    args.stride = inputs[1].dims[1];
    if (epilogue_.pair == GemmPair::kTwo) args.b1 = inputs[2].data;
    if (epilogue_.pair == GemmPair::kHalves) {
      args.b1 = static_cast<const char*>(args.b0) + sizes.N * SizeOf(args.dtype);
    }
    if (form.swapped) std::swap(args.b0, args.b1);
    args.activation = form.activation;
    const auto at = [&](int number) { return number < 0 ? nullptr : inputs[epilogue_.InputOf(number)].data; };
    args.bias0 = at(form.bias0), args.bias1 = at(form.bias1);
    args.scale = at(form.scale), args.row = at(form.row), args.residual = at(form.residual);
    return args;
  }

  // Whether the packed kernels have this epilogue, whose operands they take in a's type alone; fills it.
  template <typename T>
  bool FindFusedEpilogue(const Tensor* inputs, CpuGemmEpilogueOf<T>* fused) const {
    if (!epilogue_.has_form) return false;
    const GemmForm& form = epilogue_.form;
    bool right = true;
    const auto at = [&](int number) -> const T* {
      if (number < 0) return nullptr;
      const Tensor& tensor = inputs[epilogue_.InputOf(number)];
      right = right && tensor.dtype == inputs[0].dtype;
      return static_cast<const T*>(tensor.data);
    };
    fused->activation = form.activation;
    fused->bias0 = at(form.bias0), fused->bias1 = at(form.bias1), fused->scale = at(form.scale);
    fused->row = at(form.row), fused->residual = at(form.residual);
    return right;
  }

  // A run on the CPU, with all its memory: matmuls of as many rows as fit the caches, then the chain over them.
  struct CpuRun {
    bool is_packed = false;
    bool is_fused = false;  // the packed kernels apply the epilogue: below, only the epilogue, rows and panel are set
    CpuGemmEpilogue fused;
    CpuGemmEpilogueOf<uint16_t> narrow;  // in its place where a is fp16 or bf16
    int64_t rows = 0;                    // of a block
    size_t floats = 0;                   // of a product of a block
    float* product = nullptr;            // those of a block, side by side
    void* panel = nullptr;               // workspace of the matmul
    // Of blocks of `rows` rows, and of a shorter last one.
    std::shared_ptr<const cpu::ChainProgram> program[2];
    void* chain_workspace[2] = {};
  };
  Status PrepareCpu(const Tensor* inputs, const Sizes& sizes, bool is_packed, const RunContext& context,
                    CpuRun* run) const {
    constexpr int64_t kBlock = int64_t{1} << 20;  // elements of a product
    const int threads = std::max(1, context.parallel.threads);
    run->is_packed = is_packed;
    const bool is_narrow = inputs[0].dtype != DType::kF32;
    run->is_fused =
        is_packed && (is_narrow ? FindFusedEpilogue(inputs, &run->narrow) : FindFusedEpilogue(inputs, &run->fused));
    run->rows = run->is_fused ? sizes.M : std::min(sizes.M, std::max<int64_t>(64, kBlock / sizes.N));
    const bool is_bf16 = weights_.is_bf16();
    const size_t panel_bytes = !is_packed ? CpuGemmWorkspace(threads)
                               : is_bf16  ? CpuBf16GemmWorkspace(threads, run->rows, sizes.K)
                                          : CpuPackedGemmWorkspace(threads);
    STOF_RETURN_IF_ERROR(context.Allocate(panel_bytes, &run->panel));
    if (run->is_fused) return Status();
    run->floats = static_cast<size_t>((run->rows * sizes.N + 15) / 16 * 16);
    void* product = nullptr;
    STOF_RETURN_IF_ERROR(context.Allocate(4 * run->floats * static_cast<size_t>(epilogue_.products()), &product));
    run->product = static_cast<float*>(product);
    Chain chain = epilogue_.chain;
    chain.outputs[0].type = inputs[0].dtype;
    const int64_t blocks[2] = {run->rows, sizes.M % run->rows};
    for (int i = 0; i < 2 && blocks[i] > 0; ++i) {
      Tensor tensors[kChainMostInputs];
      BindBlock(inputs, {blocks[i], sizes.N, sizes.K}, 0, *run, tensors);
      BoundChain bound;
      STOF_RETURN_IF_ERROR(BindChain(chain, tensors, chain.inputs, &bound));
      run->program[i] = CompileCpuChain(chain, bound, BestCpuIsa(), threads);
      STOF_RETURN_IF_ERROR(context.Allocate(CpuChainWorkspace(*run->program[i], threads), &run->chain_workspace[i]));
    }
    return Status();
  }

  // The inputs of the chain for a block of rows from m on.
  void BindBlock(const Tensor* inputs, const Sizes& block, int64_t m, const CpuRun& run, Tensor* tensors) const {
    for (int number = 0; number < epilogue_.chain.inputs; ++number) {
      Tensor& tensor = tensors[number];
      const GemmRead read = epilogue_.reads[static_cast<size_t>(number)];
      if (number < epilogue_.products()) {
        tensor.dtype = DType::kF32;
        tensor = Flat(tensor, GemmRead::kMatrix, block);
        tensor.data = run.product + static_cast<size_t>(number) * run.floats;
      } else if (read != GemmRead::kUnused) {
        tensor = Flat(inputs[epilogue_.InputOf(number)], read, block);
        const int64_t skipped = read == GemmRead::kMatrix ? m * block.N : read == GemmRead::kRows ? m : 0;
        if (skipped > 0) tensor.data = static_cast<char*>(tensor.data) + skipped * SizeOf(tensor.dtype);
      }
    }
  }

  Status RunCpu(const Tensor* inputs, const Tensor& output, const Sizes& sizes, const RunContext& context) const {
    CpuRun run;
    STOF_RETURN_IF_ERROR(
        PrepareCpu(inputs, sizes, weights_.IsPacked(inputs[0].dtype, sizes.N, sizes.K), context, &run));
    if (run.is_fused) {
      CpuPackedGemmArgs args;
      args.M = sizes.M;
      if (inputs[0].dtype == DType::kF32) {
        args.a = static_cast<const float*>(inputs[0].data);
        args.output[0] = static_cast<float*>(output.data);
        args.epilogue = &run.fused;
      } else {
        args.narrow = {inputs[0].dtype, static_cast<const uint16_t*>(inputs[0].data), &run.narrow,
                       static_cast<uint16_t*>(output.data)};
      }
      CpuPackedGemm(args, weights_.packed(), run.panel, context.parallel);
      return Status();
    }
    for (int64_t m = 0; m < sizes.M; m += run.rows) {
      const Sizes block = {std::min(run.rows, sizes.M - m), sizes.N, sizes.K};
      Multiply(inputs, block, m, run, context.parallel);
      Tensor tensors[kChainMostInputs];
      BindBlock(inputs, block, m, run, tensors);
      const void* from[kChainMostInputs] = {};
      for (int number = 0; number < epilogue_.chain.inputs; ++number) from[number] = tensors[number].data;
      void* to[kChainMostOutputs] = {static_cast<char*>(output.data) + m * sizes.N * SizeOf(output.dtype)};
      const int which = block.M == run.rows ? 0 : 1;
      CpuChain({from, to}, *run.program[which], run.chain_workspace[which], context.parallel);
    }
    return Status();
  }

  // The products of a block of rows from m on.
  void Multiply(const Tensor* inputs, const Sizes& block, int64_t m, const CpuRun& run,
                const Parallel& parallel) const {
    const int64_t size = SizeOf(inputs[0].dtype);
    const char* const a = static_cast<const char*>(inputs[0].data) + m * block.K * size;
    if (run.is_packed) {
      CpuPackedGemmArgs args;
      args.M = block.M;
      if (inputs[0].dtype == DType::kF32) {
        args.a = reinterpret_cast<const float*>(a);
      } else {
        args.narrow.dtype = inputs[0].dtype, args.narrow.a = reinterpret_cast<const uint16_t*>(a);
      }
      args.output[0] = run.product, args.output[1] = run.product + run.floats;
      if (epilogue_.form.swapped) std::swap(args.output[0], args.output[1]);
      CpuPackedGemm(args, weights_.packed(), run.panel, parallel);
      return;
    }
    const auto* b0 = static_cast<const char*>(inputs[1].data);
    const void* const weight[2] = {b0, epilogue_.pair == GemmPair::kTwo ? inputs[2].data : b0 + block.N * size};
    for (int i = 0; i < epilogue_.products(); ++i) {
      CpuGemmArgs args;
      args.M = block.M, args.N = block.N, args.K = block.K;
      args.dtype = inputs[0].dtype;
      args.a = a;
      args.b = weight[i];
      args.stride = inputs[1].dims[1];
      args.output = run.product + static_cast<size_t>(i) * run.floats;
      CpuGemm(args, BestCpuIsa(), run.panel, parallel);
    }
  }

  const GemmEpilogue epilogue_;
  GemmWeights weights_;  // where they are constant
  bool may_wait_ = false;
};

std::vector<DimRule> OutputShape(const AttributeReader& attributes, const int* ranks, int rank_count, int index) {
  int64_t pair = 0;
  attributes.Int("pair", &pair);
  if (index != 0 || rank_count < 2 || ranks[0] < 2 || ranks[0] > kMaxRank || ranks[1] != 2) return {};
  std::vector<DimRule> rules;
  for (int i = 0; i + 1 < ranks[0]; ++i) rules.push_back({0, i});
  rules.push_back({1, 1, -1, 1, pair == 1 ? 2 : 1});
  return rules;
}

Status CreateGemm(const AttributeReader& attributes, std::unique_ptr<Op>* op) {
  GemmEpilogue epilogue;
  bool allow_bf16 = false;
  STOF_RETURN_IF_ERROR(ParseAttributes(attributes, &epilogue, &allow_bf16));
  *op = std::make_unique<StofGemmOp>(std::move(epilogue), allow_bf16);
  return Status();
}

}  // namespace

const OpDescription* GemmDescription() {
  static constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
  static constexpr DType kCudaTypes[] = {DType::kF16, DType::kBF16};
  static constexpr AttributeDescription kAttributes[] = {{"epilogue", AttributeType::kString},
                                                         {"pair", AttributeType::kInt},
                                                         {"gemm_id", AttributeType::kInt},
                                                         {"allow_bf16", AttributeType::kInt, false}};
  static constexpr OpDescription description = [] {
    OpDescription d;
    d.name = "StofGemm";
    d.typed_inputs = 2;
    d.optional_inputs = 1 + kFurtherInputs;
    d.types = kTypes;
    d.cuda_types = kCudaTypes;
    d.attributes = kAttributes;
    d.create = CreateGemm;
    d.shape_rule = OutputShape;
    return d;
  }();
  return &description;
}

}  // namespace stof
