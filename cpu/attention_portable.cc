// SPDX-License-Identifier: Apache-2.0
#define STOF_ISA portable
#define STOF_SIMD "cpu/simd_portable.h"
#include "cpu/attention_kernel.h"

namespace stof {
namespace cpu {
namespace portable {

const Kernels kKernels = {ScratchBytes, Prepare, Pack, TileRow, Chunk, Join};

}  // namespace portable
}  // namespace cpu
}  // namespace stof
