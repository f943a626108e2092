// SPDX-License-Identifier: Apache-2.0
#include "plugins/trt/plugin.h"

#include <algorithm>
#include <exception>

#include "plugins/core/host/quoted.h"
#include "plugins/trt/log.h"

namespace stof::trt {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimensionOperation;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IDimensionExpr;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

constexpr int32_t kFailed = 1;
constexpr uintptr_t kAlignment = 64, kFirst = 256;  // of blocks, and of the first one, which may be cuBLASLt's
constexpr int32_t kMostTactics = 64;

// Runs body and reports its error; nothing is thrown into TensorRT.
template <typename Body>
bool Succeeds(const std::string& layer, Body body) noexcept {
  try {
    const Status status = body();
    if (status.ok()) return true;
    Log(LogLevel::kError, layer, status.message());
  } catch (const std::exception& error) {
    Log(LogLevel::kError, layer, error.what());
  } catch (...) {
    Log(LogLevel::kError, layer, "an unknown exception");
  }
  return false;
}

DType ToDType(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
      return DType::kF32;
    case DataType::kHALF:
      return DType::kF16;
    case DataType::kBF16:
      return DType::kBF16;
    case DataType::kINT8:
      return DType::kI8;
    case DataType::kUINT8:
      return DType::kU8;
    case DataType::kBOOL:
      return DType::kBool;
    case DataType::kINT32:
      return DType::kI32;
    case DataType::kINT64:
      return DType::kI64;
    default:
      return DType::kUndefined;
  }
}

DataType ToDataType(DType type) {
  return type == DType::kF32 ? DataType::kFLOAT : type == DType::kF16 ? DataType::kHALF : DataType::kBF16;
}

bool Contains(const ArrayView<DType>& types, DType type) {
  return std::find(types.begin(), types.end(), type) != types.end();
}

// False where a dimension is not known (yet).
bool ToTensor(DataType type, const Dims& dims, const void* data, Tensor* tensor) {
  *tensor = Tensor();
  if (dims.nbDims < 0 || dims.nbDims > kMaxRank) return false;
  tensor->dtype = ToDType(type);
  tensor->rank = dims.nbDims;
  tensor->data = const_cast<void*>(data);
  std::copy(dims.d, dims.d + dims.nbDims, tensor->dims);
  return std::all_of(dims.d, dims.d + dims.nbDims, [](int64_t dim) { return dim >= 0; });
}

bool SameShape(const Tensor& a, const Tensor& b) {
  return a.dtype == b.dtype && a.rank == b.rank && std::equal(a.dims, a.dims + a.rank, b.dims);
}

// Allocates from the workspace of a run.
struct Bump {
  char* next = nullptr;
  size_t left = 0;
  static void* Allocate(void* self, size_t bytes) {
    auto* bump = static_cast<Bump*>(self);
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (rounded < bytes || rounded > bump->left) return nullptr;
    char* block = bump->next;
    bump->next += rounded;
    bump->left -= rounded;
    return block;
  }
};

// A dimension of an output as an expression over those of the inputs; nullptr: TensorRT is out of memory, or the rule
// names an input or axis that does not exist.
const IDimensionExpr* Express(const DimRule& rule, const DimsExprs* in, int in_count, nvinfer1::IExprBuilder* builder) {
  if (rule.input < 0) return rule.value < 0 ? nullptr : builder->constant(rule.value);
  const auto at = [&](int input, int axis) -> const IDimensionExpr* {
    return input < in_count && axis >= 0 && axis < in[input].nbDims ? in[input].d[axis] : nullptr;
  };
  const IDimensionExpr* dim = at(rule.input, rule.axis);
  const auto apply = [&](DimensionOperation operation, const IDimensionExpr* other) {
    dim = dim == nullptr || other == nullptr ? nullptr : builder->operation(operation, *dim, *other);
  };
  if (rule.times != rule.over) {
    if (rule.times != 1) apply(DimensionOperation::kPROD, builder->constant(rule.times));
    if (rule.over != 1) apply(DimensionOperation::kFLOOR_DIV, builder->constant(rule.over));
  }
  if (rule.by_input >= 0) apply(DimensionOperation::kPROD, at(rule.by_input, rule.by_axis));
  return dim;
}

}  // namespace

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* Plugin::clone() noexcept {
  Plugin* made = nullptr;
  Succeeds(definition_->layer(), [&] {
    auto copy = std::make_unique<Plugin>(definition_);
    copy->tactic_ = tactic_;
    copy->tactics_ = tactics_;
    made = copy.release();
    return Status();
  });
  return made;
}

nvinfer1::IPluginV3* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept { return clone(); }

// All nodes of a variadic operator have as many inputs as the one that needs most; further inputs are ignored.
bool Plugin::IsCountRight(int32_t in_count, int32_t out_count) const {
  const int inputs = definition_->inputs();
  const bool right =
      definition_->description().is_variadic ? in_count >= inputs && in_count <= kMostInputs : in_count == inputs;
  return right && out_count == definition_->outputs();
}

Status Plugin::CheckCounts(int32_t in_count, int32_t out_count) const {
  if (IsCountRight(in_count, out_count)) return Status();
  return Status::Error("has " + std::to_string(in_count) + " inputs and " + std::to_string(out_count) +
                       " outputs, expected " + std::to_string(definition_->inputs()) + " and " +
                       std::to_string(definition_->outputs()) + " by its attributes");
}

int32_t Plugin::getOutputDataTypes(DataType* out, int32_t out_count, const DataType* in,
                                   int32_t in_count) const noexcept {
  const auto body = [&] {
    STOF_RETURN_IF_ERROR(CheckCounts(in_count, out_count));
    const OpDescription& description = definition_->description();
    if (description.is_variadic) {
      for (int32_t o = 0; o < out_count; ++o) out[o] = ToDataType(definition_->output_type(o));
      return Status();
    }
    // Where precision is the builder's choice, later calls may ask for another type.
    if (!Contains(description.types, ToDType(in[0]))) {
      return Status::Error("input 0 has TensorRT's data type " + std::to_string(static_cast<int>(in[0])) +
                           ", which the operator does not take");
    }
    if (!Contains(description.cuda_types, ToDType(in[0]))) {
      Log(LogLevel::kError, definition_->layer(),
          "input 0 has TensorRT's data type " + std::to_string(static_cast<int>(in[0])) +
              ", for which this library has no CUDA kernel: unless the builder may choose another precision, it will "
              "find no format");
    }
    for (int32_t i = 0; i < out_count; ++i) {
      out[i] = i < description.outputs ? in[0] : DataType::kFLOAT;  // the only type of optional ones
    }
    return Status();
  };
  return Succeeds(definition_->layer(), body) ? 0 : kFailed;
}

Status Plugin::Shapes(const DimsExprs* in, DimsExprs* out, nvinfer1::IExprBuilder* builder) const {
  const OpDescription& description = definition_->description();
  const int count = definition_->inputs();
  int ranks[kMostInputs] = {};
  for (int i = 0; i < count; ++i) {
    if (in[i].nbDims < 0 || in[i].nbDims > Dims::MAX_DIMS) {
      return Status::Error("input " + std::to_string(i) + " has rank " + std::to_string(in[i].nbDims));
    }
    ranks[i] = in[i].nbDims;
  }
  for (int o = 0; o < definition_->outputs(); ++o) {
    if (o >= definition_->results()) {
      out[o].nbDims = 1;
      out[o].d[0] = builder->constant(1);
      continue;
    }
    const std::vector<DimRule> rules = description.shape_rule(
        definition_->fields(), ranks, description.is_variadic ? count : description.typed_inputs, o);
    if (rules.empty() || rules.size() > static_cast<size_t>(Dims::MAX_DIMS)) {
      return Status::Error("output " + std::to_string(o) +
                           " has no shape: the ranks of the inputs do not fit the attributes");
    }
    out[o].nbDims = static_cast<int32_t>(rules.size());
    for (size_t i = 0; i < rules.size(); ++i) {
      out[o].d[i] = Express(rules[i], in, count, builder);
      if (out[o].d[i] == nullptr) {
        return Status::Error("dimension " + std::to_string(i) + " of output " + std::to_string(o) +
                             " does not follow from the inputs and attributes: is num_heads or kv_num_heads missing?");
      }
    }
  }
  return Status();
}

int32_t Plugin::getOutputShapes(const DimsExprs* in, int32_t in_count, const DimsExprs*, int32_t shape_in_count,
                                DimsExprs* out, int32_t out_count, nvinfer1::IExprBuilder& builder) noexcept {
  const auto body = [&] {
    STOF_RETURN_IF_ERROR(CheckCounts(in_count, out_count));
    if (shape_in_count != 0) return Status::Error("has shape inputs, expected none");
    return Shapes(in, out, &builder);
  };
  return Succeeds(definition_->layer(), body) ? 0 : kFailed;
}

bool Plugin::supportsFormatCombination(int32_t at, const DynamicPluginTensorDesc* in_out, int32_t in_count,
                                       int32_t out_count) noexcept {
  if (!IsCountRight(in_count, out_count) || at < 0 || at >= in_count + out_count) return false;
  if (in_out[at].desc.format != TensorFormat::kLINEAR) return false;
  const OpDescription& description = definition_->description();
  const DType typed = ToDType(in_out[0].desc.type);
  const DType own = ToDType(in_out[at].desc.type);
  if (description.is_variadic) {
    return at < in_count ? definition_->op().IsTypeAllowed(at, own, own)
                         : own == definition_->output_type(at - in_count);
  }
  if (!Contains(description.cuda_types, typed)) return false;
  if (at >= in_count) return own == description.OutputType(at - in_count, typed);
  return definition_->op().IsTypeAllowed(at, own, typed);
}

// Checks that kernels take the shapes while the engine is built: at run time it would be too late.
Status Plugin::Configure(const DynamicPluginTensorDesc* in) {
  tactics_ = 0;
  const int count = definition_->inputs();
  const auto plan = [&](const Dims& (*dims)(const DynamicPluginTensorDesc&), DevicePlan* found) {
    Tensor tensors[kMostInputs];
    bool known = true;
    for (int i = 0; i < count; ++i) known &= ToTensor(in[i].desc.type, dims(in[i]), nullptr, &tensors[i]);
    return known ? definition_->op().PlanDevice(tensors, count, found) : Status();
  };
  DevicePlan found;
  STOF_RETURN_IF_ERROR(plan([](const DynamicPluginTensorDesc& t) -> const Dims& { return t.opt; }, &found));
  // The bounds of different inputs need not occur together.
  DevicePlan unused;
  for (const auto dims : {+[](const DynamicPluginTensorDesc& t) -> const Dims& { return t.min; },
                          +[](const DynamicPluginTensorDesc& t) -> const Dims& { return t.max; }}) {
    const Status status = plan(dims, &unused);
    if (!status.ok()) Log(LogLevel::kInfo, definition_->layer(), "at a bound of the profile: " + status.message());
  }
  tactics_ = found.kernels == 0 ? 0 : std::min(found.kernels + 1, kMostTactics);
  Load(in);
  Log(LogLevel::kInfo, definition_->layer(), "configured, " + std::to_string(tactics_) + " tactics");
  return Status();
}

// Has the driver load the kernels, since the builder times the next run. A build may have no device.
void Plugin::Load(const DynamicPluginTensorDesc* in) const {
  const int count = definition_->inputs();
  Tensor tensors[kMostInputs];
  for (int i = 0; i < count; ++i) {
    if (!ToTensor(in[i].desc.type, in[i].opt, nullptr, &tensors[i])) return;
  }
  const Status status = definition_->op().PrepareDevice(tensors, count, 0);
  if (!status.ok()) Log(LogLevel::kInfo, definition_->layer(), status.message());
}

int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc* in, int32_t in_count, const DynamicPluginTensorDesc*,
                                int32_t out_count) noexcept {
  const auto body = [&] {
    STOF_RETURN_IF_ERROR(CheckCounts(in_count, out_count));
    return Configure(in);
  };
  return Succeeds(definition_->layer(), body) ? 0 : kFailed;
}

Status Plugin::Workspace(const DynamicPluginTensorDesc* in, size_t* bytes) const {
  const int count = definition_->inputs();
  Tensor tensors[kMostInputs];
  for (int i = 0; i < count; ++i) {
    // Before the profile is known TensorRT asks with the shapes of the network, and later again.
    if (!ToTensor(in[i].desc.type, in[i].max, nullptr, &tensors[i])) return Status();
  }
  DevicePlan plan;
  STOF_RETURN_IF_ERROR(definition_->op().PlanDevice(tensors, count, &plan));
  *bytes = plan.workspace == 0 ? 0 : plan.workspace + kFirst;
  return Status();
}

size_t Plugin::getWorkspaceSize(const DynamicPluginTensorDesc* in, int32_t in_count, const DynamicPluginTensorDesc*,
                                int32_t out_count) const noexcept {
  size_t bytes = 0;
  Succeeds(definition_->layer(), [&] {
    STOF_RETURN_IF_ERROR(CheckCounts(in_count, out_count));
    return Workspace(in, &bytes);
  });
  return bytes;
}

int32_t Plugin::getNbTactics() noexcept { return tactics_; }

int32_t Plugin::getValidTactics(int32_t* tactics, int32_t count) noexcept {
  if (count != tactics_ || (count > 0 && tactics == nullptr)) return kFailed;
  for (int32_t i = 0; i < count; ++i) tactics[i] = i + 1;
  return 0;
}

int32_t Plugin::setTactic(int32_t tactic) noexcept {
  // A tactic that this device lacks is no error: the engine may come from another device.
  if (tactic < 0 || tactic > kMostTactics) return kFailed;
  if (tactic_ != tactic) graphs_.Clear();
  tactic_ = tactic;
  return 0;
}

Status Plugin::Plan(const PluginTensorDesc* in, Tensor* inputs) {
  const int count = definition_->inputs();
  for (int i = 0; i < count; ++i) {
    if (!ToTensor(in[i].type, in[i].dims, nullptr, &inputs[i])) {
      return Status::Error("the shape of input " + std::to_string(i) + " is not known");
    }
    if (in[i].format != TensorFormat::kLINEAR) {
      return Status::Error("input " + std::to_string(i) + " is not in row-major order");
    }
  }
  if (planned_for_.size() == static_cast<size_t>(count) &&
      std::equal(inputs, inputs + count, planned_for_.begin(), SameShape)) {
    return Status();
  }
  planned_for_.clear();
  graphs_.Clear();
  DevicePlan plan;
  STOF_RETURN_IF_ERROR(definition_->op().PlanDevice(inputs, count, &plan));
  planned_ = plan.workspace;
  runs_several_kernels_ = plan.runs_several_kernels;
  planned_for_.assign(inputs, inputs + count);
  return Status();
}

int32_t Plugin::onShapeChange(const PluginTensorDesc* in, int32_t in_count, const PluginTensorDesc*,
                              int32_t out_count) noexcept {
  const auto body = [&] {
    STOF_RETURN_IF_ERROR(CheckCounts(in_count, out_count));
    Tensor inputs[kMostInputs];
    STOF_RETURN_IF_ERROR(Plan(in, inputs));
    // An error here (no device, no memory left) is left to the run.
    const Status status = definition_->op().PrepareDevice(inputs, definition_->inputs(), kernel());
    if (!status.ok()) Log(LogLevel::kInfo, definition_->layer(), status.message());
    return Status();
  };
  return Succeeds(definition_->layer(), body) ? 0 : kFailed;
}

Status Plugin::Enqueue(const PluginTensorDesc* in, const PluginTensorDesc* out, const void* const* inputs,
                       void* const* outputs, void* workspace, void* stream) {
  const int in_count = definition_->inputs(), out_count = definition_->results();
  Tensor from[kMostInputs], to[kMostOutputs];
  STOF_RETURN_IF_ERROR(Plan(in, from));
  for (int i = 0; i < in_count; ++i) from[i].data = const_cast<void*>(inputs[i]);
  for (int i = 0; i < out_count; ++i) {
    if (!ToTensor(out[i].type, out[i].dims, outputs[i], &to[i])) {
      return Status::Error("the shape of output " + std::to_string(i) + " is not known");
    }
  }
  if (planned_ > 0 && workspace == nullptr) return Status::Error("TensorRT gave no workspace");
  RunContext context;
  context.on_cuda = true;
  context.stream = stream;
  context.kernel = kernel();
  const auto queue = [&](const RunContext& given) {
    const auto address = reinterpret_cast<uintptr_t>(workspace);
    Bump bump;
    bump.next = reinterpret_cast<char*>((address + kFirst - 1) / kFirst * kFirst);
    bump.left = planned_;
    RunContext own = given;
    own.allocate = Bump::Allocate;
    own.self = &bump;
    return definition_->op().Run(from, in_count, to, out_count, own);
  };
  if (!runs_several_kernels_) return queue(context);
  std::vector<const void*> key(inputs, inputs + in_count);
  key.insert(key.end(), outputs, outputs + out_count);
  key.push_back(workspace);
  return graphs_.Run(
      key, context, [](void* self, const RunContext& own) { return (*static_cast<decltype(queue)*>(self))(own); },
      const_cast<void*>(static_cast<const void*>(&queue)));
}

int32_t Plugin::enqueue(const PluginTensorDesc* in, const PluginTensorDesc* out, const void* const* inputs,
                        void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  const auto body = [&] {
    if (in == nullptr || out == nullptr || inputs == nullptr || outputs == nullptr) {
      return Status::Error("enqueue was called without tensors");
    }
    return Enqueue(in, out, inputs, outputs, workspace, stream);
  };
  return Succeeds(definition_->layer(), body) ? 0 : kFailed;
}

Creator::Creator(const OpDescription& description) : description_(description) {
  for (const AttributeDescription& attribute : description.attributes) {
    if (!attribute.is_for_tensorrt) continue;
    const bool whole = attribute.type == AttributeType::kInt || attribute.type == AttributeType::kInts;
    const PluginFieldType type = whole                                     ? PluginFieldType::kINT32
                                 : attribute.type == AttributeType::kFloat ? PluginFieldType::kFLOAT32
                                                                           : PluginFieldType::kCHAR;
    fields_.emplace_back(attribute.name, nullptr, type, 1);
  }
  // TensorRT's parser drops attributes that are not declared.
  fields_.emplace_back(kConstants, nullptr, PluginFieldType::kCHAR, 1);
  if (description.is_variadic) fields_.emplace_back(kSpareOutputs, nullptr, PluginFieldType::kINT32, 1);
  collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

nvinfer1::IPluginV3* Creator::createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                           nvinfer1::TensorRTPhase phase) noexcept {
  nvinfer1::IPluginV3* made = nullptr;
  const auto body = [&] {
    const std::string layer = name == nullptr || *name == '\0' ? description_.name : name;
    Fields read;
    std::shared_ptr<const Definition> definition;
    Status status = Fields::Read(fields, &read);
    if (status.ok()) {
      status = Definition::Make(description_, layer, read, phase == nvinfer1::TensorRTPhase::kRUNTIME, &definition);
    }
    if (!status.ok()) return Status::Error(Escape(layer, 128, 64) + ": " + status.message());
    Log(LogLevel::kInfo, layer, definition->metadata());
    made = std::make_unique<Plugin>(std::move(definition)).release();
    return Status();
  };
  Succeeds(std::string(), body);
  return made;
}

}  // namespace stof::trt
