// SPDX-License-Identifier: Apache-2.0
#include "cpu/x86_features.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#include <cstring>

namespace stof {
namespace cpu {
namespace {

enum Register { kEax, kEbx, kEcx, kEdx };

// Parts of the registers' state that the operating system keeps when it switches threads (XCR0).
constexpr uint32_t kYmm = 0x6;               // xmm and the rest of ymm
constexpr uint32_t kZmm = kYmm | 0xe0;       // masks, the rest of zmm0 to zmm15, zmm16 to zmm31
constexpr uint32_t kTiles = kZmm | 0x60000;  // and the configuration and data of tiles
constexpr uint32_t kHasXgetbv = 1u << 27;    // OSXSAVE in ecx of leaf 1

// Where CPUID says that a feature is there (Intel's manual, volume 2, CPUID), and the state that it needs.
struct Feature {
  const char* name;
  uint32_t leaf, part;
  Register where;
  int bit;
  uint32_t state;
};
constexpr Feature kFeatures[] = {
    {"fma", 1, 0, kEcx, 12, kYmm},        {"f16c", 1, 0, kEcx, 29, kYmm},       {"avx2", 7, 0, kEbx, 5, kYmm},
    {"avx512f", 7, 0, kEbx, 16, kZmm},    {"avx512dq", 7, 0, kEbx, 17, kZmm},   {"avx512bw", 7, 0, kEbx, 30, kZmm},
    {"avx512vl", 7, 0, kEbx, 31, kZmm},   {"avx512vnni", 7, 0, kEcx, 11, kZmm}, {"avx512vbmi", 7, 0, kEcx, 1, kZmm},
    {"avxvnni", 7, 1, kEax, 4, kYmm},     {"avx512bf16", 7, 1, kEax, 5, kZmm},  {"amx-bf16", 7, 0, kEdx, 22, kTiles},
    {"amx-tile", 7, 0, kEdx, 24, kTiles}, {"amx-int8", 7, 0, kEdx, 25, kTiles}};

// The state that the operating system keeps; 0 where it does not say so.
uint32_t KeptState() {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kHasXgetbv) == 0) return 0;
  uint32_t low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

}  // namespace

bool HasX86Feature(const char* name) {
  for (const Feature& feature : kFeatures) {
    if (std::strcmp(feature.name, name) != 0) continue;
    uint32_t words[4] = {}, last_part = 0;
    if (feature.part > 0) {
      // The answer for a part that a processor lacks is undefined.
      if (__get_cpuid_count(feature.leaf, 0, &last_part, &words[1], &words[2], &words[3]) == 0) return false;
      if (last_part < feature.part) return false;
    }
    if (__get_cpuid_count(feature.leaf, feature.part, &words[0], &words[1], &words[2], &words[3]) == 0) return false;
    return (words[feature.where] >> feature.bit & 1u) != 0 && (KeptState() & feature.state) == feature.state;
  }
  return false;
}

}  // namespace cpu
}  // namespace stof
#else
bool stof::cpu::HasX86Feature(const char* /*name*/) { return false; }
#endif
