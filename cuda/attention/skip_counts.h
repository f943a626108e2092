// SPDX-License-Identifier: Apache-2.0
// Skip by score: counts that attention kernels leave in device memory. Plain C++.
#ifndef STOF_CUDA_ATTENTION_SKIP_COUNTS_H_
#define STOF_CUDA_ATTENTION_SKIP_COUNTS_H_

#include "plugins/core/base/status.h"
#include "plugins/core/host/skip_scores.h"

namespace stof {
namespace cuda {

// The counts of the current device, in its memory: SkipCounts::scored and ::skipped, to which kernels add. They live as
// long as the process. nullptr while kernels are only loaded. Works while a stream is captured.
Status GetSkipCounts(unsigned long long** counts);

// Adds the counts of all devices, after their work has ended; sets them to 0. Does nothing in a process that may not
// use CUDA, and leaves out devices that have failed or are being captured.
void AddSkipCounts(SkipCounts* counts);
void ResetSkipCounts();

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SKIP_COUNTS_H_
