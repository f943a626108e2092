// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/schedule/schedule_checks.h"

#include <algorithm>
#include <utility>

namespace stof::test {
namespace {

using cuda::LeastOfPlan;
using cuda::PlanWork;
using cuda::TileCost;
using cuda::Walk;
using cuda::WorkItem;
using cuda::WorkPlan;
using cuda::WorkStart;

// Whether 64 rows have a pair in a tile of bits; -1 has all.
bool HasPairs(const BlockMask& mask, int32_t id, int group) {
  if (id < 0) return true;
  const auto words = static_cast<size_t>(mask.n / 32), rows = static_cast<size_t>(mask.m);
  const uint32_t* bits = mask.bits.data() + (static_cast<size_t>(id) * rows + 64 * static_cast<size_t>(group)) * words;
  return std::any_of(bits, bits + 64 * words, [](uint32_t word) { return word != 0; });
}

}  // namespace

int64_t CostOf(const WorkItem& item, int64_t missing, int64_t groups, const TileCost& cost) {
  const int64_t partial = (item.full - item.begin + cost.split - 1) / cost.split;
  const int64_t all = (item.end - item.begin + cost.split - 1) / cost.split;
  return cost.row + cost.partial * partial + cost.full * (all - partial) -
         (cost.split == 1 ? cost.partial * missing / (2 * groups) : 0);
}

void CheckWalk(const BlockMask& mask, const Walk& walk, const std::string& where) {
  const int groups = mask.m / 64;
  for (size_t r = 0; r < mask.full_begin.size(); ++r) {
    const int32_t begin = mask.row_ptr[r], end = mask.row_ptr[r + 1];
    std::vector<std::pair<int32_t, int32_t>> given, walked;
    int64_t missing = 0;
    for (int32_t i = begin; i < end; ++i) {
      const auto at = static_cast<size_t>(i);
      given.emplace_back(mask.key_tile[at], mask.bits_id[at]);
      walked.emplace_back(walk.key_tile[at], walk.code[at] < 0 ? -1 : walk.code[at] & cuda::kIdMask);
    }
    for (int g = 0; g < groups; ++g) {
      const auto has = [&](const std::pair<int32_t, int32_t>& entry) { return HasPairs(mask, entry.second, g); };
      const auto first = std::find_if(walked.begin(), walked.end(), has) - walked.begin();
      const auto last = walked.rend() - std::find_if(walked.rbegin(), walked.rend(), has) - 1;
      for (int32_t i = 0; i < end - begin; ++i) {
        const int32_t code = walk.code[static_cast<size_t>(begin + i)];
        const bool any = first < end - begin;
        CHECK((cuda::LeadOf(code) >> g & 1) == (any && i < first ? 1 : 0), where, " row ", r, " entry ", i);
        CHECK((cuda::TrailOf(code) >> g & 1) == (any && i > last ? 1 : 0), where, " row ", r, " entry ", i);
        if (any && (i < first || i > last)) ++missing;
      }
    }
    CHECK(walk.missing[r] == missing, where, " row ", r);
    std::sort(given.begin(), given.end());
    std::sort(walked.begin(), walked.end());
    CHECK(given == walked, where, " row ", r);
  }
}

WorkPlan CheckPlan(const BlockMask& mask, const Walk& walk, const ExprSizes& sizes, int most, int64_t section,
                   const TileCost& cost, const std::string& name, bool finish) {
  const WorkPlan plan = PlanWork(mask, walk, sizes.B, sizes.H, most, section, cost, finish);
  const int workers = plan.workers();
  const std::string where = Text(name, workers, " of ", most, ", ", plan.parts(), " parts");
  CHECK(workers >= 1 && workers <= most && plan.begin[0] == 0, where);
  CHECK(workers == most || workers == std::max<int64_t>(1, static_cast<int64_t>(plan.items.size())), where);
  CHECK(plan.drawn() >= 0 && (plan.drawn() == 0 || (finish && cost.draws)), where, ": ", plan.drawn(), " are drawn");
  const std::vector<WorkStart> starts = StartsOf(plan, walk);
  CHECK(starts.size() == static_cast<size_t>(workers), where);
  for (size_t w = 0; w < starts.size(); ++w) {
    const WorkStart& start = starts[w];
    CHECK(start.begin == plan.begin[w] && start.end == plan.begin[w + 1], where);
    if (start.begin == start.end) continue;
    const WorkItem& first = plan.items[static_cast<size_t>(start.begin)];
    CHECK(start.first.item == first.item && start.first.begin == first.begin, where);
    CHECK(start.first.full == first.full && start.first.end == first.end, where);
    for (size_t t = 0; t < cuda::kFirstTiles; ++t) {
      const bool there = first.begin + static_cast<int32_t>(t) < first.end;
      const auto at = static_cast<size_t>(there ? first.begin + static_cast<int32_t>(t) : 0);
      CHECK(start.tile[t] == (there ? walk.key_tile[at] : -1), where);
      CHECK(start.code[t] == (there && walk.code[at] >= 0 ? walk.code[at] & cuda::kIdMask : -1), where);
    }
  }
  // Of every row how often it is there, and of every part its item.
  std::vector<int> seen(static_cast<size_t>(sizes.B * sizes.H * mask.rows), 0);
  std::vector<const WorkItem*> parts(static_cast<size_t>(plan.parts()), nullptr);
  std::vector<int> halves(seen.size(), 0);  // a bit for each group
  int64_t total = 0, largest = 0, longest = 0;
  // What is drawn comes behind the workers'; each of these has a row of its own then.
  for (int w = 0; w <= workers; ++w) {
    int64_t load = 0;
    const int32_t begin = plan.begin[static_cast<size_t>(w)];
    const int32_t end = w < workers ? plan.begin[static_cast<size_t>(w) + 1] : static_cast<int32_t>(plan.items.size());
    const bool may_be_empty = w == workers || plan.items.size() < static_cast<size_t>(workers);
    CHECK(begin < end || (begin == end && may_be_empty), where, ": nothing for worker ", w);
    for (int32_t at = begin; at < end; ++at) {
      const WorkItem& item = plan.items[static_cast<size_t>(at)];
      CHECK(item.item >= 0 && item.item < static_cast<int64_t>(seen.size()), where);
      const int64_t bh = item.item / mask.rows;
      const auto row =
          static_cast<size_t>(mask.TableOf(bh / sizes.H, bh % sizes.H) * mask.rows + item.item % mask.rows);
      int64_t own = CostOf({0, item.begin, mask.full_begin[row], item.end}, walk.missing[row], mask.m / 64, cost);
      const int32_t part = cuda::PartOf(item);
      if (part < 0) {
        ++seen[static_cast<size_t>(item.item)];
        CHECK(item.begin == mask.row_ptr[row] && item.end == mask.row_ptr[row + 1] && item.full == item.end, where);
      } else if (cost.half > 0) {
        CHECK(part < 2 && (halves[static_cast<size_t>(item.item)] >> part & 1) == 0, where, " half ", part);
        halves[static_cast<size_t>(item.item)] |= 1 << part;
        CHECK(item.begin >= mask.row_ptr[row] && item.end <= mask.row_ptr[row + 1], where, " half ", part);
        own = cost.row;
        bool some = false;
        for (int32_t i = mask.row_ptr[row]; i < mask.row_ptr[row + 1]; ++i) {
          const int32_t code = walk.code[static_cast<size_t>(i)];
          const bool has = HasPairs(mask, code < 0 ? -1 : code & cuda::kIdMask, part);
          const bool taken = i >= item.begin && i < item.end;
          some = some || has;
          CHECK(taken || !has, where, " half ", part, " of item ", item.item, " lacks entry ", i);
          if (taken) own += code < 0 ? cost.full : cost.partial;
        }
        // It has no others at its ends, but where it has none at all.
        if (some) {
          for (const int32_t end : {item.begin, item.end - 1}) {
            const int32_t code = walk.code[static_cast<size_t>(end)];
            CHECK(HasPairs(mask, code < 0 ? -1 : code & cuda::kIdMask, part), where, " half ", part, " entry ", end);
          }
        }
        own = own * cost.half / 100;
        if (halves[static_cast<size_t>(item.item)] == 3) ++seen[static_cast<size_t>(item.item)];
      } else {
        CHECK(part < plan.parts() && parts[static_cast<size_t>(part)] == nullptr, where, " part ", part);
        parts[static_cast<size_t>(part)] = &item;
        const auto bits = std::count_if(walk.code.begin() + item.begin, walk.code.begin() + item.end,
                                        [](int32_t code) { return code >= 0; });
        own = cost.row + cost.partial * bits + cost.full * (item.end - item.begin - bits);
      }
      load += own;
      largest = std::max(largest, own);
    }
    total += load;
    if (w < workers) longest = std::max(longest, load);
  }
  int32_t next = 0;
  for (const cuda::CutRow& cut : plan.cut) {
    const int64_t bh = cut.item / mask.rows;
    const auto row = static_cast<size_t>(mask.TableOf(bh / sizes.H, bh % sizes.H) * mask.rows + cut.item % mask.rows);
    CHECK(cut.first == next && cut.count >= 2 && cut.count <= cuda::kMostPartsOfRow, where, " cut row ", cut.item);
    int32_t entry = mask.row_ptr[row];
    for (int32_t i = 0; i < cut.count; ++i) {
      const WorkItem* item = parts[static_cast<size_t>(next++)];
      CHECK(item != nullptr && item->item == cut.item && item->begin == entry, where, " part ", next - 1);
      CHECK(item->end - item->begin >= cuda::kFewestTilesOfPart, where, " part ", next - 1);
      entry = item->end;
    }
    CHECK(entry == mask.row_ptr[row + 1], where, " cut row ", cut.item);
    ++seen[static_cast<size_t>(cut.item)];
  }
  CHECK(next == plan.parts() && next <= cuda::kMostParts, where);
  CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }), where);
  // Workers that share a multiprocessor change rows once more when the plan is made.
  const bool shared = finish && cost.teams > 1;
  CHECK(shared                                  ? 5 * std::abs(plan.longest - longest) <= longest
        : plan.cut.empty() && plan.drawn() == 0 ? plan.longest == longest
                                                : plan.longest > longest,
        where, ": says ", plan.longest, ", is ", longest);
  const int64_t least = LeastOfPlan(mask, sizes.B, sizes.H, most, cost);
  CHECK(least <= plan.longest, where, ": ", plan.longest, ", at least ", least);
  // Who is alone on a multiprocessor is faster, but no plan takes less than workers have in the mean, of whole rows;
  // and what joins parts is not faster.
  int64_t whole = 0;
  for (int64_t bh = 0; bh < sizes.B * sizes.H; ++bh) {
    for (int64_t r = 0; r < mask.rows; ++r) {
      const auto row = static_cast<size_t>(mask.TableOf(bh / sizes.H, bh % sizes.H) * mask.rows + r);
      const WorkItem item = {0, mask.row_ptr[row], mask.full_begin[row], mask.row_ptr[row + 1]};
      whole += CostOf(item, walk.missing[row], mask.m / 64, cost);
    }
  }
  const int64_t used = std::clamp<int64_t>(sizes.B * sizes.H * mask.rows, 1, most);
  const int64_t join = plan.parts() > 0 ? 2000 + 14 * plan.parts() : 0;
  const int64_t expected =
      cost.alone == 100 ? plan.longest : std::max(whole / used, (plan.longest - join) * 100 / cost.alone) + join;
  const int64_t time = TimeOf(plan, cost);
  CHECK(time == expected, where, ": takes ", time, ", expected ", expected);
  CHECK(least <= time, where, ": takes ", time, ", at least ", least);
  CHECK(cost.cuts || (least > 0 && 20 * least >= time), where, ": takes ", time, ", at least only ", least);
  // Whoever gets a row has the least load until then, which is at most the mean.
  CHECK(longest <= total / workers + largest, where, ": ", longest, " of ", total, ", largest row ", largest);
  return plan;
}

std::vector<int32_t> ItemsOf(const WorkPlan& plan, size_t w) {
  std::vector<int32_t> found;
  const auto end = w + 1 < plan.begin.size() ? static_cast<size_t>(plan.begin[w + 1]) : plan.items.size();
  for (auto at = static_cast<size_t>(plan.begin[w]); at < end; ++at) found.push_back(plan.items[at].item);
  return found;
}

int64_t CostOfRow(int32_t item, const BlockMask& mask, const Walk& walk, const TileCost& cost) {
  const auto row = static_cast<size_t>(item % mask.rows);
  return CostOf({0, mask.row_ptr[row], mask.full_begin[row], mask.row_ptr[row + 1]}, walk.missing[row], mask.m / 64,
                cost);
}

}  // namespace stof::test
