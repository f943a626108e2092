// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/time_op.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/status.h"

namespace stof {
namespace cuda {
namespace {

// Device memory, freed with this object. After Rewind a run gets the blocks of the run before, in the same order.
class Memory {
 public:
  ~Memory() {
    for (const Block& block : blocks_) cudaFree(block.data);
  }
  void Rewind() { next_ = 0; }
  void* Get(size_t bytes) {
    if (next_ < blocks_.size() && blocks_[next_].bytes >= bytes) return blocks_[next_++].data;
    Block block = {nullptr, std::max<size_t>(bytes, 1)};
    if (cudaMalloc(&block.data, block.bytes) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    blocks_.insert(blocks_.begin() + static_cast<std::ptrdiff_t>(next_++), block);
    return block.data;
  }
  static void* Allocate(void* self, size_t bytes) { return static_cast<Memory*>(self)->Get(bytes); }

 private:
  struct Block {
    void* data;
    size_t bytes;
  };
  std::vector<Block> blocks_;
  size_t next_ = 0;
};

// The first values of a tensor, which repeat: random numbers for all of it would take longer than the timing.
std::vector<char> Pattern(DType dtype, size_t bytes, uint32_t seed) {
  constexpr size_t kMost = size_t{4} << 20;
  std::vector<char> pattern(std::min(bytes, kMost), 0);
  std::mt19937 random(seed);
  if (dtype == DType::kF32) {
    for (size_t i = 0; i + 4 <= pattern.size(); i += 4) {
      const float x = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-30f;
      std::memcpy(&pattern[i], &x, 4);
    }
  } else if (dtype == DType::kF16 || dtype == DType::kBF16) {
    // Sign, six exponents below 2, mantissa.
    const int shift = dtype == DType::kF16 ? 10 : 7;
    const uint32_t least = dtype == DType::kF16 ? 10 : 122, kept = 0x8000u | ((1u << shift) - 1u);
    for (size_t i = 0; i + 2 <= pattern.size(); i += 2) {
      const uint32_t bits = random();
      const auto x = static_cast<uint16_t>((bits & kept) | (least + (bits >> 16) % 6u) << shift);
      std::memcpy(&pattern[i], &x, 2);
    }
  }
  return pattern;
}

Status Place(const Tensor& from, uint32_t seed, Memory* memory, Tensor* to) {
  *to = from;
  const auto bytes = static_cast<size_t>(from.Elements() * SizeOf(from.dtype));
  to->data = memory->Get(bytes);
  if (to->data == nullptr) return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of a tensor");
  if (bytes == 0) return Status();
  if (from.data != nullptr) {
    return ToStatus(cudaMemcpy(to->data, from.data, bytes, cudaMemcpyHostToDevice), "copy to the device");
  }
  const std::vector<char> pattern = Pattern(from.dtype, bytes, seed);
  for (size_t at = 0; at < bytes; at += pattern.size()) {
    STOF_RETURN_IF_ERROR(ToStatus(cudaMemcpy(static_cast<char*>(to->data) + at, pattern.data(),
                                             std::min(pattern.size(), bytes - at), cudaMemcpyHostToDevice),
                                  "copy to the device"));
  }
  return Status();
}

// CUDA handles, freed on every path.
struct Handles {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  ~Handles() {
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
    if (executable != nullptr) cudaGraphExecDestroy(executable);
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
};

}  // namespace

Status TimeOp(const Op& op, const Tensor* inputs, int input_count, int output_count, double seconds,
              double* microseconds) {
  constexpr size_t kFewest = 5, kMost = 200;  // replays that count; a fifth as many go before
  Memory tensors, workspace;
  Handles cuda;
  std::vector<Tensor> in(static_cast<size_t>(input_count)), out(static_cast<size_t>(output_count));
  STOF_RETURN_IF_ERROR(op.InferOutputs(inputs, input_count, out.data(), output_count));
  for (size_t i = 0; i < in.size(); ++i) {
    STOF_RETURN_IF_ERROR(Place(inputs[i], static_cast<uint32_t>(i + 1), &tensors, &in[i]));
  }
  for (Tensor& tensor : out) {
    tensor.data = nullptr;
    STOF_RETURN_IF_ERROR(Place(tensor, 0, &tensors, &tensor));
  }
  const auto check = [](cudaError_t error) { return ToStatus(error, "timing"); };
  // Small copies may still be under way, and a non-blocking stream does not wait for them: lengths must be there.
  STOF_RETURN_IF_ERROR(check(cudaStreamSynchronize(nullptr)));
  STOF_RETURN_IF_ERROR(check(cudaStreamCreateWithFlags(&cuda.stream, cudaStreamNonBlocking)));
  STOF_RETURN_IF_ERROR(check(cudaEventCreate(&cuda.begin)));
  STOF_RETURN_IF_ERROR(check(cudaEventCreate(&cuda.end)));
  RunContext context;
  context.on_cuda = true;
  context.stream = cuda.stream;
  context.allocate = Memory::Allocate;
  context.self = &workspace;
  const auto run = [&] {
    workspace.Rewind();
    return op.Run(in.data(), input_count, out.data(), output_count, context);
  };
  STOF_RETURN_IF_ERROR(run());
  STOF_RETURN_IF_ERROR(check(cudaStreamSynchronize(cuda.stream)));
  STOF_RETURN_IF_ERROR(check(cudaStreamBeginCapture(cuda.stream, cudaStreamCaptureModeThreadLocal)));
  const Status captured = run();
  const cudaError_t ended = cudaStreamEndCapture(cuda.stream, &cuda.graph);
  STOF_RETURN_IF_ERROR(captured);
  STOF_RETURN_IF_ERROR(check(ended));
  STOF_RETURN_IF_ERROR(check(cudaGraphInstantiate(&cuda.executable, cuda.graph, 0)));
  std::vector<float> times;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  for (size_t i = 0; times.size() < kMost && (times.size() < kFewest || elapsed() < seconds); ++i) {
    float ms = 0;
    STOF_RETURN_IF_ERROR(check(cudaEventRecord(cuda.begin, cuda.stream)));
    STOF_RETURN_IF_ERROR(check(cudaGraphLaunch(cuda.executable, cuda.stream)));
    STOF_RETURN_IF_ERROR(check(cudaEventRecord(cuda.end, cuda.stream)));
    STOF_RETURN_IF_ERROR(check(cudaEventSynchronize(cuda.end)));
    STOF_RETURN_IF_ERROR(check(cudaEventElapsedTime(&ms, cuda.begin, cuda.end)));
    if (i >= kMost / 5 || elapsed() > seconds / 5) times.push_back(ms);
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  *microseconds = 1e3 * static_cast<double>(times[times.size() / 2]);
  return Status();
}

}  // namespace cuda
}  // namespace stof
