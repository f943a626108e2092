// SPDX-License-Identifier: Apache-2.0
// The key bounds of pages of StofCachedAttention: input past_page_bounds, result present_page_bounds.
#ifndef STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_PAGE_BOUNDS_H_
#define STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_PAGE_BOUNDS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "plugins/core/contract/attention_args.h"
#include "plugins/core/contract/cached_attention.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/ops/cached_attention/cached_attention.h"
#include "plugins/core/ops/cached_attention/chosen_pages.h"
#include "plugins/core/ops/named_inputs.h"

namespace stof {

// Checks past_page_bounds against the attributes and the caches, which *args has, and binds it with the sizes of
// present_page_bounds. Without attribute chosen_pages there is neither.
Status BindPageBounds(const NamedInputs& inputs, const CachedAttentionAttributes& attributes, CacheAppendArgs* args);

// Type and shape of present_page_bounds. There are key bounds.
Tensor PresentBoundsOf(const CacheAppendArgs& args);

// Checks present_page_bounds, and binds its memory: past and present key bounds may be one buffer, and any other
// overlap would lose some.
Status BindPresentBounds(const NamedInputs& inputs, const Tensor& present, CacheAppendArgs* args);

// What attention behind the append step may leave out. Nothing where the step is longer than those that choose, or
// where STOF_SKIP_SCORES turns the choice off.
PageChoice ChoiceOf(const CacheAppendArgs& args, int64_t chosen_pages);

// The pages that a step on the CPU attends. It must stay where it is.
struct HostChoice {
  std::vector<uint8_t> planned;  // memory of plans, whose contexts give none
  std::unique_ptr<ChosenPages> pages;
};
// Whether a step may leave pages out of a cache with these lengths. ends: [B], the numbers of keys.
bool MayLeaveOut(const CacheAppendArgs& append, const PageChoice& choice, const int32_t* ends);
// Takes the pages that are not chosen from the mask of *attention, whose arguments are bound. is_plan: memory is
// counted alone, and tensors have no data.
Status ChooseOnCpu(const CacheAppendArgs& append, const PageChoice& choice, bool is_plan, const RunContext& context,
                   AttentionArgs* attention, HostChoice* chosen);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_PAGE_BOUNDS_H_
