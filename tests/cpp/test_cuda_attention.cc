// SPDX-License-Identifier: Apache-2.0
// The attention kernels on a GPU, against the definition: the CPU kernels' table of cases, each kernel by itself, and
// what only these kernels have (few queries, rows in parts, TF32).
#include <cuda_runtime.h>

#include <cmath>
#include <limits>

#include "cuda/selector.h"
#include "cuda/work_plan.h"
#include "plugins/core/cuda_backend.h"
#include "tests/cpp/attention_problem.h"

namespace stof::test::attention {
namespace {

void* Allocate(void* self, size_t bytes) {
  void* block = nullptr;
  if (cudaMalloc(&block, bytes) != cudaSuccess) return nullptr;
  static_cast<std::vector<void*>*>(self)->push_back(block);
  return block;
}

// A kernel that the selector has to take until this goes; -1: its own choice.
struct Chosen {
  explicit Chosen(int kernel) { cuda::TakeKernel(kernel); }
  ~Chosen() { cuda::TakeKernel(-1); }
  Chosen(const Chosen&) = delete;
  Chosen& operator=(const Chosen&) = delete;
};

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

// Memory of a tensor on the device, each with `shift` bytes before it as on the host.
void* OnDevice(std::vector<void*>* blocks, const void* from, size_t bytes) {
  void* block = Allocate(blocks, std::max<size_t>(bytes, 16));
  CHECK(block != nullptr, "no device memory");
  CHECK(cudaMemcpy(block, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
  return block;
}

// The vectors and tables that a case's mask may read, on the device.
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

// Cases whose outputs with allow_tf32 differ from those without.
int64_t rounded_otherwise = 0;

// kernels: those for compute capability 9.0 to take, by turns; -1: the one that is chosen. repeats: of each, at least
// two, which give the same bits; the first two are also compared with the definition.
void RunOnCuda(const Case& c, uint64_t seed, const std::vector<int>& kernels, int repeats) {
  const std::string description = Text("cuda, seed ", seed, " ", Describe(c));
  Random random(seed);
  const MaskData data = DrawMask(c, &random);
  BiasTensor bias = DrawBias(c, &random);
  const std::vector<float> relative = DrawRelative(c, &random, &bias.dense);
  Dense dense = DrawDense(c, data, bias, &random);
  if (c.sink) dense.sink = DrawValues(&random, c.dtype, c.H, 4);
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
  args.query = upload(query), args.key = upload(key), args.value = upload(value);
  args.output = upload(output);
  char* const output_bytes = static_cast<char*>(args.output) - (output.data - output.bytes.data());
  if (c.bias != Bias::kNone) {
    args.bias = OnDevice(&blocks, bias.bytes.data(), bias.bytes.size());
    args.bias_dtype = bias.dtype;
    args.bias_stride_b = bias.stride[0], args.bias_stride_h = bias.stride[1];
    args.bias_stride_q = bias.stride[2], args.bias_stride_k = bias.stride[3];
  }
  if (c.relative > 0) {
    args.relative_bias = static_cast<float*>(OnDevice(&blocks, relative.data(), relative.size() * sizeof(float)));
    args.relative_bias_size = c.relative;
    args.relative_bias_stride_h = c.relative_shared ? 0 : c.relative;
  }
  args.query_position = c.offset ? c.T - c.S : 0;
  if (c.sink) args.sink = OnDevice(&blocks, sink.data(), sink.size()), args.sink_dtype = c.dtype;
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
  // As the operator does where the mask comes apart by remainders.
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
  size_t planned = 0;
  const Status sized = PlanCudaAttention(args, padded, mask, sizes, operands, &planned);
  CHECK(sized.ok(), description, ": ", sized.message());
  const Answer answer = Attend(dense);
  const Chosen restore(-1);
  const std::vector<char> poison = output.bytes;
  std::vector<char> first;
  Lse lse(c);
  auto* const device_lse = static_cast<float*>(OnDevice(&blocks, lse.values.data(), lse.bytes()));
  args.lse_stride_b = lse.stride_b, args.lse_stride_h = lse.stride_h;
  const auto each = static_cast<size_t>(repeats);
  for (size_t run = 0; run < each * kernels.size(); ++run) {
    const int kernel = kernels[run / each], repeat = static_cast<int>(run % each);
    cuda::TakeKernel(kernel);
    const std::string where = Text(description, ", kernel ", kernel);
    CHECK(cudaMemcpy(output_bytes, poison.data(), poison.size(), cudaMemcpyHostToDevice) == cudaSuccess);
    // Asked for in one of the two runs that are compared, whose outputs are the same.
    const bool asked = !split && repeat < 2 && (repeat == 0) == (seed % 2 == 0);
    args.lse = asked ? device_lse : nullptr;
    lse.Reset();
    CHECK(cudaMemcpy(device_lse, lse.values.data(), lse.bytes(), cudaMemcpyHostToDevice) == cudaSuccess);
    counted.bytes = 0;
    const Status status = FindCudaBackend()->attention(args, padded ? &pad : nullptr, mask, sizes, operands, context);
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
  args.lse = nullptr;
  if (c.tf32) {
    args.allow_tf32 = false;
    const Status status = FindCudaBackend()->attention(args, padded ? &pad : nullptr, mask, sizes, operands, context);
    CHECK(status.ok(), description, ": ", status.message());
    std::vector<char> exact(first.size());
    CHECK(cudaMemcpy(exact.data(), output_bytes, exact.size(), cudaMemcpyDeviceToHost) == cudaSuccess, description);
    if (exact != first) ++rounded_otherwise;
  }
  for (void* block : blocks) cudaFree(block);
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
    // Scores of half types stay in their range.
    c.spread = std::min(c.spread, 8.0f);
    c.D = (c.D + 7) / 8 * 8;
    c.Dv = (c.Dv + 7) / 8 * 8;
  }
  // Every head size that a kernel for halves is written for, and those around it whose last columns it fills up.
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

void RunCudaCases(const std::vector<Case>& cases, const std::vector<int>& kernels, int repeats = 2) {
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

void Cuda() { RunCudaCases(CudaCases(), {-1}); }

// Every case as fp32 has it, of all head sizes and alignments, and lengths around the kernel's tiles.
std::vector<Case> CudaFp32Cases() {
  std::vector<Case> cases = ListedCases();
  const std::vector<Case> drawn = DrawnCases(Cases(400));
  cases.insert(cases.end(), drawn.begin(), drawn.end());
  for (Case& c : cases) c.dtype = DType::kF32;
  int64_t turn = 0;
  for (const int64_t size : {24, 32, 64, 72, 96, 128, 160, 192, 256}) {
    for (const int64_t length : {63, 64, 65, 127, 129, 200, 321}) {
      Case c;
      c.S = length, c.T = length + turn % 3 * 64, c.D = c.Dv = size, c.G = turn % 2 == 0 ? 4 : 2;
      c.mask = static_cast<int>(turn % 10);
      c.pad = static_cast<Pad>(turn % 5);
      c.empty_rows = static_cast<EmptyRows>(turn % 4);
      c.wild = turn % 4 < 2;
      c.softcap = turn % 7 == 6 ? 30.0f : 0.0f;
      c.sink = c.empty_rows == EmptyRows::kZero;
      cases.push_back(c);
      ++turn;
    }
  }
  for (Case& c : cases) c.cuda = true;
  return cases;
}

void CudaFp32() { RunCudaCases(CudaFp32Cases(), {-1}); }

// The row-wise kernel, of all types.
void CudaRows() {
  std::vector<Case> cases = CudaCases();
  for (Case& c : CudaFp32Cases()) {
    if (c.wild || c.D % 4 != 0 || c.Dv % 4 != 0) continue;
    cases.push_back(c);
  }
  for (Case& c : cases) c.kernel = "rows";
  RunCudaCases(cases, {-1});
}

void CudaTf32() {
  std::vector<Case> cases = CudaFp32Cases();
  for (Case& c : cases) c.tf32 = true, c.wild = false;
  rounded_otherwise = 0;
  RunCudaCases(cases, {-1});
  // Not of few queries, nor of rows with one key or none.
  const char* sample = std::getenv("STOF_SAMPLE");
  const int64_t ran = static_cast<int64_t>(cases.size()) / std::max(1, sample == nullptr ? 1 : std::atoi(sample));
  CHECK(std::getenv("STOF_CASE") != nullptr || rounded_otherwise >= ran / 3, rounded_otherwise, " of ", ran,
        " cases are rounded otherwise than without allow_tf32");
}

// The numbers of a list's first kernels, or the one that STOF_CUDA_KERNEL says.
std::vector<int> FirstKernels(int count) {
  std::vector<int> kernels;
  const char* only = std::getenv("STOF_CUDA_KERNEL");
  for (int kernel = 0; kernel < count; ++kernel) {
    if (only == nullptr || std::atoi(only) == kernel) kernels.push_back(kernel);
  }
  return kernels;
}

// Few queries: every type and feature, groups of heads, and keys enough for several CTAs to share them. By the
// selector's choice and by every kind of kernel.
void CudaDecode() {
  Random random(77);
  Deck<int64_t> queries({1, 1, 1, 2, 3, 4, 7, 8, 13, 16}, &random);
  Deck<int64_t> keys({16, 17, 31, 63, 64, 65, 129, 700, 1500, 3001}, &random);
  Deck<int64_t> sizes({8, 40, 64, 72, 128, 128, 200, 256}, &random);
  Deck<std::pair<int64_t, int64_t>> heads({{8, 8}, {8, 2}, {8, 1}, {6, 2}, {2, 2}}, &random);
  Deck<DType> dtypes({DType::kF16, DType::kBF16, DType::kF32}, &random);
  Deck<Arrangement> arrangements(kArrangements, &random);
  Deck<int> masks({0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kAll, Pad::kRandom}, &random);
  Deck<Bias> biases({Bias::kNone, Bias::kNone, Bias::kNone, Bias::kPlain, Bias::kLowest, Bias::kForbids}, &random);
  Deck<int64_t> relatives({0, 0, 0, 33, 999}, &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}, &random);
  Deck<float> softcaps({0, 0, 0, 30.0f}, &random);
  std::vector<Case> cases;
  for (int i = 0; i < Cases(360); ++i) {
    Case c;
    c.B = random.Range(1, 2);
    std::tie(c.H, c.G) = heads.Deal();
    c.S = queries.Deal(), c.T = keys.Deal();
    c.D = c.Dv = sizes.Deal();
    if (random.OneIn(4)) c.Dv = sizes.Deal();
    c.dtype = dtypes.Deal();
    for (Arrangement& arrangement : c.arrangement) arrangement = arrangements.Deal();
    c.offset = !random.OneIn(3);
    c.mask = masks.Deal();
    c.pad = pads.Deal();
    c.bias = biases.Deal();
    c.bias_wide = random.OneIn(2);
    if (c.bias != Bias::kNone) c.bias_broadcast = static_cast<uint32_t>(random.Range(0, 15));
    c.relative = relatives.Deal();
    c.sink = random.OneIn(4);
    c.empty_rows = c.sink ? EmptyRows::kZero : policies.Deal();
    c.softcap = softcaps.Deal();
    c.spread = random.OneIn(3) ? 4.0f : 1.0f;
    c.rising = random.OneIn(4);
    if (c.empty_rows != EmptyRows::kAll && random.OneIn(2)) c.poison = Poison::kForbidden;
    c.cuda = true;
    cases.push_back(c);
  }
  std::vector<int> kinds = FirstKernels(2);
  if (kinds.size() > 1) kinds.push_back(-1);
  RunCudaCases(cases, kinds);
}

// What the kernels for compute capability 9.0 take, wider heads and more rows than there are workers among them.
std::vector<Case> Sm90Cases() {
  std::vector<Case> cases;
  for (Case c : CudaCases()) {
    if (c.bias != Bias::kNone || c.relative > 0 || c.softcap > 0) continue;
    const int64_t wider = cases.size() % 2 == 0 ? 32 : 64;
    if (std::max(c.D, c.Dv) <= 32) c.D += wider, c.Dv += wider;
    cases.push_back(c);
  }
  for (const int mask : {0, 1, 2, 3, 4, 5, 10, 11, 12}) {
    for (const int64_t size : {64, 128}) {
      Case c;
      c.B = 3, c.H = 48, c.G = 16, c.S = 300, c.T = 300 + 10 * mask, c.D = c.Dv = size;
      c.dtype = mask % 2 == 0 ? DType::kF16 : DType::kBF16;
      c.cuda = true;
      c.mask = mask;
      c.pad = mask % 3 == 1 ? Pad::kLeft : mask % 3 == 2 ? Pad::kRandom : Pad::kNone;
      c.empty_rows = static_cast<EmptyRows>(mask % 4);
      cases.push_back(c);
      if (mask > 4) continue;
      c.B = 1, c.H = 4, c.G = 2, c.T = 700;
      c.deep = true;
      cases.push_back(c);
    }
  }
  return cases;
}

// How many cases leave rows to be drawn by this kernel of heads of 65 to 128 elements, with so many multiprocessors.
int64_t CountDrawn(const std::vector<Case>& cases, int kernel, int multiprocessors) {
  const cuda::Sm90Kernel& own = cuda::FindSm90(128, false, cuda::Extras::kNone)[kernel];
  int64_t count = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    if (std::max(c.D, c.Dv) <= 64 || std::max(c.D, c.Dv) > 128) continue;
    Random drawn(i);
    const MaskData data = DrawMask(c, &drawn);
    BoundMask bound;
    AttentionArgs args;
    CpuAttentionConfig config;
    config.m = own.rows, config.n = own.keys;
    BindMask(c, data, config, &bound, &args);
    if (args.mask == nullptr) continue;
    const cuda::WorkPlan plan = cuda::PlanWork(bound.block, cuda::WalkOf(bound.block), c.B, c.H,
                                               own.workers * multiprocessors, c.H, own.cost, true);
    count += plan.drawn() > 0 ? 1 : 0;
  }
  return count;
}

// Each of these kernels. STOF_CUDA_KERNEL=0 and so on takes one of them; with few STOF_CUDA_MULTIPROCESSORS kernel 4
// draws rows.
void CudaSm90() {
  const std::vector<Case> cases = Sm90Cases();
  const std::vector<int> kernels = FirstKernels(10);
  const char* few = std::getenv("STOF_CUDA_MULTIPROCESSORS");
  if (few != nullptr && kernels == std::vector<int>{4}) {
    const int64_t drawn = CountDrawn(cases, 4, std::atoi(few));
    CHECK(drawn >= 5, "rows are drawn in ", drawn, " cases alone");
  }
  RunCudaCases(cases, kernels);
}

// Long rows of few queries, which the kernels with one warpgroup a worker take in parts and join: every policy, padding
// that leaves parts nothing, sinks, sums of logarithms, heads that are smaller than a tile's; the last ones have rows
// of more parts than a thread of the joining kernel reads at once.
std::vector<Case> Sm90PartsCases() {
  Random random(61);
  Deck<int64_t> rows({17, 63, 64, 65, 130, 193}, &random);
  Deck<int64_t> keys({1024, 1025, 1100, 1537, 2500, 3333}, &random);
  Deck<int64_t> sizes({64, 128, 40, 96}, &random);
  Deck<int> masks({1, 5, 6, 7, 8, 9, 15}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kAll, Pad::kRandom}, &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}, &random);
  Deck<Arrangement> arrangements(kArrangements, &random);
  std::vector<Case> cases;
  int64_t cut = 0;
  int32_t most = 0;
  const int drawn_cases = Cases(48);
  for (int i = 0; i < drawn_cases + 6; ++i) {
    Case c;
    c.B = random.Range(1, 2), c.G = random.OneIn(2) ? 2 : 4;
    c.S = rows.Deal(), c.T = keys.Deal(), c.D = c.Dv = sizes.Deal();
    c.dtype = i % 2 == 0 ? DType::kF16 : DType::kBF16;
    for (Arrangement& arrangement : c.arrangement) arrangement = arrangements.Deal();
    c.mask = masks.Deal(), c.pad = pads.Deal();
    c.offset = c.mask != 5;
    c.sink = random.OneIn(4);
    c.empty_rows = c.sink ? EmptyRows::kZero : policies.Deal();
    c.rising = random.OneIn(3), c.spread = random.OneIn(3) ? 4.0f : 1.0f;
    if (c.empty_rows != EmptyRows::kAll && random.OneIn(2)) c.poison = Poison::kForbidden;
    if (i >= drawn_cases) c.B = 1, c.S = 64 + i % 3, c.T = 8192 + 13 * i, c.mask = 1, c.offset = true;
    c.cuda = true;
    cases.push_back(c);
    // Whether there is something to join.
    Random drawn(cases.size() - 1);
    const MaskData data = DrawMask(c, &drawn);
    BoundMask bound;
    AttentionArgs args;
    CpuAttentionConfig config;
    config.m = 64, config.n = 64;
    BindMask(c, data, config, &bound, &args);
    if (args.mask == nullptr) continue;
    const cuda::TileCost cost = {3000, 1200, 1400, 1, 0, true};
    const cuda::WorkPlan plan = cuda::PlanWork(bound.block, cuda::WalkOf(bound.block), c.B, c.H, 264, c.H, cost);
    cut += plan.parts() > 1 ? 1 : 0;
    for (const cuda::CutRow& row : plan.cut) most = std::max(most, row.count);
  }
  CHECK(cut * 4 >= static_cast<int64_t>(cases.size()) * 3, cut, " of ", cases.size(), " cases have rows in parts");
  CHECK(most > 16, "no row has more than ", most, " parts");
  return cases;
}

void CudaSm90Parts() { RunCudaCases(Sm90PartsCases(), {3, 4, 5, 9, -1}); }

// Runs with parts that share one workspace, one behind the other without a word from the host, and as a graph: each
// kernel may start while the one in front of it ends, and must not write what that still reads.
void CudaSm90PartsInTurn() {
  constexpr int64_t kHeads = 6, kRows = 130, kKeys = 4096, kRuns = 8;
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  std::vector<void*> blocks;
  Random random(67);
  // One block for all runs.
  struct Shared {
    char* at;
    size_t size, taken;
    static void* Take(void* self, size_t bytes) {
      auto* own = static_cast<Shared*>(self);
      own->taken = std::max(own->taken, bytes);
      return bytes <= own->size ? own->at : nullptr;
    }
  };
  Shared shared{static_cast<char*>(Allocate(&blocks, size_t{32} << 20)), size_t{32} << 20, 0};
  std::shared_ptr<const AttentionMask> mask;
  CHECK(MakeAttentionMask("k <= q + 3900", {}, &mask).ok());
  const ExprSizes sizes = {1, kHeads, kRows, kKeys, 0};
  int64_t cases = 0;
  for (const auto& [size, kernel] : {std::pair<int64_t, int>(64, 5), {128, 3}}) {
    const int64_t outputs = kHeads * kRows * size;
    const auto halves = [&](int64_t count) {
      std::vector<uint16_t> values(static_cast<size_t>(count));
      for (uint16_t& x : values)
        x = static_cast<uint16_t>(random.Range(0, 1) << 15 | random.Range(10, 15) << 10 | random.Range(0, 1023));
      return OnDevice(&blocks, values.data(), values.size() * 2);
    };
    AttentionArgs args;
    args.B = 1, args.H = args.G = kHeads, args.S = kRows, args.T = kKeys, args.D = args.Dv = size;
    args.dtype = DType::kF16;
    args.scale = 0.125f;
    args.query_stride = args.output_stride = {kHeads * kRows * size, kRows * size, size};
    args.key_stride = args.value_stride = {kHeads * kKeys * size, kKeys * size, size};
    std::vector<AttentionArgs> runs;
    for (int64_t i = 0; i < kRuns; ++i) {
      args.query = halves(outputs), args.key = halves(kHeads * kKeys * size),
      args.value = halves(kHeads * kKeys * size);
      args.output = Allocate(&blocks, static_cast<size_t>(2 * outputs));
      runs.push_back(args);
    }
    const auto clear = [&] {
      for (const AttentionArgs& run : runs) {
        CHECK(cudaMemsetAsync(run.output, 0xff, static_cast<size_t>(2 * outputs), stream) == cudaSuccess);
      }
    };
    const auto queue = [&](const AttentionArgs& run) {
      RunContext context;
      context.on_cuda = true;
      context.stream = stream;
      context.allocate = Shared::Take;
      context.self = &shared;
      const Status status = FindCudaBackend()->attention(run, nullptr, *mask, sizes, {}, context);
      CHECK(status.ok(), status.message());
    };
    const auto results = [&] {
      CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
      std::vector<std::vector<uint16_t>> all;
      for (const AttentionArgs& run : runs) {
        all.emplace_back(static_cast<size_t>(outputs));
        CHECK(cudaMemcpy(all.back().data(), run.output, all.back().size() * 2, cudaMemcpyDeviceToHost) == cudaSuccess);
      }
      return all;
    };
    const Chosen chosen(kernel);
    shared.taken = 0;
    clear();
    for (const AttentionArgs& run : runs) {
      queue(run);
      CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    }
    const auto alone = results();
    CHECK(shared.taken > 0, "head size ", size, ": no rows in parts");
    for (size_t i = 0; i < alone.size(); ++i) {
      CHECK(std::count(alone[i].begin(), alone[i].end(), uint16_t{0xffff}) == 0, "run ", i, " leaves some outputs out");
      CHECK(i == 0 || alone[i] != alone[0], "run ", i, " gives what the first gives");
    }
    clear();
    for (const AttentionArgs& run : runs) queue(run);
    CHECK(results() == alone, "head size ", size, ": runs without a wait between them give other results");
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t instance = nullptr;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    for (const AttentionArgs& run : runs) queue(run);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&instance, graph, 0) == cudaSuccess);
    for (int replay = 0; replay < 20; ++replay) {
      clear();
      CHECK(cudaGraphLaunch(instance, stream) == cudaSuccess);
      CHECK(cudaGraphLaunch(instance, stream) == cudaSuccess);
      CHECK(results() == alone, "head size ", size, ": replay ", replay, " gives other results");
      ++cases;
    }
    cudaGraphExecDestroy(instance);
    cudaGraphDestroy(graph);
  }
  for (void* block : blocks) cudaFree(block);
  cudaStreamDestroy(stream);
  CountCases(cases);
}

// Their variant for softcap and biases: what the table has of these, and biases whose rows begin at multiples of 16
// bytes, of every type, broadcast over each axis but the keys', with tiles that have bits, are padded or end the keys.
void CudaSm90Extras() {
  std::vector<Case> cases;
  for (Case c : CudaCases()) {
    if (c.bias == Bias::kNone && c.relative == 0 && c.softcap == 0) continue;
    const int64_t wider = cases.size() % 2 == 0 ? 40 : 64;
    if (std::max(c.D, c.Dv) <= 32) c.D += wider, c.Dv += wider;
    if (cases.size() % 3 == 0) c.T = (c.T + 15) / 8 * 8, c.offset = false;
    cases.push_back(c);
  }
  Random random(90);
  Deck<Bias> biases({Bias::kNone, Bias::kPlain, Bias::kLowest, Bias::kForbids, Bias::kFarBelow}, &random);
  Deck<uint32_t> broadcasts({0, 1, 2, 3, 4, 5, 6, 7}, &random);
  Deck<int64_t> relatives({0, 0, 1, 65, 999}, &random);
  Deck<int64_t> rows({63, 64, 65, 130, 193, 300}, &random);
  Deck<int64_t> keys({64, 72, 128, 200, 296, 448}, &random);
  Deck<int64_t> sizes({64, 128, 96, 40}, &random);
  Deck<int> masks({0, 1, 2, 3, 4, 6, 8, 9, 10, 13}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kAll, Pad::kRandom}, &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}, &random);
  Deck<float> softcaps({0, 0, 2.5f, 30.0f}, &random);
  for (int i = 0; i < Cases(160); ++i) {
    Case c;
    c.bias = biases.Deal(), c.bias_broadcast = broadcasts.Deal(), c.bias_wide = random.OneIn(3);
    c.relative = relatives.Deal(), c.relative_shared = random.OneIn(3);
    c.S = rows.Deal(), c.T = keys.Deal(), c.D = c.Dv = sizes.Deal();
    c.G = random.OneIn(2) ? 2 : 4;
    c.dtype = random.OneIn(2) ? DType::kF16 : DType::kBF16;
    c.mask = masks.Deal(), c.pad = pads.Deal(), c.softcap = softcaps.Deal();
    c.offset = c.T >= c.S && random.OneIn(2);
    c.sink = random.OneIn(4);
    c.empty_rows = c.sink ? EmptyRows::kZero : policies.Deal();
    c.rising = random.OneIn(4);
    if (c.empty_rows != EmptyRows::kAll && random.OneIn(2)) c.poison = Poison::kForbidden;
    c.cuda = true;
    cases.push_back(c);
  }
  for (const int64_t size : {64, 128}) {
    // More rows of tiles than workers.
    Case c;
    c.B = 3, c.H = 48, c.G = 16, c.S = 300, c.T = 304, c.D = c.Dv = size, c.mask = 1;
    c.bias = Bias::kForbids, c.bias_broadcast = 1, c.relative = 65, c.dtype = DType::kF16, c.cuda = true;
    cases.push_back(c);
  }
  RunCudaCases(cases, FirstKernels(2));
}

TEST(CudaAttentionEqualsTheDefinition) { Cuda(); }
TEST(CudaFp32EqualsTheDefinition) { CudaFp32(); }
TEST(CudaTf32EqualsTheDefinition) { CudaTf32(); }
TEST(CudaRowsEqualTheDefinition) { CudaRows(); }
// Every tenth case 50 times: of halves by the choice, the 8.0 and the row-wise kernel, of fp32, and by each 9.0 kernel.
TEST(CudaRepeatsGiveTheSameBits) {
  constexpr size_t kEvery = 10;
  constexpr int kRepeats = 50;
  const auto some = [](const std::vector<Case>& all, const char* kernel) {
    std::vector<Case> cases;
    for (size_t i = 0; i < all.size(); i += kEvery) {
      cases.push_back(all[i]);
      cases.back().kernel = kernel;
    }
    return cases;
  };
  for (const char* kernel : {"", "sm80", "rows"}) RunCudaCases(some(CudaCases(), kernel), {-1}, kRepeats);
  RunCudaCases(some(CudaFp32Cases(), ""), {-1}, kRepeats);
  RunCudaCases(some(Sm90Cases(), ""), FirstKernels(10), kRepeats);
  RunCudaCases(some(Sm90PartsCases(), ""), {3, 5, -1}, kRepeats);
}
TEST(CudaDecodeEqualsTheDefinition) { CudaDecode(); }
TEST(CudaAttentionSm90) { CudaSm90(); }
TEST(CudaExtrasSm90) { CudaSm90Extras(); }
TEST(CudaPartsSm90) { CudaSm90Parts(); }
TEST(CudaPartsSm90InTurn) { CudaSm90PartsInTurn(); }
}  // namespace
}  // namespace stof::test::attention
