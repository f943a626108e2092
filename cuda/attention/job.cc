// SPDX-License-Identifier: Apache-2.0
// Runs an attention: sets each kernel's parameters and launches it.
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

// Whether the problem is so large that L2 is cold: little of what a kernel reads first is in it, as the previous kernel
// has evicted it. STOF_CUDA_COLD=1 is for tests, whose problems are small.
bool IsL2Cold(int64_t bytes, int64_t l2_bytes) {
  static const bool always = [] {
    const char* const text = std::getenv("STOF_CUDA_COLD");
    return text != nullptr && std::strcmp(text, "1") == 0;
  }();
  return always || bytes > l2_bytes / 4 * 3;
}

Status LaunchStatus(int error) { return ToStatus(static_cast<cudaError_t>(error), "launch of the attention kernel"); }

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
  // The plain kernels take the row max before the scale, which must be positive for that.
  score_mod_ = args.softcap > 0.0f || args.bias != nullptr || args.relative_bias != nullptr || !(args.scale > 0.0f);
  bf16_ = args.dtype == DType::kBF16;
  head_size_ = static_cast<int>(std::max(args.D, args.Dv));
  empty_rows_attend_all_ = args.empty_rows == EmptyRows::kMean || args.empty_rows == EmptyRows::kAll;
}

Status AttentionJob::Run() {
  STOF_RETURN_IF_ERROR(GetDeviceProperties(&device_));
  if (device_.capability < 80) {
    return Status::Error("the device has compute capability " + std::to_string(device_.capability / 10) + "." +
                         std::to_string(device_.capability % 10) +
                         ", the CUDA kernels need 8.0 or later: run the model on the CPU provider");
  }
  if (args_.T == 0) {  // without any key all rows are zeros, whatever the policy for fully masked rows
    params_.empty_rows = static_cast<int32_t>(EmptyRows::kZero);
    return args_.dtype == DType::kF32 ? RunFp32() : RunSm80();
  }
  if (std::strcmp(args_.kernel, kRowwiseName) == 0 && CanReadVectors()) return RunRowwise();
  if (PrefersDecode()) return RunDecode();
  const Sm90Kernel* kernel = nullptr;
  SelectionProblem problem;
  STOF_RETURN_IF_ERROR(Choose(&kernel, &problem));
  bool rowwise = false;
  STOF_RETURN_IF_ERROR(PrefersRowwise(kernel, problem, &rowwise));
  if (rowwise) return RunRowwise();
  if (args_.dtype == DType::kF32) return RunFp32();
  if (kernel == nullptr) return RunSm80();
  Sm90Params params;
  params.attention = params_;
  if (!MakeTensorMaps(bf16_, kernel->rows, kernel->keys, &params)) return RunSm80();
  const MaskForm form = MaskFormOf(*kernel, problem);
  const int64_t count = args_.B * args_.H * ((args_.S + kernel->rows - 1) / kernel->rows);
  params.half_tiles = UsesHalfTiles(form.cost, count, form.ctas) ? 1 : 0;
  params.ctas = static_cast<int32_t>(std::min<int64_t>(form.ctas, count << params.half_tiles));
  params.l2_heads = static_cast<int32_t>(std::min<int64_t>(problem.l2_heads, std::numeric_limits<int32_t>::max()));
  const int64_t bytes = problem.kv_bytes + 2 * args_.B * args_.H * args_.S * (args_.D + args_.Dv);
  params.cold_l2 = IsL2Cold(bytes, device_.l2_bytes) ? 1 : 0;
  std::shared_ptr<const MaskEntry> entry;
  STOF_RETURN_IF_ERROR(GetMask(form, &params.attention, &entry));
  if (entry != nullptr && entry->tiles() != nullptr) STOF_RETURN_IF_ERROR(SetSchedule(*kernel, *entry, &params));
  // Fully masked rows that attend all keys are left to a second kernel.
  const bool unknown = params.attention.has_mask != 0 && entry == nullptr;
  const bool second =
      empty_rows_attend_all_ && (pad_ != nullptr || args_.bias != nullptr || args_.relative_bias != nullptr ||
                                 unknown || (entry != nullptr && entry->empty_rows()));
  STOF_RETURN_IF_ERROR(PreparePadding(second, &params.attention.pad_bits, &params.empty_flags));
  STOF_RETURN_IF_ERROR(LaunchStatus(kernel->launch(params, stream_)));
  if (!second) return Status();
  params_.pad_bits = params.attention.pad_bits;
  params_.only_flagged = params.empty_flags;
  params_.lse = nullptr;  // already stored
  return LaunchSm80();
}

Status AttentionJob::Ready() {
  pins_mask_ = context_.keeper != nullptr;
  const Sm90Kernel* kernel = nullptr;
  SelectionProblem problem;
  STOF_RETURN_IF_ERROR(Choose(&kernel, &problem));
  std::shared_ptr<const MaskEntry> entry;
  if (PrefersDecode()) return GetMask(DecodeForm(), &params_, &entry);
  bool rowwise = std::strcmp(args_.kernel, kRowwiseName) == 0 && CanReadVectors();
  if (!rowwise) STOF_RETURN_IF_ERROR(PrefersRowwise(kernel, problem, &rowwise));
  if (rowwise) return GetMask(RowwiseForm(), &params_, &entry);
  if (kernel != nullptr) STOF_RETURN_IF_ERROR(GetMask(MaskFormOf(*kernel, problem), &params_, &entry));
  // An sm_90a kernel may be followed by the sm_80 kernel for fully masked rows.
  return kernel == nullptr || empty_rows_attend_all_ ? GetMask(TiledForm(), &params_, &entry) : Status();
}

Status AttentionJob::RunRowwise() {
  std::shared_ptr<const MaskEntry> entry;
  int32_t* unused = nullptr;
  STOF_RETURN_IF_ERROR(PreparePadding(false, &params_.pad_bits, &unused));
  STOF_RETURN_IF_ERROR(GetMask(RowwiseForm(), &params_, &entry));
  const bool biased = args_.softcap > 0.0f || args_.bias != nullptr || args_.relative_bias != nullptr;
  const Launch launch = FindRowwise(args_.dtype, head_size_, biased);
  if (launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(head_size_));
  return LaunchStatus(launch(params_, stream_));
}

Status AttentionJob::RunDecode() {
  DecodeParams params;
  std::shared_ptr<const MaskEntry> entry;
  int32_t* unused = nullptr;
  STOF_RETURN_IF_ERROR(PreparePadding(false, &params_.pad_bits, &unused));
  STOF_RETURN_IF_ERROR(GetMask(DecodeForm(), &params_, &entry));
  params.attention = params_;
  const int64_t group = args_.H / args_.G;
  params.stacked = entry != nullptr && entry->stacked() ? 1 : 0;
  const bool alike = params_.has_mask == 0 || params_.mask.layout_h == 1 || params.stacked != 0;
  params.heads = static_cast<int32_t>(alike ? group : 1);
  const int64_t packed = params.heads * args_.S;
  const DecodeKernel kernel = FindDecode(args_.dtype, head_size_, packed);
  if (kernel.launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(head_size_));
  const int64_t tiles = entry == nullptr ? (args_.T + kTileKeys - 1) / kTileKeys : entry->longest_row();
  const int64_t blocks = args_.B * args_.G * (group / params.heads) * ((packed + kernel.rows - 1) / kernel.rows);
  if (entry != nullptr && entry->one_row()) {
    params.row_begin = 0, params.row_full = entry->one_row_full(), params.row_end = static_cast<int32_t>(tiles);
  }
  const int item = args_.dtype == DType::kF32 ? 4 : 2;
  const ClusterKernel in_clusters = FindCluster(args_.dtype, head_size_, packed);
  int clusters[kClusterSizes] = {};
  if (device_.capability >= 90) in_clusters.clusters(clusters);
  const DecodeChoice choice = ChooseDecode(kernel, params_, item, tiles, blocks, device_.sm_count,
                                           in_clusters.tiles_at_once, clusters, ForcedKernel());
  params.splits = choice.splits;
  // The combine step finds fully masked rows; if they attend all keys, a second pass computes them.
  const bool unknown = params_.has_mask != 0 && entry == nullptr;
  const bool second =
      empty_rows_attend_all_ && (pad_ != nullptr || args_.bias != nullptr || args_.relative_bias != nullptr ||
                                 unknown || (entry != nullptr && entry->empty_rows()));
  const int64_t rows = args_.B * args_.H * args_.S;
  // A workspace of fixed size may be too small for the fastest number of splits.
  while ((params.splits > 1 && !choice.cluster) || second) {
    const int64_t parts = choice.cluster ? 0 : rows * params.splits;
    const int64_t sums = 4 * parts * args_.Dv, states = 8 * parts;
    const auto bytes = static_cast<size_t>(sums + states + 4 * rows);
    auto* memory = static_cast<char*>(GetWorkspace(0, 2, bytes));
    if (memory == nullptr && parts > 0 && params.splits > 1) {
      params.splits /= 2;
      continue;
    }
    if (memory == nullptr)
      return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of split outputs");
    if (parts > 0) {
      params.split_stats = reinterpret_cast<float*>(memory);
      params.split_output = reinterpret_cast<float*>(memory + states);
    }
    if (second) params.empty_rows = reinterpret_cast<int32_t*>(memory + states + sums);
    break;
  }
  for (params.second_pass = 0; params.second_pass <= (second ? 1 : 0); ++params.second_pass) {
    STOF_RETURN_IF_ERROR(LaunchStatus((choice.cluster ? in_clusters.launch : kernel.launch)(params, stream_)));
    if (params.split_output != nullptr) STOF_RETURN_IF_ERROR(LaunchStatus(kernel.combine(params, stream_)));
    params.attention.lse = nullptr;  // already stored
  }
  return Status();
}

Status AttentionJob::RunFp32() {
  const Fp32Kernel kernel = FindFp32(head_size_, !args_.allow_tf32);
  if (kernel.launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(head_size_));
  Fp32Params params;
  std::shared_ptr<const MaskEntry> entry;
  int32_t* unused = nullptr;
  STOF_RETURN_IF_ERROR(PreparePadding(false, &params_.pad_bits, &unused));
  STOF_RETURN_IF_ERROR(GetMask(TiledForm(), &params_, &entry));
  params.attention = params_;
  const size_t bytes = Fp32WorkspaceBytes(kernel, params_);
  void* memory = bytes == 0 ? nullptr : GetWorkspace(0, 0, bytes);
  if (bytes != 0 && memory == nullptr) {
    return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of split keys and values");
  }
  PlaceFp32Workspace(kernel, memory, &params);
  STOF_RETURN_IF_ERROR(LaunchStatus(kernel.split(params, stream_)));
  return LaunchStatus(kernel.launch(params, score_mod_, stream_));
}

Status AttentionJob::RunSm80() {
  int32_t* unused = nullptr;
  STOF_RETURN_IF_ERROR(PreparePadding(false, &params_.pad_bits, &unused));
  return LaunchSm80();
}

Status AttentionJob::LaunchSm80() {
  std::shared_ptr<const MaskEntry> entry;
  STOF_RETURN_IF_ERROR(GetMask(TiledForm(), &params_, &entry));
  const Launch launch = FindSm80(head_size_, bf16_, score_mod_);
  if (launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(head_size_));
  return LaunchStatus(launch(params_, stream_));
}

}  // namespace cuda
}  // namespace stof
