// SPDX-License-Identifier: Apache-2.0
// Skip by score in the sm_90a kernels: whether a consumer warpgroup can do without a KV tile
// (docs/reference/operators.md, "Skip by score"), and which tiles are tested at all.
#ifndef STOF_CUDA_ATTENTION_SM90_SKIP_TEST_CUH_
#define STOF_CUDA_ATTENTION_SM90_SKIP_TEST_CUH_

#include "cuda/attention/sm90/api.h"
#include "cuda/attention/sm90/softmax.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// For one thread of a kernel of shape S: its two rows. In units of log2, as the row max.
template <typename S>
class SkipTest {
  static constexpr int kScores = S::kN / 2;

 public:
  // distance: SkipDistance in units of log2. row_max: the largest scores of the first tile. is_row: whether there is
  // such a query; others keep no tile.
  __device__ __forceinline__ SkipTest(float distance, const float (&row_max)[2], const bool (&is_row)[2])
      : distance_(distance) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Before a row has a key, every score of it keeps a tile, but -inf does not.
      limits_[r] = is_row[r] ? fmaxf(row_max[r] - distance, kLowestFloat) : INFINITY;
    }
  }

  // Whether this thread's scores keep the tile, once multiplied by `scale`. NaN does. The row max counts as a score: it
  // may have been raised in a tile that was not tested.
  __device__ __forceinline__ bool Keeps(float scale, const float (&row_max)[2], const float (&s)[kScores]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      constexpr int kChains = 4;
      float tops[kChains];
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        const float pair = MaxOrNan(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]);
        tops[j % kChains] = j < kChains ? pair : MaxOrNan(tops[j % kChains], pair);
      }
      tops_[r] = MaxOrNan(MaxOrNan(tops[0], tops[1]), MaxOrNan(tops[2], tops[3])) * scale;
      limits_[r] = fmaxf(limits_[r], row_max[r] - distance_);
    }
    return !(tops_[0] < limits_[0]) || !(tops_[1] < limits_[1]);
  }

  // Of the tile that was tested last: whether this thread has an allowed pair in it.
  __device__ __forceinline__ bool HasPair() const { return tops_[0] > -INFINITY || tops_[1] > -INFINITY; }

  // Takes the largest scores of the tile that was tested last into account, but of no row with a NaN in it.
  __device__ __forceinline__ void Raise() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = MaxOrNan(tops_[r], __shfl_xor_sync(~0u, tops_[r], 1));
      top = MaxOrNan(top, __shfl_xor_sync(~0u, top, 2));
      limits_[r] = fmaxf(limits_[r], top - distance_);
    }
  }

 private:
  static constexpr float kLowestFloat = -0x1.fffffep127f;
  const float distance_;
  float limits_[2];  // scores below can be left out
  float tops_[2];    // this thread's largest scores in the tile that was tested last
};

// Which tiles of a work tile are tested, and what became of them. The same in all threads of a warpgroup.
class SkipRecord {
 public:
  // Goes to the next tile.
  __device__ __forceinline__ void Next() { ++tile_; }
  __device__ __forceinline__ bool IsTested() const { return tile_ == next_; }
  __device__ __forceinline__ void Keep() { next_ = tile_ + 1 + UntestedTiles(++kept_tests_); }
  __device__ __forceinline__ void Skip() { kept_tests_ = 0, next_ = tile_ + 1, ++left_out_; }
  // The tile that was skipped last has no allowed pair of the warpgroup: it does not count.
  __device__ __forceinline__ void Discount() { ++discounted_; }
  __device__ __forceinline__ int scored() const { return tile_ + 1 - discounted_; }
  __device__ __forceinline__ int skipped() const { return left_out_ - discounted_; }

 private:
  int tile_ = 0, next_ = 1;  // this tile, and the next one that is tested
  int kept_tests_ = 0;       // tests in a row that kept their tile
  int left_out_ = 0, discounted_ = 0;
};

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_SKIP_TEST_CUH_
