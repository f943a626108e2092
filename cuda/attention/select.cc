// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/select.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/attention/families.h"
#include "cuda/attention/rowwise/api.h"
#include "cuda/attention/rowwise/cost.h"
#include "cuda/attention/select_key.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/contract/attention_args.h"
#include "plugins/core/host/environment.h"
#include "plugins/core/mask/block_mask_cache.h"

namespace stof {
namespace cuda {
namespace {

constexpr size_t kMostRemembered = 4096;

// The row-wise kernel has to be faster by this factor, and the tiles to hold at most one allowed pair in so many.
constexpr double kRowwiseMargin = 0.9;
constexpr int64_t kSparsePairs = 8;

}  // namespace

int64_t KvHeadBytes(const AttentionShape& shape) {
  return std::max<int64_t>(1, SizeOf(KvType(shape)) * shape.T * (shape.D + shape.Dv));
}

int64_t L2HeadsOf(const AttentionShape& shape, int64_t l2_bytes) {
  const int64_t group_size = shape.H / std::max<int64_t>(1, shape.G);
  return std::max<int64_t>(1, l2_bytes / 2 / KvHeadBytes(shape)) * group_size;
}

MaskForm MaskFormOf(const KernelEntry& kernel, const SelectionProblem& problem) {
  // STOF_CUDA_HALVES=0 is for tests: small problems would use nothing but half tiles.
  static const bool half_tiles = ReadVariableOr(Variable::kCudaHalves, true);
  MaskForm form;
  form.m = kernel.rows, form.n = kernel.keys;
  form.ctas = kernel.ctas_per_sm * problem.sm_count;
  form.l2_heads = problem.l2_heads;
  form.group_size = problem.group_size;
  form.cost = kernel.cost;
  if (!half_tiles) form.cost.half_tile_pct = 0;
  form.fragments = true;
  return form;
}

namespace {

// The time of the tile rows, without memory traffic beyond the first read.
Status PredictTileRows(const MaskForm& form, const SelectionProblem& problem, int64_t* nanoseconds) {
  const ExprSizes& sizes = problem.sizes;
  if (problem.mask == nullptr) {
    const int64_t rows = sizes.B * sizes.H * CeilDiv(sizes.S, form.m), waves = CeilDiv(rows, form.ctas);
    *nanoseconds = waves * (form.cost.row + form.cost.full * CeilDiv(CeilDiv(sizes.T, form.n), form.cost.split_kv));
    if (UsesHalfTiles(form.cost, rows, form.ctas)) *nanoseconds = *nanoseconds * form.cost.half_tile_pct / 100;
    return Status();
  }
  std::shared_ptr<const BlockMask> mask;
  STOF_RETURN_IF_ERROR(BlockMaskCache::Global().Get(*problem.mask, problem.hash, sizes, form.m, form.n, &mask));
  if (CanSchedule(*mask, sizes.B, sizes.H)) {
    *nanoseconds = PredictScheduleTime(
        MakeTileSchedule(*mask, MakeTileList(*mask), sizes.B, sizes.H, form.ctas, form.l2_heads, form.cost), form.cost);
    return Status();
  }
  const auto rows = static_cast<int64_t>(mask->full_begin.size());  // of all tables
  int64_t partial = 0;
  for (size_t at = 0; at < mask->full_begin.size(); ++at) partial += mask->full_begin[at] - mask->row_ptr[at];
  const int64_t all = static_cast<int64_t>(mask->key_tile.size());
  const double each = static_cast<double>(form.cost.row) +
                      static_cast<double>(form.cost.partial * partial + form.cost.full * (all - partial)) /
                          static_cast<double>(std::max<int64_t>(1, rows));
  const double items = static_cast<double>(sizes.B) * static_cast<double>(sizes.H) * mask->rows;
  *nanoseconds = static_cast<int64_t>(each * items / form.ctas);
  return Status();
}

// A lower bound of Predict.
Status PredictLowerBound(const KernelEntry& kernel, const SelectionProblem& problem, int64_t* nanoseconds) {
  *nanoseconds = 0;
  if (problem.mask == nullptr) return Status();
  const MaskForm form = MaskFormOf(kernel, problem);
  const ExprSizes& sizes = problem.sizes;
  std::shared_ptr<const BlockMask> mask;
  STOF_RETURN_IF_ERROR(BlockMaskCache::Global().Get(*problem.mask, problem.hash, sizes, form.m, form.n, &mask));
  if (!CanSchedule(*mask, sizes.B, sizes.H)) return Status();
  *nanoseconds = ScheduleLowerBound(*mask, sizes.B, sizes.H, form.ctas, form.cost) +
                 form.cost.ns_per_mib * (problem.kv_bytes >> 20);
  return Status();
}

}  // namespace

Status Predict(const KernelEntry& kernel, const SelectionProblem& problem, int64_t* nanoseconds) {
  const MaskForm form = MaskFormOf(kernel, problem);
  STOF_RETURN_IF_ERROR(PredictTileRows(form, problem, nanoseconds));
  *nanoseconds += form.cost.ns_per_mib * (problem.kv_bytes >> 20);
  return Status();
}

Status SelectRowwise(const SelectionProblem& problem, const KernelEntry& kernel, bool* rowwise) {
  static std::mutex mutex;
  static auto* remembered = new std::unordered_map<RowwiseKey, bool, SelectionKeyHash>;
  const ExprSizes& sizes = problem.sizes;
  const RowwiseKey key{&kernel, {problem.hash, sizes, problem.sm_count}, problem.head_bytes, problem.is_fp32};
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = remembered->find(key);
    if (found != remembered->end()) {
      *rowwise = found->second;
      return Status();
    }
  }
  *rowwise = false;
  const int m = kernel.rows, n = kernel.keys;
  std::shared_ptr<const BlockMask> tiled;
  STOF_RETURN_IF_ERROR(BlockMaskCache::Global().Get(*problem.mask, problem.hash, sizes, m, n, &tiled));
  const MaskCounts counts = CountPairs(*tiled, sizes.B, sizes.H);
  // With denser tiles the row-wise kernel never wins, and its own block mask need not be built.
  if (counts.pairs * kSparsePairs < counts.tiles * m * n) {
    double tiled = 0;
    if (kernel.is_scheduled) {
      int64_t nanoseconds = 0;
      STOF_RETURN_IF_ERROR(Predict(kernel, problem, &nanoseconds));
      tiled = static_cast<double>(nanoseconds);
    } else {
      tiled = PredictTiled(counts, problem.head_bytes, problem.is_fp32, problem.sm_count);
    }
    std::shared_ptr<const BlockMask> fine;
    const Status status =
        BlockMaskCache::Global().Get(*problem.mask, problem.hash, sizes, kRowwiseTile, kRowwiseTile, &fine);
    if (!status.too_large()) {  // else the tiled kernel stays
      STOF_RETURN_IF_ERROR(status);
      const double rowwise_time = PredictRowwise(CountPairs(*fine, sizes.B, sizes.H), sizes.B * sizes.H * sizes.S,
                                                 problem.head_bytes, problem.sm_count);
      *rowwise = rowwise_time < kRowwiseMargin * tiled;
    }
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (remembered->size() >= kMostRemembered) remembered->clear();
  remembered->emplace(key, *rowwise);
  return Status();
}

const KernelEntry* SelectForDeviceMask(KernelTable kernels) {
  // Time a pair in a tile row of eight KV tiles, half of them partial.
  const auto pair = [](const KernelEntry& k) {
    return static_cast<double>(k.cost.row + 4 * k.cost.full + 4 * k.cost.partial) /
           static_cast<double>(k.rows * k.keys * k.ctas_per_sm * k.cost.split_kv);
  };
  const KernelEntry* best = kernels.begin();
  for (const KernelEntry& kernel : kernels) {
    if (kernel.keys < best->keys || (kernel.keys == best->keys && pair(kernel) < pair(*best))) best = &kernel;
  }
  return best;
}

Status Select(KernelTable kernels, const SelectionProblem& problem, const KernelEntry** selected) {
  static std::mutex mutex;
  // Never destroyed: threads may outlive static objects.
  static auto* remembered = new std::unordered_map<SelectKey, const KernelEntry*, SelectionKeyHash>;
  *selected = nullptr;
  const SelectKey key{
      kernels.begin(), {problem.hash, problem.sizes, problem.sm_count}, problem.l2_heads, problem.kv_bytes};
  if (problem.mask != nullptr) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = remembered->find(key);
    if (found != remembered->end()) {
      *selected = found->second;
      return Status();
    }
  }
  // By rising lower bound, so that most kernels need no schedule.
  std::vector<std::pair<int64_t, const KernelEntry*>> candidates;
  for (const KernelEntry& kernel : kernels) {
    candidates.emplace_back(0, &kernel);
    STOF_RETURN_IF_ERROR(PredictLowerBound(kernel, problem, &candidates.back().first));
  }
  std::sort(candidates.begin(), candidates.end());
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const auto& [bound, kernel] : candidates) {
    if (bound > least) break;
    int64_t nanoseconds = 0;
    STOF_RETURN_IF_ERROR(Predict(*kernel, problem, &nanoseconds));
    if (nanoseconds < least || (nanoseconds == least && kernel < *selected)) least = nanoseconds, *selected = kernel;
  }
  if (problem.mask != nullptr) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (remembered->size() >= kMostRemembered) remembered->clear();
    remembered->emplace(key, *selected);
  }
  return Status();
}

Status ListPredictions(const KernelProblem& problem, const SelectionProblem& selection,
                       std::vector<AttentionPlan>* plans) {
  const bool are_predicted = !selection.is_mask_on_device;
  for (const KernelRole role : {KernelRole::kTiled, KernelRole::kScheduled}) {
    KernelTable kernels;
    const KernelFamily* const family = FindFamily(role, problem, &kernels);
    for (const KernelEntry& kernel : kernels) {
      AttentionPlan plan;
      plan.family = family, plan.kernel = &kernel;
      if (kernel.is_scheduled && are_predicted) {
        int64_t nanoseconds = 0;
        STOF_RETURN_IF_ERROR(Predict(kernel, selection, &nanoseconds));
        plan.nanoseconds = static_cast<double>(nanoseconds);
      } else if (are_predicted && selection.mask != nullptr) {
        std::shared_ptr<const BlockMask> mask;
        STOF_RETURN_IF_ERROR(BlockMaskCache::Global().Get(*selection.mask, selection.hash, selection.sizes, kernel.rows,
                                                          kernel.keys, &mask));
        plan.nanoseconds = PredictTiled(CountPairs(*mask, selection.sizes.B, selection.sizes.H), selection.head_bytes,
                                        selection.is_fp32, selection.sm_count);
      }
      plans->push_back(plan);
    }
  }
  std::stable_sort(plans->begin(), plans->end(),
                   [](const AttentionPlan& a, const AttentionPlan& b) { return a.nanoseconds < b.nanoseconds; });
  return Status();
}

std::string Print(const KernelProblem& problem, const SelectionProblem& selection) {
  const ExprSizes& sizes = selection.sizes;
  std::string text = "attention";
  const std::pair<const char*, int64_t> numbers[] = {{" B ", sizes.B},
                                                     {", H ", sizes.H},
                                                     {", S ", sizes.S},
                                                     {", T ", sizes.T},
                                                     {", group size ", selection.group_size},
                                                     {", head size ", problem.head_size}};
  for (const auto& [name, number] : numbers) text += name + std::to_string(number);
  text += problem.dtype == DType::kF32 ? ", fp32" : problem.dtype == DType::kF16 ? ", fp16" : ", bf16";
  if (IsQuantized(problem.kv_dtype)) text += ", quantized keys and values";
  if (problem.has_full_bias) text += ", bias";
  if (problem.has_relative_terms) text += ", relative terms";
  if (problem.skips_scores) text += ", skip by score";
  if (problem.precision != AttentionPrecision::kFull) text += ", 8-bit operands";
  text += selection.is_mask_on_device ? ", mask of the run" : selection.mask == nullptr ? ", no static mask" : ", mask";
  if (selection.mask != nullptr) text += " " + std::to_string(selection.hash);
  return text + ", " + std::to_string(selection.sm_count) + " SMs";
}

Status ChooseKernel(const KernelRequest& request, const KernelProblem& problem, const SelectionProblem& selection,
                    AttentionPlan* plan) {
  const auto take = [plan](const KernelFamily* family, const KernelEntry* kernel) {
    plan->family = family, plan->kernel = kernel;
  };
  KernelTable rowwise, decode, scheduled, tiled;
  const KernelFamily* const rowwise_family = FindFamily(KernelRole::kRowwise, problem, &rowwise);
  if (rowwise_family != nullptr && !request.name.empty() && FindRequested(rowwise, request) != nullptr) {
    take(rowwise_family, rowwise.begin());
    return Status();
  }
  if (const KernelFamily* const family = FindFamily(KernelRole::kDecode, problem, &decode)) {
    take(family, decode.begin());
    return Status();
  }
  const KernelFamily* const tiled_family = FindFamily(KernelRole::kTiled, problem, &tiled);
  if (tiled_family == nullptr) {
    return Status::Error("no CUDA kernel for head size " + std::to_string(problem.head_size));
  }
  take(tiled_family, tiled.begin());
  const KernelFamily* const family = FindFamily(KernelRole::kScheduled, problem, &scheduled);
  if (family != nullptr && request.tactic != 1 && request.name != KernelName(tiled[0])) {
    const KernelEntry* kernel = FindRequested(scheduled, request);
    if (request.tactic > 1 && request.tactic - 2 < scheduled.size()) kernel = &scheduled[request.tactic - 2];
    if (kernel == nullptr && selection.is_mask_on_device) kernel = SelectForDeviceMask(scheduled);
    if (kernel == nullptr) STOF_RETURN_IF_ERROR(Select(scheduled, selection, &kernel));
    take(family, kernel);
  }
  const bool is_free = request.name.empty() && request.tactic == 0;
  if (rowwise_family == nullptr || selection.mask == nullptr || !is_free) return Status();
  bool is_faster = false;
  STOF_RETURN_IF_ERROR(SelectRowwise(selection, *plan->kernel, &is_faster));
  if (is_faster) take(rowwise_family, rowwise.begin());
  return Status();
}

}  // namespace cuda
}  // namespace stof
