// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm80/kernel.cuh"

namespace stof {
namespace cuda {

Launch FindSm80D128(bool bf16, bool score_mod) {
  if (bf16) return score_mod ? LaunchSm80<128, __nv_bfloat16, true> : LaunchSm80<128, __nv_bfloat16, false>;
  return score_mod ? LaunchSm80<128, __half, true> : LaunchSm80<128, __half, false>;
}

}  // namespace cuda
}  // namespace stof
