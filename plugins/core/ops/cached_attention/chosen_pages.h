// SPDX-License-Identifier: Apache-2.0
// Choose pages on the CPU: the mask of a decode step without the pages that it leaves out.
// docs/reference/cached-attention.md has the definition.
#ifndef STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_CHOSEN_PAGES_H_
#define STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_CHOSEN_PAGES_H_

#include <cstdint>
#include <vector>

#include "plugins/core/base/types.h"
#include "plugins/core/contract/page_choice.h"
#include "plugins/core/mask/dynamic_mask.h"

namespace stof {

// A step of S tokens of each of B sequences, whose query heads h have KV head h / (H / G).
struct ChoosingStep {
  int64_t B = 0, H = 0, G = 0, S = 0;
  const int32_t* first_rows = nullptr;  // [B], the row of the first new token
  const int32_t* ends = nullptr;        // [B], the number of keys
  int64_t chosen = 0, rows = 0;         // PageChoice::chosen and ::rows

  // Whether the mask can leave pages out: else all of them are attended, whatever it allows.
  bool CanLeaveOut() const;
  // The most pages of a sequence.
  int64_t CountPages() const;
};

// The attended pages of each KV head. It refers to the mask, whose runs are listed, to the arrays of the step and to
// its memory. It is made in three parts: which pages are candidates (the constructor), the choice, and the mask that
// follows.
class ChosenPages {
 public:
  // memory: [B, G, pages] bytes, with pages of CountPages().
  ChosenPages(const DynamicMask& mask, const ChoosingStep& step, uint8_t* memory);
  ChosenPages(const ChosenPages&) = delete;
  ChosenPages& operator=(const ChosenPages&) = delete;

  int64_t pages() const { return pages_; }
  // [B, G]: where the pages are that a KV head chooses among. Empty where it attends all that the mask allows.
  const PageSpan* spans() const { return spans_.data(); }
  // Whether a KV head leaves pages out.
  bool leaves_out() const { return leaves_out_; }

  // Chooses by the page scores, [B, G, pages], of which those in the spans are read. memory: likewise.
  void Choose(const float* scores, float* memory, const Parallel& parallel);
  // Chooses pages that lie on as many tiles of so many keys as can be, to plan memory.
  void ChooseApart(int64_t tile_keys);

  // Pairs of queries and keys of allowed pages, and of those that are left out.
  void CountPairs(uint64_t* allowed, uint64_t* left_out) const;
  // The mask without the pages that are left out.
  const DynamicMask* view() const { return &view_; }

 private:
  enum State : uint8_t { kOutside, kCandidate, kAttended };  // of a page; kOutside: the mask allows no key of it

  // Marks the pages that the mask allows a head.
  void MarkAllowed(int64_t b, int64_t h, uint8_t* states);
  void MarkBits(int64_t b, int64_t h, int64_t tile, uint8_t* states);
  void FindCandidates(int64_t b, int64_t g);
  // How many tiles of so many keys a page has in which the mask allows a pair; rows of pages are a multiple of them.
  int64_t CountTiles(int64_t head, int64_t page, int64_t tile_keys);
  void ChooseOfHead(int64_t head, const float* scores, float* memory);
  uint8_t* StatesOf(int64_t head) const { return memory_ + head * pages_; }
  int64_t PagesOf(int64_t b) const;
  static int Tile(const void* self, int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n, uint32_t* bits);
  static int64_t Runs(const void* self, int64_t b, int64_t h, int64_t row0, int m, int n, int64_t first, int64_t last,
                      KeyTileRun* runs);
  // What a KV head attends of the pages of keys [key0, key0 + n): nothing, a part, all.
  enum class Part { kNone, kSome, kAll };
  Part PartOf(int64_t head, int64_t key0, int64_t n) const;

  const DynamicMask& mask_;
  const ChoosingStep step_;
  const int64_t pages_, group_;
  uint8_t* const memory_;
  bool leaves_out_ = false;
  std::vector<PageSpan> spans_;
  std::vector<KeyTileRun> runs_;  // of one head, while pages are found
  std::vector<uint32_t> bits_;    // of one tile, likewise
  DynamicMask view_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_CHOSEN_PAGES_H_
