// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/kv_attention.h"

#include <cmath>
#include <string>

#include "plugins/core/ops/attention_operands.h"

namespace stof {
namespace {

// An error of an input under the name that the input has in this operator.
Status NameInput(const NamedInputs& inputs, int index, const Status& status) {
  return status.ok() ? status : Status::Error(inputs.Name(index) + ": " + status.message());
}

}  // namespace

Tables MaskTables(const NamedInputs& inputs, int first) {
  Tables tables;
  for (int i = first; i < EndOfTables(inputs, first); ++i) {
    if (inputs.Has(i)) tables.emplace_back(inputs.Name(i), inputs[i]);
  }
  return tables;
}

Status CheckTableData(const NamedInputs& inputs, int first) {
  for (int i = first; i < EndOfTables(inputs, first); ++i) {
    if (!inputs.Has(i) || inputs[i].data != nullptr) continue;
    return Status::Error(inputs.Name(i) + " has no data: only a run knows what the mask allows");
  }
  return Status();
}

ScoreArgs ScoresOf(const CachedAttentionAttributes& attributes, int64_t head_size) {
  ScoreArgs scores;
  scores.scale = attributes.scale != 0.0f ? attributes.scale : 1.0f / std::sqrt(static_cast<float>(head_size));
  scores.softcap = attributes.softcap;
  scores.skip_threshold = attributes.skip_threshold;
  scores.block_threshold = attributes.block_threshold;
  return scores;
}

Status BindSink(const NamedInputs& inputs, int index, const AttentionShape& shape, ScoreArgs* scores) {
  if (!inputs.Has(index)) return Status();
  return NameInput(inputs, index, BindSink(inputs[index], shape, &scores->sink));
}

Status BindBias(const NamedInputs& inputs, int index, const AttentionShape& shape, ScoreArgs* scores) {
  if (!inputs.Has(index)) return Status();
  return NameInput(inputs, index, BindBias(inputs[index], shape, &scores->bias));
}

Status CheckResults(const KvResults& results, const Tensor* outputs, const Tensor* expected) {
  for (int i = 0; i < KvResults::kCount; ++i) {
    STOF_RETURN_IF_ERROR(CheckTensor(results.names[i], outputs[i], expected[i]));
  }
  return Status();
}

Status CheckBuffers(const KvResults& results, const NamedInputs& inputs, const Tensor* outputs) {
  STOF_RETURN_IF_ERROR(inputs.CheckData());
  for (int i = 0; i < KvResults::kCount; ++i) {
    if (outputs[i].data != nullptr || outputs[i].Elements() == 0) continue;
    return Status::Error(std::string(results.names[i]) + " has no data");
  }
  const bool has_past = inputs.Has(results.past_key);
  return CheckCacheBuffers(has_past ? &inputs[results.past_key] : nullptr, outputs + 1, results.caches);
}

Status FindDevice(bool has_constant_tables, const RunContext& context, Keeper* keeper, const CudaBackend** backend,
                  RunContext* own) {
  *backend = FindCudaBackend();
  if (*backend == nullptr) return Status::Error(kNoCudaKernels);
  if (!has_constant_tables) {
    return Status::Error("the tables of the mask are no constants, which the CUDA kernels need them to be");
  }
  *own = context;
  if (own->keeper == nullptr) own->keeper = keeper;
  return Status();
}

Status RunOnDevice(const CudaBackend& backend, const AttentionArgs& args, const AttentionMask& mask,
                   int32_t* first_positions, const RunContext& context) {
  const AttentionShape& shape = args.shape;
  Tables operands;
  if (first_positions != nullptr && !IsLimitedToKeyRange(args)) {
    operands.emplace_back(kFirstPositions, TensorOfShape(DType::kI32, {shape.B}));
    operands.back().second.data = first_positions;
  }
  const ExprSizes sizes = {shape.B, shape.H, shape.S, shape.T, 0};
  return backend.attention.run(args, nullptr, mask, sizes, operands, context);
}

}  // namespace stof
