// SPDX-License-Identifier: Apache-2.0
// Fills the table of plugins/core/contract/cuda_backend.h, one entry for each operator.
#include <cuda_runtime.h>

#include <memory>
#include <string>

#include "cuda/attention/columns/gather.h"
#include "cuda/attention/decode/api.h"
#include "cuda/attention/dequantize.h"
#include "cuda/attention/families.h"
#include "cuda/attention/job.h"
#include "cuda/attention/skip_counts.h"
#include "cuda/cached_attention/append.h"
#include "cuda/chain/run.h"
#include "cuda/common/graph_capture.h"
#include "cuda/common/one_process.h"
#include "cuda/common/status.h"
#include "cuda/common/stream_memory.h"
#include "cuda/common/time_op.h"
#include "cuda/gemm/gemm.h"
#include "cuda/mask/build/mask_builder.h"
#include "cuda/mask/device_columns.h"
#include "cuda/mask/device_mask.h"
#include "cuda/mask/program/program_cache.h"
#include "cuda/packed_sequences/move_rows.h"
#include "cuda/paged_attention/append.h"
#include "cuda/sparse_mlp/run.h"
#include "plugins/core/contract/chosen_blocks.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/host/hash.h"

namespace stof {
namespace {

using cuda::ToStatus;

Status CopyToHost(const void* from, size_t bytes, void* to) {
  return ToStatus(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy of a constant to the host");
}

Status CurrentDevice(int* id) { return ToStatus(cudaGetDevice(id), "current device"); }

const void* Advance(const void* from, int64_t elements, int64_t size) {
  return from == nullptr ? nullptr : static_cast<const char*>(from) + elements * size;
}

// The arguments of a part of the problem. It has all heads or one.
AttentionArgs ArgsOf(const AttentionArgs& whole, const cuda::MaskPart& part) {
  AttentionArgs args = whole;
  const AttentionShape& shape = whole.shape;
  const int64_t size = SizeOf(shape.dtype), g = part.h / (shape.H / shape.G);
  args.shape.B = part.batches, args.shape.H = part.heads, args.shape.S = part.rows;
  if (part.heads != shape.H) args.shape.G = 1;
  const auto at = [&](const Strides& stride, int64_t head, int64_t row) {
    return part.b * stride.b + head * stride.h + row * stride.s;
  };
  args.query.data = Advance(whole.query.data, at(whole.query.stride, part.h, part.row), size);
  args.key.data = Advance(whole.key.data, at(whole.key.stride, g, 0), size);
  args.value.data = Advance(whole.value.data, at(whole.value.stride, g, 0), size);
  PairBias& bias = args.scores.bias;
  bias.data = Advance(bias.data, part.b * bias.stride_b + part.h * bias.stride_h + part.row * bias.stride_q,
                      SizeOf(bias.dtype));
  RelativeBias& relative = args.scores.relative_bias;
  if (relative.table != nullptr) relative.table += part.h * relative.stride_h;
  relative.query_position += part.row;
  relative.factor =
      Advance(relative.factor, part.b * relative.factor_stride_b + part.h * relative.factor_stride_h + part.row,
              SizeOf(relative.factor_dtype));
  for (int i = 0; i < cuda::kRelativeTerms; ++i) {
    RelativeTable& table = cuda::RelativeTermOf(&args.scores, i);
    table.data = Advance(table.data, part.h * table.stride_h, SizeOf(table.dtype));
    table.index.query_position += part.row;
    if (table.index.query_part != nullptr) table.index.query_part += part.row;
  }
  args.scores.sink.data = Advance(whole.scores.sink.data, part.h, SizeOf(whole.scores.sink.dtype));
  if (whole.kv.pages.given()) args.kv.pages.table += part.b * whole.kv.pages.columns;
  if (whole.kv.key_ends != nullptr) args.kv.key_ends += part.b;
  if (whole.scores.diagonal.first_rows != nullptr) args.scores.diagonal.first_rows += part.b;
  if (whole.mask.existence_bias != nullptr) args.mask.existence_bias += part.b * shape.T;
  AttentionOutput& output = args.output;
  output.data = static_cast<char*>(output.data) + at(output.stride, part.h, part.row) * size;
  if (output.lse != nullptr) output.lse += part.b * output.lse_stride_b + part.h * output.lse_stride_h + part.row;
  return args;
}

// Sets outputs to NaN: all where *invalid is not 0, or by batch those of each invalid[b].
Status MarkInvalid(const int32_t* invalid, bool is_by_batch, const AttentionArgs& args, const RunContext& context) {
  int error =
      cuda::LaunchInvalidate(invalid, is_by_batch, args.output.data, SizeOf(args.shape.dtype), args.output.stride,
                             args.shape.B, args.shape.H, args.shape.S, args.shape.Dv, context.stream);
  if (error == 0 && args.output.lse != nullptr) {
    error = cuda::LaunchInvalidate(invalid, is_by_batch, args.output.lse, sizeof(float),
                                   {args.output.lse_stride_b, args.output.lse_stride_h, 1}, args.shape.B, args.shape.H,
                                   args.shape.S, 1, context.stream);
  }
  return ToStatus(static_cast<cudaError_t>(error), "launch of the kernel that marks an output");
}

// Attention under a mask that is made on the device, part by part.
Status RunAttentionInParts(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask,
                           const ExprSizes& sizes, const Tables& operands, const RunContext& context) {
  cuda::DeviceBuild build;
  STOF_RETURN_IF_ERROR(cuda::GetMaskProgram(mask, sizes, operands, &build.program));
  auto* const stream = static_cast<cudaStream_t>(context.stream);
  if (!build.program.proven) {
    build.invalid = static_cast<int32_t*>(context.allocate(context.self, sizeof(int32_t)));
    if (build.invalid == nullptr) return Status::Error("no device memory for 4 bytes");
    STOF_RETURN_IF_ERROR(cuda::Clear(build.invalid, sizeof(int32_t), stream));
  }
  // The smallest tile bounds the bytes of all: the same pairs make the most bytes there. Masks with bits by distance
  // are the exception; a part then takes two or three times as many bytes in larger tiles.
  cuda::MaskCuts cuts(build.program, sizes, cuda::MaskTile(), cuda::kMostMaskBytes);
  cuda::MaskPart part;
  while (cuts.Next(&part)) {
    const AttentionArgs own = ArgsOf(args, part);
    Tensor own_pad;
    if (pad != nullptr) {
      own_pad = *pad;
      if (pad->dims[0] != 1) {
        own_pad.data = static_cast<char*>(pad->data) + part.b * args.shape.T * SizeOf(pad->dtype);
        own_pad.dims[0] = part.batches;
      }
    }
    STOF_RETURN_IF_ERROR(
        cuda::AttentionJob(own, pad == nullptr ? nullptr : &own_pad, mask, sizes, operands, part, &build, context)
            .Run());
  }
  if (build.invalid == nullptr) return Status();
  return MarkInvalid(build.invalid, false, args, context);
}

// Attention by its AttentionMask alone, without a causal window and is_invalid.
Status RunByMask(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                 const Tables& operands, const RunContext& context) {
  if (args.shape.T > 0 && !mask.parts.dynamic.empty()) {
    return RunAttentionInParts(args, pad, mask, sizes, operands, context);
  }
  const cuda::MaskPart all = {0, args.shape.B, 0, args.shape.H, 0, args.shape.S};
  const Status status = cuda::AttentionJob(args, pad, mask, sizes, operands, all, nullptr, context).Run();
  if (!status.too_large()) return status;
  // A mask that exceeds BlockMaskBounds is made by each run, part by part.
  const Status in_parts = RunAttentionInParts(args, pad, mask, sizes, operands, context);
  if (in_parts.ok()) return in_parts;
  return Status::Error(status.message() + "; nor can it be made on the device: " + in_parts.message());
}

// Attention over gathered key columns and all keys, where that pays and the columns are on the device.
Status RunGathered(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                   const RunContext& context, bool* is_gathered) {
  cuda::GatheredAttention gathered;
  if (!cuda::ChooseGathered(args, pad, mask, sizes, &gathered)) return Status();
  std::shared_ptr<const cuda::DeviceColumnsEntry> entry;
  STOF_RETURN_IF_ERROR(cuda::GetDeviceColumns(*gathered.columns->columns, context, &entry));
  if (entry == nullptr) return Status();
  STOF_RETURN_IF_ERROR(cuda::GatherColumns(args, entry->view(), context, &gathered));
  if (gathered.args.key.data == nullptr) return Status();
  const Status status = RunByMask(gathered.args, nullptr, gathered.mask(), gathered.sizes, {}, context);
  // A captured stream cannot upload the block mask of the longer axis. It can build that of the mask itself.
  if (!status.ok() && cuda::IsCapturing(context.stream)) return Status();
  *is_gathered = status.ok();
  return status;
}

Status RunAttention(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                    const Tables& operands, const RunContext& context) {
#if !defined(NDEBUG)
  STOF_RETURN_IF_ERROR(Check(args));
#endif
  STOF_RETURN_IF_ERROR(CheckCudaAttention(args));
  if (IsQuantized(args.shape.kv_dtype) && !cuda::CanReadQuantized(args)) {
    AttentionArgs plain;
    STOF_RETURN_IF_ERROR(cuda::Dequantize(args, context, &plain));
    return RunAttention(plain, pad, mask, sizes, operands, context);
  }
  if (IsLimitedToKeyRange(args)) {
    const cuda::MaskPart all = {0, args.shape.B, 0, args.shape.H, 0, args.shape.S};
    return cuda::AttentionJob(args, pad, mask, sizes, operands, all, nullptr, context).RunDecode();
  }
  AttentionArgs by_mask = args;
  by_mask.mask.fixed = StaticMask();
  by_mask.kv.is_invalid = by_mask.kv.seqlens = nullptr;
  bool is_gathered = false;
  if (!IsQuantized(args.shape.kv_dtype)) {
    STOF_RETURN_IF_ERROR(RunGathered(by_mask, pad, mask, sizes, context, &is_gathered));
  }
  if (!is_gathered) STOF_RETURN_IF_ERROR(RunByMask(by_mask, pad, mask, sizes, operands, context));
  return args.kv.is_invalid == nullptr ? Status() : MarkInvalid(args.kv.is_invalid, true, args, context);
}

Status UploadColumns(const KeyColumns& columns, const RunContext& context, bool* is_ready) {
  std::shared_ptr<const cuda::DeviceColumnsEntry> entry;
  const Status status = cuda::GetDeviceColumns(columns, context, &entry);
  *is_ready = entry != nullptr;
  return status;
}

Status DescribeDevice(std::string* name, int32_t* capability) {
  int device = 0;
  cudaDeviceProp properties;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "current device"));
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDeviceProperties(&properties, device), "device"));
  *name = properties.name;
  *capability = 10 * properties.major + properties.minor;
  return Status();
}

int CountKernels(const AttentionArgs& args) {
  const AttentionMask none;
  const RunContext context;
  int kernels = 0;
  const Status status =
      cuda::AttentionJob(args, nullptr, none, ExprSizes(), Tables(), cuda::MaskPart(), nullptr, context)
          .CountKernels(&kernels);
  if (status.ok()) return kernels;
  cudaGetLastError();  // clears the error of a missing device
  return 0;
}

// Hashes what decides which kernels a run queues, and what is compiled into them.
uint64_t HashKernelChoice(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask,
                          const ExprSizes& sizes, const cuda::KernelRequest& request) {
  int device = 0;
  cudaGetDevice(&device);
  uint64_t hash = mask.fixed_hash;
  const auto mix = [&hash](int64_t value) { hash = MixHash(hash, static_cast<uint64_t>(value)); };
  // Sizes by their power of two: the choice hardly depends on more, and in decoding T grows in every run.
  const auto about = [](int64_t x) {
    int64_t power = 0;
    while (x > int64_t{1} << power) ++power;
    return x <= 0 ? -1 : power;
  };
  for (const int64_t x : {int64_t{device}, about(sizes.B), sizes.H, args.shape.G, about(sizes.S), about(sizes.T),
                          about(sizes.P), args.shape.D, args.shape.Dv, int64_t{request.tactic}, int64_t{request.number},
                          static_cast<int64_t>(args.shape.dtype), static_cast<int64_t>(args.shape.kv_dtype),
                          static_cast<int64_t>(args.mask.empty_rows), static_cast<int64_t>(args.precision)}) {
    mix(x);
  }
  const CausalWindow* const window = args.mask.fixed.window();
  for (const bool x : {args.allow_tf32,
                       args.scores.softcap > 0.0f,
                       args.scores.scale > 0.0f,
                       args.scores.bias.data != nullptr,
                       args.scores.relative_bias.table != nullptr,
                       args.scores.relative_bias.factor != nullptr,
                       args.scores.relative_key[0].given(),
                       args.scores.relative_key[1].given(),
                       args.scores.relative_query.given(),
                       args.scores.sink.data != nullptr,
                       args.scores.skip_threshold > 0.0f,
                       ChoosesBlocks(args),
                       args.output.lse != nullptr,
                       pad != nullptr,
                       mask.parts.fixed.empty(),
                       mask.parts.dynamic.empty(),
                       window != nullptr,
                       window != nullptr && window->window_left >= 0,
                       args.kv.is_invalid != nullptr,
                       args.kv.seqlens != nullptr}) {
    mix(x ? 1 : 0);
  }
  if (pad != nullptr) mix(static_cast<int64_t>(pad->dtype));
  return MixHash(HashBytes(request.name.data(), request.name.size(), hash), mask.parts.dynamic.Hash());
}

Status LoadKernels(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                   const Tables& operands, const RunContext& context) {
  cuda::KernelRequest request;
  STOF_RETURN_IF_ERROR(cuda::AttentionRequests().Get(args.kernel, context.kernel, &request));
  const auto queue = [&](const RunContext& own) { return RunAttention(args, pad, mask, sizes, operands, own); };
  return cuda::LoadKernels(
      HashKernelChoice(args, pad, mask, sizes, request),
      [](void* self, const RunContext& own) { return (*static_cast<decltype(queue)*>(self))(own); },
      const_cast<void*>(static_cast<const void*>(&queue)), context);
}

Status PrepareAttention(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                        const Tables& operands, const RunContext& given) {
  STOF_RETURN_IF_ERROR(CheckCudaAttention(args));
  const cuda::RelaxedCapture relaxed;  // this thread's stream may be captured
  RunContext context = given;
  // A mask that reads run-time vectors is made by the run.
  const bool has_rows = args.scores.has_relative_tables();
  if ((!mask.parts.fixed.empty() || has_rows) && mask.parts.dynamic.empty()) {
    cudaStream_t stream = nullptr;
    STOF_RETURN_IF_ERROR(cuda::UploadStream(&stream));
    context.stream = stream;
    cuda::GatheredAttention gathered;
    std::shared_ptr<const cuda::DeviceColumnsEntry> columns;
    if (cuda::ChooseGathered(args, pad, mask, sizes, &gathered)) {
      STOF_RETURN_IF_ERROR(cuda::GetDeviceColumns(*gathered.columns->columns, context, &columns));
    }
    const bool is_gathered = columns != nullptr;
    const cuda::MaskPart all = {0, args.shape.B, 0, args.shape.H, 0, args.shape.S};
    const Status status =
        cuda::AttentionJob(is_gathered ? gathered.args : args, pad, is_gathered ? gathered.mask() : mask,
                           is_gathered ? gathered.sizes : sizes, operands, all, nullptr, context)
            .Prepare();
    if (!status.too_large()) STOF_RETURN_IF_ERROR(status);  // one that is too large is made by the run
  }
  return LoadKernels(args, pad, mask, sizes, operands, context);
}

// Functions without a Status do nothing in a forked child; the run that follows reports the error.
bool AllocateAsync(void* stream, size_t bytes, void** memory) {
  return cuda::IsCudaUsable() && cuda::AllocateAsync(stream, bytes, memory);
}
void FreeAsync(void* stream, void* memory) {
  if (cuda::IsCudaUsable()) cuda::FreeAsync(stream, memory);
}
bool SynchronizeUnlessCapturing(void* stream) {
  return cuda::IsCudaUsable() && cuda::SynchronizeUnlessCapturing(stream);
}
void CallInRelaxedCapture(void (*run)(void* self), void* self) {
  cuda::IsCudaUsable() ? cuda::CallInRelaxedCapture(run, self) : run(self);
}
int CountAttentionKernels(const AttentionArgs& args) { return cuda::IsCudaUsable() ? CountKernels(args) : 0; }
void DestroyGraph(void* graph) {
  if (cuda::IsCudaUsable()) cuda::DestroyCapturedGraph(graph);
}
bool IsCapturing(void* stream) { return !cuda::IsCudaUsable() || cuda::IsCapturing(stream); }

template <auto kFunction>
constexpr auto kChecked = &cuda::InOneProcess<kFunction>::Call;

constexpr CudaBackend MakeBackend() {
  CudaBackend backend;
  backend.current_device = kChecked<&CurrentDevice>;
  backend.describe_device = kChecked<&DescribeDevice>;
  backend.copy_to_host = kChecked<&CopyToHost>;

  backend.allocate_async = AllocateAsync;
  backend.free_async = FreeAsync;
  backend.is_capturing = IsCapturing;
  backend.synchronize_unless_capturing = SynchronizeUnlessCapturing;
  backend.call_in_relaxed_capture = CallInRelaxedCapture;

  backend.capture_graph = kChecked<&cuda::CaptureRun>;
  backend.replay_graph = kChecked<&cuda::ReplayGraph>;
  backend.destroy_graph = DestroyGraph;

  backend.time_op = kChecked<&cuda::TimeOp>;

  backend.attention.run = kChecked<&RunAttention>;
  backend.attention.upload_columns = kChecked<&UploadColumns>;
  backend.attention.prepare = kChecked<&PrepareAttention>;
  backend.attention.count_kernels = CountAttentionKernels;
  backend.attention.list_kernels = kChecked<&cuda::ListKernels>;
  backend.attention.add_skip_counts = cuda::AddSkipCounts;
  backend.attention.reset_skip_counts = cuda::ResetSkipCounts;

  backend.chain.make_state = cuda::MakeDeviceChain;
  backend.chain.prepare = kChecked<&cuda::ReadyChain>;
  backend.chain.run = kChecked<&cuda::RunChain>;

  backend.cached_attention.append = kChecked<&cuda::AppendToCache>;
  backend.paged_attention.read_counts = kChecked<&cuda::ReadCounts>;
  backend.paged_attention.append = kChecked<&cuda::AppendToPages>;
  backend.paged_attention.gather = kChecked<&cuda::GatherPages>;
  backend.paged_attention.unpad = kChecked<&cuda::UnpadTokens>;
  backend.packed_sequences.unpack = kChecked<&cuda::UnpackSequences>;
  backend.packed_sequences.pack = kChecked<&cuda::PackSequences>;

  backend.gemm.run = kChecked<&cuda::RunGemm>;
  backend.gemm.plan_workspace = kChecked<&cuda::PlanGemmWorkspace>;

  backend.sparse_mlp.run = kChecked<&cuda::RunSparseMlp>;
  backend.sparse_mlp.plan_workspace = kChecked<&cuda::PlanSparseMlpWorkspace>;
  return backend;
}

constexpr CudaBackend kBackend = MakeBackend();

}  // namespace

const CudaBackend* FindCudaBackend() { return &kBackend; }

}  // namespace stof
