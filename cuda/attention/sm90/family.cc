// SPDX-License-Identifier: Apache-2.0
// Runs the sm_90a kernels: persistent CTAs with a tile schedule.
#include <algorithm>
#include <limits>
#include <memory>
#include <string>

#include "cuda/attention/choose_blocks/choose.h"
#include "cuda/attention/job.h"
#include "cuda/attention/skip_counts.h"
#include "cuda/attention/sm90/api.h"
#include "cuda/attention/sm90/int8/quantize.h"
#include "cuda/common/math.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/contract/skip_distance.h"
#include "plugins/core/host/environment.h"

namespace stof {
namespace cuda {
namespace {

#if defined(STOF_SM90)
constexpr HeadSizeTable kTables[] = {{64, FindSm90D64}, {128, FindSm90D128}, {192, FindSm90D192}, {256, FindSm90D256}};
constexpr HeadSizeTable kInt8Tables[] = {{64, FindSm90Int8D64}, {128, FindSm90Int8D128}};
constexpr HeadSizeTable kSkipTables[] = {
    {64, FindSm90SkipD64}, {128, FindSm90SkipD128}, {192, FindSm90SkipD192}, {256, FindSm90SkipD256}};

KernelTable Find(const KernelProblem& problem) {
  if (problem.has_int8_operands()) return FindByHeadSize(kInt8Tables, problem);
  const KernelTable skipping = problem.skips_scores ? FindByHeadSize(kSkipTables, problem) : KernelTable();
  return skipping.size() > 0 ? skipping : FindByHeadSize(kTables, problem);
}
#else
KernelTable Find(const KernelProblem&) { return KernelTable(); }
#endif

// Whether the problem is so large that L2 is cold: little of what a kernel reads first is in it, as the previous kernel
// has evicted it. STOF_CUDA_COLD=1 is for tests, whose problems are small.
bool IsL2Cold(int64_t bytes, int64_t l2_bytes) {
  static const bool always = ReadVariableOr(Variable::kCudaCold, false);
  return always || bytes > l2_bytes / 4 * 3;
}

// Sets the tile schedule, and workspace for split rows.
Status SetSchedule(AttentionJob* job, const AttentionPlan& plan, const MaskEntry& entry, Sm90Params* params) {
  params->tiles = entry.tiles(), params->starts = entry.starts();
  params->split_rows = entry.split_rows(), params->split_row_count = entry.split_row_count();
  if (entry.dynamic_begin() < entry.dynamic_end()) {
    params->dynamic_begin = entry.dynamic_begin(), params->dynamic_end = entry.dynamic_end();
    STOF_RETURN_IF_ERROR(entry.tile_counters().Get(job->stream(), job->keeper(), &params->tile_counter));
  }
  if (plan.workspace == 0) return Status();
  auto* memory = static_cast<char*>(job->GetWorkspace(0, 3, plan.workspace));
  if (memory == nullptr) {
    return Status::Error("no device memory for " + std::to_string(plan.workspace) + " bytes of split rows");
  }
  params->split_output = reinterpret_cast<float*>(memory);
  params->split_stats = reinterpret_cast<float2*>(memory + entry.splits() * 64 * 4 * plan.kernel->head_size);
  return Status();
}

// Whether a mask's entry has a tile schedule.
bool HasSchedule(const MaskEntry* entry) { return entry != nullptr && entry->tiles() != nullptr; }

Status Plan(AttentionJob* job, AttentionPlan* plan) {
  const KernelEntry* const choosing = FindChoosingKernel(*job, *plan->kernel, Find);
  if (choosing != nullptr) plan->kernel = choosing;
  const KernelEntry& kernel = *plan->kernel;
  const MaskForm form = MaskFormOf(kernel, job->selection());
  STOF_RETURN_IF_ERROR(job->GetMask(choosing != nullptr ? ChoosingMaskForm(kernel, *job) : form));
  const AttentionShape& shape = job->args().shape;
  const int64_t count = shape.B * shape.H * CeilDiv(shape.S, kernel.rows);
  const bool has_half_tiles = UsesHalfTiles(form.cost, count, form.ctas);
  plan->rows = has_half_tiles ? kernel.rows / 2 : kernel.rows;
  plan->persistent = std::min<int64_t>(form.ctas, has_half_tiles ? 2 * count : count);
  if (choosing != nullptr) plan->workspace = CountChoosingBytes(kernel, *job);
  if (const MaskEntry* const entry = job->mask_entry(); HasSchedule(entry)) {
    plan->persistent = entry->ctas();
    plan->workspace = static_cast<size_t>(entry->splits() * SplitBytes(kernel.head_size));
  }
  return Status();
}

Status Run(AttentionJob* job, const AttentionPlan& plan) {
  const AttentionShape& shape = job->args().shape;
  const KernelEntry& kernel = *plan.kernel;
  const SelectionProblem& selection = job->selection();
  Sm90Params params;
  params.attention = job->params();
  const bool is_int8 = job->problem().has_int8_operands();
  if (!is_int8 && !MakeTensorMaps(job->is_bf16(), kernel.rows, kernel.keys, &params)) return job->RunTiled();
  params.half_tiles = plan.rows < kernel.rows ? 1 : 0;
  params.ctas = static_cast<int32_t>(plan.persistent);
  params.l2_heads = static_cast<int32_t>(std::min<int64_t>(selection.l2_heads, std::numeric_limits<int32_t>::max()));
  const int64_t bytes = selection.kv_bytes + 2 * shape.B * shape.H * shape.S * (shape.D + shape.Dv);
  params.cold_l2 = IsL2Cold(bytes, job->device().l2_bytes) ? 1 : 0;
  const MaskEntry* const entry = job->mask_entry();
  if (HasSchedule(entry)) STOF_RETURN_IF_ERROR(SetSchedule(job, plan, *entry, &params));
  if (kernel.skips_scores) {
    params.skip_distance = kLog2E * SkipDistance(job->args().scores.skip_threshold, shape.T);
    STOF_RETURN_IF_ERROR(GetSkipCounts(&params.skip_counts));
  }
  // Fully masked rows that attend all keys are left to a second kernel.
  const bool second = job->NeedsEmptyRowPass();
  STOF_RETURN_IF_ERROR(job->PreparePadding(second, &params.attention.pad_bits, &params.empty_flags));
  if (is_int8) {
    bool is_described = false;
    STOF_RETURN_IF_ERROR(QuantizeOperands(job, &params, &is_described));
    if (!is_described) return job->RunTiled();
  }
  if (FindChoosingKernel(*job, kernel, Find) != nullptr) {
    STOF_RETURN_IF_ERROR(ChooseBlocks(job, kernel, &params.attention));
  }
  STOF_RETURN_IF_ERROR(CheckLaunch(kernel.code_as<Sm90Code>().launch(params, job->stream())));
  return second ? job->RunTiledForEmptyRows(params.attention.pad_bits, params.empty_flags) : Status();
}

Status Prepare(AttentionJob* job, const KernelEntry& kernel) {
  const KernelEntry* const choosing = FindChoosingKernel(*job, kernel, Find);
  STOF_RETURN_IF_ERROR(
      job->GetMask(choosing != nullptr ? ChoosingMaskForm(*choosing, *job) : MaskFormOf(kernel, job->selection())));
  return job->empty_rows_attend_all() ? job->PrepareTiled() : Status();
}

constexpr KernelFamily MakeFamily() {
  KernelFamily family;
  family.role = KernelRole::kScheduled;
  family.least_capability = family.most_capability = 90;  // wgmma and setmaxnreg exist on 9.0 alone
  family.takes_16_bit = true;
  family.least_head_size = 33;  // narrower heads would fill half of a tile with zeros
  family.needs_aligned_bias = true;
  family.find = Find, family.plan = Plan, family.run = Run, family.prepare = Prepare;
  family.workspace_bound = BoundSm90Workspace;
  return family;
}

}  // namespace

const KernelFamily kSm90Family = MakeFamily();

}  // namespace cuda
}  // namespace stof
