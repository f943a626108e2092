// SPDX-License-Identifier: Apache-2.0
// Runs of GEMMs on a device: guarded memory, and outputs that are compared with fp64 and with each other.
#ifndef STOF_TESTS_CPP_GEMM_DEVICE_GEMM_H_
#define STOF_TESTS_CPP_GEMM_DEVICE_GEMM_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/gemm/choose.h"
#include "cuda/gemm/gemm.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/gemm/gemm_cases.h"

namespace stof::test::gemm {

constexpr char kPoison = static_cast<char>(0xff);  // two of them are a NaN of fp16 and of bf16

// Memory of the device with a guard band on either side, all poison at first.
class GuardedMemory {
 public:
  // shift: bytes beyond a multiple of 16 at which the data begins.
  explicit GuardedMemory(size_t bytes, size_t shift = 0) : begin_(kBand + shift), bytes_(bytes) {
    CHECK_CUDA(cudaMalloc(&memory_, Total()));
    Poison();
  }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;
  ~GuardedMemory() { cudaFree(memory_); }
  char* data() const { return static_cast<char*>(memory_) + begin_; }
  size_t begin() const { return begin_; }
  size_t bytes() const { return bytes_; }
  void Poison() {
    CHECK_CUDA(cudaMemset(memory_, kPoison, Total()));
    CHECK_CUDA(cudaDeviceSynchronize());  // streams of runs do not wait for it
  }
  void Write(const std::vector<char>& bytes) {
    if (bytes.empty()) return;
    CopyToDevice(data(), bytes.data(), bytes.size());
  }
  // All of it, guard bands too.
  std::vector<char> Read() const { return ReadFrom(0, Total()); }
  // Fails where a guard band was written to.
  void CheckBands(const std::string& name) const {
    const auto check = [&](const std::vector<char>& band, const char* side) {
      const bool is_poison = std::all_of(band.begin(), band.end(), [](char byte) { return byte == kPoison; });
      CHECK(is_poison, name, "memory ", side, " the data was written");
    };
    check(ReadFrom(0, begin_), "before");
    check(ReadFrom(begin_ + bytes_, kBand), "behind");
  }

 private:
  size_t Total() const { return begin_ + bytes_ + kBand; }
  std::vector<char> ReadFrom(size_t begin, size_t size) const {
    std::vector<char> bytes(size);
    CHECK_CUDA(cudaMemcpy(bytes.data(), static_cast<const char*>(memory_) + begin, size, cudaMemcpyDeviceToHost));
    return bytes;
  }

  const size_t begin_, bytes_;
  void* memory_ = nullptr;
};

// RunContext::allocate of one run, which may ask once, and for no more than was planned.
struct RunWorkspace {
  GuardedMemory* memory = nullptr;
  int calls = 0;
  size_t most = 0;  // bytes that were asked for
  static void* Allocate(void* self, size_t bytes) {
    auto* const own = static_cast<RunWorkspace*>(self);
    own->most = std::max(own->most, bytes);
    return ++own->calls > 1 || bytes > own->memory->bytes() ? nullptr : own->memory->data();
  }
};

// Names a run in failures. name: what the case does not say.
inline std::string RunName(const Problem& problem, const std::string& name) {
  return Describe(problem.c) + name + ": ";
}

// Queues a GEMM 1 + repeats times. The first output is compared with fp64, the bits of the others with the first one's.
// queue: Status(const RunContext&), writes to `output`. workspace: of the planned size. name: as of RunName.
template <typename Queue>
void CheckRuns(const Problem& problem, const std::string& name, int repeats, GuardedMemory* output,
               GuardedMemory* workspace, cudaStream_t stream, const Queue& queue) {
  const Activation activation = problem.c.activation;
  const bool is_gelu = activation == Activation::kGelu || activation == Activation::kGeluTanh;
  const auto label = [&] { return RunName(problem, name); };
  std::vector<char> first;
  for (int i = 0; i <= repeats; ++i) {
    output->Poison();
    // Memsets and copies from pageable memory may still be under way, and the stream does not wait for them.
    CHECK_CUDA(cudaDeviceSynchronize());
    RunWorkspace given{workspace};
    RunContext context;
    context.on_cuda = true;
    context.stream = stream;
    context.allocate = RunWorkspace::Allocate;
    context.self = &given;
    const Status status = queue(context);
    CHECK(status.ok(), label(), status.message());
    const cudaError_t stopped = cudaStreamSynchronize(stream);
    CHECK(stopped == cudaSuccess, label(), cudaGetErrorString(stopped));
    CHECK(given.most <= workspace->bytes(), label(), given.most, " bytes were asked for, ", workspace->bytes(),
          " were planned");
    const std::vector<char> bytes = output->Read();
    if (i == 0) {
      first = bytes;
      try {
        Compare(problem, first, output->begin(), is_gelu ? 5e-4 : 2e-6);
      } catch (const Failure& failure) {
        throw Failure{label() + failure.message};
      }
    }
    CHECK(first == bytes, label(), "another result in run ", i);
  }
  workspace->CheckBands(label() + "workspace: ");
  CountCases(1);
}

}  // namespace stof::test::gemm
#endif  // STOF_TESTS_CPP_GEMM_DEVICE_GEMM_H_
