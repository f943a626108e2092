// SPDX-License-Identifier: Apache-2.0
// Properties of a device that the choice of kernels needs; each device is asked once.
#ifndef STOF_CUDA_COMMON_DEVICE_PROPERTIES_H_
#define STOF_CUDA_COMMON_DEVICE_PROPERTIES_H_

#include <cstdint>

#include "plugins/core/base/status.h"

namespace stof {
namespace cuda {

struct DeviceProperties {
  int capability = 0;  // 10 * major + minor
  int sm_count = 0;
  int64_t l2_bytes = 0;
  double peak_bandwidth = 0.0;  // of its memory, bytes a nanosecond; 0: not known
  int cta_shared_bytes = 0;     // most shared memory of a CTA
  int sm_shared_bytes = 0;      // of an SM
  int device = 0;               // its number in this process
};

// Shared memory of each CTA that the driver takes for itself.
constexpr int kReservedSharedBytes = 1024;

// Those of the current device. STOF_CUDA_CAPABILITY, STOF_CUDA_MULTIPROCESSORS and STOF_CUDA_SHARED_KIB lower them, for
// tests.
Status GetDeviceProperties(DeviceProperties* properties);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_DEVICE_PROPERTIES_H_
