// SPDX-License-Identifier: Apache-2.0
// Skip by score: the counts of a process.
#include "plugins/core/c_api/c_api.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/host/skip_scores.h"

extern "C" {

void stof_skip_counts(uint64_t counts[2]) {
  if (counts == nullptr) return;
  stof::SkipCounts all = stof::ReadSkipCounts();
  const stof::CudaBackend* const backend = stof::FindCudaBackend();
  if (backend != nullptr && backend->attention.add_skip_counts != nullptr) backend->attention.add_skip_counts(&all);
  counts[0] = all.scored;
  counts[1] = all.skipped;
}

void stof_reset_skip_counts(void) {
  stof::ResetSkipCounts();
  const stof::CudaBackend* const backend = stof::FindCudaBackend();
  if (backend != nullptr && backend->attention.reset_skip_counts != nullptr) backend->attention.reset_skip_counts();
}

}  // extern "C"
