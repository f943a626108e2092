// SPDX-License-Identifier: Apache-2.0
// Stream-ordered memory of runs: which blocks stay with a stream, and when they are freed. The CUDA runtime is a fake
// (fake_cuda.h), so that no GPU is needed.
#include <cuda_runtime.h>

#include <set>
#include <vector>

#include "cuda/common/stream_memory.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_cuda/fake_cuda.h"

namespace stof::test {
namespace {

constexpr size_t kUnit = size_t{2} << 20;

// A device with memory pools that no other test uses: what its streams keep stays for ever.
struct Device {
  explicit Device(int number) { CHECK(cudaSetDevice(fake::kFirstWithPools + number) == cudaSuccess); }
  ~Device() { cudaSetDevice(0); }
};

void* TakeBlock(cudaStream_t stream, size_t bytes) {
  void* memory = nullptr;
  CHECK(cuda::AllocateAsync(stream, bytes, &memory) && memory != nullptr, bytes, " bytes");
  CHECK(fake::IsInBlock(memory, bytes), bytes, " bytes");
  return memory;
}

}  // namespace

TEST(StreamMemoryStaysWithItsStream) {
  const Device device(0);
  const fake::Stream stream, other;
  void* const first = TakeBlock(stream.get(), 1000);
  cuda::FreeAsync(stream.get(), first);
  const fake::Asked before = fake::GetAsked();
  for (const size_t bytes : {size_t{1}, size_t{1000}, kUnit}) {
    void* const again = TakeBlock(stream.get(), bytes);
    CHECK(again == first, bytes, " bytes");
    cuda::FreeAsync(stream.get(), again);
  }
  CHECK(fake::GetAsked().allocations == before.allocations);
  void* const others = TakeBlock(other.get(), 1000);
  CHECK(others != first);
  cuda::FreeAsync(other.get(), others);
}

TEST(StreamMemoryIsNeverShared) {
  const Device device(1);
  const fake::Stream stream;
  std::set<void*> blocks;
  for (int i = 0; i < 3; ++i) blocks.insert(TakeBlock(stream.get(), 100));
  CHECK(blocks.size() == 3, blocks.size());
  for (void* block : blocks) cuda::FreeAsync(stream.get(), block);
}

TEST(StreamMemoryGrows) {
  const Device device(2);
  const fake::Stream stream;
  const fake::Live before = fake::GetLive();
  for (const size_t bytes : {size_t{10}, 2 * kUnit, 3 * kUnit - 1, 8 * kUnit}) {
    cuda::FreeAsync(stream.get(), TakeBlock(stream.get(), bytes));
    const fake::Live live = fake::GetLive();
    // The smaller block was freed.
    CHECK(live.blocks == before.blocks + 1, live.blocks - before.blocks, " blocks after ", bytes, " bytes");
  }
  // Larger blocks than the largest that is kept are freed at once.
  cuda::FreeAsync(stream.get(), TakeBlock(stream.get(), 8 * kUnit + 1));
  CHECK(fake::GetLive().blocks == before.blocks + 1);
}

TEST(StreamMemoryOfAStreamThatEndedGoesToNobody) {
  const Device device(3);
  void* first = nullptr;
  const cudaStream_t handle = [&] {
    const fake::Stream stream;
    first = TakeBlock(stream.get(), 100);
    cuda::FreeAsync(stream.get(), first);
    return stream.get();
  }();
  const fake::Stream next;
  CHECK(next.get() == handle, "the fake gives the handle again");
  void* const second = TakeBlock(next.get(), 100);
  CHECK(second != first);  // work of the stream that ended may still use it
  cuda::FreeAsync(next.get(), second);
}

TEST(StreamMemoryThatIsKeptHasABound) {
  const Device device(4);
  const fake::Live before = fake::GetLive();
  const std::vector<fake::Stream> streams(100);
  for (const fake::Stream& stream : streams) cuda::FreeAsync(stream.get(), TakeBlock(stream.get(), 100));
  const int64_t kept = fake::GetLive().bytes - before.bytes;
  CHECK(kept > 0 && kept <= int64_t{64} << 20, kept, " bytes");
  // One that found no room allocates in each run, until blocks that nobody uses give way.
  const cudaStream_t last = streams.back().get();
  const auto allocates = [last] {
    const int64_t allocations = fake::GetAsked().allocations;
    cuda::FreeAsync(last, TakeBlock(last, 100));
    return fake::GetAsked().allocations > allocations;
  };
  CHECK(allocates() && allocates());
  for (int i = 0; i < 1 << 16; ++i) cuda::FreeAsync(streams[0].get(), TakeBlock(streams[0].get(), 100));
  CHECK(allocates() && !allocates());
  CHECK(fake::GetLive().bytes - before.bytes == int64_t{4} << 20, "the blocks of two streams are left");
}

// Entries of the table without a block, and blocks in use, are no idle blocks: nobody waits for the device to free
// them.
TEST(StreamMemoryWithoutIdleBlocksDoesNotWaitForTheDevice) {
  const Device device(7);
  const std::vector<fake::Stream> streams(4);
  const fake::Stream used, late;
  std::vector<void*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(TakeBlock(used.get(), 8 * kUnit - kUnit * static_cast<size_t>(i)));
  for (int i = 0; i < 1 << 16; ++i) {
    const cudaStream_t stream = streams[static_cast<size_t>(i % 4)].get();
    cuda::FreeAsync(stream, TakeBlock(stream, kUnit));
  }
  const fake::Asked before = fake::GetAsked();
  cuda::FreeAsync(late.get(), TakeBlock(late.get(), 8 * kUnit));
  CHECK(fake::GetAsked().allocations == before.allocations + 1);
  CHECK(fake::GetAsked().device_waits == before.device_waits);
  for (void* block : blocks) cuda::FreeAsync(used.get(), block);
}

TEST(StreamMemoryIsNotGivenToACapturedStream) {
  const Device device(5);
  const fake::Stream stream;
  cuda::FreeAsync(stream.get(), TakeBlock(stream.get(), 100));
  const fake::Asked before = fake::GetAsked();
  const fake::Capture capture(stream.get());
  void* memory = &memory;
  CHECK(!cuda::AllocateAsync(stream.get(), 100, &memory) && memory == nullptr);
  CHECK(fake::GetAsked().wrong == before.wrong);
}

TEST(StreamMemoryOfThreads) {
  // Threads that share a stream never have a block at the same time: each writes its number and finds it again.
  const fake::Stream stream;
  fake::InThreads(4, [&](size_t thread) {
    const Device device(6);
    for (int i = 0; i < 200; ++i) {
      auto* const block = static_cast<char*>(TakeBlock(stream.get(), 64));
      for (int j = 0; j < 64; ++j) block[j] = static_cast<char>(thread);
      for (int j = 0; j < 64; ++j) CHECK(block[j] == static_cast<char>(thread), "thread ", thread);
      cuda::FreeAsync(stream.get(), block);
    }
    return Status();
  });
}

}  // namespace stof::test
