// SPDX-License-Identifier: Apache-2.0
// The append kernel on a GPU against its definition, lengths and positions that are illegal, and what it writes beside.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "cuda/cached_attention/append.h"
#include "plugins/core/contract/op.h"
#include "tests/cpp/cached_attention/append_problem.h"
#include "tests/cpp/check.h"

namespace stof::test::cached_attention {
namespace {

#define CHECK_CUDA(call)                                                 \
  do {                                                                   \
    const cudaError_t error = (call);                                    \
    CHECK(error == cudaSuccess, #call, ": ", cudaGetErrorString(error)); \
  } while (0)

// Device memory that is freed with this.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    for (void* block : blocks_) cudaFree(block);
  }
  // Not larger than it must be, so that compute-sanitizer sees every access beyond.
  void* Upload(const void* from, size_t bytes) {
    void* block = nullptr;
    CHECK_CUDA(cudaMalloc(&block, std::max<size_t>(bytes, 1)));
    blocks_.push_back(block);
    CHECK_CUDA(cudaMemcpy(block, from, bytes, cudaMemcpyHostToDevice));
    return block;
  }
  void* Upload(Buffer& buffer) { return Upload(buffer.data(), buffer.bytes().size()); }
  template <typename T>
  T* Upload(const std::vector<T>& values) {
    return static_cast<T*>(Upload(values.data(), values.size() * sizeof(T)));
  }
  void Download(const void* from, Buffer* buffer) {
    CHECK_CUDA(cudaMemcpy(buffer->data(), from, buffer->bytes().size(), cudaMemcpyDeviceToHost));
  }
  template <typename T>
  void Download(const T* from, std::vector<T>* values) {
    CHECK_CUDA(cudaMemcpy(values->data(), from, values->size() * sizeof(T), cudaMemcpyDeviceToHost));
  }

 private:
  std::vector<void*> blocks_;
};

// A run on the device; the buffers of `run` then hold what it wrote.
struct CudaRun {
  CudaRun(const Case& c, uint64_t seed)
      : run(c, seed),
        staged(c.window > 0 && c.S > 1 ? Run::past_rows(c) + c.S : 0),
        staging_key(c.dtype, c.B * c.G * staged * c.D),
        staging_value(c.dtype, staging_key.count()),
        is_invalid(static_cast<size_t>(c.B), -77),
        key_ends(is_invalid),
        before_key(run.present_key),
        before_value(run.present_value) {
    staging_key.Poison(), staging_value.Poison();
  }

  Status Append(const Case& c, const std::function<void(CacheAppendArgs* args)>& change) {
    CacheAppendArgs args = run.Args(c);
    DeviceMemory memory;
    const int64_t item = SizeOfFloat(c.dtype);
    auto* const tokens = static_cast<char*>(memory.Upload(run.tokens));
    const int64_t stride = c.is_packed ? c.D : c.S * c.D;
    args.query = tokens, args.key = tokens + c.H * stride * item, args.value = tokens + (c.H + c.G) * stride * item;
    args.present_key = memory.Upload(run.present_key), args.present_value = memory.Upload(run.present_value);
    if (c.has_past) {
      args.past_key = c.is_shared ? args.present_key : memory.Upload(run.past_key);
      args.past_value = c.is_shared ? args.present_value : memory.Upload(run.past_value);
    }
    args.seqlens = memory.Upload(run.seqlens);
    if (args.transform.cos != nullptr)
      args.transform.cos = memory.Upload(run.cos), args.transform.sin = memory.Upload(run.sin);
    if (args.transform.position_ids != nullptr) args.transform.position_ids = memory.Upload(run.positions);
    if (args.transform.query_norm != nullptr) {
      args.transform.query_norm = memory.Upload(run.query_norm), args.transform.key_norm = memory.Upload(run.key_norm);
    }
    if (args.rotated_query != nullptr) args.rotated_query = memory.Upload(run.rotated);
    args.first_row = memory.Upload(run.first_row);
    args.is_invalid = memory.Upload(is_invalid);
    args.key_ends = memory.Upload(key_ends);
    if (staged > 0) {
      args.staging_key = memory.Upload(staging_key), args.staging_value = memory.Upload(staging_value);
      args.staging_capacity = staged;
    }
    if (change) change(&args);
    RunContext context;
    context.on_cuda = true;
    STOF_RETURN_IF_ERROR(cuda::AppendToCache(args, context));
    CHECK_CUDA(cudaDeviceSynchronize());
    memory.Download(args.present_key, &run.present_key), memory.Download(args.present_value, &run.present_value);
    if (args.rotated_query != nullptr) memory.Download(args.rotated_query, &run.rotated);
    memory.Download(args.first_row, &run.first_row), memory.Download(args.is_invalid, &is_invalid);
    memory.Download(args.key_ends, &key_ends);
    if (staged > 0) {
      memory.Download(args.staging_key, &staging_key), memory.Download(args.staging_value, &staging_value);
    }
    return Status();
  }

  Run run;
  int64_t staged;
  Buffer staging_key, staging_value;
  std::vector<int32_t> is_invalid, key_ends;
  Buffer before_key, before_value;
};

// The past and new tokens in staging.
void CheckStaging(const Case& c, const CudaRun& found, const std::string& where) {
  for (int64_t b = 0; b < c.B; ++b) {
    const int64_t past = c.past[static_cast<size_t>(b)], held = static_cast<int64_t>(Held(c, past).size());
    for (int64_t g = 0; g < c.G; ++g) {
      const int64_t to = (b * c.G + g) * found.staged * c.D;
      const int64_t from = (b * c.G + g) * Run::past_rows(c) * c.D;
      const std::string here = Text(where, " staging of sequence ", b, " group ", g);
      CHECK(found.staging_key.Equals(to, found.run.past_key, from, held * c.D), here);
      CHECK(found.staging_value.Equals(to, found.run.past_value, from, held * c.D), here);
      for (int64_t i = 0; i < c.tokens_of(b); ++i) {
        const int64_t at = to + (held + i) * c.D, key = found.run.token(c, b, c.H + g, i);
        CHECK(found.staging_value.Equals(at, found.run.tokens, found.run.token(c, b, c.H + c.G + g, i), c.D), here);
        const int64_t angle = c.has_positions ? found.run.positions[static_cast<size_t>(b * c.S + i)] : past + i;
        CheckRow(c, found.staging_key, at,
                 Transformed(c, found.run.tokens, key, c.has_norm ? &found.run.key_norm : nullptr, found.run.cos,
                             found.run.sin, angle),
                 here);
      }
    }
  }
}

void CheckQueries(const Case& c, const CudaRun& found, const std::string& where) {
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t i = 0; i < c.tokens_of(b); ++i) {
        const int64_t angle = c.has_positions ? found.run.positions[static_cast<size_t>(b * c.S + i)]
                                              : c.past[static_cast<size_t>(b)] + i;
        CheckRow(c, found.run.rotated, ((b * c.H + h) * c.S + i) * c.D,
                 Transformed(c, found.run.tokens, found.run.token(c, b, h, i),
                             c.has_norm ? &found.run.query_norm : nullptr, found.run.cos, found.run.sin, angle),
                 Text(where, " query ", b, " ", h, " ", i));
      }
    }
  }
}

void RunCase(const Case& c, uint64_t seed) {
  const std::string where = Text("cuda, seed ", seed, " ", Describe(c));
  CudaRun found(c, seed);
  const Status status = found.Append(c, nullptr);
  CHECK(status.ok(), where, ": ", status.message());
  CheckCache(c, found.run, found.before_key, found.before_value, found.run.present_key, found.run.present_value, where);
  for (int64_t b = 0; b < c.B; ++b) {
    const int64_t past = c.past[static_cast<size_t>(b)];
    const auto front = [&c](int64_t n) { return Held(c, n).empty() ? 0 : Held(c, n)[0]; };
    const int64_t first = past - front(found.staged > 0 ? past : past + c.tokens_of(b));
    CHECK(found.run.first_row[static_cast<size_t>(b)] == first, where, " first_row ", b, ": ",
          found.run.first_row[static_cast<size_t>(b)], ", expected ", first);
    CHECK(found.is_invalid[static_cast<size_t>(b)] == 0, where, " is_invalid ", b);
    CHECK(found.key_ends[static_cast<size_t>(b)] == first + c.tokens_of(b), where, " key_ends ", b, ": ",
          found.key_ends[static_cast<size_t>(b)], ", expected ", first + c.tokens_of(b));
  }
  if (c.rotary > 0 || c.has_norm) CheckQueries(c, found, where);
  if (found.staged > 0) CheckStaging(c, found, where);
  CountCases(1);
}

TEST(CudaAppendEqualsTheDefinition) {
  std::vector<Case> cases = DrawCases(Cases(400));
  // Windows that are moved in several chunks, and other sizes of serving.
  for (const int64_t capacity : {1024, 1040, 1600}) {
    for (const int64_t past : {900, 1024, 5000}) {
      for (const int64_t S : {1, 3, 300}) {
        Case c;
        c.B = 1, c.H = 4, c.G = 2, c.S = S, c.D = 128, c.dtype = DType::kF16;
        c.past = {past}, c.window = 1024, c.capacity = capacity, c.is_shared = past != 900;
        if (S == 3) c.D = 36, c.dtype = DType::kF32;
        if (S == 1 && past == 5000) c.D = 75;  // no row is aligned
        cases.push_back(c);
      }
    }
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    cases[i].free_rows = cases[i].S;  // of padding
    if (IsSampled(i)) RunCase(cases[i], i);
  }
}

// Sequence 1 of three is illegal: it leaves the cache alone and is flagged, the others are right.
TEST(CudaAppendFlagsIllegalLengths) {
  for (const int64_t S : {1, 3, 40}) {
    for (const bool is_shared : {true, false}) {
      for (const int64_t window : {0, 16}) {
        for (const int32_t seqlen : {std::numeric_limits<int32_t>::min(), -1, static_cast<int>(S) - 2, 61,
                                     std::numeric_limits<int32_t>::max()}) {
          const bool is_legal = window > 0 && seqlen >= S - 1;  // a sliding-window cache takes any number of tokens
          if (is_legal) continue;
          Case c;
          c.B = 3, c.S = S, c.D = 64, c.dtype = DType::kF16, c.past = {5, 9, 12}, c.is_shared = is_shared;
          c.window = window, c.capacity = window > 0 ? 24 : 60;
          if (S == 3) c.rotary = 32;
          const std::string where = Text("seqlens ", seqlen, " ", Describe(c));
          CudaRun found(c, 3);
          found.run.seqlens[1] = seqlen;
          const Status status = found.Append(c, nullptr);
          CHECK(status.ok(), where, ": ", status.message());
          CHECK(found.is_invalid == (std::vector<int32_t>{0, 1, 0}), where);
          const int32_t row = found.run.first_row[1];
          CHECK(row >= 0 && row + S <= (found.staged > 0 ? found.staged : std::max(c.capacity, S)), where, ": ", row);
          const int64_t each = c.G * c.capacity * c.D;
          CHECK(found.run.present_key.Equals(each, found.before_key, each, each), where);
          CHECK(found.run.present_value.Equals(each, found.before_value, each, each), where);
          // The definition has no say about sequence 1, whose rows are then those of before.
          CudaRun legal(c, 3);
          CHECK(legal.Append(c, nullptr).ok(), where);
          for (const int64_t b : {0, 2}) {
            CHECK(found.run.present_key.Equals(b * each, legal.run.present_key, b * each, each), where);
            CHECK(found.run.present_value.Equals(b * each, legal.run.present_value, b * each, each), where);
          }
          CountCases(1);
        }
      }
    }
  }
}

// A sequence is illegal where it has more keys than the longest one is said to have.
TEST(CudaAppendFlagsMoreThanTheMostKeys) {
  for (const int64_t window : {0, 16}) {
    Case c;
    c.past = {5, 9}, c.window = window, c.capacity = 24;
    CudaRun found(c, 8);
    CHECK(found.Append(c, [](CacheAppendArgs* args) { args->most_keys = 9; }).ok());
    CHECK(found.is_invalid == (std::vector<int32_t>{0, 1}), window);
    CountCases(1);
  }
}

// A position beyond the rotary table flags its sequence, and makes query and key NaN; those of padding do not.
TEST(CudaAppendFlagsIllegalPositions) {
  for (const int64_t position :
       {int64_t{-1}, kRotaryRows, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()}) {
    Case c;
    c.B = 2, c.S = 3, c.D = 64, c.past = {0, 0}, c.tokens = {3, 2}, c.rotary = 64, c.has_positions = true;
    CudaRun padded(c, 4);
    padded.run.positions[5] = position;
    CHECK(padded.Append(c, nullptr).ok());
    CHECK(padded.is_invalid == (std::vector<int32_t>{0, 0}), position);
    CudaRun found(c, 4);
    found.run.positions[1] = position;
    CHECK(found.Append(c, nullptr).ok());
    CHECK(found.is_invalid == (std::vector<int32_t>{1, 0}), position);
    for (int64_t d = 0; d < c.D; ++d) {
      CHECK(std::isnan(found.run.rotated.Get(c.D + d)), position, " query, element ", d);
      CHECK(std::isnan(found.run.present_key.Get(c.D + d)), position, " key, element ", d);
      CHECK(!std::isnan(found.run.present_key.Get(d)), position, " key of token 0, element ", d);
    }
    CountCases(1);
  }
}

// Value rows behind the new ones become zeros, up to a bound and no more than a KV tile may hold.
TEST(CudaAppendClearsBehindTheNewRows) {
  for (const int64_t clear_end : {0, 8, 70, 300}) {
    for (const int64_t window : {0, 64}) {
      for (const int64_t S : {1, 5}) {
        Case c;
        c.B = 2, c.S = S, c.D = 40, c.past = {5, 100}, c.dtype = DType::kBF16;
        c.window = window, c.capacity = window > 0 ? 80 : 300;
        const std::string where = Text("clear_end ", clear_end, " ", Describe(c));
        CudaRun found(c, 5);
        CHECK(found.Append(c, [&](CacheAppendArgs* args) { args->clear_end = clear_end; }).ok(), where);
        const Buffer& cleared = found.staged > 0 ? found.staging_value : found.run.present_value;
        const Buffer& untouched = found.staged > 0 ? found.staging_key : found.run.present_key;
        const int64_t capacity = found.staged > 0 ? found.staged : c.capacity;
        for (int64_t bg = 0; bg < c.B * c.G; ++bg) {
          const int64_t behind = found.run.first_row[static_cast<size_t>(bg / c.G)] + S;
          for (int64_t row = behind; row < std::min(capacity, clear_end); ++row) {
            for (int64_t d = 0; d < c.D; ++d) {
              const int64_t at = (bg * capacity + row) * c.D + d;
              if (row < behind + 127) CHECK(cleared.Get(at) == 0, where, " head ", bg, " row ", row);
              if (row >= behind + 127 && window == 0) CHECK(cleared.Get(at) != 0, where, " head ", bg, " row ", row);
              CHECK(untouched.Get(at) != 0 || window > 0, where, " key of head ", bg, " row ", row);
            }
          }
        }
        CountCases(1);
        if (clear_end > 0 || window > 0) continue;
        CheckCache(c, found.run, found.before_key, found.before_value, found.run.present_key, found.run.present_value,
                   where);
      }
    }
  }
}

TEST(CudaAppendRefusesSizes) {
  const auto expect = [](const std::string& expected, const std::function<void(CacheAppendArgs*)>& change) {
    Case c;
    c.rotary = 8;
    CudaRun found(c, 1);
    const Status status = found.Append(c, change);
    CHECK(!status.ok() && status.message().find(expected) != std::string::npos, "found: ", status.message(),
          ", expected: ", expected);
    CountCases(1);
  };
  expect("head sizes up to 256, found 257", [](CacheAppendArgs* args) { args->D = 257; });
  expect("holds 0 positions, fewer than the 1 new ones", [](CacheAppendArgs* args) { args->capacity = 0; });
  expect("at least its sliding window of 17", [](CacheAppendArgs* args) { args->sliding_window = 17; });
  expect("a rotary table of 0 rows", [](CacheAppendArgs* args) { args->transform.rotary_rows = 0; });
  expect("for 7 elements", [](CacheAppendArgs* args) { args->transform.rotary_size = 7; });
  expect("found data type 7", [](CacheAppendArgs* args) { args->dtype = DType::kI64; });
  expect("staging holds 16 rows, expected at least 17", [](CacheAppendArgs* args) {
    args->staging_key = args->present_key, args->staging_value = args->present_value, args->staging_capacity = 16;
  });
}

}  // namespace
}  // namespace stof::test::cached_attention
