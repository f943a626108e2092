// SPDX-License-Identifier: Apache-2.0
// The overhead of a plugin over its kernels, on a GPU, without TensorRT: enqueue in a replayed graph against the
// backend's own call in one, interleaved, and the host's time in enqueue.
//
// bench_trt_plugin [FILE]   prints a table, and writes it to FILE as JSON
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/bench/bench_graph.h"
#include "plugins/core/contract/cuda_backend.h"
#include "tests/trt/harness.h"

namespace stof::test {
namespace {

struct Row {
  const char* name;
  const char* mask;
  const char* operands;  // in the order of their inputs
  DType dtype;
  int64_t B, H, S, T, D;
  int calls;  // in a graph; times are of one
};

constexpr const char* kDocuments = "segment_q[b, q] == segment_k[b, k]";
constexpr Row kRows[] = {
    {"window 128", "abs(q - k) <= 128", "", DType::kF16, 1, 16, 4096, 4096, 64, 20},
    {"window 128", "abs(q - k) <= 128", "", DType::kF16, 1, 32, 8192, 8192, 128, 5},
    {"window 128", "abs(q - k) <= 128", "", DType::kBF16, 16, 12, 512, 512, 64, 20},
    {"causal", "k <= q", "", DType::kF16, 1, 32, 8192, 8192, 128, 1},
    {"dense", "", "", DType::kF16, 1, 16, 4096, 4096, 64, 5},
    {"longformer", "abs(q - k) <= 128 or k < 64 or q < 64", "", DType::kBF16, 1, 16, 4096, 4096, 64, 10},
    {"window 128, padded", "abs(q - k) <= 128 and pad[b, k]", "pad", DType::kF16, 1, 16, 4096, 4096, 64, 20},
    {"causal, padded", "k <= q and pad[b, k]", "pad", DType::kF16, 4, 16, 2048, 2048, 64, 10},
    {"window 128", "abs(q - k) <= 128", "", DType::kF16, 1, 12, 512, 512, 64, 100},
    {"causal", "k <= q", "", DType::kF16, 1, 12, 128, 128, 64, 100},
    {"one query", "k <= q and q - k < 1024", "", DType::kF16, 1, 32, 1, 8192, 128, 100},
    {"window 128", "abs(q - k) <= 128", "", DType::kF32, 1, 16, 4096, 4096, 64, 5},
    {"documents", kDocuments, "segment_q segment_k", DType::kF16, 4, 16, 2048, 2048, 64, 10},
    {"documents", kDocuments, "segment_q segment_k", DType::kF16, 1, 12, 512, 512, 64, 50},
};

std::vector<void*> blocks;
void* OnDevice(const void* from, size_t bytes) {
  void* block = nullptr;
  CHECK_CUDA(cudaMalloc(&block, std::max<size_t>(bytes, 16)));
  if (from != nullptr) CHECK_CUDA(cudaMemcpy(block, from, bytes, cudaMemcpyHostToDevice));
  blocks.push_back(block);
  return block;
}

// Numbers in (-2, 2) of any of the types, by their bits.
void* RandomFloats(DType dtype, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  const auto bytes = static_cast<size_t>(count * SizeOf(dtype));
  std::vector<uint32_t> words((bytes + 3) / 4);
  const uint32_t keep = dtype == DType::kF32 ? 0x807fffffu : dtype == DType::kF16 ? 0x83ff83ffu : 0x807f807fu;
  const uint32_t exponent = dtype == DType::kF32 ? 0x3f000000u : dtype == DType::kF16 ? 0x38003800u : 0x3f003f00u;
  for (uint32_t& word : words) word = (static_cast<uint32_t>(random()) & keep) | exponent;
  return OnDevice(words.data(), bytes);
}

template <typename T>
void* Vector(int64_t rows, int64_t length, T (*value)(int64_t i, int64_t length)) {
  std::vector<T> values;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < length; ++i) values.push_back(value(i, length));
  }
  return OnDevice(values.data(), values.size() * sizeof(T));
}

struct Space {
  char* memory = nullptr;
  size_t size = 0, used = 0;
  static void* Allocate(void* self, size_t bytes) {
    auto* space = static_cast<Space*>(self);
    const size_t at = (space->used + 63) / 64 * 64;
    if (at + bytes > space->size) return nullptr;
    space->used = at + bytes;
    return space->memory + at;
  }
};

// Microseconds that the host is in one call.
template <typename Run>
double Elapsed(const Run& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

// The median of such.
template <typename Run>
double HostTime(cudaStream_t stream, const Run& run) {
  std::vector<double> times;
  for (int round = 0; round < 40; ++round) {
    for (int i = 0; i < 10; ++i) {
      times.push_back(Elapsed(run));
    }
    CHECK_CUDA(cudaStreamSynchronize(stream));
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

void Must(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

void Measure(const Row& row, FILE* file, bool first) {
  const int64_t count = row.B * row.H * row.T * row.D, queries = row.B * row.H * row.S * row.D;
  const DataType type = row.dtype == DType::kF32   ? DataType::kFLOAT
                        : row.dtype == DType::kF16 ? DataType::kHALF
                                                   : DataType::kBF16;
  std::vector<nvinfer1::PluginTensorDesc> in = {Desc(type, {row.B, row.H, row.S, row.D}),
                                                Desc(type, {row.B, row.H, row.T, row.D}),
                                                Desc(type, {row.B, row.H, row.T, row.D})};
  std::vector<const void*> inputs = {RandomFloats(row.dtype, queries, 1), RandomFloats(row.dtype, count, 2),
                                     RandomFloats(row.dtype, count, 3)};
  void* output = OnDevice(nullptr, static_cast<size_t>(queries * SizeOf(row.dtype)));
  const nvinfer1::PluginTensorDesc out = in[0];
  Tables operands;
  Tensor pad;
  const auto add = [&](const char* role, DataType own, DType dtype, int64_t length, void* data) {
    in.push_back(Desc(own, {row.B, length}));
    inputs.push_back(data);
    Tensor tensor;
    tensor.data = data, tensor.dtype = dtype, tensor.rank = 2;
    tensor.dims[0] = row.B, tensor.dims[1] = length;
    operands.emplace_back(role, tensor);
  };
  const std::string names = row.operands;
  if (names == "pad") {
    add("pad", DataType::kINT32, DType::kI32, row.T,
        Vector<int32_t>(row.B, row.T, [](int64_t i, int64_t length) { return i < length * 7 / 8 ? 1 : 0; }));
    pad = operands[0].second;
  } else if (!names.empty()) {
    const auto id = [](int64_t i, int64_t length) { return i * 8 / length; };
    add("segment_q", DataType::kINT64, DType::kI64, row.S, Vector<int64_t>(row.B, row.S, id));
    add("segment_k", DataType::kINT64, DType::kI64, row.T, Vector<int64_t>(row.B, row.T, id));
  }

  Attributes attributes;
  attributes.strings = {{"mask", row.mask}, {"operands", names}, {"layout", "BHSD"}};
  attributes.ints = {{"query_offset", 1}};
  const Held plugin = Create(attributes);
  Must(plugin.plugin != nullptr, "creation");
  std::vector<nvinfer1::DynamicPluginTensorDesc> bounds;
  for (const auto& desc : in) {
    const std::vector<int64_t> dims(desc.dims.d, desc.dims.d + desc.dims.nbDims);
    bounds.push_back(Bounds(desc.type, dims, dims, dims));
  }
  const std::vector<int64_t> dims(out.dims.d, out.dims.d + out.dims.nbDims);
  bounds.push_back(Bounds(out.type, dims, dims, dims));
  const auto inputs_count = static_cast<int32_t>(in.size());
  const size_t bytes = plugin.build->getWorkspaceSize(bounds.data(), inputs_count, &bounds.back(), 1);
  void* workspace = OnDevice(nullptr, bytes);
  Must(plugin.runtime->onShapeChange(in.data(), inputs_count, &out, 1) == 0, "onShapeChange");
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  void* outputs[] = {output};
  const auto enqueue = [&] {
    Must(plugin.runtime->enqueue(in.data(), &out, inputs.data(), outputs, workspace, stream) == 0, "enqueue");
  };

  AttentionArgs args;
  args.shape = {row.B, row.H, row.H, row.S, row.T, row.D, row.D, row.dtype};
  args.query.data = inputs[0], args.key.data = inputs[1], args.value.data = inputs[2], args.output.data = output;
  args.query.stride = args.output.stride = {row.H * row.S * row.D, row.S * row.D, row.D};
  args.key.stride = args.value.stride = {row.H * row.T * row.D, row.T * row.D, row.D};
  args.scores.relative_bias.query_position = row.T - row.S;
  args.scores.scale = 1.0f / std::sqrt(static_cast<float>(row.D));
  std::shared_ptr<const AttentionMask> mask;
  Must(MakeAttentionMask(row.mask, {}, &mask).ok(), "mask");
  const ExprSizes sizes = {row.B, row.H, row.S, row.T, row.T - row.S};
  Space space;
  space.size = bytes + (size_t{1} << 20);
  space.memory = static_cast<char*>(OnDevice(nullptr, space.size));
  RunContext context;
  context.on_cuda = true;
  context.stream = stream;
  context.allocate = Space::Allocate;
  context.self = &space;
  const auto raw = [&] {
    space.used = 0;
    const Tensor* const padding = mask->parts.pad ? &pad : nullptr;
    Must(FindCudaBackend()->attention.run(args, padding, *mask, sizes, operands, context).ok(), "the kernels");
  };

  // Clocks fall while a device gets warm, and move by a few percent later: a round before any that counts, either first
  // by turns, and what is compared are the two times of a round, beside each other, not two medians of all rounds.
  const double first_enqueue = Elapsed(enqueue);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  std::vector<double> ours, theirs, ratios;
  for (int round = 0; round < 13; ++round) {
    double own = 0, kernels = 0;
    if (round % 2 == 0) kernels = TimeGraph(stream, row.calls, raw);
    own = TimeGraph(stream, row.calls, enqueue);
    if (round % 2 == 1) kernels = TimeGraph(stream, row.calls, raw);
    if (round == 0) continue;
    ours.push_back(own), theirs.push_back(kernels), ratios.push_back(own / kernels);
  }
  const double kernel = Median(theirs), replayed = Median(ratios) * kernel, host = HostTime(stream, enqueue);
  // What the acceptance asks: 2 % for kernels from 50 us on, 1 us below.
  const bool met = kernel >= 50 ? replayed <= 1.02 * kernel : replayed <= kernel + 1;
  const char* name = row.dtype == DType::kF32 ? "fp32" : row.dtype == DType::kF16 ? "fp16" : "bf16";
  std::printf(
      "%-20s %s B%-2ld H%-2ld S%-4ld T%-4ld D%-3ld  kernel %8.2f us  enqueue %8.2f us  %+6.2f %% (%+.1f ... %+.1f)  %s "
      " "
      "host %5.2f us%s  first %.1f ms\n",
      row.name, name, row.B, row.H, row.S, row.T, row.D, kernel, replayed, 100 * (replayed / kernel - 1),
      100 * (*std::min_element(ratios.begin(), ratios.end()) - 1),
      100 * (*std::max_element(ratios.begin(), ratios.end()) - 1), met ? "ok" : "MISSED", host,
      host <= 10 ? "" : "  MISSED", 1e-3 * first_enqueue);
  std::fflush(stdout);
  if (file != nullptr) {
    std::fprintf(file,
                 "%s{\"mask\": \"%s\", \"expression\": \"%s\", \"dtype\": \"%s\", \"B\": %ld, \"H\": %ld, \"S\": %ld, "
                 "\"T\": %ld, \"D\": %ld, \"kernel_us\": %.3f, \"enqueue_us\": %.3f, \"host_us\": %.3f, "
                 "\"first_enqueue_us\": %.1f, "
                 "\"workspace_bytes\": %zu}",
                 first ? "" : ",\n ", row.name, row.mask, name, row.B, row.H, row.S, row.T, row.D, kernel, replayed,
                 host, first_enqueue, bytes);
  }
  CHECK_CUDA(cudaStreamDestroy(stream));
  for (void* block : blocks) CHECK_CUDA(cudaFree(block));
  blocks.clear();
}

}  // namespace
}  // namespace stof::test

int main(int argc, char** argv) {
  FILE* file = argc > 1 ? std::fopen(argv[1], "w") : nullptr;
  if (argc > 1 && file == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", argv[1]);
    return 1;
  }
  if (file != nullptr) std::fprintf(file, "[");
  bool first = true;
  for (const auto& row : stof::test::kRows) {
    stof::test::Measure(row, file, first);
    first = false;
  }
  if (file != nullptr) {
    std::fprintf(file, "]\n");
    std::fclose(file);
  }
  return 0;
}
