// SPDX-License-Identifier: Apache-2.0
// Empty where the compiler was not given avx512's flags: other processors build without it.
#if defined(__AVX512F__)
#define STOF_ISA avx512
#define STOF_SIMD "cpu/simd/avx512.h"
#include "cpu/attention/kernel.h"

namespace stof {
namespace cpu {
namespace avx512::attention {

const AttentionKernels kAttentionKernels = {ScratchBytes, Prepare, Pack, AttendTileRow, AttendSplit, CombineSplits};

}  // namespace avx512::attention
}  // namespace cpu
}  // namespace stof
#endif
