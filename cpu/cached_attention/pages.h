// SPDX-License-Identifier: Apache-2.0
// Between the dispatcher of key bounds (pages.cc) and its kernels for each instruction set.
#ifndef STOF_CPU_CACHED_ATTENTION_PAGES_H_
#define STOF_CPU_CACHED_ATTENTION_PAGES_H_

#include <cstdint>

#include "cpu/cached_attention/append.h"
#include "cpu/isa.h"
#include "plugins/core/contract/attention_args.h"
#include "plugins/core/contract/cached_attention.h"

namespace stof {
namespace cpu {

struct PagesKernels {
  // The minima and maxima of keys [rows, D], dense, along the head: to [2, D]. A NaN stays one.
  void (*find_bounds)(const void* keys, DType dtype, int64_t rows, int64_t D, void* to);
  // Scores of pages [first, last) of a KV head, to scores[first] and on: PageChoice of args.
  void (*score)(const AttentionArgs& args, int64_t b, int64_t g, int64_t first, int64_t last, float* scores);
};

// Updates CacheAppendArgs::page_bounds behind the append step. steps: [B].
void UpdatePageBounds(const CacheAppendArgs& args, const CacheStep* steps, CpuIsa isa, const Parallel& parallel);

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_CACHED_ATTENTION_PAGES_H_
