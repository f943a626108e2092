// SPDX-License-Identifier: Apache-2.0
#define STOF_ISA portable
#define STOF_SIMD "cpu/simd_portable.h"
#define STOF_TILE_ROWS 6
#define STOF_TILE_VECTORS 2
#include "cpu/gemm_packed_kernel.h"
