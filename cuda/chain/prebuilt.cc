// SPDX-License-Identifier: Apache-2.0
#include "cuda/chain/prebuilt.h"

#include <algorithm>

#include "cuda/chain/codegen.h"
#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {
namespace {

struct Usual {
  std::string lets, outputs;  // TYPE stands for the type, AT for the indices of an element
  int inputs;                 // of elements
  int vectors;                // [n], behind them
};

constexpr char kNorm[] = "c * rsqrt(mean(c * c) + 1e-5)";

std::vector<Usual> Rows() {
  const std::string norm = kNorm, centred = "let c = r - mean(r)\n";
  const auto out = [](int index, const std::string& value) {
    return "out y" + std::to_string(index) + " TYPE [b, s, n] = " + value + "\n";
  };
  const std::string one = "let r = x0[AT]\n", two = "let r = x0[AT] + x1[AT]\n";
  return {
      {one + centred, out(0, norm + " * x1[n] + x2[n]"), 1, 2},
      {one + centred, out(0, norm + " * x1[n]"), 1, 1},
      {"let c = x0[AT]\n", out(0, norm + " * x1[n]"), 1, 1},
      {two + centred, out(0, norm + " * x2[n] + x3[n]"), 2, 2},
      {two + centred, out(0, "r") + out(1, norm + " * x2[n] + x3[n]"), 2, 2},
      {two + centred, out(0, "r") + out(1, norm + " * x2[n]"), 2, 1},
      {"let c = x0[AT] + x1[AT]\n", out(0, "c") + out(1, norm + " * x2[n]"), 2, 1},
      // A bias before the residual.
      {"let r = x0[AT] + x2[n] + x1[AT]\n" + centred, out(0, norm + " * x3[n] + x4[n]"), 2, 3},
      {"let e = exp(x0[AT] - max_of(x0[AT]))\n", out(0, "e / sum(e)"), 1, 0},
  };
}
std::vector<Usual> Elements() {
  const auto out = [](const std::string& value) { return "out y0 TYPE [b, s, n] = " + value + "\n"; };
  return {
      {"", out("gelu(x0[AT] + x1[n])"), 1, 1},
      {"", out("gelu_tanh(x0[AT] + x1[n])"), 1, 1},
      {"", out("gelu(x0[AT])"), 1, 0},
      {"", out("gelu_tanh(x0[AT])"), 1, 0},
      {"", out("silu(x0[AT])"), 1, 0},
      {"", out("gelu(x0[AT]) * x1[AT]"), 2, 0},
      {"", out("gelu_tanh(x0[AT]) * x1[AT]"), 2, 0},
      {"", out("silu(x0[AT]) * x1[AT]"), 2, 0},
  };
}

const char* NameOf(DType dtype) { return dtype == DType::kF32 ? "f32" : dtype == DType::kF16 ? "f16" : "bf16"; }

std::string ReplaceAll(std::string text, const std::string& what, const std::string& by) {
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
  return text;
}

class Collector {
 public:
  void Add(const std::string& text, const std::vector<Tensor>& inputs) {
    Chain chain;
    BoundChain bound;
    if (!ParseChain(text, &chain).ok() ||
        !BindChain(chain, inputs.data(), static_cast<int>(inputs.size()), &bound).ok()) {
      kernels.clear();
      broken = true;
      return;
    }
    const void* from[kChainMostInputs] = {};
    void* to[kChainMostOutputs] = {};
    constexpr int kMultiprocessors = 128;
    ChainLayout layout;
    ChainPlan plan;
    if (!MakeChainLayout(chain, bound, from, to, kMultiprocessors, &layout)) return;
    MakeChainPlan(chain, layout, kMultiprocessors, &plan);
    if (std::find(kernels.begin(), kernels.end(), plan.kernel) == kernels.end()) kernels.push_back(plan.kernel);
  }
  std::vector<std::string> kernels;
  bool broken = false;
};

}  // namespace

std::vector<std::string> UsualChainKernels(DType dtype) {
  Collector all;
  const std::string type = NameOf(dtype);
  const auto add = [&](const Usual& usual, int64_t b, int64_t s, int64_t n) {
    std::string text = "axes b = x0.0, s = x0.1, n = x0.2\n" + usual.lets + usual.outputs;
    std::vector<Tensor> inputs(static_cast<size_t>(usual.inputs), TensorOfShape(dtype, {b, s, n}));
    inputs.resize(inputs.size() + static_cast<size_t>(usual.vectors), TensorOfShape(dtype, {n}));
    all.Add(ReplaceAll(ReplaceAll(text, "TYPE", type), "AT", "b, s, n"), inputs);
  };
  for (const Usual& usual : Rows()) {
    for (const int64_t n : {384, 512, 768, 1024, 2048, 4096}) add(usual, 2, 128, n);
  }
  struct Size {
    int64_t b, s;
  };
  // Of these the repeats of a thread depend.
  for (const Size size : {Size{2, 128}, Size{4, 512}, Size{16, 2048}}) {
    for (const Usual& usual : Elements()) add(usual, size.b, size.s, 3072);
    for (const char* f : {"gelu", "gelu_tanh", "silu"}) {
      all.Add("axes b = x0.0, s = x0.1, n = x0.2 / 2\nout y0 " + type + " [b, s, n] = " + f +
                  "(x0[b, s, n]) * x0[b, s, n + 1152]",
              {TensorOfShape(dtype, {size.b, size.s, 2304})});
    }
    for (const int64_t d : {int64_t{64}, int64_t{128}}) {
      for (const DType table : {dtype, DType::kF32}) {
        const std::string half = std::to_string(d / 2), head = std::to_string(d) + " * h + d";
        all.Add("axes b = x0.0, h = 12, s = x0.1, d = " + std::to_string(d) + "\nlet t = select(d < " + half +
                    ", -x0[b, s, " + head + " + " + half + "], x0[b, s, " + head + " - " + half + "])\nout y0 " + type +
                    " [b, h, s, d] = x0[b, s, " + head + "] * x1[s, d] + t * x2[s, d]",
                {TensorOfShape(dtype, {size.b, size.s, 12 * d}), TensorOfShape(table, {size.s, d}),
                 TensorOfShape(table, {size.s, d})});
      }
    }
  }
  return all.broken ? std::vector<std::string>() : all.kernels;
}

}  // namespace cuda
}  // namespace stof
