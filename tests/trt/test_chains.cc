// SPDX-License-Identifier: Apache-2.0
// StofChain as a plugin: types and shapes from its description, whole lives of random chains against fp64, and what no
// honest file has.
#include <algorithm>
#include <cmath>
#include <limits>

#include "plugins/core/chain/chain.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/chain/chain_random.h"
#include "tests/cpp/chain/chain_reference.h"
#include "tests/trt/harness.h"
#include "tests/trt/place.h"

namespace stof::test {
namespace {

Held CreateChain(const std::string& text, TensorRTPhase phase = TensorRTPhase::kBUILD, int spare = 0) {
  Attributes attributes;
  attributes.strings["chain"] = text;
  if (spare != 0) attributes.ints["spare_outputs"] = spare;
  attributes.ints["chain_id"] = 3;
  OwnedFields fields(attributes);
  return Held(FindCreator("StofChain")->createPlugin("layer", fields.get(), phase));
}

DataType TypeOf(DType dtype) {
  return dtype == DType::kF32 ? DataType::kFLOAT : dtype == DType::kF16 ? DataType::kHALF : DataType::kBF16;
}

// Through an engine file, as another process gets it.
Held Reloaded(const Held& built) {
  OwnedFields file(*built.runtime->getFieldsToSerialize());
  Held loaded(FindCreator("StofChain")->createPlugin("layer", file.get(), TensorRTPhase::kRUNTIME));
  CHECK(loaded.plugin != nullptr);
  CHECK(std::string(loaded.build->getTimingCacheID()) == built.build->getTimingCacheID());
  return loaded;
}

void Compare(const std::string& text, const ChainAnswer& answer, const char* got) {
  const auto size = static_cast<size_t>(SizeOf(answer.dtype));
  const double largest = answer.dtype == DType::kF16 ? 65504 : 3.3e38;
  for (size_t i = 0; i < answer.values.size(); ++i) {
    const Approximate& want = answer.values[i];
    const double value = LoadFloat(answer.dtype, got + i * size);
    if (want.error == std::numeric_limits<double>::infinity()) continue;
    if (std::isnan(want.value)) {
      CHECK(std::isnan(value), text, " element ", i, " is ", value);
      continue;
    }
    if (std::fabs(want.value) + want.error > largest * 0.999) continue;
    CHECK(std::fabs(value - want.value) <= ChainTolerance(answer.dtype, want), text, " element ", i, ": ", value,
          ", expected ", want.value);
  }
}

// The calls of a builder and of a context. extra: inputs that the description does not name; spare: such outputs.
void Live(const RandomChain& chain, int extra, int spare) {
  Chain parsed;
  CHECK(ParseChain(chain.text, &parsed).ok(), chain.text);
  Held built = CreateChain(chain.text, TensorRTPhase::kBUILD, spare);
  CHECK(built.plugin != nullptr, chain.text);
  std::vector<ChainArray> arrays = chain.inputs;
  while (static_cast<int>(arrays.size()) < std::max(1, parsed.inputs)) arrays.push_back({DType::kF32, {1}, {0.5}});
  for (int i = 0; i < extra; ++i) arrays.push_back(arrays[0]);
  std::vector<ChainAnswer> answers = EvaluateChain(chain.text, arrays);
  // Nobody reads spare ones, and nothing is written to them.
  ChainAnswer nothing;
  nothing.dtype = DType::kF32, nothing.dims = {1};
  answers.resize(answers.size() + static_cast<size_t>(spare), nothing);
  const auto in_count = static_cast<int32_t>(arrays.size()), out_count = static_cast<int32_t>(answers.size());
  CHECK(built.build->getNbOutputs() == out_count, chain.text);

  FakeBuilder builder;
  std::vector<nvinfer1::DimsExprs> shapes, outs(answers.size());
  std::vector<DataType> types, out_types(answers.size());
  std::vector<nvinfer1::PluginTensorDesc> plain;
  std::vector<nvinfer1::DynamicPluginTensorDesc> bounds;
  for (const ChainArray& array : arrays) {
    shapes.push_back(builder.Dims(array.dims));
    types.push_back(TypeOf(array.dtype));
    plain.push_back(Desc(types.back(), array.dims));
    bounds.push_back(Bounds(types.back(), array.dims, array.dims, array.dims));
  }
  CHECK(built.build->getOutputDataTypes(out_types.data(), out_count, types.data(), in_count) == 0, chain.text);
  // Dimensions of more than two sizes of a run cannot be said.
  const bool said =
      built.build->getOutputShapes(shapes.data(), in_count, nullptr, 0, outs.data(), out_count, builder) == 0;
  for (size_t o = 0; o < answers.size(); ++o) {
    CHECK(out_types[o] == TypeOf(answers[o].dtype), chain.text);
    if (said) CHECK(FakeBuilder::Values(outs[o]) == answers[o].dims, chain.text, " output ", o);
    plain.push_back(Desc(out_types[o], answers[o].dims));
    bounds.push_back(Bounds(out_types[o], answers[o].dims, answers[o].dims, answers[o].dims));
  }
  for (int32_t i = 0; i < in_count + out_count; ++i) {
    CHECK(built.build->supportsFormatCombination(i, bounds.data(), in_count, out_count), chain.text, " tensor ", i);
    std::vector<nvinfer1::DynamicPluginTensorDesc> other = bounds;
    other[static_cast<size_t>(i)].desc.type = DataType::kINT32;
    CHECK(!built.build->supportsFormatCombination(i, other.data(), in_count, out_count), chain.text, " tensor ", i);
  }
  CHECK(built.build->configurePlugin(bounds.data(), in_count, bounds.data() + in_count, out_count) == 0, chain.text);
  CHECK(built.build->getNbTactics() == 0);
  CHECK(built.build->getWorkspaceSize(bounds.data(), in_count, bounds.data() + in_count, out_count) == 0);

  Held loaded = Reloaded(built);
  Held context(loaded.runtime->attachToContext(nullptr));
  const int readies = LastSeen() == nullptr ? 0 : LastSeen()->readies;
  CHECK(context.runtime->onShapeChange(plain.data(), in_count, plain.data() + in_count, out_count) == 0, chain.text);
  CHECK(LastSeen() == nullptr || LastSeen()->readies == readies + 1, chain.text);
  std::vector<Memory> memory;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  const cudaStream_t stream = ThreadStream();
  for (const ChainArray& array : arrays) {
    const auto size = static_cast<size_t>(SizeOf(array.dtype));
    memory.emplace_back(array.values.size() * size);
    for (size_t i = 0; i < array.values.size(); ++i)
      StoreFloat(array.dtype, array.values[i], memory.back().host() + i * size);
    memory.back().Upload(stream);
    inputs.push_back(memory.back().address());
  }
  for (const ChainAnswer& answer : answers) {
    memory.emplace_back(answer.values.size() * static_cast<size_t>(SizeOf(answer.dtype)));
    memory.back().Upload(stream);
    outputs.push_back(memory.back().address());
  }
  CHECK(context.runtime->enqueue(plain.data(), plain.data() + in_count, inputs.data(), outputs.data(), nullptr,
                                 stream) == 0,
        chain.text);
  CHECK(LastSeen() == nullptr || LastSeen()->stream == static_cast<void*>(stream), "another stream");
  for (size_t o = 0; o < answers.size(); ++o) {
    const Memory& output = memory[arrays.size() + o];
    output.Download(stream);
    Compare(chain.text, answers[o], output.host());
  }
}

RandomChain Norm(DType dtype, int64_t b, int64_t s, Random* random) {
  RandomChain chain;
  chain.text =
      "axes b = x0.0, s = x0.1, n = x0.2\nlet r = x0[b, s, n] + x1[b, s, n]\nlet c = r - mean(r)\nout y0 f32 [(b s), "
      "n] = "
      "r\nout y1 f16 [b, n, s] = c * rsqrt(mean(c * c) + 1e-5) * x2[n]";
  for (const std::vector<int64_t>& dims : std::vector<std::vector<int64_t>>{{b, s, 24}, {b, s, 24}, {24}}) {
    ChainArray array;
    array.dtype = dtype;
    array.dims = dims;
    FillChainArray(random, &array);
    chain.inputs.push_back(std::move(array));
  }
  return chain;
}

}  // namespace

TEST(TrtChainLife) {
  Random random(3);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    Live(Norm(dtype, 2, 5, &random), 0, 1);
  }
  CountCases(3);
  const int count = Cases(LastSeen() == nullptr ? 40 : 200);  // a kernel is compiled for each on a device
  for (int i = 0; i < count; ++i) {
    Random own(2000 + static_cast<uint64_t>(i));
    const RandomChain chain = MakeRandomChain(&own, own.Pick<int64_t>({1, 3, 8, 64, 100}), 20);
    try {
      const int extra = static_cast<int>(own.Range(0, 2));
      Live(chain, extra, static_cast<int>(own.Range(0, 2)));
    } catch (Failure& failure) {
      failure.message += ", seed " + std::to_string(i);
      throw;
    }
    CountCases(1);
  }
}

// Symbols: a builder's sizes go through where a product of two and a quotient say them.
TEST(TrtChainShapes) {
  struct One {
    const char* text;
    std::vector<std::vector<int64_t>> in;
    std::vector<int64_t> out;  // empty: refused
  };
  const std::vector<One> kAll = {
      {"axes b = x0.0, n = x0.1 / 2; out y0 f16 [b, n] = x0[b, n] * x0[b, n + 3]", {{7, 6}}, {7, 3}},
      {"axes b = x0.0, h = 4, n = x0.1 / 4; out y0 f16 [(b h), n] = x0[b, (4 * n + h) % 8]", {{5, 8}}, {20, 2}},
      {"axes b = x0.0, s = x1.0, n = 3; out y0 f32 [(b s), n, 1] = x0[b] + x1[s] + n", {{5}, {6}}, {30, 3, 1}},
      {"axes b = x0.0, s = x1.0, n = x1.1; out y0 f32 [(b s n)] = x0[b] + x1[s, n]", {{5}, {6, 2}}, {}},
      {"axes b = x0.0, n = x0.1; out y0 f32 [b, n] = x0[b, n]", {{5}}, {}},
  };
  for (const One& one : kAll) {
    const Held held = CreateChain(one.text);
    CHECK(held.plugin != nullptr, one.text);
    FakeBuilder builder;
    std::vector<nvinfer1::DimsExprs> in, out(1);
    for (const std::vector<int64_t>& dims : one.in) in.push_back(builder.Dims(dims));
    const int32_t code =
        held.build->getOutputShapes(in.data(), static_cast<int32_t>(in.size()), nullptr, 0, out.data(), 1, builder);
    CHECK((code == 0) == !one.out.empty(), one.text);
    if (code == 0) CHECK(FakeBuilder::Values(out[0]) == one.out, one.text);
    CountCases(1);
  }
}

TEST(TrtChainHostile) {
  for (const char* text :
       {"", "axes", "axes n = 4", "axes n = 4; out y0 f64 [n] = 1", "axes n = 4; out y0 f32 [n] = x16[n]"}) {
    CHECK(CreateChain(text).plugin == nullptr, text);
    CHECK(CreateChain(text, TensorRTPhase::kRUNTIME).plugin == nullptr, text);
    CountCases(2);
  }
  Attributes none;
  OwnedFields fields(none);
  CHECK(FindCreator("StofChain")->createPlugin("layer", fields.get(), TensorRTPhase::kBUILD) == nullptr, "no chain");
  const std::string one = "axes n = x0.0; out y0 f32 [n] = x0[n]";
  CHECK(CreateChain(one, TensorRTPhase::kBUILD, 7).plugin != nullptr, "8 outputs");
  for (const int spare : {-1, 8, 9}) {
    CHECK(CreateChain(one, TensorRTPhase::kBUILD, spare).plugin == nullptr, "spare outputs ", spare);
    CountCases(1);
  }
  // Counts that are wrong, and a run with tensors that do not fit.
  const Held held = CreateChain("axes s = x0.0, n = x0.1; out y0 f16 [s, n] = x0[s, n] + x1[n]");
  std::vector<nvinfer1::PluginTensorDesc> plain = {Desc(DataType::kHALF, {3, 4}), Desc(DataType::kHALF, {3}),
                                                   Desc(DataType::kHALF, {3, 4})};
  std::vector<nvinfer1::DynamicPluginTensorDesc> bounds(40, Bounds(DataType::kHALF, {3, 4}, {3, 4}, {3, 4}));
  CHECK(held.build->configurePlugin(bounds.data(), 1, bounds.data() + 1, 1) != 0, "an input less");
  CHECK(held.build->configurePlugin(bounds.data(), 33, bounds.data() + 33, 1) != 0, "33 inputs");
  CHECK(held.build->configurePlugin(bounds.data(), 2, bounds.data() + 2, 2) != 0, "an output more");
  CHECK(!held.build->supportsFormatCombination(0, bounds.data(), 1, 1), "an input less");
  CHECK(held.runtime->onShapeChange(plain.data(), 2, plain.data() + 2, 1) != 0, "an index out of range");
  char data[64] = {};
  const void* inputs[] = {data, data};
  void* outputs[] = {data};
  CHECK(held.runtime->enqueue(plain.data(), plain.data() + 2, inputs, outputs, nullptr, nullptr) != 0, "out of range");
  CountCases(7);
}

}  // namespace stof::test
