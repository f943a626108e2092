// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/schedule/schedule_checks.h"

#include <algorithm>
#include <utility>

namespace stof::test {
namespace {

using cuda::CtaStart;
using cuda::MakeTileSchedule;
using cuda::ScheduleLowerBound;
using cuda::TileCost;
using cuda::TileList;
using cuda::TileSchedule;
using cuda::WorkTile;

// Whether a group of 64 rows has a pair in an element mask; id -1: a full tile.
bool HasPairs(const BlockMask& mask, int32_t id, int group) {
  if (id < 0) return true;
  const auto words = static_cast<size_t>(mask.n / 32), rows = static_cast<size_t>(mask.m);
  const uint32_t* bits = mask.bits.data() + (static_cast<size_t>(id) * rows + 64 * static_cast<size_t>(group)) * words;
  return std::any_of(bits, bits + 64 * words, [](uint32_t word) { return word != 0; });
}

}  // namespace

int64_t CostOf(const WorkTile& tile, int64_t skipped, int64_t groups, const TileCost& cost) {
  const int64_t partial = (tile.full - tile.begin + cost.split_kv - 1) / cost.split_kv;
  const int64_t all = (tile.end - tile.begin + cost.split_kv - 1) / cost.split_kv;
  return cost.row + cost.partial * partial + cost.full * (all - partial) -
         (cost.split_kv == 1 ? cost.partial * skipped / (2 * groups) : 0);
}

void CheckTileList(const BlockMask& mask, const TileList& list, const std::string& where) {
  const int groups = mask.m / 64;
  for (size_t r = 0; r < mask.full_begin.size(); ++r) {
    const int32_t begin = mask.row_ptr[r], end = mask.row_ptr[r + 1];
    std::vector<std::pair<int32_t, int32_t>> given, listed;
    int64_t skipped = 0;
    for (int32_t i = begin; i < end; ++i) {
      const auto at = static_cast<size_t>(i);
      given.emplace_back(mask.key_tile[at], mask.bits_id[at]);
      listed.emplace_back(list.key_tile[at], list.code[at] < 0 ? -1 : list.code[at] & cuda::kIdMask);
    }
    for (int g = 0; g < groups; ++g) {
      const auto has = [&](const std::pair<int32_t, int32_t>& entry) { return HasPairs(mask, entry.second, g); };
      const auto first = std::find_if(listed.begin(), listed.end(), has) - listed.begin();
      const auto last = listed.rend() - std::find_if(listed.rbegin(), listed.rend(), has) - 1;
      for (int32_t i = 0; i < end - begin; ++i) {
        const int32_t code = list.code[static_cast<size_t>(begin + i)];
        const bool any = first < end - begin;
        CHECK((cuda::LeadingSkips(code) >> g & 1) == (any && i < first ? 1 : 0), where, " row ", r, " entry ", i);
        CHECK((cuda::TrailingSkips(code) >> g & 1) == (any && i > last ? 1 : 0), where, " row ", r, " entry ", i);
        if (any && (i < first || i > last)) ++skipped;
      }
    }
    CHECK(list.skipped[r] == skipped, where, " row ", r);
    std::sort(given.begin(), given.end());
    std::sort(listed.begin(), listed.end());
    CHECK(given == listed, where, " row ", r);
  }
}

TileSchedule CheckSchedule(const BlockMask& mask, const TileList& list, const ExprSizes& sizes, int most,
                           int64_t l2_heads, const TileCost& cost, const std::string& name, bool refine) {
  const TileSchedule schedule = MakeTileSchedule(mask, list, sizes.B, sizes.H, most, l2_heads, cost, refine);
  const int ctas = schedule.ctas();
  const std::string where = Text(name, ctas, " of ", most, ", ", schedule.splits(), " splits");
  CHECK(ctas >= 1 && ctas <= most && schedule.begin[0] == 0, where);
  CHECK(ctas == most || ctas == std::max<int64_t>(1, static_cast<int64_t>(schedule.tiles.size())), where);
  CHECK(schedule.dynamic_tiles() >= 0 && (schedule.dynamic_tiles() == 0 || (refine && cost.dynamic)), where, ": ",
        schedule.dynamic_tiles(), " are dynamic");
  const std::vector<CtaStart> starts = MakeCtaStarts(schedule, list);
  CHECK(starts.size() == static_cast<size_t>(ctas), where);
  for (size_t w = 0; w < starts.size(); ++w) {
    const CtaStart& start = starts[w];
    CHECK(start.begin == schedule.begin[w] && start.end == schedule.begin[w + 1], where);
    if (start.begin == start.end) continue;
    const WorkTile& first = schedule.tiles[static_cast<size_t>(start.begin)];
    CHECK(start.first.index == first.index && start.first.begin == first.begin, where);
    CHECK(start.first.full == first.full && start.first.end == first.end, where);
    for (size_t t = 0; t < cuda::kFirstTiles; ++t) {
      const bool there = first.begin + static_cast<int32_t>(t) < first.end;
      const auto at = static_cast<size_t>(there ? first.begin + static_cast<int32_t>(t) : 0);
      CHECK(start.tile[t] == (there ? list.key_tile[at] : -1), where);
      CHECK(start.code[t] == (there && list.code[at] >= 0 ? list.code[at] & cuda::kIdMask : -1), where);
    }
  }
  // How often each tile row occurs, and the work tile of each split.
  std::vector<int> seen(static_cast<size_t>(sizes.B * sizes.H * mask.rows), 0);
  std::vector<const WorkTile*> splits(static_cast<size_t>(schedule.splits()), nullptr);
  std::vector<int> halves(seen.size(), 0);  // a bit for each half tile
  int64_t total = 0, largest = 0, longest = 0;
  // The dynamic tiles come behind those of the CTAs, each of which then has a tile of its own.
  for (int w = 0; w <= ctas; ++w) {
    int64_t load = 0;
    const int32_t begin = schedule.begin[static_cast<size_t>(w)];
    const int32_t end =
        w < ctas ? schedule.begin[static_cast<size_t>(w) + 1] : static_cast<int32_t>(schedule.tiles.size());
    const bool may_be_empty = w == ctas || schedule.tiles.size() < static_cast<size_t>(ctas);
    CHECK(begin < end || (begin == end && may_be_empty), where, ": nothing for CTA ", w);
    for (int32_t at = begin; at < end; ++at) {
      const WorkTile& tile = schedule.tiles[static_cast<size_t>(at)];
      CHECK(tile.index >= 0 && tile.index < static_cast<int64_t>(seen.size()), where);
      const int64_t bh = tile.index / mask.rows;
      const auto row =
          static_cast<size_t>(mask.TableOf(bh / sizes.H, bh % sizes.H) * mask.rows + tile.index % mask.rows);
      int64_t own = CostOf({0, tile.begin, mask.full_begin[row], tile.end}, list.skipped[row], mask.m / 64, cost);
      const int32_t subtile = cuda::SubtileOf(tile);
      if (subtile < 0) {
        ++seen[static_cast<size_t>(tile.index)];
        CHECK(tile.begin == mask.row_ptr[row] && tile.end == mask.row_ptr[row + 1] && tile.full == tile.end, where);
      } else if (cost.half_tile_pct > 0) {
        CHECK(subtile < 2 && (halves[static_cast<size_t>(tile.index)] >> subtile & 1) == 0, where, " half ", subtile);
        halves[static_cast<size_t>(tile.index)] |= 1 << subtile;
        CHECK(tile.begin >= mask.row_ptr[row] && tile.end <= mask.row_ptr[row + 1], where, " half ", subtile);
        own = cost.row;
        bool some = false;
        for (int32_t i = mask.row_ptr[row]; i < mask.row_ptr[row + 1]; ++i) {
          const int32_t code = list.code[static_cast<size_t>(i)];
          const bool has = HasPairs(mask, code < 0 ? -1 : code & cuda::kIdMask, subtile);
          const bool taken = i >= tile.begin && i < tile.end;
          some = some || has;
          CHECK(taken || !has, where, " half ", subtile, " of tile row ", tile.index, " lacks entry ", i);
          if (taken) own += code < 0 ? cost.full : cost.partial;
        }
        // It begins and ends with tiles in which it has a pair, unless it has none.
        if (some) {
          for (const int32_t end : {tile.begin, tile.end - 1}) {
            const int32_t code = list.code[static_cast<size_t>(end)];
            CHECK(HasPairs(mask, code < 0 ? -1 : code & cuda::kIdMask, subtile), where, " half ", subtile, " entry ",
                  end);
          }
        }
        own = own * cost.half_tile_pct / 100;
        if (halves[static_cast<size_t>(tile.index)] == 3) ++seen[static_cast<size_t>(tile.index)];
      } else {
        CHECK(subtile < schedule.splits() && splits[static_cast<size_t>(subtile)] == nullptr, where, " split ",
              subtile);
        splits[static_cast<size_t>(subtile)] = &tile;
        const auto bits = std::count_if(list.code.begin() + tile.begin, list.code.begin() + tile.end,
                                        [](int32_t code) { return code >= 0; });
        own = cost.row + cost.partial * bits + cost.full * (tile.end - tile.begin - bits);
      }
      load += own;
      largest = std::max(largest, own);
    }
    total += load;
    if (w < ctas) longest = std::max(longest, load);
  }
  int32_t next = 0;
  for (const cuda::SplitRow& split_row : schedule.split_rows) {
    const int64_t bh = split_row.index / mask.rows;
    const auto row =
        static_cast<size_t>(mask.TableOf(bh / sizes.H, bh % sizes.H) * mask.rows + split_row.index % mask.rows);
    CHECK(split_row.first == next && split_row.count >= 2 && split_row.count <= cuda::kMostSplitsOfRow, where,
          " split row ", split_row.index);
    int32_t entry = mask.row_ptr[row];
    for (int32_t i = 0; i < split_row.count; ++i) {
      const WorkTile* tile = splits[static_cast<size_t>(next++)];
      CHECK(tile != nullptr && tile->index == split_row.index && tile->begin == entry, where, " split ", next - 1);
      CHECK(tile->end - tile->begin >= cuda::kFewestTilesOfSplit, where, " split ", next - 1);
      entry = tile->end;
    }
    CHECK(entry == mask.row_ptr[row + 1], where, " split row ", split_row.index);
    ++seen[static_cast<size_t>(split_row.index)];
  }
  CHECK(next == schedule.splits() && next <= cuda::kMostScheduleSplits, where);
  CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }), where);
  // Where CTAs share an SM, tiles are exchanged after the makespan was computed.
  const bool shared = refine && cost.ctas_per_sm > 1;
  CHECK(shared ? 5 * std::abs(schedule.makespan - longest) <= longest
        : schedule.split_rows.empty() && schedule.dynamic_tiles() == 0 ? schedule.makespan == longest
                                                                       : schedule.makespan > longest,
        where, ": says ", schedule.makespan, ", is ", longest);
  const int64_t least = ScheduleLowerBound(mask, sizes.B, sizes.H, most, cost);
  CHECK(least <= schedule.makespan, where, ": ", schedule.makespan, ", at least ", least);
  // A CTA alone on its SM is faster, but no schedule takes less than the mean of whole tile rows; and the combine
  // kernel is not faster.
  int64_t whole = 0;
  for (int64_t bh = 0; bh < sizes.B * sizes.H; ++bh) {
    for (int64_t r = 0; r < mask.rows; ++r) {
      const auto row = static_cast<size_t>(mask.TableOf(bh / sizes.H, bh % sizes.H) * mask.rows + r);
      const WorkTile tile = {0, mask.row_ptr[row], mask.full_begin[row], mask.row_ptr[row + 1]};
      whole += CostOf(tile, list.skipped[row], mask.m / 64, cost);
    }
  }
  const int64_t used = std::clamp<int64_t>(sizes.B * sizes.H * mask.rows, 1, most);
  const int64_t combine = schedule.splits() > 0 ? 2000 + 14 * schedule.splits() : 0;
  const int64_t expected =
      cost.solo_speed_pct == 100
          ? schedule.makespan
          : std::max(whole / used, (schedule.makespan - combine) * 100 / cost.solo_speed_pct) + combine;
  const int64_t time = PredictScheduleTime(schedule, cost);
  CHECK(time == expected, where, ": takes ", time, ", expected ", expected);
  CHECK(least <= time, where, ": takes ", time, ", at least ", least);
  CHECK(cost.can_split_rows || (least > 0 && 20 * least >= time), where, ": takes ", time, ", at least only ", least);
  // LPT gives a tile to the least loaded CTA, whose load is at most the mean.
  CHECK(longest <= total / ctas + largest, where, ": ", longest, " of ", total, ", largest tile ", largest);
  return schedule;
}

std::vector<int32_t> TilesOf(const TileSchedule& schedule, size_t w) {
  std::vector<int32_t> found;
  const auto end = w + 1 < schedule.begin.size() ? static_cast<size_t>(schedule.begin[w + 1]) : schedule.tiles.size();
  for (auto at = static_cast<size_t>(schedule.begin[w]); at < end; ++at) found.push_back(schedule.tiles[at].index);
  return found;
}

int64_t CostOfRow(int32_t item, const BlockMask& mask, const TileList& list, const TileCost& cost) {
  const auto row = static_cast<size_t>(item % mask.rows);
  return CostOf({0, mask.row_ptr[row], mask.full_begin[row], mask.row_ptr[row + 1]}, list.skipped[row], mask.m / 64,
                cost);
}

}  // namespace stof::test
