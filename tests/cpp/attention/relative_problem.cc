// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/attention/relative_problem.h"

#include <cmath>
#include <functional>
#include <limits>
#include <tuple>

namespace stof::test::attention {
namespace {

std::string Describe(const char* role, const TableCase& c) {
  static constexpr const char* kNames[] = {
      "rising", "falling", "buckets", "falling buckets", "grid row", "grid column", "any", "random", "one", "keys"};
  if (!c.is_given) return "";
  return Text(role, " ", kNames[static_cast<int>(c.naming)], " rows ", c.rows, " shift ", c.shift,
              c.is_shared ? " shared" : "", c.has_row_bias ? " row bias" : "", c.is_wide ? " wide" : "",
              c.falls ? " falls" : "");
}

// What stands in front of row 0: rows of the first pairs are cut off, or those of the last ones, or both, or none.
int64_t ConstantOf(const TableCase& c, int64_t least, int64_t most, int64_t rows) {
  const int64_t constants[] = {-least, rows / 2, rows - 1 - most, rows / 3 - (least + most) / 2};
  return constants[c.shift];
}

using RowOf = std::function<int64_t(int64_t q, int64_t k)>;

// The expression and the formula of a table of `rows` rows.
RowOf Name(const TableCase& c, const RowSizes& sizes, int64_t rows, int number, RelativeOperand* operand,
           Random* random) {
  const int64_t last = sizes.P + sizes.S - 1, least = -last, most = sizes.T - 1;
  const auto plus = [](int64_t constant) { return " + " + std::to_string(constant); };
  const std::string name = "table" + std::to_string(number);
  switch (c.naming) {
    case Naming::kRising: {
      const int64_t constant = ConstantOf(c, least, most, rows);
      operand->index = "k - q" + plus(constant);
      return [=](int64_t q, int64_t k) { return k - q + constant; };
    }
    case Naming::kFalling: {
      const int64_t constant = ConstantOf(c, -most, -least, rows);
      operand->index = "q - k" + plus(constant);
      return [=](int64_t q, int64_t k) { return q - k + constant; };
    }
    case Naming::kBuckets:
    case Naming::kFallingBuckets:
    case Naming::kRandom: {
      const int64_t radius = c.shift == 0 ? 5 : std::max(last, most);
      int64_t entry = c.shift == 1 ? -2 : 0;
      for (int64_t i = 0; i <= 2 * radius; ++i) {
        operand->entries.push_back(
            static_cast<int32_t>(c.naming == Naming::kRandom ? random->Range(-2, rows + 1) : entry));
        // Nearly one row for each distance around 0, far fewer elsewhere.
        if (std::abs(i - radius) < rows / 4 || random->OneIn(c.shift == 2 ? 2 : 9)) ++entry;
      }
      operand->entries_name = name;
      const bool falls = c.naming == Naming::kFallingBuckets;
      operand->index = name + "[max(0, min(" + std::to_string(2 * radius) + ", " + (falls ? "q - k" : "k - q") +
                       plus(radius) + "))]";
      const std::vector<int32_t> entries = operand->entries;
      return [=](int64_t q, int64_t k) {
        const int64_t at = (falls ? q - k : k - q) + radius;
        return int64_t{entries[static_cast<size_t>(std::max<int64_t>(0, std::min(2 * radius, at)))]};
      };
    }
    case Naming::kGridRow:
    case Naming::kGridColumn: {
      const int64_t width = std::vector<int64_t>{1, 5, 14, 64}[static_cast<size_t>(random->Range(0, 3))];
      const bool is_row = c.naming == Naming::kGridRow;
      const int64_t constant = is_row && c.shift != 0 ? last / width : is_row ? rows / 2 : width - 1;
      const std::string part = (is_row ? " // " : " % ") + std::to_string(width);
      operand->index =
          c.falls ? "q" + part + " - k" + part + plus(constant) : "k" + part + " - q" + part + plus(constant);
      const bool falls = c.falls;
      return [=](int64_t q, int64_t k) {
        const int64_t difference = is_row ? k / width - q / width : k % width - q % width;
        return (falls ? -difference : difference) + constant;
      };
    }
    case Naming::kAny: {
      const int64_t constant = ConstantOf(c, 2 * least, 2 * most, rows);
      operand->index = "(k - q) * 2" + plus(constant);
      return [=](int64_t q, int64_t k) { return 2 * (k - q) + constant; };
    }
    case Naming::kOne: {
      const int64_t row = random->Range(0, rows - 1);
      operand->index = std::to_string(row);
      return [=](int64_t, int64_t) { return row; };
    }
    case Naming::kKeys:
      break;
  }
  operand->index = "k // 3";
  return [](int64_t, int64_t k) { return k / 3; };
}

}  // namespace

std::string Describe(const RelativeCase& c) {
  return Describe(c.base) + Describe(" relative_key", c.key[0]) + Describe(" relative_key1", c.key[1]) +
         Describe(" relative_query", c.query) + Describe(" relative_value", c.value) + Text(" factor ", c.factor) +
         (c.poisons ? " poisons rows" : "");
}

void RelativeOperand::Store() {
  const int64_t item = SizeOfFloat(dtype);
  bytes.assign(dense.values.size() * static_cast<size_t>(item), 0);
  bytes.shrink_to_fit();
  for (size_t i = 0; i < dense.values.size(); ++i)
    StoreFloat(dtype, dense.values[i], &bytes[i * static_cast<size_t>(item)]);
}
void RelativeOperand::Round(DType to) {
  for (double& value : dense.values) value = Rounded(to, value);
  Store();
}
Tensor RelativeOperand::table() const {
  return Describe(bytes.data(), dtype, {dense.heads, dense.rows, dense.columns});
}
Tables RelativeOperand::operands() const {
  if (entries.empty()) return {};
  return {{entries_name, Describe(entries.data(), DType::kI32, {static_cast<int64_t>(entries.size())})}};
}
std::shared_ptr<const RelativeRowArrays> RelativeOperand::Bind(const char* role, const RowSizes& sizes,
                                                               RelativeTable* bound) const {
  MaskExpr expr;
  Status status = MaskExpr::ParseInteger(index, operands(), &expr);
  CHECK(status.ok(), index, ": ", status.message());
  SeparatedExpr separated;
  CHECK(SeparatedExpr::Make(expr, &separated), index);
  std::shared_ptr<const RelativeRowArrays> made;
  status = RelativeRowArrays::Make(role, separated, {1, 1, sizes.S, sizes.T, sizes.P}, dense.rows, &made);
  CHECK(status.ok(), index, ": ", status.message());
  *bound = {bytes.data(), dtype, dense.rows, dense.columns, dense.heads == 1 ? 0 : dense.rows * dense.columns,
            made->view()};
  return made;
}

RelativeOperand DrawOperand(const TableCase& c, const RowSizes& sizes, int64_t heads, int64_t size, DType dtype,
                            int number, Random* random) {
  RelativeOperand operand;
  const int64_t rows = c.rows > 0 ? c.rows : sizes.P + sizes.S + sizes.T - 1;
  operand.dtype = c.is_wide ? DType::kF32 : dtype;
  DenseTable& dense = operand.dense;
  dense.heads = c.is_shared ? 1 : heads;
  dense.rows = rows;
  dense.columns = size + (c.has_row_bias ? 1 : 0);
  dense.values = DrawValues(random, operand.dtype, dense.heads * rows * dense.columns, 1);
  const RowOf row = Name(c, sizes, rows, number, &operand, random);
  for (int64_t i = 0; i < sizes.S; ++i) {
    for (int64_t k = 0; k < sizes.T; ++k) {
      dense.row.push_back(static_cast<int32_t>(std::max<int64_t>(0, std::min(rows - 1, row(sizes.P + i, k)))));
    }
  }
  operand.Store();
  return operand;
}

void PoisonRows(const Dense& problem, RelativeOperand* operand, Random* random) {
  static const std::vector<double> kValues = {std::nan(""), std::numeric_limits<double>::infinity(),
                                              -std::numeric_limits<double>::infinity()};
  DenseTable& table = operand->dense;
  std::vector<uint8_t> is_named(static_cast<size_t>(table.heads * table.rows), 0);
  const int64_t pairs = problem.S * problem.T;
  for (size_t at = 0; at < problem.allowed.size(); ++at) {
    if (problem.allowed[at] == 0) continue;
    const auto i = static_cast<int64_t>(at);
    const int64_t head = table.heads == 1 ? 0 : i / pairs % problem.H;
    is_named[static_cast<size_t>(head * table.rows + table.row[static_cast<size_t>(i % pairs)])] = 1;
  }
  for (size_t row = 0; row < is_named.size(); ++row) {
    const auto columns = static_cast<size_t>(table.columns);
    if (is_named[row] == 0)
      std::fill_n(table.values.begin() + static_cast<std::ptrdiff_t>(row * columns), columns, random->Pick(kValues));
  }
  operand->Store();
}

FactoredBias DrawFactored(const RelativeCase& c, Random* random, std::vector<double>* dense) {
  FactoredBias bias;
  const Case& base = c.base;
  if (base.relative == 0) return bias;
  const auto draw = [&](int64_t count) {
    const std::vector<double> values = DrawValues(random, DType::kF32, count, 2);
    return std::vector<float>(values.begin(), values.end());
  };
  bias.table = draw((base.relative_shared ? 1 : base.H) * base.relative);
  const int64_t heads = (c.factor & 1) != 0 ? 1 : base.H, batches = (c.factor & 2) != 0 ? 1 : base.B;
  if (c.factor != 0) bias.factor = draw(batches * heads * base.S);
  bias.stride_h = heads == 1 ? 0 : base.S, bias.stride_b = batches == 1 ? 0 : heads * base.S;
  dense->resize(static_cast<size_t>(base.B * base.H * base.S * base.T), 0.0);
  const int64_t radius = base.relative / 2, past = base.offset ? base.T - base.S : 0;
  for (int64_t at = 0; at < static_cast<int64_t>(dense->size()); ++at) {
    const int64_t k = at % base.T, i = at / base.T % base.S, h = at / base.T / base.S % base.H,
                  b = at / base.T / base.S / base.H;
    const int64_t entry = std::min(radius, std::max(-radius, k - past - i)) + radius;
    double value = bias.table[static_cast<size_t>((base.relative_shared ? 0 : h) * base.relative + entry)];
    if (c.factor != 0) value *= bias.factor[static_cast<size_t>(b * bias.stride_b + h * bias.stride_h + i)];
    (*dense)[static_cast<size_t>(at)] += value;
  }
  return bias;
}

BoundTables::BoundTables(const RelativeCase& c, Random* random, Dense* dense, AttentionArgs* args) {
  const Case& base = c.base;
  const RowSizes sizes = {base.S, base.T, base.offset ? base.T - base.S : 0};
  const TableCase* const cases[] = {&c.key[0], &c.key[1], &c.query, &c.value};
  DenseTable* const wanted[] = {&dense->relative_key[0], &dense->relative_key[1], &dense->relative_query,
                                &dense->relative_value};
  RelativeTable* const bound[] = {&args->scores.relative_key[0], &args->scores.relative_key[1],
                                  &args->scores.relative_query, &args->relative_value};
  for (int i = 0; i < 4; ++i) {
    if (!cases[i]->is_given) continue;
    operands[i] = DrawOperand(*cases[i], sizes, base.H, i == 3 ? base.Dv : base.D, base.dtype, i, random);
    if (base.cuda) operands[i].Round(base.dtype);
    if (c.poisons) PoisonRows(*dense, &operands[i], random);
    rows.push_back(operands[i].Bind(kRelativeRoles[i], sizes, bound[i]));
    *wanted[i] = operands[i].dense;
  }
}

std::vector<RelativeCase> DrawnRelativeCases(int count) {
  Random random(55);
  std::vector<RelativeCase> cases;
  Deck<int> given({1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 1, 4, 5}, &random);
  Deck<Naming> key(kNamings, &random), key1(kNamings, &random), query(kNamings, &random), value(kNamings, &random);
  Deck<int64_t> rows({0, 0, 1, 2, 15, 16, 17, 31, 33, 100, 257, 700}, &random);
  Deck<int64_t> lengths({1, 2, 5, 6, 7, 17, 47, 48, 49, 95, 96, 97, 130, 200}, &random);
  Deck<int64_t> sizes({1, 7, 8, 16, 20, 64, 80}, &random);
  Deck<int> shifts({0, 1, 2, 3}, &random);
  for (Case& base : DrawnCases(count)) {
    RelativeCase c;
    base.S = lengths.Deal();
    if (base.T > 65) base.B = std::min<int64_t>(base.B, 2);
    base.D = sizes.Deal(), base.Dv = sizes.Deal();
    base.offset = base.offset && base.T >= base.S;
    if (base.spread > 4) base.spread = 4;
    static constexpr Left kLeft[] = {Left::kNothing, Left::kMost, Left::kTiles, Left::kAll};
    if (base.mask != 0 && base.mask != 10 && random.OneIn(3)) base.left = kLeft[random.Range(0, 3)];
    c.base = base;
    const int bits = given.Deal();
    TableCase* const tables[] = {&c.key[0], &c.key[1], &c.query, &c.value};
    Deck<Naming>* const namings[] = {&key, &key1, &query, &value};
    for (int i = 0; i < 4; ++i) {
      TableCase& table = *tables[i];
      table.is_given = (bits >> i & 1) != 0;
      table.naming = namings[i]->Deal();
      table.rows = rows.Deal();
      table.is_shared = random.OneIn(2), table.is_wide = random.OneIn(3), table.falls = random.OneIn(2);
      table.has_row_bias = i < 3 && random.OneIn(2);
      table.shift = shifts.Deal();
    }
    if (!c.key[0].is_given) c.key[1].is_given = false;
    c.factor = c.base.relative > 0 && random.OneIn(2) ? 4 + static_cast<int>(random.Range(0, 3)) : 0;
    c.poisons = !AttendsAllKeys(base.empty_rows) && random.OneIn(3);
    cases.push_back(c);
  }
  return cases;
}

std::vector<RelativeCase> ListedRelativeCases() {
  std::vector<RelativeCase> cases;
  const auto add = [&cases](int64_t S, int64_t T, int64_t D, Naming naming, int64_t rows) -> RelativeCase& {
    RelativeCase c;
    c.base.B = 1, c.base.H = 2, c.base.G = 2, c.base.S = S, c.base.T = T, c.base.D = c.base.Dv = D;
    for (TableCase* table : {&c.key[0], &c.query}) {
      table->is_given = true, table->naming = naming, table->rows = rows, table->shift = 3;
    }
    cases.push_back(c);
    return cases.back();
  };
  // Rings of products that go round, of one row for each distance and of more rows than a ring holds; products of keys
  // that several tile rows share, and those that are too many.
  for (const Naming naming : {Naming::kRising, Naming::kFalling}) {
    add(330, 600, 16, naming, 0).key[0].has_row_bias = true;
    add(110, 1100, 8, naming, 1150).query.has_row_bias = true;
    add(420, 420, 16, naming, 300).base.G = 1;
  }
  for (const Naming naming : {Naming::kBuckets, Naming::kFallingBuckets}) {
    RelativeCase* c = &add(300, 400, 16, naming, 512);
    c->base.B = 2, c->base.pad = Pad::kLeft, c->base.m = 24, c->base.n = 64, c->query.shift = 1;
    c = &add(260, 520, 16, naming, 200);
    c->base.mask = 3, c->base.offset = true, c->query.has_row_bias = true, c->base.H = 4;
    add(64, 1500, 8, naming, 900).query.shift = 2;
    add(512, 512, 64, naming, 512).query.shift = 1;
  }
  for (const Naming naming : {Naming::kGridRow, Naming::kGridColumn, Naming::kAny, Naming::kRandom}) {
    RelativeCase* c = &add(196, 260, 16, naming, 127);
    c->key[1] = c->key[0], c->key[1].naming = Naming::kGridColumn, c->key[1].falls = true;
    c = &add(130, 530, 8, naming, 2000);
    c->query.is_shared = true;
  }
  // Weights of rows: fully masked rows, long sums, and rows that the mask leaves without weight.
  for (const EmptyRows policy : {EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}) {
    RelativeCase* c = &add(67, 1030, 16, Naming::kRising, 60);
    c->value = c->key[0], c->value.rows = 1024, c->base.mask = 13, c->base.empty_rows = policy;
    c = &add(97, 140, 20, Naming::kBuckets, 40);
    c->value = c->query, c->value.naming = Naming::kRandom, c->base.pad = Pad::kAll, c->base.B = 2;
    c->base.empty_rows = policy, c->base.rising = true;
  }
  return cases;
}

}  // namespace stof::test::attention
