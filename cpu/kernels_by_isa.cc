// SPDX-License-Identifier: Apache-2.0
// Collects the tables of kernels that are compiled. STOF_COMPILED_KERNELS, from CMakeLists.txt, lists them as
// STOF_KERNELS(set, operator).
#include <type_traits>

#include "cpu/kernel_table.h"

namespace stof {
namespace cpu {

#define STOF_KERNELS(set, operator_name)                                                            \
  namespace set {                                                                                   \
  extern const std::remove_pointer_t<decltype(KernelTable::operator_name)> operator_name##_kernels; \
  }
STOF_COMPILED_KERNELS
#undef STOF_KERNELS

namespace {

constexpr int kIsas = 0
#define STOF_COUNT(id, name, is_supported) +1
    STOF_CPU_ISAS(STOF_COUNT)
#undef STOF_COUNT
    ;

#define STOF_NAME(id, name, is_supported) [[maybe_unused]] constexpr int index_of_##name = static_cast<int>(CpuIsa::id);
STOF_CPU_ISAS(STOF_NAME)
#undef STOF_NAME

struct Tables {
  KernelTable of[kIsas];
};

constexpr Tables CollectTables() {
  Tables tables;
  for (int i = 0; i < kIsas; ++i) {
    // AVX-512 does not imply AVX-VNNI: the set behind avx_vnni inherits the kernels of avx2.
    const int before = i - 1 == index_of_avx_vnni ? i - 2 : i - 1;
    if (i > 0) tables.of[i] = tables.of[before];
#define STOF_KERNELS(set, operator_name) \
  if (index_of_##set == i) tables.of[i].operator_name = &set::operator_name##_kernels;
    STOF_COMPILED_KERNELS
#undef STOF_KERNELS
  }
  return tables;
}
constexpr Tables kTables = CollectTables();

}  // namespace

const KernelTable& KernelsOf(CpuIsa isa) { return kTables.of[static_cast<int>(isa)]; }

}  // namespace cpu
}  // namespace stof
