// SPDX-License-Identifier: Apache-2.0
// The split-KV decode kernel over chosen pages, compiled for the host: windows, biases, pages of all sizes, and NaN in
// all rows that are not attended.
#include "tests/cpp/choose_pages/emulated_sm80/decode.h"
// The kernel comes behind what stands for its headers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cuda/attention/decode/splitkv.cuh"
#include "cuda/choose_pages/choose.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

using Bf16 = cuda::Sm80Bf16;

double At(const std::vector<Bf16>& values, int64_t i) {
  return static_cast<double>(cuda::ToFloat(values[static_cast<size_t>(i)]));
}
std::vector<Bf16> Draw(int64_t count, Random* random) {
  std::vector<Bf16> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(cuda::Round<Bf16>(random->Unit()));
  return values;
}

// A problem whose pages are chosen at random.
template <int kHead>
struct Problem {
  Problem(int most_rows, Random* random) {
    shift = static_cast<int>(random->Range(4, 7));
    S = static_cast<int>(random->Range(1, 5)), H = G * (most_rows / S > 3 ? 3 : 1);
    T = 12 * (1 << shift) + static_cast<int>(random->Range(-9, 9)), capacity = T + 11;
    chosen = static_cast<int>(random->Range(1, 6)), pages = static_cast<int>(cuda::CountPages(T, 1 << shift));
    columns = static_cast<int>(cuda::ListColumns(chosen, pages));
    window_left = random->OneIn(2) ? cuda::kNoWindow : static_cast<int>(random->Range(0, T));
    splits = static_cast<int>(random->Range(1, 5));
    query = Draw(int64_t{B} * H * S * kHead, random);
    key = Draw(int64_t{B} * G * capacity * kHead, random), value = Draw(int64_t{B} * G * capacity * kHead, random);
    const bool has_bias = random->OneIn(2);
    for (int i = 0; has_bias && i < B * H * S * T; ++i) bias.push_back(random->Unit());
    first = {static_cast<int32_t>(random->Range(0, T - S)), static_cast<int32_t>(random->Range(T / 2, T - S))};
    list.resize(static_cast<size_t>(B * G * columns), -1);
    for (int head = 0; head < B * G; ++head) Choose(head, random);
  }
  void Choose(int head, Random* random) {
    const int32_t first_row = first[static_cast<size_t>(head / G)];
    const cuda::PageRange range = cuda::MakePageRange(first_row, S, T, window_left, shift);
    std::vector<int> candidates;
    std::set<int> own;
    for (int page = range.begin; page < range.end; ++page) {
      const bool is_candidate = page >= range.CandidatesBegin() && page < range.recent;
      is_candidate ? candidates.push_back(page) : void(own.insert(page));
    }
    for (int i = 0; i < chosen && !candidates.empty(); ++i) {
      const auto at = random->Range(0, static_cast<int64_t>(candidates.size()) - 1);
      own.insert(candidates[static_cast<size_t>(at)]);
      candidates.erase(candidates.begin() + at);
    }
    std::copy(own.begin(), own.end(), list.begin() + head * columns);
    left_out.push_back((range.end - static_cast<int>(own.size())) << shift);
    for (int row = 0; row < capacity; ++row) {
      if (row < first_row + S && own.count(row >> shift) > 0) continue;
      for (int64_t d = 0; d < kHead; ++d) {
        const auto at = static_cast<size_t>((int64_t{head} * capacity + row) * kHead + d);
        key[at] = value[at] = cuda::Round<Bf16>(NAN);
      }
    }
    attended.push_back(own);
  }
  cuda::DecodeParams Params() {
    cuda::DecodeParams params;
    cuda::AttentionParams& p = params.attention;
    p.B = B, p.H = H, p.G = G, p.S = S, p.T = T, p.D = p.Dv = kHead, p.scale = 0.7f;
    p.query = query.data(), p.query_stride = {int64_t{H} * S * kHead, int64_t{S} * kHead, kHead};
    p.key = key.data(), p.value = value.data();
    p.key_stride = p.value_stride = {int64_t{G} * capacity * kHead, int64_t{capacity} * kHead, kHead};
    if (!bias.empty()) p.bias = bias.data(), p.bias_is_float = 1;
    p.bias_stride_b = int64_t{H} * S * T, p.bias_stride_h = int64_t{S} * T, p.bias_stride_q = T, p.bias_stride_k = 1;
    params.heads = H / G, params.splits = splits, params.first_rows = first.data(), params.window_left = window_left;
    params.pages = {list.data(), columns, pages, int64_t{kHead} << shift, shift};
    params.left_out = left_out.data();
    output.assign(static_cast<size_t>(B * H * S * splits * kHead), NAN);
    stats.assign(static_cast<size_t>(B * H * S * splits * 2), NAN);
    params.split_output = output.data(), params.split_stats = stats.data();
    return params;
  }

  static constexpr int B = 2, G = 2;
  int H, S, T, capacity, shift, chosen, pages, columns, window_left, splits;
  std::vector<Bf16> query, key, value;
  std::vector<float> bias, output, stats;
  std::vector<int32_t> first, list, left_out;
  std::vector<std::set<int>> attended;
};

// A row by its definition, against the splits put together: its output, then ln of the sum of its weights.
template <int kHead>
void CheckRow(const Problem<kHead>& p, int b, int h, int i, const std::string& where) {
  const int64_t head = b * p.G + h / (p.H / p.G), row = (int64_t{b} * p.H + h) * p.S + i;
  const int position = p.first[static_cast<size_t>(b)] + i;
  std::vector<double> want(kHead + 1), got(kHead + 1);
  for (int k = std::max(0, position - p.window_left); k <= position; ++k) {
    if (p.attended[static_cast<size_t>(head)].count(k >> p.shift) == 0) continue;
    const int64_t at = (head * p.capacity + k) * kHead;
    double score = 0;
    for (int d = 0; d < kHead; ++d) score += At(p.query, row * kHead + d) * At(p.key, at + d);
    score = 0.7 * score + (p.bias.empty() ? 0 : static_cast<double>(p.bias[static_cast<size_t>(row * p.T + k)]));
    for (int d = 0; d < kHead; ++d) want[static_cast<size_t>(d)] += std::exp(score) * At(p.value, at + d);
    want.back() += std::exp(score);
  }
  for (int64_t split = row * p.splits; split < (row + 1) * p.splits; ++split) {
    const double sum = static_cast<double>(p.stats[static_cast<size_t>(2 * split + 1)]);
    if (sum == 0) continue;  // it stores no output
    const double weight = std::exp2(static_cast<double>(p.stats[static_cast<size_t>(2 * split)]));
    for (int d = 0; d < kHead; ++d) {
      got[static_cast<size_t>(d)] += weight * static_cast<double>(p.output[static_cast<size_t>(split * kHead + d)]);
    }
    got.back() += weight * sum;
  }
  CHECK(std::abs(std::log(got.back() / want.back())) < 1e-2, where, ": sum ", got.back(), ", expected ", want.back());
  for (size_t d = 0; d < kHead; ++d) {
    const double x = got[d] / got.back(), y = want[d] / want.back();
    CHECK(std::abs(x - y) < 1e-2, where, ": element ", d, " is ", x, ", expected ", y);
  }
}

template <int kHead, int kBlocks>
void RunCase(uint64_t seed) {
  using Kernel = cuda::Decode<kHead, Bf16, Bf16, kBlocks, cuda::KeySource::kChosenPages>;
  Random random(seed);
  Problem<kHead> p(8 * kBlocks, &random);
  const cuda::DecodeParams params = p.Params();
  const int blocks = (params.heads * p.S + 8 * kBlocks - 1) / (8 * kBlocks);
  for (int cta = 0; cta < p.B * p.G * p.splits * blocks; ++cta) {
    const auto shared = std::make_unique<typename Kernel::Shared>();
    emulated_sm80::Cta::Run(128, [&] { Kernel(params, *shared).Run(); }, cta);
  }
  for (int b = 0; b < p.B; ++b) {
    for (int h = 0; h < p.H; ++h) {
      for (int i = 0; i < p.S; ++i) {
        CheckRow(p, b, h, i,
                 Text("seed ", seed, " D ", kHead, " blocks ", kBlocks, " rows ", 1 << p.shift, " S ", p.S, " window ",
                      p.window_left, " splits ", p.splits, " bias ", !p.bias.empty(), " b ", b, " h ", h, " row ", i));
      }
    }
  }
  CountCases(1);
}

TEST(DecodeOfChosenPagesEqualsItsDefinition) {
  for (int i = 0; i < Cases(3); ++i) {
    const auto seed = static_cast<uint64_t>(i);
    RunCase<64, 1>(seed);
    RunCase<64, 2>(50 + seed);
    RunCase<128, 1>(100 + seed);
  }
}

}  // namespace
}  // namespace stof::test
