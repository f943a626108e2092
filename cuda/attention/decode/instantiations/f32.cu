// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/cluster_launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindDecodeF32(const KernelProblem& problem) { return FindDecode<float>(problem); }

}  // namespace cuda
}  // namespace stof
