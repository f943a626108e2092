// SPDX-License-Identifier: Apache-2.0
#define STOF_ISA portable
#define STOF_SIMD "cpu/simd/portable.h"
#include "cpu/gemm/kernel.h"
