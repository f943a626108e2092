// SPDX-License-Identifier: Apache-2.0
// The sm_80 attention kernel with scores in int8, and the kernels that quantize, on emulated CTAs: against their
// definition in double precision, and against attention.
#include <cuda_runtime.h>

#include "tests/cpp/emulated_sm90/mma_sm80.h"
#define __shared__ static  // variables of the CTA that runs
#include "cuda/attention/int8/quantize.cuh"
#include "cuda/attention/sm80/kernel.cuh"
#undef __shared__
#include "plugins/core/mask/attention_mask.h"
#include "plugins/core/mask/block_mask_builder.h"
#include "tests/cpp/check.h"
#include "tests/cpp/int8_attention/int8_problem.h"

namespace stof::test::int8 {
namespace {

using cuda::Sm80Scores;
using cuda::Sm90Bf16;

double ToBf16(double x) { return emulated_sm90::FromBf16(emulated_sm90::ToBf16(static_cast<float>(x))); }

std::vector<uint16_t> Bits(const std::vector<double>& values) {
  std::vector<uint16_t> bits;
  for (const double x : values) bits.push_back(static_cast<uint16_t>(emulated_sm90::ToBf16(static_cast<float>(x))));
  return bits;
}

// A problem in memory as the kernels get it. kRows: of a CTA.
template <int64_t kD, int kRows>
class Device {
  using Attention = cuda::Sm80Attention<kD, Sm90Bf16, false, kRows, Sm80Scores::kInt8>;
  using Shape = cuda::Sm80Shape<kD, false, kRows>;

 public:
  Device(const Case& c, const Dense& p, EmptyRows empty_rows)
      : c_(c),
        p_(p),
        query_(Bits(p.query)),
        key_(Bits(InCache(c, p.key, kD))),
        value_(Bits(InCache(c, p.value, kD))),
        sink_(Bits(p.sink)) {
    output_.assign(query_.size(), 0xffff), lse_.assign(static_cast<size_t>(c.B * c.H * c.S), 77.0f);
    const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
    cuda::AttentionParams& a = params_;
    a.B = narrow(c.B), a.H = narrow(c.H), a.G = narrow(c.G), a.S = narrow(c.S), a.T = narrow(c.T);
    a.D = a.Dv = narrow(kD);
    a.query = query_.data(), a.query_stride = a.output_stride = {c.H * c.S * kD, c.S * kD, kD};
    const int64_t rows = c.rows > 0 ? c.rows : c.T;
    a.key = key_.data(), a.key_stride = a.value_stride = {c.G * rows * kD, rows * kD, kD};
    a.value = value_.data(), a.output = output_.data(), a.scale = static_cast<float>(p.scale);
    a.empty_rows = static_cast<int32_t>(empty_rows);
    if (c.lse) a.lse = lse_.data(), a.lse_stride_b = c.H * c.S, a.lse_stride_h = c.S;
    if (c.sink) a.sink = sink_.data();
    BindPadding();
    BindMask();
    BindOperands();
  }

  void Run() {
    const auto run = [](int threads, int64_t ctas, unsigned char* shared, const auto& kernel) {
      for (int64_t cta = 0; cta < ctas; ++cta) {
        emulated_sm90::RunCta(static_cast<unsigned>(threads), static_cast<unsigned>(ctas), static_cast<unsigned>(cta),
                              shared, kernel);
      }
    };
    run(cuda::int8::kThreads, cuda::int8::Grid(int8_, false).ctas(), nullptr,
        [&] { cuda::int8::QuantizeOperands<Sm90Bf16, kD, false>(int8_); });
    run(cuda::int8::kThreads, cuda::int8::Grid(int8_, true).ctas(), nullptr,
        [&] { cuda::int8::QuantizeOperands<Sm90Bf16, kD, true>(int8_); });
    // As cuda/attention/sm80/family.cc binds them.
    cuda::AttentionParams codes = params_;
    codes.query = int8_.query, codes.query_stride = {c_.H * c_.S * kD / 2, c_.S * kD / 2, kD / 2};
    codes.key = int8_.key, codes.key_stride = {c_.G * c_.T * kD / 2, c_.T * kD / 2, kD / 2};
    const cuda::Int8Scales scales = {int8_.query_scales, int8_.query_shifts, int8_.tile_scales, int8_.tiles};
    constexpr int kBytes = cuda::Sm80Int8Shape<kD, kRows>::kSharedBytes;
    std::vector<unsigned char> shared(static_cast<size_t>(kBytes) + 1024, 0xcd);
    unsigned char* const memory = shared.data() + (-reinterpret_cast<uintptr_t>(shared.data()) & 1023u);
    run(Shape::kThreads, c_.B * c_.H * CeilDiv(c_.S, 128) * Shape::kCtasPerTile, memory,
        [&] { Attention(codes, {scales}, Shape::kStages, reinterpret_cast<Sm90Bf16*>(memory)).Run(); });
  }

  Result result() const {
    Result result;
    for (const uint16_t bits : output_) result.output.push_back(emulated_sm90::FromBf16(bits));
    result.lse.assign(lse_.begin(), lse_.end());
    return result;
  }

 private:
  void BindPadding() {
    if (!c_.padding) return;
    pad_bits_ = PadBits(c_, p_);
    params_.pad_bits = pad_bits_.data();
  }

  // Tiles of 128 queries and 64 keys, their bits in the order of cuda/mask/fragments.h.
  void BindMask() {
    if (*c_.mask.text == '\0') return;
    std::shared_ptr<const AttentionMask> made;
    CHECK(MakeAttentionMask(c_.mask.text, {}, &made).ok());
    CHECK(BuildBlockMask(made->parts.fixed, {c_.B, c_.H, c_.S, c_.T, 0}, 128, 64, &mask_).ok());
    for (size_t tile = 0; tile < mask_.bits.size() / (128 * 2); ++tile) {
      for (int at = 0; at < 8 * 32; ++at) {  // blocks of 16 rows, lanes
        uint32_t bits = 0;
        for (int bit = 0; bit < 32; ++bit) {
          const int element = cuda::FragmentElement(bit);
          const int row = at / 32 * 16 + at % 32 / 4 + element / 2 * 8;
          const int key = 8 * cuda::FragmentBlock(bit) + at % 4 * 2 + element % 2;
          const uint32_t from = mask_.bits[(tile * 128 + static_cast<size_t>(row)) * 2 + static_cast<size_t>(key / 32)];
          bits |= (from >> key % 32 & 1) << bit;
        }
        fragments_.push_back(bits);
      }
    }
    for (size_t at = 0; at < mask_.full_begin.size(); ++at) order_.push_back(static_cast<int32_t>(at) % mask_.rows);
    cuda::DeviceMask& view = params_.mask;
    params_.has_mask = 1;
    view.rows = mask_.rows, view.layout_b = mask_.layout_b, view.layout_h = mask_.layout_h;
    view.layout = mask_.layout.data(), view.row_ptr = mask_.row_ptr.data(), view.row_end = view.row_ptr + 1;
    view.full_begin = mask_.full_begin.data(), view.bits = fragments_.data(), view.order = order_.data();
    view.key_tile = mask_.key_tile.data(), view.bits_id = mask_.bits_id.data();
  }

  void BindOperands() {
    AttentionShape shape;
    shape.B = c_.B, shape.H = c_.H, shape.G = c_.G, shape.S = c_.S, shape.T = c_.T, shape.D = shape.Dv = kD;
    memory_ = OperandMemory(shape, false);
    int8_ = cuda::DescribeOperands(params_, shape, false, reinterpret_cast<char*>(memory_.data()));
    BindCache(c_, &ends_, &int8_);
  }

  const Case c_;
  const Dense& p_;
  std::vector<uint16_t> query_, key_, value_, sink_, output_;
  std::vector<float> lse_;
  std::vector<uint32_t> pad_bits_, fragments_;
  std::vector<int32_t> order_, ends_;
  std::vector<uint4> memory_;
  BlockMask mask_;
  cuda::Int8Params int8_;
  cuda::AttentionParams params_;
};

// The kernels' definition: tiles in rising order. Fully masked rows are zeros.
Result Define(const Dense& p) {
  std::vector<int32_t> order;
  for (int32_t tile = 0; tile < CeilDiv(p.T, kTile); ++tile) order.push_back(tile);
  const std::vector<std::vector<int32_t>> orders(static_cast<size_t>(p.B * p.H * p.S), order);
  return AttendQuantized(p, false, orders, ToBf16);
}

template <int64_t kD, int kRows>
void CheckCase(const Case& c, uint64_t seed) {
  const std::string where = Text("seed ", seed, " D ", kD, " rows ", kRows, " mask '", c.mask.text, "'");
  Random random(seed);
  const Dense p = Draw(c, kD, false, ToBf16, &random);
  Device<kD, kRows> device(c, p, EmptyRows::kZero);
  device.Run();
  Result found = device.result(), wanted = Define(p), exact = Attend(p);
  DropPadding(c, kD, where, &found, &wanted, &exact);
  // Beside the rounding of bf16 outputs and weights, a number may fall to the other side of a rounding here and there.
  const double own = RelativeRms(found.output, wanted.output), whole = RelativeRms(found.output, exact.output);
  CHECK(own < 0.004, where, ": ", own, " from the definition");
  CHECK(whole < 0.015 && whole > 0.003, where, ": ", whole, " from attention");
  for (size_t i = 0; i < exact.lse.size() && c.lse; ++i) {
    CHECK(found.lse[i] == wanted.lse[i] || std::fabs(found.lse[i] - wanted.lse[i]) < 2e-3, where, ": LSE ", i, " is ",
          found.lse[i], ", expected ", wanted.lse[i]);
  }
  CountCases(1);
}

TEST(Int8Sm80AttentionEqualsItsDefinition) {
  Case c;
  c.S = 100, c.T = 200;
  CheckCase<128, 64>(c, 1);
  c = Case();
  c.mask = kWindow, c.keys = Keys::kOffset, c.sink = true, c.S = 150, c.T = 200, c.H = 1;
  CheckCase<64, 128>(c, 2);
  c = Case();
  c.B = 2, c.padding = true, c.T = 250, c.mask = kCausal, c.keys = Keys::kOffset, c.S = 100, c.H = 1;
  CheckCase<64, 64>(c, 3);
  c = Case();
  c.mask = kScattered, c.T = 200, c.S = 70, c.keys = Keys::kSink, c.sink = true, c.lse = false;
  CheckCase<128, 64>(c, 4);
  c = Case();
  c.mask = kEmptyRows, c.T = c.S = 200, c.H = 1;
  CheckCase<64, 128>(c, 5);
}

// Behind pasts of different lengths, and a first prompt with padding.
TEST(Int8Sm80AttentionOverCachesEqualsItsDefinition) {
  Case c;
  c.B = 2, c.H = 2, c.G = 1, c.S = 100, c.T = 400, c.rows = 410, c.lengths = {290, 170}, c.lse = false;
  c.mask = kCausalCache;
  CheckCase<128, 64>(c, 11);
  c.mask = kWindowCache, c.keys = Keys::kOffset, c.sink = true;
  CheckCase<64, 128>(c, 12);
  c.mask = kCausal, c.S = c.T = 200, c.rows = 208, c.lengths = {200, 70}, c.lse = true, c.H = 1;
  CheckCase<64, 64>(c, 13);
}

// Fully masked rows: the mean of all values, or attention over all keys.
template <int64_t kD, int kRows>
void CheckEmptyRows(EmptyRows empty_rows, bool has_sink, uint64_t seed) {
  Case c;
  c.mask = kEmptyRows, c.H = 1, c.S = 140, c.T = 150, c.keys = Keys::kOffset, c.sink = has_sink;
  Random random(seed);
  Dense p = Draw(c, kD, false, ToBf16, &random);
  Device<kD, kRows> device(c, p, empty_rows);
  device.Run();
  int64_t empty = 0;
  for (int64_t row = 0; row < c.S; ++row) {
    const auto first = p.allowed.begin() + static_cast<std::ptrdiff_t>(row * c.T), end = first + c.T;
    if (std::find(first, end, 1) != end) continue;
    std::fill(first, end, uint8_t{1}), ++empty;
    if (empty_rows != EmptyRows::kMean) continue;
    for (int64_t d = 0; d < kD; ++d) p.query[static_cast<size_t>(row * kD + d)] = 0;
  }
  CHECK(empty > 90);
  const double own = RelativeRms(device.result().output, Define(p).output);
  CHECK(own < 0.004, "D ", kD, " rows ", kRows, " policy ", static_cast<int>(empty_rows), ": ", own,
        " from the definition");
  CountCases(1);
}

TEST(Int8Sm80AttentionOfFullyMaskedRows) {
  CheckEmptyRows<64, 128>(EmptyRows::kMean, true, 6);
  CheckEmptyRows<128, 64>(EmptyRows::kMean, false, 7);
  CheckEmptyRows<64, 64>(EmptyRows::kAll, true, 8);
  CheckEmptyRows<128, 64>(EmptyRows::kAll, false, 9);
}

}  // namespace
}  // namespace stof::test::int8
