// SPDX-License-Identifier: Apache-2.0
// Dynamic tile scheduling on a GPU: runs of one stream that share a tile counter, concurrent runs, captured runs.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/schedule/tile_schedule.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/mask/block_mask_builder.h"
#include "tests/cpp/attention/cuda_attention_cases.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"

namespace stof {
namespace {

constexpr int64_t kHeads = 32, kRows = 8192, kSize = 128, kCount = kHeads * kRows * kSize;
constexpr char kDynamic[] = "sm90-128x64x1", kStatic[] = "sm90-128x128x1";  // kernels of heads of 128
using Values16 = std::vector<uint16_t>;

struct Device {
  std::vector<void*> blocks;
  cudaStream_t streams[2] = {};
  Device() {
    for (cudaStream_t& stream : streams) {
      CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    }
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() {
    for (void* block : blocks) cudaFree(block);
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
  }
  void* Take(size_t bytes) {
    void* block = test::attention::Allocate(&blocks, bytes);
    CHECK(block != nullptr, "no device memory for ", bytes, " bytes");
    return block;
  }
  // Normal numbers below 2, in periods that no row or head has.
  void* Random(test::Random* random) {
    Values16 period(1000003), all(kCount);
    for (uint16_t& x : period) {
      x = static_cast<uint16_t>(random->Range(0, 1) << 15 | random->Range(10, 15) << 10 | random->Range(0, 1023));
    }
    for (size_t i = 0; i < all.size(); ++i) all[i] = period[i % period.size()];
    return test::attention::OnDevice(&blocks, all.data(), 2 * all.size());
  }
};

Values16 Read(const void* from) {
  Values16 values(kCount);
  CHECK(cudaMemcpy(values.data(), from, 2 * values.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
  return values;
}

TEST(CudaDynamicTilesInTurnAndConcurrently) {
  Device device;
  test::Random random(71);
  const char* const text = "abs(q - k) <= 128";
  std::shared_ptr<const AttentionMask> mask;
  CHECK(MakeAttentionMask(text, {}, &mask).ok());
  const ExprSizes sizes = {1, kHeads, kRows, kRows, 0};
  // The schedule has dynamic tiles.
  cuda::KernelRequest request;
  request.name = kDynamic;
  const cuda::KernelEntry* const found = cuda::FindRequested(test::attention::ScheduledKernels(kSize), request);
  CHECK(found != nullptr, "no kernel ", kDynamic, " in this build");
  const cuda::KernelEntry& kernel = *found;
  BlockMask block;
  CHECK(BuildBlockMask(mask->parts.fixed, sizes, kernel.rows, kernel.keys, &block).ok());
  int sm_count = 0, major = 0;
  CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == 9,
        "dynamic scheduling needs compute capability 9.0");
  CHECK(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess);
  const int ctas = sm_count * kernel.ctas_per_sm;
  const cuda::TileSchedule schedule =
      cuda::MakeTileSchedule(block, cuda::MakeTileList(block), 1, kHeads, ctas, kHeads, kernel.cost, true);
  CHECK(schedule.dynamic_tiles() > ctas, schedule.dynamic_tiles(), " dynamic tiles for ", ctas, " CTAs");
  AttentionArgs args;
  args.shape = {1, kHeads, kHeads, kRows, kRows, kSize, kSize, DType::kF16};
  CHECK(Check(args).ok(), Check(args).message());
  args.scores.scale = 0.0883883476f;
  args.query.stride = args.output.stride = args.key.stride = args.value.stride = {kCount, kRows * kSize, kSize};
  args.query.data = device.Random(&random), args.key.data = device.Random(&random),
  args.value.data = device.Random(&random);
  void* outputs[4];
  for (void*& output : outputs) output = device.Take(2 * kCount);
  const auto clear = [&] {
    for (void* output : outputs) CHECK(cudaMemset(output, 0xff, 2 * kCount) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
  };
  Keeper keeper;  // holds masks and tile counters of captured runs
  const auto queue = [&](int output, cudaStream_t stream) {
    args.output.data = outputs[output];
    RunContext context;
    context.on_cuda = true;
    context.stream = stream;
    context.keeper = &keeper;
    context.allocate = [](void*, size_t) -> void* { return nullptr; };  // nothing is needed
    const Status status = FindCudaBackend()->attention.run(args, nullptr, *mask, sizes, {}, context);
    CHECK(status.ok(), status.message());
  };
  clear();
  {
    const test::ForcedKernel forced(cuda::AttentionRequests(), kStatic);
    queue(1, device.streams[0]);
  }
  const test::ForcedKernel forced(cuda::AttentionRequests(), kDynamic);
  queue(0, device.streams[0]);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  const Values16 alone = Read(outputs[0]), other = Read(outputs[1]);
  CHECK(std::count(alone.begin(), alone.end(), uint16_t{0xffff}) == 0, "some outputs are not written");
  double most = 0;
  for (size_t i = 0; i < alone.size(); ++i) {
    const double own = test::LoadFloat(DType::kF16, &alone[i]), its = test::LoadFloat(DType::kF16, &other[i]);
    most = std::max(most, std::abs(own - its));
  }
  CHECK(most <= 2e-3, "differs by ", most, " from a kernel with a static schedule");
  int cases = 0;
  const auto check = [&](const char* what) {
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    for (const void* output : outputs) CHECK(Read(output) == alone, what, ": run ", cases, " gives other results");
    ++cases;
  };
  // Each run may begin while the previous one ends.
  clear();
  for (int i = 0; i < 4; ++i) queue(i, device.streams[0]);
  check("one stream");
  clear();
  for (int i = 0; i < 4; ++i) queue(i, device.streams[i % 2]);
  check("two streams");
  // Two graphs captured from one stream, one of which is launched on the other.
  cudaGraphExec_t instances[2] = {};
  for (int g = 0; g < 2; ++g) {
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamBeginCapture(device.streams[0], cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    for (int i = 0; i < 2; ++i) queue(2 * g + i, device.streams[0]);
    CHECK(cudaStreamEndCapture(device.streams[0], &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&instances[g], graph, 0) == cudaSuccess);
    cudaGraphDestroy(graph);
  }
  for (int replay = 0; replay < 5; ++replay) {
    clear();
    for (int i = 0; i < 2; ++i) {
      for (int g = 0; g < 2; ++g) CHECK(cudaGraphLaunch(instances[g], device.streams[g]) == cudaSuccess);
    }
    check("graphs");
  }
  // A captured run concurrent with a plain one.
  clear();
  CHECK(cudaGraphLaunch(instances[0], device.streams[0]) == cudaSuccess);
  for (int i = 2; i < 4; ++i) queue(i, device.streams[1]);
  check("a graph and a stream");
  for (cudaGraphExec_t instance : instances) cudaGraphExecDestroy(instance);
  test::CountCases(cases);
}

}  // namespace
}  // namespace stof
