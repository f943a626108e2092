// SPDX-License-Identifier: Apache-2.0
// The list of kernels by instruction set.
#include "cpu/attention/attention.h"
#include "cpu/chain/chain.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/packed.h"
#include "cpu/kernel_table.h"

namespace stof {
namespace cpu {
namespace {

#if defined(__x86_64__)
#define STOF_KERNELS_OF(isa) isa
#else
#define STOF_KERNELS_OF(isa) portable  // the others are not compiled
#endif
#define STOF_TABLE(id, name, features, attention, chain, gemm, packed_gemm)                \
  {&STOF_KERNELS_OF(attention)::kAttentionKernels, &STOF_KERNELS_OF(chain)::kChainKernels, \
   &STOF_KERNELS_OF(gemm)::GemmBlock, &STOF_KERNELS_OF(packed_gemm)::kPackedGemmKernels},
constexpr KernelTable kTables[] = {STOF_CPU_ISAS(STOF_TABLE)};

}  // namespace

const KernelTable& KernelsOf(CpuIsa isa) { return kTables[static_cast<int>(isa)]; }

}  // namespace cpu
}  // namespace stof
