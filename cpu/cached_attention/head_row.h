// SPDX-License-Identifier: Apache-2.0
// A row of at most a head in fp32.
#ifndef STOF_CPU_CACHED_ATTENTION_HEAD_ROW_H_
#define STOF_CPU_CACHED_ATTENTION_HEAD_ROW_H_

#include <cstdint>

#include "cpu/cached_attention/append.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/simd.h"

namespace stof {
namespace cpu {
namespace {  // of the instruction set that the file is compiled for

// A query, a key, a norm weight, a table's row: padded to whole vectors by zeros.
struct HeadRow {
  alignas(64) float x[kLargestHead];
  void Load(const void* from, DType dtype, int64_t count) {
    ToFloats(from, dtype, count, x);
    for (int64_t i = count; i < kLargestHead && i % kWidth != 0; ++i) x[i] = 0.0f;
  }
};

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_CACHED_ATTENTION_HEAD_ROW_H_
