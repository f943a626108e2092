/* SPDX-License-Identifier: Apache-2.0
 * All that TensorRT's headers want of CUDA: two opaque handles. Stands in for the toolkit's header of this name in
 * builds without CUDA kernels. */
#ifndef STOF_PLUGINS_TRT_NO_CUDA_CUDA_RUNTIME_API_H_
#define STOF_PLUGINS_TRT_NO_CUDA_CUDA_RUNTIME_API_H_

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;

#endif /* STOF_PLUGINS_TRT_NO_CUDA_CUDA_RUNTIME_API_H_ */
