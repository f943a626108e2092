// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CUDA_SPARSE_MLP_RUN_H_
#define STOF_CUDA_SPARSE_MLP_RUN_H_

#include <cstddef>

#include "plugins/core/contract/op.h"
#include "plugins/core/contract/sparse_mlp.h"

namespace stof {
namespace cuda {

// Members of SparseMlpBackend.
Status RunSparseMlp(const SparseMlpArgs& args, const RunContext& context);
Status PlanSparseMlpWorkspace(const SparseMlpArgs& args, size_t* bytes);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_RUN_H_
