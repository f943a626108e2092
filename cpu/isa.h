// SPDX-License-Identifier: Apache-2.0
// The instruction sets of CPU kernels: their names, and which of them this machine has.
#ifndef STOF_CPU_ISA_H_
#define STOF_CPU_ISA_H_

#include <cstdint>

#include "plugins/core/base/cpu_isas.h"
#include "plugins/core/base/types.h"

namespace stof {

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
// The best one that this machine has and that is no better than the named one. A set of another architecture limits
// nothing, like an unknown name: the best of all.
CpuIsa BestCpuIsaAtMost(const char* name);

}  // namespace stof
#endif  // STOF_CPU_ISA_H_
