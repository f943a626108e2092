// SPDX-License-Identifier: Apache-2.0
// What kernels take in place of <algorithm>, which they do not include. Where a template of std:: is not inlined, it is
// a weak symbol: the linker may keep the copy that was compiled for AVX-512, also for machines without it. Everything
// here and in the kernels is in an unnamed namespace: each object has copies of its own.
#ifndef STOF_CPU_SIMD_ALGORITHMS_H_
#define STOF_CPU_SIMD_ALGORITHMS_H_

#include <cstdint>
#include <cstring>

namespace stof {
namespace cpu {
namespace {

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t Clamp(int64_t x, int64_t low, int64_t high) { return Min(Max(x, low), high); }
inline int64_t RoundUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

template <typename T>
inline void Fill(T* first, T* last, T value) {
  // A count that is not negative: what a compiler cannot see of two pointers, and warns of.
  const int64_t count = Max(last - first, 0);
  for (int64_t i = 0; i < count; ++i) first[i] = value;
}
// The ranges are apart.
template <typename T>
inline void Copy(const T* first, const T* last, T* to) {
  std::memcpy(to, first, static_cast<size_t>(last - first) * sizeof(T));
}

// A number as a type: an argument that chooses a template.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_ALGORITHMS_H_
