// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_sm90.cuh"

namespace stof {
namespace cuda {

LaunchSm90 FindSm90D64(bool bf16) { return bf16 ? sm90::Launch<64, __nv_bfloat16> : sm90::Launch<64, __half>; }

}  // namespace cuda
}  // namespace stof
