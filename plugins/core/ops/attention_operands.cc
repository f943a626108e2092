// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/attention_operands.h"

#include <algorithm>
#include <cstring>

#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/ops/attention_shapes.h"

namespace stof {
namespace {

Status BindRelativeBias(const Tensor& bias, const AttentionShape& shape, RelativeBias* bound) {
  if (bias.dtype != DType::kF32) {
    return Status::Error("relative_bias has data type " + TypeText(bias.dtype) + ", expected fp32");
  }
  if (bias.rank != 2 || (bias.dims[0] != 1 && bias.dims[0] != shape.H) || bias.dims[1] % 2 != 1) {
    return Status::Error("relative_bias has shape " + ShapeText(bias) + ", expected [1 or " + std::to_string(shape.H) +
                         ", an odd number]");
  }
  bound->table = static_cast<const float*>(bias.data);
  bound->size = bias.dims[1];
  bound->stride_h = bias.dims[0] == 1 ? 0 : bias.dims[1];
  return Status();
}

// relative_bias_factor, [B or 1, H or 1, S].
Status BindFactor(const Tensor& factor, const AttentionShape& shape, RelativeBias* bound) {
  if (factor.dtype != shape.dtype && factor.dtype != DType::kF32) {
    return Status::Error("relative_bias_factor has data type " + TypeText(factor.dtype) +
                         ", expected that of query or fp32");
  }
  if (factor.rank != 3 || (factor.dims[0] != 1 && factor.dims[0] != shape.B) ||
      (factor.dims[1] != 1 && factor.dims[1] != shape.H) || factor.dims[2] != shape.S) {
    return Status::Error("relative_bias_factor has shape " + ShapeText(factor) + ", expected [1 or " +
                         std::to_string(shape.B) + ", 1 or " + std::to_string(shape.H) + ", " +
                         std::to_string(shape.S) + "]");
  }
  bound->factor = factor.data;
  bound->factor_dtype = factor.dtype;
  bound->factor_stride_h = factor.dims[1] == 1 ? 0 : shape.S;
  bound->factor_stride_b = factor.dims[0] == 1 ? 0 : factor.dims[1] * shape.S;
  return Status();
}

// The vectors that rows of a table are multiplied with, or added to: their size, and the most rows.
struct RelativeKind {
  int64_t size = 0, most_rows = 0;
  bool has_row_bias = false;
};

Status BindRelativeTable(const std::string& role, const Tensor& table, const AttentionShape& shape,
                         const RelativeKind& kind, RelativeTable* bound) {
  if (table.dtype != shape.dtype && table.dtype != DType::kF32) {
    return Status::Error(role + " has data type " + TypeText(table.dtype) + ", expected that of query or fp32");
  }
  const int64_t least_rows = shape.S == 0 || shape.T == 0 ? 0 : 1;
  if (table.rank != 3 || (table.dims[0] != 1 && table.dims[0] != shape.H) || table.dims[1] < least_rows ||
      table.dims[1] > kind.most_rows ||
      (table.dims[2] != kind.size && !(kind.has_row_bias && table.dims[2] == kind.size + 1))) {
    const std::string columns =
        std::to_string(kind.size) + (kind.has_row_bias ? " or " + std::to_string(kind.size + 1) : std::string());
    return Status::Error(role + " has shape " + ShapeText(table) + ", expected [1 or " + std::to_string(shape.H) +
                         ", 1 to " + std::to_string(kind.most_rows) + ", " + columns + "]");
  }
  bound->data = table.data;
  bound->dtype = table.dtype;
  bound->rows = table.dims[1];
  bound->columns = table.dims[2];
  bound->stride_h = table.dims[0] == 1 ? 0 : table.dims[1] * table.dims[2];
  return Status();
}

Status BindRelative(const std::string& role, const Tensor& tensor, AttentionArgs* args) {
  ScoreArgs& scores = args->scores;
  if (role == "relative_bias") return BindRelativeBias(tensor, args->shape, &scores.relative_bias);
  if (role == "relative_bias_factor") return BindFactor(tensor, args->shape, &scores.relative_bias);
  const RelativeKind of_scores = {args->shape.D, AttentionLimits::kMostRelativeRows, true};
  const RelativeKind of_values = {args->shape.Dv, AttentionLimits::kMostRelativeValueRows, false};
  const auto bind = [&](const RelativeKind& kind, RelativeTable* table) {
    return BindRelativeTable(role, tensor, args->shape, kind, table);
  };
  if (role == "relative_key") return bind(of_scores, &scores.relative_key[0]);
  if (role == "relative_key1") return bind(of_scores, &scores.relative_key[1]);
  if (role == "relative_query") return bind(of_scores, &scores.relative_query);
  return role == "relative_value" ? bind(of_values, &args->relative_value) : Status();
}

template <typename T, typename NonZero>
void ToBytes(const void* data, int64_t count, uint8_t* bytes, NonZero non_zero) {
  const T* values = static_cast<const T*>(data);
  for (int64_t i = 0; i < count; ++i) bytes[i] = non_zero(values[i]) ? 1 : 0;
}

Status CheckPad(const Tensor& pad, int64_t B, int64_t T) {
  if (pad.rank != 2 || (pad.dims[0] != B && pad.dims[0] != 1) || pad.dims[1] != T) {
    return Status::Error("pad has shape " + ShapeText(pad) + ", expected [" + std::to_string(B) + ", " +
                         std::to_string(T) + "]");
  }
  if (!IsPadType(pad.dtype)) {
    return Status::Error("pad has data type " + TypeText(pad.dtype) +
                         ", expected bool, uint8, int8, int32, int64, fp32 or fp16");
  }
  return Status();
}

// pad [B or 1, T] of any legal type as bytes [B, T].
Status PadBytes(const Tensor& pad, int64_t B, int64_t T, const RunContext& context, uint8_t** bytes) {
  STOF_RETURN_IF_ERROR(CheckPad(pad, B, T));
  *bytes = static_cast<uint8_t*>(context.allocate(context.self, static_cast<size_t>(std::max<int64_t>(1, B * T))));
  if (*bytes == nullptr) return Status::Error("out of memory for pad");
  const int64_t count = pad.dims[0] * T;
  const auto plain = [](auto value) { return value != 0; };
  switch (pad.dtype) {
    case DType::kBool:
    case DType::kU8:
    case DType::kI8:
      ToBytes<uint8_t>(pad.data, count, *bytes, plain);
      break;
    case DType::kI32:
      ToBytes<int32_t>(pad.data, count, *bytes, plain);
      break;
    case DType::kI64:
      ToBytes<int64_t>(pad.data, count, *bytes, plain);
      break;
    case DType::kF32:
      ToBytes<float>(pad.data, count, *bytes, plain);
      break;
    case DType::kF16:
      ToBytes<uint16_t>(pad.data, count, *bytes, [](uint16_t x) { return (x & 0x7fff) != 0; });
      break;
    default:
      break;
  }
  for (int64_t b = 1; b < B && pad.dims[0] == 1; ++b) std::memcpy(*bytes + b * T, *bytes, static_cast<size_t>(T));
  return Status();
}

bool ReadsPad(const MaskExpr& expr) {
  const ExprOperands& operands = expr.operands();
  return std::any_of(operands.begin(), operands.end(), [](const auto& operand) { return operand->name == "pad"; });
}

}  // namespace

Status BindBias(const Tensor& bias, const AttentionShape& shape, PairBias* bound) {
  if (bias.dtype != shape.dtype && bias.dtype != DType::kF32) {
    return Status::Error("bias has data type " + TypeText(bias.dtype) + ", expected that of query or fp32");
  }
  const int64_t want[] = {shape.B, shape.H, shape.S, shape.T};
  int64_t* strides[] = {&bound->stride_b, &bound->stride_h, &bound->stride_q, &bound->stride_k};
  if (bias.rank > 4) return Status::Error("bias has shape " + ShapeText(bias) + ", expected rank 4 or less");
  int64_t stride = 1;
  for (int i = 0; i < bias.rank; ++i) {
    const int axis = 3 - i;
    const int64_t dim = bias.dims[bias.rank - 1 - i];
    if (dim != 1 && dim != want[axis]) {
      return Status::Error("bias has shape " + ShapeText(bias) + ", expected one that broadcasts to [" +
                           std::to_string(want[0]) + ", " + std::to_string(want[1]) + ", " + std::to_string(want[2]) +
                           ", " + std::to_string(want[3]) + "]");
    }
    *strides[axis] = dim == 1 ? 0 : stride;
    if (__builtin_mul_overflow(stride, dim, &stride)) {
      return Status::Error("bias has shape " + ShapeText(bias) + ", which is too large");
    }
  }
  bound->data = bias.data;
  bound->dtype = bias.dtype;
  return Status();
}

Status BindSink(const Tensor& sink, const AttentionShape& shape, SinkLogits* bound) {
  if (sink.dtype != shape.dtype && sink.dtype != DType::kF32) {
    return Status::Error("sink has data type " + TypeText(sink.dtype) + ", expected that of query or fp32");
  }
  if (sink.rank != 1 || sink.dims[0] != shape.H) {
    return Status::Error("sink has shape " + ShapeText(sink) + ", expected [" + std::to_string(shape.H) + "]");
  }
  bound->data = sink.data;
  bound->dtype = sink.dtype;
  return Status();
}

bool IsPadType(DType dtype) {
  static constexpr DType kTypes[] = {DType::kBool, DType::kU8,  DType::kI8, DType::kI32,
                                     DType::kI64,  DType::kF32, DType::kF16};
  return std::find(std::begin(kTypes), std::end(kTypes), dtype) != std::end(kTypes);
}

Status BindOperands(const MaskParts& parts, Tables* given, const RunContext& context, AttentionArgs* args,
                    const Tensor** pad) {
  bool pad_seen = false;
  for (auto& [role, tensor] : *given) {
    if (role == "unused") continue;
    if (tensor.dtype == DType::kUndefined) return Status::Error("operand " + role + " is missing");
    if (role == "bias") STOF_RETURN_IF_ERROR(BindBias(tensor, args->shape, &args->scores.bias));
    STOF_RETURN_IF_ERROR(BindRelative(role, tensor, args));
    if (role == "sink") STOF_RETURN_IF_ERROR(BindSink(tensor, args->shape, &args->scores.sink));
    if (role != "pad") continue;
    pad_seen = true;
    if (context.on_cuda) {
      STOF_RETURN_IF_ERROR(CheckPad(tensor, args->shape.B, args->shape.T));
      if (tensor.dtype == DType::kI8) tensor.dtype = DType::kU8;  // only whether it is 0 counts
      if (parts.pad) *pad = &tensor;
      continue;
    }
    uint8_t* bytes = nullptr;
    STOF_RETURN_IF_ERROR(PadBytes(tensor, args->shape.B, args->shape.T, context, &bytes));
    tensor.data = bytes;
    tensor.dtype = DType::kBool;
    tensor.dims[0] = args->shape.B;
    if (parts.pad) args->mask.pad = bytes;
  }
  if (pad_seen && !parts.pad && !ReadsPad(parts.dynamic)) {
    return Status::Error("operand pad is given, but the mask does not read pad[b, k]: add it, or name the role unused");
  }
  if (parts.pad && !pad_seen) return Status::Error("the mask reads pad, but no operand has that role");
  return Status();
}

}  // namespace stof
