// SPDX-License-Identifier: Apache-2.0
// The sm90 kernels: their predicted times, tensor maps and grids.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/common/status.h"
#include "cuda/common/tensor_map.h"
#include "cuda/gemm/kernel_table.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {

GemmKernelTable FindGemmSm90F16(bool pair, bool is_b_transposed);
GemmKernelTable FindGemmSm90Bf16(bool pair, bool is_b_transposed);

GemmKernelTable FindGemmSm90(const GemmProblem& problem) {
#if defined(STOF_SM90)
  return problem.dtype == DType::kBF16 ? FindGemmSm90Bf16(problem.is_pair, problem.is_b_transposed)
                                       : FindGemmSm90F16(problem.is_pair, problem.is_b_transposed);
#else
  (void)problem;
  return GemmKernelTable();
#endif
}

namespace {

constexpr int kDepth = 64;  // of a step

// Of each activation in an epilogue, as a share of GELU's.
constexpr double kActivationCosts[] = {
#define STOF_COST(function, name, gives_zeros, chain_op, cublaslt, cost) cost,
    STOF_ACTIVATIONS(STOF_COST)
#undef STOF_COST
};

// Boxes of 64 columns by `box_rows` of a matrix [rows, columns].
bool EncodeMap(const void* data, bool bf16, int64_t rows, int64_t columns, int64_t stride, int box_rows,
               CUtensorMap* map) {
  const PFN_cuTensorMapEncodeTiled_v12000 encode = FindTensorMapEncode();
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

// How many clusters of a kernel the device holds at once, 0 where a part of one is too small for it.
Status CountResidentClusters(const GemmKernelEntry& kernel, int device, int* clusters) {
  static std::mutex mutex;
  static auto* const counts = new std::map<std::pair<const GemmKernelEntry*, int>, int>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [count, is_new] = counts->try_emplace({&kernel, device}, 0);
  if (is_new) {
    const Status status = ToStatus(static_cast<cudaError_t>(kernel.resident(&count->second)), "clusters of a GEMM");
    if (!status.ok()) {
      counts->erase(count);
      return status;
    }
  }
  *clusters = count->second;
  return Status();
}

int64_t CountTilesM(const GemmKernelEntry& kernel, int64_t M) {
  return CeilDiv(M, int64_t{kernel.rows} * kernel.cluster_m);
}
int64_t CountTilesN(const GemmKernelEntry& kernel, int64_t N) {
  return CeilDiv(N, int64_t{kernel.columns} * kernel.cluster_n);
}

// Nanoseconds that a kernel is expected to take. CTAs that share an SM share its tensor cores: their steps count one
// after the other, what comes behind them once. docs/design/gemm.md says how the costs were fitted.
double Predict(const GemmKernelEntry& kernel, const GemmProblem& problem, int clusters) {
  constexpr double kStart = 2.0;  // microseconds, as the costs
  const int64_t tiles = CountTilesM(kernel, problem.M) * CountTilesN(kernel, problem.N);
  const auto steps = static_cast<double>(CeilDiv(problem.K, kDepth) * CeilDiv(tiles * kernel.ctas, clusters));
  const double activation = kActivationCosts[static_cast<int>(problem.activation)];
  const double residual = (problem.epilogue & kHasResidual) == 0 ? 0.0 : double{kernel.residual};
  const double tile = kernel.tile + kernel.gelu * activation + residual;
  return 1e3 * (kStart + kernel.step * steps + tile * static_cast<double>(CeilDiv(tiles, clusters)));
}

Status Plan(const GemmArgs&, const GemmProblem& problem, std::vector<GemmPlan>* plans) {
  // wgmma exists on 9.0 alone.
  if (problem.capability != 90 || !problem.has_vectors || problem.K == 0) return Status();
  for (const GemmKernelEntry& kernel : FindGemmSm90(problem)) {
    int clusters = 0;
    STOF_RETURN_IF_ERROR(CountResidentClusters(kernel, problem.device, &clusters));
    if (clusters == 0) continue;
    GemmPlan plan;
    plan.family = &kGemmSm90Family, plan.kernel = &kernel;
    plan.rows = kernel.rows, plan.cluster = kernel.cluster_m * kernel.cluster_n, plan.persistent = clusters;
    plan.nanoseconds = Predict(kernel, problem, clusters);
    plans->push_back(plan);
  }
  return Status();
}

Status Run(const GemmArgs& args, const GemmProblem& problem, const GemmPlan& plan, const RunContext& context,
           bool* done) {
  *done = false;
  const GemmKernelEntry& kernel = *plan.kernel;
  const bool bf16 = args.dtype == DType::kBF16;
  GemmSm90Params p;
  // Each CTA of a cluster along M loads a share of b: kDepth / cluster_m rows of K, or columns / cluster_m rows of N.
  const auto encode_b = [&](const void* b, CUtensorMap* map) {
    if (args.is_b_transposed) {
      return EncodeMap(b, bf16, args.N, args.K, args.stride, kernel.columns / kernel.cluster_m, map);
    }
    return EncodeMap(b, bf16, args.K, args.N, args.stride, kDepth / kernel.cluster_m, map);
  };
  if (!EncodeMap(args.a, bf16, args.M, args.K, args.K, kernel.rows / kernel.cluster_n, &p.a) ||
      !encode_b(args.b0, &p.b0) || !encode_b(problem.is_pair ? args.b1 : args.b0, &p.b1) ||
      !EncodeMap(args.output, bf16, args.M, args.N, args.N, 64, &p.output)) {
    return Status();
  }
  const int64_t m_tiles = CountTilesM(kernel, args.M), n_tiles = CountTilesN(kernel, args.N);
  if (m_tiles * n_tiles > (int64_t{1} << 30)) return Status();
  p.epilogue = EpilogueOf(args);
  p.M = static_cast<int32_t>(args.M), p.N = static_cast<int32_t>(args.N);
  p.steps = static_cast<int32_t>(CeilDiv(args.K, kDepth));
  p.m_tiles = static_cast<int32_t>(m_tiles), p.n_tiles = static_cast<int32_t>(n_tiles);
  // What runs at one time is about as many rows as columns of weights: least is read then.
  const double side = std::sqrt(static_cast<double>(plan.persistent) * kernel.cluster_n * kernel.columns *
                                (problem.is_pair ? 2 : 1) / (static_cast<double>(kernel.cluster_m) * kernel.rows));
  p.band = static_cast<int32_t>(std::min<int64_t>(m_tiles, std::max<int64_t>(1, std::llround(side))));
  const auto clusters = static_cast<unsigned>(std::min<int64_t>(plan.persistent, m_tiles * n_tiles));
  *done = true;
  return ToStatus(static_cast<cudaError_t>(kernel.launch(p, clusters, context.stream)), "launch of a GEMM");
}

void ListNames(std::vector<std::string>* names) {
  names->push_back("sm90");
  for (const bool is_pair : {false, true}) {
    for (const bool is_b_transposed : {false, true}) {
      GemmProblem problem;
      problem.is_pair = is_pair, problem.is_b_transposed = is_b_transposed;
      for (const GemmKernelEntry& kernel : FindGemmSm90(problem)) {
        const std::string name = KernelName(kernel);
        if (std::find(names->begin(), names->end(), name) == names->end()) names->push_back(name);
      }
    }
  }
}

}  // namespace

const GemmFamily kGemmSm90Family = {"sm90", Plan, Run, ListNames};

}  // namespace cuda
}  // namespace stof
