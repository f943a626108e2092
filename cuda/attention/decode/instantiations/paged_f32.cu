// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/splitkv_launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindPagedDecodeF32(const KernelProblem& problem) { return FindPagedDecode<float>(problem); }

}  // namespace cuda
}  // namespace stof
