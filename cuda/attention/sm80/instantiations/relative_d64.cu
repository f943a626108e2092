// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm80/table.cuh"

namespace stof {
namespace cuda {

KernelTable FindSm80RelativeD64(const KernelProblem& problem) { return FindSm80<64, Sm80Scores::kRelative>(problem); }

}  // namespace cuda
}  // namespace stof
