// SPDX-License-Identifier: Apache-2.0
// Kernel names in the environment, and the choice by the model; needs no device.
#include <algorithm>
#include <limits>
#include <set>

#include "cuda/attention/select.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

TEST(CudaKernelChoices) {
  CHECK(cuda::ReadKernelChoice("").status.ok() && cuda::ReadKernelChoice("").number == -1);
  CHECK(cuda::ReadKernelChoice("7").number == 7 && cuda::ReadKernelChoice("7").name.empty());
  std::vector<std::string> names = {"sm80", "rows"};
  if (cuda::FindSm90(64, true, cuda::ScoreMod::kNone)->launch != nullptr) {
    names.push_back(cuda::KernelName(*cuda::FindSm90(64, true, cuda::ScoreMod::kNone)));
    names.push_back(cuda::KernelName(*cuda::FindSm90(256, true, cuda::ScoreMod::kRelativeBias)));
  }
  for (const std::string& name : names) {
    const cuda::KernelChoice choice = cuda::ReadKernelChoice(name);
    CHECK(choice.status.ok() && choice.name == name && choice.number == -1, name, ": ", choice.status.message());
  }
  for (const char* wrong : {"-1", "4a", "SM80", "sm90", "sm90-1x1x1", "1000", " "}) {
    const cuda::KernelChoice choice = cuda::ReadKernelChoice(wrong);
    CHECK(!choice.status.ok() && choice.name.empty() && choice.number == -1, wrong);
    for (const std::string& name : names) CHECK(choice.status.message().find(" " + name) != std::string::npos, wrong);
  }
  CountCases(static_cast<int64_t>(names.size()) + 9);
}

// The choice is the first kernel of least predicted time, although most predictions are skipped.
TEST(KernelChoiceIsTheLeastPredicted) {
  int64_t cases = 0;
  std::set<const cuda::Sm90Kernel*> chosen;
  for (const char* text : {"k <= q", "abs(q - k) <= 45", "abs(q - k) <= 45 or k < 45 or q < 45",
                           "k <= q and (q // 64 - k // 64 < 4 or (k // 64 + h) % 8 == 0)",
                           "(37 * (q // 128) + 25 * (k // 128) + 7 * (q // 128) * (k // 128)) % 61 < 7"}) {
    MaskExpr expr;
    CHECK(MaskExpr::Parse(text, {}, &expr).ok(), text);
    for (const auto& [B, H] : {std::pair<int64_t, int64_t>(1, 12), {8, 12}, {1, 32}, {3, 5}}) {
      for (const int64_t length : {64, 200, 512, 1024, 2048}) {
        for (const int64_t size : {64, 128}) {
          const cuda::Sm90Kernel* const kernels = cuda::FindSm90(static_cast<int>(size), false, cuda::ScoreMod::kNone);
          if (kernels->launch == nullptr) continue;
          cuda::SelectionProblem problem;
          problem.mask = &expr;
          problem.hash = static_cast<uint64_t>(++cases);
          problem.sizes = {B, H, length, length, 0};
          problem.l2_heads = std::max<int64_t>(1, (int64_t{25} << 20) / (4 * length * size));
          problem.kv_bytes = 4 * B * H * length * size;
          problem.sm_count = 132;
          const cuda::Sm90Kernel* best = nullptr;
          int64_t least = std::numeric_limits<int64_t>::max();
          for (const cuda::Sm90Kernel* kernel = kernels; kernel->launch != nullptr; ++kernel) {
            int64_t nanoseconds = 0;
            CHECK(cuda::Predict(*kernel, problem, &nanoseconds).ok(), text);
            if (nanoseconds < least) least = nanoseconds, best = kernel;
          }
          const cuda::Sm90Kernel* selected = nullptr;
          CHECK(cuda::Select(kernels, problem, &selected).ok() && selected == best, text, " B ", B, " H ", H, " S ",
                length, " D ", size, ": ", cuda::KernelName(*selected), ", the least is ", cuda::KernelName(*best));
          chosen.insert(selected);
        }
      }
    }
  }
  CHECK(cases == 0 || chosen.size() >= 6, chosen.size(), " kernels are chosen");
  CountCases(cases);
}

}  // namespace
}  // namespace stof::test
