// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "plugins/core/ops/attention.h"

namespace stof {
namespace {

constexpr int64_t kMostHeads = 65536;

struct View {
  int64_t heads;
  Strides* stride;
};

}  // namespace

bool SplitByResidue(const AttentionMask& mask, AttentionArgs* args, ExprSizes* sizes) {
  const int64_t m = mask.modulus;
  AttentionArgs& a = *args;
  if (m == 1 || a.S % m != 0 || a.T % m != 0 || sizes->P % m != 0) return false;
  if (a.S / m < kLeastOfResidue || a.T / m < kLeastOfResidue) return false;
  // What is given by pairs or rows would have to be strided, too; and rows without a key that take all keys mean those
  // of every part.
  const bool all_keys = a.empty_rows == EmptyRows::kMean || a.empty_rows == EmptyRows::kAll;
  if (all_keys || a.bias != nullptr || a.relative_bias != nullptr || a.lse != nullptr) return false;
  const std::array<View, 4> views = {
      {{a.H, &a.query_stride}, {a.G, &a.key_stride}, {a.G, &a.value_stride}, {a.H, &a.output_stride}}};
  const auto all = [&views](auto holds) { return std::all_of(views.begin(), views.end(), holds); };
  const bool one_axis = a.B == 1 || all([](const View& v) { return v.stride->b == v.heads * v.stride->h; });
  int64_t B = a.B, H = a.H, G = a.G;
  enum { kAsHeads, kAsBatches, kAsMoreHeads } parts;
  if (one_axis && H == G && a.sink == nullptr) {
    // Parts of a head are next to each other in the order of work: what one has brought to a cache with its rows are
    // the other's.
    parts = kAsHeads, B *= H, H = G = m;
  } else if (a.B == 1) {
    parts = kAsBatches, B = m;
  } else if (a.sink != nullptr) {  // of each head
    return false;
  } else if (one_axis) {
    parts = kAsBatches, B = m, H *= a.B, G *= a.B;
  } else if (all([](const View& v) { return v.stride->s == v.heads * v.stride->h; })) {
    parts = kAsMoreHeads, H *= m, G *= m;
  } else {
    return false;
  }
  if (m > kMostHeads || H > kMostHeads || B > MaskExpr::kMaxSize) return false;
  for (const View& v : views) {
    if (parts == kAsHeads) v.stride->b = v.stride->h, v.stride->h = v.stride->s;
    if (parts == kAsBatches) v.stride->b = v.stride->s;
    v.stride->s *= m;
  }
  a.B = B, a.H = H, a.G = G;
  a.S /= m, a.T /= m;
  *sizes = {B, H, a.S, a.T, sizes->P / m};
  a.query_position = sizes->P;
  return true;
}

}  // namespace stof
