// SPDX-License-Identifier: Apache-2.0
// StofAttention through its description, as the runtime adapters use it: every layout, operand and policy against the
// definition in docs/reference/operators.md, and every error at the boundary.
// Over 500 lines: a list of cases.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <thread>

#include "plugins/core/contract/op.h"
#include "plugins/core/host/hash.h"
#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/mask/random_expr.h"
#include "tests/cpp/memory.h"
#include "tests/cpp/shape_rules.h"

namespace stof::test {
namespace {

class MapAttributes final : public AttributeReader {
 public:
  std::map<std::string, int64_t> ints;
  std::map<std::string, float> floats;
  std::map<std::string, std::string> strings;
  std::map<std::string, std::vector<int64_t>> lists;
  bool Int(const char* name, int64_t* value) const override { return Find(ints, name, value); }
  bool Float(const char* name, float* value) const override { return Find(floats, name, value); }
  bool String(const char* name, std::string* value) const override { return Find(strings, name, value); }
  bool Ints(const char* name, std::vector<int64_t>* value) const override { return Find(lists, name, value); }

 private:
  template <typename T>
  static bool Find(const std::map<std::string, T>& map, const char* name, T* value) {
    const auto found = map.find(name);
    if (found == map.end()) return false;
    *value = found->second;
    return true;
  }
};

struct Array {
  Tensor tensor;
  std::vector<char> data;
};

Array MakeArray(DType dtype, const std::vector<int64_t>& dims) {
  Array array;
  array.tensor.dtype = dtype;
  array.tensor.rank = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), array.tensor.dims);
  array.data.resize(static_cast<size_t>(array.tensor.Elements() * SizeOf(dtype)) + 1);
  array.tensor.data = array.data.data();
  return array;
}

// bf16 is the upper half of fp32: exact here, since only values that fit are stored.
void Set(Array* array, int64_t i, float value) {
  if (array->tensor.dtype == DType::kF32) {
    std::memcpy(array->data.data() + 4 * i, &value, 4);
  } else {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    const auto half = static_cast<uint16_t>(bits >> 16);
    std::memcpy(array->data.data() + 2 * i, &half, 2);
  }
}
float Get(const Array& array, int64_t i) {
  uint32_t bits = 0;
  if (array.tensor.dtype == DType::kF32) {
    std::memcpy(&bits, array.data.data() + 4 * i, 4);
  } else {
    uint16_t half = 0;
    std::memcpy(&half, array.data.data() + 2 * i, 2);
    bits = static_cast<uint32_t>(half) << 16;
  }
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}
void FillRandom(Array* array, Random* random) {
  for (int64_t i = 0; i < array->tensor.Elements(); ++i) Set(array, i, std::round(random->Unit() * 64) / 64);
}

struct Problem {
  int64_t B = 1, H = 2, G = 2, S = 5, T = 7, D = 8, Dv = 8;
  std::string layouts[4] = {"BHSD", "BHSD", "BHSD", "BHSD"};
  MapAttributes attributes;
  int64_t before[3] = {}, behind[3] = {};  // heads in the tensor of query, key and value that are not theirs
  DType dtype = DType::kF32;
  std::vector<Array> inputs;  // query, key, value, operands
  bool constant_tables = true;
};

int64_t Offset(const std::string& layout, int64_t heads, int64_t length, int64_t size, int64_t b, int64_t h,
               int64_t s) {
  return layout == "BHSD" ? ((b * heads + h) * length + s) * size : ((b * length + s) * heads + h) * size;
}
std::vector<int64_t> Dims(const std::string& layout, int64_t b, int64_t heads, int64_t length, int64_t size) {
  if (layout == "BHSD") return {b, heads, length, size};
  if (layout == "BSHD") return {b, length, heads, size};
  return {b, length, heads * size};
}

// That the tensor of query, key or value has.
int64_t Heads(const Problem& p, int which) { return p.before[which] + (which == 0 ? p.H : p.G) + p.behind[which]; }

// Where an element of query, key or value is.
int64_t Place(const Problem& p, int which, int64_t b, int64_t h, int64_t s) {
  return Offset(p.layouts[which], Heads(p, which), which == 0 ? p.S : p.T, which == 2 ? p.Dv : p.D, b,
                p.before[which] + h, s);
}

void MakeInputs(Problem* p, Random* random) {
  const int64_t lengths[] = {p->S, p->T, p->T}, sizes[] = {p->D, p->D, p->Dv};
  for (int i = 0; i < 3; ++i) {
    const int64_t heads = Heads(*p, i), size = sizes[i];
    Array array = MakeArray(p->dtype, Dims(p->layouts[i], p->B, heads, lengths[i], size));
    FillRandom(&array, random);
    for (int64_t at = 0; at < array.tensor.Elements() && heads > 0; ++at) {
      const int64_t head = p->layouts[i] == "BHSD" ? at / size / lengths[i] % heads : at / size % heads;
      if (head < p->before[i] || head >= heads - p->behind[i]) Set(&array, at, std::nanf(""));
    }
    p->inputs.push_back(std::move(array));
  }
  p->attributes.strings["layout"] = p->layouts[0] + " " + p->layouts[1] + " " + p->layouts[2] + " " + p->layouts[3];
  p->attributes.ints["num_heads"] = p->H;
  p->attributes.ints["kv_num_heads"] = p->G;
  // CPU kernels compute in full precision, whatever is allowed.
  p->attributes.strings["precision"] = p->S % 3 == 0 ? "" : p->S % 3 == 1 ? "int8" : "int8_fp8";
}

Status RunOp(const Problem& p, const OpDescription& description, Array* output, const Parallel& parallel) {
  std::unique_ptr<Op> op;
  STOF_RETURN_IF_ERROR(description.create(p.attributes, &op));
  std::vector<Tensor> tensors;
  std::vector<Tensor> constants(p.inputs.size());
  std::string operands;
  if (p.attributes.strings.count("operands") != 0) operands = p.attributes.strings.at("operands");
  for (size_t i = 0; i < p.inputs.size(); ++i) {
    tensors.push_back(p.inputs[i].tensor);
    if (p.constant_tables && i >= 3) constants[i] = p.inputs[i].tensor;
  }
  const auto count = static_cast<int>(tensors.size());
  STOF_RETURN_IF_ERROR(op->Prepare(constants.data(), count));
  Tensor shape;
  STOF_RETURN_IF_ERROR(op->InferOutputs(tensors.data(), count, &shape, 1));
  CheckShapeRules(description, p.attributes, tensors, shape, 0);
  *output = MakeArray(shape.dtype, std::vector<int64_t>(shape.dims, shape.dims + shape.rank));
  Memory memory;
  RunContext context;
  context.parallel = parallel;
  context.allocate = Memory::Allocate;
  context.self = &memory;
  Tensor result = output->tensor;
  return op->Run(tensors.data(), count, &result, 1, context);
}

const OpDescription& Attention() {
  int count = 0;
  const OpDescription* const* ops = AllOps(&count);
  CHECK(count >= 1 && std::string(ops[0]->name) == "StofAttention");
  return *ops[0];
}

// What decides which pairs may attend, besides the tensors.
struct Rules {
  MaskExpr expr;
  ExprSizes sizes;
  std::vector<ExprBinding> bindings;
  const Array* bias = nullptr;  // [B, H, S, T] with some axes 1
};

float BiasAt(const Rules& rules, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (rules.bias == nullptr) return 0;
  const int64_t* dims = rules.bias->tensor.dims;
  const int64_t at[4] = {b, h, i, j};
  int64_t flat = 0;
  for (int axis = 0; axis < 4; ++axis) flat = flat * dims[axis] + (dims[axis] == 1 ? 0 : at[axis]);
  return Get(*rules.bias, flat);
}

// The definition, for one row, in double. Empty rows follow the policy.
std::vector<double> Row(const Problem& p, const Rules& rules, int64_t b, int64_t h, int64_t i) {
  const std::string policy = p.attributes.strings.at("empty_rows");
  const double softcap = p.attributes.floats.count("softcap") != 0 ? p.attributes.floats.at("softcap") : 0;
  const double scale = p.attributes.floats.count("scale") != 0 ? p.attributes.floats.at("scale")
                                                               : 1 / std::sqrt(static_cast<double>(p.D));
  const int64_t g = h / (p.H / p.G);
  std::vector<double> weights(static_cast<size_t>(p.T));
  const auto fill = [&](bool masked) {
    double top = -std::numeric_limits<double>::infinity();
    for (int64_t j = 0; j < p.T; ++j) {
      double score = 0;
      for (int64_t d = 0; d < p.D; ++d) {
        score += static_cast<double>(Get(p.inputs[0], Place(p, 0, b, h, i) + d)) *
                 Get(p.inputs[1], Place(p, 1, b, g, j) + d);
      }
      score *= scale;
      if (softcap > 0) score = softcap * std::tanh(score / softcap);
      const bool allowed = Allowed(rules.expr, rules.sizes, rules.bindings, b, h, rules.sizes.P + i, j);
      score += masked && !allowed ? -std::numeric_limits<double>::infinity() : BiasAt(rules, b, h, i, j);
      weights[static_cast<size_t>(j)] = score;
      top = std::max(top, score);
    }
    return top;
  };
  double top = fill(true);
  std::vector<double> out(static_cast<size_t>(p.Dv), 0.0);
  const bool empty = std::isinf(top);
  if (empty && policy == "nan") return std::vector<double>(out.size(), std::nan(""));
  if (empty && policy == "zero") return out;
  if (empty && policy == "mean") {
    top = 0;
    std::fill(weights.begin(), weights.end(), 0.0);
  }
  if (empty && policy == "all") top = fill(false);
  double sum = 0;
  for (int64_t j = 0; j < p.T; ++j) {
    const double w = std::exp(weights[static_cast<size_t>(j)] - top);
    sum += w;
    for (int64_t d = 0; d < p.Dv; ++d) {
      out[static_cast<size_t>(d)] += w * Get(p.inputs[2], Place(p, 2, b, g, j) + d);
    }
  }
  for (double& x : out) x /= sum;
  return out;
}

void Compare(const Problem& p, const Rules& rules, const Array& output, const std::string& where) {
  const double tolerance = p.dtype == DType::kF32 ? 2e-5 : 1.2e-2;
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t h = 0; h < p.H; ++h) {
      for (int64_t i = 0; i < p.S; ++i) {
        const std::vector<double> want = Row(p, rules, b, h, i);
        const int64_t at = Offset(p.layouts[3], p.H, p.S, p.Dv, b, h, i);
        for (int64_t d = 0; d < p.Dv; ++d) {
          const double got = Get(output, at + d);
          const double expected = want[static_cast<size_t>(d)];
          CHECK(std::isnan(expected) ? std::isnan(got) : std::abs(got - expected) <= tolerance, where, " b ", b, " h ",
                h, " i ", i, " d ", d, ": ", got, ", expected ", expected);
        }
      }
    }
  }
}

// pad as one of its types; the expression sees a boolean.
Array ConvertPad(const Tensor& pad, DType dtype) {
  Array array = MakeArray(dtype, {pad.dims[0], pad.dims[1]});
  for (int64_t i = 0; i < pad.Elements(); ++i) {
    const bool on = static_cast<const uint8_t*>(pad.data)[i] != 0;
    if (dtype == DType::kF32) {
      Set(&array, i, on ? -0.5f : -0.0f);
    } else {
      const int64_t value = on ? (dtype == DType::kBool ? 1 : 3) : 0;
      std::memcpy(array.data.data() + i * SizeOf(dtype), &value, static_cast<size_t>(SizeOf(dtype)));
    }
  }
  return array;
}

Array Copy(const Tensor& tensor) {
  Array array = MakeArray(tensor.dtype, std::vector<int64_t>(tensor.dims, tensor.dims + tensor.rank));
  std::memcpy(array.data.data(), tensor.data, static_cast<size_t>(tensor.Elements() * SizeOf(tensor.dtype)));
  return array;
}

Array MakeBias(const Problem& p, Random* random) {
  const std::vector<int64_t> dims = {random->OneIn(2) ? 1 : p.B, random->OneIn(2) ? 1 : p.H, random->OneIn(3) ? 1 : p.S,
                                     random->OneIn(4) ? 1 : p.T};
  Array bias = MakeArray(random->OneIn(2) ? p.dtype : DType::kF32, dims);
  FillRandom(&bias, random);
  for (int64_t i = 0; i < bias.tensor.Elements(); ++i) {
    if (random->OneIn(9)) Set(&bias, i, -std::numeric_limits<float>::infinity());
  }
  return bias;
}

// Other heads, which hold NaN, in the tensors that may have them.
void Pack(Problem* p, Random* random) {
  std::vector<int64_t>& packed = p->attributes.lists["packed"];
  for (int i = 0; i < 3; ++i) {
    if (p->layouts[i] == "BSN") {
      p->before[i] = random->Range(0, 5);
      p->behind[i] = random->Range(0, 5);
    }
    packed.push_back(p->before[i]);
    packed.push_back(Heads(*p, i));
  }
}

void RandomProblem(uint64_t seed, const Parallel& parallel) {
  static const std::vector<std::string> kLayouts = {"BHSD", "BSHD", "BSN"};
  static const std::vector<std::string> kPolicies = {"zero", "nan", "mean", "all"};
  static const std::vector<DType> kPadTypes = {DType::kBool, DType::kU8, DType::kI32, DType::kI64, DType::kF32};
  Random random(seed);
  Problem p;
  ExprSizes sizes = RandomSizes(&random, 70);
  const bool offset = sizes.T >= sizes.S && random.OneIn(2);
  sizes.P = offset ? sizes.T - sizes.S : 0;
  p.B = sizes.B;
  p.H = sizes.H;
  p.S = sizes.S;
  p.T = sizes.T;
  p.G = random.OneIn(2) ? p.H : 1;
  p.D = random.Range(1, 20);
  p.Dv = random.OneIn(2) ? p.D : random.Range(1, 20);
  p.dtype = random.OneIn(4) ? DType::kBF16 : DType::kF32;
  for (std::string& layout : p.layouts) layout = random.Pick(kLayouts);
  p.constant_tables = random.OneIn(2);
  if (random.OneIn(3)) Pack(&p, &random);
  MakeInputs(&p, &random);
  RandomMask mask = MakeRandomMask(&random, sizes, true);
  std::string text = mask.text;
  if (random.OneIn(3)) text = "(" + text + ") and pad[b, k]";
  p.attributes.strings["mask"] = text;
  p.attributes.strings["empty_rows"] = random.Pick(kPolicies);
  p.attributes.ints["query_offset"] = offset ? 1 : 0;
  if (random.OneIn(3)) p.attributes.floats["softcap"] = 2.5f;
  if (random.OneIn(3)) p.attributes.floats["scale"] = 0.7f;
  Rules rules;
  CHECK(MaskExpr::Parse(text, mask.operands.tables, &rules.expr).ok());
  rules.sizes = sizes;
  rules.bindings = Bind(rules.expr, mask.operands.runtime);
  std::string operands;
  for (const auto& list : {mask.operands.tables, mask.operands.runtime}) {
    for (const auto& [name, tensor] : list) {
      // A pad that the mask does not read is taken for a mistake.
      operands += (name == "pad" && text.find("pad") == std::string::npos ? "unused" : name) + " ";
      p.inputs.push_back(name == "pad" ? ConvertPad(tensor, random.Pick(kPadTypes)) : Copy(tensor));
    }
  }
  if (random.OneIn(3)) {
    operands += "unused ";
    p.inputs.push_back(MakeArray(DType::kF64, {}));
  }
  const bool with_bias = random.OneIn(2);
  if (with_bias) {
    operands += "bias";
    p.inputs.push_back(MakeBias(p, &random));
    rules.bias = &p.inputs.back();
  }
  p.attributes.strings["operands"] = operands;
  Array output;
  const Status status = RunOp(p, Attention(), &output, parallel);
  const std::string where = Text("seed ", seed, " ", text);
  CHECK(status.ok(), where, ": ", status.message());
  Compare(p, rules, output, where);
}

TEST(OpEqualsTheDefinition) {
  ThreadPool pool(2);
  const int count = Cases(600);
  for (int i = 0; i < count; ++i) RandomProblem(static_cast<uint64_t>(i), pool.view());
  CountCases(count);
}

// Masks of every m-th key, at lengths that m divides and at others.
TEST(OpSplitsByResidues) {
  static const std::vector<std::string> kLayouts = {"BHSD", "BSHD", "BSN"};
  static const std::vector<std::string> kRest = {"", " and k <= q", " and abs(q - k) <= 40", " and k > q + 7"};
  static const std::vector<std::string> kPolicies = {"zero", "nan", "mean"};
  ThreadPool pool(2);
  const int count = Cases(60);
  for (int i = 0; i < count; ++i) {
    Random random(static_cast<uint64_t>(1000 + i));
    Problem p;
    const int64_t m = random.Range(2, 3);
    p.B = random.Range(1, 3), p.H = 2, p.G = random.Range(1, 2);
    p.S = m * random.Range(63, 80) + (random.OneIn(5) ? 1 : 0);
    p.T = m * random.Range(63, 90) + (random.OneIn(5) ? 1 : 0);
    p.D = random.Range(1, 9), p.Dv = random.Range(1, 9);
    p.dtype = random.OneIn(3) ? DType::kBF16 : DType::kF32;
    const int alike = static_cast<int>(random.Range(0, 2));
    for (std::string& layout : p.layouts) {
      layout = alike == 0   ? "BHSD"
               : alike == 1 ? kLayouts[static_cast<size_t>(random.Range(1, 2))]
                            : random.Pick(kLayouts);
    }
    if (random.OneIn(4)) Pack(&p, &random);
    MakeInputs(&p, &random);
    const std::string text = "(q - k) % " + std::to_string(m) + " == 0" + random.Pick(kRest);
    const bool offset = p.T >= p.S && random.OneIn(2);
    p.attributes.strings["mask"] = text;
    p.attributes.strings["empty_rows"] = random.Pick(kPolicies);
    p.attributes.ints["query_offset"] = offset ? 1 : 0;
    Rules rules;
    CHECK(MaskExpr::Parse(text, {}, &rules.expr).ok());
    rules.sizes = {p.B, p.H, p.S, p.T, offset ? p.T - p.S : 0};
    Array output;
    const Status status = RunOp(p, Attention(), &output, pool.view());
    const std::string where = Text("case ", i, " ", text, " B ", p.B, " S ", p.S, " T ", p.T);
    CHECK(status.ok(), where, ": ", status.message());
    Compare(p, rules, output, where);
  }
  CountCases(count);
}

TEST(OpRunsOnSeveralThreadsAtOnce) {
  const int count = Cases(60);
  std::string failures[4];
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      ThreadPool pool(t % 2 + 1);
      try {
        for (int i = 0; i < count; ++i) RandomProblem(static_cast<uint64_t>(i + t / 2), pool.view());
      } catch (const Failure& failure) {
        failures[t] = failure.message;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) CHECK(failure.empty(), failure);
  CountCases(4 * count);
}

// Tables that are inputs of each run: the same object follows them, also when several threads bring different ones.
TEST(OpFollowsItsTables) {
  Random random(11);
  Problem p;
  p.T = 40;
  MakeInputs(&p, &random);
  p.attributes.strings["mask"] = "table0[k]";
  p.attributes.strings["operands"] = "table0";
  p.attributes.strings["empty_rows"] = "zero";
  std::unique_ptr<Op> op;
  CHECK(Attention().create(p.attributes, &op).ok());
  const std::vector<Tensor> unknown(4);
  CHECK(op->Prepare(unknown.data(), 4).ok());
  const int rounds = Cases(100);
  std::string failures[2];
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      try {
        Random choices(static_cast<uint64_t>(t));
        ThreadPool pool(1);
        for (int i = 0; i < rounds; ++i) {
          Problem own = p;
          for (Array& array : own.inputs) array.tensor.data = array.data.data();
          own.inputs.push_back(MakeArray(DType::kBool, {p.T}));
          Array& table = own.inputs.back();
          for (int64_t k = 0; k < p.T; ++k) table.data[static_cast<size_t>(k)] = choices.OneIn(2) && i % 3 != 0 ? 1 : 0;
          Rules rules;
          rules.sizes = {p.B, p.H, p.S, p.T, 0};
          CHECK(MaskExpr::Parse("table0[k]", {{"table0", table.tensor}}, &rules.expr).ok());
          rules.bindings.resize(1);
          std::vector<Tensor> tensors;
          for (const Array& array : own.inputs) tensors.push_back(array.tensor);
          Tensor shape;
          CHECK(op->InferOutputs(tensors.data(), 4, &shape, 1).ok());
          Array output = MakeArray(shape.dtype, std::vector<int64_t>(shape.dims, shape.dims + shape.rank));
          Memory memory;
          const RunContext context = {pool.view(), Memory::Allocate, &memory};
          CHECK(op->Run(tensors.data(), 4, &output.tensor, 1, context).ok());
          Compare(own, rules, output, Text("round ", i));
        }
      } catch (const Failure& failure) {
        failures[t] = failure.message;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) CHECK(failure.empty(), failure);
  CountCases(2 * rounds);
}

// Two tables of one hash, which anybody can make: the second to last word is exchanged, and the last one so that both
// come out the same. Neither mask may be found in the place of the other.
TEST(OpKeepsMasksOfEqualHashesApart) {
  Random random(12);
  Problem p;
  p.S = 40, p.T = 40;  // more rows than are evaluated without the cache
  MakeInputs(&p, &random);
  p.attributes.strings["mask"] = "table0[k] > 5";
  p.attributes.strings["operands"] = "table0";
  p.attributes.strings["empty_rows"] = "zero";
  p.constant_tables = true;
  const auto parse = [](const Array& table, MaskExpr* expr) {
    CHECK(MaskExpr::Parse("table0[k] > 5", {{"table0", table.tensor}}, expr).ok());
  };
  Array tables[2] = {MakeArray(DType::kI64, {p.T}), MakeArray(DType::kI64, {p.T})};
  std::vector<int64_t> words(static_cast<size_t>(p.T));
  for (int64_t& word : words) word = random.Range(0, 9);
  const size_t at = words.size() - 2;
  words[at] = 0;
  std::memcpy(tables[0].data.data(), words.data(), words.size() * sizeof(int64_t));
  // As HashTable comes to the word.
  const int64_t dims[4] = {p.T, 0, 0, 0};
  uint64_t hash = HashBytes("table0", 6, 0);
  hash = HashBytes(nullptr, 0, HashBytes(dims, sizeof dims, hash));
  hash = MixHash(hash, words.size() * sizeof(int64_t));
  for (size_t i = 0; i < at; ++i) hash = MixHash(hash, static_cast<uint64_t>(words[i]));
  const uint64_t first = MixHash(hash, 0) ^ static_cast<uint64_t>(words[at + 1]);
  do {
    ++words[at];
    words[at + 1] = static_cast<int64_t>(first ^ MixHash(hash, static_cast<uint64_t>(words[at])));
  } while (words[at] <= 5 || std::abs(words[at + 1] >> 1) >= int64_t{1} << 60);
  std::memcpy(tables[1].data.data(), words.data(), words.size() * sizeof(int64_t));
  MaskExpr exprs[2];
  for (int i = 0; i < 2; ++i) parse(tables[i], &exprs[i]);
  CHECK(exprs[0].Hash() == exprs[1].Hash() && exprs[0].Hash(7) != exprs[1].Hash(7));
  ThreadPool pool(1);
  for (int i = 0; i < 2; ++i) {
    Problem own = p;
    for (Array& array : own.inputs) array.tensor.data = array.data.data();
    own.inputs.push_back(tables[i]);
    own.inputs.back().tensor.data = own.inputs.back().data.data();
    Rules rules;
    rules.sizes = {p.B, p.H, p.S, p.T, 0};
    rules.expr = exprs[i];
    rules.bindings.resize(1);
    Array output;
    const Status status = RunOp(own, Attention(), &output, pool.view());
    CHECK(status.ok(), status.message());
    Compare(own, rules, output, Text("table ", i));
  }
  CountCases(2);
}

// Attributes as a damaged file may hold them: an error or an output, never a crash.
TEST(OpSurvivesDamagedAttributes) {
  ThreadPool pool(2);
  const int count = Cases(3000);
  int passed = 0;
  for (int i = 0; i < count; ++i) {
    Random random(static_cast<uint64_t>(i) + 900);
    const ExprSizes sizes = RandomSizes(&random, 20);
    Problem p;
    p.B = sizes.B;
    p.H = p.G = sizes.H;
    p.S = sizes.S;
    p.T = sizes.T;
    MakeInputs(&p, &random);
    RandomMask mask = MakeRandomMask(&random, sizes, true);
    auto& strings = p.attributes.strings;
    strings["mask"] = mask.text + " and pad[b, k]";
    strings["empty_rows"] = "zero";
    for (const auto& list : {mask.operands.tables, mask.operands.runtime}) {
      for (const auto& [name, tensor] : list) {
        strings["operands"] += name + " ";
        p.inputs.push_back(Copy(tensor));
      }
    }
    static const std::vector<std::string> kNames = {"mask", "layout", "operands", "empty_rows"};
    std::string& text = strings[random.Pick(kNames)];
    for (int64_t n = random.Range(1, 2); n > 0 && !text.empty(); --n) {
      const auto at = static_cast<size_t>(random.Range(0, static_cast<int64_t>(text.size()) - 1));
      if (random.OneIn(2)) {
        text[at] = text[static_cast<size_t>(random.Range(0, static_cast<int64_t>(text.size()) - 1))];
      } else {
        text.erase(at, 1);
      }
    }
    if (random.OneIn(3)) p.attributes.ints["num_heads"] = random.Range(-2, 9);
    if (random.OneIn(3)) p.attributes.ints["query_offset"] = random.Range(-1, 2);
    if (random.OneIn(6)) {
      std::vector<int64_t>& packed = p.attributes.lists["packed"];
      for (int64_t n = random.Range(5, 6); n > 0; --n) packed.push_back(random.Range(-1, 4));
    }
    Array output;
    passed += RunOp(p, Attention(), &output, pool.view()).ok() ? 1 : 0;
  }
  CHECK(passed > count / 50 && passed < count, passed);
  CountCases(count);
}

TEST(OpTakesEmptyTensors) {
  ThreadPool pool(1);
  for (int axis = 0; axis < 8; ++axis) {
    for (const char* policy : {"zero", "nan", "mean", "all"}) {
      Random random(7);
      Problem p;
      if (axis >= 4) {            // tensors without elements, whose data may be null, beside packed ones
        if (axis == 5) continue;  // packed tensors have heads
        for (std::string& layout : p.layouts) layout = "BSN";
      }
      const bool packed = axis >= 4;
      (axis % 4 == 0 ? p.B : axis == 1 ? p.H : axis % 4 == 2 ? p.S : p.T) = 0;
      if (axis == 1) p.G = 0;
      if (packed) Pack(&p, &random);
      MakeInputs(&p, &random);
      for (Array& array : p.inputs) {
        if (packed && array.tensor.Elements() == 0) array.tensor.data = nullptr;
      }
      p.attributes.strings["mask"] = "abs(q - k) <= 2";
      p.attributes.strings["empty_rows"] = policy;
      Array output;
      const Status status = RunOp(p, Attention(), &output, pool.view());
      CHECK(status.ok(), "axis ", axis, ": ", status.message());
      // Without any key a query gives zeros, as a product over nothing does, whatever the policy says of forbidden
      // keys.
      for (int64_t i = 0; i < output.tensor.Elements(); ++i) CHECK(Get(output, i) == 0, "axis ", axis);
      CountCases(1);
    }
  }
}

// A thread of a pool must not let an exception out, which would end the process.
TEST(OpSaysThatThreadsGotNoMemory) {
  Random random(17);
  Problem p;
  p.B = 2, p.S = 70, p.T = 150;
  MakeInputs(&p, &random);
  p.constant_tables = false;
  p.attributes.strings["mask"] = "segment_q[b, q - P] == segment_k[b, k]";
  p.attributes.strings["operands"] = "segment_q segment_k";
  for (const int64_t length : {p.S, p.T}) {
    Array segments = MakeArray(DType::kI32, {p.B, length});
    for (int64_t i = 0; i < segments.tensor.Elements(); ++i) {
      const auto id = static_cast<int32_t>(random.Range(0, 2));
      std::memcpy(segments.data.data() + 4 * i, &id, 4);
    }
    p.inputs.push_back(std::move(segments));
  }
  // All of a kernel's work on a thread of its own, without memory where that is asked for.
  struct Team {
    bool refuses = false;
    static void Run(void* self, void (*fn)(void* user, size_t i), size_t count, void* user) {
      std::thread([=] {
        MemoryIsRefused() = static_cast<Team*>(self)->refuses;
        for (size_t i = 0; i < count; ++i) fn(user, i);
        MemoryIsRefused() = false;
      }).join();
    }
  };
  Team team;
  const Parallel parallel = {&Team::Run, &team, 3};
  Array expected, output;
  Status status = RunOp(p, Attention(), &expected, parallel);
  CHECK(status.ok(), status.message());
  team.refuses = true;
  status = RunOp(p, Attention(), &output, parallel);
  CHECK(!status.ok() && std::string(status.message()).find("out of memory") != std::string::npos, status.message());
  team.refuses = false;
  status = RunOp(p, Attention(), &output, parallel);
  CHECK(status.ok(), status.message());
  for (int64_t i = 0; i < output.tensor.Elements(); ++i) CHECK(Get(output, i) == Get(expected, i), "element ", i);
  CountCases(3);
}

// One fault each; the message has to name what is wrong.
TEST(OpRefuses) {
  struct Fault {
    const char* expected;
    std::function<void(Problem*)> plant;
  };
  const auto add = [](Problem* p, const char* role, Array array) {
    p->attributes.strings["operands"] += std::string(role) + " ";
    p->inputs.push_back(std::move(array));
  };
  const auto packed = [](std::vector<int64_t> numbers) {
    return [numbers](Problem* p) { p->attributes.lists["packed"] = numbers; };
  };
  const auto mask = [](const char* text) { return [text](Problem* p) { p->attributes.strings["mask"] = text; }; };
  const std::vector<Fault> faults = {
      {"column", mask("q <")},
      {"table0", mask("table0[k]")},
      {"pad", mask("pad[b, k]")},
      {"segment_q", mask("segment_q[b, q - P] == 0")},
      {"layout", [](Problem* p) { p->attributes.strings["layout"] = "BHDS"; }},
      {"layout", [](Problem* p) { p->attributes.strings["layout"] = "BHSD BHSD"; }},
      {"empty_rows", [](Problem* p) { p->attributes.strings["empty_rows"] = "one"; }},
      {"query_offset", [](Problem* p) { p->attributes.ints["query_offset"] = 2; }},
      {"allow_tf32", [](Problem* p) { p->attributes.ints["allow_tf32"] = -1; }},
      {"precision", [](Problem* p) { p->attributes.strings["precision"] = "int4"; }},
      {"allow_bf16", [](Problem* p) { p->attributes.ints["allow_bf16"] = 2; }},
      {"softcap", [](Problem* p) { p->attributes.floats["softcap"] = -1.0f; }},
      {"softcap", [](Problem* p) { p->attributes.floats["softcap"] = std::nanf(""); }},
      {"scale", [](Problem* p) { p->attributes.floats["scale"] = std::numeric_limits<float>::infinity(); }},
      {"results", [](Problem* p) { p->attributes.strings["results"] = "lse present_key"; }},
      {"heads", [](Problem* p) { p->attributes.ints["num_heads"] = -3; }},
      {"heads", [](Problem* p) { p->attributes.ints["num_heads"] = 5; }},
      {"operands", [](Problem* p) { p->attributes.strings["operands"] = "past_key"; }},
      {"inputs", [](Problem* p) { p->attributes.strings["operands"] = "pad"; }},
      {"inputs", [](Problem* p) { p->inputs.pop_back(); }},
      {"twice",
       [&](Problem* p) {
         add(p, "bias", MakeArray(DType::kF32, {1, 1, 5, 7}));
         add(p, "bias", MakeArray(DType::kF32, {1, 1, 5, 7}));
       }},
      {"bias", [&](Problem* p) { add(p, "bias", MakeArray(DType::kF32, {1, 1, 5, 6})); }},
      {"bias", [&](Problem* p) { add(p, "bias", MakeArray(DType::kI64, {1, 1, 5, 7})); }},
      {"bias", [&](Problem* p) { add(p, "bias", MakeArray(DType::kF32, {1, 1, 1, 5, 7})); }},
      {"pad has shape",
       [&](Problem* p) {
         add(p, "pad", MakeArray(DType::kBool, {1, 6}));
         p->attributes.strings["mask"] = "pad[b, k]";
       }},
      {"pad has data type",
       [&](Problem* p) {
         add(p, "pad", MakeArray(DType::kF64, {1, 7}));
         p->attributes.strings["mask"] = "pad[b, k]";
       }},
      {"pad", [&](Problem* p) { add(p, "pad", MakeArray(DType::kBool, {1, 7})); }},  // given, but not in the mask
      {"table0",
       [&](Problem* p) {
         add(p, "table0", MakeArray(DType::kF32, {7}));
         p->attributes.strings["mask"] = "table0[k]";
       }},
      {"table0",
       [&](Problem* p) {
         add(p, "table0", MakeArray(DType::kBool, {6}));
         p->attributes.strings["mask"] = "table0[k]";
       }},
      {"lengths",
       [&](Problem* p) {
         add(p, "lengths", MakeArray(DType::kF32, {1}));
         p->attributes.strings["mask"] = "k < lengths[b]";
       }},
      {"lengths",
       [&](Problem* p) {
         add(p, "lengths", MakeArray(DType::kI64, {3}));
         p->attributes.strings["mask"] = "k < lengths[b + 3]";
       }},
      {"batch", [](Problem* p) { p->inputs[1] = MakeArray(DType::kF32, {2, 2, 7, 8}); }},
      {"length", [](Problem* p) { p->inputs[1] = MakeArray(DType::kF32, {1, 2, 6, 8}); }},
      {"head size", [](Problem* p) { p->inputs[1] = MakeArray(DType::kF32, {1, 2, 7, 9}); }},
      {"heads", [](Problem* p) { p->inputs[1] = MakeArray(DType::kF32, {1, 3, 7, 8}); }},
      {"rank", [](Problem* p) { p->inputs[0] = MakeArray(DType::kF32, {2, 5, 8}); }},
      {"data type", [](Problem* p) { p->inputs[0] = MakeArray(DType::kI32, {1, 2, 5, 8}); }},
      {"data type", [](Problem* p) { p->inputs[2] = MakeArray(DType::kBF16, {1, 2, 7, 8}); }},
      {"256",
       [](Problem* p) {
         p->inputs[0] = MakeArray(DType::kF32, {1, 2, 5, 257});
         p->inputs[1] = MakeArray(DType::kF32, {1, 2, 7, 257});
       }},
      {"packed has 5 numbers, expected 6", packed({0, 2, 0, 2, 0})},
      {"packed has 0 numbers, expected 6", packed({})},
      {"first head -1 of 2 for query", packed({-1, 2, 0, 2, 0, 2})},
      {"first head 0 of 0 for key", packed({0, 2, 0, 0, 0, 2})},
      {"first head 0 of 65537 for value", packed({0, 2, 0, 2, 0, 65537})},
      {"first head 9223372036854775807 of 3 for key", packed({0, 2, INT64_MAX, 3, 0, 2})},
      {"first head 0 of 9223372036854775807 for key", packed({0, 2, 0, INT64_MAX, 0, 2})},
      {"for key, expected 2 heads from the first one on",
       [&](Problem* p) {
         packed({0, 2, 1, 2, 0, 2})(p);
         p->attributes.strings["layout"] = "BHSD BSN BHSD BHSD";
       }},
      {"for query, expected 0 for layout BHSD", packed({1, 3, 0, 2, 0, 2})},
      {"expected 3 heads, as attribute packed says", packed({0, 2, 0, 2, 0, 3})},
      {"expected a last dimension that its number of heads (3) divides",
       [&](Problem* p) {
         packed({0, 2, 1, 3, 0, 2})(p);
         p->attributes.strings["layout"] = "BHSD BSN BHSD BHSD";
         p->inputs[1] = MakeArray(DType::kF32, {1, 7, 16});
       }},
      {"head size",
       [&](Problem* p) {
         packed({0, 2, 1, 4, 0, 2})(p);
         p->attributes.strings["layout"] = "BHSD BSN BHSD BHSD";
         p->inputs[1] = MakeArray(DType::kF32, {1, 7, 16});
       }},
      {"query_offset",
       [](Problem* p) {
         p->inputs[0] = MakeArray(DType::kF32, {1, 2, 8, 8});
         p->attributes.ints["query_offset"] = 1;
       }},
  };
  ThreadPool pool(1);
  int number = 0;
  for (const Fault& fault : faults) {
    Random random(3);
    Problem p;
    MakeInputs(&p, &random);
    p.attributes.strings["operands"] = "";
    fault.plant(&p);
    Array output;
    const Status status = RunOp(p, Attention(), &output, pool.view());
    CHECK(!status.ok(), "fault ", number, " (", fault.expected, ") passed");
    CHECK(status.message().find(fault.expected) != std::string::npos, "fault ", number, ": ", status.message());
    ++number;
  }
  CountCases(number);
}

}  // namespace
}  // namespace stof::test
