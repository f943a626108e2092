// SPDX-License-Identifier: Apache-2.0
// Upload of block masks: their memory on the device, how long they live, and failing calls. The runtime is the tests'
// own (fake_cuda.h), so that no GPU is needed.
// Over 500 lines: a list of cases.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/rowwise/api.h"
#include "cuda/mask/device_mask.h"
#include "cuda/mask/fragments.h"
#include "cuda/mask/stacked_mask.h"
#include "cuda/schedule/tile_schedule.h"
#include "plugins/core/mask/block_mask_builder.h"
#include "tests/cpp/fake_cuda/fake_cuda.h"
#include "tests/cpp/mask/random_expr.h"

namespace stof::test {
namespace {

using cuda::DeviceMaskCache;
using cuda::MaskEntry;
using cuda::MaskForm;
using cuda::TileCost;
using cuda::TileList;
using cuda::TileSchedule;
using Entry = std::shared_ptr<const MaskEntry>;

constexpr int64_t kPlenty = int64_t{64} << 20;

// ---- forms that kernels ask for ----
MaskForm Planned(int m, int n, int ctas, int64_t l2_heads, const TileCost& cost) {
  MaskForm form;
  form.m = m, form.n = n, form.ctas = ctas, form.l2_heads = l2_heads, form.cost = cost, form.fragments = true;
  return form;
}

// 9.0: all that a plan can have.
TileCost Drawing() {
  TileCost cost = {1278, 840, 948};
  cost.half_tile_pct = 74, cost.dynamic = true;
  return cost;
}

// 8.0.
MaskForm Tiles() {
  MaskForm form;
  form.fragments = true;
  return form;
}

MaskForm Rows() {
  MaskForm form;
  form.m = form.n = cuda::kRowwiseTile;
  return form;
}

MaskForm FewQueries(int64_t group) {
  MaskForm form;
  form.m = cuda::kDecodeTileRows, form.group = group, form.sm_count = 132;
  return form;
}

MaskForm RandomForm(Random* random, int64_t group) {
  const auto ctas = static_cast<int>(random->Range(1, 9));
  TileCost cost = Drawing();
  switch (random->Range(0, 9)) {
    case 0:
      return Tiles();
    case 1:
      return Rows();
    case 2:
      return MaskForm();  // fp32
    case 3:
    case 4:
      return FewQueries(group);
    case 5:
    case 6:
      return Planned(128, 64, static_cast<int>(random->Range(1, 3)), random->Range(1, 4), cost);
    case 7:
      return Planned(128, 64, 100, random->Range(1, 4), cost);  // half tiles
    case 8:
      cost.can_split_rows = true, cost.half_tile_pct = 0, cost.dynamic = false, cost.ctas_per_sm = 2;
      return Planned(64, 32 * static_cast<int>(random->Range(1, 2)), 100, random->Range(1, 4), cost);  // splits
    default:
      cost.half_tile_pct = 0, cost.dynamic = false;
      return Planned(64 * static_cast<int>(random->Range(1, 4)), 32 * static_cast<int>(random->Range(1, 5)), ctas,
                     random->Range(1, 4), cost);
  }
}

// ---- masks ----
RandomMask Parsed(const std::string& text, const ExprSizes& sizes) {
  RandomMask mask;
  mask.text = text, mask.sizes = sizes;
  const Status status = MaskExpr::Parse(text, {}, &mask.expr);
  CHECK(status.ok(), text, ": ", status.message());
  return mask;
}

int64_t LengthNearTiles(Random* random, int64_t tile, int64_t most) {
  return random->OneIn(2) ? random->Range(1, most)
                          : std::max<int64_t>(1, tile * random->Range(1, most / tile) + random->Range(-1, 1));
}

RandomMask SomeMask(Random* random, int64_t group) {
  static const std::vector<std::string> kUsual = {
      "k <= q",
      "abs(q - k) <= 40",
      "abs(q - k) <= 32 or k < 16 or q < 16",
      "k <= q and (q // 64 - k // 64 < 2 or (k // 64 + h) % 3 == 0)",
      "k <= q and b == 1",
      "k == q + 100000",  // no pair at all
      "q % 3 != 0 and k % 2 == h % 2",
  };
  ExprSizes sizes;
  sizes.B = random->Range(1, 3), sizes.H = group * random->Range(1, 3);
  sizes.S = random->OneIn(3) ? random->Range(1, 64 / group) : LengthNearTiles(random, 128, 700);
  sizes.T = random->OneIn(3) ? sizes.S : LengthNearTiles(random, 64, 700);
  sizes.P = random->OneIn(2) ? 0 : std::max<int64_t>(0, sizes.T - sizes.S);
  return random->OneIn(2) ? Parsed(random->Pick(kUsual), sizes) : MakeRandomMask(random, sizes, false);
}

Status TryGet(DeviceMaskCache* cache, const RandomMask& mask, const MaskForm& form, cudaStream_t stream, Entry* entry,
              Keeper* keeper = nullptr, bool keep = false) {
  bool missing = false;
  const Status status =
      cache->Get(mask.expr, mask.expr.Hash(), mask.sizes, form, stream, keeper, keep, entry, &missing);
  CHECK(!missing, mask.text);
  return status;
}

Entry Get(DeviceMaskCache* cache, const RandomMask& mask, const MaskForm& form, cudaStream_t stream,
          Keeper* keeper = nullptr, bool keep = false) {
  Entry entry;
  const Status status = TryGet(cache, mask, form, stream, &entry, keeper, keep);
  CHECK(status.ok() && entry != nullptr, mask.text, ": ", status.message());
  return entry;
}

// ---- device memory ----
// The first `words` words of each of `count` elements; the rest is padding.
template <typename T>
std::vector<int32_t> Words(const T* from, size_t count, size_t words) {
  std::vector<int32_t> found(count * words);
  for (size_t i = 0; i < count; ++i) std::memcpy(&found[i * words], from + i, 4 * words);
  return found;
}

template <typename T>
void CheckEqual(const T* device, const std::vector<T>& host, const char* what, const std::string& where,
                size_t words = sizeof(T) / 4) {
  if (host.empty()) return;
  CHECK(fake::IsInBlock(device, host.size() * sizeof(T)), where, ": ", what, " reaches beyond the memory");
  CHECK(reinterpret_cast<uintptr_t>(device) % 128 == 0, where, ": ", what, " begins within a line");
  CHECK(Words(device, host.size(), words) == Words(host.data(), host.size(), words), where, ": ", what, " differs");
}

// As fragments.h describes them, bit by bit.
std::vector<uint32_t> FromFragments(const uint32_t* fragments, size_t tiles, int m, int n) {
  const auto own = static_cast<size_t>(cuda::FragmentWords(n)), words = static_cast<size_t>(n) / 32;
  std::vector<uint32_t> bits(tiles * static_cast<size_t>(m) * words, 0u);
  for (size_t group = 0; group < tiles * static_cast<size_t>(m) / 64; ++group) {
    for (size_t w = 0; w < own; ++w) {
      for (size_t thread = 0; thread < 128; ++thread) {
        const uint32_t word = fragments[(group * own + w) * 128 + thread];
        for (int bit = 0; bit < 32; ++bit) {
          const auto block = static_cast<size_t>(cuda::FragmentBlock(bit));
          const auto element = static_cast<size_t>(cuda::FragmentElement(bit));
          const size_t row = 16 * (thread / 32) + thread % 32 / 4 + element / 2 * 8;
          const size_t key = 64 * w + 8 * block + 2 * (thread % 4) + element % 2;
          if ((word >> bit & 1u) == 0) continue;
          CHECK(key < static_cast<size_t>(n), "a bit of a key beyond the tile");
          bits[(64 * group + row) * words + key / 32] |= 1u << key % 32;
        }
      }
    }
  }
  return bits;
}

void CheckBits(const MaskEntry& entry, const BlockMask& mask, bool fragments, const std::string& where) {
  if (!fragments || mask.bits.empty()) {
    CheckEqual(entry.view().bits, mask.bits, "bits", where);
    return;
  }
  const size_t tiles = mask.bits.size() / (static_cast<size_t>(mask.m) * static_cast<size_t>(mask.n) / 32);
  const size_t bytes =
      tiles * static_cast<size_t>(mask.m) / 64 * static_cast<size_t>(cuda::FragmentWords(mask.n)) * 512;
  CHECK(fake::IsInBlock(entry.view().bits, bytes), where, ": bits reach beyond the memory");
  CHECK(FromFragments(entry.view().bits, tiles, mask.m, mask.n) == mask.bits, where, ": bits differ");
}

// Each row of a table once, by falling work: of a tile with bits half as much again. Equal ones as they come.
void CheckOrder(const MaskEntry& entry, const BlockMask& mask, const std::string& where) {
  const size_t count = mask.full_begin.size(), rows = static_cast<size_t>(mask.rows);
  CHECK(fake::IsInBlock(entry.view().order, 4 * count), where, ": the order reaches beyond the memory");
  for (size_t first = 0; first < count; first += rows) {
    const int32_t* order = entry.view().order + first;
    std::vector<int64_t> work(rows);
    for (size_t row = 0; row < rows; ++row) {
      const size_t at = first + row;
      work[row] = 3 * (mask.full_begin[at] - mask.row_ptr[at]) + 2 * (mask.row_ptr[at + 1] - mask.full_begin[at]);
    }
    std::set<int32_t> seen(order, order + rows);
    CHECK(seen.size() == rows && *seen.begin() == 0 && *seen.rbegin() == mask.rows - 1, where, ": not all rows");
    for (size_t i = 1; i < rows; ++i) {
      const int64_t before = work[static_cast<size_t>(order[i - 1])], own = work[static_cast<size_t>(order[i])];
      CHECK(before > own || (before == own && order[i - 1] < order[i]), where, ": row ", order[i], " in the order");
    }
  }
}

// Whether a query has no key, which is seen by the rows' bits.
bool HasEmptyRow(const BlockMask& mask) {
  const auto words = static_cast<int64_t>(mask.n / 32);
  for (size_t at = 0; at < mask.full_begin.size(); ++at) {
    const int64_t first = static_cast<int64_t>(at) % mask.rows * mask.m;
    for (int64_t q = first; q < std::min(first + mask.m, mask.S); ++q) {
      bool any = false;
      for (int32_t i = mask.row_ptr[at]; i < mask.row_ptr[at + 1]; ++i) {
        const int32_t id = mask.bits_id[static_cast<size_t>(i)];
        const int64_t at_word = (id * int64_t{mask.m} + q - first) * words;
        for (int64_t w = 0; w < words && !any; ++w) any = id < 0 || mask.bits[static_cast<size_t>(at_word + w)] != 0;
      }
      if (!any) return true;
    }
  }
  return false;
}

// Statistics of random masks.
struct Seen {
  int planned = 0, drawn = 0, halved = 0, cut = 0, by_head = 0, stacked = 0, empty = 0, empty_rows = 0, full = 0;
};

void CheckPlan(const MaskEntry& entry, const TileSchedule& plan, const TileList& list, const std::string& where) {
  CHECK(entry.ctas() == plan.ctas() && entry.splits() == plan.splits(), where);
  CheckEqual(entry.tiles(), plan.tiles, "items", where);
  CheckEqual(entry.starts(), cuda::MakeCtaStarts(plan, list), "starts", where, 6 + 2 * cuda::kFirstTiles);
  CheckEqual(entry.split_rows(), plan.split_rows, "rows in parts", where);
  CHECK(entry.split_row_count() == static_cast<int32_t>(plan.split_rows.size()), where);
  CHECK(entry.dynamic_begin() == plan.begin.back(), where);
  CHECK(entry.dynamic_end() == static_cast<int32_t>(plan.tiles.size()), where);
  if (plan.dynamic_tiles() == 0) return;
  int32_t* counts = nullptr;
  const Status status = entry.tile_counters().Get(nullptr, nullptr, &counts);
  CHECK(status.ok(), where, ": ", status.message());
  CheckEqual<int32_t>(counts, std::vector<int32_t>(cuda::TileCounters::kStreams * cuda::TileCounters::kStride, 0),
                      "counts", where);
}

void CheckEntry(const MaskEntry& entry, const RandomMask& random, const MaskForm& form, Seen* seen) {
  const std::string where =
      Text(random.text, " B ", random.sizes.B, " H ", random.sizes.H, " S ", random.sizes.S, " T ", random.sizes.T,
           " P ", random.sizes.P, " tiles ", form.m, " x ", form.n, " CTAs ", form.ctas);
  BlockMask mask;
  const Status status = BuildBlockMask(random.expr, random.sizes, form.m, form.n, &mask);
  CHECK(status.ok(), where, ": ", status.message());
  if (mask.layout_h > 1) ++seen->by_head;
  if (entry.stacked()) {
    CHECK(form.group > 1 && mask.layout_h > 1, where);
    mask = cuda::StackHeads(mask, form.group);
    ++seen->stacked;
  }
  const cuda::DeviceMask& view = entry.view();
  CHECK(view.rows == mask.rows && view.layout_b == mask.layout_b && view.layout_h == mask.layout_h, where);
  CheckEqual(view.layout, mask.layout, "layout", where);
  CheckEqual(view.row_ptr, mask.row_ptr, "ends of rows", where);
  CheckEqual(view.full_begin, mask.full_begin, "begins of full tiles", where);
  CHECK(view.row_end == view.row_ptr + 1, where);
  CheckBits(entry, mask, form.fragments, where);
  CheckOrder(entry, mask, where);
  TileList list = {mask.key_tile, mask.bits_id, {}};
  if (form.ctas > 0 && cuda::CanSchedule(mask, random.sizes.B, random.sizes.H)) {
    list = cuda::MakeTileList(mask);
    const TileSchedule plan =
        cuda::MakeTileSchedule(mask, list, random.sizes.B, random.sizes.H, form.ctas, form.l2_heads, form.cost, true);
    CheckPlan(entry, plan, list, where);
    ++seen->planned;
    if (plan.dynamic_tiles() > 0) ++seen->drawn;
    if (!plan.split_rows.empty()) ++seen->cut;
    const auto is_part = [](const cuda::WorkTile& item) { return cuda::SubtileOf(item) >= 0; };
    if (form.cost.half_tile_pct > 0 && std::any_of(plan.tiles.begin(), plan.tiles.end(), is_part)) ++seen->halved;
  } else {
    CHECK(entry.tiles() == nullptr && entry.starts() == nullptr && entry.split_rows() == nullptr, where);
    CHECK(entry.ctas() == 0 && entry.split_row_count() == 0 && entry.splits() == 0, where);
    CHECK(entry.dynamic_begin() == 0 && entry.dynamic_end() == 0, where);
  }
  CheckEqual(view.key_tile, list.key_tile, "tiles", where);
  CheckEqual(view.bits_id, list.code, "codes", where);
  int32_t longest = 0;
  for (size_t row = 0; row < mask.full_begin.size(); ++row) {
    longest = std::max(longest, mask.row_ptr[row + 1] - mask.row_ptr[row]);
  }
  CHECK(entry.longest_row() == longest, where);
  const size_t rows = mask.full_begin.size();
  CHECK(static_cast<size_t>(view.mean_row) == (mask.key_tile.size() + rows - 1) / rows, where);
  CHECK(entry.one_row() == (rows == 1) && (rows > 1 || entry.one_row_full() == mask.full_begin[0]), where);
  CHECK(entry.empty_rows() == HasEmptyRow(mask), where);
  if (entry.empty_rows()) ++seen->empty_rows;
  if (mask.key_tile.empty()) ++seen->empty;
  if (mask.bits.empty() && longest > 0) ++seen->full;
}

ONE_THREAD_TEST(DeviceMasksAreWhatTheHostMade) {
  const fake::Live before = fake::GetLive();
  Random random(5);
  Seen seen;
  constexpr int kCases = 300;  // under sanitizers, too, where fewer would not have all that is looked for
  for (int i = 0; i < kCases; ++i) {
    const int64_t group = int64_t{1} << random.Range(0, 3);
    const RandomMask mask = SomeMask(&random, group);
    const MaskForm form = RandomForm(&random, group);
    // Few queries stack their heads where the rows fit one tile.
    if (form.group > 1 && form.group * mask.sizes.S > form.m) continue;
    DeviceMaskCache cache(kPlenty);
    const Entry entry = Get(&cache, mask, form, nullptr);
    const fake::Live live = fake::GetLive();
    CHECK(live.blocks == before.blocks + 1 && live.bytes == before.bytes + entry->bytes(), mask.text);
    CHECK(live.events == before.events + 1, mask.text);
    fake::Finish();
    CheckEntry(*entry, mask, form, &seen);
  }
  CHECK(seen.planned > 0 && seen.drawn > 0 && seen.halved > 0 && seen.cut > 0, seen.planned, " planned, ", seen.drawn,
        " drawn, ", seen.halved, " halved, ", seen.cut, " cut");
  CHECK(seen.by_head > 0 && seen.stacked > 0, seen.by_head, " by head, ", seen.stacked, " stacked");
  CHECK(seen.empty > 0 && seen.empty_rows > seen.empty && seen.full > 0, seen.empty, " empty, ", seen.empty_rows,
        " with empty rows, ", seen.full, " full");
  fake::CheckTidy(before, "masks");
  CountCases(kCases);
}

TEST(DeviceMasksOfLongSequences) {
  const fake::Live before = fake::GetLive();
  Seen seen;
  for (const char* text : {"abs(q - k) <= 128", "k <= q"}) {
    for (const MaskForm& form : {Planned(128, 64, 132, 4, Drawing()), Tiles()}) {
      const RandomMask mask = Parsed(text, {1, 32, 8192, 8192, 0});
      DeviceMaskCache cache(kPlenty);
      const Entry entry = Get(&cache, mask, form, nullptr);
      fake::Finish();
      CheckEntry(*entry, mask, form, &seen);
    }
  }
  CHECK(seen.planned == 2 && seen.drawn > 0, seen.planned, " planned, ", seen.drawn, " drawn");
  fake::CheckTidy(before, "masks");
  CountCases(4);
}

// Kernels that ask for a plan get none of more than a million rows, and no mask whose tiles codes cannot name.
TEST(DeviceMasksBeyondPlans) {
  const fake::Live before = fake::GetLive();
  Seen seen;
  const MaskForm form = Planned(128, 64, 132, 4, Drawing());
  {
    DeviceMaskCache cache(kPlenty);
    const RandomMask mask = Parsed("k != 3", {1025, 1024, 1, 100, 0});
    const Entry entry = Get(&cache, mask, form, nullptr);
    fake::Finish();
    CheckEntry(*entry, mask, form, &seen);
    CHECK(seen.planned == 0 && entry->tiles() == nullptr);
  }
  BlockMask mask;
  mask.m = 1, mask.n = 32;
  mask.bits.resize(size_t{cuda::kIdMask} + 1);
  MaskEntry entry;
  const Status status = entry.Upload(mask, {1, 1, 1, 1, 0}, form, false, nullptr);
  CHECK(!status.ok() && status.message().rfind("the mask has 4194304 different tiles", 0) == 0, status.message());
  fake::CheckTidy(before, "masks");
  CountCases(2);
}

TEST(DeviceMasksAreUploadedOnce) {
  const fake::Live before = fake::GetLive();
  {
    const fake::Stream streams[2];
    const cudaStream_t stream = streams[0].get(), other = streams[1].get();
    const RandomMask mask = Parsed("abs(q - k) <= 40", {1, 8, 700, 700, 0});
    const MaskForm form = Planned(128, 64, 4, 4, Drawing());
    DeviceMaskCache cache(kPlenty);
    const fake::Asked asked = fake::GetAsked();
    const auto waits = [&asked] { return fake::GetAsked().waits - asked.waits; };
    const Entry entry = Get(&cache, mask, form, stream);
    CHECK(waits() == 0);
    // Its memory is not there yet, and others wait for it on their streams; later nobody does.
    CHECK(Get(&cache, mask, form, other) == entry && waits() == 1);
    fake::Finish();
    for (int i = 0; i < 2; ++i) CHECK(Get(&cache, mask, form, other) == entry && waits() == 1);
    CHECK(fake::GetAsked().copies == asked.copies + 1 && fake::GetAsked().allocations == asked.allocations + 1);
    CHECK(cache.GetStats().entries == 1 && cache.GetStats().bytes == entry->bytes());
    // What is another mask, in whatever it differs.
    std::set<Entry> entries = {entry};
    const auto add = [&](const RandomMask& of, const MaskForm& as) { entries.insert(Get(&cache, of, as, stream)); };
    MaskForm wide = form, more = form, longer = form, shared = form, dearer = form, plain = form;
    wide.n = 128, more.ctas = 5, longer.l2_heads = 8, shared.group_size = 4, ++dearer.cost.partial;
    plain.fragments = false;
    for (const MaskForm& as : {wide, more, longer, shared, dearer, plain, Tiles()}) add(mask, as);
    for (const ExprSizes& sizes : {ExprSizes{2, 8, 700, 700, 0}, ExprSizes{1, 8, 700, 701, 0}}) {
      add(Parsed("abs(q - k) <= 40", sizes), form);
    }
    add(Parsed("abs(q - k) <= 41", mask.sizes), form);
    CHECK(cudaSetDevice(1) == cudaSuccess);
    add(mask, form);
    CHECK(cudaSetDevice(0) == cudaSuccess);
    CHECK(entries.size() == 12 && cache.GetStats().entries == 12, entries.size());
    CHECK(fake::GetAsked().copies == asked.copies + 12);
  }
  fake::CheckTidy(before, "masks");
  CountCases(12);
}

TEST(DeviceMasksServeManyThreads) {
  const fake::Live before = fake::GetLive();
  constexpr size_t kThreads = 4, kMasks = 6, kRounds = 10;
  const MaskForm form = Planned(128, 64, 3, 2, Drawing());
  std::vector<RandomMask> masks;
  for (size_t i = 0; i < kMasks; ++i) {
    masks.push_back(Parsed("abs(q - k) <= " + std::to_string(20 + i), {1, 4, 300, 300, 0}));
  }
  for (size_t round = 0; round < kRounds; ++round) {
    DeviceMaskCache cache(kPlenty);
    std::vector<std::vector<Entry>> found(kThreads, std::vector<Entry>(kMasks));
    fake::InThreads(kThreads, [&](size_t thread) {
      for (size_t i = 0; i < 20 * kMasks; ++i) {
        const size_t at = (i + round * thread) % kMasks;
        STOF_RETURN_IF_ERROR(TryGet(&cache, masks[at], form, nullptr, &found[thread][at]));
      }
      return Status();
    });
    for (const std::vector<Entry>& own : found) CHECK(own == found[0], "round ", round);
    CHECK(cache.GetStats().entries == kMasks, "round ", round);
    CHECK(fake::GetLive().blocks == before.blocks + static_cast<int64_t>(kMasks), "round ", round);
    fake::Finish();
    Seen seen;
    for (size_t i = 0; i < kMasks; ++i) CheckEntry(*found[0][i], masks[i], form, &seen);
  }
  fake::CheckTidy(before, "masks");
  CountCases(kRounds);
}

TEST(DeviceMaskCacheForgetsTheOldest) {
  const fake::Live before = fake::GetLive();
  {
    std::vector<RandomMask> masks;
    for (int i = 0; i < 5; ++i) {
      masks.push_back(Parsed("(q * 7 + k * k + " + std::to_string(i) + ") % 11 < 5", {1, 1, 512, 512, 0}));
    }
    int64_t bytes = 0;
    {
      DeviceMaskCache cache(kPlenty);
      for (const RandomMask& mask : masks) bytes = std::max(bytes, Get(&cache, mask, Tiles(), nullptr)->bytes());
    }
    DeviceMaskCache cache(3 * bytes);
    std::vector<std::weak_ptr<const MaskEntry>> made;
    for (int i = 0; i < 3; ++i) made.emplace_back(Get(&cache, masks[static_cast<size_t>(i)], Tiles(), nullptr));
    const Entry used = Get(&cache, masks[1], Tiles(), nullptr);
    CHECK(Get(&cache, masks[0], Tiles(), nullptr) == made[0].lock() && used == made[1].lock());
    Get(&cache, masks[3], Tiles(), nullptr);  // instead of 2
    CHECK(made[2].expired() && !made[0].expired());
    CHECK(cache.GetStats().entries == 3 && fake::GetLive().blocks == before.blocks + 3);
    Get(&cache, masks[4], Tiles(), nullptr);  // instead of 1, which is still read
    CHECK(!made[1].expired() && fake::GetLive().blocks == before.blocks + 4);
    CHECK(cache.GetStats().bytes == fake::GetLive().bytes - before.bytes - used->bytes());
    Seen seen;
    fake::Finish();
    CheckEntry(*used, masks[1], Tiles(), &seen);
    CHECK(Get(&cache, masks[1], Tiles(), nullptr) != used);
    // One that alone is too large stays until the next.
    DeviceMaskCache small(1);
    for (int i = 0; i < 2; ++i) {
      Get(&small, masks[static_cast<size_t>(i)], Tiles(), nullptr);
      CHECK(small.GetStats().entries == 1);
    }
  }
  fake::CheckTidy(before, "masks");
  CountCases(7);
}

TEST(DeviceMasksLiveAsLongAsTheirKeepers) {
  const fake::Live before = fake::GetLive();
  {
    const fake::Stream own;
    const cudaStream_t stream = own.get();
    const RandomMask mask = Parsed("k <= q", {1, 4, 300, 300, 0});
    const RandomMask other = Parsed("k < q", mask.sizes);
    DeviceMaskCache cache(1);
    Entry entry;
    bool missing = false;
    {  // what is not there cannot be made
      const fake::Capture capture(stream);
      CHECK(cache.Get(mask.expr, mask.expr.Hash(), mask.sizes, Tiles(), stream, nullptr, false, &entry, &missing).ok());
      CHECK(missing && entry == nullptr && fake::GetLive().blocks == before.blocks);
    }
    std::weak_ptr<const MaskEntry> made = Get(&cache, mask, Tiles(), stream);
    {
      auto keeper = std::make_unique<Keeper>();
      {
        const fake::Capture capture(stream);
        const int64_t waits = fake::GetAsked().waits;
        CHECK(Get(&cache, mask, Tiles(), stream, keeper.get()) == made.lock());  // and its upload has ended
        CHECK(fake::GetAsked().waits == waits);
        Seen seen;
        CheckEntry(*made.lock(), mask, Tiles(), &seen);
      }
      CHECK(cache.GetStats().pinned_entries == 1 && cache.GetStats().entries == 0 && cache.GetStats().bytes == 0);
      Get(&cache, other, Tiles(), stream);
      CHECK(!made.expired() && Get(&cache, mask, Tiles(), stream) == made.lock());
      keeper.reset();
      CHECK(made.expired() && cache.GetStats().pinned_entries == 0);
    }
    made = Get(&cache, mask, Tiles(), stream);  // made again, instead of the other one
    CHECK(cache.GetStats().entries == 1 && fake::GetLive().blocks == before.blocks + 1);
    // Nodes pin no more than the capacity.
    auto keeper = std::make_unique<Keeper>();
    Get(&cache, mask, Tiles(), stream, keeper.get(), true);
    CHECK(cache.GetStats().pinned_entries == 0 && cache.GetStats().entries == 1);
    // Without a keeper what is pinned stays.
    DeviceMaskCache roomy(made.lock()->bytes());
    made = Get(&roomy, mask, Tiles(), stream, nullptr, true);
    const std::weak_ptr<const MaskEntry> beside = Get(&roomy, other, Tiles(), stream, nullptr, true);
    CHECK(roomy.GetStats().pinned_entries == 1 && roomy.GetStats().entries == 1);
    Get(&roomy, Parsed("k <= q + 70", mask.sizes), Tiles(), stream);
    CHECK(!made.expired() && beside.expired() && roomy.GetStats().pinned_entries == 1);
  }
  fake::CheckTidy(before, "masks");
  CountCases(4);
}

// Neither allocations nor questions for an event disturb a capture of another stream.
TEST(DeviceMasksAreMadeWhileOthersCapture) {
  const fake::Live before = fake::GetLive();
  {
    const fake::Stream streams[2];
    const cudaStream_t stream = streams[0].get(), captured = streams[1].get();
    const RandomMask mask = Parsed("k <= q", {1, 4, 300, 300, 0});
    const fake::Capture capture(captured);
    DeviceMaskCache cache(1);
    const Entry entry = Get(&cache, mask, Tiles(), stream);
    CHECK(Get(&cache, mask, Tiles(), stream) == entry);
    Get(&cache, Parsed("k < q", mask.sizes), Tiles(), stream);
  }
  fake::CheckTidy(before, "masks");
  CountCases(3);
}

TEST(DeviceMasksThatFailLeaveNothing) {
  const fake::Live before = fake::GetLive();
  const RandomMask mask = Parsed("abs(q - k) <= 40", {1, 8, 700, 700, 0});
  for (const MaskForm& form : {Planned(128, 64, 4, 4, Drawing()), Tiles()}) {
    auto cache = std::make_unique<DeviceMaskCache>(kPlenty);
    Entry entry;
    fake::FailEach({{"cudaGetDevice", "current device"},
                    {"cudaStreamIsCapturing", "state of the stream"},
                    {"cudaMalloc", "memory for a block mask"},
                    {"cudaMemcpyAsync", "copy of a block mask"},
                    {"cudaEventCreateWithFlags", "event"},
                    {"cudaEventRecord", "event"}},
                   [&] {
                     const Status status = TryGet(cache.get(), mask, form, nullptr, &entry);
                     CHECK((entry != nullptr) == status.ok() && cache->GetStats().entries == (status.ok() ? 1 : 0));
                     if (status.ok()) return status;
                     Get(cache.get(), mask, form, nullptr);  // the next one does not
                     cache = std::make_unique<DeviceMaskCache>(kPlenty);
                     return status;
                   });
    // Of one that is there but not on the device yet.
    fake::FailEach({{"cudaGetDevice", "current device"},
                    {"cudaStreamIsCapturing", "state of the stream"},
                    {"cudaEventQuery", "upload of a block mask"},
                    {"cudaStreamWaitEvent", "wait for a block mask"}},
                   [&] {
                     const Status status = TryGet(cache.get(), mask, form, nullptr, &entry);
                     CHECK((entry != nullptr) == status.ok(), "an entry that nobody waited for is handed out");
                     return status;
                   });
    fake::Finish();
    Seen seen;
    CheckEntry(*Get(cache.get(), mask, form, nullptr), mask, form, &seen);
    entry.reset();
    cache.reset();
    fake::CheckTidy(before, "masks");
  }
  CountCases(20);
}

}  // namespace
}  // namespace stof::test
