// SPDX-License-Identifier: Apache-2.0
// The order in which scheduled kernels compute each tile row's KV tiles, and what their CTAs start with.
#include <algorithm>
#include <utility>

#include "cuda/schedule/tile_schedule.h"

namespace stof {
namespace cuda {
namespace {

// For each element mask, the groups of 64 query rows that have a pair in it, as a bit set.
std::vector<uint32_t> RowGroupsOf(const BlockMask& mask) {
  const size_t group = 64 * static_cast<size_t>(mask.n) / 32, groups = static_cast<size_t>(mask.m) / 64;
  std::vector<uint32_t> found(mask.bits.size() / (group * groups), 0);
  for (size_t i = 0; i < found.size(); ++i) {
    for (size_t g = 0; g < groups; ++g) {
      const auto begin = mask.bits.begin() + static_cast<std::ptrdiff_t>((i * groups + g) * group);
      const auto end = begin + static_cast<std::ptrdiff_t>(group);
      if (std::any_of(begin, end, [](uint32_t word) { return word != 0; })) found[i] |= 1u << g;
    }
  }
  return found;
}

struct Entry {
  int32_t key_tile, id;
  uint32_t groups;  // that have a pair in the tile
};

// The sort key of a tile: its lowest row group plus its highest. A band reaches the first groups first.
int RankOf(uint32_t groups) {
  int lowest = 0, highest = 0;
  for (int g = kMostRowGroups; g-- > 0;) {
    if ((groups >> g & 1) != 0) lowest = g;
  }
  for (int g = 0; g < kMostRowGroups; ++g) {
    if ((groups >> g & 1) != 0) highest = g;
  }
  return lowest + highest;
}

}  // namespace

TileList MakeTileList(const BlockMask& mask) {
  const int groups = std::min(mask.m / 64, kMostRowGroups);
  const uint32_t all = (1u << groups) - 1;
  TileList list = {mask.key_tile, mask.bits_id, std::vector<int32_t>(mask.full_begin.size(), 0)};
  const std::vector<uint32_t> row_groups = groups > 1 ? RowGroupsOf(mask) : std::vector<uint32_t>();
  std::vector<Entry> row;
  for (size_t r = 0; r < mask.full_begin.size(); ++r) {
    const auto begin = static_cast<size_t>(mask.row_ptr[r]), full = static_cast<size_t>(mask.full_begin[r]);
    const auto end = static_cast<size_t>(mask.row_ptr[r + 1]);
    row.clear();
    if (full < end) row.push_back({mask.key_tile[end - 1], -1, all});
    uint32_t some = full < end ? all : 0;
    for (size_t i = begin; i < full; ++i) {
      const uint32_t own = groups > 1 ? row_groups[static_cast<size_t>(mask.bits_id[i])] : all;
      row.push_back({mask.key_tile[i], mask.bits_id[i], own});
      some |= own;
    }
    for (size_t i = full; i + 1 < end; ++i) row.push_back({mask.key_tile[i], -1, all});
    // A group without any pair skips nothing: it has to finish its rows, too.
    for (Entry& entry : row) entry.groups |= all & ~some;
    std::stable_sort(row.begin(), row.end(),
                     [](const Entry& a, const Entry& b) { return RankOf(a.groups) < RankOf(b.groups); });
    uint32_t begun = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      begun |= row[i].groups;
      list.key_tile[begin + i] = row[i].key_tile;
      list.code[begin + i] = row[i].id < 0 ? -1 : row[i].id | static_cast<int32_t>((all & ~begun) << kIdBits);
    }
    uint32_t unfinished = 0;
    for (size_t i = row.size(); i-- > 0;) {
      unfinished |= row[i].groups;
      int32_t& code = list.code[begin + i];
      if (code < 0) continue;
      code |= static_cast<int32_t>((all & ~unfinished) << (kIdBits + kMostRowGroups));
      const int32_t skips = LeadingSkips(code) | TrailingSkips(code);
      for (int g = 0; g < groups; ++g) list.skipped[r] += skips >> g & 1;
    }
  }
  return list;
}

std::vector<CtaStart> MakeCtaStarts(const TileSchedule& schedule, const TileList& list) {
  std::vector<CtaStart> starts;
  for (size_t cta = 0; cta + 1 < schedule.begin.size(); ++cta) {
    CtaStart start = {};
    start.begin = schedule.begin[cta];
    start.end = schedule.begin[cta + 1];
    if (start.begin < start.end) start.first = schedule.tiles[static_cast<size_t>(start.begin)];
    for (int i = 0; i < kFirstTiles; ++i) {
      const bool exists = i < start.first.end - start.first.begin;
      const auto at = static_cast<size_t>(exists ? start.first.begin + i : 0);
      start.tile[i] = exists ? list.key_tile[at] : -1;
      start.code[i] = exists && list.code[at] >= 0 ? list.code[at] & kIdMask : -1;
    }
    starts.push_back(start);
  }
  return starts;
}

}  // namespace cuda
}  // namespace stof
