// SPDX-License-Identifier: Apache-2.0
// Whole lives of a plugin: created from a node's attributes, asked what a builder asks, serialized, created again from
// the bytes, attached, and run at several shapes on memory of exactly the size that was agreed on.
#include <algorithm>
#include <cmath>
#include <set>
#include <thread>

#include "plugins/core/op.h"
#include "tests/cpp/reference.h"
#include "tests/trt/fake_backend.h"
#include "tests/trt/harness.h"

namespace stof::test {
namespace {

using nvinfer1::TensorFormat;

struct Sizes {
  int64_t B = 1, S = 1, T = 1;
};

struct Case {
  int64_t H = 2, G = 2, D = 16, Dv = 16;
  DType dtype = DType::kF16;
  std::string layouts[4];
  bool offset = false;
  int mask = 0;
  int pad = -1;  // of kPadTypes; -1: none
  bool one_pad = false;
  bool bias = false, sink = false;
  float softcap = 0;
  EmptyRows empty_rows = EmptyRows::kZero;
  std::vector<uint8_t> table;  // [kTableHeads, kTableKeys] of 0 and 1
};

constexpr int64_t kTableHeads = 8, kTableKeys = 96;
constexpr const char* kMasks[] = {"", "k <= q", "abs(q - k) <= 7", "table0[h, k] or k == q", "k < 0"};
constexpr DataType kPadTypes[] = {DataType::kBOOL,  DataType::kINT8,  DataType::kINT32,
                                  DataType::kINT64, DataType::kFLOAT, DataType::kHALF};

bool MaskAllows(const Case& c, const Sizes& n, int64_t h, int64_t i, int64_t k) {
  const int64_t q = i + (c.offset ? n.T - n.S : 0);
  switch (c.mask) {
    case 0:
      return true;
    case 1:
      return k <= q;
    case 2:
      return std::abs(q - k) <= 7;
    case 3:
      return c.table[static_cast<size_t>(h * kTableKeys + k)] != 0 || k == q;
    default:
      return false;
  }
}

std::vector<int64_t> DimsOf(const std::string& layout, int64_t b, int64_t heads, int64_t length, int64_t size) {
  if (layout == "BHSD") return {b, heads, length, size};
  if (layout == "BSHD") return {b, length, heads, size};
  return {b, length, heads * size};
}
int64_t Offset(const std::string& layout, int64_t heads, int64_t length, int64_t size, int64_t b, int64_t h,
               int64_t s) {
  return layout == "BHSD" ? ((b * heads + h) * length + s) * size : ((b * length + s) * heads + h) * size;
}

Case RandomCase(Random* random) {
  static const std::vector<std::string> kLayouts = {"BHSD", "BSHD", "BSN"};
  Case c;
  c.H = random->Pick(std::vector<int64_t>{1, 2, 4, 6});
  c.G = random->OneIn(2) ? c.H : 1;
  c.D = 8 * random->Range(1, 16);
  c.Dv = random->OneIn(2) ? c.D : 8 * random->Range(1, 16);
  int count = 0;
  const OpDescription& description = *AllOps(&count)[0];
  c.dtype = description.cuda_types[random->Range(0, description.cuda_type_count - 1)];
  for (std::string& layout : c.layouts) layout = random->Pick(kLayouts);
  c.offset = random->OneIn(2);
  c.mask = static_cast<int>(random->Range(0, 4));
  c.pad = random->OneIn(2) ? static_cast<int>(random->Range(0, 5)) : -1;
  c.one_pad = random->OneIn(3);
  c.bias = random->OneIn(3);
  c.sink = random->OneIn(4);
  if (random->OneIn(3)) c.softcap = 3;
  c.empty_rows = c.sink ? EmptyRows::kZero : static_cast<EmptyRows>(random->Range(0, 3));
  for (int64_t i = 0; i < kTableHeads * kTableKeys; ++i) c.table.push_back(random->OneIn(3) ? 1 : 0);
  return c;
}

// Sizes that T >= S holds for, as an offset asks.
Sizes RandomSizes(Random* random, const Sizes& most) {
  Sizes n;
  n.B = random->Range(1, most.B);
  n.S = random->Range(1, most.S);
  n.T = random->Range(n.S, std::max(n.S, most.T));
  return n;
}

Attributes AttributesOf(const Case& c, Random* random) {
  static constexpr const char* kPolicies[] = {"zero", "nan", "mean", "all"};
  Attributes a;
  std::string mask = kMasks[c.mask], operands;
  if (c.pad >= 0) mask = mask.empty() ? "pad[b, k]" : "(" + mask + ") and pad[b, k]";
  if (c.pad >= 0) operands += "pad ";
  if (c.mask == 3) {
    std::vector<uint8_t> bits((c.table.size() + 7) / 8);
    for (size_t i = 0; i < c.table.size(); ++i) bits[i / 8] |= static_cast<uint8_t>(c.table[i] << i % 8);
    a.strings["constants"] = std::string(c.pad >= 0 ? "4" : "3") + " bool " + std::to_string(kTableHeads) + "x" +
                             std::to_string(kTableKeys) + " " + ToBase64(bits);
    operands += "table0 ";
  }
  if (c.bias) operands += "bias ";
  if (c.sink) operands += "sink ";
  operands += "unused";
  a.strings["mask"] = mask;
  a.strings["operands"] = operands;
  a.strings["layout"] = c.layouts[0] + " " + c.layouts[1] + " " + c.layouts[2] + " " + c.layouts[3];
  a.strings["empty_rows"] = kPolicies[static_cast<int>(c.empty_rows)];
  // Numbers of heads are needed only where a layout does not show them.
  if (c.layouts[0] == "BSN" || random->OneIn(2)) a.ints["num_heads"] = static_cast<int32_t>(c.H);
  if (c.layouts[1] == "BSN" || c.layouts[2] == "BSN" || random->OneIn(2)) {
    a.ints["kv_num_heads"] = static_cast<int32_t>(c.G);
  }
  a.ints["query_offset"] = c.offset ? 1 : 0;
  a.ints["mask_id"] = static_cast<int32_t>(random->Range(0, 3));
  if (c.softcap > 0) a.floats["softcap"] = c.softcap;
  if (random->OneIn(2)) a.floats["scale"] = 1 / std::sqrt(static_cast<float>(c.D));
  return a;
}

struct Input {
  DataType type;
  std::vector<int64_t> dims;
};
std::vector<Input> InputsOf(const Case& c, const Sizes& n) {
  const DataType typed = c.dtype == DType::kF32   ? DataType::kFLOAT
                         : c.dtype == DType::kF16 ? DataType::kHALF
                                                  : DataType::kBF16;
  std::vector<Input> inputs = {{typed, DimsOf(c.layouts[0], n.B, c.H, n.S, c.D)},
                               {typed, DimsOf(c.layouts[1], n.B, c.G, n.T, c.D)},
                               {typed, DimsOf(c.layouts[2], n.B, c.G, n.T, c.Dv)}};
  if (c.pad >= 0) inputs.push_back({kPadTypes[c.pad], {c.one_pad ? 1 : n.B, n.T}});
  if (c.mask == 3) inputs.push_back({DataType::kBOOL, {kTableHeads, kTableKeys}});
  if (c.bias) inputs.push_back({DataType::kFLOAT, {1, c.H, n.S, n.T}});
  if (c.sink) inputs.push_back({typed, {c.H}});
  inputs.push_back({DataType::kINT32, {}});
  return inputs;
}

int64_t ItemSize(DataType type) {
  switch (type) {
    case DataType::kINT64:
      return 8;
    case DataType::kFLOAT:
    case DataType::kINT32:
      return 4;
    case DataType::kHALF:
    case DataType::kBF16:
      return 2;
    default:
      return 1;
  }
}

// Memory of exactly so many bytes at a multiple of 64, as device memory is.
class Memory {
 public:
  explicit Memory(size_t bytes)
      : data_(std::aligned_alloc(64, std::max<size_t>(64, (bytes + 63) / 64 * 64)), std::free) {
    std::memset(data_.get(), 0xcd, bytes);
  }
  char* get() const { return static_cast<char*>(data_.get()); }

 private:
  std::unique_ptr<void, void (*)(void*)> data_;
};

// Runs one shape through a plugin and compares with the definition.
void RunOnce(const Case& c, const Sizes& n, nvinfer1::IPluginV3OneRuntime* runtime, size_t workspace_bytes,
             Random* random) {
  const std::vector<Input> inputs = InputsOf(c, n);
  std::vector<nvinfer1::PluginTensorDesc> in;
  std::vector<Memory> memory;
  std::vector<const void*> pointers;
  for (const Input& input : inputs) {
    int64_t elements = 1;
    for (const int64_t dim : input.dims) elements *= dim;
    in.push_back(Desc(input.type, input.dims));
    memory.emplace_back(static_cast<size_t>(elements * ItemSize(input.type)));
    pointers.push_back(memory.back().get());
  }
  const int64_t item = SizeOfFloat(c.dtype);
  Dense p;
  p.B = n.B, p.H = c.H, p.G = c.G, p.S = n.S, p.T = n.T, p.D = c.D, p.Dv = c.Dv;
  p.scale = static_cast<double>(1 / std::sqrt(static_cast<float>(c.D)));
  p.softcap = c.softcap;
  p.empty_rows = c.empty_rows;
  const auto fill = [&](int input, int64_t heads, int64_t length, int64_t size, std::vector<double>* dense) {
    for (int64_t b = 0; b < n.B; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t s = 0; s < length; ++s) {
          for (int64_t d = 0; d < size; ++d) {
            const double value = Rounded(c.dtype, random->Unit());
            dense->push_back(value);
            const int64_t at = Offset(c.layouts[input], heads, length, size, b, h, s) + d;
            StoreFloat(c.dtype, value, memory[input].get() + item * at);
          }
        }
      }
    }
  };
  fill(0, c.H, n.S, c.D, &p.query);
  fill(1, c.G, n.T, c.D, &p.key);
  fill(2, c.G, n.T, c.Dv, &p.value);
  size_t next = 3;
  std::vector<uint8_t> padded(static_cast<size_t>(n.B * n.T), 1);
  if (c.pad >= 0) {
    const int64_t rows = c.one_pad ? 1 : n.B, size = ItemSize(kPadTypes[c.pad]);
    for (int64_t i = 0; i < rows * n.T; ++i) {
      const bool on = !random->OneIn(4);
      char* at = memory[next].get() + i * size;
      std::memset(at, 0, static_cast<size_t>(size));
      if (on) at[size - 1] = kPadTypes[c.pad] == DataType::kBOOL ? 1 : 0x3c;  // a number that is not 0 in every type
      for (int64_t b = 0; b < n.B; ++b) {
        if (c.one_pad || b == i / n.T) padded[static_cast<size_t>(b * n.T + i % n.T)] = on;
      }
    }
    ++next;
  }
  if (c.mask == 3) ++next;  // holds no sense: what counts is the constant in the fields
  if (c.bias) {
    for (int64_t b = 0; b < n.B; ++b) {
      for (int64_t i = 0; i < c.H * n.S * n.T; ++i) {
        const auto value =
            static_cast<float>(b == 0 ? random->Unit() : static_cast<float>(p.bias[static_cast<size_t>(i)]));
        p.bias.push_back(static_cast<double>(value));
        if (b == 0) std::memcpy(memory[next].get() + 4 * i, &value, 4);
      }
    }
    ++next;
  }
  if (c.sink) {
    for (int64_t h = 0; h < c.H; ++h) {
      p.sink.push_back(Rounded(c.dtype, random->Unit()));
      StoreFloat(c.dtype, p.sink.back(), memory[next].get() + item * h);
    }
  }
  for (int64_t b = 0; b < n.B; ++b) {
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t i = 0; i < n.S; ++i) {
        for (int64_t k = 0; k < n.T; ++k) {
          p.allowed.push_back(MaskAllows(c, n, h, i, k) && padded[static_cast<size_t>(b * n.T + k)] != 0 ? 1 : 0);
        }
      }
    }
  }
  const Memory output(static_cast<size_t>(n.B * c.H * n.S * c.Dv * item));
  const nvinfer1::PluginTensorDesc out = Desc(inputs[0].type, DimsOf(c.layouts[3], n.B, c.H, n.S, c.Dv));
  const Memory workspace(workspace_bytes);
  void* outputs[] = {output.get()};
  const auto count = static_cast<int32_t>(in.size());
  CHECK(runtime->onShapeChange(in.data(), count, &out, 1) == 0);
  LastSeen().allocated = 0;
  auto* stream = reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(0x5eed));
  CHECK(runtime->enqueue(in.data(), &out, pointers.data(), outputs, workspace_bytes == 0 ? nullptr : workspace.get(),
                         stream) == 0);
  CHECK(LastSeen().stream == static_cast<void*>(stream) && LastSeen().allocated <= workspace_bytes);
  const Answer answer = Attend(p);
  double largest = 0;
  for (const double value : p.value) largest = std::max(largest, std::abs(value));
  for (int64_t b = 0; b < n.B; ++b) {
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t i = 0; i < n.S; ++i) {
        const auto row = static_cast<size_t>((b * c.H + h) * n.S + i);
        for (int64_t d = 0; d < c.Dv; ++d) {
          const int64_t at = Offset(c.layouts[3], c.H, n.S, c.Dv, b, h, i) + d;
          const double got = LoadFloat(c.dtype, output.get() + item * at);
          const double want = answer.output[row * static_cast<size_t>(c.Dv) + static_cast<size_t>(d)];
          const double tolerance = Tolerance(c.dtype, answer.magnitude[row], n.T, largest, want);
          CHECK(std::isnan(want) ? std::isnan(got) : std::abs(got - want) <= tolerance, "b ", b, " h ", h, " i ", i,
                " d ", d, ": ", got, ", expected ", want);
        }
      }
    }
  }
}

// What a builder asks; gives the workspace.
size_t Build(const Case& c, const Sizes& most, const Sizes& usual, Held* held) {
  const std::vector<Input> low = InputsOf(c, Sizes()), opt = InputsOf(c, usual), high = InputsOf(c, most);
  const auto count = static_cast<int32_t>(opt.size());
  nvinfer1::IPluginV3OneBuildV2* build = held->build;
  CHECK(build->getNbOutputs() == 1 && build->getAliasedInput(0) < 0);
  std::vector<DataType> types;
  std::vector<nvinfer1::DynamicPluginTensorDesc> in_out;
  FakeBuilder builder;
  std::vector<nvinfer1::DimsExprs> shapes;
  for (size_t i = 0; i < opt.size(); ++i) {
    types.push_back(opt[i].type);
    in_out.push_back(Bounds(opt[i].type, low[i].dims, opt[i].dims, high[i].dims));
    shapes.push_back(builder.Dims(opt[i].dims));
  }
  DataType out_type = DataType::kINT32;
  CHECK(build->getOutputDataTypes(&out_type, 1, types.data(), count) == 0 && out_type == types[0]);
  nvinfer1::DimsExprs out = {};
  CHECK(build->getOutputShapes(shapes.data(), count, nullptr, 0, &out, 1, builder) == 0);
  CHECK(FakeBuilder::Values(out) == DimsOf(c.layouts[3], usual.B, c.H, usual.S, c.Dv));
  in_out.push_back(Bounds(out_type, DimsOf(c.layouts[3], 1, c.H, 1, c.Dv),
                          DimsOf(c.layouts[3], usual.B, c.H, usual.S, c.Dv),
                          DimsOf(c.layouts[3], most.B, c.H, most.S, c.Dv)));
  for (int32_t at = 0; at <= count; ++at) {
    auto& desc = in_out[static_cast<size_t>(at)].desc;
    CHECK(build->supportsFormatCombination(at, in_out.data(), count, 1), "position ", at);
    for (const TensorFormat format : {TensorFormat::kCHW2, TensorFormat::kHWC8, TensorFormat::kCHW32}) {
      desc.format = format;
      CHECK(!build->supportsFormatCombination(at, in_out.data(), count, 1));
    }
    desc.format = TensorFormat::kLINEAR;
    const DataType own = desc.type;
    desc.type = DataType::kFP8;
    CHECK(at == count - 1 || !build->supportsFormatCombination(at, in_out.data(), count, 1), "position ", at);
    desc.type = own;
  }
  CHECK(build->configurePlugin(in_out.data(), count, &in_out.back(), 1) == 0);
  const int32_t tactics = build->getNbTactics();
  CHECK(tactics == kFakeKernels + 1);
  std::vector<int32_t> ids(static_cast<size_t>(tactics), 0);
  CHECK(build->getValidTactics(ids.data(), tactics) == 0);
  CHECK(std::set<int32_t>(ids.begin(), ids.end()).size() == ids.size() &&
        *std::min_element(ids.begin(), ids.end()) > 0);
  CHECK(build->getTimingCacheID() != nullptr && build->getFormatCombinationLimit() > 0);
  const std::string metadata = build->getMetadataString();
  CHECK(metadata.find("StofAttention; ") == 0 && metadata.find('"') == std::string::npos, metadata);
  return build->getWorkspaceSize(in_out.data(), count, &in_out.back(), 1);
}

void Live(uint64_t seed) {
  Random random(seed);
  const Case c = RandomCase(&random);
  const Attributes attributes = AttributesOf(c, &random);
  const Sizes most = RandomSizes(&random, {3, 70, 96}), usual = RandomSizes(&random, most);
  auto built = std::make_unique<Held>(Create(attributes));
  CHECK(built->plugin != nullptr);
  CHECK(std::string(built->core->getPluginName()) == "StofAttention" &&
        std::string(built->core->getPluginVersion()) == "1" &&
        std::string(built->core->getPluginNamespace()) == "stof");
  const size_t workspace = Build(c, most, usual, built.get());
  Held copy(built->plugin->clone());
  CHECK(std::string(copy.build->getTimingCacheID()) == built->build->getTimingCacheID());
  CHECK(Build(c, most, usual, &copy) == workspace);

  // Into an engine file and out of it, when all that was there at the build is gone.
  auto file = std::make_unique<OwnedFields>(*copy.runtime->getFieldsToSerialize());
  const std::string timing = copy.build->getTimingCacheID();
  built.reset();
  copy.plugin.reset();
  auto loaded =
      std::make_unique<Held>(FindCreator("StofAttention")->createPlugin("layer", file->get(), TensorRTPhase::kRUNTIME));
  file.reset();
  CHECK(loaded->plugin != nullptr && timing == loaded->build->getTimingCacheID());
  Held context(loaded->runtime->attachToContext(nullptr)), other(loaded->plugin->clone());
  loaded.reset();
  const auto tactic = static_cast<int32_t>(random.Range(0, kFakeKernels + 1));
  CHECK(context.runtime->setTactic(tactic) == 0);
  const int readies = LastSeen().readies;
  RunOnce(c, usual, context.runtime, workspace, &random);
  CHECK(LastSeen().kernel == (tactic == 0 ? 0 : tactic - 1) && LastSeen().readies == readies + 1);
  RunOnce(c, most, context.runtime, workspace, &random);
  RunOnce(c, RandomSizes(&random, most), other.runtime, workspace, &random);
  CHECK(LastSeen().kernel == 0);
  CountCases(3);
}

}  // namespace

TEST(TrtLife) {
  const int count = Cases(150);
  for (int i = 0; i < count; ++i) {
    try {
      Live(static_cast<uint64_t>(i));
    } catch (Failure& failure) {
      failure.message += ", seed " + std::to_string(i);
      throw;
    }
  }
}

// Contexts on threads of their own share what was created once.
TEST(TrtContextsOnThreads) {
  Random random(7);
  const Case c = RandomCase(&random);
  const Sizes most = {2, 40, 64};
  Held built = Create(AttributesOf(c, &random));
  const size_t workspace = Build(c, most, most, &built);
  std::vector<std::string> errors(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < errors.size(); ++t) {
    threads.emplace_back([&, t] {
      Random own(100 + t);
      Held context(built.runtime->attachToContext(nullptr));
      try {
        for (int i = 0; i < 5; ++i) RunOnce(c, RandomSizes(&own, most), context.runtime, workspace, &own);
      } catch (const Failure& failure) {
        errors[t] = failure.message;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) CHECK(error.empty(), error);
  CountCases(20);
}

// One timing serves two layers only where everything but their shapes is equal.
TEST(TrtTimingIds) {
  std::vector<Attributes> different(9);
  different[1].strings["mask"] = "k <= q";
  different[2].strings["mask"] = "abs(q - k) <= 64";
  different[3].strings["mask"] = "abs(q - k) <= 65";
  different[4].strings["layout"] = "BSHD";
  different[5].ints["num_heads"] = 4;
  different[6].floats["softcap"] = 20;
  for (int i = 7; i < 9; ++i) {
    different[i].strings["mask"] = "table0[k]";
    different[i].strings["operands"] = "table0";
    different[i].strings["constants"] = i == 7 ? "3 bool 5 Hw==" : "3 bool 5 Fw==";
  }
  std::set<std::string> ids;
  for (const Attributes& attributes : different) {
    const Held one = Create(attributes), two = Create(attributes);
    CHECK(one.plugin != nullptr && two.plugin != nullptr);
    CHECK(std::string(one.build->getTimingCacheID()) == two.build->getTimingCacheID());
    ids.insert(one.build->getTimingCacheID());
  }
  CHECK(ids.size() == different.size());
  CountCases(static_cast<int64_t>(ids.size()));
}

}  // namespace stof::test
