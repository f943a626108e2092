// SPDX-License-Identifier: Apache-2.0
// In place of the driver's header: what a TMA map of a dense tensor [batches, heads, rows, size] says. A swizzled row
// of its boxes has `span` bytes.
#pragma once
#include <cstdint>

struct CUtensorMap {
  const void* data = nullptr;
  int64_t size = 0, rows = 0;
  int32_t box_rows = 0;
  int64_t heads = 1;
  int32_t item = 2, span = 128;  // bytes of an element and of a swizzled row
};
