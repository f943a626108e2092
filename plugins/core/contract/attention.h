// SPDX-License-Identifier: Apache-2.0
// Attention: the arguments of its kernels, and the entry points of cpu/ and cuda/.
#ifndef STOF_PLUGINS_CORE_CONTRACT_ATTENTION_H_
#define STOF_PLUGINS_CORE_CONTRACT_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "plugins/core/base/inline.h"
#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/contract/kv_scale.h"
#include "plugins/core/mask/block_mask.h"
#include "plugins/core/mask/dynamic_mask.h"

namespace stof {

class KeyColumns;      // plugins/core/mask/columns/key_columns.h
struct AttentionMask;  // plugins/core/mask/attention_mask.h
struct ExprSizes;      // plugins/core/mask/expr.h
struct RunContext;     // plugins/core/contract/op.h

enum class EmptyRows : int32_t { kZero = 0, kNan = 1, kMean = 2, kAll = 3 };

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

struct AttentionArgs {
  int64_t B = 0, H = 0, G = 0, S = 0, T = 0, D = 0, Dv = 0;
  DType dtype = DType::kF32;  // of query, key, value, output
  // Of key and value where they are quantized: one of kQuantizedTypes, with both scales. kUndefined: they have dtype.
  // Fully masked rows then attend nothing (empty_rows kZero or kNan).
  DType kv_dtype = DType::kUndefined;
  KvScale key_scale, value_scale;
  const void* query = nullptr;  // [B, H, S, D]
  const void* key = nullptr;    // [B, G, T, D]
  const void* value = nullptr;  // [B, G, T, Dv]
  void* output = nullptr;       // [B, H, S, Dv]
  Strides query_stride, key_stride, value_stride, output_stride;
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  EmptyRows empty_rows = EmptyRows::kZero;
  bool allow_tf32 = false;       // fp32 matmuls may round their operands to TF32
  const char* kernel = "";       // the CUDA kernel to take where it suits; "" leaves the choice to the library
  const uint8_t* pad = nullptr;  // [B, T], 1: the key may be attended; nullptr: all
  const void* bias = nullptr;    // element strides below, 0 on a broadcast axis; nullptr: none
  DType bias_dtype = DType::kUndefined;
  int64_t bias_stride_b = 0, bias_stride_h = 0, bias_stride_q = 0, bias_stride_k = 0;
  // Added to the score of query i and key j: relative_bias[h * relative_bias_stride_h + clamp(j - (query_position + i),
  // -R, R) + R], R = relative_bias_size / 2; nullptr: none.
  const float* relative_bias = nullptr;
  int64_t relative_bias_size = 0, relative_bias_stride_h = 0;
  int64_t query_position = 0;  // of query 0
  const void* sink = nullptr;  // [H], a logit that joins each row's softmax without a value; nullptr: none
  DType sink_dtype = DType::kUndefined;
  // [B, H, S], strided along batch and head: the log-sum-exp of each row. -inf for a fully masked row, or its sink's
  // logit. nullptr: not asked for.
  float* lse = nullptr;
  int64_t lse_stride_b = 0, lse_stride_h = 0;
  const BlockMask* mask = nullptr;  // static conjuncts; nullptr: every pair is allowed, but for `elements`
  // Conjuncts that read run-time operands (segment ids, lengths, pad inside an or), asked for every tile that the
  // static conjuncts keep; nullptr: none.
  const DynamicMask* dynamic = nullptr;
  // The static conjuncts, asked for the partial tiles of `mask` without bits, and for all tiles where `mask` is
  // nullptr.
  const DynamicMask* elements = nullptr;
  // The CPU alone: the first columns->packed() of the T keys are copies of these columns, which the kernel gathers. key
  // and value hold the other keys, and the masks are over all T. nullptr: none. Then there is no padding and no bias,
  // and fully masked rows attend nothing.
  const KeyColumns* columns = nullptr;
  // ---- attention over a KV cache ----
  // [B]: the index of the key at the position of query 0 of each sequence; nullptr: there is no cache.
  const int32_t* first_rows = nullptr;
  // [B], the CPU, and devices with `pages`: the number of keys of each sequence. Later rows may hold anything, NaN
  // included, and are not read. The mask is then in `elements`, and `mask` is nullptr. nullptr: T for all.
  const int32_t* key_ends = nullptr;
  // Read by the CPU kernels, and on devices by the split-KV kernel, which then runs whatever the other arguments say.
  KeyPages pages;
  // Whether query i attends exactly the keys first_rows[b] + i - window_left to first_rows[b] + i (that are before
  // key_ends[b]). The mask says the same: a kernel may use either. CUDA kernels get first_rows in this case alone.
  bool is_key_range = false;
  int64_t window_left = -1;  // -1: no bound
  // With range_columns: the window begins window_left keys before the query's block of so many positions.
  int64_t window_block = 1;
  // Devices alone: beside the key range, each query attends those of these columns that are before it. They are of T
  // keys or more, and IsLimitedToKeyRange holds. nullptr: none.
  const KeyColumns* range_columns = nullptr;
  // [B], devices alone: first_rows[b] is seqlens[b] + 1 - S where is_invalid[b] is 0. The previous kernel of the stream
  // writes neither seqlens nor keys and values below first_rows: they may be read before it ends. nullptr: it may write
  // them.
  const int32_t* seqlens = nullptr;
  // [B], devices alone: outputs of a sequence are NaN where it is not 0. nullptr: it is 0 for all.
  const int32_t* is_invalid = nullptr;
};

// The element type of key and value.
STOF_ALWAYS_INLINE DType KvType(const AttentionArgs& args) {
  return args.kv_dtype == DType::kUndefined ? args.dtype : args.kv_dtype;
}

// ---- CPU ----
struct CpuAttentionConfig {
  CpuIsa isa{};
  int m = 0;  // query rows of a tile
  int n = 0;  // keys of a tile, a multiple of 32
};
// The tile that suits the problem; the block mask of CpuAttention has exactly this tile.
CpuAttentionConfig ChooseCpuAttention(const AttentionArgs& args, int threads);
size_t CpuAttentionWorkspace(const AttentionArgs& args, const CpuAttentionConfig& config, int threads);
// args and config as given to CpuAttentionWorkspace, pointers too; workspace: its bytes, 64-byte aligned, contents
// arbitrary.
Status CpuAttention(const AttentionArgs& args, const CpuAttentionConfig& config, void* workspace,
                    const Parallel& parallel);

// ---- CUDA ----
struct AttentionBackend {
  // Queues one attention on context.stream; all pointers of args, pad and operands are device addresses. pad: [B or 1,
  // T] or nullptr. operands: by role, the vectors and tables that the mask reads; tables may be absent where the mask
  // reads no run-time vector.
  Status (*run)(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                const Tables& operands, const RunContext& context) = nullptr;
  // Uploads key columns, which AttentionArgs::range_columns may then be. They stay as long as the KeyColumns. is_ready
  // false: the stream is captured, and they are not on the device yet.
  Status (*upload_columns)(const KeyColumns& columns, const RunContext& context, bool* is_ready) = nullptr;
  // Makes the block mask that the first `run` with these sizes would make, on a stream of its own, and has the driver
  // load the kernels. Pointers of args, pad and operands are not followed: only their presence and alignment count.
  // context: kernel, and keeper where the mask shall live as long as that.
  Status (*prepare)(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                    const Tables& operands, const RunContext& context) = nullptr;
  // How many choices RunContext::kernel has for this problem on the current device; 0: none.
  int (*count_kernels)(const AttentionArgs& args) = nullptr;
  // For the tuner: the names of the kernels that attention may be asked for (AttentionArgs::kernel), separated by
  // blanks; the cost model chooses among the same ones.
  Status (*list_kernels)(int64_t head_size, DType dtype, std::string* names) = nullptr;
};

// These work without a device, and in builds without CUDA kernels, too.
// Why no CUDA kernel takes a problem. Pointers that are not null are checked for alignment.
Status CheckCudaAttention(const AttentionArgs& args);
// Whether AttentionBackend::run reads no key or value outside of the range that first_rows gives. Otherwise the values
// of all keys must be finite, also of those that the mask forbids.
bool IsLimitedToKeyRange(const AttentionArgs& args);
// Whether AttentionBackend::run takes these keys and values in `pages` (AttentionArgs): few queries, aligned rows.
bool CanReadPages(const AttentionArgs& args);
// For runtimes that plan memory ahead: how many bytes AttentionBackend::run asks RunContext::allocate for at most,
// blocks rounded up to 64. It grows with every size. pad: there is a key padding mask. operands: as for `run`; their
// data is not read.
Status PlanCudaAttention(const AttentionArgs& args, bool pad, const AttentionMask& mask, const ExprSizes& sizes,
                         const Tables& operands, size_t* workspace);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_ATTENTION_H_
