// SPDX-License-Identifier: Apache-2.0
// Activations in fp64, by their definitions.
#ifndef STOF_TESTS_CPP_ACTIVATION_H_
#define STOF_TESTS_CPP_ACTIVATION_H_

#include <cmath>

#include "plugins/core/base/activation.h"

namespace stof::test {

inline double Activate(Activation activation, double x) {
  const double positive = x < 0 ? 0 : x;  // NaN stays
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return positive;
    case Activation::kRelu2:
      return positive * positive;
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
  }
  return std::nan("");
}

// Whether it grows as the square of its argument, and the error of an argument with it.
inline bool IsQuadratic(Activation activation) { return Activate(activation, 1e3) > 1e5; }

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_ACTIVATION_H_
