// SPDX-License-Identifier: Apache-2.0
// From the operator to the CUDA kernels: what they need of the problem, block mask, padding bits, launch.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/attention_decode.h"
#include "cuda/attention_fp32.h"
#include "cuda/attention_rows.h"
#include "cuda/chain_backend.h"
#include "cuda/device_mask.h"
#include "cuda/mask_builder.h"
#include "cuda/mask_memory.h"
#include "cuda/recording.h"
#include "cuda/selector.h"
#include "cuda/stream_memory.h"
#include "cuda/time_op.h"
#include "plugins/core/cuda_backend.h"
#include "plugins/core/hash.h"

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
  p.lse = args.lse, p.lse_stride_b = args.lse_stride_b, p.lse_stride_h = args.lse_stride_h;
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
    const char* text = std::getenv("STOF_CUDA_CAPABILITY");
    const int most = text == nullptr ? 0 : std::atoi(text);
    if (most >= 80) found.capability = std::min(found.capability, most);
  }
  *facts = found;
  return Status();
}

constexpr int kNarrowHead = 32;  // heads up to it would fill half of the 9.0 kernels' tiles with zeros

Status Clear(void* memory, size_t bytes, cudaStream_t stream) {
  if (cuda::IsOnlyLoading()) return Status();
  return ToStatus(cudaMemsetAsync(memory, 0, bytes, stream), "clearing of flags");
}

// A mask that is made on the device, by run, and what its parts share.
struct DeviceBuild {
  cuda::MaskProgram program;
  int32_t* invalid = nullptr;  // in device memory; nullptr: the program is proven
  // Memory of a part by its use: parts come one after the other on the stream.
  struct Memory {
    int m, n;
    size_t bytes;
    void* data;
  };
  std::vector<Memory> memory;
};

// One attention on one stream, or a part of it.
class Job {
 public:
  // args and pad are the part's, sizes the whole problem's. build: the mask is made on the device; nullptr: it is
  // constant and cached.
  Job(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
      const Tables& operands, const cuda::MaskPart& part, DeviceBuild* build, const RunContext& context)
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

  Status Run() {
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
    if (std::strcmp(args_.kernel, cuda::kRowsName) == 0 && ReadsVectors()) return RunRows();
    if (TakesDecode()) return RunDecode();
    const cuda::Sm90Kernel* kernel = nullptr;
    cuda::Problem problem;
    STOF_RETURN_IF_ERROR(Choose(&kernel, &problem));
    bool rows = false;
    STOF_RETURN_IF_ERROR(PrefersRows(kernel, problem, &rows));
    if (rows) return RunRows();
    if (args_.dtype == DType::kF32) return RunFp32();
    if (kernel == nullptr) return RunSm80();
    cuda::Sm90Params params;
    params.attention = params_;
    if (!cuda::DescribeTensors(bf16_, kernel->rows, kernel->keys, &params)) return RunSm80();
    const cuda::MaskForm form = cuda::FormOf(*kernel, problem);
    params.workers = static_cast<int32_t>(
        std::min<int64_t>(form.workers, args_.B * args_.H * ((args_.S + kernel->rows - 1) / kernel->rows)));
    params.section = static_cast<int32_t>(std::min<int64_t>(problem.section, std::numeric_limits<int32_t>::max()));
    std::shared_ptr<const cuda::MaskEntry> entry;
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

  // The masks that Run would make; the keeper, if there is one, keeps them.
  Status Ready() {
    keep_ = context_.keeper != nullptr;
    const cuda::Sm90Kernel* kernel = nullptr;
    cuda::Problem problem;
    STOF_RETURN_IF_ERROR(Choose(&kernel, &problem));
    std::shared_ptr<const cuda::MaskEntry> entry;
    if (TakesDecode()) {
      cuda::MaskForm form;
      form.m = cuda::kDecodeTileRows;
      return GetMask(form, &params_, &entry);
    }
    bool rows = std::strcmp(args_.kernel, cuda::kRowsName) == 0 && ReadsVectors();
    if (!rows) STOF_RETURN_IF_ERROR(PrefersRows(kernel, problem, &rows));
    if (rows) return GetMask(RowsForm(), &params_, &entry);
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
    if (facts_.capability != 90 || size_ <= kNarrowHead || !cuda::TakesBias(params_)) return Status();
    if (args_.dtype == DType::kF32) return Status();
    const cuda::Extras extras = args_.bias != nullptr ? cuda::Extras::kPairs
                                : extras_             ? cuda::Extras::kDistances
                                                      : cuda::Extras::kNone;
    const cuda::Sm90Kernel* kernels = cuda::FindSm90(size_, bf16_, extras);
    if (kernels->launch != nullptr) *first = kernels;
    return Status();
  }

  // kernel nullptr: that for sm_80.
  Status Choose(const cuda::Sm90Kernel** kernel, cuda::Problem* problem) {
    const cuda::Sm90Kernel* first = nullptr;
    STOF_RETURN_IF_ERROR(First(&first));
    if (build_ == nullptr && !mask_.parts.fixed.empty()) problem->mask = &mask_.parts.fixed;
    problem->hash = mask_.fixed_hash;
    problem->sizes = {args_.B, args_.H, args_.S, args_.T, sizes_.P};
    problem->multiprocessors = facts_.multiprocessors;
    if (first == nullptr || context_.kernel == 1) return Status();
    if (context_.kernel == 0 && std::strcmp(args_.kernel, cuda::kSm80Name) == 0) return Status();
    const int64_t head = std::max<int64_t>(1, 2 * args_.T * (args_.D + args_.Dv));
    problem->section = std::max<int64_t>(1, facts_.l2_bytes / 2 / head) * (args_.H / args_.G);
    problem->bytes = args_.B * args_.G * head;
    if (context_.kernel > 1 && context_.kernel <= 1 + Listed(first)) {
      *kernel = first + (context_.kernel - 2);
      return Status();
    }
    *kernel = cuda::Named(first, args_.kernel);
    if (*kernel != nullptr) return Status();
    if (build_ == nullptr) return cuda::Select(first, *problem, kernel);
    *kernel = cuda::SelectUnseen(first);
    return Status();
  }

  static cuda::MaskForm RowsForm() {
    cuda::MaskForm form;
    form.m = form.n = cuda::kRowsTile;
    return form;
  }

  // Whether keys one by one are cheaper than tiles; never where a kernel was asked for, or the host does not see the
  // mask.
  Status PrefersRows(const cuda::Sm90Kernel* kernel, const cuda::Problem& problem, bool* rows) const {
    *rows = false;
    if (problem.mask == nullptr || context_.kernel > 0 || *args_.kernel != '\0' || !ReadsVectors()) return Status();
    const int64_t item = SizeOf(args_.dtype);
    return cuda::SelectRows(problem, kernel, static_cast<int>(size_ * item), item == 4, rows);
  }

  Status RunRows() {
    std::shared_ptr<const cuda::MaskEntry> entry;
    int32_t* unused = nullptr;
    STOF_RETURN_IF_ERROR(Prepare(false, &params_.pad_bits, &unused));
    STOF_RETURN_IF_ERROR(GetMask(RowsForm(), &params_, &entry));
    const bool biased = args_.softcap > 0.0f || args_.bias != nullptr || args_.relative_bias != nullptr;
    const cuda::Launch launch = cuda::FindRows(args_.dtype, size_, biased);
    if (launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(size_));
    return Launched(launch(params_, stream_));
  }

  bool TakesDecode() const { return args_.S <= cuda::kDecodeQueries && ReadsVectors(); }

  // Whether rows can be read 16 bytes at a time, which Check has seen to where they are halves.
  bool ReadsVectors() const {
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

  Status RunDecode() {
    cuda::DecodeParams params;
    cuda::MaskForm form;
    form.m = cuda::kDecodeTileRows;
    std::shared_ptr<const cuda::MaskEntry> entry;
    int32_t* unused = nullptr;
    STOF_RETURN_IF_ERROR(Prepare(false, &params_.pad_bits, &unused));
    STOF_RETURN_IF_ERROR(GetMask(form, &params_, &entry));
    params.attention = params_;
    const int64_t group = args_.H / args_.G;
    params.heads = static_cast<int32_t>(params_.has_mask == 0 || params_.mask.layout_h == 1 ? group : 1);
    const int64_t packed = params.heads * args_.S;
    const cuda::DecodeKernel kernel = cuda::FindDecode(args_.dtype, size_, packed);
    if (kernel.launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(size_));
    const int64_t tiles = entry == nullptr ? (args_.T + cuda::kTileKeys - 1) / cuda::kTileKeys : entry->longest_row();
    const int64_t blocks = args_.B * args_.G * (group / params.heads) * ((packed + kernel.rows - 1) / kernel.rows);
    if (entry != nullptr && entry->one_row()) {
      params.row_begin = 0, params.row_full = entry->one_row_full(), params.row_end = static_cast<int32_t>(tiles);
    }
    const int item = args_.dtype == DType::kF32 ? 4 : 2;
    const cuda::ClusterKernel in_clusters = cuda::FindCluster(args_.dtype, size_, packed);
    int clusters[cuda::kClusterSizes] = {};
    if (facts_.capability >= 90) in_clusters.clusters(clusters);
    const cuda::DecodeChoice choice = cuda::ChooseDecode(kernel, params_, item, tiles, blocks, facts_.multiprocessors,
                                                         in_clusters.streams, clusters, cuda::TakenKernel());
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

  Status RunFp32() {
    const cuda::Fp32Kernel kernel = cuda::FindFp32(size_, !args_.allow_tf32);
    if (kernel.launch == nullptr) return Status::Error("no CUDA kernel for head size " + std::to_string(size_));
    cuda::Fp32Params params;
    std::shared_ptr<const cuda::MaskEntry> entry;
    int32_t* unused = nullptr;
    STOF_RETURN_IF_ERROR(Prepare(false, &params_.pad_bits, &unused));
    STOF_RETURN_IF_ERROR(GetMask(cuda::MaskForm(), &params_, &entry));
    params.attention = params_;
    const size_t bytes = cuda::Fp32WorkspaceBytes(kernel, params_);
    void* memory = bytes == 0 ? nullptr : Held(0, 0, bytes);
    if (bytes != 0 && memory == nullptr) {
      return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of split keys and values");
    }
    cuda::PlaceFp32Workspace(kernel, memory, &params);
    STOF_RETURN_IF_ERROR(Launched(kernel.split(params, stream_)));
    return Launched(kernel.launch(params, extras_, stream_));
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

  // The mask for a kernel's tile; entry: that of the cache, nullptr where it is made on the device.
  Status GetMask(const cuda::MaskForm& form, cuda::AttentionParams* params,
                 std::shared_ptr<const cuda::MaskEntry>* entry) {
    if (build_ == nullptr) {
      if (mask_.parts.fixed.empty() || args_.T == 0) return Status();  // no pair is left to ask for
      bool missing = false;
      STOF_RETURN_IF_ERROR(cuda::DeviceMaskCache::Global().Get(mask_.parts.fixed, mask_.fixed_hash, sizes_, form,
                                                               stream_, context_.keeper, keep_, entry, &missing));
      if (!missing) {
        params->has_mask = 1;
        params->mask = (*entry)->view();
        return Status();
      }
      // While a graph is captured nothing can be uploaded: then the graph makes the mask.
      build_ = &own_;
      const Status status = cuda::CompileMask(mask_.parts.fixed, MaskExpr(), sizes_, operands_, &own_.program);
      if (!status.ok()) {
        return Status::Error(
            "no block mask for these sizes is on the device yet, and none can be made while a graph is captured (" +
            status.message() + "): run once with the same shapes before capturing");
      }
    }
    return MakeMask(form, params);
  }

  // Memory for one use: of a tile, of 0, 0 for what fp32 needs, 0, 1 for padding, 0, 2 for sums, 0, 3 for parts of
  // rows. Parts have the same, one after the other.
  void* Held(int m, int n, size_t bytes) {
    if (build_ == nullptr) return context_.allocate(context_.self, bytes);
    for (const DeviceBuild::Memory& held : build_->memory) {
      if (held.m == m && held.n == n && held.bytes >= bytes) return held.data;
    }
    void* memory = context_.allocate(context_.self, bytes);
    if (memory != nullptr) build_->memory.push_back({m, n, bytes, memory});
    return memory;
  }

  Status MakeMask(const cuda::MaskForm& form, cuda::AttentionParams* params) {
    cuda::MaskBuild build;
    build.program = &build_->program;
    build.sizes = sizes_;
    build.part = part_;
    build.tile = {form.m, form.n, form.fragments};
    build.multiprocessors = facts_.multiprocessors;
    build.invalid = build_->invalid;
    if (!cuda::IsCountable(build)) {
      return Status::Error("more than 2^29 tiles in a block mask: S × T is too large for a mask in one piece");
    }
    const size_t bytes = cuda::MaskBytes(build);
    void* memory = Held(form.m, form.n, bytes);
    if (memory == nullptr) {
      return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of a block mask");
    }
    const int error = cuda::LaunchMaskBuild(build, memory, stream_, &params->mask);
    params->has_mask = 1;
    return ToStatus(static_cast<cudaError_t>(error), "launch of the kernels that make a block mask");
  }

  // Who takes which rows, and memory for those that are taken in parts.
  Status TakePlan(const cuda::Sm90Kernel& kernel, const cuda::MaskEntry& entry, cuda::Sm90Params* params) {
    params->workers = entry.workers();
    params->work = entry.work(), params->work_start = entry.work_start();
    params->cut = entry.cut(), params->cut_rows = entry.cut_rows();
    if (entry.parts() == 0) return Status();
    const auto bytes = static_cast<size_t>(entry.parts() * cuda::PartBytes(kernel.head));
    auto* memory = static_cast<char*>(Held(0, 3, bytes));
    if (memory == nullptr) {
      return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of parts of rows");
    }
    params->parts = reinterpret_cast<float*>(memory);
    params->part_sums = reinterpret_cast<float2*>(memory + entry.parts() * 64 * 4 * kernel.head);
    return Status();
  }

  // Bits of the padding, and with `flags` a zero for every piece of rows.
  Status Prepare(bool flags, const uint32_t** pad_bits, int32_t** redo) {
    if (pad_ == nullptr && !flags) return Status();
    const int64_t tiles = pad_ == nullptr ? 0 : (args_.T + cuda::kTileKeys - 1) / cuda::kTileKeys;
    const int64_t pieces = flags ? args_.B * args_.H * ((args_.S + cuda::kPiece - 1) / cuda::kPiece) : 0;
    const int64_t bit_bytes = args_.B * tiles * cuda::kTileKeys / 8;
    const auto bytes = static_cast<size_t>(std::max<int64_t>(1, bit_bytes + 4 * pieces));
    auto* memory = static_cast<char*>(Held(0, 1, bytes));
    if (memory == nullptr) return Status::Error("no device memory for " + std::to_string(bytes) + " bytes of padding");
    auto* bits = reinterpret_cast<uint32_t*>(memory);
    auto* cleared = reinterpret_cast<int32_t*>(memory + bit_bytes);
    if (flags) *redo = cleared;
    if (pad_ == nullptr) {
      return Clear(cleared, static_cast<size_t>(4 * pieces), stream_);
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
  const Tables& operands_;
  const cuda::MaskPart& part_;
  DeviceBuild* build_;
  DeviceBuild own_;
  const RunContext& context_;
  cudaStream_t const stream_;
  cuda::AttentionParams params_;
  DeviceFacts facts_;
  bool extras_ = false, bf16_ = false, all_keys_ = false, keep_ = false;
  int size_ = 0;
};

const void* Moved(const void* from, int64_t elements, int64_t size) {
  return from == nullptr ? nullptr : static_cast<const char*>(from) + elements * size;
}

// The arguments of a part. It has all heads or one.
AttentionArgs ArgsOf(const AttentionArgs& whole, const cuda::MaskPart& part) {
  AttentionArgs args = whole;
  const int64_t size = SizeOf(whole.dtype), g = part.h / (whole.H / whole.G);
  args.B = part.batches, args.H = part.heads, args.S = part.rows;
  if (part.heads != whole.H) args.G = 1;
  const auto at = [&](const Strides& stride, int64_t head, int64_t row) {
    return part.b * stride.b + head * stride.h + row * stride.s;
  };
  args.query = Moved(whole.query, at(whole.query_stride, part.h, part.row), size);
  args.key = Moved(whole.key, at(whole.key_stride, g, 0), size);
  args.value = Moved(whole.value, at(whole.value_stride, g, 0), size);
  args.output = static_cast<char*>(whole.output) + at(whole.output_stride, part.h, part.row) * size;
  args.bias =
      Moved(whole.bias, part.b * whole.bias_stride_b + part.h * whole.bias_stride_h + part.row * whole.bias_stride_q,
            SizeOf(whole.bias_dtype));
  if (whole.relative_bias != nullptr) args.relative_bias += part.h * whole.relative_bias_stride_h;
  args.query_position += part.row;
  args.sink = Moved(whole.sink, part.h, SizeOf(whole.sink_dtype));
  if (whole.lse != nullptr) args.lse += part.b * whole.lse_stride_b + part.h * whole.lse_stride_h + part.row;
  return args;
}

// Attention under a mask that is made on the device, part by part.
Status AttendInParts(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                     const Tables& operands, const RunContext& context) {
  DeviceBuild build;
  STOF_RETURN_IF_ERROR(cuda::RememberedMask(mask, sizes, operands, &build.program));
  auto* const stream = static_cast<cudaStream_t>(context.stream);
  if (!build.program.proven) {
    build.invalid = static_cast<int32_t*>(context.allocate(context.self, sizeof(int32_t)));
    if (build.invalid == nullptr) return Status::Error("no device memory for 4 bytes");
    STOF_RETURN_IF_ERROR(Clear(build.invalid, sizeof(int32_t), stream));
  }
  // The same pairs make the most bytes in the smallest tiles.
  cuda::MaskCuts cuts(build.program, sizes, cuda::MaskTile(), cuda::kMostMaskBytes);
  cuda::MaskPart part;
  while (cuts.Next(&part)) {
    const AttentionArgs own = ArgsOf(args, part);
    Tensor own_pad;
    if (pad != nullptr) {
      own_pad = *pad;
      if (pad->dims[0] != 1) {
        own_pad.data = static_cast<char*>(pad->data) + part.b * args.T * SizeOf(pad->dtype);
        own_pad.dims[0] = part.batches;
      }
    }
    STOF_RETURN_IF_ERROR(
        Job(own, pad == nullptr ? nullptr : &own_pad, mask, sizes, operands, part, &build, context).Run());
  }
  if (build.invalid == nullptr) return Status();
  int error = cuda::LaunchInvalidate(build.invalid, args.output, SizeOf(args.dtype), args.output_stride, args.B, args.H,
                                     args.S, args.Dv, context.stream);
  if (error == 0 && args.lse != nullptr) {
    error = cuda::LaunchInvalidate(build.invalid, args.lse, sizeof(float), {args.lse_stride_b, args.lse_stride_h, 1},
                                   args.B, args.H, args.S, 1, context.stream);
  }
  return ToStatus(static_cast<cudaError_t>(error), "launch of the kernel that marks an output");
}

// The arguments with the kernel that the environment names, where they name none.
Status Hinted(const AttentionArgs& args, AttentionArgs* named, const AttentionArgs** own) {
  const char* name = nullptr;
  STOF_RETURN_IF_ERROR(cuda::NamedByEnvironment(&name));
  *own = &args;
  if (*name == '\0' || *args.kernel != '\0') return Status();
  *named = args;
  named->kernel = name;
  *own = named;
  return Status();
}

Status Attention(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                 const Tables& operands, const RunContext& context) {
  STOF_RETURN_IF_ERROR(CheckCudaAttention(args));
  AttentionArgs named;
  const AttentionArgs* own = nullptr;
  STOF_RETURN_IF_ERROR(Hinted(args, &named, &own));
  if (args.T > 0 && !mask.parts.dynamic.empty()) {
    return AttendInParts(*own, pad, mask, sizes, operands, context);
  }
  const cuda::MaskPart all = {0, args.B, 0, args.H, 0, args.S};
  return Job(*own, pad, mask, sizes, operands, all, nullptr, context).Run();
}

Status Describe(std::string* name, int32_t* capability) {
  int device = 0;
  cudaDeviceProp properties;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "current device"));
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDeviceProperties(&properties, device), "device"));
  *name = properties.name;
  *capability = 10 * properties.major + properties.minor;
  return Status();
}

Status KernelNames(int64_t head_size, DType dtype, std::string* names) {
  DeviceFacts facts;
  STOF_RETURN_IF_ERROR(Facts(&facts));
  names->clear();
  if (dtype != DType::kF16 && dtype != DType::kBF16) return Status();
  if (head_size < 1 || head_size > 256) return Status::Error("head sizes must be 1 to 256");
  *names = std::string(cuda::kSm80Name) + " " + cuda::kRowsName;
  if (facts.capability != 90 || head_size <= kNarrowHead) return Status();
  const bool bf16 = dtype == DType::kBF16;
  for (const auto* kernel = cuda::FindSm90(static_cast<int>(head_size), bf16, cuda::Extras::kNone);
       kernel->launch != nullptr; ++kernel) {
    *names += " " + cuda::NameOf(*kernel);
  }
  return Status();
}

int Kernels(const AttentionArgs& args) {
  const AttentionMask none;
  const RunContext context;
  int kernels = 0;
  const Status status =
      Job(args, nullptr, none, ExprSizes(), Tables(), cuda::MaskPart(), nullptr, context).Count(&kernels);
  if (status.ok()) return kernels;
  cudaGetLastError();  // that of a missing device is nobody else's business
  return 0;
}

// What decides which kernels a run queues, and what else is compiled into them.
uint64_t HashOf(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                int kernel) {
  int device = 0;
  cudaGetDevice(&device);
  uint64_t hash = mask.fixed_hash;
  const auto mix = [&hash](int64_t value) { hash = MixHash(hash, static_cast<uint64_t>(value)); };
  // Sizes by their power of two: which kernels a run queues hardly depends on more, and in decoding T grows in every
  // run.
  const auto about = [](int64_t x) {
    int64_t power = 0;
    while (x > int64_t{1} << power) ++power;
    return x <= 0 ? -1 : power;
  };
  for (const int64_t x :
       {int64_t{device}, about(sizes.B), sizes.H, args.G, about(sizes.S), about(sizes.T), about(sizes.P), args.D,
        args.Dv, int64_t{kernel}, static_cast<int64_t>(args.dtype), static_cast<int64_t>(args.empty_rows)}) {
    mix(x);
  }
  for (const bool x : {args.allow_tf32, args.softcap > 0.0f, args.scale > 0.0f, args.bias != nullptr,
                       args.relative_bias != nullptr, args.sink != nullptr, args.lse != nullptr, pad != nullptr,
                       mask.parts.fixed.empty(), mask.parts.dynamic.empty()}) {
    mix(x ? 1 : 0);
  }
  if (pad != nullptr) mix(static_cast<int64_t>(pad->dtype));
  return MixHash(HashBytes(args.kernel, std::strlen(args.kernel), hash), mask.parts.dynamic.Hash());
}

Status Load(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
            const Tables& operands, const RunContext& context) {
  const auto queue = [&](const RunContext& own) { return Attention(args, pad, mask, sizes, operands, own); };
  return cuda::LoadKernels(
      HashOf(args, pad, mask, sizes, context.kernel),
      [](void* self, const RunContext& own) { return (*static_cast<decltype(queue)*>(self))(own); },
      const_cast<void*>(static_cast<const void*>(&queue)), context);
}

Status Ready(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
             const Tables& operands, const RunContext& given) {
  STOF_RETURN_IF_ERROR(CheckCudaAttention(args));
  const cuda::RelaxedCapture relaxed;  // this thread's stream may be captured
  RunContext context = given;
  // A mask with vectors of the run is made by the run.
  if (!mask.parts.fixed.empty() && mask.parts.dynamic.empty()) {
    cudaStream_t stream = nullptr;
    STOF_RETURN_IF_ERROR(cuda::UploadStream(&stream));
    context.stream = stream;
    const cuda::MaskPart all = {0, args.B, 0, args.H, 0, args.S};
    AttentionArgs named;
    const AttentionArgs* own = nullptr;
    STOF_RETURN_IF_ERROR(Hinted(args, &named, &own));
    STOF_RETURN_IF_ERROR(Job(*own, pad, mask, sizes, operands, all, nullptr, context).Ready());
  }
  return Load(args, pad, mask, sizes, operands, context);
}

constexpr CudaBackend kBackend = {ToHost,
                                  Device,
                                  cuda::Take,
                                  cuda::Give,
                                  cuda::CapturedOrDone,
                                  cuda::Relaxed,
                                  Attention,
                                  Kernels,
                                  Ready,
                                  Describe,
                                  KernelNames,
                                  cuda::TimeOp,
                                  cuda::RunChain,
                                  cuda::MakeDeviceChain,
                                  cuda::ReadyChain,
                                  cuda::RecordRun,
                                  cuda::LaunchRecorded,
                                  cuda::DropRecorded,
                                  cuda::Captured};

}  // namespace

const CudaBackend* FindCudaBackend() { return &kBackend; }

}  // namespace stof
