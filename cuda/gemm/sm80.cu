// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/sm80.cuh"

namespace stof {
namespace cuda {
namespace {

template <typename T>
GemmLaunch Find(bool pair, bool vectors, bool is_b_transposed) {
  using gemm80::Launch;
  if (pair && is_b_transposed) return nullptr;
  if (is_b_transposed) return vectors ? Launch<T, false, true, true> : Launch<T, false, false, true>;
  if (pair) return vectors ? Launch<T, true, true> : Launch<T, true, false>;
  return vectors ? Launch<T, false, true> : Launch<T, false, false>;
}

}  // namespace

GemmLaunch FindGemmSm80(bool bf16, bool pair, bool vectors, bool is_b_transposed) {
  return bf16 ? Find<__nv_bfloat16>(pair, vectors, is_b_transposed) : Find<__half>(pair, vectors, is_b_transposed);
}

}  // namespace cuda
}  // namespace stof
