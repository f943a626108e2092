// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/fake_cuda/fake_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/check.h"

// The runtime's handles point to these.
struct CUstream_st {
  unsigned long long id = 0;
  bool open = false;
};
struct CUevent_st {
  cudaStream_t stream = nullptr;
  uint64_t behind = 0;  // the stream's work up to this number
};
struct CUgraph_st {};
struct CUgraphExec_st {};
struct CUmemPoolHandle_st {};

namespace stof::test::fake {
namespace {

constexpr size_t kAlignment = 256;  // as cudaMalloc's
constexpr int kFresh = 0xaa;
constexpr int kDevices = 64;

// Bytes that come to lie at `to`.
struct Work {
  uint64_t number;
  cudaStream_t stream;
  char* to;
  std::vector<char> bytes;
};

struct Runtime {
  std::mutex mutex;
  std::map<char*, size_t> blocks;
  std::list<CUstream_st> streams;
  std::map<cudaStream_t, cudaStreamCaptureMode> captured;
  std::set<cudaEvent_t> events;
  std::list<Work> works;
  uint64_t numbers = 0;
  unsigned long long ids = 1;  // 1: the stream nullptr
  int64_t graphs = 0;
  Asked asked;
  int fails_in = 0;
  std::string except;
  std::string failed;
};

Runtime& It() {
  static auto* runtime = new Runtime;  // never destroyed: static objects may free memory at exit
  return *runtime;
}

thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

cudaError_t Refuse(cudaError_t error) {
  last_error = error;
  return error;
}

cudaError_t Wrong(cudaError_t error) {
  ++It().asked.wrong;
  return Refuse(error);
}

// One call of the runtime, which has it for itself. name: nullptr where none fails.
class Call {
 public:
  explicit Call(const char* name = nullptr) : lock_(It().mutex) {
    Runtime& it = It();
    if (name == nullptr || it.fails_in == 0 || it.except == name || --it.fails_in > 0) return;
    it.failed = name;
    fails_ = true;
  }
  bool fails() const { return fails_; }

 private:
  std::lock_guard<std::mutex> lock_;
  bool fails_ = false;
};

#define STOF_FAKE_CALL(name) \
  const Call call(name);     \
  if (call.fails()) return Refuse(cudaErrorUnknown)

bool Holds(const void* begin, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(begin);
  return std::any_of(It().blocks.begin(), It().blocks.end(), [at, bytes](const auto& block) {
    const auto first = reinterpret_cast<uintptr_t>(block.first);
    return at >= first && at - first <= block.second && bytes <= block.second - (at - first);
  });
}

bool IsCaptured(cudaStream_t stream) { return It().captured.count(stream) != 0; }

// Whether somebody's capture forbids the thread what might disturb it.
bool IsForbidden() {
  const auto& captured = It().captured;
  return mode != cudaStreamCaptureModeRelaxed && std::any_of(captured.begin(), captured.end(), [](const auto& one) {
           return one.second == cudaStreamCaptureModeGlobal;
         });
}

template <typename Which>
void Do(const Which& which) {
  It().works.remove_if([&which](const Work& work) {
    if (!which(work)) return false;
    std::copy(work.bytes.begin(), work.bytes.end(), work.to);
    return true;
  });
}

void DoAll() {
  Do([](const Work&) { return true; });
}

bool Precedes(const Work& work, const CUevent_st& event) {
  return work.stream == event.stream && work.number <= event.behind;
}

cudaError_t Queue(void* to, std::vector<char> bytes, cudaStream_t stream) {
  // What a captured stream is given would be its graph's, and graphs of this runtime have nothing.
  if (IsCaptured(stream)) return Wrong(cudaErrorStreamCaptureUnsupported);
  if (!Holds(to, bytes.size())) return Wrong(cudaErrorInvalidValue);
  It().works.push_back({++It().numbers, stream, static_cast<char*>(to), std::move(bytes)});
  return cudaSuccess;
}

}  // namespace

Live GetLive() {
  Runtime& it = It();
  const std::lock_guard<std::mutex> lock(it.mutex);
  Live live;
  live.blocks = static_cast<int64_t>(it.blocks.size());
  for (const auto& block : it.blocks) live.bytes += static_cast<int64_t>(block.second);
  live.streams =
      std::count_if(it.streams.begin(), it.streams.end(), [](const CUstream_st& stream) { return stream.open; });
  live.events = static_cast<int64_t>(it.events.size());
  live.graphs = it.graphs;
  return live;
}

Asked GetAsked() {
  const std::lock_guard<std::mutex> lock(It().mutex);
  return It().asked;
}

void FailCall(int n, const std::string& except) {
  const std::lock_guard<std::mutex> lock(It().mutex);
  It().fails_in = n;
  It().except = except;
  It().failed.clear();
}

std::string FailedCall() {
  const std::lock_guard<std::mutex> lock(It().mutex);
  return It().failed;
}

bool IsInBlock(const void* begin, size_t bytes) {
  const std::lock_guard<std::mutex> lock(It().mutex);
  return Holds(begin, bytes);
}

void Finish() {
  const std::lock_guard<std::mutex> lock(It().mutex);
  DoAll();
}

Stream::Stream() { CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess); }

Capture::Capture(cudaStream_t stream) : stream_(stream) {
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
}

Capture::~Capture() {
  cudaGraph_t graph = nullptr;
  if (cudaStreamEndCapture(stream_, &graph) == cudaSuccess) cudaGraphDestroy(graph);
}

void CheckTidy(const Live& before, const std::string& where) {
  const Live now = GetLive();
  CHECK(now.blocks == before.blocks && now.bytes == before.bytes, where, ": ", now.blocks, " blocks instead of ",
        before.blocks, ", ", now.bytes, " bytes instead of ", before.bytes);
  CHECK(now.events == before.events, where, ": ", now.events, " events instead of ", before.events);
  CHECK(now.streams == before.streams, where, ": ", now.streams, " streams instead of ", before.streams);
  CHECK(now.graphs == before.graphs, where, ": ", now.graphs, " graphs instead of ", before.graphs);
  CHECK(GetAsked().wrong == 0, where, ": ", GetAsked().wrong, " calls were wrong");
  CHECK(cudaPeekAtLastError() == cudaSuccess, where, ": an error is left to others");
  CHECK(mode == cudaStreamCaptureModeGlobal, where, ": the thread's mode of captures is not what it was");
}

void FailEach(const std::map<std::string, std::string>& wants, const std::function<Status()>& attempt,
              const std::string& except) {
  std::map<std::string, std::string> left = wants;
  for (int n = 1;; ++n) {
    const Live before = GetLive();
    FailCall(n, except);
    const Status status = attempt();
    const std::string failed = FailedCall();
    FailCall(0);
    CHECK(status.ok() == failed.empty(), failed, ": ", status.message());
    if (failed.empty()) break;
    const auto want = wants.find(failed);
    CHECK(want != wants.end() && status.message().rfind(want->second + ": CUDA error ", 0) == 0, failed, " fails with ",
          status.message());
    CheckTidy(before, failed);
    left.erase(failed);
  }
  CHECK(left.empty(), left.empty() ? "" : left.begin()->first, " was not called");
}

void InThreads(size_t threads, const std::function<Status(size_t thread)>& run) {
  std::atomic<size_t> waiting{threads};
  std::vector<Status> statuses(threads);
  std::vector<std::thread> team;
  for (size_t t = 0; t < threads; ++t) {
    team.emplace_back([&, t] {
      --waiting;
      while (waiting > 0) std::this_thread::yield();
      try {
        statuses[t] = run(t);
      } catch (const Failure& failure) {
        statuses[t] = Status::Error(failure.message);
      }
    });
  }
  for (std::thread& thread : team) thread.join();
  for (const Status& status : statuses) CHECK(status.ok(), status.message());
}

}  // namespace stof::test::fake

namespace fake = stof::test::fake;
using fake::Call;
using fake::Do;
using fake::DoAll;
using fake::IsCaptured;
using fake::IsForbidden;
using fake::It;
using fake::Refuse;
using fake::Wrong;

extern "C" {

// ---- what cannot fail ----
const char* cudaGetErrorString(cudaError_t) { return "an error of the tests"; }

cudaError_t cudaGetLastError() {
  const cudaError_t error = fake::last_error;
  fake::last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return fake::last_error; }

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= fake::kDevices) return Refuse(cudaErrorInvalidDevice);
  fake::current_device = device;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, fake::mode);
  return cudaSuccess;
}

// ---- memory ----
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  STOF_FAKE_CALL("cudaMalloc");
  if (IsForbidden()) return Wrong(cudaErrorStreamCaptureUnsupported);
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  // Of just as many bytes, whatever the alignment: the next one is nobody's.
  if (posix_memalign(memory, fake::kAlignment, bytes) != 0) return Refuse(cudaErrorMemoryAllocation);
  std::memset(*memory, fake::kFresh, bytes);
  It().blocks.emplace(static_cast<char*>(*memory), bytes);
  ++It().asked.allocations;
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  const Call call;
  if (memory == nullptr) return cudaSuccess;
  if (IsForbidden()) return Wrong(cudaErrorStreamCaptureUnsupported);
  DoAll();
  if (It().blocks.erase(static_cast<char*>(memory)) == 0) return Wrong(cudaErrorInvalidValue);
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  STOF_FAKE_CALL("cudaMemcpyAsync");
  if (kind != cudaMemcpyHostToDevice) return Wrong(cudaErrorNotSupported);
  ++It().asked.copies;
  // Pageable memory is read before the call returns.
  const auto* begin = static_cast<const char*>(from);
  return fake::Queue(to, std::vector<char>(begin, begin + bytes), stream);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  STOF_FAKE_CALL("cudaMemsetAsync");
  return fake::Queue(to, std::vector<char>(bytes, static_cast<char>(value)), stream);
}

// ---- devices and streams ----
cudaError_t cudaGetDevice(int* device) {
  STOF_FAKE_CALL("cudaGetDevice");
  *device = fake::current_device;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  STOF_FAKE_CALL("cudaStreamCreateWithFlags");
  // The handle of one that is gone, if there is one, as drivers may do.
  auto& streams = It().streams;
  auto place = std::find_if(streams.begin(), streams.end(), [](const CUstream_st& one) { return !one.open; });
  if (place == streams.end()) place = streams.emplace(streams.end());
  *place = {++It().ids, true};
  *stream = &*place;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Call call;
  if (stream == nullptr || !stream->open) return Wrong(cudaErrorInvalidResourceHandle);
  Do([stream](const fake::Work& work) { return work.stream == stream; });
  It().captured.erase(stream);
  stream->open = false;
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  STOF_FAKE_CALL("cudaStreamGetId");
  *id = stream == nullptr ? 1 : stream->id;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  STOF_FAKE_CALL("cudaStreamSynchronize");
  if (IsCaptured(stream)) return Wrong(cudaErrorStreamCaptureUnsupported);
  Do([stream](const fake::Work& work) { return work.stream == stream; });
  return cudaSuccess;
}

// ---- events ----
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  STOF_FAKE_CALL("cudaEventCreateWithFlags");
  *event = new CUevent_st;
  It().events.insert(*event);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Call call;
  if (It().events.erase(event) == 0) return Wrong(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  STOF_FAKE_CALL("cudaEventRecord");
  if (IsCaptured(stream)) return Wrong(cudaErrorStreamCaptureUnsupported);
  event->stream = stream;
  event->behind = It().numbers;
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  STOF_FAKE_CALL("cudaEventQuery");
  if (IsForbidden()) return Wrong(cudaErrorStreamCaptureUnsupported);
  const auto& works = It().works;
  const bool waits =
      std::any_of(works.begin(), works.end(), [event](const fake::Work& work) { return fake::Precedes(work, *event); });
  if (waits) fake::last_error = cudaErrorNotReady;  // as if it were an error
  return waits ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  STOF_FAKE_CALL("cudaEventSynchronize");
  if (IsForbidden()) return Wrong(cudaErrorStreamCaptureUnsupported);
  Do([event](const fake::Work& work) { return fake::Precedes(work, *event); });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned int) {
  STOF_FAKE_CALL("cudaStreamWaitEvent");
  if (IsCaptured(stream)) return Wrong(cudaErrorStreamCaptureIsolation);  // the event is of the world outside
  ++It().asked.waits;
  return cudaSuccess;
}

// ---- captures ----
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  STOF_FAKE_CALL("cudaStreamIsCapturing");
  *status = IsCaptured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  STOF_FAKE_CALL("cudaStreamBeginCapture");
  if (stream == nullptr || !It().captured.emplace(stream, mode).second) return Wrong(cudaErrorIllegalState);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  STOF_FAKE_CALL("cudaStreamEndCapture");
  if (It().captured.erase(stream) == 0) return Wrong(cudaErrorIllegalState);
  *graph = new CUgraph_st;
  ++It().graphs;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t, unsigned long long) {
  STOF_FAKE_CALL("cudaGraphInstantiate");
  *executable = new CUgraphExec_st;
  ++It().graphs;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Call call;
  delete graph;
  --It().graphs;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const Call call;
  delete executable;
  --It().graphs;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  STOF_FAKE_CALL("cudaGraphLaunch");
  return cudaSuccess;
}

// ---- pools: devices have them from kFirstWithPools on ----
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  STOF_FAKE_CALL("cudaDeviceGetAttribute");
  *value = device >= fake::kFirstWithPools ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  static CUmemPoolHandle_st all;  // nobody looks into it
  *pool = &all;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }

cudaError_t cudaMallocFromPoolAsync(void** memory, size_t bytes, cudaMemPool_t, cudaStream_t stream) {
  STOF_FAKE_CALL("cudaMallocFromPoolAsync");
  if (IsCaptured(stream)) return Wrong(cudaErrorStreamCaptureUnsupported);
  if (posix_memalign(memory, fake::kAlignment, bytes) != 0) return Refuse(cudaErrorMemoryAllocation);
  std::memset(*memory, fake::kFresh, bytes);
  It().blocks.emplace(static_cast<char*>(*memory), bytes);
  ++It().asked.allocations;
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
  STOF_FAKE_CALL("cudaFreeAsync");
  if (It().blocks.erase(static_cast<char*>(memory)) == 0) return Wrong(cudaErrorInvalidValue);
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  STOF_FAKE_CALL("cudaDeviceSynchronize");
  ++It().asked.device_waits;
  if (IsForbidden()) return Wrong(cudaErrorStreamCaptureUnsupported);
  DoAll();
  return cudaSuccess;
}

}  // extern "C"
