// SPDX-License-Identifier: Apache-2.0
// The sparse MLP on tensor cores: aligned weights of fp16 and bf16, and two or more tokens.
#include <string>
#include <vector>

#include "tests/cpp/activation.h"
#include "tests/cpp/sparse_mlp/device_mlp.h"

namespace stof::test::sparse_mlp {
namespace {

// Two to 16 tokens.
TEST(CudaSparseMlpTiles) {
  Failures failures("tiles");
  Device device;
  Random random(5);
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int64_t T : {2, 7, 8, 9, 16}) {
      for (const int64_t K : {8, 64, 72, 520, 1032, 2056}) {
        for (int selection = 0; selection < 3; ++selection) {
          Case c;
          c.T = T, c.K = K, c.dtype = dtype, c.selection = static_cast<SparseMlpSelection>(selection);
          c.activation = static_cast<Activation>(random.Range(0, kActivations - 1));
          c.F = random.Pick<int64_t>({1, 15, 40, 333, 2500}), c.N = random.Pick<int64_t>({8, 64, 248, 264, 776});
          c.R = random.Pick<int64_t>({8, 32, 40, 264, 1040});
          c.density = random.Pick<double>({0.01, 0.1, 0.5, 1});
          c.has_up = random.Next() % 4 != 0, c.has_biases = random.OneIn(2), c.has_thresholds = random.OneIn(2);
          c.has_quantized_predictor = random.OneIn(2), c.has_predictor_relu = c.has_predictor() && seed % 4 == 2;
          if (IsSampled(seed++)) RunCase(c, seed, 0, &device, &failures);
        }
      }
    }
  }
  failures.Report();
}

// Hidden values beyond the range of fp16.
TEST(CudaSparseMlpLargeHiddenValues) {
  Failures failures("large hidden values");
  Device device;
  const auto scale = [](Values* values, double by) {
    for (size_t i = 0; i < values->values.size(); ++i) {
      StoreFloat(DType::kF16, values->values[i] * by, values->bytes.data() + 2 * i);
      values->values[i] = LoadFloat(DType::kF16, values->bytes.data() + 2 * i);
    }
  };
  for (const int64_t T : {1, 5, 16}) {
    Case c;
    c.T = T, c.K = 64, c.F = 200, c.N = 136, c.dtype = DType::kF16;
    Problem problem(c, 9);
    scale(&problem.gate, 0x1p15), scale(&problem.down_weight, 0x1p-12);
    const std::string where = Describe(c);
    CheckOutput(&problem, device.Run(device.Upload(&problem), where, &failures), where, &failures);
    CountCases(1);
  }
  failures.Report();
}

// More than 16 tokens: GEMMs, with the masks of a predictor.
TEST(CudaSparseMlpManyTokens) {
  Failures failures("many tokens");
  Device device;
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int64_t T : {17, 33, 64, 65, 150}) {
      for (const int64_t R : {0, 8, 264, 520}) {
        for (const bool is_quantized : {false, true}) {
          Case c;
          c.T = T, c.K = seed % 2 == 0 ? 64 : 584, c.F = seed % 3 == 0 ? 160 : 75, c.N = 40, c.R = R, c.dtype = dtype;
          c.selection = SparseMlpSelection::kPredictor, c.density = 0.3;
          c.has_quantized_predictor = is_quantized, c.has_thresholds = seed % 5 == 0;
          if (IsSampled(seed++)) RunCase(c, seed, 0, &device, &failures);
        }
      }
    }
  }
  // Several tiles of tokens, rows of factors and neurons; splits of K; sizes that are multiples of nothing, and
  // addresses without alignment.
  const auto of = [&seed](const std::vector<int64_t>& values) { return values[seed % values.size()]; };
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int64_t T : {63, 128, 129, 300}) {
      for (const int64_t K : {61, 520, 2056}) {
        for (const int64_t R : {1, 13, 127, 136, 300}) {
          for (const bool is_quantized : {false, true}) {
            Case c;
            c.T = T, c.K = K, c.F = of({129, 260, K > 500 ? 300 : 1000}), c.N = of({24, 33}), c.R = R, c.dtype = dtype;
            c.selection = SparseMlpSelection::kPredictor, c.density = 0.2, c.has_quantized_predictor = is_quantized;
            c.activation = static_cast<Activation>(seed / 2 % kActivations);
            // Squares as hidden values would exceed the range of fp16.
            if (K > 1000 && IsQuadratic(c.activation)) c.activation = Activation::kGelu;
            c.has_up = seed % 11 != 4, c.has_biases = seed % 3 == 1, c.has_predictor_relu = seed % 4 == 1;
            c.has_thresholds = seed % 7 == 0, c.bits = seed % 8 == 3 ? 4 : 0;
            const size_t shift = seed % 9 == 4 ? static_cast<size_t>(SizeOf(dtype)) : 0;
            if (IsSampled(seed++)) RunCase(c, seed, shift, &device, &failures);
          }
        }
      }
    }
  }
  for (const int64_t T : {4096, 4097}) {  // more than these run one part after the other
    Case c;
    c.T = T, c.K = 16, c.F = 40, c.N = 16, c.R = 9, c.dtype = DType::kF16, c.has_biases = true;
    c.selection = SparseMlpSelection::kPredictor;
    RunCase(c, seed++, 0, &device, &failures);
  }
  failures.Report();
}

}  // namespace
}  // namespace stof::test::sparse_mlp
