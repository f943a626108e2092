// SPDX-License-Identifier: Apache-2.0
#include "plugins/trt/captured_graphs.h"

#include <algorithm>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/trt/log.h"

namespace stof::trt {
namespace {

constexpr size_t kMostKept = 4;
constexpr int kMostCaptured = 64;  // graphs; more mean that addresses change all the time

}  // namespace

struct CapturedGraphs::CapturedGraph {
  ~CapturedGraph() {
    if (graph != nullptr) FindCudaBackend()->destroy_graph(graph);
  }
  std::vector<const void*> key;
  Keeper keeper;  // of the masks and counters that the graph reads
  void* graph = nullptr;
};

CapturedGraphs::CapturedGraphs() = default;
CapturedGraphs::~CapturedGraphs() = default;

void CapturedGraphs::Clear() {
  graphs_.clear();
  seen_.clear();
  captured_ = 0;
}

Status CapturedGraphs::Run(const std::vector<const void*>& key, const RunContext& context, QueueRun queue, void* self) {
  const CudaBackend* backend = FindCudaBackend();
  if (backend == nullptr || backend->capture_graph == nullptr || backend->is_capturing(context.stream)) {
    return queue(self, context);
  }
  auto found = std::find_if(graphs_.begin(), graphs_.end(), [&](const auto& r) { return r->key == key; });
  if (found == graphs_.end()) {
    const auto before = std::find(seen_.begin(), seen_.end(), key);
    if (before == seen_.end()) {
      if (seen_.size() == kMostKept) seen_.erase(seen_.begin());
      seen_.push_back(key);
      return queue(self, context);
    }
    if (captured_ == kMostCaptured) return queue(self, context);
    auto captured = std::make_unique<CapturedGraph>();
    captured->key = key;
    RunContext own = context;
    own.keeper = &captured->keeper;
    const Status status = backend->capture_graph(queue, self, own, &captured->graph);
    if (!status.ok()) return Fallback(status, context, queue, self);
    if (captured->graph == nullptr) return queue(self, context);
    ++captured_;
    seen_.erase(before);
    if (graphs_.size() == kMostKept) graphs_.erase(graphs_.begin());
    graphs_.push_back(std::move(captured));
    found = graphs_.end() - 1;
  }
  std::rotate(found, found + 1, graphs_.end());
  const Status status = backend->replay_graph(graphs_.back()->graph, context.stream);
  return status.ok() ? status : Fallback(status, context, queue, self);
}

Status CapturedGraphs::Fallback(const Status& status, const RunContext& context, QueueRun queue, void* self) {
  Log(LogLevel::kInfo, "", "a run is queued, not replayed as a graph: " + status.message());
  graphs_.clear();
  captured_ = kMostCaptured;
  return queue(self, context);
}

}  // namespace stof::trt
