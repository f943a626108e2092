// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/fp32/api.h"

namespace stof {
namespace cuda {

Fp32Kernel FindFp32D32(bool exact);
Fp32Kernel FindFp32D64(bool exact);
Fp32Kernel FindFp32D96(bool exact);
Fp32Kernel FindFp32D128(bool exact);
Fp32Kernel FindFp32D192(bool exact);
Fp32Kernel FindFp32D256(bool exact);

Fp32Kernel FindFp32(int head_size, bool exact) {
  if (head_size <= 32) return FindFp32D32(exact);
  if (head_size <= 64) return FindFp32D64(exact);
  if (head_size <= 96) return FindFp32D96(exact);
  if (head_size <= 128) return FindFp32D128(exact);
  if (head_size <= 192) return FindFp32D192(exact);
  if (head_size <= 256) return FindFp32D256(exact);
  return {};
}

namespace {

int64_t TilesOf(const AttentionParams& p) { return int64_t{p.B} * p.G * ((p.T + kTileKeys - 1) / kTileKeys); }
int64_t TileBytes(const Fp32Kernel& kernel) { return int64_t{2} * kernel.planes * kTileKeys * kernel.head; }

}  // namespace

size_t Fp32WorkspaceBytes(const Fp32Kernel& kernel, const AttentionParams& params) {
  return static_cast<size_t>(TilesOf(params) * (2 * TileBytes(kernel) + 4 * kTileKeys + 4));
}

void PlaceFp32Workspace(const Fp32Kernel& kernel, void* memory, Fp32Params* params) {
  const int64_t tiles = TilesOf(params->attention), bytes = tiles * TileBytes(kernel);
  char* at = static_cast<char*>(memory);
  params->key_tiles = at;
  params->value_tiles = at + bytes;
  params->key_factors = reinterpret_cast<const float*>(at + 2 * bytes);
  params->value_factors = params->key_factors + tiles * kTileKeys;
}

}  // namespace cuda
}  // namespace stof
