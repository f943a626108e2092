// SPDX-License-Identifier: Apache-2.0
// The CPU attention kernels of every instruction set of this machine, against the definition: shapes around the edges
// of tiles and register blocks, every feature of AttentionArgs, 1 and 3 threads.
#include <cmath>

#include "cpu/isa.h"
#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/attention/attention_problem.h"
#include "tests/cpp/cpu_attention/cpu_cases.h"
#include "tests/cpp/memory.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test::attention {
namespace {

// Every listed case and a share of the drawn ones.
void RunTable(CpuIsa isa) {
  std::vector<Case> cases = ListedCases();
  const std::vector<Case> drawn = DrawnCases(Cases(300));
  cases.insert(cases.end(), drawn.begin(), drawn.end());
  RunCases(cases, isa);
}
void RunLargeScores(CpuIsa isa) { RunCases(LargeScoreCases(Cases(120)), isa); }

// Masks of which the kernel evaluates some tiles, or all, itself. Tiles of few rows and keys make many of them.
void LeaveTiles(CpuIsa isa) {
  ThreadPool pool(3);
  std::vector<Case> cases = DrawnCases(Cases(120));
  const std::vector<Case> listed = ListedCases();
  cases.insert(cases.end(), listed.begin(), listed.end());
  static constexpr Left kLeft[] = {Left::kMost, Left::kTiles, Left::kAll};
  const size_t step = Effort() < 0.1 ? 5 : 1;  // coprime to 6: each Left meets both tiles
  for (size_t i = 0; i < cases.size(); i += step) {
    Case c = cases[i];
    if (c.mask == 0 || c.mask == 10) c.mask = 9;  // those have no static part
    c.left = kLeft[i % 3];
    if (i % 2 == 0) c.m = 24, c.n = 32;
    RunCase(c, isa, i, pool.view());
    CountCases(1);
  }
}

// Two keys of equal scores: the output is the mean of two numbers, exact in fp32 and in every second case halfway
// between two fp16 or bf16 values. No tolerance would show how a kernel rounds it.
void RoundFp16AndBf16(CpuIsa isa) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int64_t rows : {1, 5, 30}) {
      Case c;
      c.B = 1, c.S = rows, c.T = 2, c.Dv = 72, c.dtype = dtype;
      Random random(static_cast<uint64_t>(rows));
      Dense dense = DrawDense(c, DrawMask(c, &random), BiasTensor(), &random);
      for (size_t i = 0; i < dense.key.size(); ++i) {
        if (static_cast<int64_t>(i) / c.D % c.T == 1) dense.key[i] = dense.key[i - static_cast<size_t>(c.D)];
      }
      Strided query(c, 0, c.H, c.S, c.D), key(c, 1, c.G, c.T, c.D), value(c, 2, c.G, c.T, c.Dv);
      Strided output(c, 3, c.H, c.S, c.Dv);
      query.Fill(dense.query);
      key.Fill(dense.key);
      value.Fill(dense.value);
      const AttentionArgs args = MakeArgs(c, query, key, value, output);
      CpuAttentionConfig config = ChooseCpuAttention(args, 1);
      config.isa = isa;
      const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, 1), 0xff);
      CHECK(CpuAttention(args, config, workspace.get(), Parallel{}).ok());
      output.ForEach([&](char* at, size_t i) {
        const size_t pair =
            i / static_cast<size_t>(c.S * c.Dv) * static_cast<size_t>(c.T * c.Dv) + i % static_cast<size_t>(c.Dv);
        const double mean = (dense.value[pair] + dense.value[pair + static_cast<size_t>(c.Dv)]) / 2;
        const double got = LoadFloat(dtype, at), want = Rounded(dtype, mean);
        CHECK(got == want, "dtype ", static_cast<int>(dtype), " rows ", rows, ": ", got, ", expected ", want, " for ",
              mean);
      });
      CountCases(c.H * c.S * c.Dv);
    }
  }
}

// Many keys of equal weight, which is no short binary fraction: a rounding error of the same sign for each would grow
// with their number. Values are 1, and so is the output.
void SumLongRows(CpuIsa isa) {
  constexpr int64_t kKeys = 200000, kSize = 8;
  for (const int64_t rows : {1, 4, 8, 100}) {
    const std::vector<float> query(static_cast<size_t>(rows * kSize), 1.0f), value(kKeys * kSize, 1.0f);
    std::vector<float> key(kKeys * kSize), output(query.size()), lse(static_cast<size_t>(rows));
    key[0] = 1.2f;  // the largest score; all others are 0
    AttentionArgs args;
    args.shape = {1, 1, 1, rows, kKeys, kSize, kSize};
    args.query.data = query.data(), args.key.data = key.data(), args.value.data = value.data(),
    args.output.data = output.data();
    args.query.stride = args.output.stride = {rows * kSize, rows * kSize, kSize};
    args.key.stride = args.value.stride = {kKeys * kSize, kKeys * kSize, kSize};
    args.output.lse = lse.data(), args.output.lse_stride_b = args.output.lse_stride_h = rows;
    CpuAttentionConfig config = ChooseCpuAttention(args, 1);
    config.isa = isa;
    const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, 1), 0xff);
    CHECK(CpuAttention(args, config, workspace.get(), Parallel{}).ok());
    const double sum = std::log(kKeys - 1 + std::exp(double{key[0]}));
    for (const float x : output) CHECK(std::fabs(x - 1) <= 1e-5, "rows ", rows, ": ", x, ", expected 1");
    for (const float x : lse) CHECK(std::fabs(x - sum) <= 3e-5, "rows ", rows, ": lse ", x, ", expected ", sum);
    CountCases(rows);
  }
}

// Registers the tests of each instruction set of this machine.
const bool registered = [] {
#define STOF_TESTS(id, name, is_supported)                                                \
  {{"AttentionEqualsTheDefinition[" #name "]", [] { RunTable(CpuIsa::id); }},             \
   {"AttentionOfLargeScores[" #name "]", [] { RunLargeScores(CpuIsa::id); }},             \
   {"AttentionEvaluatesTilesItself[" #name "]", [] { LeaveTiles(CpuIsa::id); }},          \
   {"AttentionRoundsFp16AndBf16ToEven[" #name "]", [] { RoundFp16AndBf16(CpuIsa::id); }}, \
   {"AttentionSumsLongRows[" #name "]", [] { SumLongRows(CpuIsa::id); }, kOneThread}},
  static constexpr Test kRows[][5] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  return RegisterByIsa(&cpu::KernelTable::attention, kRows);
}();

}  // namespace
}  // namespace stof::test::attention
