// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CUDA_CHOOSE_PAGES_UPDATE_H_
#define STOF_CUDA_CHOOSE_PAGES_UPDATE_H_

#include "plugins/core/contract/cached_attention.h"

namespace stof {
namespace cuda {

// Queues the kernel that fills CacheAppendArgs::page_bounds by the keys of present, behind the append kernel. It reads
// first_row and is_invalid, which are given. Gives a CUDA error code, 0 for none. stream is a cudaStream_t.
int LaunchUpdateBounds(const CacheAppendArgs& args, void* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHOOSE_PAGES_UPDATE_H_
