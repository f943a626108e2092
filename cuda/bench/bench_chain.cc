// SPDX-License-Identifier: Apache-2.0
// bench_cuda_chain [PART]: times kernels of chains through the operator, as launches of a captured graph, beside a copy
// on the device in the same run. Bytes are those that the chain has to move: every input and output once.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/bench/bench_copy.h"
#include "cuda/bench/bench_graph.h"
#include "plugins/core/c_api/text_attribute.h"
#include "plugins/core/contract/op.h"

namespace stof {
namespace {

struct Input {
  DType dtype;
  std::vector<int64_t> dims;
  int64_t thirds = 3;  // thirds of it that are read
};
struct Case {
  std::string name, text;
  std::vector<Input> inputs;
};

[[noreturn]] void Die(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(1);
}
void Check(const Status& status) {
  if (!status.ok()) Die(status.message());
}

class Memory {
 public:
  explicit Memory(size_t bytes) { CHECK_CUDA(cudaMalloc(&data_, std::max<size_t>(bytes, 1))); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Values of about 1 in every type, none the same as its neighbour.
void Fill(const Tensor& tensor) {
  const int64_t count = tensor.Elements();
  std::vector<char> host(static_cast<size_t>(count * SizeOf(tensor.dtype)));
  uint32_t state = 12345;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const float value = static_cast<float>(state >> 8) / 16777216.0f * 2.0f - 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (tensor.dtype == DType::kF32) {
      std::memcpy(&host[static_cast<size_t>(4 * i)], &bits, 4);
      continue;
    }
    uint16_t half = static_cast<uint16_t>(bits >> 16);  // bf16, cut
    if (tensor.dtype == DType::kF16) {
      const int exponent = static_cast<int>(bits >> 23 & 255) - 112;
      half = static_cast<uint16_t>((bits >> 16 & 0x8000) |
                                   (exponent <= 0 ? 0 : static_cast<unsigned>(exponent) << 10 | (bits >> 13 & 0x3ff)));
    }
    std::memcpy(&host[static_cast<size_t>(2 * i)], &half, 2);
  }
  CHECK_CUDA(cudaMemcpy(tensor.data, host.data(), host.size(), cudaMemcpyHostToDevice));
}

int64_t BytesOf(const Tensor& tensor) { return tensor.Elements() * SizeOf(tensor.dtype); }

int CallsOf(int64_t bytes) { return bytes > 64000000 ? 4 : 20; }

// Bytes a second of a copy, read and written ones: the faster of CUDA's and a plain kernel's.
double CopyRate(int64_t bytes, cudaStream_t stream) {
  const auto half = static_cast<size_t>(bytes / 2);
  const Memory from(half), to(half);
  const double copy = TimeGraph(stream, CallsOf(bytes), [&] {
    CHECK_CUDA(cudaMemcpyAsync(to.data(), from.data(), half, cudaMemcpyDeviceToDevice, stream));
  });
  const double kernel =
      TimeGraph(stream, CallsOf(bytes), [&] { CHECK_CUDA(CopyByKernel(to.data(), from.data(), half, stream)); });
  return static_cast<double>(bytes) / (std::min(copy, kernel) * 1e-6);
}

void Run(const Case& one, cudaStream_t stream) {
  int count = 0;
  const OpDescription* const* ops = AllOps(&count);
  std::unique_ptr<Op> op;
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(ops[i]->name, "StofChain") == 0) Check(ops[i]->create(TextAttribute("chain", one.text), &op));
  }
  std::vector<std::unique_ptr<Memory>> memory;
  std::vector<Tensor> inputs, outputs(8);
  int64_t bytes = 0;
  const auto give = [&](Tensor* tensor, int64_t thirds) {
    memory.push_back(std::make_unique<Memory>(static_cast<size_t>(BytesOf(*tensor))));
    tensor->data = memory.back()->data();
    bytes += BytesOf(*tensor) / 3 * thirds;
  };
  for (const Input& input : one.inputs) {
    Tensor tensor = TensorOfShape(input.dtype, input.dims);
    give(&tensor, input.thirds);
    Fill(tensor);
    inputs.push_back(tensor);
  }
  const int ni = static_cast<int>(inputs.size());
  Check(op->InferOutputs(inputs.data(), ni, outputs.data(), 8));
  int no = 0;
  while (no < 8 && outputs[static_cast<size_t>(no)].dtype != DType::kUndefined)
    give(&outputs[static_cast<size_t>(no++)], 3);
  RunContext context;
  context.on_cuda = true;
  context.stream = stream;
  const auto begin = std::chrono::steady_clock::now();
  Check(op->Run(inputs.data(), ni, outputs.data(), no, context));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  const double first = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  const double us =
      TimeGraph(stream, CallsOf(bytes), [&] { Check(op->Run(inputs.data(), ni, outputs.data(), no, context)); });
  const double copy = CopyRate(bytes, stream), rate = static_cast<double>(bytes) / (us * 1e-6);
  std::printf("%-34s %9.2f us %8.1f MB %8.0f GB/s  copy %6.0f GB/s  %5.1f %%  first %5.1f ms\n", one.name.c_str(), us,
              static_cast<double>(bytes) / 1e6, rate / 1e9, copy / 1e9, 100 * rate / copy, first);
  std::fflush(stdout);
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const DType half = DType::kF16;
  const std::string norm = "c * rsqrt(mean(c * c) + 1e-5) * ";
  struct Shape {
    int64_t b, s;
  };
  for (const Shape shape : {Shape{1, 128}, Shape{8, 512}, Shape{16, 2048}, Shape{1, 8192}}) {
    const int64_t b = shape.b, s = shape.s;
    const std::string at = " (" + std::to_string(b) + "," + std::to_string(s) + ") ";
    for (const int64_t n : {int64_t{768}, int64_t{1024}}) {
      const std::string width = std::to_string(n);
      cases.push_back({"LayerNorm" + at + width,
                       "axes b = x0.0, s = x0.1, n = x0.2; let c = x0[b, s, n] - mean(x0[b, s, n]); out y0 f16 "
                       "[b, s, n] = " +
                           norm + "x1[n] + x2[n]",
                       {{half, {b, s, n}}, {half, {n}}, {half, {n}}}});
      cases.push_back(
          {"RMSNorm" + at + width,
           "axes b = x0.0, s = x0.1, n = x0.2; let c = x0[b, s, n]; out y0 f16 [b, s, n] = " + norm + "x1[n]",
           {{half, {b, s, n}}, {half, {n}}}});
      cases.push_back({"add + LayerNorm" + at + width,
                       "axes b = x0.0, s = x0.1, n = x0.2; let r = x0[b, s, n] + x1[b, s, n]; let c = r - mean(r); "
                       "out y0 f16 [b, s, n] = r; out y1 f16 [b, s, n] = " +
                           norm + "x2[n] + x3[n]",
                       {{half, {b, s, n}}, {half, {b, s, n}}, {half, {n}}, {half, {n}}}});
      cases.push_back({"bias + gelu" + at + std::to_string(4 * n),
                       "axes b = x0.0, s = x0.1, n = x0.2; out y0 f16 [b, s, n] = gelu(x0[b, s, n] + x1[n])",
                       {{half, {b, s, 4 * n}}, {half, {4 * n}}}});
    }
    cases.push_back({"GEGLU" + at + "2304",
                     "axes b = x0.0, s = x0.1, n = x0.2 / 2; out y0 f16 [b, s, n] = gelu(x0[b, s, n]) * x0[b, s, n + "
                     "1152]",
                     {{half, {b, s, 2304}}}});
    // The rotary embedding reads two thirds of what is packed.
    const std::string turned = "select(d < 32, -x0[b, s, 64 * h + d + FIRST], x0[b, s, 64 * h + d SECOND])";
    const auto turn = [&](const char* first, const char* second) {
      std::string text = turned;
      text.replace(text.find("FIRST"), 5, first);
      return text.replace(text.find("SECOND"), 6, second);
    };
    cases.push_back({"rotary q, k" + at + "12 x 64",
                     "axes b = x0.0, h = 12, s = x0.1, d = 64; out y0 f16 [b, h, s, d] = x0[b, s, 64 * h + d] * x1[s, "
                     "d] + " +
                         turn("32", "- 32") +
                         " * x2[s, d]; out y1 f16 [b, h, s, d] = x0[b, s, 64 * h + d + 768] * "
                         "x1[s, d] + " +
                         turn("800", "+ 736") + " * x2[s, d]",
                     {{half, {b, s, 2304}, 2}, {half, {s, 64}}, {half, {s, 64}}}});
    cases.push_back({"keys transposed" + at + "12 x 64",
                     "axes b = x0.0, h = 12, d = 64, s = x0.1; out y0 f16 [b, h, d, s] = (x0[b, s, 64 * h + d] + x1[64 "
                     "* h + d]) * 0.125",
                     {{half, {b, s, 768}}, {half, {768}}}});
    cases.push_back({"softmax" + at + "512",
                     "axes b = x0.0, s = x0.1, n = x0.2; let e = exp(x0[b, s, n] - max_of(x0[b, s, n])); out y0 f16 "
                     "[b, s, n] = e / sum(e)",
                     {{half, {b, s, 512}}}});
  }
  for (const int64_t n : {int64_t{64}, int64_t{4096}, int64_t{16384}}) {
    const int64_t rows = (int64_t{1} << 25) / n;
    for (const DType dtype : {half, DType::kF32}) {
      const std::string type = dtype == half ? "f16" : "f32";
      cases.push_back({"LayerNorm " + type + " rows of " + std::to_string(n),
                       "axes s = x0.0, n = x0.1; let c = x0[s, n] - mean(x0[s, n]); out y0 " + type +
                           " [s, n] = " + norm + "x1[n] + x2[n]",
                       {{dtype, {rows, n}}, {dtype, {n}}, {dtype, {n}}}});
    }
  }
  return cases;
}

}  // namespace
}  // namespace stof

int main(int argc, char** argv) {
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const stof::Case& one : stof::Cases()) {
    if (argc > 1 && one.name.find(argv[1]) == std::string::npos) continue;
    stof::Run(one, stream);
  }
  return 0;
}
