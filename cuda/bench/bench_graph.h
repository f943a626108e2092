// SPDX-License-Identifier: Apache-2.0
// For the programs that time kernels: an error ends them, one call is timed as a captured graph.
#ifndef STOF_CUDA_BENCH_BENCH_GRAPH_H_
#define STOF_CUDA_BENCH_BENCH_GRAPH_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK_CUDA(call)                                                                   \
  do {                                                                                     \
    const cudaError_t error_ = (call);                                                     \
    if (error_ != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
      std::exit(1);                                                                        \
    }                                                                                      \
  } while (0)

inline cudaGraph_t EndCapture(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  return graph;
}

// Microseconds of what `run` queues on the stream, one of `calls` in a graph: the median of 60 replays after 20 (of
// other numbers of replays, so many in a quarter). It is called once outside of the graph before. end_capture:
// gives the graph that the stream has captured.
template <typename Run, typename End = decltype(&EndCapture)>
double TimeGraph(cudaStream_t stream, int calls, const Run& run, int replays = 80,
                 const End& end_capture = EndCapture) {
  run();
  CHECK_CUDA(cudaStreamSynchronize(stream));
  cudaGraphExec_t executable = nullptr;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) run();
  const cudaGraph_t graph = end_capture(stream);
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin = nullptr, end = nullptr;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < replays; ++i) {
    CHECK_CUDA(cudaEventRecord(begin, stream));
    CHECK_CUDA(cudaGraphLaunch(executable, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= replays / 4) times.push_back(ms);
  }
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  CHECK_CUDA(cudaGraphDestroy(graph));
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return 1e3 * static_cast<double>(times[times.size() / 2]) / calls;
}

#endif  // STOF_CUDA_BENCH_BENCH_GRAPH_H_
