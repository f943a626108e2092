// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/attention_shapes.h"

#include <algorithm>
#include <cmath>

#include "plugins/core/ops/attention_sequences.h"

namespace stof {
namespace {

using Limits = AttentionLimits;

// Sizes of one tensor in problem terms: batch, heads, positions, head size, and the strides that reach them from the
// first element that is meant.
struct Sized {
  int64_t b = 0, heads = 0, s = 0, d = 0;
  Strides stride;
  int64_t first = 0;  // elements before it
};

Status Measure(const Tensor& tensor, TensorLayout layout, const char* name, int64_t heads, const PackedHeads& packed,
               Sized* sized) {
  const int rank = layout == TensorLayout::kBSN ? 3 : 4;
  if (tensor.rank != rank) {
    return Status::Error(std::string(name) + " has shape " + ShapeText(tensor) + ", expected rank " +
                         std::to_string(rank) + " for layout " + kLayoutNames[static_cast<int>(layout)]);
  }
  const int64_t* dims = tensor.dims;
  Sized& r = *sized;
  r.b = dims[0];
  int64_t total = 0;  // heads that the tensor has
  if (layout == TensorLayout::kBSN) {
    total = packed.total > 0 ? packed.total : heads;
    if (heads < 1 || dims[2] % total != 0) {
      return Status::Error(std::string(name) + " has shape " + ShapeText(tensor) +
                           ", expected a last dimension that its number of heads (" + std::to_string(total) +
                           ") divides");
    }
    r.s = dims[1];
    r.heads = heads;
    r.d = dims[2] / total;
    r.first = packed.first * r.d;
  } else {
    r.heads = dims[layout == TensorLayout::kBHSD ? 1 : 2];
    r.s = dims[layout == TensorLayout::kBHSD ? 2 : 1];
    r.d = dims[3];
    if (heads > 0 && r.heads != heads) {
      return Status::Error(std::string(name) + " has shape " + ShapeText(tensor) + ", expected " +
                           std::to_string(heads) + " heads");
    }
    if (packed.total > 0 && r.heads != packed.total) {
      return Status::Error(std::string(name) + " has shape " + ShapeText(tensor) + ", expected " +
                           std::to_string(packed.total) + " heads, as attribute packed says");
    }
    total = r.heads;
  }
  // Sizes are limited later; here no product may overflow.
  int64_t elements = std::max<int64_t>(r.d, 1);
  for (const int64_t size : {total, r.s}) {
    if (__builtin_mul_overflow(elements, std::max<int64_t>(size, 1), &elements)) {
      return Status::Error(std::string(name) + " has shape " + ShapeText(tensor) + ", which is too large");
    }
  }
  r.stride.b = total * r.s * r.d;
  r.stride.h = layout == TensorLayout::kBHSD ? r.s * r.d : r.d;
  r.stride.s = layout == TensorLayout::kBHSD ? r.d : total * r.d;
  return Status();
}

DimRule HeadsRule(const AttentionAttributes& attributes) {
  const TensorLayout query = attributes.layout[0];
  if (query != TensorLayout::kBSN) return {0, query == TensorLayout::kBHSD ? 1 : 2, -1};
  return {-1, 0, attributes.num_heads > 0 ? attributes.num_heads : -1};
}
DimRule LengthRule(const AttentionAttributes& attributes) {
  return {0, attributes.layout[0] == TensorLayout::kBHSD ? 2 : 1, -1};
}

// Gives packed tensors the batch size that their sequences have.
Status UnpackBatch(const AttentionAttributes& attributes, const Tensor* inputs, Sized* sized) {
  if (!attributes.sequences.given()) return Status();
  int64_t count = 0;
  STOF_RETURN_IF_ERROR(BindSequenceCount(attributes, inputs, &count));
  const std::string& role = attributes.operands[static_cast<size_t>(attributes.sequences.cumulative)];
  for (int i = attributes.sequences.has_queries ? 0 : 1; i < kTypedInputs; ++i) {
    if (sized[i].b != 1) {
      return Status::Error(std::string(kTensorNames[i]) + " has shape " + ShapeText(inputs[i]) +
                           ", expected batch size 1 beside " + role);
    }
    sized[i].b = count;
  }
  if (!attributes.sequences.has_queries && sized[0].b != count) {
    return Status::Error(role + " has shape " + ShapeText(inputs[kTypedInputs + attributes.sequences.cumulative]) +
                         ", expected one entry more than the batch size of query " + ShapeText(inputs[0]));
  }
  if (attributes.sequences.has_queries && sized[0].s != sized[1].s) {
    return Status::Error("query and key differ in length: query " + ShapeText(inputs[0]) + ", key " +
                         ShapeText(inputs[1]) + ", expected the same rows beside " + role);
  }
  return Status();
}

// The address of the first head that the operator reads; a tensor without elements may have no data.
const void* Begin(const Tensor& tensor, const Sized& sized) {
  if (tensor.data == nullptr || sized.b == 0 || sized.s == 0) return tensor.data;
  return static_cast<const char*>(tensor.data) + sized.first * SizeOf(tensor.dtype);
}

}  // namespace

Status BindQueryKeyValue(const AttentionAttributes& attributes, const Tensor* inputs, int input_count,
                         AttentionArgs* args) {
  if (input_count != kTypedInputs + static_cast<int>(attributes.operands.size())) {
    return Status::Error("has " + std::to_string(input_count) + " inputs, expected " +
                         std::to_string(kTypedInputs + attributes.operands.size()));
  }
  const DType dtype = inputs[0].dtype;
  if (!IsFloat(dtype)) {
    return Status::Error("query has data type " + TypeText(dtype) + ", expected fp32, fp16 or bf16");
  }
  Sized sized[3];
  for (int i = 0; i < 3; ++i) {
    if (inputs[i].dtype != dtype) {
      return Status::Error(std::string(kTensorNames[i]) + " has data type " + TypeText(inputs[i].dtype) +
                           ", expected that of query, " + TypeText(dtype));
    }
    const int64_t heads = i == 0 ? attributes.num_heads : attributes.kv_num_heads;
    STOF_RETURN_IF_ERROR(
        Measure(inputs[i], attributes.layout[i], kTensorNames[i], heads, attributes.packed[i], &sized[i]));
  }
  STOF_RETURN_IF_ERROR(UnpackBatch(attributes, inputs, sized));
  const Sized& q = sized[0];
  const Sized& k = sized[1];
  const Sized& v = sized[2];
  const auto shapes = [&] {
    return "query " + ShapeText(inputs[0]) + ", key " + ShapeText(inputs[1]) + ", value " + ShapeText(inputs[2]);
  };
  if (k.b != q.b || v.b != q.b) return Status::Error("batch sizes differ: " + shapes());
  if (k.heads != v.heads) return Status::Error("key and value differ in heads: " + shapes());
  if (k.s != v.s) return Status::Error("key and value differ in length: " + shapes());
  if (k.d != q.d) return Status::Error("query and key differ in head size: " + shapes());
  if (q.heads > 0 && (k.heads < 1 || q.heads % k.heads != 0)) {
    return Status::Error("the number of query heads is no multiple of that of key heads: " + shapes());
  }
  // The CPU takes every size that any target takes.
  const HeadSizes sizes = Limits::HeadSizesOf(Target::kCpu, dtype);
  if (!sizes.Has(q.d) || !sizes.Has(v.d)) {
    return Status::Error("head sizes must be 1 to " + std::to_string(sizes.largest) + ": " + shapes());
  }
  if (q.s > Limits::kMostLength || k.s > Limits::kMostLength) {
    return Status::Error("lengths must be at most 2^22: " + shapes());
  }
  // So that no product of sizes overflows: an empty tensor may have any batch size at no cost.
  if (q.b > Limits::kMostLength || q.heads > Limits::kMostHeads || k.heads > Limits::kMostHeads) {
    return Status::Error("batch size must be at most 2^22 and heads at most " + std::to_string(Limits::kMostHeads) +
                         ": " + shapes());
  }
  args->shape = {q.b, q.heads, k.heads, q.s, k.s, q.d, v.d, dtype};
  args->query = {Begin(inputs[0], q), q.stride};
  args->key = {Begin(inputs[1], k), k.stride};
  args->value = {Begin(inputs[2], v), v.stride};
  const int64_t H = q.heads, S = q.s, Dv = v.d;
  const bool bhsd = attributes.layout[3] == TensorLayout::kBHSD;
  args->output.stride = bhsd ? Strides{H * S * Dv, S * Dv, Dv} : Strides{H * S * Dv, Dv, H * Dv};
  args->scores.scale = attributes.scale.value_or(1.0f / std::sqrt(static_cast<float>(q.d)));
  args->scores.softcap = attributes.softcap;
  args->scores.skip_threshold = attributes.skip_threshold;
  args->scores.block_threshold = attributes.block_threshold;
  args->mask.empty_rows = attributes.empty_rows;
  args->allow_tf32 = attributes.allow_tf32;
  args->precision = attributes.precision;
  args->allow_bf16 = attributes.allow_bf16;
  args->kernel = attributes.kernel.c_str();
  return Status();
}

std::vector<DimRule> LseRules(const AttentionAttributes& attributes) {
  return {{0, 0, -1}, HeadsRule(attributes), LengthRule(attributes)};
}

std::vector<DimRule> OutputRules(const AttentionAttributes& attributes) {
  const DimRule batch = {0, 0, -1}, heads = HeadsRule(attributes), length = LengthRule(attributes);
  // Value's last dimension, divided by its number of heads in BSN.
  const bool flat = attributes.layout[2] == TensorLayout::kBSN;
  const int64_t value_heads = attributes.packed[2].total > 0 ? attributes.packed[2].total : attributes.kv_num_heads;
  DimRule head_size = flat ? DimRule{2, 2, -1, 1, value_heads} : DimRule{2, 3, -1};
  if (flat && value_heads == 0) head_size = {-1, 0, -1};
  switch (attributes.layout[3]) {
    case TensorLayout::kBHSD:
      return {batch, heads, length, head_size};
    case TensorLayout::kBSHD:
      return {batch, length, heads, head_size};
    default:
      break;
  }
  DimRule both = head_size;  // H · Dv
  if (attributes.num_heads > 0) {
    both.times = attributes.num_heads;
  } else if (heads.input < 0) {
    both = {-1, 0, -1};
  } else {
    both.by_input = heads.input;
    both.by_axis = heads.axis;
  }
  return {batch, length, both};
}

std::vector<DimRule> AttentionOutputShape(const AttributeReader& attributes, const int* ranks, int rank_count,
                                          int index) {
  AttentionAttributes parsed;
  if (rank_count < 3 || !ParseAttention(attributes, &parsed).ok()) return {};
  for (int i = 0; i < 3; ++i) {
    if (ranks[i] != (parsed.layout[i] == TensorLayout::kBSN ? 3 : 4)) return {};
  }
  if (index == 0) return OutputRules(parsed);
  return parsed.lse ? LseRules(parsed) : std::vector<DimRule>();
}

}  // namespace stof
