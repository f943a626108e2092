// SPDX-License-Identifier: Apache-2.0
#include "cuda/schedule/rebalance.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

namespace stof {
namespace cuda {
namespace {

// A plan is even when its busiest multiprocessor has one of so many nanoseconds more than the mean.
constexpr int64_t kEven = 256;
// The same where workers change multiprocessors.
constexpr int64_t kHardlyTogether = 64;
// The least busy ones that the busiest changes rows with (where they share multiprocessors, all others if none of these
// suits), and how often, for each worker.
constexpr int kLeastBusy = 8;
constexpr size_t kMostChanges = 4;
// Pairs of rows that are compared at most, for many rows of few workers take their square: some 10 ms.
constexpr size_t kMostCompared = size_t{1} << 22;

using Load = std::pair<int64_t, int>;  // of a worker or a multiprocessor

int64_t LoadOf(const std::vector<Taken>& taken) {
  return std::accumulate(taken.begin(), taken.end(), int64_t{0},
                         [](int64_t sum, const Taken& one) { return sum + one.work->cost; });
}

// So much of the first load goes over to the second.
void Shift(const Load& from, const Load& to, int64_t less, std::set<Load>* loads) {
  loads->erase(from);
  loads->erase(to);
  loads->emplace(from.first - less, from.second);
  loads->emplace(to.first + less, to.second);
}

// How busy multiprocessors are that `each` of the workers share, and what happens when two workers change rows.
class SharedLoads {
 public:
  SharedLoads(size_t each, int64_t covered, std::vector<std::vector<Taken>>* taken)
      : each_(each), covered_(covered), taken_(*taken) {
    for (const std::vector<Taken>& own : taken_) {
      int64_t load = 0;
      for (const Taken& one : own) load += CountedOf(one);
      own_.push_back(load);
      total_ += load;
    }
    for (size_t bin = 0; bin < taken_.size() / each_; ++bin) times_.emplace(TimeOf(bin), static_cast<int>(bin));
  }
  size_t compared() const { return compared_; }
  int64_t mean() const { return total_ / static_cast<int64_t>(own_.size()); }
  // The busiest last.
  const std::set<Load>& times() const { return times_; }

  struct Change {
    int64_t longer;  // what the busier one of their multiprocessors takes then
    size_t from, to, a, b;
  };
  static constexpr size_t kNone = ~size_t{0};
  // The best change of a row for one of its section, or, of workers that share a multiprocessor, for none, between
  // these multiprocessors, if it is better than `best`.
  void FindChange(size_t bin, size_t other, Change* best) {
    for (size_t from = bin * each_; from < (bin + 1) * each_; ++from) {
      for (size_t to = other * each_; to < (other + 1) * each_; ++to) {
        if (from != to) FindRows(from, to, best);
      }
    }
  }

  void Make(const Change& change) {
    const size_t bins[2] = {change.from / each_, change.to / each_};
    for (const size_t bin : bins) times_.erase({TimeOf(bin), static_cast<int>(bin)});
    std::vector<Taken>&from = taken_[change.from], &to = taken_[change.to];
    int64_t less = CountedOf(from[change.a]);
    if (change.b != kNone) {
      less -= CountedOf(to[change.b]);
      std::swap(from[change.a], to[change.b]);
    } else {
      // Before the first row that was dealt out later; within a section rows may have changed places before.
      const auto moved = from.begin() + static_cast<std::ptrdiff_t>(change.a);
      to.insert(std::find_if(to.begin(), to.end(), [&](const Taken& one) { return one.place > moved->place; }), *moved);
      from.erase(moved);
    }
    own_[change.from] -= less, own_[change.to] += less;
    for (const size_t bin : bins) times_.emplace(TimeOf(bin), static_cast<int>(bin));
  }

 private:
  // Of the workers of a multiprocessor, without two of them.
  struct Rest {
    int64_t sum = 0, most = 0;
  };
  Rest RestOf(size_t bin, size_t without, size_t and_without) const {
    Rest rest;
    for (size_t w = bin * each_; w < (bin + 1) * each_; ++w) {
      if (w == without || w == and_without) continue;
      rest.sum += own_[w];
      rest.most = std::max(rest.most, own_[w]);
    }
    return rest;
  }
  // Who ends last has the multiprocessor alone then, and is faster: between the mean and the greatest load.
  int64_t TimeOf(const Rest& rest, int64_t load, int64_t other = 0) const {
    const int64_t mean = (rest.sum + load + other) / static_cast<int64_t>(each_);
    return (mean + std::max({rest.most, load, other})) / 2;
  }
  int64_t TimeOf(size_t bin) const { return TimeOf(RestOf(bin, bin * each_, bin * each_), own_[bin * each_]); }

  int64_t CountedOf(const Taken& one) const { return std::max<int64_t>(0, one.work->cost - covered_); }

  void FindRows(size_t from, size_t to, Change* best) {
    const std::vector<Taken>&a = taken_[from], &b = taken_[to];
    compared_ += a.size() * (b.size() + 1);
    const bool together = from / each_ == to / each_;
    const Rest beside = RestOf(from / each_, from, to), beside_other = RestOf(to / each_, from, to);
    const auto look = [&](int64_t less, size_t i, size_t j) {
      const int64_t load = own_[from] - less, other = own_[to] + less;
      const int64_t longer =
          together ? TimeOf(beside, load, other) : std::max(TimeOf(beside, load), TimeOf(beside_other, other));
      if (longer < best->longer) *best = {longer, from, to, i, j};
    };
    for (size_t i = 0; i < a.size(); ++i) {
      const int64_t counted = CountedOf(a[i]);
      if (each_ > 1 && a.size() > 1) look(counted, i, kNone);
      for (size_t j = 0; j < b.size(); ++j) {
        if (a[i].section == b[j].section) look(counted - CountedOf(b[j]), i, j);
      }
    }
  }

  size_t each_;
  int64_t covered_;
  std::vector<std::vector<Taken>>& taken_;
  std::vector<int64_t> own_;
  int64_t total_ = 0;
  size_t compared_ = 0;
  std::set<Load> times_;
};

}  // namespace

int64_t EvenOut(size_t each, int64_t covered, std::vector<std::vector<Taken>>* taken) {
  SharedLoads loads(each, covered, taken);
  const int64_t mean = loads.mean();
  for (size_t changes = 0; changes < kMostChanges * taken->size() && loads.compared() < kMostCompared; ++changes) {
    const auto [most, busiest] = *loads.times().rbegin();
    if (most - mean <= mean / kEven) break;
    const auto bin = static_cast<size_t>(busiest);
    SharedLoads::Change best = {most, 0, 0, 0, 0};
    if (each > 1) loads.FindChange(bin, bin, &best);
    int tried = 0;
    for (auto other = loads.times().begin(); other->second != busiest; ++other, ++tried) {
      // Workers that share a multiprocessor have few rows, none of which may suit the least busy ones.
      if (tried >= kLeastBusy && (each == 1 || best.longer < most)) break;
      loads.FindChange(bin, static_cast<size_t>(other->second), &best);
    }
    if (best.longer == most) break;
    loads.Make(best);
  }
  return loads.times().rbegin()->first;
}

void PairUp(size_t each, std::vector<std::vector<Taken>>* taken) {
  std::vector<int64_t> load(taken->size(), 0);
  std::set<Load> sums;
  int64_t total = 0;
  for (size_t first = 0; first < taken->size(); first += each) {
    int64_t sum = 0;
    for (size_t w = first; w < first + each; ++w) {
      load[w] = LoadOf((*taken)[w]);
      sum += load[w];
    }
    sums.emplace(sum, static_cast<int>(first));
    total += sum;
  }
  const int64_t mean = total / static_cast<int64_t>(sums.size());
  for (size_t changes = 0; changes < kMostChanges * sums.size(); ++changes) {
    const auto [most, busiest] = *sums.rbegin();
    if (most - mean <= mean / kHardlyTogether) break;
    struct {
      int64_t longer;
      size_t from, to;
    } best = {most, 0, 0};
    Load with;
    for (auto other = sums.begin(); other->second != busiest; ++other) {
      for (size_t i = 0; i < each * each; ++i) {
        const size_t from = static_cast<size_t>(busiest) + i / each, to = static_cast<size_t>(other->second) + i % each;
        const int64_t less = load[from] - load[to];
        const int64_t longer = std::max(most - less, other->first + less);
        if (longer < best.longer) best = {longer, from, to}, with = *other;
      }
    }
    if (best.longer == most) break;
    const int64_t less = load[best.from] - load[best.to];
    std::swap((*taken)[best.from], (*taken)[best.to]);
    std::swap(load[best.from], load[best.to]);
    Shift({most, busiest}, with, less, &sums);
  }
}

}  // namespace cuda
}  // namespace stof
