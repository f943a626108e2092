// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/workspace.h"

#include <algorithm>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/workspace_bounds.h"
#include "cuda/choose_pages/choose.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {

namespace {

// Scores and lists of pages, where some are chosen.
int64_t BoundChoiceWorkspace(const AttentionArgs& args) {
  const AttentionShape& shape = args.shape;
  if (!args.kv.choice.given()) return 0;
  const int64_t pages = CountPages(shape.T, args.kv.choice.rows);
  return RoundUp(ChooseWorkspace(shape.B * shape.G, pages, ListColumns(args.kv.choice.chosen, pages)).bytes, 64);
}

}  // namespace

// Fewer splits where memory is short, at least one.
int64_t BoundDecodeWorkspace(const AttentionArgs& args, const AttentionMask&) {
  constexpr int64_t kMost = int64_t{16} << 20;
  const AttentionShape& shape = args.shape;
  const int64_t rows = shape.B * shape.H * std::min<int64_t>(shape.S, kDecodeQueries);
  const int64_t splits = std::min<int64_t>(CeilDiv(shape.T, kTileKeys), kMostDecodeSplits);
  const int64_t least = DecodeWorkspace(rows, 1, shape.Dv).bytes;
  return std::max(least, std::min(DecodeWorkspace(rows, splits, shape.Dv).bytes, kMost)) + BoundChoiceWorkspace(args);
}

}  // namespace cuda
}  // namespace stof
