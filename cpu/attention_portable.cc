// SPDX-License-Identifier: Apache-2.0
#define STOF_ISA portable
#include "cpu/attention_kernel.h"
#include "cpu/simd_portable.h"

namespace stof {
namespace cpu {
namespace portable {

const Kernels kKernels = {ScratchBytes, Prepare, Pack, TileRow, Chunk, Join};

}  // namespace portable
}  // namespace cpu
}  // namespace stof
