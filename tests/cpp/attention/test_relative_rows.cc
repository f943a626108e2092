// SPDX-License-Identifier: Apache-2.0
// Which row of a relative table a pair names: separation of expressions, parts, clamps, kinds and limits.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/mask/expr_eval.h"
#include "plugins/core/ops/attention_relative.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

constexpr int64_t kTable[] = {5, 0, 3, 3, 1, 9, -2, 4};

Tables SomeTables() {
  Tensor table = TensorOfShape(DType::kI64, {8});
  table.data = const_cast<int64_t*>(kTable);
  return {{"table0", table}};
}

MaskExpr Parse(const std::string& text) {
  MaskExpr expr;
  const Status status = MaskExpr::ParseInteger(text, SomeTables(), &expr);
  if (!status.ok()) std::fprintf(stderr, "%s: %s\n", text.c_str(), status.message().c_str());
  CHECK(status.ok());
  return expr;
}

Status Make(const std::string& text, const ExprSizes& sizes, int64_t rows,
            std::shared_ptr<const RelativeRowArrays>* made) {
  SeparatedExpr separated;
  CHECK(SeparatedExpr::Make(Parse(text), &separated));
  return RelativeRowArrays::Make("relative_key", separated, sizes, rows, made);
}

// The value at one pair, by the evaluator of masks: whether the expression equals a constant.
bool IsValue(const std::string& text, const ExprSizes& sizes, int64_t q, int64_t k, int64_t value) {
  MaskExpr expr;
  CHECK(MaskExpr::Parse("(" + text + ") == " + std::to_string(value), SomeTables(), &expr).ok());
  ExprEvaluator evaluator(expr, sizes, std::vector<ExprBinding>(expr.operands().size()));
  uint8_t allowed = 0;
  evaluator.Row(0, 0, q, k, 1, &allowed);
  return allowed != 0;
}

int64_t RowOf(const RelativeRows& rows, int64_t i, int64_t j, int64_t count) {
  const int64_t row = rows.row[rows.KeyPart(j) - rows.QueryPart(i) - rows.low];
  return rows.is_reversed ? count - 1 - row : row;
}

TEST(IndexExpressionsAreIntegers) {
  MaskExpr expr;
  for (const char* text : {"", "k <= q", "q == k", "k - ", "k - q)", "k and q", "unknown[q]", "table1[q]", "True"}) {
    CHECK(!MaskExpr::ParseInteger(text, SomeTables(), &expr).ok());
  }
  CHECK(MaskExpr::ParseInteger(" (k - q) ", {}, &expr).ok());
  CHECK(expr.Print() == "k - q");
}

TEST(RowsAreThoseOfTheExpression) {
  const ExprSizes sizes[] = {{1, 1, 1, 1, 0}, {1, 1, 5, 9, 4}, {1, 1, 23, 17, 0}, {1, 1, 1, 40, 39}};
  for (const char* text : {"k - q",
                           "q - k + T - 1",
                           "k - q + S + P - 1",
                           "5",
                           "T - S",
                           "k",
                           "q",
                           "k // 3",
                           "-q",
                           "max(k, 4)",
                           "q // 7 - k // 7 + 3",
                           "k % 5 - q % 5 + 4",
                           "2 * k - 2 * q",
                           "(k - q) * 3 + 1",
                           "k * 3 - 3 * q",
                           "abs(q - k)",
                           "k - q + abs(k - q)",
                           "min(4, k - q) + max(-3, q - k)",
                           "table0[max(0, min(7, q - k + 4))]",
                           "(k - q) % 6",
                           "k - q + k - q",
                           "table0[(q - k) % 8] - table0[max(0, min(7, k - q + 1))]",
                           "q + k - 2 * q",
                           "k - q - k + q",
                           "abs(k) - q",
                           "table0[k % 8] - q + k",
                           "(k - q + 3) // 2 + (q - k) // 5",
                           "k - q - (k - q)"}) {
    for (const ExprSizes& size : sizes) {
      for (const int64_t count : {1, 3, 100}) {
        std::shared_ptr<const RelativeRowArrays> made;
        CHECK(Make(text, size, count, &made).ok());
        const RelativeRows& rows = made->view();
        int32_t low = rows.row[0], high = low;
        for (int64_t i = 0; i < rows.count; ++i) low = std::min(low, rows.row[i]), high = std::max(high, rows.row[i]);
        CHECK(low == rows.first_row && high == rows.last_row && low >= 0 && high < count);
        for (int64_t i = 1; i <= RelativeRows::kMargin; ++i) {
          CHECK(rows.row[-i] == rows.row[0] && rows.row[rows.count - 1 + i] == rows.row[rows.count - 1]);
        }
        for (int64_t i = 0; i < size.S; ++i) {
          for (int64_t j = 0; j < size.T; ++j) {
            const int64_t row = RowOf(rows, i, j, count), q = size.P + i;
            if (row > 0 && row < count - 1) CHECK(IsValue(text, size, q, j, row));
            const std::string clamped = "max(0, min(" + std::to_string(count - 1) + ", " + std::string(text) + "))";
            CHECK(IsValue(clamped, size, q, j, row));
          }
        }
      }
    }
  }
}

TEST(OnlyOneDifferenceIsSeparated) {
  // A function of k and one of q make a difference, whatever they are.
  for (const char* text : {"q + k", "k - q + k", "k // 2 - q + k - q", "k % 2 - q % 2 + k // 2 - q // 2 + (k - q)"}) {
    SeparatedExpr separated;
    CHECK(SeparatedExpr::Make(Parse(text), &separated));
  }
  for (const char* text : {"q * k", "abs(k - q) + k", "max(k - q, k)", "min(k - q, 2 * k - q)", "(k - q) * (k + q)",
                           "abs(k - q) + abs(k + q)", "max(q, k)"}) {
    SeparatedExpr separated;
    CHECK(!SeparatedExpr::Make(Parse(text), &separated));
  }
}

TEST(KindsOfRowsAreFound) {
  struct Kind {
    const char* text;
    int64_t rows;
    bool is_distance, is_reversed, is_stepwise, is_linear;
  };
  const Kind kinds[] = {
      {"k - q + S - 1", 39, true, false, true, true},
      {"q - k + T - 1", 39, true, true, true, true},
      {"k - q + 5", 11, true, false, true, false},
      {"(k - q) * 2 + 40", 100, true, false, false, false},
      {"abs(k - q)", 100, true, false, false, false},
      {"q % 5 - k % 5 + 4", 9, false, true, true, true},
      {"3", 9, true, false, true, false},
  };
  for (const Kind& kind : kinds) {
    std::shared_ptr<const RelativeRowArrays> made;
    CHECK(Make(kind.text, {1, 1, 20, 20, 0}, kind.rows, &made).ok());
    const RelativeRows& rows = made->view();
    if (std::string(kind.text) != "3") CHECK((rows.key_part == nullptr) == kind.is_distance);
    CHECK(rows.is_reversed == kind.is_reversed && rows.is_stepwise == kind.is_stepwise);
    CHECK(rows.is_linear == kind.is_linear || rows.count == 1);
  }
}

TEST(DifferencesAndIndicesAreLimited) {
  std::shared_ptr<const RelativeRowArrays> made;
  CHECK(Make("k * 1000 - q * 1000", {1, 1, 4000, 4000, 0}, 9, &made).ok());
  const Status wide = Make("k * 3000 - q", {1, 1, 4000, 4000, 0}, 9, &made);
  CHECK(!wide.ok() && wide.message().find("span 12001000 values, expected at most 2^23") != std::string::npos);
  CHECK(Make("k * 9007199254740992 - q", {1, 1, 1, 300, 0}, 9, &made).message().find("2^61") != std::string::npos);
  CHECK(Make("k * 900719925474099 - q", {1, 1, 2, 2, 0}, 9, &made).message().find("span") != std::string::npos);
  CHECK(Make("k * 900719925474099 - q * 900719925474099", {1, 1, 2, 2, 0}, 9, &made).ok());
  const Status outside = Make("table0[k - q + 3]", {1, 1, 4, 6, 0}, 9, &made);
  CHECK(outside.message() == "relative_index of relative_key: index 0 of table0 runs from 0 to 8, expected 0 to 7");
  CHECK(Make("table0[k - q + 3]", {1, 1, 4, 5, 0}, 9, &made).ok());
}

}  // namespace
}  // namespace stof::test
