// SPDX-License-Identifier: Apache-2.0
// Runs the decode kernels: chooses one and its splits, gets workspace for them.
#include <algorithm>
#include <string>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/decode/workspace.h"
#include "cuda/attention/families.h"
#include "cuda/attention/job.h"
#include "cuda/attention/skip_counts.h"
#include "cuda/choose_pages/choose.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {
namespace {

KernelTable Find(const KernelProblem& problem) {
  if (IsQuantized(problem.kv_dtype)) {
    const bool is_int8 = problem.kv_dtype == DType::kI8;
    if (problem.dtype == DType::kF16) return is_int8 ? FindDecodeF16Int8(problem) : FindDecodeF16Float8(problem);
    if (problem.dtype == DType::kBF16) return is_int8 ? FindDecodeBf16Int8(problem) : FindDecodeBf16Float8(problem);
    return KernelTable();
  }
  if (problem.dtype == DType::kF16) return FindDecodeF16(problem);
  return problem.dtype == DType::kBF16 ? FindDecodeBf16(problem) : FindDecodeF32(problem);
}
KernelTable FindChosen(const KernelProblem& problem) {
  return problem.dtype == DType::kF16 ? FindChosenDecodeF16(problem) : FindChosenDecodeBf16(problem);
}
KernelTable FindPaged(const KernelProblem& problem) {
  if (problem.dtype == DType::kF16) return FindPagedDecodeF16(problem);
  return problem.dtype == DType::kBF16 ? FindPagedDecodeBf16(problem) : FindPagedDecodeF32(problem);
}

MaskForm FormOf(const AttentionJob& job) {
  MaskForm form;
  form.m = kDecodeTileRows;
  const AttentionArgs& args = job.args();
  const int64_t group = args.shape.H / args.shape.G;
  if (group * args.shape.S > kDecodeQueries) return form;
  form.group = group;
  form.sm_count = job.device().sm_count;
  return form;
}

// KV tiles of key columns beside the window, if they are spread evenly over the keys of their list.
int64_t MostColumnTiles(const DeviceColumns& columns, int64_t T) {
  if (columns.lists == 0) return 0;
  const int64_t entries = columns.gathers != 0 ? CeilDiv(columns.stride, kTileKeys) : int64_t{columns.stride};
  return CeilDiv(entries * T, int64_t{columns.tiles} * kTileKeys);
}
DeviceColumns ColumnsOf(const AttentionJob& job) {
  return job.columns() == nullptr ? DeviceColumns() : job.columns()->view();
}

// Whether the query heads of a KV head have one mask, so that a CTA packs them.
bool AreHeadsAlike(const AttentionJob& job) {
  const AttentionParams& params = job.params();
  const MaskEntry* const entry = job.mask_entry();
  return params.has_mask == 0 || params.mask.layout_h == 1 || (entry != nullptr && entry->stacked());
}

// The most KV tiles of a tile row.
int64_t CountTiles(const AttentionJob& job) {
  const AttentionShape& shape = job.args().shape;
  if (const CausalWindow* const window = job.args().mask.fixed.window()) {
    const int64_t tiles = MostTiles(window->window_left, shape.S, shape.T, window->window_block);
    if (ChoosesPages(job.args())) {
      const PageChoice& choice = job.args().kv.choice;
      const int64_t pages = ListColumns(choice.chosen, CountPages(shape.T, choice.rows));
      return std::min(tiles, CeilDiv(pages * choice.rows, kTileKeys));
    }
    return tiles + MostColumnTiles(ColumnsOf(job), shape.T);
  }
  const MaskEntry* const entry = job.mask_entry();
  return entry == nullptr ? CeilDiv(shape.T, kTileKeys) : entry->longest_row();
}

int64_t CountRows(const AttentionShape& shape) { return shape.B * shape.H * shape.S; }

// The kernel and its shape depend on the mask: whether query heads that share keys can be packed.
Status Plan(AttentionJob* job, AttentionPlan* plan) {
  const AttentionArgs& args = job->args();
  const AttentionShape& shape = args.shape;
  if (const CausalWindow* const window = args.mask.fixed.window()) {
    if (window->columns != nullptr) STOF_RETURN_IF_ERROR(job->GetColumns(*window->columns));
  } else {
    STOF_RETURN_IF_ERROR(job->GetMask(FormOf(*job)));
  }
  const int64_t group = shape.H / shape.G, heads = AreHeadsAlike(*job) ? group : 1;
  KernelProblem problem = job->problem();
  problem.packed_queries = heads * shape.S;
  const KernelTable kernels = args.kv.pages.given() ? FindPaged(problem)
                              : ChoosesPages(args)  ? FindChosen(problem)
                                                    : Find(problem);
  const KernelEntry& split_kv = kernels[kSplitKv];
  const int64_t blocks = shape.B * shape.G * (group / heads) * CeilDiv(problem.packed_queries, split_kv.rows);
  // No cluster kernel reads pages, chosen or not, or quantized keys and values.
  const auto* const cluster = kernels.size() > kCluster ? &kernels[kCluster].code_as<DecodeCode>() : nullptr;
  int clusters[kClusterSizes] = {};
  if (job->device().capability >= 90 && cluster != nullptr) {
    ColumnsOf(*job).lists > 0 ? cluster->clusters_columns(clusters) : cluster->clusters(clusters);
  }
  const KernelEntry* const requested = FindRequested(kernels, job->request());
  const int only = cluster == nullptr     ? kSplitKv
                   : requested == nullptr ? -1
                                          : static_cast<int>(requested - kernels.begin());
  const DecodeChoice choice =
      ChooseDecode(split_kv.ctas_per_sm, job->params(), static_cast<int>(SizeOf(KvType(shape))), CountTiles(*job),
                   blocks, job->device(), cluster == nullptr ? 0 : cluster->tiles_at_once, clusters, only);
  plan->kernel = choice.cluster ? &kernels[kCluster] : &split_kv;
  plan->rows = plan->kernel->rows;
  (choice.cluster ? plan->cluster : plan->splits) = choice.splits;
  plan->nanoseconds = choice.nanoseconds;
  if (plan->splits > 1 || job->NeedsEmptyRowPass()) {
    const int64_t splits = choice.cluster ? 0 : plan->splits;
    plan->workspace = static_cast<size_t>(DecodeWorkspace(CountRows(shape), splits, shape.Dv).bytes);
  }
  return Status();
}

// Gets the workspace, with fewer splits than planned where a workspace of fixed size is too small for them.
Status SetWorkspace(AttentionJob* job, const AttentionPlan& plan, bool has_second_pass, DecodeParams* params) {
  const AttentionShape& shape = job->args().shape;
  const bool is_cluster = plan.kernel->code_as<DecodeCode>().is_cluster();
  while ((params->splits > 1 && !is_cluster) || has_second_pass) {
    const DecodeWorkspace workspace(CountRows(shape), is_cluster ? 0 : params->splits, shape.Dv);
    auto* const memory = static_cast<char*>(job->GetWorkspace(0, 2, static_cast<size_t>(workspace.bytes)));
    if (memory == nullptr && params->splits > 1 && !is_cluster) {
      params->splits /= 2;
      continue;
    }
    if (memory == nullptr) {
      return Status::Error("no device memory for " + std::to_string(workspace.bytes) + " bytes of split outputs");
    }
    if (!is_cluster) {
      params->split_stats = reinterpret_cast<float*>(memory + workspace.stats);
      params->split_output = reinterpret_cast<float*>(memory + workspace.output);
    }
    if (has_second_pass) params->empty_rows = reinterpret_cast<int32_t*>(memory + workspace.empty_rows);
    break;
  }
  return Status();
}

// The parameters of the first pass.
DecodeParams MakeParams(const AttentionJob& job, const AttentionPlan& plan) {
  const AttentionArgs& args = job.args();
  DecodeParams params;
  params.attention = job.params();
  if (const CausalWindow* const window = args.mask.fixed.window()) {
    params.first_rows = window->first_rows;
    params.window_left =
        window->window_left < 0 ? kNoWindow : static_cast<int32_t>(std::min<int64_t>(window->window_left, kNoWindow));
    params.is_invalid = args.kv.is_invalid, params.seqlens = args.kv.seqlens;
    params.columns = ColumnsOf(job);
    if (window->columns != nullptr) params.window_block = static_cast<int32_t>(window->window_block);
  }
  const MaskEntry* const entry = job.mask_entry();
  params.stacked = entry != nullptr && entry->stacked() ? 1 : 0;
  if (entry != nullptr && entry->one_row()) {
    params.row_begin = 0, params.row_full = entry->one_row_full();
    params.row_end = static_cast<int32_t>(entry->longest_row());
  }
  params.heads = static_cast<int32_t>(AreHeadsAlike(job) ? args.shape.H / args.shape.G : 1);
  params.splits = std::max(plan.splits, plan.cluster);
  params.pages = args.kv.pages, params.key_ends = args.kv.key_ends;
  params.key_scale = args.kv.key_scale, params.value_scale = args.kv.value_scale;
  return params;
}

PageChoiceParams MakePageChoiceParams(const AttentionJob& job, const DecodeParams& decode) {
  const AttentionParams& p = decode.attention;
  const PageChoice& choice = job.args().kv.choice;
  PageChoiceParams params;
  params.B = p.B, params.H = p.H, params.G = p.G, params.S = p.S, params.T = p.T, params.D = p.D;
  params.dtype = job.args().shape.dtype;
  params.query = p.query, params.query_stride = p.query_stride;
  params.scale = p.scale;
  params.first_rows = decode.first_rows, params.is_invalid = decode.is_invalid;
  params.window_left = decode.window_left;
  params.bounds = choice.bounds;
  params.bounds_stride_b = choice.stride_b, params.bounds_stride_g = choice.stride_g;
  params.bounds_stride_page = choice.stride_page;
  params.shift = PageShift(choice.rows);
  params.pages = static_cast<int32_t>(CountPages(p.T, choice.rows));
  params.chosen = static_cast<int32_t>(std::min<int64_t>(choice.chosen, params.pages));
  params.columns = static_cast<int32_t>(ListColumns(params.chosen, params.pages));
  if (choice.lacks_new_bounds) {
    params.key = p.key, params.key_stride = p.key_stride;
    params.seqlens = decode.seqlens;
  }
  return params;
}

// Lists the pages that each KV head attends, and has the decode kernel read them.
Status ChoosePages(AttentionJob* job, DecodeParams* params) {
  PageChoiceParams choose = MakePageChoiceParams(*job, *params);
  const ChooseWorkspace workspace(int64_t{choose.B} * choose.G, choose.pages, choose.columns);
  auto* const memory = static_cast<char*>(job->GetWorkspace(0, 5, static_cast<size_t>(workspace.bytes)));
  if (memory == nullptr) {
    return Status::Error("no device memory for " + std::to_string(workspace.bytes) + " bytes of scores of pages");
  }
  choose.scores = reinterpret_cast<uint32_t*>(memory + workspace.scores);
  choose.list = reinterpret_cast<int32_t*>(memory + workspace.list);
  choose.left_out = reinterpret_cast<int32_t*>(memory + workspace.left_out);
  STOF_RETURN_IF_ERROR(GetSkipCounts(&choose.counts));
  STOF_RETURN_IF_ERROR(CheckLaunch(LaunchPageScores(choose, job->stream())));
  STOF_RETURN_IF_ERROR(CheckLaunch(LaunchPageChoice(choose, job->stream())));
  KeyPages& pages = params->pages;
  pages.table = choose.list, pages.columns = choose.columns, pages.pages = choose.pages;
  pages.shift = choose.shift, pages.stride = params->attention.key_stride.s << choose.shift;
  params->left_out = choose.left_out;
  params->seqlens = nullptr;  // the lists are what the previous kernel writes
  return Status();
}

Status Run(AttentionJob* job, const AttentionPlan& plan) {
  STOF_RETURN_IF_ERROR(job->PreparePadding());
  DecodeParams params = MakeParams(*job, plan);
  if (ChoosesPages(job->args())) STOF_RETURN_IF_ERROR(ChoosePages(job, &params));
  // The combine step finds fully masked rows; if they attend all keys, a second pass computes them.
  const bool has_second_pass = job->NeedsEmptyRowPass();
  STOF_RETURN_IF_ERROR(SetWorkspace(job, plan, has_second_pass, &params));
  const auto& code = plan.kernel->code_as<DecodeCode>();
  const auto launch = params.columns.lists > 0 ? code.launch_columns : code.launch;
  for (params.second_pass = 0; params.second_pass <= (has_second_pass ? 1 : 0); ++params.second_pass) {
    STOF_RETURN_IF_ERROR(CheckLaunch(launch(params, job->stream())));
    if (params.split_output != nullptr) STOF_RETURN_IF_ERROR(CheckLaunch(code.combine(params, job->stream())));
    params.attention.lse = nullptr;  // already stored
  }
  return Status();
}

Status Prepare(AttentionJob* job, const KernelEntry&) { return job->GetMask(FormOf(*job)); }

constexpr KernelFamily MakeFamily() {
  KernelFamily family;
  family.role = KernelRole::kDecode;
  family.takes_16_bit = family.takes_fp32 = family.takes_quantized = true;
  family.most_queries = kDecodeQueries;
  family.needs_aligned_rows = true;
  family.find = Find, family.plan = Plan, family.run = Run, family.prepare = Prepare;
  family.workspace_bound = BoundDecodeWorkspace;
  return family;
}

}  // namespace

const KernelFamily kDecodeFamily = MakeFamily();

}  // namespace cuda
}  // namespace stof
