// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/chain/chain_random.h"

#include <algorithm>

#include "tests/cpp/attention/reference.h"

namespace stof::test {
namespace {

const char* const kAxisNames[] = {"b", "h", "s", "t", "u", "n"};

class Maker {
 public:
  Maker(Random* random, int64_t n, int64_t most_rows) : random_(*random), n_(n), most_rows_(most_rows) {}

  RandomChain Run() {
    Axes();
    const int lets = static_cast<int>(random_.Range(0, 5));
    std::string body;
    for (int i = 0; i < lets; ++i) {
      const std::string name = "v" + std::to_string(i);
      body += "let " + name + " = " + Expr(static_cast<int>(random_.Range(1, 3)), true) + Separator();
      names_.push_back(name);
    }
    const int outs = static_cast<int>(random_.Range(1, 3));
    for (int i = 0; i < outs; ++i) body += Out(i) + (i + 1 < outs ? Separator() : "");
    chain_.text = AxesLine() + Separator() + body;
    for (ChainArray& input : chain_.inputs) FillChainArray(&random_, &input);
    return chain_;
  }

 private:
  std::string Separator() { return random_.OneIn(2) ? "\n" : "; "; }
  void Axes() {
    const int outer = static_cast<int>(random_.Range(0, 4));
    int64_t rows = 1;
    for (int i = 0; i < outer; ++i) {
      const int64_t size = random_.Range(1, std::max<int64_t>(1, std::min<int64_t>(7, most_rows_ / rows)));
      rows *= size;
      axes_.push_back(kAxisNames[i]);
      sizes_.push_back(size);
    }
    axes_.push_back("n");
    sizes_.push_back(n_);
  }
  // Sizes as integers, or as dimensions of inputs, which are made for it.
  std::string AxesLine() {
    std::string line = "axes ";
    for (size_t i = 0; i < axes_.size(); ++i) {
      line += (i > 0 ? ", " : "") + axes_[i] + " = ";
      std::string size = std::to_string(sizes_[i]);
      for (size_t input = 0; input < chain_.inputs.size() && random_.OneIn(2); ++input) {
        const auto& dims = chain_.inputs[input].dims;
        for (size_t d = 0; d < dims.size(); ++d) {
          if (sizes_[i] == 0 || dims[d] % sizes_[i] != 0) continue;
          size = "x" + std::to_string(input) + "." + std::to_string(d);
          if (dims[d] != sizes_[i] || random_.OneIn(4)) size += " / " + std::to_string(dims[d] / sizes_[i]);
        }
      }
      line += size;
    }
    return line;
  }

  std::string Number() {
    static const char* const kNumbers[] = {"2", "0.5", "1e-5", "-1", "0x1.8p1", "3", "0.044715", "1"};
    return kNumbers[random_.Range(0, 7)];
  }

  // An index of one axis or several, and the size that its dimension needs.
  std::string Index(int64_t low_n, int64_t high_n, int64_t* size) {
    std::vector<int64_t> factor(axes_.size(), 0);
    const int kind = static_cast<int>(random_.Range(0, 9));
    const auto any = static_cast<size_t>(random_.Range(0, static_cast<int64_t>(axes_.size()) - 1));
    const size_t axis = random_.OneIn(2) ? axes_.size() - 1 : any;
    factor[axis] = kind == 0 ? 2 : kind == 1 ? -1 : kind == 2 ? 0 : 1;
    if (kind == 3 && axes_.size() > 1) factor[any] += sizes_.back() > 0 ? sizes_.back() : 1;
    int64_t low = 0, high = 0;
    for (size_t i = 0; i < factor.size(); ++i) {
      const int64_t first = i + 1 == factor.size() ? low_n : 0;
      const int64_t last = i + 1 == factor.size() ? high_n : sizes_[i] - 1;
      low += factor[i] * (factor[i] > 0 ? first : last);
      high += factor[i] * (factor[i] > 0 ? last : first);
    }
    const int64_t constant = -low + (random_.OneIn(3) ? random_.Range(0, 3) : 0);
    high += constant;
    std::string text = constant == 0 ? "" : std::to_string(constant);
    for (size_t i = 0; i < factor.size(); ++i) {
      if (factor[i] == 0) continue;
      const int64_t magnitude = std::abs(factor[i]);
      text += factor[i] < 0 ? " - " : text.empty() ? "" : " + ";
      text += (magnitude == 1 ? "" : std::to_string(magnitude) + " * ") + axes_[i];
    }
    if (text.empty()) text = "0";
    *size = std::max<int64_t>(high, 0) + 1;
    if (kind > 4 || kind < 3) return text;
    const int64_t by = random_.Range(1, 9);
    const bool modulo = random_.OneIn(2);
    *size = modulo ? by : *size / by + 1;
    return "(" + text + ")" + (modulo ? " % " : " // ") + std::to_string(by);
  }

  std::string Read(int64_t low_n, int64_t high_n) {
    ChainArray array;
    array.dtype = random_.Pick<DType>({DType::kF32, DType::kF32, DType::kF16, DType::kBF16});
    std::string text;
    const int shape = static_cast<int>(random_.Range(0, 5));
    if (shape <= 2) {  // all axes, or some, in their order: what most chains read
      for (size_t i = 0; i < axes_.size(); ++i) {
        if (shape == 1 && i + 1 < axes_.size() && random_.OneIn(2)) continue;
        if (shape == 2 && i + 1 == axes_.size()) continue;
        text += (text.empty() ? "" : ", ") + axes_[i];
        array.dims.push_back(i + 1 == axes_.size() ? std::max<int64_t>(0, high_n + 1) : sizes_[i]);
      }
    } else {
      const int rank = static_cast<int>(random_.Range(0, 3));
      for (int d = 0; d < rank; ++d) {
        int64_t size = 1;
        text += (d > 0 ? ", " : "") + Index(low_n, high_n, &size);
        array.dims.push_back(size);
      }
    }
    int64_t elements = 1;
    for (int64_t dim : array.dims) elements *= dim;
    if (chain_.inputs.size() == 8 || elements > 400000) return Number();
    chain_.inputs.push_back(array);
    return "x" + std::to_string(chain_.inputs.size() - 1) + "[" + text + "]";
  }

  std::string Select(int depth, bool row) {
    const auto a = static_cast<size_t>(random_.Range(0, static_cast<int64_t>(axes_.size()) - 1));
    const bool last = a + 1 == axes_.size();
    if (!last || n_ < 2 || random_.OneIn(3)) {
      return "select(" + Expr(depth - 1, row) + " > 0.25, " + Expr(depth - 1, row) + ", " + Expr(depth - 1, row) + ")";
    }
    // A turn by part of the row, whose reads are in range on their own side alone.
    const int64_t cut = random_.Range(1, n_ - 1);
    const std::string k = std::to_string(cut);
    ChainArray array;
    array.dtype = random_.Pick<DType>({DType::kF32, DType::kF16});
    array.dims = {n_};
    if (chain_.inputs.size() >= 8) return Number();
    chain_.inputs.push_back(array);
    const std::string x = "x" + std::to_string(chain_.inputs.size() - 1);
    const std::string there = x + "[n + " + std::to_string(n_ - cut) + "]", here = x + "[n - " + k + "]";
    const int kind = static_cast<int>(random_.Range(0, 3));
    if (kind == 0) return "select(n < " + k + ", -" + there + ", " + here + ")";
    if (kind == 1) return "select(n >= " + k + ", " + here + ", " + there + ")";
    if (kind == 2) return "select(" + k + " > n, " + there + ", " + Expr(depth - 1, row) + ")";
    return "select(n == 0, " + x + "[n + " + std::to_string(n_ - 1) + "], " + x + "[n - 1])";
  }

  std::string Expr(int depth, bool row) {
    if (depth <= 0) {
      const int kind = static_cast<int>(random_.Range(0, 7));
      if (kind == 0) return Number();
      if (kind == 1)
        return "(" + axes_[static_cast<size_t>(random_.Range(0, static_cast<int64_t>(axes_.size()) - 1))] + ")";
      if (kind <= 4 && !names_.empty()) return random_.Pick(names_);
      return Read(0, n_ - 1);
    }
    static const char* const kUnary[] = {
        "abs", "exp",   "log",  "sqrt",  "rsqrt", "reciprocal", "tanh", "erf",       "sigmoid", "softplus", "sin",
        "cos", "floor", "ceil", "round", "relu",  "silu",       "gelu", "gelu_tanh", "f16",     "bf16",     "f32"};
    static const char* const kBinary[] = {"+", "-", "*", "/", "+", "*", "-", "*", "<", ">=", "!=", "=="};
    const int kind = static_cast<int>(random_.Range(0, 11));
    if (kind <= 4) {
      const std::string op = kBinary[random_.Range(0, 11)];
      return "(" + Expr(depth - 1, row) + " " + op + " " + Expr(depth - 1, row) + ")";
    }
    if (kind <= 6) {
      const std::string f = kUnary[random_.Range(0, 21)];
      const std::string arg = Expr(depth - 1, row);
      return f + "(" + (f == "log" || f.find("sqrt") != std::string::npos ? "abs(" + arg + ") + 0.5" : arg) + ")";
    }
    if (kind == 7)
      return (random_.OneIn(2) ? "min(" : "max(") + Expr(depth - 1, row) + ", " + Expr(depth - 1, row) + ")";
    if (kind == 8) return random_.OneIn(2) ? "pow(" + Expr(depth - 1, row) + ", 2)" : "-" + Expr(depth - 1, row);
    if (kind == 9 || !row || reductions_ >= 6) return Select(depth, row);
    ++reductions_;
    static const char* const kReduce[] = {"sum", "mean", "max_of", "min_of", "mean"};
    return std::string(kReduce[random_.Range(0, 4)]) + "(" + Expr(depth - 1, random_.OneIn(3)) + ")";
  }

  std::string Out(int index) {
    std::vector<size_t> order;
    for (size_t i = 0; i < axes_.size(); ++i) order.push_back(i);
    if (random_.OneIn(3)) {
      for (size_t i = order.size(); i > 1; --i) {
        std::swap(order[i - 1], order[static_cast<size_t>(random_.Range(0, static_cast<int64_t>(i) - 1))]);
      }
    }
    std::string value = Expr(2, true);
    const bool reduced = random_.OneIn(5);
    if (reduced) {
      ++reductions_;
      value = "mean(" + value + ")";
      order.erase(std::find(order.begin(), order.end(), axes_.size() - 1));
    }
    std::string dims;
    for (size_t i = 0; i < order.size(); ++i) {
      if (!dims.empty()) dims += ", ";
      if (random_.OneIn(8)) dims += "1, ";
      if (random_.OneIn(4)) {
        dims += "(" + axes_[order[i]];
        while (i + 1 < order.size() && random_.OneIn(2)) dims += " " + axes_[order[++i]];
        dims += ")";
      } else {
        dims += axes_[order[i]];
      }
    }
    if (dims.empty()) dims = "1";
    const char* const type = random_.Pick<const char*>({"f32", "f32", "f16", "bf16"});
    return "out y" + std::to_string(index) + " " + type + " [" + dims + "] = " + value;
  }

  Random& random_;
  const int64_t n_, most_rows_;
  RandomChain chain_;
  std::vector<std::string> axes_, names_;
  std::vector<int64_t> sizes_;
  int reductions_ = 0;
};

}  // namespace

void FillChainArray(Random* random, ChainArray* array) {
  int64_t elements = 1;
  for (int64_t dim : array->dims) elements *= dim;
  array->values.resize(static_cast<size_t>(elements));
  for (double& value : array->values) {
    value = Rounded(array->dtype, random->Unit() * (random->OneIn(16) ? 16.0f : 3.0f));
  }
}

RandomChain MakeRandomChain(Random* random, int64_t n, int64_t most_rows) { return Maker(random, n, most_rows).Run(); }

}  // namespace stof::test
