// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/device_properties.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "cuda/common/status.h"

namespace stof {
namespace cuda {

namespace {

// The value of an environment variable; 0 where it is unset.
int Limit(const char* variable) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? 0 : std::atoi(text);
}

}  // namespace

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
    found.capability = 10 * major + minor;
    // Tests run a kernel on a device that has a better one, and small problems with many tile rows a CTA.
    const int most = Limit("STOF_CUDA_CAPABILITY");
    if (most >= 80) found.capability = std::min(found.capability, most);
    const int few = Limit("STOF_CUDA_MULTIPROCESSORS");
    if (few > 0) found.sm_count = std::min(found.sm_count, few);
    const int shared = 1024 * std::min(Limit("STOF_CUDA_SHARED_KIB"), 1024);
    if (shared > 0 && shared < found.cta_shared_bytes) {
      found.cta_shared_bytes = shared;
      found.sm_shared_bytes = std::min(found.sm_shared_bytes, shared + kReservedSharedBytes);
    }
  }
  *properties = found;
  return Status();
}

}  // namespace cuda
}  // namespace stof
