// SPDX-License-Identifier: Apache-2.0
// Writes the source of a chain's kernel, and the words that a launch hands to it.
//
// A thread has `repeats` times `vector` elements. Values that are the same for all of them are s1, s2, ...; those of an
// element v1, v2, ... in a loop over j (repeats) and k (neighbours); what later passes over a row need again stays in
// registers: inputs as they were read, r1[j], or values, k1[j][k].
// Over 500 lines: one writer, whose members share the text and its indentation.
#include "cuda/chain/codegen.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "cuda/chain/liveness.h"

namespace stof {
namespace cuda {
namespace {

constexpr char kFunctions[] =
#include "stof_chain_functions.inc"
    ;

using Along = ChainLayout::Along;
using Ref = ChainLayout::Ref;

std::string S(int64_t x) { return std::to_string(x); }
std::string Literal(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  char text[48];
  std::snprintf(text, sizeof text, "__uint_as_float(0x%08" PRIx32 "u)", bits);
  return text;
}
const char* TypeName(DType dtype) { return dtype == DType::kF32 ? "F32" : dtype == DType::kF16 ? "F16" : "BF16"; }

// Longer than 80 lines: a case for each operator.
std::string FormatCall(ChainOp op, const std::string& a, const std::string& b, const std::string& c) {
  const auto call = [&](const char* f) { return std::string(f) + "(" + a + (b.empty() ? "" : ", " + b) + ")"; };
  const auto infix = [&](const char* sign) { return a + sign + b; };
  const auto truth = [&](const char* sign) { return "(" + a + sign + b + " ? 1.0f : 0.0f)"; };
  switch (op) {
    case ChainOp::kNeg:
      return "-" + a;
    case ChainOp::kAbs:
      return call("fabsf");
    case ChainOp::kExp:
      return call("expf");
    case ChainOp::kLog:
      return call("logf");
    case ChainOp::kSqrt:
      return call("sqrtf");
    case ChainOp::kRsqrt:
      return call("Rsqrt");
    case ChainOp::kReciprocal:
      return "1.0f / " + a;
    case ChainOp::kTanh:
      return call("tanhf");
    case ChainOp::kErf:
      return call("erff");
    case ChainOp::kSigmoid:
      return call("Sigmoid");
    case ChainOp::kSoftplus:
      return call("Softplus");
    case ChainOp::kSin:
      return call("sinf");
    case ChainOp::kCos:
      return call("cosf");
    case ChainOp::kFloor:
      return call("floorf");
    case ChainOp::kCeil:
      return call("ceilf");
    case ChainOp::kRound:
      return call("rintf");
    case ChainOp::kRelu:
      return call("Relu");
    case ChainOp::kSilu:
      return call("Silu");
    case ChainOp::kGelu:
      return call("Gelu");
    case ChainOp::kGeluTanh:
      return call("GeluTanh");
    case ChainOp::kRoundF16:
      return call("Round<F16>");
    case ChainOp::kRoundBf16:
      return call("Round<BF16>");
    case ChainOp::kAdd:
      return infix(" + ");
    case ChainOp::kSub:
      return infix(" - ");
    case ChainOp::kMul:
      return infix(" * ");
    case ChainOp::kDiv:
      return infix(" / ");
    case ChainOp::kMin:
      return call("Min");
    case ChainOp::kMax:
      return call("Max");
    case ChainOp::kPow:
      return call("powf");
    case ChainOp::kLt:
      return truth(" < ");
    case ChainOp::kLe:
      return truth(" <= ");
    case ChainOp::kGt:
      return truth(" > ");
    case ChainOp::kGe:
      return truth(" >= ");
    case ChainOp::kEq:
      return truth(" == ");
    case ChainOp::kNe:
      return truth(" != ");
    case ChainOp::kSelect:
      return a + " != 0.0f ? " + b + " : " + c;
    default:
      return "0.0f";
  }
}
const char* NameReduction(ChainOp op) {
  return op <= ChainOp::kMean ? "Sum" : op == ChainOp::kMaxOf ? "Most" : "Least";
}

class Writer {
 public:
  Writer(const Chain& chain, const ChainLayout& layout, int sm_count, ChainPlan* plan)
      : chain_(chain), l_(layout), scope_(chain, layout), sm_count_(sm_count), plan_(*plan) {}

  void Run() {
    plan_ = ChainPlan();
    size_words_.assign(static_cast<size_t>(l_.axes), -1);
    known_.assign(chain_.nodes.size(), false);
    resident_.assign(l_.reads.size(), false);
    for (const Ref& ref : l_.reads) read_data_.push_back(ref.never ? std::string() : Data(ref, false));
    for (const Ref& ref : l_.outputs) output_data_.push_back(Data(ref, true));
    l_.reduces ? BeginRows() : BeginElements();
    for (int phase = 0; phase < scope_.phases(); ++phase) Phase(phase);
    plan_.kernel = "typedef " + std::string(l_.wide ? "long long" : "int") + " I;\nstruct Words {\n  long long w[" +
                   S(static_cast<int64_t>(plan_.words.size())) +
                   "];\n};\nextern \"C\" __global__ void __launch_bounds__(" + S(most_threads_) + ") " +
                   kChainKernelName + "(const __grid_constant__ Words p) {\n" + text_ + "}\n";
  }

 private:
  void Line(const std::string& text) { text_ += text + "\n"; }
  std::string Word(int64_t value) {
    plan_.words.push_back(value);
    return "p.w[" + S(static_cast<int64_t>(plan_.words.size()) - 1) + "]";
  }
  std::string IndexWord(int64_t value) { return "(I)" + Word(value); }
  std::string Number(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return "__uint_as_float((unsigned)" + Word(bits) + ")";
  }
  std::string Size(int axis) {
    int& word = size_words_[static_cast<size_t>(axis)];
    if (word < 0) {
      word = static_cast<int>(plan_.words.size());
      Word(l_.size[axis]);
    }
    return "(I)p.w[" + S(word) + "]";
  }
  std::string Data(const Ref& ref, bool output) {
    plan_.addresses.push_back(
        {static_cast<int>(plan_.words.size()), ref.tensor, output, ref.constant * SizeOf(ref.dtype)});
    return std::string(output ? "(char*)" : "(const char*)") + Word(0);
  }
  static std::string Axis(int axis) { return "a" + S(axis); }

  // `from` counts through the axes, the first one fastest; `count` of each.
  void Decompose(std::string from, const std::vector<std::pair<std::string, int64_t>>& parts) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto& [name, count] = parts[i];
      if (i + 1 == parts.size()) {
        Line("const I " + name + " = " + from + ";");
        return;
      }
      const std::string quotient = "q" + S(++quotients_);
      if (l_.wide) {
        Line("const I " + quotient + " = " + from + " / " + IndexWord(count) + ";");
      } else {
        int shift = 0;
        while ((int64_t{1} << shift) < count) ++shift;
        const auto factor = static_cast<int64_t>(
            static_cast<uint64_t>((static_cast<unsigned __int128>((int64_t{1} << shift) - count) << 32) /
                                  static_cast<unsigned __int128>(count)) +
            1);
        const std::string factor_word = Word(factor);
        Line("const I " + quotient + " = Quotient(" + from + ", " + factor_word + ", " + Word(shift) + ");");
      }
      Line("const I " + name + " = " + from + " - " + quotient + " * " + IndexWord(count) + ";");
      from = quotient;
    }
  }

  // ---- where threads stand ----
  void BeginRows() {
    int64_t rows = 1;
    for (int a = 0; a < l_.axes; ++a) rows *= a == l_.row ? 1 : l_.size[a];
    most_threads_ = std::max(128, l_.lanes);
    plan_.threads = most_threads_;
    if (l_.lanes <= 32 && rows * l_.lanes < int64_t{4} * 128 * sm_count_) plan_.threads = 32;
    const int64_t of_cta = plan_.threads / l_.lanes;
    plan_.ctas = (rows + of_cta - 1) / of_cta;
    const std::string lanes = S(l_.lanes);
    Line("const int lane = (int)threadIdx.x % " + lanes + ";");
    Line("const I row = (I)blockIdx.x * (I)(blockDim.x / " + lanes + ") + (I)threadIdx.x / " + lanes + ";");
    Line("if (row >= " + IndexWord(rows) + ") return;");
    std::vector<std::pair<std::string, int64_t>> parts;
    for (int a = l_.axes; a-- > 0;) {
      if (a != l_.row) parts.emplace_back(Axis(a), l_.size[a]);
    }
    Decompose("row", parts);
    const std::string vector = S(l_.vector);
    body_ = "const I " + Axis(l_.row) + " = (I)(lane + j * " + lanes + ") * " + vector +
            ";\nconst bool ok = " + Axis(l_.row) + " < " + Size(l_.row) + ";\n";
    if (l_.streamed) body_ = "const int j = 0;\n";
  }

  void BeginElements() {
    std::vector<std::pair<std::string, int64_t>> parts;
    int64_t items = 1;
    const auto add = [&](int a) {
      int64_t count = l_.size[a];
      std::string name = Axis(a);
      if (a == l_.inner) count /= l_.vector, name = "inner";
      if (a == l_.unrolled) count = (count + l_.repeats - 1) / l_.repeats, name = "group";
      parts.emplace_back(name, count);
      items *= count;
    };
    const int64_t vectors = l_.size[l_.inner] / l_.vector;
    if (l_.crossed >= 0) {
      parts.emplace_back("low", 2);
      add(l_.crossed);
      parts.emplace_back("high", (vectors + 1) / 2);
      items *= 2 * ((vectors + 1) / 2);
    } else {
      add(l_.inner);
    }
    for (int a = l_.axes; a-- > 0;) {
      if (a != l_.inner && a != l_.crossed) add(a);
    }
    most_threads_ = 256;
    const int64_t apart = l_.unrolled < 0 ? l_.repeats : 1;
    plan_.threads = items / apart >= int64_t{2048} * sm_count_ ? 256 : 64;
    const int64_t of_cta = plan_.threads * apart;
    plan_.ctas = (items + of_cta - 1) / of_cta;
    std::string inner = "const I " + Axis(l_.inner) + " = inner * " + S(l_.vector) + ";";
    std::string within;
    if (l_.crossed >= 0) {
      inner = "const I inner = high * 2 + low;\n" + inner;
      within = "inner < " + IndexWord(vectors);
    }
    const std::string total = IndexWord(items);
    if (apart > 1) {
      std::swap(text_, body_);
      Line("const I at = (I)blockIdx.x * (I)(blockDim.x * " + S(apart) + ") + (I)threadIdx.x + j * (I)blockDim.x;");
      Decompose("at", parts);
      Line(inner);
      Line("const bool ok = at < " + total + (within.empty() ? "" : " && " + within) + ";");
      std::swap(text_, body_);
      return;
    }
    Line("const I at = (I)blockIdx.x * (I)blockDim.x + (I)threadIdx.x;");
    Line("if (at >= " + total + ") return;");
    Decompose("at", parts);
    Line(inner);
    if (!within.empty()) Line("if (!(" + within + ")) return;");
    body_ = "const bool ok = true;\n";
    if (l_.unrolled >= 0) {
      body_ = "const I " + Axis(l_.unrolled) + " = group * " + S(l_.repeats) +
              " + j;\nconst bool ok = " + Axis(l_.unrolled) + " < " + Size(l_.unrolled) + ";\n";
    }
  }

  // ---- where tensors are ----
  // Elements from the tensor's begin; plus: what is added to the inner index, for single elements.
  std::string Place(const Ref& ref, const std::string& plus) {
    std::string sum;
    const auto term = [&](const std::string& text) { sum += (sum.empty() ? "" : " + ") + text; };
    const auto axis = [&](int a) {
      return a == l_.inner && !plus.empty() ? "(" + Axis(a) + " + " + plus + ")" : Axis(a);
    };
    for (int a = 0; a < l_.axes; ++a) {
      if (ref.stride[a] == 0) continue;
      const bool unit = a == l_.inner && ref.along == Along::kUnit;
      term(unit ? axis(a) : IndexWord(ref.stride[a]) + " * " + axis(a));
    }
    for (const BoundRead::Part& part : ref.parts) {
      std::string affine = "(I)(" + S(part.index.constant) + "ll)";
      for (int a = 0; a < l_.axes; ++a) {
        const int64_t c = part.index.coefficient[a];
        if (c != 0) affine += " + (I)(" + S(c) + "ll) * " + axis(a);
      }
      const bool rest = part.index.kind == ChainIndex::Kind::kModulo;
      term(IndexWord(part.stride) + " * Floor" + (rest ? "Rest" : "Quotient") + "<I>(" + affine + ", (I)(" +
           S(part.index.divisor) + "ll))");
    }
    return sum.empty() ? "0" : sum;
  }
  std::string Address(const std::string& data, const Ref& ref, const std::string& plus) {
    return data + " + (long long)(" + Place(ref, plus) + ") * " + S(SizeOf(ref.dtype));
  }
  // The condition under which it is read; empty: always.
  std::string Guard(const Ref& ref, const std::string& plus) {
    std::string all;
    for (int a = 0; a < l_.axes; ++a) {
      const std::string index = a == l_.inner && !plus.empty() ? "(" + Axis(a) + " + " + plus + ")" : Axis(a);
      if ((ref.low >> a & 1) != 0) all += (all.empty() ? "" : " && ") + index + " >= " + IndexWord(ref.first[a]);
      if ((ref.high >> a & 1) != 0) all += (all.empty() ? "" : " && ") + index + " <= " + IndexWord(ref.last[a]);
    }
    return all;
  }

  // ---- reads ----
  std::string ReadName(int which) const { return "r" + S(which) + (resident_[static_cast<size_t>(which)] ? "" : tag_); }
  bool Moves(const Ref& ref) const { return (ref.axes & l_.moving) != 0; }
  bool TakesInner(const Ref& ref) const { return (ref.axes >> l_.inner & 1) != 0; }
  void Declare(int which) {
    const Ref& ref = l_.reads[static_cast<size_t>(which)];
    const bool words = TakesInner(ref) && ref.along == Along::kUnit;
    const int64_t count = words             ? std::max<int64_t>(1, l_.vector * SizeOf(ref.dtype) / 4)
                          : TakesInner(ref) ? l_.vector
                                            : 1;
    Line(std::string(words ? "unsigned " : "float ") + ReadName(which) + "[" + S(Moves(ref) ? l_.repeats : 1) + "][" +
         S(count) + "];");
  }
  void Read(int which) {
    const Ref& ref = l_.reads[static_cast<size_t>(which)];
    const std::string& data = read_data_[static_cast<size_t>(which)];
    const std::string to = ReadName(which) + (Moves(ref) ? "[j]" : "[0]");
    const std::string type = TypeName(ref.dtype);
    if (TakesInner(ref) && ref.along == Along::kUnit) {
      const std::string load = "Load<" + S(ref.width) + ">(" + to + ", " + Address(data, ref, "") + ");";
      const std::string guard = Guard(ref, "");
      Line(guard.empty() ? load : "if (" + guard + ") {\n" + load + "\n} else {\nZero(" + to + ");\n}");
      return;
    }
    const std::string plus = TakesInner(ref) ? "k" : "";
    const std::string guard = Guard(ref, plus);
    const std::string value = "Bits<" + type + ">::At(" + Address(data, ref, plus) + ")";
    if (TakesInner(ref)) Line("#pragma unroll\nfor (int k = 0; k < " + S(l_.vector) + "; ++k)");
    Line(to + (TakesInner(ref) ? "[k]" : "[0]") + " = " + (guard.empty() ? value : guard + " ? " + value + " : 0.0f") +
         ";");
  }

  // ---- nodes ----
  std::string Value(int node) {
    const ChainNode& one = chain_.nodes[static_cast<size_t>(node)];
    if (one.op == ChainOp::kConstant) return Literal(one.value);
    if (!scope_.OfElement(node)) return "s" + S(node);
    return scope_.KeptBefore(node, phase_) ? "k" + S(node) + "[j][k]" : "v" + S(node);
  }
  std::string Expression(int node) {
    const ChainNode& one = chain_.nodes[static_cast<size_t>(node)];
    if (one.op == ChainOp::kAxis) {
      const int axis = l_.of_axis[one.which];
      return "(float)(" + Axis(axis) + (axis == l_.inner && scope_.OfElement(node) ? " + k)" : ")");
    }
    if (one.op == ChainOp::kRead) {
      const Ref& ref = l_.reads[static_cast<size_t>(one.which)];
      if (ref.never) return "0.0f";
      if (!scope_.OfElement(node)) {
        const std::string guard = Guard(ref, "");
        const std::string value = std::string("Bits<") + TypeName(ref.dtype) + ">::At(" +
                                  Address(read_data_[static_cast<size_t>(one.which)], ref, "") + ")";
        return guard.empty() ? value : guard + " ? " + value + " : 0.0f";
      }
      const std::string name = ReadName(one.which) + (Moves(ref) ? "[j]" : "[0]");
      if (!TakesInner(ref)) return name + "[0]";
      if (ref.along == Along::kUnit) return std::string("Bits<") + TypeName(ref.dtype) + ">::Of(" + name + ", k)";
      return name + "[k]";
    }
    std::string arg[3];
    for (int a = 0; a < ArityOf(one.op); ++a) {
      const ChainNode& of = chain_.nodes[static_cast<size_t>(one.arg[a])];
      // What is the same for a whole thread costs nothing as a word: one kernel serves every epsilon.
      arg[a] = of.op == ChainOp::kConstant && !scope_.OfElement(node) ? Number(of.value) : Value(one.arg[a]);
    }
    if (one.op == ChainOp::kDiv && scope_.OfElement(node) && !scope_.OfElement(one.arg[1])) {
      return "Over(" + arg[0] + ", " + arg[1] + ", 1.0f / " + arg[1] + ", Fits(" + arg[1] + "))";
    }
    return FormatCall(one.op, arg[0], arg[1], arg[2]);
  }
  void Scalars(const std::vector<int>& nodes) {
    for (int node : nodes) {
      const ChainOp op = chain_.nodes[static_cast<size_t>(node)].op;
      if (scope_.OfElement(node) || known_[static_cast<size_t>(node)] || op == ChainOp::kConstant) continue;
      known_[static_cast<size_t>(node)] = true;
      Line("const float s" + S(node) + " = " + Expression(node) + ";");
    }
  }

  // ---- a pass ----
  void Phase(int phase) {
    phase_ = phase;
    tag_ = "_" + S(phase);
    const std::vector<int> nodes = scope_.ListComputedNodes(phase);
    Scalars(nodes);
    std::vector<int> reads, reading = nodes;
    if (phase == 0) reading.insert(reading.end(), scope_.early().begin(), scope_.early().end());
    for (int node : reading) {
      const ChainNode& one = chain_.nodes[static_cast<size_t>(node)];
      if (one.op != ChainOp::kRead || !scope_.OfElement(node)) continue;
      const auto which = static_cast<size_t>(one.which);
      if (l_.reads[which].never || resident_[which]) continue;
      resident_[which] = scope_.Resident(node);
      reads.push_back(one.which);
    }
    std::vector<int> sums, outputs;
    for (int node : scope_.reductions()) {
      if (chain_.nodes[static_cast<size_t>(node)].level == phase + 1) sums.push_back(node);
    }
    bool elements = !sums.empty();
    for (size_t i = 0; i < chain_.outputs.size(); ++i) {
      if (chain_.nodes[static_cast<size_t>(chain_.outputs[i].node)].level != phase) continue;
      outputs.push_back(static_cast<int>(i));
      elements = elements || !l_.reduces || !l_.outputs[i].once;
    }
    if (elements) Elements(nodes, reads, sums, outputs);
    for (int node : sums) Finish(node);
    for (int output : outputs) {
      const Ref& ref = l_.outputs[static_cast<size_t>(output)];
      if (l_.reduces && ref.once) {
        Line("if (lane == 0) " + Put(output, Value(chain_.outputs[static_cast<size_t>(output)].node), "") + ";");
      }
    }
  }

  std::string Put(int output, const std::string& value, const std::string& plus) {
    const Ref& ref = l_.outputs[static_cast<size_t>(output)];
    return std::string("Bits<") + TypeName(ref.dtype) + ">::Put(" +
           Address(output_data_[static_cast<size_t>(output)], ref, plus) + ", " + value + ")";
  }

  void Elements(const std::vector<int>& nodes, const std::vector<int>& reads, const std::vector<int>& sums,
                const std::vector<int>& outputs) {
    const std::string repeat = "#pragma unroll\nfor (int j = 0; j < " + S(l_.repeats) + "; ++j) {\n" + body_;
    for (int node : nodes) {
      if (scope_.KeptFrom(node) == phase_) {
        Line("float k" + S(node) + "[" + S(l_.repeats) + "][" + S(l_.vector) + "];");
      }
    }
    for (int node : sums) {
      const ChainOp op = chain_.nodes[static_cast<size_t>(node)].op;
      if (!l_.streamed) {
        Line("float z" + S(node) + "[" + S(l_.repeats) + "];");
      } else {
        Line(std::string(op <= ChainOp::kMean ? "double z" : "float z") + S(node) + " = " + NameReduction(op) +
             "::Start();");
      }
    }
    if (l_.streamed) {
      const std::string step = S(int64_t{l_.lanes} * l_.vector), axis = Axis(l_.row);
      Line("for (I " + axis + " = (I)lane * " + S(l_.vector) + "; " + axis + " < " + Size(l_.row) + "; " + axis +
           " += " + step + ") {\n" + body_);
      for (int which : reads) Declare(which), Read(which);
    } else {
      bool moving = false;
      for (int which : reads) {
        Declare(which);
        const bool moves = Moves(l_.reads[static_cast<size_t>(which)]);
        moving = moving || moves;
        if (!moves) Read(which);
      }
      if (moving) {
        Line(repeat + "if (ok) {");
        for (int which : reads) {
          if (Moves(l_.reads[static_cast<size_t>(which)])) Read(which);
        }
        Line("}\n}");
      }
      Line(repeat + "if (!ok) {");
      for (int node : sums) {
        Line("z" + S(node) + "[j] = " + NameReduction(chain_.nodes[static_cast<size_t>(node)].op) + "::Start();");
      }
      Line("continue;\n}");
    }
    Compute(nodes, sums, outputs);
    Line("}");
  }

  void Compute(const std::vector<int>& nodes, const std::vector<int>& sums, const std::vector<int>& outputs) {
    for (int node : sums) Line("float t" + S(node) + "[" + S(l_.vector) + "];");
    for (int output : outputs) {
      if (!l_.reduces || !l_.outputs[static_cast<size_t>(output)].once)
        Line("float y" + S(output) + "[" + S(l_.vector) + "];");
    }
    Line("#pragma unroll\nfor (int k = 0; k < " + S(l_.vector) + "; ++k) {");
    for (int node : nodes) {
      if (!scope_.OfElement(node)) continue;
      Line("const float v" + S(node) + " = " + Expression(node) + ";");
      if (scope_.KeptFrom(node) == phase_) Line("k" + S(node) + "[j][k] = v" + S(node) + ";");
    }
    for (int node : sums) {
      Line("t" + S(node) + "[k] = " + Value(chain_.nodes[static_cast<size_t>(node)].arg[0]) + ";");
    }
    for (int output : outputs) {
      if (l_.reduces && l_.outputs[static_cast<size_t>(output)].once) continue;
      Line("y" + S(output) + "[k] = " + Value(chain_.outputs[static_cast<size_t>(output)].node) + ";");
    }
    Line("}");
    for (int node : sums) {
      const std::string op = NameReduction(chain_.nodes[static_cast<size_t>(node)].op);
      const std::string tree = "Tree<" + op + ", " + S(l_.vector) + ">(t" + S(node) + ")";
      const std::string z = "z" + S(node);
      const bool wide = op == "Sum";
      Line(l_.streamed ? z + " = " + op + "::Join(" + z + ", " + (wide ? "(double)" : "") + tree + ");"
                       : z + "[j] = " + tree + ";");
    }
    for (int output : outputs) Write(output);
  }

  void Write(int output) {
    const Ref& ref = l_.outputs[static_cast<size_t>(output)];
    if (l_.reduces && ref.once) return;
    const std::string y = "y" + S(output);
    std::string text = ref.once ? "if (" + Axis(l_.row) + " == 0) {\n" : "";
    if (ref.once && l_.row == l_.inner) {
      text += Put(output, y + "[0]", "") + ";";
    } else if (ref.along == Along::kUnit) {
      text += std::string("Store<") + TypeName(ref.dtype) + ", " + S(ref.width) + ">(" +
              Address(output_data_[static_cast<size_t>(output)], ref, "") + ", " + y + ");";
    } else {
      text += "#pragma unroll\nfor (int k = 0; k < " + S(l_.vector) + "; ++k) " + Put(output, y + "[k]", "k") + ";";
    }
    Line(text + (ref.once ? "\n}" : ""));
  }

  void Finish(int node) {
    const ChainOp op = chain_.nodes[static_cast<size_t>(node)].op;
    const std::string name = S(node), joined = NameReduction(op);
    const bool wide = l_.streamed && joined == "Sum";
    const std::string own = l_.streamed ? "z" + name : "Tree<" + joined + ", " + S(l_.repeats) + ">(z" + name + ")";
    std::string all = "AcrossLanes<" + joined + ", " + S(l_.lanes) + ">(" + own + ")";
    if (l_.lanes > 32) {
      Line(std::string("__shared__ ") + (wide ? "double" : "float") + " h" + name + "[" + S(l_.lanes / 32) + "];");
      all = "AcrossCta<" + joined + ", " + S(l_.lanes) + ">(" + own + ", h" + name + ")";
    }
    if (op == ChainOp::kMean) all = all + " / " + (wide ? "(double)" : "(float)") + "(" + Size(l_.row) + ")";
    Line("const float s" + name + " = (float)(" + all + ");");
    known_[static_cast<size_t>(node)] = true;
  }

  const Chain& chain_;
  const ChainLayout& l_;
  const ChainScope scope_;
  const int sm_count_;
  ChainPlan& plan_;
  std::string text_, body_, tag_;
  std::vector<int> size_words_;
  std::vector<std::string> read_data_, output_data_;
  std::vector<bool> known_, resident_;  // values of a thread that are found; reads that stay in registers
  int phase_ = 0, quotients_ = 0, most_threads_ = 0;
};

}  // namespace

std::string ChainSource(const std::string& kernel) {
  return std::string(kFunctions) + "using namespace stof::cuda::chain;\n" + kernel;
}

void MakeChainPlan(const Chain& chain, const ChainLayout& layout, int sm_count, ChainPlan* plan) {
  Writer(chain, layout, sm_count, plan).Run();
}

}  // namespace cuda
}  // namespace stof
