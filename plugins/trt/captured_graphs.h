// SPDX-License-Identifier: Apache-2.0
// Captured graphs of a plugin's runs that queue several kernels: replaying a graph costs the host as much as launching
// one kernel.
#ifndef STOF_PLUGINS_TRT_CAPTURED_GRAPHS_H_
#define STOF_PLUGINS_TRT_CAPTURED_GRAPHS_H_

#include <memory>
#include <vector>

#include "plugins/core/contract/op.h"

namespace stof::trt {

// Queues a run on context.stream; the kernels and their parameters depend on the addresses of the key alone.
using QueueRun = Status (*)(void* self, const RunContext& context);

// Graphs of one execution context, so for one thread at a time. Call Clear where types, shapes or kernel change.
class CapturedGraphs {
 public:
  CapturedGraphs();
  CapturedGraphs(const CapturedGraphs&) = delete;
  CapturedGraphs& operator=(const CapturedGraphs&) = delete;
  ~CapturedGraphs();
  // Captures the second run of a key if few other keys came since: hosts that alternate between a few buffers get a
  // graph for each. Queues the run as it is while the stream is being captured, and always once capture or replay has
  // failed.
  Status Run(const std::vector<const void*>& key, const RunContext& context, QueueRun queue, void* self);
  void Clear();

 private:
  struct CapturedGraph;
  Status Fallback(const Status& status, const RunContext& context, QueueRun queue, void* self);
  std::vector<std::unique_ptr<CapturedGraph>> graphs_;  // the most recently used one last
  std::vector<std::vector<const void*>> seen_;          // keys of one run, the latest one last
  int captured_ = 0;                                    // graphs since the shapes changed
};

}  // namespace stof::trt
#endif  // STOF_PLUGINS_TRT_CAPTURED_GRAPHS_H_
