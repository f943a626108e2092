// SPDX-License-Identifier: Apache-2.0
// Each sm_90a attention kernel, forced, against the definition: whole and split tile rows, softcap and biases.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "cuda/schedule/tile_schedule.h"
#include "plugins/core/contract/cuda_backend.h"
#include "tests/cpp/attention/cuda_attention_cases.h"

namespace stof::test::attention {
namespace {

// The cases that sm_90a kernels take, also with wider heads and more tile rows than CTAs.
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

// How many cases have dynamic tiles with this kernel for heads of 65 to 128 elements and so many SMs.
int64_t CountDynamic(const std::vector<Case>& cases, int kernel, int sm_count) {
  const cuda::KernelEntry own = ScheduledKernels(128)[kernel];
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
    if (args.mask.fixed.blocks() == nullptr) continue;
    const cuda::TileSchedule schedule = cuda::MakeTileSchedule(bound.block, cuda::MakeTileList(bound.block), c.B, c.H,
                                                               own.ctas_per_sm * sm_count, c.H, own.cost, true);
    count += schedule.dynamic_tiles() > 0 ? 1 : 0;
  }
  return count;
}

// Each of these kernels, or the one in STOF_CUDA_KERNEL. With few STOF_CUDA_MULTIPROCESSORS kernel 4 has dynamic tiles.
void CudaSm90() {
  const std::vector<Case> cases = Sm90Cases();
  const std::vector<std::string> kernels = FirstKernels(10);
  const char* few = std::getenv("STOF_CUDA_MULTIPROCESSORS");
  if (few != nullptr && kernels == std::vector<std::string>{"4"}) {
    const int64_t drawn = CountDynamic(cases, 4, std::atoi(few));
    CHECK(drawn >= 5, "only ", drawn, " cases have dynamic tiles");
  }
  RunCudaCases(cases, kernels);
}

// Few queries with many keys, whose tile rows the kernels with one consumer warpgroup split and combine: every policy
// for fully masked rows, splits of padding alone, sinks, LSE, heads smaller than the kernel's. The last cases have more
// splits than a thread of the combine kernel reads at once.
std::vector<Case> Sm90SplitCases() {
  Random random(61);
  Deck<int64_t> rows({17, 63, 64, 65, 130, 193}, &random);
  Deck<int64_t> keys({1024, 1025, 1100, 1537, 2500, 3333}, &random);
  Deck<int64_t> sizes({64, 128, 40, 96}, &random);
  Deck<int> masks({1, 5, 6, 7, 8, 9, 15}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kAll, Pad::kRandom}, &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}, &random);
  Deck<Arrangement> arrangements(kArrangements, &random);
  std::vector<Case> cases;
  int64_t with_splits = 0;
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
    // Whether tile rows are split.
    Random drawn(cases.size() - 1);
    const MaskData data = DrawMask(c, &drawn);
    BoundMask bound;
    AttentionArgs args;
    CpuAttentionConfig config;
    config.m = 64, config.n = 64;
    BindMask(c, data, config, &bound, &args);
    if (args.mask.fixed.blocks() == nullptr) continue;
    const cuda::TileCost cost = {3000, 1200, 1400, 1, 0, true};
    const cuda::TileSchedule schedule =
        cuda::MakeTileSchedule(bound.block, cuda::MakeTileList(bound.block), c.B, c.H, 264, c.H, cost);
    with_splits += schedule.splits() > 1 ? 1 : 0;
    for (const cuda::SplitRow& row : schedule.split_rows) most = std::max(most, row.count);
  }
  CHECK(with_splits * 4 >= static_cast<int64_t>(cases.size()) * 3, with_splits, " of ", cases.size(),
        " cases have split rows");
  CHECK(most > 16, "no row has more than ", most, " splits");
  return cases;
}

// Scores of every size, by each kernel.
void CudaLargeScoresSm90() {
  std::vector<Case> plain, score_mod;
  for (Case& c : CudaLargeScoreCases(true)) {
    if (c.D <= 32) c.D = c.Dv = 64;
    (c.bias == Bias::kNone && c.softcap == 0 ? plain : score_mod).push_back(c);
  }
  RunCudaCases(plain, FirstKernels(10));
  RunCudaCases(score_mod, FirstKernels(2));
  std::vector<Case> splits = Sm90SplitCases();
  int turn = 0;
  for (Case& c : splits) {
    c.rising = false, c.spread = 1;
    c.scores = turn % 3 == 0 ? Scores::kSteps : Scores::kSpikes, c.exponent = 8 + turn % 12 * 2;
    ++turn;
  }
  RunCudaCases(splits, {"3", "5", ""});
}

void CudaSm90Splits() { RunCudaCases(Sm90SplitCases(), {"3", "4", "5", "9", ""}); }

// Runs with split rows that share one workspace, back to back without synchronization, and as a graph. Each kernel may
// start while the previous one ends, and must not overwrite what that still reads.
void CudaSm90SplitsInTurn() {
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
  for (const auto& [size, kernel] : {std::pair<int64_t, const char*>(64, "sm90-64x64x4"), {128, "sm90-64x64x2"}}) {
    const int64_t outputs = kHeads * kRows * size;
    const auto random_fp16 = [&](int64_t count) {
      std::vector<uint16_t> values(static_cast<size_t>(count));
      for (uint16_t& x : values)
        x = static_cast<uint16_t>(random.Range(0, 1) << 15 | random.Range(10, 15) << 10 | random.Range(0, 1023));
      return OnDevice(&blocks, values.data(), values.size() * 2);
    };
    AttentionArgs args;
    args.shape = {1, kHeads, kHeads, kRows, kKeys, size, size, DType::kF16};
    CHECK(Check(args).ok(), Check(args).message());
    args.scores.scale = 0.125f;
    args.query.stride = args.output.stride = {kHeads * kRows * size, kRows * size, size};
    args.key.stride = args.value.stride = {kHeads * kKeys * size, kKeys * size, size};
    std::vector<AttentionArgs> runs;
    for (int64_t i = 0; i < kRuns; ++i) {
      args.query.data = random_fp16(outputs), args.key.data = random_fp16(kHeads * kKeys * size),
      args.value.data = random_fp16(kHeads * kKeys * size);
      args.output.data = Allocate(&blocks, static_cast<size_t>(2 * outputs));
      runs.push_back(args);
    }
    const auto clear = [&] {
      for (const AttentionArgs& run : runs) {
        CHECK(cudaMemsetAsync(run.output.data, 0xff, static_cast<size_t>(2 * outputs), stream) == cudaSuccess);
      }
    };
    const auto queue = [&](const AttentionArgs& run) {
      RunContext context;
      context.on_cuda = true;
      context.stream = stream;
      context.allocate = Shared::Take;
      context.self = &shared;
      const Status status = FindCudaBackend()->attention.run(run, nullptr, *mask, sizes, {}, context);
      CHECK(status.ok(), status.message());
    };
    const auto results = [&] {
      CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
      std::vector<std::vector<uint16_t>> all;
      for (const AttentionArgs& run : runs) {
        all.emplace_back(static_cast<size_t>(outputs));
        CHECK(cudaMemcpy(all.back().data(), run.output.data, all.back().size() * 2, cudaMemcpyDeviceToHost) ==
              cudaSuccess);
      }
      return all;
    };
    const ForcedKernel forced(cuda::AttentionRequests(), kernel);
    shared.taken = 0;
    clear();
    for (const AttentionArgs& run : runs) {
      queue(run);
      CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    }
    const auto alone = results();
    CHECK(shared.taken > 0, "head size ", size, ": no split rows");
    for (size_t i = 0; i < alone.size(); ++i) {
      CHECK(std::count(alone[i].begin(), alone[i].end(), uint16_t{0xffff}) == 0, "run ", i,
            " does not write some outputs");
      CHECK(i == 0 || alone[i] != alone[0], "run ", i, " gives the same as the first");
    }
    clear();
    for (const AttentionArgs& run : runs) queue(run);
    CHECK(results() == alone, "head size ", size, ": runs without synchronization give other results");
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

// The variants with softcap and biases: those of the table, and biases whose rows are aligned to 16 bytes, of every
// type, broadcast over each axis but the keys, on tiles with element masks, padding, or the end of the keys.
void CudaSm90ScoreMod() {
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
    // More tile rows than CTAs.
    Case c;
    c.B = 3, c.H = 48, c.G = 16, c.S = 300, c.T = 304, c.D = c.Dv = size, c.mask = 1;
    c.bias = Bias::kForbids, c.bias_broadcast = 1, c.relative = 65, c.dtype = DType::kF16, c.cuda = true;
    cases.push_back(c);
  }
  RunCudaCases(cases, FirstKernels(2));
}

TEST(CudaAttentionSm90) { CudaSm90(); }
TEST(CudaSm90ScoresOfAnySize) { CudaLargeScoresSm90(); }
TEST(CudaScoreModSm90) { CudaSm90ScoreMod(); }
TEST(CudaSplitsSm90) { CudaSm90Splits(); }
TEST(CudaSplitsSm90InTurn) { CudaSm90SplitsInTurn(); }

// Every tenth case 50 times by each kernel.
TEST(CudaRepeatsOfSm90GiveTheSameBits) {
  RunCudaCases(EveryTenth(Sm90Cases(), ""), FirstKernels(10), kRepeats);
  RunCudaCases(EveryTenth(Sm90SplitCases(), ""), {"3", "5", ""}, kRepeats);
}

}  // namespace
}  // namespace stof::test::attention
