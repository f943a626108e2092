// SPDX-License-Identifier: Apache-2.0
// GEMMs by constant weights: random ones, their runs, and the comparison with the definition in fp64.
#ifndef STOF_TESTS_CPP_GEMM_PACKED_GEMM_H_
#define STOF_TESTS_CPP_GEMM_PACKED_GEMM_H_

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "plugins/core/contract/gemm.h"
#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/activation.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"
#include "tests/cpp/memory.h"

namespace stof::test {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
constexpr size_t kAround = 64;  // floats before and after an output

inline std::vector<float> Drawn(int64_t count, double range, Random* random) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random->Unit() * range);
  return values;
}

struct Packed {
  int64_t M, N, K;
  bool pair = false, has_epilogue = false;
  CpuGemmEpilogue epilogue;
  std::vector<float> a, b[2], bias[2], scale, row, residual;

  Packed(int64_t m, int64_t n, int64_t k, Random* random) : M(m), N(n), K(k) {
    pair = random->OneIn(3);
    has_epilogue = !random->OneIn(4);
    a = Drawn(M * K, 1, random);
    const double range = 2 / std::sqrt(static_cast<double>(K));
    for (int i = 0; i < (pair ? 2 : 1); ++i) b[i] = Drawn(K * N, range, random);
    const auto maybe = [&](std::vector<float>* values, int64_t count, const float** at) {
      if (random->OneIn(2)) *values = Drawn(count, 1, random), *at = values->data();
    };
    epilogue.activation = static_cast<Activation>(random->Range(0, kActivations - 1));
    maybe(&bias[0], N, &epilogue.bias0);
    if (pair) maybe(&bias[1], N, &epilogue.bias1);
    maybe(&scale, N, &epilogue.scale);
    maybe(&row, M, &epilogue.row);
    maybe(&residual, M * N, &epilogue.residual);
  }
  std::string Text() const {
    return stof::test::Text(M, " x ", N, " x ", K, pair ? " pair" : "", has_epilogue ? " epilogue " : " ",
                            static_cast<int>(epilogue.activation));
  }
  int outputs() const { return pair && !has_epilogue ? 2 : 1; }
};

using Outputs = std::vector<std::vector<float>>;

inline Outputs Run(const Packed& p, const CpuPackedWeights& weights, int64_t M, int threads) {
  Outputs outputs(static_cast<size_t>(p.outputs()),
                  std::vector<float>(static_cast<size_t>(M * p.N) + 2 * kAround, kPoison));
  CpuPackedGemmArgs args;
  args.M = M;
  args.a = p.a.data();
  for (size_t i = 0; i < outputs.size(); ++i) args.output[i] = outputs[i].data() + kAround;
  if (p.has_epilogue) args.epilogue = &p.epilogue;
  ThreadPool pool(threads);
  Starved starved(pool.view());
  Memory memory;
  const size_t bytes = weights.is_bf16() ? CpuBf16GemmWorkspace(threads, M, p.K) : CpuPackedGemmWorkspace(threads);
  CpuPackedGemm(args, weights, Memory::Allocate(&memory, bytes), starved.view());
  return outputs;
}

inline double RoundedFactor(float x, bool is_bf16) { return is_bf16 ? Rounded(DType::kBF16, x) : double{x}; }

// Compares with the definition in fp64. is_bf16: whose factors are rounded to bf16.
inline void Check(const Packed& p, const Outputs& outputs, const std::string& where, bool is_bf16 = false) {
  for (int64_t m = 0; m < p.M; ++m) {
    for (int64_t n = 0; n < p.N; ++n) {
      double sum[2] = {}, error[2] = {};
      for (int i = 0; i < (p.pair ? 2 : 1); ++i) {
        double magnitude = 0;
        for (int64_t k = 0; k < p.K; ++k) {
          const double term = RoundedFactor(p.a[static_cast<size_t>(m * p.K + k)], is_bf16) *
                              RoundedFactor(p.b[i][static_cast<size_t>(k * p.N + n)], is_bf16);
          sum[i] += term, magnitude += std::fabs(term);
        }
        error[i] = 0x1p-21 * magnitude;
      }
      const auto at = [&](const float* values, int64_t i, double otherwise) {
        return values != nullptr ? double{values[i]} : otherwise;
      };
      double want[2] = {sum[0], sum[1]}, most[2] = {error[0], error[1]};
      if (p.has_epilogue) {
        const double x = sum[0] + at(p.epilogue.bias0, n, 0);
        const double u = Activate(p.epilogue.activation, x);
        if (IsQuadratic(p.epilogue.activation)) error[0] *= 2 * std::fabs(x) + 1;  // its slope
        const double v = p.pair ? sum[1] + at(p.epilogue.bias1, n, 0) : 1;
        const double by = at(p.epilogue.scale, n, 1) * at(p.epilogue.row, m, 1);
        want[0] = u * v * by + at(p.epilogue.residual, m * p.N + n, 0);
        most[0] = std::fabs(by) * (1.13 * error[0] * std::fabs(v) + std::fabs(u) * error[1] + error[0] * error[1]) +
                  2e-6 * (std::fabs(u * v * by) + std::fabs(want[0])) + 1e-6;
      }
      for (int i = 0; i < p.outputs(); ++i) {
        const double got = outputs[static_cast<size_t>(i)][kAround + static_cast<size_t>(m * p.N + n)];
        CHECK(std::fabs(got - want[i]) <= most[i], where, " element ", m, ", ", n, " is ", got, ", expected ", want[i],
              " within ", most[i]);
      }
    }
  }
  for (const std::vector<float>& output : outputs) {
    for (size_t i = 0; i < kAround; ++i) {
      CHECK(std::isnan(output[i]) && std::isnan(output[output.size() - 1 - i]), where, " wrote around its output");
    }
  }
}

inline bool Same(const std::vector<float>& x, const std::vector<float>& y, size_t count) {
  return std::memcmp(x.data() + kAround, y.data() + kAround, count * sizeof(float)) == 0;
}

// Checks the result, and that neither threads nor the number of rows change it.
inline void CheckRuns(const Packed& p, const CpuPackedWeights& weights, const std::string& where, Random* random) {
  const Outputs one = Run(p, weights, p.M, 1), three = Run(p, weights, p.M, 3), two = Run(p, weights, p.M, 2);
  Check(p, one, where, weights.is_bf16());
  const int64_t some = random->Range(1, p.M);
  const Outputs fewer = Run(p, weights, some, 1);
  for (size_t o = 0; o < one.size(); ++o) {
    const auto all = static_cast<size_t>(p.M * p.N);
    CHECK(Same(one[o], two[o], all) && Same(one[o], three[o], all), where, ": threads change the result");
    CHECK(Same(one[o], fewer[o], static_cast<size_t>(some * p.N)), where, ": other rows change the result");
  }
}

}  // namespace
}  // namespace stof::test
#endif  // STOF_TESTS_CPP_GEMM_PACKED_GEMM_H_
