// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/paged_attention/paged_problem.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "tests/cpp/map_attributes.h"

namespace stof::test::paged {
namespace {

namespace in = paged_input;

constexpr int64_t kRotaryRows = 900;  // more than any step's keys
constexpr int32_t kIllegal[] = {-1, 1 << 30, -(1 << 30)};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t Total(const Case& c) {
  int64_t total = c.padding;
  for (const int64_t n : c.tokens) total += n;
  return total;
}

// What the helpers of the append step know of a case.
cached_attention::Case Rows(const Case& c) {
  cached_attention::Case rows;
  rows.D = c.D, rows.dtype = c.dtype;
  rows.rotary = c.rotary, rows.rotary_offset = c.rotary_offset, rows.is_interleaved = c.is_interleaved;
  return rows;
}

Tensor View(void* data, DType dtype, const std::vector<int64_t>& dims) {
  Tensor tensor = TensorOfShape(dtype, dims);
  tensor.data = data;
  return tensor;
}

}  // namespace

int64_t Case::most_tokens() const { return *std::max_element(tokens.begin(), tokens.end()); }
int64_t Case::most_keys() const {
  int64_t most = 0;
  for (int64_t b = 0; b < B(); ++b) most = std::max(most, tokens[static_cast<size_t>(b)] > 0 ? keys_of(b) : 0);
  return most;
}

std::string Describe(const Case& c) {
  std::string lengths;
  for (int64_t b = 0; b < c.B(); ++b) {
    lengths +=
        std::to_string(c.past[static_cast<size_t>(b)]) + "+" + std::to_string(c.tokens[static_cast<size_t>(b)]) + " ";
  }
  return Text("H ", c.H, " G ", c.G, " D ", c.D, " block ", c.block, " dtype ", static_cast<int>(c.dtype), " lengths ",
              lengths, "padding ", c.padding, " mask ", kMasks[c.mask].text, " ring ", c.ring,
              c.frees_blocks ? " freed blocks" : "", c.has_slots ? " slots" : "", c.is_shared ? " in place" : " copied",
              c.is_packed ? " packed" : "", c.has_sink ? " sink" : "", c.has_norm ? " norm" : "", " rotary ", c.rotary,
              " from ", c.rotary_offset, c.is_interleaved ? " interleaved" : "", " softcap ", c.softcap, " metadata ",
              static_cast<int>(c.metadata));
}

Case DrawCase(int64_t S, int64_t past, int64_t block, DType dtype, Random* random) {
  Case c;
  c.block = block, c.dtype = dtype;
  c.D = random->Pick(std::vector<int64_t>{64, 64, 80, 128, 256});
  std::tie(c.H, c.G) = random->Pick(std::vector<std::pair<int64_t, int64_t>>{{8, 1}, {8, 2}, {4, 4}, {6, 2}, {5, 1}});
  if (S > 16) c.H = std::min<int64_t>(c.H, 4), c.G = c.H == 4 ? 2 : 1, c.D = std::min<int64_t>(c.D, 80);
  const int64_t B = random->Range(1, S > 16 ? 2 : 4);
  const bool is_equal = random->OneIn(2);
  for (int64_t b = 0; b < B; ++b) {
    c.past.push_back(b == 0 ? past : random->Range(0, past));
    c.tokens.push_back(b == 0 || is_equal ? S : random->Range(0, S));
  }
  if (random->OneIn(2)) std::reverse(c.past.begin(), c.past.end()), std::reverse(c.tokens.begin(), c.tokens.end());
  c.padding = random->OneIn(4) ? random->Range(1, 5) : 0;
  c.mask = static_cast<int>(random->Range(0, kMaskCount - 1));
  const int64_t window = kMasks[c.mask].window;
  if (window > 0 && random->OneIn(2)) c.ring = CeilDiv(window - 1 + S, block) + random->Range(0, 1);
  c.frees_blocks = window > 0 && c.ring == 0 && random->OneIn(2);
  c.has_slots = random->OneIn(3);
  c.is_shared = !random->OneIn(3);
  c.is_packed = random->OneIn(2);
  c.has_sink = random->OneIn(4);
  c.has_norm = random->OneIn(3);
  if (!random->OneIn(3)) {
    c.rotary = random->Pick(std::vector<int64_t>{c.D, 32, 6});
    c.rotary_offset = c.rotary < c.D && random->OneIn(2) ? random->Pick(std::vector<int64_t>{8, 32}) : 0;
    c.is_interleaved = random->OneIn(3);
  }
  c.softcap = random->OneIn(4) ? 5.0f : 0.0f;
  c.metadata = static_cast<Metadata>(random->Range(0, 2));
  return c;
}

Problem::Problem(const Case& given, uint64_t seed)
    : c(given),
      random(seed),
      query(c.dtype, Total(c) * (c.is_packed ? c.H + 2 * c.G : c.H) * c.D),
      key(c.dtype, c.is_packed ? 0 : Total(c) * c.G * c.D),
      value(c.dtype, key.count()),
      key_cache(c.dtype, 0),
      value_cache(c.dtype, 0),
      cos(c.dtype, kRotaryRows * c.rotary / 2),
      sin(c.dtype, cos.count()),
      query_norm(c.dtype, c.D),
      key_norm(c.dtype, c.D),
      sink(c.dtype, c.H) {
  for (Buffer* buffer : {&query, &key, &value, &cos, &sin, &query_norm, &key_norm, &sink}) buffer->Draw(&random);
  cumulative.push_back(0);
  for (int64_t b = 0; b < c.B(); ++b) {
    past.push_back(static_cast<int32_t>(c.past[static_cast<size_t>(b)]));
    cumulative.push_back(cumulative.back() + static_cast<int32_t>(c.tokens[static_cast<size_t>(b)]));
  }
  const auto loose = static_cast<int32_t>(c.metadata == Metadata::kLoose ? random.Range(1, 20) : 0);
  metadata = {static_cast<int32_t>(std::max<int64_t>(1, c.most_tokens())) + loose,
              static_cast<int32_t>(std::max<int64_t>(1, c.most_keys())) + 30 * loose, 0};
  if (!c.bounds.empty()) metadata = c.bounds;
  FillTable();
  FillCaches();
}

void Problem::FillTable() {
  int64_t most = 0;
  for (int64_t b = 0; b < c.B(); ++b) most = std::max(most, c.keys_of(b));
  columns = std::max(c.least_columns, CeilDiv(std::max<int64_t>(most, 1), c.block) + random.Range(0, 2));
  const auto owned = [&](int64_t b) { return c.ring > 0 ? c.ring : CeilDiv(c.keys_of(b), c.block); };
  blocks = 3;
  for (int64_t b = 0; b < c.B(); ++b) blocks += owned(b);
  blocks = std::max(blocks, c.least_blocks);
  std::vector<int32_t> ids;
  for (int32_t id = 0; id < blocks; ++id) ids.push_back(id);
  for (size_t i = ids.size(); i-- > 1;)
    std::swap(ids[i], ids[static_cast<size_t>(random.Range(0, static_cast<int64_t>(i)))]);
  size_t next = 0;
  for (int64_t b = 0; b < c.B(); ++b) {
    const int64_t used = CeilDiv(c.keys_of(b), c.block),
                  first = kMasks[c.mask].window == 0 || !c.frees_blocks
                              ? 0
                              : std::max<int64_t>(0, c.past[static_cast<size_t>(b)] - kMasks[c.mask].window + 1) / 128 *
                                    128 / c.block;
    for (int64_t column = 0; column < columns; ++column) {
      const bool is_read = column >= first && column < used && c.tokens[static_cast<size_t>(b)] > 0;
      const size_t at = next + static_cast<size_t>(c.ring > 0 ? column % c.ring : column);
      table.push_back(is_read ? ids[at] : kIllegal[random.Range(0, 2)]);
    }
    next += static_cast<size_t>(owned(b));
  }
}

int64_t Problem::RowOf(int64_t b, int64_t position) const {
  if (c.ring > 0 && position < c.keys_of(b) - c.ring * c.block) return -1;
  const int32_t block = table[static_cast<size_t>(b * columns + position / c.block)];
  return block < 0 || block >= blocks ? -1 : block * c.block + position % c.block;
}

void Problem::FillCaches() {
  const int64_t row = c.G * c.D;
  key_cache = value_cache = Buffer(c.dtype, blocks * c.block * row);
  key_cache.Poison(), value_cache.Poison();
  const auto fill = [&](int64_t at) {
    for (int64_t i = 0; i < row; ++i) {
      key_cache.Set(at * row + i, 2 * static_cast<double>(random.Unit()));
      value_cache.Set(at * row + i, 2 * static_cast<double>(random.Unit()));
    }
  };
  slots.assign(static_cast<size_t>(Total(c)), -1);
  for (int64_t b = 0; b < c.B(); ++b) {
    if (c.tokens[static_cast<size_t>(b)] == 0) continue;
    for (int64_t p = 0; p < c.past[static_cast<size_t>(b)]; ++p) {
      // In a ring rows of later positions replace those of earlier ones, the new tokens' among them.
      const int64_t at = RowOf(b, p);
      if (at >= 0) fill(at);
    }
    for (int64_t i = 0; i < c.tokens[static_cast<size_t>(b)]; ++i) {
      const int64_t at = RowOf(b, c.past[static_cast<size_t>(b)] + i);
      auto& slot = slots[static_cast<size_t>(cumulative[static_cast<size_t>(b)] + i)];
      slot = static_cast<int32_t>(at);
      if (!c.has_slots || !random.OneIn(4)) continue;
      slot = -1;  // a key that the cache has
      fill(at);
    }
  }
}

// Inputs in bf16 are those that products take.
static bool AllowsBf16(const Case& c) { return c.dtype == DType::kBF16 && (c.H + c.D) % 4 != 0; }

std::unique_ptr<Op> Problem::MakeOp() const {
  MapAttributes attributes;
  attributes.ints = {{"num_heads", c.H},
                     {"kv_num_heads", c.G},
                     {"do_rotary", c.rotary > 0 ? 1 : 0},
                     {"rotary_interleaved", c.is_interleaved ? 1 : 0},
                     {"rotary_offset", c.rotary_offset},
                     {"allow_bf16", AllowsBf16(c) ? 1 : 0}};
  attributes.floats = {{"softcap", c.softcap}, {"qk_norm_epsilon", 1e-5f}};
  attributes.strings = {{"mask", kMasks[c.mask].text}};
  std::unique_ptr<Op> op;
  const Status status = PagedAttentionDescription()->create(attributes, &op);
  CHECK(status.ok(), Describe(c), ": ", status.message());
  return op;
}

std::vector<Tensor> Problem::Inputs() {
  std::vector<Tensor> inputs(in::kCount);
  const int64_t tokens = N(), heads = c.is_packed ? c.H + 2 * c.G : c.H;
  const auto floats = [&](int input, Buffer* buffer, const std::vector<int64_t>& dims) {
    inputs[static_cast<size_t>(input)] = View(buffer->data(), c.dtype, dims);
  };
  const auto ints = [&](int input, std::vector<int32_t>* values, const std::vector<int64_t>& dims) {
    inputs[static_cast<size_t>(input)] = View(values->data(), DType::kI32, dims);
  };
  floats(in::kQuery, &query, {tokens, heads * c.D});
  if (!c.is_packed) {
    floats(in::kKey, &key, {tokens, c.G * c.D});
    floats(in::kValue, &value, {tokens, c.G * c.D});
  }
  floats(in::kKeyCache, &key_cache, {blocks, c.block, c.G, c.D});
  floats(in::kValueCache, &value_cache, {blocks, c.block, c.G, c.D});
  ints(in::kCumulative, &cumulative, {c.B() + 1});
  ints(in::kPast, &past, {c.B()});
  ints(in::kBlockTable, &table, {c.B(), columns});
  if (c.rotary > 0) {
    floats(in::kCos, &cos, {kRotaryRows, c.rotary / 2});
    floats(in::kSin, &sin, {kRotaryRows, c.rotary / 2});
  }
  if (c.has_slots) ints(in::kSlots, &slots, {tokens});
  if (c.has_sink) floats(in::kSink, &sink, {c.H});
  if (c.has_norm) {
    floats(in::kQueryNorm, &query_norm, {c.D});
    floats(in::kKeyNorm, &key_norm, {c.D});
  }
  if (c.metadata != Metadata::kNone) ints(in::kMetadata, &metadata, {3});
  return inputs;
}

std::pair<const Buffer*, int64_t> Problem::Token(int64_t head, int64_t t) const {
  if (c.is_packed) return {&query, (t * (c.H + 2 * c.G) + head) * c.D};
  if (head < c.H) return {&query, (t * c.H + head) * c.D};
  if (head < c.H + c.G) return {&key, (t * c.G + head - c.H) * c.D};
  return {&value, (t * c.G + head - c.H - c.G) * c.D};
}

void Problem::CheckCaches(const Buffer& keys, const Buffer& values, const std::string& where,
                          const std::set<int64_t>& illegal) const {
  std::vector<std::pair<int64_t, int64_t>> token_of(static_cast<size_t>(blocks * c.block), {-1, -1});
  for (int64_t b = 0; b < c.B(); ++b) {
    for (int64_t i = 0; i < c.tokens[static_cast<size_t>(b)]; ++i) {
      const int32_t slot = slots[static_cast<size_t>(cumulative[static_cast<size_t>(b)] + i)];
      if (slot >= 0) token_of[static_cast<size_t>(slot)] = {b, i};
    }
  }
  const cached_attention::Case rows = Rows(c);
  for (int64_t row = 0; row < blocks * c.block; ++row) {
    const auto [b, i] = token_of[static_cast<size_t>(row)];
    if (b >= 0 && illegal.count(b) > 0) continue;
    for (int64_t g = 0; g < c.G; ++g) {
      const int64_t at = (row * c.G + g) * c.D;
      const std::string here = Text(where, " row ", row, " group ", g);
      if (b < 0) {
        CHECK(keys.Equals(at, key_cache, at, c.D) && values.Equals(at, value_cache, at, c.D), here, " was changed");
        continue;
      }
      const int64_t t = cumulative[static_cast<size_t>(b)] + i;
      const auto [value_from, value_at] = Token(c.H + c.G + g, t);
      CHECK(values.Equals(at, *value_from, value_at, c.D), here, " value");
      const auto [key_from, key_at] = Token(c.H + g, t);
      if (!c.has_query_copy()) {
        CHECK(keys.Equals(at, *key_from, key_at, c.D), here, " key");
        continue;
      }
      const int64_t position = c.past[static_cast<size_t>(b)] + i;
      cached_attention::CheckRow(
          rows, keys, at,
          cached_attention::Transformed(rows, *key_from, key_at, c.has_norm ? &key_norm : nullptr, cos, sin, position),
          here);
    }
  }
}

void Problem::CheckOutput(const Buffer& output, const Buffer& keys, const Buffer& values, const Buffer* queries,
                          const std::function<int64_t(int64_t, int64_t, int64_t)>& query_at, bool is_cuda,
                          const std::string& where, const std::set<int64_t>& illegal) const {
  const int64_t row = c.H * c.D;
  for (int64_t t = cumulative.back(); t < N() && illegal.empty(); ++t) {
    for (int64_t d = 0; d < row; ++d) CHECK(output.Get(t * row + d) == 0, where, ": padding token ", t, " is not 0");
  }
  for (int64_t b = 0; b < c.B(); ++b) {
    if (illegal.count(b) == 0) {
      CheckSequence(b, output, keys, values, queries, query_at, is_cuda, where);
      continue;
    }
    for (int64_t at = 0; at < c.tokens[static_cast<size_t>(b)] * row; ++at) {
      const double got = output.Get(cumulative[static_cast<size_t>(b)] * row + at);
      CHECK(std::isnan(got), where, ": element ", at, " of illegal sequence ", b, " is ", got);
    }
  }
}

void Problem::CheckSequence(int64_t b, const Buffer& output, const Buffer& keys, const Buffer& values,
                            const Buffer* queries, const std::function<int64_t(int64_t, int64_t, int64_t)>& query_at,
                            bool is_cuda, const std::string& where) const {
  const int64_t S = c.tokens[static_cast<size_t>(b)], before = c.past[static_cast<size_t>(b)];
  if (S == 0) return;
  const cached_attention::Case rows = Rows(c);
  Dense dense;
  dense.H = c.H, dense.G = c.G, dense.S = S, dense.T = before + S, dense.D = dense.Dv = c.D;
  dense.scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(c.D)));
  dense.softcap = static_cast<double>(c.softcap);
  double largest = 0;
  for (int64_t h = 0; h < c.H; ++h) {
    if (c.has_sink) dense.sink.push_back(sink.Get(h));
    for (int64_t i = 0; i < S; ++i) {
      const auto [from, at] = Token(h, cumulative[static_cast<size_t>(b)] + i);
      if (queries != nullptr) {
        cached_attention::CheckRow(
            rows, *queries, query_at(b, h, i),
            cached_attention::Transformed(rows, *from, at, c.has_norm ? &query_norm : nullptr, cos, sin, before + i),
            Text(where, " query of sequence ", b, " head ", h, " token ", i));
      }
      for (int64_t d = 0; d < c.D; ++d) {
        dense.query.push_back(queries != nullptr ? queries->Get(query_at(b, h, i) + d) : from->Get(at + d));
      }
      for (int64_t k = 0; k < dense.T; ++k) {
        const bool is_allowed = k <= before + i && kMasks[c.mask].is_allowed(h, before + i, k);
        CHECK(!is_allowed || RowOf(b, k) >= 0, where, ": the case attends a key that no row holds");
        dense.allowed.push_back(is_allowed ? 1 : 0);
      }
    }
  }
  for (int64_t g = 0; g < c.G; ++g) {
    for (int64_t k = 0; k < dense.T; ++k) {
      const int64_t at = RowOf(b, k);
      for (int64_t d = 0; d < c.D; ++d) {
        dense.key.push_back(at < 0 ? 0.0 : keys.Get((at * c.G + g) * c.D + d));
        dense.value.push_back(at < 0 ? 0.0 : values.Get((at * c.G + g) * c.D + d));
        largest = std::max(largest, std::abs(dense.value.back()));
      }
    }
  }
  const Answer answer = Attend(dense);
  for (int64_t h = 0; h < c.H; ++h) {
    for (int64_t i = 0; i < S; ++i) {
      for (int64_t d = 0; d < c.D; ++d) {
        const double got = output.Get(((cumulative[static_cast<size_t>(b)] + i) * c.H + h) * c.D + d);
        const int64_t row = h * S + i;
        const double want = answer.output[static_cast<size_t>(row * c.D + d)];
        const double magnitude = answer.magnitude[static_cast<size_t>(row)];
        double tolerance = Tolerance(c.dtype, magnitude, dense.T, largest, want);
        if (is_cuda || AllowsBf16(c)) tolerance += CudaTolerance(c.dtype, magnitude, dense.T, largest);
        CHECK(std::abs(got - want) <= tolerance, where, ": sequence ", b, " head ", h, " token ", i, " element ", d,
              " is ", got, ", expected ", want, " ± ", tolerance);
      }
    }
  }
}

}  // namespace stof::test::paged
