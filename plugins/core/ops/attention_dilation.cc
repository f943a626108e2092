// SPDX-License-Identifier: Apache-2.0
// Attention under a dilated mask as dense attentions, one for each residue class.
#include <algorithm>
#include <array>

#include "plugins/core/ops/attention.h"

namespace stof {
namespace {

struct View {
  int64_t heads;
  Strides* stride;
};

}  // namespace

bool SplitByResidue(const AttentionMask& mask, AttentionArgs* args, ExprSizes* sizes) {
  const int64_t m = mask.modulus;
  AttentionArgs& a = *args;
  if (m == 1 || a.S % m != 0 || a.T % m != 0 || sizes->P % m != 0) return false;
  if (a.S / m < kMinResidueLength || a.T / m < kMinResidueLength) return false;
  // Biases and LSE would need strides of their own. A fully masked row that attends to all keys means those of every
  // class.
  const bool all_keys = a.empty_rows == EmptyRows::kMean || a.empty_rows == EmptyRows::kAll;
  if (all_keys || a.bias != nullptr || a.relative_bias != nullptr || a.lse != nullptr) return false;
  const std::array<View, 4> views = {
      {{a.H, &a.query_stride}, {a.G, &a.key_stride}, {a.G, &a.value_stride}, {a.H, &a.output_stride}}};
  const auto all = [&views](auto holds) { return std::all_of(views.begin(), views.end(), holds); };
  const bool one_axis = a.B == 1 || all([](const View& v) { return v.stride->b == v.heads * v.stride->h; });
  int64_t B = a.B, H = a.H, G = a.G;
  enum { kAsHeads, kAsBatches, kAsMoreHeads } classes;
  if (one_axis && H == G && a.sink == nullptr) {
    // The classes of a head are neighbours in the order of work: their rows share cache lines.
    classes = kAsHeads, B *= H, H = G = m;
  } else if (a.B == 1) {
    classes = kAsBatches, B = m;
  } else if (a.sink != nullptr) {  // of each head
    return false;
  } else if (one_axis) {
    classes = kAsBatches, B = m, H *= a.B, G *= a.B;
  } else if (all([](const View& v) { return v.stride->s == v.heads * v.stride->h; })) {
    classes = kAsMoreHeads, H *= m, G *= m;
  } else {
    return false;
  }
  using Limits = AttentionLimits;
  if (m > Limits::kMostHeads || H > Limits::kMostHeads || B > Limits::kMostLength) return false;
  for (const View& v : views) {
    if (classes == kAsHeads) v.stride->b = v.stride->h, v.stride->h = v.stride->s;
    if (classes == kAsBatches) v.stride->b = v.stride->s;
    v.stride->s *= m;
  }
  a.B = B, a.H = H, a.G = G;
  a.S /= m, a.T /= m;
  *sizes = {B, H, a.S, a.T, sizes->P / m};
  a.query_position = sizes->P;
  return true;
}

}  // namespace stof
