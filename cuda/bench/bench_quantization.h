// SPDX-License-Identifier: Apache-2.0
// For bench_cuda_attention: the time of the kernels that quantize the operands of an attention, alone.
#ifndef STOF_CUDA_BENCH_BENCH_QUANTIZATION_H_
#define STOF_CUDA_BENCH_BENCH_QUANTIZATION_H_

#include "cuda/attention/int8/layout.h"
#include "cuda/attention/int8/operands.h"
#include "cuda/bench/bench_graph.h"
#include "plugins/core/contract/attention_args.h"

// Microseconds, without a sink and the LSE: queries need no shifts. memory: of at least Int8Layout's bytes.
inline double TimeQuantization(const stof::AttentionArgs& args, char* memory) {
  const stof::AttentionShape& shape = args.shape;
  const bool fp8 = args.precision == stof::AttentionPrecision::kInt8Fp8;
  stof::cuda::AttentionParams p;
  const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
  p.B = narrow(shape.B), p.H = narrow(shape.H), p.G = narrow(shape.G), p.S = narrow(shape.S), p.T = narrow(shape.T);
  p.D = p.Dv = narrow(shape.D);
  p.query = args.query.data, p.key = args.key.data, p.value = args.value.data;
  p.query_stride = args.query.stride, p.key_stride = args.key.stride, p.value_stride = args.value.stride;
  p.scale = args.scores.scale;
  const stof::cuda::Int8Params params = stof::cuda::DescribeOperands(p, shape, fp8, memory);
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const double us = TimeGraph(stream, 1, [&] {
    const int error = stof::cuda::LaunchQuantize(params, shape.dtype == stof::DType::kBF16, stream);
    CHECK_CUDA(static_cast<cudaError_t>(error));
  });
  CHECK_CUDA(cudaStreamDestroy(stream));
  return us;
}

#endif  // STOF_CUDA_BENCH_BENCH_QUANTIZATION_H_
