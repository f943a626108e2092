// SPDX-License-Identifier: Apache-2.0
// A decoder's step on the CPU: append to the KV cache, then attention over it, against double precision. Sequences have
// lengths of their own, and rows of the cache that are not valid hold NaN.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/cached_attention/append.h"
#include "cpu/kernel_table.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/host/thread_pool.h"
#include "plugins/core/mask/cached_mask.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test::cached_attention {
namespace {

// Masks in absolute positions, and what they allow. P is the past of a sequence.
struct MaskCase {
  const char* text;
  bool (*allows)(int64_t h, int64_t q, int64_t k, int64_t past);
};
constexpr MaskCase kMasks[] = {
    {"k <= q", [](int64_t, int64_t q, int64_t k, int64_t) { return k <= q; }},
    {"k <= q and q - k < 20", [](int64_t, int64_t q, int64_t k, int64_t) { return k <= q && q - k < 20; }},
    {"k <= q and q - k < 300", [](int64_t, int64_t q, int64_t k, int64_t) { return k <= q && q - k < 300; }},
    {"k <= q and (k < 4 or q - k < 33)",
     [](int64_t, int64_t q, int64_t k, int64_t) { return k <= q && (k < 4 || q - k < 33); }},
    {"k <= q and (k // 8 + h) % 3 == 0",
     [](int64_t h, int64_t q, int64_t k, int64_t) { return k <= q && (k / 8 + h) % 3 == 0; }},
    {"k <= q and k % 5 != 2", [](int64_t, int64_t q, int64_t k, int64_t) { return k <= q && k % 5 != 2; }},
    {"k <= q and k >= P - 30", [](int64_t, int64_t q, int64_t k, int64_t past) { return k <= q && k >= past - 30; }},
    {"k <= q and (q // 128 - k // 128 < 2 or k // 128 % 4 == 0)",
     [](int64_t, int64_t q, int64_t k, int64_t) { return k <= q && (q / 128 - k / 128 < 2 || k / 128 % 4 == 0); }},
    {"k + 100 < q", [](int64_t, int64_t q, int64_t k, int64_t) { return k + 100 < q; }},  // fully masked rows
};

struct Case {
  int64_t B = 2, H = 4, G = 2, S = 1, D = 16;
  DType dtype = DType::kF32;
  std::vector<int64_t> past;
  std::vector<int64_t> tokens;  // of a padded first prompt; empty: S
  int64_t spare = 0;            // rows of the cache that are not needed
  bool is_shared = true, has_sink = false, has_bias = false, is_rotated = true;
  int mask = 0;
  int64_t window = 0, capacity = 0;  // of a sliding-window cache
  float softcap = 0;
  EmptyRows empty_rows = EmptyRows::kZero;

  int64_t tokens_of(int64_t b) const { return tokens.empty() ? S : tokens[static_cast<size_t>(b)]; }
  int64_t total_of(int64_t b) const { return past[static_cast<size_t>(b)] + tokens_of(b); }
  int64_t most() const {
    int64_t most = 0;
    for (int64_t b = 0; b < B; ++b) most = std::max(most, total_of(b));
    return most;
  }
};

std::string Describe(const Case& c) {
  std::string lengths;
  for (int64_t b = 0; b < c.B; ++b) {
    lengths += std::to_string(c.past[static_cast<size_t>(b)]) + "+" + std::to_string(c.tokens_of(b)) + " ";
  }
  return Text("B ", c.B, " H ", c.H, " G ", c.G, " S ", c.S, " D ", c.D, " dtype ", static_cast<int>(c.dtype),
              " lengths ", lengths, c.tokens.empty() ? "" : "first prompt", " spare ", c.spare, " shared ", c.is_shared,
              " sink ", c.has_sink, " bias ", c.has_bias, " rotated ", c.is_rotated, " mask ", kMasks[c.mask].text,
              " window ", c.window, " softcap ", c.softcap, " empty rows ", static_cast<int>(c.empty_rows));
}

using Bytes = std::vector<char>;

Bytes Drawn(DType dtype, int64_t count, double spread, Random* random) {
  const int64_t item = SizeOfFloat(dtype);
  Bytes bytes(static_cast<size_t>(count * item));
  for (int64_t i = 0; i < count; ++i)
    StoreFloat(dtype, spread * static_cast<double>(random->Unit()), &bytes[static_cast<size_t>(i * item)]);
  return bytes;
}

std::vector<double> Loaded(DType dtype, const Bytes& bytes, int64_t first, int64_t count) {
  const int64_t item = SizeOfFloat(dtype);
  std::vector<double> values;
  for (int64_t i = first; i < first + count; ++i)
    values.push_back(LoadFloat(dtype, &bytes[static_cast<size_t>(i * item)]));
  return values;
}

// One step: its buffers, its arguments, and what attention gives in double precision.
class Step {
 public:
  Step(const Case& c, CpuIsa isa, uint64_t seed) : c_(c), isa_(isa), random_(seed), item_(SizeOfFloat(c.dtype)) {
    rows_ = c.window > 0 ? c.capacity : c.most() + c.spare;
    const int64_t N = c.H + 2 * c.G;
    tokens_ = Drawn(c.dtype, c.B * c.S * N * c.D, 2, &random_);
    key_ = value_ = Bytes(static_cast<size_t>(c.B * c.G * rows_ * c.D * item_), static_cast<char>(0xff));
    for (int64_t b = 0; b < c.B; ++b) {
      const int64_t held = c.window > 0 ? Held(c.past[static_cast<size_t>(b)]) : c.past[static_cast<size_t>(b)];
      seqlens_.push_back(static_cast<int32_t>(c.total_of(b) - 1));
      for (int64_t g = 0; g < c.G; ++g) {
        const size_t at = static_cast<size_t>((b * c.G + g) * rows_ * c.D * item_);
        const Bytes key = Drawn(c.dtype, held * c.D, 2, &random_), value = Drawn(c.dtype, held * c.D, 2, &random_);
        std::copy(key.begin(), key.end(), key_.begin() + static_cast<std::ptrdiff_t>(at));
        std::copy(value.begin(), value.end(), value_.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
    cos_ = Drawn(c.dtype, 4096 * c.D / 2, 1, &random_);
    sin_ = Drawn(c.dtype, 4096 * c.D / 2, 1, &random_);
    rotated_ = Bytes(static_cast<size_t>(c.B * c.H * c.S * c.D * item_), static_cast<char>(0xff));
    first_rows_.resize(static_cast<size_t>(c.B));
    output_ = Bytes(static_cast<size_t>(c.B * c.S * c.H * c.D * item_), static_cast<char>(0xff));
    sink_ = Drawn(c.dtype, c.H, 3, &random_);
  }

  void Append() {
    CacheAppendArgs args;
    args.B = c_.B, args.H = c_.H, args.G = c_.G, args.S = c_.S, args.D = c_.D, args.dtype = c_.dtype;
    const int64_t N = c_.H + 2 * c_.G;
    args.query_stride = args.key_stride = args.value_stride = {c_.S * N * c_.D, c_.D, N * c_.D};
    args.query = tokens_.data();
    args.key = tokens_.data() + c_.H * c_.D * item_;
    args.value = tokens_.data() + (c_.H + c_.G) * c_.D * item_;
    const Bytes past_key = key_, past_value = value_;
    if (!c_.is_shared) {
      std::fill(key_.begin(), key_.end(), static_cast<char>(0xff));
      std::fill(value_.begin(), value_.end(), static_cast<char>(0xff));
    }
    args.past_key = c_.is_shared ? key_.data() : past_key.data();
    args.past_value = c_.is_shared ? value_.data() : past_value.data();
    args.present_key = key_.data(), args.present_value = value_.data();
    args.past_capacity = args.capacity = rows_;
    args.seqlens = seqlens_.data();
    args.is_first_prompt = !c_.tokens.empty();
    args.sliding_window = c_.window;
    if (c_.is_rotated) {
      args.transform.cos = cos_.data(), args.transform.sin = sin_.data(), args.transform.rotary_rows = 4096,
      args.transform.rotary_size = c_.D / 2 * 2;
      args.rotated_query = rotated_.data();
    }
    args.first_row = first_rows_.data();
    staged_ = CpuCacheStagingRows(args);
    if (staged_ > 0) {
      staging_key_ = staging_value_ =
          Bytes(static_cast<size_t>(c_.B * c_.G * staged_ * c_.D * item_), static_cast<char>(0xff));
      args.staging_key = staging_key_.data(), args.staging_value = staging_value_.data();
      args.staging_capacity = staged_;
    }
    const Status status = cpu::AppendToCache(args, isa_, Parallel{});
    CHECK(status.ok(), Describe(c_), ": ", status.message());
  }

  void Attend(const Parallel& team, const std::string& where) {
    AttentionArgs args;
    args.shape = {c_.B, c_.H, c_.G, c_.S, 0, c_.D, c_.D, c_.dtype};
    args.scores.scale = 1.0f / std::sqrt(static_cast<float>(c_.D));
    args.scores.softcap = c_.softcap;
    args.mask.empty_rows = c_.empty_rows;
    const int64_t N = c_.H + 2 * c_.G, rows = staged_ > 0 ? staged_ : rows_;
    args.query.data = c_.is_rotated ? rotated_.data() : tokens_.data();
    args.query.stride =
        c_.is_rotated ? Strides{c_.H * c_.S * c_.D, c_.S * c_.D, c_.D} : Strides{c_.S * N * c_.D, c_.D, N * c_.D};
    args.key.data = staged_ > 0 ? staging_key_.data() : key_.data();
    args.value.data = staged_ > 0 ? staging_value_.data() : value_.data();
    args.key.stride = args.value.stride = {c_.G * rows * c_.D, rows * c_.D, c_.D};
    args.output.stride = {c_.S * c_.H * c_.D, c_.D, c_.H * c_.D};
    std::vector<int32_t> counts;
    for (int64_t b = 0; b < c_.B; ++b) {
      counts.push_back(static_cast<int32_t>(first_rows_[static_cast<size_t>(b)] + c_.tokens_of(b)));
      args.shape.T = std::max<int64_t>(args.shape.T, counts.back());
    }
    args.kv.key_ends = counts.data();
    if (c_.has_sink) args.scores.sink.data = sink_.data(), args.scores.sink.dtype = c_.dtype;
    const Bytes bias = c_.has_bias ? Drawn(c_.dtype, c_.H * c_.S * args.shape.T, 2, &random_) : Bytes();
    if (c_.has_bias) {
      args.scores.bias.data = bias.data(), args.scores.bias.dtype = c_.dtype;
      args.scores.bias.stride_h = c_.S * args.shape.T, args.scores.bias.stride_q = args.shape.T,
      args.scores.bias.stride_k = 1;
    }
    MaskExpr expr;
    Status status = MaskExpr::Parse(kMasks[c_.mask].text, {}, &expr);
    CHECK(status.ok(), status.message());
    const ExprSizes sizes = {c_.B, c_.H, c_.S, args.shape.T, 0};
    const Answer answer = stof::test::Attend(Reference(args, counts, bias));
    Bytes first;
    for (const Parallel& parallel : {Parallel{}, team}) {
      std::unique_ptr<BoundCachedMask> mask;
      status = BoundCachedMask::Make(expr, sizes, first_rows_.data(), counts.data(), &mask);
      CHECK(status.ok(), where, ": ", status.message());
      args.mask.fixed = StaticMask::OfElements(mask->view());
      CpuAttentionConfig config = ChooseCpuAttention(args, 3);
      config.isa = isa_;
      Memory memory;
      void* workspace = Memory::Allocate(&memory, CpuAttentionWorkspace(args, config, parallel.threads) + 64);
      std::fill(output_.begin(), output_.end(), static_cast<char>(0xff));
      args.output.data = output_.data();
      status = CpuAttention(args, config, workspace, parallel);
      CHECK(status.ok() && mask->status().ok(), where, ": ", status.message());
      if (first.empty()) first = output_;
      CHECK(first == output_, where, ": 3 threads give other bits than 1");
      Compare(args, answer, where);
    }
    CountCases(1);
  }

 private:
  // Rows of a sliding-window cache that n tokens leave, one by one.
  int64_t Held(int64_t n) const {
    int64_t held = 0;
    for (int64_t i = 0; i < n; ++i) held = held == c_.capacity ? c_.window : held + 1;
    return held;
  }

  Dense Reference(const AttentionArgs& args, const std::vector<int32_t>& counts, const Bytes& bias) const {
    Dense dense;
    dense.B = c_.B, dense.H = c_.H, dense.G = c_.G, dense.S = c_.S, dense.T = args.shape.T, dense.D = dense.Dv = c_.D;
    dense.scale = static_cast<double>(args.scores.scale), dense.softcap = static_cast<double>(c_.softcap);
    dense.empty_rows = c_.empty_rows;
    if (c_.has_sink) dense.sink = Loaded(c_.dtype, sink_, 0, c_.H);
    const auto element = [&](const void* base, const Strides& stride, int64_t b, int64_t head, int64_t s, int64_t d) {
      return LoadFloat(c_.dtype,
                       static_cast<const char*>(base) + item_ * (b * stride.b + head * stride.h + s * stride.s + d));
    };
    const std::vector<double> biases = Loaded(c_.dtype, bias, 0, static_cast<int64_t>(bias.size()) / item_);
    for (int64_t b = 0; b < c_.B; ++b) {
      const int64_t count = counts[static_cast<size_t>(b)], past = first_rows_[static_cast<size_t>(b)];
      for (int64_t g = 0; g < c_.G; ++g) {
        for (int64_t k = 0; k < args.shape.T; ++k) {
          for (int64_t d = 0; d < c_.D; ++d) {
            dense.key.push_back(k < count ? element(args.key.data, args.key.stride, b, g, k, d) : 0);
            dense.value.push_back(k < count ? element(args.value.data, args.value.stride, b, g, k, d) : 0);
          }
        }
      }
      for (int64_t h = 0; h < c_.H; ++h) {
        for (int64_t i = 0; i < c_.S; ++i) {
          for (int64_t d = 0; d < c_.D; ++d)
            dense.query.push_back(element(args.query.data, args.query.stride, b, h, i, d));
          for (int64_t k = 0; k < args.shape.T; ++k) {
            dense.allowed.push_back(k < count && kMasks[c_.mask].allows(h, past + i, k, past));
            if (c_.has_bias) dense.bias.push_back(biases[static_cast<size_t>((h * c_.S + i) * args.shape.T + k)]);
          }
        }
      }
    }
    return dense;
  }

  void Compare(const AttentionArgs& args, const Answer& answer, const std::string& where) const {
    for (int64_t b = 0; b < c_.B; ++b) {
      for (int64_t h = 0; h < c_.H; ++h) {
        for (int64_t i = 0; i < c_.S; ++i) {
          const int64_t row = (b * c_.H + h) * c_.S + i;
          for (int64_t d = 0; d < c_.D; ++d) {
            const double want = answer.output[static_cast<size_t>(row * c_.D + d)];
            const double got =
                LoadFloat(c_.dtype, &output_[static_cast<size_t>((((b * c_.S + i) * c_.H + h) * c_.D + d) * item_)]);
            if (std::isnan(want) && std::isnan(got)) continue;
            const double magnitude = answer.magnitude[static_cast<size_t>(row)];
            double most = Tolerance(c_.dtype, magnitude, args.shape.T, 2, want);
            if (args.allow_bf16) most += CudaTolerance(DType::kBF16, magnitude, args.shape.T, 2);
            CHECK(std::abs(got - want) <= most, where, " b ", b, " h ", h, " query ", i, " element ", d, ": ", got,
                  ", expected ", want);
          }
        }
      }
    }
  }

  const Case& c_;
  CpuIsa isa_;
  Random random_;
  int64_t item_, rows_ = 0, staged_ = 0;
  Bytes tokens_, key_, value_, staging_key_, staging_value_, cos_, sin_, rotated_, output_, sink_;
  std::vector<int32_t> seqlens_, first_rows_;
};

void RunCase(const Case& c, CpuIsa isa, const Parallel& team, uint64_t seed) {
  Step step(c, isa, seed);
  step.Append();
  step.Attend(team, Text(CpuIsaName(isa), " seed ", seed, " ", Describe(c)));
}

// Heads and groups: group sizes 1, 4, 7 and 32.
const std::vector<std::pair<int64_t, int64_t>> kHeads = {{2, 2}, {4, 1}, {8, 2}, {7, 1}, {14, 2}, {32, 1}};

std::vector<Case> DrawnCases(int count) {
  Random random(41);
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) {
    Case c;
    c.B = random.Pick(std::vector<int64_t>{1, 2, 3});
    std::tie(c.H, c.G) = random.Pick(kHeads);
    c.S = random.Pick(std::vector<int64_t>{1, 1, 1, 2, 3, 4, 5, 16, 17, 40, 97});
    c.D = random.Pick(std::vector<int64_t>{1, 8, 20, 64, 80, 128, 256});
    c.dtype = random.Pick(std::vector<DType>{DType::kF32, DType::kF16, DType::kBF16});
    c.is_shared = random.OneIn(2);
    c.spare = random.Pick(std::vector<int64_t>{0, 1, 77});
    const bool first_prompt = random.OneIn(5);
    for (int64_t b = 0; b < c.B; ++b) {
      c.past.push_back(first_prompt ? 0 : random.Pick(std::vector<int64_t>{0, 1, 62, 63, 64, 65, 127, 300, 517, 900}));
      if (first_prompt) c.tokens.push_back(random.Range(1, c.S));
    }
    c.mask = static_cast<int>(random.Range(0, static_cast<int64_t>(std::size(kMasks)) - 1));
    c.has_sink = random.OneIn(4);
    c.has_bias = random.OneIn(6);
    c.is_rotated = c.D > 1 && !random.OneIn(4);
    if (random.OneIn(5)) c.softcap = 3;
    // The reference takes all T keys for those of a fully masked row, and sequences have fewer.
    std::vector<EmptyRows> policies = {EmptyRows::kZero, EmptyRows::kNan};
    if (c.B == 1) policies.insert(policies.end(), {EmptyRows::kMean, EmptyRows::kAll});
    if (!c.has_sink) c.empty_rows = random.Pick(policies);
    cases.push_back(c);
  }
  return cases;
}

std::vector<Case> ListedCases() {
  std::vector<Case> cases;
  // Every length of a step with every past that the contract names, and lengths at the edges of tiles.
  for (const int64_t rows : {1, 3, 16, 300}) {
    for (const int64_t past : {0, 1, 517}) {
      for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
        for (const int mask : {0, 2}) {
          Case c;
          c.S = rows, c.past = std::vector<int64_t>{past, past / 2}, c.dtype = dtype, c.mask = mask, c.spare = 5,
          c.D = 32;
          cases.push_back(c);
        }
      }
    }
  }
  // Many splits, of sequences of very different length; a window at the end of a long one.
  for (const int64_t rows : {1, 2, 9}) {
    for (const auto& [heads, groups] : kHeads) {
      for (const int mask : {0, 2, 3, 7}) {
        Case c;
        c.S = rows, c.B = 3, c.H = heads, c.G = groups, c.past = std::vector<int64_t>{3000, 10, 1500}, c.mask = mask,
        c.D = 24;
        cases.push_back(c);
      }
    }
  }
  // Sliding-window caches: steps before and after their rows move, and steps that need rows which they drop.
  for (const int64_t rows : {1, 5, 16, 70}) {
    for (const int64_t past : {0, 30, 63, 64, 65, 79, 80, 200, 211}) {
      for (const int64_t capacity : {64, 80}) {
        Case c;
        c.window = 64, c.capacity = capacity, c.S = rows, c.past = std::vector<int64_t>{past, past}, c.mask = 1,
        c.D = 8;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

void RunTable(CpuIsa isa) {
  ThreadPool pool(3);
  std::vector<Case> cases = ListedCases();
  const std::vector<Case> drawn = DrawnCases(Cases(250));
  cases.insert(cases.end(), drawn.begin(), drawn.end());
  const size_t step = Effort() < 0.1 ? 5 : 1;
  for (size_t i = 0; i < cases.size(); i += step) RunCase(cases[i], isa, pool.view(), i);
}

// The runs of a mask are its tiles, whatever the range; and few boxes are asked for them where the mask is a window.
TEST(CacheMaskListsItsTiles) {
  Random random(5);
  for (int i = 0; i < Cases(300); ++i) {
    const MaskCase& mask = kMasks[static_cast<size_t>(random.Range(0, static_cast<int64_t>(std::size(kMasks)) - 1))];
    MaskExpr expr;
    CHECK(MaskExpr::Parse(mask.text, {}, &expr).ok());
    const int64_t S = random.Range(1, 200), T = random.Range(1, 900);
    const std::vector<int32_t> first = {static_cast<int32_t>(random.Range(0, 700)), 0};
    const std::vector<int32_t> count = {static_cast<int32_t>(random.Range(0, T)), static_cast<int32_t>(T)};
    std::unique_ptr<BoundCachedMask> bound;
    const Status status = BoundCachedMask::Make(expr, {2, 3, S, T, 0}, first.data(), count.data(), &bound);
    CHECK(status.ok(), status.message());
    const DynamicMask& view = *bound->view();
    const int m = static_cast<int>(random.Range(1, 50)), n = 32 * static_cast<int>(random.Range(1, 3));
    const int64_t row0 = random.Range(0, S - 1), b = random.Range(0, 1), h = random.Range(0, 2);
    const int64_t tiles = (T + n - 1) / n, from = random.Range(0, tiles), to = random.Range(from, tiles);
    std::vector<KeyTileRun> runs(static_cast<size_t>(tiles + 1));
    const int64_t found = view.runs(view.self, b, h, row0, m, n, from, to, runs.data());
    std::vector<int> listed(static_cast<size_t>(tiles), 0);
    for (int64_t r = 0; r < found; ++r) {
      const KeyTileRun& run = runs[static_cast<size_t>(r)];
      CHECK(run.first >= from && run.first < run.last && run.last <= to);
      for (int32_t tile = run.first; tile < run.last; ++tile) listed[static_cast<size_t>(tile)] = run.is_full ? 2 : 1;
    }
    for (int64_t tile = from; tile < to; ++tile) {
      int64_t ones = 0, pairs = 0;
      for (int64_t q = row0; q < std::min(S, row0 + m); ++q) {
        for (int64_t k = tile * n; k < std::min((tile + 1) * n, int64_t{count[static_cast<size_t>(b)]}); ++k) {
          ++pairs;
          ones += mask.allows(h, first[static_cast<size_t>(b)] + q, k, first[static_cast<size_t>(b)]);
        }
      }
      const int kind = listed[static_cast<size_t>(tile)];
      CHECK(kind == 0 ? ones == 0 : kind == 2 ? ones == pairs : true, mask.text, " tile ", tile, ": ", kind);
      CHECK(ones == 0 || kind != 0, mask.text, " tile ", tile);
    }
    CountCases(1);
  }
}

TEST(CacheAttentionRefusesIllegalCounts) {
  for (const int32_t illegal : {-1, 7}) {
    AttentionArgs args;
    args.shape = {2, 1, 1, 1, 6, 8, 8};
    const std::vector<int32_t> ends = {6, illegal};
    args.kv.key_ends = ends.data();
    const Status status = CpuAttention(args, ChooseCpuAttention(args, 1), nullptr, Parallel{});
    CHECK(!status.ok() && status.message().find("sequence 1 has " + std::to_string(illegal)) != std::string::npos,
          status.message());
    CountCases(1);
  }
}

// Registers the tests of each instruction set of this machine.
const bool registered = [] {
#define STOF_TESTS(id, name, is_supported) \
  {{"CacheAttentionEqualsTheDefinition[" #name "]", [] { RunTable(CpuIsa::id); }}},
  static constexpr Test kRows[][1] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  return RegisterByIsa(&cpu::KernelTable::attention, kRows);
}();

}  // namespace
}  // namespace stof::test::cached_attention
