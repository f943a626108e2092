// SPDX-License-Identifier: Apache-2.0
// ONNX Runtime's view of an OpDescription, over the C API alone.
#ifndef STOF_PLUGINS_ORT_ADAPTER_H_
#define STOF_PLUGINS_ORT_ADAPTER_H_

#include <onnxruntime_c_api.h>

#include "plugins/core/op.h"

namespace stof::ort {

// The oldest table that has all we call (GetScratchBuffer-era allocators, ParallelFor, shape inference): an older
// runtime cannot run the op, a newer one still serves this version.
constexpr uint32_t kApiVersion = 18;

// One registration: an operator for one element type on one execution provider. `OrtCustomOp` comes first so that the
// pointer that ONNX Runtime hands back is also a pointer to this.
struct Registration : OrtCustomOp {
  const OpDescription* description = nullptr;
  DType type = DType::kUndefined;
  const OrtApi* api = nullptr;
  const char* provider = nullptr;  // nullptr: the CPU provider; else one that computes with CUDA
};

void Fill(const OrtApi* api, const OpDescription& description, DType type, const char* provider,
          Registration* registration);

}  // namespace stof::ort
#endif  // STOF_PLUGINS_ORT_ADAPTER_H_
