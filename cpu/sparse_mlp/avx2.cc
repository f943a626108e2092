// SPDX-License-Identifier: Apache-2.0
// Empty where the compiler was not given avx2's flags: other processors build without it.
#if defined(__AVX2__) && defined(__FMA__)
#define STOF_ISA avx2
#define STOF_SIMD "cpu/simd/avx2.h"
#define STOF_DOT_TOKENS 3
// 4 × 3 accumulators, 3 operands and a row: 16 of 16 registers.
#include "cpu/sparse_mlp/kernel.h"
#endif
