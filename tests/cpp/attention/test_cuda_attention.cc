// SPDX-License-Identifier: Apache-2.0
// The attention kernels on a GPU, against the definition: the CPU kernels' table of cases by the selector's choice,
// fp32 and TF32, row by row, few queries.
#include <cmath>
#include <cstdlib>
#include <limits>

#include "tests/cpp/attention/cuda_attention_cases.h"

namespace stof::test::attention {
namespace {

void Cuda() { RunCudaCases(CudaCases(), {""}); }

// Every case as fp32 has it, of all head sizes and alignments, and lengths around the kernel's tiles.
std::vector<Case> CudaFp32Cases() {
  std::vector<Case> cases = ListedCases();
  const std::vector<Case> drawn = DrawnCases(Cases(400));
  cases.insert(cases.end(), drawn.begin(), drawn.end());
  for (Case& c : cases) c.dtype = DType::kF32;
  int64_t turn = 0;
  for (const int64_t size : {24, 32, 64, 72, 96, 128, 160, 192, 256}) {
    for (const int64_t length : {63, 64, 65, 127, 129, 200, 321}) {
      Case c;
      c.S = length, c.T = length + turn % 3 * 64, c.D = c.Dv = size, c.G = turn % 2 == 0 ? 4 : 2;
      c.mask = static_cast<int>(turn % 10);
      c.pad = static_cast<Pad>(turn % 5);
      c.empty_rows = static_cast<EmptyRows>(turn % 4);
      c.wild = turn % 4 < 2;
      c.softcap = turn % 7 == 6 ? 30.0f : 0.0f;
      c.sink = c.empty_rows == EmptyRows::kZero;
      cases.push_back(c);
      ++turn;
    }
  }
  for (Case& c : cases) c.cuda = true;
  return cases;
}

void CudaFp32() { RunCudaCases(CudaFp32Cases(), {""}); }

// The row-wise kernel, of all types.
void CudaRows() {
  std::vector<Case> cases = CudaCases();
  for (Case& c : CudaFp32Cases()) {
    if (c.wild || c.D % 4 != 0 || c.Dv % 4 != 0) continue;
    cases.push_back(c);
  }
  for (Case& c : cases) c.kernel = "rows";
  RunCudaCases(cases, {""});
}

void CudaTf32() {
  std::vector<Case> cases = CudaFp32Cases();
  for (Case& c : cases) c.tf32 = true, c.wild = false;
  rounded_otherwise = 0;
  RunCudaCases(cases, {""});
  // Not of few queries, nor of rows with one key or none.
  const char* sample = std::getenv("STOF_SAMPLE");
  const int64_t ran = static_cast<int64_t>(cases.size()) / std::max(1, sample == nullptr ? 1 : std::atoi(sample));
  CHECK(std::getenv("STOF_CASE") != nullptr || rounded_otherwise >= ran / 3, rounded_otherwise, " of ", ran,
        " cases are rounded otherwise than without allow_tf32");
}

// Few queries: every type and feature, groups of heads, and keys enough for several CTAs to share them. By the
// selector's choice and by every kind of kernel.
void CudaDecode() {
  Random random(77);
  Deck<int64_t> queries({1, 1, 1, 2, 3, 4, 7, 8, 13, 16}, &random);
  Deck<int64_t> keys({16, 17, 31, 63, 64, 65, 129, 700, 1500, 3001}, &random);
  Deck<int64_t> sizes({8, 40, 64, 72, 128, 128, 200, 256}, &random);
  Deck<std::pair<int64_t, int64_t>> heads({{8, 8}, {8, 2}, {8, 1}, {6, 2}, {2, 2}}, &random);
  Deck<DType> dtypes({DType::kF16, DType::kBF16, DType::kF32}, &random);
  Deck<Arrangement> arrangements(kArrangements, &random);
  Deck<int> masks({0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kAll, Pad::kRandom}, &random);
  Deck<Bias> biases({Bias::kNone, Bias::kNone, Bias::kNone, Bias::kPlain, Bias::kLowest, Bias::kForbids}, &random);
  Deck<int64_t> relatives({0, 0, 0, 33, 999}, &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}, &random);
  Deck<float> softcaps({0, 0, 0, 30.0f}, &random);
  std::vector<Case> cases;
  for (int i = 0; i < Cases(360); ++i) {
    Case c;
    c.B = random.Range(1, 2);
    std::tie(c.H, c.G) = heads.Deal();
    c.S = queries.Deal(), c.T = keys.Deal();
    c.D = c.Dv = sizes.Deal();
    if (random.OneIn(4)) c.Dv = sizes.Deal();
    c.dtype = dtypes.Deal();
    for (Arrangement& arrangement : c.arrangement) arrangement = arrangements.Deal();
    c.offset = !random.OneIn(3);
    c.mask = masks.Deal();
    c.pad = pads.Deal();
    c.bias = biases.Deal();
    c.bias_wide = random.OneIn(2);
    if (c.bias != Bias::kNone) c.bias_broadcast = static_cast<uint32_t>(random.Range(0, 15));
    c.relative = relatives.Deal();
    c.sink = random.OneIn(4);
    c.empty_rows = c.sink ? EmptyRows::kZero : policies.Deal();
    c.softcap = softcaps.Deal();
    c.spread = random.OneIn(3) ? 4.0f : 1.0f;
    c.rising = random.OneIn(4);
    if (c.empty_rows != EmptyRows::kAll && random.OneIn(2)) c.poison = Poison::kForbidden;
    c.cuda = true;
    cases.push_back(c);
  }
  std::vector<std::string> kinds = FirstKernels(2);
  if (kinds.size() > 1) kinds.push_back("");
  RunCudaCases(cases, kinds);
}

// Scores of every size by the choice and by each kind of kernel that takes them.
void CudaLargeScores() {
  std::vector<Case> cases = CudaLargeScoreCases(true);
  for (const bool fp16_bf16 : {true, false}) {
    for (const char* kernel : {"sm80", "rows"}) {
      if (!fp16_bf16 && std::string(kernel) == "sm80") continue;
      for (Case& c : CudaLargeScoreCases(fp16_bf16)) {
        c.kernel = kernel;
        cases.push_back(c);
      }
    }
  }
  for (const Case& c : CudaLargeScoreCases(false)) cases.push_back(c);
  RunCudaCases(cases, {""});
}

TEST(CudaAttentionEqualsTheDefinition) { Cuda(); }
TEST(CudaScoresOfAnySize) { CudaLargeScores(); }
TEST(CudaFp32EqualsTheDefinition) { CudaFp32(); }
TEST(CudaTf32EqualsTheDefinition) { CudaTf32(); }
TEST(CudaRowsEqualTheDefinition) { CudaRows(); }
TEST(CudaDecodeEqualsTheDefinition) { CudaDecode(); }

// Every tenth case 50 times: fp16 and bf16 by the choice, the sm_80 and the row-wise kernel; fp32.
TEST(CudaRepeatsGiveTheSameBits) {
  for (const char* kernel : {"", "sm80", "rows"}) RunCudaCases(EveryTenth(CudaCases(), kernel), {""}, kRepeats);
  RunCudaCases(EveryTenth(CudaFp32Cases(), ""), {""}, kRepeats);
}

}  // namespace
}  // namespace stof::test::attention
