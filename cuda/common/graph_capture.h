// SPDX-License-Identifier: Apache-2.0
// Graph capture: runs become CUDA graphs, to be replayed or only to load their kernels.
#ifndef STOF_CUDA_COMMON_GRAPH_CAPTURE_H_
#define STOF_CUDA_COMMON_GRAPH_CAPTURE_H_

#include <cstdint>

#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {

// Queues a run on context.stream, with memory from context.allocate.
using Queue = Status (*)(void* self, const RunContext& context);

// Makes the driver load the kernels of a run, once for each key. The driver loads a kernel at its first launch and may
// then wait until the device is idle. The run is captured with addresses of no memory, and never launched.
Status LoadKernels(uint64_t key, Queue queue, void* self, const RunContext& context);

// Captures a run as a graph that replays the same kernels with the same parameters. Sets *graph to nullptr where
// another thread captures: an enqueue does not wait for that. The run's memory and what context.keeper holds must
// outlive the graph. A graph may be dropped while the device runs it.
Status CaptureRun(Queue queue, void* self, const RunContext& context, void** graph);
Status ReplayGraph(void* graph, void* stream);
void DestroyCapturedGraph(void* graph);

// Whether the calling thread is in LoadKernels: its addresses name no memory, which must not be cleared.
bool IsOnlyLoading();

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_GRAPH_CAPTURE_H_
