// SPDX-License-Identifier: Apache-2.0
// Random relative tables, and the row of them that each pair names: by the expression of the operator, and
// by a formula of the tests.
#ifndef STOF_TESTS_CPP_ATTENTION_RELATIVE_PROBLEM_H_
#define STOF_TESTS_CPP_ATTENTION_RELATIVE_PROBLEM_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/ops/attention_relative.h"
#include "tests/cpp/attention/attention_problem.h"

namespace stof::test::attention {

// How the rows of pairs follow from q and k. kBuckets, kFallingBuckets: neighbouring distances name the same row, or
// neighbouring ones. kAny: rows two apart. kRandom: in no order. kOne: one row for all pairs. kKeys: the query is not
// read.
enum class Naming { kRising, kFalling, kBuckets, kFallingBuckets, kGridRow, kGridColumn, kAny, kRandom, kOne, kKeys };
inline const std::vector<Naming> kNamings = {
    Naming::kRising,  Naming::kFalling,    Naming::kBuckets, Naming::kFallingBuckets,
    Naming::kGridRow, Naming::kGridColumn, Naming::kAny,     Naming::kRandom,
    Naming::kOne,     Naming::kKeys};

struct TableCase {
  bool is_given = false;
  Naming naming = Naming::kRising;
  int64_t rows = 0;  // 0: as many as there are distances
  bool is_shared = false, has_row_bias = false, is_wide = false, falls = false;
  int shift = 0;  // where the rows of the table lie among those that pairs name: 0 to 3
};

struct RelativeCase {
  Case base;
  TableCase key[2], query, value;
  int factor = 0;        // of a relative bias: 0: none, else bits of broadcast axes and 4
  bool poisons = false;  // rows that no allowed pair names hold NaN or infinities
};
std::string Describe(const RelativeCase& c);

// Sizes that rows depend on: P is the position of query 0.
struct RowSizes {
  int64_t S = 0, T = 0, P = 0;
};

// One table with its expression.
struct RelativeOperand {
  std::string index;
  std::vector<int32_t> entries;  // of the integer table that the expression reads
  std::string entries_name;
  DType dtype = DType::kF32;
  std::vector<char> bytes;  // end with the last element, so that a sanitizer sees reads beyond it
  DenseTable dense;

  void Store();             // writes dense.values to bytes
  void Round(DType dtype);  // rounds the values to this type, as the CUDA kernels do, and stores them
  Tensor table() const;
  Tables operands() const;  // of the expression
  std::shared_ptr<const RelativeRowArrays> Bind(const char* role, const RowSizes& sizes, RelativeTable* bound) const;
};
// size: of the vectors that rows are multiplied with, or added to; number: of the integer table.
RelativeOperand DrawOperand(const TableCase& c, const RowSizes& sizes, int64_t heads, int64_t size, DType dtype,
                            int number, Random* random);

// NaN or infinities in rows that no allowed pair names.
void PoisonRows(const Dense& problem, RelativeOperand* operand, Random* random);

// The factors of a relative bias, and their product with it, which is also added to the dense bias.
struct FactoredBias {
  std::vector<float> table, factor;
  int64_t stride_b = 0, stride_h = 0;
};
FactoredBias DrawFactored(const RelativeCase& c, Random* random, std::vector<double>* dense);

// The tables of a case, bound to the arguments of the kernel.
struct BoundTables {
  RelativeOperand operands[4];
  std::vector<std::shared_ptr<const RelativeRowArrays>> rows;

  BoundTables(const RelativeCase& c, Random* random, Dense* dense, AttentionArgs* args);
};

std::vector<RelativeCase> DrawnRelativeCases(int count);
std::vector<RelativeCase> ListedRelativeCases();

}  // namespace stof::test::attention
#endif  // STOF_TESTS_CPP_ATTENTION_RELATIVE_PROBLEM_H_
