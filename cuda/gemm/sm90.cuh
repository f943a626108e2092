// SPDX-License-Identifier: Apache-2.0
// GEMM with an epilogue for compute capability 9.0a: persistent CTAs of a producer warpgroup, whose one
// thread has the copy engine bring tiles, and consumer warpgroups, which multiply with wgmma: 64 rows of one tile each,
// or a tile each, in ping-pong: one finishes its tile while the other multiplies. docs/design/gemm.md says why.
#ifndef STOF_CUDA_GEMM_SM90_CUH_
#define STOF_CUDA_GEMM_SM90_CUH_

#include "cuda/common/cluster.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_sm90.cuh"
#include "cuda/gemm/epilogue.cuh"

namespace stof {
namespace cuda {
namespace gemm90 {

constexpr int kDepth = 64;            // of a step: rows of 128 bytes
constexpr uint32_t kAtom = 64 * 128;  // bytes of 64 columns of b in a step, and of a warpgroup's output
// Hardware barriers: a warpgroup's own, from 1 on, and those that let it multiply when the other one has.
constexpr int kPingPongBarrier = 4;

// groups x 64 rows by `columns` of each of `matmuls`; stages of tiles; clusters of cm x cn CTAs, of which those of one
// column share b and those of one row share a; so many CTAs an SM. ping_pong_blocks: above 0, the warpgroups take tiles
// in ping-pong, of so many blocks of 64 rows. is_b_transposed: b0 is [N, K].
template <int kGroupCount, int kColumnCount, int kMatmulCount, int kStageCount, int kClusterM, int kClusterN,
          int kPerSm, int kPingPongBlocks = 0, bool is_b_transposed = false>
struct GemmSm90Shape {
  static constexpr int kGroups = kGroupCount, kColumns = kColumnCount, kMatmuls = kMatmulCount;
  static constexpr int kStages = kStageCount, kCm = kClusterM, kCn = kClusterN, kCtas = kPerSm;
  static constexpr bool kIsPingPong = kPingPongBlocks > 0, kIsBTransposed = is_b_transposed;
  static constexpr int kBlocks = kIsPingPong ? kPingPongBlocks : 1;  // of 64 rows, of a warpgroup
  static constexpr int kRows = 64 * (kIsPingPong ? kBlocks : kGroups);
  static constexpr int kTotal = kMatmuls * kColumns;
  // Registers by role: a producer of a whole warpgroup gives back what the consumers take. Two CTAs leave too few for
  // that (ptxas wants 96 for everybody then), and have a producer of one warp instead.
  static constexpr bool kMoves = kGroups > 1 && kCtas == 1;
  static constexpr int kConsumerRegisters = kIsPingPong ? 240 : kGroups == 3 ? 160 : 232;
  static constexpr int kProducerRegisters = kIsPingPong ? 24 : 32;
  static constexpr int kThreads = kGroups * kWarpgroup + (kMoves ? kWarpgroup : 32);
  static constexpr uint32_t kBytesA = kRows * 128, kBytesB = kTotal / 64 * kAtom, kBytes = kBytesA + kBytesB;
  static constexpr uint32_t kStaging = kStages * kBytes;
  static constexpr int kChunks = kColumns / 64;  // of a block's output
  // Of a warpgroup's output: two where there is room.
  static constexpr bool kRoom = kStaging + 2 * kGroups * kAtom + 2048 <= 228 * 1024;
  static constexpr int kBuffers = kCtas == 1 && kBlocks * kChunks > 1 && kRoom ? 2 : 1;
  static constexpr uint32_t kBarriers = kStaging + kGroups * kBuffers * kAtom;
  static constexpr uint32_t kShared = kBarriers + 16 * kStages;
  static constexpr bool kAhead = kCtas == 1 && !kIsPingPong;  // vectors and residual are read a chunk ahead
  // By turns they are read anew when they have been used, where accumulators leave registers for that; else late, under
  // the other warpgroup's matmuls.
  static constexpr bool kRenews = kIsPingPong && kBlocks * kTotal / 2 <= 128;
  static_assert((kShared + 1024) * kCtas <= 228 * 1024, "shared memory");
  static_assert(kColumns % 64 == 0 && (kCm == 1 || kCm == 2) && (kCn == 1 || kCn == 2), "tiles");
  static_assert(!kIsPingPong || (kGroups == 2 && kCtas == 1), "ping-pong");
  static_assert(!kIsBTransposed || kMatmuls == 1, "a pair has no transposed b");
};

// Where a tile stands.
struct OutputTile {
  int m, n;
};
template <typename S>
__device__ __forceinline__ OutputTile OutputTileOf(const GemmSm90Params& p, int tile, int cm, int cn) {
  const int in_band = p.band * p.n_tiles;
  const int band = tile / in_band, rest = tile % in_band;
  const int high = min(p.band, p.m_tiles - band * p.band);
  const int m = band * p.band + rest % high, n = rest / high;
  return {(m * S::kCm + cm) * S::kRows, (n * S::kCn + cn) * S::kColumns};
}

template <typename T, typename S>
struct Consumer {
  static constexpr int kChunk = 64;  // columns of the output at a time

  const GemmSm90Params& p;
  const uint32_t staging;  // this warpgroup's
  const int group, warp, lane;

  // A thread's elements of a vector [N]: of every block of 8 columns two.
  __device__ __forceinline__ void LoadColumns(uint32_t (&r)[8], const void* from, int n) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int column = n + 8 * j + 2 * (lane % 4);
      r[j] = 0;
      if (column < p.N) r[j] = LoadPair(from, column);
    }
  }
  // Of a chunk of the residual: of every block of 8 columns two in either row. m: of the block.
  __device__ __forceinline__ void LoadResidual(uint32_t (&r)[16], int m, int n) const {
    const int row = m + 16 * warp + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t base = static_cast<int64_t>(row + 8 * i) * p.N;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int column = n + 8 * j + 2 * (lane % 4);
        r[2 * j + i] = 0;
        if (row + 8 * i < p.M && column < p.N) r[2 * j + i] = LoadPair(p.epilogue.residual, base + column);
      }
    }
  }
  static __device__ __forceinline__ void AddColumns(float (&v)[32], const uint32_t (&vector)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float low, high;
      UnpackPair<T>(vector[j], &low, &high);
      v[4 * j] += low, v[4 * j + 1] += high;
      v[4 * j + 2] += low, v[4 * j + 3] += high;
    }
  }

  // What a chunk of 64 columns needs of vectors and residual.
  struct Operands {
    uint32_t bias0[8], bias1[8], residual[16];
  };
  __device__ __forceinline__ void Load(Operands& operands, int m, int n) const {
    if ((p.epilogue.has & kHasBias0) != 0) LoadColumns(operands.bias0, p.epilogue.bias0, n);
    if (S::kMatmuls == 2 && (p.epilogue.has & kHasBias1) != 0) LoadColumns(operands.bias1, p.epilogue.bias1, n);
    if ((p.epilogue.has & kHasResidual) != 0) LoadResidual(operands.residual, m, n);
  }

  // The first row of a block of this warpgroup.
  __device__ __forceinline__ int RowOf(const OutputTile& place, int block) const {
    return place.m + 64 * (S::kIsPingPong ? block : group);
  }

  // Writes the block of the tile whose matmuls are in c. operands: of the first chunk where they are read ahead, and
  // then of the next block's.
  __device__ __forceinline__ void Finish(float (&c)[S::kTotal / 2], int block, Operands& operands,
                                         const OutputTile& place) const {
    const GemmEpilogueParams& epilogue = p.epilogue;
    const int m = RowOf(place, block), row = m + 16 * warp + lane / 4;
    float of_row[2] = {1.0f, 1.0f};
    if ((epilogue.has & kHasRow) != 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (row + 8 * i < p.M) of_row[i] = ToFloat(static_cast<const T*>(epilogue.row)[row + 8 * i]);
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < S::kChunks; ++chunk) {
      const int n = place.n + kChunk * chunk;
      auto& v = reinterpret_cast<float (&)[32]>(c[32 * chunk]);
      Operands next;
      if (S::kAhead && chunk + 1 < S::kChunks) Load(next, m, n + kChunk);
      if ((epilogue.has & kHasBias0) != 0) {
        if constexpr (!S::kAhead && !S::kRenews) LoadColumns(operands.bias0, epilogue.bias0, n);
        AddColumns(v, operands.bias0);
      }
      Activate(epilogue.activation, v);
      if constexpr (S::kMatmuls == 2) {
        auto& u = reinterpret_cast<float (&)[32]>(c[S::kColumns / 2 + 32 * chunk]);
        if ((epilogue.has & kHasBias1) != 0) {
          if constexpr (!S::kAhead && !S::kRenews) LoadColumns(operands.bias1, epilogue.bias1, n);
          AddColumns(u, operands.bias1);
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) v[i] *= u[i];
      }
      if ((epilogue.has & (kHasScale | kHasRow)) != 0) Scale(v, of_row, n);
      if ((epilogue.has & kHasResidual) != 0) {
        if constexpr (!S::kAhead && !S::kRenews) LoadResidual(operands.residual, m, n);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float low, high;
            UnpackPair<T>(operands.residual[2 * j + i], &low, &high);
            v[4 * j + 2 * i] += low, v[4 * j + 2 * i + 1] += high;
          }
        }
      }
      if constexpr (S::kAhead) operands = next;
      if (S::kRenews && (chunk + 1 < S::kChunks || block + 1 < S::kBlocks)) {
        // While this chunk is stored, the next one's come.
        const bool end = chunk + 1 == S::kChunks;
        Load(operands, end ? m + 64 : m, end ? place.n : n + kChunk);
      }
      Store(v, S::kChunks * block + chunk, m, n);
    }
  }

  __device__ __forceinline__ void Scale(float (&v)[32], const float (&of_row)[2], int n) const {
    uint32_t scale[8];
    if ((p.epilogue.has & kHasScale) != 0) LoadColumns(scale, p.epilogue.scale, n);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float low = 1.0f, high = 1.0f;
      if ((p.epilogue.has & kHasScale) != 0) UnpackPair<T>(scale[j], &low, &high);
      v[4 * j] *= low * of_row[0], v[4 * j + 1] *= high * of_row[0];
      v[4 * j + 2] *= low * of_row[1], v[4 * j + 3] *= high * of_row[1];
    }
  }

  // By a buffer in shared memory, rows of 128 bytes whose 16-byte pieces are exchanged by the row.
  __device__ __forceinline__ void Store(const float (&v)[32], int chunk, int row, int column) const {
    const uint32_t buffer = staging + static_cast<uint32_t>(chunk % S::kBuffers) * kAtom;
    // Until the store before the last one has read the buffer; where a tile has an odd number of chunks, its first one
    // takes the buffer of the last one before.
    constexpr bool kUneven = S::kBlocks * S::kChunks % S::kBuffers != 0;
    if (warp == 0 && lane == 0) {
      if (kUneven && chunk == 0) {
        WaitStoresRead<0>();
      } else {
        WaitStoresRead<S::kBuffers - 1>();
      }
    }
    SyncNamed(1 + group, kWarpgroup);
    const int at = 16 * warp + lane % 16;  // the row that this lane has the address of
    const uint32_t first = buffer + static_cast<uint32_t>(128 * at + 16 * (lane / 16 ^ at % 8));
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      StoreMatrix4(first ^ static_cast<uint32_t>(16 * j), Pack<T>(v[4 * j], v[4 * j + 1]),
                   Pack<T>(v[4 * j + 2], v[4 * j + 3]), Pack<T>(v[4 * j + 4], v[4 * j + 5]),
                   Pack<T>(v[4 * j + 6], v[4 * j + 7]));
    }
    FenceForCopies();
    SyncNamed(1 + group, kWarpgroup);
    if (warp == 0 && lane == 0) {
      StoreBox(&p.output, buffer, column, row);
      CommitStores();
    }
  }
};

// Loads this CTA's share of b in a step. Where two CTAs share b, each loads half of the rows for both. n, k: where the
// tile and the step begin.
template <typename S>
__device__ __forceinline__ void CopyB(const GemmSm90Params& p, uint32_t b, uint32_t barrier, int n, int k, int cm,
                                      uint16_t column_ctas) {
  if constexpr (S::kIsBTransposed) {
    // One box: rows of N, 64 values of K each.
    constexpr int kPart = S::kColumns / S::kCm;
    if constexpr (S::kCm == 1) {
      CopyBox(b, &p.b0, barrier, k, n);
    } else {
      CopyBoxTo(b + cm * kPart * 128, &p.b0, barrier, k, n + cm * kPart, column_ctas);
    }
  } else {
    constexpr int kPart = kDepth / S::kCm;
#pragma unroll
    for (int atom = 0; atom < S::kTotal / 64; ++atom) {
      const CUtensorMap* const map = atom < S::kColumns / 64 ? &p.b0 : &p.b1;
      const int column = n + atom % (S::kColumns / 64) * 64;
      if constexpr (S::kCm == 1) {
        CopyBox(b + atom * kAtom, map, barrier, column, k);
      } else {
        CopyBoxTo(b + atom * kAtom + cm * kPart * 128, map, barrier, column, k + cm * kPart, column_ctas);
      }
    }
  }
}

// Longer than 80 lines: producer and consumers share the ring of stages; accumulators of a wgmma that runs stay here.
template <typename T, typename S>
__global__ void __cluster_dims__(S::kCm* S::kCn, 1, 1) __launch_bounds__(S::kThreads, S::kCtas)
    GemmKernel(const __grid_constant__ GemmSm90Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  constexpr int kCluster = S::kCm * S::kCn;
  const uint32_t base = SharedAddress(shared);  // with no other shared memory it begins at a multiple of 1024
  const uint32_t full = base + S::kBarriers, empty = full + 8 * S::kStages;
  const int rank = kCluster > 1 ? static_cast<int>(ClusterRank()) : 0;
  const int cm = rank % S::kCm, cn = rank / S::kCm;
  const int tiles = p.m_tiles * p.n_tiles;
  const int first = static_cast<int>(blockIdx.x) / kCluster, clusters = static_cast<int>(gridDim.x) / kCluster;
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) % kWarpgroup / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    PrefetchMap(&p.a);
    PrefetchMap(&p.b0);
    PrefetchMap(&p.output);
    if (S::kMatmuls == 2) PrefetchMap(&p.b1);
    for (int i = 0; i < S::kStages; ++i) {
      InitBarrier(full + 8 * i, 1);
      // Every warp that reads the stage of every CTA that this one brings tiles to.
      InitBarrier(empty + 8 * i, (S::kCm + S::kCn - 1) * (S::kIsPingPong ? 1 : S::kGroups) * 4);
    }
    FenceBarrierInit();
  }
  if constexpr (kCluster > 1) {
    SyncCluster();
  } else {
    __syncthreads();
  }
  WaitForPrevious();

  if (group == S::kGroups) {
    if constexpr (S::kMoves) GiveRegisters<S::kProducerRegisters>();
    if (warp == 0 && lane == 0) {
      // CTAs of this one's row and column of the cluster.
      const auto row_ctas = static_cast<uint16_t>(S::kCn == 1 ? 1u << rank : (1u | 1u << S::kCm) << cm);
      const auto column_ctas = static_cast<uint16_t>(((1u << S::kCm) - 1u) << cn * S::kCm);
      uint32_t stage = 0, parity = 1;
      for (int tile = first; tile < tiles; tile += clusters) {
        const OutputTile place = OutputTileOf<S>(p, tile, cm, cn);
        for (int step = 0; step < p.steps; ++step) {
          const uint32_t barrier = full + 8 * stage, a = base + stage * S::kBytes, b = a + S::kBytesA;
          Wait(empty + 8 * stage, parity);
          ArriveExpect(barrier, S::kBytes);
          const int k = step * kDepth;
          if constexpr (S::kCn == 1) {
            CopyBox(a, &p.a, barrier, k, place.m);
          } else {
            constexpr int kPart = S::kRows / S::kCn;
            CopyBoxTo(a + cn * kPart * 128, &p.a, barrier, k, place.m + cn * kPart, row_ctas);
          }
          CopyB<S>(p, b, barrier, place.n, k, cm, column_ctas);
          if (++stage == S::kStages) stage = 0, parity ^= 1;
        }
      }
      LetNextStart();
    }
  } else {
    if constexpr (S::kMoves) TakeRegisters<S::kConsumerRegisters>();
    const Consumer<T, S> consumer = {p, base + S::kStaging + group * S::kBuffers * kAtom, group, warp, lane};
    // In a cluster a CTA's own addresses carry its rank above the 18 bits that an operand's description has room for.
    const uint32_t own = base & 0x3ffff;
    // Lane 0 tells this CTA, lane 1 the one that shares b, lane 2 the one that shares a.
    const bool tells = lane == 0 || (lane == 1 && S::kCm == 2) || (lane == 2 && S::kCn == 2);
    const auto told = static_cast<uint32_t>(lane == 0 ? rank : lane == 1 ? rank ^ 1 : rank ^ S::kCm);
    uint32_t stage = 0, parity = 0;
    const auto pass = [&](int steps) {  // over those of another warpgroup's tile
      const auto whole = static_cast<uint32_t>(steps) / S::kStages;
      stage += static_cast<uint32_t>(steps) - whole * S::kStages;
      parity ^= whole & 1;
      if (stage >= S::kStages) stage -= S::kStages, parity ^= 1;
    };
    const int own_first = S::kIsPingPong ? first + group * clusters : first,
              stride = S::kIsPingPong ? 2 * clusters : clusters;
    if (S::kIsPingPong && group == 1) pass(p.steps);
    for (int tile = own_first; tile < tiles; tile += stride) {
      const OutputTile place = OutputTileOf<S>(p, tile, cm, cn);
      typename Consumer<T, S>::Operands operands;
      // They come during the matmuls.
      if constexpr (S::kAhead || S::kRenews) consumer.Load(operands, consumer.RowOf(place, 0), place.n);
      // Until the other warpgroup has issued every wgmma of the tile before. Its stages are full then, and a wait for
      // one of this tile cannot take an earlier phase of the same parity for its own.
      if (S::kIsPingPong && tile != first) SyncNamed(kPingPongBarrier + group, 2 * kWarpgroup);
      float c[S::kBlocks][S::kTotal / 2];
      for (int step = 0; step < p.steps; ++step) {
        const uint32_t a = own + stage * S::kBytes;
        const uint32_t rows = DescribeInner(S::kIsPingPong ? a : a + group * 64 * 128);
        // In shared memory a transposed b is K-major, like a; else it is MN-major.
        const uint32_t columns =
            S::kIsBTransposed ? DescribeInner(a + S::kBytesA) : DescribeAcross(a + S::kBytesA, kAtom);
        Wait(full + 8 * stage, parity);
        WgmmaFence();
#pragma unroll
        for (int i = 0; i < kDepth / 16; ++i) {
#pragma unroll
          for (int block = 0; block < S::kBlocks; ++block) {
            const uint64_t left = Operand(rows + block * (64 * 128 >> 4) + i * (32 >> 4));
            const int add = step + i > 0 ? 1 : 0;
            if constexpr (S::kIsBTransposed) {
              Wgmma<T>::Inner(c[block], left, Operand(columns + i * (32 >> 4)), add);
            } else {
              Wgmma<T>::AcrossShared(c[block], left, Operand(columns + i * (16 * 128 >> 4)), add);
            }
          }
        }
        WgmmaCommit();
        if (step > 0) {
          WgmmaWait<1>();
          const uint32_t before = stage == 0 ? S::kStages - 1 : stage - 1;
          if (tells) ArriveAt(empty + 8 * before, told);
        }
        if (++stage == S::kStages) stage = 0, parity ^= 1;
      }
      if (S::kIsPingPong && tile + clusters < tiles) ArriveNamed(kPingPongBarrier + 1 - group, 2 * kWarpgroup);
      WgmmaWait<0>();
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) PinRegisters(c[block]);
      const uint32_t last = stage == 0 ? S::kStages - 1 : stage - 1;
      if (tells) ArriveAt(empty + 8 * last, told);
      if (S::kIsPingPong) pass(p.steps);
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) consumer.Finish(c[block], block, operands, place);
    }
    if (warp == 0 && lane == 0) WaitStores();
  }
  // No CTA may end while others write into its memory or arrive at its barriers. The producer's one thread comes behind
  // the others of its warp.
  __syncwarp();
  if constexpr (kCluster > 1) {
    ArriveAtCluster();
    AwaitCluster();
  }
#endif
}

template <typename T, typename S>
int Launch(const GemmSm90Params& params, unsigned clusters, void* stream) {
  return LaunchKernel<GemmSm90Params, GemmKernel<T, S>>(params, clusters * S::kCm * S::kCn, S::kThreads,
                                                        static_cast<int>(S::kShared), stream, true);
}

template <void (*kKernel)(const GemmSm90Params), int kCluster, int kThreads, uint32_t kShared>
int ResidentOf(int* clusters) {
  cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kCluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kShared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return static_cast<int>(cudaOccupancyMaxActiveClusters(clusters, kKernel, &config));
}

// ---- the named numbers of a table's rows ----
// GemmSm90Shape. Warpgroups: consumers; Columns: of the output's tile; Matmuls: 2 for a pair of matmuls; Cluster: CTAs
// along M and N; PingPongBlocks: above 0, warpgroups take tiles in ping-pong, of so many blocks of 64 rows;
// TransposedB: b0 is [N, K].
template <int kValue>
struct Warpgroups {};
template <int kValue>
struct Columns {};
template <int kValue>
struct Matmuls {};
template <int kValue>
struct Stages {};
template <int kM, int kN>
struct Cluster {};
template <int kValue>
struct CtasPerSm {};
template <int kValue>
struct PingPongBlocks {};
template <bool kValue>
struct TransposedB {};

// Microseconds of a step of 64 of K, of a tile, of a tile's GELU and of its residual.
struct StepUs {
  float value;
};
struct TileUs {
  float value;
};
struct GeluUs {
  float value;
};
struct ResidualUs {
  float value;
};
struct KernelCosts {
  StepUs step;
  TileUs tile;
  GeluUs gelu;
  ResidualUs residual;
};

// What MakeKernel makes of its arguments.
template <typename Warpgroups_, typename Columns_, typename Matmuls_, typename Stages_, typename Cluster_,
          typename CtasPerSm_, typename PingPongBlocks_, typename TransposedB_>
struct ShapeOf;
template <int kWarpgroups, int kColumns, int kMatmuls, int kStages, int kClusterM, int kClusterN, int kCtasPerSm,
          int kPingPongBlocks, bool is_b_transposed>
struct ShapeOf<Warpgroups<kWarpgroups>, Columns<kColumns>, Matmuls<kMatmuls>, Stages<kStages>,
               Cluster<kClusterM, kClusterN>, CtasPerSm<kCtasPerSm>, PingPongBlocks<kPingPongBlocks>,
               TransposedB<is_b_transposed>> {
  using Type = GemmSm90Shape<kWarpgroups, kColumns, kMatmuls, kStages, kClusterM, kClusterN, kCtasPerSm,
                             kPingPongBlocks, is_b_transposed>;
};

// A row of a table.
template <typename T, typename Warpgroups_, typename Columns_, typename Matmuls_, typename Stages_, typename Cluster_,
          typename CtasPerSm_, typename PingPongBlocks_ = PingPongBlocks<0>, typename TransposedB_ = TransposedB<false>>
constexpr GemmKernelEntry MakeKernel(const KernelCosts& costs) {
  using S = typename ShapeOf<Warpgroups_, Columns_, Matmuls_, Stages_, Cluster_, CtasPerSm_, PingPongBlocks_,
                             TransposedB_>::Type;
  GemmKernelEntry kernel;
  kernel.name = "sm90";
  kernel.launch = Launch<T, S>;
  kernel.resident = ResidentOf<GemmKernel<T, S>, S::kCm * S::kCn, S::kThreads, S::kShared>;
  kernel.rows = S::kRows, kernel.columns = S::kColumns;
  kernel.cluster_m = S::kCm, kernel.cluster_n = S::kCn;
  kernel.ctas = S::kCtas, kernel.is_ping_pong = S::kIsPingPong;
  kernel.step = costs.step.value, kernel.tile = costs.tile.value;
  kernel.gelu = costs.gelu.value, kernel.residual = costs.residual.value;
  return kernel;
}

}  // namespace gemm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_SM90_CUH_
