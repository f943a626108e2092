// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/cached_attention/append_problem.h"

#include <cmath>
#include <cstdlib>

namespace stof::test::cached_attention {

std::string Describe(const Case& c) {
  std::string lengths;
  for (const int64_t n : c.past) lengths += Text(n).substr(2) + " ";
  return Text("B ", c.B, " H ", c.H, " G ", c.G, " S ", c.S, " D ", c.D, " dtype ", static_cast<int>(c.dtype), " past ",
              lengths, c.is_first_prompt() ? "first prompt" : "", " capacity ", c.capacity, " shared ", c.is_shared,
              " past given ", c.has_past, " rotary ", c.rotary, c.is_interleaved ? " interleaved" : "", " positions ",
              c.has_positions, " norm ", c.has_norm, " packed ", c.is_packed, " window ", c.window);
}

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
    double& a = x[static_cast<size_t>(c.rotary_offset + (c.is_interleaved ? 2 * i : i))];
    double& b = x[static_cast<size_t>(c.rotary_offset + (c.is_interleaved ? 2 * i + 1 : i + c.rotary / 2))];
    const double cosine = cos.Get(position * (c.rotary / 2) + i), sine = sin.Get(position * (c.rotary / 2) + i);
    const double first = a * cosine - b * sine;
    b = b * cosine + a * sine;
    a = first;
  }
  return x;
}

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
          if (c.window > 0 || row < total + c.free_rows) continue;
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

bool IsSampled(uint64_t number) {
  const char* const sample = std::getenv("STOF_SAMPLE");
  return sample == nullptr || number % std::max<uint64_t>(1, std::strtoull(sample, nullptr, 10)) == 0;
}

std::vector<Case> DrawCases(int count) {
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

}  // namespace stof::test::cached_attention
