// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/choose_blocks/choose.h"

#include "cuda/attention/choose_blocks/layout.h"
#include "cuda/attention/choose_blocks/params.h"
#include "cuda/attention/skip_counts.h"

namespace stof {
namespace cuda {
namespace {

// Whether the tiles of a block are a kernel's tiles, and no two CTAs share a tile row.
bool HasTilesOfBlocks(const KernelEntry& kernel) {
  return kernel.rows == kBlockQueries && kBlockKeys % kernel.keys == 0 && kBlockKeys / kernel.keys <= 2 &&
         kernel.cost.split_kv == 1;
}

ChoosingLayout LayoutOf(const KernelEntry& kernel, const AttentionJob& job) {
  const AttentionShape& shape = job.args().shape;
  const int64_t tiles = CeilDiv(shape.T, kernel.keys);
  const bool has_mask = !job.mask().parts.fixed.empty() || !job.mask().parts.dynamic.empty();
  return ChoosingLayout(shape, tiles, has_mask ? tiles : 0);
}

// Whether all that the mask reads is constant, or the lengths of caches.
bool HasConstantMask(const AttentionJob& job) {
  return job.mask().parts.dynamic.empty() || job.args().scores.diagonal.first_rows != nullptr;
}

// A build without sm_90a has no kernels that choose.
#if defined(STOF_SM90)
constexpr auto kCanChoose = CanChooseBlocks;
constexpr auto kLaunch = LaunchChooseBlocks;
#else
constexpr auto kCanChoose = [](int64_t, int64_t, int) { return false; };
constexpr auto kLaunch = [](bool, const BlockChoiceParams&, int, void*) { return 0; };
#endif

}  // namespace

const KernelEntry* FindChoosingKernel(const AttentionJob& job, const KernelEntry& planned,
                                      KernelTable (*find)(const KernelProblem& problem)) {
  const AttentionArgs& args = job.args();
  const AttentionShape& shape = args.shape;
  // With a scale of 0 all estimates are alike. Query blocks of a part are those of the sequence.
  if (!stof::ChoosesBlocks(args) || shape.dtype == DType::kF32 || IsQuantized(shape.kv_dtype) || shape.T == 0 ||
      args.scores.scale == 0.0f || !HasConstantMask(job) || job.part().row % kBlockQueries != 0 ||
      PooledSize(shape.D) == 0 ||
      !kCanChoose(PooledSize(shape.D), CeilDiv(shape.T, kBlockKeys), job.device().cta_shared_bytes)) {
    return nullptr;
  }
  const KernelEntry* best = nullptr;
  const auto cost = [](const KernelEntry& kernel) {  // of a full block, times 128
    return kernel.cost.full * kBlockKeys / kernel.keys * kBlockKeys / kernel.ctas_per_sm;
  };
  KernelProblem problem = job.problem();
  for (const bool skips : {true, false}) {  // kernels that skip by score first
    if (best != nullptr || (skips && !problem.skips_scores)) continue;
    problem.skips_scores = skips;
    for (const KernelEntry& kernel : find(problem)) {
      if (HasTilesOfBlocks(kernel) && (best == nullptr || cost(kernel) < cost(*best))) best = &kernel;
    }
  }
  if (!job.request().is_empty() && HasTilesOfBlocks(planned)) best = &planned;
  if (best == nullptr || LayoutOf(*best, job).total > kMaxChoiceBytes) return nullptr;
  return best;
}

MaskForm ChoosingMaskForm(const KernelEntry& kernel, const AttentionJob& job) {
  MaskForm form = MaskFormOf(kernel, job.selection());
  form.ctas = 0;
  return form;
}

size_t CountChoosingBytes(const KernelEntry& kernel, const AttentionJob& job) {
  return static_cast<size_t>(LayoutOf(kernel, job).total);
}

Status ChooseBlocks(AttentionJob* job, const KernelEntry& kernel, AttentionParams* attention) {
  const ScoreArgs& scores = job->args().scores;
  const ChoosingLayout layout = LayoutOf(kernel, *job);
  auto* const memory = static_cast<char*>(job->GetWorkspace(0, 5, static_cast<size_t>(layout.total)));
  if (memory == nullptr) return Status();
  const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
  const auto words = [memory](int64_t at) { return reinterpret_cast<int32_t*>(memory + at); };
  BlockChoiceParams p;
  p.attention = *attention;
  p.pooled_size = narrow(layout.pooled_size);
  p.row_blocks = narrow(layout.row_blocks), p.key_blocks = narrow(layout.key_blocks);
  p.query_rows = narrow(layout.query_rows), p.key_rows = narrow(layout.key_rows);
  p.tiles_of_block = narrow(kBlockKeys / kernel.keys), p.list_stride = narrow(layout.list_stride);
  p.threshold = scores.block_threshold;
  const int64_t part_row = job->part().row;
  p.first_position = narrow(part_row + (scores.diagonal.first_rows == nullptr ? scores.diagonal.first : 0));
  p.first_rows = scores.diagonal.first_rows;
  p.key_offset = narrow(job->sizes().S);
  p.pooled_queries = memory + layout.pooled_queries, p.pooled_keys = memory + layout.pooled_keys;
  p.exists = reinterpret_cast<uint8_t*>(memory + layout.exists);
  p.layout = words(layout.layout), p.row_ptr = words(layout.row_ptr), p.row_end = words(layout.row_end);
  p.full_begin = words(layout.full_begin), p.order = words(layout.order);
  // A row's words: its key tiles, then the element masks of the partial ones, which come first.
  p.key_tile = words(layout.lists), p.bits_id = p.key_tile + CeilDiv(job->args().shape.T, kernel.keys);
  p.counts_kept = kernel.skips_scores ? 0 : 1;
  if (!MakePooledMaps(job->is_bf16(), &p)) return Status();
  STOF_RETURN_IF_ERROR(GetSkipCounts(&p.skip_counts));
  STOF_RETURN_IF_ERROR(CheckLaunch(kLaunch(job->is_bf16(), p, job->device().sm_count, job->stream())));
  DeviceMask& mask = attention->mask;
  mask.rows = p.row_blocks;
  mask.layout_b = attention->B, mask.layout_h = attention->H;
  mask.mean_row = 0;
  mask.layout = p.layout, mask.order = p.order;
  mask.row_ptr = p.row_ptr, mask.row_end = p.row_end, mask.full_begin = p.full_begin;
  mask.key_tile = p.key_tile, mask.bits_id = p.bits_id;
  attention->has_mask = 1;
  return Status();
}

}  // namespace cuda
}  // namespace stof
