// SPDX-License-Identifier: Apache-2.0
// The attention kernels of every instruction set that this machine has, against the definition: shapes around the edges
// of tiles and register blocks, every feature of AttentionArgs, 1 and 3 threads. Cases are drawn from decks, so that
// every value of every column of the table below comes up, in combinations that the seed chooses; a list of cases for
// paths that no draw is sure to reach stands beside them.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#ifdef STOF_WITH_CUDA
#include <cuda_runtime.h>

#include "cuda/selector.h"
#include "cuda/work_plan.h"
#endif

#include "plugins/core/block_mask_builder.h"
#include "plugins/core/cuda_backend.h"
#include "plugins/core/ops/attention.h"
#include "plugins/core/thread_pool.h"
#include "tests/cpp/check.h"
#include "tests/cpp/reference.h"

namespace stof::test {
namespace {

// kGaps: more between rows, heads and batches than they need. kPacked: as kBSHD, with other heads before and behind in
// each row.
enum class Arrangement { kBHSD, kBSHD, kGaps, kPacked };
const std::vector<Arrangement> kArrangements = {Arrangement::kBHSD, Arrangement::kBSHD, Arrangement::kGaps,
                                                Arrangement::kPacked};
enum class Pad { kNone, kLeft, kRight, kAll, kRandom };
// kLowest: some entries are the lowest finite number, and whole rows of them; kForbids: some are -inf, and whole rows;
// kFarBelow: the first keys have -10000, so that the running maximum begins far below the scores that count.
enum class Bias { kNone, kPlain, kLowest, kForbids, kFarBelow };
// What the keys hold that no query of their group may attend; kOneKey: NaN in one key whatever the mask says.
enum class Poison { kNone, kForbidden, kOneKey };

constexpr int kMasks = 16;

struct Case {
  int64_t B = 2, H = 4, G = 4, S = 5, T = 7, D = 16, Dv = 16;
  DType dtype = DType::kF32;
  Arrangement arrangement[4] = {};  // query, key, value, output
  bool offset = false;              // the queries are the last S of T positions
  int mask = 0;
  Pad pad = Pad::kNone;
  Bias bias = Bias::kNone;
  bool bias_wide = false;        // fp32 whatever dtype
  uint32_t bias_broadcast = 0;   // bit per axis
  int64_t relative = 0;          // entries of a relative bias; 0: none
  bool relative_shared = false;  // by all heads
  bool sink = false;
  EmptyRows empty_rows = EmptyRows::kZero;
  float softcap = 0;
  float spread = 1;     // of the queries: how far scores are apart
  bool rising = false;  // later keys score higher, so that the running maximum moves in every tile
  bool deep = false;    // all scores are far below zero, at the beginning below -1024 in units of log2
  Poison poison = Poison::kNone;
  bool shifted = false;     // tensors begin one element after an aligned address
  bool pad_shared = false;  // one row of padding for all batches
  bool cuda = false;        // rows begin at multiples of 16 bytes, and weights are rounded to dtype
  const char* kernel = "";  // that is asked for by name
  bool tf32 = false;        // fp32 whose products are rounded as TF32 is; the inputs have been before
  bool wild = false;        // fp32: small queries, large keys, and values of padded keys that are huge
  int m = 0, n = 0;         // 0: as the library chooses
};

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
              c.spread, " rising ", c.rising, c.deep ? " deep" : "", " poison ", kPoisons[static_cast<int>(c.poison)],
              " shifted ", c.shifted, " shared pad ", c.pad_shared, c.wild ? " wild" : "", c.tf32 ? " tf32" : "", " ",
              c.kernel, " tile ", c.m, "x", c.n);
}

// ---- masks: the product's text beside what it means ----
struct MaskData {
  std::vector<uint8_t> head_keys;   // table0 [H, T]
  std::vector<uint8_t> pairs;       // table0 [S, T]
  std::vector<uint8_t> head_tiles;  // table0 [H, ceil(S / 16), ceil(T / 32)]
  std::vector<int32_t> segment_q;   // [B, S]
  std::vector<int64_t> segment_k;   // [B, T]
  std::vector<int64_t> lengths;     // [B]
  std::vector<uint8_t> pad;         // [B, T]
};

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

// The mask as the operator hands it to the kernel: a block mask of the static part, the dynamic part bound.
struct BoundMask {
  MaskParts parts;
  BlockMask block;
  std::unique_ptr<BoundDynamicMask> dynamic;
};

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
    status = BuildBlockMask(bound->parts.fixed, sizes, config.m, config.n, &bound->block);
    CHECK(status.ok(), status.message());
    args->mask = &bound->block;
  }
  if (!bound->parts.dynamic.empty()) {
    status = BoundDynamicMask::Make(bound->parts.dynamic, sizes,
                                    {{"segment_q", Describe(data.segment_q.data(), DType::kI32, {c.B, c.S})},
                                     {"segment_k", Describe(data.segment_k.data(), DType::kI64, {c.B, c.T})},
                                     {"lengths", Describe(data.lengths.data(), DType::kI64, {c.B})},
                                     {"pad", Describe(data.pad.data(), DType::kBool, {c.B, c.T})}},
                                    &bound->dynamic);
    CHECK(status.ok(), status.message());
    args->dynamic = bound->dynamic->view();
  }
}

// ---- tensors ----
constexpr unsigned char kUntouched = 0xff;  // as fp32, fp16 and bf16 a NaN that no arithmetic gives

// Memory that ends with the tensor's last element, so that a sanitizer sees what reads beyond it; NaN between rows.
struct Strided {
  static constexpr int64_t kBefore = 2, kBehind = 3;  // heads of kPacked
  std::vector<char> bytes;
  char* data = nullptr;
  Strides stride;
  DType dtype = DType::kF32;
  int64_t B = 0, heads = 0, length = 0, size = 0;

  Strided(const Case& c, int which, int64_t heads, int64_t length, int64_t size)
      : dtype(c.dtype), B(c.B), heads(heads), length(length), size(size) {
    int64_t first = 0;  // elements before those that are meant
    switch (c.arrangement[which]) {
      case Arrangement::kBHSD:
        stride = {heads * length * size, length * size, size};
        break;
      case Arrangement::kBSHD:
        stride = {length * heads * size, size, heads * size};
        break;
      case Arrangement::kGaps:
        stride.s = size + (c.cuda ? 8 : 5);
        stride.h = length * stride.s + (c.cuda ? 16 : 3);
        stride.b = heads * stride.h + (c.cuda ? 8 : 7);
        break;
      case Arrangement::kPacked:
        stride.h = size;
        stride.s = (kBefore + heads + kBehind) * size;
        stride.b = length * stride.s;
        first = kBefore * size;
        break;
    }
    const int64_t item = SizeOfFloat(dtype), shift = c.shifted ? item : 0;
    const int64_t last = (B - 1) * stride.b + (heads - 1) * stride.h + (length - 1) * stride.s + size;
    bytes.assign(static_cast<size_t>(shift + item * (first + last)), static_cast<char>(kUntouched));
    bytes.shrink_to_fit();
    data = bytes.data() + shift + item * first;
  }
  Strided(const Strided&) = delete;
  Strided& operator=(const Strided&) = delete;

  // f(element's memory, its index in dense order)
  template <typename F>
  void ForEach(F f) {
    int64_t i = 0;
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t s = 0; s < length; ++s) {
          for (int64_t d = 0; d < size; ++d) {
            f(data + SizeOfFloat(dtype) * (b * stride.b + h * stride.h + s * stride.s + d), static_cast<size_t>(i++));
          }
        }
      }
    }
  }
  void Fill(const std::vector<double>& values) {
    ForEach([&](char* at, size_t i) { StoreFloat(dtype, values[i], at); });
  }
  void Reset() { std::fill(bytes.begin(), bytes.end(), static_cast<char>(kUntouched)); }
};

std::vector<double> DrawValues(Random* random, DType dtype, int64_t count, double spread) {
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = Rounded(dtype, spread * static_cast<double>(random->Unit()));
  return values;
}

double Lowest(DType dtype) {
  if (dtype == DType::kF16) return -65504;
  return dtype == DType::kBF16 ? -0x1.fep127 : -static_cast<double>(std::numeric_limits<float>::max());
}

struct BiasTensor {
  DType dtype = DType::kF32;
  std::vector<char> bytes;
  int64_t stride[4] = {};  // 0 where an axis is broadcast
  std::vector<double> dense;
};

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

// The table of a relative bias, whose part in each score goes to the dense bias.
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

Dense DrawDense(const Case& c, const MaskData& data, const BiasTensor& bias, Random* random) {
  Dense dense;
  dense.B = c.B, dense.H = c.H, dense.G = c.G, dense.S = c.S, dense.T = c.T, dense.D = c.D, dense.Dv = c.Dv;
  dense.scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(c.D)));
  dense.softcap = static_cast<double>(c.softcap);
  dense.empty_rows = c.empty_rows;
  const DType drawn = c.tf32 ? DType::kF16 : c.dtype;
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

void Compare(const Case& c, const Dense& dense, const Answer& answer, Strided* output, const std::string& where) {
  double largest = 0;
  for (const double value : dense.value) largest = std::max(largest, std::abs(value));
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

// Memory for the logarithms of the rows' divisors, with gaps.
struct Lse {
  int64_t stride_h, stride_b;
  std::vector<float> values;

  explicit Lse(const Case& c)
      : stride_h(c.S + 3), stride_b(c.H * stride_h + 5), values(static_cast<size_t>(c.B * stride_b)) {
    Reset();
  }
  void Reset() { std::memset(values.data(), kUntouched, bytes()); }
  size_t bytes() const { return values.size() * sizeof(float); }
  bool Untouched(size_t at) const {
    static constexpr unsigned char kPoison[4] = {kUntouched, kUntouched, kUntouched, kUntouched};
    return std::memcmp(&values[at], kPoison, sizeof kPoison) == 0;
  }

  void Compare(const Case& c, const Answer& answer, const std::string& where) const {
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
      if (!std::isinf(want) && want < least) want = least;
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
};

AttentionArgs MakeArgs(const Case& c, const Strided& query, const Strided& key, const Strided& value,
                       const Strided& output) {
  AttentionArgs args;
  args.B = c.B, args.H = c.H, args.G = c.G, args.S = c.S, args.T = c.T, args.D = c.D, args.Dv = c.Dv;
  args.dtype = c.dtype;
  args.query = query.data, args.key = key.data, args.value = value.data, args.output = output.data;
  args.query_stride = query.stride, args.key_stride = key.stride, args.value_stride = value.stride;
  args.output_stride = output.stride;
  args.scale = 1.0f / std::sqrt(static_cast<float>(c.D));
  args.softcap = c.softcap;
  args.empty_rows = c.empty_rows;
  args.allow_tf32 = c.tf32;
  args.kernel = c.kernel;
  return args;
}

using Memory = std::unique_ptr<void, void (*)(void*)>;
Memory MakeWorkspace(size_t bytes, int content) {
  Memory memory(std::aligned_alloc(64, std::max<size_t>(64, (bytes + 63) / 64 * 64)), std::free);
  std::memset(memory.get(), content, bytes);
  return memory;
}

void RunCase(const Case& c, CpuIsa isa, uint64_t seed, const Parallel& team) {
  const std::string where = Text("seed ", seed, " ", Describe(c));
  Random random(seed);
  const MaskData data = DrawMask(c, &random);
  BiasTensor bias = DrawBias(c, &random);
  const std::vector<float> relative = DrawRelative(c, &random, &bias.dense);
  Dense dense = DrawDense(c, data, bias, &random);
  if (c.sink) dense.sink = DrawValues(&random, c.dtype, c.H, 4);
  std::vector<char> sink(static_cast<size_t>(c.H * SizeOfFloat(c.dtype)));
  for (size_t h = 0; h < dense.sink.size(); ++h) {
    StoreFloat(c.dtype, dense.sink[h], &sink[h * static_cast<size_t>(SizeOfFloat(c.dtype))]);
  }
  Strided query(c, 0, c.H, c.S, c.D), key(c, 1, c.G, c.T, c.D), value(c, 2, c.G, c.T, c.Dv);
  Strided output(c, 3, c.H, c.S, c.Dv);
  query.Fill(dense.query);
  key.Fill(dense.key);
  value.Fill(dense.value);

  AttentionArgs args = MakeArgs(c, query, key, value, output);
  if (c.pad != Pad::kNone && c.mask != 12) args.pad = data.pad.data();
  if (c.bias != Bias::kNone) {
    args.bias = bias.bytes.data();
    args.bias_dtype = bias.dtype;
    args.bias_stride_b = bias.stride[0], args.bias_stride_h = bias.stride[1];
    args.bias_stride_q = bias.stride[2], args.bias_stride_k = bias.stride[3];
  }
  if (c.relative > 0) {
    args.relative_bias = relative.data();
    args.relative_bias_size = c.relative;
    args.relative_bias_stride_h = c.relative_shared ? 0 : c.relative;
    args.query_position = c.offset ? c.T - c.S : 0;
  }
  if (c.sink) args.sink = sink.data(), args.sink_dtype = c.dtype;
  CpuAttentionConfig config = ChooseCpuAttention(args, team.threads);
  config.isa = isa;
  if (c.m > 0) config.m = c.m;
  if (c.n > 0) config.n = c.n;
  BoundMask bound;
  BindMask(c, data, config, &bound, &args);

  const Answer answer = Attend(dense);
  std::vector<char> first;
  Lse lse(c);
  for (const int threads : {1, 3}) {
    output.Reset();
    lse.Reset();
    // Asked for or not, the output is the same.
    args.lse = threads == 1 || seed % 2 == 0 ? lse.values.data() : nullptr;
    args.lse_stride_b = lse.stride_b, args.lse_stride_h = lse.stride_h;
    // NaN in one run and ordinary numbers in the other: what is found there may not matter.
    const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, threads), threads == 1 ? 0xff : 0x3f);
    const Status status = CpuAttention(args, config, workspace.get(), threads == 1 ? Parallel{} : team);
    CHECK(status.ok(), where, ": ", status.message());
    if (threads == 1) first = output.bytes;
    CHECK(first == output.bytes, where, ": 3 threads give other bits than 1");
    Compare(c, dense, answer, &output, Text(where, " threads ", threads));
    if (args.lse != nullptr) lse.Compare(c, answer, Text(where, " threads ", threads));
  }
}

// ---- the table ----
// Deals the values in a random order, all of them before any comes again.
template <typename T>
class Deck {
 public:
  Deck(std::vector<T> values, Random* random) : values_(std::move(values)), random_(*random) {}
  T Deal() {
    if (next_ == 0) {
      for (size_t i = values_.size(); i > 1; --i) {
        std::swap(values_[i - 1], values_[static_cast<size_t>(random_.Range(0, static_cast<int64_t>(i) - 1))]);
      }
    }
    const T value = values_[next_];
    next_ = (next_ + 1) % values_.size();
    return value;
  }

 private:
  std::vector<T> values_;
  Random& random_;
  size_t next_ = 0;
};

std::vector<Case> DrawnCases(int count) {
  Random random(2024);
  Deck<int64_t> rows({1, 2, 3, 4, 5, 6, 7, 47, 48, 49, 63, 64, 65, 95, 96, 97, 130}, &random);
  Deck<int64_t> keys({1, 15, 16, 17, 63, 64, 65, 129, 300, 0}, &random);  // 0: as many as rows
  Deck<int64_t> sizes({1, 7, 8, 16, 20, 64, 80, 96, 128, 192, 256}, &random);
  Deck<int64_t> value_sizes({0, 0, 0, 1, 5, 8, 16, 24, 64, 72, 128, 256}, &random);  // 0: as D
  Deck<int> groups({0, 1, 2}, &random);
  Deck<int64_t> heads({2, 4, 6}, &random);
  Deck<int64_t> batches({2, 2, 1, 3}, &random);
  Deck<DType> dtypes({DType::kF32, DType::kF32, DType::kF16, DType::kBF16}, &random);
  Deck<Arrangement> arrangements(kArrangements, &random);
  Deck<int> masks({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kAll, Pad::kRandom}, &random);
  Deck<Bias> biases(
      {Bias::kNone, Bias::kNone, Bias::kNone, Bias::kPlain, Bias::kLowest, Bias::kForbids, Bias::kFarBelow}, &random);
  Deck<uint32_t> broadcasts({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, &random);
  Deck<int64_t> relatives({0, 0, 0, 1, 3, 33, 257, 999}, &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}, &random);
  Deck<float> softcaps({0, 0, 0, 2.5f, 30.0f}, &random);
  Deck<float> spreads({1, 1, 4, 30}, &random);
  Deck<Poison> poisons({Poison::kNone, Poison::kForbidden, Poison::kForbidden, Poison::kOneKey}, &random);
  Deck<std::pair<int, int>> tiles({{0, 0}, {0, 0}, {0, 0}, {24, 64}, {48, 32}, {5, 96}, {1, 32}, {64, 128}, {96, 256}},
                                  &random);
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) {
    Case c;
    c.B = batches.Deal();
    c.H = heads.Deal();
    const int group = groups.Deal();
    c.G = group == 0 ? c.H : group == 1 ? c.H / 2 : 1;
    c.S = rows.Deal();
    c.T = keys.Deal();
    if (c.T == 0) c.T = c.S;
    c.D = sizes.Deal();
    c.Dv = value_sizes.Deal();
    if (c.Dv == 0) c.Dv = c.D;
    c.dtype = dtypes.Deal();
    for (Arrangement& arrangement : c.arrangement) arrangement = arrangements.Deal();
    c.offset = c.T >= c.S && random.OneIn(2);
    c.mask = masks.Deal();
    c.pad = pads.Deal();
    c.bias = biases.Deal();
    c.bias_wide = random.OneIn(2);
    if (c.bias != Bias::kNone) c.bias_broadcast = broadcasts.Deal();
    c.relative = relatives.Deal();
    c.relative_shared = random.OneIn(4);
    c.sink = random.OneIn(4);
    c.empty_rows = policies.Deal();
    if (c.sink) c.empty_rows = EmptyRows::kZero;
    c.softcap = softcaps.Deal();
    c.spread = spreads.Deal();
    c.rising = random.OneIn(4);
    // An empty row attends every key under this policy, also those that are forbidden to all.
    c.poison = c.empty_rows == EmptyRows::kAll ? Poison::kNone : poisons.Deal();
    c.shifted = random.OneIn(3);
    std::tie(c.m, c.n) = tiles.Deal();
    cases.push_back(c);
  }
  return cases;
}

// Paths that depend on long inputs, and the extremes of each column.
std::vector<Case> ListedCases() {
  std::vector<Case> cases;
  const auto add = [&cases](int64_t H, int64_t G, int64_t S, int64_t T, int64_t D, int64_t Dv) -> Case& {
    Case c;
    c.H = H, c.G = G, c.S = S, c.T = T, c.D = D, c.Dv = Dv;
    cases.push_back(c);
    return cases.back();
  };
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    // A few queries against many keys, whose parts are joined: several heads per key head, and one.
    Case* c = &add(4, 1, 1, 2100, 20, 24);
    c->dtype = dtype, c->pad = Pad::kLeft, c->rising = true;
    c = &add(4, 2, 4, 1030, 64, 64);
    c->dtype = dtype, c->offset = true, c->mask = 4, c->pad = Pad::kRandom, c->poison = Poison::kForbidden;
    c = &add(2, 2, 2, 4200, 16, 16);
    c->dtype = dtype, c->B = 1, c->bias = Bias::kForbids, c->bias_broadcast = 4;
    // Keys that no cache holds are packed beforehand.
    c = &add(2, 1, 7, 640, 256, 40);
    c->dtype = dtype, c->mask = 3, c->empty_rows = EmptyRows::kAll, c->pad = Pad::kAll;
    c = &add(2, 2, 97, 640, 256, 256);
    c->dtype = dtype, c->B = 1, c->rising = true, c->softcap = 30;
    c = &add(2, 1, 65, 300, 24, 24);
    c->dtype = dtype, c->bias = Bias::kFarBelow, c->bias_wide = true, c->bias_broadcast = 3, c->spread = 4;
    c = &add(2, 2, 2, 300, 24, 24);
    c->dtype = dtype, c->bias = Bias::kFarBelow, c->bias_wide = true, c->spread = 4;
    c = &add(4, 2, 130, 300, 16, 16);
    c->dtype = dtype, c->relative = 65, c->offset = true, c->mask = 4, c->pad = Pad::kLeft, c->sink = true;
    c = &add(4, 2, 3, 600, 16, 16);
    c->dtype = dtype, c->relative = 1199, c->offset = true, c->sink = true, c->spread = 30;
    // The largest head against the smallest.
    c = &add(4, 2, 49, 65, 256, 1);
    c->dtype = dtype, c->mask = 1;
    c = &add(4, 4, 49, 65, 1, 256);
    c->dtype = dtype, c->mask = 2;
    for (const EmptyRows policy : {EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}) {
      // No key for any row: by the static mask, by padding, by the bias; and long ones, whose mean is a long sum.
      c = &add(4, 2, 97, 97, 20, 20);
      c->dtype = dtype, c->mask = 13, c->empty_rows = policy;
      c = &add(4, 4, 6, 300, 16, 24);
      c->dtype = dtype, c->pad = Pad::kAll, c->mask = 5, c->empty_rows = policy;
      c = &add(2, 1, 3, 1500, 8, 8);
      c->dtype = dtype, c->pad = Pad::kAll, c->empty_rows = policy;
      c = &add(2, 2, 64, 129, 64, 64);
      c->dtype = dtype, c->bias = Bias::kForbids, c->bias_broadcast = 8, c->empty_rows = policy;
      // Every score absorbed by the lowest number: such a row has keys, and averages them.
      c = &add(2, 2, 13, 129, 16, 16);
      c->dtype = dtype, c->bias = Bias::kLowest, c->bias_broadcast = 8, c->empty_rows = policy;
    }
  }
  for (int mask = 0; mask < kMasks; ++mask) {
    // Every mask on several tiles, queries before and at the end of the keys, with keys that nobody may look at.
    Case* c = &add(4, 2, 130, 300, 16, 16);
    c->mask = mask, c->poison = Poison::kForbidden, c->offset = true;
    c = &add(2, 2, 97, 65, 24, 8);
    c->mask = mask, c->poison = Poison::kForbidden, c->pad = Pad::kRight, c->empty_rows = EmptyRows::kMean;
    c = &add(4, 1, 3, 129, 80, 80);
    c->mask = mask, c->poison = Poison::kForbidden, c->pad = Pad::kLeft, c->softcap = 2.5f, c->offset = true;
  }
  return cases;
}

// Every listed case and a share of the drawn ones.
void RunTable(CpuIsa isa) {
  ThreadPool pool(3);
  std::vector<Case> cases = ListedCases();
  const std::vector<Case> drawn = DrawnCases(Cases(300));
  cases.insert(cases.end(), drawn.begin(), drawn.end());
  const size_t step = Effort() < 0.1 ? 5 : 1;
  for (size_t i = 0; i < cases.size(); i += step) {
    RunCase(cases[i], isa, i, pool.view());
    CountCases(1);
  }
}

// Two keys of equal scores: the output is the mean of two numbers, exact in fp32 and in every second case halfway
// between two of the half type. No tolerance would see on which side a kernel comes down.
void RoundHalves(CpuIsa isa) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int64_t rows : {1, 5, 30}) {
      Case c;
      c.B = 1, c.S = rows, c.T = 2, c.Dv = 72, c.dtype = dtype;
      Random random(static_cast<uint64_t>(rows));
      Dense dense = DrawDense(c, DrawMask(c, &random), BiasTensor(), &random);
      for (size_t i = 0; i < dense.key.size(); ++i) {
        if (static_cast<int64_t>(i) / c.D % c.T == 1) dense.key[i] = dense.key[i - static_cast<size_t>(c.D)];
      }
      Strided query(c, 0, c.H, c.S, c.D), key(c, 1, c.G, c.T, c.D), value(c, 2, c.G, c.T, c.Dv);
      Strided output(c, 3, c.H, c.S, c.Dv);
      query.Fill(dense.query);
      key.Fill(dense.key);
      value.Fill(dense.value);
      const AttentionArgs args = MakeArgs(c, query, key, value, output);
      CpuAttentionConfig config = ChooseCpuAttention(args, 1);
      config.isa = isa;
      const Memory workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, 1), 0xff);
      CHECK(CpuAttention(args, config, workspace.get(), Parallel{}).ok());
      output.ForEach([&](char* at, size_t i) {
        const size_t pair =
            i / static_cast<size_t>(c.S * c.Dv) * static_cast<size_t>(c.T * c.Dv) + i % static_cast<size_t>(c.Dv);
        const double mean = (dense.value[pair] + dense.value[pair + static_cast<size_t>(c.Dv)]) / 2;
        const double got = LoadFloat(dtype, at), want = Rounded(dtype, mean);
        CHECK(got == want, "dtype ", static_cast<int>(dtype), " rows ", rows, ": ", got, ", expected ", want, " for ",
              mean);
      });
      CountCases(c.H * c.S * c.Dv);
    }
  }
}

#ifdef STOF_WITH_CUDA
void* Allocate(void* self, size_t bytes) {
  void* block = nullptr;
  if (cudaMalloc(&block, bytes) != cudaSuccess) return nullptr;
  static_cast<std::vector<void*>*>(self)->push_back(block);
  return block;
}

// What a run is given, counted as runtimes do that plan memory ahead.
struct Counted {
  std::vector<void*>* blocks;
  size_t bytes = 0;
  static void* Take(void* self, size_t bytes) {
    auto* own = static_cast<Counted*>(self);
    own->bytes += (bytes + 63) / 64 * 64;
    return Allocate(own->blocks, bytes);
  }
};

// Memory of a tensor on the device, each with `shift` bytes before it as on the host.
void* OnDevice(std::vector<void*>* blocks, const void* from, size_t bytes) {
  void* block = Allocate(blocks, std::max<size_t>(bytes, 16));
  CHECK(block != nullptr, "no device memory");
  CHECK(cudaMemcpy(block, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
  return block;
}

// The vectors and tables that a case's mask may read, on the device.
Tables OperandsOnDevice(const Case& c, const MaskData& data, std::vector<void*>* blocks) {
  Tables operands;
  const auto add = [&](const char* name, const auto& values, DType dtype, std::initializer_list<int64_t> dims) {
    operands.emplace_back(name,
                          Describe(OnDevice(blocks, values.data(), values.size() * sizeof(values[0])), dtype, dims));
  };
  if (c.mask == 6) add("table0", data.head_keys, DType::kBool, {c.H, c.T});
  if (c.mask == 7) add("table0", data.pairs, DType::kU8, {c.S, c.T});
  if (c.mask == 8) add("table0", data.head_tiles, DType::kBool, {c.H, (c.S + 15) / 16, (c.T + 31) / 32});
  add("segment_q", data.segment_q, DType::kI32, {c.B, c.S});
  add("segment_k", data.segment_k, DType::kI64, {c.B, c.T});
  add("lengths", data.lengths, DType::kI64, {c.B});
  add("pad", data.pad, DType::kBool, {c.pad_shared ? 1 : c.B, c.T});
  return operands;
}

// Cases whose outputs with allow_tf32 differ from those without.
int64_t rounded_otherwise = 0;

// kernels: those for compute capability 9.0 to take, by turns; -1: the one that is chosen.
void RunOnCuda(const Case& c, uint64_t seed, const std::vector<int>& kernels) {
  const std::string description = Text("cuda, seed ", seed, " ", Describe(c));
  Random random(seed);
  const MaskData data = DrawMask(c, &random);
  BiasTensor bias = DrawBias(c, &random);
  const std::vector<float> relative = DrawRelative(c, &random, &bias.dense);
  Dense dense = DrawDense(c, data, bias, &random);
  if (c.sink) dense.sink = DrawValues(&random, c.dtype, c.H, 4);
  std::vector<char> sink(static_cast<size_t>(c.H * SizeOfFloat(c.dtype)));
  for (size_t h = 0; h < dense.sink.size(); ++h) {
    StoreFloat(c.dtype, dense.sink[h], &sink[h * static_cast<size_t>(SizeOfFloat(c.dtype))]);
  }
  Strided query(c, 0, c.H, c.S, c.D), key(c, 1, c.G, c.T, c.D), value(c, 2, c.G, c.T, c.Dv);
  Strided output(c, 3, c.H, c.S, c.Dv);
  query.Fill(dense.query);
  key.Fill(dense.key);
  value.Fill(dense.value);
  if (c.wild && c.mask != 12 && c.empty_rows <= EmptyRows::kNan) {
    value.ForEach([&](char* at, size_t i) {
      const int64_t row = static_cast<int64_t>(i) / c.Dv;
      if (data.pad[static_cast<size_t>(row / c.T / c.G * c.T + row % c.T)] == 0) StoreFloat(c.dtype, 1e30, at);
    });
  }
  AttentionArgs args = MakeArgs(c, query, key, value, output);
  std::vector<void*> blocks;
  const auto upload = [&blocks](const Strided& tensor) {
    return static_cast<char*>(OnDevice(&blocks, tensor.bytes.data(), tensor.bytes.size())) +
           (tensor.data - tensor.bytes.data());
  };
  args.query = upload(query), args.key = upload(key), args.value = upload(value);
  args.output = upload(output);
  char* const output_bytes = static_cast<char*>(args.output) - (output.data - output.bytes.data());
  if (c.bias != Bias::kNone) {
    args.bias = OnDevice(&blocks, bias.bytes.data(), bias.bytes.size());
    args.bias_dtype = bias.dtype;
    args.bias_stride_b = bias.stride[0], args.bias_stride_h = bias.stride[1];
    args.bias_stride_q = bias.stride[2], args.bias_stride_k = bias.stride[3];
  }
  if (c.relative > 0) {
    args.relative_bias = static_cast<float*>(OnDevice(&blocks, relative.data(), relative.size() * sizeof(float)));
    args.relative_bias_size = c.relative;
    args.relative_bias_stride_h = c.relative_shared ? 0 : c.relative;
  }
  args.query_position = c.offset ? c.T - c.S : 0;
  if (c.sink) args.sink = OnDevice(&blocks, sink.data(), sink.size()), args.sink_dtype = c.dtype;
  Tensor pad = Describe(data.pad.data(), DType::kBool, {c.pad_shared ? 1 : c.B, c.T});
  const bool padded = c.pad != Pad::kNone && c.mask != 12;
  if (padded) pad.data = OnDevice(&blocks, data.pad.data(), data.pad.size());
  AttentionMask mask;
  BoundMask bound;
  AttentionArgs host;
  CpuAttentionConfig config;
  config.m = 128, config.n = 64;
  BindMask(c, data, config, &bound, &host);
  mask.parts = bound.parts;
  // Cases differ in their tables; the seed keeps their masks apart in the cache.
  mask.fixed_hash = mask.parts.fixed.empty() ? 0 : mask.parts.fixed.Hash() ^ (seed << 32);
  ExprSizes sizes = {c.B, c.H, c.S, c.T, c.offset ? c.T - c.S : 0};
  // As the operator does where the mask comes apart by remainders.
  std::shared_ptr<const AttentionMask> residues;
  if (c.mask >= 14 && !mask.parts.pad) CHECK(MakeAttentionMask(MaskText(c.mask), {}, &residues).ok());
  const bool split = residues != nullptr && SplitByResidue(*residues, &args, &sizes);
  if (split) mask.parts = residues->of_residue->parts, mask.fixed_hash = residues->of_residue->fixed_hash;
  RunContext context;
  context.on_cuda = true;
  Counted counted{&blocks};
  context.allocate = Counted::Take;
  context.self = &counted;
  const Tables operands = OperandsOnDevice(c, data, &blocks);
  size_t planned = 0;
  const Status sized = PlanCudaAttention(args, padded, mask, sizes, operands, &planned);
  CHECK(sized.ok(), description, ": ", sized.message());
  const Answer answer = Attend(dense);
  struct Chosen {
    ~Chosen() { cuda::TakeKernel(-1); }
  };
  const Chosen chosen;
  const std::vector<char> poison = output.bytes;
  std::vector<char> first;
  Lse lse(c);
  auto* const device_lse = static_cast<float*>(OnDevice(&blocks, lse.values.data(), lse.bytes()));
  args.lse_stride_b = lse.stride_b, args.lse_stride_h = lse.stride_h;
  for (size_t run = 0; run < 2 * kernels.size(); ++run) {
    const int kernel = kernels[run / 2], repeat = static_cast<int>(run % 2);
    cuda::TakeKernel(kernel);
    const std::string where = Text(description, ", kernel ", kernel);
    if (repeat == 0) {
      CHECK(cudaMemcpy(output_bytes, poison.data(), poison.size(), cudaMemcpyHostToDevice) == cudaSuccess);
    }
    // Asked for in one of two runs, whose outputs are the same.
    const bool asked = !split && (repeat == 0) == (seed % 2 == 0);
    args.lse = asked ? device_lse : nullptr;
    lse.Reset();
    CHECK(cudaMemcpy(device_lse, lse.values.data(), lse.bytes(), cudaMemcpyHostToDevice) == cudaSuccess);
    counted.bytes = 0;
    const Status status = FindCudaBackend()->attention(args, padded ? &pad : nullptr, mask, sizes, operands, context);
    CHECK(status.ok(), where, ": ", status.message());
    CHECK(counted.bytes <= planned, where, ": ", counted.bytes, " bytes of memory, planned were ", planned);
    output.Reset();
    const cudaError_t error =
        cudaMemcpy(output.bytes.data(), output_bytes, output.bytes.size(), cudaMemcpyDeviceToHost);
    CHECK(error == cudaSuccess, where, ": ", cudaGetErrorString(error));
    if (repeat == 0) first = output.bytes;
    CHECK(first == output.bytes, where, ": a second run gives other bits");
    Compare(c, dense, answer, &output, where);
    if (!asked) continue;
    CHECK(cudaMemcpy(lse.values.data(), device_lse, lse.bytes(), cudaMemcpyDeviceToHost) == cudaSuccess, where);
    lse.Compare(c, answer, where);
  }
  args.lse = nullptr;
  if (c.tf32) {
    args.allow_tf32 = false;
    const Status status = FindCudaBackend()->attention(args, padded ? &pad : nullptr, mask, sizes, operands, context);
    CHECK(status.ok(), description, ": ", status.message());
    std::vector<char> exact(first.size());
    CHECK(cudaMemcpy(exact.data(), output_bytes, exact.size(), cudaMemcpyDeviceToHost) == cudaSuccess, description);
    if (exact != first) ++rounded_otherwise;
  }
  for (void* block : blocks) cudaFree(block);
}

std::vector<Case> CudaCases() {
  std::vector<Case> cases = ListedCases();
  const std::vector<Case> drawn = DrawnCases(Cases(600));
  cases.insert(cases.end(), drawn.begin(), drawn.end());
  for (size_t i = 0; i < cases.size(); ++i) {
    Case& c = cases[i];
    c.cuda = true;
    c.shifted = false;
    c.pad_shared = i % 4 == 1;
    if (c.dtype == DType::kF32) c.dtype = i % 2 == 0 ? DType::kF16 : DType::kBF16;
    // Scores of half types stay in their range.
    c.spread = std::min(c.spread, 8.0f);
    c.D = (c.D + 7) / 8 * 8;
    c.Dv = (c.Dv + 7) / 8 * 8;
  }
  return cases;
}

void RunCudaCases(const std::vector<Case>& cases, const std::vector<int>& kernels) {
  int devices = 0;
  CHECK(cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0, "no CUDA device");
  int64_t ran = 0;
  const char* only = std::getenv("STOF_CASE");      // a seed, to repeat one
  const char* sample = std::getenv("STOF_SAMPLE");  // n: every n-th, for slow tools
  const size_t step = sample == nullptr ? 1 : std::max<size_t>(1, std::strtoull(sample, nullptr, 10));
  // The first few failures say more than the first; none can be told from another once the device has failed.
  constexpr int kShown = 4;
  std::string failures;
  int64_t failed = 0;
  for (size_t i = 0; i < cases.size(); i += step) {
    if (only != nullptr && std::strtoull(only, nullptr, 10) != i) continue;
    ++ran;
    try {
      RunOnCuda(cases[i], i, kernels);
    } catch (const Failure& failure) {
      if (++failed <= kShown) failures += "\n  " + failure.message;
      if (cudaDeviceSynchronize() != cudaSuccess) break;
    }
  }
  CountCases(ran);
  CHECK(failed == 0, failed, " of ", ran, " cases failed, the first:", failures);
}

void Cuda() { RunCudaCases(CudaCases(), {-1}); }

// Every case as fp32 has it, of all head sizes and alignments, and lengths around the kernel's tiles.
std::vector<Case> CudaFp32Cases() {
  std::vector<Case> cases = ListedCases();
  const std::vector<Case> drawn = DrawnCases(Cases(400));
  cases.insert(cases.end(), drawn.begin(), drawn.end());
  for (Case& c : cases) c.dtype = DType::kF32;
  int64_t turn = 0;
  for (const int64_t size : {24, 32, 64, 72, 96, 128, 160, 192, 256}) {
    for (const int64_t length : {63, 64, 65, 127, 129, 200, 321}) {
      Case c;
      c.S = length, c.T = length + turn % 3 * 64, c.D = c.Dv = size, c.G = turn % 2 == 0 ? 4 : 2;
      c.mask = static_cast<int>(turn % 10);
      c.pad = static_cast<Pad>(turn % 5);
      c.empty_rows = static_cast<EmptyRows>(turn % 4);
      c.wild = turn % 4 < 2;
      c.softcap = turn % 7 == 6 ? 30.0f : 0.0f;
      c.sink = c.empty_rows == EmptyRows::kZero;
      cases.push_back(c);
      ++turn;
    }
  }
  for (Case& c : cases) c.cuda = true;
  return cases;
}

void CudaFp32() { RunCudaCases(CudaFp32Cases(), {-1}); }

// The row-wise kernel, of all types.
void CudaRows() {
  std::vector<Case> cases = CudaCases();
  for (Case& c : CudaFp32Cases()) {
    if (c.wild || c.D % 4 != 0 || c.Dv % 4 != 0) continue;
    cases.push_back(c);
  }
  for (Case& c : cases) c.kernel = "rows";
  RunCudaCases(cases, {-1});
}

void CudaTf32() {
  std::vector<Case> cases = CudaFp32Cases();
  for (Case& c : cases) c.tf32 = true, c.wild = false;
  rounded_otherwise = 0;
  RunCudaCases(cases, {-1});
  // Not of few queries, nor of rows with one key or none.
  const char* sample = std::getenv("STOF_SAMPLE");
  const int64_t ran = static_cast<int64_t>(cases.size()) / std::max(1, sample == nullptr ? 1 : std::atoi(sample));
  CHECK(std::getenv("STOF_CASE") != nullptr || rounded_otherwise >= ran / 3, rounded_otherwise, " of ", ran,
        " cases are rounded otherwise than without allow_tf32");
}

// The numbers of a list's first kernels, or the one that STOF_CUDA_KERNEL says.
std::vector<int> FirstKernels(int count) {
  std::vector<int> kernels;
  const char* only = std::getenv("STOF_CUDA_KERNEL");
  for (int kernel = 0; kernel < count; ++kernel) {
    if (only == nullptr || std::atoi(only) == kernel) kernels.push_back(kernel);
  }
  return kernels;
}

// Few queries: every type and feature, groups of heads, and keys enough for several CTAs to share them. By the
// selector's choice and by every kind of kernel.
void CudaDecode() {
  Random random(77);
  Deck<int64_t> queries({1, 1, 1, 2, 3, 4, 7, 8, 13, 16}, &random);
  Deck<int64_t> keys({16, 17, 31, 63, 64, 65, 129, 700, 1500, 3001}, &random);
  Deck<int64_t> sizes({8, 40, 64, 72, 128, 128, 200, 256}, &random);
  Deck<std::pair<int64_t, int64_t>> heads({{8, 8}, {8, 2}, {8, 1}, {6, 2}, {2, 2}}, &random);
  Deck<DType> dtypes({DType::kF16, DType::kBF16, DType::kF32}, &random);
  Deck<Arrangement> arrangements(kArrangements, &random);
  Deck<int> masks({0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kAll, Pad::kRandom}, &random);
  Deck<Bias> biases({Bias::kNone, Bias::kNone, Bias::kNone, Bias::kPlain, Bias::kLowest, Bias::kForbids}, &random);
  Deck<int64_t> relatives({0, 0, 0, 33, 999}, &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}, &random);
  Deck<float> softcaps({0, 0, 0, 30.0f}, &random);
  std::vector<Case> cases;
  for (int i = 0; i < Cases(360); ++i) {
    Case c;
    c.B = random.Range(1, 2);
    std::tie(c.H, c.G) = heads.Deal();
    c.S = queries.Deal(), c.T = keys.Deal();
    c.D = c.Dv = sizes.Deal();
    if (random.OneIn(4)) c.Dv = sizes.Deal();
    c.dtype = dtypes.Deal();
    for (Arrangement& arrangement : c.arrangement) arrangement = arrangements.Deal();
    c.offset = !random.OneIn(3);
    c.mask = masks.Deal();
    c.pad = pads.Deal();
    c.bias = biases.Deal();
    c.bias_wide = random.OneIn(2);
    if (c.bias != Bias::kNone) c.bias_broadcast = static_cast<uint32_t>(random.Range(0, 15));
    c.relative = relatives.Deal();
    c.sink = random.OneIn(4);
    c.empty_rows = c.sink ? EmptyRows::kZero : policies.Deal();
    c.softcap = softcaps.Deal();
    c.spread = random.OneIn(3) ? 4.0f : 1.0f;
    c.rising = random.OneIn(4);
    if (c.empty_rows != EmptyRows::kAll && random.OneIn(2)) c.poison = Poison::kForbidden;
    c.cuda = true;
    cases.push_back(c);
  }
  std::vector<int> kinds = FirstKernels(2);
  if (kinds.size() > 1) kinds.push_back(-1);
  RunCudaCases(cases, kinds);
}

// The kernels for compute capability 9.0, each in all cases that they take, wider heads and more rows than there are
// workers among them. STOF_CUDA_KERNEL=0 and so on takes one of them.
void CudaSm90() {
  std::vector<Case> cases;
  for (Case c : CudaCases()) {
    if (c.bias != Bias::kNone || c.relative > 0 || c.softcap > 0) continue;
    const int64_t wider = cases.size() % 2 == 0 ? 32 : 64;
    if (std::max(c.D, c.Dv) <= 32) c.D += wider, c.Dv += wider;
    cases.push_back(c);
  }
  for (const int mask : {0, 1, 2, 3, 4, 5, 10, 11, 12}) {
    for (const int64_t size : {64, 128}) {
      Case c;
      c.B = 3, c.H = 48, c.G = 16, c.S = 300, c.T = 300 + 10 * mask, c.D = c.Dv = size;
      c.dtype = mask % 2 == 0 ? DType::kF16 : DType::kBF16;
      c.cuda = true;
      c.mask = mask;
      c.pad = mask % 3 == 1 ? Pad::kLeft : mask % 3 == 2 ? Pad::kRandom : Pad::kNone;
      c.empty_rows = static_cast<EmptyRows>(mask % 4);
      cases.push_back(c);
      if (mask > 4) continue;
      c.B = 1, c.H = 4, c.G = 2, c.T = 700;
      c.deep = true;
      cases.push_back(c);
    }
  }
  RunCudaCases(cases, FirstKernels(10));
}

// Long rows of few queries, which the kernels with one warpgroup a worker take in parts and join: every policy, padding
// that leaves parts nothing, sinks, sums of logarithms, heads that are smaller than a tile's.
void CudaSm90Parts() {
  Random random(61);
  Deck<int64_t> rows({17, 63, 64, 65, 130, 193}, &random);
  Deck<int64_t> keys({1024, 1025, 1100, 1537, 2500, 3333}, &random);
  Deck<int64_t> sizes({64, 128, 40, 96}, &random);
  Deck<int> masks({1, 5, 6, 7, 8, 9, 15}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kAll, Pad::kRandom}, &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}, &random);
  Deck<Arrangement> arrangements(kArrangements, &random);
  std::vector<Case> cases;
  int64_t cut = 0;
  for (int i = 0; i < Cases(48); ++i) {
    Case c;
    c.B = random.Range(1, 2), c.G = random.OneIn(2) ? 2 : 4;
    c.S = rows.Deal(), c.T = keys.Deal(), c.D = c.Dv = sizes.Deal();
    c.dtype = i % 2 == 0 ? DType::kF16 : DType::kBF16;
    for (Arrangement& arrangement : c.arrangement) arrangement = arrangements.Deal();
    c.mask = masks.Deal(), c.pad = pads.Deal();
    c.offset = c.mask != 5;
    c.sink = random.OneIn(4);
    c.empty_rows = c.sink ? EmptyRows::kZero : policies.Deal();
    c.rising = random.OneIn(3), c.spread = random.OneIn(3) ? 4.0f : 1.0f;
    if (c.empty_rows != EmptyRows::kAll && random.OneIn(2)) c.poison = Poison::kForbidden;
    c.cuda = true;
    cases.push_back(c);
    // Whether there is something to join.
    Random drawn(cases.size() - 1);
    const MaskData data = DrawMask(c, &drawn);
    BoundMask bound;
    AttentionArgs args;
    CpuAttentionConfig config;
    config.m = 64, config.n = 64;
    BindMask(c, data, config, &bound, &args);
    if (args.mask == nullptr) continue;
    const cuda::TileCost cost = {3000, 1200, 1400, 1, 0, true};
    cut += cuda::PlanWork(bound.block, cuda::WalkOf(bound.block), c.B, c.H, 264, c.H, cost).parts() > 1 ? 1 : 0;
  }
  CHECK(cut * 4 >= static_cast<int64_t>(cases.size()) * 3, cut, " of ", cases.size(), " cases have rows in parts");
  RunCudaCases(cases, {3, 4, 5, 9, -1});
}

// Runs with parts that share one workspace, one behind the other without a word from the host, and as a graph: each
// kernel may start while the one in front of it ends, and must not write what that still reads.
void CudaSm90PartsInTurn() {
  constexpr int64_t kHeads = 6, kRows = 130, kKeys = 4096, kRuns = 8;
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  std::vector<void*> blocks;
  Random random(67);
  // One block for all runs.
  struct Shared {
    char* at;
    size_t size, taken;
    static void* Take(void* self, size_t bytes) {
      auto* own = static_cast<Shared*>(self);
      own->taken = std::max(own->taken, bytes);
      return bytes <= own->size ? own->at : nullptr;
    }
  };
  Shared shared{static_cast<char*>(Allocate(&blocks, size_t{32} << 20)), size_t{32} << 20, 0};
  std::shared_ptr<const AttentionMask> mask;
  CHECK(MakeAttentionMask("k <= q + 3900", {}, &mask).ok());
  const ExprSizes sizes = {1, kHeads, kRows, kKeys, 0};
  int64_t cases = 0;
  for (const auto& [size, kernel] : {std::pair<int64_t, int>(64, 5), {128, 3}}) {
    const int64_t outputs = kHeads * kRows * size;
    const auto halves = [&](int64_t count) {
      std::vector<uint16_t> values(static_cast<size_t>(count));
      for (uint16_t& x : values)
        x = static_cast<uint16_t>(random.Range(0, 1) << 15 | random.Range(10, 15) << 10 | random.Range(0, 1023));
      return OnDevice(&blocks, values.data(), values.size() * 2);
    };
    AttentionArgs args;
    args.B = 1, args.H = args.G = kHeads, args.S = kRows, args.T = kKeys, args.D = args.Dv = size;
    args.dtype = DType::kF16;
    args.scale = 0.125f;
    args.query_stride = args.output_stride = {kHeads * kRows * size, kRows * size, size};
    args.key_stride = args.value_stride = {kHeads * kKeys * size, kKeys * size, size};
    std::vector<AttentionArgs> runs;
    for (int64_t i = 0; i < kRuns; ++i) {
      args.query = halves(outputs), args.key = halves(kHeads * kKeys * size),
      args.value = halves(kHeads * kKeys * size);
      args.output = Allocate(&blocks, static_cast<size_t>(2 * outputs));
      runs.push_back(args);
    }
    const auto clear = [&] {
      for (const AttentionArgs& run : runs) {
        CHECK(cudaMemsetAsync(run.output, 0xff, static_cast<size_t>(2 * outputs), stream) == cudaSuccess);
      }
    };
    const auto queue = [&](const AttentionArgs& run) {
      RunContext context;
      context.on_cuda = true;
      context.stream = stream;
      context.allocate = Shared::Take;
      context.self = &shared;
      const Status status = FindCudaBackend()->attention(run, nullptr, *mask, sizes, {}, context);
      CHECK(status.ok(), status.message());
    };
    const auto results = [&] {
      CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
      std::vector<std::vector<uint16_t>> all;
      for (const AttentionArgs& run : runs) {
        all.emplace_back(static_cast<size_t>(outputs));
        CHECK(cudaMemcpy(all.back().data(), run.output, all.back().size() * 2, cudaMemcpyDeviceToHost) == cudaSuccess);
      }
      return all;
    };
    struct Chosen {
      explicit Chosen(int kernel) { cuda::TakeKernel(kernel); }
      ~Chosen() { cuda::TakeKernel(-1); }
    };
    const Chosen chosen(kernel);
    shared.taken = 0;
    clear();
    for (const AttentionArgs& run : runs) {
      queue(run);
      CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    }
    const auto alone = results();
    CHECK(shared.taken > 0, "head size ", size, ": no rows in parts");
    for (size_t i = 0; i < alone.size(); ++i) {
      CHECK(std::count(alone[i].begin(), alone[i].end(), uint16_t{0xffff}) == 0, "run ", i, " leaves some outputs out");
      CHECK(i == 0 || alone[i] != alone[0], "run ", i, " gives what the first gives");
    }
    clear();
    for (const AttentionArgs& run : runs) queue(run);
    CHECK(results() == alone, "head size ", size, ": runs without a wait between them give other results");
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t instance = nullptr;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    for (const AttentionArgs& run : runs) queue(run);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&instance, graph, 0) == cudaSuccess);
    for (int replay = 0; replay < 20; ++replay) {
      clear();
      CHECK(cudaGraphLaunch(instance, stream) == cudaSuccess);
      CHECK(cudaGraphLaunch(instance, stream) == cudaSuccess);
      CHECK(results() == alone, "head size ", size, ": replay ", replay, " gives other results");
      ++cases;
    }
    cudaGraphExecDestroy(instance);
    cudaGraphDestroy(graph);
  }
  for (void* block : blocks) cudaFree(block);
  cudaStreamDestroy(stream);
  CountCases(cases);
}

// Their variant for softcap and biases: what the table has of these, and biases whose rows begin at multiples of 16
// bytes, of every type, broadcast over each axis but the keys', with tiles that have bits, are padded or end the keys.
void CudaSm90Extras() {
  std::vector<Case> cases;
  for (Case c : CudaCases()) {
    if (c.bias == Bias::kNone && c.relative == 0 && c.softcap == 0) continue;
    const int64_t wider = cases.size() % 2 == 0 ? 40 : 64;
    if (std::max(c.D, c.Dv) <= 32) c.D += wider, c.Dv += wider;
    if (cases.size() % 3 == 0) c.T = (c.T + 15) / 8 * 8, c.offset = false;
    cases.push_back(c);
  }
  Random random(90);
  Deck<Bias> biases({Bias::kNone, Bias::kPlain, Bias::kLowest, Bias::kForbids, Bias::kFarBelow}, &random);
  Deck<uint32_t> broadcasts({0, 1, 2, 3, 4, 5, 6, 7}, &random);
  Deck<int64_t> relatives({0, 0, 1, 65, 999}, &random);
  Deck<int64_t> rows({63, 64, 65, 130, 193, 300}, &random);
  Deck<int64_t> keys({64, 72, 128, 200, 296, 448}, &random);
  Deck<int64_t> sizes({64, 128, 96, 40}, &random);
  Deck<int> masks({0, 1, 2, 3, 4, 6, 8, 9, 10, 13}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kAll, Pad::kRandom}, &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}, &random);
  Deck<float> softcaps({0, 0, 2.5f, 30.0f}, &random);
  for (int i = 0; i < Cases(160); ++i) {
    Case c;
    c.bias = biases.Deal(), c.bias_broadcast = broadcasts.Deal(), c.bias_wide = random.OneIn(3);
    c.relative = relatives.Deal(), c.relative_shared = random.OneIn(3);
    c.S = rows.Deal(), c.T = keys.Deal(), c.D = c.Dv = sizes.Deal();
    c.G = random.OneIn(2) ? 2 : 4;
    c.dtype = random.OneIn(2) ? DType::kF16 : DType::kBF16;
    c.mask = masks.Deal(), c.pad = pads.Deal(), c.softcap = softcaps.Deal();
    c.offset = c.T >= c.S && random.OneIn(2);
    c.sink = random.OneIn(4);
    c.empty_rows = c.sink ? EmptyRows::kZero : policies.Deal();
    c.rising = random.OneIn(4);
    if (c.empty_rows != EmptyRows::kAll && random.OneIn(2)) c.poison = Poison::kForbidden;
    c.cuda = true;
    cases.push_back(c);
  }
  for (const int64_t size : {64, 128}) {
    // More rows of tiles than workers.
    Case c;
    c.B = 3, c.H = 48, c.G = 16, c.S = 300, c.T = 304, c.D = c.Dv = size, c.mask = 1;
    c.bias = Bias::kForbids, c.bias_broadcast = 1, c.relative = 65, c.dtype = DType::kF16, c.cuda = true;
    cases.push_back(c);
  }
  RunCudaCases(cases, FirstKernels(2));
}

TEST(CudaAttentionEqualsTheDefinition) { Cuda(); }
TEST(CudaFp32EqualsTheDefinition) { CudaFp32(); }
TEST(CudaTf32EqualsTheDefinition) { CudaTf32(); }
TEST(CudaRowsEqualTheDefinition) { CudaRows(); }
TEST(CudaDecodeEqualsTheDefinition) { CudaDecode(); }
TEST(CudaAttentionSm90) { CudaSm90(); }
TEST(CudaExtrasSm90) { CudaSm90Extras(); }
TEST(CudaPartsSm90) { CudaSm90Parts(); }
TEST(CudaPartsSm90InTurn) { CudaSm90PartsInTurn(); }
#endif  // STOF_WITH_CUDA

void Portable() { RunTable(CpuIsa::kPortable); }
void Avx2() { RunTable(CpuIsa::kAvx2); }
void Avx512() { RunTable(CpuIsa::kAvx512); }
void PortableHalves() { RoundHalves(CpuIsa::kPortable); }
void Avx2Halves() { RoundHalves(CpuIsa::kAvx2); }
void Avx512Halves() { RoundHalves(CpuIsa::kAvx512); }

// Rows of the report for each instruction set at hand.
const bool registered = [] {
  static constexpr Test kRows[][2] = {
      {{"AttentionEqualsTheDefinition[portable]", Portable}, {"AttentionRoundsHalvesToEven[portable]", PortableHalves}},
      {{"AttentionEqualsTheDefinition[avx2]", Avx2}, {"AttentionRoundsHalvesToEven[avx2]", Avx2Halves}},
      {{"AttentionEqualsTheDefinition[avx512]", Avx512}, {"AttentionRoundsHalvesToEven[avx512]", Avx512Halves}}};
  for (int isa = 0; isa <= static_cast<int>(BestCpuIsa()); ++isa) {
    AllTests().insert(AllTests().end(), std::begin(kRows[isa]), std::end(kRows[isa]));
  }
  return true;
}();

}  // namespace
}  // namespace stof::test
