// SPDX-License-Identifier: Apache-2.0
// Atomic tile counters: which streams share one, that each is 0 at first, and who frees it. The CUDA runtime is a fake
// (fake_cuda.h), so that no GPU is needed.
#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cuda/common/graph_capture.h"
#include "cuda/common/stream_memory.h"
#include "cuda/schedule/dynamic_counter.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_cuda/fake_cuda.h"

namespace stof::test {
namespace {

using cuda::TileCounters;

// The tile counters of a schedule, with zeros in host memory.
struct Counts {
  std::vector<int32_t> zeros = std::vector<int32_t>(TileCounters::kStreams * TileCounters::kStride, 0);
  TileCounters counts;
  Counts() { counts.SetMemory(zeros.data()); }
  bool IsZero(const int32_t* count) const { return count >= zeros.data() && count < zeros.data() + zeros.size(); }
  // A kernel that uses the counter leaves it 0.
  int32_t* Get(cudaStream_t stream, Keeper* keeper = nullptr) const {
    int32_t* count = nullptr;
    const Status status = counts.Get(stream, keeper, &count);
    CHECK(status.ok() && count != nullptr, status.message());
    CHECK(*count == 0, "a tile counter is ", *count, " at first");
    return count;
  }
};

// Makes the stream for uploads, which lives for ever, before anything is counted.
fake::Live Begin() {
  cudaStream_t uploads = nullptr;
  const Status status = cuda::UploadStream(&uploads);
  CHECK(status.ok(), status.message());
  return fake::GetLive();
}

TEST(TileCountersAreOneAStream) {
  const fake::Live before = Begin();
  constexpr size_t kMany = TileCounters::kStreams + 8;
  {
    const Counts counts;
    const std::vector<fake::Stream> streams(kMany);
    std::vector<int32_t*> found;
    for (const fake::Stream& stream : streams) found.push_back(counts.Get(stream.get()));
    const fake::Live live = fake::GetLive();
    CHECK(live.blocks == before.blocks + 8 && live.bytes == before.bytes + 32, live.blocks, " blocks");
    CHECK(std::set<int32_t*>(found.begin(), found.end()).size() == kMany);
    for (size_t i = 0; i < kMany; ++i) {
      CHECK(counts.IsZero(found[i]) == (i < TileCounters::kStreams), "count ", i);
      CHECK(i == 0 || !counts.IsZero(found[i]) || found[i] - found[i - 1] == TileCounters::kStride, "count ", i);
    }
    for (size_t i = kMany; i-- > 0;) CHECK(counts.Get(streams[i].get()) == found[i], "count ", i);
    CHECK(fake::GetLive().blocks == before.blocks + 8);
  }
  fake::CheckTidy(before, "counts");
  CountCases(kMany);
}

// Kernels of a destroyed stream may still use its counter; a new stream may have its handle.
TEST(TileCountersOfDestroyedStreamsAreNotReused) {
  const fake::Live before = Begin();
  {
    const Counts counts;
    auto stream = std::make_unique<fake::Stream>();
    const cudaStream_t handle = stream->get();
    const int32_t* count = counts.Get(handle);
    stream.reset();
    stream = std::make_unique<fake::Stream>();
    CHECK(stream->get() == handle);
    CHECK(counts.Get(handle) != count && counts.Get(nullptr) != count);
  }
  fake::CheckTidy(before, "counts");
  CountCases(1);
}

TEST(TileCountersOfCapturesBelongToTheKeeper) {
  const fake::Live before = Begin();
  int32_t* stays = nullptr;
  {
    const fake::Stream stream;
    auto keeper = std::make_unique<Keeper>();
    std::set<int32_t*> found;
    {
      const Counts counts;
      found.insert(counts.Get(stream.get()));
      const fake::Capture capture(stream.get());
      for (int i = 0; i < 3; ++i) found.insert(counts.Get(stream.get(), keeper.get()));
      CHECK(found.size() == 4, found.size(), " counts");
      CHECK(fake::GetLive().blocks == before.blocks + 3);
      stays = counts.Get(stream.get());
    }
    // The schedule is destroyed before the graph.
    CHECK(fake::GetLive().blocks == before.blocks + 4);
    keeper.reset();
    CHECK(fake::GetLive().blocks == before.blocks + 1 && *stays == 0);
  }
  CHECK(cudaFree(stays) == cudaSuccess);
  fake::CheckTidy(before, "counts");
  CountCases(4);
}

TEST(TileCountersAreNotMadeForLoading) {
  const fake::Live before = Begin();
  struct Loader {
    Counts counts;
    int runs = 0;
    static Status Queue(void* self, const RunContext& context) {
      auto& loader = *static_cast<Loader*>(self);
      ++loader.runs;
      int32_t* count = loader.counts.zeros.data();
      const Status status = loader.counts.counts.Get(static_cast<cudaStream_t>(context.stream), nullptr, &count);
      return status.ok() && count != nullptr ? Status::Error("there is a counter") : status;
    }
  } loader;
  const auto load = [&loader] { return cuda::LoadKernels(0xd4a3, Loader::Queue, &loader, RunContext()); };
  // A failed load is repeated, a successful one is not.
  fake::FailCall(1);
  CHECK(!load().ok() && loader.runs == 0, loader.runs, " runs");
  for (int i = 0; i < 2; ++i) {
    const Status status = load();
    CHECK(status.ok() && loader.runs == 1, status.message());
  }
  fake::CheckTidy(before, "counts");
  CountCases(3);
}

TEST(TileCountersThatFailLeaveNothing) {
  const fake::Live before = Begin();
  {
    const fake::Stream stream;
    const std::vector<fake::Stream> others(TileCounters::kStreams);
    const Counts counts;
    for (const fake::Stream& other : others) counts.Get(other.get());
    // Counters beyond the preallocated ones, and of a capture. A stream of unknown state counts as captured.
    const char* const tells = "cudaStreamIsCapturing";
    const std::map<std::string, std::string> making = {{"cudaGetDevice", "current device"},
                                                       {"cudaMalloc", "memory for a tile counter"},
                                                       {"cudaMemsetAsync", "clearing of a tile counter"},
                                                       {"cudaStreamSynchronize", "clearing of a tile counter"}};
    int32_t* count = nullptr;
    const auto get = [&](Keeper* keeper) {
      const Status status = counts.counts.Get(stream.get(), keeper, &count);
      CHECK((count != nullptr) == status.ok());
      return status;
    };
    std::map<std::string, std::string> wants = making;
    wants.emplace("cudaStreamGetId", "number of the stream");
    fake::FailEach(wants, [&] { return get(nullptr); }, tells);
    CHECK(*count == 0 && counts.Get(stream.get()) == count);
    Keeper keeper;
    const fake::Capture capture(stream.get());
    fake::FailEach(making, [&] { return get(&keeper); }, tells);
    CHECK(*count == 0 && counts.Get(stream.get(), &keeper) != count);
  }
  fake::CheckTidy(before, "counts");
  CountCases(9);
}

// A stream whose capture state CUDA cannot give counts as captured, and the error is cleared.
TEST(TileCountersOfUnknownStreamsAreTheirOwn) {
  const fake::Live before = Begin();
  {
    const fake::Stream stream;
    const Counts counts;
    const int32_t* const own = counts.Get(stream.get());
    Keeper keeper;
    fake::FailCall(1);
    CHECK(counts.Get(stream.get(), &keeper) != own);
    CHECK(fake::FailedCall() == "cudaStreamIsCapturing", fake::FailedCall());
    CHECK(counts.Get(stream.get(), &keeper) == own);
    // Such a run gets no stream-ordered memory; the stream is synchronized where that is possible.
    void* memory = nullptr;
    for (const auto& [call, name] : {std::pair(1, "cudaStreamIsCapturing"), std::pair(2, "cudaGetDevice")}) {
      fake::FailCall(call);
      CHECK(!cuda::AllocateAsync(stream.get(), 100, &memory) && memory == nullptr && fake::FailedCall() == name);
    }
    fake::FailCall(1);
    CHECK(!cuda::SynchronizeUnlessCapturing(stream.get()) && fake::FailedCall() == "cudaStreamIsCapturing");
    CHECK(!cuda::SynchronizeUnlessCapturing(stream.get()));
    const fake::Capture capture(stream.get());
    CHECK(cuda::SynchronizeUnlessCapturing(stream.get()));
  }
  fake::CheckTidy(before, "counts");
  CountCases(5);
}

TEST(TileCountersServeManyThreads) {
  const fake::Live before = Begin();
  constexpr size_t kThreads = 4, kMany = 2 * TileCounters::kStreams, kRounds = 20;
  for (size_t round = 0; round < kRounds; ++round) {
    const std::vector<fake::Stream> streams(kMany);
    const fake::Stream captured;
    const fake::Capture capture(captured.get());  // which no other thread may break, not even by freeing counters
    const Counts counts;
    Keeper keeper;
    std::vector<std::vector<int32_t*>> found(kThreads, std::vector<int32_t*>(kMany));
    fake::InThreads(kThreads, [&](size_t thread) {
      for (size_t i = 0; i < 3 * kMany; ++i) {
        const size_t at = (i + round * thread) % kMany;
        STOF_RETURN_IF_ERROR(counts.counts.Get(streams[at].get(), nullptr, &found[thread][at]));
        int32_t* own = nullptr;
        if (i % 16 == 0) STOF_RETURN_IF_ERROR(counts.counts.Get(captured.get(), &keeper, &own));
      }
      return Status();
    });
    for (const std::vector<int32_t*>& own : found) CHECK(own == found[0], "round ", round);
    const std::set<int32_t*> all(found[0].begin(), found[0].end());
    CHECK(all.size() == kMany && all.count(nullptr) == 0, "round ", round);
    for (const int32_t* count : all) CHECK(*count == 0, "round ", round);
    constexpr int64_t kMade = kMany - TileCounters::kStreams + kThreads * 3 * kMany / 16;
    CHECK(fake::GetLive().blocks == before.blocks + kMade, "round ", round);
  }
  fake::CheckTidy(before, "counts");
  CountCases(kRounds);
}

}  // namespace
}  // namespace stof::test
