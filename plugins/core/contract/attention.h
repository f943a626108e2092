// SPDX-License-Identifier: Apache-2.0
// Attention: the entry points of cpu/ and cuda/.
#ifndef STOF_PLUGINS_CORE_CONTRACT_ATTENTION_H_
#define STOF_PLUGINS_CORE_CONTRACT_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/contract/attention_args.h"
#include "plugins/core/host/skip_scores.h"

namespace stof {

struct AttentionMask;  // plugins/core/mask/attention_mask.h
struct ExprSizes;      // plugins/core/mask/expr.h
struct RunContext;     // plugins/core/contract/op.h

// ---- CPU ----
// Keys of a tile where queries are few. Shorter pages have shorter tiles: those that are left out lie among the others,
// and a tile is read as a whole.
constexpr int FewQueriesTile(const PageChoice& choice) { return choice.given() && choice.rows < 64 ? 32 : 64; }
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
// Fills the scores of pages, [B, G, pages], in the spans [B, G] alone, by args.kv.choice: upper bounds of the scores of
// their keys. A page score is NaN where an element of queries or of the page's key bounds is.
void CpuScorePages(const AttentionArgs& args, const PageSpan* spans, int64_t pages, float* scores,
                   const Parallel& parallel);

// ---- CUDA ----
struct AttentionBackend {
  // Queues one attention on context.stream; all pointers of args, pad and operands are device addresses. pad: [B or 1,
  // T] or nullptr. operands: by role, the vectors and tables that the mask reads; tables may be absent where the mask
  // reads no run-time vector.
  Status (*run)(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                const Tables& operands, const RunContext& context) = nullptr;
  // Uploads key columns, which CausalWindow::columns may then be. They stay as long as the KeyColumns. is_ready false:
  // the stream is captured, and they are not on the device yet.
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
  // Skip by score: adds what kernels of this process have counted in device memory, on all devices, after it has waited
  // for them; sets it to 0. nullptr: no kernel counts. They can return no error: after one the next run fails.
  void (*add_skip_counts)(SkipCounts* counts) = nullptr;
  void (*reset_skip_counts)() = nullptr;
};

// These work without a device, and in builds without CUDA kernels, too.
// Why no CUDA kernel takes a problem. Pointers that are not null are checked for alignment.
Status CheckCudaAttention(const AttentionArgs& args);
// Whether AttentionBackend::run reads no key or value outside of the CausalWindow. Otherwise the values of all keys
// must be finite, also of those that the mask forbids.
bool IsLimitedToKeyRange(const AttentionArgs& args);
// Whether AttentionBackend::run takes these keys and values in KvArgs::pages: few queries, aligned rows.
bool CanReadPages(const AttentionArgs& args);
// Whether AttentionBackend::run attends chosen pages alone (KvArgs::choice), and computes the key bounds that these
// lack.
bool ChoosesPages(const AttentionArgs& args);
// For runtimes that plan memory ahead: how many bytes AttentionBackend::run asks RunContext::allocate for at most,
// blocks rounded up to 64. It grows with every size. pad: there is a key padding mask. operands: as for `run`; their
// data is not read.
Status PlanCudaAttention(const AttentionArgs& args, bool pad, const AttentionMask& mask, const ExprSizes& sizes,
                         const Tables& operands, size_t* workspace);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_ATTENTION_H_
