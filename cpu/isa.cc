// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"

#include <cstring>
#include <string>
#include <string_view>

#include "plugins/core/host/environment.h"
#include "plugins/core/host/fork_guard.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#endif

namespace stof {
namespace {

#define STOF_NAME(id, name, is_supported) #name,
constexpr const char* kNames[] = {STOF_CPU_ISAS(STOF_NAME)};
#undef STOF_NAME
constexpr int kIsas = static_cast<int>(sizeof(kNames) / sizeof(kNames[0]));

// The best one of the machine, or the one that the environment asks for; a lesser one where the machine lacks that.
CpuIsa DetectIsa() {
  auto best = static_cast<CpuIsa>(kIsas - 1);
  const std::string_view wanted = ReadVariableOr(Variable::kCpuIsa, std::string_view());
  (void)FindCpuIsa(std::string(wanted).c_str(), &best);  // of no name: the best
  while (!IsCpuIsaSupported(best)) best = static_cast<CpuIsa>(static_cast<int>(best) - 1);
  return best;
}

#if defined(__aarch64__)
enum class ArmFeature { kNeon, kDotProduct };

bool HasArmFeature(ArmFeature feature) {
  if (feature == ArmFeature::kNeon) return true;  // every AArch64 processor that runs an operating system has it
#if defined(__linux__)
  constexpr unsigned long kAsimdDp = 1ul << 20;  // HWCAP_ASIMDDP, which older headers lack
  return (getauxval(AT_HWCAP) & kAsimdDp) != 0;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has != 0;
#elif defined(_WIN32)
  constexpr DWORD kV82DotProduct = 43;  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE, which older headers lack
  return IsProcessorFeaturePresent(kV82DotProduct) != 0;
#else
  return false;
#endif
}
#endif

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
#if defined(__x86_64__)
#define STOF_HAS(feature) __builtin_cpu_supports(feature)
#define STOF_HAS_ARM(feature) false
#elif defined(__aarch64__)
#define STOF_HAS(feature) false
#define STOF_HAS_ARM(feature) HasArmFeature(ArmFeature::feature)
#else
#define STOF_HAS(feature) false
#define STOF_HAS_ARM(feature) false
#endif
#define STOF_SUPPORTED(id, name, is_supported) \
  case CpuIsa::id:                             \
    return is_supported;
  switch (isa) { STOF_CPU_ISAS(STOF_SUPPORTED) }
#undef STOF_SUPPORTED
#undef STOF_HAS_ARM
#undef STOF_HAS
  return false;
}

CpuIsa BestCpuIsa() {
  static ProcessWide<const CpuIsa> isa;
  return isa.Get(DetectIsa);
}

}  // namespace stof
