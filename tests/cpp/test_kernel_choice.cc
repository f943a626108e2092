// SPDX-License-Identifier: Apache-2.0
// What may be asked for in the environment; needs no device.
#include "cuda/selector.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

TEST(CudaKernelChoices) {
  CHECK(cuda::ReadKernelChoice("").status.ok() && cuda::ReadKernelChoice("").number == -1);
  CHECK(cuda::ReadKernelChoice("7").number == 7 && cuda::ReadKernelChoice("7").name.empty());
  std::vector<std::string> names = {"sm80", "rows"};
  if (cuda::FindSm90(64, true, cuda::Extras::kNone)->launch != nullptr) {
    names.push_back(cuda::NameOf(*cuda::FindSm90(64, true, cuda::Extras::kNone)));
    names.push_back(cuda::NameOf(*cuda::FindSm90(256, true, cuda::Extras::kDistances)));
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

}  // namespace
}  // namespace stof::test
