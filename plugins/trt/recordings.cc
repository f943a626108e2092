// SPDX-License-Identifier: Apache-2.0
#include "plugins/trt/recordings.h"

#include <algorithm>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/trt/log.h"

namespace stof::trt {
namespace {

constexpr size_t kMostKept = 4;
constexpr int kMostMade = 64;  // graphs; more mean that addresses change all the time

}  // namespace

struct Recordings::Recording {
  ~Recording() {
    if (graph != nullptr) FindCudaBackend()->destroy_graph(graph);
  }
  std::vector<const void*> key;
  Keeper keeper;  // of the masks and counters that the graph reads
  void* graph = nullptr;
};

Recordings::Recordings() = default;
Recordings::~Recordings() = default;

void Recordings::Clear() {
  recordings_.clear();
  seen_.clear();
  made_ = 0;
}

Status Recordings::Run(const std::vector<const void*>& key, const RunContext& context, QueueRun queue, void* self) {
  const CudaBackend* backend = FindCudaBackend();
  if (backend == nullptr || backend->capture_graph == nullptr || backend->is_capturing(context.stream)) {
    return queue(self, context);
  }
  auto found = std::find_if(recordings_.begin(), recordings_.end(), [&](const auto& r) { return r->key == key; });
  if (found == recordings_.end()) {
    const auto before = std::find(seen_.begin(), seen_.end(), key);
    if (before == seen_.end()) {
      if (seen_.size() == kMostKept) seen_.erase(seen_.begin());
      seen_.push_back(key);
      return queue(self, context);
    }
    if (made_ == kMostMade) return queue(self, context);
    auto made = std::make_unique<Recording>();
    made->key = key;
    RunContext own = context;
    own.keeper = &made->keeper;
    const Status status = backend->capture_graph(queue, self, own, &made->graph);
    if (!status.ok()) return Fallback(status, context, queue, self);
    if (made->graph == nullptr) return queue(self, context);
    ++made_;
    seen_.erase(before);
    if (recordings_.size() == kMostKept) recordings_.erase(recordings_.begin());
    recordings_.push_back(std::move(made));
    found = recordings_.end() - 1;
  }
  std::rotate(found, found + 1, recordings_.end());
  const Status status = backend->launch_graph(recordings_.back()->graph, context.stream);
  return status.ok() ? status : Fallback(status, context, queue, self);
}

Status Recordings::Fallback(const Status& status, const RunContext& context, QueueRun queue, void* self) {
  Log(LogLevel::kInfo, "", "a run is queued, not launched as a graph: " + status.message());
  recordings_.clear();
  made_ = kMostMade;
  return queue(self, context);
}

}  // namespace stof::trt
