// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/attention_padded_copies.h"

#include <algorithm>
#include <array>

#include "plugins/core/base/integers.h"
#include "plugins/core/ops/attention_sequences.h"

namespace stof {
namespace {

// The product of sizes, the last of which is the bytes of an element.
Status CountBytes(std::initializer_list<int64_t> sizes, size_t* bytes) {
  int64_t product = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return Status::Error("padded copies of more than 2^63 bytes");
  }
  *bytes = static_cast<size_t>(product);
  return Status();
}

// Multiples of the key tiles of all kernels (64, 96 and 128; no 96 for heads of up to 64 elements).
constexpr int64_t kKeyTilesOfSmallHeads = 128, kKeyTiles = 384;

// A placeholder address where nothing is read: aligned as device memory is.
constexpr uintptr_t kSomewhere = uintptr_t{1} << 20;

void* CountBlock(void* self, size_t bytes) {
  *static_cast<size_t*>(self) += static_cast<size_t>(RoundUp(static_cast<int64_t>(bytes), 64));
  return reinterpret_cast<void*>(kSomewhere);
}

}  // namespace

Status PaddedCopies::Bind(const AttentionAttributes& attributes, const Tensor* inputs, AttentionArgs* args) {
  const SequenceRoles& roles = attributes.sequences;
  if (!roles.given()) return Status();
  const auto& operands = attributes.operands;
  name_ = operands[static_cast<size_t>(roles.cumulative)];
  has_bias_ = std::find(operands.begin(), operands.end(), "bias") != operands.end();
  PaddedLength padded;
  STOF_RETURN_IF_ERROR(FindPaddedLength(attributes, inputs, &padded));
  if (padded.name.empty()) {
    return Status::Error(
        "no operand says how long a padded sequence is, expected pad, segment_k or a bias of all keys "
        "beside " +
        name_ + " on CUDA");
  }
  sequences_.starts = static_cast<const int32_t*>(inputs[kTypedInputs + roles.cumulative].data);
  if (roles.first_position >= 0) {
    sequences_.first_positions = static_cast<const int32_t*>(inputs[kTypedInputs + roles.first_position].data);
  }
  sequences_.B = args->shape.B, sequences_.rows = args->shape.T, sequences_.positions = padded.length;
  is_bound_ = true, has_queries_ = roles.has_queries, dtype_ = args->shape.dtype;
  args->shape.T = padded.length;
  if (has_queries_) args->shape.S = padded.length;
  args->scores.block_threshold = 0.0f;  // rows behind a sequence hold anything, and would be part of pooled queries
  return Status();
}

Status PaddedCopies::AllocateRows(const RunContext& context, int64_t heads, int64_t size, TensorView* view,
                                  SequenceRows* rows) {
  const int64_t T = sequences_.positions;
  rows->packed = const_cast<void*>(view->data);
  rows->packed_stride = view->stride;
  rows->heads = heads, rows->size = size, rows->dtype = dtype_;
  size_t bytes = 0;
  STOF_RETURN_IF_ERROR(CountBytes({sequences_.B, heads, T, size, SizeOf(dtype_)}, &bytes));
  STOF_RETURN_IF_ERROR(context.Allocate(bytes, &rows->padded));
  view->data = rows->padded;
  view->stride = {heads * T * size, T * size, size};
  return Status();
}

Status PaddedCopies::CheckEmptyRows(const AttentionArgs& args) const {
  // Keys that do not exist need a bias of their own.
  if (args.mask.empty_rows != EmptyRows::kAll || !has_bias_) return Status();
  return Status::Error("attribute empty_rows is 'all', expected zero, nan or mean beside bias and " + name_ +
                       " on CUDA");
}

Status PaddedCopies::Allocate(bool is_pad_alone, const RunContext& context, AttentionArgs* args, const Tensor** pad) {
  STOF_RETURN_IF_ERROR(CheckEmptyRows(*args));
  const AttentionShape& shape = args->shape;
  const EmptyRows empty_rows = args->mask.empty_rows;
  const bool attends_all = AttendsAllKeys(empty_rows);
  // Without biases, which may forbid keys by -inf, all rows of a sequence have an allowed key, or none has. Then marks
  // allow all keys that exist, and, where the result is their mean, every value is that: no row needs a second pass.
  const bool is_whole_or_none = is_pad_alone && !has_bias_ && args->scores.relative_bias.table == nullptr;
  if (attends_all && is_whole_or_none) {
    args->mask.empty_rows = EmptyRows::kZero;
    keys_.keeps_whole_sequences = true;
  }
  // Kernels use no forbidden keys, and no values of a tile without an allowed key. A second pass reads all of them, and
  // the kernels for few queries have other tiles.
  const bool has_second_pass = attends_all && !is_whole_or_none;
  const int64_t tile = std::max(shape.D, shape.Dv) <= 64 ? kKeyTilesOfSmallHeads : kKeyTiles;
  value_.tile = has_second_pass || !has_queries_ ? std::max<int64_t>(shape.T, 1) : tile;
  key_.tile = empty_rows == EmptyRows::kAll && has_second_pass ? std::max<int64_t>(shape.T, 1) : 1;
  void* memory = nullptr;
  size_t bytes = 0;
  if (empty_rows == EmptyRows::kMean) {
    STOF_RETURN_IF_ERROR(CountBytes({shape.B, shape.G, shape.Dv, SizeOf(dtype_)}, &bytes));
    STOF_RETURN_IF_ERROR(context.Allocate(bytes, &value_.means));
  }
  STOF_RETURN_IF_ERROR(AllocateRows(context, shape.G, shape.D, &args->key, &key_));
  STOF_RETURN_IF_ERROR(AllocateRows(context, shape.G, shape.Dv, &args->value, &value_));
  if (has_queries_) {
    STOF_RETURN_IF_ERROR(AllocateRows(context, shape.H, shape.D, &args->query, &query_));
    TensorView output = {args->output.data, args->output.stride};
    STOF_RETURN_IF_ERROR(AllocateRows(context, shape.H, shape.Dv, &output, &output_));
    args->output.data = const_cast<void*>(output.data);
    args->output.stride = output.stride;
  }
  if (*pad != nullptr) keys_.given = **pad;
  STOF_RETURN_IF_ERROR(CountBytes({shape.B, shape.T}, &bytes));
  STOF_RETURN_IF_ERROR(context.Allocate(bytes, &memory));
  keys_.pad = static_cast<uint8_t*>(memory);
  pad_.data = memory, pad_.dtype = DType::kU8, pad_.rank = 2;
  pad_.dims[0] = shape.B, pad_.dims[1] = shape.T;
  *pad = &pad_;
  if (!has_second_pass) return Status();
  STOF_RETURN_IF_ERROR(context.Allocate(4 * bytes, &memory));
  keys_.bias = static_cast<float*>(memory);
  args->mask.existence_bias = keys_.bias;
  args->mask.do_queries_exist_as_keys = has_queries_;
  return Status();
}

Status PaddedCopies::Unpack(const PackedSequencesBackend& backend, const RunContext& context) const {
  const std::array<SequenceRows, kMaxUnpackedTensors> tensors = {key_, value_, query_};
  return backend.unpack(sequences_, tensors.data(), has_queries_ ? 3 : 2, keys_, context);
}

Status PaddedCopies::Pack(const PackedSequencesBackend& backend, const RunContext& context) const {
  return has_queries_ ? backend.pack(sequences_, output_, context) : Status();
}

Status PlanPaddedCopies(bool is_pad_alone, PaddedCopies* copies, AttentionArgs* args, const Tensor** pad,
                        size_t* bytes) {
  RunContext context;
  context.on_cuda = true;
  context.allocate = CountBlock;
  context.self = bytes;
  *bytes = 0;
  return copies->Allocate(is_pad_alone, context, args, pad);
}

}  // namespace stof
