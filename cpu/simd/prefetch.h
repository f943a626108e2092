// SPDX-License-Identifier: Apache-2.0
// Software prefetch.
#ifndef STOF_CPU_SIMD_PREFETCH_H_
#define STOF_CPU_SIMD_PREFETCH_H_

#include <cstdint>

namespace stof {
namespace cpu {
namespace {

// A queue of rows to prefetch into the L2 cache, a few cache lines at a time between computations. Hardware prefetchers
// stop at the end of a page and do not see rows that are a page apart.
//
// kMost: calls of Add between two of Clear; further ones do nothing.
template <uint32_t kMost>
class PrefetchQueueOf {
 public:
  void Clear() { count_ = block_ = 0, row_ = line_ = 0, total_ = 0; }
  void Add(const void* at, int64_t stride, int64_t rows, int64_t bytes) {
    if (count_ >= kMost || rows <= 0) return;
    Block* block = &blocks_[count_++];
    block->at = static_cast<const char*>(at), block->stride = stride;
    block->rows = rows, block->lines = (bytes + kLine - 1) / kLine;
    total_ += block->rows * block->lines;
  }
  int64_t lines() const { return total_; }
  void Fetch(int64_t lines) {
    while (lines > 0 && block_ < count_) {
      const Block& block = blocks_[block_];
      const char* at = block.at + row_ * block.stride + line_ * kLine;
      const int64_t some = lines < block.lines - line_ ? lines : block.lines - line_;
      for (int64_t i = 0; i < some; ++i) __builtin_prefetch(at + i * kLine, 0, 2);
      lines -= some;
      line_ += some;
      if (line_ < block.lines) return;
      line_ = 0;
      if (++row_ < block.rows) continue;
      row_ = 0;
      ++block_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Block {
    const char* at;
    int64_t stride, rows, lines;
  };
  Block blocks_[kMost];
  uint32_t count_ = 0, block_ = 0;
  int64_t row_ = 0, line_ = 0, total_ = 0;
};
using PrefetchQueue = PrefetchQueueOf<16>;

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_PREFETCH_H_
