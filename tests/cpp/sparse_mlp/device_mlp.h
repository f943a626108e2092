// SPDX-License-Identifier: Apache-2.0
// Random sparse MLPs on a GPU against their definition: what the tests of its kernels share.
#ifndef STOF_TESTS_CPP_SPARSE_MLP_DEVICE_MLP_H_
#define STOF_TESTS_CPP_SPARSE_MLP_DEVICE_MLP_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "cuda/sparse_mlp/run.h"
#include "plugins/core/contract/op.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/sparse_mlp/mlp_problem.h"

namespace stof::test::sparse_mlp {

constexpr int kPoison = 0xff;   // NaN in every type: 0 times a value that nobody wrote shows
constexpr size_t kGuard = 256;  // bytes around each tensor
constexpr size_t kArena = size_t{64} << 20;

class Failures {
 public:
  explicit Failures(const char* test) : test_(test) {}
  void Add(const std::string& what) {
    if (count_++ < 25) text_ += "\n  " + what;
  }
  // Fails where a case did.
  void Report() const { CHECK(count_ == 0, test_, ": ", count_, " failures", text_); }

 private:
  const char* test_;
  int64_t count_ = 0;
  std::string text_;
};

// STOF_SAMPLE = n, for compute-sanitizer: every n-th of the random cases runs, and each tensor has a block of memory of
// its own, so that the sanitizer sees every access beyond. 0: not set.
inline int SampleStep() {
  static const int step = [] {
    const char* const text = std::getenv("STOF_SAMPLE");
    return text == nullptr ? 0 : std::max(1, std::atoi(text));
  }();
  return step;
}

// Whether a case runs, by its number.
inline bool IsSampled(uint64_t number) { return number % static_cast<uint64_t>(std::max(1, SampleStep())) == 0; }

// Device memory of a problem: one block, poisoned between the tensors. A test keeps it over all of its cases.
class Device {
 public:
  Device() {
    CHECK_CUDA(cudaMalloc(&arena_, kArena));
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() {
    cudaStreamDestroy(stream_);
    FreeBlocks();
    cudaFree(arena_);
  }

  // shift: bytes by which weights and tokens are not aligned.
  SparseMlpArgs Upload(Problem* problem, size_t shift = 0) {
    Reset();
    SparseMlpArgs args = problem->Args(nullptr);
    args.input = Place(problem->input, shift);
    if (args.gate != nullptr) args.gate = Place(problem->gate, shift);
    const auto weight = [&](const Values& data, const Values& scales, const Values& zeros, SparseMlpWeight* to) {
      if (to->data == nullptr) return;
      to->data = Place(data, shift);
      if (to->scales != nullptr) to->scales = Place(scales, shift);
      if (to->zero_points != nullptr) to->zero_points = Place(zeros, shift);
    };
    weight(problem->gate_weight, problem->gate_scales, problem->gate_zeros, &args.gate_weight);
    weight(problem->up_weight, problem->up_scales, problem->up_zeros, &args.up_weight);
    weight(problem->down_weight, problem->down_scales, problem->down_zeros, &args.down_weight);
    const Values none;
    if (problem->c.has_predictor()) {
      weight(problem->predictor_down, problem->predictor_down_scales, none, &args.predictor_down);
      weight(problem->predictor_up, problem->predictor_up_scales, none, &args.predictor_up);
    }
    for (auto [to, from] : {std::pair{&args.gate_bias, &problem->gate_bias},
                            {&args.up_bias, &problem->up_bias},
                            {&args.down_bias, &problem->down_bias}}) {
      if (*to != nullptr) *to = Place(*from, shift);
    }
    args.threshold = static_cast<const float*>(Place(problem->threshold.data(), problem->threshold.size() * 4, 0));
    output_bytes_ = static_cast<size_t>(args.T * args.N * SizeOf(args.dtype));
    const std::vector<char> poison(output_bytes_ + 2 * kGuard, static_cast<char>(kPoison));
    args.output = static_cast<char*>(Place(poison.data(), poison.size(), 0)) + kGuard;
    // A copy from pageable memory may return before its end, and stream_ does not wait for the default stream.
    CHECK_CUDA(cudaDeviceSynchronize());
    return args;
  }

  // Poisons the workspace and runs.
  Status Queue(const SparseMlpArgs& args) {
    RunContext context;
    context.on_cuda = true;
    context.stream = stream_;
    context.self = this;
    context.allocate = [](void* self, size_t bytes) {
      auto& own = *static_cast<Device*>(self);
      // cudaMalloc is not allowed during graph capture: a captured run takes the block of the run before.
      if (SampleStep() == 0 || own.workspace_ == nullptr || own.workspace_bytes_ != bytes) {
        own.workspace_ = own.Take(bytes, 0);
      }
      own.workspace_bytes_ = bytes;
      CHECK(bytes <= own.planned_bytes_, "a run asks for ", bytes, " bytes of workspace, planned were ",
            own.planned_bytes_);
      CHECK_CUDA(cudaMemsetAsync(own.workspace_, kPoison, bytes, own.stream_));
      return own.workspace_;
    };
    CHECK(cuda::PlanSparseMlpWorkspace(args, &planned_bytes_).ok());
    const size_t used = used_;
    const Status status = cuda::RunSparseMlp(args, context);
    used_ = used;  // runs of one problem share the workspace
    return status;
  }

  // Poisons the output, runs, and checks the bytes around the output. Returns the output.
  std::vector<char> Run(const SparseMlpArgs& args, const std::string& where, Failures* failures) {
    CHECK_CUDA(cudaMemsetAsync(static_cast<char*>(args.output) - kGuard, kPoison, output_bytes_ + 2 * kGuard, stream_));
    const Status status = Queue(args);
    if (!status.ok()) failures->Add(where + ": " + status.message());
    return Download(args, where, failures);
  }
  std::vector<char> Download(const SparseMlpArgs& args, const std::string& where, Failures* failures) {
    const cudaError_t error = cudaStreamSynchronize(stream_);
    CHECK(error == cudaSuccess, where, ": ", cudaGetErrorString(error));  // the device is lost to all later cases
    std::vector<char> found(output_bytes_ + 2 * kGuard);
    CHECK_CUDA(
        cudaMemcpy(found.data(), static_cast<char*>(args.output) - kGuard, found.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < kGuard; ++i) {
      if (found[i] == static_cast<char>(kPoison) && found[kGuard + output_bytes_ + i] == static_cast<char>(kPoison)) {
        continue;
      }
      failures->Add(where + ": wrote beside the output");
      break;
    }
    return {found.begin() + kGuard, found.end() - kGuard};
  }

  void* Place(const void* from, size_t bytes, size_t shift) {
    void* const to = Take(bytes, shift);
    CopyToDevice(to, from, bytes);
    return to;
  }
  void* Place(const Values& values, size_t shift) { return Place(values.bytes.data(), values.bytes.size(), shift); }
  void FreeBlocks() {
    for (void* block : blocks_) cudaFree(block);
    blocks_.clear();
    workspace_ = nullptr;
  }
  void Reset() {
    used_ = 0;
    FreeBlocks();
    CHECK_CUDA(cudaMemset(arena_, kPoison, size_t{1} << 20));
  }
  cudaStream_t stream() const { return stream_; }

 private:
  void* Take(size_t bytes, size_t shift) {
    if (SampleStep() > 0) {
      void* block = nullptr;
      CHECK_CUDA(cudaMalloc(&block, std::max<size_t>(bytes + shift, 1)));
      blocks_.push_back(block);
      return static_cast<char*>(block) + shift;
    }
    void* const at = static_cast<char*>(arena_) + used_ + kGuard + shift;
    used_ += (bytes + shift + 255) / 256 * 256 + 2 * kGuard;
    CHECK(used_ <= kArena, "the arena of the test is too small");
    return at;
  }

  void* arena_ = nullptr;
  void* workspace_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> blocks_;
  size_t used_ = 0, output_bytes_ = 0, workspace_bytes_ = 0, planned_bytes_ = 0;
};

inline void CheckOutput(Problem* problem, const std::vector<char>& found, const std::string& where,
                        Failures* failures) {
  problem->c.accuracy_level = 0;  // matmuls are computed in fp32 at every level
  std::vector<double> expected, tolerance;
  // GEMMs compute many tokens of 16 bits, and round matmuls, hidden values and dequantized weights.
  const bool is_dense = problem->c.T > 16 && problem->c.dtype != DType::kF32;
  problem->Expect(&expected, &tolerance, is_dense ? UnitRoundoff(problem->c.dtype) : 0);
  const int64_t item = SizeOfFloat(problem->c.dtype);
  size_t wrong = 0, worst = 0;
  double most = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double y = LoadFloat(problem->c.dtype, found.data() + static_cast<int64_t>(i) * item);
    const double error = std::fabs(y - expected[i]) / tolerance[i];
    if (error <= 1) continue;
    ++wrong;
    if (!(error <= most)) most = std::isnan(error) ? 1e300 : error, worst = i;
  }
  if (wrong == 0) return;
  const double y = LoadFloat(problem->c.dtype, found.data() + static_cast<int64_t>(worst) * item);
  failures->Add(Text(where, ": ", wrong, " of ", expected.size(), " elements, the worst is ", worst, ": ", y,
                     ", expected ", expected[worst], " +- ", tolerance[worst]));
}

inline void RunCase(const Case& c, uint64_t seed, size_t shift, Device* device, Failures* failures) {
  const std::string where = Text("seed ", seed, " ", Describe(c), shift > 0 ? " not aligned" : "");
  Problem problem(c, seed);
  const SparseMlpArgs args = device->Upload(&problem, shift);
  const std::vector<char> found = device->Run(args, where, failures);
  CheckOutput(&problem, found, where, failures);
  if (device->Run(args, where, failures) != found) failures->Add(where + ": a second run gives other bits");
  CountCases(1);
}

}  // namespace stof::test::sparse_mlp
#endif  // STOF_TESTS_CPP_SPARSE_MLP_DEVICE_MLP_H_
