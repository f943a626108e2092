// SPDX-License-Identifier: Apache-2.0
// GEMM with an epilogue beside cuBLASLt's in the same run: captured graphs, median of replays, by turns.
//
// bench_cuda_gemm [--lt PATH] [--all] [--quick] [--only NAME] [--bf16] [--json FILE]
//   --lt    libcublasLt.so; else found by its name; without one only this library's times are given
//   --all   every kernel (STOF_CUDA_GEMM=name does the same for one), and the choice without timing
//   --quick that alone
// Unfused: the best of cuBLASLt's eight first algorithms, and a kernel of 16 bytes a thread for what it leaves.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/bench/bench_graph.h"
#include "cuda/common/activation.cuh"
#include "cuda/gemm/choose.h"
#include "cuda/gemm/cublaslt.h"
#include "cuda/gemm/cublaslt_gemm.h"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/gemm.h"
#include "plugins/core/contract/cuda_backend.h"

namespace {

using stof::Activation;
using stof::GemmArgs;
namespace cuda = stof::cuda;
using stof::cuda::CublasLt;

struct Row {
  const char* name;
  int64_t M, N, K;
  Activation activation;
  bool bias, pair, residual;
};
// Products of BERT, ViT (768), GPT-2 (by tanh), T5 (ReLU, no bias), BERT-large (1024), LLaMA and ModernBERT at
// (1, 128), (1, 512), (8, 512) and (16, 2048).
constexpr Activation kNone = Activation::kNone, kErf = Activation::kGelu, kTanh = Activation::kGeluTanh,
                     kRelu = Activation::kRelu, kSilu = Activation::kSilu;
constexpr Row kRows[] = {
    {"ffn1", 4096, 3072, 768, kErf, true, false, false},
    {"ffn1-tanh", 4096, 3072, 768, kTanh, true, false, false},
    {"ffn1-relu", 4096, 3072, 768, kRelu, false, false, false},
    {"ffn2", 4096, 768, 3072, kNone, true, false, true},
    {"out", 4096, 768, 768, kNone, true, false, true},
    {"qkv", 4096, 2304, 768, kNone, true, false, false},
    {"large-ffn1", 4096, 4096, 1024, kErf, true, false, false},
    {"large-ffn2", 4096, 1024, 4096, kNone, true, false, true},
    {"large-out", 4096, 1024, 1024, kNone, true, false, true},
    {"llama-down", 4096, 4096, 11008, kNone, false, false, true},
    {"square-gelu", 4096, 4096, 4096, kErf, true, false, false},
    {"modern-mlp", 4096, 1152, 768, kErf, false, true, false},
    {"modern-mlp-2x2k", 4096, 2624, 1024, kErf, false, true, false},
    {"llama-mlp", 4096, 11008, 4096, kSilu, false, true, false},
    {"long-ffn1", 32768, 3072, 768, kErf, true, false, false},
    {"long-ffn1-tanh", 32768, 3072, 768, kTanh, true, false, false},
    {"long-ffn1-relu", 32768, 3072, 768, kRelu, false, false, false},
    {"long-ffn2", 32768, 768, 3072, kNone, true, false, true},
    {"long-out", 32768, 768, 768, kNone, true, false, true},
    {"long-qkv", 32768, 2304, 768, kNone, true, false, false},
    {"long-large-ffn1", 32768, 4096, 1024, kErf, true, false, false},
    {"long-large-ffn2", 32768, 1024, 4096, kNone, true, false, true},
    {"long-modern-mlp", 32768, 1152, 768, kErf, false, true, false},
    {"512-ffn1", 512, 3072, 768, kErf, true, false, false},
    {"512-ffn2", 512, 768, 3072, kNone, true, false, true},
    {"512-modern-mlp", 512, 1152, 768, kErf, false, true, false},
    {"128-ffn1", 128, 3072, 768, kErf, true, false, false},
    {"128-ffn1-tanh", 128, 3072, 768, kTanh, true, false, false},
    {"128-ffn1-relu", 128, 3072, 768, kRelu, false, false, false},
    {"128-ffn2", 128, 768, 3072, kNone, true, false, true},
    {"128-out", 128, 768, 768, kNone, true, false, true},
    {"128-qkv", 128, 2304, 768, kNone, true, false, false},
    {"128-large-ffn1", 128, 4096, 1024, kErf, true, false, false},
    {"128-large-ffn2", 128, 1024, 4096, kNone, true, false, true},
    {"128-llama-mlp", 128, 11008, 4096, kSilu, false, true, false},
    {"128-llama-down", 128, 4096, 11008, kNone, false, false, true},
    {"128-modern-mlp", 128, 1152, 768, kErf, false, true, false},
    {"square", 8192, 8192, 8192, kNone, false, false, false},
};

// y = act(x[, :F]) * x[, F:], or act(x) + residual: what stands behind a product that cuBLASLt cannot fuse.
template <typename T>
__global__ void Unfused(const T* x, const T* residual, T* y, int64_t rows, int64_t columns, int64_t stride, bool pair,
                        int activation) {
  const int64_t at = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * 8;
  if (at >= rows * columns) return;
  const int64_t row = at / columns, column = at % columns;
  uint32_t a[4], b[4], out[4];
  stof::cuda::LoadConstant(a, reinterpret_cast<const uint32_t*>(x + row * stride + column));
  if (pair) {
    stof::cuda::LoadConstant(b, reinterpret_cast<const uint32_t*>(x + row * stride + columns + column));
  } else if (residual != nullptr) {
    stof::cuda::LoadConstant(b, reinterpret_cast<const uint32_t*>(residual + at));
  }
  float v[8], w[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    stof::cuda::UnpackPair<T>(a[i], &v[2 * i], &v[2 * i + 1]);
    stof::cuda::UnpackPair<T>(b[i], &w[2 * i], &w[2 * i + 1]);
  }
  stof::cuda::Activate(activation, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = pair ? v[i] * w[i] : residual != nullptr ? v[i] + w[i] : v[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = stof::cuda::Pack<T>(v[2 * i], v[2 * i + 1]);
  *reinterpret_cast<uint4*>(y + at) = make_uint4(out[0], out[1], out[2], out[3]);
}

// The largest error of some elements, in units of 2^-11 (2^-8 for bf16) of 1 + |expected|. What is expected has sums in
// fp64 and activations in fp32.
template <typename T>
__global__ void Check(GemmArgs g, int64_t samples, float* worst) {
  using stof::cuda::ToFloat;
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= samples) return;
  const uint64_t mixed = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15u;
  const int64_t m = static_cast<int64_t>((mixed >> 33) % static_cast<uint64_t>(g.M));
  const int64_t n = static_cast<int64_t>((mixed * 0x94d049bb133111ebu >> 33) % static_cast<uint64_t>(g.N));
  const auto at = [](const void* p, int64_t k) { return static_cast<double>(ToFloat(static_cast<const T*>(p)[k])); };
  double x = 0, u = 0;
  for (int64_t k = 0; k < g.K; ++k) {
    x += at(g.a, m * g.K + k) * at(g.b0, k * g.stride + n);
    if (g.b1 != nullptr) u += at(g.a, m * g.K + k) * at(g.b1, k * g.stride + n);
  }
  if (g.bias0 != nullptr) x += at(g.bias0, n);
  double y = stof::cuda::Activate<stof::cuda::Fp32Activations>(g.activation, static_cast<float>(x));
  if (g.b1 != nullptr) y *= u;
  if (g.residual != nullptr) y += at(g.residual, m * g.N + n);
  const double got = at(g.output, m * g.N + n);
  const double unit = sizeof(T) == 2 && ToFloat(T(1.0f + 1.0f / 512)) > 1.0f ? 0x1p-11 : 0x1p-8;
  const double error = got == got ? fabs(got - y) / (1 + fabs(y)) / unit : 1e30;
  atomicMax(reinterpret_cast<int*>(worst), __float_as_int(static_cast<float>(error)));
}

void* Halves(int64_t count, uint32_t seed, bool bf16, float range) {
  // A large tensor repeats a part whose length is prime.
  constexpr int64_t kPart = 999983;
  std::vector<uint16_t> values(static_cast<size_t>(std::min(count, kPart)));
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (uint16_t& x : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const float value = (static_cast<float>(state >> 40) * 0x1p-23f - 1.0f) * range;
    if (bf16) {
      const __nv_bfloat16 half = __float2bfloat16(value);
      std::memcpy(&x, &half, 2);
    } else {
      const __half half = __float2half(value);
      std::memcpy(&x, &half, 2);
    }
  }
  void* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, static_cast<size_t>(count) * 2));
  for (int64_t at = 0; at < count; at += kPart) {
    CHECK_CUDA(cudaMemcpy(static_cast<uint16_t*>(memory) + at, values.data(),
                          static_cast<size_t>(std::min(count - at, kPart)) * 2, cudaMemcpyHostToDevice));
  }
  return memory;
}

// Longer than 80 lines: one row from its operands to its record; what is timed are lambdas that capture the operands.
template <typename T>
void Bench(const Row& row, CublasLt* lt, bool all, bool quick, FILE* report, bool* first) {
  constexpr bool kBf16 = sizeof(T) == 2 && std::is_same<T, __nv_bfloat16>::value;
  constexpr size_t kWorkspace = size_t{32} << 20;
  const int64_t wide = row.pair ? 2 * row.N : row.N;
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  void* const a = Halves(row.M * row.K, 1, kBf16, 1.0f);
  void* const b = Halves(row.K * wide, 2, kBf16, 3.0f / std::sqrt(static_cast<float>(row.K)));
  void* const bias = Halves(wide, 3, kBf16, 1.0f);
  void* const residual = Halves(row.M * row.N, 4, kBf16, 1.0f);
  void *y = nullptr, *product = nullptr, *workspace = nullptr;
  float* worst = nullptr;
  CHECK_CUDA(cudaMalloc(&y, static_cast<size_t>(2 * row.M * row.N)));
  CHECK_CUDA(cudaMalloc(&product, static_cast<size_t>(2 * row.M * wide)));
  CHECK_CUDA(cudaMalloc(&workspace, kWorkspace));
  CHECK_CUDA(cudaMalloc(&worst, 4));

  const auto free_all = [&] {
    for (void* memory : {a, b, bias, residual, y, product, workspace, static_cast<void*>(worst)}) {
      CHECK_CUDA(cudaFree(memory));
    }
    CHECK_CUDA(cudaStreamDestroy(stream));
  };

  GemmArgs args;
  args.M = row.M, args.N = row.N, args.K = row.K;
  args.dtype = kBf16 ? stof::DType::kBF16 : stof::DType::kF16;
  args.a = a, args.b0 = b, args.stride = wide, args.output = y;
  if (row.pair) args.b1 = static_cast<const char*>(b) + 2 * row.N;
  args.activation = row.activation;
  if (row.bias) args.bias0 = bias;
  if (row.residual) args.residual = residual;
  stof::RunContext context;
  context.on_cuda = true;
  context.stream = stream;
  context.self = workspace;
  context.allocate = [](void* self, size_t bytes) { return bytes <= kWorkspace ? self : nullptr; };
  const auto exit_unless_ok = [&](const stof::Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "%s: %s\n", row.name, status.message().c_str());
    std::exit(1);
  };
  const auto ours = [&] { exit_unless_ok(cuda::RunGemm(args, context)); };
  const double flops = 2.0 * static_cast<double>(row.M) * static_cast<double>(wide) * static_cast<double>(row.K);
  const int calls = flops < 4e10 ? 10 : 1;
  const auto error = [&] {
    CHECK_CUDA(cudaMemsetAsync(y, 0xff, static_cast<size_t>(2 * row.M * row.N), stream));
    CHECK_CUDA(cudaMemsetAsync(worst, 0, 4, stream));
    ours();
    Check<T><<<64, 256, 0, stream>>>(args, 64 * 256, worst);
    float value = 0;
    CHECK_CUDA(cudaMemcpyAsync(&value, worst, 4, cudaMemcpyDeviceToHost, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    return value;
  };

  std::printf("%-16s %5lld x %5lld x %5lld", row.name, static_cast<long long>(row.M), static_cast<long long>(row.N),
              static_cast<long long>(row.K));
  cuda::KernelRequests& requests = cuda::GemmRequests();
  cuda::GemmProblem problem;
  exit_unless_ok(cuda::DescribeGemm(args, true, &problem));
  for (const cuda::GemmKernelEntry& kernel : cuda::FindGemmSm90(problem)) {
    const std::string name = KernelName(kernel);
    if (!all || !requests.Force(name).ok()) continue;
    const float off = error();
    std::printf(" [%s %.1f%s]", name.c_str(), TimeGraph(stream, calls, ours, 32), off < 4 ? "" : " WRONG");
  }
  requests.Release();
  const double by_model = TimeGraph(stream, calls, ours, 32);
  if (quick) {
    std::printf(" model %.1f\n", by_model);
    free_all();
    return;
  }
  args.may_wait = true;
  const float off = error();
  cuda::GemmPlan chosen;
  exit_unless_ok(cuda::RunGemmAndGetPlan(args, context, &chosen));
  const std::string kernel = KernelName(*chosen.kernel);

  // cuBLASLt: the product alone, and with the epilogue where it has one, by the best of its eight first algorithms; and
  // by the one that the library takes.
  double plain = 0, fused = 0, behind = 0, own_lt = 0;
  float off_lt = 0;
  const bool own_has = lt != nullptr && cuda::CanUseCublasLt(args);
  CublasLt::Shape shape;
  shape.M = row.M, shape.N = wide, shape.K = row.K, shape.stride = wide, shape.bf16 = kBf16;
  shape.alignment = 256, shape.workspace = kWorkspace;
  size_t best_plain = 0, best_fused = 0;
  CublasLt::Problem lt_plain, lt_fused;
  CublasLt::Operands operands;
  operands.a = a, operands.b = b, operands.y = row.pair ? product : y, operands.workspace = workspace;
  const auto run_plain = [&] { lt->Run(lt_plain, best_plain, operands, stream); };
  const auto run_fused = [&] {
    CublasLt::Operands all_of_them = operands;
    if (row.bias) all_of_them.bias = bias;
    if (row.residual) all_of_them.c = residual;
    lt->Run(lt_fused, best_fused, all_of_them, stream);
  };
  const auto run_behind = [&] {
    const auto blocks = static_cast<unsigned>((row.M * row.N / 8 + 255) / 256);
    Unfused<T><<<blocks, 256, 0, stream>>>(static_cast<const T*>(operands.y),
                                           row.residual ? static_cast<const T*>(residual) : nullptr, static_cast<T*>(y),
                                           row.M, row.N, wide, row.pair, static_cast<int>(row.activation));
  };
  if (lt != nullptr && lt->Make(shape, nullptr, 8, &lt_plain)) {
    const auto pick = [&](const CublasLt::Problem& problem, size_t* best, const auto& run) {
      double least = 0;
      size_t found = 0;
      for (size_t i = 0; i < problem.algorithms.size(); ++i) {
        *best = i;
        const double time = TimeGraph(stream, calls, run, 24);
        if (i == 0 || time < least) least = time, found = i;
      }
      *best = found;
    };
    pick(lt_plain, &best_plain, run_plain);
    if (!row.pair && (row.bias || row.residual || row.activation != kNone)) {
      shape.epilogue = row.activation == kRelu   ? row.bias ? CublasLt::kReluBias : CublasLt::kRelu
                       : row.activation == kNone ? row.bias ? CublasLt::kBias : CublasLt::kNothing
                                                 : CublasLt::kGeluBias;
      if (lt->Make(shape, row.bias ? bias : nullptr, 8, &lt_fused)) pick(lt_fused, &best_fused, run_fused);
    }
    behind = TimeGraph(stream, calls, run_behind);
  }
  const auto taking_lt = [&](const auto& what) {
    (void)requests.Force("cublaslt");
    const auto result = what();
    requests.Release();
    return result;
  };
  if (own_has) off_lt = taking_lt(error);
  // By turns, so that the clock is the same for all.
  constexpr int kTurns = 3;
  std::vector<double> time_ours, time_plain, time_fused, time_unfused, time_own_lt;
  for (int turn = 0; turn < kTurns; ++turn) {
    time_ours.push_back(TimeGraph(stream, calls, ours));
    if (!lt_plain.algorithms.empty()) {
      time_plain.push_back(TimeGraph(stream, calls, run_plain));
      time_unfused.push_back(TimeGraph(stream, calls, [&] {
        run_plain();
        run_behind();
      }));
    }
    if (!lt_fused.algorithms.empty()) time_fused.push_back(TimeGraph(stream, calls, run_fused));
    if (own_has) time_own_lt.push_back(taking_lt([&] { return TimeGraph(stream, calls, ours); }));
  }
  const auto median = [](std::vector<double> v) {
    if (v.empty()) return 0.0;
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  };
  const double mine = median(time_ours), unfused = median(time_unfused);
  plain = median(time_plain), fused = median(time_fused), own_lt = median(time_own_lt);
  std::printf(
      " model %.1f | stof %s %.2f us %.0f TFLOPS | Lt %.2f #%d, epilogue %.2f #%d, + kernel %.2f (%.2f) | %.3f %.3f "
      "%.3f "
      "| by Lt %.2f "
      "| err %.2f %.2f\n",
      by_model, kernel.c_str(), mine, flops / mine * 1e-6, plain, static_cast<int>(best_plain), fused,
      static_cast<int>(best_fused), unfused, behind, plain / mine, fused / mine, unfused / mine, own_lt,
      static_cast<double>(off), static_cast<double>(off_lt));
  std::fflush(stdout);
  if (report != nullptr) {
    std::fprintf(report,
                 "%s\n  {\"name\": \"%s\", \"type\": \"%s\", \"M\": %lld, \"N\": %lld, \"K\": %lld, \"pair\": %d, "
                 "\"kernel\": \"%s\", "
                 "\"stof_us\": %.3f, \"lt_us\": %.3f, \"lt_epilogue_us\": %.3f, \"lt_and_kernel_us\": %.3f, "
                 "\"kernel_us\": %.3f, \"by_lt_us\": %.3f, \"error\": %.3f}",
                 *first ? "[" : ",", row.name, kBf16 ? "bf16" : "fp16", static_cast<long long>(row.M),
                 static_cast<long long>(row.N), static_cast<long long>(row.K), row.pair ? 1 : 0, kernel.c_str(), mine,
                 plain, fused, unfused, behind, own_lt, static_cast<double>(off));
    *first = false;
  }
  free_all();
}

}  // namespace

int main(int argc, char** argv) {
  const char *path = nullptr, *only = nullptr, *json = nullptr;
  bool all = false, bf16 = false, quick = false;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--all") all = true;
    if (word == "--bf16") bf16 = true;
    if (word == "--quick") quick = true;
    if (word == "--lt" && i + 1 < argc) path = argv[++i];
    if (word == "--only" && i + 1 < argc) only = argv[++i];
    if (word == "--json" && i + 1 < argc) json = argv[++i];
  }
  CublasLt lt;
  const bool has_lt = lt.Open(path);
  if (!has_lt) std::printf("no cuBLASLt: give its path by --lt\n");
  FILE* const report = json == nullptr ? nullptr : std::fopen(json, "w");
  bool first = true;
  for (const Row& row : kRows) {
    if (only != nullptr && std::strstr(row.name, only) == nullptr) continue;
    if (bf16) {
      Bench<__nv_bfloat16>(row, has_lt ? &lt : nullptr, all, quick, report, &first);
    } else {
      Bench<__half>(row, has_lt ? &lt : nullptr, all, quick, report, &first);
    }
  }
  if (report != nullptr) {
    std::fprintf(report, "%s]\n", first ? "[" : "\n");
    std::fclose(report);
  }
  return 0;
}
