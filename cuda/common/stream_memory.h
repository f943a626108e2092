// SPDX-License-Identifier: Apache-2.0
// Memory in the order of a stream, and what else of streams has nothing to do with attention.
#ifndef STOF_CUDA_COMMON_STREAM_MEMORY_H_
#define STOF_CUDA_COMMON_STREAM_MEMORY_H_

#include <cuda_runtime.h>

#include "plugins/core/contract/status.h"

namespace stof {
namespace cuda {

// As CudaBackend has them.
bool Take(void* stream, size_t bytes, void** memory);
void Give(void* stream, void* memory);
bool Captured(void* stream);
bool CapturedOrDone(void* stream);
void Relaxed(void (*run)(void* self), void* self);

// A stream of this library's own on the current device, for uploads that come before the stream of a run is known.
Status UploadStream(cudaStream_t* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_STREAM_MEMORY_H_
