// SPDX-License-Identifier: Apache-2.0
// The sparse MLP with fp32 weights rounded to bf16, and the operator with attribute allow_bf16: every instruction set
// of this machine against the definitions with rounded weights, and with rounded tokens and hidden values where the set
// has kernels for them.
#include <cmath>
#include <cstdlib>
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

// A problem whose weights are rounded, and its arguments. The fp32 weights are poisoned: a run reads the rounded ones.
struct RoundedProblem {
  RoundedProblem(const Case& c, uint64_t seed, CpuIsa isa) : problem(c, seed) {
    problem.least_bf16_tokens = CpuMlpLeastBf16Tokens(isa);
    Values* const weights[] = {&problem.gate_weight, &problem.up_weight, &problem.down_weight};
    for (int w = 0; w < 3; ++w) {
      rounded[w] = RoundWeight(weights[w]);
      std::memset(weights[w]->data(), 0xff, weights[w]->bytes.size());
    }
  }
  SparseMlpArgs Args() {
    SparseMlpArgs args = problem.Args(nullptr);
    SparseMlpWeight* const read[] = {&args.gate_weight, &args.up_weight, &args.down_weight};
    for (int w = 0; w < 3; ++w) read[w]->rounded = read[w]->data != nullptr ? rounded[w].data() : nullptr;
    return args;
  }

  Problem problem;
  std::vector<uint16_t> rounded[3];  // gate, up and down
};

TEST(SparseMlpRoundedWeights) {
  for (const CpuIsa isa : IsasOfThisMachine()) {
    ThreadPool pool(3);
    std::vector<Case> cases = DrawCases(Cases(250));
    for (size_t i = 0; i < cases.size(); ++i) {
      Case c = cases[i];
      c.dtype = DType::kF32, c.bits = 0, c.accuracy_level = 0;
      RoundedProblem rounded(c, i, isa);
      const SparseMlpArgs args = rounded.Args();
      const std::string where = Text(CpuIsaName(isa), " seed ", i, " ", Describe(c));
      const std::vector<char> found = Run(args, isa, Parallel{});
      CheckOutput(rounded.problem, found, where);
      CHECK(Run(args, isa, pool.view()) == found, where, ": 3 threads give other bits than 1");
      CountCases(1);
    }
  }
}

// One weight is fp32: what multiplies it is not rounded.
TEST(SparseMlpSomeRoundedWeights) {
  for (const CpuIsa isa : IsasOfThisMachine()) {
    for (int kept = 0; kept < 3; ++kept) {
      for (const double density : {0.05, 0.2, 0.9}) {
        Case c;
        c.T = 40, c.K = 333, c.F = 300, c.N = 81, c.density = density, c.has_biases = true;
        c.selection = SparseMlpSelection::kPredictor;
        RoundedProblem rounded(c, 7, isa);
        rounded.problem.is_rounded[kept] = false;
        std::vector<float> same;  // numbers
        for (const uint16_t& value : rounded.rounded[kept]) {
          same.push_back(static_cast<float>(LoadFloat(DType::kBF16, reinterpret_cast<const char*>(&value))));
        }
        SparseMlpArgs args = rounded.Args();
        SparseMlpWeight* const weights[] = {&args.gate_weight, &args.up_weight, &args.down_weight};
        weights[kept]->rounded = nullptr, weights[kept]->data = same.data();
        CheckOutput(rounded.problem, Run(args, isa, Parallel{}), Text(CpuIsaName(isa), " ", kept, " ", Describe(c)));
        CountCases(1);
      }
    }
  }
}

// More threads than parts share the columns of a part.
TEST(SparseMlpRoundedWeightsOfManyThreads) {
  for (const CpuIsa isa : IsasOfThisMachine()) {
    ThreadPool pool(33);
    for (const int64_t T : {16, 40, 64}) {
      Case c;
      c.T = T, c.F = 600, c.N = 1100, c.density = 0.7, c.has_biases = true;
      RoundedProblem rounded(c, 13, isa);
      const std::string where = Text(CpuIsaName(isa), " ", Describe(c));
      const std::vector<char> found = Run(rounded.Args(), isa, Parallel{});
      CheckOutput(rounded.problem, found, where);
      CHECK(Run(rounded.Args(), isa, pool.view()) == found, where, ": 33 threads give other bits than 1");
      CountCases(1);
    }
  }
}

// What a run leaves in its workspace changes no bit of the next one: masks of 32 tokens that need every neuron are NaN
// where the next run has tokens, and pairs read tokens up to a multiple of kMlpPadding.
TEST(SparseMlpRoundedWeightsInAUsedWorkspace) {
  for (const CpuIsa isa : IsasOfThisMachine()) {
    for (const int64_t K : {70, 96, 333}) {
      Case all;
      all.T = 32, all.K = K, all.F = 192, all.N = 64, all.density = 1;
      Case few = all;
      few.T = 64, few.density = 0.08;
      RoundedProblem first(all, 3, isa), second(few, 5, isa);
      const std::unique_ptr<void, void (*)(void*)> workspace(
          std::aligned_alloc(64, CpuSparseMlpWorkspace(second.Args(), isa)), std::free);
      const std::string where = Text(CpuIsaName(isa), " ", Describe(few));
      for (int i = 0; i < 2; ++i) {
        CheckOutput(first.problem, RunIn(workspace.get(), first.Args(), isa, Parallel{}), where);
        const std::vector<char> found = RunIn(workspace.get(), second.Args(), isa, Parallel{});
        CheckOutput(second.problem, found, where);
        CHECK(found == Run(second.Args(), isa, Parallel{}), where, ": other bits than in a workspace of its own");
      }
      CountCases(1);
    }
  }
}

// Infinite weights of neurons that a token does not need change no bit of its output.
TEST(SparseMlpInfiniteRoundedWeights) {
  for (const CpuIsa isa : IsasOfThisMachine()) {
    for (const int64_t T : {16, 40, 64, 81}) {
      for (const double density : {0.1, 0.35, 0.95}) {
        Case c;
        c.T = T, c.K = 70, c.F = 190, c.N = T % 2 == 0 ? 96 : 590, c.density = density;
        RoundedProblem rounded(c, 11, isa);
        const std::vector<char> finite = Run(rounded.Args(), isa, Parallel{});
        CheckOutput(rounded.problem, finite, Text(CpuIsaName(isa), " ", Describe(c)));
        std::vector<bool> is_touched(static_cast<size_t>(T), false);
        for (int64_t j = 5; j < c.F; j += 37) {
          for (int64_t t = 0; t < T; ++t) {
            if (rounded.problem.gate.values[static_cast<size_t>(t * c.F + j)] > 0) {
              is_touched[static_cast<size_t>(t)] = true;
            }
          }
          rounded.rounded[1][static_cast<size_t>(j * c.K)] = 0x7f80;
          rounded.rounded[2][static_cast<size_t>(j * c.N)] = 0x7f80;
        }
        const std::vector<char> found = Run(rounded.Args(), isa, Parallel{});
        for (int64_t t = 0; t < T; ++t) {
          const bool is_equal =
              std::memcmp(found.data() + t * c.N * 4, finite.data() + t * c.N * 4, static_cast<size_t>(c.N) * 4) == 0;
          CHECK(is_equal != is_touched[static_cast<size_t>(t)], CpuIsaName(isa), " ", Describe(c), " token ", t);
        }
        CountCases(1);
      }
    }
  }
}

// An infinite hidden value at a down row with an infinite weight: infinity in all columns of the tokens that need it.
TEST(SparseMlpInfiniteHiddenValues) {
  constexpr int64_t kNeuron = 5;
  for (const CpuIsa isa : IsasOfThisMachine()) {
    for (const int64_t T : {3, 17, 64}) {
      for (const double density : {0.1, 0.95}) {
        Case c;
        c.T = T, c.K = 70, c.F = 60, c.N = 150, c.density = density;
        RoundedProblem rounded(c, 12, isa);
        rounded.rounded[1][static_cast<size_t>(kNeuron * c.K)] = 0x7f80;
        rounded.rounded[2][static_cast<size_t>(kNeuron * c.N)] = 0x7f80;
        const std::vector<char> bytes = Run(rounded.Args(), isa, Parallel{});
        for (int64_t i = 0; i < T * c.N; ++i) {
          float found;
          std::memcpy(&found, bytes.data() + 4 * i, 4);
          const bool is_needed = rounded.problem.gate.values[static_cast<size_t>(i / c.N * c.F + kNeuron)] > 0;
          CHECK(is_needed ? std::isinf(found) : std::isfinite(found), CpuIsaName(isa), " ", Describe(c), " element ", i,
                " is ", found);
        }
        CountCases(1);
      }
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

void CheckAttribute(int64_t tokens) {
  Case c;
  c.T = tokens, c.K = 130, c.F = 200, c.N = 77, c.density = 0.4;
  Problem problem(c, 17);
  std::vector<char> plain, rounded, not_constant;
  CHECK(RunNode(&problem, 0, true, &plain).ok() && RunNode(&problem, 1, true, &rounded).ok());
  CHECK(RunNode(&problem, 1, false, &not_constant).ok());
  CHECK(not_constant == plain, "weights that are not constant are not rounded");
  CHECK(rounded != plain, "nothing was rounded");
  CheckOutput(problem, plain, "without the attribute");
  for (Values* weight : {&problem.up_weight, &problem.down_weight}) RoundWeight(weight);
  problem.least_bf16_tokens = CpuMlpLeastBf16Tokens(BestCpuIsa());
  CheckOutput(problem, rounded, "with attribute allow_bf16");
  CountCases(3);
}

TEST(SparseMlpBf16ByAttribute) {
  for (const int64_t tokens : {5, 15, 16, 70}) CheckAttribute(tokens);
  Case c;
  Problem problem(c, 17);
  std::vector<char> output;
  const Status status = RunNode(&problem, 2, true, &output);
  CHECK(status.message() == "attribute allow_bf16 is 2, expected 0 or 1", status.message());
  CountCases(1);
}

}  // namespace
}  // namespace stof::test::sparse_mlp
