// SPDX-License-Identifier: Apache-2.0
// StofCachedAttention over caches of int8 and fp8 on a GPU: what the caches hold, and outputs against the definition in
// double precision over what the device holds. Rows without a key hold NaN in fp8 and 127 in int8.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "plugins/core/ops/cached_attention/cached_attention.h"
#include "tests/cpp/cached_attention/cuda_node.h"
#include "tests/cpp/check.h"

namespace stof::test::cached_attention {
namespace {

struct QuantizedCase {
  int64_t B = 2, H = 8, G = 2, S = 1, D = 128;
  DType dtype = DType::kF16, stored = DType::kI8;
  std::vector<int64_t> past = {60, 7};
  int64_t capacity = 300, total = 0;  // 0: of the longest sequence
  bool has_channels[2] = {false, false};
  bool is_shared = true, has_sink = false;
  int64_t rotary = 0, window = 0;
  float softcap = 0;
  int mask = 0;

  int64_t TotalOf(int64_t b) const { return past[static_cast<size_t>(b)] + S; }
  int64_t Total() const {
    int64_t most = total;
    for (int64_t b = 0; b < B; ++b) most = std::max(most, TotalOf(b));
    return most;
  }
  cached_attention::Case Plain() const {
    cached_attention::Case c;
    c.B = B, c.H = H, c.G = G, c.S = S, c.D = D, c.dtype = dtype, c.past = past, c.capacity = capacity;
    c.rotary = rotary, c.window = window;
    return c;
  }
};

std::string Text(const QuantizedCase& c) {
  std::string lengths;
  for (const int64_t n : c.past) lengths += std::to_string(n) + " ";
  return test::Text("B ", c.B, " H ", c.H, " G ", c.G, " S ", c.S, " D ", c.D, " dtype ", static_cast<int>(c.dtype),
                    " stored ", static_cast<int>(c.stored), " past ", lengths, "capacity ", c.capacity, " total ",
                    c.Total(), " channels ", c.has_channels[0], c.has_channels[1], " shared ", c.is_shared, " sink ",
                    c.has_sink, " rotary ", c.rotary, " window ", c.window, " softcap ", c.softcap, " mask ",
                    kMasks[c.mask].text);
}

// ---- stored numbers ----
double ReadStored(DType stored, uint8_t bits) {
  if (stored == DType::kI8) return static_cast<double>(static_cast<int8_t>(bits));
  const int exponent = bits >> 3 & 15, significand = bits & 7;
  if ((bits & 0x7f) == 0x7f) return std::nan("");
  const double size = exponent == 0 ? std::ldexp(significand, -9) : std::ldexp(8 + significand, exponent - 10);
  return (bits & 0x80) != 0 ? -size : size;
}
// Neighbours differ by 1.
int Ordinal(DType stored, uint8_t bits) {
  if (stored == DType::kI8) return static_cast<int8_t>(bits);
  return (bits & 0x80) != 0 ? -(bits & 0x7f) : bits & 0x7f;
}
// The nearest number, by search among all.
uint8_t Nearest(DType stored, double x) {
  uint8_t best = 0;
  double least = 1e300;
  for (int bits = 0; bits < 256; ++bits) {
    const double y = ReadStored(stored, static_cast<uint8_t>(bits));
    if (std::isnan(y)) continue;
    const double away = std::abs(x - y);
    // Ties go to even bits, of equal numbers to the positive one.
    if (away < least || (away == least && bits % 2 == 0 && (best & 1) != 0))
      best = static_cast<uint8_t>(bits), least = away;
  }
  return best;
}

struct Cache {
  std::vector<uint8_t> key, value;
};

class QuantizedNode {
 public:
  QuantizedNode(const QuantizedCase& c, uint64_t seed) : c_(c), plain_(c.Plain()), run_(plain_, seed) {
    const auto cells = static_cast<size_t>(c.B * c.G * c.capacity * c.D);
    for (std::vector<uint8_t>* cache : {&before_.key, &before_.value}) {
      cache->assign(cells, 0x7f);  // NaN in fp8
      for (int64_t head = 0; head < c.B * c.G; ++head) {
        const auto held = static_cast<int64_t>(Held(plain_, c.past[static_cast<size_t>(head / c.G)]).size());
        for (int64_t at = 0; at < held * c.D; ++at) {
          uint8_t& bits = (*cache)[static_cast<size_t>(head * c.capacity * c.D + at)];
          do {
            bits = static_cast<uint8_t>(run_.random.Range(0, 255));
          } while (std::isnan(ReadStored(c.stored, bits)));
        }
      }
    }
    for (int i = 0; i < 2; ++i) {
      const int64_t count = c.has_channels[i] ? c.G * c.D : 1;
      // Stored numbers are as large as 127 or 448: what they stand for is about 2.
      const float unit = c.stored == DType::kI8 ? 0.015f : 0.005f;
      for (int64_t at = 0; at < count; ++at) {
        scale_[i].push_back(unit * (0.5f + std::abs(run_.random.Unit())) * (at % 7 == 3 ? -1.0f : 1.0f));
      }
    }
    for (int64_t h = 0; h < c.H; ++h) sink_.push_back(Rounded(c.dtype, run_.random.Unit()));
    Upload();
  }

  void RunAndCheck(const std::string& where, int64_t illegal = -1, int32_t seqlen = 0) {
    if (illegal >= 0) {
      const auto address = static_cast<int32_t*>(inputs_[in::kSeqlens].data) + illegal;
      CopyToDevice(address, &seqlen, sizeof(seqlen));
    }
    RunContext context;
    context.on_cuda = true;
    context.allocate = DeviceMemory::Allocate;
    context.self = &memory_;
    const Status status = op_->Run(inputs_.data(), in::kCount, outputs_, 3, context);
    CHECK(status.ok(), where, ": ", status.message());
    CHECK_CUDA(cudaDeviceSynchronize());
    const auto download = [](const void* from, size_t bytes) {
      std::vector<uint8_t> data(bytes);
      CHECK_CUDA(cudaMemcpy(data.data(), from, bytes, cudaMemcpyDeviceToHost));
      return data;
    };
    const Cache found = {download(outputs_[1].data, before_.key.size()),
                         download(outputs_[2].data, before_.key.size())};
    Buffer output(c_.dtype, c_.B * c_.S * c_.H * c_.D), rotated(c_.dtype, c_.rotary > 0 ? output.count() : 0);
    CHECK_CUDA(cudaMemcpy(output.data(), outputs_[0].data, output.bytes().size(), cudaMemcpyDeviceToHost));
    if (c_.rotary > 0) {
      CHECK_CUDA(cudaMemcpy(rotated.data(), memory_.workspace()[2], rotated.bytes().size(), cudaMemcpyDeviceToHost));
    }
    for (int64_t b = 0; b < c_.B; ++b) {
      if (b == illegal) {
        for (int64_t at = 0; at < c_.S * c_.H * c_.D; ++at) {
          CHECK(std::isnan(output.Get(b * c_.S * c_.H * c_.D + at)), where, ": an output of an illegal sequence");
        }
        continue;
      }
      CheckCaches(b, found, where);
      if (c_.window == 0 || c_.S == 1) CheckOutput(b, found, rotated, output, where);
    }
    CountCases(1);
  }

 private:
  void Upload() {
    const QuantizedCase& c = c_;
    MapAttributes attributes;
    attributes.ints = {{"num_heads", c.H},
                       {"kv_num_heads", c.G},
                       {"do_rotary", c.rotary > 0 ? 1 : 0},
                       {"sliding_window_cache", c.window}};
    attributes.floats = {{"softcap", c.softcap}};
    attributes.strings = {{"mask", kMasks[c.mask].text}};
    Status status = CachedAttentionDescription()->create(attributes, &op_);
    CHECK(status.ok(), Text(c), ": ", status.message());
    const auto upload = [this](const void* from, size_t bytes) { return memory_.Upload(from, bytes); };
    const int64_t N = c.H + 2 * c.G, item = SizeOfFloat(c.dtype);
    const auto part = [&](int64_t head, int64_t heads) {
      std::vector<char> rows;
      for (int64_t b = 0; b < c.B; ++b) {
        for (int64_t i = 0; i < c.S; ++i) {
          for (int64_t h = head; h < head + heads; ++h) {
            const char* from = static_cast<const char*>(run_.tokens.data()) + ((b * N + h) * c.S + i) * c.D * item;
            rows.insert(rows.end(), from, from + c.D * item);
          }
        }
      }
      return Describe(upload(rows.data(), rows.size()), c.dtype, {c.B, c.S, heads * c.D});
    };
    inputs_.resize(in::kCount);
    inputs_[in::kQuery] = part(0, c.H), inputs_[in::kKey] = part(c.H, c.G), inputs_[in::kValue] = part(c.H + c.G, c.G);
    const std::vector<int64_t> dims = {c.B, c.G, c.capacity, c.D};
    void* present[2] = {upload(before_.key.data(), before_.key.size()),
                        upload(before_.value.data(), before_.key.size())};
    for (int i = 0; i < 2; ++i) {
      const std::vector<uint8_t>& cache = i == 0 ? before_.key : before_.value;
      void* const past = c.is_shared ? present[i] : upload(cache.data(), cache.size());
      if (!c.is_shared) CHECK_CUDA(cudaMemset(present[i], 0x7f, cache.size()));
      inputs_[static_cast<size_t>(in::kPastKey + i)] = Describe(past, c.stored, dims);
      inputs_[static_cast<size_t>(in::kKeyScale + i)] =
          Describe(upload(scale_[i].data(), scale_[i].size() * sizeof(float)), DType::kF32,
                   {static_cast<int64_t>(scale_[i].size())});
      outputs_[1 + i] = Describe(present[i], c.stored, dims);
    }
    inputs_[in::kSeqlens] =
        Describe(upload(run_.seqlens.data(), run_.seqlens.size() * sizeof(int32_t)), DType::kI32, {c.B});
    total_ = static_cast<int32_t>(c.Total());
    inputs_[in::kTotal] = Describe(&total_, DType::kI32, {1});
    if (c.rotary > 0) {
      inputs_[in::kCos] =
          Describe(upload(run_.cos.data(), run_.cos.bytes().size()), c.dtype, {kRotaryRows, c.rotary / 2});
      inputs_[in::kSin] =
          Describe(upload(run_.sin.data(), run_.sin.bytes().size()), c.dtype, {kRotaryRows, c.rotary / 2});
    }
    if (c.has_sink) {
      Buffer buffer(c.dtype, c.H);
      for (int64_t h = 0; h < c.H; ++h) buffer.Set(h, sink_[static_cast<size_t>(h)]);
      inputs_[in::kSink] = Describe(upload(buffer.data(), buffer.bytes().size()), c.dtype, {c.H});
    }
    const auto bytes = static_cast<size_t>(c.B * c.S * c.H * c.D * item);
    outputs_[0] = Describe(memory_.Take(bytes), c.dtype, {c.B, c.S, c.H * c.D});
    CHECK_CUDA(cudaMemset(outputs_[0].data, 0xff, bytes));
    status = op_->Prepare(inputs_.data(), in::kCount);
    CHECK(status.ok(), Text(c), ": ", status.message());
  }

  double ScaleOf(int i, int64_t g, int64_t d) const {
    return static_cast<double>(scale_[i].size() == 1 ? scale_[i][0] : scale_[i][static_cast<size_t>(g * c_.D + d)]);
  }
  size_t CellOf(int64_t b, int64_t g, int64_t row, int64_t d) const {
    return static_cast<size_t>(((b * c_.G + g) * c_.capacity + row) * c_.D + d);
  }

  // Old rows are copied to the bit, new ones are what is rounded, or its neighbour in few elements.
  void CheckCaches(int64_t b, const Cache& found, const std::string& where) const {
    const int64_t past = c_.past[static_cast<size_t>(b)];
    const std::vector<int64_t> was = Held(plain_, past), held = Held(plain_, past + c_.S);
    int64_t flips = 0, checked = 0;
    for (int i = 0; i < 2; ++i) {
      const std::vector<uint8_t>& now = i == 0 ? found.key : found.value;
      const std::vector<uint8_t>& then = i == 0 ? before_.key : before_.value;
      for (int64_t g = 0; g < c_.G; ++g) {
        for (size_t row = 0; row < held.size(); ++row) {
          const int64_t position = held[row], token = position - past;
          std::vector<double> x;
          if (token >= 0) {
            const int64_t at = run_.token(plain_, b, c_.H + (i == 0 ? 0 : c_.G) + g, token);
            cached_attention::Case transformed = plain_;
            if (i == 1) transformed.rotary = 0;
            x = Transformed(transformed, run_.tokens, at, nullptr, run_.cos, run_.sin, position);
          }
          for (int64_t d = 0; d < c_.D; ++d) {
            const uint8_t got = now[CellOf(b, g, static_cast<int64_t>(row), d)];
            const auto place = [&] {
              return test::Text(where, ": ", i == 0 ? "key" : "value", " b ", b, " g ", g, " row ", row, " d ", d);
            };
            if (token < 0) {
              const auto old = static_cast<int64_t>(std::find(was.begin(), was.end(), position) - was.begin());
              CHECK(got == then[CellOf(b, g, old, d)], place(), " of the past changed");
              continue;
            }
            const double rounded = Rounded(c_.dtype, x[static_cast<size_t>(d)]);
            const uint8_t want = Nearest(c_.stored, rounded / ScaleOf(i, g, d));
            const int away = std::abs(Ordinal(c_.stored, got) - Ordinal(c_.stored, want));
            CHECK(away <= 1, place(), " is ", ReadStored(c_.stored, got), ", expected ", ReadStored(c_.stored, want));
            flips += away, ++checked;
          }
        }
      }
    }
    CHECK(flips <= 2 + checked / 50, where, ": b ", b, ": ", flips, " of ", checked, " elements are a step away");
  }

  void CheckOutput(int64_t b, const Cache& found, const Buffer& rotated, const Buffer& output,
                   const std::string& where) const {
    const int64_t past = c_.past[static_cast<size_t>(b)];
    const auto keys = static_cast<int64_t>(Held(plain_, past + c_.S).size());
    const int64_t first = keys - c_.S, origin = past - first;
    Dense dense;
    dense.H = c_.H, dense.G = c_.G, dense.S = c_.S, dense.T = keys, dense.D = dense.Dv = c_.D;
    dense.scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(c_.D)));
    dense.softcap = static_cast<double>(c_.softcap);
    if (c_.has_sink) dense.sink = sink_;
    double largest = 0, query_norm = 0, key_norm = 0;
    for (int64_t h = 0; h < c_.H; ++h) {
      for (int64_t i = 0; i < c_.S; ++i) {
        double squares = 0;
        for (int64_t d = 0; d < c_.D; ++d) {
          dense.query.push_back(rotated.count() > 0 ? rotated.Get(((b * c_.H + h) * c_.S + i) * c_.D + d)
                                                    : run_.tokens.Get(run_.token(plain_, b, h, i) + d));
          squares += dense.query.back() * dense.query.back();
        }
        query_norm = std::max(query_norm, std::sqrt(squares));
        for (int64_t k = 0; k < keys; ++k) {
          dense.allowed.push_back(k <= first + i && kMasks[c_.mask].is_allowed(h, past + i, k + origin) ? 1 : 0);
        }
      }
    }
    for (int64_t g = 0; g < c_.G; ++g) {
      for (int64_t k = 0; k < keys; ++k) {
        double squares = 0;
        for (int64_t d = 0; d < c_.D; ++d) {
          dense.key.push_back(ReadStored(c_.stored, found.key[CellOf(b, g, k, d)]) * ScaleOf(0, g, d));
          dense.value.push_back(ReadStored(c_.stored, found.value[CellOf(b, g, k, d)]) * ScaleOf(1, g, d));
          squares += dense.key.back() * dense.key.back();
          largest = std::max(largest, std::abs(dense.value.back()));
        }
        key_norm = std::max(key_norm, std::sqrt(squares));
      }
    }
    const Answer answer = Attend(dense);
    // Queries, or dequantized keys and values, are rounded once more: a random walk over D terms.
    const double unit = c_.dtype == DType::kF32 ? 0x1p-24 : c_.dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
    const double score = unit * query_norm * key_norm * dense.scale / std::sqrt(static_cast<double>(c_.D));
    const double rounding = (6 * score + unit) * largest;
    for (int64_t h = 0; h < c_.H; ++h) {
      for (int64_t i = 0; i < c_.S; ++i) {
        for (int64_t d = 0; d < c_.D; ++d) {
          const int64_t row = h * c_.S + i;
          const double got = output.Get(((b * c_.S + i) * c_.H + h) * c_.D + d);
          const double want = answer.output[static_cast<size_t>(row * c_.D + d)];
          const double magnitude = answer.magnitude[static_cast<size_t>(row)];
          const double tolerance = Tolerance(c_.dtype, magnitude, keys, largest, want) +
                                   CudaTolerance(c_.dtype, magnitude, keys, largest) + rounding;
          CHECK(std::abs(got - want) <= tolerance, where, ": b ", b, " h ", h, " row ", i, " d ", d, ": ", got,
                ", expected ", want, " ± ", tolerance);
        }
      }
    }
  }

  QuantizedCase c_;
  cached_attention::Case plain_;
  Run run_;
  DeviceMemory memory_;
  std::unique_ptr<Op> op_;
  Cache before_;
  std::vector<float> scale_[2];
  std::vector<double> sink_;
  std::vector<Tensor> inputs_;
  Tensor outputs_[3];
  int32_t total_ = 0;
};

void RunCase(const QuantizedCase& c, uint64_t seed) {
  if (!IsSampled(seed)) return;
  QuantizedNode(c, seed).RunAndCheck(test::Text("seed ", seed, " ", Text(c)));
}

constexpr DType kStored[] = {DType::kI8, DType::kF8E4M3};
constexpr DType kTypes[] = {DType::kF16, DType::kBF16, DType::kF32};

// Decode kernels, each head size and number of row blocks, and what is dequantized first.
TEST(CudaQuantizedCachesOfEveryShape) {
  uint64_t seed = 0;
  for (const DType stored : kStored) {
    for (const DType dtype : kTypes) {
      for (const int64_t D : {64, 48, 128, 96, 256, 40, 20}) {
        if (dtype != DType::kF32 && D % 8 != 0) continue;
        for (const int64_t S : {1, 3, 16}) {
          QuantizedCase c;
          c.stored = stored, c.dtype = dtype, c.D = D, c.S = S;
          c.has_channels[0] = seed % 2 == 0, c.has_channels[1] = seed % 3 == 0;
          c.H = seed % 4 == 1 ? 4 : 8, c.G = seed % 4 == 2 ? 1 : 2;
          RunCase(c, seed++);
        }
      }
    }
  }
}

TEST(CudaQuantizedCachesUnderEveryMask) {
  uint64_t seed = 1000;
  for (const DType stored : kStored) {
    for (const DType dtype : kTypes) {
      for (int mask = 0; mask < 5; ++mask) {
        for (const int64_t S : {1, 16, 40, 300}) {
          QuantizedCase c;
          c.stored = stored, c.dtype = dtype, c.S = S, c.mask = mask, c.D = 64;
          c.past = {517, 3}, c.capacity = 517 + S + 13;
          c.has_channels[0] = c.has_channels[1] = seed % 2 == 0;
          c.is_shared = seed % 3 != 0, c.has_sink = seed % 4 == 1, c.softcap = seed % 5 == 2 ? 5.0f : 0.0f;
          c.rotary = seed % 2 == 1 ? 64 : 0;
          RunCase(c, seed++);
        }
      }
    }
  }
}

// Long caches: many splits, most of them behind the keys of a short sequence.
TEST(CudaQuantizedCachesOfManySplits) {
  uint64_t seed = 2000;
  for (const DType stored : kStored) {
    for (const int64_t D : {64, 128, 256}) {
      for (const int mask : {0, 2}) {
        QuantizedCase c;
        c.stored = stored, c.D = D, c.mask = mask, c.H = 16, c.G = 1, c.past = {4000, 0}, c.capacity = 6000;
        c.total = 6000, c.has_channels[0] = c.has_channels[1] = true;
        RunCase(c, seed++);
      }
    }
  }
}

TEST(CudaQuantizedSlidingWindowCaches) {
  uint64_t seed = 3000;
  for (const DType stored : kStored) {
    for (const int64_t capacity : {16, 24}) {
      for (const int64_t S : {1, 3, 20}) {
        for (const bool is_shared : {true, false}) {
          QuantizedCase c;
          c.stored = stored, c.S = S, c.mask = 1, c.window = 16, c.capacity = capacity, c.past = {61, 9}, c.D = 64;
          c.is_shared = is_shared, c.has_channels[0] = true, c.rotary = 64;
          RunCase(c, seed++);
        }
      }
    }
  }
}

TEST(CudaQuantizedCachesMarkIllegalLengths) {
  uint64_t seed = 4000;
  for (const DType stored : kStored) {
    for (const int64_t S : {1, 40}) {
      for (const int32_t seqlen : {-1, 299, 2000000000}) {
        QuantizedCase c;
        c.stored = stored, c.S = S, c.B = 3, c.past = {60, 5, 7}, c.mask = seed % 2 == 0 ? 0 : 3;
        QuantizedNode(c, seed).RunAndCheck(test::Text("illegal ", seqlen, " ", Text(c)), 1, seqlen);
        ++seed;
      }
    }
  }
}

}  // namespace
}  // namespace stof::test::cached_attention
