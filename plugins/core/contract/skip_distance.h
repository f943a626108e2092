// SPDX-License-Identifier: Apache-2.0
// Skip by score: which key tiles kernels of attention leave out. docs/reference/operators.md has the definition.
#ifndef STOF_PLUGINS_CORE_CONTRACT_SKIP_DISTANCE_H_
#define STOF_PLUGINS_CORE_CONTRACT_SKIP_DISTANCE_H_

#include <cmath>
#include <cstdint>

#include "plugins/core/base/inline.h"

namespace stof {

// How far the scores of a row in a key tile lie below its largest one so far where the row can do without the tile:
// ln(keys / threshold), at least 0. Natural units, once for a sequence. threshold: ScoreArgs::skip_threshold, above 0.
// keys: of the row's sequence, gathered copies not counted; 0 for a sequence without keys is allowed.
//
// A group of rows leaves a tile out where each of its rows can do without it: the row's largest score in the tile is
// below m - SkipDistance, m the largest one in the tiles before, a finite number. A row that may attend no key of the
// tile can do without it. A NaN keeps a tile.
STOF_ALWAYS_INLINE_HOST_DEVICE float SkipDistance(float threshold, int64_t keys) {
  const float ratio = static_cast<float>(keys) / threshold;
  return ratio > 1.0f ? logf(ratio) : 0.0f;
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_SKIP_DISTANCE_H_
