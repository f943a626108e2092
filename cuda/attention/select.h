// SPDX-License-Identifier: Apache-2.0
// Which of the sm_90a kernels suits a problem. The analytical model is the plan itself: every kernel's tiles are
// counted, its rows are dealt out as they would be, and when they are done says how long it takes (TimeOf).
#ifndef STOF_CUDA_ATTENTION_SELECT_H_
#define STOF_CUDA_ATTENTION_SELECT_H_

#include <string>

#include "cuda/attention/sm90/api.h"
#include "cuda/mask/device_mask.h"
#include "plugins/core/contract/status.h"
#include "plugins/core/mask/expr.h"

namespace stof {
namespace cuda {

struct Problem {
  const MaskExpr* mask = nullptr;  // nullptr: every pair is allowed
  uint64_t hash = 0;               // of the mask
  ExprSizes sizes;
  int64_t section = 1;  // heads whose keys and values fit the L2 cache
  int64_t sharing = 1;  // query heads of a key head
  int64_t bytes = 0;    // of all keys and values
  int multiprocessors = 1;
};

// What a kernel asks of the problem's block mask.
MaskForm FormOf(const Sm90Kernel& kernel, const Problem& problem);

// Nanoseconds that a kernel needs by the model; builds its block mask, which is kept.
Status Predict(const Sm90Kernel& kernel, const Problem& problem, int64_t* nanoseconds);

// The names of the kernels that are none of a list.
constexpr char kSm80Name[] = "sm80", kRowsName[] = "rows";

// What the environment variable STOF_CUDA_KERNEL may say: nothing, a number, or a name of a kernel.
struct KernelChoice {
  int number = -1;
  std::string name;
  Status status;
};
KernelChoice ReadKernelChoice(const std::string& text);
// The name that it says, empty where it says none. For nodes whose attribute `kernel` names none themselves.
Status NamedByEnvironment(const char** name);

// For tests and measurements: a number from 0 takes that kernel of every list which has it, of those for few queries
// the one for long rows (0) or clusters (1), -1 leaves the choice to the model. At the start, what the environment
// says.
void TakeKernel(int index);
int TakenKernel();

// The kernel of a list of them, which ends with an empty one, that has this name; nullptr: none.
const Sm90Kernel* Named(const Sm90Kernel* kernels, const char* name);

// The kernel of such a list that the model takes for the fastest; remembered.
Status Select(const Sm90Kernel* kernels, const Problem& problem, const Sm90Kernel** selected);

// Whether the row-wise kernel takes a problem with a mask in less time than that one (nullptr: the kernel for
// capability 8.0, or that for fp32), by the model; remembered. head_bytes: of a key.
Status SelectRows(const Problem& problem, const Sm90Kernel* kernel, int head_bytes, bool fp32, bool* rows);

// The one for a mask that the host does not see: of those with the fewest keys in a tile, which leave most out, the one
// that needs least for a pair.
const Sm90Kernel* SelectUnseen(const Sm90Kernel* kernels);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SELECT_H_
