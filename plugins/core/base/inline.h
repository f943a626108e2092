// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_CORE_BASE_INLINE_H_
#define STOF_PLUGINS_CORE_BASE_INLINE_H_

// Begins a function of a header that CPU kernels call. Where one is not inlined, it is a weak symbol, compiled for an
// instruction set that the machine may lack, and the linker may keep that copy for all callers.
#define STOF_ALWAYS_INLINE inline __attribute__((always_inline))

// Likewise, of a function that CUDA kernels call, too.
#if defined(__CUDACC__)
#define STOF_ALWAYS_INLINE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define STOF_ALWAYS_INLINE_HOST_DEVICE STOF_ALWAYS_INLINE
#endif

#endif  // STOF_PLUGINS_CORE_BASE_INLINE_H_
