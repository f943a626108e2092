// SPDX-License-Identifier: Apache-2.0
// Runs the decode kernels: chooses one and its splits, gets workspace for them.
#include <algorithm>
#include <memory>
#include <string>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/families.h"
#include "cuda/attention/job.h"

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
int64_t MostColumnTiles(const DecodeParams& params) {
  const DeviceColumns& columns = params.columns;
  if (columns.lists == 0) return 0;
  const int64_t entries =
      columns.gathers != 0 ? (int64_t{columns.stride} + kTileKeys - 1) / kTileKeys : int64_t{columns.stride};
  const int64_t keys = int64_t{columns.tiles} * kTileKeys;
  return (entries * params.attention.T + keys - 1) / keys;
}

// The kernel and its shape depend on the mask: whether query heads that share keys can be packed.
Status Run(AttentionJob* job, const KernelEntry&) {
  const AttentionArgs& args = job->args();
  DecodeParams params;
  std::shared_ptr<const MaskEntry> entry;
  std::shared_ptr<const DeviceColumnsEntry> columns;
  STOF_RETURN_IF_ERROR(job->PreparePadding());
  const CausalWindow* const window = args.mask.fixed.window();
  if (window != nullptr) {
    params.first_rows = window->first_rows;
    params.window_left =
        window->window_left < 0 ? kNoWindow : static_cast<int32_t>(std::min<int64_t>(window->window_left, kNoWindow));
    params.is_invalid = args.kv.is_invalid;
    params.seqlens = args.kv.seqlens;
    if (window->columns != nullptr) {
      STOF_RETURN_IF_ERROR(job->GetColumns(*window->columns, &columns));
      params.columns = columns->view();
      params.window_block = static_cast<int32_t>(window->window_block);
    }
  } else {
    STOF_RETURN_IF_ERROR(job->GetMask(FormOf(*job), job->params(), &entry));
  }
  params.attention = *job->params();
  const int64_t group = args.shape.H / args.shape.G;
  params.stacked = entry != nullptr && entry->stacked() ? 1 : 0;
  const bool alike = params.attention.has_mask == 0 || params.attention.mask.layout_h == 1 || params.stacked != 0;
  params.heads = static_cast<int32_t>(alike ? group : 1);
  KernelProblem problem = job->problem();
  problem.packed_queries = params.heads * args.shape.S;
  const bool is_paged = args.kv.pages.given();
  params.pages = args.kv.pages;
  params.key_ends = args.kv.key_ends;
  const KernelTable kernels = is_paged ? FindPaged(problem) : Find(problem);
  const KernelEntry& split_kv = kernels[kSplitKv];
  const auto& split_kv_code = split_kv.code_as<SplitKvCode>();
  // No cluster kernel reads pages, or quantized keys and values.
  static constexpr ClusterCode kNoClusters;
  const bool has_clusters = kernels.size() > kCluster;
  const ClusterCode& cluster_code = has_clusters ? kernels[kCluster].code_as<ClusterCode>() : kNoClusters;
  const int64_t tiles =
      window != nullptr
          ? MostTiles(window->window_left, args.shape.S, args.shape.T, window->window_block) + MostColumnTiles(params)
      : entry == nullptr ? (args.shape.T + kTileKeys - 1) / kTileKeys
                         : entry->longest_row();
  const int64_t blocks = args.shape.B * args.shape.G * (group / params.heads) *
                         ((problem.packed_queries + split_kv.rows - 1) / split_kv.rows);
  if (entry != nullptr && entry->one_row()) {
    params.row_begin = 0, params.row_full = entry->one_row_full(), params.row_end = static_cast<int32_t>(tiles);
  }
  params.key_scale = args.kv.key_scale, params.value_scale = args.kv.value_scale;
  const auto item = static_cast<int>(SizeOf(KvType(args.shape)));
  int clusters[kClusterSizes] = {};
  const bool has_columns = params.columns.lists > 0;
  if (job->device().capability >= 90 && has_clusters) {
    has_columns ? cluster_code.clusters_columns(clusters) : cluster_code.clusters(clusters);
  }
  const KernelEntry* const requested = FindRequested(kernels, job->request());
  const int only = !has_clusters ? kSplitKv : requested == nullptr ? -1 : static_cast<int>(requested - kernels.begin());
  const DecodeChoice choice = ChooseDecode(split_kv.ctas_per_sm, params.attention, item, tiles, blocks, job->device(),
                                           cluster_code.tiles_at_once, clusters, only);
  params.splits = choice.splits;
  // The combine step finds fully masked rows; if they attend all keys, a second pass computes them.
  const bool second = job->NeedsEmptyRowPass(params.attention.has_mask != 0, entry.get());
  const int64_t rows = args.shape.B * args.shape.H * args.shape.S;
  // A workspace of fixed size may be too small for the fastest number of splits.
  while ((params.splits > 1 && !choice.cluster) || second) {
    const int64_t parts = choice.cluster ? 0 : rows * params.splits;
    const int64_t sums = 4 * parts * args.shape.Dv, states = 8 * parts;
    const auto bytes = static_cast<size_t>(sums + states + 4 * rows);
    auto* memory = static_cast<char*>(job->GetWorkspace(0, 2, bytes));
    if (memory == nullptr && parts > 0 && params.splits > 1) {
      params.splits /= 2;
      continue;
    }
    if (memory == nullptr)
      return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of split outputs");
    if (parts > 0) {
      params.split_stats = reinterpret_cast<float*>(memory);
      params.split_output = reinterpret_cast<float*>(memory + states);
    }
    if (second) params.empty_rows = reinterpret_cast<int32_t*>(memory + states + sums);
    break;
  }
  const auto launch = choice.cluster ? (has_columns ? cluster_code.launch_columns : cluster_code.launch)
                                     : (has_columns ? split_kv_code.launch_columns : split_kv_code.launch);
  for (params.second_pass = 0; params.second_pass <= (second ? 1 : 0); ++params.second_pass) {
    STOF_RETURN_IF_ERROR(CheckLaunch(launch(params, job->stream())));
    if (params.split_output != nullptr) {
      STOF_RETURN_IF_ERROR(CheckLaunch(split_kv_code.combine(params, job->stream())));
    }
    params.attention.lse = nullptr;  // already stored
  }
  return Status();
}

Status Prepare(AttentionJob* job, const KernelEntry&) {
  std::shared_ptr<const MaskEntry> entry;
  return job->GetMask(FormOf(*job), job->params(), &entry);
}

constexpr KernelFamily MakeFamily() {
  KernelFamily family;
  family.role = KernelRole::kDecode;
  family.takes_16_bit = family.takes_fp32 = family.takes_quantized = true;
  family.most_queries = kDecodeQueries;
  family.needs_aligned_rows = true;
  family.find = Find, family.run = Run, family.prepare = Prepare;
  return family;
}

}  // namespace

const KernelFamily kDecodeFamily = MakeFamily();

}  // namespace cuda
}  // namespace stof
