// SPDX-License-Identifier: Apache-2.0
// Skip by score in the sm_90a kernels: which KV tiles a consumer warpgroup leaves out (docs/reference/operators.md,
// "Skip by score").
#ifndef STOF_CUDA_ATTENTION_SM90_SKIP_TEST_CUH_
#define STOF_CUDA_ATTENTION_SM90_SKIP_TEST_CUH_

#include "cuda/attention/sm90/softmax.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// For one thread of a kernel of shape S: its two rows. Scores are in units of log2, less the row max that the weights
// have, which lags behind the largest score by at most `slack`. All comparisons are of bits: non-negative numbers have
// the order of integers, and among all numbers those from -x on are the ones whose bits, unsigned, are at most those of
// -x. NaN is above every number either way.
template <typename S>
class SkipTest {
  static constexpr int kScores = S::kN / 2;
  // Elements that are tested first. Where nothing can be left out, one of them nearly always shows it.
  static constexpr int kFirst = 16;
  static constexpr uint32_t kSign = 1u << 31, kMinusInfinity = 0xff800000u;

 public:
  // distance: SkipDistance in units of log2.
  __device__ __forceinline__ explicit SkipTest(float distance) : distance_(distance) {}

  // So far above the row max may scores be before it must be raised. With more than the distance, scores above the row
  // max could be the ones to leave out.
  __device__ __forceinline__ float slack() const { return fminf(kSlack, distance_); }

  // The row max is the largest score.
  __device__ __forceinline__ void Begin() { above_[0] = above_[1] = 0; }

  // The largest score of each row among this thread's, in bits; a negative number where all are negative.
  static __device__ __forceinline__ void FindTops(const float (&s)[kScores], int32_t (&tops)[2]) {
    constexpr int kLanes = 4;
    int32_t most[2][kLanes];
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t x = __float_as_int(s[i + 2 * r]), y = __float_as_int(s[i + 2 * r + 1]);
        int32_t& lane = most[r][i / 4 % kLanes];
        lane = i / 4 < kLanes ? max(x, y) : __vimax3_s32(lane, x, y);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) tops[r] = max(__vimax3_s32(most[r][0], most[r][1], most[r][2]), most[r][3]);
  }

  // Whether the warp has to look at the tops: some row has a larger score than before.
  __device__ __forceinline__ bool Exceeds(const int32_t (&tops)[2]) const {
    return tops[0] > above_[0] || tops[1] > above_[1];
  }
  __device__ __forceinline__ bool ExceedsSlack(const int32_t (&tops)[2]) const {
    return max(tops[0], tops[1]) > __float_as_int(slack());
  }

  // Takes over tops that exceed nothing of slack.
  __device__ __forceinline__ void Raise(int32_t (&tops)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tops[r] = max(tops[r], __shfl_xor_sync(~0u, tops[r], 1));
      above_[r] = __vimax3_s32(above_[r], tops[r], __shfl_xor_sync(~0u, tops[r], 2));
    }
  }
  // Takes over what Softmax::RaiseMax has found.
  __device__ __forceinline__ void Raise(const float (&above)[2], const bool (&raised)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      above_[r] = raised[r] ? 0 : __float_as_int(fmaxf(__int_as_float(above_[r]), above[r]));  // above may be NaN
    }
  }

  // After a change of the row max or the scores above it. is_row: whether there is such a query.
  __device__ __forceinline__ void SetLimits(const float (&row_max)[2], const bool (&is_row)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t least = __float_as_uint(__int_as_float(above_[r]) - distance_) | kSign;
      const uint32_t limit = row_max[r] == -INFINITY ? kMinusInfinity : least + 1;
      limits_[r] = is_row[r] ? limit : 0;
    }
  }

  // Whether this warp's scores keep the tile.
  __device__ __forceinline__ bool Keeps(const float (&s)[kScores]) const {
    if (__any_sync(~0u, HasAny<0, kFirst>(s)) != 0) return true;
    return HasAny<kFirst, kScores>(s);
  }

 private:
  template <int kBegin, int kEnd>
  __device__ __forceinline__ bool HasAny(const float (&s)[kScores]) const {
    constexpr int kLanes = kEnd - kBegin >= 32 ? 4 : 2;
    uint32_t least[2][kLanes];
#pragma unroll
    for (int i = kBegin; i < kEnd; i += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t x = __float_as_uint(s[i + 2 * r]), y = __float_as_uint(s[i + 2 * r + 1]);
        const int at = (i - kBegin) / 4;
        uint32_t& lane = least[r][at % kLanes];
        lane = at < kLanes ? min(x, y) : __vimin3_u32(lane, x, y);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 1; c < kLanes; ++c) least[r][0] = min(least[r][0], least[r][c]);
    }
    return least[0][0] < limits_[0] || least[1][0] < limits_[1];
  }

  const float distance_;
  int32_t above_[2];    // the largest score so far, less the row max, in bits: at least 0
  uint32_t limits_[2];  // scores whose bits are below keep a tile
};

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_SKIP_TEST_CUH_
