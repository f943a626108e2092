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

// What the environment variable says; 0 without one.
int Limit(const char* variable) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? 0 : std::atoi(text);
}

}  // namespace

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
    // For tests of one kernel on a device that another serves better, and of many rows a worker in small problems.
    const int most = Limit("STOF_CUDA_CAPABILITY");
    if (most >= 80) found.capability = std::min(found.capability, most);
    const int few = Limit("STOF_CUDA_MULTIPROCESSORS");
    if (few > 0) found.multiprocessors = std::min(found.multiprocessors, few);
  }
  *facts = found;
  return Status();
}

}  // namespace cuda
}  // namespace stof
