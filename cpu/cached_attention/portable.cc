// SPDX-License-Identifier: Apache-2.0
#define STOF_ISA portable
#define STOF_SIMD "cpu/simd/portable.h"
#include "cpu/cached_attention/append_kernel.h"

namespace stof {
namespace cpu {
namespace portable::cached_attention {

const AppendKernels kAppendKernels = {Append};

}  // namespace portable::cached_attention
}  // namespace cpu
}  // namespace stof
