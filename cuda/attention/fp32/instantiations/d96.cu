// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/fp32/launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindFp32D96(const KernelProblem& problem) { return FindFp32<96>(problem); }

}  // namespace cuda
}  // namespace stof
