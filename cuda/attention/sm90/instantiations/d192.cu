// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/wide_heads.cuh"

namespace stof {
namespace cuda {

const Sm90Kernel* FindSm90D192(bool bf16, Extras extras) {
  return sm90::Wide<192, 96, 3000, 1570, 1680>::Find(bf16, extras);
}

}  // namespace cuda
}  // namespace stof
