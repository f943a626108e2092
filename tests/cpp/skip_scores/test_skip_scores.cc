// SPDX-License-Identifier: Apache-2.0
// Skip by score on the CPU: the kernels of every instruction set of this machine leave out the tiles that the
// definition leaves out, count them, and keep the bound of the mass; packed sequences and pages like separate calls.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "plugins/core/host/skip_scores.h"
#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/attention/relative_problem.h"
#include "tests/cpp/skip_scores/skip_reference.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test::attention {
namespace {

constexpr int64_t kLevelKeys = 32;

struct SkipCase {
  RelativeCase drawn;
  float threshold = 1;
  // Blocks of kLevelKeys keys have scores of about -levels to levels, another one in each block and KV head.
  double levels = 12;
  bool is_ragged = false;  // sequences end before T
};

std::string Describe(const SkipCase& c) {
  return Text(Describe(c.drawn), " threshold ", c.threshold, " levels ", c.levels, c.is_ragged ? " ragged" : "");
}

// What all cases of a test counted.
struct Totals {
  uint64_t scored = 0, skipped = 0, uncertain = 0;
};

// Element 0 of queries is 4, and that of keys makes the level of their block.
void SetLevels(const SkipCase& skip, Random* random, Dense* dense) {
  const Case& c = skip.drawn.base;
  if (skip.levels == 0 || c.scores != Scores::kDrawn) return;
  for (size_t i = 0; i < dense->query.size(); i += static_cast<size_t>(c.D)) dense->query[i] = 4;
  double level = 0;
  for (int64_t key = 0; key < c.B * c.G * c.T; ++key) {
    if (key % c.T % kLevelKeys == 0) level = skip.levels * static_cast<double>(random->Unit());
    dense->key[static_cast<size_t>(key * c.D)] = Rounded(c.dtype, level / 4 / dense->scale);
  }
}

std::vector<int32_t> DrawEnds(const SkipCase& skip, Random* random, Dense* dense) {
  const Case& c = skip.drawn.base;
  std::vector<int32_t> ends;
  for (int64_t b = 0; skip.is_ragged && b < c.B; ++b) {
    ends.push_back(static_cast<int32_t>(b == 1 ? random->Range(0, 40) : random->Range(c.T / 2, c.T)));
    for (int64_t row = b * c.H * c.S; row < (b + 1) * c.H * c.S; ++row) {
      std::fill(dense->allowed.begin() + static_cast<std::ptrdiff_t>(row * c.T + ends.back()),
                dense->allowed.begin() + static_cast<std::ptrdiff_t>((row + 1) * c.T), uint8_t{0});
    }
  }
  return ends;
}

// Of what a row keeps, at most `threshold` times is left out.
void CheckMass(const SkipCase& skip, const Answer& all, const Lse& lse, const std::string& where) {
  const Case& c = skip.drawn.base;
  for (int64_t row = 0; row < c.B * c.H * c.S; ++row) {
    const auto at = row / c.S / c.H * lse.stride_b + row / c.S % c.H * lse.stride_h + row % c.S;
    const double exact = all.lse[static_cast<size_t>(row)];
    if (!std::isfinite(exact)) continue;
    const double left = std::exp(exact - static_cast<double>(lse.values[static_cast<size_t>(at)])) - 1;
    const double tolerance = 4 * LseTolerance(all.magnitude[static_cast<size_t>(row)], c.T, exact);
    CHECK(left <= (static_cast<double>(skip.threshold) + tolerance) * (1 + tolerance), where, ": row ", row,
          " leaves out ", left, " of what it keeps");
  }
}

void RunCase(const SkipCase& skip, CpuIsa isa, uint64_t seed, const Parallel& team, Totals* totals) {
  const Case& c = skip.drawn.base;
  const std::string where = Text("seed ", seed, " ", Describe(skip));
  Random random(seed);
  const MaskData data = DrawMask(c, &random);
  BiasTensor bias = DrawBias(c, &random);
  const FactoredBias factored = DrawFactored(skip.drawn, &random, &bias.dense);
  Dense dense = DrawDense(c, data, bias, &random);
  SetLevels(skip, &random, &dense);
  const std::vector<int32_t> ends = DrawEnds(skip, &random, &dense);
  if (c.sink) dense.sink = DrawSink(c, &random);
  std::vector<char> sink(static_cast<size_t>(c.H * SizeOfFloat(c.dtype)));
  for (size_t h = 0; h < dense.sink.size(); ++h) {
    StoreFloat(c.dtype, dense.sink[h], &sink[h * static_cast<size_t>(SizeOfFloat(c.dtype))]);
  }
  Strided query(c, 0, c.H, c.S, c.D), key(c, 1, c.G, c.T, c.D), value(c, 2, c.G, c.T, c.Dv);
  Strided output(c, 3, c.H, c.S, c.Dv);
  query.Fill(dense.query), key.Fill(dense.key), value.Fill(dense.value);
  AttentionArgs args = MakeArgs(c, query, key, value, output);
  const BoundTables tables(skip.drawn, &random, &dense, &args);
  args.scores.skip_threshold = skip.threshold;
  if (skip.is_ragged) args.kv.key_ends = ends.data();
  if (c.pad != Pad::kNone && c.mask != 12) args.mask.pad = data.pad.data();
  if (c.bias != Bias::kNone) {
    args.scores.bias = {bias.bytes.data(), bias.dtype, bias.stride[0], bias.stride[1], bias.stride[2], bias.stride[3]};
  }
  if (c.relative > 0) {
    args.scores.relative_bias = {factored.table.data(), c.relative, c.relative_shared ? 0 : c.relative,
                                 c.offset ? c.T - c.S : 0};
  }
  if (c.sink) args.scores.sink = {sink.data(), c.dtype};
  CpuAttentionConfig config = ChooseCpuAttention(args, team.threads);
  config.isa = isa;
  if (c.m > 0) config.m = c.m;
  if (c.n > 0) config.n = c.n;
  BoundMask bound;
  BindMask(c, data, config, &bound, &args);
  const Answer all = Attend(dense);
  const SkipChoice choice = ChooseTiles(dense, args, config, team.threads);
  dense.allowed = choice.kept;
  Answer answer = Attend(dense);
  // Sums of scores start at minus the row max, which is as far from a score as levels are apart.
  for (double& magnitude : answer.magnitude) magnitude += 2 * skip.levels;
  std::vector<char> first;
  Lse lse(c);
  for (const int threads : {1, 3}) {
    output.Reset();
    lse.Reset();
    args.output.lse = lse.values.data();
    args.output.lse_stride_b = lse.stride_b, args.output.lse_stride_h = lse.stride_h;
    const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, threads), threads == 1 ? 0xff : 0x3f);
    ResetSkipCounts();
    const Status status = CpuAttention(args, config, workspace.get(), threads == 1 ? Parallel{} : team);
    const SkipCounts counts = ReadSkipCounts();
    CHECK(status.ok(), where, ": ", status.message());
    CHECK(counts.scored == choice.scored, where, ": scored ", counts.scored, ", expected ", choice.scored);
    CHECK(counts.skipped >= choice.skipped && counts.skipped <= choice.skipped + choice.uncertain, where, ": skipped ",
          counts.skipped, ", expected ", choice.skipped, " to ", choice.skipped + choice.uncertain);
    if (threads == 1) first = output.bytes;
    CHECK(first == output.bytes, where, ": 3 threads give other bits than 1");
    if (threads == 1) ExceptRows(choice.is_uncertain, c, &output, lse, &answer);
    Compare(c, dense, answer, &output, Text(where, " threads ", threads));
    lse.Compare(c, answer, Text(where, " threads ", threads));
    CheckMass(skip, all, lse, where);
  }
  totals->scored += choice.scored, totals->skipped += choice.skipped;
  if (c.poison != Poison::kOneKey) totals->uncertain += choice.uncertain;
}

std::vector<SkipCase> DrawnSkipCases(int count) {
  Random random(56);
  Deck<int64_t> rows({1, 1, 2, 3, 5, 6, 8, 16, 16, 24, 65, 97, 130}, &random);
  Deck<int64_t> keys({300, 511, 700, 1100}, &random);
  Deck<int64_t> sizes({64, 64, 80, 128, 192, 256}, &random);
  Deck<DType> dtypes({DType::kF32, DType::kF32, DType::kF16, DType::kBF16}, &random);
  Deck<int> masks({0, 0, 0, 1, 1, 3, 5, 6, 7, 8, 9, 10, 11, 13, 14}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kNone, Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kAll, Pad::kRandom}, &random);
  Deck<Bias> biases({Bias::kNone, Bias::kNone, Bias::kNone, Bias::kNone, Bias::kPlain, Bias::kLowest, Bias::kForbids,
                     Bias::kFarBelow},
                    &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}, &random);
  Deck<Left> left({Left::kNothing, Left::kNothing, Left::kMost, Left::kTiles, Left::kAll}, &random);
  Deck<float> thresholds({1e-4f, 0.03f, 1, 1, 20, 100, 4e6f}, &random);
  Deck<double> levels({12, 25, 60, 60, 3}, &random);
  Deck<std::pair<int, int>> tiles({{0, 0}, {0, 0}, {0, 0}, {24, 64}, {48, 32}, {5, 96}, {96, 256}}, &random);
  Deck<Poison> poisons({Poison::kNone, Poison::kNone, Poison::kNone, Poison::kForbidden, Poison::kOneKey}, &random);
  Deck<Scores> scores({Scores::kDrawn, Scores::kDrawn, Scores::kDrawn, Scores::kDrawn, Scores::kDrawn, Scores::kDrawn,
                       Scores::kDrawn, Scores::kSteps, Scores::kEqual, Scores::kSpikes, Scores::kUp, Scores::kDown},
                      &random);
  std::vector<SkipCase> cases;
  for (int i = 0; i < count; ++i) {
    SkipCase skip;
    Case& c = skip.drawn.base;
    c.B = random.Range(1, 2), c.H = random.OneIn(2) ? 4 : 2, c.G = random.OneIn(2) ? c.H : c.H / 2;
    c.S = rows.Deal(), c.T = keys.Deal(), c.D = c.Dv = sizes.Deal();
    if (c.S > 60 && c.T > 400) c.B = 1, c.H = 2, c.G = random.OneIn(2) ? 1 : 2;
    c.dtype = dtypes.Deal();
    for (Arrangement& arrangement : c.arrangement) arrangement = random.Pick(kArrangements);
    c.mask = masks.Deal(), c.pad = pads.Deal(), c.bias = biases.Deal(), c.left = left.Deal();
    if (c.mask == 0 || c.mask == 10) c.left = Left::kNothing;
    c.offset = random.OneIn(2);
    c.bias_wide = true, c.bias_broadcast = 5;
    c.scores = scores.Deal(), c.exponent = static_cast<int>(random.Range(0, 4));
    c.sink = random.OneIn(4);
    c.empty_rows = c.sink ? EmptyRows::kZero : policies.Deal();
    c.softcap = random.OneIn(6) ? 30 : 0;
    c.spread = random.OneIn(2) ? 4 : 1;
    const Poison poison = poisons.Deal();
    c.poison = c.empty_rows == EmptyRows::kAll ? Poison::kNone : poison;
    const auto [m, n] = tiles.Deal();
    if (m == 0 || c.S > 16) c.m = m, c.n = n;
    skip.threshold = thresholds.Deal();
    skip.levels = levels.Deal();
    const bool has_tables = random.OneIn(6);
    skip.is_ragged = !has_tables && c.mask == 0 && c.pad == Pad::kNone && !AttendsAllKeys(c.empty_rows);
    if (skip.is_ragged) c.B = 2;
    if (has_tables) {
      Deck<Naming> namings(kNamings, &random);
      for (TableCase* table : {&skip.drawn.key[0], &skip.drawn.query, &skip.drawn.value}) {
        table->is_given = true, table->naming = namings.Deal(), table->rows = 33;
      }
      c.scores = Scores::kDrawn;
    }
    cases.push_back(skip);
  }
  return cases;
}

void RunTable(CpuIsa isa) {
  ThreadPool pool(3);
  Totals totals;
  const std::vector<SkipCase> cases = DrawnSkipCases(Cases(160));
  for (size_t i = 0; i < cases.size(); ++i) {
    RunCase(cases[i], isa, i, pool.view(), &totals);
    CountCases(1);
  }
  const double share = static_cast<double>(totals.skipped) / static_cast<double>(totals.scored);
  const double uncertain = static_cast<double>(totals.uncertain) / static_cast<double>(totals.scored);
  if (Effort() == 1) CHECK(share > 0.2 && share < 0.8, "share ", share);
  CHECK(uncertain < 0.001, "uncertain ", uncertain);
}

// Seven of ten blocks hardly count: as many pairs are skipped, of many queries and of one.
void SkipStatedShare(CpuIsa isa) {
  constexpr int64_t kBlock = 128, kBlocks = 20, kSize = 64;
  for (const int64_t S : {1, 16, 192}) {
    const int64_t T = kBlock * kBlocks;
    Random random(static_cast<uint64_t>(S));
    std::vector<float> query(static_cast<size_t>(S * kSize)), key(static_cast<size_t>(T * kSize)), value(key.size()),
        output(query.size());
    for (std::vector<float>* const drawn : {&query, &key, &value}) {
      for (float& x : *drawn) x = random.Unit();
    }
    for (size_t i = 0; i < query.size(); i += kSize) query[i] = 8;
    for (size_t i = 0; i < key.size(); i += kSize) {
      const auto block = static_cast<int64_t>(i) / kSize / kBlock;
      key[i] = block % 10 % 3 == 0 && block % 10 < 9 ? 40.0f : -40.0f;  // 0, 3 and 6 of ten count
    }
    AttentionArgs args;
    args.shape = {1, 1, 1, S, T, kSize, kSize};
    args.query = {query.data(), {S * kSize, S * kSize, kSize}};
    args.key = {key.data(), {T * kSize, T * kSize, kSize}};
    args.value = {value.data(), {T * kSize, T * kSize, kSize}};
    args.output.data = output.data(), args.output.stride = args.query.stride;
    args.scores.scale = 0.125f;
    args.scores.skip_threshold = 0.01f;
    CpuAttentionConfig config = ChooseCpuAttention(args, 1);
    config.isa = isa;
    const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, 1), 0xff);
    ResetSkipCounts();
    CHECK(CpuAttention(args, config, workspace.get(), Parallel{}).ok());
    const SkipCounts counts = ReadSkipCounts();
    CHECK(counts.scored == static_cast<uint64_t>(S * T), "scored ", counts.scored);
    // The first tiles of a work item and of a KV split are kept whatever they hold.
    const double share = static_cast<double>(counts.skipped) / static_cast<double>(counts.scored);
    CHECK(share <= 0.7 && share > (S == 192 ? 0.58 : 0.5), "S ", S, ": share ", share);
    CountCases(1);
  }
}

// A NaN that the maxima lose, in a tile of far lower scores, stays a NaN of the rows that attend it, and of no others.
void KeepNan(CpuIsa isa) {
  for (const int64_t S : {1, 4, 12, 30}) {
    for (const int64_t nan : {320, 321, 383, 639}) {
      constexpr int64_t T = 640, kSize = 16;
      std::vector<float> query(static_cast<size_t>(S * kSize), 1.0f), key(T * kSize, -2.0f), value(T * kSize, 1.0f);
      std::vector<float> output(query.size());
      std::fill_n(key.begin(), 64 * kSize, 2.0f);  // of the first tile
      key[static_cast<size_t>(nan * kSize)] = std::numeric_limits<float>::quiet_NaN();
      AttentionArgs args;
      args.shape = {1, 1, 1, S, T, kSize, kSize};
      args.query = {query.data(), {S * kSize, S * kSize, kSize}};
      args.key = {key.data(), {T * kSize, T * kSize, kSize}};
      args.value = {value.data(), {T * kSize, T * kSize, kSize}};
      args.output.data = output.data(), args.output.stride = args.query.stride;
      args.scores.skip_threshold = 1;
      CpuAttentionConfig config = ChooseCpuAttention(args, 1);
      config.isa = isa;
      const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, 1), 0xff);
      CHECK(CpuAttention(args, config, workspace.get(), Parallel{}).ok());
      for (const float x : output) CHECK(std::isnan(x), "S ", S, " key ", nan, ": ", x);
      CountCases(1);
    }
  }
}

// The tensors of sequences that lie one behind the other.
struct Sequences {
  static constexpr int64_t kHeads = 2, kSize = 64;
  std::vector<int32_t> starts, lengths;
  int64_t longest = 0;
  std::vector<float> query, key, value;

  Sequences(const std::vector<int32_t>& sizes, Random* random) : starts{0}, lengths(sizes) {
    for (const int32_t length : lengths) {
      starts.push_back(starts.back() + length);
      longest = std::max<int64_t>(longest, length);
    }
    for (std::vector<float>* const drawn : {&query, &key, &value}) {
      drawn->resize(static_cast<size_t>(starts.back() * kHeads * kSize));
      for (float& x : *drawn) x = 2 * random->Unit();
    }
    for (size_t i = 0; i < key.size(); i += kSize) {
      query[i] = 4;
      key[i] = 20 * static_cast<float>(static_cast<int>(i / kSize / kHeads / kLevelKeys * 7 % 5) - 2);
    }
  }
  // Sequence b alone: S queries, the last of its keys.
  AttentionArgs One(size_t b, int64_t S, float* output) const {
    const int64_t first = starts[b] * kHeads * kSize, past = (lengths[b] - S) * kHeads * kSize;
    const Strides stride = {0, kSize, kHeads * kSize};
    AttentionArgs args;
    args.shape = {1, kHeads, kHeads, S, lengths[b], kSize, kSize};
    args.query = {query.data() + first + past, stride};
    args.key = {key.data() + first, stride}, args.value = {value.data() + first, stride};
    args.output.data = output, args.output.stride = stride;
    args.scores.scale = 0.125f;
    args.scores.skip_threshold = 0.5f;
    return args;
  }
};

void RunArgs(const AttentionArgs& args, const CpuAttentionConfig& config) {
  const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, 1), 0xff);
  const Status status = CpuAttention(args, config, workspace.get(), Parallel{});
  CHECK(status.ok(), status.message());
}

// The number of keys that counts is that of the sequence: packed sequences have the bits of separate calls.
void SkipInPackedSequences(CpuIsa isa) {
  Random random(3);
  const Sequences all({700, 130, 1, 400}, &random);
  const size_t row = Sequences::kHeads * Sequences::kSize;
  std::vector<float> together(all.query.size()), wanted(all.query.size());
  AttentionArgs args = all.One(0, all.lengths[0], together.data());
  args.shape.B = 4, args.shape.S = args.shape.T = all.longest;
  args.sequences.starts = all.starts.data(), args.sequences.has_queries = true;
  args.kv.key_ends = all.lengths.data();
  CpuAttentionConfig config;
  config.isa = isa, config.m = 48, config.n = 64;
  ResetSkipCounts();
  RunArgs(args, config);
  const SkipCounts counts = ReadSkipCounts();
  ResetSkipCounts();
  for (size_t b = 0; b < all.lengths.size(); ++b) {
    const size_t first = static_cast<size_t>(all.starts[b]) * row;
    // Packed, too: a call of few queries would take another path.
    const std::vector<int32_t> starts = {0, all.lengths[b]}, ends = {all.lengths[b]};
    AttentionArgs one = all.One(b, all.lengths[b], wanted.data() + first);
    one.sequences.starts = starts.data(), one.sequences.has_queries = true, one.kv.key_ends = ends.data();
    RunArgs(one, config);
  }
  CHECK(std::memcmp(together.data(), wanted.data(), together.size() * sizeof(float)) == 0);
  const SkipCounts apart = ReadSkipCounts();
  CHECK(counts.scored == apart.scored && counts.skipped == apart.skipped && counts.skipped > counts.scored / 5,
        counts.skipped, " of ", counts.scored, ", apart ", apart.skipped, " of ", apart.scored);
  CountCases(1);
}

// Pages have the bits of keys that lie one behind the other.
void SkipInPages(CpuIsa isa) {
  Random random(4);
  const Sequences all({800}, &random);
  const size_t row = Sequences::kHeads * Sequences::kSize;
  for (const int64_t S : {1, 12, 100}) {
    for (const int shift : {4, 8}) {
      const int64_t page = int64_t{1} << shift, pages = (800 + page - 1) / page;
      std::vector<int32_t> table;
      for (int64_t i = 0; i < pages; ++i) table.push_back(static_cast<int32_t>((i * 3 + 1) % pages));
      if (pages % 3 == 0) std::reverse(table.begin(), table.end());
      std::vector<float> key(static_cast<size_t>(pages * page) * row, std::nanf("")), value(key);
      for (int64_t t = 0; t < 800; ++t) {
        const auto at = static_cast<size_t>(table[static_cast<size_t>(t / page)] * page + t % page) * row;
        std::copy_n(all.key.begin() + t * static_cast<int64_t>(row), row, key.begin() + static_cast<int64_t>(at));
        std::copy_n(all.value.begin() + t * static_cast<int64_t>(row), row, value.begin() + static_cast<int64_t>(at));
      }
      const std::vector<int32_t> ends = {800};
      std::vector<float> wanted(static_cast<size_t>(S) * row), found(wanted.size());
      AttentionArgs args = all.One(0, S, wanted.data());
      args.kv.key_ends = ends.data();
      CpuAttentionConfig config = ChooseCpuAttention(args, 1);
      config.isa = isa;
      ResetSkipCounts();
      RunArgs(args, config);
      const SkipCounts apart = ReadSkipCounts();
      args.output.data = found.data(), args.key.data = key.data(), args.value.data = value.data();
      args.kv.pages = {table.data(), pages, pages, page * static_cast<int64_t>(row), shift};
      ResetSkipCounts();
      RunArgs(args, config);
      const SkipCounts counts = ReadSkipCounts();
      CHECK(found == wanted, "S ", S, " pages of ", page);
      CHECK(counts.scored == apart.scored && counts.skipped == apart.skipped && counts.skipped > 0, "S ", S,
            " pages of ", page, ": ", counts.skipped, " of ", counts.scored, ", contiguous ", apart.skipped, " of ",
            apart.scored);
      CountCases(1);
    }
  }
}

// Registers the tests of each instruction set of this machine.
const bool registered = [] {
#define STOF_TESTS(id, name, is_supported)                                                         \
  {{"SkippedTilesAreThoseOfTheDefinition[" #name "]", [] { RunTable(CpuIsa::id); }},               \
   {"AStatedShareOfTilesIsSkipped[" #name "]", [] { SkipStatedShare(CpuIsa::id); }},               \
   {"ANanIsNotSkipped[" #name "]", [] { KeepNan(CpuIsa::id); }},                                   \
   {"PackedSequencesSkipLikeSeparateCalls[" #name "]", [] { SkipInPackedSequences(CpuIsa::id); }}, \
   {"PagesSkipLikeContiguousKeys[" #name "]", [] { SkipInPages(CpuIsa::id); }}},
  static constexpr Test kRows[][5] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  return RegisterByIsa(&cpu::KernelTable::attention, kRows);
}();

}  // namespace

}  // namespace stof::test::attention
