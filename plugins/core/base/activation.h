// SPDX-License-Identifier: Apache-2.0
// The one list of activations: of GEMM epilogues, sparse MLPs and chains, for the host and for device code.
#ifndef STOF_PLUGINS_CORE_BASE_ACTIVATION_H_
#define STOF_PLUGINS_CORE_BASE_ACTIVATION_H_

#include <cstdint>

namespace stof {

// ACTIVATION(function, name, gives_zeros, chain_op, cublaslt, cost). All switches and tables are made of this list.
//   function     Activation::kFunction is the enumerator. cpu/simd/activation.h and cuda/common/activation.cuh define
//                `function`; without a definition they do not compile
//   name         in attributes and messages
//   gives_zeros  whether results are exactly zero for negative arguments: such neurons are left out without a change
//   chain_op     the operator of chains that an epilogue of StofGemm writes it as; std::nullopt: epilogues lack it
//   cublaslt     the epilogue of cuBLASLt without a bias; std::nullopt: cuBLASLt lacks it
//   cost         in the epilogue of an sm90 GEMM as a share of GELU's, for predicted times
#define STOF_ACTIVATIONS(ACTIVATION)                                                 \
  ACTIVATION(None, "none", false, std::nullopt, CublasLt::kNothing, 0.0)             \
  ACTIVATION(Relu, "relu", true, ChainOp::kRelu, CublasLt::kRelu, 0.15)              \
  ACTIVATION(Relu2, "relu2", true, std::nullopt, std::nullopt, 1.0)                  \
  ACTIVATION(Gelu, "gelu", false, ChainOp::kGelu, std::nullopt, 1.0)                 \
  ACTIVATION(GeluTanh, "gelu_tanh", false, ChainOp::kGeluTanh, CublasLt::kGelu, 1.0) \
  ACTIVATION(Silu, "silu", false, ChainOp::kSilu, std::nullopt, 1.0)

enum class Activation : int32_t {
#define STOF_ENUMERATOR(function, ...) k##function,
  STOF_ACTIVATIONS(STOF_ENUMERATOR)
#undef STOF_ENUMERATOR
};

// In the order of Activation.
constexpr const char* kActivationNames[] = {
#define STOF_NAME(function, name, ...) name,
    STOF_ACTIVATIONS(STOF_NAME)
#undef STOF_NAME
};
constexpr bool kActivationGivesZeros[] = {
#define STOF_GIVES_ZEROS(function, name, gives_zeros, ...) gives_zeros,
    STOF_ACTIVATIONS(STOF_GIVES_ZEROS)
#undef STOF_GIVES_ZEROS
};
constexpr int kActivations = static_cast<int>(sizeof(kActivationNames) / sizeof(kActivationNames[0]));

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_BASE_ACTIVATION_H_
