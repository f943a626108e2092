// SPDX-License-Identifier: Apache-2.0
// Recursive descent over the grammar of docs/reference/chain-format.md. Every limit is checked before memory or stack
// is spent.
// Over 500 lines: one parser.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <limits>
#include <map>

#include "plugins/core/base/ascii.h"
#include "plugins/core/chain/chain.h"
#include "plugins/core/host/quoted.h"

namespace stof {
namespace {

struct Function {
  const char* name;
  ChainOp op;
};
constexpr Function kFunctions[] = {
    {"abs", ChainOp::kAbs},
    {"exp", ChainOp::kExp},
    {"log", ChainOp::kLog},
    {"sqrt", ChainOp::kSqrt},
    {"rsqrt", ChainOp::kRsqrt},
    {"reciprocal", ChainOp::kReciprocal},
    {"tanh", ChainOp::kTanh},
    {"erf", ChainOp::kErf},
    {"sigmoid", ChainOp::kSigmoid},
    {"softplus", ChainOp::kSoftplus},
    {"sin", ChainOp::kSin},
    {"cos", ChainOp::kCos},
    {"floor", ChainOp::kFloor},
    {"ceil", ChainOp::kCeil},
    {"round", ChainOp::kRound},
    {"relu", ChainOp::kRelu},
    {"silu", ChainOp::kSilu},
    {"gelu", ChainOp::kGelu},
    {"gelu_tanh", ChainOp::kGeluTanh},
    {"f16", ChainOp::kRoundF16},
    {"bf16", ChainOp::kRoundBf16},
    {"min", ChainOp::kMin},
    {"max", ChainOp::kMax},
    {"pow", ChainOp::kPow},
    {"select", ChainOp::kSelect},
    {"sum", ChainOp::kSum},
    {"mean", ChainOp::kMean},
    {"max_of", ChainOp::kMaxOf},
    {"min_of", ChainOp::kMinOf},
};

bool IsNameStart(char c) { return IsLetter(c) || c == '_'; }
bool IsBlankInLine(char c) { return c == ' ' || c == '\t' || c == '\r'; }

// x or y and digits.
bool IsTensorName(std::string_view word) {
  return word.size() > 1 && (word[0] == 'x' || word[0] == 'y') && std::all_of(word.begin() + 1, word.end(), IsDigit);
}

bool IsReserved(std::string_view word) {
  for (const char* own : {"axes", "let", "out", "inf", "nan", "f32"}) {
    if (word == own) return true;
  }
  for (const Function& function : kFunctions) {
    if (word == function.name) return true;
  }
  return IsTensorName(word);
}

class Parser {
 public:
  Parser(std::string_view text, Chain* chain) : text_(text), chain_(*chain) {}

  Status Run() {
    if (text_.size() > kChainMostText) {
      return Status::Error("chain: " + std::to_string(text_.size()) + " bytes of text, expected at most 16384");
    }
    chain_ = Chain();
    bool first = true;
    for (line_ = 1; error_.empty(); ++line_) {
      Skip();
      if (!AtEndOfLine()) {
        Line(first);
        first = false;
        if (error_.empty() && !AtEndOfLine()) FailExpected("the end of the line");
      }
      if (!error_.empty() || at_ == text_.size()) break;
      ++at_;  // the separator
    }
    if (error_.empty() && first) Fail("found nothing, expected 'axes'");
    if (error_.empty() && chain_.outputs.empty()) Fail("found no output, expected 'out y0'");
    if (!error_.empty()) return Status::Error("chain, line " + std::to_string(line_) + ": " + error_);
    return Status();
  }

 private:
  // ---- characters and words ----
  void Skip() {
    while (at_ < text_.size() && IsBlankInLine(text_[at_])) ++at_;
  }
  bool AtEndOfLine() {
    Skip();
    return at_ == text_.size() || text_[at_] == ';' || text_[at_] == '\n';
  }
  int Fail(std::string message) {
    if (error_.empty()) error_ = std::move(message);
    return -1;
  }
  std::string_view Next() {
    if (AtEndOfLine()) return {};
    size_t end = at_;
    while (end < text_.size() && (IsNameStart(text_[end]) || IsDigit(text_[end]))) ++end;
    return text_.substr(at_, std::max<size_t>(1, end - at_));
  }
  int FailExpected(const std::string& what) {
    const std::string_view next = Next();
    return Fail("found " + (next.empty() ? "the end of the line" : Quote(next)) + ", expected " + what);
  }
  bool Take(char c) {
    Skip();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool Take(const char* token) {
    Skip();
    const std::string_view wanted(token);
    if (text_.substr(at_, wanted.size()) != wanted) return false;
    at_ += wanted.size();
    return true;
  }
  bool Want(char c) { return Take(c) || FailExpected(std::string("'") + c + "'") == 0; }
  std::string_view Word() {
    if (AtEndOfLine() || !IsNameStart(text_[at_])) return {};
    const std::string_view word = Next();
    at_ += word.size();
    return word;
  }
  bool TakeWord(std::string_view wanted) {
    if (AtEndOfLine() || Next() != wanted) return false;
    at_ += wanted.size();
    return true;
  }

  // Digits, at most 2^31.
  bool Integer(int64_t* value) {
    if (AtEndOfLine() || !IsDigit(text_[at_])) return FailExpected("an integer") == 0;
    int64_t sum = 0;
    const size_t begin = at_;
    for (; at_ < text_.size() && IsDigit(text_[at_]); ++at_) {
      sum = sum * 10 + (text_[at_] - '0');
      if (sum > kChainMostInteger) {
        return Fail("found " + Quote(text_.substr(begin)) + ", expected an integer of at most 2^31") == 0;
      }
    }
    *value = sum;
    return true;
  }

  // x and a number of at most 15.
  bool Input(std::string_view word, int* input) {
    *input = kChainMostInputs;
    std::from_chars(word.data() + 1, word.data() + word.size(), *input);
    if (word.size() > 3 || *input >= kChainMostInputs) {
      return Fail("found " + Quote(word) + ", expected x0 to x15") == 0;
    }
    chain_.inputs = std::max(chain_.inputs, *input + 1);
    return true;
  }

  // ---- lines ----
  void Line(bool first) {
    if (first) {
      if (!TakeWord("axes")) {
        FailExpected("'axes' in the first line");
        return;
      }
      do Axis();
      while (error_.empty() && Take(','));
      return;
    }
    if (TakeWord("let")) return Let();
    if (TakeWord("out")) return Out();
    FailExpected("'let' or 'out'");
  }

  bool NewName(std::string_view word) {
    if (word.empty()) return FailExpected("a name") == 0;
    if (IsReserved(word)) return Fail("found " + Quote(word) + ", expected a name that means nothing else") == 0;
    if (names_.count(std::string(word)) != 0 || AxisOf(word) >= 0) {
      return Fail("found " + Quote(word) + ", expected a name that is not defined yet") == 0;
    }
    return true;
  }
  int AxisOf(std::string_view word) const {
    for (size_t i = 0; i < chain_.axes.size(); ++i) {
      if (chain_.axes[i].name == word) return static_cast<int>(i);
    }
    return -1;
  }

  void Axis() {
    if (chain_.axes.size() == kChainMostAxes) {
      Fail("found a seventh axis, expected 1 to 6");
      return;
    }
    ChainAxis axis;
    const std::string_view name = Word();
    if (!NewName(name) || !Want('=')) return;
    axis.name = name;
    Skip();
    if (at_ < text_.size() && IsDigit(text_[at_])) {
      if (!Integer(&axis.value)) return;
    } else {
      const std::string_view word = Word();
      if (!IsTensorName(word) || word[0] != 'x') {
        if (word.empty()) {
          FailExpected("a size: an integer or a dimension such as x0.1");
        } else {
          Fail("found " + Quote(word) + ", expected a size: an integer or a dimension such as x0.1");
        }
        return;
      }
      int64_t dim = 0;
      if (!Input(word, &axis.input) || !Want('.') || !Integer(&dim)) return;
      if (dim >= kMaxRank) {
        Fail("found dimension " + std::to_string(dim) + ", expected 0 to 7");
        return;
      }
      axis.dim = static_cast<int>(dim);
      if (Take('/')) {
        if (!Integer(&axis.over)) return;
        if (axis.over < 1) {
          Fail("found '/ 0', expected a divisor of 1 or more");
          return;
        }
      }
    }
    chain_.axes.push_back(axis);
  }

  void Let() {
    const std::string name(Word());
    if (!NewName(name) || !Want('=')) return;
    const int node = Expression();
    if (node >= 0) names_[name] = node;
  }

  void Out() {
    const std::string_view word = Word();
    const std::string wanted = "y" + std::to_string(chain_.outputs.size());
    if (chain_.outputs.size() == kChainMostOutputs) {
      Fail("found a ninth output, expected at most 8");
      return;
    }
    if (word != wanted) {
      Fail("found " + Quote(word) + ", expected " + wanted);
      return;
    }
    ChainOutput output;
    output.line = line_;
    const std::string_view type = Word();
    if (type == "f32") {
      output.type = DType::kF32;
    } else if (type == "f16") {
      output.type = DType::kF16;
    } else if (type == "bf16") {
      output.type = DType::kBF16;
    } else {
      Fail("found " + Quote(type) + ", expected f32, f16 or bf16");
      return;
    }
    if (!Want('[')) return;
    uint32_t seen = 0;
    do Dim(&output, &seen);
    while (error_.empty() && Take(','));
    if (!error_.empty() || !Want(']') || !Want('=')) return;
    output.node = Expression();
    if (output.node < 0) return;
    for (int axis = 0; axis <= chain_.last(); ++axis) {
      if ((seen >> axis & 1) != 0) continue;
      if (axis == chain_.last() && !chain_.VariesAlongRow(output.node)) continue;
      Fail("found no axis " + chain_.axes[static_cast<size_t>(axis)].name + " in the dimensions of " + wanted +
           ", expected every axis once" + (axis == chain_.last() ? ": the value varies along it" : ""));
      return;
    }
    chain_.outputs.push_back(std::move(output));
  }

  void Dim(ChainOutput* output, uint32_t* seen) {
    if (output->dims.size() == kMaxRank) {
      Fail("found a ninth dimension, expected at most 8");
      return;
    }
    std::vector<int> axes;
    const auto axis = [&] {
      const std::string_view word = Word();
      const int found = AxisOf(word);
      if (found < 0) {
        if (word.empty()) return FailExpected("an axis, several in parentheses, or 1") == 0;
        return Fail("found " + Quote(word) + ", expected an axis") == 0;
      }
      if ((*seen >> found & 1) != 0) return Fail("found " + Quote(word) + " twice, expected every axis once") == 0;
      *seen |= 1u << found;
      axes.push_back(found);
      return true;
    };
    if (Take('(')) {
      do {
        if (!axis()) return;
      } while (!Take(')'));
    } else if (!AtEndOfLine() && IsDigit(text_[at_])) {
      int64_t one = 0;
      if (!Integer(&one)) return;
      if (one != 1) {
        Fail("found " + std::to_string(one) + ", expected an axis, several in parentheses, or 1");
        return;
      }
    } else if (!axis()) {
      return;
    }
    output->dims.push_back(std::move(axes));
  }

  // ---- expressions: each function gives the number of its node, or -1 once error_ is set ----
  struct Nested {
    explicit Nested(Parser* parser) : parser(parser) {
      if (++parser->depth_ > kChainMostDepth) parser->Fail("found an expression nested deeper than 64");
    }
    ~Nested() { --parser->depth_; }
    bool ok() const { return parser->error_.empty(); }
    Parser* parser;
  };

  int Expression() {
    const Nested nested(this);
    if (!nested.ok()) return -1;
    const int left = Sum();
    if (left < 0) return -1;
    static constexpr struct {
      const char* token;
      ChainOp op;
    } kCompare[] = {{"<=", ChainOp::kLe}, {">=", ChainOp::kGe}, {"==", ChainOp::kEq},
                    {"!=", ChainOp::kNe}, {"<", ChainOp::kLt},  {">", ChainOp::kGt}};
    for (const auto& compare : kCompare) {
      if (Take(compare.token)) return Add(compare.op, left, Sum());
    }
    return left;
  }
  int Sum() {
    int node = Product();
    while (node >= 0) {
      if (Take('+')) {
        node = Add(ChainOp::kAdd, node, Product());
      } else if (Take('-')) {
        node = Add(ChainOp::kSub, node, Product());
      } else {
        break;
      }
    }
    return node;
  }
  int Product() {
    int node = Unary();
    while (node >= 0) {
      if (Take('*')) {
        node = Add(ChainOp::kMul, node, Unary());
      } else if (Take('/')) {
        node = Add(ChainOp::kDiv, node, Unary());
      } else {
        break;
      }
    }
    return node;
  }
  int Unary() {
    if (!Take('-')) return Atom();
    const Nested nested(this);
    const int node = nested.ok() ? Unary() : -1;
    if (node < 0) return -1;
    const ChainNode& arg = chain_.nodes[static_cast<size_t>(node)];
    return arg.op == ChainOp::kConstant ? Constant(-arg.value) : Add(ChainOp::kNeg, node);
  }

  int Atom() {
    if (AtEndOfLine()) return FailExpected("a value");
    if (Take('(')) {
      const int node = Expression();
      return node >= 0 && Want(')') ? node : -1;
    }
    if (IsDigit(text_[at_]) || text_[at_] == '.') return Number();
    const std::string_view word = Word();
    if (word.empty()) return FailExpected("a value");
    if (word == "inf") return Constant(std::numeric_limits<float>::infinity());
    if (word == "nan") return Constant(std::numeric_limits<float>::quiet_NaN());
    if (IsTensorName(word) && word[0] == 'x') return Read(word);
    if (word == "f32") return Want('(') ? Rest(Expression()) : -1;
    for (const Function& function : kFunctions) {
      if (word == function.name) return Call(function);
    }
    const int axis = AxisOf(word);
    if (axis >= 0) {
      ChainNode node;
      node.op = ChainOp::kAxis;
      node.which = axis;
      node.axes = 1u << axis;
      return Unique(node);
    }
    const auto named = names_.find(std::string(word));
    if (named != names_.end()) return named->second;
    return Fail("found " + Quote(word) +
                ", expected a number, an input, an axis, a function or a name that is defined");
  }
  int Rest(int node) { return node >= 0 && Want(')') ? node : -1; }

  int Call(const Function& function) {
    if (!Want('(')) return -1;
    int arg[3] = {-1, -1, -1};
    const int count = ArityOf(function.op);
    for (int i = 0; i < count; ++i) {
      if (i > 0 && !Want(',')) return -1;
      arg[i] = Expression();
      if (arg[i] < 0) return -1;
    }
    return Rest(Add(function.op, arg[0], arg[1], arg[2]));
  }

  int Number() {
    const char* begin = text_.data() + at_;
    const char* const end = text_.data() + text_.size();
    const bool hex = end - begin > 2 && begin[0] == '0' && (begin[1] == 'x' || begin[1] == 'X');
    const char* const digits = hex ? begin + 2 : begin;
    const auto format = hex ? std::chars_format::hex : std::chars_format::general;
    double value = 0;
    float single = 0;
    auto result = std::from_chars(digits, end, value, format);
    // Of a double, and so not "-0x1p3" or "0x-1", which from_chars alone would take.
    const bool bad = result.ec != std::errc() || digits == end || *digits == '-' || *digits == '+';
    if (bad || (result.ptr < end && (IsNameStart(*result.ptr) || IsDigit(*result.ptr) || *result.ptr == '.'))) {
      return FailExpected("a floating-point number");
    }
    if (std::from_chars(digits, end, single, format).ec != std::errc()) {
      // Too large or too small for fp32.
      single = value > 1.0 ? std::numeric_limits<float>::infinity() : static_cast<float>(value);
    }
    at_ += static_cast<size_t>(result.ptr - begin);
    return Constant(single);
  }

  int Read(std::string_view word) {
    ChainRead read;
    read.line = line_;
    if (!Input(word, &read.input) || !Want('[')) return -1;
    uint32_t axes = 0;
    if (!Take(']')) {
      do {
        if (read.index.size() == kMaxRank) return Fail("found a ninth index, expected at most 8");
        ChainIndex index;
        if (!Index(&index)) return -1;
        for (int i = 0; i < kChainMostAxes; ++i) axes |= index.coefficient[i] != 0 ? 1u << i : 0u;
        read.index.push_back(index);
      } while (Take(','));
      if (!Want(']')) return -1;
    }
    ChainNode node;
    node.op = ChainOp::kRead;
    node.axes = axes;
    node.which = SameRead(read);
    if (node.which == static_cast<int>(chain_.reads.size())) chain_.reads.push_back(std::move(read));
    return Unique(node);
  }
  int SameRead(const ChainRead& read) const {
    for (size_t i = 0; i < chain_.reads.size(); ++i) {
      const ChainRead& other = chain_.reads[i];
      if (other.input != read.input || other.index.size() != read.index.size()) continue;
      bool same = true;
      for (size_t d = 0; d < read.index.size(); ++d) {
        const ChainIndex &a = other.index[d], &b = read.index[d];
        same = same && a.kind == b.kind && a.divisor == b.divisor && a.constant == b.constant &&
               std::equal(a.coefficient, a.coefficient + kChainMostAxes, b.coefficient);
      }
      if (same) return static_cast<int>(i);
    }
    return static_cast<int>(chain_.reads.size());
  }

  bool Index(ChainIndex* index) {
    if (!Take('(')) return Affine(index);
    if (!Affine(index) || !Want(')')) return false;
    if (Take('%')) {
      index->kind = ChainIndex::Kind::kModulo;
    } else if (Take("//")) {
      index->kind = ChainIndex::Kind::kQuotient;
    } else {
      return FailExpected("'%' or '//' behind a parenthesis in an index") == 0;
    }
    if (!Integer(&index->divisor)) return false;
    if (index->divisor < 1) return Fail("found a divisor of 0, expected 1 or more") == 0;
    return true;
  }
  bool Affine(ChainIndex* index) {
    bool minus = Take('-');
    for (;;) {
      if (AtEndOfLine()) return FailExpected("an integer or an axis in an index") == 0;
      int64_t factor = 1;
      int axis = -1;
      if (IsDigit(text_[at_])) {
        if (!Integer(&factor)) return false;
        if (Take('*')) {
          axis = AxisOf(Word());
          if (axis < 0) return Fail("found another factor in an index, expected an axis behind '*'") == 0;
        }
      } else {
        const std::string_view next = Next();
        axis = AxisOf(next);
        if (axis < 0) return FailExpected("an integer or an axis in an index") == 0;
        at_ += next.size();
      }
      int64_t& sum = axis < 0 ? index->constant : index->coefficient[axis];
      sum += minus ? -factor : factor;
      if (sum > kChainMostInteger || sum < -kChainMostInteger) {
        return Fail("found an index that adds up to " + std::to_string(sum) + ", expected within 2^31") == 0;
      }
      if (Take('+')) {
        minus = false;
      } else if (Take('-')) {
        minus = true;
      } else {
        return true;
      }
    }
  }

  // ---- nodes ----
  int Constant(float value) {
    ChainNode node;
    node.value = value;
    return Unique(node);
  }
  int Add(ChainOp op, int a, int b = -1, int c = -1) {
    const int arity = ArityOf(op);
    if (a < 0 || (arity > 1 && b < 0) || (arity > 2 && c < 0)) return -1;
    ChainNode node;
    node.op = op;
    const int arg[3] = {a, b, c};
    for (int i = 0; i < arity; ++i) {
      node.arg[i] = arg[i];
      const ChainNode& from = chain_.nodes[static_cast<size_t>(arg[i])];
      node.axes |= from.axes;
      node.level = std::max(node.level, from.level);
    }
    if (IsReduction(op)) {
      node.axes &= ~(1u << chain_.last());
      ++node.level;
    }
    return Unique(node);
  }
  int Unique(const ChainNode& node) {
    uint32_t bits = 0;
    std::memcpy(&bits, &node.value, 4);
    const std::array<int64_t, 6> key = {
        static_cast<int64_t>(node.op), node.arg[0], node.arg[1], node.arg[2], node.which, bits};
    const auto found = seen_.find(key);
    if (found != seen_.end()) return found->second;
    if (chain_.nodes.size() == kChainMostNodes) return Fail("found more than 256 nodes");
    if (IsReduction(node.op) && ++reductions_ > kChainMostReductions) return Fail("found more than 16 reductions");
    chain_.nodes.push_back(node);
    const int index = static_cast<int>(chain_.nodes.size()) - 1;
    seen_[key] = index;
    return index;
  }

  const std::string_view text_;
  Chain& chain_;
  size_t at_ = 0;
  int line_ = 1;
  int depth_ = 0;
  int reductions_ = 0;
  std::string error_;
  std::map<std::string, int> names_;
  std::map<std::array<int64_t, 6>, int> seen_;
};

}  // namespace

Status ParseChain(std::string_view text, Chain* chain) { return Parser(text, chain).Run(); }

}  // namespace stof
