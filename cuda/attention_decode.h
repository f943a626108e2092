// SPDX-License-Identifier: Apache-2.0
// Between the backend and the kernels for few queries.
#ifndef STOF_CUDA_ATTENTION_DECODE_H_
#define STOF_CUDA_ATTENTION_DECODE_H_

#include "cuda/attention.h"

namespace stof {
namespace cuda {

constexpr int kDecodeQueries = 16;   // the most that these kernels take
constexpr int kDecodeTileRows = 64;  // m of their block mask: the least that the kernels that make masks give
constexpr int kMostSplits = 128;

struct DecodeParams {
  AttentionParams attention;
  int32_t heads = 1;         // query heads that share a CTA's keys; H / G, or 1 where their masks differ
  int32_t splits = 1;        // CTAs that share the keys of the same rows
  float* partial = nullptr;  // [B, H, S, splits, Dv]: sums, not divided; nullptr: one split, which writes the output
  float* state = nullptr;    // [B, H, S, splits, 2]: maximum in units of log2, sum of weights
  int32_t* empty_rows = nullptr;  // [B, H, S]: set to whether a row has no key; nullptr: nobody asks
  int32_t second = 0;             // 1: only rows of empty_rows, and all keys for them
};

struct DecodeKernel {
  int rows = 0;                                                        // query rows of a CTA
  int ctas = 0;                                                        // on a multiprocessor at once
  int (*launch)(const DecodeParams& params, void* stream) = nullptr;   // nullptr: no such kernel
  int (*combine)(const DecodeParams& params, void* stream) = nullptr;  // after it where there is a partial result
};
// By the larger of D and Dv, and rows = heads * S.
DecodeKernel FindDecode(DType dtype, int head_size, int64_t rows);

// How many CTAs share the keys of one row block, from the number of key tiles that its mask keeps and how many such
// blocks there are: docs/cuda-kernel.md has the model.
int ChooseSplits(const DecodeKernel& kernel, const AttentionParams& params, int item_bytes, int64_t tiles,
                 int64_t blocks, int multiprocessors);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_H_
