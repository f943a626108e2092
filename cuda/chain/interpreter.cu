// SPDX-License-Identifier: Apache-2.0
// Evaluates a chain node by node: for each pass over a row, and each element, the nodes that the pass wants. Slow
// beside a kernel made for the chain, and right for all of them. A warp or a CTA takes a row; sums of a row are made in
// fp64.
#include <limits>

#include "cuda/chain/functions.cuh"
#include "cuda/chain/params.h"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kF32 = static_cast<int>(DType::kF32), kF16 = static_cast<int>(DType::kF16);

__device__ float Apply(ChainOp op, float a, float b, float c) {
  switch (op) {
    case ChainOp::kNeg:
      return -a;
    case ChainOp::kAbs:
      return fabsf(a);
    case ChainOp::kExp:
      return expf(a);
    case ChainOp::kLog:
      return logf(a);
    case ChainOp::kSqrt:
      return sqrtf(a);
    case ChainOp::kRsqrt:
      return chain::Rsqrt(a);
    case ChainOp::kReciprocal:
      return 1.0f / a;
    case ChainOp::kTanh:
      return tanhf(a);
    case ChainOp::kErf:
      return erff(a);
    case ChainOp::kSigmoid:
      return chain::Sigmoid(a);
    case ChainOp::kSoftplus:
      return chain::Softplus(a);
    case ChainOp::kSin:
      return sinf(a);
    case ChainOp::kCos:
      return cosf(a);
    case ChainOp::kFloor:
      return floorf(a);
    case ChainOp::kCeil:
      return ceilf(a);
    case ChainOp::kRound:
      return rintf(a);
    case ChainOp::kRelu:
      return chain::Relu(a);
    case ChainOp::kSilu:
      return chain::Silu(a);
    case ChainOp::kGelu:
      return chain::Gelu(a);
    case ChainOp::kGeluTanh:
      return chain::GeluTanh(a);
    case ChainOp::kRoundF16:
      return chain::Round<chain::F16>(a);
    case ChainOp::kRoundBf16:
      return chain::Round<chain::BF16>(a);
    case ChainOp::kAdd:
      return a + b;
    case ChainOp::kSub:
      return a - b;
    case ChainOp::kMul:
      return a * b;
    case ChainOp::kDiv:
      return a / b;
    case ChainOp::kMin:
      return chain::Min(a, b);
    case ChainOp::kMax:
      return chain::Max(a, b);
    case ChainOp::kPow:
      return powf(a, b);
    case ChainOp::kLt:
      return a < b ? 1.0f : 0.0f;
    case ChainOp::kLe:
      return a <= b ? 1.0f : 0.0f;
    case ChainOp::kGt:
      return a > b ? 1.0f : 0.0f;
    case ChainOp::kGe:
      return a >= b ? 1.0f : 0.0f;
    case ChainOp::kEq:
      return a == b ? 1.0f : 0.0f;
    case ChainOp::kNe:
      return a != b ? 1.0f : 0.0f;
    case ChainOp::kSelect:
      return a != 0.0f ? b : c;
    default:
      return 0.0f;
  }
}

__device__ float Read(const ChainParams& p, const ChainReadParams& read, const int64_t* index) {
  if (read.never != 0) return 0.0f;
  if (read.guarded != 0) {
    for (int axis = 0; axis < p.axes; ++axis) {
      if (index[axis] < read.first[axis] || index[axis] > read.last[axis]) return 0.0f;
    }
  }
  int64_t at = read.constant;
  for (int axis = 0; axis < p.axes; ++axis) at += index[axis] * read.stride[axis];
  for (int i = read.part_begin; i < read.part_end; ++i) {
    const ChainPartParams& part = p.part[i];
    int64_t affine = part.constant;
    for (int axis = 0; axis < p.axes; ++axis) affine += index[axis] * part.coefficient[axis];
    int64_t quotient = affine / part.divisor;
    if (quotient * part.divisor > affine) --quotient;
    at += (part.modulo != 0 ? affine - quotient * part.divisor : quotient) * part.stride;
  }
  const char* data = static_cast<const char*>(read.data);
  if (read.dtype == kF32) return chain::Bits<chain::F32>::At(data + 4 * at);
  if (read.dtype == kF16) return chain::Bits<chain::F16>::At(data + 2 * at);
  return chain::Bits<chain::BF16>::At(data + 2 * at);
}

__device__ void Write(const ChainOutputParams& output, int64_t at, float value) {
  char* data = static_cast<char*>(output.data);
  if (output.dtype == kF32) {
    chain::Bits<chain::F32>::Put(data + 4 * at, value);
  } else if (output.dtype == kF16) {
    chain::Bits<chain::F16>::Put(data + 2 * at, value);
  } else {
    chain::Bits<chain::BF16>::Put(data + 2 * at, value);
  }
}

__device__ int64_t Place(const ChainParams& p, const ChainOutputParams& output, const int64_t* index) {
  int64_t at = 0;
  for (int axis = 0; axis < p.axes; ++axis) at += index[axis] * output.stride[axis];
  return at;
}

// The nodes of a pass for one element; values of reductions come from `found`.
__device__ void Evaluate(const ChainParams& p, int phase, const int64_t* index, const float* found, float* value) {
  for (int i = 0; i < p.nodes; ++i) {
    if ((p.wanted[phase][i / 32] >> (i % 32) & 1u) == 0) continue;
    const ChainNodeParams& node = p.node[i];
    const auto op = static_cast<ChainOp>(node.op);
    float x = 0.0f;
    if (op == ChainOp::kConstant) {
      x = node.value;
    } else if (op == ChainOp::kAxis) {
      x = static_cast<float>(index[node.which]);
    } else if (op == ChainOp::kRead) {
      x = Read(p, p.read[node.which], index);
    } else if (op >= ChainOp::kSum) {
      for (int r = 0; r < p.reductions; ++r) {
        if (p.reduction[r].node == i) x = found[r];
      }
    } else {
      const float a = value[node.arg[0]];
      const float b = node.arg[1] < 0 ? 0.0f : value[node.arg[1]];
      x = Apply(op, a, b, node.arg[2] < 0 ? 0.0f : value[node.arg[2]]);
    }
    value[i] = x;
  }
}

__device__ double Join(int op, double a, double b) {
  if (op <= static_cast<int>(ChainOp::kMean)) return a + b;
  if (a != a || b != b) return a + b;
  return op == static_cast<int>(ChainOp::kMaxOf) ? (a > b ? a : b) : (a < b ? a : b);
}
__device__ double Start(int op) {
  if (op <= static_cast<int>(ChainOp::kMean)) return 0.0;
  return op == static_cast<int>(ChainOp::kMaxOf) ? -HUGE_VAL : HUGE_VAL;
}

// One row, by `threads` threads of which this is number `lane`.
template <int kRowThreads>
__device__ void Row(const ChainParams& p, int64_t row, int64_t begin, int64_t end, float* found, double* partial,
                    float* value) {
  const int lane = static_cast<int>(threadIdx.x) % kRowThreads;
  const auto sync = [] {
    if (kRowThreads == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };
  const int last = p.axes - 1;
  int64_t index[kChainMostAxes] = {};
  for (int axis = last - 1; axis >= 0; --axis) {
    index[axis] = row % p.size[axis];
    row /= p.size[axis];
  }
  for (int phase = 0; phase < p.phases; ++phase) {
    double sum[kChainMostReductions];
    for (int r = 0; r < p.reductions; ++r) sum[r] = Start(p.reduction[r].op);
    for (int64_t i = begin + lane; i < end; i += kRowThreads) {
      index[last] = i;
      Evaluate(p, phase, index, found, value);
      for (int r = 0; r < p.reductions; ++r) {
        const ChainReductionParams& reduction = p.reduction[r];
        if (reduction.phase == phase) sum[r] = Join(reduction.op, sum[r], value[reduction.arg]);
      }
      for (int o = 0; o < p.outputs; ++o) {
        const ChainOutputParams& output = p.output[o];
        if (output.phase == phase && output.of_row == 0) Write(output, Place(p, output, index), value[output.node]);
      }
    }
    for (int r = 0; r < p.reductions; ++r) {
      const ChainReductionParams& reduction = p.reduction[r];
      if (reduction.phase != phase) continue;
      for (int step = 16; step > 0; step /= 2) {
        sum[r] = Join(reduction.op, sum[r], __shfl_xor_sync(0xffffffffu, sum[r], step));
      }
      if (kRowThreads > 32) {
        __syncthreads();
        if (lane % 32 == 0) partial[lane / 32] = sum[r];
        __syncthreads();
        sum[r] = partial[0];
        for (int w = 1; w < kRowThreads / 32; ++w) sum[r] = Join(reduction.op, sum[r], partial[w]);
      }
      const double by = reduction.op == static_cast<int>(ChainOp::kMean) ? static_cast<double>(p.n) : 1.0;
      if (lane == 0) found[r] = static_cast<float>(sum[r] / by);
    }
    sync();
    if (lane == 0 && begin == 0) {
      index[last] = 0;
      bool any = false;
      for (int o = 0; o < p.outputs; ++o) any = any || (p.output[o].phase == phase && p.output[o].of_row != 0);
      if (any) Evaluate(p, phase, index, found, value);
      for (int o = 0; o < p.outputs; ++o) {
        const ChainOutputParams& output = p.output[o];
        if (output.phase == phase && output.of_row != 0) Write(output, Place(p, output, index), value[output.node]);
      }
    }
    sync();
  }
}

template <int kRowThreads>
__global__ void __launch_bounds__(kThreads) InterpretChain(const __grid_constant__ ChainParams p) {
  constexpr int kRows = kThreads / kRowThreads;
  __shared__ float found[kRows][kChainMostReductions];
  __shared__ double partial[kThreads / 32];
  float value[kChainMostNodes];
  const int own = static_cast<int>(threadIdx.x) / kRowThreads;
  const int64_t groups = (p.rows + kRows - 1) / kRows;
  for (int64_t item = blockIdx.x; item < groups * p.pieces; item += gridDim.x) {
    const int64_t row = item / p.pieces * kRows + own, piece = item % p.pieces;
    // A warp without a row of its own waits for nobody; a CTA has one row.
    if (row >= p.rows) continue;
    const int64_t begin = p.n * piece / p.pieces, end = p.n * (piece + 1) / p.pieces;
    Row<kRowThreads>(p, row, begin, end, found[own], partial, value);
  }
}

template <int kRowThreads>
int Launch(const ChainParams& p, void* stream) {
  constexpr int64_t kRows = kThreads / kRowThreads;
  const int64_t items = (p.rows + kRows - 1) / kRows * p.pieces;
  const auto ctas = static_cast<unsigned>(items < 65536 ? items : 65536);
  return LaunchKernel<ChainParams, InterpretChain<kRowThreads>>(p, ctas, kThreads, 0, stream);
}

}  // namespace

int LaunchChain(const ChainParams& params, void* stream) {
  if (params.rows == 0) return 0;
  return params.row_threads == 32 ? Launch<32>(params, stream) : Launch<kThreads>(params, stream);
}

}  // namespace cuda
}  // namespace stof
