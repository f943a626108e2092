// SPDX-License-Identifier: Apache-2.0
// Attention by its definition in docs/reference/operators.md, in double precision and by plain loops, and numbers of
// fp16 and bf16. Shares no code with the kernels.
#ifndef STOF_TESTS_CPP_ATTENTION_REFERENCE_H_
#define STOF_TESTS_CPP_ATTENTION_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "plugins/core/contract/attention.h"

namespace stof::test {

int64_t SizeOfFloat(DType dtype);
double LoadFloat(DType dtype, const void* source);
// Rounds to nearest even.
void StoreFloat(DType dtype, double value, void* target);
// value as dtype holds it.
double Rounded(DType dtype, double value);

// A table of relative positions: [heads, rows, columns], and the row that each pair names, [S, T].
struct DenseTable {
  std::vector<double> values;  // empty: none
  int64_t heads = 1, rows = 0, columns = 0;
  std::vector<int32_t> row;
  // The row of a pair for head h.
  const double* At(int64_t h, int64_t pair) const {
    return &values[static_cast<size_t>(((heads == 1 ? 0 : h) * rows + row[static_cast<size_t>(pair)]) * columns)];
  }
};

// One problem, dense and row-major.
struct Dense {
  int64_t B = 1, H = 1, G = 1, S = 0, T = 0, D = 0, Dv = 0;
  std::vector<double> query;     // [B, H, S, D]
  std::vector<double> key;       // [B, G, T, D]
  std::vector<double> value;     // [B, G, T, Dv]
  std::vector<double> bias;      // [B, H, S, T] or empty
  std::vector<uint8_t> allowed;  // [B, H, S, T], by mask and padding
  std::vector<double> sink;      // [H] or empty
  DenseTable relative_key[2], relative_query, relative_value;
  double scale = 1, softcap = 0;
  EmptyRows empty_rows = EmptyRows::kZero;
  // Not 0: scores are rounded to fp32, where they are exact but for overflow, and add to the tolerance of their rows
  // only up to this size.
  double exact_beyond = 0;
};

struct Answer {
  std::vector<double> output;     // [B, H, S, Dv]
  std::vector<double> magnitude;  // [B, H, S], see Tolerance
  std::vector<double> lse;        // [B, H, S]
};
Answer Attend(const Dense& problem);

// The scores of all pairs, [B, H, S, T], -inf where a pair is not allowed, and by what their rounding errors grow, as
// in `magnitude`.
struct PairScores {
  std::vector<double> scores, sizes;
};
PairScores Scores(const Dense& problem);

// How far a correct kernel may be from Attend in one element of a row.
//
// The kernels compute in fp32 (unit roundoff u = 2^-24) from inputs that they hold exactly, and round once to the type
// of the output. The relative error of a weight is the absolute error of its score; a dot product of D terms errs by
// u |q| |k| where its partial sums walk at random and by u sqrt(D / 3) |q . k| where they grow steadily; softcap and
// bias add u times their size. `magnitude` is the sum of these, averaged with the row's weights. To this come the
// exponential (1.7e-7 relative, 3 u) and a sum over at most T terms, a random walk again. Each weight enters twice, in
// the output and in the row sum, and no output exceeds `largest`, the largest value. The factors leave three times what
// these come to.
double Tolerance(DType dtype, double magnitude, int64_t T, double largest, double expected);
// What the CUDA kernels add: weights are rounded to fp16 or bf16 (those of fp16 below 2^-14 by 2^-25), tensor cores
// sum with fewer guard bits than fp32 has, and ex2.approx errs by 2^-22.
double CudaTolerance(DType dtype, double magnitude, int64_t T, double largest);
// How far the LSE of a row may be off: as far as a score, and twice the roundoff of numbers of its size,
// those by which it is found in units of log2.
double LseTolerance(double magnitude, int64_t T, double expected);

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_ATTENTION_REFERENCE_H_
