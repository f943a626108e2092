// SPDX-License-Identifier: Apache-2.0
// Fields and shapes that no honest file has: refused by a return code, without a crash and without a read beyond what
// was given (run under AddressSanitizer, too).
#include <cstdint>
#include <limits>
#include <string>

#include "plugins/trt/fields.h"
#include "plugins/trt/log.h"
#include "tests/trt/fake_backend.h"
#include "tests/trt/harness.h"

namespace stof::test {
namespace {

nvinfer1::IPluginV3* CreateRaw(const nvinfer1::PluginFieldCollection* fields,
                               TensorRTPhase phase = TensorRTPhase::kBUILD) {
  return FindCreator("StofAttention")->createPlugin("layer", fields, phase);
}

bool Refused(const Attributes& attributes) { return Create(attributes).plugin == nullptr; }

Attributes Strings(std::initializer_list<std::pair<const std::string, std::string>> strings) {
  Attributes attributes;
  attributes.strings = strings;
  return attributes;
}

std::string RandomText(Random* random, int64_t most) {
  static constexpr char kAlphabet[] = "qkbhSTP()[]<>=!+-*/% andornot0123456789table,.abspadsegment_lengthsx==\"\\";
  std::string text;
  for (int64_t i = random->Range(0, most); i > 0; --i) {
    text += random->OneIn(40) ? static_cast<char>(random->Range(1, 255))
                              : kAlphabet[random->Next() % (sizeof kAlphabet - 1)];
  }
  return text;
}

// Asks a plugin for everything with shapes that make no sense.
void Provoke(Held* held, Random* random) {
  const auto in_count = static_cast<int32_t>(random->Range(0, 20));
  const auto out_count = static_cast<int32_t>(random->Range(0, 3));
  FakeBuilder builder;
  std::vector<nvinfer1::DimsExprs> shapes(20), outs(8);
  std::vector<DataType> types(20);
  std::vector<nvinfer1::DynamicPluginTensorDesc> descs(28);
  std::vector<nvinfer1::PluginTensorDesc> plain(28);
  const auto dims = [&] {
    static const std::vector<int64_t> kSizes = {
        -1, 0, 1, 2, 8, 16, 64, 4096, int64_t{1} << 22, int64_t{1} << 40, std::numeric_limits<int64_t>::max()};
    std::vector<int64_t> made;
    for (int64_t i = random->Range(0, random->OneIn(3) ? 8 : 4); i > 0; --i) made.push_back(random->Pick(kSizes));
    return made;
  };
  for (size_t i = 0; i < plain.size(); ++i) {
    const auto type = static_cast<DataType>(random->Range(-1, 12));
    const std::vector<int64_t> shape = dims();
    if (i < 20) {
      types[i] = type;
      shapes[i] = builder.Dims(shape);
      if (random->OneIn(20)) shapes[i].nbDims = random->OneIn(2) ? -1 : 9;
    }
    plain[i] = Desc(type, shape);
    descs[i].desc = plain[i];
    descs[i].min = ToDims(dims()), descs[i].opt = random->OneIn(2) ? plain[i].dims : ToDims(dims());
    descs[i].max = random->OneIn(2) ? plain[i].dims : ToDims(dims());
    if (random->OneIn(20)) {
      plain[i].dims.nbDims = descs[i].desc.dims.nbDims = descs[i].opt.nbDims = random->OneIn(2) ? -5 : 99;
    }
  }
  const int32_t right_in = random->OneIn(2) ? 3 : in_count, right_out = random->OneIn(2) ? 1 : out_count;
  std::vector<DataType> out_types(8);
  held->build->getOutputDataTypes(out_types.data(), right_out, types.data(), right_in);
  held->build->getOutputShapes(shapes.data(), right_in, nullptr, random->OneIn(9) ? 1 : 0, outs.data(), right_out,
                               builder);
  held->build->supportsFormatCombination(static_cast<int32_t>(random->Range(-1, 28)), descs.data(), right_in,
                                         right_out);
  held->build->configurePlugin(descs.data(), right_in, descs.data() + 20, right_out);
  held->build->getWorkspaceSize(descs.data(), right_in, descs.data() + 20, right_out);
  held->runtime->setTactic(static_cast<int32_t>(random->Range(-2, 1000)));
  held->runtime->onShapeChange(plain.data(), right_in, plain.data() + 20, right_out);
  CountCases(1);
}

}  // namespace

TEST(TrtRefusesFields) {
  CHECK(!Refused({}));
  CHECK(CreateRaw(nullptr) == nullptr);
  nvinfer1::PluginFieldCollection broken = {3, nullptr};
  CHECK(CreateRaw(&broken) == nullptr);
  broken.nbFields = -1;
  CHECK(CreateRaw(&broken) == nullptr);
  broken.nbFields = 0;
  CHECK(Held(CreateRaw(&broken)).plugin != nullptr);
  // An engine's data without our format, and of another one.
  CHECK(CreateRaw(&broken, TensorRTPhase::kRUNTIME) == nullptr);
  Attributes other;
  other.ints["stof_format"] = 2;
  CHECK(Create(other, TensorRTPhase::kRUNTIME).plugin == nullptr);
  other.ints["stof_format"] = 3;
  CHECK(Create(other, TensorRTPhase::kRUNTIME).plugin != nullptr);

  CHECK(Refused(Strings({{"mask", "q <"}})));
  CHECK(Refused(Strings({{"mask", std::string(70000, '(')}})));
  CHECK(Refused(Strings({{"layout", "BDHS"}})));
  CHECK(Refused(Strings({{"empty_rows", "none"}})));
  CHECK(Refused(Strings({{"operands", "pad pad"}, {"mask", "pad[b, k]"}})));
  CHECK(Refused(Strings({{"operands", "weights"}})));
  CHECK(Refused(Strings({{"operands", "cumulative_sequence_length"}})));
  CHECK(Refused(Strings({{"results", "present_key"}})));
  CHECK(Refused(Strings({{"num_heads", "4"}})));
  CHECK(Refused(Strings({{"scale", "1"}})));
  Attributes ints;
  ints.ints["mask"] = 1;
  CHECK(Refused(ints));
  ints.ints = {{"num_heads", -1}};
  CHECK(Refused(ints));
  Attributes floats;
  for (const float value :
       {-1.0f, 1e-31f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    floats.floats["softcap"] = value;
    CHECK(Refused(floats), value);
  }
  // Tables: which text, and that the data is all there.
  const auto table = [](const std::string& text) {
    return Refused(Strings({{"mask", "table0[k]"}, {"operands", "table0"}, {"constants", text}}));
  };
  CHECK(!table("3 bool 5 Hw==") && !table("3 bool 5 Hw==;"));
  for (const char* text : {"3",
                           "3 ",
                           "3 bool",
                           "3 bool 5",
                           "3 bool 5 ",
                           "3 bool 9 Hw==",
                           "3 bool 5 Hw",
                           "3 bool 5 H===",
                           "3 bool 5 H!==",
                           "3 bool x5 Hw==",
                           "3 bool 5x Hw==",
                           "3 bool -5 Hw==",
                           "3 bool 5x5x5x5x5x5x5x5x5 Hw==",
                           "3 bool 99999999999999999999 Hw==",
                           "3 bool 4294967296x4294967296 Hw==",
                           "3 float 5 Hw==",
                           "3 int64 1 AAAAAA==",
                           "3 int32 2 AAAAAA==",
                           "bool 5 Hw==",
                           "4 bool 5 Hw==",
                           "-3 bool 5 Hw==",
                           "33333333333333 bool 5 Hw==",
                           "3 bool 5 Hw==;3 bool 5 Hw==",
                           ";3 bool 5 Hw==",
                           "3 bool 5 Hw==;;"}) {
    CHECK(table(text), text);
  }
  CHECK(Refused(Strings({{"mask", "table0[h, k]"}, {"operands", "table0"}, {"constants", "3 bool 5 Hw=="}})));
  CountCases(40);
}

TEST(TrtRefusesRawFields) {
  const int32_t number = 1;
  const float real = 1;
  const std::string text("k <= q\0x", 9);
  struct Bad {
    PluginField field;
    const char* what;
  };
  const std::string long_name(300, 'n');
  const int64_t wide = int64_t{1} << 40;
  const int32_t numbers[65] = {0, 2, 0, 2, 0, 2};
  const int64_t wides[6] = {0, 2, 0, 2, 0, wide};
  const Bad cases[] = {{{nullptr, &number, PluginFieldType::kINT32, 1}, "no name"},
                       {{"", &number, PluginFieldType::kINT32, 1}, "an empty name"},
                       {{long_name.c_str(), &number, PluginFieldType::kINT32, 1}, "a long name"},
                       {{"num_heads", nullptr, PluginFieldType::kINT32, 1}, "no data"},
                       {{"num_heads", &number, PluginFieldType::kINT32, -1}, "a negative length"},
                       {{"num_heads", &wide, PluginFieldType::kINT64, 1}, "more than 32 bits"},
                       {{"num_heads", &real, PluginFieldType::kFLOAT32, 1}, "a float for an int"},
                       {{"num_heads", &number, PluginFieldType::kINT32, 0}, "no number"},
                       {{"num_heads", &number, static_cast<PluginFieldType>(77), 1}, "an unknown type"},
                       {{"scale", &number, PluginFieldType::kINT32, 1}, "an int for a float"},
                       {{"num_heads", numbers, PluginFieldType::kINT32, 2}, "a list for an int"},
                       {{"packed", &number, PluginFieldType::kINT32, 1}, "a list of one"},
                       {{"packed", numbers, PluginFieldType::kINT32, 5}, "a list of five"},
                       {{"packed", numbers, PluginFieldType::kINT32, 65}, "a list of 65"},
                       {{"packed", wides, PluginFieldType::kINT64, 6}, "a list of more than 32 bits"},
                       {{"packed", &real, PluginFieldType::kFLOAT32, 1}, "a float for a list"},
                       {{"packed", text.data(), PluginFieldType::kCHAR, 6}, "text for a list"},
                       {{"mask", text.data(), PluginFieldType::kUNKNOWN, 6}, "bytes for text"},
                       {{"mask", text.data(), PluginFieldType::kCHAR, 8}, "a NUL inside"}};
  for (const Bad& bad : cases) {
    const nvinfer1::PluginFieldCollection collection = {1, &bad.field};
    CHECK(CreateRaw(&collection) == nullptr, bad.what);
  }
  // Text without a NUL at its end, and empty text without data.
  const PluginField good[] = {{"mask", text.data(), PluginFieldType::kCHAR, 6},
                              {"operands", nullptr, PluginFieldType::kCHAR, 0}};
  const nvinfer1::PluginFieldCollection collection = {2, good};
  CHECK(Held(CreateRaw(&collection)).plugin != nullptr);
  const int64_t longs[6] = {0, 2, 0, 2, 0, 2};
  const PluginField listed = {"packed", longs, PluginFieldType::kINT64, 6};
  const nvinfer1::PluginFieldCollection lists = {1, &listed};
  CHECK(Held(CreateRaw(&lists)).plugin != nullptr);
  const PluginField twice[] = {good[0], good[0]};
  const nvinfer1::PluginFieldCollection doubled = {2, twice};
  CHECK(CreateRaw(&doubled) == nullptr);
  CountCases(static_cast<int64_t>(std::size(cases)) + 3);
}

// Messages with a file's names are text, in one line.
TEST(TrtLogsText) {
  char line[64];
  trt::LogLine("a\x1b[31mb\n", "field \r\x7f\tö", line, sizeof line);
  CHECK(std::string(line) == "stof: a\\x1b[31mb\\n: field \\r\\x7f\\tö", line);
  trt::LogLine("", std::string(100, 'm'), line, sizeof line);
  CHECK(std::string(line) == "stof: " + std::string(57, 'm'), line);
  // Neither an escape nor a character is cut, and a name leaves room for the message.
  trt::LogLine("", std::string(56, 'm') + "\n", line, sizeof line);
  CHECK(std::string(line) == "stof: " + std::string(56, 'm'), line);
  trt::LogLine("", std::string(56, 'm') + "ö", line, sizeof line);
  CHECK(std::string(line) == "stof: " + std::string(56, 'm'), line);
  char wide[4096];
  trt::LogLine(std::string(1 << 16, 'n'), "no kernel\xff", wide, sizeof wide);
  CHECK(std::string(wide) == "stof: " + std::string(192, 'n') + "...: no kernel\\xff", wide);
  CountCases(5);
}

TEST(TrtRandomFields) {
  static const std::vector<std::string> kNames = {"mask",      "mask_id",      "scale",        "softcap",    "layout",
                                                  "num_heads", "kv_num_heads", "query_offset", "empty_rows", "operands",
                                                  "results",   "constants",    "stof_format",  "packed",     "other"};
  static const std::vector<std::string> kTexts = {
      "k <= q", "BSN",           "BHSD BSHD BSN BHSD", "pad",       "table0",     "pad bias sink",
      "mean",   "3 bool 4 Dw==", "pad[b, k]",          "table0[k]", "q // k < 3", ""};
  const int count = Cases(20000);
  int created = 0;
  for (int i = 0; i < count; ++i) {
    Random random(static_cast<uint64_t>(i));
    OwnedFields fields((Attributes()));
    for (int64_t n = random.Range(0, 6); n > 0; --n) {
      const std::string& name = random.Pick(kNames);
      const std::string text = random.OneIn(2) ? random.Pick(kTexts) : RandomText(&random, 40);
      const uint64_t word = random.OneIn(2) ? random.Next() : random.Next() % 9;
      const auto type = static_cast<PluginFieldType>(random.Range(0, 13));
      if (random.OneIn(2)) {
        fields.Add(name, PluginFieldType::kCHAR, static_cast<int32_t>(text.size()), text.data(), text.size(), true);
      } else {
        fields.Add(name, type, static_cast<int32_t>(random.Range(0, 1)), &word, sizeof word, true);
      }
      if (random.OneIn(30)) fields.fields().back().data = nullptr;
      if (random.OneIn(30)) fields.fields().back().length = -static_cast<int32_t>(random.Range(0, 1000));
    }
    fields.Finish();
    Held held(CreateRaw(fields.get(), random.OneIn(4) ? TensorRTPhase::kRUNTIME : TensorRTPhase::kBUILD));
    if (held.plugin == nullptr) continue;
    ++created;
    Provoke(&held, &random);
    // What a plugin serializes is always read again, and gives the same.
    OwnedFields again(*held.runtime->getFieldsToSerialize());
    const Held loaded(CreateRaw(again.get(), TensorRTPhase::kRUNTIME));
    CHECK(loaded.plugin != nullptr && std::string(loaded.build->getTimingCacheID()) == held.build->getTimingCacheID(),
          "seed ", i);
  }
  CHECK(created > count / 50 && created < count, created, " of ", count);
}

TEST(TrtRandomShapes) {
  Attributes packed = Strings({{"mask", "abs(q - k) <= 64"}, {"layout", "BSN"}});
  packed.ints = {{"num_heads", 4}, {"kv_num_heads", 2}};
  for (const Attributes& attributes : {Attributes(), packed, Strings({{"mask", "k <= q"}})}) {
    const int count = Cases(4000);
    for (int i = 0; i < count; ++i) {
      Random random(static_cast<uint64_t>(i));
      Held held = Create(attributes);
      Provoke(&held, &random);
    }
  }
}

TEST(TrtRefusesShapes) {
  Attributes packed = Strings({{"layout", "BSN"}});
  Held no_heads = Create(packed);
  FakeBuilder builder;
  nvinfer1::DimsExprs shapes[3] = {builder.Dims({2, 5, 64}), builder.Dims({2, 5, 64}), builder.Dims({2, 5, 64})};
  nvinfer1::DimsExprs out = {};
  CHECK(no_heads.build->getOutputShapes(shapes, 3, nullptr, 0, &out, 1, builder) != 0);
  packed.ints = {{"num_heads", 4}, {"kv_num_heads", 4}};
  Held held = Create(packed);
  CHECK(held.build->getOutputShapes(shapes, 3, nullptr, 0, &out, 1, builder) == 0);
  CHECK(FakeBuilder::Values(out) == std::vector<int64_t>({2, 5, 64}));
  packed.lists["packed"] = {0, 4, 4, 8, 4, 16};
  const Held wide = Create(packed);
  nvinfer1::DimsExprs wides[3] = {shapes[0], builder.Dims({2, 5, 128}), builder.Dims({2, 5, 512})};
  CHECK(wide.build->getOutputShapes(wides, 3, nullptr, 0, &out, 1, builder) == 0);
  CHECK(FakeBuilder::Values(out) == std::vector<int64_t>({2, 5, 128}));
  CHECK(held.build->getOutputShapes(shapes, 2, nullptr, 0, &out, 1, builder) != 0);
  CHECK(held.build->getOutputShapes(shapes, 3, shapes, 1, &out, 1, builder) != 0);
  shapes[1] = builder.Dims({2, 5, 4, 16});
  CHECK(held.build->getOutputShapes(shapes, 3, nullptr, 0, &out, 1, builder) != 0);
  shapes[1] = shapes[2];
  shapes[0] = builder.Dims({2, 5, 4, 16});
  CHECK(held.build->getOutputShapes(shapes, 3, nullptr, 0, &out, 1, builder) != 0);

  // Sizes that the kernels do not take end the build of the engine, not its run.
  const auto configure = [](int64_t size, DataType type, int64_t length, const std::string& mask) {
    Attributes attributes;
    attributes.strings["mask"] = mask;
    const Held one = Create(attributes);
    CHECK(one.plugin != nullptr);
    const std::vector<int64_t> dims = {1, 2, length, size};
    std::vector<nvinfer1::DynamicPluginTensorDesc> in(4, Bounds(type, dims, dims, dims));
    return one.build->configurePlugin(in.data(), 3, &in[3], 1);
  };
  CHECK(configure(64, DataType::kHALF, 100, "k <= q") == 0);
  CHECK(configure(12, DataType::kHALF, 100, "k <= q") != 0);
  CHECK(configure(264, DataType::kHALF, 100, "k <= q") != 0);
  CHECK(configure(64, DataType::kINT32, 100, "k <= q") != 0);
  CHECK(configure(64, DataType::kHALF, (int64_t{1} << 22) + 1, "k <= q") != 0);
  CHECK(configure(64, DataType::kHALF, 1 << 20, "q * q * q * q < k") != 0, "an overflow");
  CHECK(configure(64, DataType::kHALF, 100, "lengths[b] > k") != 0, "an operand that is not there");
  CountCases(14);
}

// A run that does not fit what was agreed on.
TEST(TrtRefusesRuns) {
  Attributes attributes = Strings({{"mask", "pad[b, k]"}, {"operands", "pad"}});
  Held held = Create(attributes);
  const std::vector<int64_t> dims = {1, 2, 40, 16};
  std::vector<nvinfer1::PluginTensorDesc> in(3, Desc(DataType::kHALF, dims));
  in.push_back(Desc(DataType::kINT32, {1, 40}));
  nvinfer1::PluginTensorDesc out = Desc(DataType::kHALF, dims);
  alignas(64) static char data[4][1 * 2 * 40 * 16 * 2];
  alignas(64) static char result[sizeof data[0]], workspace[65536];
  const void* inputs[] = {data[0], data[1], data[2], data[3]};
  void* outputs[] = {result};
  CHECK(held.runtime->onShapeChange(in.data(), 4, &out, 1) == 0);
  CHECK(held.runtime->enqueue(in.data(), &out, inputs, outputs, workspace, nullptr) == 0);
  CHECK(held.runtime->enqueue(in.data(), &out, inputs, outputs, nullptr, nullptr) != 0, "no workspace");
  CHECK(held.runtime->enqueue(nullptr, &out, inputs, outputs, workspace, nullptr) != 0);
  CHECK(held.runtime->enqueue(in.data(), &out, inputs, nullptr, workspace, nullptr) != 0);
  out = Desc(DataType::kHALF, {1, 2, 41, 16});
  CHECK(held.runtime->enqueue(in.data(), &out, inputs, outputs, workspace, nullptr) != 0, "another output");
  out = Desc(DataType::kFLOAT, dims);
  CHECK(held.runtime->enqueue(in.data(), &out, inputs, outputs, workspace, nullptr) != 0, "another type");
  out = Desc(DataType::kHALF, dims);
  in[3] = Desc(DataType::kINT32, {1, 39});
  CHECK(held.runtime->onShapeChange(in.data(), 4, &out, 1) != 0, "padding of another length");
  CHECK(held.runtime->enqueue(in.data(), &out, inputs, outputs, workspace, nullptr) != 0);
  in[3] = Desc(DataType::kINT32, {1, 40}, nvinfer1::TensorFormat::kCHW32);
  CHECK(held.runtime->enqueue(in.data(), &out, inputs, outputs, workspace, nullptr) != 0, "another format");
  in[3] = Desc(DataType::kINT32, {1, 40});
  CHECK(held.runtime->enqueue(in.data(), &out, inputs, outputs, workspace, nullptr) == 0);
  // A table that is an input alone: its data is on the device, where no mask is read from.
  Held table = Create(Strings({{"mask", "table0[k]"}, {"operands", "table0"}}));
  in[3] = Desc(DataType::kBOOL, {40});
  CHECK(table.plugin != nullptr && table.runtime->onShapeChange(in.data(), 4, &out, 1) != 0);
  CHECK(table.runtime->enqueue(in.data(), &out, inputs, outputs, workspace, nullptr) != 0);
  CountCases(13);
}

TEST(TrtConstants) {
  const auto parse = [](const std::string& text, Tensor* tensors, std::vector<char>* data) {
    for (int i = 0; i < 3; ++i) tensors[i] = Tensor();
    return trt::ParseConstants(text, 3, tensors, data).ok();
  };
  Tensor tensors[3];
  std::vector<char> data[3];
  CHECK(parse("2 bool 2x5 qQI=;0 int32 2 AQAAAP////8=", tensors, data));  // bytes a9 02
  const std::vector<char> want = {1, 0, 0, 1, 0, 1, 0, 1, 0, 1};
  CHECK(tensors[2].dtype == DType::kBool && tensors[2].rank == 2 && tensors[2].dims[1] == 5 && data[2] == want);
  int32_t values[2];
  std::memcpy(values, tensors[0].data, sizeof values);
  CHECK(tensors[0].dtype == DType::kI32 && values[0] == 1 && values[1] == -1);
  CHECK(tensors[1].dtype == DType::kUndefined);
  CHECK(parse("1 uint8 3 AQL/", tensors, data) && data[1] == std::vector<char>({1, 2, '\xff'}));
  CHECK(parse("1 int64 0 ", tensors, data) && tensors[1].Elements() == 0);
  Random random(3);
  const int count = Cases(2000);
  for (int i = 0; i < count; ++i) {  // what is written is read
    std::vector<uint8_t> bytes(static_cast<size_t>(random.Range(0, 50)));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Next());
    CHECK(parse("1 uint8 " + std::to_string(bytes.size()) + " " + ToBase64(bytes), tensors, data));
    CHECK(std::vector<uint8_t>(data[1].begin(), data[1].end()) == bytes);
  }
  CountCases(count + 3);
}

}  // namespace stof::test
