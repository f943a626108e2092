// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <string_view>

#include "cuda/attention/fp32/api.h"
#include "cuda/attention/job.h"
#include "plugins/core/host/environment.h"

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

// Whether CTAs of 128 rows are faster: there are enough of them for the device, and tile rows have many KV tiles
// (docs/lab/cuda-experiments.md, "fp32").
bool PrefersLargeCtas(const AttentionParams& p, const DeviceProperties& device) {
  // Tests run both sizes.
  static const std::string_view rows = ReadVariableOr(Variable::kCudaFp32Rows, std::string_view());
  if (!rows.empty()) return rows == "128";
  constexpr int kManyTiles = 24, kCtas = 2;  // an SM
  const int64_t items = int64_t{p.B} * p.H * ((p.S + kTileRows - 1) / kTileRows);
  const int tiles = p.has_mask != 0 ? p.mask.mean_row : (p.T + kTileKeys - 1) / kTileKeys;
  return tiles >= kManyTiles && items >= int64_t{kCtas} * device.sm_count;
}

// As many CTAs an SM as the registers allow, with two stages if they fit, else one; fewer CTAs where shared memory is
// short. -1: it is too small for one.
int CountStages(const CtaSize& size, const DeviceProperties& device) {
  for (int ctas = std::max(size.ctas_per_sm, 2); ctas > 0; ctas /= 2) {
    for (int stages = size.most_stages; stages >= (ctas == 1 ? 0 : 1); --stages) {
      if (FitsSharedMemory(size, stages, ctas, device)) return stages;
    }
  }
  return -1;
}

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
  const bool has_score_mod = job->problem().score_mod() != ScoreMod::kNone;
  const Fp32Launch launch = ChooseFp32Launch(kernel, params.attention, has_score_mod, job->device());
  if (launch.size == nullptr) {
    return Status::Error("the device has too little shared memory for head size " + std::to_string(kernel.head_size));
  }
  STOF_RETURN_IF_ERROR(CheckLaunch(kernel.code_as<Fp32Code>().split(params, job->stream())));
  const Fp32CtaSize::Launch run = has_score_mod ? launch.size->launch_score_mod : launch.size->launch;
  return CheckLaunch(run(params, launch.stages, launch.l2_heads, job->stream()));
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

Fp32Launch ChooseFp32Launch(const KernelEntry& kernel, const AttentionParams& params, bool has_score_mod,
                            const DeviceProperties& device) {
  const auto& code = kernel.code_as<Fp32Code>();
  Fp32Launch launch;
  const int64_t heads = int64_t{params.B} * params.H;
  const int64_t head_bytes = int64_t{4} * code.planes * kernel.head_size * params.T / (params.H / params.G) + 1;
  const int64_t l2_groups = 1 + (heads * head_bytes - 1) / std::max<int64_t>(device.l2_bytes / 2, 1);
  launch.l2_heads = static_cast<int>((heads + l2_groups - 1) / l2_groups);
  const auto take = [&](const Fp32CtaSize& size) {
    if (launch.size != nullptr || size.rows == 0) return;
    if ((has_score_mod ? size.launch_score_mod : size.launch) == nullptr) return;
    const int stages = CountStages(size, device);
    if (stages >= 0) launch.size = &size, launch.stages = stages;
  };
  if (PrefersLargeCtas(params, device)) take(code.sizes[1]);
  take(code.sizes[0]);
  take(code.sizes[2]);
  return launch;
}

const KernelFamily kFp32Family = MakeFamily();

}  // namespace cuda
}  // namespace stof
