// SPDX-License-Identifier: Apache-2.0
// Kernels of usual chains that the library brings along, compiled when it is built: the same ones that would be made
// when they are needed, found by the same text. For devices without NVRTC, and for first runs that do not wait.
#ifndef STOF_CUDA_CHAIN_PREBUILT_H_
#define STOF_CUDA_CHAIN_PREBUILT_H_

#include <string>
#include <vector>

#include "plugins/core/base/types.h"

namespace stof {
namespace cuda {

// What usual chains of a type are made into; for the build.
std::vector<std::string> UsualChainKernels(DType dtype);

struct UsualChainKernel {
  const char* text = nullptr;
  const void* kernel = nullptr;  // a function of the library's, for the CUDA runtime
};
struct UsualChains {
  const UsualChainKernel* kernels = nullptr;
  int count = 0;
};
// Of the files that the build makes, a type each.
UsualChains UsualChainsF16();
UsualChains UsualChainsBf16();
UsualChains UsualChainsF32();

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHAIN_PREBUILT_H_
