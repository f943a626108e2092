// SPDX-License-Identifier: Apache-2.0
// The sparse MLP with fp32 weights rounded to bf16: every instruction set of this machine against the definition with
// rounded weights, and the operator with attribute allow_bf16.
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/isa.h"
#include "plugins/core/host/thread_pool.h"
#include "plugins/core/ops/sparse_mlp/sparse_mlp.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/map_attributes.h"
#include "tests/cpp/memory.h"
#include "tests/cpp/sparse_mlp/mlp_problem.h"
#include "tests/cpp/sparse_mlp/mlp_runs.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test::sparse_mlp {
namespace {

namespace in = sparse_mlp_input;

// A weight's values rounded to bf16, which the definition multiplies by from then on.
std::vector<uint16_t> RoundWeight(Values* weight) {
  std::vector<uint16_t> rounded(weight->values.size());
  for (size_t i = 0; i < rounded.size(); ++i) {
    StoreFloat(DType::kBF16, weight->values[i], reinterpret_cast<char*>(&rounded[i]));
    weight->values[i] = LoadFloat(DType::kBF16, reinterpret_cast<const char*>(&rounded[i]));
  }
  return rounded;
}

// The fp32 weights are poisoned: a run reads the rounded ones alone.
TEST(SparseMlpRoundedWeights) {
  for (const CpuIsa isa : IsasOfThisMachine()) {
    ThreadPool pool(3);
    std::vector<Case> cases = DrawCases(Cases(250));
    for (size_t i = 0; i < cases.size(); ++i) {
      Case c = cases[i];
      c.dtype = DType::kF32, c.bits = 0, c.accuracy_level = 0;
      Problem problem(c, i);
      Values* const weights[] = {&problem.gate_weight, &problem.up_weight, &problem.down_weight};
      std::vector<uint16_t> rounded[3];
      for (int w = 0; w < 3; ++w) {
        rounded[w] = RoundWeight(weights[w]);
        std::memset(weights[w]->data(), 0xff, weights[w]->bytes.size());
      }
      SparseMlpArgs args = problem.Args(nullptr);
      SparseMlpWeight* const read[] = {&args.gate_weight, &args.up_weight, &args.down_weight};
      for (int w = 0; w < 3; ++w) read[w]->rounded = read[w]->data != nullptr ? rounded[w].data() : nullptr;
      const std::string where = Text(CpuIsaName(isa), " seed ", i, " ", Describe(c));
      const std::vector<char> found = Run(args, isa, Parallel{});
      CheckOutput(problem, found, where);
      CHECK(Run(args, isa, pool.view()) == found, where, ": 3 threads give other bits than 1");
      CountCases(1);
    }
  }
}

TEST(SparseMlpRoundsToNearestEven) {
  const float infinity = std::numeric_limits<float>::infinity();
  // Between two numbers of bf16, at the tie and beside it; beyond the largest one; subnormal.
  const std::pair<float, uint16_t> known[] = {
      {1.0f, 0x3f80},      {0x1.01p0f, 0x3f80},  {0x1.0100p0f + 0x1p-20f, 0x3f81},
      {0x1.03p0f, 0x3f82}, {-0x1.01p0f, 0xbf80}, {infinity, 0x7f80},
      {-infinity, 0xff80}, {3.4e38f, 0x7f80},    {0.0f, 0},
      {-0.0f, 0x8000},     {0x1p-133f, 1},       {1e-45f, 0}};
  for (const CpuIsa isa : IsasOfThisMachine()) {
    for (const int copies : {1, 3}) {  // a part of a vector, and whole vectors
      std::vector<float> from;
      for (int i = 0; i < copies; ++i) {
        for (const auto& row : known) from.push_back(row.first);
      }
      from.push_back(std::numeric_limits<float>::quiet_NaN());
      std::vector<uint16_t> to(from.size());
      CpuRoundMlpWeight(isa, from.data(), static_cast<int64_t>(from.size()), to.data());
      for (size_t i = 0; i + 1 < from.size(); ++i) {
        CHECK(to[i] == known[i % std::size(known)].second, CpuIsaName(isa), ": ", from[i], " became ", to[i]);
      }
      CHECK((to.back() & 0x7f80) == 0x7f80 && (to.back() & 0x7f) != 0, CpuIsaName(isa), ": NaN became ", to.back());
      CountCases(1);
    }
  }
}

// ---- by way of the operator ----
// The output of an exact MLP with an up weight. is_constant: whether the weights are.
Status RunNode(Problem* problem, int64_t allow_bf16, bool is_constant, std::vector<char>* output) {
  const Case& c = problem->c;
  MapAttributes attributes;
  attributes.ints = {{"allow_bf16", allow_bf16}};
  attributes.strings = {{"activation", "relu"}};
  std::unique_ptr<Op> op;
  STOF_RETURN_IF_ERROR(SparseMlpDescription()->create(attributes, &op));
  Tensor inputs[in::kDownWeight + 1], constants[in::kDownWeight + 1];
  const auto put = [&](int i, Values* values, std::vector<int64_t> dims) {
    inputs[i] = TensorOfShape(DType::kF32, dims);
    inputs[i].data = values->data();
  };
  put(in::kInput, &problem->input, {c.T, c.K}), put(in::kGate, &problem->gate, {c.T, c.F});
  put(in::kUpWeight, &problem->up_weight, {c.F, c.K}), put(in::kDownWeight, &problem->down_weight, {c.F, c.N});
  for (const int i : {in::kUpWeight, in::kDownWeight}) constants[i] = is_constant ? inputs[i] : Tensor();
  STOF_RETURN_IF_ERROR(op->Prepare(constants, in::kDownWeight + 1));
  size_t planned = 0;
  STOF_RETURN_IF_ERROR(op->PlanHost(inputs, in::kDownWeight + 1, 1, &planned));
  Tensor result;
  STOF_RETURN_IF_ERROR(op->InferOutputs(inputs, in::kDownWeight + 1, &result, 1));
  output->assign(static_cast<size_t>(c.T * c.N) * sizeof(float), static_cast<char>(0xfe));
  result.data = output->data();
  Memory memory;
  RunContext context;
  context.allocate = Memory::Allocate;
  context.self = &memory;
  return op->Run(inputs, in::kDownWeight + 1, &result, 1, context);
}

TEST(SparseMlpBf16ByAttribute) {
  Case c;
  c.T = 5, c.K = 130, c.F = 200, c.N = 77, c.density = 0.4;
  Problem problem(c, 17);
  std::vector<char> plain, rounded, not_constant;
  CHECK(RunNode(&problem, 0, true, &plain).ok() && RunNode(&problem, 1, true, &rounded).ok());
  CHECK(RunNode(&problem, 1, false, &not_constant).ok());
  CHECK(not_constant == plain, "weights that are not constant are not rounded");
  CHECK(rounded != plain, "nothing was rounded");
  CheckOutput(problem, plain, "without the attribute");
  for (Values* weight : {&problem.up_weight, &problem.down_weight}) RoundWeight(weight);
  CheckOutput(problem, rounded, "with rounded weights");
  const Status status = RunNode(&problem, 2, true, &plain);
  CHECK(status.message() == "attribute allow_bf16 is 2, expected 0 or 1", status.message());
  CountCases(4);
}

}  // namespace
}  // namespace stof::test::sparse_mlp
