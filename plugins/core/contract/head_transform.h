// SPDX-License-Identifier: Apache-2.0
// What is done to each head of a query or key before attention: an RMS norm, then a rotary embedding.
#ifndef STOF_PLUGINS_CORE_CONTRACT_HEAD_TRANSFORM_H_
#define STOF_PLUGINS_CORE_CONTRACT_HEAD_TRANSFORM_H_

#include <cstdint>

namespace stof {

// Tensors have the type of query. On a device all pointers are device addresses.
struct HeadTransformArgs {
  // ---- RMS norm; nullptr: none ----
  const void* query_norm = nullptr;  // [D]
  const void* key_norm = nullptr;
  float epsilon = 1e-6f;
  // ---- rotary embedding behind it; cos nullptr: none ----
  const void* cos = nullptr;  // [rotary_rows, rotary_size / 2]
  const void* sin = nullptr;
  int64_t rotary_rows = 0, rotary_size = 0;
  int64_t rotary_offset = 0;  // the first rotated element of a head
  bool is_interleaved = false;
  const int64_t* position_ids = nullptr;  // [B, S]; nullptr: the position is that of the row in the cache

  // Whether there is a norm or an embedding.
  bool given() const { return cos != nullptr || query_norm != nullptr; }
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_HEAD_TRANSFORM_H_
