// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/int8/quantize.h"

#include <string>

#include "cuda/attention/int8/layout.h"

namespace stof {
namespace cuda {
namespace {

// A build without sm_90a has no kernels with 8-bit operands.
#if defined(STOF_SM90)
constexpr auto kLaunch = LaunchQuantize;
#else
constexpr auto kLaunch = [](const Int8Params&, bool, void*) { return 0; };
#endif

}  // namespace

Status QuantizeOperands(AttentionJob* job, Sm90Params* params, bool* is_described) {
  const AttentionShape& shape = job->args().shape;
  const AttentionParams& p = params->attention;
  const bool fp8 = job->problem().precision == AttentionPrecision::kInt8Fp8;
  const Int8Layout layout(shape, fp8);
  auto* const memory = static_cast<char*>(job->GetWorkspace(0, 6, static_cast<size_t>(layout.total)));
  if (memory == nullptr) {
    return Status::Error("no device memory for " + std::to_string(layout.total) + " bytes of 8-bit operands");
  }
  Int8Params int8;
  int8.attention = p;
  int8.tiles = static_cast<int32_t>(CeilDiv(shape.T, int64_t{kInt8TileKeys}));
  int8.parts = KeySumParts(shape.T);
  int8.key_ctas = p.B * p.G * int8.tiles;
  const auto floats = [memory](int64_t at) { return reinterpret_cast<float*>(memory + at); };
  int8.query = reinterpret_cast<int8_t*>(memory + layout.query);
  int8.key = reinterpret_cast<int8_t*>(memory + layout.key);
  if (fp8) int8.value = reinterpret_cast<uint8_t*>(memory + layout.value);
  int8.query_scales = floats(layout.query_scales);
  if (p.sink != nullptr || p.lse != nullptr) int8.query_shifts = floats(layout.query_shifts);
  int8.tile_scales = floats(layout.tile_scales);
  int8.key_sums = floats(layout.key_sums);
  *is_described = MakeInt8TensorMaps(job->is_bf16(), int8, params);
  if (!*is_described) return Status();
  params->query_scales = int8.query_scales;
  params->query_shifts = int8.query_shifts;
  params->tile_scales = int8.tile_scales;
  return CheckLaunch(kLaunch(int8, job->is_bf16(), job->stream()));
}

}  // namespace cuda
}  // namespace stof
