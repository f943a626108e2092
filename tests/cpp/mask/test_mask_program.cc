// SPDX-License-Identifier: Apache-2.0
// Masks as programs for the device, evaluated on the host by the same code: every pair against plain recursion, boxes
// against the pairs in them. Needs no GPU.
#include <algorithm>
#include <limits>

#include "cuda/mask/program/mask_program.h"
#include "cuda/mask/program/mask_words.h"
#include "cuda/mask/program/program_cache.h"
#include "plugins/core/mask/attention_mask.h"
#include "tests/cpp/mask/random_expr.h"

namespace stof::test {
namespace {

using cuda::CompileMask;
using cuda::MaskBox;
using cuda::MaskIntervals;
using cuda::MaskOperand;
using cuda::MaskProgram;
using cuda::MaskView;
using cuda::MaskWord;

// Minimum and maximum of every block and group, as the device's kernel lays them out.
std::vector<int64_t> Summaries(const MaskProgram& program) {
  std::vector<int64_t> pairs(static_cast<size_t>(2 * program.pairs));
  const auto fill = [&](const MaskOperand& operand, int32_t first, int size) {
    for (int64_t at = 0; at * size < operand.count; ++at) {
      int64_t low = std::numeric_limits<int64_t>::max(), high = std::numeric_limits<int64_t>::min();
      for (int64_t i = at * size; i < std::min<int64_t>(operand.count, (at + 1) * size); ++i) {
        low = std::min(low, cuda::ReadElement(operand, i));
        high = std::max(high, cuda::ReadElement(operand, i));
      }
      pairs[static_cast<size_t>(2 * (first + at))] = low;
      pairs[static_cast<size_t>(2 * (first + at) + 1)] = high;
    }
  };
  for (const MaskOperand& operand : program.operands) {
    if (operand.blocks < 0) continue;
    fill(operand, operand.blocks, MaskOperand::kBlock);
    fill(operand, operand.groups, MaskOperand::kGroup);
  }
  return pairs;
}

struct Bound {
  std::vector<int64_t> summaries;
  MaskView view;
  explicit Bound(const MaskProgram& program) : summaries(Summaries(program)) {
    view.steps = program.steps.data(), view.affines = program.affines.data(), view.operands = program.operands.data();
    view.summaries = summaries.data();
    view.words = program.words.data(), view.sides = program.sides.data();
    view.count = static_cast<int32_t>(program.steps.size());
    view.words_count = static_cast<int32_t>(program.words.size());
    view.narrow = program.narrow ? 1 : 0;
  }
};

cuda::MaskInputs AllInputs(const Operands& operands) {
  cuda::MaskInputs inputs = operands.runtime;
  inputs.insert(inputs.end(), operands.tables.begin(), operands.tables.end());
  return inputs;
}

template <typename V>
void CheckRows(const Bound& bound, const RandomMask& mask, const MaskBox& box) {
  for (int64_t q0 = box.q_lo; q0 <= box.q_hi; q0 += cuda::kMaskRows<V>) {
    for (int64_t k = box.k_lo; k <= box.k_hi; ++k) {
      V allowed[cuda::kMaskRows<V>];
      cuda::EvaluateRows<V>(bound.view, box.b, box.h, q0, k, allowed);
      for (int64_t q = q0; q <= std::min<int64_t>(box.q_hi, q0 + cuda::kMaskRows<V> - 1); ++q) {
        const bool want = Allowed(mask.expr, mask.sizes, mask.bindings, box.b, box.h, q, k);
        CHECK(allowed[q - q0] == (want ? 1 : 0), mask.text, " at ", box.b, " ", box.h, " ", q, " ", k);
      }
    }
  }
}

// The host's evaluator, rows of keys in lanes, against the same oracle and its own intervals.
void CheckLanes(const RandomMask& mask, const MaskBox& box) {
  ExprEvaluator evaluator(mask.expr, mask.sizes, mask.bindings);
  const Verdict verdict = evaluator.Classify({box.b, box.b, box.h, box.h, box.q_lo, box.q_hi, box.k_lo, box.k_hi});
  const int64_t count = box.k_hi - box.k_lo + 1;
  std::vector<uint8_t> allowed(static_cast<size_t>(count));
  for (int64_t q = box.q_lo; q <= box.q_hi; ++q) {
    evaluator.Row(box.b, box.h, q, box.k_lo, count, allowed.data());
    for (int64_t i = 0; i < count; ++i) {
      const bool want = Allowed(mask.expr, mask.sizes, mask.bindings, box.b, box.h, q, box.k_lo + i);
      CHECK(allowed[static_cast<size_t>(i)] == (want ? 1 : 0), mask.text, " in lanes at ", q, " ", box.k_lo + i);
      CHECK(verdict != (want ? Verdict::kNone : Verdict::kAll), mask.text, " classified otherwise at ", q);
    }
  }
}

// The lanes of a warp, for one query.
struct HostLanes {
  const MaskView& view;
  int64_t q, last;  // last: the last key

  int64_t Side(int side, int64_t b, int64_t h, int64_t key) const {
    return cuda::EvaluateOne(view, view.sides[side].first, view.sides[side].count, b, h, q, std::min(key, last));
  }
  template <typename Bit>
  static void Fill(const Bit& bit, uint32_t (&bits)[2]) {
    for (int j = 0; j < 64; ++j) bits[j / 32] = (j % 32 == 0 ? 0 : bits[j / 32]) | (bit(j) ? 1u : 0u) << j % 32;
  }
  int64_t Row(int side) const { return Side(side, b_, h_, 0); }
  void Outer(const MaskWord& word, int64_t b, int64_t h, int64_t k0, uint32_t (&bits)[2]) const {
    const int64_t row = Row(word.row);
    Fill([&](int j) { return Compare<int64_t>(word.op, row, Side(word.key, b, h, k0 + j)); }, bits);
  }
  void Keys(const MaskWord& word, int64_t b, int64_t h, int64_t k0, uint32_t (&bits)[2]) const {
    Fill([&](int j) { return Side(word.key, b, h, k0 + j) != 0; }, bits);
  }
  void Bytes(const MaskWord& word, int64_t b, int64_t h, int64_t k0, uint32_t (&bits)[2]) const {
    const Affine& x = view.affines[view.steps[word.first].arg];
    const MaskOperand& operand = view.operands[view.steps[word.first + 1].operand];
    const auto* bytes = static_cast<const uint8_t*>(operand.data) + (x.constant + x.b * b + x.h * h + x.q * q);
    Fill([&](int j) { return k0 + j <= last && bytes[k0 + j] != 0; }, bits);
  }
  void Pairs(const MaskWord& word, int64_t b, int64_t h, int64_t k0, uint32_t (&bits)[2]) const {
    Fill([&](int j) { return cuda::EvaluateOne(view, word.first, word.count, b, h, q, std::min(k0 + j, last)) != 0; },
         bits);
  }
  int64_t b_ = 0, h_ = 0;
};

// Whether words give the expression in a box, and what they may be in it holds. The number of words of each kind is
// added to `kinds`; the result: whether the box was decided.
bool CheckWords(const Bound& bound, const MaskProgram& program, const RandomMask& mask, const MaskBox& box,
                std::vector<int>* kinds) {
  const MaskView& view = bound.view;
  CHECK(!program.words.empty(), mask.text);
  for (const MaskWord& word : program.words) ++(*kinds)[word.kind];
  const auto extremes = [&](int i) {
    const cuda::MaskSide& side = program.sides[static_cast<size_t>(i)];
    Interval found{std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
    for (int64_t at = side.keys ? box.k_lo : box.q_lo; at <= (side.keys ? box.k_hi : box.q_hi); ++at) {
      const int64_t value =
          cuda::EvaluateOne(view, side.first, side.count, box.b, box.h, side.keys ? box.q_lo : at, side.keys ? at : 0);
      found = {std::min(found.lo, value), std::max(found.hi, value)};
    }
    return found;
  };
  bool ok = true, narrow = true;
  const cuda::MaskCan can = cuda::DecideWords<true>(view, box, extremes, &ok, &narrow);
  CHECK(ok && (can.zero || can.one), mask.text);
  for (int64_t q = box.q_lo; q <= box.q_hi; ++q) {
    const HostLanes lanes{view, q, mask.sizes.T - 1, box.b, box.h};
    for (int64_t k0 = box.k_lo; k0 <= box.k_hi; k0 += 64) {
      uint32_t bits[2];
      cuda::EvaluateWords(view, box.b, box.h, q, k0, lanes, bits);
      for (int64_t k = k0; k <= std::min(box.k_hi, k0 + 63); ++k) {
        const bool want = Allowed(mask.expr, mask.sizes, mask.bindings, box.b, box.h, q, k);
        const bool found = (bits[(k - k0) / 32] >> (k - k0) % 32 & 1) != 0;
        CHECK(found == want, mask.text, " in words at ", box.b, " ", box.h, " ", q, " ", k);
        CHECK(want ? can.one : can.zero, mask.text, " decided otherwise at ", box.b, " ", box.h, " ", q, " ", k);
      }
    }
  }
  return can.zero != can.one;
}

TEST(MaskProgramsGiveTheExpression) {
  const int cases = Cases(1500);
  int decided = 0, narrow = 0, boxes = 0, in_words = 0;
  std::vector<int> kinds(MaskWord::kPairs + 1);
  for (int seed = 0; seed < cases; ++seed) {
    Random random(static_cast<uint64_t>(seed));
    const RandomMask mask = MakeRandomMask(&random, RandomSizes(&random, seed % 10 == 0 ? 1500 : 90), seed % 3 != 0);
    const MaskParts parts = SplitMask(mask.expr);
    // In half of the cases in two parts, as the operator has them; padding belongs to neither.
    const bool split = random.OneIn(2) && !parts.pad && !(parts.fixed.empty() && parts.dynamic.empty());
    MaskProgram program;
    const Status status = CompileMask(split ? parts.fixed : MaskExpr(), split ? parts.dynamic : mask.expr, mask.sizes,
                                      AllInputs(mask.operands), &program);
    CHECK(status.ok(), mask.text, ": ", status.message());
    const ExprSizes& s = mask.sizes;
    const int64_t b = random.Range(0, s.B - 1), h = random.Range(0, s.H - 1);
    const Bound bound(program);
    for (int i = 0; i < 6; ++i) {
      MaskBox box;
      box.b = b, box.h = h;
      box.q_lo = s.P + random.Range(0, s.S - 1), box.k_lo = random.Range(0, s.T - 1);
      box.q_hi = std::min(s.P + s.S - 1, box.q_lo + random.Range(0, 40));
      box.k_hi = std::min(s.T - 1, box.k_lo + random.Range(0, 70));
      MaskIntervals intervals(bound.view);
      const Interval found = intervals.Run(box);
      CHECK(intervals.ok(), mask.text, ": Check passed, so every box must");
      CHECK(found.lo >= 0 && found.hi <= 1 && found.lo <= found.hi, mask.text, ": ", found.lo, " to ", found.hi);
      ++boxes;
      CheckRows<int64_t>(bound, mask, box);
      CheckLanes(mask, box);
      in_words += CheckWords(bound, program, mask, box, &kinds) ? 1 : 0;
      if (intervals.narrow()) {
        CheckRows<int32_t>(bound, mask, box);
        ++narrow;
      }
      if (found.lo != found.hi) continue;
      ++decided;
      for (int64_t q = box.q_lo; q <= box.q_hi; ++q) {
        for (int64_t k = box.k_lo; k <= box.k_hi; ++k) {
          CHECK(Allowed(mask.expr, s, mask.bindings, b, h, q, k) == (found.lo == 1), mask.text, " at ", q, " ", k);
        }
      }
    }
  }
  CHECK(decided * 4 > boxes && narrow * 2 > boxes, decided, " and ", narrow, " of ", boxes);
  CHECK(in_words * 4 > boxes, in_words, " of ", boxes, " decided in words");
  kinds[MaskWord::kBytes] += 1;  // has a test of its own
  // A share of the cases, as under sanitizers, need not have the rare ones.
  for (size_t kind = 0; kind < kinds.size() && Effort() >= 1; ++kind) {
    CHECK(kinds[kind] > 0, "words of kind ", kind, ": ", kinds[kind]);
  }
  CountCases(boxes);
}

// Every comparison of lines, distances and rests, with constants around where something changes.
TEST(MaskWordsOfLinesAndRests) {
  int cases = 0;
  std::vector<int> kinds(MaskWord::kPairs + 1);
  for (const char* op : {"<", "<=", ">", ">=", "==", "!="}) {
    std::vector<std::string> texts;
    for (const int c : {-130, -64, -32, -1, 0, 1, 31, 32, 33, 64, 130}) {
      for (const char* left :
           {"abs(q - k)", "q - k", "k + 3 * h", "q + 2 * k", "abs(3 * k - 2 * q)", "2 * q", "q - 70"}) {
        texts.push_back(std::string(left) + " " + op + " " + std::to_string(c));
      }
    }
    for (const int m : {1, 2, 3, 5, 31, 32, 33, 64, 100}) {
      for (const int c : {-1, 0, 1, m / 2, m - 1, m}) {
        for (const char* left : {"(q - k)", "(k - 2 * q + h)", "(q * 5 + k - 1000)"}) {
          texts.push_back(std::string(left) + " % " + std::to_string(m) + " " + op + " " + std::to_string(c));
        }
      }
    }
    for (const std::string& text : texts) {
      RandomMask mask;
      mask.text = text, mask.sizes = {1, 2, 170, 150, 5};
      Status status = MaskExpr::Parse(text, {}, &mask.expr);
      CHECK(status.ok(), text, ": ", status.message());
      MaskProgram program;
      status = CompileMask(mask.expr, MaskExpr(), mask.sizes, {}, &program);
      CHECK(status.ok() && program.words.size() == 1, text, ": ", status.message());
      const Bound bound(program);
      CheckWords(bound, program, mask, {0, 1, 60, 75, 0, 149}, &kinds);
      CheckWords(bound, program, mask, {0, 0, 140, 141, 32, 95}, &kinds);
      ++cases;
    }
  }
  CHECK(kinds[MaskWord::kRange] > 500 && kinds[MaskWord::kLinear] > 100 && kinds[MaskWord::kAbs] > 50 &&
        kinds[MaskWord::kMod] == 2 * 6 * 9 * 6 * 3);
  CountCases(cases);
}

Tensor Vector(std::vector<int64_t>* values, std::initializer_list<int64_t> dims) {
  Tensor tensor;
  tensor.data = values->data();
  tensor.dtype = DType::kI64;
  tensor.rank = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), tensor.dims);
  return tensor;
}

Status Compile(const std::string& text, const ExprSizes& sizes, const cuda::MaskInputs& inputs, MaskProgram* program) {
  MaskExpr expr;
  STOF_RETURN_IF_ERROR(MaskExpr::Parse(text, {}, &expr));
  return CompileMask(MaskExpr(), expr, sizes, inputs, program);
}

// Boolean tables in the order of keys, and vectors with the extreme numbers of their type.
TEST(MaskWordsOfTablesAndVectors) {
  Random random(7);
  std::vector<uint8_t> bytes(2 * 40 * 150);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.OneIn(2) ? random.Range(1, 255) : 0);
  std::vector<int64_t> segment_q(40), segment_k(150), lengths = {1};
  Tensor table;
  table.data = bytes.data(), table.dtype = DType::kBool, table.rank = 3;
  table.dims[0] = 2, table.dims[1] = 40, table.dims[2] = 150;
  const std::vector<std::pair<std::string, Tensor>> tables = {{"table0", table}};
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  int cases = 0;
  std::vector<int> kinds(MaskWord::kPairs + 1);
  for (const char* text : {"table0[h, q, k]", "not table0[h, q, k] and k <= q", "segment_q[b, q] == segment_k[b, k]",
                           "segment_q[b, q] < segment_k[b, k] or k <= q", "segment_k[b, k] <= segment_q[b, q]",
                           "k < segment_q[b, q]", "segment_q[b, q] - 0 != k", "q >= segment_k[b, k]", "k < lengths[b]",
                           "lengths[b] <= k - q", "q - k > segment_q[b, q]"}) {
    for (const int64_t far : {int64_t{60}, int64_t{1} << 29, int64_t{1} << 40, kMost}) {
      for (int64_t& x : segment_q)
        x = random.OneIn(9) ? (random.OneIn(2) ? far : far == kMost ? kLeast : -far) : random.Range(-3, 50);
      for (int64_t& x : segment_k)
        x = random.OneIn(9) ? (random.OneIn(2) ? far : far == kMost ? kLeast : -far) : random.Range(-3, 50);
      lengths[0] = random.OneIn(2) ? far : -far;
      RandomMask mask;
      mask.text = text, mask.sizes = {1, 2, 40, 150, 0};
      Status status = MaskExpr::Parse(text, tables, &mask.expr);
      CHECK(status.ok(), text, ": ", status.message());
      mask.operands.tables = tables;
      mask.operands.runtime = {{"segment_q", Vector(&segment_q, {1, 40})},
                               {"segment_k", Vector(&segment_k, {1, 150})},
                               {"lengths", Vector(&lengths, {1})}};
      mask.bindings = Bind(mask.expr, mask.operands.runtime);
      MaskProgram program;
      status = CompileMask(MaskExpr(), mask.expr, mask.sizes, AllInputs(mask.operands), &program);
      CHECK(status.ok(), text, ": ", status.message());
      if (!program.proven) continue;
      const Bound bound(program);
      for (const int64_t q : {0, 7, 39}) CheckWords(bound, program, mask, {0, q % 2, q, q, 0, 149}, &kinds);
      CheckWords(bound, program, mask, {0, 1, 3, 9, 32, 100}, &kinds);
      ++cases;
    }
  }
  CHECK(kinds[MaskWord::kBytes] == 32 && kinds[MaskWord::kOuter] > 40 && kinds[MaskWord::kPairs] < 40,
        kinds[MaskWord::kBytes], " ", kinds[MaskWord::kOuter], " ", kinds[MaskWord::kPairs]);
  CountCases(cases);
}

// Vectors whose numbers no host has seen: what is right for all of them, for some, for none.
TEST(MaskProgramsTellWhatVectorsMayBreak) {
  const ExprSizes sizes = {2, 1, 8, 8, 0};
  std::vector<int64_t> keys(16, 3), lengths = {8, 5};
  const cuda::MaskInputs inputs = {{"segment_k", Vector(&keys, {2, 8})}, {"lengths", Vector(&lengths, {2})}};
  MaskProgram program;
  for (const char* text : {"k < lengths[b]", "segment_k[b, k] == lengths[b]", "not (segment_k[b, k] != 3) or k <= q"}) {
    const Status status = Compile(text, sizes, inputs, &program);
    CHECK(status.ok() && program.proven, text, ": ", status.message());
  }
  for (const char* text : {"k + lengths[b] > 9", "segment_k[b, lengths[b] - 1] == 3", "abs(lengths[b]) > k"}) {
    const Status status = Compile(text, sizes, inputs, &program);
    CHECK(status.ok() && !program.proven, text, ": ", status.message());
  }
  for (const char* text : {"segment_k[b, k + 1] == 3", "segment_q[b, q] == 3", "lengths[k] == 3"}) {
    const Status status = Compile(text, sizes, inputs, &program);
    CHECK(!status.ok(), text, " must be an error");
  }
  // An index beyond its table and a sum beyond 2^61 are seen where they happen.
  const auto ok = [&](const char* text) {
    const Status status = Compile(text, sizes, inputs, &program);
    CHECK(status.ok(), text, ": ", status.message());
    const Bound bound(program);
    MaskIntervals intervals(bound.view);
    intervals.Run({0, 0, 0, 7, 0, 7});
    return intervals.ok();
  };
  CHECK(ok("segment_k[b, lengths[b] - 1] == 3"));
  lengths[0] = 9;
  CHECK(!ok("segment_k[b, lengths[b] - 1] == 3"));
  lengths[0] = 0;
  CHECK(!ok("segment_k[b, lengths[b] - 1] == 3"));
  lengths[0] = std::numeric_limits<int64_t>::min();
  CHECK(!ok("k - lengths[b] > 9"));
  CHECK(!ok("-lengths[b] > 9"));
  CHECK(ok("k > lengths[b]"));
  lengths[0] = int64_t{1} << 40;
  CHECK(!ok("lengths[b] * lengths[b] > 9"));
  CHECK(ok("lengths[b] * 3 > k"));
  CountCases(15);
}

// Which masks depend on the distance from query to key alone.
TEST(MaskProgramsByDistance) {
  const ExprSizes sizes = {2, 3, 200, 300, 40};
  int cases = 0;
  for (const auto& [text, by_distance] : std::initializer_list<std::pair<const char*, bool>>{
           {"k <= q", true},
           {"abs(q - k) <= 128 and (k - q) % 3 != b", true},
           {"(2 * q - h - 2 * k) // 7 % 2 == 0 and not q - k == 3", true},
           {"q - k < S // 2 or h == 1", true},
           {"abs(q - k) <= 128 or k < 16", false},
           {"q // 64 == k // 64", false},
           {"q - 2 * k > 0", false},
           {"q + k > 100", false},
           {"k < lengths[b]", false},
           {"k <= q and segment_k[b, k] == 1", false},
           // Look-ups of one index are decided by boxes as everything else; of several, some smaller boxes are not.
           {"table0[max(min(q - k, 9), 0)] == 1", true},
           {"table0[q - k + T] == 1", true},
           {"table1[h, q - k + T] == 1", true},
           {"table1[h, max(min(q - k, 9), 0)] == 1", false},
           {"table0[q] == 1", false}}) {
    std::vector<int64_t> ones(3 * 700, 1);
    const cuda::MaskInputs inputs = {{"lengths", Vector(&ones, {2})},
                                     {"segment_k", Vector(&ones, {2, 300})},
                                     {"table0", Vector(&ones, {700})},
                                     {"table1", Vector(&ones, {3, 700})}};
    MaskProgram program;
    MaskExpr expr;
    Status status = MaskExpr::Parse(text, {inputs[2], inputs[3]}, &expr);
    CHECK(status.ok(), text, ": ", status.message());
    status = CompileMask(MaskExpr(), expr, sizes, inputs, &program);
    CHECK(status.ok() && program.diagonal == by_distance, text, ": ", status.message());
    ++cases;
  }
  CountCases(cases);
}

// Long and deep expressions: the stack of a program grows with the logarithm of what is balanced only.
TEST(MaskProgramsOfLongExpressions) {
  const ExprSizes sizes = {1, 2, 70, 70, 0};
  std::string chain = "k <= q";
  for (int i = 0; i < 400; ++i) chain += " and (q * " + std::to_string(i + 2) + " + k) % 7 != 3";
  std::string nested = "q % 3";
  for (int i = 0; i < 20; ++i) nested = "(k % " + std::to_string(i + 2) + " - (" + nested + ") % 5)";
  for (const std::string& text : {chain, nested + " > 0"}) {
    RandomMask mask;
    mask.text = text, mask.sizes = sizes;
    Status status = MaskExpr::Parse(text, {}, &mask.expr);
    CHECK(status.ok(), status.message());
    MaskProgram program;
    status = CompileMask(mask.expr, MaskExpr(), sizes, {}, &program);
    CHECK(status.ok(), status.message());
    const Bound bound(program);
    CheckRows<int32_t>(bound, mask, {0, 1, 0, 69, 0, 69});
  }
  CountCases(2);
}

// A long expression has a bound of its work as on the CPU.
TEST(MaskProgramsOfTooManyPairs) {
  std::string text = "q - k != 0";
  for (int i = 1; i < 30; ++i) text += " and q - k != " + std::to_string(i);
  std::shared_ptr<const AttentionMask> mask;
  CHECK(MakeAttentionMask(text, {}, &mask).ok());
  MaskProgram program;
  for (const int64_t length : {int64_t{16384}, MaskExpr::kMaxSize}) {
    const Status status = CompileMask(mask->parts.fixed, mask->parts.dynamic, {1, 1, length, length, 0}, {}, &program);
    CHECK(status.ok() == (length == 16384), status.message());
    CHECK(status.ok() || status.message().find("2^38 nodes for all pairs") != std::string::npos, status.message());
  }
  CountCases(2);
}

// A remembered program is that of this run's sizes, types, shapes and addresses.
TEST(MaskProgramsAreRemembered) {
  std::shared_ptr<const AttentionMask> mask;
  const std::string text = "segment_q[b, q - P] == segment_k[b, k] and k < lengths[b] and (q + k) % 3 != 1";
  CHECK(MakeAttentionMask(text, {}, &mask).ok());
  std::vector<char> memory(64);
  const auto input = [&](const char* role, DType dtype, std::vector<int64_t> dims, int64_t at) {
    Tensor tensor;
    tensor.data = memory.data() + at, tensor.dtype = dtype, tensor.rank = static_cast<int32_t>(dims.size());
    std::copy(dims.begin(), dims.end(), tensor.dims);
    return std::pair<std::string, Tensor>(role, tensor);
  };
  Random random(11);
  MaskProgram program, direct;
  for (int i = 0; i < 400; ++i) {
    const ExprSizes sizes = {random.Range(1, 2), 2, random.Range(5, 6), random.Range(6, 7), random.Range(0, 1)};
    const DType ids = random.OneIn(2) ? DType::kI32 : DType::kI64;
    const int64_t rows = random.OneIn(3) ? 1 : sizes.B;
    // Two of them may share their memory.
    cuda::MaskInputs inputs = {input("segment_q", ids, {rows, sizes.S}, random.Range(0, 3)),
                               input("bias", DType::kF32, {1, 1, sizes.S, sizes.T}, 0),
                               input("segment_k", ids, {sizes.B, sizes.T}, random.Range(0, 3)),
                               input("lengths", DType::kI64, {sizes.B}, random.Range(0, 3))};
    if (random.OneIn(2)) std::swap(inputs[0], inputs[2]);
    if (random.OneIn(9)) inputs[3].second.data = nullptr;
    const Status expected = CompileMask(mask->parts.fixed, mask->parts.dynamic, sizes, inputs, &direct);
    const Status status = cuda::GetMaskProgram(*mask, sizes, inputs, &program);
    CHECK(status.ok() == expected.ok() && status.message() == expected.message(), status.message(), " and ",
          expected.message());
    if (!status.ok()) continue;
    CHECK(program.operands.size() == 3 && direct.operands.size() == 3);
    for (size_t at = 0; at < 3; ++at) {
      const MaskOperand &a = program.operands[at], &b = direct.operands[at];
      CHECK(a.data == b.data && a.dtype == b.dtype && a.count == b.count && std::equal(a.dims, a.dims + 4, b.dims));
    }
    CHECK(program.steps.size() == direct.steps.size() && program.uses_b == direct.uses_b &&
          program.pairs == direct.pairs && program.affines.size() == direct.affines.size());
    for (size_t at = 0; at < program.affines.size(); ++at) {
      CHECK(program.affines[at].constant == direct.affines[at].constant &&
            program.affines[at].q == direct.affines[at].q);
    }
  }
  CountCases(400);
}

}  // namespace
}  // namespace stof::test
