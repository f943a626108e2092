// SPDX-License-Identifier: Apache-2.0
#include "cuda/mask/device_mask.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cuda/common/graph_capture.h"
#include "cuda/common/one_process.h"
#include "cuda/common/status.h"
#include "cuda/mask/fragments.h"
#include "cuda/mask/stacked_mask.h"
#include "plugins/core/host/hash.h"
#include "plugins/core/mask/block_mask_cache.h"

namespace stof {
namespace cuda {
namespace {

constexpr int64_t kCapacity = int64_t{64} << 20;
constexpr int64_t kLine = 128;

// Rows of each table by falling number of tiles; a partial one counts half as much again, for its bits.
std::vector<int32_t> OrderOf(const BlockMask& mask) {
  std::vector<int32_t> order(mask.full_begin.size());
  const auto rows = static_cast<size_t>(mask.rows);
  for (size_t first = 0; first < order.size(); first += rows) {
    const auto cost = [&mask, first](int32_t row) {
      const size_t at = first + static_cast<size_t>(row);
      return 3 * (mask.row_ptr[at + 1] - mask.row_ptr[at]) - (mask.row_ptr[at + 1] - mask.full_begin[at]);
    };
    const auto begin = order.begin() + static_cast<std::ptrdiff_t>(first);
    std::iota(begin, begin + mask.rows, 0);
    std::stable_sort(begin, begin + mask.rows, [&cost](int32_t a, int32_t b) { return cost(a) > cost(b); });
  }
  return order;
}

// Whether a query below S is fully masked.
bool HasEmptyRows(const BlockMask& mask) {
  const auto words = static_cast<size_t>(mask.n / 32), m = static_cast<size_t>(mask.m);
  std::vector<bool> found(m);
  for (size_t at = 0; at < mask.full_begin.size(); ++at) {
    const auto begin = static_cast<size_t>(mask.row_ptr[at]), full = static_cast<size_t>(mask.full_begin[at]);
    if (full < static_cast<size_t>(mask.row_ptr[at + 1])) continue;
    found.assign(m, false);
    for (size_t i = begin; i < full; ++i) {
      const uint32_t* bits = mask.bits.data() + static_cast<size_t>(mask.bits_id[i]) * m * words;
      for (size_t q = 0; q < m; ++q) {
        for (size_t w = 0; w < words; ++w) {
          if (bits[q * words + w] != 0) found[q] = true;
        }
      }
    }
    const auto row0 = static_cast<int64_t>(at) % mask.rows * mask.m;
    for (size_t q = 0; q < m && row0 + static_cast<int64_t>(q) < mask.S; ++q) {
      if (!found[q]) return true;
    }
  }
  return false;
}

int64_t LongestRow(const BlockMask& mask) {
  int64_t longest = 0;
  for (size_t row = 0; row + 1 < mask.row_ptr.size(); ++row) {
    longest = std::max<int64_t>(longest, mask.row_ptr[row + 1] - mask.row_ptr[row]);
  }
  return longest;
}

// The tile schedule depends on these costs, in which kernels of one tile differ.
uint64_t HashOf(const TileCost& cost) {
  uint64_t hash = (cost.can_split_rows ? 1 : 0) + (cost.dynamic ? 2 : 0);
  for (const int64_t x :
       {cost.row, cost.full, cost.partial, cost.split_kv, cost.half_tile_pct, int64_t{cost.ctas_per_sm}}) {
    hash = MixHash(hash, static_cast<uint64_t>(x));
  }
  return hash;
}

DeviceMaskKey KeyOf(int device, uint64_t hash, const ExprSizes& sizes, const MaskForm& form) {
  DeviceMaskKey key;
  key.device = device;
  key.expression = hash;
  key.sizes = sizes;
  key.m = form.m, key.n = form.n;
  key.ctas = form.ctas;
  key.l2_heads = form.l2_heads;
  key.group_size = form.group_size;
  key.cost = HashOf(form.cost);
  key.group = form.group;
  key.fragments = form.fragments;
  return key;
}

// The bits in the order of fragments.h.
std::vector<uint32_t> ToFragments(const BlockMask& mask) {
  const size_t words = static_cast<size_t>(mask.n / 32), m = static_cast<size_t>(mask.m), tile = m * words;
  const auto own = static_cast<size_t>(FragmentWords(mask.n));
  std::vector<uint32_t> fragments(mask.bits.size() / tile * m / 64 * own * 128);
  uint32_t* to = fragments.data();
  for (const uint32_t* from = mask.bits.data(); from < mask.bits.data() + mask.bits.size(); from += tile) {
    for (size_t group = 0; group < m; group += 64) {
      for (size_t w = 0; w < 2 * own; w += 2) {
        for (size_t thread = 0; thread < 128; ++thread) {
          const uint32_t* row = from + (group + thread / 32 * 16 + thread % 32 / 4) * words + w;
          const bool high = w + 1 < words;
          *to++ = FragmentWord(row[0], high ? row[1] : 0, row[8 * words], high ? row[8 * words + 1] : 0,
                               static_cast<int>(thread % 4));
        }
      }
    }
  }
  return fragments;
}

}  // namespace

uint64_t DeviceMaskKey::Hash() const {
  const auto word = [](int64_t x) { return static_cast<uint64_t>(x); };
  return HashWords({word(device), sizes.Hash(), word(m), word(n), word(ctas), word(l2_heads), word(group_size), cost,
                    word(group), fragments ? 1u : 0u},
                   expression);
}

std::string DeviceMaskKey::Print() const {
  return "device " + std::to_string(device) + " expression " + std::to_string(expression) + " " + sizes.Print() +
         " tile " + std::to_string(m) + "x" + std::to_string(n) + " CTAs " + std::to_string(ctas) + " L2 heads " +
         std::to_string(l2_heads) + " group size " + std::to_string(group_size) + " cost " + std::to_string(cost) +
         " group " + std::to_string(group) + (fragments ? " fragments" : "");
}

MaskEntry::~MaskEntry() {
  if (!IsCudaUsable()) return;
  const RelaxedCapture relaxed;
  if (uploaded_ != nullptr) cudaEventDestroy(uploaded_);
  if (memory_ != nullptr) cudaFree(memory_);
}

Status MaskEntry::Upload(const BlockMask& mask, const ExprSizes& sizes, const MaskForm& form, bool stacked,
                         cudaStream_t stream) {
  const size_t tile = static_cast<size_t>(mask.m) * static_cast<size_t>(mask.n) / 32;
  if (form.ctas > 0 && mask.bits.size() / tile > static_cast<size_t>(kIdMask)) {
    return Status::Error("the mask has " + std::to_string(mask.bits.size() / tile) +
                         " different tiles that are neither empty nor full, expected at most " +
                         std::to_string(kIdMask));
  }
  empty_rows_ = HasEmptyRows(mask);
  longest_row_ = LongestRow(mask);
  stacked_ = stacked;
  one_row_ = mask.full_begin.size() == 1;
  if (one_row_) one_row_full_ = mask.full_begin[0];
  TileSchedule plan;
  TileList list;
  if (form.ctas > 0 && CanSchedule(mask, sizes.B, sizes.H)) {
    list = MakeTileList(mask);
    plan = MakeTileSchedule(mask, list, sizes.B, sizes.H, form.ctas, form.l2_heads, form.cost, true, form.group_size);
  }
  const std::vector<int32_t> order = OrderOf(mask);
  std::vector<char> image;
  const auto put = [&image](const auto& values) {
    const size_t at = (image.size() + kLine - 1) / kLine * kLine;
    const size_t bytes = values.size() * sizeof(values[0]);
    image.resize(at + bytes);
    const char* from = reinterpret_cast<const char*>(values.data());
    std::copy(from, from + bytes, image.begin() + static_cast<std::ptrdiff_t>(at));
    return at;
  };
  const size_t layout = put(mask.layout), row_ptr = put(mask.row_ptr), full = put(mask.full_begin);
  const bool planned = !plan.begin.empty();
  const size_t tiles = put(planned ? list.key_tile : mask.key_tile), ids = put(planned ? list.code : mask.bits_id);
  const size_t bits = form.fragments ? put(ToFragments(mask)) : put(mask.bits), ordered = put(order);
  const size_t work = put(plan.tiles), starts = put(MakeCtaStarts(plan, list)), cut = put(plan.split_rows);
  const size_t counts =
      put(std::vector<int32_t>(plan.dynamic_tiles() > 0 ? TileCounters::kStreams * TileCounters::kStride : 0, 0));
  bytes_ = static_cast<int64_t>(std::max<size_t>(image.size(), 1));
  const RelaxedCapture relaxed;
  STOF_RETURN_IF_ERROR(ToStatus(cudaMalloc(&memory_, static_cast<size_t>(bytes_)), "memory for a block mask"));
  // From pageable memory: the image is staged before the call returns.
  STOF_RETURN_IF_ERROR(ToStatus(cudaMemcpyAsync(memory_, image.data(), image.size(), cudaMemcpyHostToDevice, stream),
                                "copy of a block mask"));
  STOF_RETURN_IF_ERROR(ToStatus(cudaEventCreateWithFlags(&uploaded_, cudaEventDisableTiming), "event"));
  STOF_RETURN_IF_ERROR(ToStatus(cudaEventRecord(uploaded_, stream), "event"));
  const char* base = static_cast<const char*>(memory_);
  view_.rows = mask.rows;
  view_.layout_b = mask.layout_b;
  view_.layout_h = mask.layout_h;
  const size_t rows = std::max<size_t>(mask.full_begin.size(), 1);
  view_.mean_row = static_cast<int32_t>((mask.key_tile.size() + rows - 1) / rows);
  view_.layout = reinterpret_cast<const int32_t*>(base + layout);
  view_.row_ptr = reinterpret_cast<const int32_t*>(base + row_ptr);
  view_.row_end = view_.row_ptr + 1;
  view_.full_begin = reinterpret_cast<const int32_t*>(base + full);
  view_.key_tile = reinterpret_cast<const int32_t*>(base + tiles);
  view_.bits_id = reinterpret_cast<const int32_t*>(base + ids);
  view_.bits = reinterpret_cast<const uint32_t*>(base + bits);
  view_.order = reinterpret_cast<const int32_t*>(base + ordered);
  if (planned) {
    tiles_ = reinterpret_cast<const WorkTile*>(base + work);
    starts_ = reinterpret_cast<const CtaStart*>(base + starts);
    ctas_ = plan.ctas();
    dynamic_begin_ = plan.begin.back(), dynamic_end_ = static_cast<int32_t>(plan.tiles.size());
    tile_counters_.SetMemory(reinterpret_cast<int32_t*>(static_cast<char*>(memory_) + counts));
    split_rows_ = reinterpret_cast<const SplitRow*>(base + cut);
    split_row_count_ = static_cast<int32_t>(plan.split_rows.size());
    splits_ = plan.splits();
  }
  return Status();
}

Status MaskEntry::Join(cudaStream_t stream, bool captured) const {
  if (ready_.load(std::memory_order_acquire)) return Status();
  // A captured stream may not wait for an event of the world outside; asking for its state needs the relaxed mode.
  // Whoever captures ran before, so that the upload has ended or is about to.
  const RelaxedCapture relaxed;
  const cudaError_t state = captured ? cudaEventSynchronize(uploaded_) : cudaEventQuery(uploaded_);
  if (state == cudaSuccess) {
    ready_.store(true, std::memory_order_release);
    return Status();
  }
  if (state != cudaErrorNotReady) return ToStatus(state, "upload of a block mask");
  cudaGetLastError();  // clears it: an upload that goes on is no error
  return ToStatus(cudaStreamWaitEvent(stream, uploaded_, 0), "wait for a block mask");
}

namespace {

// No caller gets an entry whose upload may not have ended.
Status JoinOrDrop(cudaStream_t stream, bool captured, std::shared_ptr<const MaskEntry>* entry) {
  const Status joined = (*entry)->Join(stream, captured);
  if (!joined.ok()) entry->reset();
  return joined;
}

}  // namespace

DeviceMaskCache& DeviceMaskCache::Global() {
  // Never destroyed: at exit the driver may be gone before static objects are.
  static auto* cache = new DeviceMaskCache(kCapacity);
  return *cache;
}

Status DeviceMaskCache::Get(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, const MaskForm& form,
                            cudaStream_t stream, Keeper* keeper, bool keep, std::shared_ptr<const MaskEntry>* entry,
                            bool* missing) {
  *missing = false;
  entry->reset();
  int device = 0;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "current device"));
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  STOF_RETURN_IF_ERROR(ToStatus(cudaStreamIsCapturing(stream, &capture), "state of the stream"));
  const bool captured = capture != cudaStreamCaptureStatusNone;
  const Key key = KeyOf(device, hash, sizes, form);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = slots_.find(key);
    if (found != slots_.end()) {
      Slot& slot = found->second;
      *entry = slot.entry != nullptr ? slot.entry : slot.kept.lock();
      if (*entry == nullptr) {
        slots_.erase(found);  // its keepers are gone
      } else if ((captured && !IsOnlyLoading()) || (keep && IsRoomToPin(**entry))) {
        Pin(&slot, keeper, *entry);
      } else if (!slot.pinned) {
        ages_.splice(ages_.begin(), ages_, slot.age);
      }
    }
  }
  if (*entry != nullptr) return JoinOrDrop(stream, captured, entry);
  if (captured) {
    *missing = true;
    return Status();
  }
  std::shared_ptr<const BlockMask> mask;
  STOF_RETURN_IF_ERROR(BlockMaskCache::Global().Get(expr, hash, sizes, form.m, form.n, &mask));
  bool stacked = false;
  if (form.group > 1 && mask->layout_h > 1) {
    auto groups = std::make_shared<const BlockMask>(StackHeads(*mask, form.group));
    stacked = StackingPays(LongestRow(*groups), LongestRow(*mask), form.group, sizes.B * (sizes.H / form.group),
                           form.sm_count);
    if (stacked) mask = std::move(groups);
  }
  auto made = std::make_shared<MaskEntry>();
  STOF_RETURN_IF_ERROR(made->Upload(*mask, sizes, form, stacked, stream));
  std::list<std::shared_ptr<const MaskEntry>> gone;  // freed outside the lock, since that waits for the device
  const std::lock_guard<std::mutex> lock(mutex_);
  DropReleased();
  const auto [slot, fresh] = slots_.try_emplace(key);
  *entry = fresh ? made : slot->second.entry != nullptr ? slot->second.entry : slot->second.kept.lock();
  if (*entry == nullptr) *entry = made;  // of a pinned slot whose keepers went just now
  if (fresh) {
    ages_.push_front(key);
    slot->second.entry = made;
    slot->second.age = ages_.begin();
    bytes_ += made->bytes();
  }
  if (keep && IsRoomToPin(**entry)) Pin(&slot->second, keeper, *entry);
  if (!fresh) return JoinOrDrop(stream, captured, entry);  // another thread was quicker
  while (bytes_ > capacity_ && ages_.size() > 1) {
    const auto old = slots_.find(ages_.back());
    bytes_ -= old->second.entry->bytes();
    gone.push_back(std::move(old->second.entry));
    slots_.erase(old);
    ages_.pop_back();
  }
  return Status();
}

bool DeviceMaskCache::IsRoomToPin(const MaskEntry& entry) const {
  int64_t bytes = entry.bytes();
  for (const auto& [key, slot] : slots_) {
    const std::shared_ptr<const MaskEntry> other = slot.entry != nullptr ? slot.entry : slot.kept.lock();
    if (slot.pinned && other != nullptr && other.get() != &entry) bytes += other->bytes();
  }
  return bytes <= capacity_;
}

void DeviceMaskCache::Pin(Slot* slot, Keeper* keeper, const std::shared_ptr<const MaskEntry>& entry) {
  slot->kept = entry;
  if (!slot->pinned) {
    slot->pinned = true;
    bytes_ -= entry->bytes();
    ages_.erase(slot->age);
    slot->entry.reset();
  }
  if (keeper == nullptr) {
    slot->entry = entry;
  } else {
    keeper->Keep(entry);
  }
}

void DeviceMaskCache::DropReleased() {
  for (auto slot = slots_.begin(); slot != slots_.end();) {
    const bool gone = slot->second.entry == nullptr && slot->second.kept.expired();
    slot = gone ? slots_.erase(slot) : std::next(slot);
  }
}

DeviceMaskCache::Stats DeviceMaskCache::GetStats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Stats stats;
  stats.entries = static_cast<int64_t>(ages_.size());
  stats.bytes = bytes_;
  for (const auto& [key, slot] : slots_) {
    const std::shared_ptr<const MaskEntry> entry = slot.entry != nullptr ? slot.entry : slot.kept.lock();
    if (!slot.pinned || entry == nullptr) continue;
    ++stats.pinned_entries;
    stats.pinned_bytes += entry->bytes();
  }
  return stats;
}

}  // namespace cuda
}  // namespace stof
