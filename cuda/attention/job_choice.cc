// SPDX-License-Identifier: Apache-2.0
// Chooses the kernel of an attention: the one that is named, else the fastest by the models.
#include <algorithm>
#include <cstring>
#include <string>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/job.h"
#include "cuda/attention/rowwise/api.h"
#include "plugins/core/contract/attention_limits.h"

namespace stof {
namespace cuda {
namespace {

constexpr int kNarrowHead = 32;  // narrower heads would fill half of the sm_90a kernels' tiles with zeros

int CountKernels(const Sm90Kernel* first) {
  int count = 0;
  while (first[count].launch != nullptr) ++count;
  return count;
}

}  // namespace

Status AttentionJob::Count(int* kernels) {
  const Sm90Kernel* first = nullptr;
  STOF_RETURN_IF_ERROR(First(&first));
  *kernels = first == nullptr ? 0 : 1 + CountKernels(first);
  return Status();
}

Status AttentionJob::First(const Sm90Kernel** first) {
  STOF_RETURN_IF_ERROR(GetDeviceProperties(&device_));
  *first = nullptr;
  if (device_.capability != 90 || head_size_ <= kNarrowHead || !CanReadBias(params_)) return Status();
  if (args_.dtype == DType::kF32) return Status();
  const ScoreMod score_mod = args_.bias != nullptr ? ScoreMod::kFullBias
                             : score_mod_          ? ScoreMod::kRelativeBias
                                                   : ScoreMod::kNone;
  const Sm90Kernel* kernels = FindSm90(head_size_, bf16_, score_mod);
  if (kernels->launch != nullptr) *first = kernels;
  return Status();
}

Status AttentionJob::Choose(const Sm90Kernel** kernel, SelectionProblem* problem) {
  const Sm90Kernel* first = nullptr;
  STOF_RETURN_IF_ERROR(First(&first));
  if (build_ == nullptr && !mask_.parts.fixed.empty()) problem->mask = &mask_.parts.fixed;
  problem->hash = mask_.fixed_hash;
  problem->sizes = {args_.B, args_.H, args_.S, args_.T, sizes_.P};
  problem->sm_count = device_.sm_count;
  if (first == nullptr || context_.kernel == 1) return Status();
  if (context_.kernel == 0 && std::strcmp(args_.kernel, kSm80Name) == 0) return Status();
  const int64_t head = std::max<int64_t>(1, 2 * args_.T * (args_.D + args_.Dv));
  problem->l2_heads = std::max<int64_t>(1, device_.l2_bytes / 2 / head) * (args_.H / args_.G);
  problem->group_size = args_.H / args_.G;
  problem->kv_bytes = args_.B * args_.G * head;
  if (context_.kernel > 1 && context_.kernel <= 1 + CountKernels(first)) {
    *kernel = first + (context_.kernel - 2);
    return Status();
  }
  *kernel = FindByName(first, args_.kernel);
  if (*kernel != nullptr) return Status();
  if (build_ == nullptr) return Select(first, *problem, kernel);
  *kernel = SelectForDeviceMask(first);
  return Status();
}

MaskForm AttentionJob::TiledForm() {
  MaskForm form;
  form.fragments = true;
  return form;
}

MaskForm AttentionJob::RowwiseForm() {
  MaskForm form;
  form.m = form.n = kRowwiseTile;
  return form;
}

MaskForm AttentionJob::DecodeForm() const {
  MaskForm form;
  form.m = kDecodeTileRows;
  const int64_t group = args_.H / args_.G;
  if (group * args_.S > kDecodeQueries) return form;
  form.group = group;
  form.multiprocessors = device_.sm_count;
  return form;
}

Status AttentionJob::PrefersRowwise(const Sm90Kernel* kernel, const SelectionProblem& problem, bool* rowwise) const {
  *rowwise = false;
  if (problem.mask == nullptr || context_.kernel > 0 || *args_.kernel != '\0' || !CanReadVectors()) return Status();
  const int64_t item = SizeOf(args_.dtype);
  return SelectRowwise(problem, kernel, static_cast<int>(head_size_ * item), item == 4, rowwise);
}

bool AttentionJob::PrefersDecode() const { return args_.S <= kDecodeQueries && CanReadVectors(); }

bool AttentionJob::CanReadVectors() const {
  if (args_.dtype != DType::kF32) return true;
  bool aligned = args_.D % 4 == 0 && args_.Dv % 4 == 0;
  for (const Strides* stride : {&args_.query_stride, &args_.key_stride, &args_.value_stride}) {
    aligned = aligned && stride->b % 4 == 0 && stride->h % 4 == 0 && stride->s % 4 == 0;
  }
  for (const void* base : {args_.query, args_.key, args_.value}) {
    aligned = aligned && reinterpret_cast<uintptr_t>(base) % 16 == 0;
  }
  return aligned;
}

Status KernelNames(int64_t head_size, DType dtype, std::string* names) {
  DeviceProperties properties;
  STOF_RETURN_IF_ERROR(GetDeviceProperties(&properties));
  names->clear();
  if (dtype != DType::kF16 && dtype != DType::kBF16) return Status();
  // Kernels pad smaller sizes: only the largest one limits them here.
  const int64_t largest = AttentionLimits::HeadSizesOf(Target::kCuda, dtype).largest;
  if (head_size < 1 || head_size > largest) {
    return Status::Error("head sizes must be 1 to " + std::to_string(largest));
  }
  *names = std::string(kSm80Name) + " " + kRowwiseName;
  if (properties.capability != 90 || head_size <= kNarrowHead) return Status();
  const bool bf16 = dtype == DType::kBF16;
  for (const auto* kernel = FindSm90(static_cast<int>(head_size), bf16, ScoreMod::kNone); kernel->launch != nullptr;
       ++kernel) {
    *names += " " + KernelName(*kernel);
  }
  return Status();
}

}  // namespace cuda
}  // namespace stof
