// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <string_view>

#include "cuda/attention/int8/operands.h"
#include "cuda/attention/job.h"
#include "cuda/attention/sm80/api.h"
#include "plugins/core/host/environment.h"

namespace stof {
namespace cuda {
namespace {

constexpr HeadSizeTable kTables[] = {{32, FindSm80D32},   {64, FindSm80D64},   {96, FindSm80D96},  {128, FindSm80D128},
                                     {160, FindSm80D160}, {192, FindSm80D192}, {256, FindSm80D256}};

constexpr HeadSizeTable kRelativeTables[] = {
    {32, FindSm80RelativeD32},   {64, FindSm80RelativeD64},   {96, FindSm80RelativeD96},  {128, FindSm80RelativeD128},
    {160, FindSm80RelativeD160}, {192, FindSm80RelativeD192}, {256, FindSm80RelativeD256}};

constexpr HeadSizeTable kInt8Tables[] = {{64, FindSm80Int8D64}, {128, FindSm80Int8D128}};

// On 9.0 these kernels run where those of 9.0 cannot: fully masked rows that attend all keys.
bool HasInt8Scores(const KernelProblem& problem) { return problem.has_int8_operands() && problem.capability != 90; }

KernelTable Find(const KernelProblem& problem) {
  if (HasInt8Scores(problem)) return FindByHeadSize(kInt8Tables, problem);
  return problem.has_relative_terms ? FindByHeadSize(kRelativeTables, problem) : FindByHeadSize(kTables, problem);
}

// The stages that fit the device's shared memory with so many CTAs an SM; -1: not even one buffer does.
int CountStages(const CtaSize& size, int ctas, const DeviceProperties& device) {
  int stages = size.most_stages;
  while (stages >= 0 && !FitsSharedMemory(size, stages, ctas, device)) --stages;
  return stages;
}

// Whether CTAs of half a tile are faster: there are few tiles for an SM (docs/lab/cuda-experiments.md, "8.0, fp32, row
// by row"). Lookups of products by parts of positions want the more warps that such CTAs have on an SM.
bool PrefersHalfTiles(int head_size, const AttentionParams& p, bool has_parts, const DeviceProperties& device) {
  // Tests run both sizes.
  static const std::string_view rows = ReadVariableOr(Variable::kCudaSm80Rows, std::string_view());
  if (!rows.empty()) return rows == "64";
  if (has_parts) return true;
  const int64_t most = head_size <= 64 ? 3 : 1;  // tiles an SM
  return int64_t{p.B} * p.H * ((p.S + kTileRows - 1) / kTileRows) <= most * device.sm_count;
}

Status Plan(AttentionJob* job, AttentionPlan* plan) {
  STOF_RETURN_IF_ERROR(job->PrepareTiled());
  bool has_parts = false;
  if (job->problem().has_relative_terms) {
    STOF_RETURN_IF_ERROR(job->GetRelativeRows());
    RelativeLayout layout;
    STOF_RETURN_IF_ERROR(PlanRelative(job->args(), plan->kernel->head_size, &layout));
    plan->workspace = static_cast<size_t>(layout.bytes);
    for (const RelativeTermLayout& term : layout.terms) has_parts = has_parts || (term.is_given && !term.is_band);
  }
  if (HasInt8Scores(job->problem())) {
    plan->workspace = static_cast<size_t>(Int8Layout(job->args().shape, false).total);
  }
  if (ChooseSm80Size(job->params(), has_parts, job->device(), plan)) return Status();
  return Status::Error("the device has too little shared memory for head size " +
                       std::to_string(plan->kernel->head_size));
}

// Queues the kernels that quantize queries and keys. Sets these and their scales.
Status Quantize(AttentionJob* job, AttentionParams* params, Int8Scales* scales) {
  Int8Params int8;
  STOF_RETURN_IF_ERROR(PlaceOperands(job, *params, false, &int8));
  STOF_RETURN_IF_ERROR(CheckLaunch(LaunchQuantize(int8, job->is_bf16(), job->stream())));
  const auto strides = [](int64_t heads, int64_t rows, int64_t words) {
    return Strides{heads * rows * words, rows * words, words};
  };
  const int64_t words = params->D / 2;  // of 16 bits: see Sm80Attention
  params->query = int8.query, params->query_stride = strides(params->H, params->S, words);
  params->key = int8.key, params->key_stride = strides(params->G, params->T, words);
  scales->query = int8.query_scales, scales->shifts = int8.query_shifts;
  scales->tile = int8.tile_scales, scales->tiles = int8.tiles;
  return Status();
}

Status Run(AttentionJob* job, const AttentionPlan& plan) {
  STOF_RETURN_IF_ERROR(job->PreparePadding());
  RelativeParams relative;
  if (job->problem().has_relative_terms) {
    RelativeLayout layout;
    STOF_RETURN_IF_ERROR(PlanRelative(job->args(), plan.kernel->head_size, &layout));
    void* const memory = plan.workspace == 0 ? nullptr : job->GetWorkspace(0, 4, plan.workspace);
    if (memory == nullptr && plan.workspace > 0) {
      return Status::Error("no device memory for " + std::to_string(plan.workspace) + " bytes of relative positions");
    }
    STOF_RETURN_IF_ERROR(PrepareRelative(job->args(), layout, job->relative_rows(), memory, job->stream(), &relative));
  }
  const auto& code = plan.kernel->code_as<Sm80Code>();
  const Sm80CtaSize& size = plan.rows == code.half.rows ? code.half : code.whole;
  AttentionParams params = job->params();
  Int8Scales int8;
  if (HasInt8Scores(job->problem())) STOF_RETURN_IF_ERROR(Quantize(job, &params, &int8));
  return CheckLaunch(size.launch(params, relative, int8, plan.stages, job->stream()));
}

Status Prepare(AttentionJob* job, const KernelEntry&) {
  STOF_RETURN_IF_ERROR(job->GetRelativeRows());
  return job->PrepareTiled();
}

constexpr KernelFamily MakeFamily() {
  KernelFamily family;
  family.role = KernelRole::kTiled;
  family.takes_16_bit = true;
  family.takes_relative_terms = true;
  family.workspace_bound = BoundSm80Workspace;
  family.find = Find, family.plan = Plan, family.run = Run, family.prepare = Prepare;
  return family;
}

}  // namespace

bool ChooseSm80Size(const AttentionParams& params, bool has_parts, const DeviceProperties& device,
                    AttentionPlan* plan) {
  const auto& code = plan->kernel->code_as<Sm80Code>();
  const auto take = [plan](const CtaSize& size, int stages) {
    plan->rows = size.rows, plan->stages = stages;
    return stages >= 0;
  };
  constexpr int kSmallHead = 128;  // up to here all stages fit every device
  const int head_size = plan->kernel->head_size;
  if (head_size <= kSmallHead) {
    const bool is_half = code.whole.rows == 0 || PrefersHalfTiles(head_size, params, has_parts, device);
    const CtaSize& size = is_half ? code.half : code.whole;
    return take(size, size.most_stages);
  }
  // Two CTAs of 64 rows overlap their softmax, where an SM has room for both.
  const int half_stages = CountStages(code.half, code.half.ctas_per_sm, device);
  if (half_stages > 0) return take(code.half, half_stages);
  if (code.whole.rows > 0) return take(code.whole, CountStages(code.whole, code.whole.ctas_per_sm, device));
  // Kernels with relative terms have no other size, and need a buffer for values.
  const int lone_stages = CountStages(code.half, 1, device);
  return take(code.half, lone_stages > 0 ? lone_stages : -1);
}

const KernelFamily kSm80Family = MakeFamily();

}  // namespace cuda
}  // namespace stof
