// SPDX-License-Identifier: Apache-2.0
#define STOF_ISA portable
#include "cpu/chain/kernels.h"

namespace stof {
namespace cpu {
namespace portable::chain {

const ChainKernels kChainKernels = STOF_CHAIN_KERNELS;

}  // namespace portable::chain
}  // namespace cpu
}  // namespace stof
