// SPDX-License-Identifier: Apache-2.0
// StofChain through its description: results against fp64, hostile texts, limits.
// Over 500 lines: a list of cases.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#ifdef STOF_WITH_CUDA
#include <cuda_runtime.h>
#endif

#include "cpu/chain/chain.h"
#include "cpu/kernel_table.h"
#include "plugins/core/c_api/text_attribute.h"
#include "plugins/core/chain/chain.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/chain/chain_random.h"
#include "tests/cpp/chain/chain_reference.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/memory.h"
#include "tests/cpp/shape_rules.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test {
namespace {

const OpDescription& Description() {
  int count = 0;
  const OpDescription* const* ops = AllOps(&count);
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(ops[i]->name, "StofChain") == 0) return *ops[i];
  }
  throw Failure{"StofChain is not registered"};
}

using Block = std::unique_ptr<char[]>;  // of the exact size, so that a sanitizer sees the first byte beyond

Tensor TensorOf(const ChainArray& array, Block* block) {
  Tensor tensor;
  tensor.dtype = array.dtype;
  tensor.rank = static_cast<int32_t>(array.dims.size());
  std::copy(array.dims.begin(), array.dims.end(), tensor.dims);
  const auto size = static_cast<size_t>(SizeOf(array.dtype));
  block->reset(new char[array.values.size() * size + (array.values.empty() ? 1 : 0)]);
  for (size_t i = 0; i < array.values.size(); ++i) StoreFloat(array.dtype, array.values[i], block->get() + i * size);
  tensor.data = block->get();
  return tensor;
}

struct Result {
  Tensor tensor;
  std::vector<char> data;  // with kBand bytes on either side
};
constexpr size_t kBand = 64;

#ifdef STOF_WITH_CUDA
int64_t shifted = 0;    // elements between an allocation and the tensor in it
bool captured = false;  // runs are captured, and the graph runs

// Runs on the device, where every tensor has a copy, at an offset that keeps no more than the alignment of kBand.
Status RunOnDevice(const Op& op, const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs) {
  std::vector<void*> blocks;
  const auto put = [&blocks](const Tensor& tensor, size_t before) {
    const auto bytes = static_cast<size_t>(tensor.Elements() * SizeOf(tensor.dtype)) + 2 * before;
    const auto shift = static_cast<size_t>(shifted * SizeOf(tensor.dtype));
    char* block = nullptr;
    if (cudaMalloc(&block, std::max<size_t>(bytes + shift, 1)) != cudaSuccess) throw Failure{"no device memory"};
    blocks.push_back(block);
    block += shift;
    Tensor moved = tensor;
    if (bytes > 0) cudaMemcpy(block, static_cast<char*>(tensor.data) - before, bytes, cudaMemcpyHostToDevice);
    moved.data = block + before;
    return moved;
  };
  std::vector<Tensor> in, out;
  for (const Tensor& tensor : inputs) in.push_back(put(tensor, 0));
  for (const Tensor& tensor : outputs) out.push_back(put(tensor, kBand));
  cudaDeviceSynchronize();  // copies from pageable memory may be under way, and the stream does not wait for them
  RunContext context;
  context.on_cuda = true;
  cudaStream_t stream = nullptr;
  if (captured) {
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  }
  context.stream = stream;
  const Status status =
      op.Run(in.data(), static_cast<int>(in.size()), out.data(), static_cast<int>(out.size()), context);
  if (captured) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    if (cudaStreamEndCapture(stream, &graph) != cudaSuccess ||
        cudaGraphInstantiate(&executable, graph, 0) != cudaSuccess) {
      throw Failure{"the run was not captured"};
    }
    if (status.ok()) cudaGraphLaunch(executable, stream);
    cudaStreamSynchronize(stream);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
  const cudaError_t error = cudaDeviceSynchronize();
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto bytes = static_cast<size_t>(outputs[i].Elements() * SizeOf(outputs[i].dtype)) + 2 * kBand;
    cudaMemcpy(static_cast<char*>(outputs[i].data) - kBand, static_cast<char*>(out[i].data) - kBand, bytes,
               cudaMemcpyDeviceToHost);
  }
  for (void* block : blocks) cudaFree(block);
  if (error != cudaSuccess) return Status::Error(cudaGetErrorString(error));
  return status;
}
#endif

// The outputs of a run, or its error. On a device in a build for one, and `threads` means nothing there.
Status RunOp(const std::string& text, const std::vector<ChainArray>& arrays, int threads,
             std::vector<Result>* results) {
  std::unique_ptr<Op> op;
  STOF_RETURN_IF_ERROR(Description().create(TextAttribute("chain", text), &op));
  std::vector<Block> blocks(arrays.size());
  std::vector<Tensor> inputs;
  for (size_t i = 0; i < arrays.size(); ++i) inputs.push_back(TensorOf(arrays[i], &blocks[i]));
  const int count = static_cast<int>(inputs.size());
  Chain chain;
  STOF_RETURN_IF_ERROR(ParseChain(text, &chain));
  const auto outputs = static_cast<int>(chain.outputs.size());
  std::vector<Tensor> tensors(static_cast<size_t>(outputs));
  STOF_RETURN_IF_ERROR(op->InferOutputs(inputs.data(), count, tensors.data(), outputs));
  for (int i = 0; i < outputs; ++i) {
    CheckShapeRules(Description(), TextAttribute("chain", text), inputs, tensors[static_cast<size_t>(i)], i);
  }
  results->clear();
  results->resize(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    Result& result = (*results)[i];
    const auto bytes = static_cast<size_t>(tensors[i].Elements() * SizeOf(tensors[i].dtype));
    if (bytes > (size_t{1} << 28)) return Status::Error("an output too large for a test");
    result.data.assign(bytes + 2 * kBand, static_cast<char>(0xcd));
    tensors[i].data = result.data.data() + kBand;
    result.tensor = tensors[i];
  }
#ifdef STOF_WITH_CUDA
  (void)threads;
  return RunOnDevice(*op, inputs, tensors);
#else
  ThreadPool pool(threads);
  Starved starved(pool.view());
  Memory memory;
  RunContext context;
  context.parallel = starved.view();
  context.allocate = Memory::Allocate;
  context.self = &memory;
  return op->Run(inputs.data(), count, tensors.data(), outputs, context);
#endif
}

int64_t compared = 0, unknown = 0;

void Compare(const std::string& text, const std::vector<ChainAnswer>& expected, const std::vector<Result>& results) {
  CHECK(expected.size() == results.size(), text);
  for (size_t o = 0; o < expected.size(); ++o) {
    const ChainAnswer& answer = expected[o];
    const Tensor& tensor = results[o].tensor;
    CHECK(tensor.dtype == answer.dtype, text);
    CHECK(std::vector<int64_t>(tensor.dims, tensor.dims + tensor.rank) == answer.dims, text, " output ", o);
    const auto size = static_cast<size_t>(SizeOf(tensor.dtype));
    for (size_t i = 0; i < answer.values.size(); ++i) {
      const Approximate& want = answer.values[i];
      const double got = LoadFloat(tensor.dtype, results[o].data.data() + kBand + i * size);
      ++compared;
      if (want.error == std::numeric_limits<double>::infinity()) {
        ++unknown;
        continue;
      }
      if (std::isnan(want.value)) {
        CHECK(std::isnan(got), text, "\n  y", o, " element ", i, ": got ", got, ", expected NaN");
        continue;
      }
      const double largest = answer.dtype == DType::kF16 ? 65504 : 3.3e38;
      if (std::fabs(want.value) + want.error > largest * 0.999) continue;  // infinity or the largest number
      const double most = ChainTolerance(answer.dtype, want);
      CHECK(std::fabs(got - want.value) <= most, text, "\n  y", o, " element ", i, ": got ", got, ", expected ",
            want.value, " within ", most);
    }
    for (size_t i = 0; i < kBand; ++i) {
      CHECK(results[o].data[i] == static_cast<char>(0xcd) &&
                results[o].data[results[o].data.size() - 1 - i] == static_cast<char>(0xcd),
            text, " writes beyond output ", o);
    }
  }
}

void Check(const std::string& text, const std::vector<ChainArray>& inputs, int threads = 1) {
  std::vector<Result> results;
  const Status status = RunOp(text, inputs, threads, &results);
  CHECK(status.ok(), text, "\n  ", status.message());
  Compare(text, EvaluateChain(text, inputs), results);
}

ChainArray Array(Random* random, DType dtype, std::vector<int64_t> dims) {
  ChainArray array;
  array.dtype = dtype;
  array.dims = std::move(dims);
  FillChainArray(random, &array);
  return array;
}

// STOF_SHARD=2/8 takes every eighth case, from the third one: compiling kernels takes the time, and processes share it.
bool Mine(int64_t index) {
  const char* text = std::getenv("STOF_SHARD");
  int own = 0, all = 1;
  if (text == nullptr || std::sscanf(text, "%d/%d", &own, &all) != 2 || all < 1) return true;
  return index % all == own;
}

const DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
const char* NameOf(DType dtype) { return dtype == DType::kF32 ? "f32" : dtype == DType::kF16 ? "f16" : "bf16"; }

ONE_THREAD_TEST(ChainNorms) {
  Random random(1);
  int64_t index = 0;
  for (int64_t n : {1,   2,   3,    7,    8,    15,   16,   17,   63,   64,   65,   127,  255,  256,   257,   511,  512,
                    513, 768, 1000, 1023, 1024, 1025, 1535, 1536, 1537, 2049, 3072, 4097, 8191, 16384, 16385, 40000}) {
    for (DType dtype : kTypes) {
      if (!Mine(index++)) continue;
      const int64_t rows = n > 500 ? 1 : 7;
      const std::string type = NameOf(dtype);
      Check("axes b = x0.0, s = x0.1, n = x0.2\nlet r = x0[b, s, n] + x1[b, s, n]\nlet c = r - mean(r)\nout y0 " +
                type + " [b, s, n] = r\nout y1 " + type + " [b, s, n] = c * rsqrt(mean(c * c) + 1e-5) * x2[n] + x3[n]",
            {Array(&random, dtype, {2, rows, n}), Array(&random, dtype, {2, rows, n}), Array(&random, dtype, {n}),
             Array(&random, DType::kF32, {n})});
      Check("axes s = x0.0, n = x0.1; let r = x0[s, n]; out y0 " + type +
                " [s, n] = r * rsqrt(mean(r * r) + 1e-6) * (1 + x1[n])",
            {Array(&random, dtype, {rows, n}), Array(&random, dtype, {n})});
      Check(
          "axes s = x0.0, n = x0.1; let e = exp(x0[s, n] - max_of(x0[s, n])); out y0 " + type + " [s, n] = e / sum(e)",
          {Array(&random, dtype, {rows, n})});
      CountCases(3);
    }
  }
}

ONE_THREAD_TEST(ChainActivationsAndViews) {
  Random random(2);
  int64_t index = 0;
  for (int64_t n : {1, 5, 8, 31, 64, 100, 1152, 5000}) {
    for (DType dtype : kTypes) {
      if (!Mine(index++)) continue;
      const std::string type = NameOf(dtype);
      for (const char* f : {"gelu", "gelu_tanh", "silu", "relu", "sigmoid", "softplus", "tanh", "erf"}) {
        Check("axes b = x0.0, s = x0.1, n = x0.2 / 2; out y0 " + type + " [b, s, n] = " + f +
                  "(x0[b, s, n]) * x0[b, s, n + " + std::to_string(n) + "]",
              {Array(&random, dtype, {2, 3, 2 * n})});
        CountCases(1);
      }
      Check("axes s = x0.0, n = x0.1; out y0 " + type + " [n, s] = x0[s, n] + x1[(n) % 3] * x2[(s) // 2]",
            {Array(&random, dtype, {5, n}), Array(&random, dtype, {3}), Array(&random, DType::kF32, {3})});
    }
  }
  for (DType dtype : kTypes) {
    Check(
        "axes b = x0.0, h = 12, s = x0.1, d = 64\nlet turned = select(d < 32, -x0[b, s, 64 * h + d + 32], x0[b, s, 64 "
        "* h + "
        "d - 32])\nout y0 f16 [b, h, s, d] = x0[b, s, 64 * h + d] * x1[s, d] + turned * x2[s, d]",
        {Array(&random, dtype, {2, 9, 768}), Array(&random, DType::kF32, {9, 64}), Array(&random, dtype, {9, 64})});
    CountCases(1);
  }
}

#ifdef STOF_WITH_CUDA
// While a graph is captured no kernel is made: the first run is interpreted, or an error where that is not wanted.
TEST(ChainCaptured) {
  Random random(8);
  const char* wanted = std::getenv("STOF_CHAIN_KERNELS");
  for (const int64_t n : {48, 1000, 5000}) {
    const std::string text =
        "axes s = x0.0, n = x0.1; let r = x0[s, n] * 1.25; out y0 f16 [s, n] = r - mean(r * r) + " + std::to_string(n);
    const std::vector<ChainArray> inputs = {Array(&random, DType::kF16, {3, n})};
    captured = true;
    if (wanted != nullptr && std::strcmp(wanted, "made") == 0) {
      std::vector<Result> results;
      const Status status = RunOp(text, inputs, 1, &results);
      CHECK(!status.ok() && status.message().find("run once") != std::string::npos, status.message());
    } else {
      Check(text, inputs);
    }
    captured = false;
    Check(text, inputs);
    captured = true;
    Check(text, inputs);
    captured = false;
    CountCases(3);
  }
}

// Tensors that are aligned to no more than some of their elements.
TEST(ChainAlignments) {
  Random random(7);
  for (shifted = 1; shifted < 8; ++shifted) {
    for (const int64_t n : {64, 100, 768, 2048}) {
      const DType dtype = random.OneIn(2) ? DType::kF16 : DType::kF32;
      if (!Mine(shifted)) continue;
      Check(
          "axes s = x0.0, n = x0.1; let r = x0[s, n] + x1[s, n]; let c = r - mean(r); out y0 f16 [s, n] = r; out y1 "
          "bf16 [s, n] = c * rsqrt(mean(c * c) + 1e-5) * x2[n]",
          {Array(&random, dtype, {5, n}), Array(&random, DType::kF16, {5, n}), Array(&random, DType::kF32, {n})});
      Check(
          "axes s = x0.0, n = x0.1 / 2; out y0 f16 [s, n] = silu(x0[s, n]) * x0[s, n + " + std::to_string(n / 2) + "]",
          {Array(&random, dtype, {5, n})});
      CountCases(2);
    }
  }
  shifted = 0;
}
#endif

TEST(ChainRandom) {
  compared = unknown = 0;
  const int cases = Cases(500);
  for (int i = 0; i < cases; ++i) {
    if (!Mine(i)) continue;
    Random random(1000 + static_cast<uint64_t>(i));
    const int64_t n = random.Pick<int64_t>({1, 2, 3, 5, 8, 17, 64, 100, 257, 513, 1025, 1600, 2500});
    const RandomChain chain = MakeRandomChain(&random, n, n > 1000 ? 4 : n > 100 ? 20 : 300);
    try {
      Check(chain.text, chain.inputs, random.OneIn(3) ? 2 : 1);
    } catch (const Failure& failure) {
      Fail(__FILE__, __LINE__, "case " + std::to_string(i) + ": " + failure.message);
    }
  }
  CHECK(compared > 0 && unknown * 4 < compared, "too few values have a known error: ", unknown, " of ", compared);
  CountCases(cases);
}

// Rows in pieces, with a side of a select each, of tensors with gaps between rows that are used where they lie.
TEST(ChainPieces) {
  const int cases = Cases(300);
  for (int i = 0; i < cases; ++i) {
    if (!Mine(i)) continue;
    Random random(5000 + static_cast<uint64_t>(i));
    const auto number = [](int64_t value) { return std::to_string(value); };
    const int64_t n = random.Pick<int64_t>({16, 31, 32, 33, 40, 64, 80, 128, 200, 256, 513, 1100, 9000});
    const int64_t most = n > 1000 ? 2 : n > 100 ? 5 : 14;
    const int64_t a = random.Range(1, 2), b = random.Range(1, most), c = random.Range(1, most);
    const int64_t cut = random.OneIn(4) ? random.Range(0, n) : n / 2, other = random.Range(1, n - 1);
    const auto less = [&](int64_t at) {  // n < at, in other words
      switch (random.Range(0, 3)) {
        case 0:
          return "n <= " + number(at - 1);
        case 1:
          return number(at) + " > n";
        case 2:
          return "n < " + number(at) + ".0";
        default:
          return "n < " + number(at);
      }
    };
    const bool packed = random.OneIn(2);
    const auto part = [&](int64_t offset) {  // a row of the third that begins at `offset`
      if (packed) return "x0[a, b, " + number(n) + " * c + n + " + number(offset) + "]";
      return "x0[a, c, b, n + " + number(offset) + "]";
    };
    const auto turned = [&](int64_t begin) {
      const std::string sign = random.OneIn(3) ? "" : "-";
      const std::string low = sign + part(begin + n - cut), high = random.OneIn(3) ? sign + part(begin) : part(begin);
      // What lies below `cut` takes the row's end, the rest takes its begin.
      const std::string shifted = packed ? "x0[a, b, " + number(n) + " * c + n + " + number(begin - cut) + "]"
                                         : "x0[a, c, b, n + " + number(begin - cut) + "]";
      return random.OneIn(4) ? "select(n >= " + number(cut) + ", " + shifted + ", " + low + ")"
                             : "select(" + less(cut) + ", " + low + ", " + shifted + ")";
    };
    const std::string table = random.OneIn(2) ? "x1[b, n]" : random.OneIn(2) ? "x1[b, 0]" : "x1[0, n]";
    const int64_t third = packed ? n * c : n;
    const std::string types[] = {"f32", NameOf(random.Pick<DType>({DType::kF32, DType::kF16, DType::kBF16}))};
    const auto output = [&](int which) {
      const std::string dims = random.Pick<std::string>({"a, b, c, n", "a, c, b, n", "a, b, (c n)", "c, a, b, n"});
      return "\nout y" + number(which) + " " + types[random.OneIn(3) ? 1 : 0] + " [" + dims + "] = ";
    };
    std::string text = "axes a = " + number(a) + ", b = " + number(b) + ", c = " + number(c) + ", n = " + number(n) +
                       "\nlet t = " + table + "\nlet u = " + turned(third);
    text += output(0) + part(0) + (random.OneIn(2) ? "" : " * 0.125");
    text += output(1) + part(third) + " * t + u * x2[b, n]";
    switch (random.Range(0, 5)) {
      case 0:
        text += output(2) + "t - u * select(" + less(other) + ", 2, t)";
        break;
      case 1:
        text += output(2) + "select(" + less(other) + ", exp(u), c + n * 0.25)";
        break;
      case 2:
        text += output(2) + "u - mean(u)";
        break;
      case 3:
        text += output(2) + "select(" + less(other) + ", select(" + less(other / 2) + ", 3, x1[b, 0]), -x2[b, n])";
        break;
      default:
        text += output(2) + "-u * -t + " + turned(2 * third) + " * x2[b, n]";
    }
    const DType dtype = random.OneIn(2) ? DType::kF32 : random.Pick<DType>({DType::kF32, DType::kF16, DType::kBF16});
    const std::vector<int64_t> dims =
        packed ? std::vector<int64_t>{a, b, 3 * n * c + n} : std::vector<int64_t>{a, c, b, 4 * n};
    try {
      Check(text, {Array(&random, dtype, dims), Array(&random, DType::kF32, {b, n}), Array(&random, dtype, {b, n})},
            random.OneIn(3) ? 2 : 1);
    } catch (const Failure& failure) {
      Fail(__FILE__, __LINE__, "case " + std::to_string(i) + ": " + failure.message);
    }
  }
  CountCases(cases);
}

TEST(ChainEmpty) {
  Random random(5);
  for (const std::vector<int64_t>& dims : std::vector<std::vector<int64_t>>{{0, 3}, {3, 0}, {0, 0}}) {
    Check("axes s = x0.0, n = x0.1; out y0 f32 [s, n] = x0[s, n] - mean(x0[s, n]); out y1 f16 [s] = sum(x0[s, n])",
          {Array(&random, DType::kF32, dims)});
  }
  Check("axes s = x0.0, n = x0.1; out y0 f32 [s] = max_of(x0[s, n]); out y1 f32 [s, 1] = mean(x0[s, n]) + x1[s]",
        {Array(&random, DType::kF32, {4, 0}), Array(&random, DType::kF32, {4})});
  Check("axes n = 3; out y0 f32 [n] = x0[] * n", {Array(&random, DType::kBF16, {})});
  // As many rows as axes may have, of nothing: a walk through them would not end.
  std::vector<Result> results;
  const Status status = RunOp("axes a = 2147483648, b = 268435456, n = x0.0; out y0 f32 [a, b, n] = x0[n]",
                              {Array(&random, DType::kF32, {0})}, 1, &results);
  CHECK(status.ok() && results[0].tensor.Elements() == 0, status.message());
  CountCases(6);
}

#ifndef STOF_WITH_CUDA
// Whoever computes a row, its value is the same.
TEST(ChainThreads) {
  for (int i = 0; i < Cases(60); ++i) {
    Random random(70000 + static_cast<uint64_t>(i));
    const int64_t n = random.Pick<int64_t>({3, 64, 700, 3000, 20000});
    const RandomChain chain = MakeRandomChain(&random, n, n > 10000 ? 4 : 300);
    std::vector<Result> one, many;
    CHECK(RunOp(chain.text, chain.inputs, 1, &one).ok(), chain.text);
    for (int threads : {2, 3, 7}) {
      CHECK(RunOp(chain.text, chain.inputs, threads, &many).ok(), chain.text);
      for (size_t o = 0; o < one.size(); ++o)
        CHECK(one[o].data == many[o].data, chain.text, " with ", threads, " threads");
    }
    CountCases(3);
  }
}

#endif

double UlpsOff(double got, double want) {
  if (std::isnan(want) || std::isnan(got)) return std::isnan(want) == std::isnan(got) ? 0 : 1e9;
  if (std::fabs(want) > 3.4028235e38) return std::isinf(got) || std::fabs(got) > 3.4028e38 ? 0 : 1e9;
  int exponent = 0;
  std::frexp(want, &exponent);
  const double ulp = std::ldexp(1.0, std::max(exponent - 24, -140));
  // Exponentials below 2^-126 are 0 within the sigmoid and its kin.
  return std::max(0.0, std::fabs(got - want) - 2e-36) / ulp;
}

struct Measured {
  const char* name;
  ChainOp op;
  double (*exact)(double);
  double most;       // units in the last place
  bool of_argument;  // ... of the argument: where the value nearly vanishes beside it
};
#ifdef STOF_WITH_CUDA
constexpr double kGeluUlps = 2;
#else
constexpr double kGeluUlps = 1;
#endif
const Measured kMeasured[] = {
    {"exp", ChainOp::kExp, [](double x) { return std::exp(x); }, 1.5, false},
    {"log", ChainOp::kLog, [](double x) { return std::log(x); }, 1.5, false},
    {"sqrt", ChainOp::kSqrt, [](double x) { return std::sqrt(x); }, 0.5, false},
    {"rsqrt", ChainOp::kRsqrt, [](double x) { return 1 / std::sqrt(x); }, 1.5, false},
    {"reciprocal", ChainOp::kReciprocal, [](double x) { return 1 / x; }, 0.5, false},
    {"tanh", ChainOp::kTanh, [](double x) { return std::tanh(x); }, 2.5, false},
    {"erf", ChainOp::kErf, [](double x) { return std::erf(x); }, 2, false},
    {"sigmoid", ChainOp::kSigmoid, [](double x) { return 1 / (1 + std::exp(-x)); }, 2.5, false},
    {"softplus", ChainOp::kSoftplus,
     [](double x) { return std::isnan(x) ? x : std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }, 3, false},
    {"sin", ChainOp::kSin, [](double x) { return std::sin(x); }, 2, false},
    {"cos", ChainOp::kCos, [](double x) { return std::cos(x); }, 2, false},
    {"silu", ChainOp::kSilu, [](double x) { return x / (1 + std::exp(-x)); }, 3.5, false},
    {"gelu", ChainOp::kGelu, [](double x) { return 0.5 * x * std::erfc(-x * 0.70710678118654752440); }, kGeluUlps,
     true},
    {"gelu_tanh", ChainOp::kGeluTanh,
     [](double x) { return x / (1 + std::exp(-2 * 0.79788456080286535588 * (x + 0.044715 * x * x * x))); }, 2, true},
};

#ifdef STOF_WITH_CUDA
TEST(ChainFunctionsInUlps) {
  for (const Measured& measured : kMeasured) {
    Random random(9);
    ChainArray x;
    x.dims = {50000};
    for (int i = 0; i < 50000; ++i) {
      const auto bits = static_cast<uint32_t>(random.Next());
      float value = random.Unit() * (i % 4 == 1 ? 4.0f : 100.0f);
      if (i % 2 == 0) std::memcpy(&value, &bits, 4);
      x.values.push_back(value);
    }
    const double special[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1.0, -1.0};
    std::copy(std::begin(special), std::end(special), x.values.begin());
    std::vector<Result> results;
    const Status status =
        RunOp(std::string("axes n = x0.0; out y0 f32 [n] = ") + measured.name + "(x0[n])", {x}, 1, &results);
    CHECK(status.ok(), measured.name, ": ", status.message());
    double worst = 0, at = 0;
    for (size_t i = 0; i < x.values.size(); ++i) {
      const double want = measured.exact(x.values[i]);
      const double got = LoadFloat(DType::kF32, results[0].data.data() + kBand + 4 * i);
      double off = UlpsOff(got, want);
      if (measured.of_argument && std::isfinite(x.values[i]))
        off = std::fabs(got - want) / (std::fabs(x.values[i]) * 0x1p-23 + 1e-44);
      if (off > worst) worst = off, at = x.values[i];
    }
    std::printf("  %-11s %.2f ulp at %.9g\n", measured.name, worst, at);
    CHECK(worst <= measured.most + 1, measured.name, " is off by ", worst, " ulp at ", at);
    CountCases(50000);
  }
}
#else
TEST(ChainFunctionsInUlps) {
  for (const CpuIsa isa : IsasOfThisMachine()) {
    const cpu::ChainKernels& kernels = *cpu::KernelsOf(isa).chain;
    for (const Measured& measured : kMeasured) {
      Random random(9);
      double worst = 0, at = 0;
      for (int block = 0; block < Cases(400); ++block) {
        std::vector<float> x(1001), y(1001);
        for (float& value : x) {
          const auto bits = static_cast<uint32_t>(random.Next());
          if (block % 2 == 0) {
            std::memcpy(&value, &bits, 4);
          } else {
            value = random.Unit() * (block % 4 == 1 ? 4.0f : 100.0f);
          }
        }
        x[0] = 0.0f, x[1] = -0.0f, x[2] = INFINITY, x[3] = -INFINITY, x[4] = NAN, x[5] = 1.0f, x[6] = -1.0f;
        kernels.function[static_cast<int>(measured.op)][0](y.data(), x.data(), nullptr, nullptr, 1001,
                                                           cpu::ChainRows());
        for (size_t i = 0; i < x.size(); ++i) {
          const double want = measured.exact(x[i]);
          double off = UlpsOff(y[i], want);
          if (measured.of_argument && std::isfinite(x[i]))
            off = std::fabs(y[i] - want) / (std::fabs(x[i]) * 0x1p-23 + 1e-44);
          if (off > worst) worst = off, at = x[i];
        }
        CountCases(1001);
      }
      std::printf("  %-11s %-11s %.2f ulp at %.9g\n", CpuIsaName(isa), measured.name, worst, at);
      // Without a fused multiply-add a little more.
      CHECK(worst <= measured.most + (isa == CpuIsa::kPortable ? 1.5 : 0), measured.name, " of ", CpuIsaName(isa),
            " is off by ", worst, " ulp at ", at);
    }
  }
}

// Prefetches cover each element of rows with gaps once, and no rows in the order of memory.
TEST(ChainLooksAhead) {
  const auto ahead = [](const std::string& text, const std::vector<std::vector<int64_t>>& dims) {
    Chain chain;
    CHECK(ParseChain(text, &chain).ok(), text);
    std::vector<ChainArray> arrays;
    std::vector<Block> blocks(dims.size());
    std::vector<Tensor> inputs;
    Random random(4);
    for (const auto& each : dims) arrays.push_back(Array(&random, DType::kF32, each));
    for (size_t i = 0; i < arrays.size(); ++i) inputs.push_back(TensorOf(arrays[i], &blocks[i]));
    BoundChain bound;
    CHECK(BindChain(chain, inputs.data(), static_cast<int>(inputs.size()), &bound).ok(), text);
    cpu::ChainProgram program;
    cpu::CompileChain(chain, bound, 1, &program);
    std::vector<std::string> found;
    for (const cpu::ChainPrefetch& a : program.prefetches) {
      const int64_t at = a.first + (a.output ? 0 : bound.reads[static_cast<size_t>(a.which)].constant);
      const int tensor = a.output ? a.which : bound.reads[static_cast<size_t>(a.which)].input;
      found.push_back((a.output ? "y" : "x") + std::to_string(tensor) + " " + std::to_string(at) + " + " +
                      std::to_string(a.count));
    }
    std::sort(found.begin(), found.end());
    return found;
  };
  const std::string rotary =
      "axes a = x0.0, b = 3, c = x0.1, n = 64\n"
      "let t0 = x1[0, 0, c, n]\n"
      "out y0 f32 [a, b, c, n] = x0[a, c, 64 * b + n] * t0 + "
      "select(n < 32, -x0[a, c, 64 * b + n + 32], x0[a, c, 64 * b + n - 32])\n"
      "out y1 f32 [a, b, c, n] = x0[a, c, 64 * b + n + 192] * t0";
  // x1 is what all b share.
  const std::vector<std::string> wanted = {"x0 0 + 64", "x0 192 + 64", "y0 0 + 64", "y1 0 + 64"};
  CHECK(ahead(rotary, {{2, 40, 384}, {1, 1, 40, 64}}) == wanted, "rotary embedding");
  const std::string dense = "axes a = x0.0, n = x0.1; out y0 f32 [a, n] = x0[a, n] * sum(x0[a, n])";
  CHECK(ahead(dense, {{40, 64}}).empty(), "rows without gaps");
  const std::string by_row =
      "axes a = x0.0, n = x0.1; out y0 f32 [a, n] = x0[a, n] * x1[a, 0]; out y1 f32 [a] = x1[a, 0]";
  CHECK(ahead(by_row, {{40, 64}, {40, 1}}).empty(), "values of rows are no gaps");
  const std::string moved = "axes a = x0.0, b = x0.1, n = x0.2; out y0 f32 [b, a, n] = x0[a, b, n] + 1";
  CHECK(ahead(moved, {{5, 40, 64}}) == (std::vector<std::string>{"x0 0 + 64", "y0 0 + 64"}), "rows that move");
}

// One operand for a whole strip is the same number as a strip of it, the sign of zero included.
TEST(ChainSingleOperands) {
  for (const CpuIsa isa : IsasOfThisMachine()) {
    const cpu::ChainKernels& kernels = *cpu::KernelsOf(isa).chain;
    const auto* divide = kernels.function[static_cast<int>(ChainOp::kDiv)];
    for (const float one : {-0.0f, 0.0f, -1.5f, INFINITY, -INFINITY, 1e-45f}) {
      const std::vector<float> x(37, 3.0f), strip(37, one);
      std::vector<float> y(37), want(37);
      divide[0](want.data(), x.data(), strip.data(), nullptr, 37, cpu::ChainRows());
      divide[2](y.data(), x.data(), &one, nullptr, 37, cpu::ChainRows());
      for (size_t i = 0; i < y.size(); ++i) CHECK(y[i] == want[i], "3 / ", one, " is ", y[i], ", expected ", want[i]);
    }
  }
}

#endif

struct Bad {
  const char* text;
  const char* part;  // of the message
};
TEST(ChainErrors) {
  const std::string deep = "axes n = 4; out y0 f32 [n] = " + std::string(100, '(') + "1" + std::string(100, ')');
  const std::string minus = "axes n = 4; out y0 f32 [n] = " + std::string(100, '-') + "1";
  std::string many = "axes n = 4; out y0 f32 [n] = 1";
  for (int i = 0; i < 300; ++i) many += " + exp(n + " + std::to_string(i) + ")";
  std::string sums = "axes n = 4; out y0 f32 [n] = 1";
  for (int i = 0; i < 17; ++i) sums += " + sum(n + " + std::to_string(i) + ")";
  const std::string huge = "axes n = 4; out y0 f32 [n] = 1" + std::string(20000, ' ');
  const Bad kBad[] = {
      {"", "line 1: found nothing, expected 'axes'"},
      {"let a = 1", "line 1: found 'let', expected 'axes'"},
      {"axes n = 4", "found no output"},
      {"axes n = 4; foo", "line 2: found 'foo', expected 'let' or 'out'"},
      {"axes n = 4; out y1 f32 [n] = 1", "line 2: found 'y1', expected y0"},
      {"axes n = 4; out y0 f64 [n] = 1", "expected f32, f16 or bf16"},
      {"axes n = 4; out y0 f32 [m] = 1", "found 'm', expected an axis"},
      {"axes n = 4; out y0 f32 [n, n] = 1", "found 'n' twice"},
      {"axes b = 2, n = 4; out y0 f32 [n] = 1", "found no axis b"},
      {"axes b = 2, n = 4; out y0 f32 [b] = n", "varies along it"},
      {"axes n = 4; out y0 f32 [2] = 1", "found 2, expected an axis"},
      {"axes n = 4; out y0 f32 [n] = 1 +", "found the end of the line, expected a value"},
      {"axes n = 4; out y0 f32 [n] = a", "found 'a', expected a number"},
      {"axes n = 4; out y0 f32 [n] = 1 2", "found '2', expected the end of the line"},
      {"axes n = 4; out y0 f32 [n] = exp(1", "found the end of the line, expected ')'"},
      {"axes n = 4; out y0 f32 [n] = exp(1, 2)", "found ',', expected ')'"},
      {"axes n = 4; out y0 f32 [n] = min(1)", "found ')', expected ','"},
      {"axes n = 4; out y0 f32 [n] = x0[n] * x16[n]", "found 'x16', expected x0 to x15"},
      {"axes n = 4; out y0 f32 [n] = x0[n * 2]", "found '*'"},
      {"axes n = 4; out y0 f32 [n] = x0[(n) % 0]", "divisor of 0"},
      {"axes n = 4; out y0 f32 [n] = x0[(n)]", "expected '%' or '//'"},
      {"axes n = 4; out y0 f32 [n] = x0[3000000000]", "at most 2^31"},
      {"axes n = 4; out y0 f32 [n] = x0[2147483648 + 1]", "within 2^31"},
      {"axes n = 4; out y0 f32 [n] = 1e", "found '1e', expected a floating-point number"},
      {"axes n = 4; out y0 f32 [n] = 0x", "expected a floating-point number"},
      {"axes n = 4; let exp = 1; out y0 f32 [n] = 1", "found 'exp', expected a name that means nothing else"},
      {"axes n = 4; let a = 1; let a = 2; out y0 f32 [n] = 1",
       "line 3: found 'a', expected a name that is not defined"},
      {"axes a = 1, b = 1, c = 1, d = 1, e = 1, f = 1, g = 1; out y0 f32 [a] = 1", "seventh axis"},
      {"axes n = x0.9; out y0 f32 [n] = 1", "found dimension 9"},
      {"axes n = x0.0 / 0; out y0 f32 [n] = 1", "divisor of 1 or more"},
      {"axes n = 4; out y0 f32 [n] = sum(\x1b[31m)", "found '\\x1b', expected a value"},
      {"axes n = x1.0; out y0 f32 [n] = 1", "inputs, but the chain names x1"},
      {"axes n = x0.1; out y0 f32 [n] = 1", "axis n: found input x0 of shape [6], expected a dimension 1"},
      {"axes n = x0.0 / 4; out y0 f32 [n] = 1", "found size 6 of x0.0, expected a multiple of 4"},
      {"axes n = x0.0; out y0 f32 [n] = x0[n, n]", "found 2 indices of x0"},
      {"axes n = x0.0; out y0 f32 [n] = x0[n + 1]", "found an index of 1 to 6 in dimension 0 of x0, expected 0 to 5"},
      {"axes n = x0.0; out y0 f32 [n] = x0[n - 1]", "found an index of -1 to 4"},
      {"axes n = x0.0; out y0 f32 [n] = x0[2 * n]", "found an index of 0 to 10"},
      {"axes n = 12; out y0 f32 [n] = x0[(n) % 7]", "found an index of 0 to 6"},
      {"axes n = 14; out y0 f32 [n] = x0[(n) // 2]", "found an index of 0 to 6"},
      {"axes n = x0.0; out y0 f32 [n] = select(n < 4, x0[n + 3], 0)", "found an index of 3 to 6"},
      {"axes n = x0.0; out y0 f32 [n] = select(n + 0 < 3, x0[n + 3], 0)", "found an index of 3 to 8"},
      {"axes n = x0.0; let a = x0[n + 3]; out y0 f32 [n] = select(n < 3, a, a)", "found an index of 3 to 8"},
      {"axes n = x0.0; out y0 f32 [n] = select(n < 3, sum(x0[n + 3]), 0)", "found an index of 3 to 8"},
      {"axes a = 2147483648, b = 2147483648, n = 4; out y0 f32 [a, b, n] = 1", "does not fit"},
      {"axes m = 8, n = 2147483648; out y0 f32 [m] = sum(n * x0[0])",
       "line 1: found axes whose product is 17179869184 with 4 values to compute at each position, but only 9 "
       "elements"},
      {deep.c_str(), "nested deeper than 64"},
      {minus.c_str(), "nested deeper than 64"},
      {many.c_str(), "more than 256 nodes"},
      {sums.c_str(), "more than 16 reductions"},
      {huge.c_str(), "bytes of text, expected at most 16384"},
  };
  Random random(3);
  for (const Bad& bad : kBad) {
    std::vector<Result> results;
    const Status status = RunOp(bad.text, {Array(&random, DType::kF32, {6})}, 1, &results);
    CHECK(!status.ok(), bad.text);
    CHECK(status.message().find(bad.part) != std::string::npos, bad.text, " says ", status.message());
    CHECK(status.message().find('\x1b') == std::string::npos, "a message with a control character");
    CountCases(1);
  }
}

// The work of a run is bounded by what it reads and writes, however its text spells long rows.
TEST(ChainWork) {
  struct Sizes {
    const char* text;
    std::vector<std::vector<int64_t>> shapes;
    bool fits;
  };
  constexpr int64_t kLarge = int64_t{1} << 20;
  const Sizes kSizes[] = {
      // As many positions as elements, or a few for each.
      {"axes b = x0.0, n = x0.1; out y0 f32 [b, n] = x0[b, n] - mean(x0[b, n])", {{kLarge, kLarge}}, true},
      {"axes b = x0.0, n = x0.1; out y0 f32 [b] = mean(x0[b, n])", {{kLarge, kLarge}}, true},
      {"axes b = x0.0, h = 3, n = x0.1; out y0 f32 [b, h] = sum(x0[b, n] * h)", {{kLarge, kLarge}}, true},
      {"axes b = x0.0, h = 5, n = x0.1; out y0 f32 [b, h] = sum(x0[b, n] * h)", {{kLarge, kLarge}}, false},
      {"axes n = x0.0 / 64; out y0 f32 [1] = sum(x0[64 * n])", {{int64_t{1} << 40}}, true},
      // Rows of all pairs: what another output has of them, or as many as are affordable.
      {"axes b = x0.0, n = x1.0; out y0 f32 [b] = sum(x0[b] * x1[n])", {{8192}, {8192}}, true},
      {"axes b = x0.0, n = x1.0; out y0 f32 [b] = sum(x0[b] * x1[n])", {{kLarge}, {kLarge}}, false},
      {"axes b = x0.0, n = x1.0; out y0 f32 [b] = sum(x0[b] * x1[n]); out y1 f16 [b, n] = 1",
       {{kLarge}, {kLarge}},
       true},
      // A read of few elements counts as few, however large its input or often its row repeats them.
      {"axes b = 4, n = 2147483648; out y0 f32 [b] = sum(x0[0] * n)", {{int64_t{1} << 40}}, false},
      {"axes b = 4, n = 2147483648; out y0 f32 [b] = sum(x0[(n) % 8])", {{8}}, false},
      {"axes b = 4, n = 2147483648; out y0 f32 [b] = select(b < 9, 1, sum(x0[(n) // 2147483648]))", {{1}}, false},
      {"axes b = 0, n = 2147483648; out y0 f32 [b] = sum(n)", {{1}}, true},
      {"axes b = 16384, n = 0; out y0 f32 [b] = sum(n)", {{1}}, true},
  };
  for (const Sizes& one : kSizes) {
    Chain chain;
    const Status parsed = ParseChain(one.text, &chain);
    CHECK(parsed.ok(), one.text, " says ", parsed.message());
    std::vector<Tensor> shapes(one.shapes.size());
    for (size_t i = 0; i < shapes.size(); ++i) {
      shapes[i].dtype = DType::kF32;
      shapes[i].rank = static_cast<int>(one.shapes[i].size());
      std::copy(one.shapes[i].begin(), one.shapes[i].end(), shapes[i].dims);
    }
    BoundChain bound;
    const Status status = BindChain(chain, shapes.data(), static_cast<int>(shapes.size()), &bound);
    CHECK(status.ok() == one.fits, one.text, " says ", status.message());
    CHECK(one.fits || status.message().find("expected at most 4 positions for each element") != std::string::npos,
          status.message());
    CountCases(1);
  }
}

// Texts that went wrong somewhere: an error, or a chain that gives what the definition says.
TEST(ChainMutations) {
  int64_t valid = 0;
  const int cases = Cases(20000);
  int64_t mine = 0;
  for (int i = 0; i < cases; ++i) {
    if (!Mine(i)) continue;
    ++mine;
    Random random(500000 + static_cast<uint64_t>(i));
    RandomChain chain = MakeRandomChain(&random, random.Pick<int64_t>({1, 4, 9}), 12);
    std::string& text = chain.text;
    static const char kBytes[] = "0123456789.()[],;=+-*/%<>! \nxyabhsneflout_\t\0\xff";
    const int edits = random.OneIn(2) ? 1 : static_cast<int>(random.Range(1, 4));
    for (int e = 0; e < edits && !text.empty(); ++e) {
      const auto at = static_cast<size_t>(random.Range(0, static_cast<int64_t>(text.size()) - 1));
      const auto length = std::min<size_t>(text.size() - at, static_cast<size_t>(random.Range(1, 12)));
      switch (random.Range(0, 4)) {
        case 0:
          text[at] = kBytes[random.Range(0, static_cast<int64_t>(sizeof kBytes) - 2)];
          break;
        case 1:
          text.erase(at, random.OneIn(2) ? 1 : length);
          break;
        case 2:
          text.insert(at, 1, kBytes[random.Range(0, static_cast<int64_t>(sizeof kBytes) - 2)]);
          break;
        case 3:
          text.insert(at,
                      text.substr(static_cast<size_t>(random.Range(0, static_cast<int64_t>(text.size()) - 1)), length));
          break;
        default:
          text[at] = static_cast<char>(random.Next());
      }
    }
    Chain parsed;
    if (!ParseChain(text, &parsed).ok()) continue;
    std::vector<Tensor> shapes(chain.inputs.size());
    std::vector<Block> blocks(chain.inputs.size());
    for (size_t k = 0; k < shapes.size(); ++k) shapes[k] = TensorOf(chain.inputs[k], &blocks[k]);
    BoundChain bound;
    if (!BindChain(parsed, shapes.data(), static_cast<int>(shapes.size()), &bound).ok()) continue;
    if (bound.rows > 2000 || bound.n > 2000 || bound.rows * bound.n > 20000) continue;
    ++valid;
    try {
      Check(text, chain.inputs);
    } catch (const std::exception& error) {
      Fail(__FILE__, __LINE__, "case " + std::to_string(i) + ": " + text + "\n  " + error.what());
    }
  }
  CHECK(mine < 500 || valid * 100 > mine, "only ", valid, " of ", mine, " mutated texts are chains");
  CountCases(cases);
}

}  // namespace
}  // namespace stof::test
