// SPDX-License-Identifier: Apache-2.0
// The contract between kernels (cpu/, cuda/) and everything that calls them. Plain structs; no framework type.
#ifndef STOF_PLUGINS_CORE_CONTRACT_KERNELS_H_
#define STOF_PLUGINS_CORE_CONTRACT_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "plugins/core/contract/status.h"
#include "plugins/core/mask/block_mask.h"

namespace stof {

// Values of onnx.TensorProto.DataType, so that adapters cast instead of translating.
enum class DType : int32_t {
  kUndefined = 0,
  kF32 = 1,
  kU8 = 2,
  kI8 = 3,
  kI32 = 6,
  kI64 = 7,
  kBool = 9,
  kF16 = 10,
  kF64 = 11,
  kBF16 = 16,
};

// Bytes of an element; 0 for no type.
constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kI64:
    case DType::kF64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kU8:
    case DType::kI8:
    case DType::kBool:
      return 1;
    default:
      return 0;
  }
}

// Elements between neighbours along batch, head and position; the head size is contiguous.
struct Strides {
  int64_t b = 0;
  int64_t h = 0;
  int64_t s = 0;
};

enum class EmptyRows : int32_t { kZero = 0, kNan = 1, kMean = 2, kAll = 3 };

// Runs fn(user, i) for i in [0, count), on up to `threads` threads at once. count may exceed threads.
struct Parallel {
  void (*run)(void* self, void (*fn)(void* user, size_t i), size_t count, void* user) = nullptr;
  void* self = nullptr;
  int threads = 1;
};

// A part of the mask that is evaluated while a kernel runs.
struct DynamicMask {
  // Returns 0: the tile is empty, 1: partial and bits [m, n / 32] hold its element mask, 2: full.
  int (*tile)(const void* self, int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n,
              uint32_t* bits) = nullptr;
  const void* self = nullptr;
  bool by_batch = true, by_head = true;  // whether it differs between batches, between heads
};

struct AttentionArgs {
  int64_t B = 0, H = 0, G = 0, S = 0, T = 0, D = 0, Dv = 0;
  DType dtype = DType::kF32;    // of query, key, value, output
  const void* query = nullptr;  // [B, H, S, D]
  const void* key = nullptr;    // [B, G, T, D]
  const void* value = nullptr;  // [B, G, T, Dv]
  void* output = nullptr;       // [B, H, S, Dv]
  Strides query_stride, key_stride, value_stride, output_stride;
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  EmptyRows empty_rows = EmptyRows::kZero;
  bool allow_tf32 = false;       // fp32 products may be rounded as TF32 is
  const char* kernel = "";       // the one to take where it suits; others are chosen
  const uint8_t* pad = nullptr;  // [B, T], 1: the key may be attended; nullptr: all
  const void* bias = nullptr;    // element strides below, 0 on a broadcast axis; nullptr: none
  DType bias_dtype = DType::kUndefined;
  int64_t bias_stride_b = 0, bias_stride_h = 0, bias_stride_q = 0, bias_stride_k = 0;
  // Added to the score of query i and key j: relative_bias[h * relative_bias_stride_h + clamp(j - (query_position + i),
  // -R, R) + R], R = relative_bias_size / 2; nullptr: none.
  const float* relative_bias = nullptr;
  int64_t relative_bias_size = 0, relative_bias_stride_h = 0;
  int64_t query_position = 0;  // of query 0
  const void* sink = nullptr;  // [H], a logit that takes its share of each row's softmax; nullptr: none
  DType sink_dtype = DType::kUndefined;
  // [B, H, S], neighbours along batch and head as the strides say: the natural logarithm of what a row's weights are
  // divided by; -inf for a row without a key, or its sink's logit. nullptr: not asked for.
  float* lse = nullptr;
  int64_t lse_stride_b = 0, lse_stride_h = 0;
  const BlockMask* mask = nullptr;  // static part; nullptr: every pair is allowed, but for `elements`
  // Conjuncts that read run-time operands (segment ids, lengths, pad inside an or), asked for every tile that the
  // static part keeps; nullptr: none.
  const DynamicMask* dynamic = nullptr;
  // The static part, asked for the partial tiles of `mask` without bits, and for all tiles where `mask` is nullptr.
  const DynamicMask* elements = nullptr;
};

// ---- CPU (cpu/attention/attention.h has the implementation's own parts) ----
enum class CpuIsa : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };
CpuIsa BestCpuIsa();  // of this machine, may be lowered by the environment variable STOF_CPU_ISA

struct CpuAttentionConfig {
  CpuIsa isa = CpuIsa::kPortable;
  int m = 0;  // query rows of a tile
  int n = 0;  // keys of a tile, a multiple of 32
};
// The tile that suits the problem; the block mask handed to CpuAttention has exactly this tile.
CpuAttentionConfig ChooseCpuAttention(const AttentionArgs& args, int threads);
size_t CpuAttentionWorkspace(const AttentionArgs& args, const CpuAttentionConfig& config, int threads);
// args and config as given to CpuAttentionWorkspace, pointers too; workspace: its bytes, 64-byte aligned, contents
// arbitrary.
Status CpuAttention(const AttentionArgs& args, const CpuAttentionConfig& config, void* workspace,
                    const Parallel& parallel);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_KERNELS_H_
