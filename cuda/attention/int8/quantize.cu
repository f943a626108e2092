// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/int8/quantize.cuh"

namespace stof {
namespace cuda {
namespace {

// Where the device's code has programmatic dependent launch, the kernel may start early.
template <void (*kKernel)(Int8Params)>
int LaunchEarly(const Int8Params& params, int ctas, void* stream) {
  return LaunchKernel<Int8Params, kKernel>(params, static_cast<unsigned>(ctas), int8::kThreads, 0, stream,
                                           CanStartEarly<Int8Params, kKernel>());
}

template <typename T, int kHead>
int Launch(const Int8Params& params, void* stream) {
  const auto ctas = [&params](bool is_second) { return int8::Grid(params, is_second).ctas(); };
  const int error = LaunchEarly<int8::QuantizeOperands<T, kHead, false>>(params, ctas(false), stream);
  return error != 0 ? error : LaunchEarly<int8::QuantizeOperands<T, kHead, true>>(params, ctas(true), stream);
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
