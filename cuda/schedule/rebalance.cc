// SPDX-License-Identifier: Apache-2.0
#include "cuda/schedule/rebalance.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

namespace stof {
namespace cuda {
namespace {

// Loads are balanced when the greatest exceeds the mean by less than 1 / n: for exchanges of tile rows, and of CTAs.
constexpr int64_t kBalanced = 256, kBalancedSms = 64;
// How many of the least busy CTAs, or SMs, the busiest one exchanges tiles with. Where CTAs share an SM all others
// follow if none of these helps.
constexpr int kLeastBusy = 8;
constexpr size_t kMostExchanges = 4;  // a CTA or SM
// Pairs of tiles that are compared at most, some 10 ms: few CTAs with many tiles would compare the square of these.
constexpr size_t kMostCompared = size_t{1} << 22;

using Load = std::pair<int64_t, int>;  // nanoseconds; of which CTA or SM

int64_t LoadOf(const std::vector<Assignment>& cta) {
  return std::accumulate(cta.begin(), cta.end(), int64_t{0},
                         [](int64_t sum, const Assignment& one) { return sum + one.tile->cost; });
}

// Moves `moved` nanoseconds from one load to another.
void MoveLoad(const Load& from, const Load& to, int64_t moved, std::set<Load>* loads) {
  loads->erase(from);
  loads->erase(to);
  loads->emplace(from.first - moved, from.second);
  loads->emplace(to.first + moved, to.second);
}

// The loads of SMs that run ctas_per_sm CTAs each, and the exchanges of tiles between these.
class SmLoads {
 public:
  SmLoads(size_t ctas_per_sm, int64_t overlapped_ns, std::vector<std::vector<Assignment>>* ctas)
      : ctas_per_sm_(ctas_per_sm), overlapped_ns_(overlapped_ns), ctas_(*ctas) {
    for (const std::vector<Assignment>& cta : ctas_) {
      int64_t load = 0;
      for (const Assignment& one : cta) load += CostOf(one);
      cta_loads_.push_back(load);
      total_ += load;
    }
    for (size_t sm = 0; sm < ctas_.size() / ctas_per_sm_; ++sm) times_.emplace(SmTime(sm), static_cast<int>(sm));
  }
  size_t compared() const { return compared_; }
  int64_t mean() const { return total_ / static_cast<int64_t>(cta_loads_.size()); }
  // Of all SMs, the busiest last.
  const std::set<Load>& times() const { return times_; }

  struct Exchange {
    int64_t time;           // of the busier of the two SMs afterwards
    size_t from, to, a, b;  // tile a of CTA `from` for tile b of CTA `to`
  };
  static constexpr size_t kNoTile = ~size_t{0};
  // Sets `best` to the best exchange between two SMs, or within one, if it is better: of two tiles of a group, or,
  // where CTAs share an SM, of a tile for none.
  void FindExchange(size_t sm, size_t other, Exchange* best) {
    for (size_t from = sm * ctas_per_sm_; from < (sm + 1) * ctas_per_sm_; ++from) {
      for (size_t to = other * ctas_per_sm_; to < (other + 1) * ctas_per_sm_; ++to) {
        if (from != to) FindTiles(from, to, best);
      }
    }
  }

  void Apply(const Exchange& exchange) {
    const size_t sms[2] = {exchange.from / ctas_per_sm_, exchange.to / ctas_per_sm_};
    for (const size_t sm : sms) times_.erase({SmTime(sm), static_cast<int>(sm)});
    std::vector<Assignment>&from = ctas_[exchange.from], &to = ctas_[exchange.to];
    int64_t moved_load = CostOf(from[exchange.a]);
    if (exchange.b != kNoTile) {
      moved_load -= CostOf(to[exchange.b]);
      std::swap(from[exchange.a], to[exchange.b]);
    } else {
      // Before the first tile that LPT assigned later; earlier exchanges may have reordered tiles of a group.
      const auto moved = from.begin() + static_cast<std::ptrdiff_t>(exchange.a);
      to.insert(std::find_if(to.begin(), to.end(), [&](const Assignment& one) { return one.order > moved->order; }),
                *moved);
      from.erase(moved);
    }
    cta_loads_[exchange.from] -= moved_load, cta_loads_[exchange.to] += moved_load;
    for (const size_t sm : sms) times_.emplace(SmTime(sm), static_cast<int>(sm));
  }

 private:
  // Of the CTAs of an SM without two of them.
  struct Rest {
    int64_t sum = 0, most = 0;
  };
  Rest RestOf(size_t sm, size_t without, size_t and_without) const {
    Rest rest;
    for (size_t cta = sm * ctas_per_sm_; cta < (sm + 1) * ctas_per_sm_; ++cta) {
      if (cta == without || cta == and_without) continue;
      rest.sum += cta_loads_[cta];
      rest.most = std::max(rest.most, cta_loads_[cta]);
    }
    return rest;
  }
  // The last CTA of an SM runs faster alone: the time is halfway between the mean and the greatest load.
  int64_t SmTime(const Rest& rest, int64_t load, int64_t other = 0) const {
    const int64_t mean = (rest.sum + load + other) / static_cast<int64_t>(ctas_per_sm_);
    return (mean + std::max({rest.most, load, other})) / 2;
  }
  int64_t SmTime(size_t sm) const {
    const size_t first = sm * ctas_per_sm_;
    return SmTime(RestOf(sm, first, first), cta_loads_[first]);
  }

  int64_t CostOf(const Assignment& one) const { return std::max<int64_t>(0, one.tile->cost - overlapped_ns_); }

  void FindTiles(size_t from, size_t to, Exchange* best) {
    const std::vector<Assignment>&a = ctas_[from], &b = ctas_[to];
    compared_ += a.size() * (b.size() + 1);
    const bool same_sm = from / ctas_per_sm_ == to / ctas_per_sm_;
    const Rest rest = RestOf(from / ctas_per_sm_, from, to), other_rest = RestOf(to / ctas_per_sm_, from, to);
    const auto consider = [&](int64_t moved, size_t i, size_t j) {
      const int64_t load = cta_loads_[from] - moved, other = cta_loads_[to] + moved;
      const int64_t time =
          same_sm ? SmTime(rest, load, other) : std::max(SmTime(rest, load), SmTime(other_rest, other));
      if (time < best->time) *best = {time, from, to, i, j};
    };
    for (size_t i = 0; i < a.size(); ++i) {
      const int64_t cost = CostOf(a[i]);
      if (ctas_per_sm_ > 1 && a.size() > 1) consider(cost, i, kNoTile);
      for (size_t j = 0; j < b.size(); ++j) {
        if (a[i].group == b[j].group) consider(cost - CostOf(b[j]), i, j);
      }
    }
  }

  size_t ctas_per_sm_;
  int64_t overlapped_ns_;
  std::vector<std::vector<Assignment>>& ctas_;
  std::vector<int64_t> cta_loads_;
  int64_t total_ = 0;
  size_t compared_ = 0;
  std::set<Load> times_;
};

}  // namespace

int64_t Rebalance(size_t ctas_per_sm, int64_t overlapped_ns, std::vector<std::vector<Assignment>>* ctas) {
  SmLoads loads(ctas_per_sm, overlapped_ns, ctas);
  const int64_t mean = loads.mean();
  for (size_t i = 0; i < kMostExchanges * ctas->size() && loads.compared() < kMostCompared; ++i) {
    const auto [most, busiest] = *loads.times().rbegin();
    if (most - mean <= mean / kBalanced) break;
    const auto sm = static_cast<size_t>(busiest);
    SmLoads::Exchange best = {most, 0, 0, 0, 0};
    if (ctas_per_sm > 1) loads.FindExchange(sm, sm, &best);
    int tried = 0;
    for (auto other = loads.times().begin(); other->second != busiest; ++other, ++tried) {
      // CTAs that share an SM have few tiles: perhaps none of the least busy SMs has one that fits.
      if (tried >= kLeastBusy && (ctas_per_sm == 1 || best.time < most)) break;
      loads.FindExchange(sm, static_cast<size_t>(other->second), &best);
    }
    if (best.time == most) break;
    loads.Apply(best);
  }
  return loads.times().rbegin()->first;
}

void BalanceSms(size_t ctas_per_sm, std::vector<std::vector<Assignment>>* ctas) {
  std::vector<int64_t> load(ctas->size(), 0);
  std::set<Load> sums;  // of each SM, by its first CTA
  int64_t total = 0;
  for (size_t first = 0; first < ctas->size(); first += ctas_per_sm) {
    int64_t sum = 0;
    for (size_t cta = first; cta < first + ctas_per_sm; ++cta) {
      load[cta] = LoadOf((*ctas)[cta]);
      sum += load[cta];
    }
    sums.emplace(sum, static_cast<int>(first));
    total += sum;
  }
  const int64_t mean = total / static_cast<int64_t>(sums.size());
  for (size_t exchanges = 0; exchanges < kMostExchanges * sums.size(); ++exchanges) {
    const auto [most, busiest] = *sums.rbegin();
    if (most - mean <= mean / kBalancedSms) break;
    struct {
      int64_t load;  // of the busier of the two SMs afterwards
      size_t from, to;
    } best = {most, 0, 0};
    Load with;
    for (auto other = sums.begin(); other->second != busiest; ++other) {
      for (size_t i = 0; i < ctas_per_sm * ctas_per_sm; ++i) {
        const size_t from = static_cast<size_t>(busiest) + i / ctas_per_sm;
        const size_t to = static_cast<size_t>(other->second) + i % ctas_per_sm;
        const int64_t moved = load[from] - load[to];
        const int64_t greater = std::max(most - moved, other->first + moved);
        if (greater < best.load) best = {greater, from, to}, with = *other;
      }
    }
    if (best.load == most) break;
    const int64_t moved = load[best.from] - load[best.to];
    std::swap((*ctas)[best.from], (*ctas)[best.to]);
    std::swap(load[best.from], load[best.to]);
    MoveLoad({most, busiest}, with, moved, &sums);
  }
}

}  // namespace cuda
}  // namespace stof
