// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/int8/operands.h"

#include <string>

#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {

Int8Params DescribeOperands(const AttentionParams& attention, const AttentionShape& shape, bool has_fp8_values,
                            char* memory) {
  const Int8Layout layout(shape, has_fp8_values);
  const auto floats = [memory](int64_t at) { return reinterpret_cast<float*>(memory + at); };
  Int8Params params;
  params.attention = attention;
  params.tiles = static_cast<int32_t>(CeilDiv(shape.T, int64_t{kInt8TileKeys}));
  params.query = reinterpret_cast<int8_t*>(memory + layout.query);
  params.key = reinterpret_cast<int8_t*>(memory + layout.key);
  if (has_fp8_values) params.value = reinterpret_cast<uint8_t*>(memory + layout.value);
  params.query_scales = floats(layout.query_scales);
  if (attention.sink != nullptr || attention.lse != nullptr) params.query_shifts = floats(layout.query_shifts);
  params.tile_scales = floats(layout.tile_scales);
  params.key_means = floats(layout.key_means);
  return params;
}

Status PlaceOperands(AttentionJob* job, const AttentionParams& attention, bool has_fp8_values, Int8Params* params) {
  const AttentionShape& shape = job->args().shape;
  const int64_t bytes = Int8Layout(shape, has_fp8_values).total;
  auto* const memory = static_cast<char*>(job->GetWorkspace(0, 6, static_cast<size_t>(bytes)));
  if (memory == nullptr) {
    return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of 8-bit operands");
  }
  *params = DescribeOperands(attention, shape, has_fp8_values, memory);
  return Status();
}

}  // namespace cuda
}  // namespace stof
