// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/fp32/launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindFp32D32(const KernelProblem& problem) { return FindFp32<32>(problem); }

}  // namespace cuda
}  // namespace stof
