// SPDX-License-Identifier: Apache-2.0
// Parses the attributes of StofCachedAttention.
#include <cmath>

#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/host/quoted.h"
#include "plugins/core/ops/attribute_checks.h"
#include "plugins/core/ops/cached_attention/cached_attention.h"

namespace stof {
Status ParseCachedAttention(const AttributeReader& attributes, CachedAttentionAttributes* parsed) {
  CachedAttentionAttributes& a = *parsed;
  attributes.String("mask", &a.mask);
  attributes.String("kernel", &a.kernel);
  attributes.Float("scale", &a.scale);
  attributes.Float("softcap", &a.softcap);
  attributes.Float("qk_norm_epsilon", &a.epsilon);
  attributes.Int("num_heads", &a.num_heads);
  attributes.Int("kv_num_heads", &a.kv_num_heads);
  attributes.Int("sliding_window_cache", &a.sliding_window);
  attributes.Int("chosen_pages", &a.chosen_pages);
  attributes.Int("page_rows", &a.page_rows);
  STOF_RETURN_IF_ERROR(ParseFlag(attributes, "do_rotary", &a.do_rotary));
  STOF_RETURN_IF_ERROR(ParseFlag(attributes, "rotary_interleaved", &a.is_interleaved));
  STOF_RETURN_IF_ERROR(ParseFlag(attributes, "allow_bf16", &a.allow_bf16));
  STOF_RETURN_IF_ERROR(ParsePrecision(attributes, &a.precision));
  STOF_RETURN_IF_ERROR(ParseSkipThreshold(attributes, &a.skip_threshold));
  STOF_RETURN_IF_ERROR(ParseBlockThreshold(attributes, &a.block_threshold));
  STOF_RETURN_IF_ERROR(attributes.CheckTypes());
  if (!std::isfinite(a.scale)) return Status::Error("attribute scale is not finite");
  // The kernels multiply by these two and log2(e).
  constexpr float kMost = 1e30f, kLeast = 1e-30f;
  const bool caps = a.softcap != 0.0f;
  if (!std::isfinite(a.softcap) ||
      (caps && (a.softcap < kLeast || a.softcap > kMost || std::fabs(a.scale / a.softcap) > kMost))) {
    return UnexpectedAttribute("softcap", PrintFloat(a.softcap),
                               "0 or 1e-30 to 1e30, and no more than 1e30 times smaller than scale");
  }
  if (!std::isfinite(a.epsilon) || a.epsilon < 0.0f) {
    return UnexpectedAttribute("qk_norm_epsilon", PrintFloat(a.epsilon), "0 or more");
  }
  for (const auto& [name, heads] : {std::pair("num_heads", a.num_heads), std::pair("kv_num_heads", a.kv_num_heads)}) {
    if (heads >= 1 && heads <= AttentionLimits::kMostHeads) continue;
    return UnexpectedAttribute(name, heads, "1 to " + std::to_string(AttentionLimits::kMostHeads));
  }
  if (a.num_heads % a.kv_num_heads != 0) {
    return UnexpectedAttribute("num_heads", a.num_heads,
                               "a multiple of kv_num_heads, " + std::to_string(a.kv_num_heads));
  }
  if (a.sliding_window < 0 || a.sliding_window > AttentionLimits::kMostLength) {
    return UnexpectedAttribute("sliding_window_cache", a.sliding_window, "0 or a window of up to 2^22");
  }
  if (!AttentionLimits::IsChosenPages(a.chosen_pages)) {
    return UnexpectedAttribute("chosen_pages", a.chosen_pages, "0 to 4194304");
  }
  if (!AttentionLimits::IsPageRows(a.page_rows)) {
    return UnexpectedAttribute("page_rows", a.page_rows, "16, 32, 64 or 128");
  }
  if (a.chosen_pages > 0 && a.sliding_window > 0) {
    return UnexpectedAttribute("chosen_pages", a.chosen_pages,
                               "0 beside sliding_window_cache, whose rows move from page to page");
  }
  return Status();
}

}  // namespace stof
