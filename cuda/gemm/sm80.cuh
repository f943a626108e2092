// SPDX-License-Identifier: Apache-2.0
// GEMM with an epilogue for compute capability 8.0 and later: tiles of 128 x 128 (64 columns of a pair), 8 warps of
// 64 x 32, mma.sync m16n8k16 with fp32 accumulators, three stages by cp.async.
#ifndef STOF_CUDA_GEMM_SM80_CUH_
#define STOF_CUDA_GEMM_SM80_CUH_

#include "cuda/common/launch.cuh"
#include "cuda/gemm/epilogue.cuh"

namespace stof {
namespace cuda {
namespace gemm80 {

constexpr int kRows = 128, kWide = 128, kDepth = 32, kStages = 3, kThreads = 256;
constexpr uint32_t kBytesA = kRows * kDepth * 2, kBytesB = kDepth * kWide * 2, kBytes = kBytesA + kBytesB;
constexpr int kBand = 8;  // tiles of rows that are taken together for each tile of columns

// 16-byte pieces of a row of a (64 bytes) and of b (256 bytes), exchanged so that 8 rows meet every bank once. A
// transposed b is stored like a.
__device__ __forceinline__ uint32_t PlaceA(int row, int piece) {
  return static_cast<uint32_t>(row * 64 + ((piece ^ (row / 2 % 4)) << 4));
}
__device__ __forceinline__ uint32_t PlaceB(int row, int piece) {
  return static_cast<uint32_t>(row * 256 + ((piece ^ (row % 8)) << 4));
}

// Eight elements of a row from `column` on, zeros beyond `columns` or where the row is none, to shared memory.
template <bool kVectors>
__device__ __forceinline__ void Bring(uint32_t to, const void* base, int64_t row_begin, bool row, int column,
                                      int columns) {
  const auto* const from = static_cast<const uint16_t*>(base);
  if constexpr (kVectors) {
    const bool valid = row && column < columns;  // columns are a multiple of 8
    CopyAsync16(to, from + (valid ? row_begin + column : 0), valid);
  } else {
    uint32_t word[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (row && column + i < columns) {
        word[i / 2] |= static_cast<uint32_t>(from[row_begin + column + i]) << 16 * (i % 2);
      }
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
  }
}

template <typename T>
__device__ __forceinline__ float Element(const void* base, int64_t at) {
  return ToFloat(static_cast<const T*>(base)[at]);
}

// kIsBTransposed: b0 is [N, K].
// Longer than 80 lines: copies, matmul and epilogue share a thread's coordinates and its accumulators, in registers.
template <typename T, bool kPair, bool kVectors, bool kIsBTransposed>
__global__ void __launch_bounds__(kThreads, 2) GemmSm80(const GemmParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  static_assert(!kPair || !kIsBTransposed, "a pair has no transposed b");
  constexpr int kColumns = kPair ? kWide / 2 : kWide;  // of the output
  const uint32_t base = SharedAddress(shared);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int m_tiles = (p.M - 1) / kRows + 1, n_tiles = (p.N - 1) / kColumns + 1;
  const int tile = static_cast<int>(blockIdx.x);
  const int band = tile / (kBand * n_tiles), rest = tile % (kBand * n_tiles);
  const int high = min(kBand, m_tiles - band * kBand);
  const int m0 = (band * kBand + rest % high) * kRows, n0 = rest / high * kColumns;
  const int steps = (p.K + kDepth - 1) / kDepth;

  const auto bring = [&](int step) {
    const uint32_t a = base + static_cast<uint32_t>(step % kStages) * kBytes, b = a + kBytesA;
    const int k0 = step * kDepth;
#pragma unroll
    for (int i = 0; i < kRows * 4 / kThreads; ++i) {
      const int at = thread + i * kThreads, row = at / 4, piece = at % 4;
      Bring<kVectors>(a + PlaceA(row, piece), p.a, static_cast<int64_t>(m0 + row) * p.K, m0 + row < p.M, k0 + 8 * piece,
                      p.K);
    }
    if constexpr (kIsBTransposed) {
#pragma unroll
      for (int i = 0; i < kWide * 4 / kThreads; ++i) {
        const int at = thread + i * kThreads, row = at / 4, piece = at % 4;
        Bring<kVectors>(b + PlaceA(row, piece), p.b0, (n0 + row) * p.stride, n0 + row < p.N, k0 + 8 * piece, p.K);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kDepth * 16 / kThreads; ++i) {
        const int at = thread + i * kThreads, row = at / 16, piece = at % 16;
        const bool second = kPair && piece >= 8;
        Bring<kVectors>(b + PlaceB(row, piece), second ? p.b1 : p.b0, (k0 + row) * p.stride, k0 + row < p.K,
                        n0 + 8 * (kPair ? piece % 8 : piece), p.N);
      }
    }
  };

  // A warp's 64 rows and 32 columns; of a pair the same 16 columns of both matmuls.
  const int wm = warp % 2 * 64, wn = warp / 2 * (kPair ? 16 : 32);
  float c[4][4][4] = {};
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) bring(s);
    CommitCopies();
  }
  for (int step = 0; step < steps; ++step) {
    WaitCopies<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < steps) bring(step + kStages - 1);
    CommitCopies();
    const uint32_t a = base + static_cast<uint32_t>(step % kStages) * kBytes, b = a + kBytesA;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t rows[4][4], columns[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) LoadMatrix4(rows[i], a + PlaceA(wm + 16 * i + lane % 16, k / 8 + lane / 16));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = kPair ? wn + 64 * j : wn + 16 * j;
        if constexpr (kIsBTransposed) {
          LoadMatrix4(columns[j], b + PlaceA(column + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2));
        } else {
          LoadMatrix4Transposed(columns[j], b + PlaceB(k + lane % 16, column / 8 + lane / 16));
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) Mma<T>(c[i][j], rows[i], columns[j / 2][j % 2 * 2], columns[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
  WaitCopies<0>();

  // c[i][j]: rows 16 i + lane / 4 (and 8 below), columns 8 j + 2 (lane % 4); of a pair j = 2, 3 are the second matmul.
  const GemmEpilogueParams& epilogue = p.epilogue;
  constexpr int kBlocks = kPair ? 2 : 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int column = n0 + wn + 8 * j + 2 * (lane % 4);
      float v[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = c[i][j][e];
      const bool inside[2] = {column < p.N, column + 1 < p.N};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if ((epilogue.has & kHasBias0) != 0 && inside[e]) {
          const float bias = Element<T>(epilogue.bias0, column + e);
          v[e] += bias, v[e + 2] += bias;
        }
      }
      Activate(epilogue.activation, v);
      if constexpr (kPair) {
        float u[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) u[e] = c[i][j + 2][e];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((epilogue.has & kHasBias1) != 0 && inside[e]) {
            const float bias = Element<T>(epilogue.bias1, column + e);
            u[e] += bias, u[e + 2] += bias;
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] *= u[e];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m0 + wm + 16 * i + lane / 4 + 8 * half;
        if (row >= p.M) continue;
        float factor = 1.0f;
        if ((epilogue.has & kHasRow) != 0) factor = Element<T>(epilogue.row, row);
        const int64_t at = static_cast<int64_t>(row) * p.N + column;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (!inside[e]) continue;
          float y = v[2 * half + e];
          if ((epilogue.has & kHasScale) != 0) y *= Element<T>(epilogue.scale, column + e);
          if ((epilogue.has & kHasRow) != 0) y *= factor;
          if ((epilogue.has & kHasResidual) != 0) y += Element<T>(epilogue.residual, at + e);
          v[2 * half + e] = y;
        }
        if (kVectors) {
          if (inside[0]) {
            *reinterpret_cast<uint32_t*>(static_cast<T*>(p.output) + at) = Pack<T>(v[2 * half], v[2 * half + 1]);
          }
        } else {
          const uint32_t pair = Pack<T>(v[2 * half], v[2 * half + 1]);
          auto* const to = static_cast<uint16_t*>(p.output) + at;
          if (inside[0]) to[0] = static_cast<uint16_t>(pair);
          if (inside[1]) to[1] = static_cast<uint16_t>(pair >> 16);
        }
      }
    }
  }
}

template <typename T, bool kPair, bool kVectors, bool kIsBTransposed = false>
int Launch(const GemmParams& params, void* stream) {
  constexpr int kColumns = kPair ? kWide / 2 : kWide;
  const int64_t tiles = ((int64_t{params.M} - 1) / kRows + 1) * ((int64_t{params.N} - 1) / kColumns + 1);
  if (tiles > 0x7fffffff) return static_cast<int>(cudaErrorInvalidConfiguration);
  return LaunchKernel<GemmParams, GemmSm80<T, kPair, kVectors, kIsBTransposed>>(
      params, static_cast<unsigned>(tiles), kThreads, static_cast<int>(kStages * kBytes), stream);
}

}  // namespace gemm80
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_SM80_CUH_
