// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "cuda/attention/fp32/api.h"
#include "cuda/attention/job.h"

namespace stof {
namespace cuda {
namespace {

int64_t TilesOf(const AttentionParams& p) { return int64_t{p.B} * p.G * ((p.T + kTileKeys - 1) / kTileKeys); }
int64_t TileBytes(const KernelEntry& kernel) {
  return int64_t{2} * kernel.code_as<Fp32Code>().planes * kTileKeys * kernel.head_size;
}

// Bytes of the tiles and factors, and their addresses in a workspace aligned to 16 bytes.
size_t WorkspaceBytes(const KernelEntry& kernel, const AttentionParams& params) {
  return static_cast<size_t>(TilesOf(params) * (2 * TileBytes(kernel) + 4 * kTileKeys + 4));
}

void PlaceWorkspace(const KernelEntry& kernel, void* memory, Fp32Params* params) {
  const int64_t tiles = TilesOf(params->attention), bytes = tiles * TileBytes(kernel);
  char* at = static_cast<char*>(memory);
  params->key_tiles = at;
  params->value_tiles = at + bytes;
  params->key_factors = reinterpret_cast<const float*>(at + 2 * bytes);
  params->value_factors = params->key_factors + tiles * kTileKeys;
}

constexpr HeadSizeTable kTables[] = {{32, FindFp32D32},   {64, FindFp32D64},   {96, FindFp32D96},
                                     {128, FindFp32D128}, {192, FindFp32D192}, {256, FindFp32D256}};

KernelTable Find(const KernelProblem& problem) { return FindByHeadSize(kTables, problem); }

Status Run(AttentionJob* job, const KernelEntry& kernel) {
  STOF_RETURN_IF_ERROR(job->PreparePadding());
  STOF_RETURN_IF_ERROR(job->PrepareTiled());
  Fp32Params params;
  params.attention = *job->params();
  const size_t bytes = WorkspaceBytes(kernel, params.attention);
  void* memory = bytes == 0 ? nullptr : job->GetWorkspace(0, 0, bytes);
  if (bytes != 0 && memory == nullptr) {
    return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of split keys and values");
  }
  PlaceWorkspace(kernel, memory, &params);
  const auto& code = kernel.code_as<Fp32Code>();
  STOF_RETURN_IF_ERROR(CheckLaunch(code.split(params, job->stream())));
  return CheckLaunch(code.launch(params, job->problem().score_mod() != ScoreMod::kNone, job->stream()));
}

Status Prepare(AttentionJob* job, const KernelEntry&) { return job->PrepareTiled(); }

constexpr KernelFamily MakeFamily() {
  KernelFamily family;
  family.role = KernelRole::kTiled;
  family.takes_fp32 = true;
  family.find = Find, family.run = Run, family.prepare = Prepare;
  return family;
}

}  // namespace

const KernelFamily kFp32Family = MakeFamily();

}  // namespace cuda
}  // namespace stof
