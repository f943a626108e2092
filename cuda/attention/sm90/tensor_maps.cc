// SPDX-License-Identifier: Apache-2.0
// TMA maps of query, key, value, output and bias; of pooled queries and keys.
#include "cuda/attention/choose_blocks/params.h"
#include "cuda/attention/int8/layout.h"
#include "cuda/attention/sm90/api.h"
#include "cuda/common/tensor_map.h"

namespace stof {
namespace cuda {
namespace {

constexpr uint32_t kQueryRows = 64;  // of one warpgroup

struct View {
  const void* data;
  int64_t size, rows, heads, batches;
  Strides stride;
};

// span: bytes of a swizzled row, 128 or 64.
bool Describe(const View& view, CUtensorMapDataType type, uint32_t box_rows, CUtensorMap* map, int32_t* step_h,
              int32_t* step_b, uint32_t span = 128) {
  const PFN_cuTensorMapEncodeTiled_v12000 encode = FindTensorMapEncode();
  if (encode == nullptr) return false;
  // An axis with stride 0 has one element in the map: TMA need not accept stride 0.
  const bool one_head = view.heads == 1 || view.stride.h == 0, one_batch = view.batches == 1 || view.stride.b == 0;
  *step_h = one_head ? 0 : 1;
  *step_b = one_batch ? 0 : 1;
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(view.size), static_cast<cuuint64_t>(view.rows),
                              static_cast<cuuint64_t>(one_head ? 1 : view.heads),
                              static_cast<cuuint64_t>(one_batch ? 1 : view.batches)};
  const int64_t item = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  const auto bytes = [item](int64_t elements, bool unused) {
    return static_cast<cuuint64_t>(unused ? 16 : item * elements);
  };
  const cuuint64_t strides[3] = {bytes(view.stride.s, view.rows == 1), bytes(view.stride.h, one_head),
                                 bytes(view.stride.b, one_batch)};
  const cuuint32_t box[4] = {span / static_cast<uint32_t>(item), box_rows, 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode(map, type, 4, const_cast<void*>(view.data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                span == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool MakeTensorMaps(bool bf16, int tile_rows, int tile_keys, Sm90Params* params) {
  const auto rows = static_cast<uint32_t>(tile_rows), keys = static_cast<uint32_t>(tile_keys);
  const AttentionParams& p = params->attention;
  const CUtensorMapDataType half = bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (p.bias != nullptr) {
    // A row that all queries share is loaded once.
    const bool one_row = p.S == 1 || p.bias_stride_q == 0;
    params->bias_one_row = one_row ? 1 : 0;
    const View view = {p.bias, p.T, one_row ? 1 : p.S, p.H, p.B, {p.bias_stride_b, p.bias_stride_h, p.bias_stride_q}};
    if (!Describe(view, p.bias_is_float != 0 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : half, one_row ? 1 : rows,
                  &params->bias, &params->bias_step_h, &params->bias_step_b)) {
      return false;
    }
  }
  return Describe({p.query, p.D, p.S, p.H, p.B, p.query_stride}, half, kQueryRows, &params->query,
                  &params->query_step_h, &params->query_step_b) &&
         Describe({p.key, p.D, p.T, p.G, p.B, p.key_stride}, half, keys, &params->key, &params->key_step_h,
                  &params->key_step_b) &&
         Describe({p.value, p.Dv, p.T, p.G, p.B, p.value_stride}, half, keys, &params->value, &params->value_step_h,
                  &params->value_step_b) &&
         Describe({p.output, p.Dv, p.S, p.H, p.B, p.output_stride}, half, kQueryRows, &params->output,
                  &params->output_step_h, &params->output_step_b);
}

bool MakeInt8TensorMaps(bool bf16, const Int8Params& operands, Sm90Params* params) {
  const AttentionParams& p = params->attention;
  const CUtensorMapDataType half = bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  constexpr CUtensorMapDataType kByte = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const int64_t S = p.S, T = p.T, D = p.D, keys = int64_t{operands.tiles} * kInt8TileKeys;
  const auto span = static_cast<uint32_t>(D);
  const View query = {operands.query, D, S, p.H, p.B, {p.H * S * D, S * D, D}};
  const View key = {operands.key, D, T, p.G, p.B, {p.G * T * D, T * D, D}};
  const View transposed = {operands.value, keys, D, p.G, p.B, {p.G * D * keys, D * keys, keys}};
  const View value = {p.value, D, T, p.G, p.B, p.value_stride};
  const bool fp8 = operands.value != nullptr;
  return Describe(query, kByte, kQueryRows, &params->query, &params->query_step_h, &params->query_step_b, span) &&
         Describe(key, kByte, kInt8TileKeys, &params->key, &params->key_step_h, &params->key_step_b, span) &&
         Describe(fp8 ? transposed : value, fp8 ? kByte : half, fp8 ? static_cast<uint32_t>(D) : kInt8TileKeys,
                  &params->value, &params->value_step_h, &params->value_step_b) &&
         Describe({p.output, D, S, p.H, p.B, p.output_stride}, half, kQueryRows, &params->output,
                  &params->output_step_h, &params->output_step_b);
}

bool MakePooledMaps(bool bf16, BlockChoiceParams* params) {
  const CUtensorMapDataType half = bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const AttentionParams& p = params->attention;
  const int64_t size = params->pooled_size, heads = int64_t{p.B} * p.G;
  const auto describe = [&](const void* pooled, int64_t rows, uint32_t box_rows, CUtensorMap* map) {
    int32_t step_h = 0, step_b = 0;
    return Describe({pooled, size, rows, heads, 1, {heads * rows * size, rows * size, size}}, half, box_rows, map,
                    &step_h, &step_b);
  };
  return describe(params->pooled_queries, params->query_rows, kQueryRows, &params->query_map) &&
         describe(params->pooled_keys, params->key_rows, PooledTileRows(size), &params->key_map);
}

}  // namespace cuda
}  // namespace stof
