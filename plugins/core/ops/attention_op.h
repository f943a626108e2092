// SPDX-License-Identifier: Apache-2.0
// StofAttention as an operator. attention.cc checks and runs it, attention_plan.cc prepares runs.
#ifndef STOF_PLUGINS_CORE_OPS_ATTENTION_OP_H_
#define STOF_PLUGINS_CORE_OPS_ATTENTION_OP_H_

#include <memory>
#include <utility>
#include <vector>

#include "plugins/core/mask/columns/key_columns.h"
#include "plugins/core/ops/attention.h"
#include "plugins/core/ops/attention_padded_copies.h"
#include "plugins/core/ops/attention_sequences.h"
#include "plugins/core/ops/attention_shapes.h"
#include "plugins/core/ops/named_inputs.h"

namespace stof {

// So few query rows are evaluated directly: in decode T grows with every step, and no entry would be used twice.
constexpr int64_t kUncachedRows = 16;

class AttentionOp final : public Op {
 public:
  explicit AttentionOp(AttentionAttributes attributes)
      : attributes_(std::move(attributes)),
        output_rules_(OutputRules(attributes_)),
        lse_rules_(LseRules(attributes_)),
        mask_(attributes_.mask),
        relative_(attributes_.relative_index) {}

  Status Prepare(const Tensor* inputs, int input_count) override;
  Status InferOutputs(const Tensor* inputs, int input_count, Tensor* outputs, int output_count) const override;
  Status Run(const Tensor* inputs, int input_count, const Tensor* outputs, int output_count,
             const RunContext& context) const override;
  int InputCount() const override { return kTypedInputs + static_cast<int>(attributes_.operands.size()); }
  int OutputCount() const override { return attributes_.lse ? 2 : 1; }
  bool IsTypeAllowed(int index, DType dtype, DType typed) const override;
  Status CheckTarget(Target target) const override;
  Status PlanDevice(const Tensor* inputs, int input_count, DevicePlan* plan) const override;
  Status PrepareDevice(const Tensor* inputs, int input_count, int kernel) const override;
  Status PlanHost(const Tensor* inputs, int input_count, int threads, size_t* workspace) const override;
  Status PrepareNode(const Tensor* inputs, int input_count, bool on_cuda, int threads) override;

 private:
  // One run's inputs, in terms of the kernels.
  struct Problem {
    AttentionArgs args;
    // Packed sequences: of the CPU, and of a device.
    HostSequences sequences;
    PaddedCopies copies;
    Tables given;  // operands by role
    std::shared_ptr<const AttentionMask> mask;
    ExprSizes sizes;
    RelativeIndices::Rows relative_rows;

    // Whether the mask is the key padding mask alone; biases may forbid keys, too.
    bool is_pad_alone() const { return mask->parts.fixed.empty() && mask->parts.dynamic.empty(); }
    // By residue class, where the mask is dilated.
    bool Split() {
      if (sequences.given() || copies.given() || !SplitByResidue(*mask, &args, &sizes)) return false;
      mask = mask->of_residue;
      return true;
    }
  };

  // The block mask of a node with static shapes, made with the node.
  struct PreparedMask {
    ExprSizes sizes;
    CpuAttentionConfig config;
    std::shared_ptr<const BlockMask> mask;
    uint64_t hash = 0;  // of the expression, that of a residue class where the mask is dilated
    bool Suits(uint64_t expression, const ExprSizes& s, const CpuAttentionConfig& c) const {
      return mask != nullptr && hash == expression && config.m == c.m && config.n == c.n && sizes == s;
    }
  };

  // ---- attention.cc ----
  // The inputs with the names that messages use: query, key, value, and the roles of operands.
  NamedInputs Named(const Tensor* inputs, int input_count) const;
  Status CheckOutputCount(int count) const;
  // Type and shape of an output: 0 the output, 1 lse. Query, key and value are checked.
  Tensor OutputOf(const Tensor* inputs, int index) const;
  // Callers of the C ABI, and graphs without schema checks, may pass tensors without data. On a device the tables of a
  // mask need none: they were given before. An lse without data is not computed.
  Status CheckData(const Tensor* inputs, const Tensor& output, bool on_cuda) const;
  // Operands, mask and sizes of a problem with bound arguments.
  Status Complete(const Tensor* inputs, bool on_cuda, Problem* problem) const;
  // Whether the key columns of a mask are gathered on the CPU. The mask of so few queries is evaluated in each run,
  // which lists its tiles at the same cost.
  static bool CanGatherColumns(const AttentionMask& mask, const AttentionArgs& args,
                               std::shared_ptr<const ColumnSource::Gathered>* gathered);
  Status RunOnCuda(const Tensor* pad, const RunContext& context, Problem* problem) const;
  static Status RunOnCpu(const AttentionMask& mask, const ExprSizes& sizes, const PreparedMask& prepared,
                         const MaskShift& shift, const RunContext& context, const AttentionArgs& unmasked);

  // ---- attention_plan.cc ----
  // Binds a run on a device by types and shapes alone.
  Status BindForDevice(const Tensor* inputs, int input_count, Problem* problem, const Tensor** pad) const;
  Status PrepareHost(const Tensor* inputs, int input_count, int threads);
  // Replaces unknown sizes by usual ones: one batch, `length` queries, 1024 keys. False where head sizes or numbers of
  // heads are unknown, too, or a rank is wrong.
  bool FillUnknownSizes(int64_t length, std::vector<Tensor>* tensors) const;
  // known: these are a run's sizes, not just plausible ones. keep: keeps the mask as long as the node.
  Status PrepareDeviceFor(std::vector<Tensor> inputs, int kernel, bool known, bool keep) const;

  AttentionAttributes attributes_;
  std::vector<DimRule> output_rules_, lse_rules_;
  AttentionMaskSource mask_;
  RelativeIndices relative_;
  PreparedMask prepared_;
  mutable Keeper keeper_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_ATTENTION_OP_H_
