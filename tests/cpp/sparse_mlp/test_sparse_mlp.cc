// SPDX-License-Identifier: Apache-2.0
// The sparse MLP on the CPU against its definition in docs/reference/sparse-mlp.md, for every instruction set.
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/memory.h"
#include "tests/cpp/sparse_mlp/mlp_problem.h"
#include "tests/cpp/sparse_mlp/mlp_runs.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test::sparse_mlp {
namespace {

// Under sanitizers every third case of loops whose lengths have no factor 3.
bool IsLeftOut(int64_t number) { return Effort() < 1 && number % 3 != 0; }

void RunTable(CpuIsa isa) {
  ThreadPool pool(3);
  Starved starved(pool.view());
  const std::vector<Case> cases = DrawCases(Cases(250));
  for (size_t i = 0; i < cases.size(); ++i) {
    Case c = cases[i];
    c.has_predictor_relu = c.has_predictor() && i % 3 == 0;
    const std::string where = Text(CpuIsaName(isa), " seed ", i, " ", Describe(c));
    Problem problem(c, i);
    const std::vector<char> found = Run(problem.Args(nullptr), isa, Parallel{});
    CheckOutput(problem, found, where);
    CHECK(Run(problem.Args(nullptr), isa, starved.view()) == found, where, ": 3 threads give other bits than 1");
    CountCases(1);
  }
}

// Every token alone gives the bits that it has among others.
void RunTokensAlone(CpuIsa isa) {
  struct Weights {
    int bits, level;
    int64_t block;
  };
  constexpr Weights kWeights[] = {{0, 0, 32}, {4, 0, 32},  {8, 0, 32}, {4, 4, 16},
                                  {4, 4, 32}, {4, 4, 128}, {8, 4, 16}, {8, 4, 64}};
  int64_t number = 0;
  for (const double density : {0.05, 0.5, 0.9, 1.0}) {
    for (const Weights& weights : kWeights) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        if (IsLeftOut(number++)) continue;
        Case c;
        c.T = 31, c.K = 1100, c.F = 150, c.N = 530, c.density = density, c.dtype = dtype;
        c.bits = weights.bits, c.accuracy_level = weights.level, c.block = weights.block;
        Problem problem(c, 5);
        SparseMlpArgs args = problem.Args(nullptr);
        const std::vector<char> found = Run(args, isa, Parallel{});
        const int64_t item = SizeOf(dtype);
        for (const int64_t count : {int64_t{1}, int64_t{5}}) {
          for (const int64_t t : {int64_t{0}, int64_t{9}, c.T - count}) {
            SparseMlpArgs some = args;
            some.T = count;
            some.input = static_cast<const char*>(args.input) + t * c.K * item;
            some.gate = static_cast<const char*>(args.gate) + t * c.F * item;
            const std::vector<char> alone = Run(some, isa, Parallel{});
            CHECK(std::memcmp(alone.data(), found.data() + t * c.N * item, alone.size()) == 0, CpuIsaName(isa), " ",
                  Describe(c), " tokens ", t, " to ", t + count - 1, " alone have other bits");
            CountCases(1);
          }
        }
      }
    }
  }
}

void RunEachIsa(void (*run)(CpuIsa isa)) {
  for (const CpuIsa isa : IsasOfThisMachine()) run(isa);
}

TEST(SparseMlpTable) { RunEachIsa(RunTable); }
ONE_THREAD_TEST(SparseMlpTokensAlone) { RunEachIsa(RunTokensAlone); }

// Rows of idle neurons are poisoned, and may not reach the output: they are not read.
TEST(SparseMlpIdleRowsAreNotRead) {
  RunEachIsa([](CpuIsa isa) {
    for (const int64_t T : {1, 6}) {
      Case c;
      c.T = T, c.F = 300, c.density = 0.1;
      Problem problem(c, 7);
      const std::vector<char> expected = Run(problem.Args(nullptr), isa, Parallel{});
      const float nan = std::numeric_limits<float>::quiet_NaN();
      for (int64_t j = 0; j < c.F; ++j) {
        bool is_active = false;
        for (int64_t t = 0; t < T; ++t)
          is_active = is_active || problem.gate.values[static_cast<size_t>(t * c.F + j)] > 0;
        if (is_active) continue;
        for (int64_t k = 0; k < c.K; ++k) std::memcpy(problem.up_weight.bytes.data() + (j * c.K + k) * 4, &nan, 4);
        for (int64_t n = 0; n < c.N; ++n) std::memcpy(problem.down_weight.bytes.data() + (j * c.N + n) * 4, &nan, 4);
      }
      CHECK(Run(problem.Args(nullptr), isa, Parallel{}) == expected, CpuIsaName(isa), " T", T);
      CountCases(1);
    }
  });
}

// Many tokens are multiplied with neurons that they do not need. Infinite weights of these may not reach their output,
// and other tokens that need them change no bit of it.
void RunInfiniteWeights(CpuIsa isa, DType dtype) {
  const uint16_t half = dtype == DType::kF16 ? 0x7c00 : 0x7f80;
  const float single = std::numeric_limits<float>::infinity();
  const int64_t item = SizeOf(dtype);
  const void* const infinity = item == 4 ? static_cast<const void*>(&single) : &half;
  int64_t number = 0;
  for (const int64_t T : {2, 5, 13, 20, 32, 40, 64, 81}) {
    for (const double density : {0.1, 0.3, 0.5, 0.6, 0.95}) {
      if (IsLeftOut(number++)) continue;
      Case c;
      c.T = T, c.K = 70, c.F = 190, c.N = T % 2 == 0 ? 96 : 590, c.density = density, c.dtype = dtype;
      Problem problem(c, 11);
      const std::vector<char> finite = Run(problem.Args(nullptr), isa, Parallel{});
      CheckOutput(problem, finite, Text(CpuIsaName(isa), " ", Describe(c)));
      constexpr int64_t kEvery = 37;  // neurons
      std::vector<bool> is_touched(static_cast<size_t>(T), false);
      for (int64_t j = 5; j < c.F; j += kEvery) {
        for (int64_t t = 0; t < T; ++t) {
          if (problem.gate.values[static_cast<size_t>(t * c.F + j)] > 0) is_touched[static_cast<size_t>(t)] = true;
        }
        std::memcpy(problem.up_weight.bytes.data() + j * c.K * item, infinity, item);
        std::memcpy(problem.down_weight.bytes.data() + j * c.N * item, infinity, item);
      }
      const std::vector<char> found = Run(problem.Args(nullptr), isa, Parallel{});
      for (int64_t t = 0; t < T; ++t) {
        const int64_t row = c.N * item;
        const bool is_equal = std::memcmp(found.data() + t * row, finite.data() + t * row, row) == 0;
        CHECK(is_equal != is_touched[static_cast<size_t>(t)], CpuIsaName(isa), " ", Describe(c), " token ", t);
      }
      CountCases(1);
    }
  }
}
ONE_THREAD_TEST(SparseMlpInfiniteWeightsOfOtherTokens) {
  RunEachIsa([](CpuIsa isa) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) RunInfiniteWeights(isa, dtype);
  });
}

// More threads than parts share the columns of a part. The first column of some rows is infinite, so that a part is
// added again in one range of columns alone.
TEST(SparseMlpThreadsShareColumns) {
  struct Weights {
    DType dtype;
    int bits, level;
  };
  static constexpr Weights kWeights[] = {{DType::kF32, 0, 0}, {DType::kBF16, 0, 0}, {DType::kF32, 4, 0},
                                         {DType::kF32, 4, 4}, {DType::kF32, 8, 0},  {DType::kF32, 8, 4}};
  RunEachIsa([](CpuIsa isa) {
    ThreadPool pool(33);
    for (const int64_t T : {1, 3, 20, 40, 64}) {
      if (Effort() < 0.5 && T != 3 && T != 64) continue;
      for (const Weights& weights : kWeights) {
        Case c;
        c.T = T, c.F = 600, c.N = T == 40 ? 4500 : 1100, c.density = T == 40 ? 0.2 : 0.7, c.has_biases = true;
        c.dtype = weights.dtype, c.bits = weights.bits, c.accuracy_level = weights.level;
        Problem problem(c, 13);
        const std::string where = Text(CpuIsaName(isa), " ", Describe(c));
        const std::vector<char> expected = Run(problem.Args(nullptr), isa, Parallel{});  // SparseMlpTable compares it
        CHECK(Run(problem.Args(nullptr), isa, pool.view()) == expected, where, ": 33 threads give other bits than 1");
        CountCases(1);
        if (weights.bits != 0 || weights.dtype != DType::kF32) continue;
        const float infinity = std::numeric_limits<float>::infinity();
        for (int64_t j = 0; j < c.F; j += 97) {
          std::memcpy(problem.down_weight.bytes.data() + j * c.N * 4, &infinity, 4);
        }
        const std::vector<char> one = Run(problem.Args(nullptr), isa, Parallel{});
        CHECK(one != expected, where);
        CHECK(Run(problem.Args(nullptr), isa, pool.view()) == one, where, " with infinite weights: other bits");
        CountCases(1);
      }
    }
  });
}

// A number of fp32 in a tensor of a problem, and what it means.
void Set(Values* tensor, int64_t i, float x) {
  std::memcpy(tensor->bytes.data() + i * 4, &x, 4);
  tensor->values[static_cast<size_t>(i)] = static_cast<double>(x);
}

// Hidden values up to the largest fp32 number are finite, also where they are quantized to int8.
TEST(SparseMlpLargestHiddenValues) {
  RunEachIsa([](CpuIsa isa) {
    for (const int64_t T : {1, 3, 33}) {
      for (const int level : {0, 4}) {
        for (const float largest : {3.2e38f, std::numeric_limits<float>::max()}) {
          Case c;
          c.T = T, c.F = 40, c.N = 70, c.bits = 4, c.accuracy_level = level;
          c.has_up = false, c.activation = Activation::kNone;
          Problem problem(c, 3);
          for (int64_t i = 0; i < T * c.F; ++i) Set(&problem.gate, i, i % c.F == 3 ? largest : 0.0f);
          for (int64_t i = 0; i < 2 * c.N; ++i) Set(&problem.down_scales, i, 0x1p-10f);
          for (int64_t i = 0; i < c.F * c.N; ++i) {
            const auto q = static_cast<uint8_t>(problem.down_weight.bytes[static_cast<size_t>(i / 2)]);
            problem.down_weight.values[static_cast<size_t>(i)] = ((i % 2 == 0 ? q & 15 : q >> 4) - 8) * 0x1p-10;
          }
          CheckOutput(problem, Run(problem.Args(nullptr), isa, Parallel{}), Text(CpuIsaName(isa), " ", Describe(c)));
          CountCases(1);
        }
      }
    }
  });
}

// A token whose terms underflow to -0 gives the same bits alone and among tokens that need other neurons.
TEST(SparseMlpNegativeZerosOfTokensAlone) {
  RunEachIsa([](CpuIsa isa) {
    Case c;
    c.T = 9, c.K = 8, c.F = 1024, c.N = 40;  // each part of the sum has neurons of the first token
    c.has_up = false, c.activation = Activation::kNone;
    Problem problem(c, 3);
    const auto is_tiny = [](int64_t neuron) { return neuron % 64 == 5; };
    for (int64_t j = 0; j < c.F; ++j) {
      for (int64_t t = 0; t < c.T; ++t) {
        Set(&problem.gate, t * c.F + j, t > 0 ? 1.0f : is_tiny(j) ? 1e-30f : 0.0f);
      }
      for (int64_t n = 0; n < c.N; ++n) Set(&problem.down_weight, j * c.N + n, is_tiny(j) ? -1e-30f : 1.0f);
    }
    SparseMlpArgs args = problem.Args(nullptr);
    const std::vector<char> found = Run(args, isa, Parallel{});
    args.T = 1;
    const std::vector<char> alone = Run(args, isa, Parallel{});
    CHECK(std::memcmp(alone.data(), found.data(), alone.size()) == 0, CpuIsaName(isa));
    CountCases(1);
  });
}

}  // namespace
}  // namespace stof::test::sparse_mlp
