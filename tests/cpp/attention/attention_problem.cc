// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/attention/attention_problem.h"

#include <cmath>
#include <cstdlib>
#include <limits>

namespace stof::test::attention {
std::string Describe(const Case& c) {
  static constexpr const char* kPads[] = {"none", "left", "right", "all", "random"};
  static constexpr const char* kBiases[] = {"none", "plain", "lowest", "forbids", "far below"};
  static constexpr const char* kPoisons[] = {"none", "forbidden", "one key"};
  static constexpr const char* kPolicies[] = {"zero", "nan", "mean", "all"};
  std::string layout;
  for (const Arrangement a : c.arrangement)
    layout += std::string(layout.empty() ? "" : ",") + "DSGP"[static_cast<int>(a)];
  return Text("B ", c.B, " H ", c.H, " G ", c.G, " S ", c.S, " T ", c.T, " D ", c.D, " Dv ", c.Dv, " dtype ",
              static_cast<int>(c.dtype), " layout ", layout, " offset ", c.offset, " mask ", c.mask, " pad ",
              kPads[static_cast<int>(c.pad)], " bias ", kBiases[static_cast<int>(c.bias)], " wide ", c.bias_wide,
              " broadcast ", c.bias_broadcast, " relative ", c.relative, c.relative_shared ? " shared" : "", " sink ",
              c.sink, " empty rows ", kPolicies[static_cast<int>(c.empty_rows)], " softcap ", c.softcap, " spread ",
              c.spread, " rising ", c.rising, c.deep ? " deep" : "", " scores ", static_cast<int>(c.scores), " of 2^",
              c.exponent, " poison ", kPoisons[static_cast<int>(c.poison)], " shifted ", c.shifted, " shared pad ",
              c.pad_shared, c.wild ? " wild" : "", c.bf16 ? " bf16" : "", c.tf32 ? " tf32" : "", " ", c.kernel,
              " tile ", c.m, "x", c.n, " left ", static_cast<int>(c.left));
}
const char* MaskText(int mask) {
  static constexpr const char* kTexts[kMasks] = {"",
                                                 "k <= q",
                                                 "abs(q - k) <= 9",
                                                 "abs(q - k) <= 40",
                                                 "k <= q and q - k < 20",
                                                 "k < 4 or q < 4 or abs(q - k) <= 9",
                                                 "table0[h, k]",
                                                 "table0[q - P, k]",
                                                 "table0[h, (q - P) // 16, k // 32] and k <= q",
                                                 "abs(q - k) <= 4 * h and k % 3 != b",
                                                 "segment_q[b, q - P] == segment_k[b, k]",
                                                 "k < lengths[b] and abs(q - k) <= 33",
                                                 "k <= q and (k < 3 or pad[b, k])",
                                                 "k < 0",
                                                 "abs(q - k) <= 41 and (q - k) % 2 == 0",
                                                 "k <= q and k % 3 == q % 3"};
  return kTexts[mask];
}

namespace {

bool MaskAllows(const Case& c, const MaskData& data, int64_t b, int64_t h, int64_t i, int64_t k) {
  const int64_t q = i + (c.offset ? c.T - c.S : 0);
  const int64_t distance = q > k ? q - k : k - q;
  const auto at = [](const auto& table, int64_t index) { return table[static_cast<size_t>(index)]; };
  switch (c.mask) {
    case 0:
      return true;
    case 1:
      return k <= q;
    case 2:
      return distance <= 9;
    case 3:
      return distance <= 40;
    case 4:
      return k <= q && q - k < 20;
    case 5:
      return k < 4 || q < 4 || distance <= 9;
    case 6:
      return at(data.head_keys, h * c.T + k) != 0;
    case 7:
      return at(data.pairs, i * c.T + k) != 0;
    case 8:
      return at(data.head_tiles, (h * ((c.S + 15) / 16) + i / 16) * ((c.T + 31) / 32) + k / 32) != 0 && k <= q;
    case 9:
      return distance <= 4 * h && k % 3 != b;
    case 10:
      return at(data.segment_q, b * c.S + i) == at(data.segment_k, b * c.T + k);
    case 11:
      return k < at(data.lengths, b) && distance <= 33;
    case 12:
      return k <= q && (k < 3 || at(data.pad, b * c.T + k) != 0);
    case 14:
      return distance <= 41 && distance % 2 == 0;
    case 15:
      return k <= q && distance % 3 == 0;
    default:
      return false;
  }
}

template <typename T>
std::vector<T> Draws(Random* random, int64_t count, int64_t low, int64_t high) {
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) value = static_cast<T>(random->Range(low, high));
  return values;
}

// Ids that rise from 0, in stretches of about `stretch`.
template <typename T>
std::vector<T> Segments(Random* random, int64_t rows, int64_t length, int stretch) {
  std::vector<T> values;
  for (int64_t row = 0; row < rows; ++row) {
    T id = 0;
    for (int64_t i = 0; i < length; ++i) {
      values.push_back(id);
      if (random->OneIn(stretch)) ++id;
    }
  }
  return values;
}
}  // namespace

MaskData DrawMask(const Case& c, Random* random) {
  MaskData data;
  data.head_keys = Draws<uint8_t>(random, c.H * c.T, 0, 1);
  data.pairs = Draws<uint8_t>(random, c.S * c.T, 0, 1);
  data.head_tiles = Draws<uint8_t>(random, c.H * ((c.S + 15) / 16) * ((c.T + 31) / 32), 0, 1);
  data.segment_q = Segments<int32_t>(random, c.B, c.S, 20);
  data.segment_k = Segments<int64_t>(random, c.B, c.T, 20);
  data.lengths = Draws<int64_t>(random, c.B, 0, c.T);
  data.pad.assign(static_cast<size_t>(c.B * c.T), 1);
  // Batch 0 is padded more than the others, which differ too.
  for (int64_t b = 0; b < c.B; ++b) {
    const int64_t gone = b == 0 ? (c.T + 1) / 2 : random->Range(0, c.T / 3);
    for (int64_t k = 0; k < c.T; ++k) {
      uint8_t& pad = data.pad[static_cast<size_t>(b * c.T + k)];
      if (c.pad == Pad::kLeft) pad = k >= gone;
      if (c.pad == Pad::kRight) pad = k < c.T - gone;
      if (c.pad == Pad::kAll) pad = b != 0;
      if (c.pad == Pad::kRandom) pad = random->OneIn(2);
    }
  }
  for (int64_t b = 1; b < c.B && c.pad_shared; ++b) {
    std::copy_n(data.pad.begin(), c.T, data.pad.begin() + static_cast<std::ptrdiff_t>(b * c.T));
  }
  return data;
}

Tensor Describe(const void* data, DType dtype, std::initializer_list<int64_t> dims) {
  Tensor tensor;
  tensor.data = const_cast<void*>(data);
  tensor.dtype = dtype;
  tensor.rank = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), tensor.dims);
  return tensor;
}
void BindMask(const Case& c, const MaskData& data, const CpuAttentionConfig& config, BoundMask* bound,
              AttentionArgs* args) {
  std::vector<std::pair<std::string, Tensor>> tables;
  if (c.mask == 6) tables.emplace_back("table0", Describe(data.head_keys.data(), DType::kBool, {c.H, c.T}));
  if (c.mask == 7) tables.emplace_back("table0", Describe(data.pairs.data(), DType::kU8, {c.S, c.T}));
  if (c.mask == 8) {
    tables.emplace_back("table0",
                        Describe(data.head_tiles.data(), DType::kBool, {c.H, (c.S + 15) / 16, (c.T + 31) / 32}));
  }
  // uint8 tables are integers; of two values the comparison makes the boolean that a mask is.
  const std::string text = c.mask == 7 ? std::string(MaskText(c.mask)) + " != 0" : MaskText(c.mask);
  MaskExpr expr;
  Status status = MaskExpr::Parse(text, tables, &expr);
  CHECK(status.ok(), status.message());
  bound->parts = SplitMask(expr);
  const ExprSizes sizes = {c.B, c.H, c.S, c.T, c.offset ? c.T - c.S : 0};
  if (!text.empty() && !bound->parts.fixed.empty()) {
    BlockMaskBounds bounds;
    bounds.leaves_tiles = c.left != Left::kNothing;
    if (c.left == Left::kMost) bounds.element_bytes = 2 * (config.m * config.n / 8 + 64);
    if (c.left == Left::kTiles) bounds.operations = 0;
    status = BuildBlockMask(bound->parts.fixed, sizes, config.m, config.n, &bound->block, bounds);
    CHECK(status.ok(), status.message());
    if (c.left != Left::kNothing) {
      status = BoundDynamicMask::Make(bound->parts.fixed, sizes, {}, &bound->elements);
      CHECK(status.ok(), status.message());
    }
    args->mask.fixed = StaticMask::OfBlocks(c.left == Left::kAll ? nullptr : &bound->block,
                                            bound->elements == nullptr ? nullptr : bound->elements->view());
  }
  if (!bound->parts.dynamic.empty()) {
    status = BoundDynamicMask::Make(bound->parts.dynamic, sizes,
                                    {{"segment_q", Describe(data.segment_q.data(), DType::kI32, {c.B, c.S})},
                                     {"segment_k", Describe(data.segment_k.data(), DType::kI64, {c.B, c.T})},
                                     {"lengths", Describe(data.lengths.data(), DType::kI64, {c.B})},
                                     {"pad", Describe(data.pad.data(), DType::kBool, {c.B, c.T})}},
                                    &bound->dynamic);
    CHECK(status.ok(), status.message());
    args->mask.dynamic = bound->dynamic->view();
  }
}
std::vector<double> DrawValues(Random* random, DType dtype, int64_t count, double spread) {
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = Rounded(dtype, spread * static_cast<double>(random->Unit()));
  return values;
}
namespace {
double Lowest(DType dtype) {
  if (dtype == DType::kF16) return -65504;
  return dtype == DType::kBF16 ? -0x1.fep127 : -static_cast<double>(std::numeric_limits<float>::max());
}
}  // namespace

BiasTensor DrawBias(const Case& c, Random* random) {
  BiasTensor bias;
  if (c.bias == Bias::kNone) return bias;
  bias.dtype = c.bias_wide ? DType::kF32 : c.dtype;
  const int64_t full[] = {c.B, c.H, c.S, c.T};
  int64_t dims[4];
  int64_t count = 1;
  for (int axis = 3; axis >= 0; --axis) {
    dims[axis] = (c.bias_broadcast >> axis & 1) != 0 ? 1 : full[axis];
    bias.stride[axis] = dims[axis] == 1 ? 0 : count;
    count *= dims[axis];
  }
  std::vector<double> values = DrawValues(random, bias.dtype, count, 2);
  // Beside scores of one size theirs is the same, so that sums are exact.
  for (double& value : values) {
    if (c.scores == Scores::kSpikes) value = 0;
    if (c.scores != Scores::kDrawn) value = std::ldexp(std::nearbyint(2 * value), c.exponent - 3);
  }
  const double special = c.bias == Bias::kLowest ? Lowest(bias.dtype) : -std::numeric_limits<double>::infinity();
  if (c.bias == Bias::kFarBelow) {
    for (int64_t i = 0; i < count; ++i) {
      if (3 * (i % dims[3]) < 2 * dims[3]) values[static_cast<size_t>(i)] = Rounded(bias.dtype, -10000);
    }
  } else if (c.bias != Bias::kPlain) {
    bool whole_row = false;
    for (int64_t i = 0; i < count; ++i) {
      if (i % dims[3] == 0) whole_row = random->OneIn(5);
      if (whole_row || random->OneIn(4)) values[static_cast<size_t>(i)] = special;
    }
  }
  const int64_t item = SizeOfFloat(bias.dtype);
  bias.bytes.resize(static_cast<size_t>(item * count));
  for (int64_t i = 0; i < count; ++i)
    StoreFloat(bias.dtype, values[static_cast<size_t>(i)], &bias.bytes[static_cast<size_t>(item * i)]);
  bias.dense.reserve(static_cast<size_t>(c.B * c.H * c.S * c.T));
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t i = 0; i < c.S; ++i) {
        for (int64_t k = 0; k < c.T; ++k) {
          bias.dense.push_back(values[static_cast<size_t>(b * bias.stride[0] + h * bias.stride[1] + i * bias.stride[2] +
                                                          k * bias.stride[3])]);
        }
      }
    }
  }
  return bias;
}

std::vector<float> DrawRelative(const Case& c, Random* random, std::vector<double>* dense) {
  std::vector<float> table;
  if (c.relative == 0) return table;
  for (const double x : DrawValues(random, DType::kF32, (c.relative_shared ? 1 : c.H) * c.relative, 2)) {
    table.push_back(static_cast<float>(random->OneIn(9) ? -std::numeric_limits<double>::infinity() : x));
  }
  dense->resize(static_cast<size_t>(c.B * c.H * c.S * c.T), 0.0);
  const int64_t radius = c.relative / 2, past = c.offset ? c.T - c.S : 0;
  for (int64_t i = 0; i < static_cast<int64_t>(dense->size()); ++i) {
    const int64_t k = i % c.T, q = past + i / c.T % c.S, h = i / c.T / c.S % c.H;
    const int64_t entry = std::min(radius, std::max(-radius, k - q)) + radius;
    (*dense)[static_cast<size_t>(i)] += table[static_cast<size_t>((c.relative_shared ? 0 : h) * c.relative + entry)];
  }
  return table;
}

namespace {
float ScaleOf(const Case& c) {
  if (c.scores == Scores::kDrawn) return 1.0f / std::sqrt(static_cast<float>(c.D));
  return c.scores == Scores::kSpikes ? 1.0f : std::ldexp(1.0f, c.exponent - 3);
}

// Of each row of queries and keys element 0 makes the score, a power of two times a short number. Elsewhere one of both
// is 0.
void DrawScores(const Case& c, Random* random, Dense* dense) {
  const auto draw = [&](std::vector<double>* rows, size_t zero, double unit) {
    for (size_t i = 0; i < rows->size(); ++i) {
      const size_t d = i % static_cast<size_t>(c.D);
      (*rows)[i] = d % 2 == zero || d == 0 ? 0.0 : Rounded(c.dtype, unit * static_cast<double>(random->Unit()));
    }
  };
  const bool spikes = c.scores == Scores::kSpikes;
  const int half = spikes ? c.exponent / 2 : 0;  // the query's part of the exponent
  draw(&dense->query, 0, std::ldexp(1.0, half)), draw(&dense->key, 1, std::ldexp(1.0, -half));
  for (size_t i = 0; i < dense->query.size(); i += static_cast<size_t>(c.D)) {
    dense->query[i] = std::ldexp(1.0, spikes ? half : static_cast<int>(random->Range(0, 3)));
    if (spikes && c.D > 1) dense->query[i + 1] = std::ldexp(1.0, half);  // by which other scores are small numbers
  }
  const int64_t one = random->Range(0, c.T - 1);
  for (size_t i = 0; i < dense->key.size(); i += static_cast<size_t>(c.D)) {
    const int64_t k = static_cast<int64_t>(i) / c.D % c.T;
    double& score = dense->key[i];
    score = static_cast<double>(random->Range(-24, 24)) / 8;
    if (c.scores == Scores::kEqual) score = 2.5;
    if (c.scores == Scores::kUp && k == one) score = std::numeric_limits<double>::infinity();
    if (c.scores == Scores::kDown && random->OneIn(3)) score = -std::numeric_limits<double>::infinity();
    if (!spikes) continue;
    const bool high = random->OneIn(40);
    score = high ? std::ldexp(1.5, c.exponent - half) : 0;
    if (c.D > 1) dense->key[i + 1] = high ? 0 : std::ldexp(static_cast<double>(random->Range(-40, 40)), -3 - half);
  }
  // In units of log2 scores of large size are rounded once more, which shows where they count the same.
  dense->exact_beyond = c.cuda ? 0x1p17 : 256;
}

// NaN and infinities where the result may not depend on them.
void PoisonKeys(const Case& c, Random* random, Dense* dense) {
  if (c.poison == Poison::kNone) return;
  static const std::vector<double> kValues = {std::nan(""), std::numeric_limits<double>::infinity(),
                                              -std::numeric_limits<double>::infinity()};
  std::vector<uint8_t> attended(static_cast<size_t>(c.B * c.G * c.T), 0);
  for (int64_t row = 0; row < c.B * c.H * c.S; ++row) {
    const int64_t group = row / c.S / c.H * c.G + row / c.S % c.H / (c.H / c.G);
    for (int64_t k = 0; k < c.T; ++k) {
      const auto at = static_cast<size_t>(row * c.T + k);
      const bool biased = dense->bias.empty() || !std::isinf(dense->bias[at]);
      if (dense->allowed[at] != 0 && biased) attended[static_cast<size_t>(group * c.T + k)] = 1;
    }
  }
  const int64_t one = random->Range(0, c.B * c.G * c.T - 1);
  for (int64_t key = 0; key < c.B * c.G * c.T; ++key) {
    const bool chosen = c.poison == Poison::kForbidden ? attended[static_cast<size_t>(key)] == 0 : key == one;
    if (!chosen) continue;
    const double value = c.poison == Poison::kForbidden ? random->Pick(kValues) : kValues[0];
    std::fill_n(dense->key.begin() + static_cast<std::ptrdiff_t>(key * c.D), c.D, value);
  }
}
}  // namespace

Dense DrawDense(const Case& c, const MaskData& data, const BiasTensor& bias, Random* random) {
  Dense dense;
  dense.B = c.B, dense.H = c.H, dense.G = c.G, dense.S = c.S, dense.T = c.T, dense.D = c.D, dense.Dv = c.Dv;
  dense.scale = static_cast<double>(ScaleOf(c));
  dense.softcap = static_cast<double>(c.softcap);
  dense.empty_rows = c.empty_rows;
  const DType drawn = c.tf32 ? DType::kF16 : c.dtype;
  // Short numbers of every type are numbers of bf16, too.
  const auto shorten = [&](std::vector<double>* values) {
    for (double& x : *values) x = c.bf16 ? Rounded(c.dtype, Rounded(DType::kBF16, x)) : x;
  };
  dense.query = DrawValues(random, drawn, c.B * c.H * c.S * c.D, static_cast<double>(c.spread));
  dense.key = DrawValues(random, drawn, c.B * c.G * c.T * c.D, 1);
  dense.value = DrawValues(random, drawn, c.B * c.G * c.T * c.Dv, 1);
  if (c.rising) {
    for (double& x : dense.query) x = std::abs(x);
    for (size_t i = 0; i < dense.key.size(); ++i) {
      const int64_t k = static_cast<int64_t>(i) / c.D % c.T;
      dense.key[i] = Rounded(drawn, dense.key[i] / 8 + 3.0 * static_cast<double>(k) / static_cast<double>(c.T));
    }
  }
  if (c.deep) {
    // -800 up to -600: queries of 400 / sqrt(D) at most, half of that on the average.
    const double most = 400 / std::sqrt(static_cast<double>(c.D));
    for (double& x : dense.query) x = Rounded(drawn, -most * std::abs(x));
    for (size_t i = 0; i < dense.key.size(); ++i) {
      const int64_t k = static_cast<int64_t>(i) / c.D % c.T;
      dense.key[i] = Rounded(drawn, dense.key[i] / 8 + 4.0 - static_cast<double>(k) / static_cast<double>(c.T));
    }
  }
  if (c.scores != Scores::kDrawn) DrawScores(c, random, &dense);
  for (std::vector<double>* values : {&dense.query, &dense.key, &dense.value}) shorten(values);
  if (c.wild) {
    for (double& x : dense.query) x *= 0x1p-40;
    for (double& x : dense.key) x *= 0x1p40;
  }
  dense.bias = bias.dense;
  dense.allowed.reserve(static_cast<size_t>(c.B * c.H * c.S * c.T));
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t i = 0; i < c.S; ++i) {
        for (int64_t k = 0; k < c.T; ++k) {
          // In mask 12 pad forbids less than everything.
          const bool padded = c.mask != 12 && data.pad[static_cast<size_t>(b * c.T + k)] == 0;
          dense.allowed.push_back(!padded && MaskAllows(c, data, b, h, i, k));
        }
      }
    }
  }
  PoisonKeys(c, random, &dense);
  return dense;
}

std::vector<double> DrawSink(const Case& c, Random* random) {
  std::vector<double> sink = DrawValues(random, c.dtype, c.H, 4);
  // Of every second head as large as the scores, as far as the type has such numbers.
  for (size_t h = 0; h < sink.size() && c.scores != Scores::kDrawn; h += 2) {
    const double large = Rounded(c.dtype, std::ldexp(c.scores == Scores::kSpikes ? 1.5 : 2.5, c.exponent));
    if (std::isfinite(large)) sink[h] = large;
  }
  return sink;
}

void Compare(const Case& c, const Dense& dense, const Answer& answer, Strided* output, const std::string& where) {
  double largest = 0, relative = 0;
  for (const double value : dense.value) largest = std::max(largest, std::abs(value));
  for (const double value : dense.relative_value.values) relative = std::max(relative, std::abs(value));
  largest += relative;
  output->ForEach([&](char* at, size_t i) {
    const auto row = static_cast<int64_t>(i) / c.Dv;
    const auto place = [&] {
      return Text(where, ": b ", row / c.S / c.H, " h ", row / c.S % c.H, " row ", row % c.S, " d ",
                  static_cast<int64_t>(i) % c.Dv);
    };
    static constexpr unsigned char kPoison[4] = {kUntouched, kUntouched, kUntouched, kUntouched};
    const auto item = static_cast<size_t>(SizeOfFloat(c.dtype));
    CHECK(std::memcmp(at, kPoison, item) != 0, place(), " was not written");
    const double got = LoadFloat(c.dtype, at);
    const double want = answer.output[i];
    double tolerance = Tolerance(c.dtype, answer.magnitude[static_cast<size_t>(row)], c.T, largest, want);
    if (c.bf16) tolerance += CudaTolerance(DType::kBF16, answer.magnitude[static_cast<size_t>(row)], c.T, largest);
    if (c.cuda)
      tolerance +=
          CudaTolerance(c.tf32 ? DType::kF16 : c.dtype, answer.magnitude[static_cast<size_t>(row)], c.T, largest);
    CHECK(std::isnan(want) ? std::isnan(got) : std::abs(got - want) <= tolerance, place(), ": ", got, ", expected ",
          want, " ± ", tolerance);
    std::memset(at, kUntouched, item);
  });
  for (const char byte : output->bytes) {
    CHECK(static_cast<unsigned char>(byte) == kUntouched, where, ": written beside the output's elements");
  }
}
void Lse::Compare(const Case& c, const Answer& answer, const std::string& where) const {
  // A row whose scores all lie beyond fp32's range in units of log2 says that end of it.
  const double least = -static_cast<double>(std::numeric_limits<float>::max()) * std::log(2.0);
  std::vector<char> own(values.size(), 0);
  for (int64_t row = 0; row < c.B * c.H * c.S; ++row) {
    const int64_t b = row / c.S / c.H, h = row / c.S % c.H;
    const auto at = static_cast<size_t>(b * stride_b + h * stride_h + row % c.S);
    const auto place = [&] { return Text(where, ": lse of b ", b, " h ", h, " row ", row % c.S); };
    own[at] = 1;
    CHECK(!Untouched(at), place(), " was not written");
    double want = answer.lse[static_cast<size_t>(row)];
    if (c.cuda && !std::isinf(want) && want < least) want = least;
    const double got = static_cast<double>(values[at]), magnitude = answer.magnitude[static_cast<size_t>(row)];
    double tolerance = LseTolerance(magnitude, c.T, want);
    if (c.cuda) tolerance += CudaTolerance(DType::kF32, magnitude, c.T, 1);
    const bool same = std::isnan(want)   ? std::isnan(got)
                      : std::isinf(want) ? got == want
                                         : std::abs(got - want) <= tolerance;
    CHECK(same, place(), ": ", got, ", expected ", want, " ± ", tolerance);
  }
  for (size_t at = 0; at < values.size(); ++at) {
    CHECK(own[at] != 0 || Untouched(at), where, ": written beside the elements of lse");
  }
}

void ExceptRows(const std::vector<uint8_t>& is_uncertain, const Case& c, Strided* output, const Lse& lse,
                Answer* answer) {
  output->ForEach([&](const char* at, size_t i) {
    const double got = LoadFloat(c.dtype, at);
    if (is_uncertain[i / static_cast<size_t>(c.Dv)] != 0 && !std::isnan(answer->output[i])) answer->output[i] = got;
  });
  for (size_t row = 0; row < answer->lse.size(); ++row) {
    const auto at = static_cast<int64_t>(row) / c.S / c.H * lse.stride_b +
                    static_cast<int64_t>(row) / c.S % c.H * lse.stride_h + static_cast<int64_t>(row) % c.S;
    if (is_uncertain[row] != 0 && !std::isnan(answer->lse[row])) {
      answer->lse[row] = static_cast<double>(lse.values[static_cast<size_t>(at)]);
    }
  }
}

AttentionArgs MakeArgs(const Case& c, const Strided& query, const Strided& key, const Strided& value,
                       const Strided& output) {
  AttentionArgs args;
  args.shape = {c.B, c.H, c.G, c.S, c.T, c.D, c.Dv, c.dtype};
  args.query = {query.data, query.stride};
  args.key = {key.data, key.stride};
  args.value = {value.data, value.stride};
  args.output.data = output.data;
  args.output.stride = output.stride;
  args.scores.scale = ScaleOf(c);
  args.scores.softcap = c.softcap;
  args.mask.empty_rows = c.empty_rows;
  args.allow_tf32 = c.tf32;
  args.allow_bf16 = c.bf16;
  args.kernel = c.kernel;
  return args;
}
Memory MakeWorkspace(size_t bytes, int content) {
  Memory memory(std::aligned_alloc(64, std::max<size_t>(64, (bytes + 63) / 64 * 64)), std::free);
  std::memset(memory.get(), content, bytes);
  return memory;
}
}  // namespace stof::test::attention
