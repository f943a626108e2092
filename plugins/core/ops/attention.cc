// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "plugins/core/block_mask_cache.h"
#include "plugins/core/cuda_backend.h"

namespace stof {
namespace {

constexpr int kTypedInputs = 3;
constexpr int64_t kMaxHeadSize = 256;
constexpr int64_t kMaxHeads = 65536;
// So few query rows are evaluated directly: in decode T grows with every step, and no entry would be used twice.
constexpr int64_t kUncachedRows = 8;
// An address that stands for any where nothing is read: aligned as memory of devices is.
constexpr uintptr_t kSomewhere = uintptr_t{1} << 20;
constexpr int64_t kUsualLength = 1024;  // where none is known
constexpr char kNoKernels[] = "this build has no CUDA kernels";
constexpr const char* kTensorNames[] = {"query", "key", "value", "output"};
constexpr const char* kLayoutNames[] = {"BHSD", "BSHD", "BSN"};

std::string ShapeText(const Tensor& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(tensor.dims[i]);
  return text + "]";
}

// Sizes of one tensor in problem terms: batch, heads, positions, head size, and the strides that reach them from the
// first element that is meant.
struct Sized {
  int64_t b = 0, heads = 0, s = 0, d = 0;
  Strides stride;
  int64_t first = 0;  // elements before it
};

Status Measure(const Tensor& tensor, TensorLayout layout, const char* name, int64_t heads, const PackedHeads& packed,
               Sized* sized) {
  const int rank = layout == TensorLayout::kBSN ? 3 : 4;
  if (tensor.rank != rank) {
    return Status::Error(std::string(name) + " has shape " + ShapeText(tensor) + ", expected rank " +
                         std::to_string(rank) + " for layout " + kLayoutNames[static_cast<int>(layout)]);
  }
  const int64_t* dims = tensor.dims;
  Sized& r = *sized;
  r.b = dims[0];
  int64_t total = 0;  // heads that the tensor has
  if (layout == TensorLayout::kBSN) {
    total = packed.total > 0 ? packed.total : heads;
    if (heads < 1 || dims[2] % total != 0) {
      return Status::Error(std::string(name) + " has shape " + ShapeText(tensor) +
                           ", expected a last dimension that its number of heads (" + std::to_string(total) +
                           ") divides");
    }
    r.s = dims[1];
    r.heads = heads;
    r.d = dims[2] / total;
    r.first = packed.first * r.d;
  } else {
    r.heads = dims[layout == TensorLayout::kBHSD ? 1 : 2];
    r.s = dims[layout == TensorLayout::kBHSD ? 2 : 1];
    r.d = dims[3];
    if (heads > 0 && r.heads != heads) {
      return Status::Error(std::string(name) + " has shape " + ShapeText(tensor) + ", expected " +
                           std::to_string(heads) + " heads");
    }
    if (packed.total > 0 && r.heads != packed.total) {
      return Status::Error(std::string(name) + " has shape " + ShapeText(tensor) + ", expected " +
                           std::to_string(packed.total) + " heads, as attribute packed says");
    }
    total = r.heads;
  }
  // Limits come later; here nothing may overflow, whatever a runtime claims.
  int64_t elements = std::max<int64_t>(r.d, 1);
  for (const int64_t size : {total, r.s}) {
    if (__builtin_mul_overflow(elements, std::max<int64_t>(size, 1), &elements)) {
      return Status::Error(std::string(name) + " has shape " + ShapeText(tensor) + ", which is too large");
    }
  }
  r.stride.b = total * r.s * r.d;
  r.stride.h = layout == TensorLayout::kBHSD ? r.s * r.d : r.d;
  r.stride.s = layout == TensorLayout::kBHSD ? r.d : total * r.d;
  return Status();
}

// Where the heads that are meant begin; a tensor without elements may have no data.
const void* Begin(const Tensor& tensor, const Sized& sized) {
  if (tensor.data == nullptr || sized.b == 0 || sized.s == 0) return tensor.data;
  return static_cast<const char*>(tensor.data) + sized.first * SizeOf(tensor.dtype);
}

void SetOutput(const AttentionArgs& args, TensorLayout layout, Tensor* output) {
  output->dtype = args.dtype;
  output->rank = layout == TensorLayout::kBSN ? 3 : 4;
  const int64_t bhsd[] = {args.B, args.H, args.S, args.Dv};
  const int64_t bshd[] = {args.B, args.S, args.H, args.Dv};
  const int64_t bsn[] = {args.B, args.S, args.H * args.Dv, 0};
  const int64_t* dims = layout == TensorLayout::kBHSD ? bhsd : layout == TensorLayout::kBSHD ? bshd : bsn;
  std::copy(dims, dims + output->rank, output->dims);
}

Status BindBias(const Tensor& bias, AttentionArgs* args) {
  if (bias.dtype != args->dtype && bias.dtype != DType::kF32) {
    return Status::Error("bias has data type " + std::to_string(static_cast<int>(bias.dtype)) +
                         ", expected that of query or fp32");
  }
  const int64_t want[] = {args->B, args->H, args->S, args->T};
  int64_t* strides[] = {&args->bias_stride_b, &args->bias_stride_h, &args->bias_stride_q, &args->bias_stride_k};
  if (bias.rank > 4) return Status::Error("bias has shape " + ShapeText(bias) + ", expected rank 4 or less");
  int64_t stride = 1;
  for (int i = 0; i < bias.rank; ++i) {
    const int axis = 3 - i;
    const int64_t dim = bias.dims[bias.rank - 1 - i];
    if (dim != 1 && dim != want[axis]) {
      return Status::Error("bias has shape " + ShapeText(bias) + ", expected one that broadcasts to [" +
                           std::to_string(want[0]) + ", " + std::to_string(want[1]) + ", " + std::to_string(want[2]) +
                           ", " + std::to_string(want[3]) + "]");
    }
    *strides[axis] = dim == 1 ? 0 : stride;
    if (__builtin_mul_overflow(stride, dim, &stride)) {
      return Status::Error("bias has shape " + ShapeText(bias) + ", which is too large");
    }
  }
  args->bias = bias.data;
  args->bias_dtype = bias.dtype;
  return Status();
}

Status BindRelativeBias(const Tensor& bias, AttentionArgs* args) {
  if (bias.dtype != DType::kF32) {
    return Status::Error("relative_bias has data type " + std::to_string(static_cast<int>(bias.dtype)) +
                         ", expected fp32");
  }
  if (bias.rank != 2 || (bias.dims[0] != 1 && bias.dims[0] != args->H) || bias.dims[1] % 2 != 1) {
    return Status::Error("relative_bias has shape " + ShapeText(bias) + ", expected [1 or " + std::to_string(args->H) +
                         ", an odd number]");
  }
  args->relative_bias = static_cast<const float*>(bias.data);
  args->relative_bias_size = bias.dims[1];
  args->relative_bias_stride_h = bias.dims[0] == 1 ? 0 : bias.dims[1];
  return Status();
}

Status BindSink(const Tensor& sink, AttentionArgs* args) {
  if (sink.dtype != args->dtype && sink.dtype != DType::kF32) {
    return Status::Error("sink has data type " + std::to_string(static_cast<int>(sink.dtype)) +
                         ", expected that of query or fp32");
  }
  if (sink.rank != 1 || sink.dims[0] != args->H) {
    return Status::Error("sink has shape " + ShapeText(sink) + ", expected [" + std::to_string(args->H) + "]");
  }
  args->sink = sink.data;
  args->sink_dtype = sink.dtype;
  return Status();
}

template <typename T, typename NonZero>
void ToBytes(const void* data, int64_t count, uint8_t* bytes, NonZero non_zero) {
  const T* values = static_cast<const T*>(data);
  for (int64_t i = 0; i < count; ++i) bytes[i] = non_zero(values[i]) ? 1 : 0;
}

bool IsPadType(DType dtype) {
  static constexpr DType kTypes[] = {DType::kBool, DType::kU8,  DType::kI8, DType::kI32,
                                     DType::kI64,  DType::kF32, DType::kF16};
  return std::find(std::begin(kTypes), std::end(kTypes), dtype) != std::end(kTypes);
}

Status CheckPad(const Tensor& pad, int64_t B, int64_t T) {
  if (pad.rank != 2 || (pad.dims[0] != B && pad.dims[0] != 1) || pad.dims[1] != T) {
    return Status::Error("pad has shape " + ShapeText(pad) + ", expected [" + std::to_string(B) + ", " +
                         std::to_string(T) + "]");
  }
  if (!IsPadType(pad.dtype)) {
    return Status::Error("pad has data type " + std::to_string(static_cast<int>(pad.dtype)) +
                         ", expected bool, uint8, int8, int32, int64, fp32 or fp16");
  }
  return Status();
}

// pad [B or 1, T] of any legal type as bytes [B, T].
Status PadBytes(const Tensor& pad, int64_t B, int64_t T, const RunContext& context, uint8_t** bytes) {
  STOF_RETURN_IF_ERROR(CheckPad(pad, B, T));
  *bytes = static_cast<uint8_t*>(context.allocate(context.self, static_cast<size_t>(std::max<int64_t>(1, B * T))));
  if (*bytes == nullptr) return Status::Error("out of memory for pad");
  const int64_t count = pad.dims[0] * T;
  const auto plain = [](auto value) { return value != 0; };
  switch (pad.dtype) {
    case DType::kBool:
    case DType::kU8:
    case DType::kI8:
      ToBytes<uint8_t>(pad.data, count, *bytes, plain);
      break;
    case DType::kI32:
      ToBytes<int32_t>(pad.data, count, *bytes, plain);
      break;
    case DType::kI64:
      ToBytes<int64_t>(pad.data, count, *bytes, plain);
      break;
    case DType::kF32:
      ToBytes<float>(pad.data, count, *bytes, plain);
      break;
    case DType::kF16:
      ToBytes<uint16_t>(pad.data, count, *bytes, [](uint16_t x) { return (x & 0x7fff) != 0; });
      break;
    default:
      break;
  }
  for (int64_t b = 1; b < B && pad.dims[0] == 1; ++b) std::memcpy(*bytes + b * T, *bytes, static_cast<size_t>(T));
  return Status();
}

bool ReadsPad(const MaskExpr& expr) {
  const ExprOperands& operands = expr.operands();
  return std::any_of(operands.begin(), operands.end(), [](const auto& operand) { return operand->name == "pad"; });
}

// The second output.
void SetLse(const AttentionArgs& args, Tensor* lse) {
  lse->dtype = DType::kF32;
  lse->rank = 3;
  lse->dims[0] = args.B, lse->dims[1] = args.H, lse->dims[2] = args.S;
}

Status CheckOutput(const char* name, const Tensor& found, const Tensor& expected) {
  if (found.dtype == expected.dtype && found.rank == expected.rank &&
      std::equal(expected.dims, expected.dims + expected.rank, found.dims)) {
    return Status();
  }
  return Status::Error(std::string(name) + " has shape " + ShapeText(found) + " and data type " +
                       std::to_string(static_cast<int>(found.dtype)) + ", expected " + ShapeText(expected) + " and " +
                       std::to_string(static_cast<int>(expected.dtype)));
}

class AttentionOp final : public Op {
 public:
  explicit AttentionOp(AttentionAttributes attributes) : attributes_(std::move(attributes)), mask_(attributes_.mask) {}

  Status Prepare(const Tensor* inputs, int input_count) override {
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
    return mask_.Fix(tables);
  }

  Status InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const override {
    STOF_RETURN_IF_ERROR(CheckOutputCount(output_count));
    AttentionArgs args;
    STOF_RETURN_IF_ERROR(Bind(inputs, input_count, &args));
    SetOutput(args, attributes_.layout[3], &outputs[0]);
    if (output_count > 1) SetLse(args, &outputs[1]);
    return Status();
  }

  Status Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
             const RunContext& context) const override {
    Problem problem;
    STOF_RETURN_IF_ERROR(Bind(inputs, input_count, &problem.args));
    AttentionArgs& args = problem.args;
    Tensor expected;
    STOF_RETURN_IF_ERROR(CheckOutputCount(output_count));
    SetOutput(args, attributes_.layout[3], &expected);
    STOF_RETURN_IF_ERROR(CheckOutput("output", outputs[0], expected));
    if (output_count > 1) {
      Tensor lse;
      SetLse(args, &lse);
      STOF_RETURN_IF_ERROR(CheckOutput("lse", outputs[1], lse));
      args.lse = static_cast<float*>(outputs[1].data);
      args.lse_stride_b = args.H * args.S, args.lse_stride_h = args.S;
    }
    STOF_RETURN_IF_ERROR(Complete(inputs, context.on_cuda, &problem));
    if (expected.Elements() == 0) return Status();
    STOF_RETURN_IF_ERROR(CheckData(inputs, outputs[0], context.on_cuda));
    Tables& given = problem.given;
    const Tensor* pad = nullptr;
    STOF_RETURN_IF_ERROR(BindOperands(problem.mask->parts, &given, context, &args, &pad));
    args.output = outputs[0].data;
    args.query_position = problem.sizes.P;
    problem.Split();
    const std::shared_ptr<const AttentionMask>& mask = problem.mask;
    const ExprSizes& sizes = problem.sizes;
    if (context.on_cuda) {
      const CudaBackend* backend = FindCudaBackend();
      if (backend == nullptr) return Status::Error(kNoKernels);
      RunContext own = context;
      if (own.keeper == nullptr) own.keeper = &keeper_;
      return backend->attention(args, pad, *mask, sizes, given, own);
    }
    if (args.T == 0) args.empty_rows = EmptyRows::kZero;  // nothing is summed, whatever other rows without a key give
    std::unique_ptr<BoundDynamicMask> dynamic;
    if (args.T > 0 && !mask->parts.dynamic.empty()) {
      STOF_RETURN_IF_ERROR(BoundDynamicMask::Make(mask->parts.dynamic, sizes, given, &dynamic));
      args.dynamic = dynamic->view();
    }
    STOF_RETURN_IF_ERROR(Launch(*mask, sizes, ready_, context, &args));
    return dynamic == nullptr ? Status() : dynamic->status();
  }

  int InputCount() const override { return kTypedInputs + static_cast<int>(attributes_.operands.size()); }
  int OutputCount() const override { return attributes_.lse ? 2 : 1; }

  bool Takes(int index, DType dtype, DType typed) const override {
    if (index < 0 || index >= InputCount()) return false;
    if (index < kTypedInputs) return dtype == typed;
    const std::string& role = attributes_.operands[static_cast<size_t>(index - kTypedInputs)];
    if (role == "unused") return true;
    if (role == "pad") return IsPadType(dtype);
    if (role == "bias" || role == "sink") return dtype == typed || dtype == DType::kF32;
    if (role == "relative_bias") return dtype == DType::kF32;
    const bool integer = dtype == DType::kI32 || dtype == DType::kI64;
    return integer || (IsTableName(role) && (dtype == DType::kBool || dtype == DType::kU8));
  }

  Status PlanDevice(const Tensor* inputs, int input_count, DevicePlan* plan) const override {
    Problem problem;
    const Tensor* pad = nullptr;
    STOF_RETURN_IF_ERROR(BindForDevice(inputs, input_count, &problem, &pad));
    const MaskExpr& fixed = problem.mask->parts.fixed;
    if (!fixed.empty()) {
      std::vector<ExprBinding> none(fixed.operands().size());
      STOF_RETURN_IF_ERROR(fixed.Check(problem.sizes, &none));
    }
    STOF_RETURN_IF_ERROR(
        PlanCudaAttention(problem.args, pad != nullptr, *problem.mask, problem.sizes, problem.given, &plan->workspace));
    // Runs of other lengths may come apart by remainders.
    const int64_t m = problem.mask->modulus;
    if (problem.args.S / m >= kLeastOfResidue && problem.args.T / m >= kLeastOfResidue && m > 1) {
      AttentionArgs parts = problem.args;
      parts.B *= m, parts.S = (parts.S + m - 1) / m, parts.T = (parts.T + m - 1) / m;
      size_t workspace = 0;
      const ExprSizes sizes = {parts.B, parts.H, parts.S, parts.T, 0};
      if (PlanCudaAttention(parts, false, *problem.mask->of_residue, sizes, problem.given, &workspace).ok()) {
        plan->workspace = std::max(plan->workspace, workspace);
      }
    }
    // In fp32 keys and values are split into halves first.
    plan->several = pad != nullptr || !problem.mask->parts.dynamic.empty() || problem.args.dtype == DType::kF32;
    const CudaBackend* backend = FindCudaBackend();
    plan->kernels = backend == nullptr ? 0 : backend->kernels(problem.args);
    return Status();
  }

  Status ReadyDevice(const Tensor* inputs, int input_count, int kernel) const override {
    return ReadyDeviceFor(std::vector<Tensor>(inputs, inputs + input_count), kernel, true, false);
  }

  Status ReadyNode(const Tensor* inputs, int input_count, bool on_cuda, int threads) override {
    if (!mask_.fixed()) return Status();
    const std::vector<Tensor> given(inputs, inputs + input_count);
    if (AllKnown(given)) {
      return on_cuda ? ReadyDeviceFor(given, 0, true, true) : ReadyHost(inputs, input_count, threads);
    }
    for (const int64_t length : {kUsualLength, int64_t{1}}) {
      std::vector<Tensor> sized = given;
      if (!on_cuda || !Suppose(length, &sized)) return Status();
      STOF_RETURN_IF_ERROR(ReadyDeviceFor(sized, 0, false, false));
    }
    return Status();
  }

 private:
  // One run's inputs, in terms of the kernels.
  struct Problem {
    AttentionArgs args;
    Tables given;  // operands by role
    std::shared_ptr<const AttentionMask> mask;
    ExprSizes sizes;

    // Into parts that its mask keeps from each other, if it does.
    bool Split() {
      if (!SplitByResidue(*mask, &args, &sizes)) return false;
      mask = mask->of_residue;
      return true;
    }
  };

  Status CheckOutputCount(int count) const {
    if (count >= 1 && count <= OutputCount()) return Status();
    return Status::Error("has " + std::to_string(count) + " outputs, expected " +
                         (attributes_.lse ? "output and lse" : "output alone: attribute results asks for no other"));
  }

  // Graphs that no schema was checked for, and callers of the C ABI, may leave something out. On a device nobody reads
  // the tables of a mask, which were given before. An lse without data is one that nobody wants.
  Status CheckData(const Tensor* inputs, const Tensor& output, bool on_cuda) const {
    const auto missing = [](const Tensor& tensor) {
      return tensor.data == nullptr &&
             std::all_of(tensor.dims, tensor.dims + tensor.rank, [](int64_t dim) { return dim != 0; });
    };
    for (int i = 0; i < InputCount(); ++i) {
      if (!missing(inputs[i]) || inputs[i].dtype == DType::kUndefined) continue;
      const std::string role =
          i < kTypedInputs ? kTensorNames[i] : attributes_.operands[static_cast<size_t>(i - kTypedInputs)];
      if (on_cuda && mask_.fixed() && IsTableName(role)) continue;
      if (role != "unused") return Status::Error(role + " has no data");
    }
    return output.data == nullptr ? Status::Error("output has no data") : Status();
  }

  // Operands, mask and sizes of a problem with bound arguments.
  Status Complete(const Tensor* inputs, bool on_cuda, Problem* problem) const {
    for (size_t i = 0; i < attributes_.operands.size(); ++i) {
      problem->given.emplace_back(attributes_.operands[i], inputs[kTypedInputs + i]);
    }
    if (on_cuda && !mask_.fixed()) {
      return Status::Error("the tables of the mask are no constants, which the CUDA kernels need them to be");
    }
    STOF_RETURN_IF_ERROR(mask_.Get(problem->given, &problem->mask));
    const AttentionArgs& args = problem->args;
    problem->sizes = {args.B, args.H, args.S, args.T, attributes_.query_offset ? args.T - args.S : 0};
    if (problem->sizes.P < 0) {
      return Status::Error("query_offset is 1 with S = " + std::to_string(args.S) + " > T = " + std::to_string(args.T));
    }
    return Status();
  }

  // The block mask of the one shape that a node with fixed shapes has, made with the node.
  struct ReadyMask {
    ExprSizes sizes;
    CpuAttentionConfig config;
    std::shared_ptr<const BlockMask> mask;
    uint64_t hash = 0;  // of the expression: a part's, where the mask comes apart
    bool Suits(uint64_t expression, const ExprSizes& s, const CpuAttentionConfig& c) const {
      return mask != nullptr && hash == expression && config.m == c.m && config.n == c.n && sizes.B == s.B &&
             sizes.H == s.H && sizes.S == s.S && sizes.T == s.T && sizes.P == s.P;
    }
  };

  // Of a node's declared sizes, for which no tensor has to exist: more tables than these are left to the run, and, on
  // the CPU, more tiles of all tables times nodes of the expression (some seconds where every tile is evaluated).
  static constexpr int64_t kMostReadyTables = int64_t{1} << 20;
  static constexpr int64_t kMostReadyWork = int64_t{1} << 20;

  Status ReadyHost(const Tensor* inputs, int input_count, int threads) {
    Problem problem;
    STOF_RETURN_IF_ERROR(Bind(inputs, input_count, &problem.args));
    STOF_RETURN_IF_ERROR(Complete(inputs, false, &problem));
    if (attributes_.operands.empty() && !attributes_.lse) problem.Split();
    const AttentionArgs& args = problem.args;
    if (problem.mask->parts.fixed.empty() || args.B * args.H * args.T == 0 || args.S <= kUncachedRows ||
        args.B * args.H > kMostReadyTables) {
      return Status();
    }
    const CpuAttentionConfig config = ChooseCpuAttention(args, std::max(1, threads));
    const MaskExpr& fixed = problem.mask->parts.fixed;
    const int64_t tables = (fixed.Uses(ExprOp::kB) ? args.B : 1) * (fixed.Uses(ExprOp::kH) ? args.H : 1);
    const int64_t tiles = ((args.S + config.m - 1) / config.m) * ((args.T + config.n - 1) / config.n);  // to 2^34
    if (tiles > kMostReadyWork || tables * tiles * static_cast<int64_t>(fixed.nodes().size()) > kMostReadyWork) {
      return Status();
    }
    ready_.sizes = problem.sizes;
    ready_.hash = problem.mask->fixed_hash;
    ready_.config = config;
    return BlockMaskCache::Global().Get(problem.mask->parts.fixed, problem.mask->fixed_hash, problem.sizes,
                                        ready_.config.m, ready_.config.n, &ready_.mask);
  }

  static bool AllKnown(const std::vector<Tensor>& tensors) {
    return std::all_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) {
      return std::all_of(tensor.dims, tensor.dims + tensor.rank, [](int64_t dim) { return dim >= 0; });
    });
  }

  // Puts sizes that are usual in the place of unknown ones: one batch, `length` queries, 1024 keys. False where head
  // sizes or numbers of heads are missing, too, or a rank is not what it should be.
  bool Suppose(int64_t length, std::vector<Tensor>* tensors) const {
    const auto set = [](Tensor* tensor, int axis, int64_t value) {
      if (axis < tensor->rank && tensor->dims[axis] < 0) tensor->dims[axis] = value;
      return axis < tensor->rank ? tensor->dims[axis] : value;
    };
    int64_t lengths[kTypedInputs] = {length, kUsualLength, kUsualLength}, batch = 1;
    for (size_t i = 0; i < tensors->size(); ++i) {
      Tensor& tensor = (*tensors)[i];
      if (tensor.rank > 0 && tensor.dims[0] < 0) tensor.dims[0] = i < kTypedInputs ? batch : 1;
      if (i < kTypedInputs) {
        if (i == 0) batch = tensor.rank > 0 ? tensor.dims[0] : 1;
        lengths[i] = set(&tensor, attributes_.layout[i] == TensorLayout::kBHSD ? 2 : 1, lengths[i]);
        if (i == 1 && attributes_.query_offset) lengths[1] = std::max(lengths[1], lengths[0]);
        continue;
      }
      const std::string& role = attributes_.operands[i - kTypedInputs];
      if (role == "pad" || role == "segment_k") set(&tensor, 1, lengths[1]);
      if (role == "segment_q") set(&tensor, 1, lengths[0]);
      if (role == "bias") {
        for (int axis = 1; axis < tensor.rank; ++axis) set(&tensor, axis, 1);
      }
    }
    return AllKnown(*tensors);
  }

  // known: these are a run's sizes, else only of its kind. keep: the mask, as long as the node.
  Status ReadyDeviceFor(std::vector<Tensor> inputs, int kernel, bool known, bool keep) const {
    for (Tensor& tensor : inputs) tensor.data = reinterpret_cast<void*>(kSomewhere);
    Problem problem;
    const Tensor* pad = nullptr;
    STOF_RETURN_IF_ERROR(BindForDevice(inputs.data(), static_cast<int>(inputs.size()), &problem, &pad));
    const CudaBackend* backend = FindCudaBackend();
    if (backend == nullptr) return Status::Error(kNoKernels);
    AttentionArgs& args = problem.args;
    if (args.B == 0 || args.H == 0 || args.S == 0 || args.T == 0) return Status();  // nothing is computed
    if (args.B * args.H > kMostReadyTables) return Status();
    args.output = reinterpret_cast<void*>(kSomewhere);
    if (known && !attributes_.lse) problem.Split();
    RunContext context;
    context.on_cuda = true;
    context.kernel = kernel;
    if (keep) context.keeper = &keeper_;
    if (known) return backend->ready(args, pad, *problem.mask, problem.sizes, problem.given, context);
    // Without the part of the mask that would be made for sizes that no run may have.
    AttentionMask mask;
    mask.parts.dynamic = problem.mask->parts.dynamic;
    mask.parts.pad = problem.mask->parts.pad;
    const int kernels = args.S > 1 ? backend->kernels(args) : 0;
    for (context.kernel = kernels > 0 ? 1 : 0; context.kernel <= kernels; ++context.kernel) {
      STOF_RETURN_IF_ERROR(backend->ready(args, pad, mask, problem.sizes, problem.given, context));
    }
    return Status();
  }

  // A run on a device, by types and shapes alone.
  Status BindForDevice(const Tensor* inputs, int input_count, Problem* problem, const Tensor** pad) const {
    STOF_RETURN_IF_ERROR(Bind(inputs, input_count, &problem->args));
    STOF_RETURN_IF_ERROR(Complete(inputs, true, problem));
    RunContext context;
    context.on_cuda = true;
    STOF_RETURN_IF_ERROR(BindOperands(problem->mask->parts, &problem->given, context, &problem->args, pad));
    problem->args.query_position = problem->sizes.P;
    return Status();
  }

  // Shapes, types and strides of query, key and value.
  Status Bind(const Tensor* inputs, int input_count, AttentionArgs* args) const {
    if (input_count != kTypedInputs + static_cast<int>(attributes_.operands.size())) {
      return Status::Error("has " + std::to_string(input_count) + " inputs, expected " +
                           std::to_string(kTypedInputs + attributes_.operands.size()));
    }
    const DType dtype = inputs[0].dtype;
    if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
      return Status::Error("query has data type " + std::to_string(static_cast<int>(dtype)) +
                           ", expected fp32, fp16 or bf16");
    }
    Sized sized[3];
    for (int i = 0; i < 3; ++i) {
      if (inputs[i].dtype != dtype) {
        return Status::Error(std::string(kTensorNames[i]) + " has data type " +
                             std::to_string(static_cast<int>(inputs[i].dtype)) + ", expected that of query, " +
                             std::to_string(static_cast<int>(dtype)));
      }
      const int64_t heads = i == 0 ? attributes_.num_heads : attributes_.kv_num_heads;
      STOF_RETURN_IF_ERROR(
          Measure(inputs[i], attributes_.layout[i], kTensorNames[i], heads, attributes_.packed[i], &sized[i]));
    }
    const Sized& q = sized[0];
    const Sized& k = sized[1];
    const Sized& v = sized[2];
    const auto shapes = [&] {
      return "query " + ShapeText(inputs[0]) + ", key " + ShapeText(inputs[1]) + ", value " + ShapeText(inputs[2]);
    };
    if (k.b != q.b || v.b != q.b) return Status::Error("batch sizes differ: " + shapes());
    if (k.heads != v.heads) return Status::Error("key and value differ in heads: " + shapes());
    if (k.s != v.s) return Status::Error("key and value differ in length: " + shapes());
    if (k.d != q.d) return Status::Error("query and key differ in head size: " + shapes());
    if (q.heads > 0 && (k.heads < 1 || q.heads % k.heads != 0)) {
      return Status::Error("the number of query heads is no multiple of that of key heads: " + shapes());
    }
    if (q.d < 1 || q.d > kMaxHeadSize || v.d < 1 || v.d > kMaxHeadSize) {
      return Status::Error("head sizes must be 1 to 256: " + shapes());
    }
    if (q.s > MaskExpr::kMaxSize || k.s > MaskExpr::kMaxSize) {
      return Status::Error("lengths must be at most 2^22: " + shapes());
    }
    // So that no product of sizes overflows: an empty tensor may have any batch size at no cost.
    if (q.b > MaskExpr::kMaxSize || q.heads > kMaxHeads || k.heads > kMaxHeads) {
      return Status::Error("batch size must be at most 2^22 and heads at most 65536: " + shapes());
    }
    args->B = q.b;
    args->H = q.heads;
    args->G = k.heads;
    args->S = q.s;
    args->T = k.s;
    args->D = q.d;
    args->Dv = v.d;
    args->dtype = dtype;
    args->query = Begin(inputs[0], q);
    args->key = Begin(inputs[1], k);
    args->value = Begin(inputs[2], v);
    args->query_stride = q.stride;
    args->key_stride = k.stride;
    args->value_stride = v.stride;
    const bool bhsd = attributes_.layout[3] == TensorLayout::kBHSD;
    args->output_stride.b = args->H * args->S * args->Dv;
    args->output_stride.h = bhsd ? args->S * args->Dv : args->Dv;
    args->output_stride.s = bhsd ? args->Dv : args->H * args->Dv;
    args->scale = attributes_.has_scale ? attributes_.scale : 1.0f / std::sqrt(static_cast<float>(args->D));
    args->softcap = attributes_.softcap;
    args->empty_rows = attributes_.empty_rows;
    args->allow_tf32 = attributes_.allow_tf32;
    args->kernel = attributes_.kernel.c_str();
    return Status();
  }

  // Biases, sink and pad; on the CPU, pad is replaced in `given` by its bytes, which a dynamic part may read too; on a
  // device it stays what it is.
  Status BindOperands(const MaskParts& parts, std::vector<std::pair<std::string, Tensor>>* given,
                      const RunContext& context, AttentionArgs* args, const Tensor** pad) const {
    bool pad_seen = false;
    for (auto& [role, tensor] : *given) {
      if (role == "unused") continue;
      if (tensor.dtype == DType::kUndefined) return Status::Error("operand " + role + " is missing");
      if (role == "bias") STOF_RETURN_IF_ERROR(BindBias(tensor, args));
      if (role == "relative_bias") STOF_RETURN_IF_ERROR(BindRelativeBias(tensor, args));
      if (role == "sink") STOF_RETURN_IF_ERROR(BindSink(tensor, args));
      if (role != "pad") continue;
      pad_seen = true;
      if (context.on_cuda) {
        STOF_RETURN_IF_ERROR(CheckPad(tensor, args->B, args->T));
        if (tensor.dtype == DType::kI8) tensor.dtype = DType::kU8;  // only whether it is 0 counts
        if (parts.pad) *pad = &tensor;
        continue;
      }
      uint8_t* bytes = nullptr;
      STOF_RETURN_IF_ERROR(PadBytes(tensor, args->B, args->T, context, &bytes));
      tensor.data = bytes;
      tensor.dtype = DType::kBool;
      tensor.dims[0] = args->B;
      if (parts.pad) args->pad = bytes;
    }
    if (pad_seen && !parts.pad && !ReadsPad(parts.dynamic)) {
      return Status::Error(
          "operand pad is given, but the mask does not read pad[b, k]: add it, or name the role unused");
    }
    if (parts.pad && !pad_seen) return Status::Error("the mask reads pad, but no operand has that role");
    return Status();
  }

  static Status Launch(const AttentionMask& mask, const ExprSizes& sizes, const ReadyMask& ready,
                       const RunContext& context, AttentionArgs* args) {
    const int threads = std::max(1, context.parallel.threads);
    CpuAttentionConfig config = ChooseCpuAttention(*args, threads);
    std::shared_ptr<const BlockMask> shared;
    BlockMask direct;
    if (args->T > 0 && !mask.parts.fixed.empty()) {
      if (args->S <= kUncachedRows) {
        STOF_RETURN_IF_ERROR(BuildBlockMask(mask.parts.fixed, sizes, config.m, config.n, &direct));
        args->mask = &direct;
      } else if (ready.Suits(mask.fixed_hash, sizes, config)) {
        args->mask = ready.mask.get();
      } else {
        STOF_RETURN_IF_ERROR(
            BlockMaskCache::Global().Get(mask.parts.fixed, mask.fixed_hash, sizes, config.m, config.n, &shared));
        args->mask = shared.get();
      }
    }
    const size_t bytes = CpuAttentionWorkspace(*args, config, threads);
    void* workspace = bytes == 0 ? nullptr : context.allocate(context.self, bytes);
    if (bytes != 0 && workspace == nullptr) {
      return Status::Error("no memory for a workspace of " + std::to_string(bytes) + " bytes");
    }
    return CpuAttention(*args, config, workspace, context.parallel);
  }

  AttentionAttributes attributes_;
  AttentionMaskSource mask_;
  ReadyMask ready_;
  mutable Keeper keeper_;
};

std::vector<DimRule> OutputShape(const AttributeReader& attributes, const int* ranks, int rank_count, int index) {
  AttentionAttributes parsed;
  if (rank_count < 3 || !ParseAttention(attributes, &parsed).ok()) return {};
  for (int i = 0; i < 3; ++i) {
    if (ranks[i] != (parsed.layout[i] == TensorLayout::kBSN ? 3 : 4)) return {};
  }
  const TensorLayout query = parsed.layout[0];
  const DimRule batch = {0, 0, -1};
  const DimRule length = {0, query == TensorLayout::kBHSD ? 2 : 1, -1};
  DimRule heads = {-1, 0, parsed.num_heads > 0 ? parsed.num_heads : -1};
  if (query != TensorLayout::kBSN) heads = {0, query == TensorLayout::kBHSD ? 1 : 2, -1};
  if (index == 1) return parsed.lse ? std::vector<DimRule>{batch, heads, length} : std::vector<DimRule>();
  // Value's last dimension, or that over the heads that lie in it.
  const bool flat = parsed.layout[2] == TensorLayout::kBSN;
  const int64_t value_heads = parsed.packed[2].total > 0 ? parsed.packed[2].total : parsed.kv_num_heads;
  DimRule head_size = flat ? DimRule{2, 2, -1, 1, value_heads} : DimRule{2, 3, -1};
  if (flat && value_heads == 0) head_size = {-1, 0, -1};
  switch (parsed.layout[3]) {
    case TensorLayout::kBHSD:
      return {batch, heads, length, head_size};
    case TensorLayout::kBSHD:
      return {batch, length, heads, head_size};
    default:
      break;
  }
  DimRule both = head_size;  // H · Dv
  if (parsed.num_heads > 0) {
    both.times = parsed.num_heads;
  } else if (heads.input < 0) {
    both = {-1, 0, -1};
  } else {
    both.by_input = heads.input;
    both.by_axis = heads.axis;
  }
  return {batch, length, both};
}

Status CreateAttention(const AttributeReader& attributes, std::unique_ptr<Op>* op) {
  AttentionAttributes parsed;
  STOF_RETURN_IF_ERROR(ParseAttention(attributes, &parsed));
  *op = std::make_unique<AttentionOp>(std::move(parsed));
  return Status();
}

}  // namespace

const OpDescription* AttentionDescription() {
  static constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
  static constexpr AttributeDescription kAttributes[] = {
      {"mask", AttributeType::kString},      {"mask_id", AttributeType::kInt},
      {"scale", AttributeType::kFloat},      {"softcap", AttributeType::kFloat},
      {"layout", AttributeType::kString},    {"num_heads", AttributeType::kInt},
      {"kv_num_heads", AttributeType::kInt}, {"packed", AttributeType::kInts},
      {"query_offset", AttributeType::kInt}, {"empty_rows", AttributeType::kString},
      {"operands", AttributeType::kString},  {"results", AttributeType::kString},
      {"allow_tf32", AttributeType::kInt},   {"kernel", AttributeType::kString},
      {"tile", AttributeType::kString}};
  static const OpDescription description = {"StofAttention",
                                            kTypedInputs,
                                            kMostOperands,
                                            1,
                                            kTypes,
                                            3,
                                            kTypes,
                                            3,
                                            CreateAttention,
                                            OutputShape,
                                            kAttributes,
                                            static_cast<int>(std::size(kAttributes)),
                                            false,
                                            nullptr,
                                            1,
                                            DType::kF32};
  return &description;
}

}  // namespace stof
