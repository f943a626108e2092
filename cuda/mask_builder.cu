// SPDX-License-Identifier: Apache-2.0
// Four kernels: summaries of the vectors; a class for every tile, by intervals; the bits of those that are undecided,
// shared out among all multiprocessors wherever in the mask they are; the lists of the tiles of every row. The first
// also clears what the others count with.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/mask_builder.h"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kCtas = 4;  // that evaluate tiles, a multiprocessor
constexpr int64_t kLine = 128;
constexpr int64_t kMostTiles = int64_t{1} << 29;  // of a mask: twice their number fits 32 bits
constexpr int kInlineSteps = 128, kInlineAffines = 40;
constexpr int kMostOrdered = 1024;  // rows of a table that are sorted; of more, chance balances
constexpr int kPiece = 3072;        // bytes of a program that one launch carries

enum TileClass : uint8_t { kEmptyTile, kFullTile, kUndecidedTile };

// By value: below the 4 KiB that every driver takes, and what a captured graph keeps.
struct Build {
  MaskOperand operands[kMostOperands];
  int32_t operand_count, steps_count, affines_count, narrow;
  // Small programs are in here, larger ones in memory.
  const MaskStep* steps;
  const MaskAffine* affines;
  MaskStep inline_steps[kInlineSteps];
  MaskAffine inline_affines[kInlineAffines];
  int32_t m, n, rows, columns;        // tile, tiles along the sides
  int32_t class_stride;               // from one row of classes to the next, a multiple of 16
  int32_t tables, layout_h;           // heads that are told apart
  int64_t b0, h0, q0, queries, keys;  // of the part; q0 is an absolute position
  int64_t* summaries;
  uint8_t* classes;     // [tables, rows, class_stride]
  int32_t* ones;        // [tables, rows, columns] of undecided tiles: allowed pairs
  uint32_t* undecided;  // their slots times 2, plus 1 where 32 bits are enough for the values
  int32_t* count;       // of those
  int32_t* invalid;
  int32_t* arrived;  // [tables]
  int32_t *layout, *row_begin, *row_end, *full_begin, *key_tile, *bits_id, *order;
  uint32_t* bits;
};
static_assert(sizeof(Build) <= 4096, "parameters of a kernel");

// ---- long programs: carried by launches, since a copy from the host has no place in a captured graph ----
struct Piece {
  unsigned char bytes[kPiece];
};
__global__ void CarryPiece(const __grid_constant__ Piece piece, unsigned char* to, int32_t count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) to[i] = piece.bytes[i];
}

int Carry(const void* from, size_t bytes, unsigned char* to, cudaStream_t stream) {
  const auto* source = static_cast<const unsigned char*>(from);
  for (size_t at = 0; at < bytes; at += kPiece) {
    Piece piece;
    auto count = static_cast<int32_t>(std::min<size_t>(kPiece, bytes - at));
    std::copy(source + at, source + at + count, piece.bytes);
    unsigned char* target = to + at;
    void* arguments[] = {&piece, &target, &count};
    const cudaError_t error =
        cudaLaunchKernel(reinterpret_cast<const void*>(CarryPiece), dim3(1), dim3(256), arguments, 0, stream);
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  return 0;
}

// ---- summaries ----
__device__ __forceinline__ int64_t Shuffled(int64_t x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }

// A CTA of 1024 threads takes a group of 1024 elements, a warp a block of 32.
__global__ void __launch_bounds__(MaskOperand::kGroup) Summarize(const __grid_constant__ Build p) {
  constexpr int kBlock = MaskOperand::kBlock, kGroup = MaskOperand::kGroup;
  __shared__ int64_t lows[kGroup / kBlock], highs[kGroup / kBlock];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int group = static_cast<int>(blockIdx.x);
  if (group == 0) {
    for (int t = thread; t < p.tables; t += kGroup) p.arrived[t] = 0, p.layout[t] = t;
    if (thread == 0) *p.count = 0;
  }
  int which = 0;
  for (; which < p.operand_count; ++which) {
    const MaskOperand& operand = p.operands[which];
    const int groups = operand.blocks < 0 ? 0 : (operand.count + kGroup - 1) / kGroup;
    if (group < groups) break;
    group -= groups;
  }
  if (which == p.operand_count) return;
  const MaskOperand& operand = p.operands[which];
  const int64_t at = static_cast<int64_t>(group) * kGroup + thread;
  // Beyond the end the last element again.
  const int64_t value = ReadElement(operand, at < operand.count ? at : operand.count - 1);
  int64_t low = value, high = value;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    low = Least(low, Shuffled(low, lanes));
    high = Most(high, Shuffled(high, lanes));
  }
  if (lane == 0) {
    lows[warp] = low, highs[warp] = high;
    const int64_t block = static_cast<int64_t>(group) * (kGroup / kBlock) + warp;
    if (block * kBlock < operand.count) {
      p.summaries[2 * (operand.blocks + block)] = low;
      p.summaries[2 * (operand.blocks + block) + 1] = high;
    }
  }
  __syncthreads();
  if (warp != 0) return;
  low = lows[lane], high = highs[lane];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    low = Least(low, Shuffled(low, lanes));
    high = Most(high, Shuffled(high, lanes));
  }
  if (lane == 0) {
    p.summaries[2 * (operand.groups + group)] = low;
    p.summaries[2 * (operand.groups + group) + 1] = high;
  }
}

// ---- classes and bits ----
// The program in shared memory; for all threads of a CTA.
__device__ __forceinline__ MaskView Share(const Build& p, unsigned char* shared, MaskOperand* operands) {
  const int thread = static_cast<int>(threadIdx.x);
  auto* const affines = reinterpret_cast<MaskAffine*>(shared);
  auto* const steps = reinterpret_cast<MaskStep*>(affines + p.affines_count);
  const MaskAffine* from = p.affines == nullptr ? p.inline_affines : p.affines;
  const MaskStep* source = p.steps == nullptr ? p.inline_steps : p.steps;
  for (int i = thread; i < p.affines_count; i += kThreads) affines[i] = from[i];
  for (int i = thread; i < p.steps_count; i += kThreads) steps[i] = source[i];
  if (thread < p.operand_count) operands[thread] = p.operands[thread];
  __syncthreads();
  MaskView view;
  view.steps = steps, view.affines = affines, view.operands = operands, view.summaries = p.summaries;
  view.count = p.steps_count, view.narrow = p.narrow;
  return view;
}

// Where a tile is.
struct Place {
  int64_t b, h, q, key;  // the first of its queries and keys
  int rows;              // queries below S
};
__device__ __forceinline__ Place PlaceOf(const Build& p, int slot) {
  const int at = slot / p.columns, table = at / p.rows, row = at % p.rows;
  const int64_t first = static_cast<int64_t>(row) * p.m;
  return {p.b0 + table / p.layout_h, p.h0 + table % p.layout_h, p.q0 + first,
          static_cast<int64_t>(slot % p.columns) * p.n, static_cast<int>(Least(p.m, p.queries - first))};
}

// A thread decides a tile.
__global__ void __launch_bounds__(kThreads) Decide(const __grid_constant__ Build p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ MaskOperand operands[kMostOperands];
  const MaskView view = Share(p, shared, operands);
  const int slot = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  bool open = false;
  uint32_t entry = 0;
  if (slot < p.tables * p.rows * p.columns) {
    const Place place = PlaceOf(p, slot);
    MaskIntervals intervals(view);
    const MaskInterval found = intervals.Run(
        {place.b, place.h, place.q, place.q + place.rows - 1, place.key, Least(place.key + p.n, p.keys) - 1});
    TileClass verdict = kUndecidedTile;
    if (!intervals.ok()) {
      if (p.invalid != nullptr) *p.invalid = 1;
      verdict = kEmptyTile;
    } else if (found.hi == 0) {
      verdict = kEmptyTile;
    } else if (found.lo == 1 && place.key + p.n <= p.keys) {
      verdict = kFullTile;
    }
    open = verdict == kUndecidedTile;
    entry = 2 * static_cast<uint32_t>(slot) + (intervals.narrow() ? 1 : 0);
    if (open) p.ones[slot] = 0;
    p.classes[static_cast<int64_t>(slot / p.columns) * p.class_stride + slot % p.columns] = verdict;
  }
  // One addition a warp.
  const uint32_t all = __ballot_sync(~0u, open);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int first = 0;
  if (lane == 0 && all != 0) first = atomicAdd(p.count, __popc(all));
  first = __shfl_sync(~0u, first, 0);
  if (open) p.undecided[first + __popc(all & ((1u << lane) - 1u))] = entry;
}

// 32 rows of a tile, a lane for a key of a word and then for a row: gives the number of ones in this lane's row.
template <typename V>
__device__ __forceinline__ int Bits(const MaskView& view, const Build& p, int slot, const Place& place, int row0) {
  const int lane = static_cast<int>(threadIdx.x) % 32, words = p.n / 32;
  uint32_t* const to = p.bits + (static_cast<int64_t>(slot) * p.m + row0 + lane) * words;
  int ones = 0;
  for (int w = 0; w < words; ++w) {
    const int64_t key = place.key + 32 * w + lane;
    const bool there = key < p.keys;
    uint32_t mine = 0;
#pragma unroll 1
    for (int group = 0; group < 32; group += kMaskRows<V>) {
      V allowed[kMaskRows<V>];
      EvaluateRows<V>(view, place.b, place.h, place.q + row0 + group, key, allowed);
#pragma unroll
      for (int r = 0; r < kMaskRows<V>; ++r) {
        const uint32_t word = __ballot_sync(~0u, there && allowed[r] != 0);
        if (lane == group + r) mine = word;
      }
    }
    if (row0 + lane >= place.rows) mine = 0;
    to[w] = mine;
    ones += __popc(mine);
  }
  return ones;
}

// Warps take pieces of 32 rows of the undecided tiles in turn.
__global__ void __launch_bounds__(kThreads) Evaluate(const __grid_constant__ Build p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ MaskOperand operands[kMostOperands];
  const MaskView view = Share(p, shared, operands);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t pieces = p.m / 32, all = *p.count * pieces;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + warp; at < all; at += int64_t{gridDim.x} * kWarps) {
    const uint32_t entry = p.undecided[at / pieces];
    const int slot = static_cast<int>(entry >> 1), row0 = static_cast<int>(at % pieces) * 32;
    const Place place = PlaceOf(p, slot);
    int own = 0;
    if ((entry & 1) != 0) {
      own = Bits<int32_t>(view, p, slot, place, row0);
    } else {
      own = Bits<int64_t>(view, p, slot, place, row0);
    }
    own = __reduce_add_sync(~0u, own);
    if (lane == 0 && own != 0) atomicAdd(p.ones + slot, own);
  }
}

// ---- lists ----
// A warp lists the tiles of a row, partial ones first; the CTA that is the last one of a table sorts its rows by
// falling number of tiles.
__global__ void __launch_bounds__(kThreads) ListTiles(const __grid_constant__ Build p) {
  __shared__ int32_t costs[kMostOrdered];
  __shared__ bool last;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int ctas = (p.rows + kWarps - 1) / kWarps;
  const int table = static_cast<int>(blockIdx.x) / ctas;
  const int row = static_cast<int>(blockIdx.x) % ctas * kWarps + warp;
  if (row < p.rows) {
    const int64_t at = static_cast<int64_t>(table) * p.rows + row;
    const int64_t begin = at * p.columns;
    const uint8_t* classes = p.classes + at * p.class_stride;
    const int every = static_cast<int>(Least(p.m, p.queries - static_cast<int64_t>(row) * p.m)) * p.n;
    int64_t next = begin;
    for (int pass = 0; pass < 2; ++pass) {
      // A lane takes 16 columns.
      for (int column0 = 0; column0 < p.columns; column0 += 16 * 32) {
        const int first = column0 + 16 * lane;
        uint32_t wanted = 0;
        if (first < p.columns) {
          const uint4 found = *reinterpret_cast<const uint4*>(classes + first);
          const uint32_t words[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
          for (int e = 0; e < 16; ++e) {
            const uint32_t own = words[e / 4] >> 8 * (e % 4) & 0xffu;
            if (first + e >= p.columns || own == kEmptyTile) continue;
            bool full = own == kFullTile, partial = false;
            if (own == kUndecidedTile) {
              const int32_t ones = p.ones[begin + first + e];
              full = ones == every;
              partial = ones != 0 && !full;
            }
            if (pass == 0 ? partial : full) wanted |= 1u << e;
          }
        }
        int behind = __popc(wanted);  // of this lane and those before it
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
          const int before = __shfl_up_sync(~0u, behind, lanes);
          if (lane >= lanes) behind += before;
        }
        int64_t to = next + behind - __popc(wanted);
        for (; wanted != 0; wanted &= wanted - 1, ++to) {
          const int column = first + __ffs(static_cast<int>(wanted)) - 1;
          p.key_tile[to] = column;
          if (pass == 0) p.bits_id[to] = static_cast<int32_t>(begin + column);
        }
        next += __shfl_sync(~0u, behind, 31);
      }
      if (lane == 0) (pass == 0 ? p.full_begin : p.row_end)[at] = static_cast<int32_t>(next);
    }
    if (lane == 0) {
      p.row_begin[at] = static_cast<int32_t>(begin);
      if (p.rows > kMostOrdered) p.order[at] = row;
    }
  }
  if (p.rows > kMostOrdered) return;
  __threadfence();
  __syncthreads();
  if (thread == 0) last = atomicAdd(p.arrived + table, 1) == ctas - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const int64_t first = static_cast<int64_t>(table) * p.rows;
  // The host's order: a partial tile counts half as much again, equal rows stay in theirs.
  for (int r = thread; r < p.rows; r += kThreads) {
    const int full = __ldcg(p.full_begin + first + r);
    costs[r] =
        3 * (__ldcg(p.row_end + first + r) - __ldcg(p.row_begin + first + r)) - (__ldcg(p.row_end + first + r) - full);
  }
  __syncthreads();
  for (int r = thread; r < p.rows; r += kThreads) {
    int rank = 0;
    for (int other = 0; other < p.rows; ++other) {
      rank += costs[other] > costs[r] || (costs[other] == costs[r] && other < r) ? 1 : 0;
    }
    p.order[first + rank] = r;
  }
}

__global__ void Invalidate(const int32_t* invalid, uint16_t* output, Strides stride, int64_t H, int64_t S, int64_t Dv,
                           int64_t count) {
  if (*invalid == 0) return;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += threads) {
    const int64_t row = i / Dv, bh = row / S;
    output[bh / H * stride.b + bh % H * stride.h + row % S * stride.s + i % Dv] = 0x7fff;  // NaN in both half types
  }
}

// ---- the host's part ----
int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Bits, class, and four words in lists.
int64_t TileBytes(const MaskTile& tile) { return int64_t{tile.m} * tile.n / 8 + 17; }
int64_t ClassStride(int64_t columns) { return CeilDiv(columns, 16) * 16; }

struct Layout {
  int64_t rows = 0, columns = 0, tables = 0;
  int64_t summaries = 0, steps = 0, affines = 0, arrived = 0, layout = 0, row_begin = 0, row_end = 0, full_begin = 0,
          order = 0, key_tile = 0, bits_id = 0, classes = 0, ones = 0, undecided = 0, count = 0, bits = 0, total = 0;
};

bool IsInline(const MaskProgram& program) {
  return program.steps.size() <= kInlineSteps && program.affines.size() <= kInlineAffines;
}

Layout LayoutOf(const MaskBuild& build) {
  const MaskProgram& program = *build.program;
  Layout l;
  l.rows = CeilDiv(build.part.rows, build.tile.m);
  l.columns = CeilDiv(build.sizes.T, build.tile.n);
  l.tables = (program.uses_b ? build.part.batches : 1) * (program.uses_h ? build.part.heads : 1);
  const auto take = [&l](int64_t bytes) {
    const int64_t at = l.total;
    l.total += CeilDiv(bytes, kLine) * kLine;
    return at;
  };
  l.summaries = take(16 * int64_t{program.pairs});
  if (!IsInline(program)) {
    l.steps = take(static_cast<int64_t>(program.steps.size() * sizeof(MaskStep)));
    l.affines = take(static_cast<int64_t>(program.affines.size() * sizeof(MaskAffine)));
  }
  const int64_t all = l.tables * l.rows;
  l.arrived = take(4 * l.tables);
  l.layout = take(4 * l.tables);
  l.row_begin = take(4 * all);
  l.row_end = take(4 * all);
  l.full_begin = take(4 * all);
  l.order = take(4 * all);
  l.key_tile = take(4 * all * l.columns);
  l.bits_id = take(4 * all * l.columns);
  l.classes = take(all * ClassStride(l.columns));
  l.ones = take(4 * all * l.columns);
  l.undecided = take(4 * all * l.columns);
  l.count = take(4);
  l.bits = take(all * l.columns * build.tile.m * build.tile.n / 8);
  return l;
}

template <typename Kernel>
int Start(Kernel* kernel, const Build& build, int64_t ctas, int threads, size_t shared, cudaStream_t stream) {
  void* arguments[] = {const_cast<Build*>(&build)};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(ctas)),
                                           dim3(static_cast<unsigned>(threads)), arguments, shared, stream));
}

}  // namespace

MaskCuts::MaskCuts(const MaskProgram& program, const ExprSizes& sizes, const MaskTile& tile, int64_t most)
    : sizes_(sizes) {
  const int64_t rows = CeilDiv(sizes.S, tile.m);
  // bits_id and the list's places are 32 bits.
  const int64_t tiles = std::max<int64_t>(1, std::min(most / TileBytes(tile), kMostTiles));
  const int64_t row_tiles = std::max<int64_t>(1, CeilDiv(sizes.T, tile.n));
  const int64_t table = rows * row_tiles;
  const int64_t b = program.uses_b ? sizes.B : 1, h = program.uses_h ? sizes.H : 1;
  batches_ = sizes.B, heads_ = sizes.H, rows_ = sizes.S;
  if (b * h * table > tiles) {
    if (program.uses_b) batches_ = std::max<int64_t>(1, tiles / (h * table));
    if (program.uses_h && h * table > tiles) heads_ = 1;
    if (table > tiles) rows_ = std::max<int64_t>(1, tiles / row_tiles) * tile.m;
  }
}

bool MaskCuts::Next(MaskPart* part) {
  if (next_.b >= sizes_.B || sizes_.H == 0 || sizes_.S == 0) return false;
  *part = next_;
  part->batches = std::min(batches_, sizes_.B - next_.b);
  part->heads = std::min(heads_, sizes_.H - next_.h);
  part->rows = std::min(rows_, sizes_.S - next_.row);
  next_.row += rows_;
  if (next_.row >= sizes_.S) next_.row = 0, next_.h += heads_;
  if (next_.h >= sizes_.H) next_.h = 0, next_.b += batches_;
  return true;
}

bool IsCountable(const MaskBuild& build) {
  const Layout l = LayoutOf(build);
  return l.tables * l.rows * l.columns <= kMostTiles;
}

size_t MaskBytes(const MaskBuild& build) { return static_cast<size_t>(LayoutOf(build).total); }

int LaunchMaskBuild(const MaskBuild& build, void* memory, void* stream, DeviceMask* mask) {
  const MaskProgram& program = *build.program;
  const auto on = static_cast<cudaStream_t>(stream);
  const Layout l = LayoutOf(build);
  auto* const base = static_cast<unsigned char*>(memory);
  const auto words = [base](int64_t at) { return reinterpret_cast<int32_t*>(base + at); };
  Build p = {};
  std::copy(program.operands.begin(), program.operands.end(), p.operands);
  p.operand_count = static_cast<int32_t>(program.operands.size());
  p.steps_count = static_cast<int32_t>(program.steps.size());
  p.affines_count = static_cast<int32_t>(program.affines.size());
  p.narrow = program.narrow ? 1 : 0;
  if (IsInline(program)) {
    std::copy(program.steps.begin(), program.steps.end(), p.inline_steps);
    std::copy(program.affines.begin(), program.affines.end(), p.inline_affines);
  } else {
    p.steps = reinterpret_cast<const MaskStep*>(base + l.steps);
    p.affines = reinterpret_cast<const MaskAffine*>(base + l.affines);
    int error = Carry(program.steps.data(), program.steps.size() * sizeof(MaskStep), base + l.steps, on);
    if (error == 0) {
      error = Carry(program.affines.data(), program.affines.size() * sizeof(MaskAffine), base + l.affines, on);
    }
    if (error != 0) return error;
  }
  p.m = build.tile.m, p.n = build.tile.n;
  p.rows = static_cast<int32_t>(l.rows), p.columns = static_cast<int32_t>(l.columns);
  p.tables = static_cast<int32_t>(l.tables);
  p.layout_h = static_cast<int32_t>(program.uses_h ? build.part.heads : 1);
  p.b0 = build.part.b, p.h0 = build.part.h;
  p.q0 = build.sizes.P + build.part.row, p.queries = build.part.rows, p.keys = build.sizes.T;
  p.summaries = reinterpret_cast<int64_t*>(base + l.summaries);
  p.classes = base + l.classes;
  p.class_stride = static_cast<int32_t>(ClassStride(l.columns));
  p.ones = words(l.ones), p.count = words(l.count);
  p.undecided = reinterpret_cast<uint32_t*>(base + l.undecided);
  p.invalid = build.invalid;
  p.arrived = words(l.arrived), p.layout = words(l.layout);
  p.row_begin = words(l.row_begin), p.row_end = words(l.row_end), p.full_begin = words(l.full_begin);
  p.order = words(l.order), p.key_tile = words(l.key_tile), p.bits_id = words(l.bits_id);
  p.bits = reinterpret_cast<uint32_t*>(base + l.bits);

  int64_t groups = 0;
  for (const MaskOperand& operand : program.operands) {
    if (operand.blocks >= 0) groups += CeilDiv(operand.count, MaskOperand::kGroup);
  }
  int error = Start(Summarize, p, std::max<int64_t>(1, groups), MaskOperand::kGroup, 0, on);
  if (error != 0) return error;

  const int64_t all = l.tables * l.rows * l.columns;
  const size_t shared = program.affines.size() * sizeof(MaskAffine) + program.steps.size() * sizeof(MaskStep);
  for (auto* kernel : {Decide, Evaluate}) {
    if (shared <= 40 << 10) break;
    const cudaError_t allowed =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (allowed != cudaSuccess) return static_cast<int>(allowed);
  }
  error = Start(Decide, p, CeilDiv(all, kThreads), kThreads, shared, on);
  if (error != 0) return error;
  const int64_t pieces = all * (p.m / 32);
  error = Start(Evaluate, p, std::min<int64_t>(CeilDiv(pieces, kWarps), kCtas * int64_t{build.multiprocessors}),
                kThreads, shared, on);
  if (error != 0) return error;
  error = Start(ListTiles, p, l.tables * CeilDiv(l.rows, kWarps), kThreads, 0, on);
  if (error != 0) return error;

  mask->rows = p.rows;
  mask->layout_b = static_cast<int32_t>(program.uses_b ? build.part.batches : 1);
  mask->layout_h = p.layout_h;
  mask->layout = p.layout;
  mask->row_ptr = p.row_begin, mask->row_end = p.row_end, mask->full_begin = p.full_begin;
  mask->key_tile = p.key_tile, mask->bits_id = p.bits_id, mask->bits = p.bits, mask->order = p.order;
  return 0;
}

int LaunchInvalidate(const int32_t* invalid, void* output, const Strides& stride, int64_t B, int64_t H, int64_t S,
                     int64_t Dv, void* stream) {
  auto* to = static_cast<uint16_t*>(output);
  Strides strides = stride;
  int64_t count = B * H * S * Dv;
  const int64_t ctas = std::min<int64_t>(CeilDiv(count, 256), 1024);
  void* arguments[] = {&invalid, &to, &strides, &H, &S, &Dv, &count};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(Invalidate), dim3(static_cast<unsigned>(ctas)),
                                           dim3(256), arguments, 0, static_cast<cudaStream_t>(stream)));
}

}  // namespace cuda
}  // namespace stof
