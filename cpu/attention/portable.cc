// SPDX-License-Identifier: Apache-2.0
#define STOF_ISA portable
#define STOF_SIMD "cpu/simd/portable.h"
#include "cpu/attention/kernel.h"

namespace stof {
namespace cpu {
namespace portable::attention {

const AttentionKernels kAttentionKernels = {ScratchBytes, Prepare, Pack, AttendTileRow, AttendSplit, CombineSplits};

}  // namespace portable::attention
}  // namespace cpu
}  // namespace stof
