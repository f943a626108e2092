// SPDX-License-Identifier: Apache-2.0
// Stream-ordered memory, and the capture state of streams.
#ifndef STOF_CUDA_COMMON_STREAM_MEMORY_H_
#define STOF_CUDA_COMMON_STREAM_MEMORY_H_

#include <cuda_runtime.h>

#include "plugins/core/base/status.h"

namespace stof {
namespace cuda {

// The functions of these names in CudaBackend (plugins/core/contract/cuda_backend.h).
bool AllocateAsync(void* stream, size_t bytes, void** memory);
void FreeAsync(void* stream, void* memory);
// A stream whose state is unknown counts as captured: its memory is never shared.
bool IsCapturing(void* stream);
bool SynchronizeUnlessCapturing(void* stream);
void CallInRelaxedCapture(void (*run)(void* self), void* self);

// The library's own stream on the current device, for uploads before the stream of a run is known.
Status UploadStream(cudaStream_t* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_STREAM_MEMORY_H_
