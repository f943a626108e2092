// SPDX-License-Identifier: Apache-2.0
// The state of the process in a child of fork(), and after failed allocations. Threads are held at a certain place by a
// call in one of their allocations, never by a delay.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/common/one_process.h"
#include "plugins/core/c_api/c_api.h"
#include "plugins/core/host/fork_guard.h"
#include "plugins/core/host/thread_pool.h"
#include "plugins/core/mask/block_mask_cache.h"
#include "tests/cpp/check.h"
#include "tests/cpp/memory.h"

namespace stof::test {
namespace {

// Runs fn in a child and fails where a check fails there, or where the child does not end: SIGALRM ends it.
template <typename Fn>
void InChild(Fn fn) {
  std::fflush(nullptr);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(120);
    int result = 0;
    try {
      fn();
    } catch (const Failure& failure) {
      std::fprintf(stderr, "in the child: %s\n", failure.message.c_str());
      result = 1;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in the child: threw %s\n", error.what());
      result = 1;
    }
    _exit(result);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(!WIFSIGNALED(status), "the child was ended by signal ", WTERMSIG(status), ", 14: it waited for ever");
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child gave ", WEXITSTATUS(status));
}

// A thread whose checks fail in the thread that joins it.
class CheckedThread {
 public:
  explicit CheckedThread(std::function<void()> run)
      : thread_([this, run = std::move(run)] {
          try {
            run();
          } catch (const Failure& failure) {
            failure_ = failure.message;
          }
        }) {}
  void Join() {
    thread_.join();
    CHECK(failure_.empty(), failure_);
  }

 private:
  std::string failure_;
  std::thread thread_;
};

// A place where a thread stops until it is let go.
class Stop {
 public:
  // Of the thread that is held.
  void Here() {
    std::unique_lock<std::mutex> lock(mutex_);
    here_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return go_; });
  }
  void WaitUntilHere() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return here_; });
  }
  void Go() {
    const std::lock_guard<std::mutex> lock(mutex_);
    go_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool here_ = false, go_ = false;
};

// An expression whose element masks take some 20 KiB: no other part of a build allocates 8 KiB at once.
struct Irregular {
  Irregular() { CHECK(MaskExpr::Parse("(q * q + k * 5) % 13 < 6", {}, &expr).ok()); }
  Status Get(BlockMaskCache* cache, std::shared_ptr<const BlockMask>* mask) const {
    return cache->Get(expr, expr.Hash(), sizes, 32, 64, mask);
  }
  MaskExpr expr;
  ExprSizes sizes = {1, 1, 400, 400, 0};
};
constexpr size_t kOfElementMasks = 8 << 10;

TEST(ForkedChildBuildsTheMaskOfAnotherThread) {
  const Irregular wanted;
  BlockMaskCache cache;
  BlockMask expected;
  CHECK(BuildBlockMask(wanted.expr, wanted.sizes, 32, 64, &expected).ok());
  Stop stop;
  std::shared_ptr<const BlockMask> built, waited;
  CheckedThread builder([&] {
    bool held = false;
    OnAllocation() = [&](size_t bytes) {
      if (bytes < kOfElementMasks || held) return;
      held = true;
      stop.Here();
    };
    const Status status = wanted.Get(&cache, &built);
    OnAllocation() = nullptr;
    CHECK(status.ok() && held);
  });
  stop.WaitUntilHere();
  // May or may not have begun to wait when the process forks: the child has to do without it either way.
  CheckedThread waiter([&] { CHECK(wanted.Get(&cache, &waited).ok()); });
  for (int child = 0; child < 2; ++child) {
    InChild([&] {
      for (int time = 0; time < 2; ++time) {
        std::shared_ptr<const BlockMask> mask;
        const Status status = wanted.Get(&cache, &mask);
        CHECK(status.ok(), status.message());
        CHECK(mask->bits == expected.bits && mask->key_tile == expected.key_tile && mask->row_ptr == expected.row_ptr);
      }
      CHECK(cache.GetStats().builds == 1 && cache.GetStats().entries == 1);
      InChild([&] {  // a child's child
        std::shared_ptr<const BlockMask> mask;
        CHECK(wanted.Get(&cache, &mask).ok() && cache.GetStats().builds == 1);
      });
    });
  }
  stop.Go();
  builder.Join();
  waiter.Join();
  CHECK(built != nullptr && built == waited && built->bits == expected.bits);
  CHECK(cache.GetStats().builds == 1);
  CountCases(8);
}

struct Pair {
  int first = 7, second = 7;  // equal, but while they are changed
  bool operator==(const Pair& other) const { return first == other.first && second == other.second; }
};

TEST(ForkedChildFindsNoLockThatAnotherThreadHeld) {
  ForkSafe<Pair> changing, at_rest;
  *changing.Lock() = {1, 1};
  *at_rest.Lock() = {2, 2};
  Stop stop;
  CheckedThread holder([&] {
    const auto pair = changing.Lock();
    pair->first = 3;
    stop.Here();
    pair->second = 3;
  });
  stop.WaitUntilHere();
  InChild([&] {
    CHECK(*changing.Lock() == Pair());  // made anew
    CHECK(*at_rest.Lock() == Pair({2, 2}));
    *changing.Lock() = {4, 4};
    CHECK(*changing.Lock() == Pair({4, 4}));
    InChild([&] { CHECK(*changing.Lock() == Pair({4, 4})); });
  });
  stop.Go();
  holder.Join();
  CHECK(*changing.Lock() == Pair({3, 3}));
  CountCases(4);
}

// What ONE_THREAD_TEST is checked by.
TEST(StartedThreadsAreCounted) {
#if defined(STOF_COUNTS_THREADS)
  constexpr int64_t kCounted = 1;
#else
  constexpr int64_t kCounted = 0;
#endif
  const int64_t before = StartedThreads();
  const ThreadPool one(1);
  CHECK(StartedThreads() == before);
  const ThreadPool three(3);
  CHECK(StartedThreads() == before + 2 * kCounted, StartedThreads() - before);
  std::thread([] {}).join();
  CHECK(StartedThreads() == before + 3 * kCounted, StartedThreads() - before);
  CountCases(3);
}

TEST(ForkedChildRunsWithoutThePoolsThreads) {
  for (const bool used : {false, true}) {
    auto pool = std::make_unique<ThreadPool>(3);
    std::vector<int> seen(64, 0);
    const auto run = [&] {
      const Parallel team = pool->view();
      team.run(team.self, [](void* user, size_t i) { ++(*static_cast<std::vector<int>*>(user))[i]; }, 64, &seen);
    };
    if (used) run();
    const int before = used ? 1 : 0;
    InChild([&] {
      for (int time = 1; time <= 3; ++time) {
        run();
        for (const int count : seen) CHECK(count == before + time, count);
      }
      pool.reset();  // waits for nobody
    });
    run();
    for (const int count : seen) CHECK(count == before + 1, count);
  }
  CountCases(2);
}

// An operator of the C ABI, whose calls keep a team of threads, with its mask and output.
class Attention {
 public:
  explicit Attention(const char* mask) {
    const stof_attribute attribute = {"mask", 2, 0, 0, mask};
    CHECK(stof_op_create("StofAttention", &attribute, 1, &op_, error_, sizeof error_) == 0, error_);
  }
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;
  ~Attention() { stof_op_destroy(op_); }

  // The result of stof_op_run. Every element of the output is 1 where it is 0: rows have a key, and values are 1.
  int Run(int threads) {
    stof_tensor inputs[3], output;
    for (stof_tensor& input : inputs) input = {ones_.data(), 1, 4, {1, 1, kLength, 1}};
    std::fill(output_.begin(), output_.end(), 0.0f);
    output = {output_.data(), 1, 4, {1, 1, kLength, 1}};
    return stof_op_run(op_, inputs, 3, &output, 1, threads, error_, sizeof error_);
  }
  void CheckRun(int threads) {
    CHECK(Run(threads) == 0, error_);
    for (const float x : output_) CHECK(std::abs(x - 1.0f) < 1e-5f, x);
  }
  const char* error() const { return error_; }

 private:
  static constexpr int64_t kLength = 200;
  stof_op* op_ = nullptr;
  std::vector<float> ones_ = std::vector<float>(kLength, 1.0f), output_ = std::vector<float>(kLength);
  char error_[256] = "";
};

TEST(ForkedChildRunsOperators) {
  const int threads = kIsThreadSanitizer ? 1 : 2;  // ThreadSanitizer ends a child that starts threads
  Attention attention("k <= q and (q * k) % 7 < 6");
  attention.CheckRun(2);
  InChild([&] {
    attention.CheckRun(threads);
    Attention own("k <= q and (q * k) % 11 < 9 or k == q");
    own.CheckRun(threads);
  });
  attention.CheckRun(2);
  CountCases(4);
}

TEST(SingleProcessIsThatOfItsFirstUser) {
  SingleProcess used, unused;
  CHECK(used.Claim() && used.Claim());
  InChild([&] {
    CHECK(!used.Claim() && !used.Claim());
    CHECK(unused.Claim() && unused.Claim());
    InChild([&] { CHECK(!used.Claim() && !unused.Claim()); });
  });
  CHECK(used.Claim() && unused.Claim());
  CountCases(8);
}

Status Twice(int x, int* to) {
  *to = 2 * x;
  return Status();
}

TEST(ForkedChildIsToldThatItCannotUseCuda) {
  int result = 0;
  InChild([&] {  // before anybody has
    CHECK(cuda::InOneProcess<&Twice>::Call(1, &result).ok() && result == 2);
  });
  CHECK(cuda::InOneProcess<&Twice>::Call(3, &result).ok() && result == 6);
  InChild([&] {
    const Status status = cuda::InOneProcess<&Twice>::Call(4, &result);
    CHECK(!status.ok() && result == 6 && !cuda::IsCudaUsable());
    CHECK(status.message().find("'spawn'") != std::string::npos, status.message());
  });
  CountCases(3);
}

// Every allocation of a build fails once, and the one after it, if any, works: the slot is free again each time.
ONE_THREAD_TEST(CacheForgetsBuildsWithoutMemory) {
  const Irregular wanted;
  BlockMaskCache cache;
  int failures = 0;
  for (int64_t allowed = 0;; ++allowed) {
    std::shared_ptr<const BlockMask> mask;
    Status status;
    AllocationsLeft() = allowed;
    try {
      status = wanted.Get(&cache, &mask);
    } catch (const std::bad_alloc&) {  // there was no memory for a message
      status = Status::Error("");
    }
    AllocationsLeft() = -1;
    if (status.ok()) break;
    ++failures;
    CHECK(mask == nullptr && cache.GetStats().entries == 0 && cache.GetStats().bytes == 0, allowed);
  }
  CHECK(failures > 50, failures);
  std::shared_ptr<const BlockMask> mask;
  CHECK(wanted.Get(&cache, &mask).ok());
  CHECK(cache.GetStats().builds == 1 && cache.GetStats().entries == 1);
  CountCases(failures);
}

// The builder has no memory while others wait, or are about to: they get an error, or build the mask themselves.
TEST(CacheWakesThoseThatWaitForABuildWithoutMemory) {
  const Irregular wanted;
  for (int i = 0, count = Cases(50); i < count; ++i) {
    BlockMaskCache cache;
    Stop stop;
    CheckedThread builder([&] {
      OnAllocation() = [&](size_t bytes) {
        if (bytes < kOfElementMasks || MemoryIsRefused()) return;
        stop.Here();
        MemoryIsRefused() = true;
      };
      std::shared_ptr<const BlockMask> mask;
      bool failed = false;
      try {
        failed = !wanted.Get(&cache, &mask).ok();
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      OnAllocation() = nullptr;
      MemoryIsRefused() = false;
      CHECK(failed);
    });
    stop.WaitUntilHere();
    std::vector<std::unique_ptr<CheckedThread>> waiters;
    for (int w = 0; w < 3; ++w) {
      waiters.push_back(std::make_unique<CheckedThread>([&] {
        std::shared_ptr<const BlockMask> mask;
        const Status status = wanted.Get(&cache, &mask);
        CHECK(status.ok() == (mask != nullptr));
      }));
    }
    stop.Go();
    builder.Join();
    for (const auto& waiter : waiters) waiter->Join();
    std::shared_ptr<const BlockMask> mask;
    CHECK(wanted.Get(&cache, &mask).ok() && cache.GetStats().entries == 1);
  }
  CountCases(Cases(50));
}

// Every allocation of an operator's first runs fails once; the operator works as soon as there is memory.
ONE_THREAD_TEST(OperatorsWorkAfterRunsWithoutMemory) {
  int failures = 0;
  for (int64_t allowed = 0;; ++allowed) {
    stof_block_mask_cache_stats(nullptr, 1);
    Attention attention("k <= q and (q * k + 3) % 19 < 17 or k == q");
    AllocationsLeft() = allowed;
    const int result = attention.Run(1);
    AllocationsLeft() = -1;
    attention.CheckRun(1);
    if (result == 0) break;
    ++failures;
    CHECK(attention.error()[0] != '\0');
  }
  CHECK(failures > 20, failures);
  CountCases(failures);
}

}  // namespace
}  // namespace stof::test
