// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/splitkv_launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindChosenDecodeF16(const KernelProblem& problem) { return FindChosenDecode<__half>(problem); }

}  // namespace cuda
}  // namespace stof
