// SPDX-License-Identifier: Apache-2.0
// The matmuls of a register block: MultiplyTile and ValueSums.
#ifndef STOF_CPU_QUANTIZED_ATTENTION_MATMULS_H_
#define STOF_CPU_QUANTIZED_ATTENTION_MATMULS_H_

#include "cpu/simd/tiles.h"

#if defined(STOF_TILES)
#include "cpu/quantized_attention/tile_matmuls.h"
#else
#include "cpu/quantized_attention/vector_matmuls.h"
#endif

#endif  // STOF_CPU_QUANTIZED_ATTENTION_MATMULS_H_
