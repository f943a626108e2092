// SPDX-License-Identifier: Apache-2.0
// The CUDA attention kernels alone: calls in a captured graph, timed with events, median of replays. Prints useful
// TFLOPS (allowed pairs), TFLOPS on the tiles that the mask keeps, and the build time of the block mask.
//
// bench_cuda_attention [fp16 | bf16 | fp32 | tf32] [int8 | int8_fp8] [decode | wide | extras | few | long] [--all]
// [--only NAME]... [--zeros] [--seconds S] [--json FILE]
//   tf32    fp32 tensors, products as by allow_tf32
//   int8    8-bit operands where there are kernels with them (attribute precision); quantization counts
//   decode  one query against a cache that is not in the L2 cache; wide  heads of more than 128 elements; extras biases
//   and softcap; few  masks with few keys a query, whose tiles are hardly filled; long  rows for int8 and int8_fp8, up
//   to 32768 keys
//   --all   times every kernel of the head size, or every kind for few queries, too, and says what the selector's model
//           thinks of each and how much slower its choice is than the best
//   --zeros and --seconds 0.5 repeat better than bursts: inputs of zeros leave the clock alone, and who runs so long
//   has the clock that the board's power allows (docs/lab/cuda-experiments.md, "Energy")
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "cuda/attention/families.h"
#include "cuda/attention/select.h"
#include "cuda/bench/attention_rows.h"
#include "cuda/bench/bench_graph.h"
#include "cuda/bench/bench_quantization.h"
#include "cuda/common/device_properties.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/mask/block_mask_builder.h"

namespace {

// Bytes of the sets of inputs of a query that decodes, and calls in a graph.
constexpr int64_t kCold = int64_t{128} << 20, kCalls = 100;
constexpr size_t kMostSets = 32;

bool zeros = false;
stof::AttentionPrecision precision = stof::AttentionPrecision::kFull;
double seconds = 0;  // of replays; 0: as many as TimeGraph takes

// On the device, `count` of them; a long tensor repeats a part, for the host takes its time to draw numbers.
template <typename T, typename Draw>
void* RandomTensor(int64_t count, uint32_t seed, Draw draw) {
  constexpr int64_t kPart = int64_t{1} << 22;
  std::vector<T> values(static_cast<size_t>(std::min(count, kPart)));
  std::mt19937 random(seed);
  for (T& x : values) x = zeros ? T{} : draw(static_cast<uint32_t>(random()));
  char* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, static_cast<size_t>(count) * sizeof(T)));
  for (int64_t at = 0; at < count; at += kPart) {
    const size_t bytes = static_cast<size_t>(std::min(count - at, kPart)) * sizeof(T);
    CHECK_CUDA(cudaMemcpy(memory + at * static_cast<int64_t>(sizeof(T)), values.data(), bytes, cudaMemcpyHostToDevice));
  }
  return memory;
}

void* RandomFp16(int64_t count, uint32_t seed) {
  // fp16 in (-2, 2): sign, exponents 10 to 15, mantissa.
  return RandomTensor<uint16_t>(count, seed, [](uint32_t bits) {
    return static_cast<uint16_t>((bits & 0x83ffu) | (10u + (bits >> 16) % 6u) << 10);
  });
}

// bf16 in (-2, 2): sign, six exponents, mantissa.
void* RandomBf16(int64_t count, uint32_t seed) {
  return RandomTensor<uint16_t>(count, seed, [](uint32_t bits) {
    return static_cast<uint16_t>((bits & 0x807fu) | (122u + (bits >> 16) % 6u) << 7);
  });
}

void* RandomFloats(int64_t count, uint32_t seed) {
  return RandomTensor<float>(count, seed,
                             [](uint32_t bits) { return static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-30f; });
}

// The same figures for programs.
FILE* report = nullptr;
int reported = 0;
template <typename... A>
void Report(const char* format, A... values) {
  if (report != nullptr) std::fprintf(report, format, values...);
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
  const void* from[] = {args.query.data, args.key.data, args.value.data, args.output.data};
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
      const double weight = std::exp(score * static_cast<double>(args.scores.scale));
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

void ExitUnlessOk(const stof::Status& status, const Row& row) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", row.name, status.message().c_str());
  std::exit(1);
}

// Microseconds of one call, by the kernel of that name; "": what STOF_CUDA_KERNEL says, else the selector's choice.
// Calls take the sets of inputs in turn.
double Time(const Row& row, const std::vector<stof::AttentionArgs>& sets, int calls, const stof::AttentionMask& mask,
            const stof::ExprSizes& sizes, Workspace* space, const std::string& kernel) {
  ExitUnlessOk(stof::cuda::AttentionRequests().Force(kernel), row);
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stof::RunContext context;
  context.on_cuda = true;
  context.stream = stream;
  context.allocate = Workspace::Allocate;
  context.self = space;
  size_t turn = 0;
  const auto run = [&] {
    space->used = 0;
    const stof::Status status =
        stof::FindCudaBackend()->attention.run(sets[turn++ % sets.size()], nullptr, mask, sizes, {}, context);
    ExitUnlessOk(status, row);
  };
  double us = TimeGraph(stream, calls, run);
  if (seconds > 0) us = TimeGraph(stream, calls, run, static_cast<int>(seconds * 1e6 / us / calls) + 1);
  CHECK_CUDA(cudaStreamDestroy(stream));
  stof::cuda::AttentionRequests().Release();
  return us;
}

// The time of every kind of kernel for few queries beside the choice, which took `chosen`.
void MeasureDecodeKinds(const Row& row, const std::vector<stof::AttentionArgs>& sets, int calls,
                        const stof::AttentionMask& mask, const stof::ExprSizes& sizes, Workspace* space,
                        double chosen) {
  constexpr const char* kKinds[] = {"splits", "clusters"};
  constexpr const char* kKernels[] = {"decode-splitkv", "decode-cluster"};
  double best = chosen;
  Report("%s", R"(, "kinds": {)");
  for (int kind = 0; kind < 2; ++kind) {
    const double us = Time(row, sets, calls, mask, sizes, space, kKernels[kind]);
    best = std::min(best, us);
    std::printf("    %-8s %9.2f us\n", kKinds[kind], us);
    Report(R"(%s"%s": %.2f)", kind == 0 ? "" : ", ", kKinds[kind], us);
  }
  std::printf("    regret %.1f %%\n", 100.0 * (chosen / best - 1.0));
  Report("%s", "}");
}

// Every kernel's time beside the model's, and the regret of the choice, which took `chosen`.
void MeasureAll(const Row& row, const stof::AttentionArgs& args, const stof::AttentionMask& mask,
                const stof::ExprSizes& sizes, Workspace* space, double chosen) {
  stof::cuda::SelectionProblem problem;
  if (!mask.parts.fixed.empty()) problem.mask = &mask.parts.fixed;
  problem.hash = mask.fixed_hash;
  problem.sizes = sizes;
  stof::cuda::DeviceProperties device;
  ExitUnlessOk(stof::cuda::GetDeviceProperties(&device), row);
  problem.sm_count = device.sm_count;
  problem.l2_heads = std::max<int64_t>(1, device.l2_bytes / 2 / (4 * sizes.T * row.D)) * (args.shape.H / args.shape.G);
  problem.kv_bytes = args.shape.B * args.shape.G * 4 * sizes.T * row.D;
  stof::cuda::KernelProblem asked;
  asked.capability = device.capability;
  asked.dtype = args.shape.dtype;
  asked.head_size = static_cast<int>(row.D);
  asked.has_softcap_or_bias = row.extra != Row::kNone;
  asked.has_full_bias = args.scores.bias.data != nullptr;
  stof::cuda::KernelTable kernels;
  stof::cuda::FindFamily(stof::cuda::KernelRole::kScheduled, asked, &kernels);
  double best = chosen;
  Report("%s", R"(, "kernels": [)");
  int at = 0;
  for (const stof::cuda::KernelEntry& kernel : kernels) {
    int64_t model = 0;
    ExitUnlessOk(stof::cuda::Predict(kernel, problem, &model), row);
    const double us = Time(row, {args}, row.launches, mask, sizes, space, stof::cuda::KernelName(kernel));
    best = std::min(best, us);
    std::printf("    kernel %d (%3d x %3d, %d): %9.1f us, model %9.1f\n", at, kernel.rows, kernel.keys,
                kernel.ctas_per_sm, us, static_cast<double>(model) * 1e-3);
    Report(R"(%s{"rows": %d, "keys": %d, "workers": %d, "us": %.2f, "model_us": %.2f})", at == 0 ? "" : ", ",
           kernel.rows, kernel.keys, kernel.ctas_per_sm, us, static_cast<double>(model) * 1e-3);
    ++at;
  }
  std::printf("    regret %.1f %%\n", 100.0 * (chosen / best - 1.0));
  Report("%s", "]");
}

// The error of the outputs of the first head, which a kernel with 8-bit operands has just written, against those in
// full precision.
double RelativeRmsToFullPrecision(const Row& row, stof::AttentionArgs args, const stof::AttentionMask& mask,
                                  const stof::ExprSizes& sizes, Workspace* space) {
  const bool bf16 = args.shape.dtype == stof::DType::kBF16;
  const auto count = static_cast<size_t>(row.S * row.D);
  const auto read = [&] {
    std::vector<uint16_t> bits(count);
    CHECK_CUDA(cudaMemcpy(bits.data(), args.output.data, 2 * count, cudaMemcpyDeviceToHost));
    std::vector<double> values;
    for (const uint16_t x : bits) {
      const float value = bf16 ? __bfloat162float(__nv_bfloat16_raw{x}) : __half2float(__half_raw{x});
      values.push_back(double{value});
    }
    return values;
  };
  const std::vector<double> found = read();
  args.precision = stof::AttentionPrecision::kFull;
  Time(row, {args}, 1, mask, sizes, space, "");
  const std::vector<double> wanted = read();
  double difference = 0, size = 0;
  for (size_t i = 0; i < count; ++i) {
    difference += (found[i] - wanted[i]) * (found[i] - wanted[i]), size += wanted[i] * wanted[i];
  }
  return std::sqrt(difference / size);
}

// Longer than 80 lines: one row from its inputs to its record, and every step reads the inputs.
void Measure(const Row& row, stof::DType dtype, bool tf32, bool all) {
  stof::AttentionArgs args;
  const int64_t T = row.T > 0 ? row.T : row.S, G = row.G > 0 ? row.G : row.H;
  args.shape = {row.B, row.H, G, row.S, T, row.D, row.D, dtype};
  const int64_t query_count = row.B * row.H * row.S * row.D, count = row.B * G * T * row.D;
  args.allow_tf32 = tf32;
  args.precision = precision;
  const auto random = dtype == stof::DType::kF32 ? RandomFloats : dtype == stof::DType::kBF16 ? RandomBf16 : RandomFp16;
  args.query.data = random(query_count, 1), args.key.data = random(count, 2), args.value.data = random(count, 3);
  args.output.data = random(query_count, 4);
  args.query.stride = args.output.stride = {row.H * row.S * row.D, row.S * row.D, row.D};
  args.key.stride = args.value.stride = {G * T * row.D, T * row.D, row.D};
  args.scores.relative_bias.query_position = T - row.S;
  args.scores.scale = 1.0f / std::sqrt(static_cast<float>(row.D));
  void* biases = nullptr;
  if (row.extra == Row::kPairs || row.extra == Row::kSharedPairs || row.extra == Row::kWidePairs) {
    const int64_t heads = row.extra == Row::kSharedPairs ? 1 : row.H;
    const bool wide = row.extra == Row::kWidePairs;
    biases = (wide || dtype == stof::DType::kF32 ? RandomFloats : RandomFp16)(heads * row.S * T, 5);
    args.scores.bias = {biases, wide ? stof::DType::kF32 : dtype, 0, heads == 1 ? 0 : row.S * T, T, 1};
  }
  if (row.extra == Row::kNear || row.extra == Row::kDistances) {
    args.scores.relative_bias.size = args.scores.relative_bias.stride_h = row.extra == Row::kNear ? 257 : 2 * T - 1;
    biases = RandomFloats(row.H * args.scores.relative_bias.size, 5);
    args.scores.relative_bias.table = static_cast<const float*>(biases);
  }
  if (row.extra == Row::kSoftcap) args.scores.softcap = 50.0f;
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
  ExitUnlessOk(status, row);
  Workspace space;
  space.size = static_cast<size_t>(8 * count + std::min(1024 * query_count, int64_t{16} << 30)) + (size_t{16} << 20);
  CHECK_CUDA(cudaMalloc(&space.memory, space.size));
  std::vector<stof::AttentionArgs> sets(1, args);
  int calls = row.launches;
  if (decode) {
    // What is read once is not in the L2 cache: more sets of inputs than fit it, one after the other.
    const int64_t bytes = 2 * count * (dtype == stof::DType::kF32 ? 4 : 2);
    while (static_cast<int64_t>(sets.size()) * bytes < kCold && sets.size() < kMostSets) {
      const auto seed = static_cast<uint32_t>(10 + 2 * sets.size());
      sets.push_back(args);
      sets.back().key.data = random(count, seed), sets.back().value.data = random(count, seed + 1);
    }
    calls =
        static_cast<int>(std::clamp<int64_t>(kCalls * kCold / 4 / bytes, static_cast<int64_t>(sets.size()), kCalls));
  }
  const double us = Time(row, sets, calls, *mask, sizes, &space, "");
  const double flops = 4.0 * static_cast<double>(row.B * row.H * row.S * T * row.D);
  if (decode) {
    // A group of heads with one mask reads a key once, heads with masks of their own read their own keys.
    const bool own = row.mask == kStride;
    const double item = dtype == stof::DType::kF32 ? 4 : 2;
    const double bytes = 2 * item * static_cast<double>(row.B * (own ? row.H : G) * T * row.D) * tiles;
    std::printf("%-7s B%ld H%ld G%ld T%-6ld D%-3ld %8.2f us  %6.0f GB/s\n", row.name, row.B, row.H, G, T, row.D, us,
                bytes / us * 1e-3);
  } else {
    std::printf(
        "%-11s B%-2ld H%-2ld S%-5ld D%-3ld %9.1f us  %6.1f useful %6.1f on tiles TFLOPS  tiles %.3f  build %.2f ms\n",
        row.name, row.B, row.H, row.S, row.D, us, flops * pairs / us * 1e-6, flops * tiles / us * 1e-6, tiles, build);
  }
  if (precision != stof::AttentionPrecision::kFull) {
    std::printf("  quantization alone %.1f us, relative RMS of the first head %.2f %%\n",
                TimeQuantization(args, space.memory),
                100.0 * RelativeRmsToFullPrecision(row, args, *mask, sizes, &space));
  }
  const char* type = dtype == stof::DType::kF32 ? "fp32" : dtype == stof::DType::kBF16 ? "bf16" : "fp16";
  Report(R"(%s{"dtype": "%s", "mask": "%s", "expression": "%s", "B": %ld, "H": %ld, "G": %ld, "S": %ld, "T": %ld, )",
         reported == 0 ? "" : ",\n ", type, row.name, row.mask, row.B, row.H, G, row.S, T);
  Report(R"("D": %ld, "launches": %d, "us": %.2f, "tiles": %.4f, "pairs": %.4f)", row.D, calls, us, tiles, pairs);
  if (dtype == stof::DType::kF32 && !decode && row.mask[0] == '\0' && row.extra == Row::kNone) {
    const double error = ErrorOf(row, args);
    std::printf("  largest error over largest output, a few rows: %.2e\n", error);
    Report(R"(, "error": %.3e)", error);
  }
  if (all && decode) MeasureDecodeKinds(row, sets, calls, *mask, sizes, &space, us);
  if (all && dtype != stof::DType::kF32 && !decode) MeasureAll(row, args, *mask, sizes, &space, us);
  Report("%s", "}");
  ++reported;
  std::fflush(stdout);
  for (const void* memory : {args.query.data, args.key.data, args.value.data,
                             static_cast<const void*>(args.output.data), static_cast<const void*>(biases)}) {
    CHECK_CUDA(cudaFree(const_cast<void*>(memory)));
  }
  for (size_t i = 1; i < sets.size(); ++i) {
    CHECK_CUDA(cudaFree(const_cast<void*>(sets[i].key.data)));
    CHECK_CUDA(cudaFree(const_cast<void*>(sets[i].value.data)));
  }
  CHECK_CUDA(cudaFree(space.memory));
}

}  // namespace

int main(int argc, char** argv) {
  stof::DType dtype = stof::DType::kF16;
  bool tf32 = false, all = false, decode = false, wide = false, extras = false, few = false, has_long_rows = false;
  std::vector<std::string> only;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "fp16" || word == "bf16" || word == "fp32") {
      dtype = word == "fp16" ? stof::DType::kF16 : word == "bf16" ? stof::DType::kBF16 : stof::DType::kF32;
    } else if (word == "tf32") {
      dtype = stof::DType::kF32, tf32 = true;
    } else if (word == "int8" || word == "int8_fp8") {
      precision = word == "int8" ? stof::AttentionPrecision::kInt8 : stof::AttentionPrecision::kInt8Fp8;
    } else if (word == "decode") {
      decode = true;
    } else if (word == "wide") {
      wide = true;
    } else if (word == "extras") {
      extras = true;
    } else if (word == "few") {
      few = true;
    } else if (word == "long") {
      has_long_rows = true;
    } else if (word == "--all") {
      all = true;
    } else if (word == "--zeros") {
      zeros = true;
    } else if (word == "--seconds" && i + 1 < argc) {
      char* end = nullptr;
      seconds = std::strtod(argv[++i], &end);
      if (*end != '\0' || !(seconds > 0 && seconds <= 60)) {
        std::fprintf(stderr, "--seconds %s: expected a number up to 60\n", argv[i]);
        return 2;
      }
    } else if (word == "--only" && i + 1 < argc) {
      only.emplace_back(argv[++i]);
    } else if (word == "--json" && i + 1 < argc) {
      report = std::fopen(argv[++i], "w");
      if (report == nullptr) {
        std::fprintf(stderr, "cannot write %s\n", argv[i]);
        return 1;
      }
    } else {
      std::fprintf(stderr,
                   "usage: bench_cuda_attention [fp16 | bf16 | fp32 | tf32] [int8 | int8_fp8] [decode | wide | extras "
                   "| few | long] [--all] [--only NAME]... [--zeros] [--seconds S] [--json FILE]\n");
      return 2;
    }
  }
  const Row* const first = decode          ? std::begin(kDecodeRows)
                           : wide          ? std::begin(kWideRows)
                           : extras        ? std::begin(kExtraRows)
                           : few           ? std::begin(kFewRows)
                           : has_long_rows ? std::begin(kLongRows)
                                           : std::begin(kRows);
  const Row* const last = decode          ? std::end(kDecodeRows)
                          : wide          ? std::end(kWideRows)
                          : extras        ? std::end(kExtraRows)
                          : few           ? std::end(kFewRows)
                          : has_long_rows ? std::end(kLongRows)
                                          : std::end(kRows);
  Report("%s", "[");
  for (const Row* row = first; row != last; ++row) {
    if (only.empty() || std::find(only.begin(), only.end(), row->name) != only.end()) Measure(*row, dtype, tf32, all);
  }
  Report("%s\n", "]");
  if (report != nullptr) std::fclose(report);
  return 0;
}
