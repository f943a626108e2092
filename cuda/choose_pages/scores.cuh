// SPDX-License-Identifier: Apache-2.0
// Scores of pages: an upper bound of the scores of their keys. For query q and a page with the key bounds min and max,
//   sum over d of max(q_d min_d, q_d max_d) = [min(q, 0), max(q, 0)] . [min, max]
// is a product of rows of 2 D elements. So a warp multiplies the key bounds of 16 pages by eight query rows at once on
// tensor cores. As in the split-KV decode kernel, key bounds go from memory to registers 16 bytes at a time, and the
// k-indices of both operands are permuted alike.
#ifndef STOF_CUDA_CHOOSE_PAGES_SCORES_CUH_
#define STOF_CUDA_CHOOSE_PAGES_SCORES_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/choose_pages/choose.h"
#include "cuda/choose_pages/loads.cuh"
#include "cuda/choose_pages/page_bounds.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_sm80.cuh"

namespace stof {
namespace cuda {

// Numbers whose order as unsigned integers is that of scores. NaN is above all of them; the least one is above 0.
__device__ __forceinline__ uint32_t SortableScore(float x) {
  if (isnan(x)) return ~0u;
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// The first CTAs, kNewPages for each KV head, compute the key bounds of a page with new rows where
// PageChoiceParams::key is given. The others score kPages pages of a KV head each.
template <int kHead, typename T>
class PageScores {
 public:
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kPages = 16 * kWarps;
  static constexpr int kNewPages = 2;  // that a step of at most 16 tokens may touch
  using Bounds = PageBoundsOf<T, 8, kThreads>;
  using Shared = typename Bounds::Shared;

  __device__ explicit PageScores(const PageChoiceParams& params)
      : params_(params), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  __device__ void Run(Shared& shared) {
    const int updates = params_.key != nullptr ? params_.B * params_.G * kNewPages : 0;
    int cta = blockIdx.x;
    if (cta < updates) {
      Wait();
      return Update(cta / kNewPages, cta % kNewPages, shared);
    }
    cta -= updates;
    const int of_head = (params_.pages + kPages - 1) / kPages;
    Score(cta / of_head, cta % of_head * kPages + warp_ * 16);
  }

 private:
  static constexpr int kChunks = kHead / 16;  // of 32 elements of a page's key bounds; four lanes load one

  // All CTAs wait: the next kernel may read what kernels before the previous one have written.
  static __device__ __forceinline__ void Wait() {
    WaitForPrevious();
    LetNextStart();
  }

  __device__ T* BoundsAt(int b, int g, int64_t page) const {
    return static_cast<T*>(params_.bounds) + b * params_.bounds_stride_b + g * params_.bounds_stride_g +
           page * params_.bounds_stride_page;
  }

  __device__ void Update(int head, int number, Shared& shared) const {
    const int b = head / params_.G, g = head % params_.G;
    const int first = LoadFresh(params_.first_rows + b), page = (first >> params_.shift) + number;
    const int rows = 1 << params_.shift, keys = first + params_.S, first_key = page << params_.shift;
    if (first_key >= keys || keys > params_.T) return;
    if (params_.is_invalid != nullptr && LoadFresh(params_.is_invalid + b) != 0) return;
    const T* const from = static_cast<const T*>(params_.key) + b * params_.key_stride.b + g * params_.key_stride.h +
                          first_key * params_.key_stride.s;
    Bounds::Compute(from, params_.key_stride.s, min(rows, keys - first_key), kHead, BoundsAt(b, g, page), shared);
  }

  __device__ void Score(int head, int first_page) {
    const int b = head / params_.G, g = head % params_.G;
    const bool reads_ahead = params_.seqlens != nullptr;
    if (!reads_ahead) Wait();
    // Of an invalid sequence seqlens may be any number.
    const int first_row = reads_ahead ? min(max(LoadFresh(params_.seqlens + b), -1), params_.T) + 1 - params_.S
                                      : LoadFresh(params_.first_rows + b);
    const PageRange range = MakePageRange(first_row, params_.S, params_.T, params_.window_left, params_.shift);
    const int begin = range.CandidatesBegin(), end = min(range.recent, params_.pages);
    const bool has_pages = first_page < end && first_page + 16 > begin && range.Candidates() > params_.chosen;
    uint32_t bounds[2][kChunks][4];
    if (has_pages) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int page = first_page + lane_ / 4 + 8 * i;
        const T* const from = BoundsAt(b, g, page);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          LoadBounds(bounds[i][c], from + 8 * (4 * c + lane_ % 4), page >= begin && page < end);
        }
      }
    }
    if (reads_ahead) Wait();
    if (!has_pages) return;
    float most[2] = {-INFINITY, -INFINITY};
    const int rows = params_.H / params_.G * params_.S;
    for (int row = lane_ / 4; row < rows + lane_ / 4; row += 8) Multiply(b, g, min(row, rows - 1), bounds, most);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) most[i] = MaxOrNan(most[i], __shfl_xor_sync(~0u, most[i], step));
      const int page = first_page + lane_ / 4 + 8 * i;
      if (lane_ % 4 == 0 && page >= begin && page < end) {
        params_.scores[static_cast<int64_t>(head) * params_.pages + page] =
            SortableScore(most[i] * fabsf(params_.scale));
      }
    }
  }

  // Multiplies the key bounds by eight query rows, of which this lane loads `row`.
  __device__ __forceinline__ void Multiply(int b, int g, int row, const uint32_t (&bounds)[2][kChunks][4],
                                           float (&most)[2]) const {
    const int head = g * (params_.H / params_.G) + row / params_.S;
    const T* const from = static_cast<const T*>(params_.query) + b * params_.query_stride.b +
                          head * params_.query_stride.h + row % params_.S * params_.query_stride.s;
    uint32_t query[kChunks / 2][4];
#pragma unroll
    for (int c = 0; c < kChunks / 2; ++c) LoadFresh(query[c], from + 8 * (4 * c + lane_ % 4));
    // The sign of the scale belongs to the query.
    const uint32_t sign = params_.scale < 0.0f ? 0x80008000u : 0u;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const bool above = c >= kChunks / 2;
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint32_t a[4] = {bounds[0][c][2 * step], bounds[1][c][2 * step], bounds[0][c][2 * step + 1],
                               bounds[1][c][2 * step + 1]};
        const uint32_t (&q)[4] = query[c % (kChunks / 2)];
        Mma<T>(sum, a, PartOf<T>(q[2 * step] ^ sign, above), PartOf<T>(q[2 * step + 1] ^ sign, above));
      }
    }
    most[0] = MaxOrNan(most[0], MaxOrNan(sum[0], sum[1]));
    most[1] = MaxOrNan(most[1], MaxOrNan(sum[2], sum[3]));
  }

  const PageChoiceParams& params_;
  const int warp_, lane_;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHOOSE_PAGES_SCORES_CUH_
