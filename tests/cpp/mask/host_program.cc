// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/mask/host_program.h"

#include <algorithm>
#include <limits>

namespace stof::test {
namespace {

using cuda::BitStep;
using cuda::MaskBox;
using cuda::MaskOperand;
using cuda::MaskView;

// Minimum and maximum of every block and group, as the device's kernel lays them out.
std::vector<int64_t> Summaries(const cuda::MaskProgram& program) {
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

// The lanes of a warp, for one query.
struct HostLanes {
  const MaskView& view;
  int64_t b, h, q, last;  // last: the last key

  int64_t Side(int side, int64_t key) const {
    return cuda::EvaluateOne(view, view.sides[side].first, view.sides[side].count, b, h, q, std::min(key, last));
  }
  template <typename Bit>
  static void Fill(const Bit& bit, uint32_t (&bits)[2]) {
    for (int j = 0; j < 64; ++j) bits[j / 32] = (j % 32 == 0 ? 0 : bits[j / 32]) | (bit(j) ? 1u : 0u) << j % 32;
  }
  int64_t Row(int side) const { return Side(side, 0); }
  void Outer(const BitStep& step, int64_t, int64_t, int64_t k0, uint32_t (&bits)[2]) const {
    const int64_t row = Row(step.row);
    Fill([&](int j) { return Compare<int64_t>(step.op, row, Side(step.key, k0 + j)); }, bits);
  }
  void Keys(const BitStep& step, int64_t, int64_t, int64_t k0, uint32_t (&bits)[2]) const {
    Fill([&](int j) { return Side(step.key, k0 + j) != 0; }, bits);
  }
  void Bytes(const BitStep& step, int64_t, int64_t, int64_t k0, uint32_t (&bits)[2]) const {
    const Affine& x = view.affines[view.steps[step.first].arg];
    const MaskOperand& operand = view.operands[view.steps[step.first + 1].operand];
    const auto* bytes = static_cast<const uint8_t*>(operand.data) + (x.constant + x.b * b + x.h * h + x.q * q);
    Fill([&](int j) { return k0 + j <= last && bytes[k0 + j] != 0; }, bits);
  }
  void Pairs(const BitStep& step, int64_t, int64_t, int64_t k0, uint32_t (&bits)[2]) const {
    Fill([&](int j) { return cuda::EvaluateOne(view, step.first, step.count, b, h, q, std::min(k0 + j, last)) != 0; },
         bits);
  }
};

}  // namespace

Pattern PatternByDefinition(const RandomMask& mask, const MaskBox& box) {
  Pattern pattern;
  for (int64_t q = box.q_lo; q <= box.q_hi; ++q) {
    for (int64_t k = box.k_lo; k <= box.k_hi; ++k) {
      pattern.push_back(Allowed(mask.expr, mask.sizes, mask.bindings, box.b, box.h, q, k) ? 1 : 0);
    }
  }
  return pattern;
}

void CheckPattern(const char* evaluator, const Pattern& found, const Pattern& want, const RandomMask& mask,
                  const MaskBox& box) {
  CHECK(found.size() == want.size(), evaluator);
  const auto at = std::mismatch(found.begin(), found.end(), want.begin()).first - found.begin();
  CHECK(found == want, evaluator, ": ", mask.text, " of ", mask.sizes.Print(), " at b ", box.b, " h ", box.h, " q ",
        box.q_lo + at / Keys(box), " k ", box.k_lo + at % Keys(box));
}

cuda::MaskInputs AllInputs(const Operands& operands) {
  cuda::MaskInputs inputs = operands.runtime;
  inputs.insert(inputs.end(), operands.tables.begin(), operands.tables.end());
  return inputs;
}

HostProgram::HostProgram(const cuda::MaskProgram& program, int64_t last) : summaries_(Summaries(program)), last_(last) {
  view_.steps = program.steps.data(), view_.affines = program.affines.data();
  view_.operands = program.operands.data(), view_.summaries = summaries_.data();
  view_.bit_steps = program.bit_steps.data(), view_.sides = program.sides.data();
  view_.count = static_cast<int32_t>(program.steps.size());
  view_.bit_steps_count = static_cast<int32_t>(program.bit_steps.size());
  view_.narrow = program.narrow ? 1 : 0;
}

template <typename V>
Pattern HostProgram::ByNumbers(const MaskBox& box) const {
  Pattern pattern(static_cast<size_t>(Queries(box) * Keys(box)));
  for (int64_t q0 = box.q_lo; q0 <= box.q_hi; q0 += cuda::kMaskRows<V>) {
    for (int64_t k = box.k_lo; k <= box.k_hi; ++k) {
      V allowed[cuda::kMaskRows<V>];
      cuda::EvaluateRows<V>(view_, box.b, box.h, q0, k, allowed);
      for (int64_t q = q0; q <= std::min<int64_t>(box.q_hi, q0 + cuda::kMaskRows<V> - 1); ++q) {
        pattern[static_cast<size_t>((q - box.q_lo) * Keys(box) + k - box.k_lo)] = static_cast<uint8_t>(allowed[q - q0]);
      }
    }
  }
  return pattern;
}
template Pattern HostProgram::ByNumbers<int32_t>(const MaskBox&) const;
template Pattern HostProgram::ByNumbers<int64_t>(const MaskBox&) const;

Pattern HostProgram::ByBits(const MaskBox& box) const {
  Pattern pattern;
  for (int64_t q = box.q_lo; q <= box.q_hi; ++q) {
    const HostLanes lanes{view_, box.b, box.h, q, last_};
    for (int64_t k0 = box.k_lo; k0 <= box.k_hi; k0 += 64) {
      uint32_t bits[2];
      cuda::EvaluateBits(view_, box.b, box.h, q, k0, lanes, bits);
      for (int64_t j = 0; j < std::min<int64_t>(64, box.k_hi - k0 + 1); ++j) {
        pattern.push_back(static_cast<uint8_t>(bits[j / 32] >> j % 32 & 1));
      }
    }
  }
  return pattern;
}

template <bool kIntervals>
cuda::MaskCan HostProgram::Decide(const MaskBox& box, bool* ok, bool* narrow) const {
  return cuda::DecideBits<kIntervals>(view_, box, [&](int side) { return Extremes(side, box); }, ok, narrow);
}
template cuda::MaskCan HostProgram::Decide<false>(const MaskBox&, bool*, bool*) const;
template cuda::MaskCan HostProgram::Decide<true>(const MaskBox&, bool*, bool*) const;

Interval HostProgram::Extremes(int i, const MaskBox& box) const {
  const cuda::MaskSide& side = view_.sides[i];
  const bool keys = side.keys != 0;
  Interval extremes{std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  for (int64_t at = keys ? box.k_lo : box.q_lo; at <= (keys ? box.k_hi : box.q_hi); ++at) {
    const int64_t value =
        cuda::EvaluateOne(view_, side.first, side.count, box.b, box.h, keys ? box.q_lo : at, keys ? at : 0);
    extremes = {std::min(extremes.lo, value), std::max(extremes.hi, value)};
  }
  return extremes;
}

}  // namespace stof::test
