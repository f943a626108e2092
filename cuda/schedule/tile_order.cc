// SPDX-License-Identifier: Apache-2.0
// The order in which kernels with a plan walk each row's tiles, and what their workers start with.
#include <algorithm>
#include <utility>

#include "cuda/schedule/tile_schedule.h"

namespace stof {
namespace cuda {
namespace {

// Of every tile of bits, the groups of 64 rows that have some.
std::vector<uint32_t> GroupsOf(const BlockMask& mask) {
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
  uint32_t groups;
};

// The lowest group and the highest one together: rows' bands reach the first groups first.
int PlaceOf(uint32_t groups) {
  int lowest = 0, highest = 0;
  for (int g = kMostGroups; g-- > 0;) {
    if ((groups >> g & 1) != 0) lowest = g;
  }
  for (int g = 0; g < kMostGroups; ++g) {
    if ((groups >> g & 1) != 0) highest = g;
  }
  return lowest + highest;
}

}  // namespace

Walk WalkOf(const BlockMask& mask) {
  const int groups = std::min(mask.m / 64, kMostGroups);
  const uint32_t all = (1u << groups) - 1;
  Walk walk = {mask.key_tile, mask.bits_id, std::vector<int32_t>(mask.full_begin.size(), 0)};
  const std::vector<uint32_t> known = groups > 1 ? GroupsOf(mask) : std::vector<uint32_t>();
  std::vector<Entry> row;
  for (size_t r = 0; r < mask.full_begin.size(); ++r) {
    const auto begin = static_cast<size_t>(mask.row_ptr[r]), full = static_cast<size_t>(mask.full_begin[r]);
    const auto end = static_cast<size_t>(mask.row_ptr[r + 1]);
    row.clear();
    if (full < end) row.push_back({mask.key_tile[end - 1], -1, all});
    uint32_t some = full < end ? all : 0;
    for (size_t i = begin; i < full; ++i) {
      const uint32_t own = groups > 1 ? known[static_cast<size_t>(mask.bits_id[i])] : all;
      row.push_back({mask.key_tile[i], mask.bits_id[i], own});
      some |= own;
    }
    for (size_t i = full; i + 1 < end; ++i) row.push_back({mask.key_tile[i], -1, all});
    // A group without any pair takes part in everything: it has to end its row, too.
    for (Entry& entry : row) entry.groups |= all & ~some;
    std::stable_sort(row.begin(), row.end(),
                     [](const Entry& a, const Entry& b) { return PlaceOf(a.groups) < PlaceOf(b.groups); });
    uint32_t before = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      before |= row[i].groups;
      walk.key_tile[begin + i] = row[i].key_tile;
      walk.code[begin + i] = row[i].id < 0 ? -1 : row[i].id | static_cast<int32_t>((all & ~before) << kIdBits);
    }
    uint32_t behind = 0;
    for (size_t i = row.size(); i-- > 0;) {
      behind |= row[i].groups;
      int32_t& code = walk.code[begin + i];
      if (code < 0) continue;
      code |= static_cast<int32_t>((all & ~behind) << (kIdBits + kMostGroups));
      const int32_t none = LeadOf(code) | TrailOf(code);
      for (int g = 0; g < groups; ++g) walk.missing[r] += none >> g & 1;
    }
  }
  return walk;
}

std::vector<WorkStart> StartsOf(const WorkPlan& plan, const Walk& walk) {
  std::vector<WorkStart> starts;
  for (size_t worker = 0; worker + 1 < plan.begin.size(); ++worker) {
    WorkStart start = {};
    start.begin = plan.begin[worker];
    start.end = plan.begin[worker + 1];
    if (start.begin < start.end) start.first = plan.items[static_cast<size_t>(start.begin)];
    for (int i = 0; i < kFirstTiles; ++i) {
      const bool there = i < start.first.end - start.first.begin;
      const auto at = static_cast<size_t>(there ? start.first.begin + i : 0);
      start.tile[i] = there ? walk.key_tile[at] : -1;
      start.code[i] = there && walk.code[at] >= 0 ? walk.code[at] & kIdMask : -1;
    }
    starts.push_back(start);
  }
  return starts;
}

}  // namespace cuda
}  // namespace stof
