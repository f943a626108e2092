// SPDX-License-Identifier: Apache-2.0
// Random problems of the append step, and its definition in docs/reference/cached-attention.md, in double precision and
// token by token. For the kernels of all devices.
#ifndef STOF_TESTS_CPP_CACHED_ATTENTION_APPEND_PROBLEM_H_
#define STOF_TESTS_CPP_CACHED_ATTENTION_APPEND_PROBLEM_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "plugins/core/contract/cached_attention.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"

namespace stof::test::cached_attention {

constexpr int64_t kRotaryRows = 900;  // of the tables: more than any step's keys

struct Case {
  int64_t B = 2, H = 4, G = 2, S = 1, D = 16;
  DType dtype = DType::kF32;
  std::vector<int64_t> past = {5, 0};  // n[b]
  std::vector<int64_t> tokens;         // valid ones of a padded first prompt; empty: S
  int64_t capacity = 16;
  bool is_shared = true;
  bool has_past = true;
  int64_t rotary = 0, rotary_offset = 0;
  bool is_interleaved = false, has_positions = false, has_norm = false, is_packed = false;
  int64_t window = 0;
  int64_t free_rows = 0;  // rows behind the valid ones that may be written

  bool is_first_prompt() const { return !tokens.empty(); }
  int64_t tokens_of(int64_t b) const { return tokens.empty() ? S : tokens[static_cast<size_t>(b)]; }
};

std::string Describe(const Case& c);

// Numbers of one type in a buffer of their own size, so that a sanitizer sees every access beyond.
class Buffer {
 public:
  Buffer(DType dtype, int64_t count)
      : dtype_(dtype), item_(SizeOfFloat(dtype)), bytes_(static_cast<size_t>(count * item_)) {}
  void Draw(Random* random) {
    for (int64_t i = 0; i < count(); ++i) Set(i, 2 * static_cast<double>(random->Unit()));
  }
  // NaN of a pattern that nothing computes.
  void Poison() { std::fill(bytes_.begin(), bytes_.end(), static_cast<char>(0xfe)); }
  int64_t count() const { return static_cast<int64_t>(bytes_.size()) / item_; }
  double Get(int64_t i) const { return LoadFloat(dtype_, bytes_.data() + i * item_); }
  void Set(int64_t i, double x) { StoreFloat(dtype_, x, bytes_.data() + i * item_); }
  void* data() { return bytes_.data(); }
  const std::vector<char>& bytes() const { return bytes_; }
  bool Equals(int64_t i, const Buffer& other, int64_t j, int64_t elements) const {
    return std::memcmp(bytes_.data() + i * item_, other.bytes_.data() + j * item_,
                       static_cast<size_t>(elements * item_)) == 0;
  }

 private:
  DType dtype_;
  int64_t item_;
  std::vector<char> bytes_;
};

// Positions that a cache holds after n tokens, one by one: a sliding-window cache that is full drops a block first.
std::vector<int64_t> Held(const Case& c, int64_t n);

// A row after norm and rotary embedding, in double precision.
std::vector<double> Transformed(const Case& c, const Buffer& rows, int64_t at, const Buffer* weight, const Buffer& cos,
                                const Buffer& sin, int64_t position);

struct Run {
  Run(const Case& c, uint64_t seed)
      : random(seed),
        tokens(c.dtype, c.B * c.S * (c.H + 2 * c.G) * c.D),
        past_key(c.dtype, c.B * c.G * past_rows(c) * c.D),
        past_value(c.dtype, past_key.count()),
        present_key(c.dtype, c.B * c.G * c.capacity * c.D),
        present_value(c.dtype, present_key.count()),
        cos(c.dtype, kRotaryRows * c.rotary / 2),
        sin(c.dtype, cos.count()),
        query_norm(c.dtype, c.D),
        key_norm(c.dtype, c.D),
        rotated(c.dtype, c.B * c.H * c.S * c.D),
        first_row(static_cast<size_t>(c.B), -77) {
    for (Buffer* buffer : {&tokens, &past_key, &past_value, &cos, &sin, &query_norm, &key_norm}) buffer->Draw(&random);
    for (Buffer* buffer : {&present_key, &present_value, &rotated}) buffer->Poison();
    for (int64_t b = 0; b < c.B; ++b) {
      seqlens.push_back(static_cast<int32_t>(c.past[static_cast<size_t>(b)] + c.tokens_of(b) - 1));
      for (int64_t i = 0; i < c.S; ++i) positions.push_back(random.Range(0, kRotaryRows - 1));
    }
    if (c.has_past && c.is_shared) present_key = past_key, present_value = past_value;
  }
  // Without a shared buffer past may be smaller.
  static int64_t past_rows(const Case& c) {
    if (c.is_shared || c.window > 0) return c.capacity;
    return *std::max_element(c.past.begin(), c.past.end());
  }
  int64_t token(const Case& c, int64_t b, int64_t head, int64_t i) const {  // head: queries, keys, values
    const int64_t N = c.H + 2 * c.G;
    return c.is_packed ? ((b * c.S + i) * N + head) * c.D : ((b * N + head) * c.S + i) * c.D;
  }
  CacheAppendArgs Args(const Case& c) {
    CacheAppendArgs args;
    args.B = c.B, args.H = c.H, args.G = c.G, args.S = c.S, args.D = c.D, args.dtype = c.dtype;
    const int64_t N = c.H + 2 * c.G, item = SizeOfFloat(c.dtype);
    const Strides stride = c.is_packed ? Strides{N * c.S * c.D, c.D, N * c.D} : Strides{N * c.S * c.D, c.S * c.D, c.D};
    args.query_stride = args.key_stride = args.value_stride = stride;
    char* data = static_cast<char*>(tokens.data());
    args.query = data;
    args.key = data + c.H * stride.h * item;
    args.value = data + (c.H + c.G) * stride.h * item;
    args.present_key = present_key.data(), args.present_value = present_value.data();
    args.capacity = c.capacity;
    if (c.has_past) {
      args.past_key = c.is_shared ? present_key.data() : past_key.data();
      args.past_value = c.is_shared ? present_value.data() : past_value.data();
      args.past_capacity = past_rows(c);
    }
    args.seqlens = seqlens.data();
    args.is_first_prompt = c.is_first_prompt();
    args.sliding_window = c.window;
    if (c.rotary > 0) {
      args.transform.cos = cos.data(), args.transform.sin = sin.data();
      args.transform.rotary_rows = kRotaryRows, args.transform.rotary_size = c.rotary,
      args.transform.is_interleaved = c.is_interleaved;
      if (c.has_positions) args.transform.position_ids = positions.data();
    }
    if (c.has_norm)
      args.transform.query_norm = query_norm.data(), args.transform.key_norm = key_norm.data(),
      args.transform.epsilon = 1e-5f;
    if (c.rotary > 0 || c.has_norm) args.rotated_query = rotated.data();
    args.first_row = first_row.data();
    return args;
  }

  Random random;
  Buffer tokens, past_key, past_value, present_key, present_value, cos, sin, query_norm, key_norm, rotated;
  std::vector<int32_t> seqlens, first_row;
  std::vector<int64_t> positions;
};

// A row of a rotated query or key against the definition.
void CheckRow(const Case& c, const Buffer& found, int64_t at, const std::vector<double>& expected,
              const std::string& where);

// The caches after a step. before_key, before_value: present before it.
void CheckCache(const Case& c, const Run& run, const Buffer& before_key, const Buffer& before_value,
                const Buffer& present_key, const Buffer& present_value, const std::string& where);

std::vector<Case> DrawCases(int count);

// STOF_SAMPLE=n: every n-th case is run, for slow tools.
bool IsSampled(uint64_t number);

}  // namespace stof::test::cached_attention
#endif  // STOF_TESTS_CPP_CACHED_ATTENTION_APPEND_PROBLEM_H_
