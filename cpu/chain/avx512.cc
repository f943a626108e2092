// SPDX-License-Identifier: Apache-2.0
// Empty where the compiler was not given avx512's flags: other processors build without it.
#if defined(__AVX512F__)
#define STOF_ISA avx512
#include "cpu/chain/kernels.h"

namespace stof {
namespace cpu {
namespace avx512::chain {

const ChainKernels kChainKernels = STOF_CHAIN_KERNELS;

}  // namespace avx512::chain
}  // namespace cpu
}  // namespace stof
#endif
