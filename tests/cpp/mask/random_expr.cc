// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/mask/random_expr.h"

#include <algorithm>

namespace stof::test {
namespace {

class Writer {
 public:
  Writer(Random* random, const ExprSizes& sizes, bool runtime) : random_(*random), sizes_(sizes), runtime_(runtime) {}

  std::string Boolean(int depth) {
    if (depth <= 0 || random_.OneIn(4)) return Compare(depth);
    switch (random_.Range(0, 6)) {
      case 0:
      case 1:
        return "(" + Boolean(depth - 1) + ") and (" + Boolean(depth - 1) + ")";
      case 2:
      case 3:
        return "(" + Boolean(depth - 1) + ") or " + Compare(depth - 1);
      case 4:
        return "not (" + Boolean(depth - 1) + ")";
      case 5:
        return BooleanLookup();
      default:
        return random_.OneIn(8) ? (random_.OneIn(2) ? "True" : "False") : Compare(depth);
    }
  }

 private:
  std::string Number(int64_t most) { return std::to_string(random_.Range(-most, most)); }

  std::string Compare(int depth) {
    static const std::vector<std::string> kOps = {" < ", " <= ", " > ", " >= ", " == ", " != "};
    static const std::vector<std::string> kLeft = {"q - k", "abs(q - k)", "k - q", "q", "k", "q - P - k"};
    const std::string left = random_.OneIn(2) ? random_.Pick(kLeft) : Integer(depth);
    const std::string right = random_.OneIn(2) ? Number(sizes_.T + 2) : Integer(depth - 1);
    return left + random_.Pick(kOps) + right;
  }

  std::string Integer(int depth) {
    static const std::vector<std::string> kLeaves = {"q", "k", "q", "k", "h", "b", "S", "T", "P"};
    if (depth <= 0) return random_.OneIn(4) ? Number(20) : random_.Pick(kLeaves);
    const auto part = [&] { return "(" + Integer(depth - 1) + ")"; };
    switch (random_.Range(0, 10)) {
      case 0:
      case 1:
        return part() + " + " + part();
      case 2:
      case 3:
        return part() + " - " + part();
      case 4:
        return part() + " * " + part();
      case 5:
        return part() + " // " + Divisor();
      case 6:
        return part() + " % " + Divisor();
      case 7:
        return "abs(" + Integer(depth - 1) + ")";
      case 8:
        return (random_.OneIn(2) ? "min(" : "max(") + Integer(depth - 1) + ", " + Integer(depth - 1) + ")";
      case 9:
        return IntegerLookup();
      default:
        return "-" + part();
    }
  }

  std::string Divisor() {
    const int64_t divisor = random_.OneIn(2) ? int64_t{1} << random_.Range(0, 6) : random_.Range(-9, 9);
    return std::to_string(divisor == 0 ? 7 : divisor);
  }

  // Shapes are those of MakeOperands.
  std::string BooleanLookup() {
    switch (random_.Range(0, runtime_ ? 3 : 2)) {
      case 0:
        return "table0[k]";
      case 1:
        return "table1[(q - P) // 4, k // 8]";
      case 2:
        return "table2[h, k]";
      default:
        return "pad[b, k]";
    }
  }
  std::string IntegerLookup() {
    switch (random_.Range(0, runtime_ ? 5 : 2)) {
      case 0:
        return "table3[q - P]";
      case 1:
        return "table4[b, min(k, 3)]";
      case 2:
        return "table3[min(k, S - 1)]";
      case 3:
        return "segment_q[b, q - P]";
      case 4:
        return "segment_k[b, k]";
      default:
        return "lengths[b]";
    }
  }

  Random& random_;
  ExprSizes sizes_;
  bool runtime_;
};

void Add(const std::string& name, bool boolean, std::initializer_list<int64_t> dims, Random* random,
         std::vector<std::pair<std::string, Tensor>>* to, Operands* operands) {
  Tensor tensor;
  tensor.rank = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), tensor.dims);
  const auto count = static_cast<size_t>(tensor.Elements());
  if (boolean) {
    tensor.dtype = DType::kBool;
    const int64_t density = random->Range(0, 8);
    operands->bytes.emplace_back(count);
    for (uint8_t& value : operands->bytes.back()) value = random->Range(0, 7) < density;
    tensor.data = operands->bytes.back().data();
  } else {
    tensor.dtype = DType::kI64;
    operands->integers.emplace_back(count);
    int64_t value = 0;
    const bool sorted = random->OneIn(2);  // segment ids are
    for (int64_t& element : operands->integers.back()) {
      value = sorted ? value + (random->OneIn(9) ? 1 : 0) : random->Range(-5, 40);
      element = value;
    }
    tensor.data = operands->integers.back().data();
  }
  to->emplace_back(name, tensor);
}

Operands MakeOperands(Random* random, const ExprSizes& s) {
  Operands operands;
  operands.bytes.reserve(8);
  operands.integers.reserve(8);
  auto& tables = operands.tables;
  Add("table0", true, {s.T}, random, &tables, &operands);
  Add("table1", true, {(s.S + 3) / 4, (s.T + 7) / 8}, random, &tables, &operands);
  Add("table2", true, {random->OneIn(2) ? 1 : s.H, s.T}, random, &tables, &operands);
  Add("table3", false, {s.S}, random, &tables, &operands);
  Add("table4", false, {random->OneIn(2) ? 1 : s.B, 4}, random, &tables, &operands);
  auto& runtime = operands.runtime;
  Add("pad", true, {random->OneIn(2) ? 1 : s.B, s.T}, random, &runtime, &operands);
  Add("segment_q", false, {s.B, s.S}, random, &runtime, &operands);
  Add("segment_k", false, {s.B, s.T}, random, &runtime, &operands);
  Add("lengths", false, {random->OneIn(2) ? 1 : s.B}, random, &runtime, &operands);
  return operands;
}

__extension__ typedef __int128 Wide;

struct Recursion {
  const MaskExpr& expr;
  const ExprSizes& sizes;
  const std::vector<ExprBinding>& bindings;
  int64_t b, h, q, k;

  Wide Floor(Wide a, Wide d) const {
    Wide quotient = a / d;
    if (quotient * d != a && ((a < 0) != (d < 0))) --quotient;
    return quotient;
  }

  Wide Lookup(const ExprNode& node) const {
    const ExprOperand& operand = *expr.operands()[static_cast<size_t>(node.operand)];
    const ExprBinding& binding = bindings[static_cast<size_t>(node.operand)];
    const int64_t* dims = operand.table ? operand.dims : binding.dims;
    Wide flat = 0;
    for (int axis = 0; axis < node.arity; ++axis) {
      const ExprOp op = expr.nodes()[static_cast<size_t>(node.child[axis])].op;
      Wide index = Value(node.child[axis]);
      if (dims[axis] == 1 && (op == ExprOp::kB || op == ExprOp::kH)) index = 0;
      CHECK(index >= 0 && index < dims[axis], "index out of range");
      flat = flat * dims[axis] + index;
    }
    const auto i = static_cast<size_t>(flat);
    if (operand.table) return operand.wide.empty() ? Wide{operand.bytes[i]} : Wide{operand.wide[i]};
    if (binding.dtype == DType::kBool) return static_cast<const uint8_t*>(binding.data)[i] != 0;
    return static_cast<const int64_t*>(binding.data)[i];
  }

  Wide Value(int32_t i) const {
    const ExprNode& node = expr.nodes()[static_cast<size_t>(i)];
    if (node.op == ExprOp::kLookup) return Lookup(node);
    const Wide x = node.arity > 0 ? Value(node.child[0]) : 0;
    const Wide y = node.arity > 1 ? Value(node.child[1]) : 0;
    switch (node.op) {
      case ExprOp::kConst:
        return node.value;
      case ExprOp::kB:
        return b;
      case ExprOp::kH:
        return h;
      case ExprOp::kQ:
        return q;
      case ExprOp::kK:
        return k;
      case ExprOp::kS:
        return sizes.S;
      case ExprOp::kT:
        return sizes.T;
      case ExprOp::kP:
        return sizes.P;
      case ExprOp::kAdd:
        return x + y;
      case ExprOp::kSub:
        return x - y;
      case ExprOp::kMul:
        return x * y;
      case ExprOp::kDiv:
        return Floor(x, y);
      case ExprOp::kMod:
        return x - y * Floor(x, y);
      case ExprOp::kNeg:
        return -x;
      case ExprOp::kAbs:
        return x < 0 ? -x : x;
      case ExprOp::kMin:
        return x < y ? x : y;
      case ExprOp::kMax:
        return x > y ? x : y;
      case ExprOp::kLt:
        return x < y;
      case ExprOp::kLe:
        return x <= y;
      case ExprOp::kGt:
        return x > y;
      case ExprOp::kGe:
        return x >= y;
      case ExprOp::kEq:
        return x == y;
      case ExprOp::kNe:
        return x != y;
      case ExprOp::kAnd:
        return x != 0 && y != 0;
      case ExprOp::kOr:
        return x != 0 || y != 0;
      case ExprOp::kNot:
        return x == 0;
      case ExprOp::kTrue:
        return 1;
      default:
        return 0;
    }
  }
};

}  // namespace

ExprSizes RandomSizes(Random* random, int64_t most) {
  ExprSizes sizes;
  sizes.B = random->Range(1, 3);
  sizes.H = random->Range(1, 4);
  sizes.S = random->Range(1, most);
  sizes.T = random->OneIn(3) ? sizes.S : random->Range(1, most);
  sizes.P = random->OneIn(2) ? 0 : std::max<int64_t>(0, sizes.T - sizes.S);
  return sizes;
}

std::vector<ExprBinding> Bind(const MaskExpr& expr, const std::vector<std::pair<std::string, Tensor>>& runtime) {
  std::vector<ExprBinding> bindings(expr.operands().size());
  for (size_t i = 0; i < bindings.size(); ++i) {
    for (const auto& [name, tensor] : runtime) {
      if (name != expr.operands()[i]->name) continue;
      bindings[i].data = tensor.data;
      bindings[i].dtype = tensor.dtype;
      bindings[i].rank = tensor.rank;
      std::copy(tensor.dims, tensor.dims + tensor.rank, bindings[i].dims);
    }
  }
  return bindings;
}

RandomMask MakeRandomMask(Random* random, const ExprSizes& sizes, bool runtime_operands) {
  for (;;) {
    RandomMask mask;
    mask.sizes = sizes;
    mask.operands = MakeOperands(random, sizes);
    mask.text = Writer(random, sizes, runtime_operands).Boolean(static_cast<int>(random->Range(0, 4)));
    const Status status = MaskExpr::Parse(mask.text, mask.operands.tables, &mask.expr);
    CHECK(status.ok(), mask.text, ": ", status.message());
    mask.bindings = Bind(mask.expr, mask.operands.runtime);
    if (mask.expr.Check(sizes, &mask.bindings).ok()) return mask;  // products of products may overflow
  }
}

bool Allowed(const MaskExpr& expr, const ExprSizes& sizes, const std::vector<ExprBinding>& bindings, int64_t b,
             int64_t h, int64_t q, int64_t k) {
  if (expr.empty()) return true;
  return Recursion{expr, sizes, bindings, b, h, q, k}.Value(expr.root()) != 0;
}

}  // namespace stof::test
