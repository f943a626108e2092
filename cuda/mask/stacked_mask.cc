// SPDX-License-Identifier: Apache-2.0
#include "cuda/mask/stacked_mask.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

namespace stof {
namespace cuda {
namespace {

// A head's tile: an index into the bits, or one of these.
constexpr int32_t kFull = -1, kNone = -2;

// Stacks the tables of several heads; stores equal tiles and tables once.
class Stack {
 public:
  Stack(const BlockMask& mask, int64_t group)
      : mask_(mask),
        group_(static_cast<size_t>(group)),
        tiles_(static_cast<size_t>((mask.T + mask.n - 1) / mask.n)),
        heads_(group_ * tiles_) {
    stacked_.S = mask.S * group, stacked_.T = mask.T, stacked_.P = mask.P;
    stacked_.m = mask.m, stacked_.n = mask.n, stacked_.rows = 1;
    stacked_.layout_b = mask.layout_b, stacked_.layout_h = mask.layout_h / static_cast<int32_t>(group);
    stacked_.row_ptr.push_back(0);
  }

  BlockMask Make() {
    std::map<std::vector<int32_t>, int32_t> tables;
    std::vector<int32_t> of_group(group_);
    for (int64_t b = 0; b < stacked_.layout_b; ++b) {
      for (int64_t g = 0; g < stacked_.layout_h; ++g) {
        for (size_t i = 0; i < group_; ++i) {
          of_group[i] = mask_.TableOf(b, g * static_cast<int64_t>(group_) + static_cast<int64_t>(i));
        }
        const auto [table, fresh] = tables.try_emplace(of_group, static_cast<int32_t>(tables.size()));
        if (fresh) Add(of_group);
        stacked_.layout.push_back(table->second);
      }
    }
    return std::move(stacked_);
  }

 private:
  // One more table: first its partial tiles, then the full ones.
  void Add(const std::vector<int32_t>& tables) {
    std::fill(heads_.begin(), heads_.end(), kNone);
    for (size_t i = 0; i < group_; ++i) {
      const auto row = static_cast<size_t>(tables[i]);
      for (int32_t at = mask_.row_ptr[row]; at < mask_.row_ptr[row + 1]; ++at) {
        const auto entry = static_cast<size_t>(at);
        const auto tile = static_cast<size_t>(mask_.key_tile[entry]);
        heads_[tile * group_ + i] = at < mask_.full_begin[row] ? mask_.bits_id[entry] : kFull;
      }
    }
    std::vector<int32_t> full;
    for (size_t tile = 0; tile < tiles_; ++tile) {
      const auto begin = heads_.begin() + static_cast<std::ptrdiff_t>(tile * group_);
      const std::vector<int32_t> heads(begin, begin + static_cast<std::ptrdiff_t>(group_));
      if (std::count(heads.begin(), heads.end(), kNone) == static_cast<std::ptrdiff_t>(group_)) continue;
      if (std::count(heads.begin(), heads.end(), kFull) == static_cast<std::ptrdiff_t>(group_)) {
        full.push_back(static_cast<int32_t>(tile));
        continue;
      }
      stacked_.key_tile.push_back(static_cast<int32_t>(tile));
      stacked_.bits_id.push_back(BitsOf(heads));
    }
    stacked_.full_begin.push_back(static_cast<int32_t>(stacked_.key_tile.size()));
    stacked_.key_tile.insert(stacked_.key_tile.end(), full.begin(), full.end());
    stacked_.bits_id.resize(stacked_.key_tile.size(), -1);
    stacked_.row_ptr.push_back(static_cast<int32_t>(stacked_.key_tile.size()));
  }

  int32_t BitsOf(const std::vector<int32_t>& heads) {
    const auto [found, fresh] = ids_.try_emplace(heads, static_cast<int32_t>(ids_.size()));
    if (!fresh) return found->second;
    const auto words = static_cast<size_t>(mask_.n / 32), tile = static_cast<size_t>(mask_.m) * words;
    const size_t own = static_cast<size_t>(mask_.S) * words;  // of one head
    const size_t to = stacked_.bits.size();
    stacked_.bits.resize(to + tile, 0u);
    for (size_t i = 0; i < group_; ++i) {
      uint32_t* const rows = &stacked_.bits[to + i * own];
      if (heads[i] == kFull) std::fill_n(rows, own, ~0u);
      if (heads[i] >= 0) std::copy_n(&mask_.bits[static_cast<size_t>(heads[i]) * tile], own, rows);
    }
    return found->second;
  }

  const BlockMask& mask_;
  const size_t group_, tiles_;
  std::vector<int32_t> heads_;  // [tiles, group], of one table
  std::map<std::vector<int32_t>, int32_t> ids_;
  BlockMask stacked_;
};

}  // namespace

BlockMask StackHeads(const BlockMask& mask, int64_t group) {
  return mask.layout_h == 1 ? mask : Stack(mask, group).Make();
}

bool StackingPays(int64_t stacked_tiles, int64_t tiles, int64_t group, int64_t groups, int sm_count) {
  // Clusters of eight CTAs saturate the memory from half of the SMs on.
  constexpr int64_t kCluster = 8;
  return 2 * kCluster * groups >= sm_count || 4 * stacked_tiles <= 3 * group * tiles;
}

}  // namespace cuda
}  // namespace stof
