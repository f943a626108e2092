// SPDX-License-Identifier: Apache-2.0
// The sm_90a attention kernels with 8-bit operands and those that quantize, on emulated CTAs: against their definition
// in double precision, and against attention.
#include <cuda_runtime.h>

#include "tests/cpp/emulated_sm90/attention_device.h"
#define __shared__
#include "cuda/attention/sm90/kernel.cuh"
#undef __shared__
#define __shared__ static  // variables of the CTA that runs
#include "cuda/attention/int8/quantize.cuh"
#undef __shared__
#include "cuda/attention/workspace_bounds.h"
#include "plugins/core/mask/attention_mask.h"
#include "plugins/core/mask/block_mask_builder.h"
#include "tests/cpp/check.h"
#include "tests/cpp/int8_attention/int8_problem.h"

namespace stof::test::int8 {
namespace {

using cuda::Sm90Bf16;
using cuda::sm90::Operands;

double ToBf16(double x) { return emulated_sm90::FromBf16(emulated_sm90::ToBf16(static_cast<float>(x))); }

// A problem in memory as the kernels get it.
template <int64_t kD, Operands kOperands>
class Device {
  static constexpr bool kFp8 = kOperands == Operands::kInt8Fp8;
  // As in cuda/attention/sm90/instantiations/int8_d*.cu.
  static constexpr int kStages = kD == 64 ? (kFp8 ? 6 : 5) : (kFp8 ? 4 : 3);
  using Shape =
      cuda::sm90::Sm90Shape<kD, 128, 128, kStages, 2, 1, 1, cuda::ScoreMod::kNone, true, false, false, kOperands>;

 public:
  Device(const Case& c, const Dense& p)
      : c_(c),
        p_(p),
        query_(Bits(p.query)),
        key_(Bits(InCache(c, p.key, kD))),
        value_(Bits(kFp8 ? InCache(c, p.value, kD) : p.value)),  // TMA of the emulation reads dense tensors
        sink_(Bits(p.sink)) {
    output_.assign(query_.size(), 0xffff), lse_.assign(static_cast<size_t>(c.B * c.H * c.S), 77.0f);
    auto& a = params_.attention;
    const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
    a.B = narrow(c.B), a.H = narrow(c.H), a.G = narrow(c.G), a.S = narrow(c.S), a.T = narrow(c.T);
    a.D = a.Dv = narrow(kD);
    a.query = query_.data(), a.query_stride = a.output_stride = {c.H * c.S * kD, c.S * kD, kD};
    const auto dense = [&c](int64_t rows) { return Strides{c.G * rows * kD, rows * kD, kD}; };
    a.key = key_.data(), a.key_stride = dense(c.rows > 0 ? c.rows : c.T);
    a.value_stride = kFp8 ? a.key_stride : dense(c.T);
    a.value = value_.data(), a.output = output_.data(), a.scale = static_cast<float>(p.scale);
    if (c.lse) a.lse = lse_.data(), a.lse_stride_b = c.H * c.S, a.lse_stride_h = c.S;
    if (c.sink) a.sink = sink_.data();
    BindPadding();
    BindMask();
    BindOperands();
  }

  void Run() {
    const auto run = [](int64_t ctas, const auto& kernel) {
      for (int64_t cta = 0; cta < ctas; ++cta) {
        emulated_sm90::RunCta(cuda::int8::kThreads, static_cast<unsigned>(ctas), static_cast<unsigned>(cta), nullptr,
                              kernel);
      }
    };
    run(cuda::int8::Grid(int8_, false).ctas(), [&] { cuda::int8::QuantizeOperands<Sm90Bf16, kD, false>(int8_); });
    run(cuda::int8::Grid(int8_, true).ctas(), [&] { cuda::int8::QuantizeOperands<Sm90Bf16, kD, true>(int8_); });
    std::vector<unsigned char> shared(static_cast<size_t>(Shape::kSharedBytes) + 1024, 0xcd);
    unsigned char* const memory = shared.data() + (-reinterpret_cast<uintptr_t>(shared.data()) & 1023u);
    for (int cta = 0; cta < params_.ctas; ++cta) {
      emulated_sm90::RunCta(Shape::kThreads, static_cast<unsigned>(params_.ctas), static_cast<unsigned>(cta), memory,
                            [&] { cuda::sm90::Sm90Attention<Shape, Sm90Bf16>(params_, memory).Run(); });
    }
  }

  Result result() const {
    Result result;
    for (const uint16_t bits : output_) result.output.push_back(emulated_sm90::FromBf16(bits));
    result.lse.assign(lse_.begin(), lse_.end());
    return result;
  }

  // The KV tiles of every query, in the order of the kernel.
  std::vector<std::vector<int32_t>> Orders() const {
    std::vector<std::vector<int32_t>> orders;
    for (int64_t row = 0; row < c_.B * c_.H * c_.S; ++row) {
      std::vector<int32_t> order;
      const auto& mask = params_.attention.mask;
      if (params_.attention.has_mask == 0) {
        for (int32_t tile = 0; tile < int8_.tiles; ++tile) order.push_back(tile);
      } else {
        const int64_t bh = row / c_.S;
        const auto at = mask_.TableOf(bh / c_.H, bh % c_.H) * mask_.rows + row % c_.S / 128;
        const cuda::WorkTile tile = {0, mask.row_ptr[at], mask.full_begin[at], mask.row_end[at]};
        for (int32_t i = 0; i < tile.end - tile.begin; ++i) {
          order.push_back(mask.key_tile[c_.scheduled ? tile.begin + i : cuda::EntryAt(tile, i)]);
        }
      }
      orders.push_back(order);
    }
    return orders;
  }

 private:
  static std::vector<uint16_t> Bits(const std::vector<double>& values) {
    std::vector<uint16_t> bits;
    for (const double x : values) bits.push_back(static_cast<uint16_t>(emulated_sm90::ToBf16(static_cast<float>(x))));
    return bits;
  }

  void BindPadding() {
    if (!c_.padding) return;
    pad_bits_ = PadBits(c_, p_);
    params_.attention.pad_bits = pad_bits_.data();
  }

  void BindMask() {
    params_.ctas = 2;
    params_.half_tiles = c_.half_tiles ? 1 : 0;
    if (*c_.mask.text == '\0') return;
    std::shared_ptr<const AttentionMask> made;
    CHECK(MakeAttentionMask(c_.mask.text, {}, &made).ok());
    CHECK(BuildBlockMask(made->parts.fixed, {c_.B, c_.H, c_.S, c_.T, 0}, 128, 128, &mask_).ok());
    // The bits of a tile in the order of cuda/mask/fragments.h.
    for (size_t tile = 0; tile < mask_.bits.size() / (128 * 4); ++tile) {
      for (int at = 0; at < 2 * 2 * 128; ++at) {  // warpgroup, word, thread
        const int group = at / 256, word = at / 128 % 2, thread = at % 128;
        uint32_t bits = 0;
        for (int bit = 0; bit < 32; ++bit) {
          const int element = cuda::FragmentElement(bit);
          const int row = 64 * group + thread / 32 * 16 + thread % 32 / 4 + element / 2 * 8;
          const int key = 64 * word + 8 * cuda::FragmentBlock(bit) + thread % 4 * 2 + element % 2;
          const uint32_t from = mask_.bits[(tile * 128 + static_cast<size_t>(row)) * 4 + static_cast<size_t>(key / 32)];
          bits |= (from >> key % 32 & 1) << bit;
        }
        fragments_.push_back(bits);
      }
    }
    for (size_t at = 0; at < mask_.full_begin.size(); ++at) order_.push_back(static_cast<int32_t>(at) % mask_.rows);
    if (c_.scheduled) list_ = cuda::MakeTileList(mask_);
    cuda::DeviceMask& view = params_.attention.mask;
    params_.attention.has_mask = 1;
    view.rows = mask_.rows, view.layout_b = mask_.layout_b, view.layout_h = mask_.layout_h;
    view.layout = mask_.layout.data(), view.row_ptr = mask_.row_ptr.data(), view.row_end = view.row_ptr + 1;
    view.full_begin = mask_.full_begin.data(), view.bits = fragments_.data(), view.order = order_.data();
    view.key_tile = c_.scheduled ? list_.key_tile.data() : mask_.key_tile.data();
    view.bits_id = c_.scheduled ? list_.code.data() : mask_.bits_id.data();
    if (!c_.scheduled) return;
    cuda::TileCost cost;
    cost.row = 3000, cost.full = 900, cost.partial = 1000, cost.half_tile_pct = c_.half_tiles ? 74 : 0;
    schedule_ = cuda::MakeTileSchedule(mask_, list_, c_.B, c_.H, params_.ctas, 4, cost, true, c_.H / c_.G);
    starts_ = cuda::MakeCtaStarts(schedule_, list_);
    CHECK(schedule_.dynamic_tiles() == 0 && schedule_.split_rows.empty());
    params_.tiles = schedule_.tiles.data(), params_.starts = starts_.data();
  }

  void BindOperands() {
    const auto& a = params_.attention;
    AttentionShape shape;
    shape.B = c_.B, shape.H = c_.H, shape.G = c_.G, shape.S = c_.S, shape.T = c_.T, shape.D = shape.Dv = kD;
    memory_ = OperandMemory(shape, kFp8);
    int8_ = cuda::DescribeOperands(a, shape, kFp8, reinterpret_cast<char*>(memory_.data()));
    BindCache(c_, &ends_, &int8_);
    params_.query_scales = int8_.query_scales, params_.query_shifts = int8_.query_shifts;
    params_.tile_scales = int8_.tile_scales;
    constexpr int kSpan = kD;
    params_.query = {int8_.query, kD, c_.S, 64, c_.H, 1, kSpan};
    params_.key = {int8_.key, kD, c_.T, 128, c_.G, 1, kSpan};
    params_.value = kFp8 ? CUtensorMap{int8_.value, int8_.tiles * 128, kD, kD, c_.G, 1, 128}
                         : CUtensorMap{a.value, kD, c_.T, 128, c_.G, 2, 128};
    params_.output = {a.output, kD, c_.S, 64, c_.H, 2, 128};
  }

  const Case c_;
  const Dense& p_;
  std::vector<uint16_t> query_, key_, value_, sink_, output_;
  std::vector<float> lse_;
  std::vector<uint32_t> pad_bits_, fragments_;
  std::vector<int32_t> order_, ends_;
  std::vector<uint4> memory_;
  BlockMask mask_;
  cuda::TileList list_;
  cuda::TileSchedule schedule_;
  std::vector<cuda::CtaStart> starts_;
  cuda::Int8Params int8_;
  cuda::Sm90Params params_;
};

template <int64_t kD, Operands kOperands>
void CheckCase(const Case& c, uint64_t seed) {
  constexpr bool kFp8 = kOperands == Operands::kInt8Fp8;
  const std::string where = Text("seed ", seed, " D ", kD, " mask '", c.mask.text, "'");
  Random random(seed);
  const Dense p = Draw(c, kD, kFp8, ToBf16, &random);
  Device<kD, kOperands> device(c, p);
  device.Run();
  Result found = device.result();
  Result wanted = AttendQuantized(p, kFp8, device.Orders(), kFp8 ? RoundToFloat8 : ToBf16);
  Result exact = Attend(p);
  DropPadding(c, kD, where, &found, &wanted, &exact);
  // Beside the rounding of bf16 outputs, a number may fall to the other side of a rounding here and there.
  const double own = RelativeRms(found.output, wanted.output), whole = RelativeRms(found.output, exact.output);
  CHECK(own < 0.004, where, ": ", own, " from the definition");
  CHECK(whole < (kFp8 ? 0.045 : 0.015), where, ": ", whole, " from attention");
  for (size_t i = 0; i < exact.lse.size() && c.lse; ++i) {
    CHECK(found.lse[i] == wanted.lse[i] || std::fabs(found.lse[i] - wanted.lse[i]) < 2e-3, where, ": LSE ", i, " is ",
          found.lse[i], ", expected ", wanted.lse[i]);
  }
  CountCases(1);
}

TEST(Fp8AttentionEqualsItsDefinition) {
  Case c;
  CheckCase<128, Operands::kInt8Fp8>(c, 1);
  c.mask = kCausal, c.keys = Keys::kOffset, c.scheduled = true, c.S = 300;
  CheckCase<128, Operands::kInt8Fp8>(c, 2);
  c = Case();
  c.B = 2, c.padding = true, c.sink = true, c.T = 450, c.half_tiles = true, c.S = 100;
  CheckCase<64, Operands::kInt8Fp8>(c, 3);
  c = Case();
  c.mask = kScattered, c.padding = true, c.B = 2, c.keys = Keys::kSink, c.T = 400, c.S = 130, c.H = c.G = 1;
  CheckCase<128, Operands::kInt8Fp8>(c, 4);
  c = Case();
  c.mask = kEmptyRows, c.T = c.S = 400, c.lse = false, c.scheduled = c.half_tiles = true, c.H = 1;
  CheckCase<64, Operands::kInt8Fp8>(c, 5);
  c = Case();
  c.mask = kWindow, c.T = c.S = 400, c.scheduled = true, c.sink = true, c.lse = false, c.H = 1;
  CheckCase<128, Operands::kInt8Fp8>(c, 6);
}

// More keys than the mean is of.
TEST(Fp8AttentionOfManyKeysEqualsItsDefinition) {
  Case c;
  c.S = 70, c.T = 1500, c.H = 1, c.keys = Keys::kOffset;
  CheckCase<64, Operands::kInt8Fp8>(c, 21);
  c.B = 2, c.padding = true, c.lse = false;
  CheckCase<128, Operands::kInt8Fp8>(c, 22);
}

TEST(Int8AttentionEqualsItsDefinition) {
  Case c;
  CheckCase<128, Operands::kInt8>(c, 11);
  c.mask = kWindow, c.keys = Keys::kOffset, c.scheduled = c.sink = true, c.S = c.T = 300, c.H = 4, c.G = 2;
  CheckCase<128, Operands::kInt8>(c, 12);
  c = Case();
  c.B = 2, c.padding = true, c.T = 450, c.half_tiles = true, c.mask = kCausal, c.keys = Keys::kOffset, c.S = 100;
  CheckCase<64, Operands::kInt8>(c, 13);
  c = Case();
  c.mask = kEmptyRows, c.T = c.S = 300, c.keys = Keys::kSink, c.H = 1;
  CheckCase<64, Operands::kInt8>(c, 14);
}

// Behind pasts of different lengths, in a cache with more rows than total_sequence_length, which itself is more than
// any sequence has: rows without a key hold NaN, and tiles without one are neither written nor read.
template <Operands kOperands>
void CheckCaches(uint64_t seed) {
  Case c;
  c.B = 2, c.H = 4, c.G = 2, c.S = 100, c.T = 500, c.rows = 520, c.lengths = {290, 170}, c.lse = false;
  c.mask = kCausalCache;
  CheckCase<128, kOperands>(c, seed);
  c.mask = kWindowCache, c.keys = Keys::kOffset, c.sink = true, c.T = 290;
  CheckCase<64, kOperands>(c, seed + 1);
  // A first prompt, whose padding attends tiles of padding.
  c.mask = kCausal, c.keys = Keys::kSink, c.S = c.T = 300, c.rows = 301, c.lengths = {300, 70}, c.scheduled = true;
  c.H = 2, c.lse = true;
  CheckCase<128, kOperands>(c, seed + 2);
}
TEST(Int8AttentionOverCachesEqualsItsDefinition) { CheckCaches<Operands::kInt8>(31); }
TEST(Fp8AttentionOverCachesEqualsItsDefinition) { CheckCaches<Operands::kInt8Fp8>(41); }

// More keys than the mean is of, and fewer than rows.
TEST(Fp8AttentionOverLongCachesEqualsItsDefinition) {
  Case c;
  c.S = 40, c.T = 1700, c.rows = 1701, c.lengths = {1500}, c.H = 1, c.keys = Keys::kOffset, c.lse = false;
  c.mask = {"k <= q + 1460", kCausal.allows};
  CheckCase<64, Operands::kInt8Fp8>(c, 51);
}

// key_ends comes from the device and may be illegal: reads must stay in bounds, and outputs finite. Their values mean
// nothing.
TEST(Int8QuantizationOfIllegalLengths) {
  for (const int64_t length : {int64_t{-5}, int64_t{0}, int64_t{1000}}) {
    Case c;
    c.S = c.T = 200, c.H = 1, c.lse = false;  // as a first prompt, of which all tiles are written
    Random random(61);
    const Dense p = Draw(c, 64, false, ToBf16, &random);
    c.lengths = {length};
    Device<64, Operands::kInt8Fp8> device(c, p);
    device.Run();
    for (const double x : device.result().output) CHECK(std::isfinite(x), "length ", length, ": ", x);
    CountCases(1);
  }
}

// Memory is reserved for problems alone that kernels with 8-bit operands compute, and for all head sizes up to a bound.
TEST(Int8WorkspaceIsThatOfKernels) {
  const auto bytes = [](DType dtype, int64_t D, int64_t Dv, float softcap) {
    AttentionArgs args;
    args.shape = {1, 2, 1, 256, 256, D, Dv, dtype};
    args.scores.scale = 0.125f, args.scores.softcap = softcap;
    args.precision = AttentionPrecision::kInt8Fp8;
    // The bound is shared; sm_80 keeps values in 16 bits and needs less.
    CHECK(cuda::BoundSm80Workspace(args, AttentionMask()) == cuda::BoundSm90Workspace(args, AttentionMask()));
    return cuda::BoundSm90Workspace(args, AttentionMask());
  };
  const AttentionShape shape = {1, 2, 1, 256, 256, 128, 128, DType::kBF16};
  CHECK(bytes(DType::kBF16, 128, 128, 0.0f) == cuda::Int8Layout(shape, true).total);
  CHECK(bytes(DType::kF16, 192, 128, 0.0f) == cuda::Int8Layout(shape, true).total);
  CHECK(bytes(DType::kF16, 64, 96, 0.0f) == bytes(DType::kF16, 64, 64, 0.0f) && bytes(DType::kF16, 64, 64, 0.0f) > 0);
  CHECK(bytes(DType::kF32, 128, 128, 0.0f) == 0 && bytes(DType::kF16, 32, 128, 0.0f) == 0);
  CHECK(bytes(DType::kF16, 128, 128, 30.0f) == 0);
  CountCases(7);
}

}  // namespace
}  // namespace stof::test::int8
