// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "cpu/arm_features.h"
#include "cpu/x86_features.h"
#include "plugins/core/host/environment.h"
#include "plugins/core/host/fork_guard.h"

namespace stof {
namespace {

#define STOF_NAME(id, name, is_supported) #name,
constexpr const char* kNames[] = {STOF_CPU_ISAS(STOF_NAME)};
#undef STOF_NAME
constexpr int kIsas = static_cast<int>(sizeof(kNames) / sizeof(kNames[0]));

#if defined(__x86_64__)
constexpr bool kIsX86 = true, kIsArm = false;
#elif defined(__aarch64__)
constexpr bool kIsX86 = false, kIsArm = true;
#else
constexpr bool kIsX86 = false, kIsArm = false;
#endif

// Whether a processor of this architecture may have it.
bool IsOfThisArchitecture(CpuIsa isa) {
#define STOF_HAS_X86(feature) kIsX86
#define STOF_HAS_ARM(feature) kIsArm
#define STOF_POSSIBLE(id, name, is_supported) \
  case CpuIsa::id:                            \
    return is_supported;
  switch (isa) { STOF_CPU_ISAS(STOF_POSSIBLE) }
#undef STOF_POSSIBLE
#undef STOF_HAS_ARM
#undef STOF_HAS_X86
  return false;
}

// Whether the processor has what a set needs.
bool AskProcessor(CpuIsa isa) {
#define STOF_HAS_X86(feature) cpu::HasX86Feature(feature)
#define STOF_HAS_ARM(feature) cpu::HasArmFeature(feature)
#define STOF_SUPPORTED(id, name, is_supported) \
  case CpuIsa::id:                             \
    return is_supported;
  switch (isa) { STOF_CPU_ISAS(STOF_SUPPORTED) }
#undef STOF_SUPPORTED
#undef STOF_HAS_ARM
#undef STOF_HAS_X86
  return false;
}

CpuIsa DetectIsa() {
  return BestCpuIsaAtMost(std::string(ReadVariableOr(Variable::kCpuIsa, std::string_view())).c_str());
}

}  // namespace

const char* CpuIsaName(CpuIsa isa) { return kNames[static_cast<int>(isa)]; }

bool FindCpuIsa(const char* name, CpuIsa* isa) {
  for (int i = 0; i < kIsas; ++i) {
    if (std::strcmp(name, kNames[i]) != 0) continue;
    *isa = static_cast<CpuIsa>(i);
    return true;
  }
  return false;
}

bool IsCpuIsaSupported(CpuIsa isa) {
  // Runs ask, and in a virtual machine an instruction like CPUID takes 20 us or more. Threads that come first ask each.
  constexpr uint32_t kKnown = 1u << 31;
  static std::atomic<uint32_t> known{0};
  uint32_t sets = known.load(std::memory_order_relaxed);
  if (sets == 0) {
    sets = kKnown;
    for (int i = 0; i < kIsas; ++i) sets |= AskProcessor(static_cast<CpuIsa>(i)) ? 1u << i : 0u;
    known.store(sets, std::memory_order_relaxed);
  }
  return (sets >> static_cast<int>(isa) & 1u) != 0;
}

CpuIsa BestCpuIsaAtMost(const char* name) {
  auto best = static_cast<CpuIsa>(kIsas - 1);
  CpuIsa named = best;
  if (FindCpuIsa(name, &named) && IsOfThisArchitecture(named)) best = named;
  while (!IsCpuIsaSupported(best)) best = static_cast<CpuIsa>(static_cast<int>(best) - 1);
  return best;
}

CpuIsa BestCpuIsa() {
  static ProcessWide<const CpuIsa> isa;
  return isa.Get(DetectIsa);
}

}  // namespace stof
