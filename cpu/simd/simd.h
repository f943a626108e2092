// SPDX-License-Identifier: Apache-2.0
// The vector type of the instruction set that a source is compiled for. Each header defines `Simd`: a vector V of
// kWidth floats, a mask M of its lanes, operations on them, and how many accumulators the tiles of each operator take.
#ifndef STOF_CPU_SIMD_SIMD_H_
#define STOF_CPU_SIMD_SIMD_H_

#if defined(__AVX512F__)
#include "cpu/simd/avx512.h"
#elif defined(__AVX2__)
#include "cpu/simd/avx2.h"
#elif defined(STOF_NEON)
#include "cpu/simd/neon.h"
#else
#include "cpu/simd/portable.h"
#endif

namespace stof {
namespace cpu {
namespace {

using V = Simd::V;
constexpr int kWidth = Simd::kWidth;

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_SIMD_H_
