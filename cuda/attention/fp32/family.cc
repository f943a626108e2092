// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

#include "cuda/attention/fp32/api.h"
#include "cuda/attention/fp32/workspace.h"
#include "cuda/attention/job.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/host/environment.h"

namespace stof {
namespace cuda {
namespace {

Fp32Workspace WorkspaceOf(const AttentionParams& p, const KernelEntry& kernel) {
  const int64_t tiles = int64_t{p.B} * p.G * CeilDiv(p.T, kTileKeys);
  return {tiles, kernel.code_as<Fp32Code>().planes, kernel.head_size};
}

constexpr HeadSizeTable kTables[] = {{kFp32HeadSizes[0], FindFp32D32},  {kFp32HeadSizes[1], FindFp32D64},
                                     {kFp32HeadSizes[2], FindFp32D96},  {kFp32HeadSizes[3], FindFp32D128},
                                     {kFp32HeadSizes[4], FindFp32D192}, {kFp32HeadSizes[5], FindFp32D256}};

constexpr HeadSizeTable kRelativeTables[] = {
    {kFp32HeadSizes[0], FindFp32RelativeD32},  {kFp32HeadSizes[1], FindFp32RelativeD64},
    {kFp32HeadSizes[2], FindFp32RelativeD96},  {kFp32HeadSizes[3], FindFp32RelativeD128},
    {kFp32HeadSizes[4], FindFp32RelativeD192}, {kFp32HeadSizes[5], FindFp32RelativeD256}};

KernelTable Find(const KernelProblem& problem) {
  return problem.has_relative_terms ? FindByHeadSize(kRelativeTables, problem) : FindByHeadSize(kTables, problem);
}

// The launcher of the kernel that splits keys and values for a kernel of the table.
auto SplitOf(const KernelProblem& problem, const KernelEntry& kernel) {
  const auto& code = kernel.code_as<Fp32Code>();
  if (code.split != nullptr) return code.split;
  KernelProblem plain = problem;
  plain.has_relative_terms = plain.allows_tf32 = false;
  return Find(plain).begin()->code_as<Fp32Code>().split;
}

// The workspace of relative terms is behind that of keys and values.
int64_t RelativeOffset(const Fp32Workspace& split, const RelativeLayout& relative) {
  return relative.bytes == 0 ? split.bytes : RoundUp(split.bytes, kRelativeAlign);
}
Status PlanRelativeOf(const AttentionJob& job, const KernelEntry& kernel, RelativeLayout* layout) {
  *layout = RelativeLayout();
  if (!job.problem().has_relative_terms) return Status();
  return PlanRelative(job.args(), kernel.head_size, layout);
}

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

// Query heads of an L2 head group, whose keys and values fill half of L2.
int CountL2Heads(const AttentionParams& p, const KernelEntry& kernel, const DeviceProperties& device) {
  const int64_t heads = int64_t{p.B} * p.H, planes = kernel.code_as<Fp32Code>().planes;
  const int64_t head_bytes = int64_t{4} * planes * kernel.head_size * p.T / (p.H / p.G) + 1;
  const int64_t l2_groups = 1 + (heads * head_bytes - 1) / std::max<int64_t>(device.l2_bytes / 2, 1);
  return static_cast<int>(CeilDiv(heads, l2_groups));
}

Status Plan(AttentionJob* job, AttentionPlan* plan) {
  STOF_RETURN_IF_ERROR(job->PrepareTiled());
  const bool has_score_mod = job->problem().score_mod() != ScoreMod::kNone;
  if (!ChooseFp32Size(job->params(), has_score_mod, job->device(), plan)) {
    return Status::Error("the device has too little shared memory for head size " +
                         std::to_string(plan->kernel->head_size));
  }
  STOF_RETURN_IF_ERROR(job->GetRelativeRows());
  RelativeLayout relative;
  STOF_RETURN_IF_ERROR(PlanRelativeOf(*job, *plan->kernel, &relative));
  plan->workspace =
      static_cast<size_t>(RelativeOffset(WorkspaceOf(job->params(), *plan->kernel), relative) + relative.bytes);
  return Status();
}

Status Run(AttentionJob* job, const AttentionPlan& plan) {
  STOF_RETURN_IF_ERROR(job->PreparePadding());
  Fp32Params params;
  params.attention = job->params();
  char* memory = nullptr;
  if (plan.workspace > 0) {
    memory = static_cast<char*>(job->GetWorkspace(0, 0, plan.workspace));
    if (memory == nullptr) {
      return Status::Error("no device memory for " + std::to_string(plan.workspace) +
                           " bytes of split keys and values");
    }
  }
  const Fp32Workspace workspace = WorkspaceOf(params.attention, *plan.kernel);
  params.key_tiles = memory + workspace.key_tiles, params.value_tiles = memory + workspace.value_tiles;
  params.key_factors = reinterpret_cast<const float*>(memory + workspace.key_factors);
  params.value_factors = reinterpret_cast<const float*>(memory + workspace.value_factors);
  const auto& code = plan.kernel->code_as<Fp32Code>();
  STOF_RETURN_IF_ERROR(CheckLaunch(SplitOf(job->problem(), *plan.kernel)(params, job->stream())));
  const auto* const size = std::find_if(std::begin(code.sizes), std::end(code.sizes),
                                        [&plan](const CtaSize& one) { return one.rows == plan.rows; });
  const bool has_score_mod = job->problem().score_mod() != ScoreMod::kNone;
  const int l2_heads = CountL2Heads(params.attention, *plan.kernel, job->device());
  if (job->problem().has_relative_terms) {
    RelativeLayout layout;
    STOF_RETURN_IF_ERROR(PlanRelativeOf(*job, *plan.kernel, &layout));
    RelativeParams relative;
    STOF_RETURN_IF_ERROR(PrepareRelative(job->args(), layout, job->relative_rows(),
                                         memory + RelativeOffset(workspace, layout), job->stream(), &relative));
    return CheckLaunch(size->launch_relative(params, relative, plan.stages, l2_heads, job->stream()));
  }
  const Fp32CtaSize::Launch launch = has_score_mod ? size->launch_score_mod : size->launch;
  return CheckLaunch(launch(params, plan.stages, l2_heads, job->stream()));
}

Status Prepare(AttentionJob* job, const KernelEntry&) {
  STOF_RETURN_IF_ERROR(job->GetRelativeRows());
  return job->PrepareTiled();
}

constexpr KernelFamily MakeFamily() {
  KernelFamily family;
  family.role = KernelRole::kTiled;
  family.takes_fp32 = true;
  family.takes_relative_terms = true;
  family.find = Find, family.plan = Plan, family.run = Run, family.prepare = Prepare;
  family.workspace_bound = BoundFp32Workspace;
  return family;
}

}  // namespace

bool ChooseFp32Size(const AttentionParams& params, bool has_score_mod, const DeviceProperties& device,
                    AttentionPlan* plan) {
  const auto& code = plan->kernel->code_as<Fp32Code>();
  const auto take = [&](const Fp32CtaSize& size) {
    const bool is_compiled =
        size.launch_relative != nullptr || (has_score_mod ? size.launch_score_mod : size.launch) != nullptr;
    if (size.rows == 0 || !is_compiled) return false;
    const int stages = CountStages(size, device);
    if (stages >= 0) plan->rows = size.rows, plan->stages = stages;
    return stages >= 0;
  };
  return (PrefersLargeCtas(params, device) && take(code.sizes[1])) || take(code.sizes[0]) || take(code.sizes[2]);
}

const KernelFamily kFp32Family = MakeFamily();

}  // namespace cuda
}  // namespace stof
