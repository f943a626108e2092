// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm80/table.cuh"

namespace stof {
namespace cuda {

KernelTable FindSm80Int8D128(const KernelProblem& problem) { return FindSm80Int8<128>(problem); }

}  // namespace cuda
}  // namespace stof
