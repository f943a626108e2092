// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CUDA_BENCH_BENCH_COPY_H_
#define STOF_CUDA_BENCH_BENCH_COPY_H_

#include <cuda_runtime.h>

#include <cstddef>

namespace stof {

// A plain copy of whole blocks of 16 bytes, on the stream.
cudaError_t CopyByKernel(void* to, const void* from, size_t bytes, cudaStream_t stream);

}  // namespace stof
#endif  // STOF_CUDA_BENCH_BENCH_COPY_H_
