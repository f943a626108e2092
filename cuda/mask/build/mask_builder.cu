// SPDX-License-Identifier: Apache-2.0
// The host side of making block masks on the device: memory sizes, cutting into parts, and the launches of
// cuda/mask/build/kernels.cuh.
#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>

#include "cuda/common/launch.cuh"
#include "cuda/mask/build/kernels.cuh"
#include "cuda/mask/build/mask_builder.h"
#include "cuda/mask/fragments.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {
namespace {

using mask_build::Build;
using mask_build::Decide;
using mask_build::Evaluate;
using mask_build::Invalidate;
using mask_build::kDecided;
using mask_build::kEvaluating;
using mask_build::kFewThreads;
using mask_build::kInlineAffines;
using mask_build::kInlineBitSteps;
using mask_build::kInlineSteps;
using mask_build::kMostThreads;
using mask_build::kThreads;
using mask_build::ListTiles;
using mask_build::Prepare;

constexpr int64_t kLine = 128;
constexpr int64_t kMostTiles = int64_t{1} << 29;  // of a mask: twice their number fits 32 bits
constexpr int kPiece = 3072;                      // bytes of a program that one launch carries

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

// ---- memory ----
int64_t BitBytes(const MaskTile& tile) {
  return int64_t{tile.m} * (tile.fragments ? 64 * FragmentWords(tile.n) : tile.n) / 8;
}
constexpr int64_t kListBytes = 17;  // of a tile: class, and four words in lists
int64_t ClassStride(int64_t columns) { return RoundUp(columns, 16); }

// Bits of a table of a mask that depends on the distance from query to key alone: of the first tile of every diagonal,
// and of those that may be cut off at the end.
struct Diagonals {
  Diagonals(const MaskTile& tile, int64_t columns) {
    const int common = std::gcd(tile.m, tile.n);
    step_rows = tile.n / common, step_columns = tile.m / common;
    fixed = (step_rows + 1) * columns, each_row = step_columns + 1;
  }
  int64_t step_rows, step_columns;  // from one tile to the next
  int64_t fixed, each_row;          // slots
};

struct Layout {
  int64_t rows = 0, columns = 0, tables = 0;
  int64_t slots = 0;  // of a table
  bool diagonal = false;
  int64_t summaries = 0, extremes = 0, values = 0, steps = 0, affines = 0, bit_steps = 0, numbers = 0, layout = 0,
          row_begin = 0, row_end = 0, full_begin = 0, order = 0, key_tile = 0, bits_id = 0, classes = 0, undecided = 0,
          count = 0, bits = 0, total = 0;
};

bool IsInline(const MaskProgram& program) {
  return program.steps.size() <= kInlineSteps && program.affines.size() <= kInlineAffines &&
         program.bit_steps.size() <= kInlineBitSteps;
}

int64_t SpanOf(const MaskBuild& build, const Layout& l) {
  return std::max(l.rows * build.tile.m, l.columns * build.tile.n);
}

Layout LayoutOf(const MaskBuild& build) {
  const MaskProgram& program = *build.program;
  Layout l;
  l.rows = CeilDiv(build.part.rows, build.tile.m);
  l.columns = CeilDiv(build.sizes.T, build.tile.n);
  l.tables = (program.uses_b ? build.part.batches : 1) * (program.uses_h ? build.part.heads : 1);
  const Diagonals diagonals(build.tile, l.columns);
  l.slots = l.rows * l.columns;
  if (const int64_t few = diagonals.fixed + l.rows * diagonals.each_row; program.diagonal && few < l.slots) {
    l.diagonal = true, l.slots = few;
  }
  const auto take = [&l](int64_t bytes) {
    const int64_t at = l.total;
    l.total += RoundUp(bytes, kLine);
    return at;
  };
  if (program.by_intervals) l.summaries = take(16 * int64_t{program.pairs});
  l.extremes = take(16 * static_cast<int64_t>(program.sides.size()) * l.tables * std::max(l.rows, l.columns));
  l.values = take(8 * static_cast<int64_t>(program.sides.size()) * l.tables * SpanOf(build, l));
  if (!IsInline(program)) {
    l.steps = take(static_cast<int64_t>(program.steps.size() * sizeof(NumberStep)));
    l.affines = take(static_cast<int64_t>(program.affines.size() * sizeof(Affine)));
    l.bit_steps = take(static_cast<int64_t>(program.bit_steps.size() * sizeof(BitStep)));
  }
  const int64_t all = l.tables * l.rows;
  l.numbers = take(8 * all);
  l.layout = take(4 * l.tables);
  l.row_begin = take(4 * all);
  l.row_end = take(4 * all);
  l.full_begin = take(4 * all);
  l.order = take(4 * all);
  l.key_tile = take(4 * all * l.columns);
  l.bits_id = take(4 * all * l.columns);
  l.classes = take(all * ClassStride(l.columns));
  l.undecided = take(8 * all * l.columns);
  l.count = take(4);
  l.bits = take(l.tables * l.slots * BitBytes(build.tile));
  return l;
}

using Kernel = void (*)(Build);
struct Kernels {
  Kernel decide, evaluate, list;
};
template <bool kDiagonal>
Kernels KernelsFor(const MaskProgram& program) {
  return {program.by_intervals ? Decide<true, kDiagonal> : Decide<false, kDiagonal>,
          program.by_pairs ? Evaluate<true, kDiagonal> : Evaluate<false, kDiagonal>, ListTiles<kDiagonal>};
}

int Start(Kernel kernel, const Build& build, int64_t ctas, int threads, size_t shared, cudaStream_t stream,
          bool early) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  void* arguments[] = {const_cast<Build*>(&build)};
  return static_cast<int>(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments));
}

}  // namespace

MaskCuts::MaskCuts(const MaskProgram& program, const ExprSizes& sizes, const MaskTile& tile, int64_t most)
    : sizes_(sizes) {
  const int64_t rows = CeilDiv(sizes.S, tile.m);
  const int64_t row_tiles = std::max<int64_t>(1, CeilDiv(sizes.T, tile.n));
  // With what a table has for each query and key, shared out among its tiles.
  const int64_t values = 8 * static_cast<int64_t>(program.sides.size()) *
                         std::max(CeilDiv(tile.n, std::max<int64_t>(1, rows)), CeilDiv(tile.m, row_tiles));
  // How many tables of so many rows of tiles fit.
  const auto tables = [&](int64_t count) {
    const int64_t lists = count * row_tiles * (kListBytes + values);
    int64_t slots = count * row_tiles;
    if (program.diagonal) {
      const Diagonals diagonals(tile, row_tiles);
      slots = std::min(slots, diagonals.fixed + count * diagonals.each_row);
    }
    // bits_id and the list's places are 32 bits.
    return std::min(most / std::max<int64_t>(1, lists + slots * BitBytes(tile)),
                    kMostTiles / std::max<int64_t>(1, count * row_tiles));
  };
  const int64_t b = program.uses_b ? sizes.B : 1, h = program.uses_h ? sizes.H : 1, fit = tables(rows);
  batches_ = sizes.B, heads_ = sizes.H, rows_ = sizes.S;
  if (b * h <= fit) return;
  if (program.uses_b) batches_ = std::max<int64_t>(1, fit / h);
  if (program.uses_h && h > fit) heads_ = 1;
  if (fit > 0) return;
  int64_t low = 1, high = rows;  // the most rows of which a table fits, or one
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (tables(middle) > 0 ? low : high) = middle;
  }
  rows_ = low * tile.m;
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

// Longer than 80 lines: an assignment for each field of the kernels' parameters, then the four launches.
int LaunchMaskBuild(const MaskBuild& build, void* memory, void* stream, DeviceMask* mask) {
  if (build.tile.m > kMostThreads || build.tile.n > kThreads) return static_cast<int>(cudaErrorInvalidValue);
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
  p.bit_steps_count = static_cast<int32_t>(program.bit_steps.size());
  p.sides_count = static_cast<int32_t>(program.sides.size());
  std::copy(program.sides.begin(), program.sides.end(), p.sides);
  p.narrow = program.narrow ? 1 : 0;
  if (IsInline(program)) {
    std::copy(program.steps.begin(), program.steps.end(), p.inline_steps);
    std::copy(program.affines.begin(), program.affines.end(), p.inline_affines);
    std::copy(program.bit_steps.begin(), program.bit_steps.end(), p.inline_bit_steps);
  } else {
    p.steps = reinterpret_cast<const NumberStep*>(base + l.steps);
    p.affines = reinterpret_cast<const Affine*>(base + l.affines);
    p.bit_steps = reinterpret_cast<const BitStep*>(base + l.bit_steps);
    int error = Carry(program.steps.data(), program.steps.size() * sizeof(NumberStep), base + l.steps, on);
    if (error == 0) {
      error = Carry(program.affines.data(), program.affines.size() * sizeof(Affine), base + l.affines, on);
    }
    if (error == 0)
      error = Carry(program.bit_steps.data(), program.bit_steps.size() * sizeof(BitStep), base + l.bit_steps, on);
    if (error != 0) return error;
  }
  p.m = build.tile.m, p.n = build.tile.n;
  p.fragments = build.tile.fragments ? FragmentWords(build.tile.n) : 0;
  p.rows = static_cast<int32_t>(l.rows), p.columns = static_cast<int32_t>(l.columns);
  p.tables = static_cast<int32_t>(l.tables);
  p.layout_h = static_cast<int32_t>(program.uses_h ? build.part.heads : 1);
  p.b0 = build.part.b, p.h0 = build.part.h;
  p.q0 = build.sizes.P + build.part.row, p.queries = build.part.rows, p.keys = build.sizes.T;
  p.summaries = reinterpret_cast<int64_t*>(base + l.summaries);
  p.classes = base + l.classes;
  p.class_stride = static_cast<int32_t>(ClassStride(l.columns));
  p.slots = static_cast<int32_t>(l.slots);
  if (l.diagonal) {
    const Diagonals diagonals(build.tile, l.columns);
    p.step_rows = static_cast<int32_t>(diagonals.step_rows);
    p.step_columns = static_cast<int32_t>(diagonals.step_columns);
  }
  p.extremes = reinterpret_cast<int64_t*>(base + l.extremes);
  p.numbers = reinterpret_cast<unsigned long long*>(base + l.numbers), p.count = words(l.count);
  p.values = reinterpret_cast<int64_t*>(base + l.values);
  p.widest = std::max(p.rows, p.columns), p.span = static_cast<int32_t>(SpanOf(build, l));
  p.undecided = reinterpret_cast<uint2*>(base + l.undecided);
  p.invalid = build.invalid;
  p.layout = words(l.layout);
  p.row_begin = words(l.row_begin), p.row_end = words(l.row_end), p.full_begin = words(l.full_begin);
  p.order = words(l.order), p.key_tile = words(l.key_tile), p.bits_id = words(l.bits_id);
  p.bits = reinterpret_cast<uint32_t*>(base + l.bits);

  for (const MaskOperand& operand : program.operands) {
    if (program.by_intervals && operand.blocks >= 0) {
      p.summary_ctas += static_cast<int32_t>(CeilDiv(operand.count, MaskOperand::kGroup));
    }
  }
  for (const MaskSide& side : program.sides) {
    p.side_ctas += l.tables * (side.keys != 0 ? CeilDiv(l.columns, kThreads / p.n) : CeilDiv(l.rows, kThreads / p.m));
  }

  const Kernels kernels = l.diagonal ? KernelsFor<true>(program) : KernelsFor<false>(program);
  const size_t shared = program.affines.size() * sizeof(Affine) + program.bit_steps.size() * sizeof(BitStep) +
                        program.steps.size() * sizeof(NumberStep);
  for (const Kernel kernel : {static_cast<Kernel>(Prepare), kernels.decide, kernels.evaluate}) {
    if (shared <= 40 << 10) break;
    const cudaError_t allowed = cudaFuncSetAttribute(
        reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (allowed != cudaSuccess) return static_cast<int>(allowed);
  }
  const bool early = CanStartEarly<Build, ListTiles<false>>();
  const int64_t rows = l.tables * l.rows, all = rows * l.columns;
  // What counts is cleared by all.
  const int64_t clearing = std::min<int64_t>(CeilDiv(rows, 4 * kThreads), build.sm_count);
  const int64_t ctas = std::max<int64_t>({1, p.summary_ctas + p.side_ctas, clearing});
  int error = Start(Prepare, p, ctas, kThreads, shared, on, false);
  if (error != 0) return error;
  const int64_t pieces = rows * CeilDiv(l.columns, kDecided);
  error = Start(kernels.decide, p, CeilDiv(pieces, kFewThreads / 32), kFewThreads, shared, on, early);
  if (error != 0) return error;
  error = Start(kernels.evaluate, p, std::min<int64_t>(all, int64_t{kEvaluating / p.m} * build.sm_count), p.m, shared,
                on, early);
  if (error != 0) return error;
  error = Start(kernels.list, p, CeilDiv(rows, kFewThreads / 64), kFewThreads, 0, on, early);
  if (error != 0) return error;

  mask->rows = p.rows;
  mask->layout_b = static_cast<int32_t>(program.uses_b ? build.part.batches : 1);
  mask->layout_h = p.layout_h;
  mask->layout = p.layout;
  mask->row_ptr = p.row_begin, mask->row_end = p.row_end, mask->full_begin = p.full_begin;
  mask->key_tile = p.key_tile, mask->bits_id = p.bits_id, mask->bits = p.bits, mask->order = p.order;
  return 0;
}

int LaunchInvalidate(const int32_t* invalid, bool is_by_batch, void* output, int64_t size, const Strides& stride,
                     int64_t B, int64_t H, int64_t S, int64_t Dv, void* stream) {
  Strides strides = stride;
  int64_t flag_stride = is_by_batch ? 1 : 0;
  int64_t count = B * H * S * Dv;
  const int64_t ctas = std::min<int64_t>(CeilDiv(count, 256), 1024);
  const void* kernel = size == 2 ? reinterpret_cast<const void*>(Invalidate<uint16_t>)
                                 : reinterpret_cast<const void*>(Invalidate<uint32_t>);
  void* arguments[] = {&invalid, &flag_stride, &output, &strides, &H, &S, &Dv, &count};
  return static_cast<int>(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(ctas)), dim3(256), arguments, 0,
                                           static_cast<cudaStream_t>(stream)));
}

}  // namespace cuda
}  // namespace stof
