// SPDX-License-Identifier: Apache-2.0
// The contract of operators without any of them: what a minimal one inherits, rules of shapes, limits of attention.
#include <cstring>
#include <limits>

#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/contract/dim_rule.h"
#include "plugins/core/contract/op.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

// y = x, for two inputs of which the second is ignored: no more than an operator must have.
class CopyOp final : public Op {
 public:
  int InputCount() const override { return 2; }
  Status InferOutputs(const Tensor* inputs, int, Tensor* outputs, int output_count) const override {
    if (output_count != 1) return Status::Error("one output");
    if (inputs[0].dtype != DType::kF32) return Status::Error("expected fp32");
    outputs[0] = inputs[0];
    outputs[0].data = nullptr;
    return Status();
  }
  Status Run(const Tensor* inputs, int, const Tensor* outputs, int, const RunContext&) const override {
    std::memcpy(outputs[0].data, inputs[0].data, static_cast<size_t>(inputs[0].Elements()) * 4);
    return Status();
  }
};

TEST(ContractDefaults) {
  CopyOp op;
  const Tensor inputs[2] = {TensorOfShape(DType::kF32, {2, 3}), TensorOfShape(DType::kF32, {1})};
  CHECK(op.Prepare(inputs, 2).ok());
  CHECK(op.Prepare(inputs, 1).message() == "has 1 inputs, expected 2");
  CHECK(op.OutputCount() == 1);
  CHECK(op.IsTypeAllowed(0, DType::kF16, DType::kF16) && op.IsTypeAllowed(1, DType::kF32, DType::kF32));
  CHECK(!op.IsTypeAllowed(1, DType::kF32, DType::kF16));
  CHECK(!op.IsTypeAllowed(2, DType::kF32, DType::kF32) && !op.IsTypeAllowed(-1, DType::kF32, DType::kF32));
  DevicePlan plan;
  plan.workspace = 7, plan.kernels = 7, plan.runs_several_kernels = true;
  CHECK(op.PlanDevice(inputs, 2, &plan).ok());
  CHECK(plan.workspace == 0 && plan.kernels == 0 && !plan.runs_several_kernels);
  const Tensor half = TensorOfShape(DType::kF16, {2, 3});
  CHECK(op.PlanDevice(&half, 1, &plan).message() == "expected fp32");
  CHECK(op.PrepareDevice(inputs, 2, 0).ok() && op.PrepareNode(inputs, 2, true, 1).ok());
  CountCases(10);
}

TEST(ContractWorkspace) {
  RunContext context;
  int64_t memory = 0;
  context.self = &memory;
  context.allocate = [](void* self, size_t bytes) { return bytes > sizeof(int64_t) ? nullptr : self; };
  void* workspace = &context;
  CHECK(context.Allocate(0, &workspace).ok() && workspace == nullptr);
  CHECK(context.Allocate(8, &workspace).ok() && workspace == &memory);
  CHECK(context.Allocate(9, &workspace).message() == "no memory for a workspace of 9 bytes");
  CountCases(3);
}

TEST(ContractRules) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const Tensor inputs[2] = {TensorOfShape(DType::kF32, {6, -1, kMost}), TensorOfShape(DType::kF32, {0, 5})};
  const auto size = [&](const DimRule& rule) {
    return EvaluateRule(rule, [&](int input, int axis) { return inputs[input].dims[axis]; });
  };
  CHECK(size({-1, 0, 4}) == 4 && size({-1, 0, -1}) == -1);
  CHECK(size({0, 0}) == 6 && size({0, 1}) == -1);
  CHECK(size({0, 0, -1, 2, 3}) == 4 && size({0, 0, -1, 1, 4}) == 1);
  CHECK(size({0, 0, -1, 1, 2, 1, 1}) == 15 && size({0, 0, -1, 1, 1, 1, 0}) == 0);
  CHECK(size({0, 0, -1, 1, 1, 0, 1}) == -1);
  CHECK(size({0, 2, -1, 2}) == -1 && size({0, 2, -1, 1, 1, 1, 1}) == -1);
  const Tensor output = TensorByRules(DType::kF16, {{1, 1}, {0, 0, -1, 1, 2}}, inputs);
  CHECK(output.dtype == DType::kF16 && ShapeText(output) == "[5, 3]" && output.data == nullptr);
  CountCases(12);
}

TEST(ContractLimits) {
  for (const Target target : {Target::kCpu, Target::kCuda, Target::kTensorRt}) {
    for (const DType dtype : AttentionLimits::kTypes) {
      const HeadSizes sizes = AttentionLimits::HeadSizesOf(target, dtype);
      CHECK(sizes.Has(64) && sizes.Has(256) && !sizes.Has(0) && !sizes.Has(-8) && !sizes.Has(264) && !sizes.Has(257));
      CHECK(sizes.Has(20) == (target == Target::kCpu || dtype == DType::kF32));
    }
    CHECK(!AttentionLimits::HeadSizesOf(target, DType::kF64).Has(64));
  }
  CountCases(12);
}

}  // namespace
}  // namespace stof::test
