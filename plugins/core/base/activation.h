// SPDX-License-Identifier: Apache-2.0
// The one list of activations: of GEMM epilogues, sparse MLPs and chains, for the host and for device code.
#ifndef STOF_PLUGINS_CORE_BASE_ACTIVATION_H_
#define STOF_PLUGINS_CORE_BASE_ACTIVATION_H_

#include <cstdint>

namespace stof {

// ACTIVATION(function, name, whether it gives true zeros). Activation::kFunction is the enumerator. Kernels define
// `function`, and make their switches of this list: without a definition they do not compile. cpu/simd/activation.h and
// cuda/common/activation.cuh have the definitions.
#define STOF_ACTIVATIONS(ACTIVATION)       \
  ACTIVATION(None, "none", false)          \
  ACTIVATION(Relu, "relu", true)           \
  ACTIVATION(Relu2, "relu2", true)         \
  ACTIVATION(Gelu, "gelu", false)          \
  ACTIVATION(GeluTanh, "gelu_tanh", false) \
  ACTIVATION(Silu, "silu", false)

enum class Activation : int32_t {
#define STOF_ENUMERATOR(function, name, gives_zeros) k##function,
  STOF_ACTIVATIONS(STOF_ENUMERATOR)
#undef STOF_ENUMERATOR
};

// In the order of Activation.
constexpr const char* kActivationNames[] = {
#define STOF_NAME(function, name, gives_zeros) name,
    STOF_ACTIVATIONS(STOF_NAME)
#undef STOF_NAME
};
constexpr bool kActivationGivesZeros[] = {
#define STOF_GIVES_ZEROS(function, name, gives_zeros) gives_zeros,
    STOF_ACTIVATIONS(STOF_GIVES_ZEROS)
#undef STOF_GIVES_ZEROS
};
constexpr int kActivations = static_cast<int>(sizeof(kActivationNames) / sizeof(kActivationNames[0]));

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_BASE_ACTIVATION_H_
