// SPDX-License-Identifier: Apache-2.0
// From the operator to the CUDA kernels: what they need of the problem, block mask, padding bits, launch.
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <string>

#include "cuda/attention.h"
#include "cuda/device_mask.h"
#include "plugins/core/cuda_backend.h"

namespace stof {
namespace {

using cuda::ToStatus;

Status ToHost(const void* from, size_t bytes, void* to) {
  return ToStatus(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy of a constant to the host");
}

Status Device(int* id) { return ToStatus(cudaGetDevice(id), "current device"); }

Status Check(const AttentionArgs& args) {
  if (args.dtype != DType::kF16 && args.dtype != DType::kBF16) {
    return Status::Error("the CUDA kernels take fp16 and bf16, found data type " +
                         std::to_string(static_cast<int>(args.dtype)));
  }
  // Rows are copied 16 bytes at a time.
  if (args.D % 8 != 0 || args.Dv % 8 != 0 || std::max(args.D, args.Dv) > 128) {
    return Status::Error("the CUDA kernels take head sizes that are multiples of 8 up to 128, found " +
                         std::to_string(args.D) + " and " + std::to_string(args.Dv));
  }
  for (const Strides* stride : {&args.query_stride, &args.key_stride, &args.value_stride, &args.output_stride}) {
    if (stride->b % 8 != 0 || stride->h % 8 != 0 || stride->s % 8 != 0) {
      return Status::Error("rows of query, key, value and output must begin at multiples of 16 bytes");
    }
  }
  for (const void* base : {args.query, args.key, args.value, static_cast<const void*>(args.output)}) {
    if (reinterpret_cast<uintptr_t>(base) % 16 != 0) {
      return Status::Error("query, key, value and output must be aligned to 16 bytes");
    }
  }
  const int64_t items = args.B * args.H * ((args.S + cuda::kTileRows - 1) / cuda::kTileRows);
  if (items > std::numeric_limits<int32_t>::max() || args.S > (1 << 22) || args.T > (1 << 22)) {
    return Status::Error("too many rows for one launch");
  }
  return Status();
}

cuda::AttentionParams ToParams(const AttentionArgs& args) {
  cuda::AttentionParams p;
  p.B = static_cast<int32_t>(args.B), p.H = static_cast<int32_t>(args.H), p.G = static_cast<int32_t>(args.G);
  p.S = static_cast<int32_t>(args.S), p.T = static_cast<int32_t>(args.T);
  p.D = static_cast<int32_t>(args.D), p.Dv = static_cast<int32_t>(args.Dv);
  p.query = args.query, p.key = args.key, p.value = args.value, p.output = args.output;
  p.query_stride = args.query_stride, p.key_stride = args.key_stride;
  p.value_stride = args.value_stride, p.output_stride = args.output_stride;
  p.scale = args.scale, p.softcap = args.softcap;
  p.empty_rows = static_cast<int32_t>(args.empty_rows);
  p.bias = args.bias;
  p.bias_is_float = args.bias_dtype == DType::kF32 ? 1 : 0;
  p.bias_stride_b = args.bias_stride_b, p.bias_stride_h = args.bias_stride_h;
  p.bias_stride_q = args.bias_stride_q, p.bias_stride_k = args.bias_stride_k;
  p.relative_bias = args.relative_bias;
  p.relative_bias_size = args.relative_bias_size, p.relative_bias_stride_h = args.relative_bias_stride_h;
  p.query_position = static_cast<int32_t>(args.query_position);
  p.sink = args.sink;
  p.sink_is_float = args.sink_dtype == DType::kF32 ? 1 : 0;
  return p;
}

Status Attention(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                 const RunContext& context) {
  STOF_RETURN_IF_ERROR(Check(args));
  if (!mask.parts.dynamic.empty()) {
    return Status::Error(
        "the mask reads vectors at run time other than padding, which no CUDA kernel of this build does; run this node "
        "on "
        "the CPU, or leave its site as it is (--skip)");
  }
  auto* stream = static_cast<cudaStream_t>(context.stream);
  cuda::AttentionParams params = ToParams(args);
  std::shared_ptr<const cuda::MaskEntry> entry;
  if (!mask.parts.fixed.empty()) {
    STOF_RETURN_IF_ERROR(cuda::DeviceMaskCache::Global().Get(mask.parts.fixed, mask.fixed_hash, sizes, stream, &entry));
    params.has_mask = 1;
    params.mask = entry->view();
  }
  if (pad != nullptr) {
    const int64_t tiles = (args.T + cuda::kTileKeys - 1) / cuda::kTileKeys;
    const auto bytes = static_cast<size_t>(std::max<int64_t>(1, args.B * tiles) * cuda::kTileKeys / 8);
    auto* bits = static_cast<uint32_t*>(context.allocate(context.self, bytes));
    if (bits == nullptr) return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of padding");
    const int error = cuda::LaunchPadBits(pad->data, pad->dtype, pad->dims[0], args.B, args.T, bits, stream);
    STOF_RETURN_IF_ERROR(ToStatus(static_cast<cudaError_t>(error), "launch of the padding kernel"));
    params.pad_bits = bits;
  }
  const bool extras = args.softcap > 0.0f || args.bias != nullptr || args.relative_bias != nullptr;
  const auto size = static_cast<int>(std::max(args.D, args.Dv));
  const cuda::Launch launch = cuda::FindSm80(size, args.dtype == DType::kBF16, extras);
  if (launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(size));
  return ToStatus(static_cast<cudaError_t>(launch(params, stream)), "launch of the attention kernel");
}

constexpr CudaBackend kBackend = {ToHost, Device, Attention};

}  // namespace

const CudaBackend* FindCudaBackend() { return &kBackend; }

}  // namespace stof
