// SPDX-License-Identifier: Apache-2.0
// Between the dispatcher of the append step (append.cc) and its kernels for each instruction set.
#ifndef STOF_CPU_CACHED_ATTENTION_APPEND_H_
#define STOF_CPU_CACHED_ATTENTION_APPEND_H_

#include <cstdint>

#include "cpu/isa.h"
#include "plugins/core/contract/cached_attention.h"

namespace stof {
namespace cpu {

constexpr int64_t kLargestHead = 256;  // elements of a head that a kernel holds on its stack

// What a step does to the cache of one sequence. Rows count from the front of the cache.
struct CacheStep {
  int64_t past = 0;       // keys before the step, n[b]
  int64_t tokens = 0;     // new tokens that are valid: S, fewer in a padded first prompt
  int64_t held = 0;       // rows that the past cache holds, from row 0 on; below `past` where it slides
  int64_t dropped = 0;    // the first rows of past and new tokens that the present cache does not keep
  int64_t first_row = 0;  // of token 0, in the cache that new tokens are written to
};

// One call. Filled by the dispatcher, read by the kernels.
struct AppendProblem {
  const CacheAppendArgs* args = nullptr;
  const CacheStep* steps = nullptr;  // [B]
  // [S]: the row of each token in a cache of pages, [rows, G, D], -1: none. B is then 1, position_ids are given, and
  // rotated_query is [S, H, D]. nullptr: the cache is no paged one.
  const int64_t* slots = nullptr;
  // Where new tokens go: staging, or present.
  void* key = nullptr;
  void* value = nullptr;
  int64_t capacity = 0;
};

struct AppendKernels {
  // Norm, rotary embedding and append of new tokens [first, last) of B * S.
  void (*append)(const AppendProblem& problem, int64_t first, int64_t last);
};

// Whether sizes, types and buffers fit the kernel. Lengths are not read.
Status CheckAppendSizes(const CacheAppendArgs& args);

// Calls the kernel for all tokens, on several threads.
void AppendTokens(const AppendProblem& problem, CpuIsa isa, const Parallel& parallel);

// CpuAppendToCache with the kernels of one instruction set.
Status AppendToCache(const CacheAppendArgs& args, CpuIsa isa, const Parallel& parallel);

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_CACHED_ATTENTION_APPEND_H_
