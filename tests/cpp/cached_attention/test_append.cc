// SPDX-License-Identifier: Apache-2.0
// The append step on the CPU against its definition in docs/reference/cached-attention.md, computed in double precision
// and token by token.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "cpu/cached_attention/append.h"
#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"
#include "tests/cpp/memory.h"

namespace stof::test::cached_attention {
namespace {

struct Case {
  int64_t B = 2, H = 4, G = 2, S = 1, D = 16;
  DType dtype = DType::kF32;
  std::vector<int64_t> past = {5, 0};  // n[b]
  std::vector<int64_t> tokens;         // valid ones of a padded first prompt; empty: S
  int64_t capacity = 16;
  bool is_shared = true;
  bool has_past = true;
  int64_t rotary = 0;
  bool is_interleaved = false, has_positions = false, has_norm = false, is_packed = false;
  int64_t window = 0;

  bool is_first_prompt() const { return !tokens.empty(); }
  int64_t tokens_of(int64_t b) const { return tokens.empty() ? S : tokens[static_cast<size_t>(b)]; }
};

std::string Describe(const Case& c) {
  std::string lengths;
  for (const int64_t n : c.past) lengths += Text(n).substr(2) + " ";
  return Text("B ", c.B, " H ", c.H, " G ", c.G, " S ", c.S, " D ", c.D, " dtype ", static_cast<int>(c.dtype), " past ",
              lengths, c.is_first_prompt() ? "first prompt" : "", " capacity ", c.capacity, " shared ", c.is_shared,
              " past given ", c.has_past, " rotary ", c.rotary, c.is_interleaved ? " interleaved" : "", " positions ",
              c.has_positions, " norm ", c.has_norm, " packed ", c.is_packed, " window ", c.window);
}

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
std::vector<int64_t> Held(const Case& c, int64_t n) {
  std::vector<int64_t> held;
  for (int64_t position = 0; position < n; ++position) {
    if (c.window > 0 && static_cast<int64_t>(held.size()) == c.capacity) {
      held.erase(held.begin(), held.begin() + static_cast<std::ptrdiff_t>(c.capacity - c.window + 1));
    }
    held.push_back(position);
  }
  return held;
}

// A row after norm and rotary embedding, in double precision.
std::vector<double> Transformed(const Case& c, const Buffer& rows, int64_t at, const Buffer* weight, const Buffer& cos,
                                const Buffer& sin, int64_t position) {
  std::vector<double> x(static_cast<size_t>(c.D));
  double squares = 0;
  for (int64_t d = 0; d < c.D; ++d) {
    x[static_cast<size_t>(d)] = rows.Get(at + d);
    squares += x[static_cast<size_t>(d)] * x[static_cast<size_t>(d)];
  }
  if (weight != nullptr) {
    const double factor = 1 / std::sqrt(squares / static_cast<double>(c.D) + 1e-5);
    for (int64_t d = 0; d < c.D; ++d) x[static_cast<size_t>(d)] *= factor * weight->Get(d);
  }
  for (int64_t i = 0; i < c.rotary / 2; ++i) {
    double& a = x[static_cast<size_t>(c.is_interleaved ? 2 * i : i)];
    double& b = x[static_cast<size_t>(c.is_interleaved ? 2 * i + 1 : i + c.rotary / 2)];
    const double cosine = cos.Get(position * (c.rotary / 2) + i), sine = sin.Get(position * (c.rotary / 2) + i);
    const double first = a * cosine - b * sine;
    b = b * cosine + a * sine;
    a = first;
  }
  return x;
}

struct Run {
  Run(const Case& c, uint64_t seed)
      : random(seed),
        tokens(c.dtype, c.B * c.S * (c.H + 2 * c.G) * c.D),
        past_key(c.dtype, c.B * c.G * past_rows(c) * c.D),
        past_value(c.dtype, past_key.count()),
        present_key(c.dtype, c.B * c.G * c.capacity * c.D),
        present_value(c.dtype, present_key.count()),
        cos(c.dtype, 700 * c.rotary / 2),
        sin(c.dtype, cos.count()),
        query_norm(c.dtype, c.D),
        key_norm(c.dtype, c.D),
        rotated(c.dtype, c.B * c.H * c.S * c.D),
        first_row(static_cast<size_t>(c.B), -77) {
    for (Buffer* buffer : {&tokens, &past_key, &past_value, &cos, &sin, &query_norm, &key_norm}) buffer->Draw(&random);
    for (Buffer* buffer : {&present_key, &present_value, &rotated}) buffer->Poison();
    for (int64_t b = 0; b < c.B; ++b) {
      seqlens.push_back(static_cast<int32_t>(c.past[static_cast<size_t>(b)] + c.tokens_of(b) - 1));
      for (int64_t i = 0; i < c.S; ++i) positions.push_back(random.Range(0, 699));
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
      args.cos = cos.data(), args.sin = sin.data();
      args.rotary_rows = 700, args.rotary_size = c.rotary, args.is_interleaved = c.is_interleaved;
      if (c.has_positions) args.position_ids = positions.data();
    }
    if (c.has_norm) args.query_norm = query_norm.data(), args.key_norm = key_norm.data(), args.epsilon = 1e-5f;
    if (c.rotary > 0 || c.has_norm) args.rotated_query = rotated.data();
    args.first_row = first_row.data();
    return args;
  }

  Random random;
  Buffer tokens, past_key, past_value, present_key, present_value, cos, sin, query_norm, key_norm, rotated;
  std::vector<int32_t> seqlens, first_row;
  std::vector<int64_t> positions;
};

void CheckRow(const Case& c, const Buffer& found, int64_t at, const std::vector<double>& expected,
              const std::string& where) {
  double size = 0;
  for (const double x : expected) size = std::max(size, std::abs(x));
  const double unit = c.dtype == DType::kF32 ? 0 : c.dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
  for (int64_t d = 0; d < c.D; ++d) {
    const double got = found.Get(at + d), want = expected[static_cast<size_t>(d)];
    const double computed = 0x1p-21 * size;
    CHECK(
        std::abs(got - want) <= computed + unit * (std::abs(want) + computed) + (c.dtype == DType::kF16 ? 0x1p-25 : 0),
        where, " element ", d, ": ", got, ", expected ", want);
  }
}

void CheckCache(const Case& c, const Run& run, const Buffer& before_key, const Buffer& before_value,
                const Buffer& present_key, const Buffer& present_value, const std::string& where) {
  for (int64_t b = 0; b < c.B; ++b) {
    const int64_t past = c.past[static_cast<size_t>(b)], total = past + c.tokens_of(b);
    const std::vector<int64_t> was = Held(c, past), held = Held(c, total);
    for (int64_t g = 0; g < c.G; ++g) {
      for (int64_t row = 0; row < c.capacity; ++row) {
        const int64_t at = ((b * c.G + g) * c.capacity + row) * c.D;
        const std::string here = Text(where, " sequence ", b, " group ", g, " row ", row);
        if (row >= static_cast<int64_t>(held.size())) {  // not valid: as it was, in a sliding-window cache anything
          if (c.window > 0) continue;
          CHECK(present_key.Equals(at, before_key, at, c.D) && present_value.Equals(at, before_value, at, c.D), here);
          continue;
        }
        const int64_t position = held[static_cast<size_t>(row)];
        if (position < past) {
          const auto old = std::find(was.begin(), was.end(), position) - was.begin();
          const int64_t from = ((b * c.G + g) * Run::past_rows(c) + old) * c.D;
          CHECK(present_key.Equals(at, run.past_key, from, c.D), here);
          CHECK(present_value.Equals(at, run.past_value, from, c.D), here);
          continue;
        }
        const int64_t i = position - past, key = run.token(c, b, c.H + g, i);
        CHECK(present_value.Equals(at, run.tokens, run.token(c, b, c.H + c.G + g, i), c.D), here);
        if (!c.has_norm && c.rotary == 0) {
          CHECK(present_key.Equals(at, run.tokens, key, c.D), here);
          continue;
        }
        const int64_t angle = c.has_positions ? run.positions[static_cast<size_t>(b * c.S + i)] : position;
        CheckRow(c, present_key, at,
                 Transformed(c, run.tokens, key, c.has_norm ? &run.key_norm : nullptr, run.cos, run.sin, angle), here);
      }
    }
  }
}

void RunCase(const Case& c, CpuIsa isa, const Parallel& team, uint64_t seed) {
  const std::string where = Text(CpuIsaName(isa), " seed ", seed, " ", Describe(c));
  std::vector<char> first;
  for (const Parallel& parallel : {Parallel{}, team}) {
    Run run(c, seed);
    CacheAppendArgs args = run.Args(c);
    const Buffer before_key = run.present_key, before_value = run.present_value;
    const int64_t staged = CpuCacheStagingRows(args);
    Buffer staging_key(c.dtype, c.B * c.G * staged * c.D), staging_value(c.dtype, staging_key.count());
    staging_key.Poison(), staging_value.Poison();
    if (staged > 0) {
      args.staging_key = staging_key.data(), args.staging_value = staging_value.data();
      args.staging_capacity = staged;
    }
    const Status status = cpu::AppendToCache(args, isa, parallel);
    CHECK(status.ok(), where, ": ", status.message());
    CheckCache(c, run, before_key, before_value, run.present_key, run.present_value, where);
    for (int64_t b = 0; b < c.B; ++b) {
      const int64_t past = c.past[static_cast<size_t>(b)];
      const auto front = [&c](int64_t n) { return Held(c, n).empty() ? 0 : Held(c, n)[0]; };
      // What the queries attend begins at this position, in row 0.
      const int64_t origin = staged > 0 ? front(past) : front(past + c.tokens_of(b));
      CHECK(run.first_row[static_cast<size_t>(b)] == past - origin, where, " first_row ", b, ": ",
            run.first_row[static_cast<size_t>(b)], ", expected ", past - origin);
      if (c.window > 0) {
        CHECK(origin <= std::max<int64_t>(0, past - c.window + 1), where, ": query 0 attends rows that are gone");
      }
      if (args.rotated_query == nullptr) continue;
      for (int64_t h = 0; h < c.H; ++h) {
        for (int64_t i = 0; i < c.tokens_of(b); ++i) {
          const int64_t angle = c.has_positions ? run.positions[static_cast<size_t>(b * c.S + i)] : past + i;
          CheckRow(c, run.rotated, ((b * c.H + h) * c.S + i) * c.D,
                   Transformed(c, run.tokens, run.token(c, b, h, i), c.has_norm ? &run.query_norm : nullptr, run.cos,
                               run.sin, angle),
                   Text(where, " query ", b, " ", h, " ", i));
        }
      }
    }
    if (first.empty()) first = run.present_key.bytes();
    CHECK(first == run.present_key.bytes(), where, ": 3 threads give other bits than 1");
    CountCases(1);
  }
}

std::vector<Case> Cases(int count) {
  Random random(40);
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) {
    Case c;
    c.B = random.Pick(std::vector<int64_t>{1, 2, 3});
    c.G = random.Pick(std::vector<int64_t>{1, 2});
    c.H = c.G * random.Pick(std::vector<int64_t>{1, 4, 7});
    c.S = random.Pick(std::vector<int64_t>{1, 1, 3, 16, 40});
    c.D = random.Pick(std::vector<int64_t>{2, 8, 20, 64, 80, 128, 256});
    c.dtype = random.Pick(std::vector<DType>{DType::kF32, DType::kF16, DType::kBF16});
    c.past.clear();
    if (random.OneIn(3)) {
      for (int64_t b = 0; b < c.B; ++b) {
        c.past.push_back(0);
        c.tokens.push_back(b == 0 ? c.S : random.Range(1, c.S));
      }
      c.has_past = random.OneIn(2);
    } else {
      for (int64_t b = 0; b < c.B; ++b) c.past.push_back(random.Pick(std::vector<int64_t>{0, 1, 17, 60, 517}));
    }
    const int64_t most = *std::max_element(c.past.begin(), c.past.end());
    c.capacity = most + c.S + random.Pick(std::vector<int64_t>{0, 1, 30});
    c.is_shared = random.OneIn(2);
    if (random.OneIn(3)) {
      c.window = random.Pick(std::vector<int64_t>{1, 7, 16});
      c.capacity = c.window + random.Pick(std::vector<int64_t>{0, 1, 5, 16});
      c.has_past = true;
    }
    if (!random.OneIn(4)) {
      c.rotary = random.OneIn(2) ? c.D : std::max<int64_t>(2, c.D / 4 * 2);
      c.is_interleaved = random.OneIn(3);
      c.has_positions = random.OneIn(3);
    }
    c.has_norm = random.OneIn(3);
    c.is_packed = random.OneIn(2);
    cases.push_back(c);
  }
  return cases;
}

void RunTable(CpuIsa isa) {
  ThreadPool pool(3);
  Starved starved(pool.view());
  const std::vector<Case> cases = Cases(static_cast<int>(400 * Effort()) + 1);
  for (size_t i = 0; i < cases.size(); ++i) RunCase(cases[i], isa, starved.view(), i);
}

// A sequence of steps leaves what single tokens leave: 100 tokens in pieces of several sizes.
void RunSteps(CpuIsa isa) {
  for (const int64_t capacity : {8, 9, 12, 24}) {
    Case c;
    c.B = 1, c.window = 8, c.capacity = capacity, c.D = 8, c.rotary = 8;
    Run run(c, 3);
    int64_t n = 0;
    for (int step = 0; n < 100; ++step) {
      c.S = step % 4 == 3 ? 5 : 1;
      c.past = {n};
      Run tokens(c, static_cast<uint64_t>(n));
      tokens.present_key = tokens.past_key = run.present_key;
      tokens.present_value = tokens.past_value = run.present_value;
      CacheAppendArgs args = tokens.Args(c);
      const int64_t staged = CpuCacheStagingRows(args);
      CHECK(staged == 0 || (c.S > 1 && staged <= capacity + c.S), "capacity ", capacity, " n ", n, ": ", staged);
      Buffer staging_key(c.dtype, c.G * staged * c.D), staging_value(c.dtype, c.G * staged * c.D);
      if (staged > 0) {
        args.staging_key = staging_key.data(), args.staging_value = staging_value.data();
        args.staging_capacity = staged;
      }
      const Status status = cpu::AppendToCache(args, isa, Parallel{});
      CHECK(status.ok(), status.message());
      CheckCache(c, tokens, tokens.past_key, tokens.past_value, tokens.present_key, tokens.present_value,
                 Text("capacity ", capacity, " n ", n));
      run.present_key = tokens.present_key, run.present_value = tokens.present_value;
      n += c.S;
      CountCases(1);
    }
  }
}

void ExpectError(const Case& c, const std::string& expected, void (*damage)(CacheAppendArgs* args, Run* run)) {
  Run run(c, 1);
  CacheAppendArgs args = run.Args(c);
  damage(&args, &run);
  const Buffer key = run.present_key, value = run.present_value;
  const Status status = CpuAppendToCache(args, Parallel{});
  CHECK(!status.ok() && status.message().find(expected) != std::string::npos, "found: ", status.message(),
        ", expected: ", expected);
  CHECK(key.bytes() == run.present_key.bytes() && value.bytes() == run.present_value.bytes(), expected);
  CountCases(1);
}

TEST(CacheAppendRefusesIllegalLengths) {
  Case c;
  c.rotary = 8;
  ExpectError(c, "seqlens_k[1] is -1, expected at least 0", [](CacheAppendArgs*, Run* run) { run->seqlens[1] = -1; });
  ExpectError(c, "seqlens_k[1] is -2147483648", [](CacheAppendArgs*, Run* run) { run->seqlens[1] = INT32_MIN; });
  ExpectError(c, "seqlens_k[1] is 16: 17 keys, but present_key holds 16",
              [](CacheAppendArgs*, Run* run) { run->seqlens[1] = 16; });
  ExpectError(c, "seqlens_k[0] is 2147483647: 2147483647 keys before this step, but past_key holds 16",
              [](CacheAppendArgs*, Run* run) { run->seqlens[0] = INT32_MAX; });
  ExpectError(c, "seqlens_k[0] is 5: 5 keys before this step, but there is no past_key",
              [](CacheAppendArgs* args, Run*) { args->past_key = args->past_value = nullptr; });
  ExpectError(c, "cos_cache has 5 rows", [](CacheAppendArgs* args, Run*) { args->rotary_rows = 5; });
  ExpectError(c, "rotates 20 elements of a head of 16", [](CacheAppendArgs* args, Run*) { args->rotary_size = 20; });
  ExpectError(c, "past_key holds 15 rows and present_key 16",
              [](CacheAppendArgs* args, Run*) { args->past_capacity = 15; });
  ExpectError(c, "no memory for the rotated queries",
              [](CacheAppendArgs* args, Run*) { args->rotated_query = nullptr; });
  c.has_positions = true;
  ExpectError(c, "position_ids[1, 0] is 700, but cos_cache has 700 rows",
              [](CacheAppendArgs*, Run* run) { run->positions[1] = 700; });
  ExpectError(c, "position_ids[0, 0] is -1", [](CacheAppendArgs*, Run* run) { run->positions[0] = -1; });
  c.has_positions = false;
  c.is_shared = false;
  ExpectError(c, "seqlens_k[1] is 6: 6 keys before this step, but past_key holds 5",
              [](CacheAppendArgs*, Run* run) { run->seqlens[1] = 6; });
  c.S = 3, c.past = {0, 0}, c.tokens = {3, 2}, c.has_past = false;
  ExpectError(c, "seqlens_k[0] is 3, expected 0 to 2, since the first prompt has 3 tokens",
              [](CacheAppendArgs*, Run* run) { run->seqlens[0] = 3; });
  ExpectError(c, "seqlens_k[0] is -1, expected 0 to 2", [](CacheAppendArgs*, Run* run) { run->seqlens[0] = -1; });
  c.tokens.clear();
  ExpectError(c, "seqlens_k[1] is 1, expected at least 2, since this step adds 3 tokens",
              [](CacheAppendArgs*, Run* run) { run->seqlens[1] = 1; });
  Case windowed;
  windowed.window = 16;
  ExpectError(windowed, "sliding_window_cache is 17, but the cache holds only 16 rows",
              [](CacheAppendArgs* args, Run*) { args->sliding_window = 17; });
}

// Registers the tests of each instruction set of this machine.
const bool registered = [] {
#define STOF_TESTS(id, name, features, attention, chain, gemm, packed_gemm)    \
  {{"CacheAppendEqualsTheDefinition[" name "]", [] { RunTable(CpuIsa::id); }}, \
   {"CacheAppendInStepsOfAnySize[" name "]", [] { RunSteps(CpuIsa::id); }}},
  static constexpr Test kRows[][2] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  for (int isa = 0; isa <= static_cast<int>(BestCpuIsa()); ++isa) {
    AllTests().insert(AllTests().end(), std::begin(kRows[isa]), std::end(kRows[isa]));
  }
  return true;
}();

}  // namespace
}  // namespace stof::test::cached_attention
