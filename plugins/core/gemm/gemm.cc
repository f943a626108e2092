// SPDX-License-Identifier: Apache-2.0
// Checks that a chain is an epilogue of a GEMM, and matches it with the form that the kernels implement.
#include "plugins/core/gemm/gemm.h"

#include <algorithm>
#include <optional>

namespace stof {
namespace {

// The operator of chains that writes each activation; std::nullopt: epilogues lack it.
constexpr std::optional<ChainOp> kChainOps[] = {
#define STOF_CHAIN_OP(function, name, gives_zeros, chain_op, ...) chain_op,
    STOF_ACTIVATIONS(STOF_CHAIN_OP)
#undef STOF_CHAIN_OP
};

// kNone: the operator of chains is no activation.
Activation FindActivation(ChainOp op) {
  for (int i = 0; i < kActivations; ++i) {
    if (kChainOps[i] == op) return static_cast<Activation>(i);
  }
  return Activation::kNone;
}

// Of those that epilogues have.
std::string ListActivations() {
  std::string names;
  for (int i = 0; i < kActivations; ++i) {
    if (kChainOps[i].has_value()) names += (names.empty() ? "" : ", ") + std::string(kActivationNames[i]);
  }
  return names;
}

Status AtLine(int line, const std::string& message) {
  return Status::Error("epilogue, line " + std::to_string(line) + ": " + message);
}

std::string Name(int input) { return "x" + std::to_string(input); }

// Whether an index is a single axis; which one.
bool IsAxis(const ChainIndex& index, int* axis) {
  if (index.kind != ChainIndex::Kind::kPlain || index.constant != 0) return false;
  *axis = -1;
  for (int i = 0; i < kChainMostAxes; ++i) {
    if (index.coefficient[i] == 0) continue;
    if (index.coefficient[i] != 1 || *axis >= 0) return false;
    *axis = i;
  }
  return *axis >= 0;
}

// kUnused: no supported way of reading.
GemmRead KindOf(const ChainRead& read) {
  int axes[2] = {-1, -1};
  if (read.index.empty()) return GemmRead::kScalar;
  if (read.index.size() > 2) return GemmRead::kUnused;
  for (size_t i = 0; i < read.index.size(); ++i) {
    if (!IsAxis(read.index[i], &axes[i])) return GemmRead::kUnused;
  }
  if (read.index.size() == 1) return axes[0] == 0 ? GemmRead::kRows : GemmRead::kColumns;
  return axes[0] == 0 && axes[1] == 1 ? GemmRead::kMatrix : GemmRead::kUnused;
}

Status Check(GemmEpilogue* epilogue) {
  const Chain& chain = epilogue->chain;
  if (chain.axes.size() != 2) {
    return AtLine(1, "found " + std::to_string(chain.axes.size()) + " axes, expected two: axes m = x0.0, n = x0.1");
  }
  for (int i = 0; i < 2; ++i) {
    const ChainAxis& axis = chain.axes[static_cast<size_t>(i)];
    if (axis.input != 0 || axis.dim != i || axis.over != 1) {
      return AtLine(1, "found another size of axis " + axis.name + ", expected x0." + std::to_string(i));
    }
  }
  if (chain.outputs.size() != 1) {
    return Status::Error("epilogue: found " + std::to_string(chain.outputs.size()) + " outputs, expected y0 alone");
  }
  const ChainOutput& output = chain.outputs[0];
  if (output.dims != std::vector<std::vector<int>>{{0}, {1}}) {
    return AtLine(output.line, "found other dimensions of y0, expected both axes, [" + chain.axes[0].name + ", " +
                                   chain.axes[1].name + "]");
  }
  for (const ChainNode& node : chain.nodes) {
    if (IsReduction(node.op)) {
      return Status::Error("epilogue: found a sum, mean, max_of or min_of, expected functions of elements");
    }
  }
  epilogue->reads.assign(static_cast<size_t>(std::max(chain.inputs, epilogue->products())), GemmRead::kUnused);
  for (const ChainRead& read : chain.reads) {
    const GemmRead kind = KindOf(read);
    GemmRead& known = epilogue->reads[static_cast<size_t>(read.input)];
    const bool product = read.input < epilogue->products();
    if (product && kind != GemmRead::kMatrix) {
      return AtLine(read.line, "found another read of the product " + Name(read.input) + ", expected " +
                                   Name(read.input) + "[m, n]");
    }
    if (kind == GemmRead::kUnused) {
      return AtLine(read.line, "found another read of " + Name(read.input) + ", expected [m, n], [n], [m] or []");
    }
    if (known != GemmRead::kUnused && !product && known != kind) {
      return AtLine(read.line, "found " + Name(read.input) + " read in two ways, expected one way for each input");
    }
    known = product ? GemmRead::kProduct : kind;
  }
  return Status();
}

// Matches the form; each function gives false where the expression is another one.
class Recognizer {
 public:
  explicit Recognizer(const GemmEpilogue& epilogue) : epilogue_(epilogue), chain_(epilogue.chain) {}

  bool Find(GemmForm* form) {
    form_ = GemmForm();
    std::vector<int> terms;
    Flatten(ChainOp::kAdd, chain_.outputs[0].node, &terms);
    int core = -1, bias = -1;
    for (int term : terms) {
      const GemmRead kind = KindOfRead(term);
      if (kind == GemmRead::kMatrix) {
        if (!Take(term, &form_.residual)) return false;
      } else if (kind == GemmRead::kColumns) {
        if (bias >= 0) return false;
        bias = term;
      } else if (core >= 0) {
        return false;
      } else {
        core = term;
      }
    }
    if (core < 0) return false;
    // x0 + bias without an activation.
    if (KindOfRead(core) == GemmRead::kProduct) {
      if (epilogue_.products() != 1) return false;
      if (bias >= 0 && !Take(bias, &form_.bias0)) return false;
    } else if (bias >= 0 || !Factors(core)) {
      return false;
    }
    *form = form_;
    return true;
  }

 private:
  const ChainNode& Node(int node) const { return chain_.nodes[static_cast<size_t>(node)]; }

  void Flatten(ChainOp op, int node, std::vector<int>* parts) const {
    // The limit bounds the work for shared sums, which are visited once for each use.
    if (Node(node).op == op && parts->size() < 16) {
      Flatten(op, Node(node).arg[0], parts);
      Flatten(op, Node(node).arg[1], parts);
    } else {
      parts->push_back(node);
    }
  }

  GemmRead KindOfRead(int node) const {
    if (Node(node).op != ChainOp::kRead) return GemmRead::kUnused;
    return epilogue_.reads[static_cast<size_t>(chain_.reads[static_cast<size_t>(Node(node).which)].input)];
  }
  // Each input has one place in the form.
  bool Take(int node, int* place) {
    const int input = chain_.reads[static_cast<size_t>(Node(node).which)].input;
    for (int taken : {form_.bias0, form_.bias1, form_.scale, form_.row, form_.residual}) {
      if (taken == input) return false;
    }
    if (*place >= 0) return false;
    *place = input;
    return true;
  }

  bool Factors(int core) {
    std::vector<int> factors, branches;
    Flatten(ChainOp::kMul, core, &factors);
    for (int factor : factors) {
      const GemmRead kind = KindOfRead(factor);
      if (kind == GemmRead::kColumns) {
        if (!Take(factor, &form_.scale)) return false;
      } else if (kind == GemmRead::kRows) {
        if (!Take(factor, &form_.row)) return false;
      } else {
        branches.push_back(factor);
      }
    }
    // u * sigmoid(u).
    for (size_t i = 0; i < branches.size(); ++i) {
      if (Node(branches[i]).op != ChainOp::kSigmoid) continue;
      const int of = Node(branches[i]).arg[0];
      const auto other = std::find(branches.begin(), branches.end(), of);
      if (other == branches.end() || form_.activation != Activation::kNone) return false;
      form_.activation = Activation::kSilu;
      activated_ = of;
      branches.erase(branches.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
    const auto products = static_cast<size_t>(epilogue_.products());
    if (branches.size() != products) return false;
    int input[2] = {-1, -1}, bias[2] = {-1, -1};
    bool active[2] = {false, false};
    for (size_t i = 0; i < products; ++i) {
      if (!Branch(branches[i], &input[i], &bias[i], &active[i])) return false;
    }
    if (products == 1) return bias[0] < 0 || Take(bias[0], &form_.bias0);
    if (input[0] == input[1] || (active[0] && active[1])) return false;
    const size_t first = active[1] || (!active[0] && input[1] == 0) ? 1 : 0;
    form_.swapped = input[first] == 1;
    return (bias[first] < 0 || Take(bias[first], &form_.bias0)) &&
           (bias[1 - first] < 0 || Take(bias[1 - first], &form_.bias1));
  }

  // [act] (x0 | x1) [+ bias].
  bool Branch(int node, int* input, int* bias, bool* active) {
    const Activation activation = FindActivation(Node(node).op);
    if (activation != Activation::kNone) {
      if (form_.activation != Activation::kNone) return false;
      form_.activation = activation;
      *active = true;
      node = Node(node).arg[0];
    } else {
      *active = node == activated_;
    }
    std::vector<int> terms;
    Flatten(ChainOp::kAdd, node, &terms);
    for (int term : terms) {
      const GemmRead kind = KindOfRead(term);
      if (kind == GemmRead::kProduct && *input < 0) {
        *input = chain_.reads[static_cast<size_t>(Node(term).which)].input;
      } else if (kind == GemmRead::kColumns && *bias < 0) {
        *bias = term;
      } else {
        return false;
      }
    }
    return *input >= 0;
  }

  const GemmEpilogue& epilogue_;
  const Chain& chain_;
  GemmForm form_;
  int activated_ = -1;
};

}  // namespace

std::string GemmForm::Text(bool pair) const {
  std::string text;
  const auto add = [&text](bool there, const char* word) {
    if (there) text += (text.empty() ? "" : " ") + std::string(word);
  };
  add(bias0 >= 0, "bias0");
  add(activation != Activation::kNone, kActivationNames[static_cast<int>(activation)]);
  add(bias1 >= 0, "bias1");
  add(pair, "pair");
  add(scale >= 0, "scale");
  add(row >= 0, "row");
  add(residual >= 0, "residual");
  return text.empty() ? "none" : text;
}

Status ParseGemm(std::string_view text, int64_t pair, GemmEpilogue* epilogue) {
  *epilogue = GemmEpilogue();
  if (pair < 0 || pair > 2) {
    return Status::Error("attribute pair is " + std::to_string(pair) +
                         ", expected 0 (one product), 1 (halves of one weight) or 2 (two weights)");
  }
  epilogue->pair = static_cast<GemmPair>(pair);
  if (text.empty()) {
    if (pair != 0) return Status::Error("attribute epilogue is empty, expected what becomes of the pair of products");
    text = "axes m = x0.0, n = x0.1; out y0 f32 [m, n] = x0[m, n]";
  }
  const Status parsed = ParseChain(text, &epilogue->chain);
  if (!parsed.ok()) return Status::Error("attribute epilogue: " + parsed.message());
  STOF_RETURN_IF_ERROR(Check(epilogue));
  epilogue->has_form = Recognizer(*epilogue).Find(&epilogue->form);
  if (!epilogue->has_form) {
    epilogue->why_not =
        "CUDA: no kernel has this epilogue, expected act(x0 + bias0) [* (x1 + bias1)] * scale[n] * row[m] + "
        "residual[m, n], each part but the product at will, act one of " +
        ListActivations();
  }
  return Status();
}

}  // namespace stof
