// SPDX-License-Identifier: Apache-2.0
// Empty where the compiler was not given avx512's flags: other processors build without it.
#if defined(__AVX512F__)
#define STOF_ISA avx512
#define STOF_SIMD "cpu/simd/avx512.h"
#include "cpu/cached_attention/append_kernel.h"

namespace stof {
namespace cpu {
namespace avx512::cached_attention {

const AppendKernels kAppendKernels = {Append};

}  // namespace avx512::cached_attention
}  // namespace cpu
}  // namespace stof
#endif
