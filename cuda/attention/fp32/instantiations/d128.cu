// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/fp32/launch.cuh"

namespace stof {
namespace cuda {

Fp32Kernel FindFp32D128(bool exact) { return MakeFp32Kernel<128>(exact); }

}  // namespace cuda
}  // namespace stof
