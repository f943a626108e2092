// SPDX-License-Identifier: Apache-2.0
// Measures the limits of this machine: FMA rate and read bandwidth, for the benchmark run that quotes them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <vector>

#include "cpu/isa.h"
#include "plugins/core/base/types.h"
#include "plugins/core/c_api/c_api.h"
#include "plugins/core/host/thread_pool.h"

namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

constexpr int kSteps = 20000;

// Chains of FMAs, as many as hide the latency: 4 to 5 cycles × 2 units need 10, and 16 registers allow 12. AArch64 has
// cores with 4 units, and 32 registers.
#if defined(__aarch64__)
constexpr int kChains = 24;
#else
constexpr int kChains = 12;
#endif
template <typename Vector>
__attribute__((always_inline)) inline float FmaChains(float seed) {
  Vector x = Vector{} + 0.999999f;
  Vector y = Vector{} + 1e-7f;
  Vector a[kChains];
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) a[i] = Vector{} + (seed + static_cast<float>(i));
  for (int step = 0; step < kSteps; ++step) {
    // Unrolled in full, so that every chain lives in a register. Without -ffast-math nothing may be folded.
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) a[i] = a[i] * x + y;
  }
  Vector sum = a[0];
#pragma GCC unroll 24
  for (int i = 1; i < kChains; ++i) sum += a[i];
  return sum[0];
}

typedef float Vec128 __attribute__((vector_size(16)));
typedef float Vec256 __attribute__((vector_size(32)));
typedef float Vec512 __attribute__((vector_size(64)));

#if defined(__x86_64__)
#if defined(__clang__)  // unrolls by the pragmas alone
#define STOF_UNROLLED
#else
#define STOF_UNROLLED __attribute__((optimize("O3", "unroll-loops")))
#endif
__attribute__((target("avx512f"))) STOF_UNROLLED float Fma512(float seed) { return FmaChains<Vec512>(seed); }
__attribute__((target("avx2,fma"))) STOF_UNROLLED float Fma256(float seed) { return FmaChains<Vec256>(seed); }
#endif
float Fma128(float seed) { return FmaChains<Vec128>(seed); }

struct Kernel {
  float (*run)(float) = Fma128;
  int lanes = 4;
};

Kernel BestKernel() {
#if defined(__x86_64__)
  if (stof::BestCpuIsa() >= stof::CpuIsa::kAvx512) return {Fma512, 16};
  if (stof::BestCpuIsa() >= stof::CpuIsa::kAvx2) return {Fma256, 8};
#endif
  return {};
}

std::atomic<float> sink;

double FmaRate(int threads, double seconds) {
  threads = std::clamp(threads, 1, 64);
  stof::ThreadPool pool(threads);
  const stof::Parallel parallel = pool.view();
  Kernel kernel = BestKernel();
  double best = 0;
  const auto begin = Clock::now();
  do {
    const auto slice = Clock::now();
    parallel.run(
        parallel.self,
        [](void* user, size_t i) {
          float sum = 0;
          for (int r = 0; r < 20; ++r) sum += static_cast<Kernel*>(user)->run(1.0f + static_cast<float>(i));
          sink.store(sum, std::memory_order_relaxed);
        },
        static_cast<size_t>(threads), &kernel);
    best = std::max(best, 2.0 * 20 * kSteps * kChains * kernel.lanes * threads / Seconds(slice) * 1e-9);
  } while (Seconds(begin) < seconds);
  return best;
}

double ReadBandwidth(int threads, size_t bytes, double seconds) {
  threads = std::clamp(threads, 1, 64);
  stof::ThreadPool pool(threads);
  const stof::Parallel parallel = pool.view();
  struct Job {
    std::vector<uint64_t> words;
    size_t share = 0;
  } job;
  job.share = std::max<size_t>(64, bytes / 8 / static_cast<size_t>(threads) / 64 * 64);
  job.words.assign(job.share * static_cast<size_t>(threads), 1);
  double best = 0;
  const auto begin = Clock::now();
  do {
    const auto slice = Clock::now();
    parallel.run(
        parallel.self,
        [](void* user, size_t i) {
          const auto& j = *static_cast<Job*>(user);
          const uint64_t* words = j.words.data() + i * j.share;
          uint64_t sums[8] = {};
          for (size_t w = 0; w < j.share; w += 8) {
            for (int l = 0; l < 8; ++l) sums[l] += words[w + l];
          }
          uint64_t total = 0;
          for (uint64_t sum : sums) total += sum;
          sink.store(static_cast<float>(total), std::memory_order_relaxed);
        },
        static_cast<size_t>(threads), &job);
    best = std::max(best, 8.0 * static_cast<double>(job.words.size()) / Seconds(slice) * 1e-9);
  } while (Seconds(begin) < seconds);
  return best;
}

// No exception leaves the library.
template <typename Fn>
double RateOr0(Fn fn) {
  try {
    return fn();
  } catch (const std::exception&) {
    return 0;
  }
}

}  // namespace

extern "C" double stof_fma_rate(int threads, double seconds) {
  return RateOr0([&] { return FmaRate(threads, seconds); });
}

extern "C" double stof_read_bandwidth(int threads, size_t bytes, double seconds) {
  return RateOr0([&] { return ReadBandwidth(threads, bytes, seconds); });
}
