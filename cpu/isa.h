// SPDX-License-Identifier: Apache-2.0
// The instruction sets of CPU kernels: the one list of them, their names, and which of them this machine has.
#ifndef STOF_CPU_ISA_H_
#define STOF_CPU_ISA_H_

#include <cstdint>

#include "plugins/core/base/types.h"

namespace stof {

// What the processor must have. isa.cc defines STOF_HAS.
#define STOF_HAS_AVX2 STOF_HAS("avx2") && STOF_HAS("fma") && STOF_HAS("f16c")
#define STOF_HAS_AVX512 STOF_HAS("avx512f") && STOF_HAS("avx512bw") && STOF_HAS("avx512dq") && STOF_HAS("avx512vl")
#define STOF_HAS_AVX512_VNNI STOF_HAS("avx512vnni") && STOF_HAS_AVX512

// A row for each set, ISA(enumerator, name, whether the processor has it), from the least to the best: a set's features
// include those of the sets before it. CMakeLists.txt says which kernels are compiled for a set, and with which flags.
// Of an operator without kernels of its own, a set runs those of the best set before it.
#define STOF_CPU_ISAS(ISA)              \
  ISA(kPortable, portable, true)        \
  ISA(kAvx2, avx2, STOF_HAS_AVX2)       \
  ISA(kAvx512, avx512, STOF_HAS_AVX512) \
  ISA(kAvx512Vnni, avx512_vnni, STOF_HAS_AVX512_VNNI)

enum class CpuIsa : int32_t {
#define STOF_ENUMERATOR(id, name, is_supported) id,
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
