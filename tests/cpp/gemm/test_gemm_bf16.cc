// SPDX-License-Identifier: Apache-2.0
// GEMMs by constant weights, with both factors rounded to bf16: every instruction set of this machine that has kernels
// against fp64 with the same roundings, around tiles' and panels' edges.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "plugins/core/c_api/c_api.h"
#include "tests/cpp/gemm/gemm_cases.h"
#include "tests/cpp/gemm/packed_gemm.h"
#include "tests/cpp/map_attributes.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test {
namespace {

bool PackBf16(CpuIsa isa, const Packed& p, CpuPackedWeights* weights) {
  return weights->Pack(isa, true, p.b[0].data(), p.pair ? p.b[1].data() : nullptr, p.N, p.N, p.K);
}

void RunBf16Case(CpuIsa isa, const Packed& p, Random* random) {
  const std::string where = Text("isa ", CpuIsaName(isa), " ", p.Text());
  CpuPackedWeights weights;
  CHECK(PackBf16(isa, p, &weights), where, " was not packed");
  CheckRuns(p, weights, where, random);
  CountCases(1);
}

void RunBf16Isa(CpuIsa isa) {
  const int64_t rows[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 129, 511, 513};
  const int64_t columns[] = {8, 16, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97, 144, 200};
  const int64_t depths[] = {1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 255, 768, 769};
  Random random(177 + static_cast<uint64_t>(isa));
  const int cases = Cases(100);
  for (int i = 0; i < cases; ++i) {
    const Packed p(rows[random.Range(0, 14)], columns[random.Range(0, 16)], depths[random.Range(0, 12)], &random);
    RunBf16Case(isa, p, &random);
  }
}

// Several blocks of rounded rows, and long sums.
void RunLongSums(CpuIsa isa) {
  Random random(9);
  RunBf16Case(isa, Packed(33, 40, 8192, &random), &random);
  RunBf16Case(isa, Packed(1100, 33, 70, &random), &random);
}

// It rounds: the result differs from that in fp32, by no more than two roundings of each term.
void RoundBothFactors(CpuIsa isa) {
  Random random(3);
  Packed p(40, 72, 200, &random);
  p.pair = p.has_epilogue = false;
  CpuPackedWeights weights, plain;
  CHECK(PackBf16(isa, p, &weights) && plain.Pack(isa, false, p.b[0].data(), nullptr, p.N, p.N, p.K));
  CHECK(weights.is_bf16() && !plain.is_bf16());
  const Outputs rounded = Run(p, weights, p.M, 1), exact = Run(p, plain, p.M, 1);
  CHECK(!Same(rounded[0], exact[0], static_cast<size_t>(p.M * p.N)), "nothing was rounded");
  for (int64_t m = 0; m < p.M; ++m) {
    for (int64_t n = 0; n < p.N; ++n) {
      double magnitude = 0;
      for (int64_t k = 0; k < p.K; ++k) {
        magnitude +=
            std::fabs(double{p.a[static_cast<size_t>(m * p.K + k)]} * p.b[0][static_cast<size_t>(k * p.N + n)]);
      }
      const auto at = kAround + static_cast<size_t>(m * p.N + n);
      CHECK(std::fabs(double{rounded[0][at]} - exact[0][at]) <= 0x1.1p-7 * magnitude, m, ", ", n);
    }
  }
  CountCases(p.M * p.N);
}

// An infinity or a NaN stays in its row; a finite number beyond the largest of bf16 becomes infinite.
void KeepRowsApart(CpuIsa isa) {
  Random random(5);
  for (int64_t M : {3, 130}) {
    Packed p(M, 100, 40, &random);
    p.has_epilogue = false;
    CpuPackedWeights weights;
    CHECK(PackBf16(isa, p, &weights));
    const Outputs before = Run(p, weights, M, 2);
    p.a[static_cast<size_t>(p.K)] = std::numeric_limits<float>::infinity();
    p.a[static_cast<size_t>(p.K) + 1] = kPoison;
    for (int64_t k = 0; k < p.K; ++k) p.a[static_cast<size_t>(2 * p.K + k)] = k == 0 ? 3.4e38f : 0.0f;
    const Outputs after = Run(p, weights, M, 2);
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t n = 0; n < p.N; ++n) {
        const auto at = kAround + static_cast<size_t>(m * p.N + n);
        const float x = after[0][at];
        CHECK(m == 1 ? std::isnan(x) : m == 2 ? !std::isfinite(x) : x == before[0][at], "row ", m, ": ", x);
      }
    }
    CountCases(1);
  }
}

// Registers the tests of each instruction set of this machine that has kernels.
const bool registered = [] {
#define STOF_TESTS(id, name, is_supported)                                     \
  {{"Bf16GemmEqualsTheDefinition[" #name "]", [] { RunBf16Isa(CpuIsa::id); }}, \
   {"Bf16GemmOfLongSums[" #name "]", [] { RunLongSums(CpuIsa::id); }},         \
   {"Bf16GemmRoundsFactors[" #name "]", [] { RoundBothFactors(CpuIsa::id); }}, \
   {"Bf16GemmKeepsRowsApart[" #name "]", [] { KeepRowsApart(CpuIsa::id); }}},
  static constexpr Test kRows[][4] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  return RegisterByIsa(&cpu::KernelTable::packed_gemm_bf16, kRows);
}();

// ---- by way of the operator ----
// Output of a node without an epilogue. is_constant: whether the weight is.
Status RunNode(const Packed& p, int64_t allow_bf16, bool is_constant, std::vector<float>* output) {
  MapAttributes attributes;
  attributes.ints = {{"allow_bf16", allow_bf16}};
  std::unique_ptr<Op> op;
  STOF_RETURN_IF_ERROR(gemm::Description().create(attributes, &op));
  Tensor inputs[2] = {TensorOfShape(DType::kF32, {p.M, p.K}), TensorOfShape(DType::kF32, {p.K, p.N})};
  inputs[0].data = const_cast<float*>(p.a.data());
  inputs[1].data = const_cast<float*>(p.b[0].data());
  Tensor constants[2];
  if (is_constant) constants[1] = inputs[1];
  STOF_RETURN_IF_ERROR(op->Prepare(constants, 2));
  size_t planned = 0;
  STOF_RETURN_IF_ERROR(op->PlanHost(inputs, 2, 2, &planned));
  Tensor result;
  STOF_RETURN_IF_ERROR(op->InferOutputs(inputs, 2, &result, 1));
  output->assign(static_cast<size_t>(p.M * p.N), kPoison);
  result.data = output->data();
  ThreadPool pool(2);
  Memory memory;
  RunContext context;
  context.parallel = pool.view();
  context.allocate = Memory::Allocate;
  context.self = &memory;
  return op->Run(inputs, 2, &result, 1, context);
}

TEST(Bf16GemmByAttribute) {
  Random random(21);
  Packed p(600, 97, 64, &random);
  p.pair = p.has_epilogue = false;
  std::vector<float> plain, rounded, not_constant, plain_not_constant;
  CHECK(RunNode(p, 0, true, &plain).ok() && RunNode(p, 1, true, &rounded).ok());
  CHECK(RunNode(p, 1, false, &not_constant).ok() && RunNode(p, 0, false, &plain_not_constant).ok());
  CHECK(not_constant == plain_not_constant, "weights that are not constant are not rounded");
  const std::optional<CpuIsa> isa = IsaOfBf16Gemm(BestCpuIsa());
  CpuPackedWeights weights;
  CHECK(weights.Pack(isa.value_or(BestCpuIsa()), isa.has_value(), p.b[0].data(), nullptr, p.N, p.N, p.K));
  const Outputs expected = Run(p, weights, p.M, 1);
  CHECK(std::memcmp(rounded.data(), expected[0].data() + kAround, rounded.size() * sizeof(float)) == 0);
  CHECK((rounded == plain) == !isa.has_value(), "without kernels it computes as without the attribute");
  const Status status = RunNode(p, 2, true, &plain);
  CHECK(status.message() == "attribute allow_bf16 is 2, expected 0 or 1", status.message());
  CountCases(5);
}

TEST(Bf16GemmKernelOfThisMachine) {
  const std::optional<CpuIsa> isa = IsaOfBf16Gemm(BestCpuIsa());
  CHECK(std::string(stof_cpu_bf16_gemm_kernel()) == (isa.has_value() ? CpuIsaName(*isa) : ""));
  CHECK(isa.has_value() == (cpu::KernelsOf(BestCpuIsa()).packed_gemm_bf16 != nullptr));
  CountCases(2);
}

}  // namespace
}  // namespace stof::test
