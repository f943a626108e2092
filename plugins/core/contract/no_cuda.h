// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_CORE_CONTRACT_NO_CUDA_H_
#define STOF_PLUGINS_CORE_CONTRACT_NO_CUDA_H_

namespace stof {

// What an operator that is run on a device answers in a build without CUDA kernels.
constexpr char kNoCudaKernels[] =
    "this build has no CUDA kernels; in stof's source folder: CMAKE_ARGS=-DSTOF_CUDA=ON pip install .";

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_NO_CUDA_H_
