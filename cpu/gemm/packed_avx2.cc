// SPDX-License-Identifier: Apache-2.0
// Empty where the compiler was not given avx2's flags: other processors build without it.
#if defined(__AVX2__) && defined(__FMA__)
#define STOF_ISA avx2
#define STOF_SIMD "cpu/simd/avx2.h"
#define STOF_TILE_ROWS 6
#define STOF_TILE_VECTORS 2
// 6 × 2 accumulators, 2 operands and a broadcast: 15 of 16 registers.
#include "cpu/gemm/packed_kernel.h"
#endif
