// SPDX-License-Identifier: Apache-2.0
// Skip by score on a GPU, against the definition in docs/reference/operators.md: in double precision, with the tiles of
// each sm_90a kernel in its order, by groups of 64 query rows. Outputs, LSE and counts. A tile whose largest score is
// so near to the threshold that rounding decides may go either way, and the tiles behind it may be tested or not: these
// are few, and widen the tolerance of their rows by what they weigh.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cuda/attention/families.h"
#include "cuda/attention/select.h"
#include "cuda/common/device_properties.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/mask/attention_mask.h"
#include "plugins/core/mask/block_mask_builder.h"
#include "tests/cpp/check.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/forced_kernel.h"
#include "tests/cpp/skip_scores/cuda_skip_problem.h"

namespace stof::test::skip {
namespace {

// A problem on the device.
class Runner {
 public:
  Runner(const Case& c, const Problem& p) : c_(c) {
    args_.shape = {c.B, c.H, c.G, c.S, c.T, c.D, c.D, c.dtype};
    args_.query = {Upload(p.query), {c.H * c.S * c.D, c.S * c.D, c.D}};
    args_.key = {Upload(p.key), {c.G * c.T * c.D, c.T * c.D, c.D}};
    args_.value = {Upload(p.value), args_.key.stride};
    output_bytes_ = p.query.size() * 2;
    args_.output.data = memory_.Take(output_bytes_);
    args_.output.stride = args_.query.stride;
    rows_ = static_cast<size_t>(c.B * c.H * c.S);
    args_.output.lse = static_cast<float*>(memory_.Take(4 * rows_));
    args_.output.lse_stride_b = c.H * c.S, args_.output.lse_stride_h = c.S;
    args_.scores.scale = 1 / std::sqrt(static_cast<float>(c.D));
    args_.scores.softcap = static_cast<float>(c.softcap);
    args_.scores.relative_bias.query_position = c.P();
    if (c.sink) args_.scores.sink = {Upload(p.sink), c.dtype};
    CHECK(MakeAttentionMask(kMasks[c.mask], {}, &mask_).ok());
    sizes_ = {c.B, c.H, c.S, c.T, c.P()};
    if (c.padding == Padding::kNone) return;
    void* const pad = memory_.Take(p.pad.size());
    CopyToDevice(pad, p.pad.data(), p.pad.size());
    pad_.data = pad, pad_.dtype = DType::kBool, pad_.rank = 2, pad_.dims[0] = c.B, pad_.dims[1] = c.T;
  }

  struct Result {
    std::vector<char> output;
    std::vector<float> lse;
    SkipCounts counts;
  };
  Result Run(const std::string& kernel, float threshold, const std::string& where) {
    const ForcedKernel forced(cuda::AttentionRequests(), kernel);
    args_.kernel = kernel.c_str();  // key columns are then not gathered, which would make other tiles
    Poison();
    const SkipCounts before = Counts();
    Queue(threshold, nullptr, where);
    return Read(before);
  }
  // As a captured graph that runs `replays` times.
  Result RunCaptured(const std::string& kernel, float threshold, int replays, const std::string& where) {
    const ForcedKernel forced(cuda::AttentionRequests(), kernel);
    args_.kernel = kernel.c_str();
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t instance = nullptr;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Queue(threshold, stream, where);  // makes the block mask
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    Queue(threshold, stream, where);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&instance, graph, 0));
    Poison();
    const SkipCounts before = Counts();
    for (int i = 0; i < replays; ++i) CHECK_CUDA(cudaGraphLaunch(instance, stream));
    const Result result = Read(before);
    CHECK_CUDA(cudaGraphExecDestroy(instance));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_CUDA(cudaStreamDestroy(stream));
    return result;
  }
  // The same bias for all batches and heads.
  void SetBias(const std::vector<double>& bias) { args_.scores.bias = {Upload(bias), c_.dtype, 0, 0, c_.T, 1}; }
  const AttentionShape& shape() const { return args_.shape; }
  const AttentionMask& mask() const { return *mask_; }
  const ExprSizes& sizes() const { return sizes_; }

 private:
  const void* Upload(const std::vector<double>& values) {
    std::vector<char> bytes(values.size() * 2);
    for (size_t i = 0; i < values.size(); ++i) StoreFloat(c_.dtype, values[i], &bytes[2 * i]);
    void* const block = memory_.Take(bytes.size());
    CopyToDevice(block, bytes.data(), bytes.size());
    return block;
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
  void Queue(float threshold, cudaStream_t stream, const std::string& where) {
    args_.scores.skip_threshold = threshold;
    RunContext context;
    context.on_cuda = true;
    context.stream = stream;
    context.self = &memory_;
    context.allocate = [](void* self, size_t bytes) { return static_cast<DeviceMemory*>(self)->Take(bytes); };
    const Status status = FindCudaBackend()->attention.run(args_, c_.padding == Padding::kNone ? nullptr : &pad_,
                                                           *mask_, sizes_, {}, context);
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
  AttentionArgs args_;
  size_t output_bytes_ = 0, rows_ = 0;
  Tensor pad_;
  std::shared_ptr<const AttentionMask> mask_;
  ExprSizes sizes_;
};

void Compare(const Case& c, const Problem& p, const Answer& answer, const Runner::Result& result,
             const std::string& where) {
  const double largest = 1.25, unit = c.dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
  for (size_t row = 0; row < answer.lse.size(); ++row) {
    const double open = answer.open[row], lse = static_cast<double>(result.lse[row]), want_lse = answer.lse[row];
    const double tolerance = CudaTolerance(c.dtype, p.magnitude, c.T, largest) + 2 * largest * open;
    for (int64_t d = 0; d < c.D; ++d) {
      const size_t at = row * static_cast<size_t>(c.D) + static_cast<size_t>(d);
      const double got = LoadFloat(c.dtype, &result.output[2 * at]), want = answer.output[at];
      CHECK(std::isnan(want) ? std::isnan(got) : std::abs(got - want) <= tolerance + std::abs(want) * unit, where,
            ": row ", row, " column ", d, ": ", got, ", expected ", want, " within ", tolerance);
    }
    // The sum is that of rounded weights nowhere: only scores and their exponentials err.
    const bool is_close = std::abs(lse - want_lse) <= LseTolerance(p.magnitude, c.T, want_lse) + 2 * open;
    CHECK(std::isnan(want_lse) ? std::isnan(lse)
          : want_lse == -kInf  ? lse == want_lse
                               : is_close,
          where, ": LSE of row ", row, ": ", lse, ", expected ", want_lse);
  }
}

// The kernels that skip by score.
cuda::KernelTable SkippingKernels(const Case& c) {
  cuda::DeviceProperties device;
  CHECK(cuda::GetDeviceProperties(&device).ok(), "no CUDA device");
  cuda::KernelProblem problem;
  problem.capability = device.capability;
  problem.dtype = c.dtype;
  problem.head_size = static_cast<int>(c.D);
  problem.has_softcap_or_bias = c.softcap > 0;
  problem.skips_scores = true;
  cuda::KernelTable kernels;
  cuda::FindFamily(cuda::KernelRole::kScheduled, problem, &kernels);
  return kernels.size() > 0 && kernels.begin()->skips_scores ? kernels : cuda::KernelTable();
}

// The tiles of this kernel, by the schedule that a call gets: small problems have half tiles where a kernel
// can.
KernelTiles ScheduleTiles(const Case& c, const Runner& runner, const cuda::KernelEntry& kernel) {
  KernelTiles own{kernel, {}, {}};
  if (c.mask == 0) return own;
  cuda::DeviceProperties device;
  CHECK(cuda::GetDeviceProperties(&device).ok(), "no CUDA device");
  cuda::SelectionProblem selection;
  selection.group_size = c.H / c.G;
  selection.l2_heads = cuda::L2HeadsOf(runner.shape(), device.l2_bytes);
  selection.sm_count = device.sm_count;
  const cuda::MaskForm form = cuda::MaskFormOf(kernel, selection);
  BlockMask block;
  CHECK(BuildBlockMask(runner.mask().parts.fixed, runner.sizes(), kernel.rows, kernel.keys, &block).ok());
  own.list = cuda::MakeTileList(block);
  own.entries = FindEntries(
      c, block,
      cuda::MakeTileSchedule(block, own.list, c.B, c.H, form.ctas, form.l2_heads, form.cost, true, form.group_size));
  return own;
}

std::vector<Case> DrawCases() {
  std::vector<Case> cases;
  int turn = 0;
  for (const int64_t size : {64, 128, 72, 192, 256}) {
    for (int mask = 0; mask < 6; ++mask) {
      for (const double distance : {2.0, 0.0, 5.0}) {
        Case c;
        c.D = size, c.mask = mask, c.distance = distance;
        c.B = 1 + turn % 2, c.G = turn % 3 == 0 ? 4 : turn % 3;
        c.S = std::vector<int64_t>{300, 257, 64, 449, 130}[static_cast<size_t>(turn % 5)];
        c.T = std::vector<int64_t>{900, 1024, 640, 777}[static_cast<size_t>(turn % 4)];
        c.dtype = turn % 2 == 0 ? DType::kF16 : DType::kBF16;
        c.offset = turn % 3 != 1;
        c.padding = turn % 4 == 1 ? Padding::kLeft : turn % 4 == 3 ? Padding::kRight : Padding::kNone;
        c.block = turn % 3 == 0 ? 64 : 128;
        c.sink = turn % 5 == 2;
        c.softcap = turn % 7 == 3 ? 30 : 0;
        cases.push_back(c);
        ++turn;
      }
    }
    // The row max of the kernel lags behind the largest score: weights of the tiles that are left out show in the
    // counts alone.
    for (const double rise : {9.0, 30.0}) {
      Case c;
      c.D = size, c.distance = 12, c.rise = rise, c.S = 200, c.T = 1500, c.block = 128, c.low_share = 0.7;
      c.dtype = size == 64 ? DType::kBF16 : DType::kF16;
      cases.push_back(c);
    }
    // Long runs of tiles that are kept, in which few are tested.
    for (const int mask : {0, 1}) {
      Case c;
      c.D = size, c.mask = mask, c.offset = true, c.low_share = 0.12, c.middle_share = 0.02, c.S = 150, c.T = 3000;
      c.distance = 4, c.block = 128, c.rise = mask * 25;
      cases.push_back(c);
    }
    Case c;
    c.D = size, c.mask = 1, c.offset = true, c.nan = true;
    cases.push_back(c);
  }
  return cases;
}

uint64_t Difference(uint64_t x, uint64_t y) { return x > y ? x - y : y - x; }

// The definition in the tiles of each kernel; what is left out only moves the result by rounding.
void SkipScores() {
  int64_t ran = 0, tiles = 0, untested = 0, near = 0;
  uint64_t scored = 0, skipped = 0;
  const std::vector<Case> cases = DrawCases();
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    Random random(1000 + i);
    const Problem p = Draw(c, &random);
    Runner runner(c, p);
    for (const cuda::KernelEntry& kernel : SkippingKernels(c)) {
      const std::string name = cuda::KernelName(kernel), where = Text("case ", i, ": ", Describe(c), ", ", name);
      const Answer answer = Define(c, p, ScheduleTiles(c, runner, kernel));
      const Runner::Result result = runner.Run(name, c.threshold(), where);
      CHECK(Difference(result.counts.scored, answer.scored) <= answer.may_score, where, ": ", result.counts.scored,
            " pairs scored, expected ", answer.scored, ", of which rounding decides ", answer.may_score);
      CHECK(Difference(result.counts.skipped, answer.skipped) <= answer.may_skip, where, ": ", result.counts.skipped,
            " pairs skipped, expected ", answer.skipped, ", of which rounding decides ", answer.may_skip);
      Compare(c, p, answer, result, where);
      CHECK(runner.Run(name, c.threshold(), where).output == result.output, where, ": a second run gives other bits");
      tiles += answer.tiles, untested += answer.untested, near += answer.near, scored += answer.scored,
          skipped += answer.skipped;
      ++ran;
    }
  }
  CountCases(ran);
  CHECK(ran == 0 || skipped * 4 > scored, "only ", skipped, " of ", scored, " pairs are skipped");
  CHECK(ran == 0 || skipped * 10 < scored * 9, skipped, " of ", scored, " pairs are skipped");
  CHECK(ran == 0 || (untested * 20 > tiles && untested * 2 < tiles), untested, " of ", tiles, " tiles are not tested");
  CHECK(near * 200 <= tiles, "rounding decides ", near, " of ", tiles, " tiles");
}

// A threshold that nothing is below: the bits are those without one, and a graph counts in every replay.
void NothingSkipped() {
  int64_t ran = 0;
  for (const int64_t size : {64, 128}) {
    for (const int mask : {0, 1, 4}) {
      Case c;
      c.D = size, c.mask = mask, c.offset = true, c.distance = 60, c.low_share = 0.9;
      for (const DType dtype : {DType::kF16, DType::kBF16}) {
        c.dtype = dtype;
        Random random(static_cast<uint64_t>(size + mask));
        // Levels as if for a distance of 5, so that scores are small.
        Case drawn = c;
        drawn.distance = 5;
        const Problem p = Draw(drawn, &random);
        Runner runner(c, p);
        for (const cuda::KernelEntry& kernel : SkippingKernels(c)) {
          const std::string name = cuda::KernelName(kernel), where = Text(Describe(c), ", ", name);
          const Runner::Result plain = runner.Run(name, 0, where), kept = runner.Run(name, c.threshold(), where);
          CHECK(plain.counts.scored == 0 && plain.counts.skipped == 0, where, ": counted without a threshold");
          CHECK(kept.counts.scored > 0 && kept.counts.skipped == 0, where, ": ", kept.counts.skipped, " pairs skipped");
          CHECK(plain.output == kept.output, where, ": other bits than without a threshold");
          CHECK(std::memcmp(plain.lse.data(), kept.lse.data(), 4 * plain.lse.size()) == 0, where, ": another LSE");
          const Runner::Result some = runner.Run(name, drawn.threshold(), where);
          CHECK(some.counts.skipped > 0, where, ": nothing skipped");
          const Runner::Result replayed = runner.RunCaptured(name, drawn.threshold(), 5, where);
          CHECK(replayed.counts.scored == 5 * some.counts.scored && replayed.counts.skipped == 5 * some.counts.skipped,
                where, ": five replays count ", replayed.counts.skipped, ", one run ", some.counts.skipped);
          CHECK(replayed.output == some.output, where, ": a replay gives other bits");
          ++ran;
        }
      }
    }
  }
  FindCudaBackend()->attention.reset_skip_counts();
  SkipCounts counts;
  FindCudaBackend()->attention.add_skip_counts(&counts);
  CHECK(counts.scored == 0 && counts.skipped == 0, "counts after a reset");
  CountCases(ran);
}

// By the kernel that the library selects. Where no kernel that skips takes the problem, the threshold counts for
// nothing.
void SkipScoresBySelectedKernel() {
  Case c;
  c.D = 128, c.S = 512, c.T = 512, c.mask = 1, c.block = 128;
  Random random(5);
  const Problem p = Draw(c, &random);
  Runner runner(c, p);
  const Runner::Result result = runner.Run("", c.threshold(), "choice");
  if (SkippingKernels(c).size() > 0) CHECK(result.counts.skipped > 0, "the choice skips nothing");
  std::vector<double> bias(static_cast<size_t>(c.S * c.T));
  for (double& x : bias) x = random.Unit();
  runner.SetBias(bias);
  const Runner::Result biased = runner.Run("", c.threshold(), "bias");
  CHECK(biased.output == runner.Run("", 0, "bias").output, "an attention bias with a threshold gives other bits");
  CountCases(2);
}

TEST(CudaSkipScoresEqualTheDefinition) { SkipScores(); }
TEST(CudaSkipScoresWhereNothingIsLeftOut) { NothingSkipped(); }
TEST(CudaSkipScoresBySelectedKernel) { SkipScoresBySelectedKernel(); }

}  // namespace
}  // namespace stof::test::skip
