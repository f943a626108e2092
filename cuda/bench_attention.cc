// SPDX-License-Identifier: Apache-2.0
// The CUDA attention kernel alone: one call as a captured graph, timed with events, median of replays. Prints useful
// TFLOPS (allowed pairs), TFLOPS on the tiles that the mask keeps, and the build time of the block mask.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/attention_sm90.h"
#include "plugins/core/block_mask_builder.h"
#include "plugins/core/cuda_backend.h"

namespace {

struct Row {
  const char* name;
  const char* mask;
  int64_t B, H, S, D;
  int64_t T = 0, G = 0;  // 0: as S and H
};

constexpr int kReplays = 80;

constexpr Row kRows[] = {
    {"dense", "", 1, 16, 4096, 64},
    {"causal", "k <= q", 1, 16, 4096, 64},
    {"window-128", "abs(q - k) <= 128", 1, 16, 4096, 64},
    {"longformer", "abs(q - k) <= 128 or k < 64 or q < 64", 1, 16, 4096, 64},
    {"dilated", "abs(q - k) <= 256 and (q - k) % 2 == 0", 1, 16, 4096, 64},
    {"s2", "k <= q and (q // 64 - k // 64 < 8 or (k // 64 + h) % 8 == 0)", 1, 16, 4096, 64},
    {"bits", "(q - k) % 5 != 0", 1, 16, 4096, 64},
    {"dense", "", 16, 12, 512, 64},
    {"window-128", "abs(q - k) <= 128", 16, 12, 512, 64},
    {"dense", "", 1, 32, 8192, 128},
    {"bits", "(q - k) % 5 != 0", 1, 32, 8192, 128},
    {"causal", "k <= q", 1, 32, 8192, 128},
    {"window-128", "abs(q - k) <= 128", 1, 32, 8192, 128},
    {"longformer", "abs(q - k) <= 128 or k < 64 or q < 64", 1, 32, 8192, 128},
    {"s2", "k <= q and (q // 64 - k // 64 < 8 or (k // 64 + h) % 8 == 0)", 1, 32, 8192, 128},
};

// One new token against a cache; the query is the last of T positions.
constexpr const char* kWindow = "k <= q and q - k < 1024";
constexpr const char* kStride = "k <= q and (q - k < 512 or (k // 64 + h) % 8 == 0)";
constexpr Row kDecodeRows[] = {
    {"dense", "", 1, 32, 1, 128, 1 << 10, 8},       {"dense", "", 1, 32, 1, 128, 1 << 13, 8},
    {"dense", "", 1, 32, 1, 128, 1 << 15, 8},       {"dense", "", 1, 32, 1, 128, 1 << 17, 8},
    {"window", kWindow, 1, 32, 1, 128, 1 << 13, 8}, {"window", kWindow, 1, 32, 1, 128, 1 << 17, 8},
    {"stride", kStride, 1, 32, 1, 128, 1 << 13, 8}, {"stride", kStride, 1, 32, 1, 128, 1 << 15, 8},
    {"stride", kStride, 1, 32, 1, 128, 1 << 17, 8}, {"dense", "", 1, 16, 1, 64, 1 << 10, 16},
    {"dense", "", 1, 16, 1, 64, 1 << 13, 16},       {"dense", "", 1, 16, 1, 64, 1 << 15, 16},
    {"dense", "", 1, 16, 1, 64, 1 << 17, 16},       {"window", kWindow, 1, 16, 1, 64, 1 << 13, 16},
    {"window", kWindow, 1, 16, 1, 64, 1 << 17, 16}, {"stride", kStride, 1, 16, 1, 64, 1 << 15, 16},
    {"stride", kStride, 1, 16, 1, 64, 1 << 17, 16},
};

#define CHECK_CUDA(call)                                                   \
  do {                                                                     \
    const cudaError_t error_ = (call);                                     \
    if (error_ != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

// On the device, `count` of them; a long tensor repeats a part, for the host takes its time to draw numbers.
template <typename T, typename Draw>
void* RandomTensor(int64_t count, uint32_t seed, Draw draw) {
  constexpr int64_t kPart = int64_t{1} << 22;
  std::vector<T> values(static_cast<size_t>(std::min(count, kPart)));
  std::mt19937 random(seed);
  for (T& x : values) x = draw(static_cast<uint32_t>(random()));
  char* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, static_cast<size_t>(count) * sizeof(T)));
  for (int64_t at = 0; at < count; at += kPart) {
    const size_t bytes = static_cast<size_t>(std::min(count - at, kPart)) * sizeof(T);
    CHECK_CUDA(cudaMemcpy(memory + at * static_cast<int64_t>(sizeof(T)), values.data(), bytes, cudaMemcpyHostToDevice));
  }
  return memory;
}

void* RandomHalves(int64_t count, uint32_t seed) {
  // fp16 in (-2, 2): sign, exponents 10 to 15, mantissa.
  return RandomTensor<uint16_t>(count, seed, [](uint32_t bits) {
    return static_cast<uint16_t>((bits & 0x83ffu) | (10u + (bits >> 16) % 6u) << 10);
  });
}

void* RandomFloats(int64_t count, uint32_t seed) {
  return RandomTensor<float>(count, seed,
                             [](uint32_t bits) { return static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-30f; });
}

// Gives blocks one after the other, always from the beginning in the next run.
struct Workspace {
  char* memory = nullptr;
  size_t size = 0, used = 0;
  static void* Allocate(void* self, size_t bytes) {
    auto* space = static_cast<Workspace*>(self);
    const size_t at = (space->used + 255) / 256 * 256;
    if (at + bytes > space->size) return nullptr;
    space->used = at + bytes;
    return space->memory + at;
  }
};

// The largest error of a few rows of the first head against fp64, over the largest output there; fp32 only.
double ErrorOf(const Row& row, const stof::AttentionArgs& args) {
  const auto size = static_cast<size_t>(row.S * row.D);
  std::vector<float> tensors[4] = {std::vector<float>(size), std::vector<float>(size), std::vector<float>(size),
                                   std::vector<float>(size)};
  const void* from[] = {args.query, args.key, args.value, args.output};
  for (int i = 0; i < 4; ++i) CHECK_CUDA(cudaMemcpy(tensors[i].data(), from[i], 4 * size, cudaMemcpyDeviceToHost));
  double error = 0, largest = 0;
  for (int64_t q = 0; q < row.S; q += row.S / 8 - 1) {
    std::vector<double> out(static_cast<size_t>(row.D), 0.0);
    double sum = 0;
    for (int64_t k = 0; k < row.S; ++k) {
      double score = 0;
      for (int64_t d = 0; d < row.D; ++d) {
        score +=
            double{tensors[0][static_cast<size_t>(q * row.D + d)]} * tensors[1][static_cast<size_t>(k * row.D + d)];
      }
      const double weight = std::exp(score * static_cast<double>(args.scale));
      sum += weight;
      for (int64_t d = 0; d < row.D; ++d) {
        out[static_cast<size_t>(d)] += weight * tensors[2][static_cast<size_t>(k * row.D + d)];
      }
    }
    for (int64_t d = 0; d < row.D; ++d) {
      const double want = out[static_cast<size_t>(d)] / sum;
      error = std::max(error, std::abs(want - tensors[3][static_cast<size_t>(q * row.D + d)]));
      largest = std::max(largest, std::abs(want));
    }
  }
  return error / largest;
}

void Measure(const Row& row, stof::DType dtype) {
  stof::AttentionArgs args;
  const int64_t T = row.T > 0 ? row.T : row.S, G = row.G > 0 ? row.G : row.H;
  args.B = row.B, args.H = row.H, args.G = G, args.S = row.S, args.T = T, args.D = args.Dv = row.D;
  args.dtype = stof::DType::kF16;
  const int64_t query_count = row.B * row.H * row.S * row.D, count = row.B * G * T * row.D;
  args.dtype = dtype;
  const auto random = dtype == stof::DType::kF32 ? RandomFloats : RandomHalves;
  args.query = random(query_count, 1), args.key = random(count, 2), args.value = random(count, 3);
  args.output = random(query_count, 4);
  args.query_stride = args.output_stride = {row.H * row.S * row.D, row.S * row.D, row.D};
  args.key_stride = args.value_stride = {G * T * row.D, T * row.D, row.D};
  args.query_position = T - row.S;
  args.scale = 1.0f / std::sqrt(static_cast<float>(row.D));
  std::shared_ptr<const stof::AttentionMask> mask;
  stof::Status status = stof::MakeAttentionMask(row.mask, {}, &mask);
  const stof::ExprSizes sizes = {row.B, row.H, row.S, T, T - row.S};
  double tiles = 1, pairs = 1, build = 0;
  const bool decode = row.T > 0;
  const int m = decode ? 16 : 128, n = decode ? 64 : 128;
  if (status.ok() && row.mask[0] != '\0') {
    stof::BlockMask block;
    const auto start = std::chrono::steady_clock::now();
    status = stof::BuildBlockMask(mask->parts.fixed, sizes, m, n, &block);
    build = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    double kept = 0, whole = 0;
    for (int64_t h = 0; h < row.H; ++h) {
      const int64_t table = block.TableOf(0, h);
      for (int64_t r = table * block.rows; r < (table + 1) * block.rows; ++r) {
        kept += block.row_ptr[static_cast<size_t>(r) + 1] - block.row_ptr[static_cast<size_t>(r)];
        whole += static_cast<double>(T) / n;
        for (int32_t i = block.row_ptr[static_cast<size_t>(r)]; i < block.row_ptr[static_cast<size_t>(r) + 1]; ++i) {
          if (block.bits_id[static_cast<size_t>(i)] < 0) {
            pairs += m * n;
          } else {
            const size_t words = m * n / 32;
            for (size_t w = 0; w < words; ++w)
              pairs += __builtin_popcount(
                  block.bits[static_cast<size_t>(block.bits_id[static_cast<size_t>(i)]) * words + w]);
          }
        }
      }
    }
    tiles = kept / whole;
    pairs = (pairs - 1) / (static_cast<double>(row.H) * static_cast<double>(row.S) * static_cast<double>(T));
  }
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stof::RunContext context;
  context.on_cuda = true;
  context.stream = stream;
  Workspace space;
  space.size = static_cast<size_t>(8 * count + 1024 * query_count) + (size_t{16} << 20);
  CHECK_CUDA(cudaMalloc(&space.memory, space.size));
  context.allocate = Workspace::Allocate;
  context.self = &space;
  const auto run = [&] {
    space.used = 0;
    if (status.ok()) status = stof::FindCudaBackend()->attention(args, nullptr, *mask, sizes, {}, context);
    if (!status.ok()) {
      std::fprintf(stderr, "%s: %s\n", row.name, status.message().c_str());
      std::exit(1);
    }
  };
  run();
  CHECK_CUDA(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run();
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin = nullptr, end = nullptr;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kReplays; ++i) {
    CHECK_CUDA(cudaEventRecord(begin, stream));
    CHECK_CUDA(cudaGraphLaunch(executable, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= kReplays / 4) times.push_back(ms);
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  const double us = 1e3 * static_cast<double>(times[times.size() / 2]);
  const double flops = 4.0 * static_cast<double>(row.B * row.H * row.S * T * row.D);
  if (decode) {
    // A group of heads with one mask reads a key once, heads with masks of their own read their own keys.
    const bool own = row.mask == kStride;
    const double item = dtype == stof::DType::kF32 ? 4 : 2;
    const double bytes = 2 * item * static_cast<double>(row.B * (own ? row.H : G) * T * row.D) * tiles;
    std::printf("%-7s B%ld H%ld G%ld T%-6ld D%-3ld %8.1f us  %6.0f GB/s\n", row.name, row.B, row.H, G, T, row.D, us,
                bytes / us * 1e-3);
  } else {
    std::printf(
        "%-11s B%-2ld H%-2ld S%-5ld D%-3ld %9.1f us  %6.1f useful %6.1f on tiles TFLOPS  tiles %.3f  build %.2f ms\n",
        row.name, row.B, row.H, row.S, row.D, us, flops * pairs / us * 1e-6, flops * tiles / us * 1e-6, tiles, build);
  }
  if (dtype == stof::DType::kF32 && !decode && row.mask[0] == '\0') {
    std::printf("  largest error over largest output, a few rows: %.2e\n", ErrorOf(row, args));
  }
  std::fflush(stdout);
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  CHECK_CUDA(cudaGraphDestroy(graph));
  for (const void* memory : {args.query, args.key, args.value, static_cast<const void*>(args.output)}) {
    CHECK_CUDA(cudaFree(const_cast<void*>(memory)));
  }
  CHECK_CUDA(cudaFree(space.memory));
}

}  // namespace

// bench_cuda_attention [fp16 | bf16 | fp32] [decode] [name of a row]
int main(int argc, char** argv) {
  stof::DType dtype = stof::DType::kF16;
  int next = 1;
  if (argc > next && std::strcmp(argv[next], "fp16") == 0) ++next;
  if (argc > next && std::strcmp(argv[next], "bf16") == 0) dtype = stof::DType::kBF16, ++next;
  if (argc > next && std::strcmp(argv[next], "fp32") == 0) dtype = stof::DType::kF32, ++next;
  if (argc > next && std::strcmp(argv[next], "decode") == 0) {
    ++next;
    for (const Row& row : kDecodeRows) {
      if (argc <= next || std::strcmp(argv[next], row.name) == 0) Measure(row, dtype);
    }
    return 0;
  }
  for (const Row& row : kRows) {
    if (argc <= next || std::strcmp(argv[next], row.name) == 0) Measure(row, dtype);
  }
  return 0;
}
