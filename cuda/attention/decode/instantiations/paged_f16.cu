// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/splitkv_launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindPagedDecodeF16(const KernelProblem& problem) { return FindPagedDecode<__half>(problem); }

}  // namespace cuda
}  // namespace stof
