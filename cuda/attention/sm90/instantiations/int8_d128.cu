// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/int8/table.cuh"

namespace stof {
namespace cuda {

KernelTable FindSm90Int8D128(const KernelProblem& problem) {
  return sm90::Int8Kernels<sm90::Head<128>, 4, 3>::Find(problem);
}

}  // namespace cuda
}  // namespace stof
