// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/fp32/launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindFp32D128(const KernelProblem& problem) { return FindFp32<128>(problem); }

}  // namespace cuda
}  // namespace stof
