// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_fp32_launch.cuh"

namespace stof {
namespace cuda {

Fp32Kernel FindFp32D96(bool exact) { return MakeFp32Kernel<96>(exact); }

}  // namespace cuda
}  // namespace stof
