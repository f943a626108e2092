// SPDX-License-Identifier: Apache-2.0
// Runs of one plugin that queue several kernels, kept as graphs: to launch a graph costs the host what one kernel does.
#ifndef STOF_PLUGINS_TRT_RECORDINGS_H_
#define STOF_PLUGINS_TRT_RECORDINGS_H_

#include <memory>
#include <vector>

#include "plugins/core/contract/op.h"

namespace stof::trt {

// Queues a run on context.stream. What it queues depends on the addresses of its key alone.
using QueueRun = Status (*)(void* self, const RunContext& context);

// Of one context, so of one thread at a time, for runs of the same types, shapes and kernel: Clear where these change.
class Recordings {
 public:
  Recordings();
  Recordings(const Recordings&) = delete;
  Recordings& operator=(const Recordings&) = delete;
  ~Recordings();
  // A key that comes again is recorded, if few others came since: hosts that take turns with several buffers get a
  // graph for each. What is being captured is queued, and everything once recording or launching has failed.
  Status Run(const std::vector<const void*>& key, const RunContext& context, QueueRun queue, void* self);
  void Clear();

 private:
  struct Recording;
  Status Fallback(const Status& status, const RunContext& context, QueueRun queue, void* self);
  std::vector<std::unique_ptr<Recording>> recordings_;  // the one used last at the end
  std::vector<std::vector<const void*>> seen_;          // keys that came once, the last one at the end
  int made_ = 0;                                        // since the shapes changed
};

}  // namespace stof::trt
#endif  // STOF_PLUGINS_TRT_RECORDINGS_H_
