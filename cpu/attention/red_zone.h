// SPDX-License-Identifier: Apache-2.0
// Gaps between the buffers of a workspace that AddressSanitizer reports accesses to. Other builds have none.
#ifndef STOF_CPU_ATTENTION_RED_ZONE_H_
#define STOF_CPU_ATTENTION_RED_ZONE_H_

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace stof {
namespace cpu {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kRedZone = 64;
inline void ForbidAccess(const void* begin, int64_t bytes) {
  ASAN_POISON_MEMORY_REGION(begin, static_cast<size_t>(bytes));
}
inline void AllowAccess(const void* begin, int64_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(begin, static_cast<size_t>(bytes));
}
#else
constexpr int64_t kRedZone = 0;
inline void ForbidAccess(const void* /*begin*/, int64_t /*bytes*/) {}
inline void AllowAccess(const void* /*begin*/, int64_t /*bytes*/) {}
#endif

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_RED_ZONE_H_
