// SPDX-License-Identifier: Apache-2.0
// Empty where the compiler was not given avx2's flags: other processors build without it.
#if defined(__AVX2__) && defined(__FMA__)
#define STOF_ISA avx2
#define STOF_SIMD "cpu/simd/avx2.h"
#define STOF_DOT_TOKENS 3
#define STOF_DOT_PANELS 1
#define STOF_PAIR_VECTORS 8
#define STOF_DOWN_TOKENS 6
// 4 × 3 accumulators, 3 operands and a row: 16 of 16 registers. 6 × 2, 2 operands and a factor: 15.
#include "cpu/sparse_mlp/kernel.h"
#endif
