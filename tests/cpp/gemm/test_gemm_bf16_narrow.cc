// SPDX-License-Identifier: Apache-2.0
// GEMMs in bf16 whose operands are fp16 or bf16: the same numbers in fp32 give the same sums, and the result is rounded
// once. Those are held to fp64 by test_gemm_bf16.cc.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/simd/convert.h"
#include "tests/cpp/gemm/gemm_cases.h"
#include "tests/cpp/gemm/packed_gemm.h"
#include "tests/cpp/map_attributes.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test {
namespace {

constexpr uint16_t kPoison16 = 0x7fa5;  // NaN in both types

// Rounds numbers to a type, and gives them in it.
std::vector<uint16_t> Narrow(DType dtype, std::vector<float>* values) {
  std::vector<uint16_t> narrow(values->size());
  const auto count = static_cast<int64_t>(values->size());
  cpu::FromFloats(values->data(), dtype, count, narrow.data());
  cpu::ToFloats(narrow.data(), dtype, count, values->data());
  return narrow;
}

// A problem, and its operands in a type of 16 bits.
struct NarrowPacked {
  Packed wide;
  DType dtype;
  std::vector<uint16_t> a, b[2], bias[2], scale, row, residual;
  CpuGemmEpilogueOf<uint16_t> epilogue;

  NarrowPacked(Packed packed, DType type) : wide(std::move(packed)), dtype(type) {
    a = Narrow(dtype, &wide.a);
    epilogue.activation = wide.epilogue.activation;
    const auto fill = [&](std::vector<float>* from, std::vector<uint16_t>* to, const uint16_t** narrow_at,
                          const float** at) {
      *to = Narrow(dtype, from);
      *narrow_at = to->empty() ? nullptr : to->data();
      *at = to->empty() ? nullptr : from->data();
    };
    for (int i = 0; i < 2; ++i) b[i] = Narrow(dtype, &wide.b[i]);
    fill(&wide.bias[0], &bias[0], &epilogue.bias0, &wide.epilogue.bias0);
    fill(&wide.bias[1], &bias[1], &epilogue.bias1, &wide.epilogue.bias1);
    fill(&wide.scale, &scale, &epilogue.scale, &wide.epilogue.scale);
    fill(&wide.row, &row, &epilogue.row, &wide.epilogue.row);
    fill(&wide.residual, &residual, &epilogue.residual, &wide.epilogue.residual);
  }
};

void RunNarrowCase(CpuIsa isa, const NarrowPacked& p, int threads) {
  const std::string where = Text("isa ", CpuIsaName(isa), " ", p.wide.Text(), " ", TypeText(p.dtype));
  CpuPackedWeights weights, wide_weights;
  CHECK(weights.PackNarrow(isa, p.dtype, p.b[0].data(), p.wide.pair ? p.b[1].data() : nullptr, p.wide.N, p.wide.N,
                           p.wide.K));
  CHECK(wide_weights.Pack(isa, true, p.wide.b[0].data(), p.wide.pair ? p.wide.b[1].data() : nullptr, p.wide.N, p.wide.N,
                          p.wide.K));
  const Outputs expected = Run(p.wide, wide_weights, p.wide.M, 1);
  const auto count = static_cast<size_t>(p.wide.M * p.wide.N);
  CpuPackedGemmArgs args;
  args.M = p.wide.M;
  args.narrow.dtype = p.dtype, args.narrow.a = p.a.data();
  std::vector<uint16_t> output(count + 2 * kAround, kPoison16);
  Outputs matmuls(static_cast<size_t>(p.wide.outputs()), std::vector<float>(count + 2 * kAround, kPoison));
  if (p.wide.has_epilogue) {
    args.narrow.epilogue = &p.epilogue, args.narrow.output = output.data() + kAround;
  } else {
    for (size_t i = 0; i < matmuls.size(); ++i) args.output[i] = matmuls[i].data() + kAround;
  }
  ThreadPool pool(threads);
  Memory memory;
  CpuPackedGemm(args, weights, Memory::Allocate(&memory, CpuBf16GemmWorkspace(threads, p.wide.M, p.wide.K)),
                pool.view());
  if (!p.wide.has_epilogue) {
    for (size_t i = 0; i < matmuls.size(); ++i) CHECK(Same(matmuls[i], expected[i], count), where, " matmul ", i);
  } else {
    std::vector<uint16_t> rounded(count);
    cpu::FromFloats(expected[0].data() + kAround, p.dtype, static_cast<int64_t>(count), rounded.data());
    CHECK(std::equal(rounded.begin(), rounded.end(), output.begin() + kAround), where);
    for (size_t i = 0; i < kAround; ++i) {
      CHECK(output[i] == kPoison16 && output[output.size() - 1 - i] == kPoison16, where, " wrote around its output");
    }
  }
  CountCases(1);
}

void RunNarrowIsa(CpuIsa isa) {
  const int64_t rows[] = {1, 2, 7, 16, 17, 32, 33, 129, 513};
  const int64_t columns[] = {8, 24, 25, 32, 33, 47, 48, 49, 64, 97, 200};
  const int64_t depths[] = {1, 2, 31, 32, 33, 63, 64, 65, 255, 769};
  Random random(277 + static_cast<uint64_t>(isa));
  for (int i = 0; i < Cases(80); ++i) {
    Packed p(rows[random.Range(0, 8)], columns[random.Range(0, 10)], depths[random.Range(0, 9)], &random);
    RunNarrowCase(isa, NarrowPacked(std::move(p), i % 2 == 0 ? DType::kF16 : DType::kBF16), 1 + i % 3);
  }
}

// bf16 numbers are copied, not rounded: the panels and sums have them bit by bit. One row and one term each.
void CopyBf16(CpuIsa isa) {
  std::vector<uint16_t> b(64), one = {0x3f80};
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<uint16_t>(0x0080 + 0x01f5 * i);  // normal, up to 3e38
  CpuPackedWeights weights;
  CHECK(weights.PackNarrow(isa, DType::kBF16, b.data(), nullptr, 64, 64, 1));
  CpuGemmEpilogueOf<uint16_t> none;
  std::vector<uint16_t> output(64, kPoison16);
  CpuPackedGemmArgs args;
  args.M = 1;
  args.narrow = {DType::kBF16, one.data(), &none, output.data()};
  ThreadPool pool(1);
  Memory memory;
  CpuPackedGemm(args, weights, Memory::Allocate(&memory, CpuBf16GemmWorkspace(1, 1, 1)), pool.view());
  CHECK(output == b);
  CountCases(64);
}

const bool registered = [] {
#define STOF_TESTS(id, name, is_supported)                                    \
  {{"Bf16GemmOfNarrowOperands[" #name "]", [] { RunNarrowIsa(CpuIsa::id); }}, \
   {"Bf16GemmCopiesBf16[" #name "]", [] { CopyBf16(CpuIsa::id); }}},
  static constexpr Test kRows[][2] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  return RegisterByIsa(&cpu::KernelTable::packed_gemm_bf16, kRows);
}();

}  // namespace
}  // namespace stof::test
