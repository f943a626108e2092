// SPDX-License-Identifier: Apache-2.0
// Device memory of an attention: its block mask, packed padding, tile schedule and workspace.
#include <algorithm>
#include <string>

#include "cuda/attention/job.h"
#include "cuda/common/graph_capture.h"
#include "cuda/common/status.h"

namespace stof {
namespace cuda {

Status Clear(void* memory, size_t bytes, cudaStream_t stream) {
  if (IsOnlyLoading()) return Status();
  return ToStatus(cudaMemsetAsync(memory, 0, bytes, stream), "clearing of flags");
}

Status AttentionJob::GetMask(const MaskForm& form) {
  mask_entry_.reset();
  if (build_ == nullptr) {
    if (mask_.parts.fixed.empty() || args_.shape.T == 0) return Status();  // there is no pair to mask
    bool missing = false;
    STOF_RETURN_IF_ERROR(DeviceMaskCache::Global().Get(mask_.parts.fixed, mask_.fixed_hash, sizes_, form, stream_,
                                                       context_.keeper, pins_mask_, &mask_entry_, &missing));
    if (!missing) {
      params_.has_mask = 1;
      params_.mask = mask_entry_->view();
      return Status();
    }
    // A captured stream cannot upload the mask: the graph builds it.
    build_ = &own_build_;
    const Status status = CompileMask(mask_.parts.fixed, MaskExpr(), sizes_, operands_, &own_build_.program);
    if (!status.ok()) {
      return Status::Error(
          "no block mask for these sizes is on the device yet, and none can be made while a graph is captured (" +
          status.message() + "): run once with the same shapes before capturing");
    }
  }
  return MakeMask(form);
}

Status AttentionJob::GetColumns(const KeyColumns& columns) {
  if (columns.length() < args_.shape.T) {
    return Status::Error("key columns of " + std::to_string(columns.length()) + " keys, expected those of " +
                         std::to_string(args_.shape.T));
  }
  STOF_RETURN_IF_ERROR(GetDeviceColumns(columns, context_, &columns_));
  return columns_ != nullptr ? Status()
                             : Status::Error("key columns are not on the device, and the stream is captured");
}

Status AttentionJob::GetRelativeRows() {
  for (int i = 0; i < kRelativeTerms; ++i) {
    const RelativeTable& table = RelativeTermOf(args_.scores, i);
    if (!table.given()) continue;
    auto* const entry = &relative_rows_.terms[i];
    STOF_RETURN_IF_ERROR(GetDeviceRows(table.index, sizes_.S, sizes_.T, context_, entry));
    if (*entry != nullptr || IsOnlyLoading()) continue;
    return Status::Error(std::string("the rows that ") + kRelativeTermNames[i] +
                         " names for these sizes are not on the device yet, and none can be copied while a graph is "
                         "captured: run once with the same shapes before capturing");
  }
  return Status();
}

void* AttentionJob::GetWorkspace(int m, int n, size_t bytes) {
  if (build_ == nullptr) return context_.allocate(context_.self, bytes);
  for (const DeviceBuild::Memory& held : build_->memory) {
    if (held.m == m && held.n == n && held.bytes >= bytes) return held.data;
  }
  void* memory = context_.allocate(context_.self, bytes);
  if (memory != nullptr) build_->memory.push_back({m, n, bytes, memory});
  return memory;
}

Status AttentionJob::MakeMask(const MaskForm& form) {
  MaskBuild build;
  build.program = &build_->program;
  build.sizes = sizes_;
  build.part = part_;
  build.tile = {form.m, form.n, form.fragments};
  build.sm_count = device_.sm_count;
  build.invalid = build_->invalid;
  if (!IsCountable(build)) {
    return Status::Error("more than 2^29 tiles in a block mask: S × T is too large for a mask in one piece");
  }
  const size_t bytes = MaskBytes(build);
  if (build_ == &own_build_ && bytes > static_cast<size_t>(kMostMaskBytes)) {
    return Status::TooLarge("a block mask of " + std::to_string(bytes) + " bytes, expected at most " +
                            std::to_string(kMostMaskBytes) + " in one piece");
  }
  void* memory = GetWorkspace(form.m, form.n, bytes);
  if (memory == nullptr) {
    return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of a block mask");
  }
  const int error = LaunchMaskBuild(build, memory, stream_, &params_.mask);
  params_.has_mask = 1;
  return ToStatus(static_cast<cudaError_t>(error), "launch of the kernels that build a block mask");
}

Status AttentionJob::PreparePadding() {
  int32_t* unused = nullptr;
  return params_.pad_bits != nullptr ? Status() : PreparePadding(false, &params_.pad_bits, &unused);
}

Status AttentionJob::PreparePadding(bool flags, const uint32_t** pad_bits, int32_t** empty_flags) {
  if (pad_ == nullptr && !flags) return Status();
  const int64_t tiles = pad_ == nullptr ? 0 : (args_.shape.T + kTileKeys - 1) / kTileKeys;
  const int64_t flag_count =
      flags ? args_.shape.B * args_.shape.H * ((args_.shape.S + kRowsPerFlag - 1) / kRowsPerFlag) : 0;
  const int64_t bit_bytes = args_.shape.B * tiles * kTileKeys / 8;
  const auto bytes = static_cast<size_t>(std::max<int64_t>(1, bit_bytes + 4 * flag_count));
  auto* memory = static_cast<char*>(GetWorkspace(0, 1, bytes));
  if (memory == nullptr) return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of padding");
  auto* bits = reinterpret_cast<uint32_t*>(memory);
  auto* cleared = reinterpret_cast<int32_t*>(memory + bit_bytes);
  if (flags) *empty_flags = cleared;
  if (pad_ == nullptr) {
    return Clear(cleared, static_cast<size_t>(4 * flag_count), stream_);
  }
  *pad_bits = bits;
  const int error = LaunchPadBits(pad_->data, pad_->dtype, pad_->dims[0], args_.shape.B, args_.shape.T, bits, cleared,
                                  flag_count, stream_);
  return ToStatus(static_cast<cudaError_t>(error), "launch of the padding kernel");
}

}  // namespace cuda
}  // namespace stof
