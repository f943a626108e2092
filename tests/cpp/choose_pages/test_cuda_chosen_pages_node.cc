// SPDX-License-Identifier: Apache-2.0
// StofCachedAttention with chosen pages on a GPU: key bounds, outputs and counts against the definition in
// docs/reference/cached-attention.md, in double precision. Rewinding, caches without key bounds, illegal lengths,
// captured graphs.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/contract/page_choice.h"
#include "tests/cpp/cached_attention/append_problem.h"
#include "tests/cpp/cached_attention/cuda_node.h"
#include "tests/cpp/check.h"

namespace stof::test::cached_attention {
namespace {

struct Choice {
  int64_t chosen = 4, rows = 64;
  bool is_known = true;   // there are key bounds of the step before
  bool is_shared = true;  // past and present key bounds are one buffer
  bool is_taken = true;   // the CUDA kernels choose; else they attend all pages
};

std::string Explain(const Step& step, const Choice& choice) {
  return Text(Describe(step), " chosen ", choice.chosen, " rows ", choice.rows, " known ", choice.is_known, " shared ",
              choice.is_shared);
}

// A node with key bounds of pages beside its caches. Those that the step takes as they are lie some way around the
// keys, so that others would be seen.
class ChoosingNode {
 public:
  ChoosingNode(const Step& step, const Choice& choice, uint64_t seed, size_t arena = 0)
      : node(step, seed, arena), step_(step), choice_(choice), random_(seed + 1), before_(step.c.dtype, 0) {
    const Case& c = step_.c;
    MapAttributes attributes;
    attributes.ints = {{"num_heads", c.H},
                       {"kv_num_heads", c.G},
                       {"do_rotary", c.rotary > 0 ? 1 : 0},
                       {"rotary_interleaved", c.is_interleaved ? 1 : 0},
                       {"chosen_pages", choice.chosen},
                       {"page_rows", choice.rows}};
    attributes.floats = {{"softcap", step.softcap}, {"qk_norm_epsilon", 1e-5f}};
    attributes.strings = {{"mask", kMasks[step.mask].text}};
    Status status = CachedAttentionDescription()->create(attributes, &node.op);
    CHECK(status.ok(), status.message());
    status = node.op->Prepare(node.inputs.data(), static_cast<int>(node.inputs.size()));
    CHECK(status.ok(), status.message());
    AddBounds();
  }

  // Queues the step and waits for it.
  void Run(cudaStream_t stream, const std::string& where) {
    const Status status = node.Queue(stream);
    CHECK(status.ok(), where, ": ", status.message());
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  // Another step: its lengths before it. The key bounds on the device are those of the step before.
  void Advance(const std::vector<int64_t>& past) {
    before_ = DownloadBounds();
    choice_.is_known = true;
    step_.c.past = past;
    node.Advance(past);
  }

  // Caches, key bounds, outputs and counts.
  void Check(const std::string& where, int64_t illegal = -1) {
    const Case& c = step_.c;
    const int64_t count = c.B * c.G * c.capacity * c.D;
    const Buffer key = node.Download(node.outputs[1].data, count), value = node.Download(node.outputs[2].data, count);
    const Buffer bounds = DownloadBounds(), output = node.Download(node.outputs[0].data, c.B * c.S * c.H * c.D);
    const bool is_rotated = c.rotary > 0 || c.has_norm;
    const Buffer rotated = is_rotated ? node.Download(node.memory.workspace()[2], output.count()) : Buffer(c.dtype, 0);
    for (int64_t b = 0; b < c.B; ++b) {
      if (b == illegal) {
        for (int64_t i = 0; i < c.S * c.H * c.D; ++i) {
          CHECK(std::isnan(output.Get(b * c.S * c.H * c.D + i)), where, ": element ", i, " of an illegal sequence");
        }
        continue;
      }
      for (int64_t g = 0; g < c.G; ++g) {
        CheckBounds(b, g, key, bounds, where);
        CheckHead(b, g, key, value, bounds, rotated, output, where);
      }
    }
  }

  Node node;
  // What steps count, of all that Check has seen; and KV heads whose choice rounding may decide.
  SkipCounts counts;
  int64_t heads = 0, unclear = 0;

 private:
  int64_t pages() const { return (step_.c.capacity + choice_.rows - 1) / choice_.rows; }
  int64_t past_pages() const { return (Run::past_rows(step_.c) + choice_.rows - 1) / choice_.rows; }
  double KeyBound(const Buffer& bounds, int64_t head, int64_t page, int64_t i) const {
    return bounds.Get((head * pages() + page) * 2 * step_.c.D + i);
  }
  Buffer DownloadBounds() const {
    return node.Download(node.outputs[3].data, step_.c.B * step_.c.G * pages() * 2 * step_.c.D);
  }

  void AddBounds() {
    const Case& c = step_.c;
    const int64_t known = choice_.is_known && c.has_past ? past_pages() : 0;
    Buffer past(c.dtype, c.B * c.G * known * 2 * c.D);
    for (int64_t at = 0; at < past.count(); ++at) {
      const double x = 1.5 + static_cast<double>(random_.Unit());
      past.Set(at, at / c.D % 2 == 0 ? -x : x);
    }
    before_ = Buffer(c.dtype, c.B * c.G * pages() * 2 * c.D);
    before_.Poison();
    for (int64_t head = 0; head < c.B * c.G; ++head) {
      for (int64_t i = 0; i < known * 2 * c.D; ++i) {
        before_.Set(head * pages() * 2 * c.D + i, past.Get(head * known * 2 * c.D + i));
      }
    }
    const bool is_shared = choice_.is_shared && known == pages();
    Buffer present(c.dtype, before_.count());
    present.Poison();
    void* const data = node.memory.Upload(is_shared ? before_.data() : present.data(), present.bytes().size());
    node.inputs[in::kPageBounds] = Describe(is_shared ? data : node.memory.Upload(past.data(), past.bytes().size()),
                                            c.dtype, {c.B, c.G, known, 2, c.D});
    node.outputs.push_back(Describe(data, c.dtype, {c.B, c.G, pages(), 2, c.D}));
  }

  void CheckBounds(int64_t b, int64_t g, const Buffer& key, const Buffer& bounds, const std::string& where) const {
    const Case& c = step_.c;
    const int64_t past = c.past[static_cast<size_t>(b)], keys = past + c.tokens_of(b), head = b * c.G + g;
    for (int64_t page = 0; page * choice_.rows < keys; ++page) {
      const bool is_kept = choice_.is_known && c.has_past && (page + 1) * choice_.rows <= past;
      for (int64_t d = 0; d < c.D; ++d) {
        double low = KeyBound(before_, head, page, d), high = KeyBound(before_, head, page, c.D + d);
        for (int64_t k = page * choice_.rows; !is_kept && k < std::min((page + 1) * choice_.rows, keys); ++k) {
          const double x = key.Get((head * c.capacity + k) * c.D + d);
          low = k == page * choice_.rows ? x : std::min(low, x),
          high = k == page * choice_.rows ? x : std::max(high, x);
        }
        CHECK(KeyBound(bounds, head, page, d) == low && KeyBound(bounds, head, page, c.D + d) == high, where,
              ": key bounds of b ", b, " g ", g, " page ", page, " element ", d, ": ", KeyBound(bounds, head, page, d),
              " and ", KeyBound(bounds, head, page, c.D + d), ", expected ", low, " and ", high);
      }
    }
  }

  double Query(const Buffer& rotated, int64_t b, int64_t h, int64_t i, int64_t d) const {
    const Case& c = step_.c;
    return rotated.count() > 0 ? rotated.Get(((b * c.H + h) * c.S + i) * c.D + d)
                               : node.run.tokens.Get(node.run.token(c, b, h, i) + d);
  }

  // The pages that a KV head attends. *is_clear: rounding does not decide.
  std::vector<bool> ChooseOf(int64_t b, int64_t g, const Buffer& bounds, const Buffer& rotated, bool* is_clear) {
    const Case& c = step_.c;
    const int64_t past = c.past[static_cast<size_t>(b)], keys = past + c.tokens_of(b), group = c.H / c.G;
    std::vector<bool> attended(static_cast<size_t>(pages()), false);
    std::vector<std::pair<double, int64_t>> candidates;
    double largest = 0;
    uint64_t allowed = 0, chosen = 0;
    const auto size_of = [&](int64_t page) {
      return static_cast<uint64_t>(group * c.S * (std::min((page + 1) * choice_.rows, keys) - page * choice_.rows));
    };
    for (int64_t page = 0; page * choice_.rows < keys; ++page) {
      bool is_allowed = false;
      for (int64_t q = past; q < keys; ++q) {
        for (int64_t k = page * choice_.rows; k <= q && k < (page + 1) * choice_.rows; ++k) {
          is_allowed = is_allowed || kMasks[step_.mask].is_allowed(g * group, q, k);
        }
      }
      if (!is_allowed) continue;
      allowed += size_of(page);
      if (page == 0 || page >= FirstRecentPage(choice_.rows, past)) {
        attended[static_cast<size_t>(page)] = true, chosen += size_of(page);
        continue;
      }
      double most = -std::numeric_limits<double>::infinity();
      for (int64_t row = 0; row < group * c.S; ++row) {
        double sum = 0, size = 0;
        for (int64_t d = 0; d < c.D; ++d) {
          const double x = Query(rotated, b, g * group + row / c.S, row % c.S, d) / std::sqrt(static_cast<double>(c.D));
          const double part =
              std::max(x * KeyBound(bounds, b * c.G + g, page, d), x * KeyBound(bounds, b * c.G + g, page, c.D + d));
          sum += part, size += std::abs(part);
        }
        most = std::max(most, sum), largest = std::max(largest, size);
      }
      candidates.emplace_back(-most, page);
    }
    std::sort(candidates.begin(), candidates.end());
    const auto limit = static_cast<size_t>(choice_.chosen);
    *is_clear = candidates.size() <= limit || candidates[limit].first - candidates[limit - 1].first > 2e-6 * largest;
    for (size_t i = 0; i < candidates.size() && i < limit; ++i) {
      attended[static_cast<size_t>(candidates[i].second)] = true, chosen += size_of(candidates[i].second);
    }
    counts.scored += allowed, counts.skipped += allowed - chosen;
    return attended;
  }

  void CheckHead(int64_t b, int64_t g, const Buffer& key, const Buffer& value, const Buffer& bounds,
                 const Buffer& rotated, const Buffer& output, const std::string& where) {
    const Case& c = step_.c;
    const int64_t past = c.past[static_cast<size_t>(b)], tokens = c.tokens_of(b), group = c.H / c.G;
    bool is_clear = true;
    std::vector<bool> attended(static_cast<size_t>(pages()), true);
    if (choice_.is_taken && c.S <= kMaxStepTokens) attended = ChooseOf(b, g, bounds, rotated, &is_clear);
    ++heads;
    if (!is_clear) return void(++unclear);
    Dense dense;
    dense.H = group, dense.G = 1, dense.S = tokens, dense.T = past + tokens, dense.D = dense.Dv = c.D;
    dense.scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(c.D)));
    dense.softcap = static_cast<double>(step_.softcap);
    double largest = 0;
    for (int64_t h = 0; h < group; ++h) {
      if (step_.has_sink) dense.sink.push_back(node.sink[static_cast<size_t>(g * group + h)]);
      for (int64_t i = 0; i < tokens; ++i) {
        for (int64_t d = 0; d < c.D; ++d) dense.query.push_back(Query(rotated, b, g * group + h, i, d));
        for (int64_t k = 0; k < dense.T; ++k) {
          const bool is_allowed = k <= past + i && kMasks[step_.mask].is_allowed(g * group + h, past + i, k);
          dense.allowed.push_back(is_allowed && attended[static_cast<size_t>(k / choice_.rows)] ? 1 : 0);
          if (!step_.has_bias) continue;
          const int64_t row = (b * c.H + g * group + h) * c.S + i;
          dense.bias.push_back(node.bias[static_cast<size_t>(row * step_.total + k)]);
        }
      }
    }
    for (int64_t at = 0; at < dense.T * c.D; ++at) {
      dense.key.push_back(key.Get((b * c.G + g) * c.capacity * c.D + at));
      dense.value.push_back(value.Get((b * c.G + g) * c.capacity * c.D + at));
      largest = std::max(largest, std::abs(dense.value.back()));
    }
    const Answer answer = Attend(dense);
    for (int64_t row = 0; row < group * tokens; ++row) {
      const int64_t h = g * group + row / tokens, i = row % tokens;
      const double magnitude = answer.magnitude[static_cast<size_t>(row)];
      for (int64_t d = 0; d < c.D; ++d) {
        const double got = output.Get(((b * c.S + i) * c.H + h) * c.D + d);
        const double want = answer.output[static_cast<size_t>(row * c.D + d)];
        const double tolerance =
            Tolerance(c.dtype, magnitude, dense.T, largest, want) + CudaTolerance(c.dtype, magnitude, dense.T, largest);
        CHECK(std::abs(got - want) <= tolerance, where, ": b ", b, " h ", h, " row ", i, " d ", d, ": ", got,
              ", expected ", want, " ± ", tolerance);
      }
    }
  }

  Step step_;
  Choice choice_;
  Random random_;
  Buffer before_;  // key bounds before the step, [B, G, pages, 2, D]
};

SkipCounts Counts() {
  SkipCounts counts;
  FindCudaBackend()->attention.add_skip_counts(&counts);
  return counts;
}

void RunChoosing(const Step& step, const Choice& choice, uint64_t seed, int64_t* heads, int64_t* unclear) {
  if (!IsSampled(seed)) return;
  const std::string where = Text("seed ", seed, " ", Explain(step, choice));
  ChoosingNode choosing(step, choice, seed);
  const SkipCounts before = Counts();
  choosing.Run(nullptr, where);
  const SkipCounts after = Counts();
  choosing.node.CheckCaches(where);
  choosing.Check(where);
  CHECK(after.scored - before.scored == choosing.counts.scored, where, ": ", after.scored - before.scored,
        " pairs counted, expected ", choosing.counts.scored);
  CHECK(after.skipped - before.skipped == choosing.counts.skipped, where, ": ", after.skipped - before.skipped,
        " pairs left out, expected ", choosing.counts.skipped);
  *heads += choosing.heads, *unclear += choosing.unclear;
  CountCases(1);
}

// Sizes and options of a step that chooses.
Step DrawChoosing(int64_t S, Choice* choice, Random* random) {
  Step step;
  Case& c = step.c;
  c.is_packed = true;
  c.B = random->Range(1, 2), c.S = S, c.D = random->OneIn(2) ? 64 : 128;
  c.dtype = random->OneIn(2) ? DType::kF16 : DType::kBF16;
  std::tie(c.H, c.G) = random->Pick(std::vector<std::pair<int64_t, int64_t>>{{8, 2}, {4, 4}, {6, 2}, {16, 1}, {5, 1}});
  if (S == 16) c.H = std::min<int64_t>(c.H, 8), c.G = c.H == 8 ? 2 : 1;
  c.rotary = random->OneIn(2) ? c.D : 0, c.has_norm = random->OneIn(4), c.is_interleaved = random->OneIn(3);
  const int64_t most = c.rotary > 0 ? kRotaryRows - S - 20 : 2500;
  c.past.clear();
  for (int64_t b = 0; b < c.B; ++b) c.past.push_back(random->Range(b == 0 ? most / 2 : 1, most));
  step.total = *std::max_element(c.past.begin(), c.past.end()) + S + random->Range(0, 20);
  c.is_shared = !random->OneIn(3), c.has_past = true;
  c.capacity = c.is_shared ? step.total + random->Range(0, 200) : step.total;
  step.mask = random->Pick(std::vector<int>{0, 0, 2});
  step.softcap = random->OneIn(5) ? 5.0f : 0.0f;
  step.has_sink = random->OneIn(4), step.has_bias = random->OneIn(5);
  c.free_rows = S + 127;
  choice->rows = random->Pick(std::vector<int64_t>{16, 32, 64, 128});
  choice->chosen = random->Range(1, std::max<int64_t>(1, (step.total - 1) / choice->rows - 5));
  choice->is_known = !random->OneIn(4), choice->is_shared = !random->OneIn(4);
  return step;
}

bool IsChosen(const Step& step, const Choice& choice) {
  return choice.chosen + 4 < (step.total + choice.rows - 1) / choice.rows;
}

TEST(CudaChoosePagesEqualsTheDefinition) {
  Random random(60);
  uint64_t seed = 0;
  int64_t heads = 0, unclear = 0;
  for (const int64_t S : {1, 1, 2, 5, 16}) {
    for (int i = 0; i < Cases(24); ++i) {
      Choice choice;
      const Step step = DrawChoosing(S, &choice, &random);
      choice.is_taken = IsChosen(step, choice);
      RunChoosing(step, choice, seed++, &heads, &unclear);
    }
  }
  CHECK(unclear * 20 <= heads, "rounding decides ", unclear, " of ", heads, " choices");
}

// Steps and sizes of which all pages are attended: their key bounds are right.
TEST(CudaChoosePagesKeepsKeyBoundsWhereAllIsAttended) {
  Random random(61);
  uint64_t seed = 0;
  int64_t heads = 0, unclear = 0;
  for (const int64_t S : {1, 16, 17, 70, 300}) {
    for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
      for (const int64_t D : {64, 96, 36}) {
        if (D == 36 && dtype != DType::kF32) continue;
        if (S <= 16 && dtype != DType::kF32 && D == 64) continue;
        for (const bool is_known : {true, false}) {
          Choice choice;
          Step step = DrawChoosing(S, &choice, &random);
          Case& c = step.c;
          c.D = D, c.dtype = dtype, c.rotary = std::min<int64_t>(c.rotary, 32);
          if (S > 16) c.H = 4, c.G = 2;
          choice.is_taken = false, choice.is_known = is_known;
          RunChoosing(step, choice, seed++, &heads, &unclear);
        }
      }
    }
  }
  // A first prompt, whose sequences have different lengths.
  for (const int64_t S : {40, 200}) {
    Choice choice;
    Step step;
    Case& c = step.c;
    c.is_packed = true;
    c.B = 2, c.S = S, c.D = 64, c.dtype = DType::kF16, c.past = {0, 0}, c.tokens = {S, 7}, c.has_past = true;
    step.total = S, c.capacity = 400, c.free_rows = S + 127;
    choice.is_taken = false, choice.is_known = S == 40;
    RunChoosing(step, choice, seed++, &heads, &unclear);
  }
}

// Lengths that grow and fall over one cache and its key bounds: what lies behind a length is never read.
void RunSteps(Step step, const Choice& choice, bool is_captured, const std::string& name) {
  Case& c = step.c;
  c.is_packed = true;
  c.B = 2, c.H = 8, c.G = 2, c.free_rows = 128;
  c.past = {700, 500};  // rows behind them hold NaN
  step.total = c.capacity = 760;
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ChoosingNode choosing(step, choice, 11, size_t{64} << 20);
  choosing.Run(stream, name);
  choosing.Check(name);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  if (is_captured) {
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    const Status status = choosing.node.Queue(stream);
    CHECK(status.ok(), name, ": ", status.message());
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  }
  for (int i = 0; i < 40; ++i) {
    // One sequence is rewound in the middle, the other one in every step but one.
    choosing.Advance({i < 20 ? 701 + i : 300 + i * c.S, i % 2 == 0 ? 400 : 127});
    const std::string where = Text(name, " step ", i);
    if (is_captured) {
      CHECK_CUDA(cudaGraphLaunch(executable, stream));
      CHECK_CUDA(cudaStreamSynchronize(stream));
    } else {
      choosing.Run(stream, where);
    }
    choosing.Check(where);
    CountCases(1);
  }
  CHECK(choosing.unclear * 20 <= choosing.heads, name, ": rounding decides ", choosing.unclear, " choices");
  if (is_captured) {
    CHECK_CUDA(cudaGraphExecDestroy(executable));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  CHECK_CUDA(cudaStreamDestroy(stream));
}

TEST(CudaChoosePagesRewinds) {
  for (const bool is_captured : {false, true}) {
    for (const int64_t S : {1, 3}) {
      for (const int64_t rows : {16, 64}) {
        Step step;
        step.c.D = 128, step.c.dtype = DType::kF16, step.c.S = S, step.c.rotary = 64;
        Choice choice;
        choice.rows = rows, choice.chosen = 3;
        RunSteps(step, choice, is_captured, Text("captured ", is_captured, " S ", S, " rows ", rows));
      }
    }
  }
}

// Every output of a sequence of illegal length is NaN, and the others are right.
TEST(CudaChoosePagesMarksIllegalLengths) {
  uint64_t seed = 0;
  for (const int64_t S : {1, 3}) {
    for (const bool is_shared : {true, false}) {
      for (const int32_t seqlen :
           {std::numeric_limits<int32_t>::min(), -1, 1200, std::numeric_limits<int32_t>::max()}) {
        Step step;
        Case& c = step.c;
        c.is_packed = true;
        c.B = 3, c.S = S, c.H = 4, c.G = 2, c.D = 64, c.dtype = DType::kF16, c.past = {900, 70, 500};
        c.capacity = step.total = 1000, c.free_rows = S + 127;
        Choice choice;
        choice.is_shared = is_shared;
        const std::string where = Text("seqlen ", seqlen, " ", Explain(step, choice));
        ChoosingNode choosing(step, choice, seed++);
        choosing.node.run.seqlens[1] = seqlen, choosing.node.SetLengths();
        choosing.Run(nullptr, where);
        choosing.Check(where, 1);
        choosing.node.CheckUnchanged(where, 1);
        CountCases(1);
      }
    }
  }
}

}  // namespace
}  // namespace stof::test::cached_attention
