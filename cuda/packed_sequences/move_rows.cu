// SPDX-License-Identifier: Apache-2.0
// Copies between packed sequences and padded batches, and the key padding mask of the latter.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/common/mma_sm80.cuh"
#include "cuda/common/status.h"
#include "cuda/packed_sequences/copy_units.cuh"
#include "cuda/packed_sequences/move_rows.h"
#include "cuda/packed_sequences/sequence_rows.h"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerCta = 32;
constexpr uint32_t kInFlight = 4;  // units of a thread

__device__ __forceinline__ bool IsLegal(const DeviceSequences& sequences) {
  return __syncthreads_and(HasLegalStarts(sequences, threadIdx.x, kThreads) ? 1 : 0) != 0;
}

// SequenceRows with strides and sizes in units: 16 bytes, or one element where rows are not aligned so.
struct TensorUnits {
  void* packed = nullptr;
  void* padded = nullptr;
  int64_t stride_h = 0, stride_s = 0;  // of packed rows
  int64_t tile = 1;
  void* means = nullptr;
  uint32_t heads = 0, pieces = 0;  // pieces: units of a head
  STOF_HD uint32_t row_pieces() const { return heads * pieces; }
};

struct UnpackParams {
  DeviceSequences sequences;
  TensorUnits tensors[kMaxUnpackedTensors];
  KeyExistence keys;
  int64_t chunks = 0;  // of kRowsPerCta positions of a sequence
  int count = 0;       // of tensors
};

struct AverageParams {
  DeviceSequences sequences;
  TensorUnits tensor;
  KeyExistence keys;
  int64_t column_blocks = 0;  // CTAs of a sequence
};

struct PackParams {
  DeviceSequences sequences;
  TensorUnits tensor;
  int64_t chunks = 0;  // as in UnpackParams
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

// Where the row of a sequence begins in a key padding mask.
__device__ __forceinline__ int64_t BeginOfRow(const Tensor& pad, int64_t positions, int64_t b) {
  return pad.dims[0] == 1 ? 0 : b * positions;
}

// Whether the key padding mask forbids all keys of a sequence, which KeyExistence::keeps_whole_sequences allows then.
// All threads call it.
__device__ bool IsKeptWhole(const KeyExistence& keys, const SequenceSpan& span, int64_t positions, int64_t b) {
  if (!keys.keeps_whole_sequences || keys.given.dtype == DType::kUndefined || span.length == 0) return false;
  const int64_t row = BeginOfRow(keys.given, positions, b) + span.first;
  bool is_any_kept = false;
  for (int64_t i = threadIdx.x; i < span.length; i += kThreads) {
    is_any_kept = is_any_kept || IsNonZero(keys.given, row + i);
  }
  return __syncthreads_or(is_any_kept ? 1 : 0) == 0;
}

// Marks kThreads keys of a sequence from position `begin` on.
__device__ void MarkKeys(const UnpackParams& params, const SequenceSpan& span, int64_t b, int64_t begin) {
  const KeyExistence& keys = params.keys;
  const int64_t positions = params.sequences.positions, position = begin + threadIdx.x;
  const bool is_whole = IsKeptWhole(keys, span, positions, b);
  if (position >= positions) return;
  const bool exists = position >= span.first && position < span.first + span.length;
  bool is_kept = exists;
  if (exists && !is_whole && keys.given.dtype != DType::kUndefined) {
    is_kept = IsNonZero(keys.given, BeginOfRow(keys.given, positions, b) + position);
  }
  // The keys of an illegal sequence are NaN, and attended.
  keys.pad[b * positions + position] = is_kept || !span.is_legal ? 1 : 0;
  if (keys.bias != nullptr) keys.bias[b * positions + position] = exists || span.length == 0 ? 0.0f : -INFINITY;
}

// Copies `count` units: load(i) reads one, target(i) is its address. A thread has kInFlight loads in flight.
template <typename Unit, typename Load, typename Target>
__device__ __forceinline__ void MoveUnits(uint32_t count, const Load& load, const Target& target) {
  for (uint32_t begin = threadIdx.x; begin < count; begin += kInFlight * kThreads) {
    Unit units[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (begin + i * kThreads < count) units[i] = load(begin + i * kThreads);
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (begin + i * kThreads < count) *target(begin + i * kThreads) = units[i];
    }
  }
}

// A CTA fills kRowsPerCta positions of all heads of a sequence in one tensor. The last CTAs mark keys.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) UnpackKernel(const __grid_constant__ UnpackParams params) {
  WaitForPrevious();
  LetNextStart();
  const DeviceSequences& sequences = params.sequences;
  const int64_t chunk = blockIdx.x % params.chunks, b = blockIdx.x / params.chunks % sequences.B;
  const auto tensor_index = static_cast<int>(blockIdx.x / params.chunks / sequences.B);
  const bool is_legal = IsLegal(sequences);
  const SequenceSpan span = SpanOf(sequences, is_legal, b);
  if (tensor_index == params.count) {
    if (chunk * kThreads < sequences.positions) MarkKeys(params, span, b, chunk * kThreads);
    return;
  }
  const TensorUnits& tensor = params.tensors[tensor_index];
  const bool is_average = tensor.means != nullptr && IsKeptWhole(params.keys, span, sequences.positions, b);
  const int64_t end = span.first + span.length;  // of the rows that exist
  int64_t fill_begin = chunk * kRowsPerCta, fill_end = min(fill_begin + kRowsPerCta, sequences.positions);
  if (span.is_legal && tensor.tile < sequences.positions) {
    if (span.length == 0) return;
    fill_begin = max(fill_begin, span.first / tensor.tile * tensor.tile);
    fill_end = min(fill_end, (end + tensor.tile - 1) / tensor.tile * tensor.tile);
  }
  if (fill_begin >= fill_end) return;
  const uint32_t row_pieces = tensor.row_pieces();
  const auto* const from = static_cast<const Unit*>(tensor.packed) + (span.begin - span.first) * tensor.stride_s;
  auto* const to = static_cast<Unit*>(tensor.padded) + b * sequences.positions * row_pieces;
  const auto* const means = static_cast<const Unit*>(tensor.means) + b * row_pieces;
  const bool fills_means = tensor.means != nullptr && span.is_legal && !params.keys.keeps_whole_sequences;
  MoveUnits<Unit>(
      static_cast<uint32_t>(fill_end - fill_begin) * row_pieces,
      [&](uint32_t at) {
        const uint32_t in_row = at % row_pieces;
        const int64_t position = fill_begin + at / row_pieces;
        const bool exists = position >= span.first && position < end;
        if (is_average || (fills_means && !exists)) return means[in_row];
        if (!exists) return span.is_legal ? Unit{} : NanOf<Unit>();
        return from[position * tensor.stride_s + in_row / tensor.pieces * tensor.stride_h + in_row % tensor.pieces];
      },
      [&](uint32_t at) {
        const uint32_t in_row = at % row_pieces;
        const int64_t position = fill_begin + at / row_pieces;
        return to + (in_row / tensor.pieces * sequences.positions + position) * tensor.pieces + in_row % tensor.pieces;
      });
}

// ---- means ----
constexpr int kColumns = 32, kRowGroups = kThreads / kColumns;  // units and groups of rows of a CTA

// A CTA averages 32 units of the rows of a sequence.
template <typename Unit, typename T>
__global__ void __launch_bounds__(kThreads) AverageKernel(const __grid_constant__ AverageParams params) {
  constexpr int kElements = sizeof(Unit) / sizeof(T);
  __shared__ float sums[kRowGroups][kColumns][kElements];
  WaitForPrevious();
  LetNextStart();
  const DeviceSequences& sequences = params.sequences;
  const TensorUnits& tensor = params.tensor;
  const int64_t b = blockIdx.x / params.column_blocks;
  const SequenceSpan span = SpanOf(sequences, IsLegal(sequences), b);
  if (params.keys.keeps_whole_sequences && !IsKeptWhole(params.keys, span, sequences.positions, b)) return;
  const uint32_t row_pieces = tensor.row_pieces();
  const uint32_t column = threadIdx.x % kColumns, group = threadIdx.x / kColumns;
  const uint32_t at = static_cast<uint32_t>(blockIdx.x % params.column_blocks) * kColumns + column;
  float own[kElements] = {};
  if (at < row_pieces) {
    const auto* const from = static_cast<const Unit*>(tensor.packed) + at / tensor.pieces * tensor.stride_h +
                             at % tensor.pieces + span.begin * tensor.stride_s;
    for (int64_t row = group; row < span.length; row += kRowGroups) {
      const Unit unit = from[row * tensor.stride_s];
      const T* const elements = reinterpret_cast<const T*>(&unit);
#pragma unroll
      for (int i = 0; i < kElements; ++i) own[i] += ToFloat(elements[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) sums[group][column][i] = own[i];
  __syncthreads();
  if (group != 0 || at >= row_pieces) return;
  Unit mean = {};
  T* const elements = reinterpret_cast<T*>(&mean);
  const float by = 1.0f / static_cast<float>(max(span.length, int64_t{1}));
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    float sum = 0.0f;
    for (int g = 0; g < kRowGroups; ++g) sum += sums[g][column][i];
    elements[i] = static_cast<T>(sum * by);
  }
  static_cast<Unit*>(tensor.means)[b * row_pieces + at] = mean;
}

// ---- packing ----
// Fills rows begin, begin + step, ... below `end` of all heads.
template <typename Unit>
__device__ void FillRows(const TensorUnits& tensor, int64_t begin, int64_t end, int64_t step, Unit value) {
  auto* const to = static_cast<Unit*>(tensor.packed);
  for (int64_t row = begin; row < end; row += step) {
    for (uint32_t at = threadIdx.x; at < tensor.row_pieces(); at += kThreads) {
      to[row * tensor.stride_s + at / tensor.pieces * tensor.stride_h + at % tensor.pieces] = value;
    }
  }
}

// A CTA fills kRowsPerCta packed rows of a sequence, of all heads.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) PackKernel(const __grid_constant__ PackParams params) {
  WaitForPrevious();
  LetNextStart();
  const DeviceSequences& sequences = params.sequences;
  const TensorUnits& tensor = params.tensor;
  if (!IsLegal(sequences)) {
    FillRows(tensor, blockIdx.x, sequences.rows, gridDim.x, NanOf<Unit>());
    return;
  }
  // Rows behind the last sequence.
  FillRows(tensor, sequences.starts[sequences.B] + blockIdx.x, sequences.rows, gridDim.x, Unit{});
  const int64_t b = blockIdx.x / params.chunks, chunk = blockIdx.x % params.chunks;
  if (b >= sequences.B) return;
  const SequenceSpan span = SpanOf(sequences, true, b);
  if (!span.is_legal) {
    FillRows(tensor, sequences.starts[b] + chunk, sequences.starts[b + 1], params.chunks, NanOf<Unit>());
    return;
  }
  const int64_t first = chunk * kRowsPerCta, rows = min(span.length - first, int64_t{kRowsPerCta});
  if (rows <= 0) return;
  const uint32_t row_pieces = tensor.row_pieces();
  const auto* const from = static_cast<const Unit*>(tensor.padded) + b * sequences.positions * row_pieces;
  auto* const to = static_cast<Unit*>(tensor.packed);
  MoveUnits<Unit>(
      static_cast<uint32_t>(rows) * row_pieces,
      [&](uint32_t at) {
        const uint32_t in_row = at % row_pieces;
        const int64_t position = span.first + first + at / row_pieces;
        return from[(in_row / tensor.pieces * sequences.positions + position) * tensor.pieces + in_row % tensor.pieces];
      },
      [&](uint32_t at) {
        const uint32_t in_row = at % row_pieces;
        const int64_t row = span.begin + first + at / row_pieces;
        return to + row * tensor.stride_s + in_row / tensor.pieces * tensor.stride_h + in_row % tensor.pieces;
      });
}

template <typename Params, void (*kKernel)(const Params)>
Status Launch(const Params& params, int64_t ctas, void* stream) {
  if (ctas > kMostCtas) return Status::Error("too many rows of packed sequences: run with a smaller batch");
  const int error = LaunchKernel<Params, kKernel>(params, static_cast<unsigned>(ctas), kThreads, 0, stream,
                                                  CanStartEarly<Params, kKernel>());
  return ToStatus(static_cast<cudaError_t>(error), "launch of the kernel that copies packed sequences");
}

bool CanMoveVectors(const SequenceRows& tensor) {
  const int64_t elements = static_cast<int64_t>(sizeof(uint4)) / SizeOf(tensor.dtype);
  return tensor.size % elements == 0 && tensor.packed_stride.h % elements == 0 &&
         tensor.packed_stride.s % elements == 0 && IsAligned(tensor.packed) && IsAligned(tensor.padded);
}

template <typename Unit>
TensorUnits InUnits(const SequenceRows& tensor) {
  const int64_t elements = static_cast<int64_t>(sizeof(Unit)) / SizeOf(tensor.dtype);
  TensorUnits units;
  units.packed = tensor.packed, units.padded = tensor.padded, units.tile = tensor.tile;
  units.means = tensor.means;
  units.stride_h = tensor.packed_stride.h / elements, units.stride_s = tensor.packed_stride.s / elements;
  units.heads = static_cast<uint32_t>(tensor.heads), units.pieces = static_cast<uint32_t>(tensor.size / elements);
  return units;
}

template <typename Unit, typename T>
Status AverageElements(const AverageParams& params, void* stream) {
  return Launch<AverageParams, AverageKernel<Unit, T>>(params, params.sequences.B * params.column_blocks, stream);
}

template <typename Unit>
Status Average(const UnpackParams& unpack, const TensorUnits& tensor, DType dtype, void* stream) {
  AverageParams params;
  params.sequences = unpack.sequences, params.tensor = tensor, params.keys = unpack.keys;
  params.column_blocks = (tensor.row_pieces() + kColumns - 1) / kColumns;
  if constexpr (sizeof(Unit) >= sizeof(float)) {
    if (dtype == DType::kF32) return AverageElements<Unit, float>(params, stream);
  }
  if constexpr (sizeof(Unit) != sizeof(float)) {
    if (dtype == DType::kF16) return AverageElements<Unit, __half>(params, stream);
    if (dtype == DType::kBF16) return AverageElements<Unit, __nv_bfloat16>(params, stream);
  }
  return Status::Error("no means of " + TypeText(dtype));
}

template <typename Unit>
Status Unpack(UnpackParams* params, const SequenceRows* tensors, void* stream) {
  for (int i = 0; i < params->count; ++i) {
    params->tensors[i] = InUnits<Unit>(tensors[i]);
    const bool is_empty = params->tensors[i].row_pieces() == 0;
    if (tensors[i].means == nullptr || is_empty) continue;
    STOF_RETURN_IF_ERROR(Average<Unit>(*params, params->tensors[i], tensors[i].dtype, stream));
  }
  const int64_t ctas = (params->count + 1) * params->sequences.B * params->chunks;
  return Launch<UnpackParams, UnpackKernel<Unit>>(*params, ctas, stream);
}

template <typename Unit>
Status Pack(PackParams* params, const SequenceRows& tensor, void* stream) {
  params->tensor = InUnits<Unit>(tensor);
  const int64_t ctas = std::max<int64_t>(1, params->sequences.B * params->chunks);
  return Launch<PackParams, PackKernel<Unit>>(*params, ctas, stream);
}

}  // namespace

Status UnpackSequences(const DeviceSequences& sequences, const SequenceRows* tensors, int count,
                       const KeyExistence& keys, const RunContext& context) {
  if (sequences.B == 0 || sequences.positions == 0) return Status();
  UnpackParams params;
  params.sequences = sequences, params.keys = keys, params.count = count;
  params.chunks = (sequences.positions + kRowsPerCta - 1) / kRowsPerCta;
  if (std::all_of(tensors, tensors + count, CanMoveVectors)) return Unpack<uint4>(&params, tensors, context.stream);
  return SizeOf(tensors[0].dtype) == 4 ? Unpack<uint32_t>(&params, tensors, context.stream)
                                       : Unpack<uint16_t>(&params, tensors, context.stream);
}

Status PackSequences(const DeviceSequences& sequences, const SequenceRows& tensor, const RunContext& context) {
  if (sequences.rows == 0 || tensor.heads == 0) return Status();
  PackParams params;
  params.sequences = sequences;
  params.chunks = std::max<int64_t>(1, (sequences.positions + kRowsPerCta - 1) / kRowsPerCta);
  if (CanMoveVectors(tensor)) return Pack<uint4>(&params, tensor, context.stream);
  return SizeOf(tensor.dtype) == 4 ? Pack<uint32_t>(&params, tensor, context.stream)
                                   : Pack<uint16_t>(&params, tensor, context.stream);
}

}  // namespace cuda
}  // namespace stof
