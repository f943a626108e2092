// SPDX-License-Identifier: Apache-2.0
#include "tests/trt/trial.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "plugins/core/contract/op.h"

namespace stof::test {
namespace {

using nvinfer1::TensorFormat;

constexpr const char* kTexts[kMasks] = {"",
                                        "k <= q",
                                        "abs(q - k) <= 7",
                                        "table0[h, k] or k == q",
                                        "k < 0",
                                        "segment_q[b, q - P] == segment_k[b, k]",
                                        "k < lengths[b] and abs(q - k) <= 33",
                                        "k <= q and (k < 3 or pad[b, k])"};
constexpr DataType kTypesOfPad[kPadTypes] = {DataType::kBOOL,  DataType::kINT8,  DataType::kINT32,
                                             DataType::kINT64, DataType::kFLOAT, DataType::kHALF};

std::vector<int64_t> DimsOf(const std::string& layout, int64_t b, int64_t heads, int64_t length, int64_t size) {
  if (layout == "BHSD") return {b, heads, length, size};
  if (layout == "BSHD") return {b, length, heads, size};
  return {b, length, heads * size};
}
int64_t Offset(const std::string& layout, int64_t heads, int64_t length, int64_t size, int64_t b, int64_t h,
               int64_t s) {
  return layout == "BHSD" ? ((b * heads + h) * length + s) * size : ((b * length + s) * heads + h) * size;
}

DataType TypeOf(DType dtype) {
  return dtype == DType::kF32 ? DataType::kFLOAT : dtype == DType::kF16 ? DataType::kHALF : DataType::kBF16;
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

int64_t Elements(const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= dim;
  return count;
}

size_t Bytes(const Input& input) { return static_cast<size_t>(Elements(input.dims) * ItemSize(input.type)); }

void StoreInt(DataType type, int64_t value, void* target) {
  if (type == DataType::kINT64) {
    std::memcpy(target, &value, 8);
  } else {
    const auto narrow = static_cast<int32_t>(value);
    std::memcpy(target, &narrow, 4);
  }
}

// That the tensor of query, key or value has.
int64_t Heads(const Case& c, int input) { return c.before[input] + (input == 0 ? c.H : c.G) + c.behind[input]; }

}  // namespace

Sizes RandomSizes(Random* random, const Sizes& most) {
  Sizes n;
  n.B = random->Range(1, most.B);
  n.S = random->Range(1, most.S);
  n.T = random->Range(n.S, std::max(n.S, most.T));
  return n;
}

Case RandomCase(Random* random) {
  static const std::vector<std::string> kLayouts = {"BHSD", "BSHD", "BSN"};
  Case c;
  c.H = random->Pick(std::vector<int64_t>{1, 2, 4, 6});
  c.G = random->OneIn(2) ? c.H : 1;
  int count = 0;
  const OpDescription& description = *AllOps(&count)[0];
  c.dtype = description.cuda_types[random->Range(0, description.cuda_types.size() - 1)];
  const int64_t step = c.dtype == DType::kF32 && random->OneIn(2) ? 1 : 8;
  const auto size = [&] { return step * random->Range(1, (random->OneIn(3) ? 256 : 128) / step); };
  c.D = size();
  c.Dv = random->OneIn(2) ? c.D : size();
  for (std::string& layout : c.layouts) layout = random->Pick(kLayouts);
  for (int i = 0; i < 3; ++i) {
    if (c.layouts[i] != "BSN" || random->OneIn(2)) continue;
    c.before[i] = random->Range(0, 3), c.behind[i] = random->Range(0, 3);
  }
  c.offset = random->OneIn(2);
  c.mask = static_cast<int>(random->Range(0, kMasks - 1));
  c.pad = random->OneIn(2) || c.mask == kPadInOr ? static_cast<int>(random->Range(0, kPadTypes - 1)) : -1;
  c.one_pad = random->OneIn(3);
  c.bias = random->OneIn(3);
  c.sink = random->OneIn(4);
  c.lse = random->OneIn(3);
  c.wide_ids = random->OneIn(2);
  if (random->OneIn(3)) c.softcap = 3;
  c.empty_rows = c.sink ? EmptyRows::kZero : static_cast<EmptyRows>(random->Range(0, 3));
  for (int64_t i = 0; i < kTableHeads * kTableKeys; ++i) c.table.push_back(random->OneIn(3) ? 1 : 0);
  return c;
}

std::string Describe(const Case& c) {
  return Text("H ", c.H, " G ", c.G, " D ", c.D, " Dv ", c.Dv, " dtype ", static_cast<int>(c.dtype), " layouts ",
              c.layouts[0], " ", c.layouts[1], " ", c.layouts[2], " ", c.layouts[3], " before ", c.before[0], " ",
              c.before[1], " ", c.before[2], " behind ", c.behind[0], " ", c.behind[1], " ", c.behind[2], " offset ",
              c.offset, " mask ", c.mask, " pad ", c.pad, c.one_pad ? " for all" : "", " bias ", c.bias, " sink ",
              c.sink, " lse ", c.lse, " softcap ", c.softcap, " empty rows ", static_cast<int>(c.empty_rows));
}

Attributes AttributesOf(const Case& c, Random* random) {
  static constexpr const char* kPolicies[] = {"zero", "nan", "mean", "all"};
  Attributes a;
  std::string mask = kTexts[c.mask], operands;
  if (c.pad >= 0 && c.mask != kPadInOr) mask = mask.empty() ? "pad[b, k]" : "(" + mask + ") and pad[b, k]";
  if (c.pad >= 0) operands += "pad ";
  if (c.mask == kTableMask) {
    std::vector<uint8_t> bits((c.table.size() + 7) / 8);
    for (size_t i = 0; i < c.table.size(); ++i) bits[i / 8] |= static_cast<uint8_t>(c.table[i] << i % 8);
    a.strings["constants"] = std::string(c.pad >= 0 ? "4" : "3") + " bool " + std::to_string(kTableHeads) + "x" +
                             std::to_string(kTableKeys) + " " + ToBase64(bits);
    operands += "table0 ";
  }
  if (c.mask == kDocuments) operands += "segment_q segment_k ";
  if (c.mask == kLengths) operands += "lengths ";
  if (c.bias) operands += "bias ";
  if (c.sink) operands += "sink ";
  operands += "unused";
  a.strings["mask"] = mask;
  if (c.lse || random->OneIn(2)) a.strings["results"] = c.lse ? "lse" : "";
  a.strings["operands"] = operands;
  a.strings["layout"] = c.layouts[0] + " " + c.layouts[1] + " " + c.layouts[2] + " " + c.layouts[3];
  a.strings["empty_rows"] = kPolicies[static_cast<int>(c.empty_rows)];
  // Numbers of heads are needed only where a layout does not show them.
  if (c.layouts[0] == "BSN" || random->OneIn(2)) a.ints["num_heads"] = static_cast<int32_t>(c.H);
  if (c.layouts[1] == "BSN" || c.layouts[2] == "BSN" || random->OneIn(2)) {
    a.ints["kv_num_heads"] = static_cast<int32_t>(c.G);
  }
  for (int i = 0; i < 3; ++i) {
    if (c.before[i] + c.behind[i] == 0 || !a.lists["packed"].empty()) continue;
    for (int j = 0; j < 3; ++j) {
      a.lists["packed"].push_back(static_cast<int32_t>(c.before[j]));
      a.lists["packed"].push_back(static_cast<int32_t>(Heads(c, j)));
    }
  }
  a.ints["query_offset"] = c.offset ? 1 : 0;
  a.ints["mask_id"] = static_cast<int32_t>(random->Range(0, 3));
  if (c.softcap > 0) a.floats["softcap"] = c.softcap;
  if (random->OneIn(2)) a.floats["scale"] = 1 / std::sqrt(static_cast<float>(c.D));
  return a;
}

std::vector<Input> InputsOf(const Case& c, const Sizes& n) {
  const DataType typed = TypeOf(c.dtype), ids = c.wide_ids ? DataType::kINT64 : DataType::kINT32;
  std::vector<Input> inputs = {{typed, DimsOf(c.layouts[0], n.B, Heads(c, 0), n.S, c.D)},
                               {typed, DimsOf(c.layouts[1], n.B, Heads(c, 1), n.T, c.D)},
                               {typed, DimsOf(c.layouts[2], n.B, Heads(c, 2), n.T, c.Dv)}};
  if (c.pad >= 0) inputs.push_back({kTypesOfPad[c.pad], {c.one_pad ? 1 : n.B, n.T}});
  if (c.mask == kTableMask) inputs.push_back({DataType::kBOOL, {kTableHeads, kTableKeys}});
  if (c.mask == kDocuments) {
    inputs.push_back({ids, {n.B, n.S}});
    inputs.push_back({ids, {n.B, n.T}});
  }
  if (c.mask == kLengths) inputs.push_back({ids, {n.B}});
  if (c.bias) inputs.push_back({DataType::kFLOAT, {1, c.H, n.S, n.T}});
  if (c.sink) inputs.push_back({typed, {c.H}});
  inputs.push_back({DataType::kINT32, {}});
  return inputs;
}

std::vector<Input> OutputsOf(const Case& c, const Sizes& n) {
  std::vector<Input> outputs = {{TypeOf(c.dtype), DimsOf(c.layouts[3], n.B, c.H, n.S, c.Dv)}};
  if (c.lse) outputs.push_back({DataType::kFLOAT, {n.B, c.H, n.S}});
  return outputs;
}

Trial::Trial(const Case& c, const Sizes& n, uint64_t seed) : case_(c), sizes_(n) {
  for (const Input& output : OutputsOf(c, n)) {
    out_.push_back(Desc(output.type, output.dims));
    outputs_.emplace_back(Bytes(output));
  }
  for (const Input& input : InputsOf(c, n)) {
    in_.push_back(Desc(input.type, input.dims));
    memory_.emplace_back(Bytes(input));
    inputs_.push_back(memory_.back().address());
  }
  Draw(seed, ThreadStream());
}

void Trial::Fill(int input, int64_t heads, int64_t length, int64_t size, Random* random, std::vector<double>* dense) {
  const int64_t item = SizeOfFloat(case_.dtype);
  char* const memory = memory_[static_cast<size_t>(input)].host();
  // Other heads are NaN.
  const int64_t total = Heads(case_, input);
  std::memset(memory, 0xff, static_cast<size_t>(item * sizes_.B * total * length * size));
  for (int64_t b = 0; b < sizes_.B; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t s = 0; s < length; ++s) {
        for (int64_t d = 0; d < size; ++d) {
          const double value = Rounded(case_.dtype, random->Unit());
          dense->push_back(value);
          const int64_t at = Offset(case_.layouts[input], total, length, size, b, case_.before[input] + h, s) + d;
          StoreFloat(case_.dtype, value, memory + item * at);
        }
      }
    }
  }
}

void Trial::FillOperands(Random* random, Dense* problem) {
  const Case& c = case_;
  const Sizes& n = sizes_;
  size_t next = 3;
  padded_.assign(static_cast<size_t>(n.B * n.T), 1);
  if (c.pad >= 0) {
    const DataType type = kTypesOfPad[c.pad];
    const int64_t rows = c.one_pad ? 1 : n.B, size = ItemSize(type);
    for (int64_t i = 0; i < rows * n.T; ++i) {
      const bool on = !random->OneIn(4);
      char* at = memory_[next].host() + i * size;
      std::memset(at, 0, static_cast<size_t>(size));
      if (on) at[size - 1] = type == DataType::kBOOL ? 1 : 0x3c;  // a number that is not 0 in every type
      for (int64_t b = 0; b < n.B; ++b) {
        if (c.one_pad || b == i / n.T) padded_[static_cast<size_t>(b * n.T + i % n.T)] = on;
      }
    }
    ++next;
  }
  if (c.mask == kTableMask) ++next;  // holds no sense: what counts is the constant in the fields
  const auto fill = [&](int64_t count, int64_t most, std::vector<int64_t>* values) {
    const DataType type = c.wide_ids ? DataType::kINT64 : DataType::kINT32;
    for (int64_t i = 0; i < count; ++i) {
      values->push_back(random->Range(0, most));
      StoreInt(type, values->back(), memory_[next].host() + i * ItemSize(type));
    }
    ++next;
  };
  segments_.clear(), lengths_.clear();
  if (c.mask == kDocuments) {
    fill(n.B * n.S, 2, &segments_);
    fill(n.B * n.T, 2, &segments_);
  }
  if (c.mask == kLengths) fill(n.B, n.T, &lengths_);
  if (c.bias) {
    const auto one = static_cast<size_t>(c.H * n.S * n.T);
    for (size_t i = 0; i < one; ++i) {
      const float value = random->Unit();
      problem->bias.push_back(static_cast<double>(value));
      std::memcpy(memory_[next].host() + 4 * i, &value, 4);
    }
    for (int64_t b = 1; b < n.B; ++b) {
      for (size_t i = 0; i < one; ++i) problem->bias.push_back(problem->bias[i]);
    }
    ++next;
  }
  if (c.sink) {
    for (int64_t h = 0; h < c.H; ++h) {
      problem->sink.push_back(Rounded(c.dtype, random->Unit()));
      StoreFloat(c.dtype, problem->sink.back(), memory_[next].host() + SizeOfFloat(c.dtype) * h);
    }
  }
}

bool Trial::Allows(int64_t b, int64_t h, int64_t i, int64_t k) const {
  const int64_t q = i + (case_.offset ? sizes_.T - sizes_.S : 0), distance = std::abs(q - k);
  const bool pad = padded_[static_cast<size_t>(b * sizes_.T + k)] != 0;
  switch (case_.mask) {
    case 0:
      return pad;
    case 1:
      return pad && k <= q;
    case 2:
      return pad && distance <= 7;
    case kTableMask:
      return pad && (case_.table[static_cast<size_t>(h * kTableKeys + k)] != 0 || k == q);
    case kDocuments:
      return pad && segments_[static_cast<size_t>(b * sizes_.S + i)] ==
                        segments_[static_cast<size_t>(sizes_.B * sizes_.S + b * sizes_.T + k)];
    case kLengths:
      return pad && k < lengths_[static_cast<size_t>(b)] && distance <= 33;
    case kPadInOr:
      return k <= q && (k < 3 || pad);
    default:
      return false;
  }
}

void Trial::Draw(uint64_t seed, cudaStream_t stream) {
  const Case& c = case_;
  const Sizes& n = sizes_;
  seed_ = seed;
  Random random(seed);
  Dense p;
  p.B = n.B, p.H = c.H, p.G = c.G, p.S = n.S, p.T = n.T, p.D = c.D, p.Dv = c.Dv;
  p.scale = static_cast<double>(1 / std::sqrt(static_cast<float>(c.D)));
  p.softcap = c.softcap;
  p.empty_rows = c.empty_rows;
  Fill(0, c.H, n.S, c.D, &random, &p.query);
  Fill(1, c.G, n.T, c.D, &random, &p.key);
  Fill(2, c.G, n.T, c.Dv, &random, &p.value);
  FillOperands(&random, &p);
  for (int64_t b = 0; b < n.B; ++b) {
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t i = 0; i < n.S; ++i) {
        for (int64_t k = 0; k < n.T; ++k) p.allowed.push_back(Allows(b, h, i, k) ? 1 : 0);
      }
    }
  }
  answer_ = Attend(p);
  largest_ = 0;
  for (const double value : p.value) largest_ = std::max(largest_, std::abs(value));
  for (const Memory& memory : memory_) memory.Upload(stream);
}

void Trial::Shape(nvinfer1::IPluginV3OneRuntime* runtime) const {
  const auto ins = static_cast<int32_t>(in_.size()), outs = static_cast<int32_t>(out_.size());
  CHECK(runtime->onShapeChange(in_.data(), ins, out_.data(), outs) == 0);
}

void Trial::Enqueue(nvinfer1::IPluginV3OneRuntime* runtime, const Memory& workspace, cudaStream_t stream) const {
  std::vector<void*> outputs;
  for (const Memory& output : outputs_) outputs.push_back(output.address());
  CHECK(runtime->enqueue(in_.data(), out_.data(), inputs_.data(), outputs.data(), workspace.address(), stream) == 0,
        "seed ", seed_, " ", Describe(case_));
}

void Trial::Poison(cudaStream_t stream) const {
  const std::vector<Input> all = OutputsOf(case_, sizes_);
  for (size_t i = 0; i < all.size(); ++i) {
    std::memset(outputs_[i].host(), 0xcd, Bytes(all[i]));
    outputs_[i].Upload(stream);
  }
}

void Trial::Check(cudaStream_t stream) const {
  for (const Memory& output : outputs_) output.Download(stream);
  const Case& c = case_;
  const Sizes& n = sizes_;
  const int64_t item = SizeOfFloat(c.dtype);
  for (int64_t b = 0; b < n.B; ++b) {
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t i = 0; i < n.S; ++i) {
        const auto row = static_cast<size_t>((b * c.H + h) * n.S + i);
        if (c.lse) CheckLse(row);
        for (int64_t d = 0; d < c.Dv; ++d) {
          const int64_t at = Offset(c.layouts[3], c.H, n.S, c.Dv, b, h, i) + d;
          const double got = LoadFloat(c.dtype, outputs_[0].host() + item * at);
          const double want = answer_.output[row * static_cast<size_t>(c.Dv) + static_cast<size_t>(d)];
          double tolerance = Tolerance(c.dtype, answer_.magnitude[row], n.T, largest_, want);
          if (LastSeen() == nullptr) tolerance += CudaTolerance(c.dtype, answer_.magnitude[row], n.T, largest_);
          CHECK(std::isnan(want) ? std::isnan(got) : std::abs(got - want) <= tolerance, "B ", n.B, " S ", n.S, " T ",
                n.T, " seed ", seed_, " ", Describe(c), ": b ", b, " h ", h, " row ", i, " d ", d, ": ", got,
                ", expected ", want, " ± ", tolerance);
        }
      }
    }
  }
}

void Trial::CheckLse(size_t row) const {
  const double got = LoadFloat(DType::kF32, outputs_[1].host() + 4 * row), want = answer_.lse[row];
  double tolerance = LseTolerance(answer_.magnitude[row], sizes_.T, want);
  if (LastSeen() == nullptr) tolerance += CudaTolerance(DType::kF32, answer_.magnitude[row], sizes_.T, 1);
  CHECK(std::isinf(want) ? got == want : std::abs(got - want) <= tolerance, "seed ", seed_, " ", Describe(case_),
        ": lse of row ", row, ": ", got, ", expected ", want, " ± ", tolerance);
}

size_t Build(const Case& c, const Sizes& most, const Sizes& usual, Held* held, std::vector<int32_t>* tactics) {
  const std::vector<Input> low = InputsOf(c, Sizes()), opt = InputsOf(c, usual), high = InputsOf(c, most);
  const auto count = static_cast<int32_t>(opt.size());
  nvinfer1::IPluginV3OneBuildV2* build = held->build;
  const std::vector<Input> outputs = OutputsOf(c, usual);
  const auto out_count = static_cast<int32_t>(outputs.size());
  CHECK(build->getNbOutputs() == out_count && build->getAliasedInput(0) < 0);
  std::vector<DataType> types;
  std::vector<nvinfer1::DynamicPluginTensorDesc> in_out;
  FakeBuilder builder;
  std::vector<nvinfer1::DimsExprs> shapes;
  for (size_t i = 0; i < opt.size(); ++i) {
    types.push_back(opt[i].type);
    in_out.push_back(Bounds(opt[i].type, low[i].dims, opt[i].dims, high[i].dims));
    shapes.push_back(builder.Dims(opt[i].dims));
  }
  std::vector<DataType> out_types(outputs.size(), DataType::kINT32);
  CHECK(build->getOutputDataTypes(out_types.data(), out_count, types.data(), count) == 0);
  std::vector<nvinfer1::DimsExprs> out(outputs.size());
  CHECK(build->getOutputShapes(shapes.data(), count, nullptr, 0, out.data(), out_count, builder) == 0);
  const std::vector<Input> least = OutputsOf(c, Sizes()), largest = OutputsOf(c, most);
  for (size_t i = 0; i < outputs.size(); ++i) {
    CHECK(out_types[i] == outputs[i].type && FakeBuilder::Values(out[i]) == outputs[i].dims, "output ", i);
    in_out.push_back(Bounds(out_types[i], least[i].dims, outputs[i].dims, largest[i].dims));
  }
  const nvinfer1::DynamicPluginTensorDesc* const out_descs = &in_out[opt.size()];
  for (int32_t at = 0; at < count + out_count; ++at) {
    auto& desc = in_out[static_cast<size_t>(at)].desc;
    CHECK(build->supportsFormatCombination(at, in_out.data(), count, out_count), "position ", at);
    for (const TensorFormat format : {TensorFormat::kCHW2, TensorFormat::kHWC8, TensorFormat::kCHW32}) {
      desc.format = format;
      CHECK(!build->supportsFormatCombination(at, in_out.data(), count, out_count));
    }
    desc.format = TensorFormat::kLINEAR;
    const DataType own = desc.type;
    desc.type = DataType::kFP8;
    CHECK(at == count - 1 || !build->supportsFormatCombination(at, in_out.data(), count, out_count), "position ", at);
    desc.type = own;
  }
  CHECK(build->configurePlugin(in_out.data(), count, out_descs, out_count) == 0);
  std::vector<int32_t> ids(static_cast<size_t>(build->getNbTactics()), 0);
  CHECK(build->getValidTactics(ids.data(), static_cast<int32_t>(ids.size())) == 0);
  CHECK(std::set<int32_t>(ids.begin(), ids.end()).size() == ids.size() &&
        std::all_of(ids.begin(), ids.end(), [](int32_t id) { return id > 0; }));
  CHECK(build->getTimingCacheID() != nullptr && build->getFormatCombinationLimit() > 0);
  const std::string metadata = build->getMetadataString();
  CHECK(metadata.find("StofAttention; ") == 0 && metadata.find('"') == std::string::npos, metadata);
  if (tactics != nullptr) *tactics = ids;
  return build->getWorkspaceSize(in_out.data(), count, out_descs, out_count);
}

Held Loaded(const Attributes& attributes) {
  const Held built = Create(attributes);
  CHECK(built.plugin != nullptr);
  OwnedFields file(*built.runtime->getFieldsToSerialize());
  Held loaded(FindCreator("StofAttention")->createPlugin("layer", file.get(), TensorRTPhase::kRUNTIME));
  CHECK(loaded.plugin != nullptr);
  return loaded;
}

}  // namespace stof::test
