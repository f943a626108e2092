// SPDX-License-Identifier: Apache-2.0
#define STOF_ISA portable
#define STOF_SIMD "cpu/simd_portable.h"
#include "cpu/gemm_kernel.h"
