// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/wide_heads.cuh"

namespace stof {
namespace cuda {

// WideHeads: head size, keys of a tile; nanoseconds of a tile row, a full and a partial tile.
const Sm90Kernel* FindSm90D192(bool bf16, ScoreMod score_mod) {
  return sm90::WideHeads<192, 96, 3000, 1570, 1680>::Find(bf16, score_mod);
}

}  // namespace cuda
}  // namespace stof
