// SPDX-License-Identifier: Apache-2.0
// The relative terms of a tile of scores as the sm80 kernels compute them, by the code of the device on an emulated
// warp: expanded tables, fragments, matmuls and skew.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "cuda/attention/relative/expand.cuh"
#include "cuda/attention/relative/layout.h"
#include "cuda/attention/relative/mma_products.cuh"
#include "plugins/core/ops/attention_relative.h"
#include "tests/cpp/check.h"
#include "tests/cpp/emulated_warp/bf16_words.h"

namespace stof::test {
namespace {

using cuda::EmulatedBf16;

constexpr int kHead = 64, kPairs = kHead / 32;

// A problem of S queries and T keys; its table has a row for each expanded row.
struct Problem {
  int S, T;
  std::vector<float> query, key, rows, row_bias;  // [padded S, kHead], [padded T, kHead], [expanded, kHead], [expanded]
  std::vector<uint16_t> fragments, left_fragments;

  Problem(int queries, int keys, Random* random) : S(queries), T(keys) {
    const int64_t expanded = cuda::ExpandedRows(S, T);
    query = DrawIntegers(random, int64_t{cuda::PaddedQueries(S)} * kHead);
    key = DrawIntegers(random, int64_t{cuda::PaddedKeys(T)} * kHead);
    rows = DrawIntegers(random, expanded * kHead);
    row_bias = DrawIntegers(random, expanded);
    fragments.resize(static_cast<size_t>(expanded * kHead));
    left_fragments.resize(fragments.size());
    for (int64_t at = 0; at < expanded * kHead; ++at) {
      const int lane = static_cast<int>(at / 8 % 32), i = static_cast<int>(at % 8);
      const auto block = static_cast<int>(at / 256 / kPairs), pair = static_cast<int>(at / 256 % kPairs);
      const auto element = [&](int row, int d) { return ToBf16(rows[static_cast<size_t>(row * kHead + d)]); };
      fragments[static_cast<size_t>(at)] =
          element(8 * block + cuda::FragmentRow(lane), 32 * pair + cuda::FragmentColumn(lane, i));
      const int step = block % 2 * kPairs + pair;
      left_fragments[static_cast<size_t>(at)] =
          element(block / 2 * 16 + cuda::LeftFragmentRow(lane, i), 16 * step + cuda::LeftFragmentColumn(lane, i));
    }
  }
  float Dot(const std::vector<float>& x, int of, int64_t row, bool has_row_bias) const {
    float sum = has_row_bias ? row_bias[static_cast<size_t>(row)] : 0.0f;
    for (int d = 0; d < kHead; ++d) {
      sum += x[static_cast<size_t>(of * kHead + d)] * rows[static_cast<size_t>(row * kHead + d)];
    }
    return sum;
  }
};

// The ring of a CTA of kRows queries behind the tile of keys in front of `key`, after the copies for that of `key`.
// first_row: of the CTA.
template <int kRows>
std::vector<unsigned char> FillRing(const Problem& problem, const std::vector<uint16_t>& fragments, int first_row,
                                    int key) {
  constexpr int kRing = kRows + 64, kPairBytes = 2 * 16 * kHead;
  std::vector<unsigned char> ring(static_cast<size_t>(2 * kRing * kHead), 0xff);
  const auto copy = [&](int from, int to) {
    for (int row = from; row < to; row += 16) {
      std::memcpy(&ring[cuda::RingPair<kRing / 16>(row) * kPairBytes], &fragments[static_cast<size_t>(row * kHead)],
                  kPairBytes);
    }
  };
  const int first = cuda::BandBegin(first_row + kRows - 16, key, problem.S);
  if (key >= 64) copy(first - 64, first - 64 + kRing);
  copy(key >= 64 ? first + kRows : first, first + kRing);
  return ring;
}

// Adds a term to the scores of 16 kBlocks queries from `row` on and 64 keys from `key` on, and compares all of them.
// make_rows(first, lane) gives the window of a lane.
template <int kBlocks, typename MakeRows>
void CheckTileOf(const MakeRows& make_rows, const Problem& problem, int row, int key, bool of_keys, bool has_row_bias) {
  cuda::AttentionParams p;
  p.B = p.H = p.G = 1, p.S = problem.S, p.T = problem.T;
  cuda::BandTerm term;
  if (has_row_bias) term.row_bias = problem.row_bias.data();
  std::atomic<int> blocks_of_keys{0};
  std::vector<float> got(static_cast<size_t>(16 * kBlocks * 64));
  emulated::Warp::Run([&](int lane) {
    const cuda::RelativeScores<kBlocks> scores(p, 0, 0, row, key, lane);
    const int first = scores.First(), g = lane / 4, t = lane % 4;
    const auto rows = make_rows(first, lane);
    const auto pair = [](const std::vector<float>& x, int of, int d) {
      return Word(x[static_cast<size_t>(of * kHead + d)], x[static_cast<size_t>(of * kHead + d + 1)]);
    };
    float s[kBlocks][8][4];
    for (auto& block : s) {
      for (auto& column_block : block) {
        for (float& x : column_block) x = 1000.0f;  // terms are added
      }
    }
    if (of_keys) {
      const auto read_keys = [&](int k, int j, uint32_t (&b)[4]) {
        for (int n = 0; n < 2; ++n) {
          for (int half = 0; half < 2; ++half) {
            b[2 * n + half] = pair(problem.key, key + 8 * (j + n) + g, 16 * k + 8 * half + 2 * t);
          }
        }
      };
      // Each fragment of keys comes once.
      const auto with_keys = [&](int k, int j, const uint32_t (&b)[4]) {
        uint32_t want[4];
        read_keys(k, j, want);
        if (std::equal(b, b + 4, want)) blocks_of_keys += 1 << (j / 2 * 4 + k) % 16;
      };
      scores.AddKeyBand(
          [&](int j, float (&z)[kBlocks + 1][2][4]) {
            cuda::MultiplyKeys<EmulatedBf16, kHead, kBlocks>(rows, j, read_keys, with_keys, z);
          },
          s);
    } else {
      const auto read_queries = [&](int k, uint32_t (&q)[kBlocks][4]) {
        for (int i = 0; i < kBlocks; ++i) {
          for (int word = 0; word < 4; ++word) {
            q[i][word] = pair(problem.query, row + 16 * i + g + word % 2 * 8, 16 * k + word / 2 * 8 + 2 * t);
          }
        }
      };
      scores.AddQueryBand(
          [&](int u, float (&x)[kBlocks][2][4]) {
            cuda::MultiplyQueries<EmulatedBf16, kHead, kBlocks>(rows, u, read_queries, x);
          },
          s);
    }
    if (has_row_bias) scores.AddRowBias(cuda::WindowRowBias(term, 0, first), s);
    for (int i = 0; i < kBlocks; ++i) {
      for (int j = 0; j < 8; ++j) {
        for (int e = 0; e < 4; ++e) {
          got[static_cast<size_t>((16 * i + g + e / 2 * 8) * 64 + 8 * j + 2 * t + e % 2)] = s[i][j][e];
        }
      }
    }
  });
  CHECK(blocks_of_keys == (of_keys ? 32 * 0xffff : 0));
  for (int r = 0; r < 16 * kBlocks; ++r) {
    for (int c = 0; c < 64; ++c) {
      const int64_t expanded = cuda::ExpandedRow(row + r, key + c, problem.S);
      const float term_of_pair =
          problem.Dot(of_keys ? problem.key : problem.query, of_keys ? key + c : row + r, expanded, has_row_bias);
      CHECK(got[static_cast<size_t>(r * 64 + c)] == 1000.0f + term_of_pair, "query ", row + r, ", key ", key + c,
            of_keys ? ", of keys: " : ", of queries: ", got[static_cast<size_t>(r * 64 + c)], ", expected ",
            1000.0f + term_of_pair);
    }
  }
}

template <int kBlocks>
void CheckTile(const Problem& problem, int row, int key, bool of_keys, bool has_row_bias) {
  const std::vector<uint16_t>& fragments = of_keys ? problem.left_fragments : problem.fragments;
  cuda::BandTerm term;
  term.rows = fragments.data();
  const auto in_memory = [&term](int first, int lane) {
    return cuda::GlobalWindow<kHead>(cuda::WindowRows<kPairs>(term, 0, first, lane));
  };
  CheckTileOf<kBlocks>(in_memory, problem, row, key, of_keys, has_row_bias);
  constexpr int kRows = 64 * kBlocks;
  constexpr uint32_t kRing = 32;  // its address
  std::vector<unsigned char> shared = FillRing<kRows>(problem, fragments, row / kRows * kRows, key);
  shared.insert(shared.begin(), kRing, 0xff);
  emulated::SharedMemory() = shared.data();
  const auto in_ring = [](int first, int lane) {
    return cuda::RingWindow<kHead, (kRows + 64) / 16>(kRing, first, lane);
  };
  CheckTileOf<kBlocks>(in_ring, problem, row, key, of_keys, has_row_bias);
}

TEST(RelativeBandsOfTiles) {
  Random random(55);
  for (const int S : {1, 64, 130}) {
    const Problem problem(S, S == 64 ? 65 : 200, &random);
    // The first and the last band of all, and one between.
    const int last_row = cuda::PaddedQueries(S), last_key = cuda::PaddedKeys(problem.T) - 64;
    for (const bool of_keys : {false, true}) {
      for (const bool has_row_bias : {false, true}) {
        CheckTile<1>(problem, 0, last_key, of_keys, has_row_bias);
        CheckTile<1>(problem, last_row - 16, 0, of_keys, has_row_bias);
        CheckTile<1>(problem, 48, 64, of_keys, has_row_bias);
        CheckTile<2>(problem, 0, last_key, of_keys, has_row_bias);
        CheckTile<2>(problem, last_row - 32, 0, of_keys, has_row_bias);
        CheckTile<2>(problem, 32, 0, of_keys, has_row_bias);
      }
    }
  }
}

TEST(ExpandedRowsHoldAllBands) {
  for (int S = 1; S <= 400; ++S) {
    for (const int T : {1, 63, 64, 65, 127, 129, 300}) {
      const int64_t expanded = cuda::ExpandedRows(S, T);
      CHECK(expanded % 64 == 0);
      for (int row = 0; row < cuda::PaddedQueries(S); row += 16) {
        for (int key = 0; key < cuda::PaddedKeys(T); key += 64) {
          const int begin = cuda::BandBegin(row, key, S);
          CHECK(begin % 16 == 0 && begin >= 0 && begin + cuda::kBandRows <= expanded);
          CHECK(cuda::ExpandedRow(row + 15, key, S) >= begin);
          CHECK(cuda::ExpandedRow(row, key + 63, S) < begin + cuda::kBandRows);
        }
      }
    }
  }
}

// AddParts reads a product for each pair, clamped to the tensors.
TEST(ProductsByPartsOfPositions) {
  Random random(56);
  constexpr int kS = 21, kT = 70, kColumns = 32;
  cuda::AttentionParams p;
  p.B = 2, p.H = 3, p.G = 1, p.S = kS, p.T = kT;
  std::vector<int32_t> key_part, query_part;
  for (int j = 0; j < kT; ++j) key_part.push_back(13 - j / 5);
  for (int i = 0; i < kS; ++i) query_part.push_back(i % 4);
  for (int turn = 0; turn < 4; ++turn) {
    const bool of_keys = turn % 2 != 0;
    if (turn == 2) key_part.assign(kT, 11);  // one part for all keys
    const std::vector<float> products = DrawIntegers(&random, int64_t{p.B} * p.H * (of_keys ? kT : kS) * kColumns);
    cuda::PartTerm term;
    term.products = products.data(), term.columns = kColumns, term.offset = 3;
    term.key_part = key_part.data(), term.query_part = query_part.data();
    std::vector<float> got(16 * 64);
    constexpr int kRow = 16, kKey = 64;
    emulated::Warp::Run([&](int lane) {
      float s[1][8][4] = {};
      cuda::RelativeScores<1>(p, 1, 2, kRow, kKey, lane).AddParts(term, of_keys, 2.0f, s);
      for (int j = 0; j < 8; ++j) {
        for (int e = 0; e < 4; ++e) {
          got[static_cast<size_t>((lane / 4 + e / 2 * 8) * 64 + 8 * j + lane % 4 * 2 + e % 2)] = s[0][j][e];
        }
      }
    });
    for (int r = 0; r < 16 && kRow + r < kS; ++r) {
      for (int c = 0; c < 64 && kKey + c < kT; ++c) {
        const int i = kRow + r, j = kKey + c;
        const int64_t of = (1 * 3 + 2) * (of_keys ? kT : kS) + (of_keys ? j : i);
        const int at = key_part[static_cast<size_t>(j)] - query_part[static_cast<size_t>(i)] + 3;
        CHECK(got[static_cast<size_t>(r * 64 + c)] == 2.0f * products[static_cast<size_t>(of * kColumns + at)]);
      }
    }
  }
}

// From an expression to the term of a pair: rows of a run, the workspace, expansion, products and skew.
struct WholeProblem {
  AttentionArgs args;
  std::vector<float> query, key, table;  // [H, S, D], [G, T, D], [heads, rows, D or D + 1]
  std::vector<uint16_t> query_bits, key_bits, table_bits;
  std::shared_ptr<const RelativeRowArrays> rows;
  cuda::RelativeLayout layout;
  std::vector<char> workspace;
  cuda::ExpandParams expand;

  WholeProblem(const std::string& text, int64_t S, int64_t T, int64_t P, int64_t count, bool of_keys, Random* random) {
    constexpr int64_t kHeads = 4, kGroups = 2, kSize = 40;  // padded to 64
    args.shape = {1, kHeads, kGroups, S, T, kSize, kSize, DType::kBF16};
    const auto draw = [random](int64_t size, std::vector<float>* values, std::vector<uint16_t>* bits) {
      *values = DrawIntegers(random, size);
      for (const float x : *values) bits->push_back(ToBf16(x));
    };
    draw(kHeads * S * kSize, &query, &query_bits);
    draw(kGroups * T * kSize, &key, &key_bits);
    const int64_t columns = random->OneIn(2) ? kSize : kSize + 1;
    draw(kHeads * count * columns, &table, &table_bits);
    args.query = {query_bits.data(), {kHeads * S * kSize, S * kSize, kSize}};
    args.key = {key_bits.data(), {kGroups * T * kSize, T * kSize, kSize}};
    const std::vector<int32_t> entries = {0, 0, 1, 2, 2, 3, 5, 5, 6};
    Tensor buckets = TensorOfShape(DType::kI32, {9});
    buckets.data = const_cast<int32_t*>(entries.data());
    MaskExpr expr;
    CHECK(MaskExpr::ParseInteger(text, {{"table0", buckets}}, &expr).ok(), text);
    SeparatedExpr separated;
    CHECK(SeparatedExpr::Make(expr, &separated), text);
    CHECK(RelativeRowArrays::Make("relative_key", separated, {1, 1, S, T, P}, count, &rows).ok(), text);
    const int term = of_keys ? 2 : 0;
    cuda::RelativeTermOf(&args.scores, term) = {table_bits.data(), DType::kBF16,    count,
                                                columns,           count * columns, rows->view()};
    CHECK(cuda::PlanRelative(args, kHead, &layout).ok());
    workspace.assign(static_cast<size_t>(layout.bytes), static_cast<char>(0xff));
    const cuda::RelativeTermLayout& own = layout.terms[term];
    expand.table = table_bits.data();
    expand.heads = own.heads, expand.rows = static_cast<int>(count), expand.columns = static_cast<int>(columns);
    expand.stride_h = count * columns, expand.D = kSize;
    expand.row = rows->view().row, expand.first = own.first, expand.count = rows->view().count;
    expand.is_reversed = rows->view().is_reversed ? 1 : 0;
    expand.pairs = own.pairs, expand.expanded = own.expanded;
    expand.to = workspace.data() + own.rows;
    expand.is_left_operand = own.is_band && of_keys ? 1 : 0;
    CHECK(own.has_row_bias == (columns > kSize || !own.is_band));
    if (own.has_row_bias) expand.row_bias = reinterpret_cast<float*>(workspace.data() + own.row_bias);
    for (int64_t head = 0; head < own.heads; ++head) {
      for (int i = 0; i < cuda::CountFragments(expand); ++i) cuda::ExpandFragment<EmulatedBf16>(expand, head, i);
    }
  }
  // The term of a pair by the definition.
  float TermOf(int64_t h, int64_t i, int64_t j, bool of_keys) const {
    const int64_t size = args.shape.D, count = expand.rows;
    const RelativeRows& view = rows->view();
    int64_t row = view.row[view.KeyPart(j) - view.QueryPart(i) - view.low];
    if (view.is_reversed) row = count - 1 - row;
    const int64_t columns = expand.columns;
    const float* const r = &table[static_cast<size_t>((h * count + row) * columns)];
    const float* const x = of_keys ? &key[static_cast<size_t>((h / 2 * args.shape.T + j) * size)]
                                   : &query[static_cast<size_t>((h * args.shape.S + i) * size)];
    float sum = columns > size ? r[size] : 0.0f;
    for (int64_t d = 0; d < size; ++d) sum += x[d] * r[d];
    return sum;
  }
  // Two elements of a row; 0 beyond the tensor.
  uint32_t Pair(bool of_keys, int64_t h, int64_t row, int d) const {
    const int64_t size = args.shape.D, count = of_keys ? args.shape.T : args.shape.S;
    if (row >= count || d >= size) return 0;
    const std::vector<float>& x = of_keys ? key : query;
    const auto at = static_cast<size_t>(((of_keys ? h / 2 : h) * count + row) * size + d);
    return Word(x[at], x[at + 1]);
  }
};

void CheckWhole(const std::string& text, int64_t S, int64_t T, int64_t P, int64_t count, bool of_keys, Random* random) {
  const WholeProblem problem(text, S, T, P, count, of_keys, random);
  const cuda::RelativeTermLayout& own = problem.layout.terms[of_keys ? 2 : 0];
  const int64_t h = random->Range(0, 3), N = of_keys ? T : S;
  cuda::AttentionParams p;
  p.B = 1, p.H = 4, p.G = 2, p.S = static_cast<int>(S), p.T = static_cast<int>(T);
  char* const base = const_cast<char*>(problem.workspace.data());
  cuda::BandTerm band;
  band.rows = problem.expand.to, band.row_bias = problem.expand.row_bias;
  band.row_stride_h = own.row_stride_h, band.row_bias_stride_h = own.row_bias_stride_h;
  std::vector<int32_t> key_part, query_part;
  for (int64_t j = 0; j < T; ++j) key_part.push_back(static_cast<int32_t>(problem.rows->view().KeyPart(j)));
  for (int64_t i = 0; i < S; ++i) query_part.push_back(static_cast<int32_t>(problem.rows->view().QueryPart(i)));
  cuda::PartTerm part;
  part.products = reinterpret_cast<const float*>(base + own.products);
  part.key_part = key_part.data(), part.query_part = query_part.data();
  part.offset = static_cast<int>(-problem.rows->view().low), part.columns = static_cast<int>(own.expanded);
  cuda::PartProductParams multiply;
  const TensorView& x = of_keys ? problem.args.key : problem.args.query;
  multiply.x = x.data, multiply.stride = x.stride;
  multiply.B = 1, multiply.H = 4, multiply.group = of_keys ? 2 : 1;
  multiply.N = static_cast<int>(N), multiply.D = static_cast<int>(problem.args.shape.D);
  multiply.rows = problem.expand.to, multiply.row_bias = problem.expand.row_bias;
  multiply.row_stride_h = own.row_stride_h, multiply.row_bias_stride_h = own.row_bias_stride_h;
  multiply.pairs = own.pairs, multiply.columns = part.columns;
  multiply.products = reinterpret_cast<float*>(base + own.products);
  const int row0 = static_cast<int>(random->Range(0, (S - 1) / 16)) * 16;
  const int key0 = static_cast<int>(random->Range(0, (T - 1) / 64)) * 64;
  std::vector<float> got(16 * 64);
  emulated::Warp::Run([&](int lane) {
    const int g = lane / 4, t = lane % 4;
    float s[1][8][4] = {};
    const cuda::RelativeScores<1> scores(p, 0, static_cast<int>(h), row0, key0, lane);
    const cuda::GlobalWindow<kHead> rows(cuda::WindowRows<kPairs>(band, static_cast<int>(h), scores.First(), lane));
    if (!own.is_band) {
      for (int row = 0; row < N; row += 16) cuda::MultiplyPartRows<EmulatedBf16>(multiply, h, row, lane);
      emulated::Warp::Current()->lanes.Wait();
      scores.AddParts(part, of_keys, 1.0f, s);
    } else if (of_keys) {
      const auto read_keys = [&](int k, int j, uint32_t (&b)[4]) {
        for (int word = 0; word < 4; ++word) {
          b[word] = problem.Pair(true, h, key0 + 8 * (j + word / 2) + g, 16 * k + word % 2 * 8 + 2 * t);
        }
      };
      const auto nothing = [](int, int, const uint32_t (&)[4]) {};
      scores.AddKeyBand(
          [&](int j, float (&z)[2][2][4]) {
            cuda::MultiplyKeys<EmulatedBf16, kHead, 1>(rows, j, read_keys, nothing, z);
          },
          s);
    } else {
      const auto read_queries = [&](int k, uint32_t (&q)[1][4]) {
        for (int word = 0; word < 4; ++word) {
          q[0][word] = problem.Pair(false, h, row0 + g + word % 2 * 8, 16 * k + word / 2 * 8 + 2 * t);
        }
      };
      scores.AddQueryBand(
          [&](int u, float (&y)[1][2][4]) { cuda::MultiplyQueries<EmulatedBf16, kHead, 1>(rows, u, read_queries, y); },
          s);
    }
    if (own.is_band && own.has_row_bias) {
      scores.AddRowBias(cuda::WindowRowBias(band, static_cast<int>(h), scores.First()), s);
    }
    for (int j = 0; j < 8; ++j) {
      for (int e = 0; e < 4; ++e) got[static_cast<size_t>((g + e / 2 * 8) * 64 + 8 * j + 2 * t + e % 2)] = s[0][j][e];
    }
  });
  for (int64_t i = row0; i < std::min<int64_t>(S, row0 + 16); ++i) {
    for (int64_t j = key0; j < std::min<int64_t>(T, key0 + 64); ++j) {
      const float want = problem.TermOf(h, i, j, of_keys), found = got[static_cast<size_t>((i - row0) * 64 + j - key0)];
      CHECK(found == want, text, ", S ", S, ", T ", T, ", P ", P, ", query ", i, ", key ", j, ": ", found,
            ", expected ", want);
    }
  }
  CountCases(1);
}

TEST(RelativeTermsFromExpressionsToScores) {
  Random random(58);
  struct Sizes {
    int64_t S, T, P;
  };
  for (const char* text : {"k - q + S + P - 1", "q - k + T - 1", "k - q + 5", "max(-12, min(4, k - q)) + 12",
                           "table0[max(0, min(8, q - k + 4))]", "q // 7 - k // 7 + 20", "k % 5 - q % 5 + 4",
                           "abs(k - q)", "k // 3", "3", "(k - q) * 2 + 30"}) {
    for (const Sizes& sizes : {Sizes{1, 1, 0}, {17, 70, 53}, {70, 17, 0}, {130, 200, 70}}) {
      for (const bool of_keys : {false, true}) {
        CheckWhole(text, sizes.S, sizes.T, sizes.P, random.OneIn(2) ? 40 : 400, of_keys, &random);
      }
    }
  }
}

}  // namespace
}  // namespace stof::test
