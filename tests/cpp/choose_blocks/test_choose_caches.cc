// SPDX-License-Identifier: Apache-2.0
// Choose blocks over KV caches on the CPU: chunks of prompts behind a past of their own, int8, against double
// precision; pages and packed sequences with the bits of contiguous calls.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/isa.h"
#include "plugins/core/host/skip_scores.h"
#include "plugins/core/mask/cached_mask.h"
#include "tests/cpp/attention/attention_problem.h"
#include "tests/cpp/choose_blocks/choose_reference.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test::attention {
namespace {

constexpr int64_t kBlock = 128, kLevelKeys = 64;

void RunArgs(const AttentionArgs& args, const CpuAttentionConfig& config) {
  const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, 1), 0xff);
  const Status status = CpuAttention(args, config, workspace.get(), Parallel{});
  CHECK(status.ok(), status.message());
}

// Masks in absolute positions.
struct MaskCase {
  const char* text;
  bool (*allows)(int64_t q, int64_t k);
};
constexpr MaskCase kMasks[] = {
    {"k <= q", [](int64_t q, int64_t k) { return k <= q; }},
    {"k <= q and q - k < 150", [](int64_t q, int64_t k) { return k <= q && q - k < 150; }},
    {"k <= q and (k < 4 or q - k < 300)", [](int64_t q, int64_t k) { return k <= q && (k < 4 || q - k < 300); }},
    {"k + 100 < q",
     [](int64_t q, int64_t k) { return k + 100 < q; }},  // fully masked rows, and own blocks without pairs
};

// Sequences of S queries each behind a past of their own. Rows of the cache behind their ends hold NaN.
class CacheTrial {
 public:
  static constexpr int64_t kH = 4, kG = 2, kSize = 64;

  CacheTrial(std::vector<int32_t> past, std::vector<int32_t> ends, int64_t S, const MaskCase& mask, DType dtype,
             bool is_int8, uint64_t seed)
      : past_(std::move(past)), ends_(std::move(ends)), S_(S), mask_(mask), dtype_(dtype), is_int8_(is_int8) {
    Random random(seed);
    Dense& p = dense_;
    p.B = B(), p.H = kH, p.G = kG, p.S = S, p.T = *std::max_element(ends_.begin(), ends_.end());
    p.D = p.Dv = kSize;
    p.scale = 0.125;
    p.query = DrawValues(&random, dtype, p.B * p.H * p.S * p.D, 1);
    p.key = DrawValues(&random, dtype, p.B * p.G * p.T * p.D, 1);
    p.value = DrawValues(&random, dtype, p.B * p.G * p.T * p.Dv, 1);
    for (size_t i = 0; i < p.query.size(); i += kSize) p.query[i] = i / kSize / 160 % 2 == 0 ? 4 : -4;
    double level = 0;
    for (size_t i = 0; i < p.key.size(); i += kSize) {
      if (i / kSize % kLevelKeys == 0) level = 24 * static_cast<double>(random.Unit());
      p.key[i] = Rounded(dtype, level);
    }
    if (is_int8) Quantize(&random);
    for (int64_t row = 0; row < p.B * p.H * p.S; ++row) {
      const auto b = static_cast<size_t>(row / p.H / p.S);
      for (int64_t k = 0; k < p.T; ++k) p.allowed.push_back(k < ends_[b] && mask.allows(past_[b] + row % p.S, k));
    }
  }

  void Check(CpuIsa isa, float threshold, uint64_t* scored, uint64_t* skipped, uint64_t* uncertain) {
    AttentionArgs args;
    const std::vector<char> query = Store(dense_.query, dtype_), key = StoreCache(dense_.key, key_scale_),
                            value = StoreCache(dense_.value, value_scale_);
    std::vector<char> output(query.size(), static_cast<char>(kUntouched));
    Bind(query, key, value, &output, threshold, &args);
    MaskExpr expr;
    CHECK(MaskExpr::Parse(mask_.text, {}, &expr).ok());
    std::unique_ptr<BoundCachedMask> mask;
    const ExprSizes sizes = {dense_.B, kH, S_, dense_.T, 0};
    CHECK(BoundCachedMask::Make(expr, sizes, past_.data(), ends_.data(), &mask).ok());
    args.mask.fixed = StaticMask::OfElements(mask->view());
    CpuAttentionConfig config = ChooseCpuAttention(args, 1);
    config.isa = isa;
    const BlockSets sets = ChooseKeyBlocks(Describe(args, config, threshold));
    ResetSkipCounts();
    RunArgs(args, config);
    const SkipCounts counts = ReadSkipCounts();
    const std::string where = Text(mask_.text, " S ", S_, " dtype ", static_cast<int>(dtype_), " int8 ", is_int8_);
    CHECK(counts.scored == sets.scored, where, ": scored ", counts.scored, ", expected ", sets.scored);
    CHECK(counts.skipped >= sets.skipped && counts.skipped <= sets.skipped + sets.uncertain, where, ": skipped ",
          counts.skipped, ", expected ", sets.skipped, " to ", sets.skipped + sets.uncertain);
    Compare(sets, output, where);
    *scored += sets.scored, *skipped += sets.skipped, *uncertain += sets.uncertain;
  }

 private:
  int64_t B() const { return static_cast<int64_t>(past_.size()); }

  void Quantize(Random* random) {
    for (auto [values, scales] : {std::pair(&dense_.key, &key_scale_), std::pair(&dense_.value, &value_scale_)}) {
      for (int64_t i = 0; i < kG * kSize; ++i) {
        const float most = i % kSize == 0 && values == &dense_.key ? 24.0f : 1.0f;
        scales->push_back(most / 127 * (1.25f + random->Unit() / 4));
      }
      for (size_t i = 0; i < values->size(); ++i) {
        const auto scale = static_cast<double>(ScaleAt(*scales, i));
        (*values)[i] = scale * std::nearbyint((*values)[i] / scale);
      }
    }
  }
  float ScaleAt(const std::vector<float>& scales, size_t i) const {
    const size_t head = i / static_cast<size_t>(kSize * dense_.T) % kG;
    return scales[head * kSize + i % kSize];
  }
  static std::vector<char> Store(const std::vector<double>& values, DType dtype) {
    const auto item = static_cast<size_t>(SizeOfFloat(dtype));
    std::vector<char> bytes(values.size() * item);
    for (size_t i = 0; i < values.size(); ++i) StoreFloat(dtype, values[i], &bytes[i * item]);
    return bytes;
  }
  std::vector<char> StoreCache(const std::vector<double>& values, const std::vector<float>& scales) const {
    std::vector<double> existing = values;
    for (size_t i = 0; i < values.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / kSize, b = row / dense_.T / kG;
      if (row % dense_.T >= ends_[static_cast<size_t>(b)]) existing[i] = std::nan("");
    }
    if (!is_int8_) return Store(existing, dtype_);
    std::vector<char> bytes;
    for (size_t i = 0; i < values.size(); ++i) {
      const double stored = std::isnan(existing[i]) ? 127 : existing[i] / static_cast<double>(ScaleAt(scales, i));
      bytes.push_back(static_cast<char>(static_cast<int8_t>(std::nearbyint(stored))));
    }
    return bytes;
  }
  void Bind(const std::vector<char>& query, const std::vector<char>& key, const std::vector<char>& value,
            std::vector<char>* output, float threshold, AttentionArgs* args) const {
    args->shape = {dense_.B, kH, kG, S_, dense_.T, kSize, kSize, dtype_};
    if (is_int8_) {
      args->shape.kv_dtype = DType::kI8;
      args->kv.key_scale = {key_scale_.data(), kSize, 1}, args->kv.value_scale = {value_scale_.data(), kSize, 1};
    }
    args->query = {query.data(), {kH * S_ * kSize, S_ * kSize, kSize}};
    args->key = {key.data(), {kG * dense_.T * kSize, dense_.T * kSize, kSize}};
    args->value = {value.data(), args->key.stride};
    args->output.data = output->data(), args->output.stride = args->query.stride;
    args->scores.scale = 0.125f;
    args->scores.block_threshold = threshold;
    args->scores.diagonal.first_rows = past_.data();
    args->kv.key_ends = ends_.data();
  }
  ChooseProblem Describe(const AttentionArgs& args, const CpuAttentionConfig& config, float threshold) const {
    ChooseProblem problem;
    problem.dense = &dense_, problem.dtype = dtype_, problem.threshold = static_cast<double>(threshold);
    problem.fixed = dense_.allowed, problem.m = config.m;
    problem.ends.assign(ends_.begin(), ends_.end());
    problem.diagonal.assign(past_.begin(), past_.end());
    problem.is_listed = [&args](int64_t b, int64_t h, int64_t query_block, int64_t key_block) {
      const DynamicMask& mask = *args.mask.fixed.elements();
      KeyTileRun run;
      return mask.runs(mask.self, b, h, query_block * kBlock, kBlock, kBlock, key_block, key_block + 1, &run) > 0;
    };
    return problem;
  }
  void Compare(const BlockSets& sets, const std::vector<char>& output, const std::string& where) const {
    Dense left = dense_;
    left.allowed = sets.kept;
    const Answer answer = Attend(left);
    for (size_t i = 0; i < answer.output.size(); ++i) {
      const size_t row = i / kSize;
      const double got = LoadFloat(dtype_, &output[i * static_cast<size_t>(SizeOfFloat(dtype_))]);
      CHECK(std::isfinite(got), where, ": row ", row);
      if (sets.is_uncertain[row] != 0) continue;
      const double tolerance = Tolerance(dtype_, answer.magnitude[row] + 48, dense_.T, 1.25, answer.output[i]);
      CHECK(std::abs(got - answer.output[i]) <= tolerance, where, ": row ", row, ": ", got, ", expected ",
            answer.output[i], " ± ", tolerance);
    }
  }

  const std::vector<int32_t> past_, ends_;
  const int64_t S_;
  const MaskCase& mask_;
  const DType dtype_;
  const bool is_int8_;
  std::vector<float> key_scale_, value_scale_;
  Dense dense_;
};

void ChooseInCaches(CpuIsa isa) {
  uint64_t scored = 0, skipped = 0, uncertain = 0, seed = 0;
  for (const MaskCase& mask : kMasks) {
    for (const auto& [dtype, S] : {std::pair(DType::kF32, int64_t{128}), std::pair(DType::kF32, int64_t{384}),
                                   std::pair(DType::kF16, int64_t{200}), std::pair(DType::kBF16, int64_t{200})}) {
      const auto n = static_cast<int32_t>(S);
      CacheTrial({0, 333, 640}, {n, 333 + n, 640 + n}, S, mask, dtype, false, ++seed)
          .Check(isa, 0.05f, &scored, &skipped, &uncertain);
      CountCases(1);
    }
    // A padded first prompt, and int8.
    CacheTrial({0, 0}, {300, 140}, 300, mask, DType::kF32, false, ++seed)
        .Check(isa, 0.05f, &scored, &skipped, &uncertain);
    CacheTrial({77, 500}, {277, 700}, 200, mask, DType::kF32, true, ++seed)
        .Check(isa, 0.05f, &scored, &skipped, &uncertain);
    CountCases(2);
  }
  const double share = static_cast<double>(skipped) / static_cast<double>(scored);
  CHECK(share > 0.1 && share < 0.8, "share ", share);
  CHECK(static_cast<double>(uncertain) < 0.005 * static_cast<double>(scored), uncertain, " of ", scored);
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
    float level = 0;
    for (size_t i = 0; i < key.size(); i += kSize) {
      if (i / kSize / kHeads % kLevelKeys == 0 && i / kSize % kHeads == 0) level = 50 * random->Unit();
      query[i] = i / kSize / kHeads / 200 % 2 == 0 ? 4.0f : -4.0f;
      key[i] = level;
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
    args.scores.block_threshold = 0.1f;
    args.scores.diagonal.first = lengths[b] - S;
    return args;
  }
};

// Blocks begin at the first row of each sequence: packed sequences have the bits of separate calls. Padding goes with
// them.
void ChooseInPackedSequences(CpuIsa isa) {
  Random random(3);
  const Sequences all({700, 130, 1, 400, 128}, &random);
  const auto count = static_cast<int64_t>(all.lengths.size());
  const size_t row = Sequences::kHeads * Sequences::kSize;
  std::vector<uint8_t> pad(static_cast<size_t>(count * all.longest), 1);
  for (size_t i = 0; i < pad.size(); ++i) pad[i] = i % 300 > 40;
  for (const bool is_padded : {false, true}) {
    std::vector<float> together(all.query.size()), wanted(all.query.size());
    AttentionArgs args = all.One(0, all.lengths[0], together.data());
    args.shape.B = count, args.shape.S = args.shape.T = all.longest;
    args.sequences.starts = all.starts.data(), args.sequences.has_queries = true;
    args.kv.key_ends = all.lengths.data();
    if (is_padded) args.mask.pad = pad.data();
    CpuAttentionConfig config;
    config.isa = isa, config.m = 64, config.n = 128;
    ResetSkipCounts();
    RunArgs(args, config);
    const SkipCounts counts = ReadSkipCounts();
    ResetSkipCounts();
    for (size_t b = 0; b < all.lengths.size(); ++b) {
      const size_t first = static_cast<size_t>(all.starts[b]) * row;
      const std::vector<int32_t> starts = {0, all.lengths[b]}, ends = {all.lengths[b]};
      AttentionArgs one = all.One(b, all.lengths[b], wanted.data() + first);
      if (all.lengths[b] <= kBlock) one.scores.block_threshold = 0;  // one block, which is chosen
      one.sequences.starts = starts.data(), one.sequences.has_queries = true, one.kv.key_ends = ends.data();
      if (is_padded) one.mask.pad = pad.data() + static_cast<int64_t>(b) * all.longest;
      RunArgs(one, config);
    }
    CHECK(std::memcmp(together.data(), wanted.data(), together.size() * sizeof(float)) == 0);
    const SkipCounts apart = ReadSkipCounts();
    CHECK(counts.skipped == apart.skipped && counts.skipped > counts.scored / 5, counts.skipped, " of ", counts.scored,
          ", apart ", apart.skipped);
    CountCases(1);
  }
}

// Pages have the bits of keys that lie one behind the other.
void ChooseInPages(CpuIsa isa) {
  Random random(4);
  const Sequences all({1000}, &random);
  const int64_t keys = all.longest;
  const size_t row = Sequences::kHeads * Sequences::kSize;
  for (const int64_t S : {128, 200, 1000}) {
    for (const int shift : {4, 8}) {
      const int64_t page = int64_t{1} << shift, pages = (keys + page - 1) / page;
      std::vector<int32_t> table;
      for (int64_t i = 0; i < pages; ++i) table.push_back(static_cast<int32_t>(pages - 1 - i));
      std::vector<float> key(static_cast<size_t>(pages * page) * row, std::nanf("")), value(key);
      for (int64_t t = 0; t < keys; ++t) {
        const auto at = static_cast<size_t>(table[static_cast<size_t>(t / page)] * page + t % page) * row;
        std::copy_n(all.key.begin() + t * static_cast<int64_t>(row), row, key.begin() + static_cast<int64_t>(at));
        std::copy_n(all.value.begin() + t * static_cast<int64_t>(row), row, value.begin() + static_cast<int64_t>(at));
      }
      const std::vector<int32_t> ends = {static_cast<int32_t>(keys)};
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
#define STOF_TESTS(id, name, is_supported)                                                                     \
  {{"ChosenBlocksOfCachesAreThoseOfTheDefinition[" #name "]", [] { ChooseInCaches(CpuIsa::id); }, kOneThread}, \
   {"PackedSequencesChooseLikeSeparateCalls[" #name "]", [] { ChooseInPackedSequences(CpuIsa::id); }},         \
   {"PagesChooseLikeContiguousKeys[" #name "]", [] { ChooseInPages(CpuIsa::id); }}},
  static constexpr Test kRows[][3] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  return RegisterByIsa(&cpu::KernelTable::attention, kRows);
}();

}  // namespace
}  // namespace stof::test::attention
