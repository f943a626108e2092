// SPDX-License-Identifier: Apache-2.0
// Packed sequences of StofAttention on a GPU beside the CPU: random cases, some with rows behind the last sequence,
// numbers that are illegal, a captured graph that is launched again with other lengths, and the memory that the plan
// states.
#include <cuda_runtime.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/attention/packed_cases.h"
#include "tests/cpp/check.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/fixtures.h"

namespace stof::test::attention {
namespace {

size_t Bytes(const Tensor& tensor) { return static_cast<size_t>(tensor.Elements() * SizeOf(tensor.dtype)); }

PackedCase DrawForDevice(Random* random) {
  PackedCase c = DrawPacked(random);
  // Rows of 16 bytes, and key tiles of all sizes.
  c.D = random->Pick<int64_t>({8, 16, 64, 72}), c.Dv = random->Pick<int64_t>({8, 16, 64, 72});
  if (random->OneIn(3)) c.D = c.Dv = random->Pick<int64_t>({64, 128, 160, 256});
  if (random->OneIn(4)) {
    c.T = random->Pick<int64_t>({300, 520, 776});
    if (c.has_queries) c.S = c.T;
    for (int32_t& first : c.first) first = c.has_first ? static_cast<int32_t>(random->Range(0, c.T - 257)) : 0;
  }
  return c;
}

// One node on the device with the tensors of the packed call.
struct DeviceNode {
  DeviceMemory memory;
  cudaStream_t stream = nullptr;
  std::unique_ptr<Op> op;
  std::vector<Tensor> inputs;
  Tensor output;

  DeviceNode(const PackedCase& c, const PackedTensors& tensors, size_t arena = 0)
      : memory(arena), inputs(tensors.PackedInputs(c)), output(PackedOutput(c).tensor) {
    op = MakePackedOp(c, tensors.packed_operands, inputs);
    for (Tensor& input : inputs) input.data = memory.Upload(input.data, Bytes(input));
    output.data = memory.Take(Bytes(output));
    CHECK_CUDA(cudaMemset(output.data, 0x3c, Bytes(output)));  // a number, so that all rows must be written
  }
  Status Queue(cudaStream_t own_stream) {
    memory.ResetArena();
    stream = own_stream;
    RunContext context;
    context.on_cuda = true;
    context.stream = stream;
    // What padded copies leave out is NaN.
    context.allocate = [](void* self, size_t bytes) {
      auto* const node = static_cast<DeviceNode*>(self);
      void* const block = DeviceMemory::Allocate(&node->memory, bytes);
      if (block != nullptr) CHECK_CUDA(cudaMemsetAsync(block, 0xff, bytes, node->stream));
      return block;
    };
    context.self = this;
    return op->Run(inputs.data(), static_cast<int>(inputs.size()), &output, 1, context);
  }
  // The operand of a role's number behind query, key and value.
  void Load(size_t input, const std::vector<int32_t>& values) {
    CHECK(values.size() * 4 == Bytes(inputs[input]), "an operand changes its size");
    CopyToDevice(inputs[input].data, values.data(), values.size() * 4);
  }
  void Download(Array* found) const {
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(found->bytes.data(), output.data, Bytes(output), cudaMemcpyDeviceToHost));
  }
};

Array RunOnHost(const PackedCase& c, const PackedTensors& tensors) {
  const std::vector<Tensor> inputs = tensors.PackedInputs(c);
  const std::unique_ptr<Op> op = MakePackedOp(c, tensors.packed_operands, inputs);
  Array output = PackedOutput(c);
  Memory memory;
  ThreadPool pool(1);
  const RunContext context = {pool.view(), Memory::Allocate, &memory};
  const Status status = op->Run(inputs.data(), static_cast<int>(inputs.size()), &output.tensor, 1, context);
  CHECK(status.ok(), status.message());
  return output;
}

// Five sequences of 24 positions with 40 rows in all, under a causal mask.
PackedCase SmallCase() {
  PackedCase c;
  c.B = 5, c.H = 2, c.T = c.S = 24, c.D = c.Dv = 64;
  c.mask = 1, c.has_first = true;
  c.length = {10, 0, 24, 1, 5}, c.first = {14, 3, 0, 23, 7};
  return c;
}
constexpr size_t kCumulative = 4, kFirst = 5;  // inputs of SmallCase

TEST(CudaAttentionOfPackedSequences) {
  const int cases = Cases(300);
  for (int i = 0; i < cases; ++i) {
    Random random(static_cast<uint64_t>(i) + 5400);
    const PackedCase c = DrawForDevice(&random);
    try {
      const PackedTensors tensors(c, &random);
      DeviceNode node(c, tensors);
      const Status status = node.Queue(nullptr);
      CHECK(status.ok(), status.message());
      Array found = PackedOutput(c);
      node.Download(&found);
      ComparePacked(c, found, RunOnHost(c, tensors));
    } catch (const Failure& failure) {
      CHECK(false, "case ", i, " ", Describe(c), failure.message);
    }
    CountCases(1);
  }
}

TEST(CudaPackedSequencesOfIllegalNumbersAreNan) {
  constexpr int32_t kHuge = std::numeric_limits<int32_t>::max();
  const std::vector<std::vector<int32_t>> starts = {
      {1, 10, 10, 34, 35, 40}, {0, 10, 9, 34, 35, 40},     {0, 10, 10, 34, 35, 34},  {0, 10, 10, 34, 35, 41},
      {0, -1, 10, 34, 35, 40}, {0, 10, kHuge, 34, 35, 40}, {0, 0, 0, 40, 40, kHuge}, {-5, 10, 10, 34, 35, 40}};
  const PackedCase c = SmallCase();
  Random random(1);
  const PackedTensors tensors(c, &random);
  DeviceNode node(c, tensors);
  Array found = PackedOutput(c);
  for (const auto& wrong : starts) {
    node.Load(kCumulative, wrong);
    CHECK(node.Queue(nullptr).ok());
    node.Download(&found);
    for (int64_t i = 0; i < found.tensor.Elements(); ++i) CHECK(std::isnan(found.Get(i)), "element ", i);
    CountCases(1);
  }
  // A position that is illegal concerns its own sequence alone.
  node.Load(kCumulative, {0, 10, 10, 34, 35, 40});
  const Array wanted = RunOnHost(c, tensors);
  for (const int32_t position : {-1, 15, kHuge, std::numeric_limits<int32_t>::min()}) {
    node.Load(kFirst, {position, 3, 0, 23, 7});
    CHECK(node.Queue(nullptr).ok());
    node.Download(&found);
    const int64_t of_first = 10 * c.H * c.Dv;
    for (int64_t i = 0; i < found.tensor.Elements(); ++i) {
      const bool is_right = i < of_first ? std::isnan(found.Get(i)) : std::fabs(found.Get(i) - wanted.Get(i)) < 1e-4f;
      CHECK(is_right, "position ", position, ", element ", i, ": ", found.Get(i));
    }
    CountCases(1);
  }
}

TEST(CudaPackedSequencesInACapturedGraph) {
  PackedCase c = SmallCase();
  Random random(2);
  const PackedTensors tensors(c, &random);
  DeviceNode node(c, tensors, size_t{64} << 20);
  CHECK(node.Queue(nullptr).ok());  // loads kernels, and makes the mask
  CHECK_CUDA(cudaDeviceSynchronize());
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const Status status = node.Queue(stream);
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK(status.ok(), status.message());
  CHECK_CUDA(cudaGraphInstantiate(&run, graph, 0));
  for (const std::vector<int32_t>& length :
       {c.length, {24, 5, 1, 0, 10}, {0, 0, 20, 20, 0}, {8, 8, 8, 8, 8}, {3, 0, 2, 1, 9}, {0, 0, 0, 0, 0}}) {
    // The same rows, divided in another way; some belong to no sequence.
    PackedTensors other(tensors);
    std::vector<int32_t> starts = {0}, first;
    for (const int32_t one : length) starts.push_back(starts.back() + one), first.push_back(24 - one);
    other.cumulative = Ints(starts), other.first = Ints(first);
    std::fill(other.pad.bytes.begin(), other.pad.bytes.end(), 1);
    node.Load(kCumulative, starts), node.Load(kFirst, first);
    CopyToDevice(node.inputs[3].data, other.pad.bytes.data(), other.pad.bytes.size());
    CHECK_CUDA(cudaGraphLaunch(run, stream));
    Array found = PackedOutput(c);
    node.Download(&found);
    ComparePacked(c, found, RunOnHost(c, other));
    for (int64_t i = starts.back() * c.H * c.Dv; i < found.tensor.Elements(); ++i) {
      CHECK(found.Get(i) == 0.0f, "element ", i, " behind the last sequence is ", found.Get(i));
    }
    CountCases(1);
  }
  cudaGraphExecDestroy(run), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
}

TEST(CudaPackedSequencesTakeThePlannedMemory) {
  const int cases = Cases(60);
  for (int i = 0; i < cases; ++i) {
    Random random(static_cast<uint64_t>(i) + 5700);
    const PackedCase c = DrawForDevice(&random);
    const PackedTensors tensors(c, &random);
    std::vector<Tensor> shapes = tensors.PackedInputs(c);
    const std::unique_ptr<Op> op = MakePackedOp(c, tensors.packed_operands, shapes);
    for (Tensor& shape : shapes) shape.data = nullptr;
    DevicePlan plan;
    Status status = op->PlanDevice(shapes.data(), static_cast<int>(shapes.size()), &plan);
    CHECK(status.ok(), Describe(c), status.message());
    DeviceNode node(c, tensors, plan.workspace + 64);  // an arena that is too small gives no memory
    status = node.Queue(nullptr);
    CHECK(status.ok(), Describe(c), status.message());
    CHECK_CUDA(cudaDeviceSynchronize());
    CountCases(1);
  }
}

}  // namespace
}  // namespace stof::test::attention
