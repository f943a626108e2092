// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/rowwise/cost.h"

#include <algorithm>
#include <vector>

#include "cuda/attention/rowwise/api.h"

namespace stof {
namespace cuda {
namespace {

// Nanoseconds of an SM, measured on an H100. The row-wise kernel:
constexpr double kRow = 160.0;       // a query
constexpr double kByte = 0.0165;     // a byte of key or value, of each pair
constexpr double kTileVisit = 1.6;   // a look at a tile, of each query
constexpr double kSerialKey = 75.0;  // a key of the longest row, which one warp reads alone
constexpr double kLaunch = 4000.0;
// A partial tile of the sm_80 and the fp32 kernel, and what each byte of a key adds to it.
constexpr double kSm80Tile = 490.0, kSm80Byte = 5.3, kFp32Tile = 50.0, kFp32Byte = 9.2;

}  // namespace

MaskCounts CountPairs(const BlockMask& mask, int64_t B, int64_t H) {
  const auto words = static_cast<size_t>(mask.n / 32), m = static_cast<size_t>(mask.m);
  std::vector<int32_t> keys(mask.bits.size() / words);  // of each row of each element mask
  for (size_t i = 0; i < keys.size(); ++i) {
    for (size_t w = 0; w < words; ++w) keys[i] += __builtin_popcount(mask.bits[i * words + w]);
  }
  const auto rows = static_cast<size_t>(mask.rows);
  std::vector<MaskCounts> tables(mask.full_begin.size() / std::max<size_t>(1, rows));
  std::vector<int64_t> sums(m);
  MaskCounts all;
  for (size_t at = 0; at < mask.full_begin.size(); ++at) {
    MaskCounts& table = tables[at / rows];
    const int64_t below = std::min<int64_t>(mask.m, mask.S - static_cast<int64_t>(at % rows) * mask.m);
    const int64_t full = int64_t{mask.row_ptr[at + 1] - mask.full_begin[at]} * mask.n;
    std::fill(sums.begin(), sums.end(), full);
    for (int32_t i = mask.row_ptr[at]; i < mask.full_begin[at]; ++i) {
      const int32_t* own = &keys[static_cast<size_t>(mask.bits_id[static_cast<size_t>(i)]) * m];
      for (size_t q = 0; q < m; ++q) sums[q] += own[q];
    }
    table.tiles += mask.row_ptr[at + 1] - mask.row_ptr[at];
    for (int64_t q = 0; q < below; ++q) {
      table.pairs += sums[static_cast<size_t>(q)];
      all.most_keys = std::max(all.most_keys, sums[static_cast<size_t>(q)]);
    }
  }
  const int64_t times = (mask.layout_b == 1 ? B : 1) * (mask.layout_h == 1 ? H : 1);
  for (const int32_t table : mask.layout) {
    all.tiles += times * tables[static_cast<size_t>(table)].tiles;
    all.pairs += times * tables[static_cast<size_t>(table)].pairs;
  }
  return all;
}

double PredictRowwise(const MaskCounts& counts, int64_t rows, int head_bytes, int sm_count) {
  const double all = static_cast<double>(rows) * kRow + static_cast<double>(counts.pairs) * kByte * 2 * head_bytes +
                     static_cast<double>(counts.tiles) * kRowwiseTile * kTileVisit;
  // One warp computes a row: the longest one is a lower bound.
  return kLaunch + std::max(all / sm_count, static_cast<double>(counts.most_keys) * kSerialKey);
}

double PredictTiled(const MaskCounts& counts, int head_bytes, bool fp32, int sm_count) {
  const double tile = fp32 ? kFp32Tile + kFp32Byte * head_bytes : kSm80Tile + kSm80Byte * head_bytes;
  return tile * static_cast<double>(counts.tiles) / sm_count;
}

}  // namespace cuda
}  // namespace stof
