// SPDX-License-Identifier: Apache-2.0
// Problems for the tests of attention with 8-bit operands.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/attention/int8/layout.h"
#include "plugins/core/base/integers.h"
#include "tests/cpp/check.h"
#include "tests/cpp/int8_attention/int8_reference.h"

namespace stof::test::int8 {

struct MaskCase {
  const char* text;
  bool (*allows)(int64_t h, int64_t q, int64_t k);
};
inline constexpr MaskCase kNoMask = {"", [](int64_t, int64_t, int64_t) { return true; }};
inline constexpr MaskCase kCausal = {"k <= q", [](int64_t, int64_t q, int64_t k) { return k <= q; }};
inline constexpr MaskCase kWindow = {"k <= q and (k < 4 or q - k < 150)",
                                     [](int64_t, int64_t q, int64_t k) { return k <= q && (k < 4 || q - k < 150); }};
inline constexpr MaskCase kScattered = {"(k + h) % 3 != 0 and k < q + 40",
                                        [](int64_t h, int64_t q, int64_t k) { return (k + h) % 3 != 0 && k < q + 40; }};
inline constexpr MaskCase kEmptyRows = {"k + 100 < q", [](int64_t, int64_t q, int64_t k) { return k + 100 < q; }};

enum class Keys { kGaussian, kOffset, kSink };
struct Case {
  int64_t B = 1, H = 2, G = 1, S = 200, T = 300;
  MaskCase mask = kNoMask;
  Keys keys = Keys::kGaussian;
  bool padding = false, sink = false, lse = true, scheduled = false, half_tiles = false;
  // Over a KV cache: the keys of each sequence, T at most. Queries are the last ones, or with S = T a first prompt,
  // which has padding behind its keys. Empty: no cache.
  std::vector<int64_t> lengths;
  int64_t rows = 0;  // of the cache, beside lengths

  bool is_first_prompt() const { return !lengths.empty() && S == T; }
  int64_t keys_of(int64_t b) const { return lengths.empty() ? T : lengths[static_cast<size_t>(b)]; }
  int64_t position_of(int64_t b, int64_t query) const {
    return query + (lengths.empty() || is_first_prompt() ? 0 : keys_of(b) - S);
  }
  bool is_padding(int64_t b, int64_t query) const { return is_first_prompt() && query >= keys_of(b); }
};
// Masks of caches. The text is for B = 2: sequence b has 190 - 120 b keys before its first query.
inline constexpr MaskCase kCausalCache = {"k <= q + 190 - 120 * b", kCausal.allows};
inline constexpr MaskCase kWindowCache = {"k <= q + 190 - 120 * b and q + 190 - 120 * b - k < 90",
                                          [](int64_t, int64_t q, int64_t k) { return k <= q && q - k < 90; }};

inline double Gaussian(Random* random) {
  double sum = 0;
  for (int i = 0; i < 12; ++i) sum += random->Unit();
  return sum / 2;
}

// Of head size D. padded_values: padded values may be NaN, too. round: to the type of the inputs.
inline Dense Draw(const Case& c, int64_t D, bool padded_values, double (*round)(double), Random* random) {
  Dense p;
  p.B = c.B, p.H = c.H, p.G = c.G, p.S = c.S, p.T = c.T, p.D = D, p.scale = 1 / std::sqrt(static_cast<double>(D));
  const auto draw = [&](int64_t rows) {
    std::vector<double> x;
    for (int64_t i = 0; i < rows * D; ++i) x.push_back(round(Gaussian(random)));
    return x;
  };
  p.query = draw(c.B * c.H * c.S), p.key = draw(c.B * c.G * c.T), p.value = draw(c.B * c.G * c.T);
  for (size_t i = 0; i < p.key.size(); ++i) {
    const auto d = static_cast<int64_t>(i) % D, k = static_cast<int64_t>(i) / D % c.T;
    if (c.keys == Keys::kOffset && d % 32 == 5) p.key[i] = round(p.key[i] + 30);
    if (c.keys == Keys::kSink && k == 0) p.key[i] *= 4, p.value[i] = round(p.value[i] / 8);
  }
  for (int64_t i = 0; i < c.B * c.T; ++i) {
    const int64_t b = i / c.T, k = i % c.T;
    const bool is_padded = c.padding && !(b == 0 ? k < c.T - 70 : k >= 130);
    p.exists.push_back(!is_padded && k < c.keys_of(b) ? 1 : 0);
    // What padding holds must change nothing.
    for (int64_t at = 0; at < c.G * D && p.exists.back() == 0; ++at) {
      const auto place = static_cast<size_t>(((b * c.G + at / D) * c.T + k) * D + at % D);
      p.key[place] = std::nan("");
      if (padded_values) p.value[place] = std::nan("");  // values in 16 bits are multiplied by weights of 0
    }
  }
  for (int64_t row = 0; row < c.B * c.H * c.S; ++row) {
    for (int64_t k = 0; k < c.T; ++k) {
      const bool allowed = c.mask.allows(row / c.S % c.H, c.position_of(row / c.S / c.H, row % c.S), k);
      p.allowed.push_back(allowed && p.exists[static_cast<size_t>(row / c.S / c.H * c.T + k)] != 0 ? 1 : 0);
    }
  }
  for (int64_t b = 0; b < c.B; ++b) p.keys.push_back(c.keys_of(b));
  for (int64_t h = 0; h < c.H && c.sink; ++h) p.sink.push_back(round(1.5 + static_cast<double>(h)));
  return p;
}

// Keys or values as a cache holds them, NaN in the rows behind T.
inline std::vector<double> InCache(const Case& c, const std::vector<double>& dense, int64_t D) {
  if (c.rows == 0) return dense;
  std::vector<double> cache(static_cast<size_t>(c.B * c.G * c.rows * D), std::nan(""));
  for (int64_t head = 0; head < c.B * c.G; ++head) {
    const auto from = dense.begin() + static_cast<std::ptrdiff_t>(head * c.T * D);
    std::copy(from, from + static_cast<std::ptrdiff_t>(c.T * D),
              cache.begin() + static_cast<std::ptrdiff_t>(head * c.rows * D));
  }
  return cache;
}

// Numbers of padded queries mean nothing, but are finite: zeros in each result from here on.
inline void DropPadding(const Case& c, int64_t D, const std::string& where, Result* found, Result* wanted,
                        Result* exact) {
  for (int64_t row = 0; row < c.B * c.H * c.S; ++row) {
    if (!c.is_padding(row / c.S / c.H, row % c.S)) continue;
    const auto at = static_cast<size_t>(row);
    for (size_t i = at * static_cast<size_t>(D); i < (at + 1) * static_cast<size_t>(D); ++i) {
      CHECK(std::isfinite(found->output[i]), where, ": padded row ", row, " is ", found->output[i]);
      found->output[i] = wanted->output[i] = exact->output[i] = 0;
    }
    found->lse[at] = wanted->lse[at] = exact->lse[at] = 0;
  }
}

// Has the kernels that quantize read the keys of a cache. ends: [B], the memory of their numbers.
inline void BindCache(const Case& c, std::vector<int32_t>* ends, cuda::Int8Params* params) {
  if (c.lengths.empty()) return;
  ends->assign(c.lengths.begin(), c.lengths.end());
  params->key_ends = ends->data(), params->skips_tiles = !c.is_first_prompt();
}

// Which keys exist, as bits [B, words of a batch]: what AttentionParams::pad_bits is.
inline std::vector<uint32_t> PadBits(const Case& c, const Dense& p) {
  const int64_t words = CeilDiv(c.T, 64) * 2;
  std::vector<uint32_t> bits(static_cast<size_t>(c.B * words));
  for (int64_t at = 0; at < c.B * c.T; ++at) {
    const int64_t k = at % c.T;
    if (p.exists[static_cast<size_t>(at)] != 0) bits[static_cast<size_t>(at / c.T * words + k / 32)] |= 1u << k % 32;
  }
  return bits;
}

// Poisoned memory for 8-bit operands. uint4 is CUDA's, or that of the emulation.
inline std::vector<uint4> OperandMemory(const AttentionShape& shape, bool has_fp8_values) {
  const auto size = static_cast<size_t>(cuda::Int8Layout(shape, has_fp8_values).total) / sizeof(uint4);
  return std::vector<uint4>(size, uint4{~0u, ~0u, ~0u, ~0u});
}

}  // namespace stof::test::int8
