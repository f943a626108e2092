// SPDX-License-Identifier: Apache-2.0
// Random sparse MLPs, and their definition in docs/reference/sparse-mlp.md, in double precision. For the kernels of all
// devices.
#ifndef STOF_TESTS_CPP_SPARSE_MLP_MLP_PROBLEM_H_
#define STOF_TESTS_CPP_SPARSE_MLP_MLP_PROBLEM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "plugins/core/contract/sparse_mlp.h"
#include "tests/cpp/check.h"

namespace stof::test::sparse_mlp {

struct Case {
  int64_t T = 1, K = 40, F = 70, N = 30, R = 9;
  double density = 0.2;
  DType dtype = DType::kF32;
  Activation activation = Activation::kRelu;
  SparseMlpSelection selection = SparseMlpSelection::kNonzero;
  bool has_up = true, has_biases = false, has_thresholds = false;  // a threshold for each neuron
  int bits = 0;
  int64_t block = 32;
  bool has_zero_points = false;
  int accuracy_level = 0;
  bool has_quantized_predictor = false;
  bool has_predictor_relu = false;  // between the factors of a predictor

  bool has_predictor() const { return selection == SparseMlpSelection::kPredictor; }
};

std::string Describe(const Case& c);
double UnitRoundoff(DType dtype);

// Numbers in a buffer of their own size, so that a sanitizer sees every access beyond, and what they mean.
struct Values {
  std::vector<char> bytes;
  std::vector<double> values;
  void* data() {
    bytes.reserve(1);  // tensors without elements have an address, too
    return bytes.data();
  }
};

struct Problem {
  Problem(const Case& c, uint64_t seed);
  SparseMlpArgs Args(void* output);
  // The output, and how far a correct kernel may be from it.
  // unit: the unit roundoff of matmuls, hidden values and dequantized weights, where a kernel rounds them; 0: in fp32.
  void Expect(std::vector<double>* output, std::vector<double>* tolerance, double unit = 0) const;

  Case c;
  // CpuMlpLeastBf16Tokens: the fewest tokens of a block whose tokens and hidden values are rounded; 0: none. The
  // predictor reads tokens that are not.
  int64_t least_bf16_tokens = 0;
  bool is_rounded[3] = {true, true, true};  // the gate, up and down weight; false: nor is what multiplies it
  Values input, gate, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias, predictor_down, predictor_up;
  Values gate_scales, up_scales, down_scales, gate_zeros, up_zeros, down_zeros, predictor_down_scales,
      predictor_up_scales;
  std::vector<float> threshold;

 private:
  Values Draw(int64_t count, double scale);
  void DrawRows(int64_t size, Values* weight, Values* scales, Values* zeros);
  void DrawDown();
  void DrawFactor(int64_t rows, int64_t size, Values* factor, Values* scales);
  void DrawGate();
  void DrawThresholds();
  std::vector<double> Scores() const;  // [T, F] of the predictor
  bool RoundsToken(int64_t t) const;

  Random random_;
};

std::vector<Case> DrawCases(int count);

}  // namespace stof::test::sparse_mlp
#endif  // STOF_TESTS_CPP_SPARSE_MLP_MLP_PROBLEM_H_
