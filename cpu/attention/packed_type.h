// SPDX-License-Identifier: Apache-2.0
// What a source of attention kernels packs keys and values as: fp32, or bf16 where STOF_BF16_MATMULS is defined.
#ifndef STOF_CPU_ATTENTION_PACKED_TYPE_H_
#define STOF_CPU_ATTENTION_PACKED_TYPE_H_

#include <cstdint>

#include "cpu/attention/attention.h"
#include "cpu/simd/algorithms.h"
#include "cpu/simd/bf16.h"
#include "cpu/simd/tiles.h"

namespace stof {
namespace cpu {
namespace {

#if defined(STOF_BF16_MATMULS)
constexpr bool kRoundsToBf16 = true;
using Packed = Bf16;
#else
constexpr bool kRoundsToBf16 = false;
using Packed = float;
#endif

// Rows of a strip of the packed path, and strips that share one pass over a key tile: their queries, scores and outputs
// (6 KiB each at D = 64) and a panel of keys (4 KiB) fit the 32 KiB L1, so that keys and values come from L2 once per
// 24 rows instead of once per 6. Tiles have 16 rows, and what has them a larger L1.
constexpr int kStripRows = kHasTiles ? 16 : kStrip, kStripsPerPass = kHasTiles ? 2 : 4;

// Elements of a packed key.
inline int64_t PackedKeySize(int64_t size) { return kRoundsToBf16 ? RoundUp(size, kBf16HeadUnit) : size; }

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_PACKED_TYPE_H_
