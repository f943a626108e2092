// SPDX-License-Identifier: Apache-2.0
// Stands for the compiler's header where kernels for AVX-VNNI are compiled for tests: VPDPBUSD of 256 bits is emulated,
// as Intel's manual defines it, on machines that have none. Other instructions are the machine's own.
#ifndef STOF_TESTS_CPP_EMULATED_AVX_VNNI_IMMINTRIN_H_
#define STOF_TESTS_CPP_EMULATED_AVX_VNNI_IMMINTRIN_H_

#include_next <immintrin.h>

#include <cstdint>

namespace stof::test {
namespace {

// Adds the products of four unsigned bytes of a and signed bytes of b to each lane of 32 bits, without saturation.
inline __m256i EmulatedDpbusd(__m256i sums, __m256i a, __m256i b) {
  alignas(32) int32_t to[8];
  alignas(32) uint8_t left[32];
  alignas(32) int8_t right[32];
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), sums);
  _mm256_store_si256(reinterpret_cast<__m256i*>(left), a);
  _mm256_store_si256(reinterpret_cast<__m256i*>(right), b);
  for (int i = 0; i < 32; ++i) to[i / 4] += left[i] * right[i];
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(to));
}

}  // namespace
}  // namespace stof::test

#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 stof::test::EmulatedDpbusd

#endif  // STOF_TESTS_CPP_EMULATED_AVX_VNNI_IMMINTRIN_H_
