// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/splitkv_launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindChosenDecodeBf16(const KernelProblem& problem) { return FindChosenDecode<__nv_bfloat16>(problem); }

}  // namespace cuda
}  // namespace stof
