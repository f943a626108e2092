// SPDX-License-Identifier: Apache-2.0
// RMS norm and rotary embedding of one head of one token by a warp.
#ifndef STOF_CUDA_COMMON_HEAD_TRANSFORM_CUH_
#define STOF_CUDA_COMMON_HEAD_TRANSFORM_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/mma_sm80.cuh"
#include "cuda/common/round.cuh"
#include "plugins/core/contract/head_transform.h"

namespace stof {
namespace cuda {

constexpr int kLargestHead = 256;

// kPieceElements elements that are loaded and stored at once.
template <typename T, int kPieceElements>
struct alignas(sizeof(T) * kPieceElements) Piece {
  T at[kPieceElements];
};

template <typename T, int kPieceElements>
class HeadTransform {
  using PieceOf = Piece<T, kPieceElements>;
  static constexpr int kPieces = kLargestHead / (32 * kPieceElements);  // of a lane

 public:
  // head_size: D, a parameter of the kernel as args are. row: kLargestHead floats of shared memory, of this warp alone.
  __device__ HeadTransform(const HeadTransformArgs& args, const int64_t& head_size, float* row)
      : args_(args), head_size_(head_size), lane_(threadIdx.x % 32), row_(row) {}

  // Stores elements [begin, end) of the head at `from` to `to` and `other`, each of which may be nullptr. norm: the
  // weight, or nullptr. rotates: by the table's row `position`; a token beyond the table becomes NaN. To is T, or a
  // quantized type: rows are then rounded to T and quantized by `scale`, that of the head's first element.
  template <typename To>
  __device__ void Run(const T* from, const T* norm, bool rotates, int64_t position, bool is_token, To* to,
                      typename std::common_type<To*>::type other, int begin, int end, const float* scale = nullptr,
                      int64_t scale_stride = 0) {
    const int size = static_cast<int>(head_size_);
    float x[kPieces][kPieceElements];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int d = (32 * p + lane_) * kPieceElements;
#pragma unroll
      for (int e = 0; e < kPieceElements; ++e) x[p][e] = 0.0f;
      if (d >= size) continue;
      const PieceOf piece = *reinterpret_cast<const PieceOf*>(from + d);
#pragma unroll
      for (int e = 0; e < kPieceElements; ++e) x[p][e] = ToFloat(piece.at[e]);
    }
    if (norm != nullptr) Normalize(norm, size, x);
    if (rotates) Rotate(position, is_token, size, x);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int d = (32 * p + lane_) * kPieceElements;
      if (d < begin || d >= end) continue;
      Piece<To, kPieceElements> piece;
#pragma unroll
      for (int e = 0; e < kPieceElements; ++e) {
        if constexpr (std::is_same<To, T>::value) {
          piece.at[e] = Round<T>(x[p][e]);
        } else {
          const float factor = scale[(d + e) * scale_stride];
          const float inverse = factor != 0.0f ? __frcp_rn(factor) : 1.0f;  // InverseScale
          piece.at[e] = Round<To>(__fmul_rn(ToFloat(Round<T>(x[p][e])), inverse));
        }
      }
      if (to != nullptr) *reinterpret_cast<Piece<To, kPieceElements>*>(to + d) = piece;
      if (other != nullptr) *reinterpret_cast<Piece<To, kPieceElements>*>(other + d) = piece;
    }
  }

 private:
  __device__ void Normalize(const T* weight, int size, float (&x)[kPieces][kPieceElements]) const {
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int e = 0; e < kPieceElements; ++e) sum = fmaf(x[p][e], x[p][e], sum);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const float factor = 1.0f / sqrtf(sum / static_cast<float>(size) + args_.epsilon);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int d = (32 * p + lane_) * kPieceElements;
#pragma unroll
      for (int e = 0; e < kPieceElements; ++e) {
        if (d < size) x[p][e] = x[p][e] * factor * ToFloat(weight[d + e]);
      }
    }
  }

  // Rotates elements with their partners, which other lanes may have: the row goes through shared memory. A token
  // beyond the table becomes NaN, so that later steps do not attend a wrong key. Padding may have any position.
  __device__ void Rotate(int64_t position, bool is_token, int size, float (&x)[kPieces][kPieceElements]) {
    if (position < 0 || position >= args_.rotary_rows) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
#pragma unroll
        for (int e = 0; e < kPieceElements; ++e) x[p][e] = is_token ? NAN : x[p][e];
      }
      return;
    }
    const int half = static_cast<int>(args_.rotary_size / 2), offset = static_cast<int>(args_.rotary_offset);
    const auto* cos = static_cast<const T*>(args_.cos) + position * half;
    const auto* sin = static_cast<const T*>(args_.sin) + position * half;
    __syncwarp();  // all lanes have read the row of the last token
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int d = (32 * p + lane_) * kPieceElements;
#pragma unroll
      for (int e = 0; e < kPieceElements; ++e) {
        if (d < size) row_[d + e] = x[p][e];
      }
    }
    __syncwarp();
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int e = 0; e < kPieceElements; ++e) {
        const int d = (32 * p + lane_) * kPieceElements + e - offset;  // in the rotated part
        if (d < 0 || d >= 2 * half) continue;
        const bool is_first = args_.is_interleaved ? d % 2 == 0 : d < half;
        const int pair = args_.is_interleaved ? d / 2 : is_first ? d : d - half;
        const int partner = args_.is_interleaved ? d ^ 1 : is_first ? d + half : d - half;
        const float turned = row_[offset + partner] * ToFloat(sin[pair]);
        x[p][e] = x[p][e] * ToFloat(cos[pair]) + (is_first ? -turned : turned);
      }
    }
  }

  const HeadTransformArgs& args_;
  const int64_t& head_size_;
  const int lane_;
  float* const row_;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_HEAD_TRANSFORM_CUH_
