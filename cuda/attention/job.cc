// SPDX-License-Identifier: Apache-2.0
// Runs an attention: the steps that all families of kernels share.
#include "cuda/attention/job.h"

#include <string>

#include "cuda/attention/families.h"
#include "cuda/common/status.h"

namespace stof {
namespace cuda {
namespace {

// The one place where arguments become what kernels take. Sizes fit 32 bits: CheckCudaAttention.
AttentionParams ToParams(const AttentionArgs& args) {
  const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
  const AttentionShape& shape = args.shape;
  const ScoreArgs& scores = args.scores;
  AttentionParams p;
  p.B = narrow(shape.B), p.H = narrow(shape.H), p.G = narrow(shape.G), p.S = narrow(shape.S), p.T = narrow(shape.T);
  p.D = narrow(shape.D), p.Dv = narrow(shape.Dv);
  p.query = args.query.data, p.query_stride = args.query.stride;
  p.key = args.key.data, p.key_stride = args.key.stride;
  p.value = args.value.data, p.value_stride = args.value.stride;
  p.scale = scores.scale, p.softcap = scores.softcap;
  p.bias = scores.bias.data;
  p.bias_is_float = scores.bias.dtype == DType::kF32 ? 1 : 0;
  p.bias_stride_b = scores.bias.stride_b, p.bias_stride_h = scores.bias.stride_h;
  p.bias_stride_q = scores.bias.stride_q, p.bias_stride_k = scores.bias.stride_k;
  p.relative_bias = scores.relative_bias.table;
  p.relative_bias_size = scores.relative_bias.size, p.relative_bias_stride_h = scores.relative_bias.stride_h;
  p.query_position = narrow(scores.relative_bias.query_position);
  p.sink = scores.sink.data;
  p.sink_is_float = scores.sink.dtype == DType::kF32 ? 1 : 0;
  p.empty_rows = static_cast<int32_t>(args.mask.empty_rows);
  p.output = args.output.data, p.output_stride = args.output.stride;
  p.lse = args.output.lse, p.lse_stride_b = args.output.lse_stride_b, p.lse_stride_h = args.output.lse_stride_h;
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
  if (args_.kv.pages.given()) return RunDecode();
  STOF_RETURN_IF_ERROR(Describe());
  if (args_.shape.T == 0) {  // without any key all rows are zeros, whatever the policy for fully masked rows
    params_.empty_rows = static_cast<int32_t>(EmptyRows::kZero);
    return RunTiled();
  }
  AttentionPlan plan;
  STOF_RETURN_IF_ERROR(ChooseForExistingKeys(&plan));
  return RunPlan(&plan);
}

Status AttentionJob::ChooseForExistingKeys(AttentionPlan* plan) {
  STOF_RETURN_IF_ERROR(Choose(plan));
  // A scheduled kernel leaves rows without an allowed key to RunTiledForEmptyRows, which binds the bias.
  if (plan->family->role == KernelRole::kScheduled || !BindExistenceBias()) return Status();
  return Choose(plan);
}

bool AttentionJob::BindExistenceBias() {
  if (args_.mask.existence_bias == nullptr || args_.mask.empty_rows != EmptyRows::kAll) return false;
  const int64_t T = args_.shape.T;
  params_.bias = args_.mask.existence_bias, params_.bias_is_float = 1;
  params_.bias_stride_b = T, params_.bias_stride_h = params_.bias_stride_q = 0, params_.bias_stride_k = 1;
  problem_.has_softcap_or_bias = problem_.has_full_bias = true;
  problem_.has_aligned_bias = T % 4 == 0;  // elements of 16 bytes
  return true;
}

Status AttentionJob::RunPlan(AttentionPlan* plan) {
  STOF_RETURN_IF_ERROR(plan->family->plan(this, plan));
  STOF_RETURN_IF_ERROR(PrintPlan(*plan));
  return plan->family->run(this, *plan);
}

Status AttentionJob::RunDecode() {
  STOF_RETURN_IF_ERROR(Describe());
  STOF_RETURN_IF_ERROR(AttentionRequests().Get(args_.kernel, context_.kernel, &request_));
  KernelTable kernels;
  AttentionPlan plan;
  plan.family = FindFamily(KernelRole::kDecode, problem_, &kernels);
  if (plan.family == nullptr) {
    return Status::Error("no decode kernel for head size " + std::to_string(problem_.head_size));
  }
  plan.kernel = kernels.begin();
  return RunPlan(&plan);
}

Status AttentionJob::Prepare() {
  pins_mask_ = context_.keeper != nullptr;
  STOF_RETURN_IF_ERROR(Describe());
  AttentionPlan plan;
  STOF_RETURN_IF_ERROR(ChooseForExistingKeys(&plan));
  return plan.family->prepare(this, *plan.kernel);
}

Status AttentionJob::RunTiled() {
  KernelTable kernels;
  AttentionPlan plan;
  plan.family = FindFamily(KernelRole::kTiled, problem_, &kernels);
  if (plan.family == nullptr) {
    return Status::Error("no CUDA kernel for head size " + std::to_string(problem_.head_size));
  }
  plan.kernel = kernels.begin();
  return RunPlan(&plan);
}

Status AttentionJob::RunTiledForEmptyRows(const uint32_t* pad_bits, int32_t* empty_flags) {
  BindExistenceBias();
  if (args_.mask.do_queries_exist_as_keys) {
    const AttentionShape& shape = args_.shape;
    STOF_RETURN_IF_ERROR(CheckLaunch(LaunchClearFlags(args_.mask.existence_bias + part_.row, shape.T, shape.B, shape.H,
                                                      shape.S, empty_flags, context_.stream)));
  }
  params_.pad_bits = pad_bits;
  params_.only_flagged = empty_flags;
  params_.lse = nullptr;  // already stored
  return RunTiled();
}

Status AttentionJob::PrepareTiled() {
  MaskForm form;
  form.fragments = true;
  return GetMask(form);
}

bool AttentionJob::empty_rows_attend_all() const { return AttendsAllKeys(args_.mask.empty_rows); }

bool AttentionJob::NeedsEmptyRowPass() const {
  const MaskEntry* const entry = mask_entry();
  const bool is_unknown = params_.has_mask != 0 && entry == nullptr;
  return empty_rows_attend_all() &&
         (pad_ != nullptr || args_.scores.bias.data != nullptr || args_.scores.relative_bias.table != nullptr ||
          is_unknown || (entry != nullptr && entry->empty_rows()));
}

}  // namespace cuda
}  // namespace stof
