// SPDX-License-Identifier: Apache-2.0
// The family of decode kernels: attention of few queries.
#ifndef STOF_CUDA_ATTENTION_DECODE_API_H_
#define STOF_CUDA_ATTENTION_DECODE_API_H_

#include "cuda/attention/decode/key_range.h"
#include "cuda/attention/kernel_table.h"
#include "cuda/common/device_properties.h"
#include "cuda/mask/device_columns.h"

namespace stof {
namespace cuda {

constexpr int kDecodeQueries = 16;   // most queries of these kernels
constexpr int kDecodeTileRows = 64;  // m of their block mask: the least that mask kernels support
constexpr int kMostDecodeSplits = 128;

struct DecodeParams {
  AttentionParams attention;
  int32_t heads =
      1;  // query heads packed into a CTA (GQA packing): H / G, or 1 if their masks differ and are not stacked
  int32_t stacked = 0;  // 1: the mask's heads are KV heads, its rows those of all packed query heads (stacked_mask.h)
  int32_t splits = 1;   // splits of the keys of a row block, a CTA each
  float* split_output =
      nullptr;  // [B, H, S, splits, Dv], before normalization; nullptr: one split, which writes the output
  float* split_stats = nullptr;   // [B, H, S, splits, 2]: row max in units of log2, row sum
  int32_t* empty_rows = nullptr;  // [B, H, S]: set to whether a row is fully masked; nullptr: not wanted
  int32_t second_pass = 0;        // 1: only the rows flagged in empty_rows, with all keys
  // The one tile row of a mask that all heads and batches share: entries [row_begin, row_end), full ones from row_full
  // on. row_begin -1: the device reads them. Only the cluster kernel uses this.
  int32_t row_begin = -1, row_full = 0, row_end = 0;
  // In place of a mask: query i of a sequence attends keys first_rows[b] + i - window_left to first_rows[b] + i
  // (key_range.h). nullptr: the mask counts.
  const int32_t* first_rows = nullptr;  // [B]
  int32_t window_left = kNoWindow;
  int32_t window_block = 1;             // KeyRange::block, beside columns alone
  DeviceColumns columns;                // attended beside the range
  const int32_t* seqlens = nullptr;     // KvArgs::seqlens; only the cluster kernel reads ahead
  const int32_t* is_invalid = nullptr;  // [B]: where it is not 0, outputs are NaN; nullptr: nowhere
  KvScale key_scale, value_scale;       // of quantized keys and values
  // Keys and values in pages, key_ends[b] of each sequence. Only FindPagedDecode's kernels read them.
  KeyPages pages;
  const int32_t* key_ends = nullptr;
  // The pages that each KV head attends, of those of its cache (cuda/choose_pages/choose.h): pages.table has a row for
  // each, [B, G, columns], and left_out [B, G] is the number of keys of the other pages. Only FindChosenDecode's
  // kernels read it.
  const int32_t* left_out = nullptr;
};

// Whether the decode kernels read quantized keys and values: 16 elements at a time. Others are dequantized first.
inline bool CanReadQuantized(const AttentionArgs& args) {
  bool can = (args.shape.dtype == DType::kF16 || args.shape.dtype == DType::kBF16) && args.shape.S <= kDecodeQueries &&
             args.shape.T > 0 && args.shape.D % 16 == 0 && args.shape.Dv % 16 == 0;
  for (const Strides* stride : {&args.key.stride, &args.value.stride}) {
    can = can && stride->b % 16 == 0 && stride->h % 16 == 0 && stride->s % 16 == 0;
  }
  for (const void* base : {args.key.data, args.value.data}) can = can && reinterpret_cast<uintptr_t>(base) % 16 == 0;
  return can;
}

constexpr int kClusterSizes = 4;  // 1, 2, 4, 8
// Two kernels. Split-KV: `splits` CTAs for a row block, then the combine kernel; ctas_per_sm of its KernelEntry says
// how many CTAs are resident on an SM. Cluster: the `splits` CTAs are a thread block cluster, which needs neither
// workspace nor a combine kernel; compute capability 9.0.
struct DecodeCode : KernelCode {
  int (*launch)(const DecodeParams& params, void* stream) = nullptr;
  int (*launch_columns)(const DecodeParams& params, void* stream) = nullptr;  // with key columns
  // ---- split-KV ----
  int (*combine)(const DecodeParams& params, void* stream) = nullptr;  // runs next where there are several splits
  // ---- cluster ----
  int tiles_at_once = 0;  // KV tiles that a CTA works on at once
  // clusters[i]: the number of clusters of 2^i CTAs that the current device runs at once; zeros: it cannot.
  void (*clusters)(int (&clusters)[kClusterSizes]) = nullptr;
  void (*clusters_columns)(int (&clusters)[kClusterSizes]) = nullptr;

  bool is_cluster() const { return clusters != nullptr; }
};

// A table has both kernels, in this order; that of quantized keys and values only the first one. `rows` of an entry:
// query rows of a CTA.
constexpr int kSplitKv = 0, kCluster = 1;

extern const KernelFamily kDecodeFamily;

// For packed_queries = heads * S.
KernelTable FindDecodeF16(const KernelProblem& problem);
KernelTable FindDecodeBf16(const KernelProblem& problem);
KernelTable FindDecodeF32(const KernelProblem& problem);
// The split-KV kernel for quantized keys and values, alone in its table.
KernelTable FindDecodeF16Int8(const KernelProblem& problem);
KernelTable FindDecodeF16Float8(const KernelProblem& problem);
KernelTable FindDecodeBf16Int8(const KernelProblem& problem);
KernelTable FindDecodeBf16Float8(const KernelProblem& problem);
// The split-KV kernel for keys and values in pages, alone in its table.
KernelTable FindPagedDecodeF16(const KernelProblem& problem);
KernelTable FindPagedDecodeBf16(const KernelProblem& problem);
KernelTable FindPagedDecodeF32(const KernelProblem& problem);
// The split-KV kernel for chosen pages, alone in its table: heads of 64 and 128 elements.
KernelTable FindChosenDecodeF16(const KernelProblem& problem);
KernelTable FindChosenDecodeBf16(const KernelProblem& problem);

struct DecodeChoice {
  bool cluster = false;      // the cluster kernel
  int splits = 1;            // CTAs of a row block
  double nanoseconds = 0.0;  // by the model
};
// The nanoseconds of the split-KV kernel with so many splits, 1 to kMostDecodeSplits. ctas_per_sm: of the kernel;
// tiles: KV tiles of a tile row; blocks: row blocks. num_splits.cc has the model.
double EstimateSplits(int ctas_per_sm, const AttentionParams& params, int item_bytes, int64_t tiles, int64_t blocks,
                      const DeviceProperties& device, int64_t splits);
// Chooses the number of splits, and the kernel. clusters: as above. only: kSplitKv, or kCluster where the device has
// room for clusters; -1: the faster one.
DecodeChoice ChooseSplits(int ctas_per_sm, const AttentionParams& params, int item_bytes, int64_t tiles, int64_t blocks,
                          const DeviceProperties& device);
DecodeChoice ChooseDecode(int ctas_per_sm, const AttentionParams& params, int item_bytes, int64_t tiles, int64_t blocks,
                          const DeviceProperties& device, int tiles_at_once, const int (&clusters)[kClusterSizes],
                          int only = -1);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_API_H_
