// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/attention/cuda_attention_cases.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/ops/attention.h"

namespace stof::test::attention {

int64_t rounded_otherwise = 0;

void* Allocate(void* self, size_t bytes) {
  void* block = nullptr;
  if (cudaMalloc(&block, bytes) != cudaSuccess) return nullptr;
  static_cast<std::vector<void*>*>(self)->push_back(block);
  return block;
}

// Memory of a tensor on the device, each with `shift` bytes before it as on the host.
void* OnDevice(std::vector<void*>* blocks, const void* from, size_t bytes) {
  void* block = Allocate(blocks, std::max<size_t>(bytes, 16));
  CHECK(block != nullptr, "no device memory");
  CHECK(cudaMemcpy(block, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
  return block;
}

Tables OperandsOnDevice(const Case& c, const MaskData& data, std::vector<void*>* blocks) {
  Tables operands;
  const auto add = [&](const char* name, const auto& values, DType dtype, std::initializer_list<int64_t> dims) {
    operands.emplace_back(name,
                          Describe(OnDevice(blocks, values.data(), values.size() * sizeof(values[0])), dtype, dims));
  };
  if (c.mask == 6) add("table0", data.head_keys, DType::kBool, {c.H, c.T});
  if (c.mask == 7) add("table0", data.pairs, DType::kU8, {c.S, c.T});
  if (c.mask == 8) add("table0", data.head_tiles, DType::kBool, {c.H, (c.S + 15) / 16, (c.T + 31) / 32});
  add("segment_q", data.segment_q, DType::kI32, {c.B, c.S});
  add("segment_k", data.segment_k, DType::kI64, {c.B, c.T});
  add("lengths", data.lengths, DType::kI64, {c.B});
  add("pad", data.pad, DType::kBool, {c.pad_shared ? 1 : c.B, c.T});
  return operands;
}

namespace {

// What a run is given, counted as runtimes do that plan memory ahead.
struct Counted {
  std::vector<void*>* blocks;
  size_t bytes = 0;
  static void* Take(void* self, size_t bytes) {
    auto* own = static_cast<Counted*>(self);
    own->bytes += (bytes + 63) / 64 * 64;
    return Allocate(own->blocks, bytes);
  }
};

// kernels: those to force, by turns; "": the one that is chosen. repeats: of each, at least two, which give the same
// bits; the first two are also compared with the definition.
void RunOnCuda(const Case& c, uint64_t seed, const std::vector<std::string>& kernels, int repeats) {
  const std::string description = Text("cuda, seed ", seed, " ", Describe(c));
  Random random(seed);
  const MaskData data = DrawMask(c, &random);
  BiasTensor bias = DrawBias(c, &random);
  const std::vector<float> relative = DrawRelative(c, &random, &bias.dense);
  Dense dense = DrawDense(c, data, bias, &random);
  if (c.sink) dense.sink = DrawSink(c, &random);
  std::vector<char> sink(static_cast<size_t>(c.H * SizeOfFloat(c.dtype)));
  for (size_t h = 0; h < dense.sink.size(); ++h) {
    StoreFloat(c.dtype, dense.sink[h], &sink[h * static_cast<size_t>(SizeOfFloat(c.dtype))]);
  }
  Strided query(c, 0, c.H, c.S, c.D), key(c, 1, c.G, c.T, c.D), value(c, 2, c.G, c.T, c.Dv);
  Strided output(c, 3, c.H, c.S, c.Dv);
  query.Fill(dense.query);
  key.Fill(dense.key);
  value.Fill(dense.value);
  if (c.wild && c.mask != 12 && c.empty_rows <= EmptyRows::kNan) {
    value.ForEach([&](char* at, size_t i) {
      const int64_t row = static_cast<int64_t>(i) / c.Dv;
      if (data.pad[static_cast<size_t>(row / c.T / c.G * c.T + row % c.T)] == 0) StoreFloat(c.dtype, 1e30, at);
    });
  }
  AttentionArgs args = MakeArgs(c, query, key, value, output);
  std::vector<void*> blocks;
  const auto upload = [&blocks](const Strided& tensor) {
    return static_cast<char*>(OnDevice(&blocks, tensor.bytes.data(), tensor.bytes.size())) +
           (tensor.data - tensor.bytes.data());
  };
  args.query.data = upload(query), args.key.data = upload(key), args.value.data = upload(value);
  args.output.data = upload(output);
  char* const output_bytes = static_cast<char*>(args.output.data) - (output.data - output.bytes.data());
  if (c.bias != Bias::kNone) {
    const void* const biases = OnDevice(&blocks, bias.bytes.data(), bias.bytes.size());
    args.scores.bias = {biases, bias.dtype, bias.stride[0], bias.stride[1], bias.stride[2], bias.stride[3]};
  }
  if (c.relative > 0) {
    args.scores.relative_bias.table =
        static_cast<float*>(OnDevice(&blocks, relative.data(), relative.size() * sizeof(float)));
    args.scores.relative_bias.size = c.relative;
    args.scores.relative_bias.stride_h = c.relative_shared ? 0 : c.relative;
  }
  args.scores.relative_bias.query_position = c.offset ? c.T - c.S : 0;
  if (c.sink) args.scores.sink = {OnDevice(&blocks, sink.data(), sink.size()), c.dtype};
  Tensor pad = Describe(data.pad.data(), DType::kBool, {c.pad_shared ? 1 : c.B, c.T});
  const bool padded = c.pad != Pad::kNone && c.mask != 12;
  if (padded) pad.data = OnDevice(&blocks, data.pad.data(), data.pad.size());
  AttentionMask mask;
  BoundMask bound;
  AttentionArgs host;
  CpuAttentionConfig config;
  config.m = 128, config.n = 64;
  BindMask(c, data, config, &bound, &host);
  mask.parts = bound.parts;
  // Cases differ in their tables; the seed keeps their masks apart in the cache.
  mask.fixed_hash = mask.parts.fixed.empty() ? 0 : mask.parts.fixed.Hash() ^ (seed << 32);
  ExprSizes sizes = {c.B, c.H, c.S, c.T, c.offset ? c.T - c.S : 0};
  // As the operator does where the mask is dilated: each residue class is a problem of its own.
  std::shared_ptr<const AttentionMask> residues;
  if (c.mask >= 14 && !mask.parts.pad) CHECK(MakeAttentionMask(MaskText(c.mask), {}, &residues).ok());
  const bool split = residues != nullptr && SplitByResidue(*residues, &args, &sizes);
  if (split) mask.parts = residues->of_residue->parts, mask.fixed_hash = residues->of_residue->fixed_hash;
  RunContext context;
  context.on_cuda = true;
  Counted counted{&blocks};
  context.allocate = Counted::Take;
  context.self = &counted;
  const Tables operands = OperandsOnDevice(c, data, &blocks);
  CHECK(Check(args).ok(), description, ": ", Check(args).message());
  size_t planned = 0;
  const Status sized = PlanCudaAttention(args, padded, mask, sizes, operands, &planned);
  CHECK(sized.ok(), description, ": ", sized.message());
  const Answer answer = Attend(dense);
  const std::vector<char> poison = output.bytes;
  std::vector<char> first;
  Lse lse(c);
  auto* const device_lse = static_cast<float*>(OnDevice(&blocks, lse.values.data(), lse.bytes()));
  args.output.lse_stride_b = lse.stride_b, args.output.lse_stride_h = lse.stride_h;
  const auto each = static_cast<size_t>(repeats);
  for (size_t run = 0; run < each * kernels.size(); ++run) {
    const std::string& kernel = kernels[run / each];
    const int repeat = static_cast<int>(run % each);
    const ForcedKernel forced(cuda::AttentionRequests(), kernel);
    const std::string where = Text(description, ", kernel '", kernel, "'");
    CHECK(cudaMemcpy(output_bytes, poison.data(), poison.size(), cudaMemcpyHostToDevice) == cudaSuccess);
    // Asked for in one of the two runs that are compared, whose outputs are the same.
    const bool asked = !split && repeat < 2 && (repeat == 0) == (seed % 2 == 0);
    args.output.lse = asked ? device_lse : nullptr;
    lse.Reset();
    CHECK(cudaMemcpy(device_lse, lse.values.data(), lse.bytes(), cudaMemcpyHostToDevice) == cudaSuccess);
    counted.bytes = 0;
    const Status status =
        FindCudaBackend()->attention.run(args, padded ? &pad : nullptr, mask, sizes, operands, context);
    CHECK(status.ok(), where, ": ", status.message());
    CHECK(counted.bytes <= planned, where, ": ", counted.bytes, " bytes of memory, planned were ", planned);
    output.Reset();
    const cudaError_t error =
        cudaMemcpy(output.bytes.data(), output_bytes, output.bytes.size(), cudaMemcpyDeviceToHost);
    CHECK(error == cudaSuccess, where, ": ", cudaGetErrorString(error));
    if (repeat == 0) first = output.bytes;
    CHECK(first == output.bytes, where, ": run ", repeat, " gives other bits than the first");
    if (repeat > 1) continue;
    Compare(c, dense, answer, &output, where);
    if (!asked) continue;
    CHECK(cudaMemcpy(lse.values.data(), device_lse, lse.bytes(), cudaMemcpyDeviceToHost) == cudaSuccess, where);
    lse.Compare(c, answer, where);
  }
  args.output.lse = nullptr;
  if (c.tf32) {
    args.allow_tf32 = false;
    const Status status =
        FindCudaBackend()->attention.run(args, padded ? &pad : nullptr, mask, sizes, operands, context);
    CHECK(status.ok(), description, ": ", status.message());
    std::vector<char> exact(first.size());
    CHECK(cudaMemcpy(exact.data(), output_bytes, exact.size(), cudaMemcpyDeviceToHost) == cudaSuccess, description);
    if (exact != first) ++rounded_otherwise;
  }
  for (void* block : blocks) cudaFree(block);
}

}  // namespace

cuda::KernelTable ScheduledKernels(int head_size) {
  cuda::KernelProblem problem;
  problem.capability = 90;
  problem.head_size = head_size;
  cuda::KernelTable kernels;
  cuda::FindFamily(cuda::KernelRole::kScheduled, problem, &kernels);
  return kernels;
}

std::vector<Case> CudaCases() {
  std::vector<Case> cases = ListedCases();
  const std::vector<Case> drawn = DrawnCases(Cases(600));
  cases.insert(cases.end(), drawn.begin(), drawn.end());
  for (size_t i = 0; i < cases.size(); ++i) {
    Case& c = cases[i];
    c.cuda = true;
    c.shifted = false;
    c.pad_shared = i % 4 == 1;
    if (c.dtype == DType::kF32) c.dtype = i % 2 == 0 ? DType::kF16 : DType::kBF16;
    // fp16 scores stay in range.
    c.spread = std::min(c.spread, 8.0f);
    c.D = (c.D + 7) / 8 * 8;
    c.Dv = (c.Dv + 7) / 8 * 8;
  }
  // Every head size that an fp16 or bf16 kernel is compiled for, and neighbours that it pads.
  int64_t turn = 0;
  for (const int64_t size : {8, 24, 32, 40, 72, 88, 96, 104, 136, 144, 152, 160, 168, 184, 192, 200, 240, 248}) {
    for (const int64_t length : {63, 64, 65, 129, 200}) {
      Case c;
      c.S = length, c.T = length + turn % 3 * 64, c.D = c.Dv = size, c.G = turn % 2 == 0 ? 4 : 2;
      c.dtype = turn % 3 == 0 ? DType::kBF16 : DType::kF16;
      c.mask = static_cast<int>((turn + turn / 10) % 10);  // not the same for every length
      c.pad = static_cast<Pad>((turn + turn / 5) % 5);
      c.empty_rows = static_cast<EmptyRows>(turn % 4);
      c.softcap = turn % 7 == 6 ? 30.0f : 0.0f;
      c.sink = c.empty_rows == EmptyRows::kZero;
      c.cuda = true;
      cases.push_back(c);
      ++turn;
    }
  }
  return cases;
}

std::vector<Case> CudaLargeScoreCases(bool fp16_bf16) {
  std::vector<Case> cases;
  for (Case& c : LargeScoreCases(Cases(180))) {
    if ((c.dtype != DType::kF32) != fp16_bf16) continue;
    // Infinity among fp32 numbers is NaN when they are split for tensor cores.
    if (!fp16_bf16 && (c.scores == Scores::kDown || c.softcap > 0)) c.scores = Scores::kSteps;
    c.cuda = true;
    cases.push_back(c);
  }
  return cases;
}

void RunCudaCases(const std::vector<Case>& cases, const std::vector<std::string>& kernels, int repeats) {
  int devices = 0;
  CHECK(cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0, "no CUDA device");
  int64_t ran = 0;
  const char* only = std::getenv("STOF_CASE");      // a seed, to repeat one
  const char* sample = std::getenv("STOF_SAMPLE");  // n: every n-th, for slow tools
  const size_t step = sample == nullptr ? 1 : std::max<size_t>(1, std::strtoull(sample, nullptr, 10));
  // The first few failures say more than the first; none can be told from another once the device has failed.
  constexpr int kShown = 4;
  std::string failures;
  int64_t failed = 0;
  for (size_t i = 0; i < cases.size(); i += step) {
    if (only != nullptr && std::strtoull(only, nullptr, 10) != i) continue;
    ++ran;
    try {
      RunOnCuda(cases[i], i, kernels, repeats);
    } catch (const Failure& failure) {
      if (++failed <= kShown) failures += "\n  " + failure.message;
      if (cudaDeviceSynchronize() != cudaSuccess) break;
    }
  }
  CountCases(ran);
  CHECK(failed == 0, failed, " of ", ran, " cases failed, the first:", failures);
}

std::vector<std::string> FirstKernels(int count) {
  std::vector<std::string> kernels;
  const char* only = std::getenv("STOF_CUDA_KERNEL");
  for (int kernel = 0; kernel < count; ++kernel) {
    if (only == nullptr || std::atoi(only) == kernel) kernels.push_back(std::to_string(kernel));
  }
  return kernels;
}

std::vector<Case> EveryTenth(const std::vector<Case>& all, const char* kernel) {
  std::vector<Case> cases;
  for (size_t i = 0; i < all.size(); i += 10) {
    cases.push_back(all[i]);
    cases.back().kernel = kernel;
  }
  return cases;
}

}  // namespace stof::test::attention
