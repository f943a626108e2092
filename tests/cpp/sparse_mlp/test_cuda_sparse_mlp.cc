// SPDX-License-Identifier: Apache-2.0
// The sparse MLP on a GPU against its definition in docs/reference/sparse-mlp.md. A test runs all of its cases and then
// names those that failed.
#include <cuda_runtime.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "tests/cpp/sparse_mlp/device_mlp.h"

namespace stof::test::sparse_mlp {
namespace {

TEST(CudaSparseMlpTable) {
  Failures failures("table");
  Device device;
  Random random(1);
  uint64_t seed = 0;
  for (int selection = 0; selection < 3; ++selection) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (int activation = 0; activation < kActivations; ++activation) {
        for (const int64_t T : {1, 3, 16, 70}) {
          Case c;
          c.selection = static_cast<SparseMlpSelection>(selection);
          c.activation = static_cast<Activation>(activation);
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
          c.has_quantized_predictor = random.OneIn(2), c.has_predictor_relu = c.has_predictor() && seed % 3 == 1;
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
    c.has_quantized_predictor = i % 3 == 0, c.has_predictor_relu = c.has_predictor() && i % 5 < 2;
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
    for (int i = 0; i < 6; ++i) {
      Case c;
      c.T = i < 3 ? 3 : 20, c.N = 32, c.dtype = dtype, c.density = 0.1;
      c.selection = static_cast<SparseMlpSelection>(i % 3);
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
        CopyToDevice(const_cast<void*>(args.gate), next.gate.bytes.data(), next.gate.bytes.size());
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

// A captured graph selects the neurons that a predictor finds for the input at its replay.
TEST(CudaSparseMlpPredictorGraph) {
  Failures failures("graph of a predictor");
  Device device;
  for (const int64_t T : {1, 5, 40, 150}) {
    Case c;
    c.T = T, c.K = 96, c.F = 300, c.N = 72, c.R = 24, c.dtype = DType::kF16, c.density = 0.3;
    c.selection = SparseMlpSelection::kPredictor;
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
    for (const uint64_t seed : {12, 13}) {
      problem.input = Problem(c, seed).input;
      CopyToDevice(const_cast<void*>(args.input), problem.input.bytes.data(), problem.input.bytes.size());
      const std::string here = Text(where, " replayed with input ", seed);
      for (int run = 0; run < 3; ++run) CHECK_CUDA(cudaGraphLaunch(instance, device.stream()));
      const std::vector<char> replayed = device.Download(args, here, &failures);
      CheckOutput(&problem, replayed, here, &failures);
      if (device.Run(args, here, &failures) != replayed) failures.Add(here + ": a run gives other bits");
      CountCases(1);
    }
    cudaGraphExecDestroy(instance);
    cudaGraphDestroy(graph);
  }
  failures.Report();
}

// Runs one after the other share the workspace, and each is queued while the one before runs.
TEST(CudaSparseMlpBackToBack) {
  Failures failures("back to back");
  Device device;
  for (int i = 0; i < 4; ++i) {
    Case c;
    c.T = i < 2 ? 4 : 33, c.K = 256, c.F = 2000, c.N = 512, c.R = 80, c.density = 0.2;
    c.dtype = i % 2 == 0 ? DType::kF32 : DType::kF16;
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
  for (int i = 0; i < 6; ++i) {
    Case c;
    c.F = 1100, c.N = 530, c.dtype = i % 2 == 0 ? DType::kF32 : DType::kF16;
    if (i >= 2) c.selection = SparseMlpSelection::kPredictor, c.R = 150;
    c.has_quantized_predictor = i >= 4, c.bits = i >= 4 ? 4 : 0;
    Problem problem(c, 1);
    SparseMlpArgs args = problem.Args(nullptr);
    size_t before = 0;
    for (args.T = 1; args.T <= 5000; args.T += args.T < 300 ? 1 : 97) {
      size_t bytes = 0;
      CHECK(cuda::PlanSparseMlpWorkspace(args, &bytes).ok());
      CHECK(bytes >= before, Describe(c), " T ", args.T, ": ", bytes, " bytes, fewer than ", before);
      before = bytes;
    }
    CountCases(1);
  }
}

}  // namespace
}  // namespace stof::test::sparse_mlp
