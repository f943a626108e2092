// SPDX-License-Identifier: Apache-2.0
// The kernels that score pages and list those that a step attends.
#include <cuda_runtime.h>

#include "cuda/choose_pages/choose.h"
#include "cuda/choose_pages/scores.cuh"
#include "cuda/choose_pages/select.cuh"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {
namespace {

template <int kHead, typename T>
__global__ void __launch_bounds__(PageScores<kHead, T>::kThreads, 4)
    ScorePages(const __grid_constant__ PageChoiceParams params) {
  __shared__ typename PageScores<kHead, T>::Shared shared;
  PageScores<kHead, T>(params).Run(shared);
}

constexpr int kChoiceThreads = 1024;

// Adds the pairs of the query rows of a KV head and the keys of allowed pages, but not those of invalid sequences.
__device__ void CountPairs(const PageChoiceParams& params, const PageRange& range, int b, int keys, int left_out) {
  if (params.is_invalid != nullptr && LoadFresh(params.is_invalid + b) != 0) return;
  const auto rows = static_cast<unsigned long long>(params.H / params.G * params.S);
  const int allowed = keys - (range.begin << params.shift);
  atomicAdd(params.counts, rows * static_cast<unsigned long long>(allowed > 0 ? allowed : 0));
  atomicAdd(params.counts + 1, rows * static_cast<unsigned long long>(left_out));
}

// A CTA lists the pages of a KV head.
__global__ void __launch_bounds__(kChoiceThreads) ChoosePages(const __grid_constant__ PageChoiceParams params) {
  using PageSelection = Selection<kChoiceThreads>;
  __shared__ PageSelection::Shared shared;
  WaitForPrevious();
  LetNextStart();
  const int head = blockIdx.x, b = head / params.G, first_row = LoadFresh(params.first_rows + b);
  const PageRange range = MakePageRange(first_row, params.S, params.T, params.window_left, params.shift);
  const int begin = range.CandidatesBegin(), candidates = range.Candidates();
  const int attended = range.Attended(params.chosen), left_out = (range.end - range.begin - attended) << params.shift;
  int32_t* const list = params.list + static_cast<int64_t>(head) * params.columns;
  // Rows before the recent pages that the list does not have.
  if (threadIdx.x == 0) params.left_out[head] = (range.end - attended) << params.shift;
  if (left_out == 0) {
    for (int i = threadIdx.x; i < attended; i += kChoiceThreads) list[i] = range.begin + i;
  } else {
    // Page 0 comes first, then those that are chosen, then the recent ones.
    const int chosen_at = begin - range.begin, recent_at = chosen_at + params.chosen;
    if (threadIdx.x < chosen_at) list[threadIdx.x] = range.begin;
    if (threadIdx.x < range.end - range.recent) list[recent_at + threadIdx.x] = range.recent + threadIdx.x;
    PageSelection selection(params.scores + static_cast<int64_t>(head) * params.pages + begin, candidates, shared);
    const SelectionCut cut = selection.FindCut(params.chosen);
    selection.ForEachSelected(cut, [&](int place, int i) { list[chosen_at + place] = begin + i; });
  }
  if (threadIdx.x == 0 && params.counts != nullptr) {
    CountPairs(params, range, b, min(first_row + params.S, params.T), left_out);
  }
}

template <int kHead, typename T>
int LaunchScores(const PageChoiceParams& params, void* stream) {
  using Scores = PageScores<kHead, T>;
  constexpr auto kKernel = ScorePages<kHead, T>;
  const int64_t of_head =
      (params.pages + Scores::kPages - 1) / Scores::kPages + (params.key != nullptr ? Scores::kNewPages : 0);
  return LaunchKernel<PageChoiceParams, kKernel>(params, static_cast<unsigned>(int64_t{params.B} * params.G * of_head),
                                                 Scores::kThreads, 0, stream,
                                                 CanStartEarly<PageChoiceParams, kKernel>());
}

}  // namespace

int LaunchPageScores(const PageChoiceParams& params, void* stream) {
  const bool is_fp16 = params.dtype == DType::kF16;
  if (params.D == 64) {
    return is_fp16 ? LaunchScores<64, __half>(params, stream) : LaunchScores<64, __nv_bfloat16>(params, stream);
  }
  return is_fp16 ? LaunchScores<128, __half>(params, stream) : LaunchScores<128, __nv_bfloat16>(params, stream);
}

int LaunchPageChoice(const PageChoiceParams& params, void* stream) {
  return LaunchKernel<PageChoiceParams, ChoosePages>(params, static_cast<unsigned>(params.B * params.G), kChoiceThreads,
                                                     0, stream, CanStartEarly<PageChoiceParams, ChoosePages>());
}

}  // namespace cuda
}  // namespace stof
