// SPDX-License-Identifier: Apache-2.0
// The kernel that scores pages, compiled for the host: scores of candidates, and key bounds of pages with new rows.
// Inputs are small integers, whose scores are exact.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cuda/choose_pages/scores.cuh"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

using Bf16 = cuda::Sm80Bf16;

std::vector<Bf16> Draw(int64_t count, Random* random) {
  std::vector<Bf16> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(cuda::Round<Bf16>(static_cast<float>(random->Range(-3, 3))));
  return values;
}
double At(const std::vector<Bf16>& values, int64_t i) {
  return static_cast<double>(cuda::ToFloat(values[static_cast<size_t>(i)]));
}

template <int kHead>
void RunCase(uint64_t seed) {
  using Scores = cuda::PageScores<kHead, Bf16>;
  Random random(seed);
  const auto shift = static_cast<int32_t>(random.Range(4, 7)), rows = 1 << shift;
  cuda::PageChoiceParams params;
  params.B = 2, params.G = 2, params.H = 2 * static_cast<int32_t>(random.Range(1, 5));
  params.S = static_cast<int32_t>(random.Range(1, 3)), params.T = 20 * rows + static_cast<int32_t>(random.Range(-9, 9));
  params.D = kHead, params.shift = shift, params.pages = (params.T + rows - 1) / rows, params.chosen = 2;
  params.window_left = random.OneIn(2) ? 1 << 28 : static_cast<int32_t>(random.Range(1, params.T));
  params.scale = random.OneIn(3) ? -0.5f : 0.25f;
  const int64_t head_rows = params.T + 3, heads = params.B * params.G;  // capacity beyond T
  const std::vector<Bf16> query = Draw(int64_t{params.B} * params.H * params.S * kHead, &random),
                          key = Draw(heads * head_rows * kHead, &random);
  std::vector<Bf16> bounds = Draw(heads * params.pages * 2 * kHead, &random);
  for (size_t at = 0; at < bounds.size(); at += 2 * kHead) {
    for (size_t low = at; low < at + kHead; ++low) {
      if (cuda::ToFloat(bounds[low]) > cuda::ToFloat(bounds[low + kHead])) std::swap(bounds[low], bounds[low + kHead]);
    }
  }
  bounds[static_cast<size_t>(random.Range(0, static_cast<int64_t>(bounds.size()) - 1))] = cuda::Round<Bf16>(NAN);
  const std::vector<Bf16> before = bounds;
  std::vector<int32_t> first_rows, seqlens;
  for (int b = 0; b < 2; ++b) {
    first_rows.push_back(static_cast<int32_t>(b == 0 ? random.Range(0, params.T - params.S) : params.T - params.S));
    seqlens.push_back(first_rows.back() + params.S - 1);
  }
  std::vector<uint32_t> scores(static_cast<size_t>(heads * params.pages), 5);
  params.query = query.data(), params.key = key.data(), params.bounds = bounds.data(), params.scores = scores.data();
  params.query_stride = {int64_t{params.H} * params.S * kHead, int64_t{params.S} * kHead, kHead};
  params.key_stride = {params.G * head_rows * kHead, head_rows * kHead, kHead};
  params.bounds_stride_b = int64_t{params.G} * params.pages * 2 * kHead;
  params.bounds_stride_g = int64_t{params.pages} * 2 * kHead, params.bounds_stride_page = 2 * kHead;
  params.first_rows = first_rows.data();
  if (random.OneIn(2)) params.seqlens = seqlens.data();
  const auto ctas =
      static_cast<int>(heads * ((params.pages + Scores::kPages - 1) / Scores::kPages + Scores::kNewPages));
  for (int cta = 0; cta < ctas; ++cta) {
    typename Scores::Shared shared;
    emulated_sm80::Cta::Run(Scores::kThreads, [&] { Scores(params).Run(shared); }, cta);
  }
  const std::string where = Text("seed ", seed, " D ", kHead, " rows ", rows, " T ", params.T, " S ", params.S);
  for (int64_t head = 0; head < heads; ++head) {
    const int32_t first = first_rows[static_cast<size_t>(head / params.G)], keys = first + params.S;
    const cuda::PageRange range = cuda::MakePageRange(first, params.S, params.T, params.window_left, shift);
    for (int64_t page = 0; page < params.pages; ++page) {
      const int64_t at = (head * params.pages + page) * 2 * kHead;
      const bool is_new = page >= first / rows && page * rows < keys;
      for (int64_t d = 0; d < 2 * kHead; ++d) {
        double want = At(before, at + d);
        for (int64_t k = page * rows; is_new && k < std::min<int64_t>(keys, (page + 1) * rows); ++k) {
          const double x = At(key, (head * head_rows + k) * kHead + d % kHead);
          want = k == page * rows ? x : d < kHead ? std::min(want, x) : std::max(want, x);
        }
        const double got = At(bounds, at + d);
        CHECK(got == want || (std::isnan(got) && std::isnan(want)), where, ": bound ", d, " of page ", page,
              " of head ", head, " is ", got, ", expected ", want);
      }
      if (page < range.CandidatesBegin() || page >= range.recent || range.Candidates() <= params.chosen) continue;
      double most = -std::numeric_limits<double>::infinity();
      const int group = params.H / params.G;
      for (int64_t row = 0; row < int64_t{group} * params.S; ++row) {
        double sum = 0;
        for (int64_t d = 0; d < kHead; ++d) {
          const int64_t b = head / params.G, h = head % params.G * group;
          const double x =
              static_cast<double>(params.scale) * At(query, ((b * params.H + h) * params.S + row) * kHead + d);
          const double low = x * At(before, at + d), high = x * At(before, at + kHead + d);
          sum += std::isnan(low) || std::isnan(high) ? std::nan("") : std::max(low, high);
        }
        most = std::isnan(sum) || std::isnan(most) ? std::nan("") : std::max(most, sum);
      }
      const uint32_t want = cuda::SortableScore(static_cast<float>(most));
      const uint32_t got = scores[static_cast<size_t>(head * params.pages + page)];
      CHECK(got == want, where, ": score of page ", page, " of head ", head, " is ", got, ", expected ", want, " for ",
            most);
    }
  }
  CountCases(1);
}

TEST(PageScoresEqualTheirDefinition) {
  for (int i = 0; i < Cases(6); ++i) {
    RunCase<64>(static_cast<uint64_t>(i));
    RunCase<128>(static_cast<uint64_t>(100 + i));
  }
}

// The order of scores, and of NaN and zeros among them.
TEST(SortableScoresHaveTheOrderOfScores) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> rising = {-kInfinity, -3e38f, -1.0f,      -1e-40f, 0.0f,
                                     1e-40f,     1.0f,   1.0000001f, 3e38f,   kInfinity};
  CHECK(cuda::SortableScore(-0.0f) == cuda::SortableScore(0.0f));
  CHECK(cuda::SortableScore(rising[0]) > 0);
  for (size_t i = 1; i < rising.size(); ++i) {
    CHECK(cuda::SortableScore(rising[i - 1]) < cuda::SortableScore(rising[i]), rising[i]);
  }
  CHECK(cuda::SortableScore(kInfinity) < cuda::SortableScore(std::nanf("")));
  CHECK(cuda::SortableScore(-std::nanf("")) == cuda::SortableScore(std::nanf("")));
}

}  // namespace
}  // namespace stof::test
