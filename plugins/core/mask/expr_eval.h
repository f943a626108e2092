// SPDX-License-Identifier: Apache-2.0
// Evaluation of mask expressions: whole boxes by intervals, rows of keys element by element.
#ifndef STOF_PLUGINS_CORE_MASK_EXPR_EVAL_H_
#define STOF_PLUGINS_CORE_MASK_EXPR_EVAL_H_

#include <cstdint>
#include <vector>

#include "plugins/core/mask/expr.h"
#include "plugins/core/mask/expr_affine.h"
#include "plugins/core/mask/interval.h"

namespace stof {

enum class Verdict : uint8_t { kNone, kAll, kMixed };

// Cheap to make; holds scratch memory, so one for each thread. MaskExpr::Check must have passed for the same sizes and
// bindings. Sub-expressions that are affine in b, h, q, k (k - q + 3, also the two sides of k <= q) are evaluated as
// one: their intervals are exact and their rows cost one addition.
class ExprEvaluator {
 public:
  ExprEvaluator(const MaskExpr& expr, const ExprSizes& sizes, std::vector<ExprBinding> bindings);

  Verdict Classify(const ExprBox& box);

  // For the box of the last Classify: everything that the pattern inside a box of that size can depend on. Boxes of
  // equal size and signature hold equal patterns: all tiles along a diagonal of a window, say.
  void Signature(std::vector<int64_t>* signature) const;

  // allowed[i] = expression at (b, h, q, k0 + i) as 0 or 1, i < count.
  void Row(int64_t b, int64_t h, int64_t q, int64_t k0, int64_t count, uint8_t* allowed);

  // Bits [rows, words] of queries q0 ... and keys k0 ...; bit j of word w is key 32 w + j. Bits of keys from `keys` on
  // are 0. Returns the number of ones.
  int64_t Tile(int64_t b, int64_t h, int64_t q0, int64_t k0, int64_t rows, int64_t keys, int64_t words, uint32_t* bits);

 private:
  struct Place {
    int64_t b = 0, h = 0, q = 0;
  };
  static constexpr int64_t kRun = 128;  // keys evaluated at once

  const ExprNode& Node(int32_t i) const { return expr_.nodes()[static_cast<size_t>(i)]; }
  const Affine* AffineOf(int32_t i) const {
    const int32_t at = affine_[static_cast<size_t>(i)];
    return at < 0 ? nullptr : &affines_[static_cast<size_t>(at)];
  }
  Interval IntervalOf(int32_t i) const { return intervals_[static_cast<size_t>(i)]; }
  void FindAffine();
  void PlanRows();
  Interval LookupInterval(const ExprNode& node) const;
  void Sign(int32_t i, std::vector<int64_t>* signature) const;

  int64_t Uniform(int32_t i, const Place& place) const;
  template <typename V>
  void Run(const Place& place, int64_t k0, int64_t count, uint8_t* allowed);
  template <typename V>
  void Varying(int32_t i, const Place& place, int64_t k0, int64_t count);
  bool IsRow(const ExprNode& node, const int64_t* dims) const;
  int64_t FirstOf(const ExprNode& node, const int64_t* dims, int64_t index) const;
  bool IsStored() const;
  const uint8_t* StoredRow(const Place& place, int64_t k0);
  template <typename V>
  void Lookup(const ExprNode& node, int64_t count, V* out);
  template <typename V>
  V* Lane(int32_t i);

  const MaskExpr& expr_;
  ExprSizes sizes_;
  std::vector<ExprBinding> bindings_;
  ExprBox box_;                      // of the last Classify
  std::vector<Interval> intervals_;  // of the planned nodes, for box_
  std::vector<Affine> affines_;
  std::vector<int32_t> affine_;        // [nodes] index into affines_, or -1; of a comparison: left minus right
  std::vector<int32_t> plan_;          // nodes to evaluate, arguments first: what affine nodes are made of is left out
  std::vector<int32_t> uniform_;       // of those, the ones that do not depend on k
  std::vector<int32_t> varying_;       // and the ones that do
  std::vector<int32_t> lane_;          // [nodes] row of the lanes, or -1 when uniform in k
  std::vector<int64_t> value_;         // [nodes] of uniform nodes
  bool narrow_ = false;                // every value fits 32 bits: twice as many at once
  std::vector<int32_t> narrow_lanes_;  // [varying nodes, kRun]
  std::vector<int64_t> wide_lanes_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_EXPR_EVAL_H_
