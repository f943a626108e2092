// SPDX-License-Identifier: Apache-2.0
// The instruction sets of CPU kernels: the one list of them, their names, and which of them this machine has.
#ifndef STOF_CPU_ISA_H_
#define STOF_CPU_ISA_H_

#include <cstdint>

#include "plugins/core/base/types.h"

namespace stof {

// The namespaces of AVX-512's kernels; avx2 in a build that leaves them out (STOF_AVX512 in CMakeLists.txt).
#ifndef STOF_AVX512_KERNELS
#define STOF_AVX512_KERNELS avx512
#define STOF_AVX512_VNNI_KERNELS avx512_vnni
#else
#define STOF_AVX512_VNNI_KERNELS STOF_AVX512_KERNELS
#endif

// ISA(enumerator, name, CPU features, and the namespaces of its kernels: attention, chain, GEMM, packed GEMM, sparse
// MLP), from the least to the best: a set's features include those of the sets before it. A set may run the kernels of
// a lesser one. Processors other than x86-64 run the portable kernels alone.
#define STOF_CPU_ISAS(ISA)                                                                                            \
  ISA(kPortable, "portable", true, portable, portable, portable, portable, portable)                                  \
  ISA(kAvx2, "avx2", STOF_HAS("avx2") && STOF_HAS("fma") && STOF_HAS("f16c"), avx2, avx2, avx2, avx2, avx2)           \
  ISA(kAvx512, "avx512", STOF_HAS("avx512f") && STOF_HAS("avx512bw") && STOF_HAS("avx512dq") && STOF_HAS("avx512vl"), \
      STOF_AVX512_KERNELS, STOF_AVX512_KERNELS, avx2, STOF_AVX512_KERNELS, STOF_AVX512_KERNELS)                       \
  ISA(kAvx512Vnni, "avx512_vnni",                                                                                     \
      STOF_HAS("avx512f") && STOF_HAS("avx512bw") && STOF_HAS("avx512dq") && STOF_HAS("avx512vl") &&                  \
          STOF_HAS("avx512vnni"),                                                                                     \
      STOF_AVX512_KERNELS, STOF_AVX512_KERNELS, avx2, STOF_AVX512_KERNELS, STOF_AVX512_VNNI_KERNELS)

// The namespaces that kernels are compiled in: DECLARE(namespace). Each operator has one of its own inside, such as
// avx2::attention. Two operators' functions of one name would be one symbol, and the linker would keep one of them.
#define STOF_CPU_KERNEL_NAMESPACES(DECLARE) DECLARE(portable) DECLARE(avx2) DECLARE(avx512)
// Those of the sparse MLP.
#define STOF_CPU_MLP_NAMESPACES(DECLARE) STOF_CPU_KERNEL_NAMESPACES(DECLARE) DECLARE(avx512_vnni)

enum class CpuIsa : int32_t {
#define STOF_ENUMERATOR(id, name, features, attention, chain, gemm, packed_gemm, sparse_mlp) id,
  STOF_CPU_ISAS(STOF_ENUMERATOR)
#undef STOF_ENUMERATOR
};

const char* CpuIsaName(CpuIsa isa);
// False where no instruction set has this name.
bool FindCpuIsa(const char* name, CpuIsa* isa);
// Whether this machine has it.
bool IsCpuIsaSupported(CpuIsa isa);

}  // namespace stof
#endif  // STOF_CPU_ISA_H_
