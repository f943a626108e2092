// SPDX-License-Identifier: Apache-2.0
// How an operator is described once, for every runtime adapter. Plain C++, no framework type.
#ifndef STOF_PLUGINS_CORE_CONTRACT_OP_H_
#define STOF_PLUGINS_CORE_CONTRACT_OP_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/contract/kernels.h"
#include "plugins/core/contract/status.h"
#include "plugins/core/host/fork_guard.h"

namespace stof {

constexpr int kMaxRank = 8;

// A dense row-major tensor; data is nullptr where only type and shape are known, and where the tensor has no element.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kUndefined;
  int32_t rank = 0;
  int64_t dims[kMaxRank] = {};

  int64_t Elements() const {
    int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= dims[i];
    return count;
  }
};

// Without data.
inline Tensor Shaped(DType dtype, const std::vector<int64_t>& dims) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.rank = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), tensor.dims);
  return tensor;
}

enum class AttributeType : uint8_t { kInt, kFloat, kString, kInts };

// Attributes of a node. Each getter leaves *value alone and returns false where the attribute is absent, or of another
// type, which CheckTypes() then tells: a default in the place of what somebody wrote would be a wrong result.
class AttributeReader {
 public:
  virtual ~AttributeReader() = default;
  virtual bool Int(const char* name, int64_t* value) const = 0;
  virtual bool Float(const char* name, float* value) const = 0;
  virtual bool String(const char* name, std::string* value) const = 0;
  virtual bool Ints(const char* name, std::vector<int64_t>* value) const = 0;
  // An error names the first attribute that was asked for and found to be of another type.
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

// What runs of an operator have made and captured graphs go on reading: it lives as long as the operator.
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

// What a run may use. Memory from allocate is 64-byte aligned and lives until Run returns; nullptr when there is none.
struct RunContext {
  Parallel parallel;
  void* (*allocate)(void* self, size_t bytes) = nullptr;
  void* self = nullptr;
  // On a device, tensors and memory are the device's, and Run returns when its work is queued on the stream.
  bool on_cuda = false;
  void* stream = nullptr;  // cudaStream_t
  int kernel = 0;          // 1 ... DevicePlan::kernels takes that one; 0, or one that does not fit: the library chooses
  Keeper* keeper = nullptr;  // the operator's; nullptr: what captured graphs read stays for ever
};

// What runtimes that plan ahead ask of a run on a device.
struct DevicePlan {
  size_t workspace = 0;  // bytes that Run takes from allocate at most, each block rounded up to 64
  int kernels = 0;       // choices beside the library's own on the current device; 0: none, or no device
  bool several =
      false;  // a run queues several kernels, one after the other (rows in parts, by luck of the shape, left out)
};

// One dimension of an output: dimension `axis` of input `input`, times `times`, over `over`, and times dimension
// `by_axis` of input `by_input` where that is not negative; or, where input is negative, `value` (-1: unknown).
struct DimRule {
  int input = -1;
  int axis = 0;
  int64_t value = -1;
  int64_t times = 1;
  int64_t over = 1;
  int by_input = -1;
  int by_axis = 0;
};

// An operator with its attributes parsed. Run is called from several threads at once.
class Op {
 public:
  virtual ~Op() = default;
  // input_count tensors with dtype and dims, of which constant ones also have data (it lives only during the call).
  virtual Status Prepare(const Tensor* inputs, int input_count) = 0;
  // The types that the runtime gives the outputs of a list, which may be wider than the operator's own: ONNX Runtime
  // takes fp16 away from nodes that it has no fp16 neighbours for. kUndefined: not known.
  virtual void SetOutputTypes(const DType* types, int count) { (void)types, (void)count; }
  // Checks inputs' types and shapes and fills dtype and dims of the outputs.
  virtual Status InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const = 0;
  virtual Status Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
                     const RunContext& context) const = 0;

  // ---- for runtimes that plan ahead ----
  // How many inputs and outputs the attributes ask for.
  virtual int InputCount() const = 0;
  virtual int OutputCount() const { return 1; }
  // Whether input `index` may be of type dtype beside typed inputs of type `typed`.
  virtual bool Takes(int index, DType dtype, DType typed) const = 0;
  // A run on a device with these types and shapes (no data), or why no kernel of the library takes them. Also in builds
  // without kernels and on machines without a device.
  virtual Status PlanDevice(const Tensor* inputs, int input_count, DevicePlan* plan) const = 0;
  // Brings to the current device what a run with these shapes reads besides its inputs, and the code of its kernels, so
  // that the run itself need not.
  virtual Status ReadyDevice(const Tensor* inputs, int input_count, int kernel) const = 0;

  // ---- for runtimes that know shapes when they make a node ----
  // Called once, before the first run: does what a run with these types and shapes would do first, for the node's
  // lifetime where they are all known; dimensions that are not are -1. threads: those of runs on the CPU.
  virtual Status ReadyNode(const Tensor* inputs, int input_count, bool on_cuda, int threads) {
    (void)inputs, (void)input_count, (void)on_cuda, (void)threads;
    return Status();
  }
};

// Attributes by name and type, for runtimes that want them declared.
struct AttributeDescription {
  const char* name;
  AttributeType type;
};

struct OpDescription {
  const char* name;
  int typed_inputs;     // the first inputs, and all outputs, share the type T that a registration fixes
  int optional_inputs;  // further inputs of any type
  int outputs;          // that every node has; there may be optional_outputs more
  const DType* types;   // possible T
  int type_count;
  const DType* cuda_types;  // those of the CUDA kernels
  int cuda_type_count;
  Status (*create)(const AttributeReader& attributes, std::unique_ptr<Op>* op);
  // Symbolic shape of output `index` from the ranks of the typed inputs; an empty result means unknown.
  std::vector<DimRule> (*shape_rule)(const AttributeReader& attributes, const int* ranks, int rank_count, int index);
  const AttributeDescription* attributes;
  int attribute_count;
  // Instead of typed inputs and a fixed number of outputs: a list of inputs and one of outputs, each of any length from
  // 1 and of any types. shape_rule gets the ranks of all inputs, -1 where unknown; types and cuda_types are
  // {kUndefined}.
  bool lists = false;
  DType (*output_type)(const AttributeReader& attributes, int index) = nullptr;  // of lists; kUndefined: no such output
  // Outputs that a node has where Op::OutputCount says so, of one type each whatever T is. shape_rule says nothing of
  // those that the attributes do not ask for.
  int optional_outputs = 0;
  DType optional_type = DType::kUndefined;

  DType OutputType(int index, DType typed) const { return index < outputs ? typed : optional_type; }
};

// Whether there are CUDA kernels for an operator, which runtimes without a CPU want.
inline bool HasCudaKernels(const OpDescription& description) { return description.cuda_type_count > 0; }

// Every operator of the library; the adapters loop over it.
const OpDescription* const* AllOps(int* count);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_OP_H_
