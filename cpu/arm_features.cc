// SPDX-License-Identifier: Apache-2.0
#include "cpu/arm_features.h"

#include <cstddef>
#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#endif

namespace stof {
namespace cpu {
namespace {

bool HasDotProduct() {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kAsimdDp = 1ul << 20;  // HWCAP_ASIMDDP, which older headers lack
  return (getauxval(AT_HWCAP) & kAsimdDp) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  // macOS 11 does not know the name. Every Mac with Apple silicon has dot products.
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) != 0 || has != 0;
#elif defined(__aarch64__) && defined(_WIN32)
  constexpr DWORD kV82DotProduct = 43;  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE, which older headers lack
  return IsProcessorFeaturePresent(kV82DotProduct) != 0;
#else
  return false;
#endif
}

// Matmuls of bf16 (bfmmla). Windows has no answer that older headers and systems know.
bool HasBf16() {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which older headers lack
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has != 0;
#else
  return false;
#endif
}

}  // namespace

bool HasArmFeature(const char* name) {
#if defined(__aarch64__)
  if (std::strcmp(name, "neon") == 0) return true;  // every one that runs an operating system has it
#endif
  if (std::strcmp(name, "bf16") == 0) return HasBf16();
  return std::strcmp(name, "dotprod") == 0 && HasDotProduct();
}

}  // namespace cpu
}  // namespace stof
