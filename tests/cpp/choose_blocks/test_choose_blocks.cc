// SPDX-License-Identifier: Apache-2.0
// Choose blocks on the CPU: the kernels of every instruction set of this machine leave out the key blocks that the
// definition leaves out, and count them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "plugins/core/host/skip_scores.h"
#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/attention/attention_problem.h"
#include "tests/cpp/choose_blocks/choose_reference.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test::attention {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kLevelKeys = 64, kSignRows = 72;

struct ChooseCase {
  Case base;
  float threshold = 0.1f;
  // Blocks of kLevelKeys keys have scores of about -levels to levels; of every second kSignRows queries, the negative.
  double levels = 12;
  bool is_ragged = false;  // sequences end before T
  double key_mean = 0;
};

std::string Describe(const ChooseCase& c) {
  return Text(Describe(c.base), " threshold ", c.threshold, " levels ", c.levels, c.is_ragged ? " ragged" : "");
}

struct Totals {
  uint64_t scored = 0, skipped = 0, uncertain = 0;
};

void SetLevels(const ChooseCase& choose, Random* random, Dense* dense) {
  const Case& c = choose.base;
  for (double& x : dense->key) x = choose.key_mean == 0 ? x : Rounded(c.dtype, x + choose.key_mean);
  if (choose.levels == 0 || c.scores != Scores::kDrawn) return;
  double sign = 4, level = 0;
  for (int64_t row = 0; row < c.B * c.H * c.S; ++row) {
    if (row % kSignRows == 0) sign = random->OneIn(2) ? 4 : -4;
    dense->query[static_cast<size_t>(row * c.D)] = sign;
  }
  for (int64_t key = 0; key < c.B * c.G * c.T; ++key) {
    double& x = dense->key[static_cast<size_t>(key * c.D)];
    if (key % c.T % kLevelKeys == 0) level = choose.levels * static_cast<double>(random->Unit());
    if (std::isfinite(x)) x = Rounded(c.dtype, level / 4 / dense->scale);
  }
}

std::vector<int32_t> DrawEnds(const ChooseCase& choose, Random* random, Dense* dense) {
  const Case& c = choose.base;
  std::vector<int32_t> ends;
  for (int64_t b = 0; choose.is_ragged && b < c.B; ++b) {
    ends.push_back(static_cast<int32_t>(b == 1 ? random->Range(0, c.T / 3) : random->Range(c.T / 2, c.T)));
    for (int64_t row = b * c.H * c.S; row < (b + 1) * c.H * c.S; ++row) {
      std::fill(dense->allowed.begin() + static_cast<std::ptrdiff_t>(row * c.T + ends.back()),
                dense->allowed.begin() + static_cast<std::ptrdiff_t>((row + 1) * c.T), uint8_t{0});
    }
  }
  return ends;
}

// Whether the definition lets a kernel leave out blocks.
bool MayChoose(const ChooseCase& choose) {
  const Case& c = choose.base;
  return choose.threshold > 0 && c.S >= kBlock && c.T > kBlock && c.bias == Bias::kNone && c.relative == 0 &&
         (c.mask < 10 || c.mask > 12) && c.empty_rows != EmptyRows::kAll;
}

// Whether the mask that a kernel gets lists a key block for a query block.
bool Lists(const AttentionArgs& args, int m, int64_t b, int64_t h, int64_t query_block, int64_t key_block) {
  const StaticMask& mask = args.mask.fixed;
  const int64_t row0 = query_block * kBlock, rows = std::min(kBlock, args.shape.S - row0);
  if (const BlockMask* const blocks = mask.blocks()) {
    for (int64_t row = row0 / m; row * m < row0 + rows; ++row) {
      const auto at = static_cast<size_t>(int64_t{blocks->TableOf(b, h)} * blocks->rows + row);
      const auto begin = blocks->key_tile.begin() + blocks->row_ptr[at],
                 end = blocks->key_tile.begin() + blocks->row_ptr[at + 1];
      if (std::find(begin, end, key_block) != end) return true;
    }
    return false;
  }
  if (mask.elements() == nullptr) return true;
  std::vector<KeyTileRun> runs(static_cast<size_t>((args.shape.T + kBlock - 1) / kBlock));
  const int64_t count = mask.elements()->runs(mask.elements()->self, b, h, row0, kBlock, kBlock, 0,
                                              static_cast<int64_t>(runs.size()), runs.data());
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    if (runs[i].first <= key_block && key_block < runs[i].last) return true;
  }
  return false;
}

ChooseProblem Describe(const ChooseCase& choose, const MaskData& data, const Dense& dense, const AttentionArgs& args,
                       const CpuAttentionConfig& config) {
  const Case& c = choose.base;
  ChooseProblem problem;
  problem.dense = &dense;
  problem.dtype = c.dtype, problem.threshold = static_cast<double>(choose.threshold), problem.m = config.m;
  problem.pad = args.mask.pad;
  problem.ends.assign(static_cast<size_t>(c.B), c.T);
  if (args.kv.key_ends != nullptr) problem.ends.assign(args.kv.key_ends, args.kv.key_ends + c.B);
  problem.diagonal.assign(static_cast<size_t>(c.B), c.offset ? c.T - c.S : 0);
  MaskData unpadded = data;
  std::fill(unpadded.pad.begin(), unpadded.pad.end(), uint8_t{1});
  Case plain = c;
  plain.poison = Poison::kNone;
  Random unread(1);
  problem.fixed = DrawDense(plain, unpadded, {}, &unread).allowed;
  for (size_t i = 0; i < problem.fixed.size() && choose.is_ragged; ++i) problem.fixed[i] &= dense.allowed[i];
  problem.is_listed = [&args, m = config.m](int64_t b, int64_t h, int64_t query_block, int64_t key_block) {
    return Lists(args, m, b, h, query_block, key_block);
  };
  return problem;
}

// One case, with the tensors that kernels get.
class Trial {
 public:
  Trial(const ChooseCase& choose, CpuIsa isa, uint64_t seed, const Parallel& team)
      : choose_(choose),
        c_(choose.base),
        where_(Text("seed ", seed, " ", Describe(choose))),
        team_(team),
        random_(seed),
        data_(DrawMask(c_, &random_)),
        bias_(DrawBias(c_, &random_)),
        relative_(DrawRelative(c_, &random_, &bias_.dense)),
        dense_(DrawDense(c_, data_, bias_, &random_)),
        query_(c_, 0, c_.H, c_.S, c_.D),
        key_(c_, 1, c_.G, c_.T, c_.D),
        value_(c_, 2, c_.G, c_.T, c_.Dv),
        output_(c_, 3, c_.H, c_.S, c_.Dv),
        lse_(c_) {
    SetLevels(choose, &random_, &dense_);
    ends_ = DrawEnds(choose, &random_, &dense_);
    query_.Fill(dense_.query), key_.Fill(dense_.key), value_.Fill(dense_.value);
    args_ = MakeArgs(c_, query_, key_, value_, output_);
    args_.scores.block_threshold = choose.threshold;
    args_.scores.diagonal.first = c_.offset ? c_.T - c_.S : 0;
    if (choose.is_ragged) args_.kv.key_ends = ends_.data();
    if (c_.pad != Pad::kNone && c_.mask != 12) args_.mask.pad = data_.pad.data();
    if (c_.bias != Bias::kNone) {
      const int64_t* const stride = bias_.stride;
      args_.scores.bias = {bias_.bytes.data(), bias_.dtype, stride[0], stride[1], stride[2], stride[3]};
    }
    if (c_.relative > 0) {
      args_.scores.relative_bias = {relative_.data(), c_.relative, c_.relative_shared ? 0 : c_.relative,
                                    c_.offset ? c_.T - c_.S : 0};
    }
    if (c_.sink) BindSink();
    args_.output.lse = lse_.values.data();
    args_.output.lse_stride_b = lse_.stride_b, args_.output.lse_stride_h = lse_.stride_h;
    config_ = ChooseCpuAttention(args_, team.threads);
    config_.isa = isa;
    if (c_.m > 0) config_.m = c_.m;
    if (c_.n > 0) config_.n = c_.n;
    BindMask(c_, data_, config_, &bound_, &args_);
  }

  void Compare(Totals* totals) {
    const bool chooses = MayChoose(choose_) && config_.n == kBlock && kBlock % config_.m == 0;
    BlockSets sets;
    if (chooses) {
      sets = ChooseKeyBlocks(Describe(choose_, data_, dense_, args_, config_));
      dense_.allowed = sets.kept;
    }
    Answer answer = Attend(dense_);
    // Sums of scores start at minus the row max, which is as far from a score as levels are apart.
    for (double& magnitude : answer.magnitude) magnitude += 2 * choose_.levels;
    std::vector<char> first;
    for (const int threads : {1, 3}) {
      const SkipCounts counts = Run(threads);
      CHECK(counts.scored == sets.scored, where_, ": scored ", counts.scored, ", expected ", sets.scored);
      CHECK(counts.skipped >= sets.skipped && counts.skipped <= sets.skipped + sets.uncertain, where_, ": skipped ",
            counts.skipped, ", expected ", sets.skipped, " to ", sets.skipped + sets.uncertain);
      if (threads == 1) first = output_.bytes;
      CHECK(first == output_.bytes, where_, ": 3 threads give other bits than 1");
      if (threads == 1 && chooses) ExceptRows(sets.is_uncertain, c_, &output_, lse_, &answer);
      attention::Compare(c_, dense_, answer, &output_, Text(where_, " threads ", threads));
      lse_.Compare(c_, answer, Text(where_, " threads ", threads));
    }
    totals->scored += sets.scored, totals->skipped += sets.skipped;
    totals->uncertain += sets.uncertain;
    if (chooses) return;
    args_.scores.block_threshold = 0;
    Run(1);
    CHECK(first == output_.bytes, where_, ": where no block is chosen, a threshold gives other bits than none");
  }

 private:
  void BindSink() {
    dense_.sink = DrawSink(c_, &random_);
    const auto item = static_cast<size_t>(SizeOfFloat(c_.dtype));
    sink_.resize(dense_.sink.size() * item);
    for (size_t h = 0; h < dense_.sink.size(); ++h) StoreFloat(c_.dtype, dense_.sink[h], &sink_[h * item]);
    args_.scores.sink = {sink_.data(), c_.dtype};
  }
  SkipCounts Run(int threads) {
    output_.Reset();
    lse_.Reset();
    const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args_, config_, threads), threads == 1 ? 0xff : 0x3f);
    ResetSkipCounts();
    const Status status = CpuAttention(args_, config_, workspace.get(), threads == 1 ? Parallel{} : team_);
    CHECK(status.ok(), where_, ": ", status.message());
    return ReadSkipCounts();
  }

  const ChooseCase choose_;
  const Case& c_ = choose_.base;
  const std::string where_;
  const Parallel team_;
  Random random_;
  const MaskData data_;
  BiasTensor bias_;
  const std::vector<float> relative_;
  Dense dense_;
  Strided query_, key_, value_, output_;
  Lse lse_;
  std::vector<int32_t> ends_;
  std::vector<char> sink_;
  AttentionArgs args_;
  CpuAttentionConfig config_;
  BoundMask bound_;
};

std::vector<ChooseCase> DrawnChooseCases(int count) {
  Random random(57);
  Deck<int64_t> rows({127, 128, 129, 130, 200, 256, 257, 300, 384}, &random);
  Deck<int64_t> keys({100, 128, 129, 256, 300, 511, 640, 900, 1100, 1300}, &random);
  Deck<int64_t> sizes({64, 64, 72, 80, 128, 192, 256, 5}, &random);
  Deck<DType> dtypes({DType::kF32, DType::kF32, DType::kF16, DType::kBF16}, &random);
  Deck<int> masks({0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kNone, Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kAll, Pad::kRandom}, &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kZero, EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kNan,
                            EmptyRows::kMean, EmptyRows::kAll},
                           &random);
  Deck<Left> left({Left::kNothing, Left::kNothing, Left::kMost, Left::kTiles, Left::kAll}, &random);
  Deck<float> thresholds({1e-6f, 1e-3f, 0.1f, 0.1f, 0.5f, 1, 0, 1e-38f}, &random);
  Deck<double> levels({6, 12, 25, 25, 60, 0}, &random);
  Deck<int> tile_rows({0, 0, 128, 64, 32, 16, 96}, &random);
  Deck<Poison> poisons({Poison::kNone, Poison::kNone, Poison::kNone, Poison::kForbidden, Poison::kOneKey}, &random);
  Deck<Scores> scores({Scores::kDrawn, Scores::kDrawn, Scores::kDrawn, Scores::kDrawn, Scores::kDrawn, Scores::kDrawn,
                       Scores::kDrawn, Scores::kDrawn, Scores::kUp, Scores::kDown, Scores::kEqual},
                      &random);
  std::vector<ChooseCase> cases;
  for (int i = 0; i < count; ++i) {
    ChooseCase choose;
    Case& c = choose.base;
    c.B = random.Range(1, 2), c.H = 2, c.G = random.OneIn(2) ? 1 : 2;
    c.S = rows.Deal(), c.T = keys.Deal(), c.D = sizes.Deal();
    c.Dv = random.OneIn(4) ? 48 : c.D;
    if (c.S > 128 && c.T > 640) c.B = 1;
    c.dtype = dtypes.Deal();
    for (Arrangement& arrangement : c.arrangement) arrangement = random.Pick(kArrangements);
    c.mask = masks.Deal(), c.pad = pads.Deal(), c.left = left.Deal();
    if (c.mask == 0 || c.mask == 10) c.left = Left::kNothing;
    c.offset = random.OneIn(2) && c.S <= c.T;
    if (random.OneIn(20)) c.bias = Bias::kPlain;
    if (random.OneIn(20)) c.relative = 31;
    c.bias_wide = true, c.bias_broadcast = 5;
    c.scores = scores.Deal();
    c.sink = random.OneIn(4);
    const EmptyRows policy = policies.Deal();
    c.empty_rows = c.sink ? EmptyRows::kZero : policy;
    c.softcap = random.OneIn(6) ? 30 : 0;
    const Poison poison = poisons.Deal();
    c.poison = c.empty_rows == EmptyRows::kAll ? Poison::kNone : poison;
    c.m = tile_rows.Deal();
    choose.threshold = thresholds.Deal();
    choose.levels = levels.Deal();
    choose.is_ragged = c.mask == 0 && c.pad == Pad::kNone && !AttendsAllKeys(c.empty_rows) && random.OneIn(2);
    if (choose.is_ragged) c.B = 2;
    cases.push_back(choose);
  }
  return cases;
}

// Many query blocks, before whose own ones a causal mask keeps others: those behind may not raise the largest estimate.
std::vector<ChooseCase> ListedChooseCases() {
  std::vector<ChooseCase> cases;
  for (const int mask : {1, 4, 8}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Left left : {Left::kNothing, Left::kAll}) {
        ChooseCase choose;
        Case& c = choose.base;
        c.B = 1, c.H = 2, c.G = 1, c.S = c.T = 700, c.D = c.Dv = 64;
        c.dtype = dtype, c.mask = mask, c.left = left, c.m = left == Left::kAll ? 64 : 128;
        choose.levels = 25;
        cases.push_back(choose);
      }
    }
  }
  return cases;
}

void RunTable(CpuIsa isa) {
  ThreadPool pool(3);
  Totals totals;
  std::vector<ChooseCase> cases = DrawnChooseCases(Cases(120));
  const std::vector<ChooseCase> listed = ListedChooseCases();
  cases.insert(cases.end(), listed.begin(), listed.end());
  for (size_t i = 0; i < cases.size(); ++i) {
    Trial(cases[i], isa, i, pool.view()).Compare(&totals);
    CountCases(1);
  }
  const double share = static_cast<double>(totals.skipped) / static_cast<double>(totals.scored);
  const double uncertain = static_cast<double>(totals.uncertain) / static_cast<double>(totals.scored);
  if (Effort() == 1) CHECK(share > 0.1 && share < 0.8, "share ", share);
  CHECK(uncertain < 0.005, "uncertain ", uncertain);
}

// Keys differ little beside their mean, so that the rounding of means to bf16 decides about many blocks.
void ChooseByRoundedPooling(CpuIsa isa) {
  ThreadPool pool(3);
  Totals totals;
  for (uint64_t seed = 0; seed < 2; ++seed) {
    ChooseCase choose;
    Case& c = choose.base;
    c.B = 1, c.H = 4, c.G = 2, c.S = 384, c.T = 1300, c.D = 64, c.Dv = 16;
    c.dtype = DType::kBF16, c.spread = 8;
    choose.levels = 0, choose.threshold = 0.98f, choose.key_mean = 4;
    Trial(choose, isa, seed, pool.view()).Compare(&totals);
    CountCases(1);
  }
  CHECK(totals.skipped > totals.scored / 20 && totals.uncertain < totals.scored / 20, totals.skipped, " and ",
        totals.uncertain, " of ", totals.scored);
}

// Dense rows of one head.
AttentionArgs OneHead(const std::vector<float>& query, const std::vector<float>& key, const std::vector<float>& value,
                      int64_t size, std::vector<float>* output) {
  const auto rows = [size](const std::vector<float>& of) { return static_cast<int64_t>(of.size()) / size; };
  const auto view = [size](const std::vector<float>& of) {
    const auto all = static_cast<int64_t>(of.size());
    return TensorView{of.data(), {all, all, size}};
  };
  AttentionArgs args;
  args.shape = {1, 1, 1, rows(query), rows(key), size, size};
  args.query = view(query), args.key = view(key), args.value = view(value);
  args.output.data = output->data(), args.output.stride = args.query.stride;
  return args;
}

// Three of ten blocks count: the others are left out, but for the first one and those of the queries.
void ChooseStatedShare(CpuIsa isa) {
  constexpr int64_t kBlocks = 20, kSize = 64, T = kBlock * kBlocks;
  for (const int64_t S : {128, 192, 256}) {
    Random random(static_cast<uint64_t>(S));
    std::vector<float> query(static_cast<size_t>(S * kSize)), key(static_cast<size_t>(T * kSize)), value(key.size()),
        output(query.size());
    for (std::vector<float>* const drawn : {&query, &key, &value}) {
      for (float& x : *drawn) x = random.Unit();
    }
    for (size_t i = 0; i < query.size(); i += kSize) query[i] = 8;
    const auto counts_much = [](int64_t block) { return block % 10 == 1 || block % 10 == 4 || block % 10 == 7; };
    for (size_t i = 0; i < key.size(); i += kSize) {
      key[i] = counts_much(static_cast<int64_t>(i) / kSize / kBlock) ? 40.0f : -40.0f;
    }
    AttentionArgs args = OneHead(query, key, value, kSize, &output);
    args.scores.scale = 0.125f;
    args.scores.block_threshold = 0.01f;
    args.scores.diagonal.first = 2 * kBlock + 70;  // blocks 2 and 3 for the first query block
    CpuAttentionConfig config = ChooseCpuAttention(args, 1);
    config.isa = isa;
    uint64_t kept = 0;
    for (int64_t row0 = 0; row0 < S; row0 += kBlock) {
      const int64_t rows = std::min(kBlock, S - row0), own = args.scores.diagonal.first + row0;
      for (int64_t block = 0; block < kBlocks; ++block) {
        const bool is_own = block * kBlock < own + rows && (block + 1) * kBlock > own;
        kept += block == 0 || is_own || counts_much(block) ? static_cast<uint64_t>(rows * kBlock) : 0;
      }
    }
    const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, 1), 0xff);
    ResetSkipCounts();
    CHECK(CpuAttention(args, config, workspace.get(), Parallel{}).ok());
    const SkipCounts counts = ReadSkipCounts();
    CHECK(counts.scored == static_cast<uint64_t>(S * T), "scored ", counts.scored);
    CHECK(counts.scored - counts.skipped == kept, "S ", S, ": kept ", counts.scored - counts.skipped, ", expected ",
          kept);
    CountCases(1);
  }
}

// A block of far lower scores with a NaN is chosen, whichever of its pooled keys has it: all rows that attend it are
// NaN.
void KeepNan(CpuIsa isa) {
  constexpr int64_t S = 128, T = 640, kSize = 16;
  for (int64_t nan = 2 * kBlock + 3; nan < 3 * kBlock; nan += 8) {
    std::vector<float> query(S * kSize, 1.0f), key(T * kSize, -2.0f), value(T * kSize, 1.0f), output(query.size());
    std::fill_n(key.begin(), kBlock * kSize, 2.0f);
    key[static_cast<size_t>(nan * kSize)] = std::numeric_limits<float>::quiet_NaN();
    AttentionArgs args = OneHead(query, key, value, kSize, &output);
    args.scores.block_threshold = 0.5f;
    CpuAttentionConfig config = ChooseCpuAttention(args, 1);
    config.isa = isa;
    const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, 1), 0xff);
    ResetSkipCounts();
    CHECK(CpuAttention(args, config, workspace.get(), Parallel{}).ok());
    CHECK(ReadSkipCounts().skipped == static_cast<uint64_t>(3 * S * kBlock), "key ", nan);
    for (const float x : output) CHECK(std::isnan(x), "key ", nan, ": ", x);
    CountCases(1);
  }
}

// Beside a skip threshold, a tile that is left out counts as skipped, and others as skip by score counts them.
void ChooseAndSkip(CpuIsa isa) {
  constexpr int64_t S = 256, T = 2048, kSize = 64;
  Random random(8);
  std::vector<float> query(S * kSize), key(T * kSize), value(key.size()), output(query.size());
  for (std::vector<float>* const drawn : {&query, &key, &value}) {
    for (float& x : *drawn) x = random.Unit();
  }
  for (size_t i = 0; i < query.size(); i += kSize) query[i] = 8;
  for (size_t i = 0; i < key.size(); i += kSize) key[i] = static_cast<float>(i / kSize / kBlock % 4) * 6 - 9;
  AttentionArgs args = OneHead(query, key, value, kSize, &output);
  args.scores.scale = 0.125f;
  CpuAttentionConfig config = ChooseCpuAttention(args, 1);
  config.isa = isa, config.m = 128, config.n = 128;
  const auto run = [&](float skip, float block) {
    args.scores.skip_threshold = skip, args.scores.block_threshold = block;
    const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, 1), 0xff);
    ResetSkipCounts();
    CHECK(CpuAttention(args, config, workspace.get(), Parallel{}).ok());
    return ReadSkipCounts();
  };
  const SkipCounts block = run(0, 1e-4f), both = run(2048, 1e-4f), skip = run(2048, 0);
  for (const SkipCounts& counts : {block, both, skip}) CHECK(counts.scored == S * T, counts.scored);
  CHECK(block.skipped > S * T / 4 && both.skipped > block.skipped && skip.skipped > S * T / 4, block.skipped, " ",
        both.skipped, " ", skip.skipped);
}

// Registers the tests of each instruction set of this machine.
const bool registered = [] {
#define STOF_TESTS(id, name, is_supported)                                             \
  {{"ChosenBlocksAreThoseOfTheDefinition[" #name "]", [] { RunTable(CpuIsa::id); }},   \
   {"RoundedPoolingChooses[" #name "]", [] { ChooseByRoundedPooling(CpuIsa::id); }},   \
   {"ANanIsChosen[" #name "]", [] { KeepNan(CpuIsa::id); }},                           \
   {"AStatedShareOfBlocksIsChosen[" #name "]", [] { ChooseStatedShare(CpuIsa::id); }}, \
   {"ChosenBlocksSkipByScore[" #name "]", [] { ChooseAndSkip(CpuIsa::id); }}},
  static constexpr Test kRows[][5] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  return RegisterByIsa(&cpu::KernelTable::attention, kRows);
}();

}  // namespace
}  // namespace stof::test::attention
