// SPDX-License-Identifier: Apache-2.0
// Runs that are recorded as graphs instead of being queued.
#ifndef STOF_CUDA_COMMON_GRAPH_CAPTURE_H_
#define STOF_CUDA_COMMON_GRAPH_CAPTURE_H_

#include <cstdint>

#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {

// Queues a run on context.stream, with memory from context.allocate.
using Queue = Status (*)(void* self, const RunContext& context);

// Has the driver load the kernels of a run, once for each key: it does so at a kernel's first launch, for which it may
// wait until the device is idle. The run is recorded, with addresses where nothing is, and never launched.
Status LoadKernels(uint64_t key, Queue queue, void* self, const RunContext& context);

// The run as a graph that can be launched again: the same kernels with the same parameters; nullptr where another
// thread records, for which an enqueue does not wait. Its memory and what context.keeper has come to hold must live as
// long; a graph may be dropped while the device works on it.
Status RecordRun(Queue queue, void* self, const RunContext& context, void** recorded);
Status LaunchRecorded(void* recorded, void* stream);
void DropRecorded(void* recorded);

// Whether the calling thread is in LoadKernels: its memory is no memory, and must not be cleared.
bool IsOnlyLoading();

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_GRAPH_CAPTURE_H_
