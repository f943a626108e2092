// SPDX-License-Identifier: Apache-2.0
// A node's kernel: creates the operator, has it make ready what it can before the first run, and computes.
#ifndef STOF_PLUGINS_ORT_KERNEL_H_
#define STOF_PLUGINS_ORT_KERNEL_H_

#include <onnxruntime_c_api.h>

namespace stof::ort {

OrtStatus* ORT_API_CALL CreateKernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out);
OrtStatus* ORT_API_CALL Compute(void* kernel, OrtKernelContext* context);
void ORT_API_CALL DestroyKernel(void* kernel);

}  // namespace stof::ort
#endif  // STOF_PLUGINS_ORT_KERNEL_H_
