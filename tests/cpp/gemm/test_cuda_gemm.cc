// SPDX-License-Identifier: Apache-2.0
// StofGemm on a device: the CPU tests' problems by every kernel, in guard bands, again and again.
#include <cuda_runtime.h>

#include <memory>
#include <vector>

#include "tests/cpp/device_memory.h"
#include "tests/cpp/gemm/device_gemm.h"
#include "tests/cpp/gemm/gemm_cases.h"

namespace stof::test {
namespace {

using namespace gemm;

// repeats: further runs, whose bits must be the first one's.
void RunDevice(const Case& c, int repeats) {
  const Problem p = Make(c);
  std::unique_ptr<Op> op;
  Status status = Description().create(Attributes(p.text, c.pair), &op);
  CHECK(status.ok(), p.text, ": ", status.message());
  const size_t shift = c.shifted ? 2 : 0;
  DeviceMemory memory;  // a block for each input, so that compute-sanitizer sees every access beyond
  std::vector<Tensor> inputs;
  for (const Host& host : p.inputs) {
    char* const at = static_cast<char*>(memory.Take(host.bytes.size() + shift)) + shift;
    CopyToDevice(at, host.bytes.data(), host.bytes.size());
    inputs.push_back(host.View(at));
  }
  const int count = static_cast<int>(inputs.size());
  Tensor output;
  CHECK(op->Prepare(inputs.data(), count).ok());
  // Every other one as in a runtime that lets the first run of a shape time kernels.
  if (c.seed % 2 == 1) CHECK(op->PrepareNode(inputs.data(), count, true, 1).ok());
  status = op->InferOutputs(inputs.data(), count, &output, 1);
  CHECK(status.ok(), Describe(c), ": ", status.message());
  DevicePlan plan;
  status = op->PlanDevice(inputs.data(), count, &plan);
  CHECK(status.ok(), Describe(c), ": ", status.message());
  GuardedMemory guarded(static_cast<size_t>(output.Elements() * SizeOf(output.dtype)), shift);
  GuardedMemory workspace(plan.workspace);
  output.data = guarded.data();
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CheckRuns(p, "", repeats, &guarded, &workspace, stream,
            [&](const RunContext& context) { return op->Run(inputs.data(), count, &output, 1, context); });
  CHECK_CUDA(cudaStreamDestroy(stream));
}

void RunSeeds(uint64_t begin, uint64_t end, int64_t most, bool vectors) {
  for (uint64_t seed = begin; seed < end; ++seed) {
    if (!IsSampled(seed)) continue;
    Case c = RandomCase(seed, seed % 2 == 0 ? DType::kF16 : DType::kBF16, most);
    if (vectors) c.N = (c.N + 7) / 8 * 8, c.K = (c.K + 7) / 8 * 8, c.shifted = false;
    RunDevice(c, 1);
  }
}

TEST(CudaGemmEqualsFp64) {
  RunSeeds(0, 120, 700, true);
  RunSeeds(120, 200, 300, false);
}

TEST(CudaGemmSizes) {
  uint64_t seed = 10000;
  for (int64_t M : {1, 7, 128, 512, 4096, 8192}) {
    for (int pair : {0, 1, 2}) {
      for (int64_t odd : {0, 1}) {
        Case c;
        c.seed = ++seed;
        if (!IsSampled(seed)) continue;
        Random random(seed);
        c.dtype = seed % 2 == 0 ? DType::kF16 : DType::kBF16;
        c.pair = pair;
        c.lead = {M};
        c.N = (pair == 0 ? 3072 : 1152) + 3 * odd, c.K = M > 512 ? 768 + odd : 1600 + odd;
        c.activation = kChainActivations[random.Range(0, 4)];
        for (int i = 1; i < Part::kKinds; ++i) c.has[i] = random.OneIn(2);
        if (pair == 0) c.has[Part::kBias1] = false;
        RunDevice(c, M == 512 ? 50 : 2);
      }
    }
  }
}

// The epilogues that cuBLASLt has, where it may be taken, at sizes of few and of many tiles.
TEST(CudaGemmPlainEpilogues) {
  uint64_t seed = 20000;
  for (int64_t M : {1, 128, 2100}) {
    for (int64_t K : {8, 768, 3072}) {
      for (Activation activation : {Activation::kNone, Activation::kRelu, Activation::kGeluTanh}) {
        for (int parts = 0; parts < (activation == Activation::kNone ? 4 : 2); ++parts) {
          Case c;
          c.seed = ++seed;
          if (!IsSampled(seed)) continue;
          c.dtype = seed % 3 == 0 ? DType::kBF16 : DType::kF16;
          c.lead = {M};
          c.N = 768, c.K = K;
          c.activation = activation;
          c.has[Part::kBias0] = parts % 2 == 1, c.has[Part::kResidual] = parts / 2 == 1;
          RunDevice(c, 2);
        }
      }
    }
  }
}

// More tiles than a device holds at once, an odd number of them for some CTAs, with fewer steps than stages and more.
void RunWaves(uint64_t seed, int pair) {
  for (int64_t M : {2600, 9100}) {
    for (int64_t K : {8, 64, 200, 320, 328, 768, 776}) {
      Case c;
      c.seed = ++seed;
      if (!IsSampled(seed)) continue;
      c.dtype = seed % 2 == 0 ? DType::kF16 : DType::kBF16;
      c.pair = pair;
      c.lead = {M};
      c.N = pair == 0 ? 1544 : 584, c.K = K;
      if (K % 64 != 0) c.activation = pair == 0 ? Activation::kGeluTanh : Activation::kGelu;
      c.has[Part::kBias0] = true, c.has[Part::kResidual] = K % 64 == 0;
      c.has[Part::kScale] = c.has[Part::kRow] = K == 328;
      RunDevice(c, 5);
    }
  }
}
TEST(CudaGemmPlainWaves) { RunWaves(30000, 0); }
TEST(CudaGemmEqualsWaves) {
  RunWaves(31000, 1);
  RunWaves(32000, 2);
}

// A GEMM with a K of 0, and one without rows.
TEST(CudaGemmEdges) {
  for (int64_t K : {0, 8}) {
    for (int64_t M : {0, 3}) {
      Case c;
      c.seed = 3, c.dtype = DType::kF16, c.lead = {M}, c.N = 72, c.K = K;
      c.activation = Activation::kSilu;
      c.has[Part::kBias0] = true;
      RunDevice(c, 1);
    }
  }
}

TEST(CudaGemmRefuses) {
  Random random(1);
  std::unique_ptr<Op> op;
  CHECK(Description().create(Attributes("axes m = x0.0, n = x0.1; out y0 f16 [m, n] = tanh(x0[m, n])", 0), &op).ok());
  Tensor inputs[2] = {Draw(DType::kF16, {2, 8}, 1, &random).View(nullptr),
                      Draw(DType::kF16, {8, 8}, 1, &random).View(nullptr)};
  DevicePlan plan;
  Status status = op->PlanDevice(inputs, 2, &plan);
  CHECK(!status.ok() && status.message().rfind("CUDA:", 0) == 0, status.message());
  CHECK(Description().create(Attributes("", 0), &op).ok());
  CHECK(op->PlanDevice(inputs, 2, &plan).ok());
  inputs[0].dtype = inputs[1].dtype = DType::kF32;
  status = op->PlanDevice(inputs, 2, &plan);
  CHECK(!status.ok() && status.message().find("take fp16 and bf16") != std::string::npos, status.message());
}

}  // namespace
}  // namespace stof::test
