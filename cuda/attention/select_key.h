// SPDX-License-Identifier: Apache-2.0
// Keys under which the choice among attention kernels is remembered. Plain C++.
#ifndef STOF_CUDA_ATTENTION_SELECT_KEY_H_
#define STOF_CUDA_ATTENTION_SELECT_KEY_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "plugins/core/host/hash.h"
#include "plugins/core/mask/expr.h"

namespace stof {
namespace cuda {

struct KernelEntry;

// What both choices depend on.
struct ProblemKey {
  uint64_t mask_hash = 0;
  ExprSizes sizes;
  int sm_count = 0;
};
inline bool operator==(const ProblemKey& a, const ProblemKey& b) {
  return a.mask_hash == b.mask_hash && a.sizes.B == b.sizes.B && a.sizes.H == b.sizes.H && a.sizes.S == b.sizes.S &&
         a.sizes.T == b.sizes.T && a.sizes.P == b.sizes.P && a.sm_count == b.sm_count;
}
inline uint64_t Hash(const ProblemKey& key) {
  uint64_t hash = key.mask_hash;
  for (const int64_t x : {key.sizes.B, key.sizes.H, key.sizes.S, key.sizes.T, key.sizes.P, int64_t{key.sm_count}}) {
    hash = MixHash(hash, static_cast<uint64_t>(x));
  }
  return hash;
}
inline std::string Print(const ProblemKey& key) {
  return "mask " + std::to_string(key.mask_hash) + ", B " + std::to_string(key.sizes.B) + ", H " +
         std::to_string(key.sizes.H) + ", S " + std::to_string(key.sizes.S) + ", T " + std::to_string(key.sizes.T) +
         ", P " + std::to_string(key.sizes.P) + ", " + std::to_string(key.sm_count) + " SMs";
}

// The choice of a scheduled kernel.
struct SelectKey {
  const KernelEntry* kernels = nullptr;  // the first one of the table
  ProblemKey problem;
  int64_t l2_heads = 0, kv_bytes = 0;
};
inline bool operator==(const SelectKey& a, const SelectKey& b) {
  return a.kernels == b.kernels && a.problem == b.problem && a.l2_heads == b.l2_heads && a.kv_bytes == b.kv_bytes;
}
inline uint64_t Hash(const SelectKey& key) {
  uint64_t hash = MixHash(Hash(key.problem), reinterpret_cast<uintptr_t>(key.kernels));
  hash = MixHash(hash, static_cast<uint64_t>(key.l2_heads));
  return MixHash(hash, static_cast<uint64_t>(key.kv_bytes));
}
inline std::string Print(const SelectKey& key) {
  return Print(key.problem) + ", " + std::to_string(key.l2_heads) + " heads in L2, " + std::to_string(key.kv_bytes) +
         " bytes of keys and values";
}

// The choice between a tiled kernel and the row-wise one.
struct RowwiseKey {
  const KernelEntry* kernel = nullptr;  // the tiled or scheduled one
  ProblemKey problem;
  int head_bytes = 0;
  bool fp32 = false;
};
inline bool operator==(const RowwiseKey& a, const RowwiseKey& b) {
  return a.kernel == b.kernel && a.problem == b.problem && a.head_bytes == b.head_bytes && a.fp32 == b.fp32;
}
inline uint64_t Hash(const RowwiseKey& key) {
  const uint64_t hash = MixHash(Hash(key.problem), reinterpret_cast<uintptr_t>(key.kernel));
  return MixHash(hash, static_cast<uint64_t>(2 * key.head_bytes + (key.fp32 ? 1 : 0)));
}
inline std::string Print(const RowwiseKey& key) {
  return Print(key.problem) + ", " + std::to_string(key.head_bytes) + " bytes a key" + (key.fp32 ? ", fp32" : "");
}

// The hash of these keys for std::unordered_map.
struct SelectionKeyHash {
  template <typename Key>
  size_t operator()(const Key& key) const {
    return static_cast<size_t>(Hash(key));
  }
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SELECT_KEY_H_
