// SPDX-License-Identifier: Apache-2.0
// From the operator to the CUDA kernels: what they need of the problem, block mask, padding bits, launch.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <string>

#include "cuda/device_mask.h"
#include "cuda/selector.h"
#include "plugins/core/cuda_backend.h"

namespace stof {
namespace {

using cuda::ToStatus;

Status ToHost(const void* from, size_t bytes, void* to) {
  return ToStatus(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy of a constant to the host");
}

Status Device(int* id) { return ToStatus(cudaGetDevice(id), "current device"); }

cuda::AttentionParams ToParams(const AttentionArgs& args) {
  cuda::AttentionParams p;
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
  return p;
}

// What is asked of a device once.
struct DeviceFacts {
  int capability = 0;  // 10 * major + minor
  int multiprocessors = 0;
  int64_t l2_bytes = 0;
};

Status Facts(DeviceFacts* facts) {
  constexpr int kDevices = 64;
  static std::mutex mutex;
  static DeviceFacts known[kDevices];
  int device = 0;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "current device"));
  const std::lock_guard<std::mutex> lock(mutex);
  DeviceFacts scratch;
  DeviceFacts& found = device < kDevices ? known[device] : scratch;
  if (found.capability == 0) {
    int major = 0, minor = 0, l2 = 0;
    STOF_RETURN_IF_ERROR(ToStatus(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device"));
    STOF_RETURN_IF_ERROR(ToStatus(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "device"));
    STOF_RETURN_IF_ERROR(ToStatus(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device), "device"));
    STOF_RETURN_IF_ERROR(
        ToStatus(cudaDeviceGetAttribute(&found.multiprocessors, cudaDevAttrMultiProcessorCount, device), "device"));
    found.l2_bytes = l2;
    found.capability = 10 * major + minor;
    // For tests of one kernel on a device that another serves better.
    if (const char* most = std::getenv("STOF_CUDA_CAPABILITY")) {
      found.capability = std::min(found.capability, std::max(80, std::atoi(most)));
    }
  }
  *facts = found;
  return Status();
}

// One attention on one stream.
class Job {
 public:
  Job(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
      const RunContext& context)
      : args_(args),
        pad_(pad),
        mask_(mask),
        sizes_(sizes),
        context_(context),
        stream_(static_cast<cudaStream_t>(context.stream)),
        params_(ToParams(args)) {
    extras_ = args.softcap > 0.0f || args.bias != nullptr || args.relative_bias != nullptr;
    bf16_ = args.dtype == DType::kBF16;
    size_ = static_cast<int>(std::max(args.D, args.Dv));
    all_keys_ = args.empty_rows == EmptyRows::kMean || args.empty_rows == EmptyRows::kAll;
  }

  Status Run() {
    const cuda::Sm90Kernel* kernel = nullptr;
    cuda::Problem problem;
    STOF_RETURN_IF_ERROR(Choose(&kernel, &problem));
    if (kernel == nullptr) return RunSm80();
    cuda::Sm90Params params;
    params.attention = params_;
    if (!cuda::DescribeTensors(bf16_, kernel->keys, &params)) return RunSm80();
    const cuda::MaskForm form = cuda::FormOf(*kernel, problem);
    params.workers = form.workers;
    std::shared_ptr<const cuda::MaskEntry> entry;
    STOF_RETURN_IF_ERROR(GetMask(form, &params.attention, &entry));
    if (entry != nullptr) params.work = entry->work(), params.work_begin = entry->work_begin();
    // Rows without a key that take all keys are left to a second kernel.
    const bool second = all_keys_ && (pad_ != nullptr || (entry != nullptr && entry->empty_rows()));
    STOF_RETURN_IF_ERROR(Prepare(second, &params.attention.pad_bits, &params.redo));
    STOF_RETURN_IF_ERROR(Launched(kernel->launch(params, stream_)));
    if (!second) return Status();
    params_.pad_bits = params.attention.pad_bits;
    params_.only = params.redo;
    return LaunchSm80();
  }

  // The masks that Run would make.
  Status Ready() {
    const cuda::Sm90Kernel* kernel = nullptr;
    cuda::Problem problem;
    STOF_RETURN_IF_ERROR(Choose(&kernel, &problem));
    std::shared_ptr<const cuda::MaskEntry> entry;
    if (kernel != nullptr) STOF_RETURN_IF_ERROR(GetMask(cuda::FormOf(*kernel, problem), &params_, &entry));
    // Also beside an sm_90a kernel where the other one may come second.
    return kernel == nullptr || all_keys_ ? GetMask(cuda::MaskForm(), &params_, &entry) : Status();
  }

  // How many choices there are: the sm_80 kernel, then those for sm_90a.
  Status Count(int* kernels) {
    const cuda::Sm90Kernel* first = nullptr;
    STOF_RETURN_IF_ERROR(First(&first));
    *kernels = first == nullptr ? 0 : 1 + Listed(first);
    return Status();
  }

 private:
  static int Listed(const cuda::Sm90Kernel* first) {
    int count = 0;
    while (first[count].launch != nullptr) ++count;
    return count;
  }

  // The sm_90a kernels that take the problem on this device; nullptr: none, only the sm_80 kernel does.
  Status First(const cuda::Sm90Kernel** first) {
    STOF_RETURN_IF_ERROR(Facts(&facts_));
    *first = nullptr;
    // Heads of up to 32 elements would fill half of the wider kernel's tiles with zeros.
    if (facts_.capability != 90 || extras_ || !(args_.scale > 0.0f) || size_ <= 32) return Status();
    const cuda::Sm90Kernel* kernels = cuda::FindSm90(size_, bf16_);
    if (kernels->launch != nullptr) *first = kernels;
    return Status();
  }

  // kernel nullptr: that for sm_80.
  Status Choose(const cuda::Sm90Kernel** kernel, cuda::Problem* problem) {
    const cuda::Sm90Kernel* first = nullptr;
    STOF_RETURN_IF_ERROR(First(&first));
    if (first == nullptr || context_.kernel == 1) return Status();
    if (!mask_.parts.fixed.empty()) problem->mask = &mask_.parts.fixed;
    problem->hash = mask_.fixed_hash;
    problem->sizes = sizes_;
    problem->multiprocessors = facts_.multiprocessors;
    const int64_t head = std::max<int64_t>(1, 2 * args_.T * (args_.D + args_.Dv));
    problem->section = std::max<int64_t>(1, facts_.l2_bytes / 2 / head) * (args_.H / args_.G);
    if (context_.kernel > 1 && context_.kernel <= 1 + Listed(first)) {
      *kernel = first + (context_.kernel - 2);
      return Status();
    }
    return cuda::Select(first, *problem, kernel);
  }

  Status RunSm80() {
    int32_t* unused = nullptr;
    STOF_RETURN_IF_ERROR(Prepare(false, &params_.pad_bits, &unused));
    return LaunchSm80();
  }

  Status LaunchSm80() {
    std::shared_ptr<const cuda::MaskEntry> entry;
    STOF_RETURN_IF_ERROR(GetMask(cuda::MaskForm(), &params_, &entry));
    const cuda::Launch launch = cuda::FindSm80(size_, bf16_, extras_);
    if (launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(size_));
    return Launched(launch(params_, stream_));
  }

  Status GetMask(const cuda::MaskForm& form, cuda::AttentionParams* params,
                 std::shared_ptr<const cuda::MaskEntry>* entry) const {
    if (mask_.parts.fixed.empty()) return Status();
    STOF_RETURN_IF_ERROR(
        cuda::DeviceMaskCache::Global().Get(mask_.parts.fixed, mask_.fixed_hash, sizes_, form, stream_, entry));
    params->has_mask = 1;
    params->mask = (*entry)->view();
    return Status();
  }

  // Bits of the padding, and with `flags` a zero for every piece of rows.
  Status Prepare(bool flags, const uint32_t** pad_bits, int32_t** redo) const {
    if (pad_ == nullptr && !flags) return Status();
    const int64_t tiles = pad_ == nullptr ? 0 : (args_.T + cuda::kTileKeys - 1) / cuda::kTileKeys;
    const int64_t pieces = flags ? args_.B * args_.H * ((args_.S + cuda::kPiece - 1) / cuda::kPiece) : 0;
    const int64_t bit_bytes = args_.B * tiles * cuda::kTileKeys / 8;
    const auto bytes = static_cast<size_t>(std::max<int64_t>(1, bit_bytes + 4 * pieces));
    auto* memory = static_cast<char*>(context_.allocate(context_.self, bytes));
    if (memory == nullptr) return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of padding");
    auto* bits = reinterpret_cast<uint32_t*>(memory);
    auto* cleared = reinterpret_cast<int32_t*>(memory + bit_bytes);
    if (flags) *redo = cleared;
    if (pad_ == nullptr) {
      return ToStatus(cudaMemsetAsync(cleared, 0, static_cast<size_t>(4 * pieces), stream_), "clearing of flags");
    }
    *pad_bits = bits;
    const int error =
        cuda::LaunchPadBits(pad_->data, pad_->dtype, pad_->dims[0], args_.B, args_.T, bits, cleared, pieces, stream_);
    return ToStatus(static_cast<cudaError_t>(error), "launch of the padding kernel");
  }

  static Status Launched(int error) {
    return ToStatus(static_cast<cudaError_t>(error), "launch of the attention kernel");
  }

  const AttentionArgs& args_;
  const Tensor* const pad_;
  const AttentionMask& mask_;
  const ExprSizes& sizes_;
  const RunContext& context_;
  cudaStream_t const stream_;
  cuda::AttentionParams params_;
  DeviceFacts facts_;
  bool extras_ = false, bf16_ = false, all_keys_ = false;
  int size_ = 0;
};

Status Attention(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                 const RunContext& context) {
  size_t workspace = 0;
  STOF_RETURN_IF_ERROR(CheckCudaAttention(args, pad != nullptr, mask, &workspace));
  return Job(args, pad, mask, sizes, context).Run();
}

int Kernels(const AttentionArgs& args) {
  const AttentionMask none;
  const RunContext context;
  int kernels = 0;
  const Status status = Job(args, nullptr, none, ExprSizes(), context).Count(&kernels);
  if (status.ok()) return kernels;
  cudaGetLastError();  // that of a missing device is nobody else's business
  return 0;
}

// A stream of this library's own on the current device, for uploads that come before the stream of a run is known.
Status UploadStream(cudaStream_t* stream) {
  constexpr int kDevices = 64;
  static std::mutex mutex;
  static cudaStream_t streams[kDevices];
  int device = 0;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "current device"));
  if (device >= kDevices) return Status::Error("more than 64 devices");
  const std::lock_guard<std::mutex> lock(mutex);
  if (streams[device] == nullptr) {
    STOF_RETURN_IF_ERROR(
        ToStatus(cudaStreamCreateWithFlags(&streams[device], cudaStreamNonBlocking), "stream for uploads"));
  }
  *stream = streams[device];
  return Status();
}

Status Ready(const AttentionArgs& args, const AttentionMask& mask, const ExprSizes& sizes, int kernel) {
  if (mask.parts.fixed.empty()) return Status();
  // Allocation is allowed while a stream, of this thread or another, is captured.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  STOF_RETURN_IF_ERROR(ToStatus(cudaThreadExchangeStreamCaptureMode(&mode), "capture mode"));
  cudaStream_t stream = nullptr;
  Status status = UploadStream(&stream);
  if (status.ok()) {
    RunContext context;
    context.on_cuda = true;
    context.stream = stream;
    context.kernel = kernel;
    status = Job(args, nullptr, mask, sizes, context).Ready();
  }
  const Status restored = ToStatus(cudaThreadExchangeStreamCaptureMode(&mode), "capture mode");
  return status.ok() ? restored : status;
}

constexpr CudaBackend kBackend = {ToHost, Device, Attention, Kernels, Ready};

}  // namespace

const CudaBackend* FindCudaBackend() { return &kBackend; }

}  // namespace stof
