// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/kernel_plan.h"

#include <cstdio>
#include <mutex>
#include <unordered_set>

#include "plugins/core/host/environment.h"

namespace stof {
namespace cuda {

bool ArePlansPrinted() {
  static const bool are = ReadVariableOr(Variable::kCudaPrintPlans, false);
  return are;
}

void PrintChoice(const std::string& problem, const std::string& plan, const std::vector<std::string>& runners_up) {
  constexpr size_t kMostPrinted = 4096;  // sizes that change with every run must not fill the memory
  static std::mutex mutex;
  static auto* const printed = new std::unordered_set<std::string>;  // never destroyed: threads may outlive it
  std::string text = "stof: " + problem + "\n  -> " + plan + "\n";
  for (const std::string& runner_up : runners_up) text += "     " + runner_up + "\n";
  const std::lock_guard<std::mutex> lock(mutex);
  if (printed->size() >= kMostPrinted || !printed->insert(text).second) return;
  std::fputs(text.c_str(), stderr);
}

}  // namespace cuda
}  // namespace stof
