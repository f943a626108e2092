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
#include "tests/cpp/gemm/gemm_cases.h"
#include "tests/cpp/gemm/packed_gemm.h"
#include "tests/cpp/memory.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test {
namespace {

void RunCase(CpuIsa isa, const Packed& p, Random* random) {
  const std::string where = Text("isa ", static_cast<int>(isa), " ", p.Text());
  CpuPackedWeights weights;
  if (!weights.Pack(isa, false, p.b[0].data(), p.pair ? p.b[1].data() : nullptr, p.N, p.N, p.K)) {
    CHECK(p.N < 25, where, " was not packed");
    return;
  }
  CheckRuns(p, weights, where, random);
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
  // Under a sanitizer: coprime to the lengths of the loops.
  const int step = kIsThreadSanitizer ? 31 : Effort() < 1 ? 5 : 1;
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
    CHECK(weights.Pack(BestCpuIsa(), false, p.b[0].data(), p.pair ? p.b[1].data() : nullptr, p.N, p.N, p.K));
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
      CHECK(!weights.Pack(isa, false, b.data(), nullptr, N, N, K) && !weights.is_packed());
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
