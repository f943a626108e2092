// SPDX-License-Identifier: Apache-2.0
// StofCachedAttention on a GPU: outputs and caches against the definition in double precision, with ragged lengths;
// illegal lengths; captured graphs.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/attention/families.h"
#include "tests/cpp/cached_attention/append_problem.h"
#include "tests/cpp/cached_attention/cuda_node.h"
#include "tests/cpp/check.h"
#include "tests/cpp/forced_kernel.h"

namespace stof::test::cached_attention {
namespace {

void RunStep(const Step& step, uint64_t seed, int64_t illegal = -1, int32_t seqlen = 0) {
  if (!IsSampled(seed)) return;
  const std::string where = Text("seed ", seed, " ", Describe(step));
  const ForcedKernel forced(cuda::AttentionRequests(), step.kernel);
  Node node(step, seed);
  if (illegal >= 0) node.run.seqlens[static_cast<size_t>(illegal)] = seqlen, node.SetLengths();
  const Status status = node.Queue(nullptr);
  CHECK(status.ok(), where, ": ", status.message());
  CHECK_CUDA(cudaDeviceSynchronize());
  if (illegal < 0) node.CheckCaches(where);
  node.Check(where, illegal);
  if (illegal >= 0 && step.c.is_shared) node.CheckUnchanged(where, illegal);
  CountCases(1);
}

int64_t MostKeys(const Case& c) {
  int64_t most = 0;
  for (int64_t b = 0; b < c.B; ++b) most = std::max(most, c.past[static_cast<size_t>(b)] + c.tokens_of(b));
  return most;
}

// Lengths, sizes and options of one step: S new tokens behind `past` keys of the longest sequence.
Step DrawStep(int64_t S, int64_t past, Random* random) {
  Step step;
  Case& c = step.c;
  c.is_packed = true;  // the form of Run; Node gives the op either form
  c.B = random->Range(1, 3), c.S = S;
  c.D = random->Pick(std::vector<int64_t>{64, 64, 96, 128, 128, 256});
  c.dtype = random->Pick(std::vector<DType>{DType::kF16, DType::kBF16, DType::kF32});
  std::tie(c.H, c.G) =
      random->Pick(std::vector<std::pair<int64_t, int64_t>>{{8, 1}, {8, 2}, {4, 4}, {6, 2}, {16, 1}, {32, 32}, {5, 1}});
  if (S > 16) c.H = std::min<int64_t>(c.H, 8), c.G = c.H == 8 ? 2 : c.G <= c.H ? c.G : c.H;
  c.past.clear();
  const bool is_padded = past == 0 && S > 1 && random->OneIn(2);
  for (int64_t b = 0; b < c.B; ++b) {
    c.past.push_back(past == 0 ? 0 : b == 0 ? past : random->Range(0, past));
    if (is_padded) c.tokens.push_back(b == 0 ? S : random->Range(1, S));
  }
  step.mask = static_cast<int>(random->Range(0, 4));
  step.total = is_padded || past == 0 ? S : MostKeys(c) + (random->OneIn(3) ? 77 : 0);
  c.is_shared = random->OneIn(2);
  c.has_past = past > 0 || random->OneIn(2);
  c.capacity = step.total;
  if (c.is_shared && c.has_past) c.capacity += random->Pick(std::vector<int64_t>{0, 1, 300});
  if (past > 16 && random->OneIn(4)) {
    step.mask = 1, c.window = 16, c.is_shared = random->OneIn(2);
    c.capacity = random->Pick(std::vector<int64_t>{16, 32});
    step.total = MostKeys(c);
  }
  if (!random->OneIn(3)) {
    c.rotary = random->OneIn(2) ? c.D : 32;
    c.is_interleaved = random->OneIn(3), c.has_positions = random->OneIn(3);
    c.has_norm = random->OneIn(3);
  }
  step.softcap = random->OneIn(4) ? 5.0f : 0.0f;
  step.has_sink = random->OneIn(4);
  step.has_bias = c.window == 0 && random->OneIn(5);
  c.free_rows = S + 127;  // of padding, and cleared ones
  return step;
}

TEST(CudaCachedAttentionEqualsTheDefinition) {
  Random random(40);
  uint64_t seed = 0;
  for (const int64_t S : {1, 3, 16}) {
    for (const int64_t past : {0, 1, 60, 517}) {
      for (int i = 0; i < Cases(12); ++i) {
        const Step step = DrawStep(S, past, &random);
        for (const char* kernel : {"", "0", "1"}) {
          Step forced = step;
          forced.kernel = kernel;
          RunStep(forced, seed);
        }
        ++seed;
      }
    }
  }
}

// Decode reads the key columns of each KV head beside the window. Every mask, by the choice and by each kernel.
TEST(CudaCachedAttentionOfKeyColumns) {
  Random random(43);
  uint64_t seed = 0;
  for (int mask = kFirstColumnMask; mask < kFirstColumnMask + kColumnMasks; ++mask) {
    for (const int64_t S : {1, 3, 16, 70}) {
      for (const int64_t past : {0, 1, 63, 64, 300, 700}) {
        Step step = DrawStep(S, past, &random);
        Case& c = step.c;
        if (c.window > 0) c.window = 0, c.capacity = step.total = MostKeys(c) + 3, c.is_shared = true;
        std::tie(c.H, c.G) = random.Pick(std::vector<std::pair<int64_t, int64_t>>{{8, 2}, {8, 8}, {4, 1}, {16, 4}});
        step.mask = mask, step.has_bias = step.has_bias && random.OneIn(3);
        for (const char* kernel : {"", "0", "1"}) {
          step.kernel = S > 16 ? "" : kernel;
          RunStep(step, seed);
          if (S > 16) break;
        }
        ++seed;
      }
    }
  }
}

// Many columns and splits, of sequences that are far shorter than the cache.
TEST(CudaCachedAttentionOfKeyColumnsInLongCaches) {
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    for (const int64_t D : {64, 128}) {
      for (const char* kernel : {"0", "1", ""}) {
        for (int mask = kFirstColumnMask; mask < kFirstColumnMask + kColumnMasks; ++mask) {
          Step step;
          Case& c = step.c;
          c.is_packed = true;
          c.B = 2, c.H = 8, c.G = 2, c.D = D, c.dtype = dtype, c.past = {300, 5000}, c.capacity = 6500;
          step.total = 6500, step.mask = mask, step.kernel = kernel;
          c.free_rows = 128;
          RunStep(step, seed++);
        }
      }
    }
  }
}

TEST(CudaCachedAttentionOfChunks) {
  Random random(41);
  uint64_t seed = 0;
  for (const int64_t S : {17, 70, 300}) {
    for (const int64_t past : {0, 1, 517}) {
      for (int i = 0; i < Cases(S == 300 ? 4 : 6); ++i) RunStep(DrawStep(S, past, &random), seed++);
    }
  }
}

// Lengths that are far shorter than the capacity by which the host chooses splits.
TEST(CudaCachedAttentionOfShortSequencesInLongCaches) {
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    for (const int64_t D : {64, 128}) {
      for (const char* kernel : {"0", "1", ""}) {
        for (const int mask : {0, 2, 3}) {
          Step step;
          Case& c = step.c;
          c.is_packed = true;
          c.B = 2, c.H = 8, c.G = 1, c.D = D, c.dtype = dtype, c.past = {0, 300}, c.capacity = 20000;
          step.total = 20000, step.mask = mask, step.kernel = kernel;
          c.free_rows = 128;
          RunStep(step, seed++);
        }
      }
    }
  }
}

// Every output of a sequence of illegal length is NaN, and the others are right, in every path.
TEST(CudaCachedAttentionMarksIllegalLengths) {
  uint64_t seed = 0;
  for (const int64_t S : {1, 3, 40}) {
    for (const int mask : {0, 1, 3, kFirstColumnMask, kFirstColumnMask + 2}) {
      for (const char* kernel : {"0", "1"}) {
        // Beyond the capacity, and beyond total_sequence_length.
        for (const int32_t seqlen : {std::numeric_limits<int32_t>::min(), -1, static_cast<int32_t>(S) - 2, 120,
                                     static_cast<int32_t>(S) + 59, std::numeric_limits<int32_t>::max()}) {
          Step step;
          Case& c = step.c;
          c.is_packed = true;
          c.B = 3, c.S = S, c.H = 4, c.G = 2, c.D = 64, c.dtype = DType::kF16, c.past = {30, 7, 59};
          c.rotary = S == 3 ? 64 : 0;
          c.capacity = 120, step.total = 59 + S, step.mask = mask, step.kernel = S > 16 ? "" : kernel;
          c.free_rows = S + 127;
          RunStep(step, seed++, 1, seqlen);
        }
      }
    }
  }
}

// One captured graph, 100 steps: only device memory changes between them.
void RunCaptured(Step step, const std::string& name) {
  Case& c = step.c;
  c.is_packed = true;
  c.B = 2, c.H = 8, c.G = 2, c.rotary = 64, c.free_rows = c.S + 127;
  c.past = {0, 13};
  step.total = c.window > 0 ? 200 : c.capacity;
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Node node(step, 9, size_t{64} << 20);
  // A run before loads the kernels; its step is the first one again.
  CHECK(node.Queue(stream).ok(), name);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const Status status = node.Queue(stream);
  CHECK(status.ok(), name, ": ", status.message());
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 100; ++i) {
    node.Advance({i, 13 + i});
    CHECK_CUDA(cudaGraphLaunch(executable, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    node.CheckCaches(Text(name, " step ", i));
    node.Check(Text(name, " step ", i));
    CountCases(1);
  }
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
}

TEST(CudaCachedAttentionInACapturedGraph) {
  for (const char* kernel : {"0", "1"}) {
    for (const int mask : {0, 1, 3, kFirstColumnMask, kFirstColumnMask + 2}) {
      Step step;
      step.c.D = 128, step.c.dtype = DType::kF16, step.c.capacity = 3000, step.mask = mask;
      const ForcedKernel forced(cuda::AttentionRequests(), kernel);
      RunCaptured(step, Text("mask ", mask, " kernel ", kernel));
    }
  }
  for (const int64_t capacity : {16, 24}) {
    Step step;
    step.c.D = 64, step.c.dtype = DType::kBF16, step.c.capacity = capacity, step.c.window = 16, step.mask = 1;
    RunCaptured(step, Text("sliding window, capacity ", capacity));
  }
}

// Prompts and chunks of them with 8-bit operands, by sequences of different lengths. NaN lies in the rows without a
// key.
TEST(CudaCachedAttentionIn8Bits) {
  uint64_t seed = 0;
  for (const char* precision : {"int8", "int8_fp8"}) {
    for (const int64_t D : {64, 128}) {
      for (const DType dtype : {DType::kF16, DType::kBF16}) {
        for (const int64_t past : {0, 300, 1500}) {
          for (const int mask : {0, 2, 3, 10}) {
            if (!IsSampled(++seed)) continue;
            Random random(seed);
            Step step;
            Case& c = step.c;
            c.is_packed = true;
            c.B = 2, c.S = 150, c.D = D, c.dtype = dtype, c.H = 4, c.G = seed % 3 == 0 ? 4 : 2;
            c.past = {past, past / 3};
            if (past == 0) c.tokens = {150, random.Range(17, 149)};
            step.mask = mask, step.has_sink = seed % 4 == 1;
            step.total = past == 0 ? 150 : past + 150 + (seed % 5 == 0 ? 300 : 0);
            c.capacity = step.total + (seed % 2 == 0 ? 77 : 0), c.is_shared = true,
            c.has_past = past > 0 || c.capacity > 150;
            c.rotary = step.total <= kRotaryRows ? 32 : 0, c.free_rows = c.S + 127;
            const std::string where = Text("seed ", seed, " ", Describe(step));
            step.precision = precision, step.may_stay_full = past == 0 && mask != 0 && mask != 2;
            Node node(step, seed);
            const Status status = node.Queue(nullptr);
            CHECK(status.ok(), where, ": ", status.message());
            CHECK_CUDA(cudaDeviceSynchronize());
            node.CheckCaches(where);
            node.Check(where);
            CountCases(1);
          }
        }
      }
    }
  }
}

// Steps of up to 16 tokens, and longer ones with softcap, give the same bits with and without the attribute. Quantized
// caches: QuantizedCachesAreAttendedInFullPrecision.
TEST(CudaCachedAttentionIn8BitsLeavesDecodingAndSoftcapAlone) {
  for (const int mask : {0, 3, 4}) {
    for (const int64_t S : {1, 3, 16, 70}) {
      Step step;
      Case& c = step.c;
      c.is_packed = true;
      c.B = 2, c.S = S, c.D = 64, c.dtype = DType::kF16, c.past = {300, 40}, c.capacity = 400, c.free_rows = S + 127;
      step.total = 300 + S, step.mask = mask, step.softcap = S > 16 ? 30.0f : 0.0f;
      std::vector<Buffer> outputs;
      const int64_t count = c.B * S * c.H * c.D;
      for (const bool is_reduced : {false, true}) {
        step.precision = is_reduced ? "int8" : "", step.may_stay_full = true;
        Node node(step, 77);
        CHECK(node.Queue(nullptr).ok());
        CHECK_CUDA(cudaDeviceSynchronize());
        node.Check(Describe(step));
        outputs.push_back(node.Download(node.outputs[0].data, count));
      }
      CHECK(outputs[0].Equals(0, outputs[1], 0, count), Describe(step));
      CountCases(1);
    }
  }
}

// One captured graph, whose chunks grow: only lengths on the device say how many tiles are quantized.
TEST(CudaCachedAttentionIn8BitsInACapturedGraph) {
  for (const char* precision : {"int8", "int8_fp8"}) {
    Step step;
    step.c.S = 40, step.c.D = 128, step.c.dtype = DType::kF16, step.c.capacity = 3000, step.precision = precision;
    RunCaptured(step, precision);
  }
}

// Steps that are queued one behind the other without a stop, also as one captured graph: a kernel that starts early
// must not read the row that the step before it still writes. Their workspace is one.
TEST(CudaCachedAttentionOfStepsBackToBack) {
  constexpr int kSteps = 12;
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (const int64_t S : {1, 3}) {
      for (const int mask : {0, 1, 2, kFirstColumnMask, kFirstColumnMask + 2}) {
        for (const char* kernel : {"", "0", "1"}) {
          for (const bool is_captured : {false, true}) {
            if (!IsSampled(seed++)) continue;
            Random random(seed);
            Step step;
            Case& c = step.c;
            c.is_packed = true;
            c.B = 2, c.S = S, c.dtype = dtype, c.D = random.Pick(std::vector<int64_t>{64, 128});
            std::tie(c.H, c.G) = random.Pick(std::vector<std::pair<int64_t, int64_t>>{{8, 2}, {4, 4}, {16, 1}});
            c.rotary = random.OneIn(3) ? 0 : 64, c.has_norm = random.OneIn(3);
            c.past = {0, 60}, c.capacity = step.total = 700, c.free_rows = S + 127;
            step.mask = mask, step.kernel = kernel, step.softcap = random.OneIn(4) ? 5.0f : 0.0f;
            const std::string where = Text("seed ", seed, " captured ", is_captured, " ", Describe(step));
            const ForcedKernel forced(cuda::AttentionRequests(), kernel);
            Node node(step, seed, size_t{16} << 20);
            std::vector<Node::OneStep> steps;
            for (int i = 0; i < kSteps; ++i) steps.push_back(node.MakeStep({i * S, 60 + i * S}));
            const auto queue = [&](cudaStream_t stream) {
              for (const Node::OneStep& one : steps) {
                node.Select(one);
                const Status status = node.Queue(stream);
                CHECK(status.ok(), where, ": ", status.message());
              }
            };
            cudaStream_t stream = nullptr;
            CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            CHECK_CUDA(cudaDeviceSynchronize());
            if (is_captured) {
              cudaGraph_t graph = nullptr;
              cudaGraphExec_t executable = nullptr;
              node.Select(steps[0]);
              CHECK(node.Queue(stream).ok(), where);  // loads kernels and makes what masks need
              CHECK_CUDA(cudaStreamSynchronize(stream));
              CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
              queue(stream);
              CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
              CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
              CHECK_CUDA(cudaGraphLaunch(executable, stream));
              CHECK_CUDA(cudaStreamSynchronize(stream));
              CHECK_CUDA(cudaGraphExecDestroy(executable));
              CHECK_CUDA(cudaGraphDestroy(graph));
            } else {
              queue(stream);
            }
            CHECK_CUDA(cudaStreamSynchronize(stream));
            CHECK_CUDA(cudaStreamDestroy(stream));
            for (int i = 0; i < kSteps; ++i) {
              node.Select(steps[static_cast<size_t>(i)]);
              node.Check(Text(where, " step ", i), -1, false);
            }
            CountCases(1);
          }
        }
      }
    }
  }
}

// A position beyond the rotary table makes the sequence's outputs and its
// new key NaN; the value is stored.
TEST(CudaCachedAttentionMarksIllegalPositions) {
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    for (const char* kernel : {"0", "1"}) {
      for (const int64_t position : {int64_t{-1}, kRotaryRows, std::numeric_limits<int64_t>::max()}) {
        if (!IsSampled(seed++)) continue;
        Step step;
        Case& c = step.c;
        c.is_packed = true;
        c.B = 3, c.H = 4, c.G = 2, c.D = 64, c.dtype = dtype, c.past = {30, 7, 59}, c.capacity = step.total = 120;
        c.rotary = 64, c.has_positions = true, c.free_rows = 128;
        const std::string where = Text("position ", position, " ", Describe(step));
        const ForcedKernel forced(cuda::AttentionRequests(), kernel);
        Node node(step, seed);
        node.run.positions[1] = position;
        CopyToDevice(node.inputs[in::kPositions].data, node.run.positions.data(),
                     node.run.positions.size() * sizeof(int64_t));
        CHECK(node.Queue(nullptr).ok(), where);
        CHECK_CUDA(cudaDeviceSynchronize());
        node.Check(where, 1);
        const int64_t count = c.B * c.G * c.capacity * c.D;
        const Buffer key = node.Download(node.outputs[1].data, count),
                     value = node.Download(node.outputs[2].data, count);
        for (int64_t g = 0; g < c.G; ++g) {
          const int64_t at = ((c.G + g) * c.capacity + 7) * c.D;
          for (int64_t d = 0; d < c.D; ++d)
            CHECK(std::isnan(key.Get(at + d)), where, ": element ", d, " of the new key");
          CHECK(value.Equals(at, node.run.tokens, node.run.token(c, 1, c.H + c.G + g, 0), c.D), where, ": new value");
        }
        CountCases(1);
      }
    }
  }
}

// Tile edges, head sizes, group sizes beyond one row block, partial and interleaved rotary embedding: the new key is
// the first or the last of a KV tile, or the only key.
TEST(CudaCachedAttentionAppendsAtTileEdges) {
  Random random(45);
  uint64_t seed = 0;
  for (const int64_t D : {16, 64, 80, 128, 192, 256}) {
    for (const auto& [H, G] : {std::pair<int64_t, int64_t>{4, 4}, {8, 1}, {12, 1}, {40, 2}}) {
      for (const int64_t past : {0, 1, 63, 64, 127, 128, 255}) {
        Step step;
        Case& c = step.c;
        c.is_packed = true;
        c.B = 2, c.H = H, c.G = G, c.D = D, c.dtype = random.OneIn(2) ? DType::kF16 : DType::kBF16;
        c.past = {past, random.Pick(std::vector<int64_t>{0, 64, 65})}, c.capacity = 320, c.free_rows = 128;
        step.total = MostKeys(c) + random.Range(0, 30) + 1;
        c.rotary = random.Pick(std::vector<int64_t>{0, 16, D}), c.is_interleaved = random.OneIn(2);
        c.has_positions = random.OneIn(3), c.has_norm = random.OneIn(2);
        step.mask = random.Pick(std::vector<int>{0, 0, 1, 2, kFirstColumnMask + 5});
        step.has_sink = random.OneIn(3), step.has_bias = random.OneIn(4), step.softcap = random.OneIn(4) ? 5.0f : 0.0f;
        for (const char* kernel : {"0", "1"}) {
          step.kernel = kernel;
          RunStep(step, seed);
        }
        ++seed;
      }
    }
  }
}

}  // namespace
}  // namespace stof::test::cached_attention
