// SPDX-License-Identifier: Apache-2.0
// The list of all families of attention kernels.
#ifndef STOF_CUDA_ATTENTION_FAMILIES_H_
#define STOF_CUDA_ATTENTION_FAMILIES_H_

#include <string>
#include <vector>

#include "cuda/attention/kernel_table.h"
#include "cuda/common/kernel_request.h"

namespace stof {
namespace cuda {

// The first family of a role that can compute the problem, with its kernels; nullptr and an empty table: none can.
const KernelFamily* FindFamily(KernelRole role, const KernelProblem& problem, KernelTable* kernels);

// The names of the kernels that can compute the problem, but for those of the decode family.
std::vector<std::string> ListKernelNames(const KernelProblem& problem);

// The names of all kernels in this build.
std::vector<std::string> ListAllKernelNames();

// The requests for attention kernels; STOF_CUDA_KERNEL is their environment variable.
KernelRequests& AttentionRequests();

// The kernel of a table that is requested by name or number; nullptr: it has none.
const KernelEntry* FindRequested(KernelTable kernels, const KernelRequest& request);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FAMILIES_H_
