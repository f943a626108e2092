// SPDX-License-Identifier: Apache-2.0
// Recursive descent over the grammar of docs/reference/mask-format.md. The text comes from untrusted files: every limit
// is checked before memory or stack is spent.
#include <algorithm>

#include "plugins/core/base/ascii.h"
#include "plugins/core/host/hash.h"
#include "plugins/core/host/quoted.h"
#include "plugins/core/mask/expr.h"
#include "plugins/core/mask/expr_builder.h"

namespace stof {
namespace {

struct Named {
  const char* text;
  ExprOp op;
};
constexpr Named kIndices[] = {{"b", ExprOp::kB}, {"h", ExprOp::kH}, {"q", ExprOp::kQ}, {"k", ExprOp::kK},
                              {"S", ExprOp::kS}, {"T", ExprOp::kT}, {"P", ExprOp::kP}};
struct Runtime {
  const char* name;
  bool boolean;
  int rank;
};
constexpr Runtime kRuntime[] = {
    {"pad", true, 2}, {"segment_q", false, 2}, {"segment_k", false, 2}, {"lengths", false, 1}};

class ExprParser {
 public:
  ExprParser(std::string_view text, const Tables& tables, bool is_integer)
      : text_(text), tables_(tables), is_integer_(is_integer) {}

  Status Run(MaskExpr* expr) {
    const int root = is_integer_ ? Sum() : Or();
    if (error_.empty()) {
      Skip();
      if (at_ != text_.size()) Fail("unexpected " + Quote(text_.substr(at_, 8)));
    }
    if (error_.empty() && !is_integer_ && !Boolean(root)) Fail("the expression is an integer, expected a condition");
    if (error_.empty() && is_integer_ && Boolean(root)) Fail("the expression is a condition, expected an integer");
    if (!error_.empty()) {
      return Status::Error((is_integer_ ? "index expression, column " : "mask expression, column ") +
                           std::to_string(at_ + 1) + ": " + error_);
    }
    *expr = builder_.Build(root);
    return Status();
  }

 private:
  // Every function returns the index of its node, or -1 once error_ is set.
  int Fail(std::string message) {
    if (error_.empty()) error_ = std::move(message);
    return -1;
  }
  bool Boolean(int node) { return builder_.node(node).boolean; }

  void Skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t')) ++at_;
  }
  bool Take(std::string_view token) {
    Skip();
    if (text_.substr(at_, token.size()) != token) return false;
    const size_t end = at_ + token.size();
    const bool word = IsLetter(token[0]);
    if (word && end < text_.size() && (IsLetterOrDigit(text_[end]) || text_[end] == '_')) {
      return false;
    }
    at_ = end;
    return true;
  }

  int CheckNode(int node) { return node < 0 ? Fail("more than 4096 nodes") : node; }
  int Add(ExprOp op, std::initializer_list<int> children = {}) { return CheckNode(builder_.Add(op, children)); }
  int Binary(ExprOp op, bool wants_boolean, int left, int right) {
    if (left < 0 || right < 0) return -1;
    if (Boolean(left) != wants_boolean || Boolean(right) != wants_boolean) {
      return Fail(wants_boolean ? "an integer where a condition is expected"
                                : "a condition where an integer is expected");
    }
    return Add(op, {left, right});
  }

  // One level of recursion; every way back into Or, Sum, Not or Unary holds one.
  struct Nested {
    explicit Nested(ExprParser* parser) : parser(parser) {
      if (++parser->depth_ > MaskExpr::kMaxDepth) parser->Fail("nested deeper than 64");
    }
    ~Nested() { --parser->depth_; }
    bool ok() const { return parser->error_.empty(); }
    ExprParser* parser;
  };

  int Or() {
    int node = And();
    while (node >= 0 && Take("or")) node = Binary(ExprOp::kOr, true, node, And());
    return node;
  }
  int And() {
    int node = Not();
    while (node >= 0 && Take("and")) node = Binary(ExprOp::kAnd, true, node, Not());
    return node;
  }
  int Not() {
    if (!Take("not")) return Compare();
    const Nested nested(this);
    const int node = nested.ok() ? Not() : -1;
    if (node < 0) return -1;
    if (!Boolean(node)) return Fail("'not' of an integer");
    return Add(ExprOp::kNot, {node});
  }
  int Compare() {
    const int left = Sum();
    if (left < 0) return -1;
    constexpr Named kCompare[] = {{"<=", ExprOp::kLe}, {">=", ExprOp::kGe}, {"==", ExprOp::kEq},
                                  {"!=", ExprOp::kNe}, {"<", ExprOp::kLt},  {">", ExprOp::kGt}};
    for (const Named& compare : kCompare) {
      if (Take(compare.text)) return Binary(compare.op, false, left, Sum());
    }
    return left;
  }
  int Sum() {
    int node = Product();
    while (node >= 0) {
      if (Take("+")) {
        node = Binary(ExprOp::kAdd, false, node, Product());
      } else if (Take("-")) {
        node = Binary(ExprOp::kSub, false, node, Product());
      } else {
        break;
      }
    }
    return node;
  }
  int Product() {
    int node = Unary();
    while (node >= 0) {
      if (Take("//")) {
        node = Divide(ExprOp::kDiv, node);
      } else if (Take("%")) {
        node = Divide(ExprOp::kMod, node);
      } else if (Take("*")) {
        node = Binary(ExprOp::kMul, false, node, Unary());
      } else {
        break;
      }
    }
    return node;
  }
  int Divide(ExprOp op, int left) {
    const int right = Unary();
    if (right < 0) return -1;
    const ExprNode& divisor = builder_.node(right);
    if (divisor.op != ExprOp::kConst || divisor.value == 0)
      return Fail("a divisor must be a non-zero integer constant");
    return Binary(op, false, left, right);
  }
  int Unary() {
    if (!Take("-")) return Atom();
    const Nested nested(this);
    const int node = nested.ok() ? Unary() : -1;
    if (node < 0) return -1;
    if (Boolean(node)) return Fail("'-' of a condition");
    ExprNode& inner = builder_.node(node);
    if (inner.op == ExprOp::kConst) {  // so that "-64" is a constant, also as a divisor
      inner.value = -inner.value;
      return node;
    }
    return Add(ExprOp::kNeg, {node});
  }

  int Atom() {
    Skip();
    if (at_ >= text_.size()) return Fail("unexpected end");
    const char c = text_[at_];
    if (IsDigit(c)) return Number();
    if (Take("(")) {
      const Nested nested(this);
      const int node = nested.ok() ? Or() : -1;
      if (node >= 0 && !Take(")")) return Fail("expected ')'");
      return node;
    }
    if (!IsLetter(c)) {
      char32_t code = 0;
      return Fail("unexpected " + Quote(text_.substr(at_, std::max<size_t>(1, ReadUtf8(text_.substr(at_), &code)))));
    }
    const size_t begin = at_;
    while (at_ < text_.size() && (IsLetterOrDigit(text_[at_]) || text_[at_] == '_')) ++at_;
    return Name(text_.substr(begin, at_ - begin));
  }
  int Number() {
    int64_t value = 0;
    while (at_ < text_.size() && IsDigit(text_[at_])) {
      value = value * 10 + (text_[at_++] - '0');
      if (value > MaskExpr::kMaxConstant) return Fail("a constant beyond 2^53");
    }
    return CheckNode(builder_.AddConstant(value));
  }
  int Name(std::string_view name) {
    if (name == "True") return Add(ExprOp::kTrue);
    if (name == "False") return Add(ExprOp::kFalse);
    for (const Named& index : kIndices) {
      if (name == index.text) return Add(index.op);
    }
    if (name == "abs" || name == "min" || name == "max") return Call(name);
    return Lookup(std::string(name));
  }
  int Call(std::string_view name) {
    const Nested nested(this);
    if (!nested.ok()) return -1;
    if (!Take("(")) return Fail("expected '(' after " + std::string(name));
    const int left = Sum();
    if (left < 0) return -1;
    if (name == "abs") {
      if (Boolean(left)) return Fail("abs of a condition");
      if (!Take(")")) return Fail("expected ')'");
      return Add(ExprOp::kAbs, {left});
    }
    if (!Take(",")) return Fail("expected ','");
    const int right = Sum();
    if (right >= 0 && !Take(")")) return Fail("expected ')'");
    return Binary(name == "min" ? ExprOp::kMin : ExprOp::kMax, false, left, right);
  }
  int Lookup(const std::string& name) {
    const int operand = Operand(name);
    if (operand < 0) return -1;
    const Nested nested(this);
    if (!nested.ok()) return -1;
    if (!Take("[")) return Fail("expected '[' after " + name);
    int children[4] = {-1, -1, -1, -1};
    int count = 0;
    do {
      if (count == 4) return Fail(name + " has more than 4 indices");
      const int child = Sum();
      if (child < 0) return -1;
      if (Boolean(child)) return Fail("an index of " + name + " is a condition");
      children[count++] = child;
    } while (Take(","));
    if (!Take("]")) return Fail("expected ']'");
    const ExprOperand& described = *builder_.operands()[static_cast<size_t>(operand)];
    if (count != described.rank) {
      return Fail(name + " has " + std::to_string(count) + " indices, expected " + std::to_string(described.rank));
    }
    return CheckNode(builder_.AddLookup(operand, children, count));
  }
  int Operand(const std::string& name) {
    const ExprOperands& known = builder_.operands();
    for (size_t i = 0; i < known.size(); ++i) {
      if (known[i]->name == name) return static_cast<int>(i);
    }
    std::shared_ptr<const ExprOperand> operand;
    if (IsTableName(name)) {
      const auto found = std::find_if(tables_.begin(), tables_.end(), [&](const auto& t) { return t.first == name; });
      if (found == tables_.end()) return Fail(name + " is not among the given tables");
      const Status status = MakeTable(name, found->second, &operand);
      if (!status.ok()) return Fail(status.message());
    } else {
      const auto* found =
          std::find_if(std::begin(kRuntime), std::end(kRuntime), [&](const Runtime& r) { return name == r.name; });
      if (found == std::end(kRuntime)) return Fail("unknown name " + Quote(name, 32));
      auto runtime = std::make_shared<ExprOperand>();
      runtime->name = name;
      runtime->boolean = found->boolean;
      runtime->rank = found->rank;
      runtime->hash = HashBytes(name.data(), name.size(), 0);
      operand = std::move(runtime);
    }
    return builder_.AddOperand(std::move(operand));
  }

  std::string_view text_;
  const Tables& tables_;
  const bool is_integer_;  // what the text has to be; else a condition
  ExprBuilder builder_;
  size_t at_ = 0;
  int depth_ = 0;
  std::string error_;
};

}  // namespace

Status MaskExpr::Parse(std::string_view text, const Tables& tables, MaskExpr* expr) {
  *expr = MaskExpr();
  if (text.size() > static_cast<size_t>(kMaxText)) {
    return Status::Error("mask expression of " + std::to_string(text.size()) + " bytes, expected at most 65536");
  }
  if (text.find_first_not_of(" \t") == std::string_view::npos) text = "True";
  return ExprParser(text, tables, false).Run(expr);
}

Status MaskExpr::ParseInteger(std::string_view text, const Tables& tables, MaskExpr* expr) {
  *expr = MaskExpr();
  if (text.size() > static_cast<size_t>(kMaxText)) {
    return Status::Error("index expression of " + std::to_string(text.size()) + " bytes, expected at most 65536");
  }
  return ExprParser(text, tables, true).Run(expr);
}

}  // namespace stof
