// SPDX-License-Identifier: Apache-2.0
// The kernels of every operator for each instruction set.
#ifndef STOF_CPU_KERNEL_TABLE_H_
#define STOF_CPU_KERNEL_TABLE_H_

#include <cstdint>

#include "cpu/isa.h"

namespace stof {
struct CpuGemmArgs;
namespace cpu {

struct AppendKernels;
struct AttentionKernels;
struct ChainKernels;
struct PackedGemmKernels;
struct SparseMlpKernels;

struct KernelTable {
  const AttentionKernels* attention;
  const AppendKernels* append;  // of the namespaces of attention
  const ChainKernels* chain;
  void (*gemm_block)(const CpuGemmArgs& args, int64_t m0, int64_t n0, float* workspace);
  const PackedGemmKernels* packed_gemm;
  const SparseMlpKernels* sparse_mlp;
};
const KernelTable& KernelsOf(CpuIsa isa);

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_KERNEL_TABLE_H_
