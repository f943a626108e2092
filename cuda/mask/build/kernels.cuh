// SPDX-License-Identifier: Apache-2.0
// Four kernels. 1: extremes of the sides of queries and keys (cuda/mask/build/extremes.cuh). 2: the class of every
// tile, by intervals. 3: the bits of undecided tiles, distributed over all SMs. 4: the tile lists of every row. Each
// starts before its predecessor has ended (programmatic dependent launch) and reads the predecessor's output only when
// it has. Included by mask_builder.cu alone.
#ifndef STOF_CUDA_MASK_BUILD_KERNELS_CUH_
#define STOF_CUDA_MASK_BUILD_KERNELS_CUH_

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/mask/build/build_params.cuh"
#include "cuda/mask/build/extremes.cuh"
#include "cuda/mask/fragments.h"

namespace stof {
namespace cuda {
namespace mask_build {

// ---- classes and bits ----
// 64 keys of 32 rows in the order of fragments.h: a lane has a row's two words, and takes those of 8 rows below.
__device__ __forceinline__ void StoreFragments(const Build& p, int64_t slot, int row, int w, uint32_t low,
                                               uint32_t high) {
  const uint32_t below = __shfl_down_sync(~0u, low, 8), below_high = __shfl_down_sync(~0u, high, 8);
  if ((row & 8) != 0) return;
  const int thread = row % 64 / 16 * 32 + row % 8 * 4;
  uint32_t* const to = p.bits + ((slot * (p.m / 64) + row / 64) * p.fragments + w) * 128 + thread;
  *reinterpret_cast<uint4*>(to) = {
      FragmentWord(low, high, below, below_high, 0), FragmentWord(low, high, below, below_high, 1),
      FragmentWord(low, high, below, below_high, 2), FragmentWord(low, high, below, below_high, 3)};
}

// Where a tile is.
struct TilePosition {
  int64_t b, h, q, key;  // the first of its queries and keys
  int rows;              // queries below S
  int table;
};
// at: the row of all tables.
__device__ __forceinline__ TilePosition TilePositionOf(const Build& p, int at, int column) {
  const int table = p.tables == 1 ? 0 : at / p.rows, row = at - table * p.rows;
  const int in_b = p.layout_h == 1 ? table : table / p.layout_h;
  const int64_t first = static_cast<int64_t>(row) * p.m;
  return {p.b0 + in_b,
          p.h0 + table - in_b * p.layout_h,
          p.q0 + first,
          static_cast<int64_t>(column) * p.n,
          static_cast<int>(Least(p.m, p.queries - first)),
          table};
}

// Where the mask depends on the distance from query to key alone, tiles along a diagonal share class and bits, computed
// for the first one. A tile that is cut off at the mask's end has its own.
__device__ __forceinline__ bool IsWhole(const Build& p, int row, int column) {
  return (row + int64_t{1}) * p.m <= p.queries && (column + int64_t{1}) * p.n <= p.keys;
}
template <bool kDiagonal>
__device__ __forceinline__ bool IsOwn(const Build& p, int row, int column) {
  return !kDiagonal || row < p.step_rows || column < p.step_columns || !IsWhole(p, row, column);
}
// Where a tile's bits are, of those of all tables. at: its row, of those of all tables.
template <bool kDiagonal>
__device__ __forceinline__ int SlotOf(const Build& p, int at, int table, int column) {
  if constexpr (!kDiagonal) return at * p.columns + column;
  const int row = at - table * p.rows, slot = table * p.slots;
  if (IsWhole(p, row, column)) return slot + column * p.step_rows + (p.rows - 1 - row) * p.step_columns;
  return slot + p.step_rows * p.columns + p.step_columns * p.rows + (row == p.rows - 1 ? column : p.columns + row);
}

// A warp decides tiles of one row: each lane first a few neighbours as one box, then the undecided ones of these one by
// one.
// Longer than 80 lines: both passes over the tiles share the box, the decision and the ballots of the warp.
template <bool kIntervals, bool kDiagonal>
__global__ void __launch_bounds__(kFewThreads) Decide(const __grid_constant__ Build p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ MaskOperand operands[kMostOperands];
  __shared__ MaskSide sides[kMostSides];
  __shared__ uint8_t open_groups[kFewThreads];
  LetNextStart();
  const MaskView view = Share(p, shared, operands, sides);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int chunks = (p.columns + kDecided - 1) / kDecided;
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * (kFewThreads / 32) + warp;
  const auto at = static_cast<int>(piece / chunks);  // of all tables' rows
  const int column0 = static_cast<int>(piece % chunks) * kDecided;
  WaitForPrevious();
  if (at >= p.tables * p.rows) return;
  const int table = at / p.rows, row = at % p.rows;
  MaskBox box;
  box.b = p.b0 + table / p.layout_h, box.h = p.h0 + table % p.layout_h;
  box.q_lo = p.q0 + static_cast<int64_t>(row) * p.m;
  box.q_hi = p.q0 + Least(static_cast<int64_t>(row + 1) * p.m, p.queries) - 1;
  // Tiles from `column` on: what their class is, and where they are undecided whether 32 bits are enough.
  const auto decide = [&](int column, auto number, bool* ok, bool* narrow) {
    constexpr int count = decltype(number)::value;
    box.k_lo = static_cast<int64_t>(column) * p.n;
    box.k_hi = Least(static_cast<int64_t>(column + count) * p.n, p.keys) - 1;
    const auto side = [&](int i) {
      const int64_t* from = p.extremes + 2 * ((static_cast<int64_t>(i) * p.tables + table) * p.widest);
      const auto read = [from](int tile) {
        const longlong2 pair = *reinterpret_cast<const longlong2*>(from + 2 * tile);
        return Interval{pair.x, pair.y};
      };
      if (view.sides[i].keys == 0) return read(row);
      Interval found = read(column);
#pragma unroll
      for (int next = 1; next < count; ++next) {  // of the last column again where there are no more
        const Interval other = read(static_cast<int>(Least(column + next, p.columns - 1)));
        found = {Least(found.lo, other.lo), Most(found.hi, other.hi)};
      }
      return found;
    };
    const MaskCan can = DecideBits<kIntervals>(view, box, side, ok, narrow);
    if (!can.one) return kEmptyTile;
    return !can.zero && static_cast<int64_t>(column + count) * p.n <= p.keys ? kFullTile : kPartialTile;
  };
  uint8_t* const classes = p.classes + static_cast<int64_t>(at) * p.class_stride;
  const int group = column0 + kTogether * lane;
  int full = 0;
  bool open = false;
  if (group < p.columns) {
    bool ok = true, narrow = true;
    const TileClass verdict = decide(group, std::integral_constant<int, kTogether>(), &ok, &narrow);
    open = !ok || verdict == kPartialTile;
    if (!open) {
      *reinterpret_cast<uint32_t*>(classes + group) = verdict * 0x01010101u;
      full = verdict == kFullTile ? kTogether : 0;
    }
  } else if (group < p.class_stride) {
    *reinterpret_cast<uint32_t*>(classes + group) = 0;
  }
  uint8_t* const groups = open_groups + warp * 32;
  const uint32_t all = __ballot_sync(~0u, open);
  if (open) groups[__popc(all & ((1u << lane) - 1u))] = static_cast<uint8_t>(lane);
  __syncwarp();
  const int tiles = kTogether * __popc(all);
  constexpr int kTurns = kTogether;
  const auto column_of = [&](int i) { return column0 + kTogether * groups[i / kTogether] + i % kTogether; };
  uint32_t undecided = 0, narrow = 0;  // a bit for each turn
#pragma unroll 1
  for (int turn = 0; 32 * turn < tiles; ++turn) {
    if (32 * turn + lane >= tiles) break;
    const int column = column_of(32 * turn + lane);
    TileClass verdict = kEmptyTile;
    if (column < p.columns) {
      bool ok = true, few = view.narrow != 0;
      verdict = decide(column, std::integral_constant<int, 1>(), &ok, &few);
      if (!ok) {
        if (p.invalid != nullptr) *p.invalid = 1;
        verdict = kEmptyTile;
      }
      undecided |= (verdict == kPartialTile && IsOwn<kDiagonal>(p, row, column) ? 1u : 0u) << turn;
      narrow |= (few ? 1u : 0u) << turn;
      full += verdict == kFullTile ? 1 : 0;
    }
    classes[column] = verdict;
  }
  // One addition a warp.
  const int number = __reduce_add_sync(~0u, __popc(undecided));
  if (number != 0) {
    int first = 0;
    if (lane == 0) first = atomicAdd(p.count, number);
    first = __shfl_sync(~0u, first, 0);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const bool own = (undecided >> turn & 1) != 0;
      const uint32_t found = __ballot_sync(~0u, own);
      if (own) {
        p.undecided[first + __popc(found & ((1u << lane) - 1u))] = {
            static_cast<uint32_t>(at), 2 * static_cast<uint32_t>(column_of(32 * turn + lane)) + (narrow >> turn & 1)};
      }
      first += __popc(found);
    }
  }
  full = __reduce_add_sync(~0u, full);
  if (lane == 0 && full != 0) atomicAdd(p.numbers + at, static_cast<unsigned long long>(full));
}

// Cooperation of a warp's lanes: a lane has one of 32 queries, and one key of a step. All lanes call.
template <bool kPairs>
struct WarpLanes {
  const Build& p;
  const MaskView& view;
  const int64_t* values;  // [sides][stride] of the table
  int64_t stride;
  int64_t row;      // this lane's query, of those of the part; the last one where it is beyond
  int64_t q0;       // the first query
  int32_t queries;  // of 32 those that are there, at least 1
  bool narrow;
  int lane;

  __device__ __forceinline__ int64_t Row(int side) const { return values[side * stride + row]; }
  __device__ __forceinline__ void Key(int side, int64_t k0, int64_t (&keys)[2]) const {
    const int64_t* const from = values + side * stride;
    keys[0] = from[Least(k0 + lane, p.keys - 1)], keys[1] = from[Least(k0 + 32 + lane, p.keys - 1)];
  }
  __device__ __forceinline__ void Keys(const BitStep& step, int64_t, int64_t, int64_t k0, uint32_t (&bits)[2]) const {
    int64_t keys[2];
    Key(step.key, k0, keys);
    bits[0] = __ballot_sync(~0u, keys[0] != 0), bits[1] = __ballot_sync(~0u, keys[1] != 0);
  }

  template <ExprOp kOp, typename V>
  static __device__ __forceinline__ void Compare(V row, const V (&keys)[2], uint32_t (&bits)[2]) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      bits[w] = 0;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const V key = __shfl_sync(~0u, keys[w], j);
        if (kOp == ExprOp::kEq ? row == key : kOp == ExprOp::kLt ? row < key : row > key) bits[w] |= 1u << j;
      }
    }
  }
  template <typename V>
  static __device__ __forceinline__ void CompareAll(ExprOp op, V row, const V (&keys)[2], uint32_t (&bits)[2]) {
    if (op == ExprOp::kEq || op == ExprOp::kNe) {
      Compare<ExprOp::kEq, V>(row, keys, bits);
    } else if (op == ExprOp::kLt || op == ExprOp::kGe) {
      Compare<ExprOp::kLt, V>(row, keys, bits);
    } else {
      Compare<ExprOp::kGt, V>(row, keys, bits);
    }
    if (op == ExprOp::kNe || op == ExprOp::kGe || op == ExprOp::kLe) bits[0] = ~bits[0], bits[1] = ~bits[1];
  }
  __device__ __forceinline__ void Outer(const BitStep& step, int64_t, int64_t, int64_t k0, uint32_t (&bits)[2]) const {
    int64_t keys[2];
    Key(step.key, k0, keys);
    const int64_t row = Row(step.row);
    const int32_t few = static_cast<int32_t>(row),
                  few_keys[2] = {static_cast<int32_t>(keys[0]), static_cast<int32_t>(keys[1])};
    if (__all_sync(~0u, few == row && few_keys[0] == keys[0] && few_keys[1] == keys[1])) {
      CompareAll<int32_t>(step.op, few, few_keys, bits);
    } else {
      CompareAll<int64_t>(step.op, row, keys, bits);
    }
  }

  // A bit of each of 16 bytes: whether it is not 0.
  static __device__ __forceinline__ uint32_t Pack(uint4 bytes) {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t high = (((words[i] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | words[i]) >> 7 & 0x01010101u;
      bits |= (high * 0x01020408u >> 24 & 0xfu) << 4 * i;
    }
    return bits;
  }
  __device__ __forceinline__ void Bytes(const BitStep& step, int64_t b, int64_t h, int64_t k0,
                                        uint32_t (&bits)[2]) const {
    const Affine& x = view.affines[view.steps[step.first].arg];
    const auto* from = static_cast<const uint8_t*>(view.operands[view.steps[step.first + 1].operand].data) +
                       (x.constant + x.b * b + x.h * h + x.q * q0 + k0);
    if (((reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(x.q)) & 15) == 0 && k0 + 64 <= p.keys) {
      // Four lanes read a row.
      uint4 values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = __ldg(reinterpret_cast<const uint4*>(from + x.q * Least(8 * i + lane / 4, queries - 1)) + lane % 4);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t own = Pack(values[i]), other = __shfl_xor_sync(~0u, own, 1);
        const uint32_t half = (lane & 1) != 0 ? own << 16 | other : other << 16 | own;
        const uint32_t low = __shfl_sync(~0u, half, lane % 8 * 4), high = __shfl_sync(~0u, half, lane % 8 * 4 + 2);
        if (lane / 8 == i) bits[0] = low, bits[1] = high;
      }
      return;
    }
    // A row at a time, a lane for a key; some are on their way at once.
    constexpr int kAtOnce = 8;
    const bool there[2] = {k0 + lane < p.keys, k0 + 32 + lane < p.keys};
    from += lane;
#pragma unroll 1
    for (int row0 = 0; row0 < 32; row0 += kAtOnce) {
      uint8_t values[kAtOnce][2];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const uint8_t* const at = from + x.q * Least(row0 + r, queries - 1);
        values[r][0] = there[0] ? __ldg(at) : 0;
        values[r][1] = there[1] ? __ldg(at + 32) : 0;
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const uint32_t low = __ballot_sync(~0u, values[r][0] != 0), high = __ballot_sync(~0u, values[r][1] != 0);
        if (lane == row0 + r) bits[0] = low, bits[1] = high;
      }
    }
  }

  template <typename V>
  __device__ __forceinline__ void PairBits(const MaskView& part, int64_t b, int64_t h, int64_t k0,
                                           uint32_t (&bits)[2]) const {
#pragma unroll 1
    for (int w = 0; w < 2; ++w) {
      uint32_t mine = 0;
#pragma unroll 1
      for (int group = 0; group < 32; group += kMaskRows<V>) {
        V allowed[kMaskRows<V>];
        EvaluateRows<V>(part, b, h, q0 + group, k0 + 32 * w + lane, allowed);
#pragma unroll
        for (int r = 0; r < kMaskRows<V>; ++r) {
          const uint32_t word = __ballot_sync(~0u, allowed[r] != 0);
          if (lane == group + r) mine = word;
        }
      }
      bits[w] = mine;
    }
  }
  __device__ __forceinline__ void Pairs(const BitStep& step, int64_t b, int64_t h, int64_t k0,
                                        uint32_t (&bits)[2]) const {
    if (!kPairs) return;
    MaskView part = view;
    part.steps += step.first, part.count = step.count;
    if (narrow) {
      PairBits<int32_t>(part, b, h, k0, bits);
    } else {
      PairBits<int64_t>(part, b, h, k0, bits);
    }
  }
};

// A CTA takes undecided tiles in turn, a thread a row of it.
template <bool kPairs, bool kDiagonal>
__global__ void __launch_bounds__(kMostThreads, kPairs ? 2 : kEvaluating / kMostThreads)
    Evaluate(const __grid_constant__ Build p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ MaskOperand operands[kMostOperands];
  __shared__ MaskSide sides[kMostSides];
  __shared__ int32_t ones[2][kMostThreads / 32];
  LetNextStart();
  const MaskView view = Share(p, shared, operands, sides);
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  WaitForPrevious();
  auto i = static_cast<int>(blockIdx.x);
  uint2 next = p.undecided[i];  // for each CTA there is one, though not always written
  const int count = *p.count, words = p.n / 32;
  int turn = 0;
  while (i < count) {
    const auto at = static_cast<int>(next.x), column = static_cast<int>(next.y >> 1);
    const bool narrow = (next.y & 1) != 0;
    i += static_cast<int>(gridDim.x);
    if (i < count) next = p.undecided[i];
    const TilePosition place = TilePositionOf(p, at, column);
    const int64_t slot = SlotOf<kDiagonal>(p, at, place.table, column);
    const int row = thread, row0 = thread - lane;
    const bool any = row0 < place.rows;
    const int64_t own_row = place.q - p.q0 + Least(row, place.rows - 1);
    const WarpLanes<kPairs> lanes = {
        p,       view,           p.values + int64_t{place.table} * p.span,           int64_t{p.tables} * p.span,
        own_row, place.q + row0, static_cast<int32_t>(Least(32, place.rows - row0)), narrow,
        lane};
    uint32_t* const to = p.bits + (slot * p.m + row) * words;
    int own = 0;
#pragma unroll 1
    for (int w = 0; w < words; w += 2) {
      const int64_t k0 = place.key + 32 * w;
      const auto left = static_cast<int32_t>(Least(p.keys - k0, 64));
      uint32_t bits[2] = {0, 0};
      if (any && left > 0) {
        EvaluateBits(view, place.b, place.h, p.q0 + own_row, k0, lanes, bits);
        bits[0] &= BitsBelow(left);
        bits[1] &= w + 1 < words ? BitsBelow(left - 32) : 0;
        if (row >= place.rows) bits[0] = bits[1] = 0;
      }
      own += __popc(bits[0]) + __popc(bits[1]);
      if (p.fragments != 0) {
        StoreFragments(p, slot, row, w / 2, bits[0], bits[1]);
      } else if (words % 2 == 0) {
        *reinterpret_cast<uint2*>(to + w) = {bits[0], bits[1]};
      } else {
        to[w] = bits[0];
        if (w + 1 < words) to[w + 1] = bits[1];
      }
    }
    own = __reduce_add_sync(~0u, own);
    if (lane == 0) ones[turn][thread / 32] = own;
    __syncthreads();
    if (kDiagonal || thread == 0) {
      int sum = 0;
      for (int warp = 0; warp < threads / 32; ++warp) sum += ones[turn][warp];
      const bool full = sum == place.rows * p.n, decided = sum == 0 || full;
      const auto tell = [&](int of, int tile) {
        if (decided) p.classes[static_cast<int64_t>(of) * p.class_stride + tile] = full ? kFullTile : kEmptyTile;
        if (sum != 0) atomicAdd(p.numbers + of, full ? 1ull : 1ull << 32);
      };
      if (thread == 0) tell(at, column);
      if constexpr (kDiagonal) {
        // So are the other tiles of its diagonal that are undecided.
        for (int step = thread + 1;; step += threads) {
          const int of = at + step * p.step_rows, tile = column + step * p.step_columns;
          if (!IsWhole(p, of - place.table * p.rows, tile)) break;
          if (p.classes[static_cast<int64_t>(of) * p.class_stride + tile] == kPartialTile) tell(of, tile);
        }
      }
    }
    turn ^= 1;
  }
}

// ---- lists ----
// The cost of a row, as on the host: a partial tile costs 1.5 times a full one.
__device__ __forceinline__ int64_t CostOf(unsigned long long numbers) {
  return 3 * static_cast<int64_t>(numbers >> 32) + 2 * static_cast<int64_t>(numbers & 0xffffffffu);
}

// A warp lists the tiles of a row, partial ones first. Another one sorts the row into the order by falling cost, stable
// among equal rows.
template <bool kDiagonal>
__global__ void __launch_bounds__(kFewThreads) ListTiles(const __grid_constant__ Build p) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * (kFewThreads / 64) + warp / 2;
  WaitForPrevious();
  if (at >= static_cast<int64_t>(p.tables) * p.rows) return;
  const int64_t table = p.tables == 1 ? 0 : at / p.rows;
  const auto row = static_cast<int>(at - table * p.rows);
  const unsigned long long numbers = p.numbers[at];
  if (warp % 2 == 1) {
    int rank = row;
    if (p.rows <= kMostOrdered) {
      const unsigned long long* of_table = p.numbers + table * p.rows;
      const int64_t cost = CostOf(numbers);
      rank = 0;
#pragma unroll 8
      for (int other = lane; other < p.rows; other += 32) {
        const int64_t its = CostOf(of_table[other]);
        rank += its > cost || (its == cost && other < row) ? 1 : 0;
      }
      rank = __reduce_add_sync(~0u, rank);
    }
    if (lane == 0) p.order[table * p.rows + rank] = row;
    return;
  }
  const auto begin = static_cast<int>(at * p.columns);
  int next = begin, next_full = begin + static_cast<int>(numbers >> 32);
  if (lane == 0) {
    p.row_begin[at] = next;
    p.full_begin[at] = next_full;
    p.row_end[at] = next_full + static_cast<int>(numbers & 0xffffffffu);
  }
  const uint8_t* classes = p.classes + at * p.class_stride;
  const uint32_t before = (1u << lane) - 1u;
  // A lane reads 16 columns at a time, whose classes are then handed out, so that beside each other's entries are
  // written together.
  for (int column0 = 0; column0 < p.columns; column0 += 16 * 32) {
    const int first = column0 + 16 * lane;
    uint32_t found = 0;  // full ones in the low half, partial ones in the high
    if (first < p.columns) {
      const uint4 read = *reinterpret_cast<const uint4*>(classes + first);
      const uint32_t words[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // a bit of each byte to four beside each other
        found |= ((words[i] & 0x01010101u) * 0x01020408u >> 24 & 0xfu) << 4 * i;
        found |= ((words[i] >> 1 & 0x01010101u) * 0x01020408u >> 24 & 0xfu) << (16 + 4 * i);
      }
    }
    const uint32_t lanes = __ballot_sync(~0u, found != 0);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if ((lanes >> 2 * i & 3) == 0) continue;
      const uint32_t own = __shfl_sync(~0u, found, 2 * i + lane / 16) >> lane % 16;
      const uint32_t full = __ballot_sync(~0u, (own & 1) != 0), partial = __ballot_sync(~0u, (own >> 16 & 1) != 0);
      const int column = column0 + 32 * i + lane;
      if ((own & 1) != 0) p.key_tile[next_full + __popc(full & before)] = column;
      if ((own >> 16 & 1) != 0) {
        const int to = next + __popc(partial & before);
        p.key_tile[to] = column;
        p.bits_id[to] = SlotOf<kDiagonal>(p, static_cast<int>(at), static_cast<int>(table), column);
      }
      next += __popc(partial), next_full += __popc(full);
    }
  }
}

template <typename Word>
__global__ void Invalidate(const int32_t* invalid, int64_t flag_stride, Word* output, Strides stride, int64_t H,
                           int64_t S, int64_t Dv, int64_t count) {
  if (flag_stride == 0 && *invalid == 0) return;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += threads) {
    const int64_t row = i / Dv, bh = row / S;
    if (invalid[bh / H * flag_stride] == 0) continue;
    // All bits but the sign's: NaN in every type.
    output[bh / H * stride.b + bh % H * stride.h + row % S * stride.s + i % Dv] =
        static_cast<Word>(static_cast<Word>(~Word{0}) >> 1);
  }
}

}  // namespace mask_build
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_BUILD_KERNELS_CUH_
