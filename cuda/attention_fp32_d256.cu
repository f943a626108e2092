// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_fp32.cuh"

namespace stof {
namespace cuda {

Fp32Kernel FindFp32D256() { return MakeFp32Kernel<256>(); }

}  // namespace cuda
}  // namespace stof
