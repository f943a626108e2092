// SPDX-License-Identifier: Apache-2.0
// Block-wise attention for compute capability 9.0a. Persistent CTAs of one producer warpgroup, which walks the tiles
// that the block mask keeps and has the copy engine bring them, and consumer warpgroups of 64 query rows each, which
// compute with wgmma. Within a warpgroup the scores of the next tile and the product with the values of this one are in
// flight while the softmax runs; among warpgroups a turn passes round, so that one's softmax covers another's products
// (Shah et al. 2024, FlashAttention-3, sec. 3.1 and 3.2). Partial tiles take their bits from the mask, full ones none.
#ifndef STOF_CUDA_ATTENTION_SM90_CUH_
#define STOF_CUDA_ATTENTION_SM90_CUH_

#include <cuda_runtime.h>

#include <atomic>

#include "cuda/attention_sm90.h"
#include "cuda/mma_sm90.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

constexpr float kLog2E = 1.44269504088896340736f;
// The running maximum is raised only when a score exceeds it by 2^8, so that the output is rescaled a few times per row
// (FlashAttention 4 has the same idea).
constexpr float kSlack = 8.0f;
constexpr int kQueries = 2;  // query tiles in shared memory: the next one comes while this one is worked on
constexpr int kAtom = 64;    // columns of a swizzled row of 128 bytes

// What the producer says about a key tile.
struct Entry {
  int32_t tile;   // -1: the item has none
  int32_t bits;   // index of its bits in the mask; -1: every pair
  int32_t last;   // of its item
  int32_t known;  // all keys are there and unpadded
  uint32_t pad[4];
};
// What it says about an item.
struct Item {
  int32_t b, h, row0;  // row0 -1: no more work
  int32_t unused;
};

template <int kHead>
struct Shape {
  static constexpr int kConsumers = 2;
  static constexpr int kM = 64 * kConsumers, kN = kSm90TileKeys;
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  static constexpr int kStages = kHead == 128 ? 2 : 4;
  static constexpr int kQueryBytes = 2 * kM * kHead;
  static constexpr int kTileBytes = 2 * kN * kHead;
  static constexpr int kKeys = kQueries * kQueryBytes;  // offsets in shared memory
  static constexpr int kValues = kKeys + kStages * kTileBytes;
  static constexpr int kEntries = kValues + kStages * kTileBytes;
  static constexpr int kItems = kEntries + kStages * static_cast<int>(sizeof(Entry));
  static constexpr int kBarriers = kItems + kQueries * static_cast<int>(sizeof(Item));
  static constexpr int kSharedBytes = kBarriers + 8 * (4 * kStages + 2 * kQueries) + 1024;  // 1024: to align the start
};

// The value of lane 0: for what is equal in a warp, so that the compiler knows. wgmma in a path that may diverge would
// be serialized.
__device__ __forceinline__ int32_t Uniform(int32_t x) { return __shfl_sync(~0u, x, 0); }

// A position in a ring of buffers, with the parity of its phase.
template <int kCount>
struct Ring {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void Next() {
    if (++at == kCount) at = 0, phase ^= 1;
  }
};

template <int kHead, typename T>
class Attention {
  using S = Shape<kHead>;

 public:
  __device__ Attention(const Sm90Params& p, unsigned char* shared) : p_(p), shared_(shared) {
    base_ = SharedAddress(shared);
  }

  __device__ void Run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < S::kStages; ++i) {
        InitBarrier(Barrier(kKeyFull, i), 1);
        InitBarrier(Barrier(kKeyEmpty, i), 4 * S::kConsumers);
        InitBarrier(Barrier(kValueFull, i), 1);
        InitBarrier(Barrier(kValueEmpty, i), 4 * S::kConsumers);
      }
      for (int i = 0; i < kQueries; ++i) {
        InitBarrier(QueryFull(i), 1);
        InitBarrier(QueryEmpty(i), 4 * S::kConsumers);
      }
      FenceBarrierInit();
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroup) {
      GiveRegisters<40>();
      if (threadIdx.x < 32) Produce();
    } else {
      TakeRegisters<232>();
      Consume();
    }
  }

 private:
  enum Kind { kKeyFull, kKeyEmpty, kValueFull, kValueEmpty };
  __device__ __forceinline__ uint32_t Barrier(Kind kind, int i) const {
    return base_ + S::kBarriers + 8 * (kind * S::kStages + i);
  }
  __device__ __forceinline__ uint32_t QueryFull(int i) const { return base_ + S::kBarriers + 8 * (4 * S::kStages + i); }
  __device__ __forceinline__ uint32_t QueryEmpty(int i) const { return QueryFull(kQueries + i); }
  __device__ __forceinline__ Entry* Entries() { return reinterpret_cast<Entry*>(shared_ + S::kEntries); }
  __device__ __forceinline__ Item* Items() { return reinterpret_cast<Item*>(shared_ + S::kItems); }

  // ---- the producer: one warp ----
  struct Cursor {
    Ring<S::kStages> stage;
    int b = 0, g = 0;
  };

  __device__ void Produce() {
    const AttentionParams& p = p_.attention;
    const int lane = threadIdx.x;
    const int rows = (p.S + S::kM - 1) / S::kM;
    const int items = p.B * p.H * rows;
    if (lane == 0) {
      PrefetchMap(&p_.query);
      PrefetchMap(&p_.key);
      PrefetchMap(&p_.value);
    }
    Ring<kQueries> query;
    Cursor cursor;
    const bool planned = p_.work != nullptr;
    int i = planned ? p_.work_begin[blockIdx.x] : static_cast<int>(blockIdx.x);
    const int end = planned ? p_.work_begin[blockIdx.x + 1] : items;
    for (; i < end; i += planned ? 1 : static_cast<int>(gridDim.x)) {
      const int item = planned ? p_.work[i] : i;
      const int bh = item / rows, row = item % rows;
      const int b = bh / p.H, h = bh % p.H;
      cursor.b = b;
      cursor.g = h / (p.H / p.G);
      Wait(QueryEmpty(query.at), query.phase ^ 1);
      if (lane == 0) {
        Items()[query.at] = Item{b, h, row * S::kM, 0};
        const uint32_t to = base_ + query.at * S::kQueryBytes, full = QueryFull(query.at);
        ArriveExpect(full, S::kQueryBytes);
#pragma unroll
        for (int wg = 0; wg < S::kConsumers; ++wg) {
#pragma unroll
          for (int c = 0; c < kHead / kAtom; ++c) {
            CopyTensor(to + (wg * (kHead / kAtom) + c) * 64 * 128, &p_.query, full, c * kAtom, row * S::kM + 64 * wg,
                       h * p_.query_step_h, b * p_.query_step_b);
          }
        }
      }
      query.Next();
      Walk(b, h, row, &cursor);
    }
    Wait(QueryEmpty(query.at), query.phase ^ 1);
    if (lane == 0) {
      Items()[query.at].row0 = -1;
      Arrive(QueryFull(query.at));
    }
  }

  // The key tiles of an item: 32 are looked at together, those of which padding leaves nothing are passed over.
  __device__ void Walk(int b, int h, int row, Cursor* cursor) {
    const AttentionParams& p = p_.attention;
    const int lane = threadIdx.x;
    int begin = 0, full = 0, end = (p.T + S::kN - 1) / S::kN;
    if (p.has_mask != 0) {
      const DeviceMask& mask = p.mask;
      const int table = mask.layout[(mask.layout_b == 1 ? 0 : b) * mask.layout_h + (mask.layout_h == 1 ? 0 : h)];
      begin = mask.row_ptr[table * mask.rows + row];
      full = mask.full_begin[table * mask.rows + row];
      end = mask.row_ptr[table * mask.rows + row + 1];
    }
    Entry held{-1, -1, 1, 0, {0, 0, 0, 0}};
    for (int at = begin; at < end; at += 32) {
      Entry own = Look(b, at + lane, end, full);
      uint32_t kept = __ballot_sync(~0u, own.tile >= 0);
      for (; kept != 0; kept &= kept - 1) {
        const int from = __ffs(static_cast<int>(kept)) - 1;
        if (held.tile >= 0) {
          held.last = 0;
          Publish(held, cursor);
        }
        held.tile = __shfl_sync(~0u, own.tile, from);
        held.bits = __shfl_sync(~0u, own.bits, from);
        held.known = __shfl_sync(~0u, own.known, from);
#pragma unroll
        for (int w = 0; w < 4; ++w) held.pad[w] = __shfl_sync(~0u, own.pad[w], from);
      }
    }
    held.last = 1;
    Publish(held, cursor);
  }

  // Entry `at` of a row of the mask; tile -1 beyond its end and where no key is left.
  __device__ Entry Look(int b, int at, int end, int full) const {
    const AttentionParams& p = p_.attention;
    Entry entry{-1, -1, 0, 1, {~0u, ~0u, ~0u, ~0u}};
    if (at >= end) return entry;
    entry.tile = at;
    if (p.has_mask != 0) {
      entry.tile = p.mask.key_tile[at];
      if (at < full) entry.bits = p.mask.bits_id[at];
    }
    const int key0 = entry.tile * S::kN;
    if (p.pad_bits == nullptr && key0 + S::kN <= p.T) return entry;
    const int words = (p.T + kTileKeys - 1) / kTileKeys * (kTileKeys / 32);
    uint32_t all = ~0u, any = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int word = key0 / 32 + w;
      const int keys = min(32, max(0, p.T - 32 * word));
      entry.pad[w] = keys == 32 ? ~0u : (1u << keys) - 1u;
      if (p.pad_bits != nullptr) entry.pad[w] = word < words ? p.pad_bits[static_cast<int64_t>(b) * words + word] : 0u;
      all &= entry.pad[w];
      any |= entry.pad[w];
    }
    entry.known = all == ~0u ? 1 : 0;
    if (any == 0) entry.tile = -1;
    return entry;
  }

  __device__ __forceinline__ void Publish(const Entry& entry, Cursor* cursor) {
    const int at = cursor->stage.at;
    Wait(Barrier(kKeyEmpty, at), cursor->stage.phase ^ 1);
    if (threadIdx.x == 0) {
      Entries()[at] = entry;
      Bring(&p_.key, Barrier(kKeyFull, at), S::kKeys + at * S::kTileBytes, entry.tile, p_.key_step_h * cursor->g,
            p_.key_step_b * cursor->b);
    }
    Wait(Barrier(kValueEmpty, at), cursor->stage.phase ^ 1);
    if (threadIdx.x == 0) {
      Bring(&p_.value, Barrier(kValueFull, at), S::kValues + at * S::kTileBytes, entry.tile,
            p_.value_step_h * cursor->g, p_.value_step_b * cursor->b);
    }
    __syncwarp();
    cursor->stage.Next();
  }

  __device__ __forceinline__ void Bring(const CUtensorMap* map, uint32_t full, int to, int tile, int h, int b) {
    if (tile < 0) {
      Arrive(full);
      return;
    }
    ArriveExpect(full, S::kTileBytes);
#pragma unroll
    for (int c = 0; c < kHead / kAtom; ++c) {
      CopyTensor(base_ + to + c * S::kN * 128, map, full, c * kAtom, tile * S::kN, h, b);
    }
  }

  // ---- a consumer: one warpgroup, 64 query rows ----
  static constexpr int kScores = S::kN / 2;  // a thread's share of 64 × N
  static constexpr int kOutputs = kHead / 2;

  __device__ void Consume() {
    const AttentionParams& p = p_.attention;
    wg_ = Uniform(static_cast<int>(threadIdx.x) / kWarpgroup - 1);
    lane_ = static_cast<int>(threadIdx.x) % 32;
    row_ = 64 * wg_ + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane_ / 4;
    scale_ = p.scale * kLog2E;
    if (wg_ == S::kConsumers - 1) PassTurn();
    Ring<kQueries> query;
    Ring<S::kStages> keys, values;
    for (;;) {
      Wait(QueryFull(query.at), query.phase);
      const Item item = ReadItem(query.at);
      if (item.row0 < 0) break;
      Work(item, query.at, &keys, &values);
      query.Next();
    }
    if (wg_ == 0) TakeTurn();  // what was passed last is taken, so that no barrier is left half full
  }

  __device__ __forceinline__ Item ReadItem(int at) {
    const Item item = Items()[at];
    return {Uniform(item.b), Uniform(item.h), Uniform(item.row0), 0};
  }
  __device__ __forceinline__ Entry ReadEntry(int at) {
    Entry entry = Entries()[at];
    entry.tile = Uniform(entry.tile);
    entry.bits = Uniform(entry.bits);
    entry.last = Uniform(entry.last);
    entry.known = Uniform(entry.known);
    return entry;
  }

  __device__ __forceinline__ void TakeTurn() const { SyncNamed(1 + wg_, 2 * kWarpgroup); }
  __device__ __forceinline__ void PassTurn() const { ArriveNamed(1 + (wg_ + 1) % S::kConsumers, 2 * kWarpgroup); }
  __device__ __forceinline__ void Release(uint32_t barrier) const {
    if (lane_ == 0) Arrive(barrier);
  }

  __device__ __forceinline__ void Work(const Item& item, int query, Ring<S::kStages>* keys, Ring<S::kStages>* values) {
    float o[kOutputs], s[kScores], high[2], sum[2];
    uint32_t weights[kScores / 2];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) high[r] = -INFINITY, sum[r] = 0.0f;

    Wait(Barrier(kKeyFull, keys->at), keys->phase);
    Entry entry = ReadEntry(keys->at);
    if (entry.tile < 0) {
      Release(Barrier(kKeyEmpty, keys->at));
      Wait(Barrier(kValueFull, values->at), values->phase);
      Release(Barrier(kValueEmpty, values->at));
      Release(QueryEmpty(query));
      keys->Next();
      values->Next();
      Finish(item, o, high, sum);
      return;
    }
    Hold(s);
    ProductFence();
    Scores(query, keys->at, s);
    ProductCommit();
    uint32_t bits[2][4];
    LoadBits(entry, bits);
    ProductWait<0>();
    Hold(s);
    Release(Barrier(kKeyEmpty, keys->at));
    if (entry.last != 0) Release(QueryEmpty(query));
    keys->Next();
    float factor[2];
    Softmax(entry, bits, s, high, sum, factor);
    Pack(s, weights);
    while (entry.last == 0) {
      Wait(Barrier(kKeyFull, keys->at), keys->phase);
      entry = ReadEntry(keys->at);
      TakeTurn();
      Hold(s);
      Hold(o);
      Hold(weights);
      ProductFence();
      Scores(query, keys->at, s);
      ProductCommit();
      Wait(Barrier(kValueFull, values->at), values->phase);
      ProductFence();
      AddValues(values->at, weights, o);
      ProductCommit();
      PassTurn();
      LoadBits(entry, bits);
      ProductWait<1>();
      Hold(s);
      Release(Barrier(kKeyEmpty, keys->at));
      if (entry.last != 0) Release(QueryEmpty(query));
      keys->Next();
      Softmax(entry, bits, s, high, sum, factor);
      ProductWait<0>();
      Hold(o);
      Hold(weights);
      Release(Barrier(kValueEmpty, values->at));
      values->Next();
      Pack(s, weights);
      if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
      }
    }
    Wait(Barrier(kValueFull, values->at), values->phase);
    Hold(o);
    Hold(weights);
    ProductFence();
    AddValues(values->at, weights, o);
    ProductCommit();
    ProductWait<0>();
    Hold(o);
    Release(Barrier(kValueEmpty, values->at));
    values->Next();
    Finish(item, o, high, sum);
  }

  // s = queries · keysᵀ
  __device__ __forceinline__ void Scores(int query, int stage, float (&s)[kScores]) const {
    const uint32_t a = base_ + query * S::kQueryBytes + wg_ * (kHead / kAtom) * 64 * 128;
    const uint32_t b = base_ + S::kKeys + stage * S::kTileBytes;
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k) {
      const int column = k % 4 * 32;  // bytes within a swizzled row
      Wgmma<T>::Inner(s, DescribeInner(a + k / 4 * 64 * 128 + column), DescribeInner(b + k / 4 * S::kN * 128 + column),
                      k > 0);
    }
  }

  // o += weights · values
  __device__ __forceinline__ void AddValues(int stage, const uint32_t (&weights)[kScores / 2],
                                            float (&o)[kOutputs]) const {
    const uint32_t b = base_ + S::kValues + stage * S::kTileBytes;
#pragma unroll
    for (int k = 0; k < S::kN / 16; ++k) {
      Wgmma<T>::Across(o, weights + 4 * k, DescribeAcross(b + k * 16 * 128, S::kN * 128));
    }
  }

  // The bits of this thread's two rows.
  __device__ __forceinline__ void LoadBits(const Entry& entry, uint32_t (&bits)[2][4]) const {
    if (entry.bits < 0) return;
    const uint32_t* from = p_.attention.mask.bits + (static_cast<int64_t>(entry.bits) * S::kM + row_) * (S::kN / 32);
    LoadConstant4(bits[0], from);
    LoadConstant4(bits[1], from + 8 * (S::kN / 32));
  }

  __device__ __forceinline__ void Softmax(const Entry& entry, const uint32_t (&bits)[2][4], float (&s)[kScores],
                                          float (&high)[2], float (&sum)[2], float (&factor)[2]) const {
    if (entry.bits >= 0 || entry.known == 0) {
      const int shift = lane_ % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const uint32_t word = (entry.bits >= 0 ? bits[r][w] & entry.pad[w] : entry.pad[w]) >> shift;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int i = 4 * (4 * w + j) + 2 * r;
            if ((word & 1u << 8 * j) == 0) s[i] = -INFINITY;
            if ((word & 2u << 8 * j) == 0) s[i + 1] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < kScores / 4; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale_;
      const float old = high[r];
      const bool raised = top > old + kSlack;
      high[r] = raised ? top : old;
      factor[r] = raised ? Exp2(old - top) : 1.0f;  // 0 from -inf
      const float base = high[r] == -INFINITY ? 0.0f : high[r];
      float added = 0.0f;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * j + 2 * r + e;
          s[i] = Exp2(s[i] * scale_ - base);
          added += s[i];
        }
      }
      sum[r] = sum[r] * factor[r] + added;
    }
  }

  static __device__ __forceinline__ void Pack(const float (&s)[kScores], uint32_t (&weights)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) weights[i] = cuda::Pack<T>(s[2 * i], s[2 * i + 1]);
  }

  // Divides and writes.
  __device__ __forceinline__ void Finish(const Item& item, float (&o)[kOutputs], const float (&high)[2],
                                         const float (&sum)[2]) const {
    const AttentionParams& p = p_.attention;
    T* const to = static_cast<T*>(p.output) + item.b * p.output_stride.b + item.h * p.output_stride.h;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = item.row0 + row_ + 8 * r;
      float total = sum[r];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const bool empty = total == 0.0f;
      if (p.sink != nullptr && !empty) {
        const float logit = p.sink_is_float != 0 ? static_cast<const float*>(p.sink)[item.h]
                                                 : ToFloat(static_cast<const T*>(p.sink)[item.h]);
        total += Exp2(fminf(logit * kLog2E - high[r], 127.0f));
      }
      if (empty && row < p.S && p_.redo != nullptr) {
        p_.redo[(item.b * p.H + item.h) * ((p.S + 63) / 64) + row / 64] = 1;
      }
      const float nothing = static_cast<EmptyRows>(p.empty_rows) == EmptyRows::kNan ? NAN : 0.0f;
      const float scale = 1.0f / total;
#pragma unroll
      for (int g = 0; g < kHead / 32; ++g) {
        // Four blocks of 8 columns, of which each of four lanes holds 2: exchanged, so that each has one block whole.
        uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = 4 * (4 * g + j) + 2 * r;
          word[j] = cuda::Pack<T>(empty ? nothing : o[i] * scale, empty ? nothing : o[i + 1] * scale);
        }
#pragma unroll
        for (int step = 1; step <= 2; step *= 2) {
          const bool upper = (lane_ & step) != 0;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if ((j & step) != 0) continue;
            const uint32_t got = __shfl_xor_sync(~0u, upper ? word[j] : word[j | step], step);
            if (upper) {
              word[j] = got;
            } else {
              word[j | step] = got;
            }
          }
        }
        const int column = 8 * (4 * g + lane_ % 4);
        if (row < p.S && column < p.Dv) {
          *reinterpret_cast<uint4*>(to + static_cast<int64_t>(row) * p.output_stride.s + column) =
              make_uint4(word[0], word[1], word[2], word[3]);
        }
      }
    }
  }

  const Sm90Params& p_;
  unsigned char* const shared_;
  uint32_t base_;
  int wg_ = 0, lane_ = 0, row_ = 0;
  float scale_ = 1.0f;
};

template <int kHead, typename T>
__global__ void __launch_bounds__(Shape<kHead>::kThreads, 1)
    AttentionKernel(const __grid_constant__ Sm90Params params) {
  extern __shared__ unsigned char shared[];
  const uint32_t lost = -SharedAddress(shared) & 1023u;
  Attention<kHead, T>(params, shared + lost).Run();
}

template <int kHead, typename T>
int Launch(const Sm90Params& params, int ctas, void* stream) {
  auto* kernel = AttentionKernel<kHead, T>;
  constexpr int kBytes = Shape<kHead>::kSharedBytes;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  kernel<<<static_cast<unsigned>(ctas), Shape<kHead>::kThreads, kBytes, static_cast<cudaStream_t>(stream)>>>(params);
  return static_cast<int>(cudaPeekAtLastError());
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_CUH_
