// SPDX-License-Identifier: Apache-2.0
// Launches the cluster kernel; the tables of the decode kernels.
#ifndef STOF_CUDA_ATTENTION_DECODE_CLUSTER_LAUNCH_CUH_
#define STOF_CUDA_ATTENTION_DECODE_CLUSTER_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <mutex>

#include "cuda/attention/decode/cluster.cuh"
#include "cuda/attention/decode/splitkv_launch.cuh"

namespace stof {
namespace cuda {

template <int kHead, typename T, int kBlocks, bool kColumns>
struct ClusterLauncher {
  using S = ClusterShape<kHead, T, kBlocks>;

  static const void* Kernel() { return reinterpret_cast<const void*>(DecodeCluster<kHead, T, kBlocks, kColumns>); }

  static cudaLaunchConfig_t Describe(int64_t ctas, cudaLaunchAttribute* cluster, int size, cudaStream_t stream) {
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim.x = static_cast<unsigned>(size);
    cluster->val.clusterDim.y = cluster->val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(S::kThreads);
    config.dynamicSmemBytes = S::kSharedBytes;
    config.stream = stream;
    config.attrs = cluster;
    config.numAttrs = 1;
    return config;
  }

  // clusters[i]: the number of clusters of 2^i CTAs that the current device runs at once; 0 where code or shared memory
  // do not suffice. Each device is asked once.
  static void Clusters(int (&clusters)[kClusterSizes]) {
    constexpr int kDevices = 64;
    struct PerDevice {
      bool asked = false;
      int clusters[kClusterSizes] = {};
    };
    static std::mutex mutex;
    static PerDevice all[kDevices];
    PerDevice known;
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess && device < kDevices) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!all[device].asked) {
        Ask(all[device].clusters);
        all[device].asked = true;
      }
      known = all[device];
    }
    for (int i = 0; i < kClusterSizes; ++i) clusters[i] = known.clusters[i];
  }

  static void Ask(int (&clusters)[kClusterSizes]) {
    cudaFuncAttributes attributes = {};
    cudaError_t error = cudaFuncGetAttributes(&attributes, Kernel());
    if (error == cudaSuccess && (attributes.ptxVersion < 90 || attributes.binaryVersion < 90)) return;
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(Kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
    }
    int device = 0, sm_count = 0;
    if (error == cudaSuccess) error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    }
    if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters[0], Kernel(), S::kThreads, S::kSharedBytes);
      clusters[0] *= sm_count;
    }
    for (int i = 1; i < kClusterSizes && error == cudaSuccess; ++i) {
      cudaLaunchAttribute attribute;
      const cudaLaunchConfig_t config = Describe(int64_t{1} << i, &attribute, 1 << i, nullptr);
      error = cudaOccupancyMaxActiveClusters(&clusters[i], Kernel(), &config);
    }
    if (error != cudaSuccess) {
      for (int& count : clusters) count = 0;
      cudaGetLastError();  // cleared, so that no later call reports it
    }
  }

  static int Run(const DecodeParams& params, void* stream) {
    const AttentionParams& p = params.attention;
    const int64_t blocks = (int64_t{params.heads} * p.S + S::kRows - 1) / S::kRows * (p.H / p.G / params.heads);
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = Describe(int64_t{p.B} * p.G * params.splits * blocks, attributes, params.splits,
                                         static_cast<cudaStream_t>(stream));
    // Programmatic dependent launch: the kernel may start early and waits for the previous one itself.
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    if (params.splits == 1) config.attrs = attributes + 1;
    config.numAttrs = params.splits == 1 ? 1 : 2;
    DecodeParams copy = params;
    void* arguments[] = {&copy};
    return static_cast<int>(cudaLaunchKernelExC(&config, Kernel(), arguments));
  }
};

template <int kHead, typename T, int kBlocks>
constexpr DecodeCode MakeClusterCode() {
  using Launcher = ClusterLauncher<kHead, T, kBlocks, false>;
  using ColumnLauncher = ClusterLauncher<kHead, T, kBlocks, true>;
  DecodeCode code;
  code.tiles_at_once = Launcher::S::kTilesAtOnce;
  code.launch = Launcher::Run;
  code.launch_columns = ColumnLauncher::Run;
  code.clusters = Launcher::Clusters;
  code.clusters_columns = ColumnLauncher::Clusters;
  return code;
}
template <int kHead, typename T, int kBlocks>
constexpr DecodeCode kClusterCode = MakeClusterCode<kHead, T, kBlocks>();

template <int kHead, typename T, int kBlocks>
constexpr KernelEntry MakeClusterKernel() {
  using S = ClusterShape<kHead, T, kBlocks>;
  KernelEntry kernel;
  kernel.name = "decode-cluster";
  kernel.head_size = kHead;
  kernel.rows = S::kRows, kernel.keys = kTileKeys;
  kernel.code = &kClusterCode<kHead, T, kBlocks>;
  return kernel;
}

// kBlocks: blocks of 8 query rows that a CTA computes.
template <int kHead, typename T, int kBlocks>
constexpr KernelEntry kDecodeKernels[] = {MakeSplitKvKernel<kHead, T, T, kBlocks, KeySource::kCache>(),
                                          MakeClusterKernel<kHead, T, kBlocks>()};

template <typename T>
KernelTable FindDecode(const KernelProblem& problem) {
  const bool few = problem.packed_queries <= 8;
  if (problem.head_size <= 64) return few ? kDecodeKernels<64, T, 1> : kDecodeKernels<64, T, 2>;
  if (problem.head_size <= 128) return few ? kDecodeKernels<128, T, 1> : kDecodeKernels<128, T, 2>;
  return kDecodeKernels<256, T, 1>;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_CLUSTER_LAUNCH_CUH_
