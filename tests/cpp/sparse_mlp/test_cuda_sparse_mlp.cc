// SPDX-License-Identifier: Apache-2.0
// The sparse MLP on a GPU against its definition in docs/reference/sparse-mlp.md. A test runs all of its cases and then
// names those that failed.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cuda/sparse_mlp/run.h"
#include "plugins/core/contract/op.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/sparse_mlp/mlp_problem.h"

namespace stof::test::sparse_mlp {
namespace {

constexpr int kPoison = 0xfe;   // NaN in fp16, a large number in bf16 and fp32
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

// Under compute-sanitizer: some of the random cases, and a block of memory for each tensor, so that it sees every
// access beyond.
int SampleStep() {
  static const int step = [] {
    const char* const text = std::getenv("STOF_SAMPLE");
    return text == nullptr ? 0 : std::max(1, std::atoi(text));
  }();
  return step;
}

// A problem in device memory: one block, poisoned between the tensors. Kept over all cases of a test.
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
    return args;
  }

  Status Queue(const SparseMlpArgs& args) {
    RunContext context;
    context.on_cuda = true;
    context.stream = stream_;
    context.self = this;
    context.allocate = [](void* self, size_t bytes) {
      auto& own = *static_cast<Device*>(self);
      return own.workspace_ = own.Take(bytes, 0);
    };
    const size_t used = used_;
    const Status status = cuda::RunSparseMlp(args, context);
    workspace_bytes_ = used_ - used;
    used_ = used;  // runs of one problem share the workspace
    return status;
  }

  // The output of a run; output and workspace are poisoned before, and what lies around the output is checked.
  std::vector<char> Run(const SparseMlpArgs& args, const std::string& where, Failures* failures) {
    CHECK_CUDA(cudaMemsetAsync(static_cast<char*>(args.output) - kGuard, kPoison, output_bytes_ + 2 * kGuard, stream_));
    CHECK_CUDA(cudaMemsetAsync(static_cast<char*>(arena_) + used_, kPoison, std::min(kArena - used_, size_t{8} << 20),
                               stream_));
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
    CHECK_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
    return to;
  }
  void* Place(const Values& values, size_t shift) { return Place(values.bytes.data(), values.bytes.size(), shift); }
  void FreeBlocks() {
    for (void* block : blocks_) cudaFree(block);
    blocks_.clear();
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
  size_t used_ = 0, output_bytes_ = 0, workspace_bytes_ = 0;
};

void CheckOutput(Problem* problem, const std::vector<char>& found, const std::string& where, Failures* failures) {
  problem->c.accuracy_level = 0;  // matmuls are computed in fp32 at every level
  std::vector<double> expected, tolerance;
  // Many tokens of 16 bits are computed by GEMMs, which round what lies between them.
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

void RunCase(const Case& c, uint64_t seed, size_t shift, Device* device, Failures* failures) {
  const std::string where = Text("seed ", seed, " ", Describe(c), shift > 0 ? " not aligned" : "");
  Problem problem(c, seed);
  const SparseMlpArgs args = device->Upload(&problem, shift);
  const std::vector<char> found = device->Run(args, where, failures);
  CheckOutput(&problem, found, where, failures);
  if (device->Run(args, where, failures) != found) failures->Add(where + ": a second run gives other bits");
  CountCases(1);
}

TEST(CudaSparseMlpTable) {
  Failures failures("table");
  Device device;
  Random random(1);
  uint64_t seed = 0;
  for (int selection = 0; selection < 3; ++selection) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (int activation = 0; activation < 6; ++activation) {
        for (const int64_t T : {1, 3, 16, 70}) {
          Case c;
          c.selection = static_cast<SparseMlpSelection>(selection);
          c.activation = static_cast<SparseMlpActivation>(activation);
          c.dtype = dtype, c.T = T;
          const bool is_odd = random.OneIn(3);  // no size is a multiple of anything
          c.K = is_odd ? random.Pick<int64_t>({7, 61, 131}) : random.Pick<int64_t>({8, 64, 120, 520});
          c.F = random.Pick<int64_t>({1, 31, 97, 160, 333});
          c.N = is_odd ? random.Pick<int64_t>({5, 77, 301}) : random.Pick<int64_t>({8, 64, 264, 520});
          c.R = random.Pick<int64_t>({1, 8, 13, 40});
          c.density = random.Pick<double>({0, 0.05, 0.3, 1});
          c.has_up = random.Next() % 4 != 0, c.has_biases = random.OneIn(2), c.has_thresholds = random.OneIn(2);
          c.bits = random.Pick<int>({0, 0, 4, 8});
          c.block = random.Pick<int64_t>({16, 32, 64, 256});
          c.has_zero_points = random.OneIn(2);
          c.accuracy_level = c.bits > 0 && random.OneIn(2) ? 4 : 0;
          c.has_quantized_predictor = random.OneIn(2);
          RunCase(c, seed++, 0, &device, &failures);
        }
      }
    }
  }
  failures.Report();
}

TEST(CudaSparseMlpRandom) {
  Failures failures("random");
  Device device;
  const std::vector<Case> cases = DrawCases(Cases(250));
  for (size_t i = 0; i < cases.size(); i += static_cast<size_t>(std::max(1, SampleStep()))) {
    Case c = cases[i];
    c.has_quantized_predictor = i % 3 == 0;
    RunCase(c, i, 0, &device, &failures);
    if (i % 8 == 0) RunCase(c, i, SizeOf(c.dtype), &device, &failures);
  }
  failures.Report();
}

// Many CTAs, splits and segments, and sizes of none.
TEST(CudaSparseMlpSizes) {
  Failures failures("sizes");
  Device device;
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF16, DType::kBF16}) {  // many tokens
    for (const int bits : {0, 4, 8}) {
      Case c;
      c.T = 200, c.K = 320, c.F = 448, c.N = 136, c.dtype = dtype, c.bits = bits, c.has_biases = true;
      RunCase(c, seed++, 0, &device, &failures);
      c.T = 17, c.selection = SparseMlpSelection::kPredictor;
      RunCase(c, seed++, 0, &device, &failures);
    }
  }
  for (const int64_t T : {1, 8, 16}) {
    for (const int bits : {0, 4}) {
      for (const SparseMlpSelection selection : {SparseMlpSelection::kNonzero, SparseMlpSelection::kPredictor}) {
        Case c;
        c.T = T, c.K = 512, c.F = 3000, c.N = 768, c.R = 120, c.bits = bits, c.density = 0.1;
        c.dtype = DType::kF16, c.selection = selection;
        RunCase(c, seed++, 0, &device, &failures);
      }
    }
  }
  for (const int64_t F : {32767, 32769, 70001}) {
    Case c;
    c.T = 2, c.K = 8, c.F = F, c.N = 8, c.R = 3;
    RunCase(c, seed++, 0, &device, &failures);
    c.selection = SparseMlpSelection::kPredictor;
    RunCase(c, seed++, 0, &device, &failures);
  }
  for (const auto& [K, F, R] : {std::tuple<int64_t, int64_t, int64_t>{0, 20, 4}, {20, 0, 4}, {20, 40, 0}, {0, 0, 0}}) {
    for (int selection = 0; selection < 3; ++selection) {
      Case c;
      c.T = 3, c.K = K, c.F = F, c.R = R, c.has_biases = true;
      c.selection = static_cast<SparseMlpSelection>(selection);
      RunCase(c, seed++, 0, &device, &failures);
    }
  }
  failures.Report();
}

// Aligned weights of fp16 and bf16, and 3 to 16 tokens: tensor cores.
TEST(CudaSparseMlpTiles) {
  Failures failures("tiles");
  Device device;
  Random random(5);
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int64_t T : {3, 7, 8, 9, 16}) {
      for (const int64_t K : {8, 64, 72, 520, 1032, 2056}) {
        for (int selection = 0; selection < 3; ++selection) {
          Case c;
          c.T = T, c.K = K, c.dtype = dtype, c.selection = static_cast<SparseMlpSelection>(selection);
          c.activation = static_cast<SparseMlpActivation>(random.Range(0, 5));
          c.F = random.Pick<int64_t>({1, 15, 40, 333, 2500}), c.N = random.Pick<int64_t>({8, 64, 248, 264, 776});
          c.R = random.Pick<int64_t>({8, 32, 40, 264, 1040});
          c.density = random.Pick<double>({0.01, 0.1, 0.5, 1});
          c.has_up = random.Next() % 4 != 0, c.has_biases = random.OneIn(2), c.has_thresholds = random.OneIn(2);
          c.has_quantized_predictor = random.OneIn(2);
          if (seed++ % static_cast<uint64_t>(std::max(1, SampleStep())) == 0) RunCase(c, seed, 0, &device, &failures);
        }
      }
    }
  }
  failures.Report();
}

// Hidden values beyond the range of fp16.
TEST(CudaSparseMlpLargeHiddenValues) {
  Failures failures("large hidden values");
  Device device;
  const auto scale = [](Values* values, double by) {
    for (size_t i = 0; i < values->values.size(); ++i) {
      StoreFloat(DType::kF16, values->values[i] * by, values->bytes.data() + 2 * i);
      values->values[i] = LoadFloat(DType::kF16, values->bytes.data() + 2 * i);
    }
  };
  for (const int64_t T : {1, 5, 16}) {
    Case c;
    c.T = T, c.K = 64, c.F = 200, c.N = 136, c.dtype = DType::kF16;
    Problem problem(c, 9);
    scale(&problem.gate, 0x1p15), scale(&problem.down_weight, 0x1p-12);
    const std::string where = Describe(c);
    CheckOutput(&problem, device.Run(device.Upload(&problem), where, &failures), where, &failures);
    CountCases(1);
  }
  failures.Report();
}

// Rows of idle neurons are poisoned, and may not reach the output; nor may those that only other tokens need.
void CheckIdleRows(DType dtype, Device* device, Failures* failures) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  const int64_t item = SizeOf(dtype);
  for (const int64_t T : {1, 6, 16}) {
    Case c;
    c.T = T, c.F = 300, c.N = 64, c.density = 0.1, c.dtype = dtype;
    Problem problem(c, 7);
    const std::string where = Describe(c);
    const std::vector<char> expected = device->Run(device->Upload(&problem), where, failures);
    // Neuron 5 is active for the last token alone, and its down row infinite.
    for (int64_t j = 0; j < c.F; ++j) {
      bool is_active = false;
      for (int64_t t = 0; t < T; ++t) {
        double& gate = problem.gate.values[static_cast<size_t>(t * c.F + j)];
        if (j == 5) {
          gate = t == T - 1 ? 1 : -1;
          StoreFloat(c.dtype, gate, problem.gate.bytes.data() + (t * c.F + j) * item);
        }
        is_active = is_active || gate > 0;
      }
      if (is_active && j != 5) continue;
      for (int64_t k = 0; k < c.K && j != 5; ++k) {
        StoreFloat(dtype, nan, problem.up_weight.bytes.data() + (j * c.K + k) * item);
      }
      for (int64_t n = 0; n < c.N; ++n) {
        StoreFloat(dtype, j == 5 ? infinity : nan, problem.down_weight.bytes.data() + (j * c.N + n) * item);
      }
    }
    const std::vector<char> found = device->Run(device->Upload(&problem), where, failures);
    for (int64_t i = 0; i < c.T * c.N; ++i) {
      const double y = LoadFloat(dtype, found.data() + i * item), x = LoadFloat(dtype, expected.data() + i * item);
      const bool is_last = i / c.N == T - 1;
      if (is_last ? std::isfinite(y) : !(std::fabs(y - x) < 100)) {
        failures->Add(Text(where, " element ", i, ": ", y, ", with other idle rows ", x));
        break;
      }
    }
    CountCases(1);
  }
}

TEST(CudaSparseMlpIdleRowsAreNotRead) {
  Failures failures("idle rows");
  Device device;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) CheckIdleRows(dtype, &device, &failures);
  failures.Report();
}

// A NaN makes its neuron active, and the output of its token NaN.
TEST(CudaSparseMlpNan) {
  Failures failures("NaN");
  Device device;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (int selection = 0; selection < 3; ++selection) {
      Case c;
      c.T = 3, c.N = 32, c.dtype = dtype, c.density = 0.1;
      c.selection = static_cast<SparseMlpSelection>(selection);
      Problem problem(c, 3);
      const double nan = std::numeric_limits<double>::quiet_NaN();
      const int64_t item = SizeOf(dtype);
      if (c.has_predictor()) {
        StoreFloat(dtype, nan, problem.input.bytes.data() + (c.K + 1) * item);
      } else {
        StoreFloat(dtype, nan, problem.gate.bytes.data() + (c.F + 4) * item);
      }
      const std::string where = Describe(c);
      const std::vector<char> found = device.Run(device.Upload(&problem), where, &failures);
      for (int64_t i = 0; i < c.T * c.N; ++i) {
        const double y = LoadFloat(dtype, found.data() + i * item);
        if (std::isnan(y) == (i / c.N == 1)) continue;
        failures.Add(Text(where, " element ", i, ": ", y));
        break;
      }
      CountCases(1);
    }
  }
  failures.Report();
}

// A captured graph computes what the gate says when it is replayed.
TEST(CudaSparseMlpGraph) {
  Failures failures("graph");
  Device device;
  for (const int64_t T : {1, 5, 16, 40}) {
    for (const bool has_up : {false, true}) {
      Case c;
      c.T = T, c.K = 96, c.F = 700, c.N = 328, c.has_up = has_up, c.dtype = DType::kF16, c.density = 0.3;
      const std::string where = Describe(c);
      Problem problem(c, 11);
      const SparseMlpArgs args = device.Upload(&problem);
      device.Run(args, where, &failures);
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t instance = nullptr;
      CHECK_CUDA(cudaStreamBeginCapture(device.stream(), cudaStreamCaptureModeThreadLocal));
      const Status status = device.Queue(args);
      CHECK_CUDA(cudaStreamEndCapture(device.stream(), &graph));
      CHECK(status.ok(), status.message());
      CHECK_CUDA(cudaGraphInstantiate(&instance, graph, 0));
      for (const double density : {0.0, 1.0, 0.02, 0.6}) {
        Case own = c;
        own.density = density;
        Problem next(own, 11);
        next.input = problem.input, next.up_weight = problem.up_weight, next.down_weight = problem.down_weight;
        CHECK_CUDA(cudaMemcpy(const_cast<void*>(args.gate), next.gate.bytes.data(), next.gate.bytes.size(),
                              cudaMemcpyHostToDevice));
        const std::string here = Text(where, " replayed at density ", density);
        for (int run = 0; run < 3; ++run) CHECK_CUDA(cudaGraphLaunch(instance, device.stream()));
        const std::vector<char> replayed = device.Download(args, here, &failures);
        CheckOutput(&next, replayed, here, &failures);
        if (device.Run(args, here, &failures) != replayed) failures.Add(here + ": a run gives other bits");
        CountCases(1);
      }
      cudaGraphExecDestroy(instance);
      cudaGraphDestroy(graph);
    }
  }
  failures.Report();
}

// Runs one after the other share the workspace, and each is queued while the one before runs.
TEST(CudaSparseMlpBackToBack) {
  Failures failures("back to back");
  Device device;
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    Case c;
    c.T = 4, c.K = 256, c.F = 2000, c.N = 512, c.R = 80, c.dtype = dtype, c.density = 0.2;
    c.selection = SparseMlpSelection::kPredictor;
    Problem problem(c, 13);
    const SparseMlpArgs args = device.Upload(&problem);
    const std::string where = Describe(c);
    const std::vector<char> expected = device.Run(args, where, &failures);
    CheckOutput(&problem, expected, where, &failures);
    for (int run = 0; run < 50; ++run) CHECK(device.Queue(args).ok());
    if (device.Download(args, where, &failures) != expected) failures.Add(where + ": other bits after 50 runs");
    CountCases(1);
  }
  failures.Report();
}

// The workspace that is planned for many tokens suffices for fewer.
TEST(CudaSparseMlpPlan) {
  Case c;
  c.F = 1100, c.N = 530;
  Problem problem(c, 1);
  SparseMlpArgs args = problem.Args(nullptr);
  size_t before = 0;
  for (args.T = 1; args.T <= 70; ++args.T) {
    size_t bytes = 0;
    CHECK(cuda::PlanSparseMlpWorkspace(args, &bytes).ok());
    CHECK(bytes >= before, "T ", args.T, ": ", bytes, " bytes, fewer than ", before);
    before = bytes;
  }
}

}  // namespace
}  // namespace stof::test::sparse_mlp
