// SPDX-License-Identifier: Apache-2.0
// Chooses the kernels of a sparse MLP: lists of active neurons, or GEMMs of all neurons. Plain C++ without a device.
#ifndef STOF_CUDA_SPARSE_MLP_CHOOSE_H_
#define STOF_CUDA_SPARSE_MLP_CHOOSE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/common/kernel_plan.h"
#include "cuda/common/kernel_request.h"
#include "plugins/core/base/types.h"

namespace stof {
namespace cuda {

// What the choice depends on.
struct SparseMlpProblem {
  int64_t T = 0, K = 0, F = 0, N = 0, R = 0;
  DType dtype = DType::kF16;
  bool has_rows = false;       // a gate or an up weight, which is read in rows of neurons
  bool is_down_tiled = false;  // tensor cores compute the output of a launch
  int sm_count = 1;

  uint64_t Hash() const;
};
bool operator==(const SparseMlpProblem& a, const SparseMlpProblem& b);
// "sparse MLP T 1, K 4096, F 11008, N 4096, R 0, fp16, 132 SMs"
std::string Print(const SparseMlpProblem& problem);

enum class MlpFamilyKind { kLists, kGemms };
struct MlpFamily {
  const char* name = "";
  MlpFamilyKind kind = MlpFamilyKind::kLists;
};
// A row of a family's table.
struct MlpKernelEntry {
  const char* name = "";
  int group_tokens = 0;  // lists: tokens of a CTA of the down kernel
};
inline std::string KernelName(const MlpKernelEntry& kernel) { return kernel.name; }

// rows: MlpKernelEntry::group_tokens; splits: of the list of active neurons in the down kernel.
using MlpPlan = KernelPlan<MlpFamily, MlpKernelEntry>;

// The requests for a family, "lists" or "gemms"; STOF_CUDA_SPARSE_MLP is their environment variable.
KernelRequests& MlpRequests();

// The plans of a problem, first choice first. Without a request: up to 16 tokens lists of active neurons, from there on
// GEMMs, since tokens together need most neurons. GEMMs have no fp32, and no sizes above 2^27.
std::vector<MlpPlan> ListMlpPlans(const SparseMlpProblem& problem, const KernelRequest& request);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_CHOOSE_H_
