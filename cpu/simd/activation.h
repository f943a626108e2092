// SPDX-License-Identifier: Apache-2.0
// Activations on vectors of fp32, by the names of plugins/core/base/activation.h. Relu is in math.h.
#ifndef STOF_CPU_SIMD_ACTIVATION_H_
#define STOF_CPU_SIMD_ACTIVATION_H_

#include "cpu/simd/math.h"
#include "plugins/core/base/activation.h"

namespace stof {
namespace cpu {
namespace {

inline V None(V x) { return x; }
inline V Relu2(V x) {
  const V positive = Relu(x);
  return positive * positive;
}
// -inf gives NaN in these three, as by their definitions: -inf * 0.
inline V Gelu(V x) {  // max(x, 0) - |x| / 2 erfc(|x| / sqrt(2))
  const V t = Abs(x);
  const V half = -0.5f * AtMost(t, 1e30f);  // inf stays: nothing is taken from it
  return Fma(half, ErfcOverRoot2(t), x * (x < 0.0f ? V{} : Set(1.0f)));
}
inline V Silu(V x) { return x * Sigmoid(x); }
inline V GeluTanh(V x) {  // 1 + tanh(u) = 2 sigmoid(2 u); 2 sqrt(2 / pi) = 1.59...
  return x * Sigmoid(1.5957691216f * x * Fma(x * x, Set(0.044715f), Set(1.0f)));
}

// An activation as a type.
template <Activation kActivation>
struct ActivationFunction {
  static V Of(V x);
};
#define STOF_DEFINE(function, ...)                                \
  template <>                                                     \
  inline V ActivationFunction<Activation::k##function>::Of(V x) { \
    return function(x);                                           \
  }
STOF_ACTIVATIONS(STOF_DEFINE)
#undef STOF_DEFINE

// Calls use(ActivationFunction<activation>()).
template <typename Use>
inline void WithActivation(Activation activation, const Use& use) {
  switch (activation) {
#define STOF_CASE(function, ...) \
  case Activation::k##function:  \
    return use(ActivationFunction<Activation::k##function>());
    STOF_ACTIVATIONS(STOF_CASE)
#undef STOF_CASE
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_ACTIVATION_H_
