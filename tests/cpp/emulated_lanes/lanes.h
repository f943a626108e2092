// SPDX-License-Identifier: Apache-2.0
// Device code in the tests of the host: a barrier of threads that stand for lanes, and mma.sync of what they hold. The
// headers in place of cuda_runtime.h share it; it defines no name of CUDA.
#ifndef STOF_TESTS_CPP_EMULATED_LANES_LANES_H_
#define STOF_TESTS_CPP_EMULATED_LANES_LANES_H_

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>

namespace stof::test::emulated {

// A barrier of `count` threads.
class Rendezvous {
 public:
  explicit Rendezvous(int count) : count_(count) {}
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t turn = turn_;
    if (++arrived_ == count_) {
      arrived_ = 0, ++turn_;
      all_.notify_all();
      return;
    }
    all_.wait(lock, [&] { return turn_ != turn; });
  }
  // Counts as a thread that waits, but goes on.
  void Arrive() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (++arrived_ < count_) return;
    arrived_ = 0, ++turn_;
    all_.notify_all();
  }

 private:
  const int count_;
  int arrived_ = 0;
  int64_t turn_ = 0;
  std::mutex mutex_;
  std::condition_variable all_;
};

// Element i of a word of two bf16.
inline float ElementOf(uint32_t word, int i) {
  const uint32_t bits = (word >> 16 * i) << 16;
  float x = 0.0f;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The operands of a lane in mma.sync.m16n8k16 of bf16.
struct Fragments {
  uint32_t a[4] = {}, b[2] = {};
};

// Adds the products of all lanes' operands to the accumulators of one, as the PTX ISA defines the fragments.
inline void MultiplyFragments(const Fragments (&of)[32], int lane, float (&c)[4]) {
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; ++k) {
      // Row 8 r + g, column 8 c + 2 t + i of A is element i of word 2 c + r of lane 4 g + t; row 8 r + 2 t + i, column
      // g of B is element i of word r of that lane.
      c[e] += ElementOf(of[row % 8 * 4 + k % 8 / 2].a[k / 8 * 2 + row / 8], k % 2) *
              ElementOf(of[column * 4 + k % 8 / 2].b[k / 8], k % 2);
    }
  }
}

}  // namespace stof::test::emulated
#endif  // STOF_TESTS_CPP_EMULATED_LANES_LANES_H_
