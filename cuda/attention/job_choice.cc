// SPDX-License-Identifier: Apache-2.0
// Which kernel takes an attention: the one that was asked for, else what the models say.
#include <algorithm>
#include <cstring>
#include <string>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/job.h"
#include "cuda/attention/rowwise/api.h"

namespace stof {
namespace cuda {
namespace {

constexpr int kNarrowHead = 32;  // heads up to it would fill half of the 9.0 kernels' tiles with zeros

int Listed(const Sm90Kernel* first) {
  int count = 0;
  while (first[count].launch != nullptr) ++count;
  return count;
}

}  // namespace

Status AttentionJob::Count(int* kernels) {
  const Sm90Kernel* first = nullptr;
  STOF_RETURN_IF_ERROR(First(&first));
  *kernels = first == nullptr ? 0 : 1 + Listed(first);
  return Status();
}

Status AttentionJob::First(const Sm90Kernel** first) {
  STOF_RETURN_IF_ERROR(Facts(&facts_));
  *first = nullptr;
  if (facts_.capability != 90 || size_ <= kNarrowHead || !TakesBias(params_)) return Status();
  if (args_.dtype == DType::kF32) return Status();
  const Extras extras = args_.bias != nullptr ? Extras::kPairs : extras_ ? Extras::kDistances : Extras::kNone;
  const Sm90Kernel* kernels = FindSm90(size_, bf16_, extras);
  if (kernels->launch != nullptr) *first = kernels;
  return Status();
}

Status AttentionJob::Choose(const Sm90Kernel** kernel, Problem* problem) {
  const Sm90Kernel* first = nullptr;
  STOF_RETURN_IF_ERROR(First(&first));
  if (build_ == nullptr && !mask_.parts.fixed.empty()) problem->mask = &mask_.parts.fixed;
  problem->hash = mask_.fixed_hash;
  problem->sizes = {args_.B, args_.H, args_.S, args_.T, sizes_.P};
  problem->multiprocessors = facts_.multiprocessors;
  if (first == nullptr || context_.kernel == 1) return Status();
  if (context_.kernel == 0 && std::strcmp(args_.kernel, kSm80Name) == 0) return Status();
  const int64_t head = std::max<int64_t>(1, 2 * args_.T * (args_.D + args_.Dv));
  problem->section = std::max<int64_t>(1, facts_.l2_bytes / 2 / head) * (args_.H / args_.G);
  problem->sharing = args_.H / args_.G;
  problem->bytes = args_.B * args_.G * head;
  if (context_.kernel > 1 && context_.kernel <= 1 + Listed(first)) {
    *kernel = first + (context_.kernel - 2);
    return Status();
  }
  *kernel = Named(first, args_.kernel);
  if (*kernel != nullptr) return Status();
  if (build_ == nullptr) return Select(first, *problem, kernel);
  *kernel = SelectUnseen(first);
  return Status();
}

MaskForm AttentionJob::TilesForm() {
  MaskForm form;
  form.fragments = true;
  return form;
}

MaskForm AttentionJob::RowsForm() {
  MaskForm form;
  form.m = form.n = kRowsTile;
  return form;
}

MaskForm AttentionJob::DecodeForm() const {
  MaskForm form;
  form.m = kDecodeTileRows;
  const int64_t group = args_.H / args_.G;
  if (group * args_.S > kDecodeQueries) return form;
  form.group = group;
  form.multiprocessors = facts_.multiprocessors;
  return form;
}

Status AttentionJob::PrefersRows(const Sm90Kernel* kernel, const Problem& problem, bool* rows) const {
  *rows = false;
  if (problem.mask == nullptr || context_.kernel > 0 || *args_.kernel != '\0' || !ReadsVectors()) return Status();
  const int64_t item = SizeOf(args_.dtype);
  return SelectRows(problem, kernel, static_cast<int>(size_ * item), item == 4, rows);
}

bool AttentionJob::TakesDecode() const { return args_.S <= kDecodeQueries && ReadsVectors(); }

bool AttentionJob::ReadsVectors() const {
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
  DeviceFacts facts;
  STOF_RETURN_IF_ERROR(Facts(&facts));
  names->clear();
  if (dtype != DType::kF16 && dtype != DType::kBF16) return Status();
  if (head_size < 1 || head_size > 256) return Status::Error("head sizes must be 1 to 256");
  *names = std::string(kSm80Name) + " " + kRowsName;
  if (facts.capability != 90 || head_size <= kNarrowHead) return Status();
  const bool bf16 = dtype == DType::kBF16;
  for (const auto* kernel = FindSm90(static_cast<int>(head_size), bf16, Extras::kNone); kernel->launch != nullptr;
       ++kernel) {
    *names += " " + NameOf(*kernel);
  }
  return Status();
}

}  // namespace cuda
}  // namespace stof
