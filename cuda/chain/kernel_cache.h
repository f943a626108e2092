// SPDX-License-Identifier: Apache-2.0
// Kernels made for chains, compiled and loaded: found by their text, in this process, in the library, on disk, or
// compiled.
#ifndef STOF_CUDA_CHAIN_KERNEL_CACHE_H_
#define STOF_CUDA_CHAIN_KERNEL_CACHE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "plugins/core/base/status.h"

namespace stof {
namespace cuda {

// The kernel of a plan's text on the current device, for LaunchChainKernel; nullptr where there is none, and *why says
// the reason. make: what is not loaded yet may be; never while a stream is being captured.
void* FindChainKernel(const std::string& text, int device, bool make, std::string* why);
Status LaunchChainKernel(void* kernel, int64_t ctas, int threads, const std::vector<int64_t>& words, void* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHAIN_KERNEL_CACHE_H_
