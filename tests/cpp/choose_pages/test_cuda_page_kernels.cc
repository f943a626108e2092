// SPDX-License-Identifier: Apache-2.0
// The kernels that score and choose pages on a GPU: lists against the definition in docs/reference/cached-attention.md.
// Inputs are small integers, whose scores are exact, so that equal ones are equal; lists are chosen from given scores,
// too, also of the longest caches.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/choose_pages/choose.h"
#include "plugins/core/contract/page_choice.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"
#include "tests/cpp/device_memory.h"

namespace stof::test {
namespace {

constexpr int32_t kNone = -7;  // in entries of a list that nothing has written

struct Case {
  int64_t B = 2, H = 8, G = 2, S = 1, D = 128, T = 3000, rows = 64, chosen = 5;
  int32_t window_left = 1 << 28;
  DType dtype = DType::kF16;
  float scale = 0.125f;
  std::vector<int32_t> first_rows = {2990, 700};
  bool reads_ahead = false;
  int largest = 3;  // integers of queries and key bounds

  int64_t heads() const { return B * G; }
  int64_t pages() const { return cuda::CountPages(T, rows); }
  int64_t columns() const { return cuda::ListColumns(chosen, pages()); }
};
std::string Describe(const Case& c) {
  return Text("B ", c.B, " H ", c.H, " G ", c.G, " S ", c.S, " D ", c.D, " T ", c.T, " rows ", c.rows, " chosen ",
              c.chosen, " window ", c.window_left, " first ", c.first_rows[0], " scale ", c.scale, " largest ",
              c.largest, " ahead ", c.reads_ahead, " bf16 ", c.dtype == DType::kBF16);
}

// The pages that a KV head of sequence b attends, in ascending order. score(page): of a candidate.
template <typename Score>
std::vector<int32_t> Define(const Case& c, int64_t b, const Score& score) {
  const int64_t first = c.first_rows[static_cast<size_t>(b)], recent = FirstRecentPage(c.rows, first);
  std::vector<int32_t> attended, candidates;
  for (int64_t page = 0; page * c.rows < std::min(first + c.S, c.T); ++page) {
    if ((page + 1) * c.rows <= first - c.window_left) continue;
    (page == 0 || page >= recent ? attended : candidates).push_back(static_cast<int32_t>(page));
  }
  std::vector<double> scores;
  for (const int32_t page : candidates) scores.push_back(score(page));
  std::vector<size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t i, size_t j) {
    return std::isnan(scores[i]) ? !std::isnan(scores[j]) : scores[i] > scores[j];
  });
  for (size_t i = 0; i < order.size() && i < static_cast<size_t>(c.chosen); ++i) {
    attended.push_back(candidates[order[i]]);
  }
  std::sort(attended.begin(), attended.end());
  return attended;
}

class Runner {
 public:
  explicit Runner(const Case& c) : c_(c) {
    const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
    params.B = narrow(c.B), params.H = narrow(c.H), params.G = narrow(c.G), params.S = narrow(c.S);
    params.T = narrow(c.T), params.D = narrow(c.D), params.dtype = c.dtype, params.scale = c.scale;
    params.first_rows = Upload(c.first_rows);
    params.window_left = c.window_left, params.shift = cuda::PageShift(c.rows);
    params.pages = narrow(c.pages()), params.chosen = narrow(c.chosen), params.columns = narrow(c.columns());
    const cuda::ChooseWorkspace workspace(c.heads(), c.pages(), c.columns());
    auto* const space = static_cast<char*>(memory_.Take(static_cast<size_t>(workspace.bytes)));
    params.scores = reinterpret_cast<uint32_t*>(space + workspace.scores);
    params.list = reinterpret_cast<int32_t*>(space + workspace.list);
    params.left_out = reinterpret_cast<int32_t*>(space + workspace.left_out);
    const std::vector<int32_t> none(static_cast<size_t>(c.heads() * c.columns()), kNone);
    CHECK_CUDA(cudaMemcpy(params.list, none.data(), 4 * none.size(), cudaMemcpyHostToDevice));
    const std::vector<uint64_t> zeros(2, 0);
    params.counts = reinterpret_cast<unsigned long long*>(Upload(zeros));
  }
  template <typename T>
  T* Upload(const std::vector<T>& values) {
    return static_cast<T*>(memory_.Upload(values.data(), values.size() * sizeof(T)));
  }
  void* UploadFloats(const std::vector<double>& values) {
    std::vector<char> bytes(2 * values.size());
    for (size_t i = 0; i < values.size(); ++i) StoreFloat(c_.dtype, values[i], &bytes[2 * i]);
    return memory_.Upload(bytes.data(), bytes.size());
  }
  void Score() { CHECK(cuda::LaunchPageScores(params, nullptr) == 0); }
  void Choose() {
    CHECK(cuda::LaunchPageChoice(params, nullptr) == 0);
    CHECK_CUDA(cudaDeviceSynchronize());
    list_.resize(static_cast<size_t>(c_.heads() * c_.columns()));
    CHECK_CUDA(cudaMemcpy(list_.data(), params.list, 4 * list_.size(), cudaMemcpyDeviceToHost));
    left_out_.resize(static_cast<size_t>(c_.heads()));
    CHECK_CUDA(cudaMemcpy(left_out_.data(), params.left_out, 4 * left_out_.size(), cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaMemcpy(counts_, params.counts, sizeof counts_, cudaMemcpyDeviceToHost));
  }
  // score(head, page), head: b * G + g.
  template <typename ScoreOf>
  void Compare(const ScoreOf& score, const std::string& where) const {
    uint64_t allowed = 0, skipped = 0;
    for (int64_t head = 0; head < c_.heads(); ++head) {
      const int64_t b = head / c_.G, keys = std::min(c_.first_rows[static_cast<size_t>(b)] + c_.S, c_.T);
      const auto want = Define(c_, b, [&](int64_t page) { return score(head, page); });
      const auto* const got = &list_[static_cast<size_t>(head * c_.columns())];
      for (size_t i = 0; i < static_cast<size_t>(c_.columns()); ++i) {
        const int32_t page = i < want.size() ? want[i] : kNone;
        CHECK(got[i] == page, where, ": entry ", i, " of head ", head, " is ", got[i], ", expected ", page);
      }
      const int64_t pages = cuda::CountPages(keys, c_.rows), attended = static_cast<int64_t>(want.size());
      CHECK(left_out_[static_cast<size_t>(head)] == (pages - attended) * c_.rows, where, ": rows left out of head ",
            head);
      const int64_t low = std::max<int64_t>(0, c_.first_rows[static_cast<size_t>(b)] - c_.window_left) / c_.rows;
      allowed += static_cast<uint64_t>(c_.H / c_.G * c_.S * (keys - low * c_.rows));
      skipped += static_cast<uint64_t>(c_.H / c_.G * c_.S * (pages - low - attended) * c_.rows);
    }
    CHECK(counts_[0] == allowed && counts_[1] == skipped, where, ": counts ", counts_[0], " and ", counts_[1],
          ", expected ", allowed, " and ", skipped);
  }

  cuda::PageChoiceParams params;

 private:
  const Case c_;
  DeviceMemory memory_;
  std::vector<int32_t> list_, left_out_;
  unsigned long long counts_[2] = {};
};

void RunCase(const Case& c, uint64_t seed) {
  const std::string where = Text("seed ", seed, " ", Describe(c));
  Random random(seed);
  Runner runner(c);
  std::vector<double> query, bounds;
  for (int64_t i = 0; i < c.B * c.H * c.S * c.D; ++i) {
    query.push_back(static_cast<double>(random.Range(-c.largest, c.largest)));
  }
  for (int64_t page = 0; page < c.heads() * c.pages(); ++page) {
    const int64_t begin = static_cast<int64_t>(bounds.size());
    for (int64_t d = 0; d < c.D; ++d) bounds.push_back(static_cast<double>(random.Range(-c.largest, c.largest)));
    for (int64_t d = 0; d < c.D; ++d) {
      bounds.push_back(bounds[static_cast<size_t>(begin + d)] + static_cast<double>(random.Range(0, c.largest)));
    }
    if (random.OneIn(300)) bounds[static_cast<size_t>(begin + random.Range(0, 2 * c.D - 1))] = std::nan("");
  }
  runner.params.query = runner.UploadFloats(query);
  runner.params.query_stride = {c.H * c.S * c.D, c.S * c.D, c.D};
  runner.params.bounds = runner.UploadFloats(bounds);
  runner.params.bounds_stride_page = 2 * c.D, runner.params.bounds_stride_g = c.pages() * 2 * c.D;
  runner.params.bounds_stride_b = c.G * c.pages() * 2 * c.D;
  std::vector<int32_t> seqlens;
  for (const int32_t first : c.first_rows) seqlens.push_back(first + static_cast<int32_t>(c.S) - 1);
  if (c.reads_ahead) runner.params.seqlens = runner.Upload(seqlens);
  runner.Score();
  runner.Choose();
  const auto score = [&](int64_t head, int64_t page) {
    double most = -std::numeric_limits<double>::infinity();
    const int64_t b = head / c.G, g = head % c.G, group = c.H / c.G;
    const double* const of_page = &bounds[static_cast<size_t>((head * c.pages() + page) * 2 * c.D)];
    for (int64_t row = 0; row < group * c.S; ++row) {
      double sum = 0;
      for (int64_t d = 0; d < c.D; ++d) {
        const double x =
            static_cast<double>(c.scale) * query[static_cast<size_t>(((b * c.H + g * group) * c.S + row) * c.D + d)];
        const double low = x * of_page[d], high = x * of_page[c.D + d];
        sum += std::isnan(low) || std::isnan(high) ? std::nan("") : std::max(low, high);
      }
      most = std::isnan(sum) || std::isnan(most) ? std::nan("") : std::max(most, sum);
    }
    return most;
  };
  runner.Compare(score, where);
  CountCases(1);
}

TEST(CudaPageScoresEqualTheDefinition) {
  Random random(21);
  for (int i = 0; i < Cases(120); ++i) {
    Case c;
    c.D = random.OneIn(2) ? 64 : 128, c.dtype = random.OneIn(2) ? DType::kF16 : DType::kBF16;
    c.rows = random.Pick(std::vector<int64_t>{16, 32, 64, 128}),
    c.S = random.Pick(std::vector<int64_t>{1, 1, 2, 3, 16});
    c.G = random.Pick(std::vector<int64_t>{1, 2, 4}), c.H = c.G * random.Pick(std::vector<int64_t>{1, 3, 4, 8});
    c.T = random.Range(200, 6000);
    c.chosen = random.Range(1, 40);
    c.largest = static_cast<int>(random.Range(1, 4));
    c.scale = random.Pick(std::vector<float>{0.125f, 1.0f, -0.5f, 0.0f});
    if (random.OneIn(3)) c.window_left = static_cast<int32_t>(random.Range(0, c.T));
    c.reads_ahead = random.OneIn(2);
    for (int32_t& first : c.first_rows) first = static_cast<int32_t>(random.Range(0, c.T - c.S));
    RunCase(c, static_cast<uint64_t>(i));
  }
}

// Lists from scores of several kinds, up to 2^22 keys in pages of 16.
TEST(CudaPageChoiceEqualsTheDefinition) {
  Random random(22);
  for (const int64_t pages : {6, 33, 64, 1000, 2048, 4097, 65536, 262144}) {
    for (int kind = 0; kind < 5; ++kind) {
      for (const double share : {0.0, 0.05, 0.7}) {
        Case c;
        c.B = 1, c.G = pages > 10000 ? 1 : 3, c.H = c.G, c.rows = 16, c.T = pages * c.rows;
        c.chosen = std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(pages) * share));
        c.first_rows = {static_cast<int32_t>(c.T - random.Range(1, 16))};
        const std::string where = Text("kind ", kind, " ", Describe(c));
        Runner runner(c);
        std::vector<uint32_t> scores;
        const uint32_t base = static_cast<uint32_t>(random.Next() >> 33) + 1u;
        for (int64_t i = 0; i < c.heads() * pages; ++i) {
          const auto drawn = static_cast<uint32_t>(random.Next() >> 32);
          scores.push_back(kind == 0   ? std::max(drawn, 1u)
                           : kind == 1 ? base + drawn % 7
                           : kind == 2 ? base
                           : kind == 3 ? (drawn % 50 == 0 ? ~0u : base + drawn % 4096)
                                       : 1u + (drawn >> drawn % 32));
        }
        CHECK_CUDA(cudaMemcpy(runner.params.scores, scores.data(), 4 * scores.size(), cudaMemcpyHostToDevice));
        runner.Choose();
        runner.Compare(
            [&](int64_t head, int64_t page) {
              return static_cast<double>(scores[static_cast<size_t>(head * pages + page)]);
            },
            where);
        CountCases(1);
      }
    }
  }
}

}  // namespace
}  // namespace stof::test
