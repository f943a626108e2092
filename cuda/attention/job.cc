// SPDX-License-Identifier: Apache-2.0
// Runs an attention: the steps that all families of kernels share.
#include "cuda/attention/job.h"

#include <string>

#include "cuda/attention/families.h"
#include "cuda/common/status.h"

namespace stof {
namespace cuda {
namespace {

AttentionParams ToParams(const AttentionArgs& args) {
  AttentionParams p;
  p.B = static_cast<int32_t>(args.B), p.H = static_cast<int32_t>(args.H), p.G = static_cast<int32_t>(args.G);
  p.S = static_cast<int32_t>(args.S), p.T = static_cast<int32_t>(args.T);
  p.D = static_cast<int32_t>(args.D), p.Dv = static_cast<int32_t>(args.Dv);
  p.query = args.query, p.key = args.key, p.value = args.value, p.output = args.output;
  p.query_stride = args.query_stride, p.key_stride = args.key_stride;
  p.value_stride = args.value_stride, p.output_stride = args.output_stride;
  p.scale = args.scale, p.softcap = args.softcap;
  p.empty_rows = static_cast<int32_t>(args.empty_rows);
  p.bias = args.bias;
  p.bias_is_float = args.bias_dtype == DType::kF32 ? 1 : 0;
  p.bias_stride_b = args.bias_stride_b, p.bias_stride_h = args.bias_stride_h;
  p.bias_stride_q = args.bias_stride_q, p.bias_stride_k = args.bias_stride_k;
  p.relative_bias = args.relative_bias;
  p.relative_bias_size = args.relative_bias_size, p.relative_bias_stride_h = args.relative_bias_stride_h;
  p.query_position = static_cast<int32_t>(args.query_position);
  p.sink = args.sink;
  p.sink_is_float = args.sink_dtype == DType::kF32 ? 1 : 0;
  p.lse = args.lse, p.lse_stride_b = args.lse_stride_b, p.lse_stride_h = args.lse_stride_h;
  return p;
}

}  // namespace

Status CheckLaunch(int error) { return ToStatus(static_cast<cudaError_t>(error), "launch of the attention kernel"); }

AttentionJob::AttentionJob(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask,
                           const ExprSizes& sizes, const Tables& operands, const MaskPart& part, DeviceBuild* build,
                           const RunContext& context)
    : args_(args),
      pad_(pad),
      mask_(mask),
      sizes_(sizes),
      operands_(operands),
      part_(part),
      build_(build),
      context_(context),
      stream_(static_cast<cudaStream_t>(context.stream)),
      params_(ToParams(args)) {}

Status AttentionJob::Run() {
  if (args_.pages.given()) return RunDecode();
  STOF_RETURN_IF_ERROR(Describe());
  if (args_.T == 0) {  // without any key all rows are zeros, whatever the policy for fully masked rows
    params_.empty_rows = static_cast<int32_t>(EmptyRows::kZero);
    return RunTiled();
  }
  KernelChoice choice;
  STOF_RETURN_IF_ERROR(Choose(&choice));
  return choice.family->run(this, *choice.kernel);
}

Status AttentionJob::RunDecode() {
  STOF_RETURN_IF_ERROR(Describe());
  STOF_RETURN_IF_ERROR(AttentionRequests().Get(args_.kernel, context_.kernel, &request_));
  KernelTable kernels;
  const KernelFamily* const family = FindFamily(KernelRole::kDecode, problem_, &kernels);
  if (family == nullptr) return Status::Error("no decode kernel for head size " + std::to_string(problem_.head_size));
  return family->run(this, kernels[0]);
}

Status AttentionJob::Prepare() {
  pins_mask_ = context_.keeper != nullptr;
  STOF_RETURN_IF_ERROR(Describe());
  KernelChoice choice;
  STOF_RETURN_IF_ERROR(Choose(&choice));
  return choice.family->prepare(this, *choice.kernel);
}

Status AttentionJob::RunTiled() {
  KernelTable kernels;
  const KernelFamily* const family = FindFamily(KernelRole::kTiled, problem_, &kernels);
  if (family == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(problem_.head_size));
  return family->run(this, kernels[0]);
}

Status AttentionJob::RunTiledForEmptyRows(const uint32_t* pad_bits, const int32_t* empty_flags) {
  params_.pad_bits = pad_bits;
  params_.only_flagged = empty_flags;
  params_.lse = nullptr;  // already stored
  return RunTiled();
}

Status AttentionJob::PrepareTiled() {
  std::shared_ptr<const MaskEntry> entry;
  MaskForm form;
  form.fragments = true;
  return GetMask(form, &params_, &entry);
}

bool AttentionJob::empty_rows_attend_all() const {
  return args_.empty_rows == EmptyRows::kMean || args_.empty_rows == EmptyRows::kAll;
}

bool AttentionJob::NeedsEmptyRowPass(bool has_mask, const MaskEntry* entry) const {
  const bool is_unknown = has_mask && entry == nullptr;
  return empty_rows_attend_all() && (pad_ != nullptr || args_.bias != nullptr || args_.relative_bias != nullptr ||
                                     is_unknown || (entry != nullptr && entry->empty_rows()));
}

}  // namespace cuda
}  // namespace stof
