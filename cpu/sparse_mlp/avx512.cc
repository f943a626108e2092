// SPDX-License-Identifier: Apache-2.0
// Empty where the compiler was not given avx512's flags: other processors build without it.
#if defined(__AVX512F__)
#define STOF_ISA avx512
#define STOF_SIMD "cpu/simd/avx512.h"
#define STOF_DOT_TOKENS 6
#define STOF_DOT_PANELS 4
#define STOF_PAIR_VECTORS 8
#define STOF_DOWN_TOKENS 8
// 4 × 6 accumulators, 6 operands and a row: 31 of 32 registers. 8 × 2, 2 operands and a factor: 19.
#include "cpu/sparse_mlp/kernel.h"
#endif
