// SPDX-License-Identifier: Apache-2.0
// Chooses among the sm_90a kernels. The analytical model is the tile schedule itself: a schedule is made for the tiles
// and costs of each kernel, and its predicted time is compared.
#ifndef STOF_CUDA_ATTENTION_SELECT_H_
#define STOF_CUDA_ATTENTION_SELECT_H_

#include <cstdint>
#include <string>

#include "cuda/attention/sm90/api.h"
#include "cuda/mask/device_mask.h"
#include "plugins/core/base/status.h"
#include "plugins/core/mask/expr.h"

namespace stof {
namespace cuda {

// What a kernel is chosen for.
struct SelectionProblem {
  const MaskExpr* mask = nullptr;  // nullptr: every pair is allowed
  uint64_t hash = 0;               // of the mask
  ExprSizes sizes;
  int64_t l2_heads = 1;    // query heads of an L2 head group
  int64_t group_size = 1;  // query heads of a KV head (GQA)
  int64_t kv_bytes = 0;    // of all keys and values
  int sm_count = 1;
};

// The block mask that a kernel needs for the problem.
MaskForm MaskFormOf(const Sm90Kernel& kernel, const SelectionProblem& problem);

// Nanoseconds that a kernel takes by the model. Builds the kernel's block mask, which stays in the cache.
Status Predict(const Sm90Kernel& kernel, const SelectionProblem& problem, int64_t* nanoseconds);

// The names of the kernels that are not in a list.
constexpr char kSm80Name[] = "sm80", kRowwiseName[] = "rows";

// The value of the environment variable STOF_CUDA_KERNEL: empty, a number, or the name of a kernel.
struct KernelChoice {
  int number = -1;
  std::string name;
  Status status;
};
KernelChoice ReadKernelChoice(const std::string& text);
// The name in STOF_CUDA_KERNEL, or an empty one. It is for nodes whose attribute `kernel` is empty.
Status KernelNameFromEnvironment(const char** name);

// Forces a kernel, for tests and measurements: the one with this index in every list that has it, and of the decode
// kernels split-KV (0) or clusters (1). -1 leaves the choice to the model. Initially the number in STOF_CUDA_KERNEL.
void ForceKernel(int index);
int ForcedKernel();

// The kernel of this name in a list, which ends with an empty kernel; nullptr: there is none.
const Sm90Kernel* FindByName(const Sm90Kernel* kernels, const char* name);

// The kernel of a list that is fastest by the model. Choices are remembered.
Status Select(const Sm90Kernel* kernels, const SelectionProblem& problem, const Sm90Kernel** selected);

// Sets *rowwise to whether the row-wise kernel is faster than `kernel` by the model, for a problem with a mask.
// nullptr: the sm_80 or the fp32 kernel. head_bytes: of one key. Choices are remembered.
Status SelectRowwise(const SelectionProblem& problem, const Sm90Kernel* kernel, int head_bytes, bool fp32,
                     bool* rowwise);

// The kernel for a mask that only the device knows: of those with the smallest KV tiles, which skip most, the one with
// the least time a pair.
const Sm90Kernel* SelectForDeviceMask(const Sm90Kernel* kernels);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SELECT_H_
