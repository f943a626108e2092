// SPDX-License-Identifier: Apache-2.0
// ONNX Runtime's view of an OpDescription, over the C API alone. A registration's kernels are in kernel.h, and the
// shapes of its outputs in shape_inference.h.
#ifndef STOF_PLUGINS_ORT_ADAPTER_H_
#define STOF_PLUGINS_ORT_ADAPTER_H_

#include <onnxruntime_c_api.h>

#include "plugins/core/contract/op.h"

namespace stof::ort {

// The oldest table that has all we call (GetScratchBuffer-era allocators, ParallelFor, shape inference): an older
// runtime cannot run the op, a newer one still serves this version.
constexpr uint32_t kApiVersion = 18;

constexpr int kMaxInputs = 32;  // of a node

// One registration: an operator for one pair of element types on one execution provider. `OrtCustomOp` comes first so
// that the pointer that ONNX Runtime passes is also a pointer to this.
struct Registration : OrtCustomOp {
  const OpDescription* description = nullptr;
  DType type = DType::kUndefined;
  DType storage = DType::kUndefined;  // of what OpDescription::storage_inputs and storage_outputs name
  const OrtApi* api = nullptr;
  const char* provider = nullptr;  // nullptr: the CPU provider; else one that computes with CUDA
};

inline const Registration& Self(const OrtCustomOp* op) { return *static_cast<const Registration*>(op); }

void Fill(const OrtApi* api, const OpDescription& description, DType type, DType storage, const char* provider,
          Registration* registration);

}  // namespace stof::ort
#endif  // STOF_PLUGINS_ORT_ADAPTER_H_
