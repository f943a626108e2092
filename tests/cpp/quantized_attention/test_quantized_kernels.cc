// SPDX-License-Identifier: Apache-2.0
// The kernels of quantized attention in every instruction set, against integers and fp64: codes of all signs, zero
// points at the ends, sizes around tiles, masks, padding, biases and fully masked rows.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/quantized_attention/quantized_reference.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test {
namespace {

struct Drawn {
  QuantizedAttentionArgs args;
  std::vector<uint8_t> query, key, value, pad;
  std::vector<float> bias, output;
  std::string mask;
};

Quantization DrawQuantization(Random* random, float scale) {
  Quantization q;
  q.scale = scale;
  q.is_signed = random->OneIn(2);
  const int unsigned_code = static_cast<int>(random->Pick<int64_t>({0, 255, 128, random->Range(0, 255)}));
  q.zero_point = unsigned_code + q.least();
  return q;
}

TensorView DrawCodes(Random* random, int64_t B, int64_t heads, int64_t rows, int64_t size,
                     std::vector<uint8_t>* codes) {
  // Nothing behind the last element: sanitizers see what reads beyond.
  codes->resize(static_cast<size_t>(B * heads * rows * size));
  for (uint8_t& code : *codes) code = static_cast<uint8_t>(random->Next());
  TensorView view;
  view.data = codes->data();
  const bool is_bhsd = random->OneIn(2);
  view.stride =
      is_bhsd ? Strides{heads * rows * size, rows * size, size} : Strides{heads * rows * size, size, heads * size};
  return view;
}

// Roundings whose steps are about a 200th of the scores.
void DrawRoundings(Random* random, QuantizedAttentionArgs* args) {
  const float unit = args->query.scale * args->key.scale;
  const auto size = static_cast<float>(args->attention.shape.D);
  const float products = unit * 6000.0f * std::sqrt(size) * (1.0f + random->Unit() / 4.0f);
  const auto draw = [&](float step) {
    Quantization q;
    q.scale = step;
    q.is_signed = random->OneIn(2);
    q.zero_point = static_cast<int>(random->Range(100, 150)) + q.least();
    return q;
  };
  if (random->OneIn(2)) args->score = draw(products / 100.0f);
  if (random->OneIn(3)) args->scaled_score = draw(products * args->attention.scores.scale / 93.0f);
  if (random->OneIn(3)) args->biased_score = draw(products * args->attention.scores.scale / 87.0f);
}

std::unique_ptr<Drawn> Draw(Random* random) {
  auto drawn = std::make_unique<Drawn>();
  QuantizedAttentionArgs& args = drawn->args;
  AttentionShape& shape = args.attention.shape;
  const std::vector<int64_t> lengths = {1, 5, 12, 13, 47, 48, 49, 63, 64, 65, 96, 127, 128, 130};
  const std::vector<int64_t> sizes = {1, 3, 4, 8, 16, 17, 32, 63, 64, 65, 80, 129};
  shape.B = random->Range(1, 2);
  shape.G = random->Range(1, 2);
  shape.H = shape.G * random->Range(1, 2);
  shape.S = random->Pick(lengths);
  shape.T = random->OneIn(40) ? 0 : random->Pick(lengths);
  shape.D = random->Pick(sizes);
  shape.Dv = random->Pick(sizes);
  shape.dtype = DType::kF32;
  args.attention.query = DrawCodes(random, shape.B, shape.H, shape.S, shape.D, &drawn->query);
  args.attention.key = DrawCodes(random, shape.B, shape.G, shape.T, shape.D, &drawn->key);
  args.attention.value = DrawCodes(random, shape.B, shape.G, shape.T, shape.Dv, &drawn->value);
  // Scores of a few units, so that weights are of all sizes.
  const float scale = 1e-2f / std::sqrt(static_cast<float>(shape.D));
  args.query = DrawQuantization(random, 0.04f * (1.5f + random->Unit()));
  args.key = DrawQuantization(random, 0.05f * (1.5f + random->Unit()));
  args.value = DrawQuantization(random, 0.03f);
  args.attention.scores.scale = random->OneIn(3) ? 1.0f : 10.0f * scale;
  DrawRoundings(random, &args);
  args.has_dynamic_weights = random->OneIn(4);
  args.weight = DrawQuantization(random, random->Pick<float>({1.0f / 255.0f, 1.0f / 1024.0f, 0.03f}));
  if (random->OneIn(2)) args.weight.zero_point = args.weight.least();
  const std::vector<std::string> masks = {
      "", "k <= q", "abs(q - k) <= 9", "k % 3 == 0 and q > 4", "h == 0 and k < 70", "b == 1 or k > q", "q < 0"};
  drawn->mask = random->Pick(masks);
  args.attention.mask.empty_rows = static_cast<EmptyRows>(random->Pick<int64_t>({0, 0, 1, 2, 3}));
  if (random->OneIn(2)) {
    const int64_t kind = random->Range(0, 2);  // left, right, any
    for (int64_t b = 0; b < shape.B; ++b) {
      const int64_t end = random->Range(0, shape.T);
      for (int64_t k = 0; k < shape.T; ++k) {
        drawn->pad.push_back(kind == 0 ? k >= end : kind == 1 ? k < end : random->OneIn(2));
      }
    }
    args.attention.mask.pad = drawn->pad.data();
    if (shape.T == 0) args.attention.mask.pad = nullptr;
  }
  if (random->OneIn(3)) {
    PairBias& bias = args.attention.scores.bias;
    const bool has_keys = !random->OneIn(3);
    drawn->bias.resize(static_cast<size_t>(shape.S * std::max<int64_t>(shape.T, 1)) + 1);
    for (float& x : drawn->bias) {
      x = 3.0f * random->Unit();
      if (random->OneIn(9)) x = -std::numeric_limits<float>::infinity();
      if (random->OneIn(999)) x = std::numeric_limits<float>::quiet_NaN();
    }
    // NaN has no code.
    for (float& x : drawn->bias) x = args.biased_score.given() && std::isnan(x) ? 1.0f : x;
    bias.data = drawn->bias.data();
    bias.dtype = DType::kF32;
    bias.stride_q = has_keys ? shape.T : 1;
    bias.stride_k = has_keys ? 1 : 0;
  }
  drawn->output.assign(static_cast<size_t>(shape.B * shape.H * shape.S * shape.Dv), -77.0f);
  args.attention.output.data = drawn->output.data();
  args.attention.output.stride = {shape.H * shape.S * shape.Dv, shape.S * shape.Dv, shape.Dv};
  return drawn;
}

std::string Describe(const Drawn& drawn) {
  const QuantizedAttentionArgs& a = drawn.args;
  const AttentionShape& s = a.attention.shape;
  return Text("B ", s.B, " H ", s.H, " G ", s.G, " S ", s.S, " T ", s.T, " D ", s.D, " Dv ", s.Dv, ", mask '",
              drawn.mask, "', pad ", a.attention.mask.pad != nullptr, ", bias ",
              a.attention.scores.bias.data != nullptr, ", roundings ", a.score.given(), a.scaled_score.given(),
              a.biased_score.given(), ", dynamic ", a.has_dynamic_weights, ", empty rows ",
              static_cast<int>(a.attention.mask.empty_rows));
}

void RunKernel(CpuIsa isa, int threads, Drawn* drawn) {
  QuantizedAttentionArgs& args = drawn->args;
  const AttentionShape& shape = args.attention.shape;
  CpuQuantizedAttentionConfig config = ChooseCpuQuantizedAttention(args);
  config.isa = isa;
  BlockMask blocks;
  const bool has_mask = !drawn->mask.empty() && shape.T > 0;
  if (has_mask) {
    blocks = BuiltMask(drawn->mask, {shape.B, shape.H, shape.S, shape.T, 0}, config.m, config.n);
    args.attention.mask.fixed = StaticMask::OfBlocks(&blocks);
  }
  const size_t bytes = CpuQuantizedAttentionWorkspace(args, config, threads);
  Memory memory;
  ThreadPool pool(threads);
  const Status status = CpuQuantizedAttention(args, config, Memory::Allocate(&memory, bytes), pool.view());
  args.attention.mask.fixed = StaticMask();
  CHECK(status.ok(), status.message());
}

IsAllowed AllowedPairs(const Drawn& drawn) {
  const auto in_mask = [&drawn](int64_t b, int64_t h, int64_t q, int64_t k) {
    const std::string& mask = drawn.mask;
    if (mask == "k <= q") return k <= q;
    if (mask == "abs(q - k) <= 9") return std::abs(q - k) <= 9;
    if (mask == "k % 3 == 0 and q > 4") return k % 3 == 0 && q > 4;
    if (mask == "h == 0 and k < 70") return h == 0 && k < 70;
    if (mask == "b == 1 or k > q") return b == 1 || k > q;
    return mask != "q < 0";
  };
  return [&drawn, in_mask](int64_t b, int64_t h, int64_t q, int64_t k) {
    const uint8_t* const pad = drawn.args.attention.mask.pad;
    return in_mask(b, h, q, k) && (pad == nullptr || pad[b * drawn.args.attention.shape.T + k] != 0);
  };
}

TEST(QuantizedAttentionAgainstIntegersAndFp64) {
  const int cases = Cases(400);
  int64_t ties = 0, weights = 0;
  for (int seed = 0; seed < cases; ++seed) {
    Random random(static_cast<uint64_t>(seed));
    const std::unique_ptr<Drawn> drawn = Draw(&random);
    const QuantizedReference expected = ComputeQuantizedAttention(drawn->args, AllowedPairs(*drawn));
    ties += expected.ties;
    weights += expected.weights;
    for (const CpuIsa isa : IsasOfThisMachine()) {
      RunKernel(isa, static_cast<int>(random.Range(1, 3)), drawn.get());
      for (size_t i = 0; i < expected.output.size(); ++i) {
        const auto found = static_cast<double>(drawn->output[i]);
        const bool is_right = std::isnan(expected.output[i])
                                  ? std::isnan(found)
                                  : std::fabs(found - expected.output[i]) <= expected.tolerance[i];
        CHECK(is_right, "seed ", seed, Describe(*drawn), ", ", CpuIsaName(isa), ", output ", i, " is ", found,
              ", expected ", expected.output[i], " within ", expected.tolerance[i]);
      }
    }
  }
  CHECK(ties * 200 < weights, ties, " of ", weights, " weights are near a tie: the test compares little");
  CountCases(cases);
}

// Where scores are kept as codes, all sums up to the outputs are integers.
TEST(QuantizedAttentionGivesTheSameBitsByEverySet) {
  const int cases = Cases(200);
  int64_t compared = 0;
  for (int seed = 2000; seed < 2000 + cases; ++seed) {
    Random random(static_cast<uint64_t>(seed));
    const std::unique_ptr<Drawn> drawn = Draw(&random);
    const QuantizedAttentionArgs& args = drawn->args;
    const bool has_rounding = args.score.given() || args.scaled_score.given() || args.biased_score.given();
    if (!has_rounding || args.attention.scores.bias.data != nullptr || drawn->output.empty()) continue;
    std::vector<float> first;
    for (const CpuIsa isa : IsasOfThisMachine()) {
      RunKernel(isa, 1, drawn.get());
      if (first.empty()) first = drawn->output;
      CHECK(std::memcmp(first.data(), drawn->output.data(), 4 * first.size()) == 0, "seed ", seed, Describe(*drawn),
            ", ", CpuIsaName(isa));
      ++compared;
    }
  }
  CHECK(compared > cases / 4, compared, " of ", cases, ": the test compares little");
  CountCases(compared);
}

// The sums of weights and values go beyond 32 bits.
TEST(QuantizedAttentionOverManyKeys) {
  Drawn drawn;
  QuantizedAttentionArgs& args = drawn.args;
  args.attention.shape = {1, 1, 1, 2, 70001, 4, 5, DType::kF32};
  const AttentionShape& shape = args.attention.shape;
  Random random(7);
  args.attention.query = DrawCodes(&random, 1, 1, shape.S, shape.D, &drawn.query);
  args.attention.key = DrawCodes(&random, 1, 1, shape.T, shape.D, &drawn.key);
  args.attention.value = DrawCodes(&random, 1, 1, shape.T, shape.Dv, &drawn.value);
  drawn.value.assign(drawn.value.size(), 255);
  args.attention.value.data = drawn.value.data();
  for (Quantization* q : {&args.query, &args.key, &args.value}) *q = Quantization{0.001f, 0, false};
  args.weight = Quantization{1e-9f, 0, false};  // all weights saturate
  args.score = Quantization{0.01f, 0, false};
  drawn.output.assign(static_cast<size_t>(shape.S * shape.Dv), 0.0f);
  args.attention.output.data = drawn.output.data();
  args.attention.output.stride = {shape.S * shape.Dv, shape.S * shape.Dv, shape.Dv};
  const double expected = 255.0 * 255.0 * 70001.0 * static_cast<double>(1e-9f) * static_cast<double>(0.001f);
  CHECK(255.0 * 255.0 * 70001.0 > 2147483647.0);
  for (const CpuIsa isa : IsasOfThisMachine()) {
    RunKernel(isa, 2, &drawn);
    for (const float found : drawn.output) {
      CHECK(std::fabs(static_cast<double>(found) - expected) < 1e-6 * expected, CpuIsaName(isa), ": ", found);
    }
  }
  CountCases(static_cast<int64_t>(IsasOfThisMachine().size()));
}

// So many equal exponentials are more than 32 bits of a lane hold.
ONE_THREAD_TEST(QuantizedAttentionAddsManyExponentials) {
  Drawn drawn;
  QuantizedAttentionArgs& args = drawn.args;
  args.attention.shape = {1, 1, 1, 1, 2200000, 1, 1, DType::kF32};
  const AttentionShape& shape = args.attention.shape;
  Random random(8);
  args.attention.query = DrawCodes(&random, 1, 1, 1, 1, &drawn.query);
  args.attention.key = DrawCodes(&random, 1, 1, shape.T, 1, &drawn.key);
  args.attention.value = DrawCodes(&random, 1, 1, shape.T, 1, &drawn.value);
  drawn.key.assign(drawn.key.size(), 7);
  drawn.value.assign(drawn.value.size(), 200);
  for (Quantization* q : {&args.query, &args.key, &args.value}) *q = Quantization{0.01f, 0, false};
  args.weight = Quantization{1.0f / (100.0f * 2200000.0f), 0, false};  // each weight has code 100
  args.score = Quantization{0.01f, 0, false};
  drawn.output.assign(1, 0.0f);
  args.attention.output.data = drawn.output.data();
  args.attention.output.stride = {1, 1, 1};
  for (const CpuIsa isa : IsasOfThisMachine()) {
    RunKernel(isa, 1, &drawn);
    CHECK(std::fabs(drawn.output[0] - 2.0f) < 1e-5f, CpuIsaName(isa), ": ", drawn.output[0]);
  }
  CountCases(static_cast<int64_t>(IsasOfThisMachine().size()));
}

// Sums of 16 bits take weights whose codes add up to 255 over half of a tile, and values of -128.
TEST(QuantizedAttentionOfTheLargestSums) {
  int64_t count = 0;
  for (const int64_t T : {64, 65, 200, 640}) {
    for (const int code : {1, 3, 4, 7, 8, 9, 127, 128, 255}) {
      for (const int value : {-128, 127}) {
        Drawn drawn;
        QuantizedAttentionArgs& args = drawn.args;
        args.attention.shape = {1, 1, 1, 13, T, 2, 17, DType::kF32};
        const AttentionShape& shape = args.attention.shape;
        Random random(8);
        args.attention.query = DrawCodes(&random, 1, 1, shape.S, shape.D, &drawn.query);
        args.attention.key = DrawCodes(&random, 1, 1, shape.T, shape.D, &drawn.key);
        args.attention.value = DrawCodes(&random, 1, 1, shape.T, shape.Dv, &drawn.value);
        drawn.key.assign(drawn.key.size(), 7);
        drawn.value.assign(drawn.value.size(), static_cast<uint8_t>(value));
        for (Quantization* q : {&args.query, &args.key, &args.value}) *q = Quantization{0.01f, 0, true};
        args.weight = Quantization{1.0f / static_cast<float>(code * T), 0, false};  // each weight has this code
        args.score = Quantization{0.01f, 0, false};
        drawn.output.assign(static_cast<size_t>(shape.S * shape.Dv), 0.0f);
        args.attention.output.data = drawn.output.data();
        args.attention.output.stride = {shape.S * shape.Dv, shape.S * shape.Dv, shape.Dv};
        for (const CpuIsa isa : IsasOfThisMachine()) {
          RunKernel(isa, 1, &drawn);
          for (const float found : drawn.output) {
            CHECK(std::fabs(found - 0.01f * static_cast<float>(value)) < 1e-5f, CpuIsaName(isa), ": ", found, ", T ", T,
                  ", code ", code, ", value ", value);
          }
          ++count;
        }
      }
    }
  }
  CountCases(count);
}

// Kernels have a bit for each row of a tile in one word.
TEST(QuantizedAttentionRefusesTilesOfOtherSizes) {
  Random random(9);
  const std::unique_ptr<Drawn> drawn = Draw(&random);
  CpuQuantizedAttentionConfig config = ChooseCpuQuantizedAttention(drawn->args);
  for (const int rows : {0, 11, 60, 72, 120}) {
    config.m = rows;
    const Status status = CpuQuantizedAttention(drawn->args, config, nullptr, Parallel{});
    CHECK(status.message().find("no kernel for tiles of " + std::to_string(rows)) != std::string::npos, rows, ": ",
          status.message());
  }
  CountCases(5);
}

TEST(QuantizedAttentionDoesNotDependOnThreads) {
  const int cases = Cases(20);
  for (int seed = 1000; seed < 1000 + cases; ++seed) {
    Random random(static_cast<uint64_t>(seed));
    const std::unique_ptr<Drawn> drawn = Draw(&random);
    RunKernel(BestCpuIsa(), 1, drawn.get());
    const std::vector<float> one = drawn->output;
    RunKernel(BestCpuIsa(), 4, drawn.get());
    CHECK(one.empty() || std::memcmp(one.data(), drawn->output.data(), 4 * one.size()) == 0, "seed ", seed);
  }
  CountCases(cases);
}

}  // namespace
}  // namespace stof::test
