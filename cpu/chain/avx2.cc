// SPDX-License-Identifier: Apache-2.0
// Empty where the compiler was not given avx2's flags: other processors build without it.
#if defined(__AVX2__)
#define STOF_ISA avx2
#include "cpu/chain/kernels.h"

namespace stof {
namespace cpu {
namespace avx2::chain {

const ChainKernels kChainKernels = STOF_CHAIN_KERNELS;

}  // namespace avx2::chain
}  // namespace cpu
}  // namespace stof
#endif
