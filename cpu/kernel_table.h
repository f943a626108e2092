// SPDX-License-Identifier: Apache-2.0
// The kernels of every operator for each instruction set.
#ifndef STOF_CPU_KERNEL_TABLE_H_
#define STOF_CPU_KERNEL_TABLE_H_

#include "cpu/isa.h"

namespace stof {
namespace cpu {

struct AppendKernels;
struct AttentionKernels;
struct ChainKernels;
struct GemmKernels;
struct PackedGemmBf16Kernels;
struct PackedGemmKernels;
struct PagesKernels;
struct QuantizedAttentionKernels;
struct SparseMlpBf16Kernels;
struct SparseMlpKernels;

// A member for each source OPERATOR_kernels.cc.
struct KernelTable {
  const AttentionKernels* attention = nullptr;
  const AttentionKernels* attention_bf16 = nullptr;  // sets without bf16 instructions have none
  const AppendKernels* append = nullptr;
  const PagesKernels* pages = nullptr;
  const ChainKernels* chain = nullptr;
  const GemmKernels* gemm = nullptr;
  const PackedGemmKernels* packed_gemm = nullptr;
  const PackedGemmBf16Kernels* packed_gemm_bf16 = nullptr;  // sets without bf16 instructions have none
  const SparseMlpKernels* sparse_mlp = nullptr;
  const SparseMlpBf16Kernels* sparse_mlp_bf16 = nullptr;  // sets without bf16 instructions have none
  const QuantizedAttentionKernels* quantized_attention = nullptr;
};
const KernelTable& KernelsOf(CpuIsa isa);

// Begins the definition of the table of a source of kernels, in the namespace of the instruction set that the source is
// compiled for. It is the only symbol that the object exports: two operators, or two sets, never share a function.
#define STOF_EXPORT_KERNELS(Table, operator_name) \
  namespace STOF_ISA {                            \
  extern const Table operator_name##_kernels;     \
  }                                               \
  const Table STOF_ISA::operator_name##_kernels

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_KERNEL_TABLE_H_
