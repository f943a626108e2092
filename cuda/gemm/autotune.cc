// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/autotune.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <list>
#include <vector>

#include "cuda/common/status.h"

namespace stof {
namespace cuda {
namespace {

struct Handles {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  ~Handles() {
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
    if (stream == nullptr) return;
    cudaStreamSynchronize(stream);  // where timing failed half way, another stream writes the same memory next
    cudaStreamDestroy(stream);
  }
};
struct Graph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ~Graph() {
    if (executable != nullptr) cudaGraphExecDestroy(executable);
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
};

Status Check(cudaError_t error) { return ToStatus(error, "timing of a GEMM"); }

// `calls` of a candidate in a graph. *done as of the queue.
Status Capture(const QueueCandidate& queue, int index, int calls, const RunContext& context, const Handles& cuda,
               Graph* graph, bool* done) {
  STOF_RETURN_IF_ERROR(queue(index, context, done));  // once outside: it may load code
  if (!*done) return Status();
  STOF_RETURN_IF_ERROR(Check(cudaStreamSynchronize(cuda.stream)));
  STOF_RETURN_IF_ERROR(Check(cudaStreamBeginCapture(cuda.stream, cudaStreamCaptureModeRelaxed)));
  Status queued;
  for (int i = 0; i < calls && queued.ok() && *done; ++i) queued = queue(index, context, done);
  const cudaError_t ended = cudaStreamEndCapture(cuda.stream, &graph->graph);
  STOF_RETURN_IF_ERROR(queued);
  STOF_RETURN_IF_ERROR(Check(ended));
  if (!*done) return Status();
  return Check(cudaGraphInstantiate(&graph->executable, graph->graph, 0));
}

Status Replay(const Graph& graph, const Handles& cuda, float* ms) {
  STOF_RETURN_IF_ERROR(Check(cudaEventRecord(cuda.begin, cuda.stream)));
  STOF_RETURN_IF_ERROR(Check(cudaGraphLaunch(graph.executable, cuda.stream)));
  STOF_RETURN_IF_ERROR(Check(cudaEventRecord(cuda.end, cuda.stream)));
  STOF_RETURN_IF_ERROR(Check(cudaEventSynchronize(cuda.end)));
  return Check(cudaEventElapsedTime(ms, cuda.begin, cuda.end));
}

// Of the later half of them: what came before was colder.
float Median(std::vector<float> times) {
  times.erase(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Rounds, in each of which every candidate has its turn: what the clock is, it is for all. A GEMM of kLong seconds and
// more may be held back by the power limit, which takes its time; it is asked about for kHot milliseconds.
constexpr size_t kLeastRounds = 5, kMostRounds = 40;
constexpr double kLong = 20e-6;
constexpr float kHot = 40.0f, kMost = 500.0f;

}  // namespace

Status FindFastest(int count, const QueueCandidate& queue, const RunContext& context, double seconds, int* best) {
  *best = -1;
  Handles cuda;
  const RelaxedCapture relaxed;  // another thread may be capturing
  STOF_RETURN_IF_ERROR(Check(cudaStreamSynchronize(static_cast<cudaStream_t>(context.stream))));
  STOF_RETURN_IF_ERROR(Check(cudaStreamCreateWithFlags(&cuda.stream, cudaStreamNonBlocking)));
  STOF_RETURN_IF_ERROR(Check(cudaEventCreate(&cuda.begin)));
  STOF_RETURN_IF_ERROR(Check(cudaEventCreate(&cuda.end)));
  RunContext own = context;
  own.stream = cuda.stream;
  const int calls = static_cast<int>(std::clamp(2e-4 / std::max(seconds, 1e-7), 1.0, 10.0));
  struct Candidate {
    int index = 0;
    Graph graph;
    std::vector<float> times;
  };
  std::list<Candidate> candidates;
  for (int i = 0; i < count; ++i) {
    bool done = false;
    Candidate& candidate = candidates.emplace_back();
    candidate.index = i;
    const Status captured = Capture(queue, i, calls, own, cuda, &candidate.graph, &done);
    if (captured.ok() && done) continue;
    candidates.pop_back();  // the others are still to be timed
    cudaGetLastError();
  }
  float passed = 0;
  for (size_t round = 0; round < kMostRounds; ++round) {
    if (round >= kLeastRounds && (seconds < kLong || passed >= kHot)) break;
    if (round > 0 && passed >= kMost) break;
    for (Candidate& candidate : candidates) {
      float ms = 0;
      if (round == 0) STOF_RETURN_IF_ERROR(Replay(candidate.graph, cuda, &ms));
      STOF_RETURN_IF_ERROR(Replay(candidate.graph, cuda, &ms));
      candidate.times.push_back(ms);
      passed += ms;
    }
  }
  float least = 0;
  for (const Candidate& candidate : candidates) {
    const float ms = Median(candidate.times);
    if (*best < 0 || ms < 0.98f * least) *best = candidate.index, least = ms;
  }
  return Check(cudaStreamSynchronize(cuda.stream));
}

}  // namespace cuda
}  // namespace stof
