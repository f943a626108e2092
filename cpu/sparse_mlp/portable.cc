// SPDX-License-Identifier: Apache-2.0
#define STOF_ISA portable
#define STOF_SIMD "cpu/simd/portable.h"
#define STOF_DOT_TOKENS 2
#define STOF_DOT_PANELS 1
#define STOF_PAIR_VECTORS 2
#define STOF_DOWN_TOKENS 2
#include "cpu/sparse_mlp/kernel.h"
