// SPDX-License-Identifier: Apache-2.0
// Quantized keys and values: their types, and their scales.
#ifndef STOF_PLUGINS_CORE_CONTRACT_KV_SCALE_H_
#define STOF_PLUGINS_CORE_CONTRACT_KV_SCALE_H_

#include <cstdint>

#include "plugins/core/base/inline.h"
#include "plugins/core/base/types.h"

namespace stof {

// The types of quantized keys and values.
constexpr DType kQuantizedTypes[] = {DType::kI8, DType::kF8E4M3};
STOF_ALWAYS_INLINE constexpr bool IsQuantized(DType dtype) { return dtype == DType::kI8 || dtype == DType::kF8E4M3; }

// The scales of quantized keys, or of quantized values: element d of KV head g is what is stored times
// data[g * stride_g + d * stride_d]. Strides of 0: one scale for the tensor. data nullptr: it is not quantized.
struct KvScale {
  const float* data = nullptr;  // on a device: its address
  int64_t stride_g = 0, stride_d = 0;
};

// The factor by which x is multiplied before it is rounded to int8 or fp8: a scale of 0 counts as 1, as in ONNX
// Runtime's CPU kernel.
STOF_ALWAYS_INLINE constexpr float InverseScale(float scale) { return scale != 0.0f ? 1.0f / scale : 1.0f; }

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_KV_SCALE_H_
