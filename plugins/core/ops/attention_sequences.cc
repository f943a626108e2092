// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/attention_sequences.h"

#include <algorithm>
#include <cstring>

#include "plugins/core/ops/named_inputs.h"

namespace stof {
namespace {

using Limits = AttentionLimits;

constexpr const char* kSequenceLength = "cumulative_sequence_length";
constexpr const char* kKeyLength = "cumulative_key_length";
constexpr const char* kFirstPosition = "first_position";

int FindRole(const std::vector<std::string>& roles, const char* role) {
  const auto found = std::find(roles.begin(), roles.end(), role);
  return found == roles.end() ? -1 : static_cast<int>(found - roles.begin());
}

std::string At(const std::string& name, int64_t i, int64_t value) {
  return name + "[" + std::to_string(i) + "] is " + std::to_string(value);
}

// What messages call the rows of a sequence.
std::string CountOf(int64_t rows) { return std::to_string(rows) + (rows == 1 ? " row" : " rows"); }

// The length that an operand has along the keys, or along packed queries; -1: it says none.
int64_t LengthOf(const std::string& role, const Tensor& tensor, bool has_queries) {
  if (role == "pad" || role == "segment_k" || (role == "segment_q" && has_queries)) {
    return tensor.rank == 2 ? tensor.dims[1] : -1;
  }
  if (role == "relative_bias_factor" && has_queries) return tensor.rank == 3 ? tensor.dims[2] : -1;
  if (role != "bias" || tensor.rank < 1 || tensor.rank > 4) return -1;
  if (tensor.dims[tensor.rank - 1] > 1) return tensor.dims[tensor.rank - 1];
  const bool has_rows = has_queries && tensor.rank > 1 && tensor.dims[tensor.rank - 2] > 1;
  return has_rows ? tensor.dims[tensor.rank - 2] : -1;
}

}  // namespace

bool IsSequenceRole(const std::string& role) {
  return role == kSequenceLength || role == kKeyLength || role == kFirstPosition;
}

Status ParseSequences(AttentionAttributes* parsed) {
  const int queries = FindRole(parsed->operands, kSequenceLength), keys = FindRole(parsed->operands, kKeyLength);
  parsed->sequences.cumulative = std::max(queries, keys);
  parsed->sequences.first_position = FindRole(parsed->operands, kFirstPosition);
  parsed->sequences.has_queries = queries >= 0;
  if (queries >= 0 && keys >= 0) {
    return Status::Error(std::string("attribute operands names ") + kSequenceLength + " and " + kKeyLength +
                         ", expected one of them");
  }
  if (!parsed->sequences.given()) {
    if (parsed->sequences.first_position < 0) return Status();
    return Status::Error(std::string("attribute operands names ") + kFirstPosition + " alone, expected " +
                         kSequenceLength + " or " + kKeyLength + " beside it");
  }
  if (parsed->lse) {
    return Status::Error(std::string("attribute results is 'lse', expected nothing beside operand ") +
                         parsed->operands[static_cast<size_t>(parsed->sequences.cumulative)]);
  }
  return Status();
}

Status BindSequenceCount(const AttentionAttributes& attributes, const Tensor* inputs, int64_t* count) {
  const auto check = [&](int role, int64_t least) {
    const Tensor& tensor = inputs[kTypedInputs + role];
    const std::string& name = attributes.operands[static_cast<size_t>(role)];
    if (tensor.dtype == DType::kUndefined) return Status::Error("operand " + name + " is missing");
    if (tensor.dtype == DType::kI32 && tensor.rank == 1 && tensor.dims[0] >= least) return Status();
    return ReportWrongTensor(name, tensor, least > 0 ? "[B + 1] and int32" : "[B] and int32");
  };
  const SequenceRoles& roles = attributes.sequences;
  STOF_RETURN_IF_ERROR(check(roles.cumulative, 1));
  *count = inputs[kTypedInputs + roles.cumulative].dims[0] - 1;
  if (*count > Limits::kMostLength) {
    return Status::Error(attributes.operands[static_cast<size_t>(roles.cumulative)] + " has " +
                         std::to_string(*count + 1) + " entries, expected at most 2^22 + 1");
  }
  if (roles.first_position < 0) return Status();
  STOF_RETURN_IF_ERROR(check(roles.first_position, 0));
  const Tensor& first = inputs[kTypedInputs + roles.first_position];
  if (first.dims[0] == *count) return Status();
  return ReportWrongTensor(kFirstPosition, first, "[" + std::to_string(*count) + "], the number of sequences");
}

Status FindPaddedLength(const AttentionAttributes& attributes, const Tensor* inputs, PaddedLength* padded) {
  // pad and segment ids say it always, a bias where it does not broadcast: they come first.
  for (const bool is_bias : {false, true}) {
    for (size_t i = 0; i < attributes.operands.size() && padded->name.empty(); ++i) {
      const std::string& role = attributes.operands[i];
      if ((role == "bias") != is_bias) continue;
      const int64_t length = LengthOf(role, inputs[kTypedInputs + i], attributes.sequences.has_queries);
      if (length < 0) continue;
      padded->name = role;
      padded->length = length;
    }
  }
  if (padded->length <= Limits::kMostLength) return Status();
  return Status::Error(padded->name + " has " + std::to_string(padded->length) +
                       " positions, expected at most 2^22, the longest sequence");
}

Status HostSequences::Read(const AttentionAttributes& attributes, const Tensor* inputs, AttentionArgs* args) {
  const SequenceRoles& roles = attributes.sequences;
  if (!roles.given()) return Status();
  const auto B = static_cast<size_t>(args->shape.B);
  const std::string& name = attributes.operands[static_cast<size_t>(roles.cumulative)];
  const auto copy = [&](int role, size_t count, std::vector<int32_t>* to) {
    const auto* const data = static_cast<const int32_t*>(inputs[kTypedInputs + role].data);
    if (data == nullptr && count > 0) {
      return Status::Error(attributes.operands[static_cast<size_t>(role)] + " has no data");
    }
    to->assign(data, data + count);
    return Status();
  };
  has_queries_ = roles.has_queries;
  STOF_RETURN_IF_ERROR(copy(roles.cumulative, B + 1, &starts_));
  first_.assign(B, 0);
  if (roles.first_position >= 0) STOF_RETURN_IF_ERROR(copy(roles.first_position, B, &first_));
  rows_ = args->shape.T;
  STOF_RETURN_IF_ERROR(CheckStarts(name));
  for (size_t b = 0; b < B; ++b) {
    ends_.push_back(starts_[b + 1] - starts_[b]);
    longest_ = std::max<int64_t>(longest_, ends_.back());
    is_shifted_ = is_shifted_ || first_[b] != 0;
  }
  PaddedLength padded;
  STOF_RETURN_IF_ERROR(FindPaddedLength(attributes, inputs, &padded));
  STOF_RETURN_IF_ERROR(CheckPositions(name, padded));
  args->shape.T = padded.length;
  if (padded.name.empty()) {
    for (size_t b = 0; b < B; ++b) args->shape.T = std::max<int64_t>(args->shape.T, int64_t{first_[b]} + ends_[b]);
  }
  if (has_queries_) args->shape.S = args->shape.T;
  return Status();
}

Status HostSequences::CheckStarts(const std::string& name) const {
  if (starts_[0] != 0) return Status::Error(At(name, 0, starts_[0]) + ", expected 0");
  for (size_t b = 1; b < starts_.size(); ++b) {
    if (starts_[b] >= starts_[b - 1] && starts_[b] <= rows_) continue;
    // In a model of a fixed capacity.
    const char* const hint = starts_[b] > rows_ ? "; a model of fixed capacity needs a larger --unpad-capacity" : "";
    return Status::Error(At(name, static_cast<int64_t>(b), starts_[b]) + ", expected " +
                         std::to_string(starts_[b - 1]) + " (the entry before it) to " + std::to_string(rows_) +
                         " (the length of " + (has_queries_ ? "query" : "key") + ")" + hint);
  }
  return Status();
}

Status HostSequences::CheckPositions(const std::string& name, const PaddedLength& padded) const {
  const int64_t most = padded.name.empty() ? Limits::kMostLength : padded.length;
  const std::string limit =
      padded.name.empty() ? "expected at most 2^22 positions"
                          : "expected at most " + std::to_string(most) + " positions, the length of " + padded.name;
  for (size_t b = 0; b < ends_.size(); ++b) {
    const int64_t first = first_[b];
    if (first < 0) return Status::Error(At(kFirstPosition, static_cast<int64_t>(b), first) + ", expected 0 or more");
    if (first + ends_[b] <= most) continue;
    if (first > 0) {
      return Status::Error(At(kFirstPosition, static_cast<int64_t>(b), first) + " with " + CountOf(ends_[b]) +
                           " behind it, " + limit);
    }
    return Status::Error(At(name, static_cast<int64_t>(b) + 1, starts_[b + 1]) + ": sequence " + std::to_string(b) +
                         " has " + CountOf(ends_[b]) + ", " + limit);
  }
  return Status();
}

Status HostSequences::Bind(const RunContext& context, AttentionArgs* args) const {
  const int64_t T = args->shape.T;
  if (has_queries_) args->shape.S = longest_;
  args->shape.T = longest_;
  args->kv.key_ends = ends_.data();
  args->sequences = {starts_.data(), has_queries_, is_shifted_ ? first_.data() : nullptr};
  const uint8_t* const pad = args->mask.pad;
  args->mask.pad = nullptr;
  const auto begin = [&](size_t b) { return pad + static_cast<int64_t>(b) * T + first_[b]; };
  const auto is_forbidden = [&](size_t b) {
    return std::find(begin(b), begin(b) + ends_[b], 0) != begin(b) + ends_[b];
  };
  bool forbids = false;
  for (size_t b = 0; b < ends_.size() && pad != nullptr && !forbids; ++b) forbids = is_forbidden(b);
  if (!forbids) return Status();
  void* memory = nullptr;
  STOF_RETURN_IF_ERROR(context.Allocate(ends_.size() * static_cast<size_t>(longest_), &memory));
  auto* const own = static_cast<uint8_t*>(memory);
  for (size_t b = 0; b < ends_.size(); ++b) {
    std::copy(begin(b), begin(b) + ends_[b], own + b * static_cast<size_t>(longest_));
  }
  args->mask.pad = own;
  return Status();
}

void HostSequences::ClearRest(const AttentionArgs& args) const {
  if (!has_queries_ || starts_.back() == rows_) return;
  // Rows lie one behind the other: of each head, or with all heads in each of them.
  const AttentionShape& shape = args.shape;
  const Strides& stride = args.output.stride;
  const int64_t blocks = stride.s == shape.Dv ? shape.H : 1;
  const int64_t item = SizeOf(shape.dtype), rest = rows_ - starts_.back();
  for (int64_t block = 0; block < blocks; ++block) {
    char* const begin = static_cast<char*>(args.output.data) + (block * stride.h + starts_.back() * stride.s) * item;
    std::memset(begin, 0, static_cast<size_t>(rest * stride.s * item));
  }
}

}  // namespace stof
