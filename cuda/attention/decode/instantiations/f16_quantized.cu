// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/splitkv_launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindDecodeF16Int8(const KernelProblem& problem) { return FindQuantizedDecode<__half, int8_t>(problem); }
KernelTable FindDecodeF16Float8(const KernelProblem& problem) { return FindQuantizedDecode<__half, Float8>(problem); }

}  // namespace cuda
}  // namespace stof
