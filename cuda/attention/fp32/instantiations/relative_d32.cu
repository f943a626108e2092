// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/fp32/launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindFp32RelativeD32(const KernelProblem&) { return kFp32RelativeKernels<32>; }

}  // namespace cuda
}  // namespace stof
