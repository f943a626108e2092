// SPDX-License-Identifier: Apache-2.0
// Counts of drawn rows: who shares one, that each is 0 at first, and who frees it. The runtime is the tests' own
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
#include "tests/cpp/fake_cuda.h"

namespace stof::test {
namespace {

using cuda::DrawCounts;

// A mask's counts, whose zeros are the host's here.
struct Counts {
  std::vector<int32_t> zeros = std::vector<int32_t>(DrawCounts::kStreams * DrawCounts::kApart, 0);
  DrawCounts counts;
  Counts() { counts.Begin(zeros.data()); }
  bool IsZero(const int32_t* count) const { return count >= zeros.data() && count < zeros.data() + zeros.size(); }
  // A kernel that uses the count leaves it 0.
  int32_t* Get(cudaStream_t stream, Keeper* keeper = nullptr) const {
    int32_t* count = nullptr;
    const Status status = counts.Get(stream, keeper, &count);
    CHECK(status.ok() && count != nullptr, status.message());
    CHECK(*count == 0, "a count is ", *count, " at first");
    return count;
  }
};

// Uploads have a stream that is made once and stays.
fake::Live Begin() {
  cudaStream_t uploads = nullptr;
  const Status status = cuda::UploadStream(&uploads);
  CHECK(status.ok(), status.message());
  return fake::GetLive();
}

TEST(DrawCountsAreOneForEachStream) {
  const fake::Live before = Begin();
  constexpr size_t kMany = DrawCounts::kStreams + 8;
  {
    const Counts counts;
    const std::vector<fake::Stream> streams(kMany);
    std::vector<int32_t*> found;
    for (const fake::Stream& stream : streams) found.push_back(counts.Get(stream.get()));
    const fake::Live live = fake::GetLive();
    CHECK(live.blocks == before.blocks + 8 && live.bytes == before.bytes + 32, live.blocks, " blocks");
    CHECK(std::set<int32_t*>(found.begin(), found.end()).size() == kMany);
    for (size_t i = 0; i < kMany; ++i) {
      CHECK(counts.IsZero(found[i]) == (i < DrawCounts::kStreams), "count ", i);
      CHECK(i == 0 || !counts.IsZero(found[i]) || found[i] - found[i - 1] == DrawCounts::kApart, "count ", i);
    }
    for (size_t i = kMany; i-- > 0;) CHECK(counts.Get(streams[i].get()) == found[i], "count ", i);
    CHECK(fake::GetLive().blocks == before.blocks + 8);
  }
  fake::CheckTidy(before, "counts");
  CountCases(kMany);
}

// A count may still be in use by the kernels of a stream that is gone, whose handle another one has now.
TEST(DrawCountsAreNotThoseOfAStreamThatIsGone) {
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

TEST(DrawCountsOfCapturesAreTheirKeepers) {
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
    // The mask is gone, and the graph is not.
    CHECK(fake::GetLive().blocks == before.blocks + 4);
    keeper.reset();
    CHECK(fake::GetLive().blocks == before.blocks + 1 && *stays == 0);
  }
  CHECK(cudaFree(stays) == cudaSuccess);
  fake::CheckTidy(before, "counts");
  CountCases(4);
}

TEST(DrawCountsAreNotMadeForLoading) {
  const fake::Live before = Begin();
  struct Loader {
    Counts counts;
    int runs = 0;
    static Status Queue(void* self, const RunContext& context) {
      auto& loader = *static_cast<Loader*>(self);
      ++loader.runs;
      int32_t* count = loader.counts.zeros.data();
      const Status status = loader.counts.counts.Get(static_cast<cudaStream_t>(context.stream), nullptr, &count);
      return status.ok() && count != nullptr ? Status::Error("a count is there") : status;
    }
  } loader;
  const auto load = [&loader] { return cuda::LoadKernels(0xd4a3, Loader::Queue, &loader, RunContext()); };
  // What failed is tried again, what succeeded is not.
  fake::FailCall(1);
  CHECK(!load().ok() && loader.runs == 0, loader.runs, " runs");
  for (int i = 0; i < 2; ++i) {
    const Status status = load();
    CHECK(status.ok() && loader.runs == 1, status.message());
  }
  fake::CheckTidy(before, "counts");
  CountCases(3);
}

TEST(DrawCountsThatFailLeaveNothing) {
  const fake::Live before = Begin();
  {
    const fake::Stream stream;
    const std::vector<fake::Stream> others(DrawCounts::kStreams);
    const Counts counts;
    for (const fake::Stream& other : others) counts.Get(other.get());
    // Beyond those that are there, and of a capture. A stream that does not tell is taken for one that is captured.
    const char* const tells = "cudaStreamIsCapturing";
    const std::map<std::string, std::string> making = {{"cudaGetDevice", "current device"},
                                                       {"cudaMalloc", "memory for a count of drawn rows"},
                                                       {"cudaMemsetAsync", "clearing of a count of drawn rows"},
                                                       {"cudaStreamSynchronize", "clearing of a count of drawn rows"}};
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

// A stream of which CUDA cannot say whether it is captured is taken for captured, and nobody finds the error.
TEST(DrawCountsOfUnknownStreamsAreTheirOwn) {
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
    // Nor does a run get memory in its order; its end is waited for, where that is possible.
    void* memory = nullptr;
    for (const auto& [call, name] : {std::pair(1, "cudaStreamIsCapturing"), std::pair(2, "cudaGetDevice")}) {
      fake::FailCall(call);
      CHECK(!cuda::Take(stream.get(), 100, &memory) && memory == nullptr && fake::FailedCall() == name);
    }
    fake::FailCall(1);
    CHECK(!cuda::CapturedOrDone(stream.get()) && fake::FailedCall() == "cudaStreamIsCapturing");
    CHECK(!cuda::CapturedOrDone(stream.get()));
    const fake::Capture capture(stream.get());
    CHECK(cuda::CapturedOrDone(stream.get()));
  }
  fake::CheckTidy(before, "counts");
  CountCases(5);
}

TEST(DrawCountsServeManyThreads) {
  const fake::Live before = Begin();
  constexpr size_t kThreads = 4, kMany = 2 * DrawCounts::kStreams, kRounds = 20;
  for (size_t round = 0; round < kRounds; ++round) {
    const std::vector<fake::Stream> streams(kMany);
    const fake::Stream captured;
    const fake::Capture capture(captured.get());  // which nobody disturbs, those that free counts neither
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
    constexpr int64_t kMade = kMany - DrawCounts::kStreams + kThreads * 3 * kMany / 16;
    CHECK(fake::GetLive().blocks == before.blocks + kMade, "round ", round);
  }
  fake::CheckTidy(before, "counts");
  CountCases(kRounds);
}

}  // namespace
}  // namespace stof::test
