// SPDX-License-Identifier: Apache-2.0
// Products by constants in fp32: every instruction set of this machine against fp64, around tiles' and panels' edges.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/isa.h"
#include "plugins/core/contract/gemm.h"
#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/activation.h"
#include "tests/cpp/gemm/gemm_cases.h"
#include "tests/cpp/memory.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
constexpr size_t kAround = 64;  // floats before and after an output

std::vector<float> Drawn(int64_t count, double range, Random* random) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random->Unit() * range);
  return values;
}

struct Packed {
  int64_t M, N, K;
  bool pair = false, has_epilogue = false;
  CpuGemmEpilogue epilogue;
  std::vector<float> a, b[2], bias[2], scale, row, residual;

  Packed(int64_t m, int64_t n, int64_t k, Random* random) : M(m), N(n), K(k) {
    pair = random->OneIn(3);
    has_epilogue = !random->OneIn(4);
    a = Drawn(M * K, 1, random);
    const double range = 2 / std::sqrt(static_cast<double>(K));
    for (int i = 0; i < (pair ? 2 : 1); ++i) b[i] = Drawn(K * N, range, random);
    const auto maybe = [&](std::vector<float>* values, int64_t count, const float** at) {
      if (random->OneIn(2)) *values = Drawn(count, 1, random), *at = values->data();
    };
    epilogue.activation = static_cast<Activation>(random->Range(0, kActivations - 1));
    maybe(&bias[0], N, &epilogue.bias0);
    if (pair) maybe(&bias[1], N, &epilogue.bias1);
    maybe(&scale, N, &epilogue.scale);
    maybe(&row, M, &epilogue.row);
    maybe(&residual, M * N, &epilogue.residual);
  }
  std::string Text() const {
    return stof::test::Text(M, " x ", N, " x ", K, pair ? " pair" : "", has_epilogue ? " epilogue " : " ",
                            static_cast<int>(epilogue.activation));
  }
  int outputs() const { return pair && !has_epilogue ? 2 : 1; }
};

using Outputs = std::vector<std::vector<float>>;

Outputs Run(const Packed& p, const CpuPackedWeights& weights, int64_t M, int threads) {
  Outputs outputs(static_cast<size_t>(p.outputs()),
                  std::vector<float>(static_cast<size_t>(M * p.N) + 2 * kAround, kPoison));
  CpuPackedGemmArgs args;
  args.M = M;
  args.a = p.a.data();
  for (size_t i = 0; i < outputs.size(); ++i) args.output[i] = outputs[i].data() + kAround;
  if (p.has_epilogue) args.epilogue = &p.epilogue;
  ThreadPool pool(threads);
  Starved starved(pool.view());
  Memory memory;
  CpuPackedGemm(args, weights, Memory::Allocate(&memory, CpuPackedGemmWorkspace(threads)), starved.view());
  return outputs;
}

void Check(const Packed& p, const Outputs& outputs, const std::string& where) {
  for (int64_t m = 0; m < p.M; ++m) {
    for (int64_t n = 0; n < p.N; ++n) {
      double sum[2] = {}, error[2] = {};
      for (int i = 0; i < (p.pair ? 2 : 1); ++i) {
        double magnitude = 0;
        for (int64_t k = 0; k < p.K; ++k) {
          const double term = double{p.a[static_cast<size_t>(m * p.K + k)]} * p.b[i][static_cast<size_t>(k * p.N + n)];
          sum[i] += term, magnitude += std::fabs(term);
        }
        error[i] = 0x1p-21 * magnitude;
      }
      const auto at = [&](const float* values, int64_t i, double otherwise) {
        return values != nullptr ? double{values[i]} : otherwise;
      };
      double want[2] = {sum[0], sum[1]}, most[2] = {error[0], error[1]};
      if (p.has_epilogue) {
        const double x = sum[0] + at(p.epilogue.bias0, n, 0);
        const double u = Activate(p.epilogue.activation, x);
        if (IsQuadratic(p.epilogue.activation)) error[0] *= 2 * std::fabs(x) + 1;  // its slope
        const double v = p.pair ? sum[1] + at(p.epilogue.bias1, n, 0) : 1;
        const double by = at(p.epilogue.scale, n, 1) * at(p.epilogue.row, m, 1);
        want[0] = u * v * by + at(p.epilogue.residual, m * p.N + n, 0);
        most[0] = std::fabs(by) * (1.13 * error[0] * std::fabs(v) + std::fabs(u) * error[1] + error[0] * error[1]) +
                  2e-6 * (std::fabs(u * v * by) + std::fabs(want[0])) + 1e-6;
      }
      for (int i = 0; i < p.outputs(); ++i) {
        const double got = outputs[static_cast<size_t>(i)][kAround + static_cast<size_t>(m * p.N + n)];
        CHECK(std::fabs(got - want[i]) <= most[i], where, " element ", m, ", ", n, " is ", got, ", expected ", want[i],
              " within ", most[i]);
      }
    }
  }
  for (const std::vector<float>& output : outputs) {
    for (size_t i = 0; i < kAround; ++i) {
      CHECK(std::isnan(output[i]) && std::isnan(output[output.size() - 1 - i]), where, " wrote around its output");
    }
  }
}

bool Same(const std::vector<float>& x, const std::vector<float>& y, size_t count) {
  return std::memcmp(x.data() + kAround, y.data() + kAround, count * sizeof(float)) == 0;
}

// Checks the result, and that neither threads nor the number of rows change it.
void RunCase(CpuIsa isa, const Packed& p, Random* random) {
  const std::string where = Text("isa ", static_cast<int>(isa), " ", p.Text());
  CpuPackedWeights weights;
  if (!weights.Pack(isa, p.b[0].data(), p.pair ? p.b[1].data() : nullptr, p.N, p.N, p.K)) {
    CHECK(p.N < 25, where, " was not packed");
    return;
  }
  const Outputs one = Run(p, weights, p.M, 1), three = Run(p, weights, p.M, 3), two = Run(p, weights, p.M, 2);
  Check(p, one, where);
  const int64_t some = random->Range(1, p.M);
  const Outputs fewer = Run(p, weights, some, 1);
  for (size_t o = 0; o < one.size(); ++o) {
    const auto all = static_cast<size_t>(p.M * p.N);
    CHECK(Same(one[o], two[o], all) && Same(one[o], three[o], all), where, ": threads change the result");
    CHECK(Same(one[o], fewer[o], static_cast<size_t>(some * p.N)), where, ": other rows change the result");
  }
  CountCases(1);
}

void RunIsa(CpuIsa isa) {
  const int64_t rows[] = {1, 2, 5, 6, 7, 8, 9, 13, 16, 127, 128, 129, 137, 260};
  const int64_t columns[] = {8, 16, 24, 25, 47, 48, 49, 63, 64, 95, 96, 97, 144, 200};
  const int64_t depths[] = {1, 2, 3, 4, 5, 16, 63, 255, 767, 768, 769, 1537};
  Random random(77 + static_cast<uint64_t>(isa));
  const int cases = Cases(120);
  for (int i = 0; i < cases; ++i) {
    const Packed p(rows[random.Range(0, 13)], columns[random.Range(0, 13)], depths[random.Range(0, 11)], &random);
    RunCase(isa, p, &random);
  }
}

// Registers the test of each instruction set of this machine.
const bool registered = [] {
#define STOF_TEST(id, name, is_supported) {{"PackedEqualsTheDefinition[" #name "]", [] { RunIsa(CpuIsa::id); }}},
  static constexpr Test kRows[][1] = {STOF_CPU_ISAS(STOF_TEST)};
#undef STOF_TEST
  return RegisterByIsa(&cpu::KernelTable::packed_gemm, kRows);
}();

// Epilogues that only add do so in registers, with the last slab of K.
TEST(PackedAddsInRegisters) {
  Random random(11);
  const int step = Effort() < 1 ? 5 : 1;  // under a sanitizer: coprime to the lengths of the loops
  int next = 0;
  for (const CpuIsa isa : IsasOfThisMachine()) {
    for (int64_t M : {1, 7, 130}) {
      for (int64_t N : {48, 97, 192}) {
        for (int64_t K : {5, 768, 1537}) {
          for (int added = 0; added < 4; ++added) {
            if (next++ % step != 0) continue;
            Packed p(M, N, K, &random);
            p.pair = false, p.has_epilogue = true;
            p.bias[0] = Drawn(N, 1, &random), p.residual = Drawn(M * N, 1, &random);
            p.epilogue = {};
            if ((added & 1) != 0) p.epilogue.bias0 = p.bias[0].data();
            if ((added & 2) != 0) p.epilogue.residual = p.residual.data();
            RunCase(isa, p, &random);
          }
        }
      }
    }
  }
}

// An infinity or a NaN stays in its row.
TEST(PackedRowsAreIndependent) {
  Random random(5);
  for (int64_t M : {3, 130}) {
    Packed p(M, 100, 40, &random);
    p.has_epilogue = false;
    CpuPackedWeights weights;
    CHECK(weights.Pack(BestCpuIsa(), p.b[0].data(), p.pair ? p.b[1].data() : nullptr, p.N, p.N, p.K));
    const Outputs before = Run(p, weights, M, 2);
    p.a[static_cast<size_t>(p.K)] = std::numeric_limits<float>::infinity();
    p.a[static_cast<size_t>(p.K) + 1] = kPoison;
    const Outputs after = Run(p, weights, M, 2);
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t n = 0; n < p.N; ++n) {
        const auto at = kAround + static_cast<size_t>(m * p.N + n);
        CHECK(m == 1 ? std::isnan(after[0][at]) : after[0][at] == before[0][at], "row ", m);
      }
    }
    CountCases(1);
  }
}

TEST(PackedRefusesWhatIsNotWorthIt) {
  const std::vector<float> b(64, 1.0f);
  for (const CpuIsa isa : IsasOfThisMachine()) {
    CpuPackedWeights weights;
    for (const auto& [N, K] : std::vector<std::pair<int64_t, int64_t>>{{1, 8}, {0, 8}, {8, 0}, {0, 0}}) {
      CHECK(!weights.Pack(isa, b.data(), nullptr, N, N, K) && !weights.is_packed());
      CountCases(1);
    }
  }
}

// ---- by way of the operator ----
Status RunOp(const gemm::Problem& p, const std::vector<Tensor>& constants, std::vector<char>* bytes) {
  std::unique_ptr<Op> op;
  STOF_RETURN_IF_ERROR(gemm::Description().create(gemm::Attributes(p.text, p.c.pair), &op));
  std::vector<Tensor> tensors;
  for (const gemm::Host& host : p.inputs) tensors.push_back(host.View(const_cast<char*>(host.bytes.data())));
  const int count = static_cast<int>(tensors.size());
  STOF_RETURN_IF_ERROR(op->Prepare(constants.data(), static_cast<int>(constants.size())));
  Tensor output;
  STOF_RETURN_IF_ERROR(op->InferOutputs(tensors.data(), count, &output, 1));
  bytes->assign(static_cast<size_t>(output.Elements()) * 4 + 2 * gemm::kBand, static_cast<char>(0xff));
  output.data = bytes->data() + gemm::kBand;
  ThreadPool pool(2);
  Memory memory;
  RunContext context;
  context.parallel = pool.view();
  context.allocate = Memory::Allocate;
  context.self = &memory;
  return op->Run(tensors.data(), count, &output, 1, context);
}

// A weight that is not constant, or was constant with another shape, is not packed; one of a nonsensical shape is not
// read.
TEST(PackedOrNot) {
  const int cases = Cases(40);
  for (int i = 0; i < cases; ++i) {
    const gemm::Problem p = gemm::Make(gemm::RandomCase(static_cast<uint64_t>(9000 + i), DType::kF32, 150));
    const int weights = p.c.pair == 2 ? 2 : 1;
    std::vector<Tensor> constant, unknown(p.inputs.size());
    for (const gemm::Host& host : p.inputs) constant.push_back(host.View(const_cast<char*>(host.bytes.data())));
    std::vector<std::vector<Tensor>> told = {constant, unknown};
    for (const std::vector<int64_t>& dims : std::vector<std::vector<int64_t>>{
             {1, 1}, {0, 5}, {5, 0}, {-1, 8}, {int64_t{1} << 40, int64_t{1} << 40}, {4}, {1, 1, 1}, {}}) {
      told.push_back(unknown);
      for (int w = 1; w <= weights; ++w) {
        told.back()[static_cast<size_t>(w)] = TensorOfShape(DType::kF32, dims);
        told.back()[static_cast<size_t>(w)].data = constant[static_cast<size_t>(w)].data;
      }
    }
    for (const std::vector<Tensor>& constants : told) {
      std::vector<char> bytes;
      const Status status = RunOp(p, constants, &bytes);
      CHECK(status.ok(), gemm::Describe(p.c), ": ", status.message());
      gemm::Compare(p, bytes, gemm::kBand, 2e-6);
      CountCases(1);
    }
  }
}

}  // namespace
}  // namespace stof::test
