// SPDX-License-Identifier: Apache-2.0
// The list of kernels by instruction set.
#include "cpu/attention/attention.h"
#include "cpu/cached_attention/append.h"
#include "cpu/chain/chain.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/packed.h"
#include "cpu/kernel_table.h"
#include "cpu/sparse_mlp/sparse_mlp.h"

namespace stof {
namespace cpu {
namespace {

#if defined(__x86_64__)
#define STOF_KERNELS_OF(isa) isa
#else
#define STOF_KERNELS_OF(isa) portable  // the others are not compiled
#endif
#define STOF_TABLE(id, name, features, attention_isa, chain_isa, gemm_isa, packed_gemm_isa, sparse_mlp_isa) \
  {&STOF_KERNELS_OF(attention_isa)::attention::kAttentionKernels,                                           \
   &STOF_KERNELS_OF(attention_isa)::cached_attention::kAppendKernels,                                       \
   &STOF_KERNELS_OF(chain_isa)::chain::kChainKernels,                                                       \
   &STOF_KERNELS_OF(gemm_isa)::gemm::GemmBlock,                                                             \
   &STOF_KERNELS_OF(packed_gemm_isa)::packed_gemm::kPackedGemmKernels,                                      \
   &STOF_KERNELS_OF(sparse_mlp_isa)::sparse_mlp::kSparseMlpKernels},
constexpr KernelTable kTables[] = {STOF_CPU_ISAS(STOF_TABLE)};

}  // namespace

const KernelTable& KernelsOf(CpuIsa isa) { return kTables[static_cast<int>(isa)]; }

}  // namespace cpu
}  // namespace stof
