// SPDX-License-Identifier: Apache-2.0
#define STOF_ISA portable
#define STOF_SIMD "cpu/simd/portable.h"
#define STOF_TILE_ROWS 6
#define STOF_TILE_VECTORS 2
#include "cpu/gemm/packed_kernel.h"
