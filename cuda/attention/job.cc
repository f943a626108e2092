// SPDX-License-Identifier: Apache-2.0
// Runs of an attention: the problem as a kernel takes it, what each kind of kernel is given beside, and the launch.
#include "cuda/attention/job.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/fp32/api.h"
#include "cuda/attention/rowwise/api.h"
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

// Whether a kernel finds little in the L2 cache of what it reads first: problems of more than three quarters of it.
// STOF_CUDA_COLD=1 is for tests, whose problems are small.
bool IsCold(int64_t bytes, int64_t l2_bytes) {
  static const bool always = [] {
    const char* const text = std::getenv("STOF_CUDA_COLD");
    return text != nullptr && std::strcmp(text, "1") == 0;
  }();
  return always || bytes > l2_bytes / 4 * 3;
}

Status Launched(int error) { return ToStatus(static_cast<cudaError_t>(error), "launch of the attention kernel"); }

}  // namespace

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
      params_(ToParams(args)) {
  // Without a positive scale the largest score is not the largest product.
  extras_ = args.softcap > 0.0f || args.bias != nullptr || args.relative_bias != nullptr || !(args.scale > 0.0f);
  bf16_ = args.dtype == DType::kBF16;
  size_ = static_cast<int>(std::max(args.D, args.Dv));
  all_keys_ = args.empty_rows == EmptyRows::kMean || args.empty_rows == EmptyRows::kAll;
}

Status AttentionJob::Run() {
  STOF_RETURN_IF_ERROR(Facts(&facts_));
  if (facts_.capability < 80) {
    return Status::Error("the device has compute capability " + std::to_string(facts_.capability / 10) + "." +
                         std::to_string(facts_.capability % 10) +
                         ", the CUDA kernels need 8.0 or later: run the model on the CPU provider");
  }
  if (args_.T == 0) {  // without any key all rows are zeros, whatever the policy says of forbidden ones
    params_.empty_rows = static_cast<int32_t>(EmptyRows::kZero);
    return args_.dtype == DType::kF32 ? RunFp32() : RunSm80();
  }
  if (std::strcmp(args_.kernel, kRowsName) == 0 && ReadsVectors()) return RunRows();
  if (TakesDecode()) return RunDecode();
  const Sm90Kernel* kernel = nullptr;
  Problem problem;
  STOF_RETURN_IF_ERROR(Choose(&kernel, &problem));
  bool rows = false;
  STOF_RETURN_IF_ERROR(PrefersRows(kernel, problem, &rows));
  if (rows) return RunRows();
  if (args_.dtype == DType::kF32) return RunFp32();
  if (kernel == nullptr) return RunSm80();
  Sm90Params params;
  params.attention = params_;
  if (!DescribeTensors(bf16_, kernel->rows, kernel->keys, &params)) return RunSm80();
  const MaskForm form = FormOf(*kernel, problem);
  const int64_t count = args_.B * args_.H * ((args_.S + kernel->rows - 1) / kernel->rows);
  params.halved = AreHalved(form.cost, count, form.workers) ? 1 : 0;
  params.workers = static_cast<int32_t>(std::min<int64_t>(form.workers, count << params.halved));
  params.section = static_cast<int32_t>(std::min<int64_t>(problem.section, std::numeric_limits<int32_t>::max()));
  const int64_t bytes = problem.bytes + 2 * args_.B * args_.H * args_.S * (args_.D + args_.Dv);
  params.cold = IsCold(bytes, facts_.l2_bytes) ? 1 : 0;
  std::shared_ptr<const MaskEntry> entry;
  STOF_RETURN_IF_ERROR(GetMask(form, &params.attention, &entry));
  if (entry != nullptr && entry->work() != nullptr) STOF_RETURN_IF_ERROR(TakePlan(*kernel, *entry, &params));
  // Rows without a key that take all keys are left to a second kernel.
  const bool unknown = params.attention.has_mask != 0 && entry == nullptr;
  const bool second = all_keys_ && (pad_ != nullptr || args_.bias != nullptr || args_.relative_bias != nullptr ||
                                    unknown || (entry != nullptr && entry->empty_rows()));
  STOF_RETURN_IF_ERROR(Prepare(second, &params.attention.pad_bits, &params.redo));
  STOF_RETURN_IF_ERROR(Launched(kernel->launch(params, stream_)));
  if (!second) return Status();
  params_.pad_bits = params.attention.pad_bits;
  params_.only = params.redo;
  params_.lse = nullptr;  // has been said
  return LaunchSm80();
}

Status AttentionJob::Ready() {
  keep_ = context_.keeper != nullptr;
  const Sm90Kernel* kernel = nullptr;
  Problem problem;
  STOF_RETURN_IF_ERROR(Choose(&kernel, &problem));
  std::shared_ptr<const MaskEntry> entry;
  if (TakesDecode()) return GetMask(DecodeForm(), &params_, &entry);
  bool rows = std::strcmp(args_.kernel, kRowsName) == 0 && ReadsVectors();
  if (!rows) STOF_RETURN_IF_ERROR(PrefersRows(kernel, problem, &rows));
  if (rows) return GetMask(RowsForm(), &params_, &entry);
  if (kernel != nullptr) STOF_RETURN_IF_ERROR(GetMask(FormOf(*kernel, problem), &params_, &entry));
  // Also beside an sm_90a kernel where the other one may come second.
  return kernel == nullptr || all_keys_ ? GetMask(TilesForm(), &params_, &entry) : Status();
}

Status AttentionJob::RunRows() {
  std::shared_ptr<const MaskEntry> entry;
  int32_t* unused = nullptr;
  STOF_RETURN_IF_ERROR(Prepare(false, &params_.pad_bits, &unused));
  STOF_RETURN_IF_ERROR(GetMask(RowsForm(), &params_, &entry));
  const bool biased = args_.softcap > 0.0f || args_.bias != nullptr || args_.relative_bias != nullptr;
  const Launch launch = FindRows(args_.dtype, size_, biased);
  if (launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(size_));
  return Launched(launch(params_, stream_));
}

Status AttentionJob::RunDecode() {
  DecodeParams params;
  std::shared_ptr<const MaskEntry> entry;
  int32_t* unused = nullptr;
  STOF_RETURN_IF_ERROR(Prepare(false, &params_.pad_bits, &unused));
  STOF_RETURN_IF_ERROR(GetMask(DecodeForm(), &params_, &entry));
  params.attention = params_;
  const int64_t group = args_.H / args_.G;
  params.stacked = entry != nullptr && entry->stacked() ? 1 : 0;
  const bool alike = params_.has_mask == 0 || params_.mask.layout_h == 1 || params.stacked != 0;
  params.heads = static_cast<int32_t>(alike ? group : 1);
  const int64_t packed = params.heads * args_.S;
  const DecodeKernel kernel = FindDecode(args_.dtype, size_, packed);
  if (kernel.launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(size_));
  const int64_t tiles = entry == nullptr ? (args_.T + kTileKeys - 1) / kTileKeys : entry->longest_row();
  const int64_t blocks = args_.B * args_.G * (group / params.heads) * ((packed + kernel.rows - 1) / kernel.rows);
  if (entry != nullptr && entry->one_row()) {
    params.row_begin = 0, params.row_full = entry->one_row_full(), params.row_end = static_cast<int32_t>(tiles);
  }
  const int item = args_.dtype == DType::kF32 ? 4 : 2;
  const ClusterKernel in_clusters = FindCluster(args_.dtype, size_, packed);
  int clusters[kClusterSizes] = {};
  if (facts_.capability >= 90) in_clusters.clusters(clusters);
  const DecodeChoice choice = ChooseDecode(kernel, params_, item, tiles, blocks, facts_.multiprocessors,
                                           in_clusters.streams, clusters, TakenKernel());
  params.splits = choice.splits;
  // Rows without a key that take all keys are found when the splits are joined, and get a second turn.
  const bool unknown = params_.has_mask != 0 && entry == nullptr;
  const bool second = all_keys_ && (pad_ != nullptr || args_.bias != nullptr || args_.relative_bias != nullptr ||
                                    unknown || (entry != nullptr && entry->empty_rows()));
  const int64_t rows = args_.B * args_.H * args_.S;
  // Where memory was planned ahead there may be too little for the splits that would be fastest.
  while ((params.splits > 1 && !choice.cluster) || second) {
    const int64_t parts = choice.cluster ? 0 : rows * params.splits;
    const int64_t sums = 4 * parts * args_.Dv, states = 8 * parts;
    const auto bytes = static_cast<size_t>(sums + states + 4 * rows);
    auto* memory = static_cast<char*>(Held(0, 2, bytes));
    if (memory == nullptr && parts > 0 && params.splits > 1) {
      params.splits /= 2;
      continue;
    }
    if (memory == nullptr) return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of sums");
    if (parts > 0) {
      params.state = reinterpret_cast<float*>(memory);
      params.partial = reinterpret_cast<float*>(memory + states);
    }
    if (second) params.empty_rows = reinterpret_cast<int32_t*>(memory + states + sums);
    break;
  }
  for (params.second = 0; params.second <= (second ? 1 : 0); ++params.second) {
    STOF_RETURN_IF_ERROR(Launched((choice.cluster ? in_clusters.launch : kernel.launch)(params, stream_)));
    if (params.partial != nullptr) STOF_RETURN_IF_ERROR(Launched(kernel.combine(params, stream_)));
    params.attention.lse = nullptr;  // has been said
  }
  return Status();
}

Status AttentionJob::RunFp32() {
  const Fp32Kernel kernel = FindFp32(size_, !args_.allow_tf32);
  if (kernel.launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(size_));
  Fp32Params params;
  std::shared_ptr<const MaskEntry> entry;
  int32_t* unused = nullptr;
  STOF_RETURN_IF_ERROR(Prepare(false, &params_.pad_bits, &unused));
  STOF_RETURN_IF_ERROR(GetMask(TilesForm(), &params_, &entry));
  params.attention = params_;
  const size_t bytes = Fp32WorkspaceBytes(kernel, params_);
  void* memory = bytes == 0 ? nullptr : Held(0, 0, bytes);
  if (bytes != 0 && memory == nullptr) {
    return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of split keys and values");
  }
  PlaceFp32Workspace(kernel, memory, &params);
  STOF_RETURN_IF_ERROR(Launched(kernel.split(params, stream_)));
  return Launched(kernel.launch(params, extras_, stream_));
}

Status AttentionJob::RunSm80() {
  int32_t* unused = nullptr;
  STOF_RETURN_IF_ERROR(Prepare(false, &params_.pad_bits, &unused));
  return LaunchSm80();
}

Status AttentionJob::LaunchSm80() {
  std::shared_ptr<const MaskEntry> entry;
  STOF_RETURN_IF_ERROR(GetMask(TilesForm(), &params_, &entry));
  const Launch launch = FindSm80(size_, bf16_, extras_);
  if (launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(size_));
  return Launched(launch(params_, stream_));
}

}  // namespace cuda
}  // namespace stof
