// SPDX-License-Identifier: Apache-2.0
// Every evaluator of mask expressions on the same random expressions, sizes and boxes, against plain recursion: the
// host's, and the two programs of the device compiled for the host. docs/design/mask-evaluators.md lists them.
#include <algorithm>
#include <string>

#include "plugins/core/mask/expr_eval.h"
#include "tests/cpp/mask/host_program.h"

namespace stof::test {
namespace {

using cuda::BitStep;
using cuda::MaskBox;

// What an evaluator may say of a box as a whole.
struct Claim {
  bool zero = true, one = true;  // some pair may have this value
};

void CheckClaim(const char* evaluator, Claim claim, const Pattern& want, const RandomMask& mask, const MaskBox& box) {
  for (const uint8_t value : {0, 1}) {
    const bool has = std::find(want.begin(), want.end(), value) != want.end();
    CHECK(!has || (value == 1 ? claim.one : claim.zero), evaluator, ": ", mask.text, " of ", mask.sizes.Print(),
          " has no ", static_cast<int>(value), " in b ", box.b, " h ", box.h, " q ", box.q_lo, " to ", box.q_hi, " k ",
          box.k_lo, " to ", box.k_hi);
  }
}

// Counts of what the random cases reached.
struct Reached {
  int64_t boxes = 0, narrow = 0, by_host = 0, by_intervals = 0, by_bits = 0, unproven = 0;
  std::vector<int> kinds = std::vector<int>(BitStep::kPairs + 1);
};

// The host's evaluator: boxes by intervals, rows of keys by lanes, tiles of bits.
void CheckHost(ExprEvaluator* evaluator, const RandomMask& mask, const MaskBox& box, const Pattern& want,
               Reached* reached) {
  const Verdict verdict = evaluator->Classify({box.b, box.b, box.h, box.h, box.q_lo, box.q_hi, box.k_lo, box.k_hi});
  CheckClaim("host, intervals", {verdict != Verdict::kAll, verdict != Verdict::kNone}, want, mask, box);
  reached->by_host += verdict != Verdict::kMixed ? 1 : 0;

  const int64_t keys = Keys(box), words = (keys + 31) / 32;
  Pattern rows(want.size()), tile;
  std::vector<uint32_t> bits(static_cast<size_t>(Queries(box) * words));
  const int64_t ones = evaluator->Tile(box.b, box.h, box.q_lo, box.k_lo, Queries(box), keys, words, bits.data());
  for (int64_t i = 0; i < Queries(box); ++i) {
    evaluator->Row(box.b, box.h, box.q_lo + i, box.k_lo, keys, rows.data() + i * keys);
    for (int64_t j = 0; j < keys; ++j) {
      tile.push_back(static_cast<uint8_t>(bits[static_cast<size_t>(i * words + j / 32)] >> j % 32 & 1));
    }
  }
  CheckPattern("host, rows", rows, want, mask, box);
  CheckPattern("host, tiles", tile, want, mask, box);
  CHECK(ones == std::count(want.begin(), want.end(), 1), "host, tiles: ", mask.text, ": ", ones, " ones");
}

// The device's number program: boxes by intervals, groups of queries by value.
void CheckNumbers(const HostProgram& program, const RandomMask& mask, const MaskBox& box, const Pattern& want,
                  Reached* reached) {
  cuda::MaskIntervals intervals(program.view());
  const Interval result = intervals.Run(box);
  CHECK(intervals.ok(), mask.text, ": Check passed, so every box must");
  CHECK(result.lo >= 0 && result.hi <= 1 && result.lo <= result.hi, mask.text, ": ", result.lo, " to ", result.hi);
  CheckClaim("number program, intervals", {result.lo == 0, result.hi == 1}, want, mask, box);
  reached->by_intervals += result.lo == result.hi ? 1 : 0;
  CheckPattern("number program, 64 bits", program.ByNumbers<int64_t>(box), want, mask, box);
  if (!intervals.narrow()) return;
  CheckPattern("number program, 32 bits", program.ByNumbers<int32_t>(box), want, mask, box);
  ++reached->narrow;
}

// The device's bit program: boxes by extremes, words of 32 keys by value.
bool CheckBits(const char* evaluator, const cuda::MaskProgram& compiled, const HostProgram& program,
               const RandomMask& mask, const MaskBox& box, const Pattern& want) {
  CheckPattern(evaluator, program.ByBits(box), want, mask, box);
  bool ok = true, narrow = true;
  const cuda::MaskCan can = program.Decide<true>(box, &ok, &narrow);
  CHECK(ok && (can.zero || can.one), evaluator, ": ", mask.text);
  CheckClaim(evaluator, {can.zero, can.one}, want, mask, box);
  if (!compiled.by_intervals) {  // kernels leave the intervals out
    const cuda::MaskCan same = program.Decide<false>(box, &ok, &narrow);
    CHECK(same.zero == can.zero && same.one == can.one, evaluator, ": ", mask.text);
  }
  return can.zero != can.one;
}

// A mask whose values need more than 32 bits, in a conjunct that holds for all pairs.
RandomMask Widen(RandomMask mask) {
  mask.text = "(" + mask.text + ") and k - q < 1099511627776";
  CHECK(MaskExpr::Parse(mask.text, mask.operands.tables, &mask.expr).ok(), mask.text);
  mask.bindings = Bind(mask.expr, mask.operands.runtime);
  CHECK(mask.expr.Check(mask.sizes, &mask.bindings).ok(), mask.text);
  return mask;
}

MaskBox RandomBox(Random* random, const ExprSizes& s, int64_t b, int64_t h) {
  MaskBox box;
  box.b = b, box.h = h;
  box.q_lo = s.P + random->Range(0, s.S - 1), box.k_lo = random->Range(0, s.T - 1);
  box.q_hi = std::min(s.P + s.S - 1, box.q_lo + random->Range(0, 40));
  box.k_hi = std::min(s.T - 1, box.k_lo + random->Range(0, 70));
  return box;
}

TEST(MaskEvaluatorsGiveTheExpression) {
  Reached reached;
  for (int seed = 0, cases = Cases(1500); seed < cases; ++seed) {
    Random random(static_cast<uint64_t>(seed));
    RandomMask mask = MakeRandomMask(&random, RandomSizes(&random, seed % 10 == 0 ? 1500 : 90), seed % 3 != 0);
    if (seed % 5 == 0) mask = Widen(std::move(mask));
    const MaskParts parts = SplitMask(mask.expr);
    // In half of the cases in two parts, as the operator has them; padding belongs to neither.
    const bool split = random.OneIn(2) && !parts.pad && !(parts.fixed.empty() && parts.dynamic.empty());
    cuda::MaskProgram compiled;
    const Status status = CompileMask(split ? parts.fixed : MaskExpr(), split ? parts.dynamic : mask.expr, mask.sizes,
                                      AllInputs(mask.operands), &compiled);
    CHECK(status.ok() && !compiled.bit_steps.empty(), mask.text, ": ", status.message());
    cuda::MaskProgram by_pairs = compiled;  // as of an expression that is too long, or that vectors may break
    CompilePairs(&by_pairs);
    for (const BitStep& step : compiled.bit_steps) ++reached.kinds[step.kind];
    reached.unproven += compiled.proven ? 0 : 1;

    const ExprSizes& s = mask.sizes;
    ExprEvaluator host(mask.expr, s, mask.bindings);
    const HostProgram device(compiled, s.T - 1), pairwise(by_pairs, s.T - 1);
    const int64_t b = random.Range(0, s.B - 1), h = random.Range(0, s.H - 1);
    for (int i = 0; i < 6; ++i, ++reached.boxes) {
      const MaskBox box = RandomBox(&random, s, b, h);
      const Pattern want = PatternByDefinition(mask, box);
      CheckHost(&host, mask, box, want, &reached);
      CheckNumbers(device, mask, box, want, &reached);
      reached.by_bits += CheckBits("bit program", compiled, device, mask, box, want) ? 1 : 0;
      CheckBits("bit program of pairs", by_pairs, pairwise, mask, box, want);
    }
  }
  const auto is_share = [&](int64_t count, int64_t of) { return count * of > reached.boxes; };
  CHECK(is_share(reached.by_host, 4) && is_share(reached.by_intervals, 4) && is_share(reached.by_bits, 4),
        "boxes decided: ", reached.by_host, " ", reached.by_intervals, " ", reached.by_bits, " of ", reached.boxes);
  CHECK(is_share(reached.narrow, 2) && is_share(reached.boxes - reached.narrow, 6), reached.narrow, " narrow of ",
        reached.boxes);
  reached.kinds[BitStep::kBytes] += 1;  // has a test of its own
  // A share of the cases, as under sanitizers, need not have the rare ones.
  for (size_t kind = 0; kind < reached.kinds.size() && Effort() >= 1; ++kind) {
    CHECK(reached.kinds[kind] > 0, "bit steps of kind ", kind);
  }
  CHECK(Effort() < 1 || reached.unproven > 0);
  CountCases(reached.boxes);
}

}  // namespace
}  // namespace stof::test
