// SPDX-License-Identifier: Apache-2.0
// From a matrix product to the launch: which kernel, its tensor maps, its grid.
#include "cuda/gemm.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "cuda/device_mask.h"
#include "plugins/core/gemm.h"

namespace stof {
namespace cuda {

const GemmSm90Kernel* FindGemmSm90F16(bool pair);
const GemmSm90Kernel* FindGemmSm90Bf16(bool pair);

const GemmSm90Kernel* FindGemmSm90(bool bf16, bool pair) {
#if defined(STOF_SM90)
  return bf16 ? FindGemmSm90Bf16(pair) : FindGemmSm90F16(pair);
#else
  static constexpr GemmSm90Kernel kNone;
  (void)bf16, (void)pair;
  return &kNone;
#endif
}

// For the program that times kernels: that one alone is taken; -1: the model's choice. STOF_CUDA_GEMM is the same.
static int taken_kernel = [] {
  const char* text = std::getenv("STOF_CUDA_GEMM");
  return text == nullptr ? -1 : std::atoi(text);
}();
void TakeGemmKernel(int index) { taken_kernel = index; }

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
  // For tests of one kernel on a device that another serves better.
  static const int most = [] {
    const char* text = std::getenv("STOF_CUDA_CAPABILITY");
    return text == nullptr ? 0 : std::atoi(text);
  }();
  if (most >= 80) facts->capability = std::min(facts->capability, most);
  return Status();
}

// How many clusters of a kernel the device holds at once; asked once.
Status Resident(const GemmSm90Kernel& kernel, int device, int* clusters) {
  static std::mutex mutex;
  static std::map<std::pair<const GemmSm90Kernel*, int>, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  int& found = known[{&kernel, device}];
  if (found == 0) {
    STOF_RETURN_IF_ERROR(ToStatus(static_cast<cudaError_t>(kernel.resident(&found)), "clusters of a matrix product"));
    if (found == 0) return Status::Error("a device of compute capability 9.0 holds no cluster of a matrix product");
  }
  *clusters = found;
  return Status();
}

int64_t Over(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool IsAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Whether rows are read 16 bytes at a time.
bool ReadsVectors(const GemmArgs& args) {
  return args.K % 8 == 0 && args.N % 8 == 0 && args.stride % 8 == 0 && IsAligned(args.a) && IsAligned(args.b0) &&
         IsAligned(args.b1) && IsAligned(args.output) && IsAligned(args.bias0) && IsAligned(args.bias1) &&
         IsAligned(args.scale) && IsAligned(args.residual);
}

GemmTail TailOf(const GemmArgs& args) {
  GemmTail tail;
  tail.activation = static_cast<int32_t>(args.activation);
  tail.bias0 = args.bias0, tail.bias1 = args.bias1, tail.scale = args.scale;
  tail.row = args.row, tail.residual = args.residual;
  const auto flag = [&tail](const void* p, int32_t bit) { tail.has |= p != nullptr ? bit : 0; };
  flag(args.bias0, kHasBias0);
  flag(args.bias1, kHasBias1);
  flag(args.scale, kHasScale);
  flag(args.row, kHasRow);
  flag(args.residual, kHasResidual);
  return tail;
}

// Microseconds that a kernel is expected to take. CTAs that share a multiprocessor share its tensor cores: their steps
// count one after the other, what comes behind them once.
double Predict(const GemmSm90Kernel& kernel, const GemmArgs& args, int clusters) {
  const int64_t tiles =
      Over(args.M, int64_t{kernel.rows} * kernel.cluster_m) * Over(args.N, int64_t{kernel.columns} * kernel.cluster_n);
  const auto steps = static_cast<double>(Over(args.K, kDepth) * Over(tiles * kernel.ctas, clusters));
  const double activation = args.activation == GemmActivation::kNone   ? 0.0
                            : args.activation == GemmActivation::kRelu ? 0.15
                                                                       : 1.0;
  return kernel.step * steps + (kernel.tile + kernel.gelu * activation) * static_cast<double>(Over(tiles, clusters));
}

Status RunSm90(const GemmArgs& args, const GemmSm90Kernel* kernels, int device, void* stream, bool* done) {
  *done = false;
  const GemmSm90Kernel* best = nullptr;
  int best_clusters = 0;
  double least = 0;
  for (const GemmSm90Kernel* kernel = kernels; kernel->launch != nullptr; ++kernel) {
    if (taken_kernel >= 0 && kernel - kernels != taken_kernel) continue;
    int clusters = 0;
    STOF_RETURN_IF_ERROR(Resident(*kernel, device, &clusters));
    const double time = Predict(*kernel, args, clusters);
    if (best == nullptr || time < least) best = kernel, least = time, best_clusters = clusters;
  }
  if (best == nullptr) return taken_kernel < 0 ? Status() : Status::Error("there is no such kernel");
  const bool bf16 = args.dtype == DType::kBF16, pair = args.b1 != nullptr;
  GemmSm90Params p;
  if (!Describe(args.a, bf16, args.M, args.K, args.K, best->rows / best->cluster_n, &p.a) ||
      !Describe(args.b0, bf16, args.K, args.N, args.stride, kDepth / best->cluster_m, &p.b0) ||
      !Describe(pair ? args.b1 : args.b0, bf16, args.K, args.N, args.stride, kDepth / best->cluster_m, &p.b1) ||
      !Describe(args.output, bf16, args.M, args.N, args.N, 64, &p.output)) {
    return Status();
  }
  const int64_t m_tiles = Over(args.M, int64_t{best->rows} * best->cluster_m);
  const int64_t n_tiles = Over(args.N, int64_t{best->columns} * best->cluster_n);
  if (m_tiles * n_tiles > (int64_t{1} << 30)) return Status();
  p.tail = TailOf(args);
  p.M = static_cast<int32_t>(args.M), p.N = static_cast<int32_t>(args.N);
  p.steps = static_cast<int32_t>(Over(args.K, kDepth));
  p.m_tiles = static_cast<int32_t>(m_tiles), p.n_tiles = static_cast<int32_t>(n_tiles);
  // What runs at one time is about as many rows as columns of weights: least is read then.
  const double side = std::sqrt(static_cast<double>(best_clusters) * best->cluster_n * best->columns * (pair ? 2 : 1) /
                                (static_cast<double>(best->cluster_m) * best->rows));
  p.band = static_cast<int32_t>(std::min<int64_t>(m_tiles, std::max<int64_t>(1, std::llround(side))));
  const auto clusters = static_cast<unsigned>(std::min<int64_t>(best_clusters, m_tiles * n_tiles));
  *done = true;
  return ToStatus(static_cast<cudaError_t>(best->launch(p, clusters, stream)), "launch of a matrix product");
}

Status Run(const GemmArgs& args, const RunContext& context) {
  Facts facts;
  STOF_RETURN_IF_ERROR(GetFacts(&facts));
  if (facts.capability < 80) {
    return Status::Error("the device has compute capability " + std::to_string(facts.capability / 10) + "." +
                         std::to_string(facts.capability % 10) + ", the CUDA kernels need 8.0 or later");
  }
  const bool bf16 = args.dtype == DType::kBF16, pair = args.b1 != nullptr, vectors = ReadsVectors(args);
  if (facts.capability == 90 && vectors && args.K > 0) {
    bool done = false;
    STOF_RETURN_IF_ERROR(RunSm90(args, FindGemmSm90(bf16, pair), facts.device, context.stream, &done));
    if (done) return Status();
  }
  GemmParams p;
  p.M = static_cast<int32_t>(args.M), p.N = static_cast<int32_t>(args.N), p.K = static_cast<int32_t>(args.K);
  p.stride = args.stride;
  p.a = args.a, p.b0 = args.b0, p.b1 = args.b1, p.output = args.output;
  p.tail = TailOf(args);
  return ToStatus(static_cast<cudaError_t>(FindGemmSm80(bf16, pair, vectors)(p, context.stream)),
                  "launch of a matrix product");
}

Status Plan(const GemmArgs&, size_t* workspace) {
  *workspace = 0;
  return Status();
}

}  // namespace
}  // namespace cuda

const GemmBackend* FindGemmBackend() {
  static constexpr GemmBackend kBackend = {cuda::Run, cuda::Plan};
  return &kBackend;
}

}  // namespace stof
