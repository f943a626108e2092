// SPDX-License-Identifier: Apache-2.0
#include "plugins/trt/recordings.h"

#include <algorithm>

#include "plugins/core/cuda_backend.h"

namespace stof::trt {
namespace {

constexpr size_t kMostKept = 4;

}  // namespace

struct Recordings::Recording {
  ~Recording() {
    if (graph != nullptr) FindCudaBackend()->drop(graph);
  }
  std::vector<const void*> key;
  Keeper keeper;  // of the masks that the graph reads
  void* graph = nullptr;
};

Recordings::Recordings() = default;
Recordings::~Recordings() = default;

void Recordings::Clear() {
  recordings_.clear();
  last_.clear();
  hopeless_ = false;
}

Status Recordings::Run(const std::vector<const void*>& key, const RunContext& context, QueueRun queue, void* self) {
  const CudaBackend* backend = FindCudaBackend();
  if (hopeless_ || backend == nullptr || backend->record == nullptr || backend->captured(context.stream)) {
    return queue(self, context);
  }
  const auto found = std::find_if(recordings_.begin(), recordings_.end(), [&](const auto& r) { return r->key == key; });
  if (found != recordings_.end()) {
    std::rotate(found, found + 1, recordings_.end());
    return backend->launch(recordings_.back()->graph, context.stream);
  }
  if (last_ != key) {
    last_ = key;
    return queue(self, context);
  }
  auto made = std::make_unique<Recording>();
  made->key = key;
  RunContext own = context;
  own.keeper = &made->keeper;
  if (!backend->record(queue, self, own, &made->graph).ok()) {
    hopeless_ = true;
    return queue(self, context);
  }
  if (recordings_.size() == kMostKept) recordings_.erase(recordings_.begin());
  recordings_.push_back(std::move(made));
  return backend->launch(recordings_.back()->graph, context.stream);
}

}  // namespace stof::trt
