// SPDX-License-Identifier: Apache-2.0
// Empty where the compiler was not given avx512's flags: other processors build without it.
#if defined(__AVX512F__)
#define STOF_ISA avx512
#define STOF_SIMD "cpu/simd_avx512.h"
#include "cpu/attention_kernel.h"

namespace stof {
namespace cpu {
namespace avx512 {

const Kernels kKernels = {ScratchBytes, Prepare, Pack, TileRow, Chunk, Join};

}  // namespace avx512
}  // namespace cpu
}  // namespace stof
#endif
