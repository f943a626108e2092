// SPDX-License-Identifier: Apache-2.0
// Empty where the compiler was not given avx2's flags: other processors build without it.
#if defined(__AVX2__)
#define STOF_ISA avx2
#define STOF_SIMD "cpu/simd/avx2.h"
#include "cpu/cached_attention/append_kernel.h"

namespace stof {
namespace cpu {
namespace avx2::cached_attention {

const AppendKernels kAppendKernels = {Append};

}  // namespace avx2::cached_attention
}  // namespace cpu
}  // namespace stof
#endif
