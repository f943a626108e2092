// SPDX-License-Identifier: Apache-2.0
// The append step on the CPU against its definition in docs/reference/cached-attention.md, computed in double precision
// and token by token.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "cpu/cached_attention/append.h"
#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/cached_attention/append_problem.h"
#include "tests/cpp/check.h"
#include "tests/cpp/memory.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test::cached_attention {
namespace {

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

void RunTable(CpuIsa isa) {
  ThreadPool pool(3);
  Starved starved(pool.view());
  const std::vector<Case> cases = DrawCases(static_cast<int>(400 * Effort()) + 1);
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
  ExpectError(c, "cos_cache has 5 rows", [](CacheAppendArgs* args, Run*) { args->transform.rotary_rows = 5; });
  ExpectError(c, "rotates 20 elements of a head of 16",
              [](CacheAppendArgs* args, Run*) { args->transform.rotary_size = 20; });
  ExpectError(c, "past_key holds 15 rows and present_key 16",
              [](CacheAppendArgs* args, Run*) { args->past_capacity = 15; });
  ExpectError(c, "no memory for the rotated queries",
              [](CacheAppendArgs* args, Run*) { args->rotated_query = nullptr; });
  c.has_positions = true;
  ExpectError(c, "position_ids[1, 0] is 900, but cos_cache has 900 rows",
              [](CacheAppendArgs*, Run* run) { run->positions[1] = kRotaryRows; });
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
#define STOF_TESTS(id, name, is_supported)                                      \
  {{"CacheAppendEqualsTheDefinition[" #name "]", [] { RunTable(CpuIsa::id); }}, \
   {"CacheAppendInStepsOfAnySize[" #name "]", [] { RunSteps(CpuIsa::id); }}},
  static constexpr Test kRows[][2] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  return RegisterByIsa(&cpu::KernelTable::append, kRows);
}();

}  // namespace
}  // namespace stof::test::cached_attention
