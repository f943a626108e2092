// SPDX-License-Identifier: Apache-2.0
// From a GEMM to the launch: which kernel, its tensor maps, its grid.
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/common/device_properties.h"
#include "cuda/common/one_process.h"
#include "cuda/common/status.h"
#include "cuda/gemm/autotune.h"
#include "cuda/gemm/cublaslt_gemm.h"
#include "cuda/gemm/params.h"
#include "cuda/gemm/run.h"
#include "plugins/core/host/environment.h"

namespace stof {
namespace cuda {

GemmKernelTable FindGemmSm90F16(bool pair, bool is_b_transposed);
GemmKernelTable FindGemmSm90Bf16(bool pair, bool is_b_transposed);

GemmKernelTable FindGemmSm90(bool bf16, bool pair, bool is_b_transposed) {
#if defined(STOF_SM90)
  return bf16 ? FindGemmSm90Bf16(pair, is_b_transposed) : FindGemmSm90F16(pair, is_b_transposed);
#else
  (void)bf16, (void)pair, (void)is_b_transposed;
  return GemmKernelTable();
#endif
}

// STOF_CUDA_GEMM does what TakeGemmKernel does; "lt" is kGemmCublasLt.
static int taken_kernel = [] {
  const char* text = std::getenv("STOF_CUDA_GEMM");
  if (text != nullptr && std::string(text) == "lt") return kGemmCublasLt;
  return text == nullptr ? kGemmByModel : std::atoi(text);
}();
void TakeGemmKernel(int index) { taken_kernel = index; }
static std::atomic<int> last_kernel{kGemmSm80};
int LastGemmKernel() { return last_kernel.load(std::memory_order_relaxed); }

namespace {

constexpr int kDepth = 64;  // of a step of the 9.0 kernels

// The driver is found at run time: the library loads where there is none.
PFN_cuTensorMapEncodeTiled_v12000 FindEncode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

// Boxes of 64 columns by `box_rows` of a matrix [rows, columns].
bool Describe(const void* data, bool bf16, int64_t rows, int64_t columns, int64_t stride, int box_rows,
              CUtensorMap* map) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = FindEncode();
  if (encode == nullptr) return false;
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(2 * stride)};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  return encode(map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                const_cast<void*>(data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// What is asked of a device once.
struct Facts {
  int device = 0;
  int capability = 0;  // 10 * major + minor
};
Status GetFacts(Facts* facts) {
  int major = 0, minor = 0;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&facts->device), "current device"));
  STOF_RETURN_IF_ERROR(
      ToStatus(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, facts->device), "device"));
  STOF_RETURN_IF_ERROR(
      ToStatus(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, facts->device), "device"));
  facts->capability = 10 * major + minor;
  return LimitCapability(&facts->capability);
}

// How many clusters of a kernel the device holds at once, 0 where a part of one is too small for it.
Status Resident(const GemmKernelEntry& kernel, int device, int* clusters) {
  static std::mutex mutex;
  static std::map<std::pair<const GemmKernelEntry*, int>, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto place = known.try_emplace({&kernel, device}, 0);
  if (place.second) {
    const Status asked =
        ToStatus(static_cast<cudaError_t>(kernel.resident(&place.first->second)), "clusters of a GEMM");
    if (!asked.ok()) {
      known.erase(place.first);
      return asked;
    }
  }
  *clusters = place.first->second;
  return Status();
}

int64_t Over(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool IsAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

GemmKernelTable KernelsOf(const GemmArgs& args) {
  return FindGemmSm90(args.dtype == DType::kBF16, args.b1 != nullptr, args.is_b_transposed);
}

Status CheckNoTransposedPair(const GemmArgs& args) {
  if (!args.is_b_transposed || args.b1 == nullptr) return Status();
  return Status::Error("a pair of matmuls has no kernel for a transposed right operand");
}

// Whether the rows of every matrix and vector [N] can be read 16 bytes at a time: K, N and stride are multiples of 8,
// addresses are multiples of 16 bytes.
bool ReadsVectors(const GemmArgs& args) {
  return args.K % 8 == 0 && args.N % 8 == 0 && args.stride % 8 == 0 && IsAligned(args.a) && IsAligned(args.b0) &&
         IsAligned(args.b1) && IsAligned(args.output) && IsAligned(args.bias0) && IsAligned(args.bias1) &&
         IsAligned(args.scale) && IsAligned(args.residual);
}

GemmEpilogueParams EpilogueOf(const GemmArgs& args) {
  GemmEpilogueParams epilogue;
  epilogue.activation = static_cast<int32_t>(args.activation);
  epilogue.bias0 = args.bias0, epilogue.bias1 = args.bias1, epilogue.scale = args.scale;
  epilogue.row = args.row, epilogue.residual = args.residual;
  const auto flag = [&epilogue](const void* p, int32_t bit) { epilogue.has |= p != nullptr ? bit : 0; };
  flag(args.bias0, kHasBias0);
  flag(args.bias1, kHasBias1);
  flag(args.scale, kHasScale);
  flag(args.row, kHasRow);
  flag(args.residual, kHasResidual);
  return epilogue;
}

// Microseconds that a kernel is expected to take. CTAs that share an SM share its tensor cores: their steps
// count one after the other, what comes behind them once.
double Predict(const GemmKernelEntry& kernel, const GemmArgs& args, int clusters) {
  constexpr double kStart = 2.0;
  const int64_t tiles =
      Over(args.M, int64_t{kernel.rows} * kernel.cluster_m) * Over(args.N, int64_t{kernel.columns} * kernel.cluster_n);
  const auto steps = static_cast<double>(Over(args.K, kDepth) * Over(tiles * kernel.ctas, clusters));
  const double activation = args.activation == Activation::kNone   ? 0.0
                            : args.activation == Activation::kRelu ? 0.15
                                                                   : 1.0;
  const double tile =
      kernel.tile + kernel.gelu * activation + (args.residual == nullptr ? 0.0 : double{kernel.residual});
  return kStart + kernel.step * steps + tile * static_cast<double>(Over(tiles, clusters));
}

// A way to compute a GEMM: one of the 9.0 kernels, an algorithm of cuBLASLt, or the 8.0 kernel.
struct Way {
  enum class Kind : uint8_t { kSm90, kLt, kSm80 } kind = Kind::kSm80;
  const GemmKernelEntry* kernel = nullptr;
  int clusters = 0;   // that the device holds at once
  int algorithm = 0;  // of cuBLASLt
  double time = 0;    // microseconds, as predicted; 0: not known
};

// Below this rate of the best 9.0 kernel (of 132 SMs), as predicted, cuBLASLt is the first choice: few
// tiles with a long K are divided along K there, and nowhere here. docs/design/gemm.md has the times behind it.
constexpr double kLtBelow = 450e12;

// What may compute a GEMM, the first choice first. timed: all that may be the fastest; else what may be needed.
Status FindWays(const GemmArgs& args, bool workspace, const Facts& facts, bool timed, std::vector<Way>* ways) {
  const bool vectors = ReadsVectors(args) && args.K > 0;
  const bool takes_lt = taken_kernel == kGemmCublasLt, takes_sm90 = taken_kernel != kGemmByModel && !takes_lt;
  if (vectors && facts.capability == 90) {
    const GemmKernelTable kernels = KernelsOf(args);
    for (const GemmKernelEntry& kernel : kernels) {
      if (takes_sm90 && &kernel - kernels.begin() != taken_kernel) continue;
      Way way;
      way.kind = Way::Kind::kSm90, way.kernel = &kernel;
      STOF_RETURN_IF_ERROR(Resident(kernel, facts.device, &way.clusters));
      if (way.clusters == 0) continue;
      way.time = Predict(kernel, args, way.clusters);
      ways->push_back(way);
    }
    if (ways->empty() && takes_sm90) return Status::Error("there is no such kernel");
    std::stable_sort(ways->begin(), ways->end(), [](const Way& a, const Way& b) { return a.time < b.time; });
    // What the model does not know is a tenth or two.
    constexpr double kNear = 1.3;
    while (ways->size() > 1 && (!timed || ways->back().time > kNear * ways->front().time)) ways->pop_back();
  }
  const bool lt = vectors && !takes_sm90 && LtFits(args);
  if (lt && takes_lt) ways->clear();
  if (lt) {
    const int count = LtAlgorithms(args, workspace, facts.device);
    const double flops = 2.0 * static_cast<double>(args.M) * static_cast<double>(args.N) * static_cast<double>(args.K);
    const bool first = ways->empty() || args.prefers_cublaslt || flops < kLtBelow * 1e-6 * ways->front().time;
    Way way;
    way.kind = Way::Kind::kLt;
    for (int i = 0; i < (timed ? count : std::min(count, 1)); ++i) {
      way.algorithm = i;
      ways->insert(i == 0 && first ? ways->begin() : ways->end(), way);
    }
  }
  if (!lt || !takes_lt) ways->push_back(Way());
  return Status();
}

// *done is false where this way cannot be taken.
Status RunSm90(const GemmArgs& args, const Way& way, void* stream, bool* done) {
  *done = false;
  const GemmKernelEntry& kernel = *way.kernel;
  const bool bf16 = args.dtype == DType::kBF16, pair = args.b1 != nullptr;
  GemmSm90Params p;
  // Each CTA of a cluster along M loads a share of b: kDepth / cluster_m rows of K, or columns / cluster_m rows of N.
  const auto describe_b = [&](const void* b, CUtensorMap* map) {
    if (args.is_b_transposed) {
      return Describe(b, bf16, args.N, args.K, args.stride, kernel.columns / kernel.cluster_m, map);
    }
    return Describe(b, bf16, args.K, args.N, args.stride, kDepth / kernel.cluster_m, map);
  };
  if (!Describe(args.a, bf16, args.M, args.K, args.K, kernel.rows / kernel.cluster_n, &p.a) ||
      !describe_b(args.b0, &p.b0) || !describe_b(pair ? args.b1 : args.b0, &p.b1) ||
      !Describe(args.output, bf16, args.M, args.N, args.N, 64, &p.output)) {
    return Status();
  }
  const int64_t m_tiles = Over(args.M, int64_t{kernel.rows} * kernel.cluster_m);
  const int64_t n_tiles = Over(args.N, int64_t{kernel.columns} * kernel.cluster_n);
  if (m_tiles * n_tiles > (int64_t{1} << 30)) return Status();
  p.epilogue = EpilogueOf(args);
  p.M = static_cast<int32_t>(args.M), p.N = static_cast<int32_t>(args.N);
  p.steps = static_cast<int32_t>(Over(args.K, kDepth));
  p.m_tiles = static_cast<int32_t>(m_tiles), p.n_tiles = static_cast<int32_t>(n_tiles);
  // What runs at one time is about as many rows as columns of weights: least is read then.
  const double side = std::sqrt(static_cast<double>(way.clusters) * kernel.cluster_n * kernel.columns * (pair ? 2 : 1) /
                                (static_cast<double>(kernel.cluster_m) * kernel.rows));
  p.band = static_cast<int32_t>(std::min<int64_t>(m_tiles, std::max<int64_t>(1, std::llround(side))));
  const auto clusters = static_cast<unsigned>(std::min<int64_t>(way.clusters, m_tiles * n_tiles));
  *done = true;
  return ToStatus(static_cast<cudaError_t>(kernel.launch(p, clusters, stream)), "launch of a GEMM");
}

Status RunSm80(const GemmArgs& args, void* stream) {
  GemmParams p;
  p.M = static_cast<int32_t>(args.M), p.N = static_cast<int32_t>(args.N), p.K = static_cast<int32_t>(args.K);
  p.stride = args.stride;
  p.a = args.a, p.b0 = args.b0, p.b1 = args.b1, p.output = args.output;
  p.epilogue = EpilogueOf(args);
  const bool bf16 = args.dtype == DType::kBF16, pair = args.b1 != nullptr;
  const GemmLaunch launch = FindGemmSm80(bf16, pair, ReadsVectors(args), args.is_b_transposed);
  return ToStatus(static_cast<cudaError_t>(launch(p, stream)), "launch of a GEMM");
}

Status RunWay(const GemmArgs& args, const Way& way, const RunContext& context, int device, bool* done) {
  *done = true;
  const GemmKernelTable kernels = KernelsOf(args);
  last_kernel.store(way.kind == Way::Kind::kSm90 ? static_cast<int>(way.kernel - kernels.begin())
                    : way.kind == Way::Kind::kLt ? kGemmCublasLt + way.algorithm
                                                 : kGemmSm80,
                    std::memory_order_relaxed);
  if (way.kind == Way::Kind::kSm90) return RunSm90(args, way, context.stream, done);
  if (way.kind == Way::Kind::kLt) return RunLt(args, context, device, way.algorithm, done);
  return RunSm80(args, context.stream);
}

// ---- ways that were timed ----
// By all that the ways and their order depend on: where timing fails, the first one is kept.
using ProblemKey =
    std::tuple<int, DType, bool, bool, bool, Activation, int32_t, uint32_t, size_t, int64_t, int64_t, int64_t, int64_t>;
struct TimedWays {
  std::mutex mutex;
  std::map<ProblemKey, Way> known;
};
// Sizes that change with every run must not be timed forever.
constexpr size_t kMostTimed = 64;

bool IsCapturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess) cudaGetLastError();
  return status != cudaStreamCaptureStatusNone;
}

// Memory of a run: all ways that are tried use one block, one after the other, of the size that is asked for first.
struct Block {
  const RunContext& context;
  size_t bytes = 0;
  void* data = nullptr;
  static void* Allocate(void* self, size_t bytes) {
    auto* const block = static_cast<Block*>(self);
    if (block->data == nullptr) {
      block->data = block->context.allocate(block->context.self, bytes);
      block->bytes = bytes;
    }
    return bytes <= block->bytes ? block->data : nullptr;
  }
};

// The way that was the fastest when this GEMM was first run; *found is false where that was not asked.
Status FindTimed(const GemmArgs& args, const RunContext& context, const Facts& facts, Way* way, bool* found) {
  static auto* const timed = new TimedWays;
  static const bool is_timed = ReadVariableOr(Variable::kGemmTiming, true);
  *found = false;
  if (!is_timed || taken_kernel != kGemmByModel) return Status();
  const ProblemKey key(facts.device, args.dtype, args.b1 != nullptr, args.is_b_transposed, args.prefers_cublaslt,
                       args.activation, EpilogueOf(args).has, ReadsVectors(args) ? LtAlignment(args) : 0,
                       context.allocate == nullptr ? 0 : LtWorkspace(args), args.M, args.N, args.K, args.stride);
  const std::lock_guard<std::mutex> lock(timed->mutex);
  const auto place = timed->known.find(key);
  if (place != timed->known.end()) {
    *way = place->second, *found = true;
    return Status();
  }
  if (!args.may_wait || timed->known.size() >= kMostTimed || IsCapturing(context.stream)) return Status();
  std::vector<Way> ways;
  STOF_RETURN_IF_ERROR(FindWays(args, context.allocate != nullptr, facts, true, &ways));
  if (ways.size() <= 2) return Status();  // nothing to choose: the 8.0 kernel is there for what no other one takes
  ways.pop_back();
  // Memory comes in the order of the context's stream, which is waited for before another one uses it. Without it, the
  // ways that need it cannot be taken.
  if (context.allocate != nullptr) (void)context.allocate(context.self, LtWorkspace(args));
  const auto queue = [&](int index, const RunContext& given, bool* done) {
    return RunWay(args, ways[static_cast<size_t>(index)], given, facts.device, done);
  };
  int best = 0;
  // What no model knows takes at least as long as at 500 TFLOPS.
  const double factors = 2.0 * static_cast<double>(args.M) * static_cast<double>(args.N) * static_cast<double>(args.K);
  const double at_least = factors * (args.b1 == nullptr ? 1 : 2) / 5e14;
  const double seconds = std::max({1e-6 * ways[0].time, 1e-6 * ways[1].time, 1e-6, at_least});
  // Where timing fails, the model's choice runs, or says why it cannot. It is kept, too: timing waits for the device,
  // and runs that do so each time would be worse than a choice that is not the best.
  if (!FastestWay(static_cast<int>(ways.size()), queue, context, seconds, &best).ok()) cudaGetLastError();
  *way = ways[static_cast<size_t>(std::max(best, 0))], *found = true;
  timed->known.emplace(key, *way);
  return Status();
}

}  // namespace

Status RunGemm(const GemmArgs& args, const RunContext& context) {
  STOF_RETURN_IF_ERROR(CheckNoTransposedPair(args));
  Facts facts;
  STOF_RETURN_IF_ERROR(GetFacts(&facts));
  if (facts.capability < 80) {
    return Status::Error("the device has compute capability " + std::to_string(facts.capability / 10) + "." +
                         std::to_string(facts.capability % 10) + ", the CUDA kernels need 8.0 or later");
  }
  Block block = {context};
  RunContext own = context;
  const bool may_divide = context.allocate != nullptr && args.b1 == nullptr && LtWorkspace(args) > 0;
  own.allocate = may_divide ? Block::Allocate : nullptr;
  own.self = &block;
  Way way;
  bool found = false, done = false;
  STOF_RETURN_IF_ERROR(FindTimed(args, own, facts, &way, &found));
  if (found) STOF_RETURN_IF_ERROR(RunWay(args, way, own, facts.device, &done));
  if (done) return Status();
  std::vector<Way> ways;
  STOF_RETURN_IF_ERROR(FindWays(args, own.allocate != nullptr, facts, false, &ways));
  for (size_t i = 0; i < ways.size() && !done; ++i) {
    STOF_RETURN_IF_ERROR(RunWay(args, ways[i], own, facts.device, &done));
  }
  return done ? Status() : Status::Error("cuBLASLt, which STOF_CUDA_GEMM asks for, does not compute this GEMM");
}

Status PlanGemmWorkspace(const GemmArgs& args, size_t* workspace) {
  STOF_RETURN_IF_ERROR(CheckNoTransposedPair(args));
  *workspace = args.most_workspace;
  return Status();
}

}  // namespace cuda
}  // namespace stof
