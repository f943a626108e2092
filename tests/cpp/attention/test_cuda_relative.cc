// SPDX-License-Identifier: Apache-2.0
// Relative terms of the score on a GPU, against the definition: every role, kind of rows and type, lengths around the
// tiles, all lengths from 1 to 300, captured graphs, and what is refused.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/contract/cuda_backend.h"
#include "tests/cpp/attention/cuda_attention_cases.h"
#include "tests/cpp/attention/relative_problem.h"

namespace stof::test::attention {
namespace {

// The memory of a run, full of NaN.
struct Poisoned {
  std::vector<void*>* blocks;
  size_t bytes = 0;
  static void* Take(void* self, size_t bytes) {
    auto* own = static_cast<Poisoned*>(self);
    own->bytes += (bytes + 63) / 64 * 64;
    void* const block = Allocate(own->blocks, bytes);
    if (block != nullptr) cudaMemset(block, kUntouched, bytes);
    return block;
  }
};

// A case with its tensors on the device.
class DeviceProblem {
 public:
  DeviceProblem(const RelativeCase& drawn, uint64_t seed)
      : c_(drawn.base),
        where_(Text("cuda, seed ", seed, " ", Describe(drawn))),
        random_(seed),
        data_(DrawMask(c_, &random_)),
        bias_(DrawBias(c_, &random_)),
        factored_(DrawFactored(drawn, &random_, &bias_.dense)),
        dense_(DrawDense(c_, data_, bias_, &random_)),
        query_(c_, 0, c_.H, c_.S, c_.D),
        key_(c_, 1, c_.G, c_.T, c_.D),
        value_(c_, 2, c_.G, c_.T, c_.Dv),
        output_(c_, 3, c_.H, c_.S, c_.Dv),
        lse_(c_) {
    if (c_.sink) dense_.sink = DrawSink(c_, &random_);
    query_.Fill(dense_.query), key_.Fill(dense_.key), value_.Fill(dense_.value);
    args_ = MakeArgs(c_, query_, key_, value_, output_);
    tables_ = std::make_unique<BoundTables>(drawn, &random_, &dense_, &args_);
    answer_ = Attend(dense_);
    Upload(drawn);
    BindMasks(seed);
  }
  ~DeviceProblem() {
    for (void* block : blocks_) cudaFree(block);
  }
  DeviceProblem(const DeviceProblem&) = delete;
  DeviceProblem& operator=(const DeviceProblem&) = delete;

  const std::string& where() const { return where_; }
  AttentionArgs& args() { return args_; }

  Status Run(cudaStream_t stream) {
    Poisoned memory{&blocks_};
    RunContext context;
    context.on_cuda = true;
    context.stream = stream;
    context.allocate = Poisoned::Take, context.self = &memory;
    const Status status =
        FindCudaBackend()->attention.run(args_, has_pad_ ? &pad_ : nullptr, mask_, sizes_, operands_, context);
    bytes_ = memory.bytes;
    return status;
  }
  // The same with memory that exists, as a captured stream needs it.
  Status RunIn(void* memory, size_t bytes, cudaStream_t stream) {
    struct Block {
      char* at;
      size_t left;
    } block = {static_cast<char*>(memory), bytes};
    RunContext context;
    context.on_cuda = true;
    context.stream = stream;
    context.self = &block;
    context.allocate = [](void* self, size_t size) -> void* {
      auto* const own = static_cast<Block*>(self);
      const size_t rounded = (size + 63) / 64 * 64;
      if (rounded > own->left) return nullptr;
      void* const at = own->at;
      own->at += rounded, own->left -= rounded;
      return at;
    };
    return FindCudaBackend()->attention.run(args_, has_pad_ ? &pad_ : nullptr, mask_, sizes_, operands_, context);
  }
  size_t Plan() {
    size_t planned = 0;
    const Status status = PlanCudaAttention(args_, has_pad_, mask_, sizes_, operands_, &planned);
    CHECK(status.ok(), where_, ": ", status.message());
    return planned;
  }

  void Poison(bool asks_for_lse) {
    output_.Reset(), lse_.Reset();
    CHECK(cudaMemcpy(output_bytes_, poison_.data(), poison_.size(), cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK(cudaMemcpy(device_lse_, lse_.values.data(), lse_.bytes(), cudaMemcpyHostToDevice) == cudaSuccess);
    args_.output.lse = asks_for_lse ? device_lse_ : nullptr;
  }
  // Compares the outputs; gives their bytes.
  std::vector<char> Check(const std::string& where) {
    const cudaError_t error =
        cudaMemcpy(output_.bytes.data(), output_bytes_, output_.bytes.size(), cudaMemcpyDeviceToHost);
    CHECK(error == cudaSuccess, where, ": ", cudaGetErrorString(error));
    std::vector<char> bytes = output_.bytes;
    Compare(c_, dense_, answer_, &output_, where);
    if (args_.output.lse == nullptr) return bytes;
    CHECK(cudaMemcpy(lse_.values.data(), device_lse_, lse_.bytes(), cudaMemcpyDeviceToHost) == cudaSuccess, where);
    lse_.Compare(c_, answer_, where);
    return bytes;
  }
  size_t bytes() const { return bytes_; }

 private:
  void* OnDeviceOf(const void* from, size_t bytes) { return OnDevice(&blocks_, from, bytes); }

  void Upload(const RelativeCase& drawn) {
    const auto upload = [this](const Strided& tensor) {
      return static_cast<char*>(OnDeviceOf(tensor.bytes.data(), tensor.bytes.size())) +
             (tensor.data - tensor.bytes.data());
    };
    args_.query.data = upload(query_), args_.key.data = upload(key_), args_.value.data = upload(value_);
    poison_ = output_.bytes;
    output_bytes_ = static_cast<char*>(OnDeviceOf(poison_.data(), poison_.size()));
    args_.output.data = output_bytes_ + (output_.data - output_.bytes.data());
    device_lse_ = static_cast<float*>(OnDeviceOf(lse_.values.data(), lse_.bytes()));
    args_.output.lse_stride_b = lse_.stride_b, args_.output.lse_stride_h = lse_.stride_h;
    ScoreArgs& scores = args_.scores;
    RelativeTable* const tables[] = {&scores.relative_key[0], &scores.relative_key[1], &scores.relative_query,
                                     &args_.relative_value};
    for (int i = 0; i < 4; ++i) {
      const std::vector<char>& bytes = tables_->operands[i].bytes;
      if (tables[i]->given()) tables[i]->data = OnDeviceOf(bytes.data(), bytes.size());
    }
    if (c_.bias != Bias::kNone) {
      scores.bias = {OnDeviceOf(bias_.bytes.data(), bias_.bytes.size()),
                     bias_.dtype,
                     bias_.stride[0],
                     bias_.stride[1],
                     bias_.stride[2],
                     bias_.stride[3]};
    }
    RelativeBias& relative = scores.relative_bias;
    if (c_.relative > 0) {
      relative.table = static_cast<float*>(OnDeviceOf(factored_.table.data(), factored_.table.size() * sizeof(float)));
      relative.size = c_.relative, relative.stride_h = c_.relative_shared ? 0 : c_.relative;
    }
    relative.query_position = c_.offset ? c_.T - c_.S : 0;
    if (drawn.factor != 0) {
      relative.factor = OnDeviceOf(factored_.factor.data(), factored_.factor.size() * sizeof(float));
      relative.factor_dtype = DType::kF32;
      relative.factor_stride_b = factored_.stride_b, relative.factor_stride_h = factored_.stride_h;
    }
    if (c_.sink) {
      const auto item = static_cast<size_t>(SizeOfFloat(c_.dtype));
      std::vector<char> sink(static_cast<size_t>(c_.H) * item);
      for (size_t h = 0; h < dense_.sink.size(); ++h) StoreFloat(c_.dtype, dense_.sink[h], &sink[h * item]);
      scores.sink = {OnDeviceOf(sink.data(), sink.size()), c_.dtype};
    }
  }

  void BindMasks(uint64_t seed) {
    has_pad_ = c_.pad != Pad::kNone && c_.mask != 12;
    pad_ = Describe(data_.pad.data(), DType::kBool, {c_.pad_shared ? 1 : c_.B, c_.T});
    if (has_pad_) pad_.data = OnDeviceOf(data_.pad.data(), data_.pad.size());
    AttentionArgs host;
    CpuAttentionConfig config;
    config.m = 128, config.n = 64;
    BindMask(c_, data_, config, &bound_, &host);
    mask_.parts = bound_.parts;
    // Cases differ in their tables; the seed keeps their masks apart in the cache.
    mask_.fixed_hash = mask_.parts.fixed.empty() ? 0 : mask_.parts.fixed.Hash() ^ ((seed + 5500) << 32);
    sizes_ = {c_.B, c_.H, c_.S, c_.T, c_.offset ? c_.T - c_.S : 0};
    operands_ = OperandsOnDevice(c_, data_, &blocks_);
  }

  const Case c_;
  const std::string where_;
  Random random_;
  MaskData data_;
  BiasTensor bias_;
  FactoredBias factored_;
  Dense dense_;
  Strided query_, key_, value_, output_;
  Lse lse_;
  AttentionArgs args_;
  std::unique_ptr<BoundTables> tables_;
  Answer answer_;
  BoundMask bound_;
  AttentionMask mask_;
  ExprSizes sizes_;
  Tables operands_;
  Tensor pad_;
  bool has_pad_ = false;
  std::vector<void*> blocks_;
  std::vector<char> poison_;
  char* output_bytes_ = nullptr;
  float* device_lse_ = nullptr;
  size_t bytes_ = 0;
};

void RunCase(const RelativeCase& drawn, uint64_t seed) {
  DeviceProblem problem(drawn, seed);
  const std::string& where = problem.where();
  const Status legal = Check(problem.args());
  CHECK(legal.ok(), where, ": ", legal.message());
  const size_t planned = problem.Plan();
  std::vector<char> first;
  for (int repeat = 0; repeat < 2; ++repeat) {
    problem.Poison((repeat == 0) == (seed % 2 == 0));
    const Status status = problem.Run(nullptr);
    CHECK(status.ok(), where, ": ", status.message());
    CHECK(problem.bytes() <= planned, where, ": ", problem.bytes(), " bytes of memory, planned were ", planned);
    const std::vector<char> bytes = problem.Check(where);
    if (repeat == 0) first = bytes;
    CHECK(first == bytes, where, ": the second run gives other bits than the first");
  }
}

void RunCases(const std::vector<RelativeCase>& cases) {
  int devices = 0;
  CHECK(cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0, "no CUDA device");
  const char* only = std::getenv("STOF_CASE");      // a seed, to repeat one
  const char* sample = std::getenv("STOF_SAMPLE");  // n: every n-th, for slow tools
  const size_t step = sample == nullptr ? 1 : std::max<size_t>(1, std::strtoull(sample, nullptr, 10));
  constexpr int kShown = 4;
  std::string failures;
  int64_t failed = 0, ran = 0;
  for (size_t i = 0; i < cases.size(); i += step) {
    if (only != nullptr && std::strtoull(only, nullptr, 10) != i) continue;
    ++ran;
    try {
      RunCase(cases[i], i);
    } catch (const Failure& failure) {
      if (++failed <= kShown) failures += "\n  " + failure.message;
      if (cudaDeviceSynchronize() != cudaSuccess) break;
    }
  }
  CountCases(ran);
  CHECK(failed == 0, failed, " of ", ran, " cases failed, the first:", failures);
}

// What the CUDA kernels take of the CPU's cases.
void Adapt(size_t i, RelativeCase* c) {
  Case& base = c->base;
  base.cuda = true;
  base.shifted = false;
  base.pad_shared = i % 4 == 1;
  if (base.dtype == DType::kF32 && i % 3 != 0) base.dtype = i % 2 == 0 ? DType::kF16 : DType::kBF16;
  base.spread = std::min(base.spread, 4.0f);
  if (base.dtype != DType::kF32) base.D = (base.D + 7) / 8 * 8, base.Dv = (base.Dv + 7) / 8 * 8;
  base.left = Left::kNothing, base.m = base.n = 0;
  c->value.is_given = false;
}

TEST(CudaRelativeTermsEqualTheDefinition) {
  std::vector<RelativeCase> cases = ListedRelativeCases();
  const std::vector<RelativeCase> drawn = DrawnRelativeCases(Cases(500));
  cases.insert(cases.end(), drawn.begin(), drawn.end());
  for (size_t i = 0; i < cases.size(); ++i) Adapt(i, &cases[i]);
  RunCases(cases);
}

// Every head size that a kernel is compiled for, and neighbours that it pads; lengths around the tiles.
TEST(CudaRelativeTermsOfEveryHeadSize) {
  std::vector<RelativeCase> cases;
  size_t turn = 0;
  for (const int64_t size : {8, 24, 32, 40, 64, 72, 96, 104, 128, 136, 160, 168, 192, 200, 256}) {
    for (const int64_t length : {63, 64, 65, 127, 129, 200}) {
      RelativeCase c;
      Case& base = c.base;
      base.B = 2, base.H = 4, base.G = turn % 2 == 0 ? 4 : 2;
      base.S = length, base.T = length + static_cast<int64_t>(turn % 3) * 64, base.D = base.Dv = size;
      base.dtype = turn % 3 == 0 ? DType::kBF16 : turn % 3 == 1 ? DType::kF16 : DType::kF32;
      base.mask = static_cast<int>((turn + turn / 10) % 10);
      base.pad = static_cast<Pad>((turn + turn / 5) % 5);
      base.empty_rows = static_cast<EmptyRows>(turn % 4);
      base.softcap = turn % 7 == 6 ? 30.0f : 0.0f;
      base.sink = base.empty_rows == EmptyRows::kZero;
      base.offset = turn % 2 == 0;
      TableCase* const tables[] = {&c.key[0], &c.key[1], &c.query};
      for (size_t i = 0; i < 3; ++i) {
        TableCase& table = *tables[i];
        table.is_given = i == 0 || (turn + i) % 3 != 0;
        table.naming = kNamings[(turn + 3 * i) % kNamings.size()];
        table.rows = turn % 4 == 0 ? 0 : 40 + static_cast<int64_t>(turn % 100);
        table.is_shared = (turn + i) % 2 == 0, table.has_row_bias = (turn / 2 + i) % 2 == 0;
        table.is_wide = turn % 5 == 0, table.falls = turn % 3 == 0, table.shift = static_cast<int>((turn + i) % 4);
      }
      Adapt(3 * turn, &c);  // keeps fp32
      cases.push_back(c);
      ++turn;
    }
  }
  RunCases(cases);
}

// Query and key bands of rising distances; S from 1 to 300 and other T.
TEST(CudaRelativeTermsOfEveryLength) {
  std::vector<RelativeCase> cases;
  for (int64_t length = 1; length <= 300; ++length) {
    RelativeCase c;
    c.base.B = 1, c.base.H = 2, c.base.G = length % 2 + 1, c.base.D = c.base.Dv = length % 3 == 0 ? 64 : 16;
    c.base.S = length, c.base.T = length % 4 == 0 ? length : (length * 7) % 311 + 1;
    c.base.dtype = length % 5 < 2 ? DType::kF16 : length % 5 == 2 ? DType::kBF16 : DType::kF32;
    c.base.mask = length % 5 == 0 ? 3 : 0;
    c.base.offset = c.base.T >= c.base.S && length % 3 == 1;
    for (TableCase* table : {&c.key[0], &c.query}) {
      table->is_given = true, table->naming = length % 2 == 0 ? Naming::kRising : Naming::kFalling;
      table->has_row_bias = true, table->shift = static_cast<int>(length % 4);
    }
    if (length % 6 == 1) c.query.is_given = false;
    if (length % 6 == 4) c.key[0].is_given = false;
    Adapt(3 * static_cast<size_t>(length), &c);
    cases.push_back(c);
  }
  RunCases(cases);
}

// Rows in shared memory that stay for the next tile of keys, and those of tiles that do not follow one another; bands
// of all three terms.
TEST(CudaRelativeTermsOfSkippedTiles) {
  std::vector<RelativeCase> cases;
  for (const int64_t size : {32, 64, 96, 128}) {
    for (const int mask : {0, 1, 5, 8}) {
      for (const int bands : {1, 2, 3}) {
        RelativeCase c;
        c.base.B = 1, c.base.H = 2, c.base.G = bands % 2 + 1, c.base.D = c.base.Dv = size;
        c.base.S = bands == 2 ? 500 : 705, c.base.T = bands == 1 ? 650 : c.base.S;
        c.base.dtype = (size / 32 + mask) % 2 == 0 ? DType::kF16 : DType::kBF16;
        c.base.mask = mask;
        TableCase* const tables[] = {&c.key[0], &c.query, &c.key[1]};
        for (int i = 0; i < bands; ++i) {
          tables[i]->is_given = true, tables[i]->naming = (i + mask) % 2 == 0 ? Naming::kRising : Naming::kFalling;
          tables[i]->has_row_bias = (i + bands) % 2 == 0;
        }
        Adapt(cases.size(), &c);
        cases.push_back(c);
      }
    }
  }
  RunCases(cases);
}

RelativeCase SomeCase() {
  RelativeCase c;
  c.base.B = 2, c.base.H = c.base.G = 2, c.base.S = 130, c.base.T = 200, c.base.D = c.base.Dv = 64;
  c.base.mask = 3;
  c.key[0].is_given = c.key[1].is_given = c.query.is_given = true;
  c.key[0].naming = Naming::kBuckets, c.key[0].rows = 100;
  c.key[1].naming = Naming::kGridColumn, c.key[1].rows = 30;
  c.query.naming = Naming::kFalling;
  Adapt(1, &c);
  return c;
}

// A graph captured after a first run, launched twice; before one, the error says what is missing.
TEST(CudaRelativeTermsInACapturedGraph) {
  RelativeCase drawn = SomeCase();
  drawn.base.mask = 0;
  DeviceProblem problem(drawn, 7);
  const size_t planned = problem.Plan();
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, planned) == cudaSuccess);
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  cudaGraph_t graph = nullptr;
  problem.Poison(false);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  const Status early = problem.RunIn(memory, planned, stream);
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  if (graph != nullptr) cudaGraphDestroy(graph);
  CHECK(!early.ok() && early.message().find("relative_key") != std::string::npos, early.message());
  CHECK(problem.RunIn(memory, planned, stream).ok());
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  const std::vector<char> first = problem.Check("before capturing");
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  const Status captured = problem.RunIn(memory, planned, stream);
  CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  CHECK(captured.ok(), captured.message());
  cudaGraphExec_t run = nullptr;
  CHECK(cudaGraphInstantiate(&run, graph, 0) == cudaSuccess);
  for (int i = 0; i < 2; ++i) {
    problem.Poison(false);
    CHECK(cudaMemset(memory, kUntouched, planned) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaGraphLaunch(run, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(problem.Check("graph") == first, "a graph gives other bits than the run");
  }
  cudaGraphExecDestroy(run), cudaGraphDestroy(graph), cudaStreamDestroy(stream), cudaFree(memory);
  CountCases(1);
}

TEST(CudaRelativeTermsThatAreRefused) {
  RelativeCase c = SomeCase();
  c.value.is_given = true, c.value.rows = 20;
  {
    DeviceProblem problem(c, 8);
    const Status status = problem.Run(nullptr);
    CHECK(!status.ok() && status.message().find("relative_value") != std::string::npos, status.message());
  }
  // Products by parts of positions with too many rows: k // 3 has 4100 values.
  c = SomeCase();
  c.base.S = 20, c.base.T = 12300, c.base.B = c.base.H = c.base.G = 1, c.base.mask = 0;
  c.key[1].is_given = c.query.is_given = false;
  c.key[0].naming = Naming::kKeys;
  DeviceProblem problem(c, 9);
  const Status status = problem.Run(nullptr);
  CHECK(!status.ok() && status.message().find("parts of positions") != std::string::npos, status.message());
  CountCases(2);
}

}  // namespace
}  // namespace stof::test::attention
