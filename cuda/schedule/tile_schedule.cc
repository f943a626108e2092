// SPDX-License-Identifier: Apache-2.0
#include "cuda/schedule/tile_schedule.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>

#include "cuda/schedule/rebalance.h"

namespace stof {
namespace cuda {
namespace {

WorkItem ItemOf(const BlockMask& mask, int64_t H, int64_t bh, int64_t row) {
  const auto at = static_cast<size_t>(mask.TableOf(bh / H, bh % H) * mask.rows + row);
  return {static_cast<int32_t>(bh * mask.rows + row), mask.row_ptr[at], mask.full_begin[at], mask.row_ptr[at + 1]};
}

// missing: of groups; a tile of which one has nothing takes the others less time, but where teams split a row, whose
// groups take part in every tile.
int64_t CostOf(const WorkItem& work, int64_t missing, int groups, const TileCost& cost) {
  const int64_t all = (work.end - work.begin + cost.split - 1) / cost.split;
  const int64_t partial = (work.full - work.begin + cost.split - 1) / cost.split;
  const int64_t passed = cost.split > 1 ? 0 : cost.partial * missing / (2 * groups);
  return cost.row + cost.partial * partial + cost.full * (all - partial) - passed;
}

constexpr int64_t kMostPlanned = int64_t{1} << 20;
constexpr int64_t kHeldBack = 32;  // one of so many nanoseconds of work
constexpr int64_t kHardly = 96;
constexpr size_t kMostTried = size_t{1} << 16, kFewRows = 4;  // kFewRows: a worker
constexpr size_t kMostRefined = size_t{1} << 13;              // by halves and changes: more rows balance by chance
constexpr int64_t kWorthHalving = 256;
constexpr int64_t kWorthReading = 32;  // keys once instead of twice: 4 to 10 % of a run
// Fewer rows than kEnough a worker stay as dealt, for their order counts for more than their sum; where workers share a
// multiprocessor, fewer than kFewest.
constexpr size_t kEnough = 8, kFewest = 3;
// One of so many nanoseconds of work is left to be drawn, if no row of it takes more than one of so many of a worker's.
constexpr int64_t kDrawn = 8, kShort = 12;
// A row is long that takes so many times what rows take in the mean, and so many times what those take that are not.
constexpr int64_t kLong = 4;
// Of a row's start and end, in percent, what the tiles of another worker of the multiprocessor cover.
constexpr int64_t kCovered = 45;

// What joins parts takes: a launch, and for each that it is written and read.
constexpr int64_t kJoin = 2000, kJoinPart = 14;
int64_t JoinOf(const WorkPlan& plan) { return plan.cut.empty() ? 0 : kJoin + kJoinPart * plan.parts(); }

// The cost below which rows are held back: all of them together take a kHeldBack-th of the time at most.
int64_t HeldBelow(const std::vector<Work>& works, int64_t total) {
  std::vector<int64_t> costs;
  for (const Work& work : works) costs.push_back(work.cost);
  std::sort(costs.begin(), costs.end());
  int64_t sum = 0;
  for (const int64_t cost : costs) {
    sum += cost;
    if (sum > total / kHeldBack) return cost;
  }
  return 0;
}

int64_t TotalOf(const std::vector<Work>& works) {
  return std::accumulate(works.begin(), works.end(), int64_t{0},
                         [](int64_t sum, const Work& work) { return sum + work.cost; });
}

// Rows that take more than `from` are long, and have other rows go beside them: first those of the heads before end[0],
// then of those before end[1] and so on, none of all heads from end.back() on.
struct Waves {
  int64_t from = 0;
  std::vector<int64_t> end;
  bool IsLong(const Work& work) const { return work.cost > from; }
};

// What is done with a plan of rows that were dealt out. holds: the smallest rows of all heads come last. covered: of
// each row's nanoseconds, by the other teams of a multiprocessor.
struct Finishing {
  bool draws = false, even = false, holds = true;
  int teams = 1;
  int64_t covered = 0;
  Waves waves;
};

// From which place on rows are left to be drawn: a kDrawn-th of the work, but not what workers begin with. A worker
// draws while it is still at a row: others might begin a long one earlier.
size_t DrawnFrom(const std::vector<const Work*>& dealt, int64_t total, int workers) {
  size_t from = dealt.size();
  for (int64_t left = total / kDrawn; from > static_cast<size_t>(workers); --from) {
    const int64_t cost = dealt[from - 1]->cost;
    left -= cost;
    if (left < 0) break;
    if (cost > total / workers / kShort) return dealt.size();
  }
  return from;
}

// Whether rows read on where the row before them ended, as those of a diagonal band do: whether they have, in the mean,
// at most two rows' worth of keys that it has not. Long rows do not count. All heads have the same rows.
bool ReadOn(const std::vector<Work>& works, const Waves& waves, const BlockMask& mask) {
  std::vector<int32_t> before, own, added;
  int64_t tiles = 0, rows = 0;
  for (int64_t row = 0; row < mask.rows; ++row) {
    const Work& work = works[static_cast<size_t>(row)];
    if (waves.IsLong(work)) continue;
    own.assign(mask.key_tile.begin() + work.item.begin, mask.key_tile.begin() + work.item.end);
    std::sort(own.begin(), own.end());
    added.clear();
    std::set_difference(own.begin(), own.end(), before.begin(), before.end(), std::back_inserter(added));
    tiles += static_cast<int64_t>(added.size());
    ++rows;
    before.swap(own);
  }
  return tiles * mask.n <= 2 * mask.m * rows;
}

// Rows of global tokens walk all keys of their heads, from the first to the last. Other rows of a band could do so at
// the same time, those of so many heads that these take as long: their keys and values come from memory once then.
// Heads for which there is no time in the end have their long rows in the last wave all the same. None where there are
// no such rows, where these walk keys that no other row has, or all is in the L2 cache anyhow.
Waves WavesOf(const std::vector<Work>& works, const BlockMask& mask, int64_t heads, int workers, int64_t section) {
  Waves waves;
  if (heads <= section || mask.layout.size() > 1 || mask.S != mask.T || works.empty()) return waves;
  const int64_t total = TotalOf(works), share = total / workers;
  waves.from = kLong * (total / static_cast<int64_t>(works.size()));
  int64_t time = 0, count = 0, most = 0;
  for (const Work& work : works) {
    if (waves.IsLong(work)) {
      time += work.cost, ++count;
    } else {
      most = std::max(most, work.cost);
    }
  }
  const int64_t length = count > 0 ? time / count : 0;
  // Others that take long themselves had better go by falling cost.
  if (length == 0 || kLong * most > length || !ReadOn(works, waves, mask)) return waves;
  const int64_t others = std::max<int64_t>(1, (total - time) / heads);
  for (int64_t end = 0, left = share / length; left > 0 && end < heads; --left) {
    const int64_t now = left > 1 ? workers * length / (others + time / heads)
                                 : (workers - (heads - end) * count / heads) * length / others;
    end = std::clamp(end + now, end, heads);
    if (now <= 0) break;
    waves.end.push_back(end);
  }
  return waves;
}

// works: in the order of their heads; section: heads at a time, give or take one.
WorkPlan DealSections(const std::vector<Work>& works, int64_t heads, int workers, int64_t section,
                      const Finishing& finishing) {
  const int64_t total = TotalOf(works), share = total / workers;
  const int64_t sections = (heads + section - 1) / section;
  const auto section_of = [&](int64_t head) { return (sections * (head + 1) - 1) / heads; };
  const int64_t small = finishing.holds ? HeldBelow(works, total) : 0;
  // When each section begins.
  std::vector<int64_t> begins(static_cast<size_t>(sections) + 1, 0);
  for (const Work& work : works) {
    if (work.cost >= small) begins[static_cast<size_t>(section_of(work.head)) + 1] += work.cost;
  }
  std::partial_sum(begins.begin(), begins.end(), begins.begin());
  for (int64_t& begin : begins) begin /= workers;
  // Rows of one section are under way together, for the L2 cache holds its heads' keys and values. Long ones (those of
  // global tokens, say) come in the last section that leaves them the time, for given out late one of them would be the
  // end of the run. The smallest rows come last of all: they fill what the others leave.
  const Waves& waves = finishing.waves;
  std::vector<std::vector<const Work*>> places(waves.end.size() + static_cast<size_t>(sections) + 1);
  for (const Work& work : works) {
    int64_t at = work.cost < small ? sections : section_of(work.head);
    size_t wave = waves.end.size();
    if (at < sections) {
      while (at > 0 && begins[static_cast<size_t>(at)] + work.cost > share - share / kHeldBack) --at;
      const auto own = std::upper_bound(waves.end.begin(), waves.end.end(), work.head);
      wave = static_cast<size_t>(own - waves.end.begin());
      if (wave > 0 && own == waves.end.end() && waves.IsLong(work)) --wave;
    }
    places[wave < waves.end.size() ? wave : wave + static_cast<size_t>(at)].push_back(&work);
  }
  using Load = std::pair<int64_t, int>;  // of a worker
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> least;
  for (int w = 0; w < workers; ++w) least.emplace(0, w);
  std::vector<std::vector<Taken>> taken(static_cast<size_t>(workers));
  std::vector<const Work*> dealt;
  WorkPlan plan;
  for (size_t at = 0; at < places.size(); ++at) {
    std::vector<const Work*>& place = places[at];
    std::stable_sort(place.begin(), place.end(), [&](const Work* a, const Work* b) {
      if (at >= waves.end.size()) return a->cost > b->cost;
      const bool first = waves.IsLong(*a), second = waves.IsLong(*b);
      return first != second ? first : !first && a->item.begin < b->item.begin;
    });
    for (const Work* work : place) {
      const auto [load, worker] = least.top();
      least.pop();
      least.emplace(load + work->cost, worker);
      plan.longest = std::max(plan.longest, load + work->cost);
      taken[static_cast<size_t>(worker)].push_back({work, at, dealt.size()});
      dealt.push_back(work);
    }
  }
  const size_t drawn_from = finishing.draws ? DrawnFrom(dealt, total, workers) : dealt.size();
  const bool evens = finishing.even && drawn_from == dealt.size();
  if (evens) plan.longest = EvenOut(1, 0, &taken);
  const auto each = static_cast<size_t>(finishing.teams);
  if (each > 1 && taken.size() % each == 0) {
    PairUp(each, &taken);
    if (evens) EvenOut(each, finishing.covered, &taken);
  }
  plan.begin.push_back(0);
  for (const std::vector<Taken>& own : taken) {
    for (const Taken& one : own) {
      if (one.place < drawn_from) plan.items.push_back(one.work->item);
    }
    plan.begin.push_back(static_cast<int32_t>(plan.items.size()));
  }
  for (size_t i = drawn_from; i < dealt.size(); ++i) plan.items.push_back(dealt[i]->item);
  return plan;
}

// How many heads at a time are tried, from most to fewest, none of which makes as many sections as the one before. Of
// many rows chance balances all; few ones may come out even only where none wait for a section.
std::vector<int64_t> SectionsToTry(size_t works, int64_t heads, int workers, int64_t section) {
  std::vector<int64_t> found;
  const auto add = [&](int64_t size) {
    size = std::clamp<int64_t>(size, 1, heads);
    const auto sections = [heads](int64_t of) { return (heads + of - 1) / of; };
    if (found.empty() || sections(size) > sections(found.back())) found.push_back(size);
  };
  if (works < kFewRows * static_cast<size_t>(workers)) add(heads);
  if (works <= kMostTried) {
    for (const int64_t part : {1, 2, 4}) add(section / part);
  }
  add(section / 8);
  return found;
}

// Few heads at a time leave the L2 cache room, but their rows may come out less even: the smallest sections that end
// hardly later than others. The smallest rows of all heads, held back to the end, have all keys come from memory again:
// where workers can change rows with each other, or draw some, they stay with their heads if that ends hardly later.
// Of finishing, `holds` is set to what was taken, as `taken` is.
WorkPlan Deal(const std::vector<Work>& works, int64_t heads, int workers, int64_t section, Finishing* finishing,
              int64_t* taken = nullptr) {
  WorkPlan best;
  Finishing tried = *finishing;
  int64_t earliest = std::numeric_limits<int64_t>::max();
  const bool may_stay = (finishing->even || finishing->draws) && finishing->waves.end.empty() && finishing->teams == 1;
  for (const int64_t size : SectionsToTry(works.size(), heads, workers, section)) {
    for (const bool holds : {true, false}) {
      if (!holds && !may_stay) continue;
      tried.holds = holds;
      WorkPlan plan = DealSections(works, heads, workers, size, tried);
      // Where the last rows of all heads are too long to be drawn, the smallest ones may be short enough.
      if (!holds && best.drawn() > 0 && plan.drawn() == 0) continue;
      earliest = std::min(earliest, plan.longest);
      if (!best.begin.empty() && plan.longest - earliest > earliest / kHardly) continue;
      best = std::move(plan);
      finishing->holds = holds;
      if (taken != nullptr) *taken = size;
    }
  }
  return best;
}

// A row's two groups, each with the tiles that have some of its pairs.
void Halve(const Work& work, const Walk& walk, const TileCost& cost, std::vector<Work>* halves) {
  for (int group = 0; group < 2; ++group) {
    Work half = work;
    WorkItem& item = half.item;
    const auto code = [&walk](int32_t at) { return walk.code[static_cast<size_t>(at)]; };
    while (item.begin < item.end && (LeadOf(code(item.begin)) >> group & 1) != 0) ++item.begin;
    while (item.begin < item.end && (TrailOf(code(item.end - 1)) >> group & 1) != 0) --item.end;
    item.full = item.end + 1 + group;
    half.cost = cost.row;
    for (int32_t at = item.begin; at < item.end; ++at) half.cost += code(at) < 0 ? cost.full : cost.partial;
    half.cost = half.cost * cost.half / 100;
    halves->push_back(half);
  }
}

std::vector<Work> WithHalves(const std::vector<Work>& works, const std::vector<size_t>& order, size_t count,
                             const Walk& walk, const TileCost& cost) {
  std::vector<bool> halved(works.size(), false);
  for (size_t i = 0; i < count; ++i) halved[order[i]] = true;
  std::vector<Work> found;
  for (size_t i = 0; i < works.size(); ++i) {
    if (halved[i]) {
      Halve(works[i], walk, cost, &found);
    } else {
      found.push_back(works[i]);
    }
  }
  return found;
}

// The plan of sections of so many heads, or one in which some rows are halved, if that ends earlier: the last rows,
// whose heads' keys and values are in the L2 cache then, the smallest, which lose least, or, of few rows, the largest.
// How many of them come out best depends on luck.
WorkPlan HalveSome(WorkPlan plan, const std::vector<Work>& works, const Walk& walk, int64_t heads, int workers,
                   int64_t section, const TileCost& cost, const Finishing& finishing) {
  const int64_t mean = TotalOf(works) / workers;
  if (works.size() > kMostRefined || plan.longest - mean <= mean / kHardly) return plan;
  std::vector<size_t> order(works.size());
  const auto by_cost = [&](bool falling) {
    std::stable_sort(order.begin(), order.end(), [&works, falling](size_t a, size_t b) {
      return falling ? works[a].cost > works[b].cost : works[a].cost < works[b].cost;
    });
  };
  const auto try_some = [&](size_t count) {
    if (count == 0 || count > works.size()) return;
    const std::vector<Work> halves = WithHalves(works, order, count, walk, cost);
    const auto most = static_cast<int>(std::min(halves.size(), static_cast<size_t>(workers)));
    WorkPlan other = DealSections(halves, heads, most, section, finishing);
    if (other.longest < plan.longest - plan.longest / kWorthHalving) plan = std::move(other);
  };
  const size_t eighth = std::max<size_t>(1, static_cast<size_t>(workers) / 8);
  const bool few = works.size() < kFewRows * static_cast<size_t>(workers);
  const auto try_all = [&] {
    for (const size_t eighths : {1, 2, 4, 8}) {
      if (few || eighths == 2 || eighths == 4) try_some(eighths * eighth);
    }
  };
  std::iota(order.rbegin(), order.rend(), size_t{0});
  try_all();
  by_cost(false);
  try_all();
  if (!few) return plan;
  by_cost(true);
  try_all();
  try_some(works.size());
  return plan;
}

// The works with rows that are longer than a worker's share in parts of one of_share-th of it; `cut` stays empty where
// there are none, or too many parts.
std::vector<Work> CutLong(const std::vector<Work>& works, const Walk& walk, int workers, const TileCost& cost,
                          int64_t of_share, std::vector<CutRow>* cut) {
  const int64_t share = TotalOf(works) / workers;
  const int64_t part = std::max(share / of_share, cost.row + kFewestTilesOfPart * cost.full);
  std::vector<Work> pieces;
  int64_t parts = 0;
  for (const Work& work : works) {
    const int64_t tiles = work.item.end - work.item.begin;
    const int64_t count = std::min({(work.cost + part - 1) / part, tiles / kFewestTilesOfPart, kMostPartsOfRow});
    if (work.cost <= share || count < 2) {
      pieces.push_back(work);
      continue;
    }
    cut->push_back({work.item.item, static_cast<int32_t>(parts), static_cast<int32_t>(count)});
    for (int64_t i = 0; i < count; ++i) {
      Work piece = {cost.row, work.head, work.item};
      piece.item.begin = static_cast<int32_t>(work.item.begin + tiles * i / count);
      piece.item.end = static_cast<int32_t>(work.item.begin + tiles * (i + 1) / count);
      piece.item.full = static_cast<int32_t>(piece.item.end + 1 + parts++);
      for (int32_t at = piece.item.begin; at < piece.item.end; ++at) {
        piece.cost += walk.code[static_cast<size_t>(at)] < 0 ? cost.full : cost.partial;
      }
      pieces.push_back(piece);
    }
  }
  if (parts > kMostParts) cut->clear();
  return pieces;
}

}  // namespace

bool IsPlanned(const BlockMask& mask, int64_t B, int64_t H) {
  const int64_t words = int64_t{mask.m} * mask.n / 32;
  return B * H * mask.rows <= kMostPlanned && static_cast<int64_t>(mask.bits.size()) / words <= kIdMask;
}

WorkPlan PlanWork(const BlockMask& mask, const Walk& walk, int64_t B, int64_t H, int workers, int64_t section,
                  const TileCost& cost, bool finish, int64_t sharing) {
  const int groups = std::max(1, mask.m / 64);
  std::vector<Work> works;
  for (int64_t bh = 0; bh < B * H; ++bh) {
    const int64_t table = mask.TableOf(bh / H, bh % H);
    for (int64_t row = 0; row < mask.rows; ++row) {
      WorkItem item = ItemOf(mask, H, bh, row);
      const int64_t own = CostOf(item, walk.missing[static_cast<size_t>(table * mask.rows + row)], groups, cost);
      item.full = item.end;
      works.push_back({own, bh, item});
    }
  }
  const auto most = [workers](const std::vector<Work>& some) {
    return static_cast<int>(std::clamp<int64_t>(static_cast<int64_t>(some.size()), 1, workers));
  };
  const size_t enough = works.size() / static_cast<size_t>(workers);
  Finishing finishing;
  if (finish) {
    finishing.draws = cost.draws && enough >= kEnough;
    finishing.even = enough >= (cost.teams > 1 ? kFewest : kEnough) && works.size() <= kMostRefined;
    finishing.teams = cost.teams;
    finishing.covered = cost.row * kCovered / 100;
    if (sharing == 1) finishing.waves = WavesOf(works, mask, B * H, workers, section);
  }
  int64_t taken = section;
  const int64_t mean = TotalOf(works) / most(works);
  WorkPlan plan = Deal(works, B * H, most(works), section, &finishing, &taken);
  if (!finishing.waves.end.empty()) {
    // Long rows of different lengths may come out uneven so.
    Finishing without = finishing;
    without.waves = Waves();
    int64_t other_taken = section;
    WorkPlan other = Deal(works, B * H, most(works), section, &without, &other_taken);
    if (plan.longest - other.longest > other.longest / kWorthReading) {
      plan = std::move(other);
      taken = other_taken;
      finishing = without;
    }
  }
  if (cost.half > 0 && plan.drawn() == 0) {
    finishing.draws = false;
    plan = HalveSome(std::move(plan), works, walk, B * H, workers, taken, cost, finishing);
  }
  plan.mean = mean;
  if (!cost.cuts) return plan;
  // How well parts fill what rows leave depends on luck: three sizes are tried. By the busiest worker, also where one
  // would be faster alone: with rows left whole by TimeOf, 64 x 64, 4 x 1 took up to 45 % longer.
  for (const int64_t of_share : {1, 2, 3}) {
    std::vector<CutRow> cut;
    const std::vector<Work> pieces = CutLong(works, walk, workers, cost, of_share, &cut);
    if (cut.empty()) continue;
    WorkPlan other = Deal(pieces, B * H, most(pieces), section, &finishing);
    other.cut = std::move(cut);
    other.longest += JoinOf(other);
    other.mean = mean;
    if (other.longest < plan.longest) plan = std::move(other);
  }
  return plan;
}

int64_t TimeOf(const WorkPlan& plan, const TileCost& cost) {
  if (cost.alone == 100) return plan.longest;
  const int64_t join = JoinOf(plan);
  return std::max(plan.mean, (plan.longest - join) * 100 / cost.alone) + join;
}

int64_t LeastOfPlan(const BlockMask& mask, int64_t B, int64_t H, int workers, const TileCost& cost) {
  const int groups = std::max(1, mask.m / 64);
  std::vector<int64_t> tables(mask.full_begin.size() / std::max<size_t>(1, static_cast<size_t>(mask.rows)), 0);
  for (int64_t bh = 0; bh < B * H; ++bh) ++tables[static_cast<size_t>(mask.TableOf(bh / H, bh % H))];
  int64_t total = 0, largest = 0;
  for (size_t at = 0; at < mask.full_begin.size(); ++at) {
    const WorkItem item = {0, mask.row_ptr[at], mask.full_begin[at], mask.row_ptr[at + 1]};
    // As if all groups but one passed over each partial tile.
    const int64_t own = CostOf(item, int64_t{groups - 1} * (item.full - item.begin), groups, cost);
    total += own * tables[at / static_cast<size_t>(mask.rows)];
    // The half with more tiles has at least every second partial one.
    const int64_t half =
        cost.half *
        (cost.row + cost.partial * ((item.full - item.begin + 1) / 2) + cost.full * (item.end - item.full)) / 100;
    largest = std::max(largest, cost.half > 0 ? std::min(own, half) : own);
  }
  if (cost.cuts) return total / workers;
  if (cost.half == 0) return std::max(total / workers, largest * 100 / cost.alone);
  // Of a tile that is one group's alone, 3 / 4 of a whole one, a half takes its percentage; and is rounded down.
  const int64_t halved = total / workers * std::min<int64_t>(300, 4 * cost.half) / 300;
  return std::max(halved - 2 * B * H * mask.rows / workers - 2, largest * 100 / cost.alone);
}

}  // namespace cuda
}  // namespace stof
