// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/int8/operands.h"

#include <string>

namespace stof {
namespace cuda {

Status PlaceOperands(AttentionJob* job, const AttentionParams& attention, bool has_fp8_values, Int8Params* params) {
  const AttentionShape& shape = job->args().shape;
  const int64_t bytes = Int8Layout(shape, has_fp8_values).total;
  auto* const memory = static_cast<char*>(job->GetWorkspace(0, 6, static_cast<size_t>(bytes)));
  if (memory == nullptr) {
    return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of 8-bit operands");
  }
  *params = DescribeOperands(attention, shape, has_fp8_values, memory);
  params->key_ends = job->args().kv.key_ends;
  // A mask made on the device reads the lengths and allows no key behind them. The constant mask of a first prompt lets
  // padded queries attend padded keys.
  params->skips_tiles = !job->mask().parts.dynamic.empty();
  return Status();
}

}  // namespace cuda
}  // namespace stof
