// SPDX-License-Identifier: Apache-2.0
// Values of ONNX Runtime as tensors of the core.
#ifndef STOF_PLUGINS_ORT_TENSORS_H_
#define STOF_PLUGINS_ORT_TENSORS_H_

#include <onnxruntime_c_api.h>

#include <vector>

#include "plugins/core/contract/op.h"

namespace stof::ort {

// Type and dimensions alone.
OrtStatus* Describe(const OrtApi* api, const OrtTensorTypeAndShapeInfo* info, Tensor* tensor);
// value: nullptr for an input left out.
OrtStatus* FromValue(const OrtApi* api, const OrtValue* value, Tensor* tensor);
// Whether a value is in device memory; constants of a CUDA kernel may be in either.
OrtStatus* OnDevice(const OrtApi* api, const OrtValue* value, bool* on_device);
// Brings a constant from the device; `copy` holds it. Floats, which no operator reads as constants and of which biases
// may be large, are left out.
Status ToHost(Tensor* tensor, std::vector<char>* copy);

}  // namespace stof::ort
#endif  // STOF_PLUGINS_ORT_TENSORS_H_
