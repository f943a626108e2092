// SPDX-License-Identifier: Apache-2.0
// Attention under a dilated mask as dense attentions, one for each residue class.
#include <algorithm>
#include <array>

#include "plugins/core/ops/attention.h"

namespace stof {
namespace {

struct HeadStrides {
  int64_t heads;
  Strides* stride;
};

}  // namespace

bool SplitByResidue(const AttentionMask& mask, AttentionArgs* args, ExprSizes* sizes) {
  const int64_t m = mask.modulus;
  AttentionShape& shape = args->shape;
  if (m == 1 || shape.S % m != 0 || shape.T % m != 0 || sizes->P % m != 0) return false;
  if (shape.S / m < kMinResidueLength || shape.T / m < kMinResidueLength) return false;
  // Biases, relative tables and LSE would need strides of their own. A fully masked row that attends to
  // all keys means those of every class.
  const ScoreArgs& scores = args->scores;
  if (AttendsAllKeys(args->mask.empty_rows) || scores.bias.data != nullptr || scores.relative_bias.table != nullptr ||
      args->output.lse != nullptr || scores.has_relative_tables() || args->relative_value.given()) {
    return false;
  }
  const std::array<HeadStrides, 4> views = {{{shape.H, &args->query.stride},
                                             {shape.G, &args->key.stride},
                                             {shape.G, &args->value.stride},
                                             {shape.H, &args->output.stride}}};
  const auto all = [&views](auto holds) { return std::all_of(views.begin(), views.end(), holds); };
  const bool one_axis = shape.B == 1 || all([](const HeadStrides& v) { return v.stride->b == v.heads * v.stride->h; });
  int64_t B = shape.B, H = shape.H, G = shape.G;
  enum { kAsHeads, kAsBatches, kAsMoreHeads } classes;
  if (one_axis && H == G && scores.sink.data == nullptr) {
    // The classes of a head are neighbours in the order of work: their rows share cache lines.
    classes = kAsHeads, B *= H, H = G = m;
  } else if (shape.B == 1) {
    classes = kAsBatches, B = m;
  } else if (scores.sink.data != nullptr) {  // of each head
    return false;
  } else if (one_axis) {
    classes = kAsBatches, B = m, H *= shape.B, G *= shape.B;
  } else if (all([](const HeadStrides& v) { return v.stride->s == v.heads * v.stride->h; })) {
    classes = kAsMoreHeads, H *= m, G *= m;
  } else {
    return false;
  }
  using Limits = AttentionLimits;
  if (m > Limits::kMostHeads || H > Limits::kMostHeads || B > Limits::kMostLength) return false;
  for (const HeadStrides& v : views) {
    if (classes == kAsHeads) v.stride->b = v.stride->h, v.stride->h = v.stride->s;
    if (classes == kAsBatches) v.stride->b = v.stride->s;
    v.stride->s *= m;
  }
  shape.B = B, shape.H = H, shape.G = G;
  shape.S /= m, shape.T /= m;
  *sizes = {B, H, shape.S, shape.T, sizes->P / m};
  args->scores.relative_bias.query_position = sizes->P;
  args->scores.skip_threshold /= static_cast<float>(m);  // the same SkipDistance for an m-th of the keys
  args->scores.block_threshold = 0.0f;                   // blocks are of neighbours
  return true;
}

}  // namespace stof
