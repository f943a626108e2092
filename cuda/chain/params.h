// SPDX-License-Identifier: Apache-2.0
// Chains on CUDA by interpretation: one kernel that runs every description. Plain structs; no CUDA header.
#ifndef STOF_CUDA_CHAIN_PARAMS_H_
#define STOF_CUDA_CHAIN_PARAMS_H_

#include <cstdint>

#include "plugins/core/chain/chain.h"

namespace stof {
namespace cuda {

constexpr int kChainReads = 64;
constexpr int kChainParts = 48;
constexpr int kChainPhases = kChainMostReductions + 1;

struct ChainNodeParams {
  uint8_t op = 0;  // ChainOp
  uint8_t which = 0;
  int16_t arg[3] = {};
  float value = 0.0f;
};
struct ChainPartParams {
  int64_t constant = 0, divisor = 1, stride = 0;
  int64_t coefficient[kChainMostAxes] = {};
  int32_t modulo = 0;
};
struct ChainReadParams {
  const void* data = nullptr;
  int64_t constant = 0;
  int64_t stride[kChainMostAxes] = {};
  int64_t first[kChainMostAxes] = {}, last[kChainMostAxes] = {};
  int16_t dtype = 0;
  uint8_t guarded = 0, never = 0;
  int16_t part_begin = 0, part_end = 0;
};
struct ChainOutputParams {
  void* data = nullptr;
  int64_t stride[kChainMostAxes] = {};
  int16_t dtype = 0, node = 0, phase = 0;
  int16_t of_row = 0;  // one value a row
};
struct ChainReductionParams {
  int16_t node = 0, arg = 0, phase = 0, op = 0;
};

// By value to the kernel, so that a captured graph keeps it: below the 32764 bytes that a launch may take since
// CUDA 12.1.
struct ChainParams {
  ChainNodeParams node[kChainMostNodes];
  ChainReadParams read[kChainReads];
  ChainPartParams part[kChainParts];
  ChainOutputParams output[kChainMostOutputs];
  ChainReductionParams reduction[kChainMostReductions];
  uint32_t wanted[kChainPhases][kChainMostNodes / 32];  // the nodes that each pass over a row evaluates
  int64_t size[kChainMostAxes];
  int64_t rows, n;
  int32_t nodes, reductions, outputs, phases, axes;
  int32_t row_threads;  // 32 or 256
  int32_t pieces;       // of a row, where it needs no reduction
};
static_assert(sizeof(ChainParams) <= 32764, "more than a launch takes");

// False where it has more reads than ChainParams holds. data: by input and by output.
bool MakeChainParams(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                     int sm_count, ChainParams* params);
// A cudaError_t.
int LaunchChain(const ChainParams& params, void* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHAIN_PARAMS_H_
