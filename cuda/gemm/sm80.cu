// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/sm80.cuh"

namespace stof {
namespace cuda {
namespace {

template <typename T>
GemmLaunch Find(bool pair, bool vectors) {
  using gemm80::Launch;
  if (pair) return vectors ? Launch<T, true, true> : Launch<T, true, false>;
  return vectors ? Launch<T, false, true> : Launch<T, false, false>;
}

}  // namespace

GemmLaunch FindGemmSm80(bool bf16, bool pair, bool vectors) {
  return bf16 ? Find<__nv_bfloat16>(pair, vectors) : Find<__half>(pair, vectors);
}

}  // namespace cuda
}  // namespace stof
