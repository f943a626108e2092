// SPDX-License-Identifier: Apache-2.0
// The sparse MLP beside the dense one in cuBLAS, in the same run: captured graphs over layers whose weights exceed L2.
//
// bench_cuda_sparse_mlp [--blas PATH] [--bf16] [--shape K F N] [--layers L] [--quick | --many] [--only MODE]
//                       [--json FILE]
//   --blas  libcublas.so; else found by its name; without one only this library's times are given
//   --quick 1 and 8 tokens; --many: 32 to 2048 tokens, of which each needs 25 % of the neurons
// The bound is that of the bytes read, not of multiplications.
//   MODE    predicted (gate, up, down with a predictor of rank 4 % of F), gated (gate is an input), plain
// The dense MLP is its matmuls alone: three, of which gated and plain leave out the first one as the sparse one does.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/bench/bench_graph.h"
#include "cuda/sparse_mlp/run.h"

namespace {

using stof::DType;
using stof::SparseMlpArgs;

__device__ uint32_t Mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>(x >> 32);
}
__device__ float Unit(uint64_t seed, int64_t i) {  // [-1, 1)
  return static_cast<float>(Mixed((seed << 40) + static_cast<uint64_t>(i) + 1)) * 0x1p-31f - 1.0f;
}
__device__ void Store(void* to, bool is_bf16, int64_t i, float x) {
  if (is_bf16) {
    static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(x);
  } else {
    static_cast<__half*>(to)[i] = __float2half_rn(x);
  }
}
__device__ float Load(const void* from, bool is_bf16, int64_t i) {
  return is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i])
                 : __half2float(static_cast<const __half*>(from)[i]);
}
__global__ void Fill(void* to, bool is_bf16, int64_t count, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    Store(to, is_bf16, i, scale * Unit(seed, i));
  }
}
// Values whose share `density` is positive.
__global__ void FillGate(void* to, bool is_bf16, int64_t count, uint64_t seed, float density) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    const float size = 0.1f + fabsf(Unit(seed, i));
    Store(to, is_bf16, i, (Unit(seed + 1, i) + 1) / 2 < density ? size : -size);
  }
}
// y[t, j] = rows[j] · x[t], of fp16 or bf16 rows and tokens of fp32 or theirs.
__global__ void Dots(const void* rows, const void* x, bool is_bf16, bool has_floats, int64_t T, int64_t J, int64_t K,
                     float* y) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= T * J) return;
  float sum = 0;
  for (int64_t k = 0; k < K; ++k) {
    const int64_t at = i / J * K + k;
    sum += Load(rows, is_bf16, i % J * K + k) * (has_floats ? static_cast<const float*>(x)[at] : Load(x, is_bf16, at));
  }
  y[i] = sum;
}

struct Blas {
  using Handle = void*;
  int (*create)(Handle*) = nullptr;
  int (*set_stream)(Handle, cudaStream_t) = nullptr;
  int (*gemm)(Handle, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*,
              void*, int, int, int, int) = nullptr;
  Handle handle = nullptr;

  bool Open(const char* path, cudaStream_t stream) {
    void* library = nullptr;
    for (const char* name : {path, "libcublas.so", "libcublas.so.13", "libcublas.so.12"}) {
      if (library == nullptr && name != nullptr) library = dlopen(name, RTLD_NOW);
    }
    if (library == nullptr) return false;
    create = reinterpret_cast<decltype(create)>(dlsym(library, "cublasCreate_v2"));
    set_stream = reinterpret_cast<decltype(set_stream)>(dlsym(library, "cublasSetStream_v2"));
    gemm = reinterpret_cast<decltype(gemm)>(dlsym(library, "cublasGemmEx"));
    return create != nullptr && set_stream != nullptr && gemm != nullptr && create(&handle) == 0 &&
           set_stream(handle, stream) == 0;
  }
  // y[T, rows] = x[T, columns] · w^T, w [rows, columns]; or x[T, rows] · w where it is transposed.
  void Run(bool is_bf16, const void* w, const void* x, void* y, int64_t T, int64_t rows, int64_t columns,
           bool is_transposed) const {
    constexpr int kHalf = 2, kBfloat = 14, kFloatSums = 68, kDefault = -1;
    const int type = is_bf16 ? kBfloat : kHalf;
    const float one = 1, zero = 0;
    const auto t = static_cast<int>(T), r = static_cast<int>(rows), c = static_cast<int>(columns);
    const int error =
        is_transposed
            ? gemm(handle, 0, 0, c, t, r, &one, w, type, c, x, type, r, &zero, y, type, c, kFloatSums, kDefault)
            : gemm(handle, 1, 0, r, t, c, &one, w, type, c, x, type, c, &zero, y, type, r, kFloatSums, kDefault);
    if (error != 0) std::fprintf(stderr, "cublasGemmEx: %d\n", error), std::exit(1);
  }
};

void* Allocate(int64_t bytes) {
  void* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 256))));
  return memory;
}

struct Layer {
  void *gate, *up, *down, *predictor_down, *predictor_up, *gate_values;
  float* threshold;
};

}  // namespace

// Longer than 80 lines: options, layers and the loop over shapes share the buffers that the timed lambdas capture.
int main(int argc, char** argv) {
  const char *path = nullptr, *json = nullptr, *only = nullptr;
  bool is_bf16 = false, is_quick = false, has_many_tokens = false;
  int64_t K = 4096, F = 11008, N = 4096, layers = 3;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const bool has_value = i + 1 < argc;
    if (option == "--bf16") {
      is_bf16 = true;
    } else if (option == "--quick") {
      is_quick = true;
    } else if (option == "--many") {
      has_many_tokens = true;
    } else if (option == "--blas" && has_value) {
      path = argv[++i];
    } else if (option == "--json" && has_value) {
      json = argv[++i];
    } else if (option == "--only" && has_value) {
      only = argv[++i];
    } else if (option == "--layers" && has_value) {
      layers = std::atoll(argv[++i]);
    } else if (option == "--shape" && i + 3 < argc) {
      K = std::atoll(argv[i + 1]), F = std::atoll(argv[i + 2]), N = std::atoll(argv[i + 3]), i += 3;
    } else {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    }
  }
  const int64_t R = (F + 12) / 25, most_tokens = has_many_tokens ? 2048 : 16;
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreate(&stream));
  Blas blas;
  const bool has_blas = blas.Open(path, stream);
  if (!has_blas) std::fprintf(stderr, "no cuBLAS: --blas PATH; dense times are left out\n");
  cudaDeviceProp device;
  CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  int kilohertz = 0, bits = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, 0));
  CHECK_CUDA(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, 0));
  const double bandwidth = 2e-6 * kilohertz * bits / 8;  // GB/s
  std::printf("%s, %.0f GB/s, K %lld F %lld N %lld R %lld, %s, %lld layers\n", device.name, bandwidth,
              static_cast<long long>(K), static_cast<long long>(F), static_cast<long long>(N),
              static_cast<long long>(R), is_bf16 ? "bf16" : "fp16", static_cast<long long>(layers));

  const std::vector<int64_t> tokens = has_many_tokens ? std::vector<int64_t>{32, 128, 512, 2048}
                                      : is_quick      ? std::vector<int64_t>{1, 8}
                                                      : std::vector<int64_t>{1, 2, 4, 8, 16};
  const std::vector<double> densities = has_many_tokens ? std::vector<double>{0.25}
                                        : is_quick      ? std::vector<double>{0.1, 1.0}
                                                        : std::vector<double>{0.01, 0.05, 0.1, 0.25, 0.5, 1.0};

  uint64_t seed = 1;
  const auto fill = [&](int64_t count, double scale) {
    void* const to = Allocate(2 * count);
    Fill<<<1024, 256>>>(to, is_bf16, count, seed++, static_cast<float>(scale));
    return to;
  };
  std::vector<Layer> all;
  for (int64_t l = 0; l < layers; ++l) {
    Layer layer = {};
    layer.gate = fill(F * K, 0.05), layer.up = fill(F * K, 0.05), layer.down = fill(F * N, 0.05);
    layer.predictor_down = fill(R * K, 0.05), layer.predictor_up = fill(F * R, 0.05);
    layer.gate_values = Allocate(2 * F * most_tokens);
    layer.threshold = static_cast<float*>(Allocate(4));
    all.push_back(layer);
  }
  void* const x = fill(most_tokens * K, 1);
  // hidden is not zero: power, and with it the clock, depends on the values that tensor cores multiply.
  void *const y = Allocate(2 * most_tokens * N), *const hidden = fill(most_tokens * F, 1),
              *const more = Allocate(2 * most_tokens * F);
  auto* const projected = static_cast<float*>(Allocate(4 * most_tokens * R));
  auto* const scores = static_cast<float*>(Allocate(4 * most_tokens * F));
  constexpr size_t kWorkspace = size_t{512} << 20;
  void* const workspace = Allocate(kWorkspace);
  FILE* const out = json == nullptr ? nullptr : std::fopen(json, "w");
  if (out != nullptr) std::fprintf(out, "[");
  bool is_first = true;
  std::printf("%-10s %3s %8s %9s %9s %7s %9s %6s\n", "mode", "T", "active", "sparse us", "dense us", "gain", "bound",
              "share");

  for (const char* mode : {"predicted", "gated", "plain"}) {
    if (only != nullptr && std::strcmp(only, mode) != 0) continue;
    const bool is_predicted = std::strcmp(mode, "predicted") == 0, has_up = std::strcmp(mode, "plain") != 0;
    for (const int64_t T : tokens) {
      for (const double density : densities) {
        double used = 0;  // neurons that a token needs, of a layer
        std::vector<float> values(static_cast<size_t>(T * F));
        for (Layer& layer : all) {
          if (is_predicted) {
            Dots<<<static_cast<unsigned>(T * R / 128 + 1), 128>>>(layer.predictor_down, x, is_bf16, false, T, R, K,
                                                                  projected);
            Dots<<<static_cast<unsigned>(T * F / 128 + 1), 128>>>(layer.predictor_up, projected, is_bf16, true, T, F, R,
                                                                  scores);
            CHECK_CUDA(cudaMemcpy(values.data(), scores, values.size() * 4, cudaMemcpyDeviceToHost));
            std::vector<float> sorted = values;
            const auto at = static_cast<int64_t>(static_cast<double>(T * F) * (1 - density));
            std::nth_element(sorted.begin(), sorted.begin() + at, sorted.end());
            const float threshold = sorted[static_cast<size_t>(at)] - (at == 0 ? 1 : 0);
            CHECK_CUDA(cudaMemcpy(layer.threshold, &threshold, 4, cudaMemcpyHostToDevice));
            for (float& v : values) v = v > threshold ? 1 : 0;
          } else {
            FillGate<<<1024, 256>>>(layer.gate_values, is_bf16, T * F, seed += 2, static_cast<float>(density));
            std::vector<uint16_t> raw(values.size());
            CHECK_CUDA(cudaMemcpy(raw.data(), layer.gate_values, raw.size() * 2, cudaMemcpyDeviceToHost));
            for (size_t i = 0; i < raw.size(); ++i) values[i] = raw[i] >> 15 == 0 ? 1 : 0;
          }
          for (int64_t j = 0; j < F; ++j) {
            bool is_used = false;
            for (int64_t t = 0; t < T; ++t) is_used = is_used || values[static_cast<size_t>(t * F + j)] > 0;
            used += is_used ? 1 : 0;
          }
        }
        used /= static_cast<double>(layers);
        size_t next = 0;
        stof::RunContext context;
        context.on_cuda = true, context.stream = stream, context.self = workspace;
        context.allocate = [](void* self, size_t bytes) { return bytes <= kWorkspace ? self : nullptr; };
        const auto sparse = [&] {
          const Layer& layer = all[next++ % all.size()];
          SparseMlpArgs a;
          a.T = T, a.K = K, a.F = F, a.N = N, a.R = is_predicted ? R : 0;
          a.dtype = is_bf16 ? DType::kBF16 : DType::kF16;
          a.activation = stof::Activation::kRelu;
          a.input = x, a.output = y;
          a.down_weight.data = layer.down;
          if (has_up) a.up_weight.data = layer.up;
          if (is_predicted) {
            a.selection = stof::SparseMlpSelection::kPredictor;
            a.gate_weight.data = layer.gate, a.threshold = layer.threshold;
            a.predictor_down.data = layer.predictor_down, a.predictor_up.data = layer.predictor_up;
          } else {
            a.gate = layer.gate_values;
          }
          const stof::Status status = stof::cuda::RunSparseMlp(a, context);
          if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str()), std::exit(1);
        };
        const auto dense = [&] {
          const Layer& layer = all[next++ % all.size()];
          if (is_predicted) blas.Run(is_bf16, layer.gate, x, more, T, F, K, false);
          if (has_up) blas.Run(is_bf16, layer.up, x, hidden, T, F, K, false);
          blas.Run(is_bf16, layer.down, hidden, y, T, F, N, true);
        };
        const int calls = static_cast<int>(layers) * 4;
        const double dense_time = has_blas ? TimeGraph(stream, calls, dense, 40) : 0;
        const double time = TimeGraph(stream, calls, sparse, 40);
        const double item = 2;
        const double touched = item * (used * static_cast<double>(N + (has_up ? K : 0) + (is_predicted ? K : 0)) +
                                       (is_predicted ? static_cast<double>(R * (K + F)) : static_cast<double>(T * F)));
        const double bound = touched / bandwidth * 1e-3;
        std::printf("%-10s %3lld %7.1f%% %9.2f %9.2f %6.2fx %9.2f %5.0f%%\n", mode, static_cast<long long>(T),
                    100 * density, time, dense_time, dense_time / time, bound, 100 * bound / time);
        std::fflush(stdout);
        if (out != nullptr) {
          std::fprintf(out,
                       "%s\n{\"mode\": \"%s\", \"T\": %lld, \"density\": %g, \"used\": %.1f, \"sparse_us\": %.3f, "
                       "\"dense_us\": %.3f, \"touched_bytes\": %.0f, \"share_of_bandwidth\": %.4f}",
                       is_first ? "" : ",", mode, static_cast<long long>(T), density, used, time, dense_time, touched,
                       bound / time);
        }
        is_first = false;
      }
    }
  }
  if (out != nullptr) {
    std::fprintf(out, "\n]\n");
    std::fclose(out);
  }
  return 0;
}
