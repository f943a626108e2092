// SPDX-License-Identifier: Apache-2.0
// Between the backend and the kernels for few queries.
#ifndef STOF_CUDA_ATTENTION_DECODE_API_H_
#define STOF_CUDA_ATTENTION_DECODE_API_H_

#include "cuda/attention/params.h"

namespace stof {
namespace cuda {

constexpr int kDecodeQueries = 16;   // the most that these kernels take
constexpr int kDecodeTileRows = 64;  // m of their block mask: the least that the kernels that make masks give
constexpr int kMostDecodeSplits = 128;

struct DecodeParams {
  AttentionParams attention;
  int32_t heads = 1;    // query heads that share a CTA's keys: H / G, or 1 where their masks differ and are not stacked
  int32_t stacked = 0;  // 1: the mask's heads are groups, its rows those of a group's heads (stacked_mask.h)
  int32_t splits = 1;   // CTAs that share the keys of the same rows
  float* split_output =
      nullptr;  // [B, H, S, splits, Dv]: sums, not divided; nullptr: one split, which writes the output
  float* split_stats = nullptr;   // [B, H, S, splits, 2]: maximum in units of log2, sum of weights
  int32_t* empty_rows = nullptr;  // [B, H, S]: set to whether a row has no key; nullptr: nobody asks
  int32_t second_pass = 0;        // 1: only rows of empty_rows, and all keys for them
  // The mask's one row of tiles, where all heads and batches have the same: entries [row_begin, row_end), from row_full
  // on full ones. row_begin -1: the device looks for them. Read by the clusters' kernel.
  int32_t row_begin = -1, row_full = 0, row_end = 0;
};

struct DecodeKernel {
  int rows = 0;                                                        // query rows of a CTA
  int ctas = 0;                                                        // on a multiprocessor at once
  int (*launch)(const DecodeParams& params, void* stream) = nullptr;   // nullptr: no such kernel
  int (*combine)(const DecodeParams& params, void* stream) = nullptr;  // after it where there is a partial result
};
// By the larger of D and Dv, and rows = heads * S.
DecodeKernel FindDecode(DType dtype, int head_size, int64_t rows);

// The kernel whose `splits` CTAs are a cluster and need neither memory for sums nor a second kernel; 9.0.
constexpr int kClusterSizes = 4;  // 1, 2, 4, 8
struct ClusterKernel {
  int rows = 0;                                                       // query rows of a CTA
  int tiles_at_once = 0;                                              // tiles of keys that it works on at once
  int (*launch)(const DecodeParams& params, void* stream) = nullptr;  // nullptr: no such kernel
  // clusters[i]: how many clusters of 2^i CTAs the current device runs at once; zeros: it cannot.
  void (*clusters)(int (&clusters)[kClusterSizes]) = nullptr;
};
ClusterKernel FindCluster(DType dtype, int head_size, int64_t rows);

struct DecodeChoice {
  bool cluster = false;      // which kernel
  int splits = 1;            // CTAs that share the keys of a row block
  double nanoseconds = 0.0;  // by the model
};
// From the number of key tiles that the mask keeps of a row, and how many row blocks there are:
// docs/design/attention-cuda.md has the models. clusters: as above. only: 0 takes the first kernel, 1 clusters where
// the device has room for them.
DecodeChoice ChooseSplits(const DecodeKernel& kernel, const AttentionParams& params, int item_bytes, int64_t tiles,
                          int64_t blocks, int multiprocessors);
DecodeChoice ChooseDecode(const DecodeKernel& kernel, const AttentionParams& params, int item_bytes, int64_t tiles,
                          int64_t blocks, int multiprocessors, int tiles_at_once, const int (&clusters)[kClusterSizes],
                          int only_flagged = -1);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_API_H_
