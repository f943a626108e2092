// SPDX-License-Identifier: Apache-2.0
// Describes an attention for the choice of its kernel.
#include <algorithm>
#include <string>
#include <vector>

#include "cuda/attention/families.h"
#include "cuda/attention/int8/precision.h"
#include "cuda/attention/job.h"
#include "plugins/core/contract/attention_limits.h"

namespace stof {
namespace cuda {
namespace {

// Whether TMA can read the full bias, if there is one: contiguous keys, rows aligned to 16 bytes.
bool HasAlignedBias(const AttentionArgs& args) {
  const PairBias& bias = args.scores.bias;
  const AttentionShape& shape = args.shape;
  if (bias.data == nullptr) return true;
  const int64_t unit = bias.dtype == DType::kF32 ? 4 : 8;  // elements of 16 bytes
  const auto wrong = [unit](int64_t stride, int64_t count) { return count > 1 && stride % unit != 0; };
  return (bias.stride_k == 1 || shape.T == 1) && !wrong(bias.stride_q, shape.S) && !wrong(bias.stride_h, shape.H) &&
         !wrong(bias.stride_b, shape.B) && reinterpret_cast<uintptr_t>(bias.data) % 16 == 0;
}

}  // namespace

Status AttentionJob::Describe() {
  STOF_RETURN_IF_ERROR(GetDeviceProperties(&device_));
  if (device_.capability < 80) {
    return Status::Error("the device has compute capability " + std::to_string(device_.capability / 10) + "." +
                         std::to_string(device_.capability % 10) +
                         ", the CUDA kernels need 8.0 or later: run the model on the CPU provider");
  }
  KernelProblem& p = problem_;
  p.capability = device_.capability;
  p.dtype = args_.shape.dtype;
  p.kv_dtype = args_.shape.kv_dtype;
  p.head_size = static_cast<int>(std::max(args_.shape.D, args_.shape.Dv));
  p.queries = args_.shape.S;
  p.packed_queries = args_.shape.H / std::max<int64_t>(1, args_.shape.G) * args_.shape.S;
  p.has_softcap_or_bias =
      args_.scores.softcap > 0.0f || args_.scores.bias.data != nullptr || args_.scores.relative_bias.table != nullptr;
  p.has_full_bias = args_.scores.bias.data != nullptr;
  p.has_relative_terms = args_.scores.has_relative_tables() || args_.scores.relative_bias.factor != nullptr;
  // The plain kernels take the row max before the scale, which must be positive for that.
  p.has_positive_scale = args_.scores.scale > 0.0f;
  p.allows_tf32 = args_.allow_tf32;
  p.has_aligned_rows = HasAlignedRows(args_);
  p.has_aligned_bias = HasAlignedBias(args_);
  p.skips_scores = args_.scores.skip_threshold > 0.0f;
  // Padded keys are quantized as zeros, but fully masked rows may attend them. On 9.0 a second kernel computes these
  // rows in full precision; elsewhere the whole problem is computed so.
  const bool may_attend_padding = pad_ != nullptr && args_.mask.empty_rows == EmptyRows::kAll;
  p.precision = may_attend_padding && p.capability != 90 ? AttentionPrecision::kFull : Int8PrecisionOf(args_);

  SelectionProblem& s = selection_;
  s.is_mask_on_device = build_ != nullptr;
  if (build_ == nullptr && !mask_.parts.fixed.empty()) s.mask = &mask_.parts.fixed;
  s.hash = mask_.fixed_hash;
  s.sizes = {args_.shape.B, args_.shape.H, args_.shape.S, args_.shape.T, sizes_.P};
  s.group_size = args_.shape.H / std::max<int64_t>(1, args_.shape.G);
  s.l2_heads = L2HeadsOf(args_.shape, device_.l2_bytes);
  s.kv_bytes = args_.shape.B * args_.shape.G * KvHeadBytes(args_.shape);
  s.head_bytes = static_cast<int>(p.head_size * SizeOf(KvType(args_.shape)));
  s.is_fp32 = args_.shape.dtype == DType::kF32;
  s.sm_count = device_.sm_count;
  return Status();
}

Status AttentionJob::Choose(AttentionPlan* plan) {
  STOF_RETURN_IF_ERROR(AttentionRequests().Get(args_.kernel, context_.kernel, &request_));
  return ChooseKernel(request_, problem_, selection_, plan);
}

Status AttentionJob::PrintPlan(const AttentionPlan& plan) const {
  if (!ArePlansPrinted()) return Status();
  std::vector<AttentionPlan> plans;
  if (plan.family->role != KernelRole::kDecode) STOF_RETURN_IF_ERROR(ListPredictions(problem_, selection_, &plans));
  AttentionPlan chosen = plan;
  for (const AttentionPlan& other : plans) {
    if (other.kernel == plan.kernel) chosen.nanoseconds = other.nanoseconds;
  }
  std::vector<std::string> runners_up;
  for (const AttentionPlan& other : plans) {
    if (other.kernel != plan.kernel) runners_up.push_back(Print(other));
  }
  PrintChoice(Print(problem_, selection_), Print(chosen), runners_up);
  return Status();
}

Status AttentionJob::CountKernels(int* kernels) {
  STOF_RETURN_IF_ERROR(Describe());
  KernelTable scheduled;
  FindFamily(KernelRole::kScheduled, problem_, &scheduled);
  *kernels = scheduled.size() == 0 ? 0 : 1 + scheduled.size();
  return Status();
}

Status ListKernels(int64_t head_size, DType dtype, std::string* names) {
  DeviceProperties properties;
  STOF_RETURN_IF_ERROR(GetDeviceProperties(&properties));
  names->clear();
  if (dtype != DType::kF16 && dtype != DType::kBF16) return Status();
  // Kernels pad smaller sizes: only the largest one limits them here.
  const int64_t largest = AttentionLimits::HeadSizesOf(Target::kCuda, dtype).largest;
  if (head_size < 1 || head_size > largest) {
    return Status::Error("head sizes must be 1 to " + std::to_string(largest));
  }
  KernelProblem problem;
  problem.capability = properties.capability;
  problem.dtype = dtype;
  problem.head_size = static_cast<int>(head_size);
  for (const std::string& name : ListKernelNames(problem)) *names += (names->empty() ? "" : " ") + name;
  return Status();
}

}  // namespace cuda
}  // namespace stof
