// SPDX-License-Identifier: Apache-2.0
// Activations of an epilogue, for the host and for device code.
#ifndef STOF_PLUGINS_CORE_GEMM_ACTIVATION_H_
#define STOF_PLUGINS_CORE_GEMM_ACTIVATION_H_

#include <cstdint>

namespace stof {

enum class GemmActivation : int32_t { kNone = 0, kRelu, kGelu, kGeluTanh, kSilu };

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_GEMM_ACTIVATION_H_
