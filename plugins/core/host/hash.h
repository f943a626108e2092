// SPDX-License-Identifier: Apache-2.0
// A 64-bit hash that is the same on every machine and in every build, which std::hash is not.
#ifndef STOF_PLUGINS_CORE_HOST_HASH_H_
#define STOF_PLUGINS_CORE_HOST_HASH_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace stof {

inline uint64_t MixHash(uint64_t hash, uint64_t word) {
  uint64_t x = (hash ^ word) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Mixes words, for keys of several fields.
inline uint64_t HashWords(std::initializer_list<uint64_t> words, uint64_t hash = 0) {
  for (const uint64_t word : words) hash = MixHash(hash, word);
  return hash;
}

// The hash of a key for std::unordered_map: that of its member Hash().
struct KeyHash {
  template <typename Key>
  size_t operator()(const Key& key) const {
    return static_cast<size_t>(key.Hash());
  }
};

inline uint64_t HashBytes(const void* data, size_t size, uint64_t seed) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint64_t hash = MixHash(seed, size);
  for (; size >= 8; bytes += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    hash = MixHash(hash, word);
  }
  if (size == 0) return hash;
  uint64_t rest = 0;
  std::memcpy(&rest, bytes, size);
  return MixHash(hash, rest);
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_HOST_HASH_H_
