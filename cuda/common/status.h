// SPDX-License-Identifier: Apache-2.0
// CUDA errors as Status, and a guard for calls that stream capture would forbid.
#ifndef STOF_CUDA_COMMON_STATUS_H_
#define STOF_CUDA_COMMON_STATUS_H_

#include <cuda_runtime.h>

#include <string>

#include "plugins/core/base/status.h"

namespace stof {
namespace cuda {

// what: the call that gave the error. Clears the thread's last error, so that no later call reports it.
inline Status ToStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status();
  cudaGetLastError();
  return Status::Error(std::string(what) + ": CUDA error " + std::to_string(static_cast<int>(error)) + ", " +
                       cudaGetErrorString(error));
}

// While it lives, the thread may allocate, free and query events although another thread captures a stream.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_STATUS_H_
