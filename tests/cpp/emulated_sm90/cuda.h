// SPDX-License-Identifier: Apache-2.0
// In place of the driver's header: what a TMA map of a tensor [heads, rows, size] of 16-bit elements says.
#pragma once
#include <cstdint>

struct CUtensorMap {
  const void* data = nullptr;
  int64_t size = 0, rows = 0;
  int32_t box_rows = 0;
};
