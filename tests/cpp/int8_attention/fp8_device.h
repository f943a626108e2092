// SPDX-License-Identifier: Apache-2.0
// What the device of the tests computes of attribute precision = "int8_fp8".
#pragma once
#include "cuda/common/device_properties.h"
#include "tests/cpp/check.h"

namespace stof::test::int8 {

// Whether kernels with values in fp8 run; others than those of 9.0 compute in int8 and 16 bits.
inline bool HasFp8() {
  cuda::DeviceProperties device;
  CHECK(cuda::GetDeviceProperties(&device).ok());
  return device.capability == 90;
}

}  // namespace stof::test::int8
