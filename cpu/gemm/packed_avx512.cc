// SPDX-License-Identifier: Apache-2.0
// Empty where the compiler was not given avx512's flags: other processors build without it.
#if defined(__AVX512F__)
#define STOF_ISA avx512
#define STOF_SIMD "cpu/simd/avx512.h"
#define STOF_TILE_ROWS 8
#define STOF_TILE_VECTORS 3
// 8 × 3 accumulators, 3 operands and a broadcast: 28 of 32 registers. 768, 1152, 2304 and 3072 are multiples of 48.
#include "cpu/gemm/packed_kernel.h"
#endif
