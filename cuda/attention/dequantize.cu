// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/attention/dequantize.h"
#include "cuda/common/quantized.cuh"
#include "cuda/common/round.cuh"
#include "cuda/common/status.h"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostCtas = 1 << 16;

// One of keys and values.
struct Source {
  const void* from = nullptr;
  void* to = nullptr;  // [B, G, T, size], dense
  Strides stride;
  int64_t size = 0;  // D or Dv
  KvScale scale;
};

struct DequantizeParams {
  Source sources[2];
  int64_t B = 0, G = 0, T = 0;
};

// blockIdx.y: keys or values. A thread takes kPiece neighbours of a row, 4 or 1.
template <typename T, typename Stored, int kPiece>
__global__ void __launch_bounds__(kThreads) DequantizeKernel(const __grid_constant__ DequantizeParams params) {
  const Source& source = params.sources[blockIdx.y];
  const int64_t pieces = source.size / kPiece, count = params.B * params.G * params.T * pieces;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < count; at += int64_t{gridDim.x} * kThreads) {
    const int64_t d = at % pieces * kPiece, row = at / pieces;
    const int64_t key = row % params.T, g = row / params.T % params.G, b = row / params.T / params.G;
    const Stored* const from =
        static_cast<const Stored*>(source.from) + b * source.stride.b + g * source.stride.h + key * source.stride.s + d;
    T* const to = static_cast<T*>(source.to) + row * source.size + d;
    uint32_t word = 0;
    if constexpr (kPiece == 4) {
      word = *reinterpret_cast<const uint32_t*>(from);
    } else {
      word = *reinterpret_cast<const uint8_t*>(from);
    }
    float x[4];
    UnpackFloats(word, x, Stored());
    const float* const scale = source.scale.data + g * source.scale.stride_g;
#pragma unroll
    for (int e = 0; e < kPiece; ++e) to[e] = Round<T>(x[e] * scale[(d + e) * source.scale.stride_d]);
  }
}

template <typename T, typename Stored>
cudaError_t Launch(const DequantizeParams& params, bool is_aligned, cudaStream_t stream) {
  int64_t most = 0;
  for (const Source& source : params.sources) {
    most = std::max(most, params.B * params.G * params.T * (source.size / (is_aligned ? 4 : 1)));
  }
  const auto ctas = static_cast<unsigned>(std::min((most + kThreads - 1) / kThreads, kMostCtas));
  if (ctas == 0) return cudaSuccess;
  if (is_aligned) {
    DequantizeKernel<T, Stored, 4><<<dim3(ctas, 2), kThreads, 0, stream>>>(params);
  } else {
    DequantizeKernel<T, Stored, 1><<<dim3(ctas, 2), kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchFor(DType stored, const DequantizeParams& params, bool is_aligned, cudaStream_t stream) {
  return stored == DType::kI8 ? Launch<T, int8_t>(params, is_aligned, stream)
                              : Launch<T, Float8>(params, is_aligned, stream);
}

bool IsAligned(const Source& source) {
  return source.size % 4 == 0 && source.stride.b % 4 == 0 && source.stride.h % 4 == 0 && source.stride.s % 4 == 0 &&
         reinterpret_cast<uintptr_t>(source.from) % 4 == 0;
}

}  // namespace

Status Dequantize(const AttentionArgs& args, const RunContext& context, AttentionArgs* plain) {
  DequantizeParams params;
  params.B = args.shape.B, params.G = args.shape.G, params.T = args.shape.T;
  params.sources[0] = {args.key.data, nullptr, args.key.stride, args.shape.D, args.kv.key_scale};
  params.sources[1] = {args.value.data, nullptr, args.value.stride, args.shape.Dv, args.kv.value_scale};
  for (Source& source : params.sources) {
    int64_t bytes = 0;
    if (__builtin_mul_overflow(args.shape.B * args.shape.G * args.shape.T, source.size * SizeOf(args.shape.dtype),
                               &bytes)) {
      return Status::Error("the dequantized keys and values of this step are too large");
    }
    STOF_RETURN_IF_ERROR(context.Allocate(static_cast<size_t>(bytes), &source.to));
  }
  const bool is_aligned = IsAligned(params.sources[0]) && IsAligned(params.sources[1]);
  auto* const stream = static_cast<cudaStream_t>(context.stream);
  cudaError_t error = cudaSuccess;
  if (args.shape.dtype == DType::kF32) {
    error = LaunchFor<float>(args.shape.kv_dtype, params, is_aligned, stream);
  } else if (args.shape.dtype == DType::kF16) {
    error = LaunchFor<__half>(args.shape.kv_dtype, params, is_aligned, stream);
  } else {
    error = LaunchFor<__nv_bfloat16>(args.shape.kv_dtype, params, is_aligned, stream);
  }
  *plain = args;
  plain->shape.kv_dtype = DType::kUndefined;
  plain->kv.key_scale = plain->kv.value_scale = KvScale();
  plain->key.data = params.sources[0].to, plain->value.data = params.sources[1].to;
  plain->key.stride = {args.shape.G * args.shape.T * args.shape.D, args.shape.T * args.shape.D, args.shape.D};
  plain->value.stride = {args.shape.G * args.shape.T * args.shape.Dv, args.shape.T * args.shape.Dv, args.shape.Dv};
  plain->kv.seqlens = nullptr;  // the previous kernel writes keys and values
  return ToStatus(error, "launch of the kernel that dequantizes keys and values");
}

}  // namespace cuda
}  // namespace stof
