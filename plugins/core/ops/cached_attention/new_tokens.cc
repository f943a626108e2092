// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/cached_attention/new_tokens.h"

#include <string>

#include "plugins/core/contract/attention_limits.h"

namespace stof {

using Limits = AttentionLimits;

Status BindTokens(const NamedInputs& inputs, const TokenInputs& at, const CachedAttentionAttributes& attributes,
                  bool has_batch_axis, CacheAppendArgs* args) {
  if (!inputs.Has(at.query)) return Status::Error("query is missing");
  const Tensor& query = inputs[at.query];
  const int64_t H = attributes.num_heads, G = attributes.kv_num_heads;
  STOF_RETURN_IF_ERROR(inputs.CheckPair(at.key, at.value));
  const bool is_packed = !inputs.Has(at.key);
  const int64_t heads = is_packed ? H + 2 * G : H;
  const int rank = has_batch_axis ? 3 : 2;
  if (!IsFloat(query.dtype) || query.rank != rank || query.dims[rank - 1] % heads != 0) {
    return inputs.ReportWrong(at.query, std::string("fp32, fp16 or bf16 and [") +
                                            (has_batch_axis ? "B, S, " : "tokens, ") + std::to_string(heads) +
                                            " x head size]" + (is_packed ? ", packed as key is absent" : ""));
  }
  CacheAppendArgs& a = *args;
  const int64_t columns = query.dims[rank - 1];
  a.B = has_batch_axis ? query.dims[0] : 1, a.S = query.dims[rank - 2], a.D = columns / heads, a.H = H, a.G = G;
  a.dtype = query.dtype;
  const HeadSizes sizes = Limits::HeadSizesOf(Target::kCpu, a.dtype);
  if (!sizes.Has(a.D)) {
    return inputs.ReportWrong(at.query, "a head size of 1 to " + std::to_string(sizes.largest));
  }
  if (a.B > Limits::kMostLength || a.S > Limits::kMostLength) {
    return inputs.ReportWrong(at.query,
                              has_batch_axis ? "a batch and a length of at most 2^22" : "at most 2^22 tokens");
  }
  a.query = query.data;
  a.query_stride = {a.S * columns, a.D, columns};
  if (is_packed) {
    const int64_t bytes = SizeOf(a.dtype);
    const auto* data = static_cast<const char*>(query.data);
    a.key = data == nullptr ? nullptr : data + H * a.D * bytes;
    a.value = data == nullptr ? nullptr : data + (H + G) * a.D * bytes;
    a.key_stride = a.value_stride = a.query_stride;
    return Status();
  }
  for (const int i : {at.key, at.value}) {
    STOF_RETURN_IF_ERROR(has_batch_axis ? inputs.Check(i, a.dtype, {a.B, a.S, G * a.D})
                                        : inputs.Check(i, a.dtype, {a.S, G * a.D}));
  }
  a.key = inputs[at.key].data;
  a.value = inputs[at.value].data;
  a.key_stride = a.value_stride = {a.S * G * a.D, a.D, G * a.D};
  return Status();
}

Status BindTransforms(const NamedInputs& inputs, const TokenInputs& at, const CachedAttentionAttributes& attributes,
                      int64_t rotary_offset, CacheAppendArgs* args) {
  CacheAppendArgs& a = *args;
  STOF_RETURN_IF_ERROR(inputs.CheckPair(at.query_norm, at.key_norm));
  if (inputs.Has(at.query_norm)) {
    for (const int i : {at.query_norm, at.key_norm}) STOF_RETURN_IF_ERROR(inputs.Check(i, a.dtype, {a.D}));
    a.transform.query_norm = inputs[at.query_norm].data;
    a.transform.key_norm = inputs[at.key_norm].data;
    a.transform.epsilon = attributes.epsilon;
  }
  if (!attributes.do_rotary) return Status();
  for (const int i : {at.cos, at.sin}) {
    if (!inputs.Has(i)) return Status::Error(inputs.Name(i) + " is missing, expected it with do_rotary");
  }
  const Tensor& cos = inputs[at.cos];
  const int64_t most = (a.D - rotary_offset) / 2;
  if (cos.dtype != a.dtype || cos.rank != 2 || cos.dims[0] < 1 || cos.dims[1] < 1 || cos.dims[1] > most) {
    return inputs.ReportWrong(at.cos, "[positions, 1 to " + std::to_string(most) + "]" +
                                          (rotary_offset > 0 ? " (half of the elements from rotary_offset on)" : "") +
                                          " and data type " + TypeText(a.dtype));
  }
  STOF_RETURN_IF_ERROR(inputs.Check(at.sin, a.dtype, {cos.dims[0], cos.dims[1]}));
  a.transform.cos = cos.data;
  a.transform.sin = inputs[at.sin].data;
  a.transform.rotary_rows = cos.dims[0];
  a.transform.rotary_size = 2 * cos.dims[1];
  a.transform.rotary_offset = rotary_offset;
  a.transform.is_interleaved = attributes.is_interleaved;
  return Status();
}

}  // namespace stof
