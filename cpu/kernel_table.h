// SPDX-License-Identifier: Apache-2.0
// The kernels of every operator for each instruction set.
#ifndef STOF_CPU_KERNEL_TABLE_H_
#define STOF_CPU_KERNEL_TABLE_H_

#include "cpu/attention/attention.h"
#include "cpu/chain/chain.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/packed.h"
#include "cpu/isa.h"

namespace stof {
namespace cpu {

struct KernelTable {
  const AttentionKernels* attention;
  const ChainKernels* chain;
  GemmBlockFunction gemm_block;
  const PackedGemmKernels* packed_gemm;
};
const KernelTable& KernelsOf(CpuIsa isa);

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_KERNEL_TABLE_H_
