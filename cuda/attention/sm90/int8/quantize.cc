// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/int8/quantize.h"

#include "cuda/attention/int8/operands.h"

namespace stof {
namespace cuda {

Status QuantizeOperands(AttentionJob* job, Sm90Params* params, bool* is_described) {
  const bool fp8 = job->problem().precision == AttentionPrecision::kInt8Fp8;
  Int8Params int8;
  STOF_RETURN_IF_ERROR(PlaceOperands(job, params->attention, fp8, &int8));
  *is_described = MakeInt8TensorMaps(job->is_bf16(), int8, params);
  if (!*is_described) return Status();
  params->query_scales = int8.query_scales;
  params->query_shifts = int8.query_shifts;
  params->tile_scales = int8.tile_scales;
  return CheckLaunch(LaunchQuantize(int8, job->is_bf16(), job->stream()));
}

}  // namespace cuda
}  // namespace stof
