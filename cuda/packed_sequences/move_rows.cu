// SPDX-License-Identifier: Apache-2.0
// Copies between packed sequences and padded batches, and the key padding mask of the latter.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/common/status.h"
#include "cuda/packed_sequences/copy_units.cuh"
#include "cuda/packed_sequences/move_rows.h"
#include "cuda/packed_sequences/sequence_rows.h"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerCta = 16;

__device__ __forceinline__ bool IsLegal(const DeviceSequences& sequences) {
  return __syncthreads_and(HasLegalStarts(sequences, threadIdx.x, kThreads) ? 1 : 0) != 0;
}

// ---- copies ----
struct MoveParams {
  DeviceSequences sequences;
  SequenceRows tensor;  // strides in units
  int64_t chunks = 0;   // unpack: CTAs of a sequence
  uint32_t pieces = 0;  // units of a head
};

// A CTA fills 16 positions of all heads of a sequence. Unit: what a thread moves at once.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) UnpackKernel(const __grid_constant__ MoveParams params) {
  WaitForPrevious();
  LetNextStart();
  const DeviceSequences& sequences = params.sequences;
  const SequenceRows& tensor = params.tensor;
  const int64_t b = blockIdx.x / params.chunks, first = blockIdx.x % params.chunks * kRowsPerCta;
  const bool is_legal = IsLegal(sequences);
  const SequenceSpan span = SpanOf(sequences, is_legal, b);
  const auto* const from = static_cast<const Unit*>(tensor.packed);
  auto* const to = static_cast<Unit*>(tensor.padded) + b * tensor.heads * sequences.positions * params.pieces;
  const uint32_t row_pieces = static_cast<uint32_t>(tensor.heads) * params.pieces;
  for (uint32_t at = threadIdx.x; at < kRowsPerCta * row_pieces; at += kThreads) {
    const uint32_t in_row = at % row_pieces, head = in_row / params.pieces, piece = in_row % params.pieces;
    const int64_t position = first + at / row_pieces, row = position - span.first;
    if (position >= sequences.positions) return;
    Unit value = span.is_legal ? Unit{} : NanOf<Unit>();
    if (row >= 0 && row < span.length) {
      value = from[(span.begin + row) * tensor.packed_stride.s + head * tensor.packed_stride.h + piece];
    }
    to[(head * sequences.positions + position) * params.pieces + piece] = value;
  }
}

// A CTA fills 16 packed rows of all heads.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) PackKernel(const __grid_constant__ MoveParams params) {
  WaitForPrevious();
  LetNextStart();
  const DeviceSequences& sequences = params.sequences;
  const SequenceRows& tensor = params.tensor;
  const bool is_legal = IsLegal(sequences);
  const auto* const from = static_cast<const Unit*>(tensor.padded);
  auto* const to = static_cast<Unit*>(tensor.packed);
  const uint32_t row_pieces = static_cast<uint32_t>(tensor.heads) * params.pieces;
  for (int64_t row = int64_t{blockIdx.x} * kRowsPerCta; row < int64_t{blockIdx.x + 1} * kRowsPerCta; ++row) {
    if (row >= sequences.rows) return;
    int64_t b = 0;
    const SequenceSpan span = SpanOfRow(sequences, is_legal, row, &b);
    const bool exists = row >= span.begin && row < span.begin + span.length;
    const int64_t position = span.first + row - span.begin;
    for (uint32_t at = threadIdx.x; at < row_pieces; at += kThreads) {
      const uint32_t head = at / params.pieces, piece = at % params.pieces;
      Unit value = span.is_legal ? Unit{} : NanOf<Unit>();
      if (exists) {
        value = from[((b * tensor.heads + head) * sequences.positions + position) * params.pieces + piece];
      }
      to[row * tensor.packed_stride.s + head * tensor.packed_stride.h + piece] = value;
    }
  }
}

template <void (*kKernel)(const MoveParams)>
Status Launch(const MoveParams& params, int64_t ctas, void* stream) {
  if (ctas > kMostCtas) return Status::Error("too many rows of packed sequences: run with a smaller batch");
  const int error = LaunchKernel<MoveParams, kKernel>(params, static_cast<unsigned>(ctas), kThreads, 0, stream,
                                                      CanStartEarly<MoveParams, kKernel>());
  return ToStatus(static_cast<cudaError_t>(error), "launch of the kernel that copies packed sequences");
}

template <typename Unit>
Status Move(MoveParams params, bool is_unpack, void* stream) {
  const int64_t units = static_cast<int64_t>(sizeof(Unit)) / SizeOf(params.tensor.dtype);  // elements of a unit
  params.pieces = static_cast<uint32_t>(params.tensor.size / units);
  params.tensor.packed_stride.h /= units, params.tensor.packed_stride.s /= units;
  if (is_unpack) return Launch<UnpackKernel<Unit>>(params, params.sequences.B * params.chunks, stream);
  return Launch<PackKernel<Unit>>(params, (params.sequences.rows + kRowsPerCta - 1) / kRowsPerCta, stream);
}

Status MoveRows(const DeviceSequences& sequences, const SequenceRows& tensor, bool is_unpack,
                const RunContext& context) {
  if (tensor.heads == 0 || (is_unpack ? sequences.B * sequences.positions : sequences.rows) == 0) return Status();
  MoveParams params;
  params.sequences = sequences;
  params.tensor = tensor;
  params.chunks = (sequences.positions + kRowsPerCta - 1) / kRowsPerCta;
  const int64_t item = SizeOf(tensor.dtype), unit = static_cast<int64_t>(sizeof(uint4)) / item;
  const bool are_rows_aligned =
      tensor.size % unit == 0 && tensor.packed_stride.h % unit == 0 && tensor.packed_stride.s % unit == 0;
  if (are_rows_aligned && IsAligned(tensor.packed) && IsAligned(tensor.padded)) {
    return Move<uint4>(params, is_unpack, context.stream);
  }
  return item == 4 ? Move<uint32_t>(params, is_unpack, context.stream)
                   : Move<uint16_t>(params, is_unpack, context.stream);
}

// ---- keys that exist ----
struct MarkParams {
  DeviceSequences sequences;
  KeyExistence keys;
  int64_t chunks = 0;  // CTAs of a sequence, a thread for each position
};

__device__ __forceinline__ bool IsNonZero(const Tensor& pad, int64_t i) {
  switch (pad.dtype) {
    case DType::kI32:
      return static_cast<const int32_t*>(pad.data)[i] != 0;
    case DType::kI64:
      return static_cast<const int64_t*>(pad.data)[i] != 0;
    case DType::kF32:
      return static_cast<const float*>(pad.data)[i] != 0.0f;
    case DType::kF16:
      return (static_cast<const uint16_t*>(pad.data)[i] & 0x7fff) != 0;
    default:
      return static_cast<const uint8_t*>(pad.data)[i] != 0;
  }
}

__global__ void __launch_bounds__(kThreads) MarkKernel(const __grid_constant__ MarkParams params) {
  WaitForPrevious();
  LetNextStart();
  const DeviceSequences& sequences = params.sequences;
  const KeyExistence& keys = params.keys;
  const int64_t b = blockIdx.x / params.chunks, position = blockIdx.x % params.chunks * kThreads + threadIdx.x;
  const bool is_legal = IsLegal(sequences);
  if (position >= sequences.positions) return;
  const SequenceSpan span = SpanOf(sequences, is_legal, b);
  const bool exists = position >= span.first && position < span.first + span.length;
  const int64_t at = b * sequences.positions + position;
  bool is_kept = exists;
  if (exists && keys.given.dtype != DType::kUndefined) {
    is_kept = IsNonZero(keys.given, keys.given.dims[0] == 1 ? position : at);
  }
  // The keys of an illegal sequence are NaN, and attended.
  keys.pad[at] = is_kept || !span.is_legal ? 1 : 0;
  if (keys.bias != nullptr) keys.bias[at] = exists || span.length == 0 ? 0.0f : -INFINITY;
}

}  // namespace

Status UnpackSequences(const DeviceSequences& sequences, const SequenceRows& tensor, const RunContext& context) {
  return MoveRows(sequences, tensor, true, context);
}

Status PackSequences(const DeviceSequences& sequences, const SequenceRows& tensor, const RunContext& context) {
  return MoveRows(sequences, tensor, false, context);
}

Status MarkKeys(const DeviceSequences& sequences, const KeyExistence& keys, const RunContext& context) {
  if (sequences.B == 0 || sequences.positions == 0) return Status();
  MarkParams params;
  params.sequences = sequences;
  params.keys = keys;
  params.chunks = (sequences.positions + kThreads - 1) / kThreads;
  const int64_t ctas = sequences.B * params.chunks;
  if (ctas > kMostCtas) return Status::Error("too many keys of packed sequences: run with a smaller batch");
  const int error = LaunchKernel<MarkParams, MarkKernel>(params, static_cast<unsigned>(ctas), kThreads, 0,
                                                         context.stream, CanStartEarly<MarkParams, MarkKernel>());
  return ToStatus(static_cast<cudaError_t>(error), "launch of the kernel that marks keys of packed sequences");
}

}  // namespace cuda
}  // namespace stof
