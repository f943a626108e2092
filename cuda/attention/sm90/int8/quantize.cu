// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/int8/quantize.cuh"

namespace stof {
namespace cuda {
namespace {

template <typename T, int kHead>
int Launch(const Int8Params& params, void* stream) {
  const auto ctas = [&params](bool is_second) { return static_cast<unsigned>(int8::Grid(params, is_second).ctas()); };
  const int error = LaunchKernel<Int8Params, int8::QuantizeOperands<T, kHead, false>>(params, ctas(false),
                                                                                      int8::kThreads, 0, stream, true);
  if (error != 0) return error;
  return LaunchKernel<Int8Params, int8::QuantizeOperands<T, kHead, true>>(params, ctas(true), int8::kThreads, 0, stream,
                                                                          true);
}

}  // namespace

int LaunchQuantize(const Int8Params& params, bool bf16, void* stream) {
  if (params.attention.D == 64) {
    return bf16 ? Launch<__nv_bfloat16, 64>(params, stream) : Launch<__half, 64>(params, stream);
  }
  return bf16 ? Launch<__nv_bfloat16, 128>(params, stream) : Launch<__half, 128>(params, stream);
}

}  // namespace cuda
}  // namespace stof
