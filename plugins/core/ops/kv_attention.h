// SPDX-License-Identifier: Apache-2.0
// What the operators of attention over a KV cache do alike, StofCachedAttention and StofPagedAttention: they bind masks
// and sinks, check results, and run on a device. new_tokens.h has what they check of new tokens.
#ifndef STOF_PLUGINS_CORE_OPS_KV_ATTENTION_H_
#define STOF_PLUGINS_CORE_OPS_KV_ATTENTION_H_

#include <algorithm>
#include <cstdint>
#include <memory>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/mask/cached_mask.h"
#include "plugins/core/ops/cached_attention/cached_attention.h"
#include "plugins/core/ops/named_inputs.h"

namespace stof {

// The tables of a mask that are given, from input `first` on, with the inputs' names. Masks have at most
// cached_input::kMostTables.
Tables MaskTables(const NamedInputs& inputs, int first);

// An error where a table of a mask has no data, by which plans of runs see what the mask allows.
Status CheckTableData(const NamedInputs& inputs, int first);

// Where the tables from input `first` on end.
inline int EndOfTables(const NamedInputs& inputs, int first) {
  return std::min(inputs.count(), first + cached_input::kMostTables);
}

// Makes the mask of a node by make(mask), which reads tables from input `first` on. Where one of them is absent, it is
// no constant: *mask stays nullptr, errors of `make` count for nothing, and each run makes the mask.
template <typename Make>
Status BindMask(const NamedInputs& inputs, int first, const Make& make, std::shared_ptr<const CachedMask>* mask) {
  const Status status = make(mask);
  if (status.ok()) return status;
  for (int i = first; i < EndOfTables(inputs, first); ++i) {
    if (!inputs.Has(i)) return Status();
  }
  return status;
}

// Scale, softcap and thresholds by the attributes.
ScoreArgs ScoresOf(const CachedAttentionAttributes& attributes, int64_t head_size);

// Bind input `index`, if it is given: the logits of heads, an attention bias. An error names the input.
Status BindSink(const NamedInputs& inputs, int index, const AttentionShape& shape, ScoreArgs* scores);
Status BindBias(const NamedInputs& inputs, int index, const AttentionShape& shape, ScoreArgs* scores);

// The three results of a KV operator: the output, the cache of keys and that of values.
struct KvResults {
  static constexpr int kCount = 3;
  const char* names[kCount];
  CacheNames caches;
  int past_key;  // the input that has the keys before the step; that of the values follows it
};

// Checks types and shapes of the results against those expected.
Status CheckResults(const KvResults& results, const Tensor* outputs, const Tensor* expected);
// Checks that inputs and results have data, and that caches share buffers as they may.
Status CheckBuffers(const KvResults& results, const NamedInputs& inputs, const Tensor* outputs);

// Finds the backend, and the context of a run on it. keeper: the operator's. An error where there are no CUDA kernels,
// or where the mask has tables that are no constants.
Status FindDevice(bool has_constant_tables, const RunContext& context, Keeper* keeper, const CudaBackend** backend,
                  RunContext* own);
// Queues attention. first_positions: [B], which a mask of CachedMask::on_device reads; nullptr: the mask reads none.
Status RunOnDevice(const CudaBackend& backend, const AttentionArgs& args, const AttentionMask& mask,
                   int32_t* first_positions, const RunContext& context);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_KV_ATTENTION_H_
