// SPDX-License-Identifier: Apache-2.0
// What is asked of a device once.
#ifndef STOF_CUDA_COMMON_DEVICE_PROPERTIES_H_
#define STOF_CUDA_COMMON_DEVICE_PROPERTIES_H_

#include <cstdint>

#include "plugins/core/contract/status.h"

namespace stof {
namespace cuda {

struct DeviceFacts {
  int capability = 0;  // 10 * major + minor
  int multiprocessors = 0;
  int64_t l2_bytes = 0;
};

// Those of the current device.
Status Facts(DeviceFacts* facts);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_DEVICE_PROPERTIES_H_
