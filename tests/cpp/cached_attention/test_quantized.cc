// SPDX-License-Identifier: Apache-2.0
// Caches of int8 and fp8 on the CPU, with the kernels of every instruction set: what the append step stores, for all
// numbers that a type has and for those between them; and attention against double precision.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/cached_attention/append.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/mask/cached_mask.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fixtures.h"

namespace stof::test::cached_attention {
namespace {

#define STOF_ID(id, name, is_supported) CpuIsa::id,
constexpr CpuIsa kIsas[] = {STOF_CPU_ISAS(STOF_ID)};
#undef STOF_ID

double ReadStored(DType stored, uint8_t bits) {
  if (stored == DType::kI8) return static_cast<double>(static_cast<int8_t>(bits));
  const int exponent = bits >> 3 & 15, significand = bits & 7;
  if ((bits & 0x7f) == 0x7f) return std::nan("");
  const double size = exponent == 0 ? std::ldexp(significand, -9) : std::ldexp(8 + significand, exponent - 10);
  return (bits & 0x80) != 0 ? -size : size;
}

// The nearest number by search; of two that are equally near the one with an even last bit.
double Nearest(DType stored, double x) {
  double best = 0, least = 1e300;
  bool is_even = false;
  for (int bits = 0; bits < 256; ++bits) {
    const double y = ReadStored(stored, static_cast<uint8_t>(bits)), away = std::abs(x - y);
    if (std::isnan(y)) continue;
    if (away < least || (away == least && bits % 2 == 0 && !is_even)) best = y, least = away, is_even = bits % 2 == 0;
  }
  return best;
}

// One sequence of `past` keys that gets S more, heads of D elements, with a scale for each channel.
class QuantizedStep {
 public:
  QuantizedStep(DType stored, int64_t D, int64_t S, int64_t past) : stored_(stored), D_(D), S_(S), past_(past) {
    for (auto* cache : {&key_, &value_}) {
      for (int64_t i = 0; i < kG * rows() * D; ++i) {
        uint8_t bits = 0x7f;  // rows without a key: NaN in fp8
        while (i / D % rows() < past && std::isnan(ReadStored(DType::kF8E4M3, bits))) {
          bits = static_cast<uint8_t>(random_.Range(0, 255));
        }
        cache->push_back(bits);
      }
    }
    for (int64_t i = 0; i < (kH + 2 * kG) * S * D; ++i) tokens_.push_back(2 * random_.Unit());
    for (auto* scales : {&key_scale_, &value_scale_}) {
      for (int64_t i = 0; i < kG * D; ++i) {
        scales->push_back((stored == DType::kI8 ? 0.02f : 0.006f) * (1.0f + random_.Unit() / 2));
      }
    }
  }

  std::vector<float>& tokens() { return tokens_; }
  std::vector<float>& value_scale() { return value_scale_; }
  int64_t rows() const { return past_ + S_ + 3; }
  double Value(int64_t g, int64_t row, int64_t d) const {
    return ReadStored(stored_, value_[static_cast<size_t>((g * rows() + row) * D_ + d)]);
  }
  float* NewValue(int64_t g, int64_t i) { return &tokens_[static_cast<size_t>(((kH + kG + g) * S_ + i) * D_)]; }

  void Append(CpuIsa isa) {
    CacheAppendArgs args;
    args.B = 1, args.H = kH, args.G = kG, args.S = S_, args.D = D_, args.cache_dtype = stored_;
    args.key_scale = {key_scale_.data(), D_, 1}, args.value_scale = {value_scale_.data(), D_, 1};
    args.query_stride = args.key_stride = args.value_stride = {0, S_ * D_, D_};
    args.query = tokens_.data();
    args.key = tokens_.data() + kH * S_ * D_, args.value = tokens_.data() + (kH + kG) * S_ * D_;
    args.past_key = args.present_key = key_.data(), args.past_value = args.present_value = value_.data();
    args.past_capacity = args.capacity = rows();
    const auto seqlen = static_cast<int32_t>(past_ + S_ - 1);
    args.seqlens = &seqlen;
    args.first_row = &first_row_;
    const Status status = cpu::AppendToCache(args, isa, Parallel{});
    CHECK(status.ok(), status.message());
  }

  void Attend(CpuIsa isa, const std::string& where) {
    AttentionArgs args;
    args.shape = {1, kH, kG, S_, past_ + S_, D_, D_, DType::kF32, stored_};
    args.kv.key_scale = {key_scale_.data(), D_, 1}, args.kv.value_scale = {value_scale_.data(), D_, 1};
    args.scores.scale = 1.0f / std::sqrt(static_cast<float>(D_));
    args.query.data = tokens_.data(), args.query.stride = {0, S_ * D_, D_};
    args.key.data = key_.data(), args.value.data = value_.data();
    args.key.stride = args.value.stride = {0, rows() * D_, D_};
    std::vector<float> output(static_cast<size_t>(kH * S_ * D_), std::nanf(""));
    args.output.data = output.data(), args.output.stride = {0, S_ * D_, D_};
    const auto end = static_cast<int32_t>(args.shape.T);
    args.kv.key_ends = &end;
    MaskExpr expr;
    std::unique_ptr<BoundCachedMask> mask;
    Status status = MaskExpr::Parse("k <= q", {}, &expr);
    if (status.ok()) status = BoundCachedMask::Make(expr, {1, kH, S_, args.shape.T, 0}, &first_row_, &end, &mask);
    CHECK(status.ok(), where, ": ", status.message());
    args.mask.fixed = StaticMask::OfElements(mask->view());
    CpuAttentionConfig config = ChooseCpuAttention(args, 1);
    config.isa = isa;
    Memory memory;
    void* workspace = Memory::Allocate(&memory, CpuAttentionWorkspace(args, config, 1) + 64);
    status = CpuAttention(args, config, workspace, Parallel{});
    CHECK(status.ok(), where, ": ", status.message());
    const Answer answer = stof::test::Attend(Reference(args.scores.scale));
    for (size_t i = 0; i < output.size(); ++i) {
      const double magnitude = answer.magnitude[i / static_cast<size_t>(D_)];
      const double most = 2 * Tolerance(DType::kF32, magnitude, args.shape.T, 5, answer.output[i]);
      CHECK(std::abs(static_cast<double>(output[i]) - answer.output[i]) <= most, where, " element ", i, ": ", output[i],
            ", expected ", answer.output[i]);
    }
    CountCases(1);
  }

 private:
  static constexpr int64_t kH = 4, kG = 2;

  Dense Reference(float scale) const {
    Dense dense;
    dense.H = kH, dense.G = kG, dense.S = S_, dense.T = past_ + S_, dense.D = dense.Dv = D_;
    dense.scale = static_cast<double>(scale);
    dense.query.assign(tokens_.begin(), tokens_.begin() + kH * S_ * D_);
    for (int64_t g = 0; g < kG; ++g) {
      for (int64_t k = 0; k < dense.T; ++k) {
        for (int64_t d = 0; d < D_; ++d) {
          const auto at = static_cast<size_t>((g * rows() + k) * D_ + d), channel = static_cast<size_t>(g * D_ + d);
          dense.key.push_back(ReadStored(stored_, key_[at]) * static_cast<double>(key_scale_[channel]));
          dense.value.push_back(ReadStored(stored_, value_[at]) * static_cast<double>(value_scale_[channel]));
        }
      }
    }
    for (int64_t row = 0; row < kH * S_; ++row) {
      for (int64_t k = 0; k < dense.T; ++k) dense.allowed.push_back(k <= past_ + row % S_ ? 1 : 0);
    }
    return dense;
  }

  DType stored_;
  int64_t D_, S_, past_;
  Random random_{7};
  std::vector<uint8_t> key_, value_;
  std::vector<float> tokens_, key_scale_, value_scale_;
  int32_t first_row_ = 0;
};

ONE_THREAD_TEST(QuantizedCachesAreAttendedByEveryIsa) {
  for (const CpuIsa isa : kIsas) {
    if (!IsCpuIsaSupported(isa)) continue;
    for (const DType stored : {DType::kI8, DType::kF8E4M3}) {
      for (const int64_t D : {16, 20, 64, 128}) {
        // Keys in place of one and of two strips, packed by few rows, and the tiled kernel.
        for (const int64_t S : {1, 2, 4, 16, 40}) {
          QuantizedStep step(stored, D, S, 300);
          step.Append(isa);
          step.Attend(isa, Text(CpuIsaName(isa), " stored ", static_cast<int>(stored), " D ", D, " S ", S));
        }
      }
    }
  }
}

TEST(QuantizedCachesHoldTheNearestNumber) {
  for (const CpuIsa isa : kIsas) {
    if (!IsCpuIsaSupported(isa)) continue;
    for (const DType stored : {DType::kI8, DType::kF8E4M3}) {
      // Every number, the middles, and what lies just beside them.
      std::vector<double> numbers;
      for (int bits = 0; bits < 256; ++bits) {
        const double x = ReadStored(stored, static_cast<uint8_t>(bits));
        if (!std::isnan(x)) numbers.push_back(x);
      }
      std::sort(numbers.begin(), numbers.end());
      const size_t count = numbers.size();
      for (size_t i = 0; i + 1 < count; ++i) {
        const auto middle = static_cast<float>((numbers[i] + numbers[i + 1]) / 2);
        for (const float x : {middle, std::nextafter(middle, 1e9f), std::nextafter(middle, -1e9f)}) {
          numbers.push_back(static_cast<double>(x));
        }
      }
      for (const double x : {1e9, -1e9, 449.0, -449.0, 128.0, -129.0, 1e-30}) numbers.push_back(x);
      constexpr int64_t kHead = 64;
      numbers.resize((numbers.size() + kHead - 1) / kHead * kHead);
      const auto S = static_cast<int64_t>(numbers.size()) / kHead;
      QuantizedStep step(stored, kHead, S, 0);
      std::fill(step.value_scale().begin(), step.value_scale().end(), 1.0f);
      for (size_t i = 0; i < numbers.size(); ++i) step.NewValue(0, 0)[i] = static_cast<float>(numbers[i]);
      step.Append(isa);
      for (int64_t i = 0; i < S * kHead; ++i) {
        const double want = Nearest(stored, numbers[static_cast<size_t>(i)]), got = step.Value(0, i / kHead, i % kHead);
        CHECK(got == want, CpuIsaName(isa), " stored ", static_cast<int>(stored), ": ", numbers[static_cast<size_t>(i)],
              " became ", got, ", expected ", want);
        CountCases(1);
      }
    }
  }
}

}  // namespace
}  // namespace stof::test::cached_attention
