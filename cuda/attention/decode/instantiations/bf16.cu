// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/cluster_launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindDecodeBf16(const KernelProblem& problem) { return FindDecode<__nv_bfloat16>(problem); }

}  // namespace cuda
}  // namespace stof
