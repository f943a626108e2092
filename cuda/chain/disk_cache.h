// SPDX-License-Identifier: Apache-2.0
// Compiled kernels of chains on disk, for the next process. What lies there is code, so that only a folder of the
// user's own is used (0700, no link), and every entry is checked: its whole key, and a hash of its content. One that is
// damaged or not the user's counts as missing. Entries are written beside and renamed: several processes may share the
// folder.
#ifndef STOF_CUDA_CHAIN_DISK_CACHE_H_
#define STOF_CUDA_CHAIN_DISK_CACHE_H_

#include <cstdint>
#include <string>

namespace stof {
namespace cuda {

// STOF_CHAIN_CACHE, or stof/chains in the user's folder for caches; empty where it is "off" or there is no such folder.
std::string ChainCacheFolder();
bool LoadCachedChain(const std::string& folder, const std::string& key, std::string* code);
// False where it could not be kept. Where all entries would take more than 256 MiB, or `most` bytes, the oldest go.
bool StoreCachedChain(const std::string& folder, const std::string& key, const std::string& code);
bool StoreCachedChain(const std::string& folder, const std::string& key, const std::string& code, int64_t most);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHAIN_DISK_CACHE_H_
