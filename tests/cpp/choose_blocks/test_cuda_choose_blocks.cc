// SPDX-License-Identifier: Apache-2.0
// Choose blocks on a GPU against the definition in docs/reference/operators.md, in double precision: outputs, LSE and
// counts, by the library's choice and by each kernel whose tiles suit. Where nothing can be chosen, the bits are those
// without a threshold. A query block with a key block about which rounding decides is not compared; there are few.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/attention/families.h"
#include "cuda/common/device_properties.h"
#include "plugins/core/contract/chosen_blocks.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/mask/attention_mask.h"
#include "plugins/core/mask/cached_mask.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"
#include "tests/cpp/choose_blocks/cuda_choose_problem.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/forced_kernel.h"

namespace stof::test::choose {
namespace {

// A problem on the device.
class Runner {
 public:
  Runner(const Case& c, const Problem& p) : c_(c) {
    const Dense& d = p.dense;
    args_.shape = {c.B, c.H, c.G, c.S, c.T, c.D, d.Dv, c.dtype};
    args_.query = {Upload(d.query), {c.H * c.S * c.D, c.S * c.D, c.D}};
    args_.key = {Upload(d.key), {c.G * c.T * c.D, c.T * c.D, c.D}};
    args_.value = {Upload(d.value), {c.G * c.T * d.Dv, c.T * d.Dv, d.Dv}};
    rows_ = static_cast<size_t>(c.B * c.H * c.S);
    output_bytes_ = rows_ * static_cast<size_t>(d.Dv) * 2;
    args_.output.data = memory_.Take(output_bytes_);
    args_.output.stride = {c.H * c.S * d.Dv, c.S * d.Dv, d.Dv};
    args_.output.lse = static_cast<float*>(memory_.Take(4 * rows_));
    args_.output.lse_stride_b = c.H * c.S, args_.output.lse_stride_h = c.S;
    args_.scores.scale = static_cast<float>(d.scale);
    args_.scores.softcap = static_cast<float>(c.softcap);
    args_.mask.empty_rows = c.empty_rows;
    if (c.sink) args_.scores.sink = {Upload(d.sink), c.dtype};
    if (c.past.empty()) {
      args_.scores.diagonal.first = c.P(0);
      CHECK(MakeAttentionMask(kMasks[c.mask], {}, &mask_).ok());
      sizes_ = {c.B, c.H, c.S, c.T, c.P(0)};
    } else {
      BindCache();
    }
    if (c.padding == Padding::kNone) return;
    pad_.data = memory_.Upload(p.pad.data(), p.pad.size());
    pad_.dtype = DType::kBool, pad_.rank = 2, pad_.dims[0] = c.B, pad_.dims[1] = c.T;
  }

  struct Result {
    std::vector<char> output;
    std::vector<float> lse;
    SkipCounts counts;
  };
  Result Run(const std::string& kernel, float threshold, const std::string& where) {
    const ForcedKernel forced(cuda::AttentionRequests(), kernel);
    args_.kernel = kGiven;  // key columns are then not gathered, which would make other blocks
    Poison();
    const SkipCounts before = Counts();
    Queue(threshold, nullptr, where);
    return Read(before);
  }
  // As a captured graph that runs `replays` times.
  Result RunCaptured(const std::string& kernel, float threshold, int replays, const std::string& where) {
    const ForcedKernel forced(cuda::AttentionRequests(), kernel);
    args_.kernel = kGiven;
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t instance = nullptr;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Queue(threshold, stream, where);  // makes the block mask
    CHECK_CUDA(cudaStreamSynchronize(stream));
    arena_ = std::make_unique<DeviceMemory>(size_t{64} << 20);
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    Queue(threshold, stream, where);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&instance, graph, 0));
    Poison();
    const SkipCounts before = Counts();
    for (int i = 0; i < replays; ++i) CHECK_CUDA(cudaGraphLaunch(instance, stream));
    const Result result = Read(before);
    arena_.reset();
    CHECK_CUDA(cudaGraphExecDestroy(instance));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaStreamDestroy(stream));
    return result;
  }
  void SetBias(const std::vector<double>& bias) { args_.scores.bias = {Upload(bias), c_.dtype, 0, 0, c_.T, 1}; }
  void SetSkipThreshold(float threshold) { args_.scores.skip_threshold = threshold; }
  // Bytes that the last call asked for, and how many it may ask for.
  size_t allocated() const { return allocated_; }
  size_t planned(float threshold) {
    args_.scores.block_threshold = threshold;
    size_t bytes = 0;
    CHECK(PlanCudaAttention(args_, pad_.data != nullptr, *mask_, sizes_, operands_, &bytes).ok());
    return bytes;
  }

 private:
  static constexpr const char* kGiven = "sm90-1x1x1";  // there is no such kernel: the library chooses

  // The mask of a cache reads the lengths of the pasts on the device.
  void BindCache() {
    std::vector<int32_t> first;
    for (int64_t b = 0; b < c_.B; ++b) first.push_back(static_cast<int32_t>(c_.P(b)));
    const auto* const rows = static_cast<const int32_t*>(memory_.Upload(first.data(), 4 * first.size()));
    CachedMask cached;
    CHECK(MakeCachedMask(kMasks[c_.mask], {}, 0, &cached).ok());
    mask_ = cached.on_device;
    args_.scores.diagonal.first_rows = rows;
    sizes_ = {c_.B, c_.H, c_.S, c_.T, 0};
    Tensor lengths;
    lengths.data = const_cast<int32_t*>(rows), lengths.dtype = DType::kI32, lengths.rank = 1, lengths.dims[0] = c_.B;
    operands_.emplace_back(kFirstPositions, lengths);
  }
  const void* Upload(const std::vector<double>& values) {
    std::vector<char> bytes(values.size() * 2);
    for (size_t i = 0; i < values.size(); ++i) StoreFloat(c_.dtype, values[i], &bytes[2 * i]);
    return memory_.Upload(bytes.data(), bytes.size());
  }
  static SkipCounts Counts() {
    SkipCounts counts;
    FindCudaBackend()->attention.add_skip_counts(&counts);
    return counts;
  }
  void Poison() {
    CHECK_CUDA(cudaMemset(args_.output.data, 0xff, output_bytes_));
    CHECK_CUDA(cudaMemset(args_.output.lse, 0xff, 4 * rows_));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  static void* Allocate(void* self, size_t bytes) {
    auto& own = *static_cast<Runner*>(self);
    own.allocated_ += (bytes + 63) / 64 * 64;
    if (own.arena_ != nullptr) return DeviceMemory::Allocate(own.arena_.get(), bytes);
    void* const block = own.memory_.Take(bytes);
    CHECK_CUDA(cudaMemset(block, 0xff, bytes));  // NaN, and indices out of bounds
    CHECK_CUDA(cudaDeviceSynchronize());
    return block;
  }
  void Queue(float threshold, cudaStream_t stream, const std::string& where) {
    args_.scores.block_threshold = threshold;
    allocated_ = 0;
    RunContext context;
    context.on_cuda = true;
    context.stream = stream;
    context.self = this;
    context.allocate = Allocate;
    const Status status = FindCudaBackend()->attention.run(args_, c_.padding == Padding::kNone ? nullptr : &pad_,
                                                           *mask_, sizes_, operands_, context);
    CHECK(status.ok(), where, ": ", status.message());
  }
  Result Read(const SkipCounts& before) const {
    Result result;
    const SkipCounts after = Counts();
    result.counts = {after.scored - before.scored, after.skipped - before.skipped};
    result.output.resize(output_bytes_);
    result.lse.resize(rows_);
    CHECK_CUDA(cudaMemcpy(result.output.data(), args_.output.data, output_bytes_, cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaMemcpy(result.lse.data(), args_.output.lse, 4 * rows_, cudaMemcpyDeviceToHost));
    return result;
  }

  const Case c_;
  DeviceMemory memory_;
  std::unique_ptr<DeviceMemory> arena_;
  AttentionArgs args_;
  size_t output_bytes_ = 0, rows_ = 0, allocated_ = 0;
  Tensor pad_;
  std::shared_ptr<const AttentionMask> mask_;
  Tables operands_;
  ExprSizes sizes_;
};

void Compare(const Case& c, const Dense& kept, const BlockSets& sets, const Runner::Result& result,
             const std::string& where) {
  const double largest = 1.25;
  const Answer answer = Attend(kept);
  for (size_t row = 0; row < answer.lse.size(); ++row) {
    if (sets.is_uncertain[row] != 0) continue;
    const double magnitude = answer.magnitude[row], lse = static_cast<double>(result.lse[row]);
    for (size_t d = 0; d < static_cast<size_t>(kept.Dv); ++d) {
      const size_t at = row * static_cast<size_t>(kept.Dv) + d;
      const double got = LoadFloat(c.dtype, &result.output[2 * at]), want = answer.output[at];
      const double tolerance =
          Tolerance(c.dtype, magnitude, c.T, largest, want) + CudaTolerance(c.dtype, magnitude, c.T, largest);
      CHECK(std::isnan(want) ? std::isnan(got) : std::abs(got - want) <= tolerance, where, ": row ", row, " column ", d,
            ": ", got, ", expected ", want, " within ", tolerance);
    }
    const double want = answer.lse[row];
    const double tolerance = LseTolerance(magnitude, c.T, want) + CudaTolerance(DType::kF32, magnitude, c.T, 1);
    CHECK(std::isnan(want)   ? std::isnan(lse)
          : std::isinf(want) ? lse == want
                             : std::abs(lse - want) <= tolerance,
          where, ": LSE of row ", row, ": ", lse, ", expected ", want);
  }
}

// The kernels that attend chosen blocks.
std::vector<std::string> ChoosingKernels(const Case& c) {
  cuda::DeviceProperties device;
  CHECK(cuda::GetDeviceProperties(&device).ok(), "no CUDA device");
  cuda::KernelProblem problem;
  problem.capability = device.capability;
  problem.dtype = c.dtype;
  problem.head_size = static_cast<int>(std::max(c.D, c.value_size()));
  problem.has_softcap_or_bias = c.softcap > 0, problem.has_positive_scale = c.scale_sign > 0;
  cuda::KernelTable kernels;
  cuda::FindFamily(cuda::KernelRole::kScheduled, problem, &kernels);
  std::vector<std::string> names;
  for (const cuda::KernelEntry& kernel : kernels) {
    const bool fits = kernel.rows == kBlockQueries && kBlockKeys % kernel.keys == 0 && kernel.cost.split_kv == 1;
    if (fits) names.push_back(cuda::KernelName(kernel));
  }
  if (!names.empty()) names.emplace_back();  // the library's choice
  return names;
}

uint64_t Difference(uint64_t x, uint64_t y) { return x > y ? x - y : y - x; }

struct Totals {
  int64_t ran = 0, rows = 0, uncertain = 0;
  uint64_t scored = 0, skipped = 0;
};

void CheckCase(const Case& c, uint64_t seed, Totals* totals) {
  const std::vector<std::string> kernels = ChoosingKernels(c);
  if (kernels.empty()) return;
  Random random(seed);
  const Problem p = Draw(c, &random);
  const BlockSets sets = Define(c, p);
  Dense kept = p.dense;
  kept.allowed = sets.kept;
  Runner runner(c, p);
  for (const std::string& name : kernels) {
    const std::string where = Text("seed ", seed, ": ", Describe(c), ", ", name);
    const Runner::Result result = runner.Run(name, c.threshold(), where);
    const size_t planned = runner.planned(c.threshold());
    CHECK(runner.allocated() <= planned, where, ": ", runner.allocated(), " bytes of workspace, planned ", planned);
    CHECK(result.counts.scored == sets.scored, where, ": ", result.counts.scored, " pairs scored, expected ",
          sets.scored);
    CHECK(Difference(result.counts.skipped, sets.skipped + sets.uncertain / 2) * 2 <= sets.uncertain + 1, where, ": ",
          result.counts.skipped, " pairs skipped, expected ", sets.skipped, " to ", sets.skipped + sets.uncertain);
    Compare(c, kept, sets, result, where);
    CHECK(runner.Run(name, c.threshold(), where).output == result.output, where, ": a second run gives other bits");
    ++totals->ran;
  }
  totals->scored += sets.scored, totals->skipped += sets.skipped;
  totals->rows += static_cast<int64_t>(sets.is_uncertain.size());
  totals->uncertain += std::count(sets.is_uncertain.begin(), sets.is_uncertain.end(), 1);
}

std::vector<Case> DrawCases() {
  std::vector<Case> cases;
  int turn = 0;
  for (const int64_t size : {64, 128, 72, 256, 48}) {
    for (int mask = 0; mask < 6; ++mask) {
      for (const double distance : {3.0, 0.5, 6.0}) {
        Case c;
        c.D = size, c.mask = mask, c.distance = distance;
        c.B = 1 + turn % 2, c.G = turn % 3 == 0 ? 4 : turn % 3;
        c.S = std::vector<int64_t>{300, 257, 128, 449, 1030}[static_cast<size_t>(turn % 5)];
        c.T = std::vector<int64_t>{900, 1024, 1130, 777}[static_cast<size_t>(turn % 4)];
        if (c.S > c.T) c.T = c.S + 100;
        c.dtype = turn % 2 == 0 ? DType::kF16 : DType::kBF16;
        c.offset = turn % 3 != 1;
        c.padding = turn % 4 == 1 ? Padding::kLeft : turn % 4 == 3 ? Padding::kRight : Padding::kNone;
        c.block = std::vector<int64_t>{128, 64, 200}[static_cast<size_t>(turn % 3)];
        c.sink = turn % 5 == 2;
        c.softcap = turn % 7 == 3 ? 30 : 0;
        c.empty_rows =
            std::vector<EmptyRows>{EmptyRows::kZero, EmptyRows::kMean, EmptyRows::kNan}[static_cast<size_t>(turn % 3)];
        cases.push_back(c);
        ++turn;
      }
    }
    Case c;
    c.D = size, c.mask = 1, c.offset = true, c.nan = true;
    cases.push_back(c);
    c = Case();
    c.D = size, c.scale_sign = -1, c.S = 200, c.T = 640;
    cases.push_back(c);
    // Many heads and query blocks, which CTAs take in several rounds; group sizes 1, 3 and 8.
    for (const int64_t group : size == 64 || size == 128 ? std::vector<int64_t>{1, 3, 8} : std::vector<int64_t>()) {
      c = Case();
      c.D = size, c.G = 24 / group, c.H = 24, c.S = 1200, c.T = 1200, c.mask = 1, c.B = group == 8 ? 2 : 1;
      cases.push_back(c);
    }
    c = Case();
    c.D = size, c.Dv = size == 64 ? 32 : 64, c.S = 200;
    cases.push_back(c);
  }
  return cases;
}

TEST(CudaChooseBlocksEqualsTheDefinition) {
  Totals totals;
  const std::vector<Case> cases = DrawCases();
  const char* const sample = std::getenv("STOF_SAMPLE");  // n: every n-th, for slow tools
  const size_t step = sample == nullptr ? 1 : std::max<size_t>(1, std::strtoull(sample, nullptr, 10));
  for (size_t i = 0; i < cases.size(); i += step) CheckCase(cases[i], 2000 + i, &totals);
  CountCases(totals.ran);
  CHECK(totals.ran == 0 || totals.skipped * 5 > totals.scored, "only ", totals.skipped, " of ", totals.scored,
        " pairs are skipped");
  CHECK(totals.skipped * 10 <= totals.scored * 9, totals.skipped, " of ", totals.scored, " pairs are skipped");
  CHECK(totals.uncertain * 20 <= totals.rows, "rounding decides about ", totals.uncertain, " of ", totals.rows,
        " rows");
}

// Prompts behind the pasts of a cache, whose lengths only the device knows.
TEST(CudaChooseBlocksOfCaches) {
  Totals totals;
  uint64_t seed = 3000;
  for (const int64_t size : {64, 128}) {
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      for (const std::vector<int64_t>& past : std::vector<std::vector<int64_t>>{{0, 0}, {700, 133}, {1000, 511}}) {
        Case c;
        c.D = size, c.dtype = dtype, c.mask = 1, c.B = 2, c.S = 200, c.T = 1210, c.past = past;
        CheckCase(c, seed++, &totals);
      }
    }
  }
  CountCases(totals.ran);
}

// A captured graph gives the same bits, and counts in every replay.
TEST(CudaChooseBlocksInGraphs) {
  int64_t ran = 0;
  for (const int64_t size : {64, 128}) {
    for (const int mask : {0, 1, 4}) {
      Case c;
      c.D = size, c.mask = mask, c.offset = true;
      Random random(static_cast<uint64_t>(size + mask));
      const Problem p = Draw(c, &random);
      Runner runner(c, p);
      for (const std::string& name : ChoosingKernels(c)) {
        const std::string where = Text(Describe(c), ", ", name);
        const Runner::Result one = runner.Run(name, c.threshold(), where);
        CHECK(one.counts.skipped > 0, where, ": nothing skipped");
        const Runner::Result replayed = runner.RunCaptured(name, c.threshold(), 5, where);
        CHECK(replayed.output == one.output, where, ": a replay gives other bits");
        CHECK(replayed.counts.scored == 5 * one.counts.scored && replayed.counts.skipped == 5 * one.counts.skipped,
              where, ": five replays count ", replayed.counts.skipped, ", one run ", one.counts.skipped);
        ++ran;
      }
    }
  }
  CountCases(ran);
}

// With a skip threshold, too, tiles of blocks that are left out count as skipped.
TEST(CudaChooseBlocksAndSkipScores) {
  Case c;
  c.D = 128, c.S = 512, c.T = 1024, c.mask = 1, c.offset = true;
  if (ChoosingKernels(c).empty()) return;
  Random random(6);
  const Problem p = Draw(c, &random);
  const BlockSets sets = Define(c, p);
  Runner runner(c, p);
  runner.SetSkipThreshold(1e-6f);  // skips nothing
  const Runner::Result result = runner.Run("", c.threshold(), "both");
  CHECK(sets.uncertain == 0, "rounding decides");
  CHECK(result.counts.skipped == sets.skipped && result.counts.scored == sets.scored, result.counts.skipped, " of ",
        result.counts.scored, " pairs skipped, expected ", sets.skipped, " of ", sets.scored);
  Dense kept = p.dense;
  kept.allowed = sets.kept;
  Compare(c, kept, sets, result, "both");
  CountCases(1);
}

// Where the call cannot choose, the bits are those without a threshold, and nothing is counted.
TEST(CudaChooseBlocksWhereNothingIsLeftOut) {
  std::vector<Case> cases(6);
  for (Case& c : cases) c.D = 128, c.mask = 1;
  cases[0].S = 127;
  cases[1].D = 192;
  cases[2].D = 64, cases[2].softcap = 20;
  cases[3].empty_rows = EmptyRows::kAll, cases[3].padding = Padding::kLeft;
  cases[4].empty_rows = EmptyRows::kAll;
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    Random random(60 + i);
    const Problem p = Draw(c, &random);
    Runner runner(c, p);
    if (i == 5) {
      std::vector<double> bias(static_cast<size_t>(c.S * c.T));
      for (double& x : bias) x = static_cast<double>(random.Unit());
      runner.SetBias(bias);
    }
    const std::string where = Text("case ", i, ": ", Describe(c));
    const Runner::Result plain = runner.Run("", 0, where), result = runner.Run("", c.threshold(), where);
    CHECK(result.counts.scored == 0, where, ": counted");
    CHECK(result.output == plain.output, where, ": other bits than without a threshold");
    CHECK(std::memcmp(plain.lse.data(), result.lse.data(), 4 * plain.lse.size()) == 0, where, ": another LSE");
  }
  CountCases(static_cast<int64_t>(cases.size()));
}

}  // namespace
}  // namespace stof::test::choose
