// SPDX-License-Identifier: Apache-2.0
// Random attention problems for kernel tests on the CPU and on a GPU: cases, their masks, tensors and biases, and the
// comparison of a kernel with the definition. Cases are sampled from decks: every value of every column of the table
// occurs, in combinations that the seed chooses. A list covers paths that random cases may miss.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/mask/attention_mask.h"
#include "plugins/core/mask/block_mask_builder.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"

namespace stof::test::attention {

// kGaps: strides are larger than needed. kPacked: as kBSHD, with other heads before and behind in each row.
enum class Arrangement { kBHSD, kBSHD, kGaps, kPacked };
inline const std::vector<Arrangement> kArrangements = {Arrangement::kBHSD, Arrangement::kBSHD, Arrangement::kGaps,
                                                       Arrangement::kPacked};
enum class Pad { kNone, kLeft, kRight, kAll, kRandom };
// kLowest: some entries, and whole rows, are the lowest finite number; kForbids: -inf; kFarBelow: the first keys have
// -10000, so that the row max begins far below the scores that count.
enum class Bias { kNone, kPlain, kLowest, kForbids, kFarBelow };
// What keys hold that no query of their group may attend; kOneKey: one key is NaN whatever the mask.
enum class Poison { kNone, kForbidden, kOneKey };

// The distribution of scores, exact fp32 numbers of about 2^exponent. kSteps: eighths of it; kEqual: all are equal;
// kSpikes: some keys have the same score, far above all others; kUp, kDown: one key has +inf, some have -inf.
enum class Scores { kDrawn, kSteps, kEqual, kSpikes, kUp, kDown };
// How much of the static mask the kernel evaluates itself: nothing; all but two element masks; every tile; the whole
// mask.
enum class Left { kNothing, kMost, kTiles, kAll };

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
  float spread = 1;                // of the queries; wide scores differ more
  bool rising = false;             // later keys score higher, so that the row max rises in every tile
  bool deep = false;               // all scores are far below zero, at the beginning below -1024 in units of log2
  Scores scores = Scores::kDrawn;  // else from 2^-126 to 2^124, of fp16 from 2^-20 to 2^30
  int exponent = 0;
  Poison poison = Poison::kNone;
  bool shifted = false;     // tensors begin one element after an aligned address
  bool pad_shared = false;  // one row of padding for all batches
  bool cuda = false;        // rows begin at multiples of 16 bytes, and weights are rounded to dtype
  const char* kernel = "";  // the name of the kernel to run
  bool tf32 = false;        // fp32 with matmuls rounded as in TF32; inputs are rounded beforehand
  bool bf16 = false;        // products may be computed in bf16; inputs are rounded beforehand
  bool wild = false;        // fp32: small queries, large keys, and values of padded keys that are huge
  int m = 0, n = 0;         // 0: as the library chooses
  Left left = Left::kNothing;
};
std::string Describe(const Case& c);

// ---- masks: the expression, and what it means ----
struct MaskData {
  std::vector<uint8_t> head_keys;   // table0 [H, T]
  std::vector<uint8_t> pairs;       // table0 [S, T]
  std::vector<uint8_t> head_tiles;  // table0 [H, ceil(S / 16), ceil(T / 32)]
  std::vector<int32_t> segment_q;   // [B, S]
  std::vector<int64_t> segment_k;   // [B, T]
  std::vector<int64_t> lengths;     // [B]
  std::vector<uint8_t> pad;         // [B, T]
};
// The expression of a case's mask.
const char* MaskText(int mask);

MaskData DrawMask(const Case& c, Random* random);

Tensor Describe(const void* data, DType dtype, std::initializer_list<int64_t> dims);

// The mask as the kernel gets it: the block mask of the static part, and the bound run-time part.
struct BoundMask {
  MaskParts parts;
  BlockMask block;
  std::unique_ptr<BoundDynamicMask> dynamic, elements;
};
void BindMask(const Case& c, const MaskData& data, const CpuAttentionConfig& config, BoundMask* bound,
              AttentionArgs* args);

// ---- tensors ----
constexpr unsigned char kUntouched = 0xff;  // as fp32, fp16 and bf16 a NaN that no arithmetic gives

// A tensor whose memory ends with its last element, so that a sanitizer sees reads beyond it; NaN between rows.
struct Strided {
  static constexpr int64_t kBefore = 2, kBehind = 3;  // heads of kPacked
  std::vector<char> bytes;
  char* data = nullptr;
  Strides stride;
  DType dtype = DType::kF32;
  int64_t B = 0, heads = 0, length = 0, size = 0;

  Strided(const Case& c, int which, int64_t heads, int64_t length, int64_t size)
      : dtype(c.dtype), B(c.B), heads(heads), length(length), size(size) {
    int64_t first = 0;  // offset of the first element
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
std::vector<double> DrawValues(Random* random, DType dtype, int64_t count, double spread);

struct BiasTensor {
  DType dtype = DType::kF32;
  std::vector<char> bytes;
  int64_t stride[4] = {};  // 0 where an axis is broadcast
  std::vector<double> dense;
};
BiasTensor DrawBias(const Case& c, Random* random);

// A random relative bias, which is also added to the dense bias.
std::vector<float> DrawRelative(const Case& c, Random* random, std::vector<double>* dense);

// The whole problem in fp64, for the definition.
Dense DrawDense(const Case& c, const MaskData& data, const BiasTensor& bias, Random* random);

// The logits beside the scores of each head.
std::vector<double> DrawSink(const Case& c, Random* random);

// Compares every element of the output, which is then reset, and checks that nothing beside it was written.
void Compare(const Case& c, const Dense& dense, const Answer& answer, Strided* output, const std::string& where);

// Memory for the LSE, with gaps.
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

  void Compare(const Case& c, const Answer& answer, const std::string& where) const;
};

// Rows that rounding decides about, [B, H, S], get the kernel's results as answer, but for NaN.
void ExceptRows(const std::vector<uint8_t>& is_uncertain, const Case& c, Strided* output, const Lse& lse,
                Answer* answer);

AttentionArgs MakeArgs(const Case& c, const Strided& query, const Strided& key, const Strided& value,
                       const Strided& output);

using Memory = std::unique_ptr<void, void (*)(void*)>;
Memory MakeWorkspace(size_t bytes, int content);

// Deals the values in random order, all of them before any comes again.
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
std::vector<Case> DrawnCases(int count);

// Paths that depend on long inputs, and the extremes of each column.
std::vector<Case> ListedCases();

// Scores from the smallest to the largest that fp32 holds, infinite ones among them, for every type, on all paths of
// the softmax: first tiles, raised maxima, few queries, sinks, biases, softcap, padding.
std::vector<Case> LargeScoreCases(int count);

}  // namespace stof::test::attention
