// SPDX-License-Identifier: Apache-2.0
// STOF_HD marks functions that both the host and the device call. Unlike STOF_HOST_DEVICE of
// plugins/core/mask/expr_operate.h, it leaves inlining to the compiler.
#ifndef STOF_CUDA_COMMON_HOST_DEVICE_H_
#define STOF_CUDA_COMMON_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define STOF_HD __host__ __device__
#else
#define STOF_HD
#endif

#endif  // STOF_CUDA_COMMON_HOST_DEVICE_H_
