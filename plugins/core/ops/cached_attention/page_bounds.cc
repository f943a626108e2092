// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/cached_attention/page_bounds.h"

#include <string>

#include "plugins/core/base/integers.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/host/skip_scores.h"

namespace stof {

namespace in = cached_input;
namespace {

constexpr char kPresentPageBounds[] = "present_page_bounds";

ChoosingStep StepOf(const CacheAppendArgs& append, const PageChoice& choice, const int32_t* ends) {
  return {append.B, append.H, append.G, append.S, append.first_row, ends, choice.chosen, choice.rows};
}

}  // namespace

Status BindPageBounds(const NamedInputs& inputs, const CachedAttentionAttributes& attributes, CacheAppendArgs* args) {
  CacheAppendArgs& a = *args;
  if (attributes.chosen_pages == 0) {
    return inputs.Has(in::kPageBounds) ? inputs.ReportSuperfluous(in::kPageBounds, "without attribute chosen_pages")
                                       : Status();
  }
  const std::string attribute = "attribute chosen_pages, " + std::to_string(attributes.chosen_pages);
  if (!inputs.Has(in::kPageBounds)) return inputs.ReportMissing(in::kPageBounds, "beside " + attribute);
  if (IsQuantized(CacheType(a))) {
    return inputs.ReportWrong(in::kPastKey, "data type " + TypeText(a.dtype) + " beside " + attribute +
                                                ": pages of quantized caches are not chosen");
  }
  const Tensor& past = inputs[in::kPageBounds];
  const int64_t pages = CeilDiv(a.past_capacity, attributes.page_rows);
  if (past.dtype != a.dtype || past.rank != 5 || past.dims[0] != a.B || past.dims[1] != a.G ||
      (past.dims[2] != 0 && past.dims[2] != pages) || past.dims[3] != 2 || past.dims[4] != a.D) {
    const std::string known = pages > 0 ? std::to_string(pages) + " (one for each " +
                                              std::to_string(attributes.page_rows) + " rows of past_key) or 0"
                                        : "0";
    return inputs.ReportWrong(in::kPageBounds, "[" + std::to_string(a.B) + ", " + std::to_string(a.G) + ", " + known +
                                                   ", 2, " + std::to_string(a.D) + "] and data type " +
                                                   TypeText(a.dtype));
  }
  a.page_bounds.rows = attributes.page_rows;
  a.page_bounds.past = past.data;
  a.page_bounds.past_pages = past.dims[2];
  a.page_bounds.pages = CeilDiv(a.capacity, attributes.page_rows);
  return Status();
}

Tensor PresentBoundsOf(const CacheAppendArgs& args) {
  return TensorOfShape(args.dtype, {args.B, args.G, args.page_bounds.pages, 2, args.D});
}

Status BindPresentBounds(const NamedInputs& inputs, const Tensor& present, CacheAppendArgs* args) {
  STOF_RETURN_IF_ERROR(CheckTensor(kPresentPageBounds, present, PresentBoundsOf(*args)));
  if (present.data == nullptr && HasElements(present)) {
    return Status::Error(std::string(kPresentPageBounds) + " has no data");
  }
  args->page_bounds.present = present.data;
  const Tensor& past = inputs[in::kPageBounds];
  if (!Overlap(past, present) || (past.data == present.data && past.dims[2] == present.dims[2])) return Status();
  return Status::Error(inputs.Name(in::kPageBounds) + " and " + kPresentPageBounds +
                       " overlap in memory, expected one buffer of one shape, or two");
}

PageChoice ChoiceOf(const CacheAppendArgs& args, int64_t chosen_pages) {
  PageChoice choice;
  const PageBounds& bounds = args.page_bounds;
  if (!bounds.given() || args.S > kMaxStepTokens || !AreScoresSkipped()) return choice;
  choice.chosen = chosen_pages;
  choice.rows = bounds.rows;
  choice.bounds = bounds.present;
  choice.stride_page = 2 * args.D;
  choice.stride_g = bounds.pages * choice.stride_page;
  choice.stride_b = args.G * choice.stride_g;
  return choice;
}

bool MayLeaveOut(const CacheAppendArgs& append, const PageChoice& choice, const int32_t* ends) {
  return choice.given() && StepOf(append, choice, ends).CanLeaveOut();
}

Status ChooseOnCpu(const CacheAppendArgs& append, const PageChoice& choice, bool is_plan, const RunContext& context,
                   AttentionArgs* attention, HostChoice* chosen) {
  AttentionArgs& args = *attention;
  const ChoosingStep step = StepOf(append, choice, args.kv.key_ends);
  // A state, the score and its copy of each page.
  const auto count = static_cast<size_t>(append.B * append.G * step.CountPages());
  void *states = nullptr, *memory = nullptr;
  STOF_RETURN_IF_ERROR(context.Allocate(count, &states));
  STOF_RETURN_IF_ERROR(context.Allocate(2 * count * sizeof(float), &memory));
  if (is_plan) {
    chosen->planned.resize(count);
    states = chosen->planned.data();
  }
  chosen->pages = std::make_unique<ChosenPages>(*args.mask.fixed.elements(), step, static_cast<uint8_t*>(states));
  ChosenPages& pages = *chosen->pages;
  args.kv.choice = choice;
  if (is_plan) {
    pages.ChooseApart(FewQueriesTile(choice));
  } else {
    const auto scores = static_cast<float*>(memory);
    if (pages.leaves_out()) CpuScorePages(args, pages.spans(), pages.pages(), scores, context.parallel);
    pages.Choose(scores, scores + count, context.parallel);
    SkipCounts counts;
    pages.CountPairs(&counts.scored, &counts.skipped);
    AddSkipCounts(counts);
  }
  args.mask.fixed = StaticMask::OfElements(pages.view());
  return Status();
}

}  // namespace stof
