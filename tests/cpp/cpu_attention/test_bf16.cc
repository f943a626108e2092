// SPDX-License-Identifier: Apache-2.0
// Attention with matmuls in bf16, by every instruction set of this machine that has kernels for them, against the
// definition.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <limits>

#include "cpu/kernel_table.h"
#include "tests/cpp/cpu_attention/cpu_cases.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test::attention {
namespace {

std::vector<Case> InBf16(std::vector<Case> cases) {
  for (Case& c : cases) c.bf16 = true;
  return cases;
}

// Emulated tiles, which stand for the kernels of the portable set (stof_wide_tests), run some.
std::vector<Case> Sample(const std::vector<Case>& cases, CpuIsa isa) {
  std::vector<Case> some;
  for (size_t i = 0; i < cases.size(); i += isa == CpuIsa::kPortable ? 5 : 1) some.push_back(cases[i]);
  return some;
}

void RunTable(CpuIsa isa) {
  std::vector<Case> cases = ListedCases();
  const std::vector<Case> drawn = DrawnCases(Cases(300));
  cases.insert(cases.end(), drawn.begin(), drawn.end());
  RunCases(Sample(InBf16(cases), isa), isa);
}

void RunLargeScores(CpuIsa isa) { RunCases(Sample(InBf16(LargeScoreCases(Cases(120))), isa), isa); }

// ---- single properties ----
struct Tensors {
  Case c;
  Dense dense;
  Strided query, key, value, output;

  Tensors(const Case& drawn, uint64_t seed)
      : c(drawn),
        dense(Draw(drawn, seed)),
        query(c, 0, c.H, c.S, c.D),
        key(c, 1, c.G, c.T, c.D),
        value(c, 2, c.G, c.T, c.Dv),
        output(c, 3, c.H, c.S, c.Dv) {
    Fill();
  }
  static Dense Draw(const Case& c, uint64_t seed) {
    Random random(seed);
    const MaskData data = DrawMask(c, &random);
    return DrawDense(c, data, BiasTensor(), &random);
  }
  void Fill() { query.Fill(dense.query), key.Fill(dense.key), value.Fill(dense.value); }

  std::vector<double> Run(CpuIsa isa, bool allow_bf16) {
    output.Reset();
    AttentionArgs args = MakeArgs(c, query, key, value, output);
    args.allow_bf16 = allow_bf16;
    CpuAttentionConfig config = ChooseCpuAttention(args, 1);
    config.isa = isa;
    BoundMask bound;
    Random random(0);
    BindMask(c, DrawMask(c, &random), config, &bound, &args);
    const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, 1), 0xff);
    CHECK(CpuAttention(args, config, workspace.get(), Parallel{}).ok());
    std::vector<double> values;
    output.ForEach([&](const char* at, size_t) { values.push_back(LoadFloat(c.dtype, at)); });
    return values;
  }
};

Dense RoundedInputs(Dense dense) {
  for (std::vector<double>* values : {&dense.query, &dense.key, &dense.value}) {
    for (double& x : *values) x = Rounded(DType::kBF16, x);
  }
  return dense;
}

// The scale of each row: its weights times the sizes of its values, the largest of all its elements.
std::vector<double> RowScales(Dense dense) {
  for (double& x : dense.value) x = std::abs(x);
  const Answer answer = Attend(dense);
  std::vector<double> scales;
  for (size_t row = 0; row < answer.output.size(); row += static_cast<size_t>(dense.Dv)) {
    const auto begin = answer.output.begin() + static_cast<std::ptrdiff_t>(row);
    scales.push_back(*std::max_element(begin, begin + static_cast<std::ptrdiff_t>(dense.Dv)));
  }
  return scales;
}

double LargestError(const Tensors& t, const std::vector<double>& found, const Answer& answer,
                    const std::vector<double>& scales) {
  double largest = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double scale = scales[i / static_cast<size_t>(t.c.Dv)];
    if (scale > 0) largest = std::max(largest, std::abs(found[i] - answer.output[i]) / scale);
  }
  return largest;
}

// Any inputs: errors beside the definition with rounded inputs, and beside the unrounded one.
void RoundInputs(CpuIsa isa) {
  // A set with the same kernels in fp32.
  CpuIsa before = isa;
  for (int i = static_cast<int>(isa); i-- > 0;) {
    if (cpu::KernelsOf(static_cast<CpuIsa>(i)).attention == cpu::KernelsOf(isa).attention)
      before = static_cast<CpuIsa>(i);
  }
  double rounded = 0, unrounded = 0;
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t size : {1, 2, 31, 32, 33, 64, 80, 128, 256}) {
      for (const int mask : {0, 1, 3}) {
        if (Effort() < 0.1 && ++seed % 8 != 0) continue;  // an emulator
        Case c;
        c.S = 70, c.T = 200, c.D = size, c.Dv = size % 3 == 0 ? 40 : size, c.dtype = dtype, c.mask = mask;
        c.H = 4, c.G = seed % 2 == 0 ? 4 : 2, c.offset = mask != 0, c.spread = 2;
        Tensors t(c, ++seed);
        const std::vector<double> found = t.Run(isa, true), plain = t.Run(isa, false);
        const std::vector<double> scales = RowScales(RoundedInputs(t.dense));
        const double output = dtype == DType::kF32 ? 0 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
        const double error = LargestError(t, found, Attend(RoundedInputs(t.dense)), scales);
        CHECK(error <= 0x1p-8 + output + 1e-5, Describe(c), ": ", error);
        CHECK(found != plain, Describe(c), ": not rounded");
        CHECK(plain == t.Run(before, false), Describe(c), ": another default");
        if (dtype == DType::kF32) {
          rounded = std::max(rounded, error);
          unrounded = std::max(unrounded, LargestError(t, found, Attend(t.dense), scales));
        }
        CountCases(1);
      }
    }
  }
  std::printf("  of fp32 inputs: error %.5f of a row's scale, %.5f beside unrounded inputs\n", rounded, unrounded);
}

// Few queries read keys in place, and compute in fp32.
void KeepFp32OfFewQueries(CpuIsa isa) {
  for (const int64_t rows : {1, 2, 4}) {
    Case c;
    c.S = rows, c.T = 700, c.D = c.Dv = 64;
    Tensors t(c, static_cast<uint64_t>(rows));
    CHECK(t.Run(isa, true) == t.Run(isa, false), "rows ", rows);
    CountCases(1);
  }
}

// NaN and infinities of inputs reach the rows that attend them, and no others.
void KeepNanAndInfinity(CpuIsa isa) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    Case c;
    c.B = 1, c.H = c.G = 1, c.S = 40, c.T = 50, c.D = 20, c.Dv = 24, c.dtype = dtype;
    Tensors t(c, 5);
    t.dense.query[static_cast<size_t>(7 * c.D + 3)] = std::nan("");
    t.dense.value[static_cast<size_t>(11 * c.Dv + 2)] = kInf;
    t.dense.value[static_cast<size_t>(12 * c.Dv + 4)] = std::nan("");
    t.Fill();
    const std::vector<double> found = t.Run(isa, true);
    for (int64_t i = 0; i < c.S * c.Dv; ++i) {
      const int64_t row = i / c.Dv, d = i % c.Dv;
      const double x = found[static_cast<size_t>(i)];
      const bool is_right = row == 7 || d == 4 ? std::isnan(x) : d == 2 ? x == kInf : std::isfinite(x);
      CHECK(is_right, "dtype ", static_cast<int>(dtype), " row ", row, " element ", d, ": ", x);
    }
    CountCases(c.S * c.Dv);
  }
}

// Numbers beyond the largest of bf16 become infinite, subnormal ones count as 0.
void RoundEndsOfTheRange(CpuIsa isa) {
  constexpr int64_t kSubnormal = 3, kLarge = 5;
  Case c;
  c.B = 1, c.H = c.G = 1, c.S = 40, c.T = 50, c.D = 20, c.Dv = 24, c.dtype = DType::kF32;
  Tensors t(c, 6);
  for (int64_t k = 0; k < c.T; ++k) t.dense.value[static_cast<size_t>(k * c.Dv + kSubnormal)] = 1e-39;
  t.dense.value[static_cast<size_t>(11 * c.Dv + kLarge)] = 3.4e38;
  t.Fill();
  const std::vector<double> found = t.Run(isa, true), plain = t.Run(isa, false);
  for (int64_t i = 0; i < c.S * c.Dv; ++i) {
    const double x = found[static_cast<size_t>(i)];
    const int64_t d = i % c.Dv;
    const bool is_right = d == kSubnormal ? x == 0 : d == kLarge ? std::isinf(x) && x > 0 : std::isfinite(x);
    CHECK(is_right, "row ", i / c.Dv, " element ", d, ": ", x);
    CHECK(std::isfinite(plain[static_cast<size_t>(i)]), "in fp32: row ", i / c.Dv, " element ", d);
  }
  CountCases(c.S * c.Dv);
}

// Registers the tests of each instruction set of this machine that has kernels.
const bool registered = [] {
#define STOF_TESTS(id, name, is_supported)                                                   \
  {{"Bf16AttentionEqualsTheDefinition[" #name "]", [] { RunTable(CpuIsa::id); }},            \
   {"Bf16AttentionOfLargeScores[" #name "]", [] { RunLargeScores(CpuIsa::id); }},            \
   {"Bf16AttentionRoundsInputs[" #name "]", [] { RoundInputs(CpuIsa::id); }, kOneThread},    \
   {"Bf16AttentionOfFewQueriesIsFp32[" #name "]", [] { KeepFp32OfFewQueries(CpuIsa::id); }}, \
   {"Bf16AttentionKeepsNanAndInfinity[" #name "]", [] { KeepNanAndInfinity(CpuIsa::id); }},  \
   {"Bf16AttentionRoundsEndsOfTheRange[" #name "]", [] { RoundEndsOfTheRange(CpuIsa::id); }}},
  static constexpr Test kRows[][6] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  for (const CpuIsa isa : IsasOfThisMachine()) {
    if (cpu::KernelsOf(isa).attention_bf16 == nullptr) continue;
    const auto& row = kRows[static_cast<int>(isa)];
    AllTests().insert(AllTests().end(), std::begin(row), std::end(row));
  }
  return true;
}();

}  // namespace
}  // namespace stof::test::attention
