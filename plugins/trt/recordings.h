// SPDX-License-Identifier: Apache-2.0
// Runs of one plugin that queue several kernels, kept as graphs: to launch a graph costs the host what one kernel does.
#ifndef STOF_PLUGINS_TRT_RECORDINGS_H_
#define STOF_PLUGINS_TRT_RECORDINGS_H_

#include <memory>
#include <vector>

#include "plugins/core/op.h"

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
  // A key that comes twice in a row is recorded; what cannot be recorded, or is itself being captured, is queued.
  Status Run(const std::vector<const void*>& key, const RunContext& context, QueueRun queue, void* self);
  void Clear();

 private:
  struct Recording;
  std::vector<std::unique_ptr<Recording>> recordings_;  // the one used last at the end
  std::vector<const void*> last_;
  bool hopeless_ = false;
};

}  // namespace stof::trt
#endif  // STOF_PLUGINS_TRT_RECORDINGS_H_
