// SPDX-License-Identifier: Apache-2.0
// What the choice of a kernel gives: the same type for all operators. Plain C++.
#ifndef STOF_CUDA_COMMON_KERNEL_PLAN_H_
#define STOF_CUDA_COMMON_KERNEL_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plugins/core/host/hash.h"

namespace stof {
namespace cuda {

// The decision of one run, from which a family launches without deciding anything. Kernel is a row of a table of the
// Family, and has a KernelName.
template <typename Family, typename Kernel>
struct KernelPlan {
  const Family* family = nullptr;
  const Kernel* kernel = nullptr;
  int rows = 0;              // of a CTA's tile
  int stages = 0;            // buffers of a CTA, where the kernel leaves their number open
  int splits = 1;            // CTAs that share a tile along its reduction
  int cluster = 1;           // CTAs of a thread block cluster
  int64_t persistent = 0;    // clusters that run at once and take several tiles; 0: a CTA for each tile
  size_t workspace = 0;      // bytes
  double nanoseconds = 0.0;  // predicted, no part of the decision; 0: not known

  uint64_t Hash() const {
    return HashWords({reinterpret_cast<uintptr_t>(family), reinterpret_cast<uintptr_t>(kernel),
                      static_cast<uint64_t>(rows), static_cast<uint64_t>(stages), static_cast<uint64_t>(splits),
                      static_cast<uint64_t>(cluster), static_cast<uint64_t>(persistent), workspace});
  }
};

template <typename Family, typename Kernel>
bool operator==(const KernelPlan<Family, Kernel>& a, const KernelPlan<Family, Kernel>& b) {
  return a.family == b.family && a.kernel == b.kernel && a.rows == b.rows && a.stages == b.stages &&
         a.splits == b.splits && a.cluster == b.cluster && a.persistent == b.persistent && a.workspace == b.workspace;
}

// "sm90-128x256x1, cluster of 2, 66 persistent, 8388608 bytes of workspace, 31.2 us predicted"
template <typename Family, typename Kernel>
std::string Print(const KernelPlan<Family, Kernel>& plan) {
  if (plan.kernel == nullptr) return "no kernel";
  std::string text = KernelName(*plan.kernel);
  const auto add = [&text](const char* before, int64_t number, const char* behind) {
    text += before + std::to_string(number) + behind;
  };
  if (plan.stages > 0) add(", ", plan.stages, plan.stages == 1 ? " stage" : " stages");
  if (plan.splits > 1) add(", ", plan.splits, " splits");
  if (plan.cluster > 1) add(", cluster of ", plan.cluster, "");
  if (plan.persistent > 0) add(", ", plan.persistent, " persistent");
  if (plan.workspace > 0) add(", ", static_cast<int64_t>(plan.workspace), " bytes of workspace");
  if (plan.nanoseconds > 0) {
    const auto tenths = static_cast<int64_t>(plan.nanoseconds / 100 + 0.5);
    add(", ", tenths / 10, ".");
    add("", tenths % 10, " us predicted");
  }
  return text;
}

// Whether STOF_CUDA_PRINT_PLANS=1 asks for PrintChoice.
bool ArePlansPrinted();
// Writes a choice to the standard error stream, once for each text: problem, plan and runners-up.
void PrintChoice(const std::string& problem, const std::string& plan, const std::vector<std::string>& runners_up);

// PrintChoice of the first one of `plans`, where plans are printed.
template <typename Problem, typename Family, typename Kernel>
void PrintChoiceOf(const Problem& problem, const std::vector<KernelPlan<Family, Kernel>>& plans) {
  if (!ArePlansPrinted() || plans.empty()) return;
  std::vector<std::string> runners_up;
  for (size_t i = 1; i < plans.size(); ++i) runners_up.push_back(Print(plans[i]));
  PrintChoice(Print(problem), Print(plans[0]), runners_up);
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_KERNEL_PLAN_H_
