// SPDX-License-Identifier: Apache-2.0
// The arguments of an attention kernel, in parts: shape, tensors, scores, mask, keys and values, packed sequences,
// output. Check() says which combinations are legal.
#ifndef STOF_PLUGINS_CORE_CONTRACT_ATTENTION_ARGS_H_
#define STOF_PLUGINS_CORE_CONTRACT_ATTENTION_ARGS_H_

#include <cstdint>

#include "plugins/core/base/inline.h"
#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/contract/kv_scale.h"
#include "plugins/core/contract/page_choice.h"
#include "plugins/core/contract/relative_table.h"
#include "plugins/core/mask/block_mask.h"
#include "plugins/core/mask/dynamic_mask.h"

namespace stof {

class KeyColumns;  // plugins/core/mask/columns/key_columns.h

// What a fully masked row gives.
enum class EmptyRows : int32_t { kZero = 0, kNan = 1, kMean = 2, kAll = 3 };
// Whether fully masked rows attend all keys, or have the mean of all values.
STOF_ALWAYS_INLINE constexpr bool AttendsAllKeys(EmptyRows empty_rows) {
  return empty_rows == EmptyRows::kMean || empty_rows == EmptyRows::kAll;
}

// The lowest precision that kernels may compute an attention in: that of its operands; scores in int8; or these, and
// weights and values in fp8. Kernels without such operands compute in full precision.
enum class AttentionPrecision : int32_t { kFull = 0, kInt8 = 1, kInt8Fp8 = 2 };

struct AttentionShape {
  int64_t B = 0, H = 0, G = 0, S = 0, T = 0, D = 0, Dv = 0;
  DType dtype = DType::kF32;  // of query, key, value, output
  // Of key and value where they are quantized: one of kQuantizedTypes. kUndefined: they have dtype.
  DType kv_dtype = DType::kUndefined;
};
// The element type of key and value.
STOF_ALWAYS_INLINE DType KvType(const AttentionShape& shape) {
  return shape.kv_dtype == DType::kUndefined ? shape.dtype : shape.kv_dtype;
}

// [B, heads, rows, head size] by strides.
struct TensorView {
  const void* data = nullptr;
  Strides stride;
};

// ---- scores ----
// A bias of every query-key pair, [B, H, S, T]; strides in elements, 0 on a broadcast axis.
struct PairBias {
  const void* data = nullptr;  // nullptr: none
  DType dtype = DType::kUndefined;
  int64_t stride_b = 0, stride_h = 0, stride_q = 0, stride_k = 0;
};

// Added to the score of query i and key j: table[h * stride_h + clamp(j - (query_position + i), -R, R) + R],
// R = size / 2, times the factor of the query.
struct RelativeBias {
  const float* table = nullptr;  // nullptr: none
  int64_t size = 0, stride_h = 0;
  int64_t query_position = 0;  // of query 0
  // [B, H, S] by strides, 0 on a broadcast axis; nullptr: 1 for all.
  const void* factor = nullptr;
  DType factor_dtype = DType::kUndefined;
  int64_t factor_stride_b = 0, factor_stride_h = 0;
};

// [H], a logit that joins each row's softmax without a value.
struct SinkLogits {
  const void* data = nullptr;  // nullptr: none
  DType dtype = DType::kUndefined;
};

// The diagonal begins at the key at the position of query 0, in keys of its sequence: queries stand behind each other
// from there.
struct DiagonalStart {
  int64_t first = 0;
  const int32_t* first_rows = nullptr;  // [B], of each sequence, in place of `first`; devices: a device address
};

struct ScoreArgs {
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  PairBias bias;
  RelativeBias relative_bias;
  SinkLogits sink;
  // Added to the products of queries and keys, inside scale and softcap: a query times its row of a table for each key,
  // and a key times its row for each query.
  RelativeTable relative_key[2], relative_query;
  // Key tiles whose weights are all below skip_threshold / keys of the largest one so far may be left out: SkipDistance
  // (contract/skip_distance.h). 0: none is. Kernels that leave out none are right, too.
  float skip_threshold = 0.0f;
  // Key blocks whose estimated weights are all below block_threshold of the largest one may be left out, before their
  // scores are computed: contract/chosen_blocks.h. 0: none is. Kernels that leave out none, or fewer, are right, too.
  float block_threshold = 0.0f;
  DiagonalStart diagonal;  // beside block_threshold: the blocks of its keys are always chosen
  bool has_relative_tables() const {
    return relative_key[0].given() || relative_key[1].given() || relative_query.given();
  }
};

// ---- mask ----
// Query i of sequence b attends keys first_rows[b] + i - window_left to first_rows[b] + i, as far as they are before
// KvArgs::key_ends[b]. For devices: the AttentionMask beside the arguments says the same, and a kernel may use either.
struct CausalWindow {
  const int32_t* first_rows = nullptr;  // [B]: the key at the position of query 0
  int64_t window_left = -1;             // -1: no bound
  // Each query also attends those of these columns that are before the window. They are of T keys or more. nullptr:
  // none. IsLimitedToKeyRange (contract/attention.h) holds with them.
  const KeyColumns* columns = nullptr;
  int64_t window_block = 1;  // beside columns: the window begins window_left keys before the query's block of so many
};

// The static conjuncts of a mask in one of these forms. A variant without std::variant: kernels of one instruction set
// call no function of the standard library.
class StaticMask {
 public:
  // Every pair is allowed. On devices: or the mask is the AttentionMask beside the arguments.
  StaticMask() = default;
  // Tiles of queries and keys. elements: the same conjuncts, asked for partial tiles without bits; nullptr where all
  // have bits.
  static StaticMask OfBlocks(const BlockMask* blocks, const DynamicMask* elements = nullptr) {
    StaticMask mask;
    mask.blocks_ = blocks, mask.elements_ = elements;
    return mask;
  }
  // Asked for every tile.
  static StaticMask OfElements(const DynamicMask* elements) { return OfBlocks(nullptr, elements); }
  static StaticMask OfWindow(const CausalWindow& window) {
    StaticMask mask;
    mask.window_ = window;
    return mask;
  }

  STOF_ALWAYS_INLINE const BlockMask* blocks() const { return blocks_; }
  STOF_ALWAYS_INLINE const DynamicMask* elements() const { return elements_; }
  const CausalWindow* window() const { return window_.first_rows != nullptr ? &window_ : nullptr; }

 private:
  const BlockMask* blocks_ = nullptr;
  const DynamicMask* elements_ = nullptr;
  CausalWindow window_;
};

// The conjuncts of a mask, and what a row gives that they mask fully.
struct MaskArgs {
  StaticMask fixed;
  // The CPU: conjuncts that read run-time operands (segment ids, lengths, pad inside an or), asked for every tile that
  // the static ones keep; nullptr: none.
  const DynamicMask* dynamic = nullptr;
  const uint8_t* pad = nullptr;  // the CPU: [B, T], 1: the key may be attended; nullptr: all
  EmptyRows empty_rows = EmptyRows::kZero;
  // Devices, [B, T]: 0 where a key exists, else -inf; nullptr: all do. Under kAll, rows without an allowed key attend
  // those that exist, and there is no attention bias. Under kMean, values without a key are the mean of the others.
  const float* existence_bias = nullptr;
  bool do_queries_exist_as_keys = false;  // it also says which query rows exist; outputs of others are never read
};

// ---- keys and values ----
// Keys and values in pages, as a paged KV cache holds them: the rows of a sequence lie in the pages that its row of a
// block table names. `key` and `value` are then the addresses of page 0, and the batch strides are 0.
struct KeyPages {
  const int32_t* table = nullptr;  // [B, columns]; nullptr: keys and values are not in pages
  int64_t columns = 0;
  int64_t pages = 0;   // of the cache: entries are below it, and on devices others are read as 0
  int64_t stride = 0;  // elements between pages
  int shift = 0;       // a page holds 2^shift rows, 16 at least
  STOF_ALWAYS_INLINE bool given() const { return table != nullptr; }
};

struct KvArgs {
  KvScale key_scale, value_scale;  // of quantized ones
  // The CPU: all keys are read there. Devices: the split-KV kernel reads them, whatever the other arguments say.
  KeyPages pages;
  // [B], the CPU, and devices with pages or 8-bit operands: the number of keys of each sequence. Later rows may hold
  // anything, NaN included, and are not read. nullptr: T for all.
  const int32_t* key_ends = nullptr;
  // The CPU: the first columns->packed() of the T keys are copies of these columns, which the kernel gathers. key and
  // value hold the other keys, and the masks are over all T. nullptr: none.
  const KeyColumns* columns = nullptr;
  // Pages whose keys may be left out. On the CPU the mask leaves them out
  // (plugins/core/ops/cached_attention/chosen_pages.h); kernels only see to it that memory does not depend on which
  // ones these are.
  PageChoice choice;
  // [B], devices: CausalWindow::first_rows[b] is seqlens[b] + 1 - S where is_invalid[b] is 0. The previous kernel of
  // the stream writes neither seqlens nor keys and values below first_rows: they may be read before it ends. nullptr:
  // it may write them.
  const int32_t* seqlens = nullptr;
  // [B], devices: outputs of a sequence are NaN where it is not 0. nullptr: it is 0 for all.
  const int32_t* is_invalid = nullptr;
};

// ---- packed sequences ----
// The CPU: tensors of batch size 1 hold the sequences one behind the other. Kernels count rows and keys of a sequence
// from 0: shape.S and shape.T are those of the longest sequence, KvArgs::key_ends has the numbers of keys, and batch
// strides are not read.
struct PackedSequences {
  // [B + 1]: key and value of sequence b are rows starts[b] to starts[b + 1] - 1. nullptr: none are packed.
  const int32_t* starts = nullptr;
  bool has_queries = false;  // query and output are packed likewise
  // [B]: the position of row 0 of each sequence, by which biases are read. nullptr: 0 for all. Static and dynamic masks
  // take rows and keys counted from 0.
  const int32_t* first_positions = nullptr;
  STOF_ALWAYS_INLINE bool given() const { return starts != nullptr; }
};

// ---- output ----
struct AttentionOutput {
  void* data = nullptr;  // [B, H, S, Dv]
  Strides stride;
  // [B, H, S], strided along batch and head: the log-sum-exp of each row. -inf for a fully masked row, or its sink's
  // logit. nullptr: not asked for.
  float* lse = nullptr;
  int64_t lse_stride_b = 0, lse_stride_h = 0;
};

struct AttentionArgs {
  AttentionShape shape;
  TensorView query;  // [B, H, S, D]
  TensorView key;    // [B, G, T, D]
  TensorView value;  // [B, G, T, Dv]
  // Weights also multiply the rows that their pairs name: output += sum of weight * row. CPU only.
  RelativeTable relative_value;
  ScoreArgs scores;
  MaskArgs mask;
  KvArgs kv;
  PackedSequences sequences;
  AttentionOutput output;
  bool allow_tf32 = false;  // fp32 matmuls may round their operands to TF32
  AttentionPrecision precision = AttentionPrecision::kFull;
  bool allow_bf16 = false;  // the CPU: matmuls may round their operands to bf16
  const char* kernel = "";  // the CUDA kernel to take where it suits; "" leaves the choice to the library
};

// An error where parts do not go together. Reads no memory of tensors. Kernels rely on it.
Status Check(const AttentionArgs& args);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_ATTENTION_ARGS_H_
