// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/cached_attention/chosen_pages.h"

#include <algorithm>
#include <cmath>

#include "plugins/core/base/integers.h"
#include "plugins/core/base/parallel_for.h"

namespace stof {
namespace {

// Key tiles by which pages are found have whole words of bits.
constexpr int64_t kLeastTile = 32;
// KV heads that are worth a thread of their own: a choice among fewer pages takes less than waking one.
constexpr int64_t kPagesPerWorker = 4096;

// Whether a page with this score is taken before one with the other: a NaN comes before all numbers.
bool IsBefore(float score, float other) { return std::isnan(score) ? !std::isnan(other) : score > other; }

}  // namespace

bool ChoosingStep::CanLeaveOut() const {
  for (int64_t b = 0; b < B; ++b) {
    if (FirstRecentPage(rows, first_rows[b]) - 1 > chosen) return true;
  }
  return false;
}

int64_t ChoosingStep::CountPages() const {
  int64_t most = 0;
  for (int64_t b = 0; b < B; ++b) most = std::max<int64_t>(most, CeilDiv(ends[b], rows));
  return most;
}

ChosenPages::ChosenPages(const DynamicMask& mask, const ChoosingStep& step, uint8_t* memory)
    : mask_(mask),
      step_(step),
      pages_(step.CountPages()),
      group_(step.H / step.G),
      memory_(memory),
      spans_(static_cast<size_t>(step.B * step.G)),
      view_{&Tile, this, true, true, &Runs, mask.by_head ? mask.alike_heads : group_} {
  const int64_t tile = std::max(kLeastTile, step.rows);
  runs_.resize(static_cast<size_t>(CeilDiv(pages_ * step.rows, tile)));
  bits_.resize(static_cast<size_t>(step.S * tile / 32));
  std::fill(memory_, memory_ + step.B * step.G * pages_, uint8_t{kOutside});
  for (int64_t b = 0; b < step.B; ++b) {
    for (int64_t g = 0; g < step.G; ++g) FindCandidates(b, g);
  }
}

int64_t ChosenPages::PagesOf(int64_t b) const { return CeilDiv(step_.ends[b], step_.rows); }

void ChosenPages::MarkBits(int64_t b, int64_t h, int64_t tile, uint8_t* states) {
  const int64_t n = std::max(kLeastTile, step_.rows), words = n / 32;
  const int kind =
      mask_.tile(mask_.self, b, h, 0, tile * n, static_cast<int>(step_.S), static_cast<int>(n), bits_.data());
  const int64_t last = std::min((tile + 1) * n, PagesOf(b) * step_.rows);
  for (int64_t key = tile * n; key < last && kind != 0; key += step_.rows) {
    const int64_t at = key - tile * n;
    const uint32_t part = step_.rows < 32 ? ((1u << step_.rows) - 1u) << at : ~0u;  // of each word
    uint32_t any = kind == 2 ? 1 : 0;
    for (int64_t i = 0; i < step_.S && any == 0; ++i) {
      for (int64_t w = at / 32; w < CeilDiv(at + step_.rows, 32); ++w)
        any |= bits_[static_cast<size_t>(i * words + w)] & part;
    }
    if (any != 0) states[key / step_.rows] = kAttended;
  }
}

void ChosenPages::MarkAllowed(int64_t b, int64_t h, uint8_t* states) {
  const int64_t n = std::max(kLeastTile, step_.rows), pages = PagesOf(b);
  const int64_t count = mask_.runs(mask_.self, b, h, 0, static_cast<int>(step_.S), static_cast<int>(n), 0,
                                   CeilDiv(pages * step_.rows, n), runs_.data());
  for (int64_t i = 0; i < count; ++i) {
    const KeyTileRun& run = runs_[static_cast<size_t>(i)];
    if (run.is_full) {
      std::fill(states + run.first * n / step_.rows, states + std::min(run.last * n / step_.rows, pages),
                uint8_t{kAttended});
      continue;
    }
    for (int64_t tile = run.first; tile < run.last; ++tile) MarkBits(b, h, tile, states);
  }
}

void ChosenPages::FindCandidates(int64_t b, int64_t g) {
  const int64_t head = b * step_.G + g;
  uint8_t* const states = StatesOf(head);
  PageSpan& span = spans_[static_cast<size_t>(head)];
  if (g > 0 && !mask_.by_head) {
    std::copy_n(StatesOf(head - g), pages_, states);
    span = spans_[static_cast<size_t>(head - g)];
    return;
  }
  for (int64_t h = 0; h < group_; h += mask_.by_head ? mask_.alike_heads : group_) {
    MarkAllowed(b, g * group_ + h, states);
  }
  const int64_t recent = FirstRecentPage(step_.rows, step_.first_rows[b]);
  int64_t count = 0;
  for (int64_t page = 1; page < recent; ++page) {
    if (states[page] == kOutside) continue;
    if (count++ == 0) span.first = static_cast<int32_t>(page);
    span.last = static_cast<int32_t>(page + 1);
  }
  if (count <= step_.chosen) {
    span = PageSpan();
    return;
  }
  leaves_out_ = true;
  for (int64_t page = span.first; page < span.last; ++page) {
    if (states[page] == kAttended) states[page] = kCandidate;
  }
}

void ChosenPages::ChooseOfHead(int64_t head, const float* scores, float* memory) {
  const PageSpan& span = spans_[static_cast<size_t>(head)];
  if (span.first == span.last) return;
  uint8_t* const states = StatesOf(head);
  float* end = memory;
  for (int64_t page = span.first; page < span.last; ++page) {
    if (states[page] == kCandidate) *end++ = scores[page];
  }
  // All pages above the k-th largest score, and the first ones of those that have it.
  std::nth_element(memory, memory + step_.chosen - 1, end, IsBefore);
  const float least = memory[step_.chosen - 1];
  int64_t equal =
      std::count_if(memory, memory + step_.chosen, [least](float score) { return !IsBefore(score, least); });
  for (int64_t page = span.first; page < span.last; ++page) {
    if (states[page] != kCandidate) continue;
    if (IsBefore(least, scores[page])) continue;
    if (IsBefore(scores[page], least) || equal-- > 0) states[page] = kAttended;
  }
}

void ChosenPages::Choose(const float* scores, float* memory, const Parallel& parallel) {
  const int64_t heads = step_.B * step_.G;
  ParallelFor(parallel, heads, heads * pages_ / kPagesPerWorker, [&](int64_t head, int64_t /*task*/) {
    ChooseOfHead(head, scores + head * pages_, memory + head * pages_);
  });
}

int64_t ChosenPages::CountTiles(int64_t head, int64_t page, int64_t tile_keys) {
  const int64_t h = head % step_.G * group_;
  int64_t count = 0;
  for (int64_t key = page * step_.rows; key < (page + 1) * step_.rows; key += tile_keys) {
    count += mask_.tile(mask_.self, head / step_.G, h, 0, key, static_cast<int>(step_.S), static_cast<int>(tile_keys),
                        bits_.data()) != 0;
  }
  return count;
}

void ChosenPages::ChooseApart(int64_t tile_keys) {
  for (int64_t head = 0; head < step_.B * step_.G; ++head) {
    const PageSpan& span = spans_[static_cast<size_t>(head)];
    uint8_t* const states = StatesOf(head);
    int64_t left = step_.chosen;
    const auto choose = [&](const auto& is_wanted) {
      for (int64_t page = span.first; page < span.last && left > 0; ++page) {
        if (states[page] != kCandidate || !is_wanted(page)) continue;
        states[page] = kAttended;
        --left;
      }
    };
    if (step_.rows < tile_keys) {  // a page for each tile first
      choose([&](int64_t page) {
        return PartOf(head, page * step_.rows / tile_keys * tile_keys, tile_keys) == Part::kNone;
      });
    } else {  // pages of many tiles first
      for (int64_t most = step_.rows / tile_keys; most > 1; --most) {
        choose([&](int64_t page) { return CountTiles(head, page, tile_keys) >= most; });
      }
    }
    choose([](int64_t) { return true; });
  }
}

void ChosenPages::CountPairs(uint64_t* allowed, uint64_t* left_out) const {
  for (int64_t head = 0; head < step_.B * step_.G; ++head) {
    const int64_t end = step_.ends[head / step_.G], queries = step_.S * group_;
    for (int64_t page = 0; page < PagesOf(head / step_.G); ++page) {
      const uint8_t state = StatesOf(head)[page];
      const auto pairs = static_cast<uint64_t>(queries * std::min(step_.rows, end - page * step_.rows));
      if (state != kOutside) *allowed += pairs;
      if (state == kCandidate) *left_out += pairs;
    }
  }
}

ChosenPages::Part ChosenPages::PartOf(int64_t head, int64_t key0, int64_t n) const {
  const uint8_t* const states = StatesOf(head);
  const int64_t first = key0 / step_.rows;
  const int64_t last = std::min(CeilDiv(key0 + n, step_.rows), PagesOf(head / step_.G));
  const int64_t attended = std::count(states + first, states + std::max(first, last), uint8_t{kAttended});
  return attended == 0 ? Part::kNone : attended == last - first ? Part::kAll : Part::kSome;
}

int ChosenPages::Tile(const void* self, int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n,
                      uint32_t* bits) {
  const auto& chosen = *static_cast<const ChosenPages*>(self);
  const int64_t head = b * chosen.step_.G + h / chosen.group_, words = n / 32;
  const Part part = chosen.PartOf(head, key0, n);
  if (part == Part::kNone) return 0;
  const int kind = chosen.mask_.tile(chosen.mask_.self, b, h, row0, key0, m, n, bits);
  if (kind == 0 || part == Part::kAll) return kind;
  const uint8_t* const states = chosen.StatesOf(head);
  const int64_t pages = chosen.PagesOf(b);
  for (int64_t w = 0; w < words; ++w) {
    uint32_t word = 0;
    for (int64_t bit = 0; bit < 32; bit += 16) {  // pages have 16 rows or more
      const int64_t page = (key0 + 32 * w + bit) / chosen.step_.rows;
      if (page < pages && states[page] == kAttended) word |= 0xffffu << bit;
    }
    for (int64_t i = 0; i < m; ++i) {
      uint32_t& own = bits[i * words + w];
      own = kind == 2 ? word : own & word;
    }
  }
  return 1;
}

int64_t ChosenPages::Runs(const void* self, int64_t b, int64_t h, int64_t row0, int m, int n, int64_t first,
                          int64_t last, KeyTileRun* runs) {
  const auto& chosen = *static_cast<const ChosenPages*>(self);
  const DynamicMask& mask = chosen.mask_;
  const int64_t head = b * chosen.step_.G + h / chosen.group_;
  const int64_t listed = mask.runs(mask.self, b, h, row0, m, n, first, last, runs);
  // The mask's runs go to the end of the array. Each has a tile or more, so what replaces one ends before the next one.
  KeyTileRun* const rest = runs + std::max<int64_t>(0, last - first) - listed;
  std::copy_backward(runs, runs + listed, rest + listed);
  int64_t count = 0;
  for (int64_t i = 0; i < listed; ++i) {
    const KeyTileRun run = rest[i];
    for (int32_t tile = run.first; tile < run.last; ++tile) {
      const Part part = chosen.PartOf(head, int64_t{tile} * n, n);
      if (part == Part::kNone) continue;
      const bool is_full = run.is_full && part == Part::kAll;
      if (count > 0 && runs[count - 1].last == tile && runs[count - 1].is_full == is_full) {
        runs[count - 1].last = tile + 1;
      } else {
        runs[count++] = {tile, tile + 1, is_full};
      }
    }
  }
  return count;
}

}  // namespace stof
