// SPDX-License-Identifier: Apache-2.0
// What the host and the device compute alike.
#ifndef STOF_CUDA_COMMON_HOST_DEVICE_H_
#define STOF_CUDA_COMMON_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define STOF_EVERYWHERE __host__ __device__
#else
#define STOF_EVERYWHERE
#endif

#endif  // STOF_CUDA_COMMON_HOST_DEVICE_H_
