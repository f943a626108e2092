// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_sm90.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

namespace stof {
namespace cuda {
namespace {

constexpr uint32_t kBoxColumns = 64;  // 128 bytes, the span of the swizzle
constexpr uint32_t kQueryRows = 64;   // of one warpgroup

// The driver is found at run time: the library loads where there is none.
PFN_cuTensorMapEncodeTiled_v12000 FindEncode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

struct View {
  const void* data;
  int64_t size, rows, heads, batches;
  Strides stride;
};

bool Describe(const View& view, bool bf16, uint32_t box_rows, CUtensorMap* map, int32_t* step_h, int32_t* step_b) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = FindEncode();
  if (encode == nullptr) return false;
  // An axis that all share has stride 0, which a map need not take: there it has one element.
  const bool one_head = view.heads == 1 || view.stride.h == 0, one_batch = view.batches == 1 || view.stride.b == 0;
  *step_h = one_head ? 0 : 1;
  *step_b = one_batch ? 0 : 1;
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(view.size), static_cast<cuuint64_t>(view.rows),
                              static_cast<cuuint64_t>(one_head ? 1 : view.heads),
                              static_cast<cuuint64_t>(one_batch ? 1 : view.batches)};
  const auto bytes = [](int64_t elements, bool unused) { return static_cast<cuuint64_t>(unused ? 16 : 2 * elements); };
  const cuuint64_t strides[3] = {bytes(view.stride.s, view.rows == 1), bytes(view.stride.h, one_head),
                                 bytes(view.stride.b, one_batch)};
  const cuuint32_t box[4] = {kBoxColumns, box_rows, 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode(map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                const_cast<void*>(view.data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool DescribeTensors(bool bf16, int tile_keys, Sm90Params* params) {
  const auto keys = static_cast<uint32_t>(tile_keys);
  const AttentionParams& p = params->attention;
  return Describe({p.query, p.D, p.S, p.H, p.B, p.query_stride}, bf16, kQueryRows, &params->query,
                  &params->query_step_h, &params->query_step_b) &&
         Describe({p.key, p.D, p.T, p.G, p.B, p.key_stride}, bf16, keys, &params->key, &params->key_step_h,
                  &params->key_step_b) &&
         Describe({p.value, p.Dv, p.T, p.G, p.B, p.value_stride}, bf16, keys, &params->value, &params->value_step_h,
                  &params->value_step_b);
}

}  // namespace cuda
}  // namespace stof
