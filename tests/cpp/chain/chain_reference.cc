// SPDX-License-Identifier: Apache-2.0
// Chains in fp64: a parser and an evaluator apart from the library's. Over 500 lines: one grammar.
#include "tests/cpp/chain/chain_reference.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <sstream>
#include <stdexcept>

#include "tests/cpp/attention/reference.h"

namespace stof::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kUnit = 0x1p-24;  // fp32's unit roundoff
constexpr double kTiny = 2e-36;    // exponentials below 2^-126 are 0 within the sigmoid and its kin
constexpr double kLargest = 3.3e38;

struct Expr;
using Index = std::vector<std::pair<int64_t, int>>;  // factor and axis, -1: none

struct Dim {
  Index terms;
  char kind = ' ';  // '%', '/'
  int64_t by = 1;
};
struct Expr {
  std::string name;  // a function, an operator, "number", "axis", "read"
  std::vector<int> args;
  double number = 0;
  int which = 0;  // axis or input
  std::vector<Dim> index;
};

bool Monotone(const std::string& f) {
  for (const char* name : {"exp", "log", "sqrt", "rsqrt", "tanh", "erf", "sigmoid", "softplus", "relu", "-1", "f16",
                           "bf16", "floor", "ceil", "round"}) {
    if (f == name) return true;
  }
  return false;
}
double Apply(const std::string& f, double x) {
  if (f == "-1") return -x;
  if (f == "abs") return std::fabs(x);
  if (f == "exp") return std::exp(x);
  if (f == "log") return std::log(x);
  if (f == "sqrt") return std::sqrt(x);
  if (f == "rsqrt") return 1 / std::sqrt(x);
  if (f == "reciprocal") return 1 / x;
  if (f == "tanh") return std::tanh(x);
  if (f == "erf") return std::erf(x);
  if (f == "sigmoid") return 1 / (1 + std::exp(-x));
  if (f == "softplus") return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))) + (x - x);
  if (f == "sin") return std::sin(x);
  if (f == "cos") return std::cos(x);
  if (f == "floor") return std::floor(x);
  if (f == "ceil") return std::ceil(x);
  if (f == "round") return std::nearbyint(x);
  if (f == "relu") return x < 0 ? 0 : x;
  if (f == "silu") return x / (1 + std::exp(-x));
  if (f == "gelu") return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
  if (f == "gelu_tanh") return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  if (f == "f32") return x;
  if (f == "f16") return Rounded(DType::kF16, x);
  if (f == "bf16") return Rounded(DType::kBF16, x);
  throw std::runtime_error("no function " + f);
}
// Units that the function itself may add, of its value.
double Units(const std::string& f, double x) {
  if (f == "-1" || f == "abs" || f == "relu" || f == "floor" || f == "ceil" || f == "round" || f == "f16" ||
      f == "bf16" || f == "f32") {
    return 0;
  }
  if (f == "sqrt" || f == "reciprocal") return 1;
  if (f == "gelu_tanh") return 6 + 10 * std::fabs(x) * (1 + 0.05 * x * x);
  if (f == "rsqrt") return 3;
  return 5;
}

Approximate Checked(double value, double error) {
  if (!(error <= 1e30) || std::fabs(value) + error > kLargest) {
    const bool exact = error == 0 && !std::isfinite(value);
    return {value, exact ? 0 : kInf};
  }
  return {value, error + (error > 0 ? kTiny : 0)};
}

Approximate Unary(const std::string& f, const Approximate& a) {
  const double v = Apply(f, a.value);
  if (a.error == kInf) return {v, kInf};
  if (!std::isfinite(a.value) || !std::isfinite(v)) return {v, a.error == 0 ? 0 : kInf};
  double error = 0;
  if (a.error > 0) {
    if (Monotone(f)) {
      const double up = std::fabs(Apply(f, a.value + a.error) - v), down = std::fabs(Apply(f, a.value - a.error) - v);
      error = down <= up ? up : down;  // NaN where a root or logarithm may be of a negative number
    } else if (f == "reciprocal") {
      error = std::fabs(a.value) > 2 * a.error ? a.error / (a.value * a.value) * 2 : kInf;
    } else {
      error = 1.3 * a.error;
    }
    if (std::isnan(error)) error = kInf;
    if ((f == "floor" || f == "ceil" || f == "round") && error > 0) error = kInf;
  }
  // gelu's fp32 form errs by units of x where the value itself nearly vanishes.
  const double scale = f == "gelu" ? std::fabs(a.value) : std::fabs(v);
  return Checked(v, error + Units(f, a.value) * kUnit * scale + (Units(f, a.value) > 0 ? kTiny : 0));
}

Approximate Binary(const std::string& f, const Approximate& a, const Approximate& b) {
  const double x = a.value, y = b.value;
  double v = 0, e = 0;
  if (f == "+" || f == "-") {
    v = f == "+" ? x + y : x - y;
    e = a.error + b.error + kUnit * std::fabs(v);
  } else if (f == "*") {
    v = x * y;
    e = std::fabs(x) * b.error + std::fabs(y) * a.error + a.error * b.error + kUnit * std::fabs(v) + kTiny;
  } else if (f == "/") {
    v = x / y;
    const double least = std::fabs(y) - b.error;
    e = least > 0                      ? (a.error + std::fabs(v) * b.error) / least + kUnit * std::fabs(v) + kTiny
        : a.error == 0 && b.error == 0 ? 0
                                       : kInf;
  } else if (f == "min" || f == "max") {
    v = std::isnan(x) || std::isnan(y) ? x + y : f == "min" ? std::min(x, y) : std::max(x, y);
    e = std::max(a.error, b.error);
  } else if (f == "pow") {
    v = std::pow(x, y);
    for (double dx : {-a.error, a.error}) {
      for (double dy : {-b.error, b.error}) {
        const double corner = std::fabs(std::pow(x + dx, y + dy) - v);
        e = std::isnan(corner) && std::isfinite(v) ? kInf : std::max(e, corner);
      }
    }
    if (a.error > 0 && std::fabs(x) <= a.error) e = kInf;
    e += 5 * kUnit * std::fabs(v) + kTiny;
  } else {
    const bool truth = f == "<"    ? x < y
                       : f == "<=" ? x <= y
                       : f == ">"  ? x > y
                       : f == ">=" ? x >= y
                       : f == "==" ? x == y
                                   : x != y;
    const double both = a.error + b.error;
    return {truth ? 1.0 : 0.0, both > 0 && !(std::fabs(x - y) > both) ? 1.0 : 0.0};
  }
  if (a.error == kInf || b.error == kInf) return {v, kInf};
  if (!std::isfinite(v) && a.error == 0 && b.error == 0) {
    return {v, std::isfinite(x) && std::isfinite(y) && f != "/" ? kInf : 0};
  }
  return Checked(v, e);
}

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  struct Out {
    DType type;
    std::vector<std::vector<int>> dims;
    int root;
  };
  std::vector<Expr> nodes;
  std::vector<std::string> axes;
  std::vector<int64_t> sizes;
  std::vector<Out> outs;

  void Read(const std::vector<ChainArray>& inputs) {
    while (Take(";") || Take("\n")) continue;
    Word("axes");
    do {
      axes.push_back(Name());
      Word("=");
      if (std::isdigit(Peek()) != 0) {
        sizes.push_back(std::stoll(Digits()));
      } else {
        Word("x");
        const size_t input = std::stoul(Digits());
        Word(".");
        int64_t size = inputs.at(input).dims.at(std::stoul(Digits()));
        if (Take("/")) size /= std::stoll(Digits());
        sizes.push_back(size);
      }
    } while (Take(","));
    for (;;) {
      while (Take(";") || Take("\n")) continue;
      if (at_ >= text_.size()) return;
      if (Take("let ") || Take("let\t") || Take("let\r")) {
        const std::string name = Name();
        Word("=");
        names_[name] = Compare();
        continue;
      }
      Word("out");
      Name();
      Out out;
      const std::string type = Name();
      out.type = type == "f32" ? DType::kF32 : type == "f16" ? DType::kF16 : DType::kBF16;
      Word("[");
      do {
        std::vector<int> dim;
        if (Take("(")) {
          while (!Take(")")) dim.push_back(Axis(Name()));
        } else if (!Take("1")) {
          dim.push_back(Axis(Name()));
        }
        out.dims.push_back(dim);
      } while (Take(","));
      Word("]");
      Word("=");
      out.root = Compare();
      outs.push_back(out);
    }
  }

 private:
  char Peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool Take(const std::string& token) {
    Peek();
    if (text_.compare(at_, token.size(), token) != 0) return false;
    at_ += token.size();
    return true;
  }
  void Word(const std::string& token) {
    if (!Take(token)) throw std::runtime_error("expected " + token + " at " + text_.substr(at_, 20));
  }
  std::string Name() {
    Peek();
    const size_t begin = at_;
    while (at_ < text_.size() && (std::isalnum(text_[at_]) != 0 || text_[at_] == '_')) ++at_;
    return text_.substr(begin, at_ - begin);
  }
  std::string Digits() {
    Peek();
    const size_t begin = at_;
    while (at_ < text_.size() && std::isdigit(text_[at_]) != 0) ++at_;
    return text_.substr(begin, at_ - begin);
  }
  int Axis(const std::string& name) {
    const auto found = std::find(axes.begin(), axes.end(), name);
    if (found == axes.end()) throw std::runtime_error("no axis " + name);
    return static_cast<int>(found - axes.begin());
  }
  int Make(const std::string& name, std::vector<int> args) {
    Expr expr;
    expr.name = name;
    expr.args = std::move(args);
    nodes.push_back(expr);
    return static_cast<int>(nodes.size()) - 1;
  }
  int Compare() {
    const int left = Sum();
    for (const char* op : {"<=", ">=", "==", "!=", "<", ">"}) {
      if (Take(op)) return Make(op, {left, Sum()});
    }
    return left;
  }
  int Sum() {
    int node = Product();
    for (;;) {
      if (Take("+")) {
        node = Make("+", {node, Product()});
      } else if (Take("-")) {
        node = Make("-", {node, Product()});
      } else {
        return node;
      }
    }
  }
  int Product() {
    int node = Unary();
    for (;;) {
      if (Take("*")) {
        node = Make("*", {node, Unary()});
      } else if (Take("/")) {
        node = Make("/", {node, Unary()});
      } else {
        return node;
      }
    }
  }
  int Unary() { return Take("-") ? Make("-1", {Unary()}) : Atom(); }
  int Atom() {
    if (Take("(")) {
      const int node = Compare();
      Word(")");
      return node;
    }
    if (std::isdigit(Peek()) != 0 || Peek() == '.') {
      char* end = nullptr;
      const int node = Make("number", {});
      nodes.back().number = std::strtof(text_.c_str() + at_, &end);
      at_ = static_cast<size_t>(end - text_.c_str());
      return node;
    }
    const std::string name = Name();
    if (name == "inf" || name == "nan") {
      const int node = Make("number", {});
      nodes.back().number = name == "inf" ? kInf : std::nan("");
      return node;
    }
    if (names_.count(name) != 0) return names_[name];
    if (std::find(axes.begin(), axes.end(), name) != axes.end()) {
      const int node = Make("axis", {});
      nodes.back().which = Axis(name);
      return node;
    }
    if (Take("[")) {
      const int node = Make("read", {});
      nodes.back().which = std::stoi(name.substr(1));
      std::vector<Dim> dims;
      if (!Take("]")) {
        do dims.push_back(ReadDim());
        while (Take(","));
        Word("]");
      }
      nodes.back().index = dims;
      return node;
    }
    Word("(");
    std::vector<int> args;
    do args.push_back(Compare());
    while (Take(","));
    Word(")");
    return Make(name, args);
  }
  Dim ReadDim() {
    Dim dim;
    const bool nested = Take("(");
    int64_t sign = Take("-") ? -1 : 1;
    for (;;) {
      int64_t factor = 1;
      int axis = -1;
      if (std::isdigit(Peek()) != 0) {
        factor = std::stoll(Digits());
        if (Take("*")) axis = Axis(Name());
      } else {
        axis = Axis(Name());
      }
      dim.terms.emplace_back(sign * factor, axis);
      if (Take("+")) {
        sign = 1;
      } else if (Take("-")) {
        sign = -1;
      } else {
        break;
      }
    }
    if (!nested) return dim;
    Word(")");
    dim.kind = Take("%") ? '%' : '/';
    if (dim.kind == '/') Word("//");
    dim.by = std::stoll(Digits());
    return dim;
  }

  const std::string text_;
  size_t at_ = 0;
  std::map<std::string, int> names_;
};

class Evaluator {
 public:
  Evaluator(const Reader& reader, const std::vector<ChainArray>& inputs)
      : r_(reader),
        inputs_(inputs),
        index_(reader.sizes.size(), 0),
        known_(reader.nodes.size()),
        stamp_(reader.nodes.size(), 0),
        row_known_(reader.nodes.size()),
        row_stamp_(reader.nodes.size(), 0) {}

  ChainAnswer Output(const Reader::Out& out) {
    ChainAnswer answer;
    answer.dtype = out.type;
    int64_t total = 1;
    bool row = false;
    for (const auto& dim : out.dims) {
      int64_t size = 1;
      for (int axis : dim) {
        size *= r_.sizes[static_cast<size_t>(axis)];
        row = row || axis == static_cast<int>(r_.axes.size()) - 1;
      }
      answer.dims.push_back(size);
      total *= size;
    }
    answer.values.resize(static_cast<size_t>(total));
    if (total > 0) Walk(out, 0, row, &answer);
    return answer;
  }

 private:
  void Walk(const Reader::Out& out, size_t axis, bool row, ChainAnswer* answer) {
    const size_t last = r_.axes.size() - 1;
    if (axis == last) ++row_now_;
    if (axis > last || (axis == last && !row)) {
      index_[last] = axis > last ? index_[last] : 0;
      ++now_;
      int64_t at = 0;
      for (const auto& dim : out.dims) {
        for (int a : dim) at = at * r_.sizes[static_cast<size_t>(a)] + index_[static_cast<size_t>(a)];
      }
      answer->values[static_cast<size_t>(at)] = Value(out.root);
      return;
    }
    for (index_[axis] = 0; index_[axis] < r_.sizes[axis]; ++index_[axis]) Walk(out, axis + 1, row, answer);
  }

  Approximate Value(int node) {
    const auto i = static_cast<size_t>(node);
    if (stamp_[i] != now_) {
      const Approximate value = Compute(r_.nodes[i], i);
      known_[i] = value;
      stamp_[i] = now_;
    }
    return known_[i];
  }

  Approximate Compute(const Expr& e, size_t i) {
    if (e.name == "number") return {e.number, 0};
    if (e.name == "axis") {
      const auto x = static_cast<double>(index_[static_cast<size_t>(e.which)]);
      return {x, x > 0x1p24 ? 1.0 : 0.0};
    }
    if (e.name == "read") return {Element(e), 0};
    if (e.name == "select") {
      const Approximate c = Value(e.args[0]);
      if (c.error == 0) return Value(e.args[c.value != 0 ? 1 : 2]);
      const Approximate a = Value(e.args[1]), b = Value(e.args[2]);
      const double apart = std::fabs(a.value - b.value);
      return {c.value != 0 ? a.value : b.value, std::max(a.error, b.error) + (std::isnan(apart) ? kInf : apart)};
    }
    if (e.name == "sum" || e.name == "mean" || e.name == "max_of" || e.name == "min_of") {
      if (row_stamp_[i] != row_now_) {
        row_known_[i] = Reduce(e);
        row_stamp_[i] = row_now_;
      }
      return row_known_[i];
    }
    if (e.args.size() == 1) return Unary(e.name, Value(e.args[0]));
    const Approximate a = Value(e.args[0]);
    return Binary(e.name, a, Value(e.args[1]));
  }

  Approximate Reduce(const Expr& e) {
    const size_t last = r_.axes.size() - 1;
    const int64_t kept = index_[last];
    const bool max = e.name == "max_of", sum = e.name == "sum" || e.name == "mean";
    double value = sum ? 0 : max ? -kInf : kInf, error = 0, size = 0;
    bool exact = true;
    for (index_[last] = 0; index_[last] < r_.sizes[last]; ++index_[last]) {
      ++now_;
      const Approximate one = Value(e.args[0]);
      exact = exact && one.error == 0;
      size += std::fabs(one.value);
      if (sum) {
        value += one.value, error += one.error;
      } else {
        error = std::max(error, one.error);
        if (std::isnan(value) || std::isnan(one.value)) {
          value = std::nan("");
        } else {
          value = max ? std::max(value, one.value) : std::min(value, one.value);
        }
      }
    }
    index_[last] = kept;
    ++now_;
    if (!sum) return error == kInf ? Approximate{value, kInf} : Checked(value, error);
    const auto n = static_cast<double>(r_.sizes[last]);
    if (e.name == "mean") value /= n, error /= n, size /= n;
    if (!std::isfinite(value)) return {value, exact && !std::isfinite(size) ? 0.0 : exact && n == 0 ? 0.0 : kInf};
    // Three additions in fp32, then fp64; a fused product's rounding is within these.
    return Checked(value, error + 4 * kUnit * size + 2 * kUnit * std::fabs(value));
  }

  double Element(const Expr& e) const {
    const ChainArray& input = inputs_.at(static_cast<size_t>(e.which));
    if (input.dims.size() != e.index.size()) throw std::runtime_error("rank");
    int64_t at = 0;
    for (size_t d = 0; d < e.index.size(); ++d) {
      int64_t x = 0;
      for (const auto& [factor, axis] : e.index[d].terms)
        x += factor * (axis < 0 ? 1 : index_[static_cast<size_t>(axis)]);
      const int64_t by = e.index[d].by;
      const int64_t rest = (x % by + by) % by;
      if (e.index[d].kind == '%') x = rest;
      if (e.index[d].kind == '/') x = (x - rest) / by;
      if (x < 0 || x >= input.dims[d])
        throw std::runtime_error("index " + std::to_string(x) + " of x" + std::to_string(e.which));
      at = at * input.dims[d] + x;
    }
    return input.values.at(static_cast<size_t>(at));
  }

  const Reader& r_;
  const std::vector<ChainArray>& inputs_;
  std::vector<int64_t> index_;
  std::vector<Approximate> known_;
  std::vector<int64_t> stamp_;
  std::vector<Approximate> row_known_;
  std::vector<int64_t> row_stamp_;
  int64_t now_ = 0, row_now_ = 0;
};

}  // namespace

std::vector<ChainAnswer> EvaluateChain(const std::string& text, const std::vector<ChainArray>& inputs) {
  Reader reader(text);
  reader.Read(inputs);
  std::vector<ChainAnswer> answers;
  for (const Reader::Out& out : reader.outs) {
    Evaluator evaluator(reader, inputs);
    answers.push_back(evaluator.Output(out));
  }
  return answers;
}

double ChainTolerance(DType dtype, const Approximate& expected) {
  const double size = std::fabs(expected.value) + expected.error;
  if (dtype == DType::kF32) return expected.error + kUnit * size + kTiny;
  if (dtype == DType::kBF16) return expected.error + 0x1p-8 * size * 1.01 + 0x1p-133;
  return expected.error + 0x1p-11 * size * 1.01 + 0x1p-24;
}

}  // namespace stof::test
