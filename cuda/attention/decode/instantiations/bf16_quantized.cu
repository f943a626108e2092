// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/splitkv_launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindDecodeBf16Int8(const KernelProblem& problem) {
  return FindQuantizedDecode<__nv_bfloat16, int8_t>(problem);
}
KernelTable FindDecodeBf16Float8(const KernelProblem& problem) {
  return FindQuantizedDecode<__nv_bfloat16, Float8>(problem);
}

}  // namespace cuda
}  // namespace stof
