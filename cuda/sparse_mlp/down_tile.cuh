// SPDX-License-Identifier: Apache-2.0
// The output of up to 16 tokens, by tensor cores.
//
// A CTA sums 256 columns over a split of the list, in blocks of 16 neurons. A warp sums 64 of the columns over every
// second block. It multiplies the rows of a block, transposed in registers, by hidden values.
//
// Hidden values are fp32. Each is the sum of two terms in fp16, or of three in bf16, and each term takes an mma. Where
// a token does not need a neuron, its hidden value is 0. A sum that is not finite may come from 0 times an infinite
// weight, or from a hidden value too large for the type: the CTA then computes all of its sums again in fp32.
#ifndef STOF_CUDA_SPARSE_MLP_DOWN_TILE_CUH_
#define STOF_CUDA_SPARSE_MLP_DOWN_TILE_CUH_

#include "cuda/sparse_mlp/down.cuh"
#include "cuda/sparse_mlp/tile.cuh"

namespace stof {
namespace cuda {
namespace mlp {

constexpr int kBlockNeurons = 16;  // the depth of an mma
constexpr int kWarpColumns = 64;   // eight for each value of lane / 4
constexpr int kColumnWarps = kMlpSliceColumns / kWarpColumns;
constexpr int kNeuronWarps = kMlpWarps / kColumnWarps;

// Entries of the list that a CTA looks up at a time. Splits begin at whole blocks.
constexpr int kWindowEntries = 1024;

struct ListWindow {
  alignas(16) int32_t neurons[kWindowEntries];
  static_assert(kMlpTileTokens <= 16, "tokens are bits of a mask");
  alignas(16) uint16_t masks[kWindowEntries];  // 0 beyond the last entry

  // Entries [begin, end) of the list.
  __device__ __forceinline__ void Load(const ActiveList& list, int32_t begin, int32_t end) {
#pragma unroll
    for (int u = 0; u < kWindowEntries / kMlpThreads; ++u) {
      const int i = static_cast<int>(threadIdx.x) + u * kMlpThreads;
      ListEntry entry;
      if (begin + i < end) entry = list.At(begin + i);
      neurons[i] = entry.neuron, masks[i] = static_cast<uint16_t>(entry.mask);
    }
  }
};

// Lane 4 g + q has neurons 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of a block.
__device__ __forceinline__ int NeuronOfBlock(int i) {
  return static_cast<int>(threadIdx.x) % 4 * 2 + i % 2 + i / 2 * 8;
}

// A warp's ring of asynchronous copies of blocks: their rows and their hidden values. Lanes read what others copied.
template <int kTokens>
class BlockRing {
 public:
  static constexpr int kRowBytes = kWarpColumns * 2, kRowsBytes = kBlockNeurons * kRowBytes;
  static constexpr int kSlotBytes = kRowsBytes + kBlockNeurons * kTokens * 4, kSlots = 3;
  static constexpr int kBytes = kSlots * kSlotBytes * kMlpWarps;

  __device__ __forceinline__ explicit BlockRing(uint8_t* shared)
      : own_(shared + threadIdx.x / 32 * (kSlots * kSlotBytes)), lane_(static_cast<int>(threadIdx.x) % 32) {}

  // Eight lanes copy the 64 columns of a row. from: this lane's columns of row 0. Rows that do not exist are zeros.
  __device__ __forceinline__ void CopyRows(int slot, const ListWindow& window, int block, const char* from,
                                           int64_t stride, bool is_inside) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane_ / 8, k = block * kBlockNeurons + row;
      CopyAsync16(AddressOf(slot, row, lane_ % 8), from + window.neurons[k] * stride,
                  is_inside && window.masks[k] != 0);
    }
  }
  // from: the hidden values of a block, [16, T], of which the first `count` exist. Copies are of four values: the last
  // one may read up to three more, which the workspace has.
  __device__ __forceinline__ void CopyHidden(int slot, const float* from, int count) {
    const uint32_t to = SharedAddress(own_) + slot * kSlotBytes + kRowsBytes;
#pragma unroll
    for (int i = lane_ * 4; i < kBlockNeurons * kTokens; i += 128) {
      if (i < count) CopyAsync16(to + i * 4, from + i);
    }
  }
  // Eight columns of this lane's four neurons.
  __device__ __forceinline__ void Read(int slot, uint32_t (&rows)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) LoadShared(rows[i], AddressOf(slot, NeuronOfBlock(i), lane_ / 4));
  }
  __device__ __forceinline__ const float* Hidden(int slot) const {
    return reinterpret_cast<const float*>(own_ + slot * kSlotBytes + kRowsBytes);
  }

 private:
  // XOR swizzle: the eight lanes that read at a time, two chunks of four rows, access different banks.
  __device__ __forceinline__ uint32_t AddressOf(int slot, int row, int chunk) const {
    return SharedAddress(own_) + slot * kSlotBytes + row * kRowBytes + (chunk ^ row / 2 % 4 * 2) * kCopyBytes;
  }
  uint8_t* const own_;
  const int lane_;
};

// Hidden values of a block that are this lane's mma operands: four neurons of token g, and of token g + 8.
template <typename T, int kTokens>
struct HiddenBlock {
  static constexpr int kOwn = kTokens / 8;
  float values[kOwn][4];

  // hidden: [16, tokens]. Those of pairs that are not needed may be anything, and count as 0.
  __device__ __forceinline__ void Load(const float* hidden, const uint16_t* masks, int tokens) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = NeuronOfBlock(i);
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        const int token = static_cast<int>(threadIdx.x) % 32 / 4 + 8 * n;
        const float x = hidden[k * tokens + token];
        values[n][i] = (masks[k] >> token & 1) != 0 ? x : 0.0f;
      }
    }
  }
};

// The mma accumulators of lane 4 g + q. [i][n] has columns 2 i and 2 i + 1 of the lane's eight, and tokens 8 n + 2 q
// and 8 n + 2 q + 1; elements 0 and 1 are those of the first column.
template <int kTokens>
using BlockAccumulators = float[4][kTokens / 8][4];

// rows: eight columns of each of this lane's four neurons.
template <typename T, int kTokens>
__device__ __forceinline__ void AddBlock(const uint32_t (&rows)[4][4], const HiddenBlock<T, kTokens>& hidden,
                                         BlockAccumulators<kTokens>& sums) {
#pragma unroll
  for (int n = 0; n < kTokens / 8; ++n) {
    uint32_t terms[2][kFp32Terms<T>];
#pragma unroll
    for (int i = 0; i < 2; ++i) DecomposePair<T>(hidden.values[n][2 * i], hidden.values[n][2 * i + 1], terms[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t a[4] = {__byte_perm(rows[0][i], rows[1][i], 0x5410), __byte_perm(rows[0][i], rows[1][i], 0x7632),
                             __byte_perm(rows[2][i], rows[3][i], 0x5410), __byte_perm(rows[2][i], rows[3][i], 0x7632)};
#pragma unroll
      for (int term = 0; term < kFp32Terms<T>; ++term) Mma<T>(sums[i][n], a, terms[0][term], terms[1][term]);
    }
  }
}

// Shared memory in which the warps' sums over their neurons are added. The odd row size keeps most lanes' stores in
// different banks.
template <int kTokens>
struct DownTileSums {
  float values[kNeuronWarps][kTokens][kMlpSliceColumns + 1];

  __device__ __forceinline__ void Store(const BlockAccumulators<kTokens>& sums) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int column = warp % kColumnWarps * kWarpColumns + lane / 4 * kMlpChunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          values[warp / kColumnWarps][8 * n + lane % 4 * 2 + c % 2][column + 2 * i + c / 2] = sums[i][n][c];
        }
      }
    }
  }
  __device__ __forceinline__ float Sum(int token, int column) const {
    float sum = values[0][token][column];
#pragma unroll
    for (int i = 1; i < kNeuronWarps; ++i) sum += values[i][token][column];
    return sum;
  }
};

// One column's sums over entries [begin, end), in fp32. Each token adds only the neurons that it needs.
template <typename T, int kTokens>
__device__ __forceinline__ void SumColumn(const MlpParams& p, const ActiveList& list, int32_t begin, int32_t end,
                                          int64_t column, float (&sums)[kTokens]) {
#pragma unroll
  for (int t = 0; t < kTokens; ++t) sums[t] = 0.0f;
  for (int32_t i = begin; i < end; ++i) {
    const ListEntry entry = list.At(i);
    const float w = ToFloat(reinterpret_cast<const T*>(p.down_rows.data)[entry.neuron * p.down_rows.size + column]);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if ((entry.mask >> t & 1) != 0) sums[t] = fmaf(__ldcg(p.hidden + int64_t{i} * p.T + t), w, sums[t]);
    }
  }
}

// Adds the splits of a slice in their order, four columns a thread, and writes the output. The last CTA of the slice
// calls it.
template <typename T>
__device__ __forceinline__ void AddSplits(const MlpParams& p, int slice) {
  constexpr int kColumns = 4, kThreadsOfToken = kMlpSliceColumns / kColumns;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t column = slice * int64_t{kMlpSliceColumns} + thread % kThreadsOfToken * kColumns;
  if (column >= p.N) return;  // N is a multiple of eight
  for (int t = thread / kThreadsOfToken; t < p.T; t += kMlpThreads / kThreadsOfToken) {
    const float* const from = p.partials + t * p.N + column;
    float y[kColumns] = {};
#pragma unroll 16
    for (int i = 0; i < p.splits; ++i) {
      const float4 part = __ldcg(reinterpret_cast<const float4*>(from + int64_t{i} * p.T * p.N));
      y[0] += part.x, y[1] += part.y, y[2] += part.z, y[3] += part.w;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) WriteOutput<T>(p, t, column + i, y[i]);
  }
}

// Longer than 80 lines: copies into the ring, waits for them and matmuls are one pipeline.
template <typename T, int kTokens>
__global__ void __launch_bounds__(kMlpThreads, 2) DownTileKernel(const __grid_constant__ MlpParams p) {
  using Ring = BlockRing<kTokens>;
  using WarpSums = DownTileSums<kTokens>;
  extern __shared__ __align__(128) uint8_t shared[];
  static_assert(sizeof(WarpSums) <= Ring::kBytes, "the warps' sums take the place of the rings");
  __shared__ ActiveList::Storage list_storage;
  __shared__ ListWindow window;
  __shared__ bool is_last;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int slice = static_cast<int>(blockIdx.x) % p.slices, split = static_cast<int>(blockIdx.x) / p.slices;
  const int64_t column = slice * int64_t{kMlpSliceColumns} + warp % kColumnWarps * kWarpColumns + lane % 8 * kMlpChunk;
  const char* const from = static_cast<const char*>(p.down_rows.data) + column * static_cast<int64_t>(sizeof(T));

  if (!p.runs_hidden_kernel) WaitForPrevious();
  const ActiveList list(p, &list_storage);
  const int64_t blocks = (list.size() + kBlockNeurons - 1) / kBlockNeurons;
  const auto begin = static_cast<int32_t>(blocks * split / p.splits * kBlockNeurons);
  const auto end = static_cast<int32_t>(min(int64_t{list.size()}, blocks * (split + 1) / p.splits * kBlockNeurons));

  Ring ring(shared);
  BlockAccumulators<kTokens> sums = {};
  for (int32_t first = begin; first == begin || first < end; first += kWindowEntries) {
    if (first != begin) __syncthreads();  // the window before has been read
    window.Load(list, first, end);
    __syncthreads();
    // Warps that share columns take blocks in turns.
    const int count = (min(kWindowEntries, end - first) + kBlockNeurons - 1) / kBlockNeurons;
    const auto copy_rows = [&](int slot, int block) {
      if (block < count) ring.CopyRows(slot, window, block, from, p.down_rows.stride, column < p.N);
    };
    const auto copy_hidden = [&](int slot, int block) {
      if (block < count) {
        const int32_t at = first + block * kBlockNeurons;
        ring.CopyHidden(slot, p.hidden + int64_t{at} * p.T, min(kBlockNeurons, end - at) * p.T);
      }
      CommitCopies();
    };
    int filled = warp / kColumnWarps;
#pragma unroll
    for (int slot = 0; slot < Ring::kSlots; ++slot) copy_rows(slot, filled + slot * kNeuronWarps);
    if (first == begin) {
      if (p.runs_hidden_kernel) WaitForPrevious();
      LetNextStart();
    }
#pragma unroll
    for (int slot = 0; slot < Ring::kSlots; ++slot) copy_hidden(slot, filled + slot * kNeuronWarps);
    filled += Ring::kSlots * kNeuronWarps;
    int slot = 0;
    for (int block = warp / kColumnWarps; block < count; block += kNeuronWarps) {
      WaitCopies<Ring::kSlots - 1>();
      __syncwarp();  // the copies of other lanes are seen
      HiddenBlock<T, kTokens> hidden;
      hidden.Load(ring.Hidden(slot), window.masks + block * kBlockNeurons, p.T);
      uint32_t rows[4][4];
      ring.Read(slot, rows);
      __syncwarp();  // all lanes have read
      copy_rows(slot, filled);
      copy_hidden(slot, filled);
      AddBlock<T, kTokens>(rows, hidden, sums);
      filled += kNeuronWarps;
      slot = slot == Ring::kSlots - 1 ? 0 : slot + 1;
    }
  }

  WarpSums& warp_sums = *reinterpret_cast<WarpSums*>(shared);
  __syncthreads();  // all warps have read their rings, and no copy is in flight
  warp_sums.Store(sums);
  __syncthreads();
  const int64_t own = slice * int64_t{kMlpSliceColumns} + thread;
  static_assert(kMlpSliceColumns == kMlpThreads, "a thread a column");
  float y[kTokens];
  bool is_finite = true;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    y[t] = warp_sums.Sum(t, thread);
    is_finite = is_finite && isfinite(y[t]);
  }
  if (__syncthreads_or(!is_finite) && own < p.N) SumColumn<T, kTokens>(p, list, begin, end, own, y);
  if (own < p.N) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= p.T) break;
      if (p.splits == 1) {
        WriteOutput<T>(p, t, own, y[t]);
      } else {
        __stcg(p.partials + (int64_t{split} * p.T + t) * p.N + own, y[t]);
      }
    }
  }
  if (p.splits > 1 && IsLastOfSlice(p, slice, &is_last)) AddSplits<T>(p, slice);
}

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_DOWN_TILE_CUH_
