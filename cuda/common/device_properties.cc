// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/device_properties.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <mutex>

#include "cuda/common/status.h"
#include "plugins/core/host/environment.h"

namespace stof {
namespace cuda {

Status GetDeviceProperties(DeviceProperties* properties) {
  constexpr int kDevices = 64;
  static std::mutex mutex;
  static DeviceProperties known[kDevices];
  int device = 0;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "current device"));
  const std::lock_guard<std::mutex> lock(mutex);
  DeviceProperties scratch;
  DeviceProperties& found = device < kDevices ? known[device] : scratch;
  if (found.capability == 0) {
    int major = 0, minor = 0, l2 = 0;
    STOF_RETURN_IF_ERROR(ToStatus(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device"));
    STOF_RETURN_IF_ERROR(ToStatus(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "device"));
    STOF_RETURN_IF_ERROR(ToStatus(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device), "device"));
    STOF_RETURN_IF_ERROR(
        ToStatus(cudaDeviceGetAttribute(&found.sm_count, cudaDevAttrMultiProcessorCount, device), "device"));
    found.l2_bytes = l2;
    STOF_RETURN_IF_ERROR(ToStatus(
        cudaDeviceGetAttribute(&found.cta_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "device"));
    STOF_RETURN_IF_ERROR(ToStatus(
        cudaDeviceGetAttribute(&found.sm_shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), "device"));
    // Without them the cost models take an H100's.
    int kilohertz = 0, bits = 0;
    if (cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device) == cudaSuccess) {
      found.peak_bandwidth = 2e-6 * kilohertz * bits / 8;
    }
    found.device = device;
    // Tests run a kernel on a device that has a better one, small problems with many tile rows a CTA, and what devices
    // with little shared memory run.
    int64_t most_capability = 10 * major + minor, most_sms = found.sm_count;
    int64_t most_kib = std::numeric_limits<int>::max() / 1024;
    STOF_RETURN_IF_ERROR(GetVariable(Variable::kCudaCapability, &most_capability));
    STOF_RETURN_IF_ERROR(GetVariable(Variable::kCudaMultiprocessors, &most_sms));
    STOF_RETURN_IF_ERROR(GetVariable(Variable::kCudaSharedKib, &most_kib));
    found.sm_count = static_cast<int>(std::min<int64_t>(found.sm_count, most_sms));
    if (const int shared = static_cast<int>(1024 * most_kib); shared < found.cta_shared_bytes) {
      found.cta_shared_bytes = shared;
      found.sm_shared_bytes = std::min(found.sm_shared_bytes, shared + kReservedSharedBytes);
    }
    found.capability = static_cast<int>(std::min<int64_t>(10 * major + minor, most_capability));
  }
  *properties = found;
  return Status();
}

}  // namespace cuda
}  // namespace stof
