// SPDX-License-Identifier: Apache-2.0
// Chooses the kernel of an attention: the one that is requested, else the fastest by the models. The model of the
// scheduled kernels is the tile schedule itself: one is made for the tiles and costs of each kernel, and the predicted
// times are compared.
#ifndef STOF_CUDA_ATTENTION_SELECT_H_
#define STOF_CUDA_ATTENTION_SELECT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/attention/kernel_table.h"
#include "cuda/common/kernel_request.h"
#include "cuda/mask/device_mask.h"
#include "plugins/core/base/status.h"
#include "plugins/core/mask/expr.h"

namespace stof {
namespace cuda {

// What predictions depend on.
struct SelectionProblem {
  const MaskExpr* mask = nullptr;  // nullptr: every pair is allowed
  uint64_t hash = 0;               // of the mask
  bool is_mask_on_device = false;  // only the device knows the mask
  ExprSizes sizes;
  int64_t l2_heads = 1;    // query heads of an L2 head group
  int64_t group_size = 1;  // query heads of a KV head (GQA)
  int64_t kv_bytes = 0;    // of all keys and values
  int head_bytes = 0;      // of one key
  bool is_fp32 = false;
  int sm_count = 1;
};

// Sets family and kernel of the plan of a problem, in this order:
//   the row-wise kernel, where it is requested by name;
//   with few queries the first decode kernel, in place of which KernelFamily::plan may take another;
//   the requested one of the tiled and the scheduled kernels;
//   the fastest of these by the models, and of the row-wise kernel unless a name or a tactic is requested.
// A request that does not fit the problem counts for nothing else. An error where no kernel fits.
Status ChooseKernel(const KernelRequest& request, const KernelProblem& problem, const SelectionProblem& selection,
                    AttentionPlan* plan);

// Bytes of all keys and values of a KV head, at least 1.
int64_t KvHeadBytes(const AttentionShape& shape);
// Query heads of an L2 head group, whose keys and values fill half of the L2 cache.
int64_t L2HeadsOf(const AttentionShape& shape, int64_t l2_bytes);

// The block mask that a scheduled kernel needs for the problem.
MaskForm MaskFormOf(const KernelEntry& kernel, const SelectionProblem& problem);

// Nanoseconds that a scheduled kernel takes by the model. Builds the kernel's block mask, which stays in the cache.
Status Predict(const KernelEntry& kernel, const SelectionProblem& problem, int64_t* nanoseconds);

// The scheduled kernel of a table that is fastest by the model. Choices are remembered.
Status Select(KernelTable kernels, const SelectionProblem& problem, const KernelEntry** selected);

// Sets *rowwise to whether the row-wise kernel is faster than `kernel` by the model, for a problem with a mask. Choices
// are remembered.
Status SelectRowwise(const SelectionProblem& problem, const KernelEntry& kernel, bool* rowwise);

// For people: the tiled and the scheduled kernels that can compute a problem, by rising predicted time.
Status ListPredictions(const KernelProblem& problem, const SelectionProblem& selection,
                       std::vector<AttentionPlan>* plans);
// "attention B 1, H 32, S 4096, T 4096, group size 4, head size 128, fp16, mask 1234, 132 SMs"
std::string Print(const KernelProblem& problem, const SelectionProblem& selection);

// The scheduled kernel for a mask that only the device knows: of those with the smallest KV tiles, which skip most, the
// one with the least time a pair.
const KernelEntry* SelectForDeviceMask(KernelTable kernels);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SELECT_H_
