// SPDX-License-Identifier: Apache-2.0
// Upper bounds of the workspaces of the families. Plain C++ without a device, also in builds without kernels: an engine
// may be built on another machine than it runs on.
#ifndef STOF_CUDA_ATTENTION_WORKSPACE_BOUNDS_H_
#define STOF_CUDA_ATTENTION_WORKSPACE_BOUNDS_H_

#include <cstdint>

#include "plugins/core/contract/attention_args.h"
#include "plugins/core/mask/attention_mask.h"

namespace stof {
namespace cuda {

// Bytes that a run with these arguments, or smaller ones, asks for at most. 0: the family does not take them, or needs
// none.
using WorkspaceBound = int64_t (*)(const AttentionArgs& args, const AttentionMask& mask);

int64_t BoundDecodeWorkspace(const AttentionArgs& args, const AttentionMask& mask);  // decode/workspace.cc
int64_t BoundFp32Workspace(const AttentionArgs& args, const AttentionMask& mask);    // fp32/workspace.cc
int64_t BoundSm80Workspace(const AttentionArgs& args, const AttentionMask& mask);    // sm80/workspace.cc
int64_t BoundSm90Workspace(const AttentionArgs& args, const AttentionMask& mask);    // sm90/workspace.cc

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_WORKSPACE_BOUNDS_H_
