// SPDX-License-Identifier: Apache-2.0
// Hidden values of active neurons for 2 to 16 tokens, by tensor cores. A CTA computes a tile of eight neurons at a
// time, and its warps split the K values of their rows.
#ifndef STOF_CUDA_SPARSE_MLP_HIDDEN_TILE_CUH_
#define STOF_CUDA_SPARSE_MLP_HIDDEN_TILE_CUH_

#include "cuda/sparse_mlp/hidden.cuh"
#include "cuda/sparse_mlp/tile.cuh"

namespace stof {
namespace cuda {
namespace mlp {

template <typename T, bool kHasGate, bool kHasUp, int kTokens>
class HiddenTiles {
 public:
  static constexpr int kWeights = (kHasGate ? 1 : 0) + (kHasUp ? 1 : 0);
  using Sums = TileSums<kWeights, kTokens>;

  // sums is a double buffer: a warp stores the sums of a tile while others read those of the tile before.
  __device__ __forceinline__ HiddenTiles(const MlpParams& params, const ActiveList& list, void* shared, Sums (&sums)[2])
      : p_(params),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        chunks_(params.K / kMlpChunk),
        steps_(max(2, static_cast<int32_t>((chunks_ + kMlpWarps * kStepChunks - 1) / (kMlpWarps * kStepChunks)))),
        prefetches_(list.size() * params.down_rows.stride <= kMostPrefetched),
        entries_(list, static_cast<int32_t>(blockIdx.x) * kTileRows, list.size(),
                 static_cast<int32_t>(gridDim.x) * kTileRows),
        tiles_((entries_.count() + kTileRows - 1) / kTileRows),
        ring_(shared),
        sums_(sums) {}

  __device__ __forceinline__ void Run() {
    PointAtRows();
    for (int i = 0; i < Stream::kSlots; ++i) Fill();
    for (int32_t tile = 0; tile < tiles_; ++tile) {
      const int32_t first = tile * kTileRows;
      entries_.MoveTo(first);
      if (prefetches_) {
        const int64_t neuron = entries_.NeuronOf(first + warp_);
        if (first + warp_ < entries_.count()) PrefetchDownRow(p_, neuron);
      }
      Multiply(&sums_[tile % 2]);
      Finish(first, sums_[tile % 2]);
    }
  }

 private:
  static_assert(kMlpWarps == kTileRows, "a warp prefetches the down row of a neuron");
  static constexpr int kStepChunks = 8;  // of a row, in a step of a warp: 64 values, two chunks of each lane
  // Of a lane in a step, for each weight. At least two steps a tile: copies then run at most four tiles ahead of the
  // one that is read, and WarpEntries holds the entries of these.
  static constexpr int kCopiesOfRow = kStepChunks / 4;
  using Stream = CopyRing<kWeights * kCopiesOfRow>;
  static_assert(Stream::kSlots <= 6, "copies run at most four tiles ahead");

  __device__ __forceinline__ int64_t ChunkOf(int32_t step) const {
    return (int64_t{step} * kMlpWarps + warp_) * kStepChunks + lane_ % 4;
  }
  // Points from_ at the rows of the tile that is copied next.
  __device__ __forceinline__ void PointAtRows() {
    if (filled_ >= tiles_) return;
    const int32_t k = filled_ * kTileRows + lane_ / 4;
    const int64_t neuron = entries_.NeuronOf(k);
    is_entry_ = k < entries_.count();
    if constexpr (kHasGate) from_[0] = static_cast<const char*>(p_.gate_rows.data) + neuron * p_.gate_rows.stride;
    if constexpr (kHasUp) {
      from_[kWeights - 1] = static_cast<const char*>(p_.up_rows.data) + neuron * p_.up_rows.stride;
    }
  }
  __device__ __forceinline__ void Fill() {
    if (filled_ < tiles_) {
      const int64_t chunk = ChunkOf(filled_step_);
#pragma unroll
      for (int i = 0; i < kWeights * kCopiesOfRow; ++i) {
        const int64_t own = chunk + i % kCopiesOfRow * 4;
        ring_.Copy(i, from_[i / kCopiesOfRow] + own * kCopyBytes, is_entry_ && own < chunks_);
      }
      if (++filled_step_ == steps_) {
        filled_step_ = 0, ++filled_;
        PointAtRows();
      }
    }
    ring_.Commit();
  }

  __device__ __forceinline__ void Multiply(Sums* to) {
    float sums[kWeights][kTokenTiles<kTokens>][4] = {};
    TileTokens<T, kTokens> tokens[kCopiesOfRow], next[kCopiesOfRow];
    LoadTokens(0, tokens);
    for (int32_t step = 0; step < steps_; ++step) {
      LoadTokens(step + 1, next);
      ring_.Wait();
#pragma unroll
      for (int w = 0; w < kWeights; ++w) {
#pragma unroll
        for (int i = 0; i < kCopiesOfRow; ++i) {
          uint32_t words[4];
          ring_.Read(w * kCopiesOfRow + i, words);
          AddTile<T, kTokens>(words, tokens[i], sums[w]);
        }
      }
      ring_.Release();
      Fill();
#pragma unroll
      for (int i = 0; i < kCopiesOfRow; ++i) tokens[i] = next[i];
    }
    to->Store(sums);
  }
  __device__ __forceinline__ void LoadTokens(int32_t step, TileTokens<T, kTokens> (&to)[kCopiesOfRow]) const {
#pragma unroll
    for (int i = 0; i < kCopiesOfRow; ++i) to[i].Load(p_, ChunkOf(step) + 4 * i, chunks_);
  }

  // Adds the warps' sums. Thread 8 t + n has token t of neuron n.
  __device__ __forceinline__ void Finish(int32_t first, const Sums& sums) {
    const int thread = static_cast<int>(threadIdx.x), token = thread / kTileRows, row = thread % kTileRows;
    const int32_t k = first + row;
    const int64_t neuron = entries_.NeuronOf(k);
    const uint64_t mask = entries_.MaskOf(k);  // 0 beyond the last entry
    __syncthreads();
    if (token >= kTokens || (mask >> token & 1) == 0) return;
    StoreHidden<T, kHasGate, kHasUp>(p_, entries_.PositionOf(k), neuron, token, sums.Sum(0, token, row),
                                     sums.Sum(kWeights - 1, token, row));
  }

  const MlpParams& p_;
  const int lane_, warp_;
  const int64_t chunks_;
  const int32_t steps_;
  const bool prefetches_;
  WarpEntries<kTileRows> entries_;
  const int32_t tiles_;
  Stream ring_;
  Sums (&sums_)[2];
  // What is copied next: step filled_step_ of tile filled_.
  int32_t filled_ = 0, filled_step_ = 0;
  bool is_entry_ = false;  // this lane's row of that tile exists
  const char* from_[kWeights] = {};
};

// Without gate and up weights, activated gates are the hidden values. The tiled down kernel reads them by their
// position in the list.
template <typename T>
__global__ void __launch_bounds__(kMlpThreads) HiddenOfGateKernel(const __grid_constant__ MlpParams p) {
  __shared__ ActiveList::Storage storage;
  WaitForPrevious();
  LetNextStart();
  const ActiveList list(p, &storage);
  constexpr int kTokens = kMlpTileTokens, kEntries = kMlpThreads / kTokens;
  const int token = static_cast<int>(threadIdx.x) / kEntries;
  if (token >= p.T) return;
  for (int64_t i = int64_t{blockIdx.x} * kEntries + threadIdx.x % kEntries; i < list.size();
       i += int64_t{gridDim.x} * kEntries) {
    const ListEntry entry = list.At(static_cast<int32_t>(i));
    if ((entry.mask >> token & 1) == 0) continue;
    p.hidden[i * p.T + token] =
        Activate(p.activation, ToFloat(static_cast<const T*>(p.gate)[token * p.F + entry.neuron]));
  }
}

template <typename T, bool kHasGate, bool kHasUp, int kTokens>
__global__ void __launch_bounds__(kMlpThreads, 2) HiddenTileKernel(const __grid_constant__ MlpParams p) {
  using Tiles = HiddenTiles<T, kHasGate, kHasUp, kTokens>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ActiveList::Storage storage;
  __shared__ typename Tiles::Sums sums[2];
  WaitForPrevious();
  LetNextStart();
  const ActiveList list(p, &storage);
  Tiles(p, list, shared, sums).Run();
}

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_HIDDEN_TILE_CUH_
