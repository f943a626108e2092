// SPDX-License-Identifier: Apache-2.0
// Checks which buffers of KV caches are one, for StofCachedAttention and StofPagedAttention.
#include <cstdint>
#include <string>

#include "plugins/core/ops/cached_attention.h"

namespace stof {
namespace {

bool Overlap(const Tensor& first, const Tensor& second) {
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data); };
  const auto bytes = [](const Tensor& t) { return static_cast<uintptr_t>(t.Elements() * SizeOf(t.dtype)); };
  if (bytes(first) == 0 || bytes(second) == 0) return false;
  return begin(first) < begin(second) + bytes(second) && begin(second) < begin(first) + bytes(first);
}

}  // namespace

Status CheckCacheBuffers(const Tensor* past, const Tensor* present, const CacheNames& names) {
  if (Overlap(present[0], present[1])) {
    return Status::Error(std::string(names.present[0]) + " and " + names.present[1] +
                         " overlap in memory, expected a buffer each");
  }
  if (past == nullptr) return Status();
  bool share[2];
  for (int i = 0; i < 2; ++i) share[i] = past[i].data == present[i].data && Overlap(past[i], present[i]);
  if (share[0] != share[1]) {
    return Status::Error("past and present share the buffer of keys or of values alone, expected both or none");
  }
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 2; ++k) {
      if (!Overlap(past[i], present[k]) || (i == k && share[i])) continue;
      return Status::Error(std::string(names.past[i]) + " and " + names.present[k] + " overlap in memory, expected " +
                           (i == k ? "one buffer or two" : "a buffer each"));
    }
  }
  return Status();
}

}  // namespace stof
