// SPDX-License-Identifier: Apache-2.0
// Two operators under four threads that bring 200 shapes in changing order, as a server meets them: right answers, and
// a cache of block masks that keeps its limit. STOF_SOAK_SECONDS sets how long, 2 s by default.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>

#include "plugins/core/contract/op.h"
#include "plugins/core/host/thread_pool.h"
#include "plugins/core/mask/block_mask_cache.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

constexpr int kThreads = 4;
constexpr int kShapes = 200;
constexpr int64_t kHeads = 4, kGroups = 2, kSize = 16;

// The second operator's tables come with each run, so that threads exchange its parsed mask under each other.
struct Variant {
  const char* mask;
  const char* operands;
  const char* empty_rows;
  bool offset;
};
constexpr Variant kVariants[] = {{"k <= q and q - k < 20 and pad[b, k]", "pad", "zero", true},
                                 {"abs(q - k) <= table0[h] and (k < 2 or pad[b, k])", "pad table0", "mean", false}};

class VariantAttributes final : public AttributeReader {
 public:
  explicit VariantAttributes(const Variant& variant) : variant_(variant) {}
  bool Int(const char* name, int64_t* value) const override {
    if (std::strcmp(name, "query_offset") != 0) return false;
    *value = variant_.offset ? 1 : 0;
    return true;
  }
  bool Float(const char*, float*) const override { return false; }
  bool Ints(const char*, std::vector<int64_t>*) const override { return false; }
  bool String(const char* name, std::string* value) const override {
    const char* found = std::strcmp(name, "mask") == 0         ? variant_.mask
                        : std::strcmp(name, "operands") == 0   ? variant_.operands
                        : std::strcmp(name, "empty_rows") == 0 ? variant_.empty_rows
                                                               : nullptr;
    if (found != nullptr) *value = found;
    return found != nullptr;
  }

 private:
  const Variant& variant_;
};

struct Memory {
  std::vector<std::unique_ptr<void, void (*)(void*)>> blocks;
  static void* Allocate(void* self, size_t bytes) {
    auto& memory = *static_cast<Memory*>(self);
    memory.blocks.emplace_back(std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
    std::memset(memory.blocks.back().get(), 0xa5, bytes);  // kernels may not rely on zeros
    return memory.blocks.back().get();
  }
};

struct Request {
  int variant = 0;
  int64_t B = 1, S = 1, T = 1;
  std::vector<float> query, key, value;
  std::vector<uint8_t> pad;
  std::vector<int64_t> widths;  // table0
  std::vector<double> output, tolerance;
};

std::vector<float> Draw(Random* random, std::vector<double>* exact, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) exact->push_back(static_cast<double>(value = random->Unit()));
  return values;
}

Request DrawRequest(Random* random, int variant) {
  Request r;
  r.variant = variant;
  r.B = random->Range(1, 3);
  r.S = random->OneIn(4) ? random->Range(1, 3) : random->Range(4, 130);
  r.T = random->OneIn(3) ? r.S : random->Range(1, 160);
  if (kVariants[variant].offset) r.T = std::max(r.S, r.T);
  Dense dense;
  dense.B = r.B, dense.H = kHeads, dense.G = kGroups, dense.S = r.S, dense.T = r.T, dense.D = dense.Dv = kSize;
  dense.scale = 0.25;  // 1 / sqrt(kSize), the default
  dense.empty_rows = variant == 0 ? EmptyRows::kZero : EmptyRows::kMean;
  r.query = Draw(random, &dense.query, r.B * kHeads * r.S * kSize);
  r.key = Draw(random, &dense.key, r.B * kGroups * r.T * kSize);
  r.value = Draw(random, &dense.value, r.B * kGroups * r.T * kSize);
  for (int64_t b = 0; b < r.B; ++b) {
    const int64_t left = random->Range(0, r.T / 2), right = random->OneIn(2) ? r.T : random->Range(r.T / 2, r.T);
    for (int64_t k = 0; k < r.T; ++k) r.pad.push_back(k >= left && k < right);
  }
  for (int64_t h = 0; h < kHeads; ++h) r.widths.push_back(random->Range(0, 40));
  const int64_t past = kVariants[variant].offset ? r.T - r.S : 0;
  for (int64_t b = 0; b < r.B; ++b) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t q = past; q < past + r.S; ++q) {
        for (int64_t k = 0; k < r.T; ++k) {
          const bool pad = r.pad[static_cast<size_t>(b * r.T + k)] != 0;
          const int64_t width = r.widths[static_cast<size_t>(h)];
          dense.allowed.push_back(variant == 0 ? k <= q && q - k < 20 && pad
                                               : std::abs(q - k) <= width && (k < 2 || pad));
        }
      }
    }
  }
  const Answer answer = Attend(dense);
  r.output = answer.output;
  for (size_t i = 0; i < r.output.size(); ++i) {
    r.tolerance.push_back(Tolerance(DType::kF32, answer.magnitude[i / kSize], r.T, 1.0, r.output[i]));
  }
  return r;
}

Tensor Shape(void* data, DType dtype, std::initializer_list<int64_t> dims) {
  Tensor tensor;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), tensor.dims);
  return tensor;
}

void Serve(const Op& op, Request* r, const Parallel& parallel) {
  const Tensor inputs[] = {Shape(r->query.data(), DType::kF32, {r->B, kHeads, r->S, kSize}),
                           Shape(r->key.data(), DType::kF32, {r->B, kGroups, r->T, kSize}),
                           Shape(r->value.data(), DType::kF32, {r->B, kGroups, r->T, kSize}),
                           Shape(r->pad.data(), DType::kBool, {r->B, r->T}),
                           Shape(r->widths.data(), DType::kI64, {kHeads})};
  const int count = r->variant == 0 ? 4 : 5;
  const std::string where = Text("variant ", r->variant, " B ", r->B, " S ", r->S, " T ", r->T);
  Tensor output;
  Status status = op.InferOutputs(inputs, count, &output, 1);
  CHECK(status.ok(), where, ": ", status.message());
  std::vector<float> found(static_cast<size_t>(output.Elements()), std::numeric_limits<float>::quiet_NaN());
  output.data = found.data();
  Memory memory;
  status = op.Run(inputs, count, &output, 1, {parallel, Memory::Allocate, &memory});
  CHECK(status.ok(), where, ": ", status.message());
  CHECK(found.size() == r->output.size(), where);
  for (size_t i = 0; i < found.size(); ++i) {
    CHECK(std::abs(static_cast<double>(found[i]) - r->output[i]) <= r->tolerance[i], where, " element ", i, ": ",
          found[i], ", expected ", r->output[i]);
  }
}

double SoakSeconds() {
  const char* given = std::getenv("STOF_SOAK_SECONDS");
  return given == nullptr ? 2.0 : std::atof(given);
}

TEST(OpServesChangingShapesOnSeveralThreads) {
  const OpDescription& description = []() -> const OpDescription& {
    int count = 0;
    const OpDescription* const* all = AllOps(&count);
    const auto* const* found = std::find_if(
        all, all + count, [](const OpDescription* op) { return std::string(op->name) == "StofAttention"; });
    CHECK(found != all + count);
    return **found;
  }();
  std::unique_ptr<Op> ops[2];
  for (int i = 0; i < 2; ++i) {
    Status status = description.create(VariantAttributes(kVariants[i]), &ops[i]);
    CHECK(status.ok(), status.message());
    const std::vector<Tensor> unknown(i == 0 ? 4 : 5);
    status = ops[i]->Prepare(unknown.data(), static_cast<int>(unknown.size()));
    CHECK(status.ok(), status.message());
  }
  Random random(5);
  std::vector<Request> requests;
  for (int i = 0; i < kShapes; ++i) requests.push_back(DrawRequest(&random, i % 2));

  // Every request once by each thread at least, then until the time is over.
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(SoakSeconds());
  std::atomic<int64_t> served{0};
  std::atomic<int64_t> most_bytes{0};
  std::string failures[kThreads];
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      try {
        ThreadPool pool(t % 2 + 1);
        Random order(static_cast<uint64_t>(t));
        for (int64_t i = 0; i < kShapes || std::chrono::steady_clock::now() < end; ++i) {
          const int64_t at = i < kShapes ? (i + t * kShapes / kThreads) % kShapes : order.Range(0, kShapes - 1);
          Request& request = requests[static_cast<size_t>(at)];
          Serve(*ops[request.variant], &request, pool.view());
          served.fetch_add(1);
          const int64_t bytes = BlockMaskCache::Global().GetStats().bytes;
          int64_t seen = most_bytes.load();
          while (bytes > seen && !most_bytes.compare_exchange_weak(seen, bytes)) {
          }
        }
      } catch (const Failure& failure) {
        failures[t] = failure.message;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) CHECK(failure.empty(), failure);
  const BlockMaskCache::Stats stats = BlockMaskCache::Global().GetStats();
  CHECK(most_bytes.load() > 0 && most_bytes.load() <= int64_t{64} << 20, "the cache held ", most_bytes.load(),
        " bytes");
  CHECK(stats.hits > 0, "no block mask was used twice");
  CountCases(served.load());
}

// A cache that holds less than the requests need drops masks while others compute with them.
TEST(SmallCachesKeepTheirLimitUnderThreads) {
  MaskExpr expr;
  CHECK(MaskExpr::Parse("k <= q and (q * 7 + k) % 5 != 0", {}, &expr).ok());
  const uint64_t hash = expr.Hash();
  constexpr int64_t kLimit = 200'000;
  BlockMaskCache cache(kLimit);
  std::string failures[kThreads];
  std::vector<std::thread> threads;
  const int rounds = std::max(Cases(400), 80);  // enough to fill it several times
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      try {
        Random order(static_cast<uint64_t>(t));
        for (int i = 0; i < rounds; ++i) {
          const int64_t length = 64 + order.Range(0, kShapes - 1);
          std::shared_ptr<const BlockMask> mask;
          const Status status = cache.Get(expr, hash, {1, 1, length, length, 0}, 32, 64, &mask);
          CHECK(status.ok(), status.message());
          CHECK(mask->S == length && mask->rows == (length + 31) / 32 && mask->Bytes() < kLimit, length);
          const BlockMaskCache::Stats stats = cache.GetStats();
          CHECK(stats.bytes <= kLimit, stats.bytes);
        }
      } catch (const Failure& failure) {
        failures[t] = failure.message;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) CHECK(failure.empty(), failure);
  const BlockMaskCache::Stats stats = cache.GetStats();
  CHECK(stats.builds > stats.entries && stats.entries > 0, stats.builds, " built, ", stats.entries, " kept");
  CHECK(stats.hits + stats.misses == int64_t{kThreads} * rounds, stats.hits, " + ", stats.misses);
  CountCases(kThreads * rounds);
}

}  // namespace
}  // namespace stof::test
