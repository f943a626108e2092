// SPDX-License-Identifier: Apache-2.0
// How an operator is described once, for every runtime adapter. Plain C++, no framework type.
#ifndef STOF_PLUGINS_CORE_CONTRACT_OP_H_
#define STOF_PLUGINS_CORE_CONTRACT_OP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/host/fork_guard.h"

namespace stof {

enum class AttributeType : uint8_t { kInt, kFloat, kString, kInts };

// Attributes of a node. Each getter leaves *value alone and returns false where the attribute is absent or of another
// type. CheckTypes() reports the latter: silently taking the default would give a wrong result.
class AttributeReader {
 public:
  virtual ~AttributeReader() = default;
  virtual bool Int(const char* name, int64_t* value) const = 0;
  virtual bool Float(const char* name, float* value) const = 0;
  virtual bool String(const char* name, std::string* value) const = 0;
  virtual bool Ints(const char* name, std::vector<int64_t>* value) const = 0;
  // An error that names the first attribute whose getter found another type.
  Status CheckTypes() const {
    if (mistyped_.empty()) return Status();
    static constexpr const char* kTypes[] = {"an integer", "a float", "a string", "a list of integers"};
    return Status::Error("attribute " + mistyped_ + " is of another type, expected " +
                         kTypes[static_cast<int>(wanted_)]);
  }

 protected:
  void SetMistyped(const char* name, AttributeType wanted) const {
    if (mistyped_.empty()) mistyped_ = name, wanted_ = wanted;
  }

 private:
  mutable std::string mistyped_;
  mutable AttributeType wanted_ = AttributeType::kInt;
};

// Owns what captured graphs of an operator's runs read: it lives as long as the operator.
class Keeper {
 public:
  void Keep(const std::shared_ptr<const void>& what) {
    const auto all = kept_.Lock();
    for (const auto& kept : *all) {
      if (kept == what) return;
    }
    all->push_back(what);
  }

 private:
  ForkSafe<std::vector<std::shared_ptr<const void>>> kept_;
};

// The resources of a run. Memory from allocate is 64-byte aligned and lives until Run returns; nullptr when there is
// none.
struct RunContext {
  Parallel parallel;
  void* (*allocate)(void* self, size_t bytes) = nullptr;
  void* self = nullptr;
  // On a device, tensors and memory are the device's, and Run returns when its work is queued on the stream.
  bool on_cuda = false;
  void* stream = nullptr;  // cudaStream_t
  // 1 ... DevicePlan::kernels takes that kernel; 0, or one that does not fit: the library chooses.
  int kernel = 0;
  // The operator's; nullptr: what captured graphs read stays for ever.
  Keeper* keeper = nullptr;

  // Allocates a workspace, or says that there is no memory. Of 0 bytes it is nullptr.
  Status Allocate(size_t bytes, void** workspace) const {
    *workspace = bytes == 0 ? nullptr : allocate(self, bytes);
    if (bytes == 0 || *workspace != nullptr) return Status();
    return Status::Error("no memory for a workspace of " + std::to_string(bytes) + " bytes");
  }
};

// A run on a device, as far as types and shapes decide it.
struct DevicePlan {
  // Bytes that Run takes from allocate at most, each block rounded up to 64.
  size_t workspace = 0;
  // Choices beside the library's own on the current device; 0: none, or no device.
  int kernels = 0;
  // A run queues several kernels, one after the other. Split-KV with its combine kernel does not count: it depends on
  // the sizes.
  bool runs_several_kernels = false;
};

// One dimension of an output: dimension `axis` of input `input` * times / over, and, where by_input is not negative,
// times dimension `by_axis` of input `by_input`. Where input is negative: `value` (-1: unknown).
struct DimRule {
  int input = -1;
  int axis = 0;
  int64_t value = -1;
  int64_t times = 1;
  int64_t over = 1;
  int by_input = -1;
  int by_axis = 0;
};

// What runs a node, as `stof-optimize --target` names it.
enum class Target : int32_t { kCpu, kCuda, kTensorRt };
constexpr const char* kTargetNames[] = {"cpu", "cuda", "tensorrt"};

// An operator with its attributes parsed. Run is called from several threads at once.
class Op {
 public:
  virtual ~Op() = default;
  // input_count tensors with dtype and dims, of which constant ones also have data (it lives only during the call). The
  // default checks their number.
  virtual Status Prepare(const Tensor* inputs, int input_count) {
    (void)inputs;
    if (input_count >= InputCount()) return Status();
    return Status::Error("has " + std::to_string(input_count) + " inputs, expected " + std::to_string(InputCount()));
  }
  // The types that the runtime gives the outputs of a variadic operator. They may be wider than the operator's own:
  // ONNX Runtime turns fp16 nodes without fp16 neighbours into fp32. kUndefined: not known.
  virtual void SetOutputTypes(const DType* types, int count) { (void)types, (void)count; }
  // Checks inputs' types and shapes and fills dtype and dims of the outputs.
  virtual Status InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const = 0;
  virtual Status Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
                     const RunContext& context) const = 0;

  // ---- for runtimes that plan ahead ----
  // How many inputs and outputs the attributes ask for.
  virtual int InputCount() const = 0;
  virtual int OutputCount() const { return 1; }
  // Whether input `index` may be of type dtype beside typed inputs of type `typed`. The default: of that type alone.
  virtual bool IsTypeAllowed(int index, DType dtype, DType typed) const {
    return index >= 0 && index < InputCount() && dtype == typed;
  }
  // Why a target does not take the operator with these attributes.
  virtual Status CheckTarget(Target target) const {
    (void)target;
    return Status();
  }
  // Plans a run on a device with these types and shapes (no data), or says why no kernel takes them. Works in builds
  // without kernels and on machines without a device, too. The default checks types and shapes, for one kernel without
  // workspace.
  virtual Status PlanDevice(const Tensor* inputs, int input_count, DevicePlan* plan) const {
    *plan = DevicePlan();
    std::vector<Tensor> outputs(static_cast<size_t>(OutputCount()));
    return InferOutputs(inputs, input_count, outputs.data(), OutputCount());
  }
  // Brings to the current device what a run with these shapes reads besides its inputs, and the code of its kernels.
  // The default: nothing.
  virtual Status PrepareDevice(const Tensor* inputs, int input_count, int kernel) const {
    (void)inputs, (void)input_count, (void)kernel;
    return Status();
  }

  // Bytes that a run on the CPU with these types and shapes takes from allocate. Constants have data, others need none.
  // Of floats only the address is looked at: constant ones count as given to Prepare. Lengths without data are the
  // longest. The default: none.
  virtual Status PlanHost(const Tensor* inputs, int input_count, int threads, size_t* workspace) const {
    (void)inputs, (void)input_count, (void)threads;
    *workspace = 0;
    return Status();
  }

  // ---- for runtimes that know shapes when they make a node ----
  // Called once, before the first run: makes what a run with these types and shapes would make first. Where they are
  // all known it lives as long as the node; unknown dimensions are -1. threads: those of runs on the CPU.
  virtual Status PrepareNode(const Tensor* inputs, int input_count, bool on_cuda, int threads) {
    (void)inputs, (void)input_count, (void)on_cuda, (void)threads;
    return Status();
  }
};

// An attribute by name and type, for runtimes that want them declared.
struct AttributeDescription {
  const char* name;
  AttributeType type;
  bool is_for_tensorrt = true;  // else its plugins do not read it
};

// A number that limits what an operator takes.
struct OpLimit {
  const char* name;
  int64_t value;
};

// A view of a constant array.
template <typename T>
class ArrayView {
 public:
  constexpr ArrayView() = default;
  template <int kSize>
  constexpr ArrayView(const T (&array)[kSize]) : data_(array), size_(kSize) {}  // NOLINT: implicit as of std::span
  constexpr const T* begin() const { return data_; }
  constexpr const T* end() const { return data_ + size_; }
  constexpr int size() const { return size_; }
  constexpr const T& operator[](int i) const { return data_[i]; }

 private:
  const T* data_ = nullptr;
  int size_ = 0;
};

// An operator as adapters need it before a node of it exists.
struct OpDescription {
  const char* name = "";
  // The first inputs, and all outputs, share the type T that a registration fixes.
  int typed_inputs = 0;
  // Instead of typed inputs: the first inputs, each of any type. T is then that of the outputs alone.
  int untyped_inputs = 0;
  // Further inputs of any type.
  int optional_inputs = 0;
  // Outputs that every node has.
  int outputs = 1;
  // Outputs that a node has where Op::OutputCount says so, of type optional_type whatever T is; kUndefined: of type T.
  // shape_rule says nothing of those that the attributes do not ask for.
  int optional_outputs = 0;
  DType optional_type = DType::kUndefined;
  // Bit i: input or output i has T, or one of storage_types in its place, where it is given. All of them have one type.
  uint64_t storage_inputs = 0, storage_outputs = 0;
  ArrayView<DType> storage_types;
  // Bit i: input i is in host memory, on every target.
  uint64_t host_inputs = 0;
  // Whether TensorRT gets a plugin of it. Its plugins update no tensor in place and read no value in host memory.
  bool has_tensorrt_plugin = true;
  // Possible T, and those of the CUDA kernels.
  ArrayView<DType> types;
  ArrayView<DType> cuda_types;
  // A list of inputs and one of outputs, each of any length from 1 and of any types, instead of typed inputs and a
  // fixed number of outputs. shape_rule then gets the ranks of all inputs, -1 where unknown; types and cuda_types are
  // {kUndefined}, and `outputs` is the longest list of them.
  bool is_variadic = false;
  // The type of a variadic operator's output; kUndefined: there is no such output.
  DType (*output_type)(const AttributeReader& attributes, int index) = nullptr;
  ArrayView<AttributeDescription> attributes;
  Status (*create)(const AttributeReader& attributes, std::unique_ptr<Op>* op) = nullptr;
  // Roles that optional inputs may have, where an attribute gives them roles.
  ArrayView<const char*> roles;
  // Whether attribute `activation` is one of kActivationNames, which stof_op_limits then gives out.
  bool has_activation = false;
  // Whether kernels of a target leave out key tiles by attribute skip_threshold; nullptr: none do.
  bool (*skips_scores)(Target target) = nullptr;
  // Likewise key blocks by attribute block_threshold.
  bool (*chooses_blocks)(Target target) = nullptr;
  // Whether kernels of a target choose pages by attribute chosen_pages; nullptr: none do.
  bool (*chooses_pages)(Target target) = nullptr;
  // The limits of a node with typed inputs of type dtype on a target, which stof_op_limits gives out; nullptr: none.
  std::vector<OpLimit> (*limits)(Target target, DType dtype) = nullptr;
  // Symbolic shape of output `index` from the ranks of the first inputs; an empty result means unknown. nullptr: no
  // shape is known before a run.
  std::vector<DimRule> (*shape_rule)(const AttributeReader& attributes, const int* ranks, int rank_count,
                                     int index) = nullptr;

  // Inputs that every node has, by which shape_rule goes.
  constexpr int FirstInputs() const { return typed_inputs + untyped_inputs; }
  // The type of an output where T is `typed` and what is stored has type `storage`.
  constexpr DType OutputType(int index, DType typed, DType storage) const {
    if ((storage_outputs >> index & 1u) != 0) return storage;
    return index < outputs || optional_type == DType::kUndefined ? typed : optional_type;
  }
  constexpr DType OutputType(int index, DType typed) const { return OutputType(index, typed, typed); }
  // Whether the operator runs on a device, which runtimes without a CPU want.
  constexpr bool has_cuda_kernels() const { return cuda_types.size() > 0; }
  constexpr ArrayView<DType> TypesOn(Target target) const {
    if (target == Target::kTensorRt && !has_tensorrt_plugin) return {};
    return target == Target::kCpu ? types : cuda_types;
  }
};

// Every operator of the library; the adapters loop over it.
const OpDescription* const* AllOps(int* count);

// Makes an operator: what its description's `create` does, in an environment whose variables have right values.
Status CreateOp(const OpDescription& description, const AttributeReader& attributes, std::unique_ptr<Op>* op);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_OP_H_
