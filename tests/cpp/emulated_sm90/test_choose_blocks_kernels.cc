// SPDX-License-Identifier: Apache-2.0
// The kernels that choose blocks on CUDA, on emulated CTAs: the chosen tiles, their order and the counts against the
// definition in double precision.
#include <cuda_runtime.h>

#define __shared__
#include "cuda/attention/choose_blocks/estimate.cuh"
#include "cuda/attention/choose_blocks/pooling.cuh"
#undef __shared__
#define __shared__ static  // variables of the CTA that runs
#include "cuda/attention/choose_blocks/order.cuh"
#undef __shared__
#include "plugins/core/mask/attention_mask.h"
#include "plugins/core/mask/block_mask_builder.h"
#include "tests/cpp/check.h"
#include "tests/cpp/choose_blocks/cuda_choose_problem.h"

namespace stof::test::choose {
namespace {

using cuda::BlockChoiceParams;
using cuda::ChoosingLayout;
using cuda::Sm90Bf16;

// A problem in memory as the kernels get it. keys: of a tile.
class Device {
 public:
  Device(const Case& c, const Problem& p, int64_t keys)
      : keys_(keys), query_(Bits(p.dense.query)), key_(Bits(p.dense.key)) {
    const Dense& d = p.dense;
    AttentionShape shape;
    shape.B = c.B, shape.H = c.H, shape.G = c.G, shape.S = c.S, shape.T = c.T, shape.D = c.D;
    const ChoosingLayout layout(shape, CeilDiv(c.T, keys), c.mask == 0 ? 0 : CeilDiv(c.T, keys));
    auto& a = params_.attention;
    const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
    a.B = narrow(c.B), a.H = narrow(c.H), a.G = narrow(c.G), a.S = narrow(c.S), a.T = narrow(c.T), a.D = narrow(c.D);
    a.query = query_.data(), a.query_stride = {c.H * c.S * c.D, c.S * c.D, c.D};
    a.key = key_.data(), a.key_stride = {c.G * c.T * c.D, c.T * c.D, c.D};
    a.scale = static_cast<float>(d.scale), a.softcap = static_cast<float>(c.softcap);
    params_.pooled_size = narrow(layout.pooled_size);
    params_.row_blocks = narrow(layout.row_blocks), params_.key_blocks = narrow(layout.key_blocks);
    params_.query_rows = narrow(layout.query_rows), params_.key_rows = narrow(layout.key_rows);
    params_.tiles_of_block = narrow(kBlockKeys / keys), params_.list_stride = narrow(layout.list_stride);
    params_.threshold = c.threshold();
    for (int64_t b = 0; b < c.B; ++b) first_rows_.push_back(narrow(c.P(b)));
    if (c.past.empty()) params_.first_position = first_rows_[0];
    if (!c.past.empty()) params_.first_rows = first_rows_.data();
    params_.key_offset = narrow(c.S);
    memory_.assign(static_cast<size_t>(layout.total / 16), uint4{~0u, ~0u, ~0u, ~0u});
    const auto at = [this](int64_t bytes) { return &memory_[static_cast<size_t>(bytes / 16)]; };
    const auto words = [&at](int64_t bytes) { return reinterpret_cast<int32_t*>(at(bytes)); };
    params_.pooled_queries = at(layout.pooled_queries), params_.pooled_keys = at(layout.pooled_keys);
    params_.exists = reinterpret_cast<uint8_t*>(at(layout.exists));
    params_.layout = words(layout.layout), params_.order = words(layout.order);
    params_.row_ptr = words(layout.row_ptr), params_.row_end = words(layout.row_end);
    params_.full_begin = words(layout.full_begin), params_.key_tile = words(layout.lists);
    params_.bits_id = params_.key_tile + CeilDiv(c.T, keys);
    params_.skip_counts = counts_;
    params_.query_map = {params_.pooled_queries, params_.pooled_size, params_.query_rows, 64};
    params_.key_map = {params_.pooled_keys, params_.pooled_size, params_.key_rows,
                       static_cast<int32_t>(cuda::PooledTileRows(params_.pooled_size))};
    if (c.padding != Padding::kNone) BindPadding(c, p);
    if (c.mask != 0) BindMask(c);
  }

  template <int kSize, bool kSoftcap>
  void Run(int64_t ctas) {
    using Shape = cuda::choose::ChooseShape<kSize, kSoftcap>;
    const auto& a = params_.attention;
    const int64_t heads = a.B * a.G, pooled = heads * (params_.query_rows + params_.key_rows);
    RunThreads(CeilDiv(pooled, cuda::choose::kPoolingThreads / (kSize / cuda::choose::kItems)));
    std::vector<unsigned char> shared(
        static_cast<size_t>(cuda::choose::SharedBytes<Shape>(params_.key_blocks) + Shape::kToAlign), 0xcd);
    const auto lost = -reinterpret_cast<uintptr_t>(shared.data()) & (Shape::kToAlign - 1u);
    const int64_t items = heads * CeilDiv(params_.row_blocks * (a.H / a.G), Shape::kUnits);
    const auto grid = static_cast<unsigned>(std::min(items, ctas));
    unsigned char* const memory = shared.data() + lost;
    for (unsigned cta = 0; cta < grid; ++cta) {
      emulated_sm90::RunCta(Shape::kThreads, grid, cta, memory,
                            [&] { cuda::choose::BlockChooser<Shape, Sm90Bf16>(params_, memory).Run(); });
    }
    const auto tables = static_cast<unsigned>(a.B * a.H);
    for (unsigned cta = 0; cta < tables; ++cta) {
      emulated_sm90::RunCta(cuda::choose::kOrderThreads, tables, cta, nullptr,
                            [&] { cuda::choose::OrderRows(params_); });
    }
  }

  const BlockChoiceParams& params() const { return params_; }
  const BlockMask& mask() const { return mask_; }
  SkipCounts counts() const { return {counts_[0], counts_[1]}; }

 private:
  static std::vector<uint16_t> Bits(const std::vector<double>& values) {
    std::vector<uint16_t> bits;
    for (const double x : values) bits.push_back(static_cast<uint16_t>(emulated_sm90::ToBf16(static_cast<float>(x))));
    return bits;
  }
  // Its threads need each other nowhere.
  void RunThreads(int64_t ctas);

  void BindPadding(const Case& c, const Problem& p) {
    const int64_t words = CeilDiv(c.T, 64) * 2;
    pad_bits_.assign(static_cast<size_t>(c.B * words), 0);
    for (int64_t at = 0; at < c.B * c.T; ++at) {
      const int64_t k = at % c.T;
      if (p.pad[static_cast<size_t>(at)] != 0)
        pad_bits_[static_cast<size_t>(at / c.T * words + k / 32)] |= 1u << k % 32;
    }
    params_.attention.pad_bits = pad_bits_.data();
  }
  void BindMask(const Case& c) {
    std::shared_ptr<const AttentionMask> made;
    CHECK(MakeAttentionMask(kMasks[c.mask], {}, &made).ok());
    const ExprSizes sizes = {c.B, c.H, c.S, c.T, c.P(0)};
    CHECK(BuildBlockMask(made->parts.fixed, sizes, kBlockQueries, static_cast<int>(keys_), &mask_).ok());
    cuda::DeviceMask& view = params_.attention.mask;
    params_.attention.has_mask = 1;
    view.rows = mask_.rows, view.layout_b = mask_.layout_b, view.layout_h = mask_.layout_h;
    view.layout = mask_.layout.data(), view.row_ptr = mask_.row_ptr.data(), view.row_end = view.row_ptr + 1;
    view.full_begin = mask_.full_begin.data(), view.key_tile = mask_.key_tile.data();
    view.bits_id = mask_.bits_id.data();
  }

  const int64_t keys_;
  const std::vector<uint16_t> query_, key_;
  std::vector<int32_t> first_rows_;
  std::vector<uint32_t> pad_bits_;
  std::vector<uint4> memory_;
  BlockMask mask_;
  unsigned long long counts_[2] = {};
  BlockChoiceParams params_;
};

void Device::RunThreads(int64_t ctas) {
  emulated_sm90::Cta cta;
  emulated_sm90::Current() = &cta;
  for (int64_t block = 0; block < ctas; ++block) {
    cta.block.x = static_cast<unsigned>(block);
    for (unsigned thread = 0; thread < cuda::choose::kPoolingThreads; ++thread) {
      emulated_sm90::Thread().x = thread;
      if (params_.pooled_size == 64) cuda::choose::PoolQueriesAndKeys<Sm90Bf16, 64>(params_);
      if (params_.pooled_size == 128) cuda::choose::PoolQueriesAndKeys<Sm90Bf16, 128>(params_);
      if (params_.pooled_size == 256) cuda::choose::PoolQueriesAndKeys<Sm90Bf16, 256>(params_);
    }
  }
  emulated_sm90::Thread().x = 0;
  emulated_sm90::Current() = nullptr;
}

// A key tile in the list of a tile row: with which element mask; kNone: it is not listed.
constexpr int32_t kNone = -9, kFullTile = -1;
using TileMasks = std::vector<int32_t>;

// The list of a tile row. Key tiles rise among the partial and among the full ones.
TileMasks ListOf(const cuda::DeviceMask& mask, int64_t row, int64_t tiles, const std::string& where) {
  TileMasks list(static_cast<size_t>(tiles), kNone);
  const int32_t begin = mask.row_ptr[row], full = mask.full_begin[row], end = mask.row_end[row];
  CHECK(begin <= full && full <= end, where, ": entries ", begin, " ", full, " ", end);
  for (int32_t i = begin; i < end; ++i) {
    const int32_t tile = mask.key_tile[i];
    CHECK(tile >= 0 && tile < tiles && list[static_cast<size_t>(tile)] == kNone, where, ": tile ", tile);
    CHECK(i == begin || i == full || tile > mask.key_tile[i - 1], where, ": tile ", tile, " is out of order");
    list[static_cast<size_t>(tile)] = i < full ? mask.bits_id[i] : kFullTile;
  }
  return list;
}

// Whether the definition keeps an allowed pair of a tile, and whether there is one.
struct Wanted {
  bool kept = false, allowed = false;
};
Wanted FindWanted(const Dense& d, const BlockSets& sets, int64_t bh, int64_t block, int64_t first, int64_t end) {
  Wanted wanted;
  for (int64_t q = block * kBlockQueries; q < std::min(d.S, (block + 1) * kBlockQueries); ++q) {
    for (int64_t k = first; k < std::min(d.T, end); ++k) {
      const auto at = static_cast<size_t>((bh * d.S + q) * d.T + k);
      wanted.kept = wanted.kept || sets.kept[at] != 0, wanted.allowed = wanted.allowed || d.allowed[at] != 0;
    }
  }
  return wanted;
}

void CheckLists(const Case& c, const Problem& p, const BlockSets& sets, const Device& device, int64_t keys,
                const std::string& where) {
  const BlockChoiceParams& params = device.params();
  cuda::DeviceMask chosen;
  chosen.row_ptr = params.row_ptr, chosen.row_end = params.row_end, chosen.full_begin = params.full_begin;
  chosen.key_tile = params.key_tile, chosen.bits_id = params.bits_id;
  const int64_t tiles = CeilDiv(c.T, keys), rows = params.row_blocks;
  for (int64_t bh = 0; bh < c.B * c.H; ++bh) {
    for (int64_t block = 0; block < rows; ++block) {
      const std::string row = Text(where, ", batch and head ", bh, ", query block ", block);
      const TileMasks list = ListOf(chosen, bh * rows + block, tiles, row);
      TileMasks whole(static_cast<size_t>(tiles), kFullTile);
      if (c.mask != 0) {
        whole = ListOf(params.attention.mask, device.mask().TableOf(bh / c.H, bh % c.H) * rows + block, tiles, row);
      }
      const bool is_uncertain = sets.is_uncertain[static_cast<size_t>(bh * c.S + block * kBlockQueries)] != 0;
      for (size_t t = 0; t < list.size(); ++t) {
        CHECK(list[t] == kNone || list[t] == whole[t], row, ": tile ", t, " has mask ", list[t], " of ", whole[t]);
        const auto first = static_cast<int64_t>(t) * keys;
        const Wanted wanted = FindWanted(p.dense, sets, bh, block, first, first + keys);
        CHECK(is_uncertain || !wanted.allowed || wanted.kept == (list[t] != kNone), row, ": tile ", t,
              wanted.kept ? " is missing" : " is chosen");
      }
    }
    std::vector<int64_t> lengths, order(params.order + bh * rows, params.order + (bh + 1) * rows);
    for (const int64_t row : order)
      lengths.push_back(chosen.row_end[bh * rows + row] - chosen.row_ptr[bh * rows + row]);
    CHECK(std::is_sorted(lengths.rbegin(), lengths.rend()), where, ": rows are not in falling order");
    std::sort(order.begin(), order.end());
    for (int64_t row = 0; row < rows; ++row) CHECK(order[static_cast<size_t>(row)] == row, where, ": row ", row);
    CHECK(params.layout[bh] == bh, where, ": table ", params.layout[bh]);
  }
}

template <int kSize, bool kSoftcap = false>
void CheckCase(const Case& c, int64_t keys, int64_t ctas, uint64_t seed) {
  const std::string where = Text("seed ", seed, ": ", Describe(c), ", tiles of ", keys);
  Random random(seed);
  const Problem p = Draw(c, &random);
  const BlockSets sets = Define(c, p);
  Device device(c, p, keys);
  device.Run<kSize, kSoftcap>(ctas);
  CheckLists(c, p, sets, device, keys, where);
  const SkipCounts counts = device.counts();
  CHECK(counts.scored == sets.scored, where, ": ", counts.scored, " pairs scored, expected ", sets.scored);
  CHECK(counts.skipped >= sets.skipped && counts.skipped <= sets.skipped + sets.uncertain, where, ": ", counts.skipped,
        " pairs skipped, expected ", sets.skipped, " to ", sets.skipped + sets.uncertain);
  CHECK(sets.skipped * 40 > sets.scored, where, ": only ", sets.skipped, " of ", sets.scored, " pairs are skipped");
  CountCases(1);
}

Case MakeCase(int64_t S, int64_t T, int64_t D, int mask) {
  Case c;
  c.dtype = DType::kBF16, c.low_share = 0.75, c.S = S, c.T = T, c.D = D, c.mask = mask;
  return c;
}

TEST(ChooseBlocksKernelsEqualTheDefinition) {
  Case c = MakeCase(300, 900, 64, 1);
  c.offset = true;
  CheckCase<64>(c, 128, 2, 1);
  c = MakeCase(257, 1130, 128, 0);
  c.B = 2, c.padding = Padding::kLeft;
  CheckCase<128>(c, 64, 1, 2);
  c = MakeCase(449, 777, 48, 4);
  c.H = 6, c.offset = true, c.padding = Padding::kRight;
  CheckCase<64>(c, 64, 2, 3);
  c = MakeCase(1030, 1130, 64, 2);
  c.H = 2, c.offset = true, c.softcap = 30;
  CheckCase<64, true>(c, 128, 1, 4);
  c = MakeCase(130, 640, 256, 0);
  c.H = 8, c.G = 1, c.scale_sign = -1;
  CheckCase<256>(c, 64, 1, 5);
  c = MakeCase(300, 1810, 64, 1);
  c.B = 2, c.H = 2, c.G = 1, c.past = {1400, 1400};  // one P for the mask
  CheckCase<64>(c, 64, 3, 6);
}

}  // namespace
}  // namespace stof::test::choose
