// SPDX-License-Identifier: Apache-2.0
#include "plugins/ort/adapter.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plugins/core/cuda_backend.h"

namespace stof::ort {
namespace {

constexpr size_t kAlignment = 64;
constexpr int kMaxInputs = 32;
constexpr int kMaxOutputs = 8;
constexpr int kMaxThreads = 64;

const Registration& Self(const OrtCustomOp* op) { return *static_cast<const Registration*>(op); }

// Frees an error that we answer by a default, and says whether there was one.
bool Failed(const OrtApi* api, OrtStatus* status) {
  if (status == nullptr) return false;
  api->ReleaseStatus(status);
  return true;
}

OrtStatus* ToOrt(const OrtApi* api, const std::string& node, const Status& status) {
  if (status.ok()) return nullptr;
  return api->CreateStatus(ORT_INVALID_ARGUMENT, (node + ": " + status.message()).c_str());
}

// An error that does not say where it was met, for the runtime that does not either.
OrtStatus* OfInput(const OrtApi* api, const std::string& node, size_t input, OrtStatus* status) {
  if (status == nullptr) return nullptr;
  const std::string message = node + ": input " + std::to_string(input) + " " + api->GetErrorMessage(status);
  const OrtErrorCode code = api->GetErrorCode(status);
  api->ReleaseStatus(status);
  return api->CreateStatus(code, message.c_str());
}
OrtStatus* TooMany(const OrtApi* api, const std::string& node, size_t count, const char* what, int most) {
  const std::string message = node + ": has " + std::to_string(count) + " " + what + ", expected at most " +
                              std::to_string(most) + ": leave out those that nothing reads";
  return api->CreateStatus(ORT_INVALID_ARGUMENT, message.c_str());
}

#define STOF_ORT_RETURN(expr)                                \
  do {                                                       \
    if (OrtStatus* ort_status_ = (expr)) return ort_status_; \
  } while (0)

class KernelAttributes final : public AttributeReader {
 public:
  KernelAttributes(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}
  bool Int(const char* name, int64_t* value) const override {
    return Get(name, AttributeType::kInt,
               [this, value](const char* n) { return api_->KernelInfoGetAttribute_int64(info_, n, value); });
  }
  bool Float(const char* name, float* value) const override {
    return Get(name, AttributeType::kFloat,
               [this, value](const char* n) { return api_->KernelInfoGetAttribute_float(info_, n, value); });
  }
  bool String(const char* name, std::string* value) const override {
    size_t size = 0;  // counts the NUL
    const auto measure = [this, &size](const char* n) {
      return api_->KernelInfoGetAttribute_string(info_, n, nullptr, &size);
    };
    if (!Get(name, AttributeType::kString, measure) || size == 0) return false;
    std::string text(size, '\0');
    if (Failed(api_, api_->KernelInfoGetAttribute_string(info_, name, text.data(), &size))) return false;
    text.resize(size - 1);
    *value = std::move(text);
    return true;
  }
  bool Ints(const char* name, std::vector<int64_t>* value) const override {
    size_t count = 0;
    const auto measure = [this, &count](const char* n) {
      return api_->KernelInfoGetAttributeArray_int64(info_, n, nullptr, &count);
    };
    if (!Get(name, AttributeType::kInts, measure)) return false;
    if (count == 0) {  // what an attribute of any other type looks like, since the C API does not look at it
      SetMistyped(name, AttributeType::kInts);
      return false;
    }
    std::vector<int64_t> numbers(count);
    if (Failed(api_, api_->KernelInfoGetAttributeArray_int64(info_, name, numbers.data(), &count))) return false;
    *value = std::move(numbers);
    return true;
  }

 private:
  // The C API reports a missing attribute and one of another type by the same code. The message for a name that no node
  // has, with the name exchanged, is what a missing attribute gives; any other message is about the type.
  template <typename Getter>
  bool Get(const char* name, AttributeType type, Getter get) const {
    OrtStatus* status = get(name);
    if (status == nullptr) return true;
    const std::string message = Message(status);
    std::string missing = Message(get(kNoName));
    const size_t at = missing.find(kNoName);
    if (at != std::string::npos) missing.replace(at, sizeof kNoName - 1, name);
    if (message != missing) SetMistyped(name, type);
    return false;
  }
  std::string Message(OrtStatus* status) const {
    if (status == nullptr) return std::string();
    std::string message = api_->GetErrorMessage(status);
    api_->ReleaseStatus(status);
    return message;
  }

  static constexpr char kNoName[] = "stof_attribute_that_no_node_has";
  const OrtApi* api_;
  const OrtKernelInfo* info_;
};

class InferAttributes final : public AttributeReader {
 public:
  InferAttributes(const OrtApi* api, const OrtShapeInferContext* context) : api_(api), context_(context) {}
  bool Int(const char* name, int64_t* value) const override {
    return Read(name, ORT_OP_ATTR_INT, value, sizeof *value);
  }
  bool Float(const char* name, float* value) const override {
    return Read(name, ORT_OP_ATTR_FLOAT, value, sizeof *value);
  }
  bool String(const char* name, std::string* value) const override {
    const OrtOpAttr* attribute = nullptr;
    size_t size = 0;
    if (Failed(api_, api_->ShapeInferContext_GetAttribute(context_, name, &attribute))) return false;
    // The first call only asks for the size and reports the missing buffer as an error.
    Failed(api_, api_->ReadOpAttr(attribute, ORT_OP_ATTR_STRING, nullptr, 0, &size));
    std::string text(size, '\0');
    if (size == 0 || Failed(api_, api_->ReadOpAttr(attribute, ORT_OP_ATTR_STRING, text.data(), size, &size)))
      return false;
    while (!text.empty() && text.back() == '\0') text.pop_back();
    *value = std::move(text);
    return true;
  }
  bool Ints(const char* name, std::vector<int64_t>* value) const override {
    const OrtOpAttr* attribute = nullptr;
    size_t size = 0;
    if (Failed(api_, api_->ShapeInferContext_GetAttribute(context_, name, &attribute))) return false;
    // As above.
    Failed(api_, api_->ReadOpAttr(attribute, ORT_OP_ATTR_INTS, nullptr, 0, &size));
    std::vector<int64_t> numbers(size / sizeof(int64_t));
    if (numbers.empty() || Failed(api_, api_->ReadOpAttr(attribute, ORT_OP_ATTR_INTS, numbers.data(), size, &size))) {
      return false;
    }
    *value = std::move(numbers);
    return true;
  }

 private:
  bool Read(const char* name, OrtOpAttrType type, void* value, size_t size) const {
    const OrtOpAttr* attribute = nullptr;
    size_t written = 0;
    return !Failed(api_, api_->ShapeInferContext_GetAttribute(context_, name, &attribute)) &&
           !Failed(api_, api_->ReadOpAttr(attribute, type, value, size, &written));
  }
  const OrtApi* api_;
  const OrtShapeInferContext* context_;
};

struct Kernel {
  Kernel() = default;
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  ~Kernel() {
    if (allocator != nullptr) api->ReleaseAllocator(allocator);
  }
  const OrtApi* api = nullptr;
  OrtAllocator* allocator = nullptr;  // of its provider, for CUDA
  bool on_cuda = false;
  std::string node;
  std::unique_ptr<Op> op;
};

// Memory of one Run. On the CPU from ONNX Runtime's arena, returned at the end. On a device the end comes while kernels
// still use it, and another thread's Run on another stream must not be given it before they are done. The arena can tie
// memory to a stream, but the call for it (KernelContext_GetScratchBuffer) ends the process when the arena is full: it
// throws, and is noexcept (seen with gpu_mem_limit). So such memory comes from CUDA, in the order of the stream. While
// a graph is captured it is the arena's, as all that the graph uses: ONNX Runtime then has one thread and one stream.
class Scratch {
 public:
  // stream: that of a device, and on_device.
  Scratch(const OrtApi* api, OrtAllocator* allocator, bool on_device, void* stream)
      : api_(api), allocator_(allocator), backend_(on_device ? FindCudaBackend() : nullptr), stream_(stream) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    for (void* block : ordered_) backend_->give(stream_, block);
    // On a device without memory in the order of a stream the arena gets its own back when the stream is done.
    if (!blocks_.empty() && backend_ != nullptr) backend_->captured_or_done(stream_);
    for (void* block : blocks_) Failed(api_, api_->AllocatorFree(allocator_, block));
  }
  static void* Allocate(void* self, size_t bytes) {
    auto* scratch = static_cast<Scratch*>(self);
    void* block = nullptr;
    bytes += kAlignment;
    if (scratch->backend_ == nullptr) {
      block = scratch->FromArena(bytes);
    } else if (scratch->backend_->take(scratch->stream_, bytes, &block)) {
      if (block != nullptr) scratch->ordered_.push_back(block);
    } else {
      // An arena that grows while a graph is captured allocates.
      struct Call {
        Scratch* scratch;
        size_t bytes;
        void* block;
      } call{scratch, bytes, nullptr};
      scratch->backend_->relaxed(
          [](void* c) {
            static_cast<Call*>(c)->block = static_cast<Call*>(c)->scratch->FromArena(static_cast<Call*>(c)->bytes);
          },
          &call);
      block = call.block;
    }
    const auto address = reinterpret_cast<uintptr_t>(block);
    return reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
  }

 private:
  void* FromArena(size_t bytes) {
    void* block = nullptr;
    if (Failed(api_, api_->AllocatorAlloc(allocator_, bytes, &block)) || block == nullptr) return nullptr;
    blocks_.push_back(block);
    return block;
  }

  const OrtApi* api_;
  OrtAllocator* allocator_;
  const CudaBackend* backend_;
  void* stream_;
  std::vector<void*> blocks_, ordered_;
};

// The C API does not tell the size of the intra-op pool; work slots beyond it only cost an empty call. Asked for once:
// the C library opens a file for it, which takes as long as a small operator.
int RunThreads() {
  static const auto threads =
      static_cast<int>(std::clamp<unsigned>(std::thread::hardware_concurrency(), 1, kMaxThreads));
  return threads;
}

struct Pool {
  ~Pool() {
    if (status != nullptr) api->ReleaseStatus(status);
  }
  const OrtApi* api;
  const OrtKernelContext* context;
  OrtStatus* status = nullptr;
};

void RunOnPool(void* self, void (*fn)(void* user, size_t i), size_t count, void* user) {
  auto* pool = static_cast<Pool*>(self);
  if (count == 0) return;
  if (count == 1) return fn(user, 0);
  OrtStatus* status = pool->api->KernelContext_ParallelFor(pool->context, fn, count, 0, user);
  if (status == nullptr) return;
  if (pool->status == nullptr) {
    pool->status = status;
  } else {
    pool->api->ReleaseStatus(status);
  }
}

OrtStatus* Describe(const OrtApi* api, const OrtTensorTypeAndShapeInfo* info, Tensor* tensor) {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  size_t rank = 0;
  STOF_ORT_RETURN(api->GetTensorElementType(info, &type));
  STOF_ORT_RETURN(api->GetDimensionsCount(info, &rank));
  if (rank > kMaxRank) {
    return api->CreateStatus(ORT_INVALID_ARGUMENT,
                             ("has rank " + std::to_string(rank) + ", expected 8 or less").c_str());
  }
  tensor->dtype = static_cast<DType>(type);  // both follow onnx.TensorProto.DataType
  tensor->rank = static_cast<int32_t>(rank);
  return api->GetDimensions(info, tensor->dims, rank);
}

OrtStatus* FromValue(const OrtApi* api, const OrtValue* value, Tensor* tensor) {
  *tensor = Tensor();
  if (value == nullptr) return nullptr;  // an input left out: dtype stays undefined
  int is_tensor = 0;
  STOF_ORT_RETURN(api->IsTensor(value, &is_tensor));
  if (is_tensor == 0) return api->CreateStatus(ORT_INVALID_ARGUMENT, "is a sequence or a map, expected a tensor");
  OrtTensorTypeAndShapeInfo* info = nullptr;
  STOF_ORT_RETURN(api->GetTensorTypeAndShape(value, &info));
  OrtStatus* status = Describe(api, info, tensor);
  api->ReleaseTensorTypeAndShapeInfo(info);
  STOF_ORT_RETURN(status);
  return api->GetTensorMutableData(const_cast<OrtValue*>(value), &tensor->data);
}

std::string NodeName(const OrtApi* api, const OrtKernelInfo* info, const char* fallback) {
  size_t size = 0;
  if (Failed(api, api->KernelInfo_GetNodeName(info, nullptr, &size)) || size <= 1) return fallback;
  std::string name(size, '\0');
  if (Failed(api, api->KernelInfo_GetNodeName(info, name.data(), &size))) return fallback;
  name.resize(size - 1);
  return name;
}

// Whether a value lies in device memory; constants of a CUDA kernel may lie on either side.
OrtStatus* OnDevice(const OrtApi* api, const OrtValue* value, bool* on_device) {
  const OrtMemoryInfo* memory = nullptr;
  OrtMemoryInfoDeviceType type = OrtMemoryInfoDeviceType_CPU;
  STOF_ORT_RETURN(api->GetTensorMemoryInfo(value, &memory));
  api->MemoryInfoGetDeviceType(memory, &type);
  *on_device = type == OrtMemoryInfoDeviceType_GPU;
  return nullptr;
}

// Brings a constant from the device; `copy` holds it. Floats, which no operator reads as constants and of which biases
// may be large, are left out.
Status ToHost(Tensor* tensor, std::vector<char>* copy) {
  const CudaBackend* backend = FindCudaBackend();
  const bool read = tensor->dtype == DType::kBool || tensor->dtype == DType::kU8 || tensor->dtype == DType::kI8 ||
                    tensor->dtype == DType::kI32 || tensor->dtype == DType::kI64;
  const int64_t bytes = read ? tensor->Elements() * SizeOf(tensor->dtype) : 0;
  if (backend == nullptr || bytes == 0) {
    *tensor = Tensor();
    return Status();
  }
  copy->resize(static_cast<size_t>(bytes));
  STOF_RETURN_IF_ERROR(backend->to_host(tensor->data, copy->size(), copy->data()));
  tensor->data = copy->data();
  return Status();
}

// Types and ranks are known at creation only for constants; everything else is checked in each Run.
OrtStatus* PrepareKernel(const OrtApi* api, const OrtKernelInfo* info, Kernel* kernel) {
  size_t count = 0;
  STOF_ORT_RETURN(api->KernelInfo_GetInputCount(info, &count));
  if (count > kMaxInputs) return TooMany(api, kernel->node, count, "inputs", kMaxInputs);
  std::vector<Tensor> inputs(count);
  std::vector<std::vector<char>> copies(count);
  for (size_t i = 0; i < count; ++i) {
    int constant = 0;
    const OrtValue* value = nullptr;
    if (Failed(api, api->KernelInfoGetConstantInput_tensor(info, i, &constant, &value)) || constant == 0) continue;
    STOF_ORT_RETURN(OfInput(api, kernel->node, i, FromValue(api, value, &inputs[i])));
    bool on_device = false;
    STOF_ORT_RETURN(OnDevice(api, value, &on_device));
    if (on_device) STOF_ORT_RETURN(ToOrt(api, kernel->node, ToHost(&inputs[i], &copies[i])));
  }
  return ToOrt(api, kernel->node, kernel->op->Prepare(inputs.data(), static_cast<int>(count)));
}

// Whether the thread works on the device that a kernel's provider has.
bool IsOnItsDevice(const OrtApi* api, const OrtAllocator* allocator) {
  const OrtMemoryInfo* memory = nullptr;
  int own = -1, current = -2;
  return allocator != nullptr && !Failed(api, api->AllocatorGetInfo(allocator, &memory)) &&
         !Failed(api, api->MemoryInfoGetId(memory, &own)) && FindCudaBackend()->device(&current).ok() && own == current;
}

// What the first run would else do: as far as the model says the shapes.
void ReadyKernel(const OrtApi* api, const OrtKernelInfo* info, Kernel* kernel) {
  size_t count = 0;
  if (Failed(api, api->KernelInfo_GetInputCount(info, &count)) || count > kMaxInputs) return;
  std::vector<Tensor> inputs(count);
  for (size_t i = 0; i < count; ++i) {
    OrtTypeInfo* type = nullptr;
    if (Failed(api, api->KernelInfo_GetInputTypeInfo(info, i, &type)) || type == nullptr) continue;  // left out
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    const bool described = !Failed(api, api->CastTypeInfoToTensorInfo(type, &tensor)) && tensor != nullptr &&
                           !Failed(api, Describe(api, tensor, &inputs[i]));
    api->ReleaseTypeInfo(type);
    if (!described) return;
  }
  if (kernel->on_cuda && !IsOnItsDevice(api, kernel->allocator)) return;
  // What cannot be made ready now is made, or reported, by the run; so is what there is no memory for.
  try {
    (void)kernel->op->ReadyNode(inputs.data(), static_cast<int>(count), kernel->on_cuda, RunThreads());
  } catch (const std::exception&) {
  }
}

// What the model, or the runtime that changed it, says of the outputs.
OrtStatus* ReadOutputTypes(const OrtApi* api, const OrtKernelInfo* info, Op* op) {
  size_t count = 0;
  STOF_ORT_RETURN(api->KernelInfo_GetOutputCount(info, &count));
  DType types[kMaxOutputs] = {};
  for (size_t i = 0; i < std::min<size_t>(count, kMaxOutputs); ++i) {
    OrtTypeInfo* type = nullptr;
    if (Failed(api, api->KernelInfo_GetOutputTypeInfo(info, i, &type)) || type == nullptr) continue;
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    ONNXTensorElementDataType element = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    if (!Failed(api, api->CastTypeInfoToTensorInfo(type, &tensor)) && tensor != nullptr &&
        !Failed(api, api->GetTensorElementType(tensor, &element))) {
      types[i] = static_cast<DType>(element);
    }
    api->ReleaseTypeInfo(type);
  }
  op->SetOutputTypes(types, static_cast<int>(std::min<size_t>(count, kMaxOutputs)));
  return nullptr;
}

OrtStatus* ORT_API_CALL CreateKernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out) {
  const Registration& self = Self(op);
  std::string node;
  try {
    node = self.description->name;
    auto kernel = std::make_unique<Kernel>();
    kernel->api = api;
    kernel->on_cuda = self.provider != nullptr;
    node = NodeName(api, info, self.description->name);
    kernel->node = node;
    STOF_ORT_RETURN(ToOrt(api, kernel->node, self.description->create(KernelAttributes(api, info), &kernel->op)));
    if (self.description->lists) STOF_ORT_RETURN(ReadOutputTypes(api, info, kernel->op.get()));
    STOF_ORT_RETURN(PrepareKernel(api, info, kernel.get()));
    if (kernel->on_cuda && Failed(api, api->KernelInfoGetAllocator(info, OrtMemTypeDefault, &kernel->allocator))) {
      kernel->allocator = nullptr;
    }
    ReadyKernel(api, info, kernel.get());
    *out = kernel.release();
    return nullptr;
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, (node + ": " + error.what()).c_str());
  }
}

void ORT_API_CALL DestroyKernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

OrtStatus* ComputeChecked(const Kernel& kernel, OrtKernelContext* context) {
  const OrtApi* api = kernel.api;
  size_t input_count = 0;
  size_t output_count = 0;
  STOF_ORT_RETURN(api->KernelContext_GetInputCount(context, &input_count));
  STOF_ORT_RETURN(api->KernelContext_GetOutputCount(context, &output_count));
  if (input_count > kMaxInputs) return TooMany(api, kernel.node, input_count, "inputs", kMaxInputs);
  if (output_count > kMaxOutputs) return TooMany(api, kernel.node, output_count, "outputs", kMaxOutputs);
  Tensor inputs[kMaxInputs];
  Tensor outputs[kMaxOutputs];
  for (size_t i = 0; i < input_count; ++i) {
    const OrtValue* value = nullptr;
    STOF_ORT_RETURN(api->KernelContext_GetInput(context, i, &value));
    STOF_ORT_RETURN(OfInput(api, kernel.node, i, FromValue(api, value, &inputs[i])));
  }
  const int ni = static_cast<int>(input_count);
  const int no = static_cast<int>(output_count);
  STOF_ORT_RETURN(ToOrt(api, kernel.node, kernel.op->InferOutputs(inputs, ni, outputs, no)));
  for (size_t i = 0; i < output_count; ++i) {
    if (outputs[i].dtype == DType::kUndefined) continue;  // one that the operator does not give
    OrtValue* value = nullptr;
    STOF_ORT_RETURN(api->KernelContext_GetOutput(context, i, outputs[i].dims, outputs[i].rank, &value));
    if (value == nullptr) continue;
    STOF_ORT_RETURN(api->GetTensorMutableData(value, &outputs[i].data));
  }
  OrtMemoryInfo* memory = nullptr;
  OrtAllocator* allocator = nullptr;
  RunContext run;
  if (kernel.on_cuda) {
    int device = 0;
    STOF_ORT_RETURN(ToOrt(api, kernel.node, FindCudaBackend()->device(&device)));
    STOF_ORT_RETURN(api->KernelContext_GetGPUComputeStream(context, &run.stream));
    STOF_ORT_RETURN(api->CreateMemoryInfo("Cuda", OrtArenaAllocator, device, OrtMemTypeDefault, &memory));
    run.on_cuda = true;
  } else {
    STOF_ORT_RETURN(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  }
  OrtStatus* status = api->KernelContext_GetAllocator(context, memory, &allocator);
  api->ReleaseMemoryInfo(memory);
  // A provider that is a plugin may describe its memory otherwise: then what it gave when the kernel was made.
  const bool own = status != nullptr && kernel.allocator != nullptr;
  if (own) api->ReleaseStatus(status), status = nullptr, allocator = kernel.allocator;
  STOF_ORT_RETURN(status);

  Pool pool{api, context};
  {
    Scratch scratch(api, allocator, run.on_cuda, run.stream);
    run.parallel = {RunOnPool, &pool, RunThreads()};
    run.allocate = Scratch::Allocate;
    run.self = &scratch;
    status = ToOrt(api, kernel.node, kernel.op->Run(inputs, ni, outputs, no, run));
  }
  if (!own) api->ReleaseAllocator(allocator);
  return status != nullptr ? status : std::exchange(pool.status, nullptr);
}

OrtStatus* ORT_API_CALL Compute(void* kernel, OrtKernelContext* context) {
  const auto& self = *static_cast<const Kernel*>(kernel);
  try {
    return ComputeChecked(self, context);
  } catch (const std::bad_alloc&) {
    return self.api->CreateStatus(ORT_FAIL, (self.node + ": out of memory").c_str());
  } catch (const std::exception& error) {
    return self.api->CreateStatus(ORT_FAIL, (self.node + ": " + error.what()).c_str());
  }
}

using ShapeInfo = std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)>;

// Copies symbols as well as sizes, so that users keep seeing "batch" and "sequence" on the outputs.
OrtStatus* InferOne(const Registration& self, OrtShapeInferContext* context, const InferAttributes& attributes,
                    const std::vector<OrtTensorTypeAndShapeInfo*>& inputs, const std::vector<int>& ranks, int index) {
  const OrtApi* api = self.api;
  const auto rules = self.description->shape_rule(attributes, ranks.data(), static_cast<int>(ranks.size()), index);
  if (rules.empty()) return nullptr;
  std::vector<int64_t> sizes(rules.size(), -1);
  std::vector<const char*> symbols(rules.size(), "");
  for (size_t i = 0; i < rules.size(); ++i) {
    sizes[i] = rules[i].value;
    if (rules[i].input < 0) continue;
    const auto rank = static_cast<size_t>(ranks[rules[i].input]);
    std::vector<int64_t> dims(rank);
    std::vector<const char*> names(rank, "");
    STOF_ORT_RETURN(api->GetDimensions(inputs[rules[i].input], dims.data(), rank));
    STOF_ORT_RETURN(api->GetSymbolicDimensions(inputs[rules[i].input], names.data(), rank));
    const int64_t size = dims[rules[i].axis];
    const bool scaled = rules[i].times != rules[i].over || rules[i].by_input >= 0;
    // A model may claim any size; one that overflows is unknown, and refused when the node runs.
    int64_t times = 0;
    sizes[i] = size >= 0 && !__builtin_mul_overflow(size, rules[i].times, &times) ? times / rules[i].over : -1;
    if (rules[i].by_input >= 0) {
      std::vector<int64_t> by(static_cast<size_t>(ranks[rules[i].by_input]));
      STOF_ORT_RETURN(api->GetDimensions(inputs[rules[i].by_input], by.data(), by.size()));
      const int64_t factor = by[static_cast<size_t>(rules[i].by_axis)];
      if (sizes[i] < 0 || factor < 0 || __builtin_mul_overflow(sizes[i], factor, &sizes[i])) sizes[i] = -1;
    }
    if (size < 0 && !scaled && names[rules[i].axis] != nullptr) symbols[i] = names[rules[i].axis];
  }
  // ONNX Runtime takes a dimension of -1 without a symbol for a size, so an unknown one leaves the whole shape open.
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 && (symbols[i] == nullptr || symbols[i][0] == '\0')) return nullptr;
  }
  OrtTensorTypeAndShapeInfo* raw = nullptr;
  STOF_ORT_RETURN(api->CreateTensorTypeAndShapeInfo(&raw));
  const ShapeInfo shape(raw, api->ReleaseTensorTypeAndShapeInfo);
  STOF_ORT_RETURN(api->SetDimensions(raw, sizes.data(), sizes.size()));
  STOF_ORT_RETURN(api->SetSymbolicDimensions(raw, symbols.data(), symbols.size()));
  // Input 0's type, not this registration's: ONNX Runtime asks one registration for all types of the operator.
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  if (self.description->lists) {
    type = static_cast<ONNXTensorElementDataType>(self.description->output_type(attributes, index));
  } else {
    STOF_ORT_RETURN(api->GetTensorElementType(inputs[0], &type));
    type = static_cast<ONNXTensorElementDataType>(self.description->OutputType(index, static_cast<DType>(type)));
  }
  STOF_ORT_RETURN(api->SetTensorElementType(raw, type));
  return api->ShapeInferContext_SetOutputTypeShape(context, static_cast<size_t>(index), raw);
}

OrtStatus* InferLists(const Registration& self, OrtShapeInferContext* context, const InferAttributes& attributes) {
  const OrtApi* api = self.api;
  size_t count = 0;
  STOF_ORT_RETURN(api->ShapeInferContext_GetInputCount(context, &count));
  std::vector<OrtTensorTypeAndShapeInfo*> inputs(std::min<size_t>(count, kMaxInputs), nullptr);
  std::vector<int> ranks(inputs.size(), -1);
  for (size_t i = 0; i < inputs.size(); ++i) {
    size_t rank = 0;
    if (Failed(api, api->ShapeInferContext_GetInputTypeShape(context, i, &inputs[i])) || inputs[i] == nullptr ||
        Failed(api, api->GetDimensionsCount(inputs[i], &rank))) {
      continue;
    }
    ranks[i] = static_cast<int>(rank);
  }
  // The first output alone: a node may take fewer than the description has, the API does not tell how many, and ONNX
  // Runtime up to 1.23 ends the process when it is told the shape of one that a node does not have. The others' shapes
  // are the model's value_info.
  const DType type = self.description->output_type(attributes, 0);
  // On the CPU the runtime may turn an fp16 node into one of fp32, and refuses it when we say fp16 then; a shape
  // without a type cannot be given. So these types come from the model's value_info, too.
  if (type == DType::kUndefined || type == DType::kF16) return nullptr;
  (void)Failed(api, InferOne(self, context, attributes, inputs, ranks, 0));
  return nullptr;
}

OrtStatus* ORT_API_CALL InferShapes(const OrtCustomOp* op, OrtShapeInferContext* context) {
  const Registration& self = Self(op);
  try {
    const InferAttributes attributes(self.api, context);
    if (self.description->lists) return InferLists(self, context, attributes);
    std::vector<OrtTensorTypeAndShapeInfo*> inputs(self.description->typed_inputs, nullptr);
    std::vector<int> ranks(inputs.size(), 0);
    for (size_t i = 0; i < inputs.size(); ++i) {
      size_t rank = 0;
      // An input of unknown shape leaves the output's shape unknown; Run checks it anyway.
      if (Failed(self.api, self.api->ShapeInferContext_GetInputTypeShape(context, i, &inputs[i])) ||
          inputs[i] == nullptr || Failed(self.api, self.api->GetDimensionsCount(inputs[i], &rank)) || rank == 0) {
        return nullptr;
      }
      ranks[i] = static_cast<int>(rank);
    }
    // Nothing of optional ones: the API does not tell whether a node has them, and ONNX Runtime up to 1.23 ends the
    // process when it is told the shape of an output that a node does not have.
    for (int i = 0; i < self.description->outputs; ++i) {
      STOF_ORT_RETURN(InferOne(self, context, attributes, inputs, ranks, i));
    }
    return nullptr;
  } catch (const std::exception& error) {
    return self.api->CreateStatus(ORT_FAIL, error.what());
  }
}

}  // namespace

void Fill(const OrtApi* api, const OpDescription& description, DType type, const char* provider,
          Registration* registration) {
  Registration& r = *registration;
  static_cast<OrtCustomOp&>(r) = OrtCustomOp{};
  r.description = &description;
  r.type = type;
  r.provider = provider;
  r.api = api;
  r.version = kApiVersion;
  r.GetName = [](const OrtCustomOp* op) { return Self(op).description->name; };
  r.GetExecutionProviderType = [](const OrtCustomOp* op) { return Self(op).provider; };
  r.GetInputTypeCount = [](const OrtCustomOp* op) -> size_t {
    if (Self(op).description->lists) return 1;
    return Self(op).description->typed_inputs + Self(op).description->optional_inputs;
  };
  r.GetInputType = [](const OrtCustomOp* op, size_t i) {
    return i < static_cast<size_t>(Self(op).description->typed_inputs)
               ? static_cast<ONNXTensorElementDataType>(Self(op).type)
               : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  };
  r.GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) {
    if (Self(op).description->lists) return INPUT_OUTPUT_VARIADIC;
    return i < static_cast<size_t>(Self(op).description->typed_inputs) ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  r.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  r.GetOutputTypeCount = [](const OrtCustomOp* op) -> size_t {
    const OpDescription& description = *Self(op).description;
    return description.lists ? 1 : description.outputs + description.optional_outputs;
  };
  r.GetOutputType = [](const OrtCustomOp* op, size_t i) {
    return static_cast<ONNXTensorElementDataType>(Self(op).description->OutputType(static_cast<int>(i), Self(op).type));
  };
  r.GetOutputCharacteristic = [](const OrtCustomOp* op, size_t i) {
    const OpDescription& description = *Self(op).description;
    if (description.lists) return INPUT_OUTPUT_VARIADIC;
    return i < static_cast<size_t>(description.outputs) ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  r.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  r.GetVariadicInputHomogeneity = [](const OrtCustomOp* op) { return Self(op).description->lists ? 0 : 1; };
  r.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  r.GetVariadicOutputHomogeneity = [](const OrtCustomOp* op) { return Self(op).description->lists ? 0 : 1; };
  r.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  r.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  r.CreateKernelV2 = CreateKernel;
  r.KernelComputeV2 = Compute;
  r.KernelDestroy = DestroyKernel;
  r.InferOutputShapeFn = InferShapes;
}

}  // namespace stof::ort
