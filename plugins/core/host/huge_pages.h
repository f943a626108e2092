// SPDX-License-Identifier: Apache-2.0
// Memory for weights, which every run reads as a whole. With pages of 4 KiB their page tables would not fit the caches.
#ifndef STOF_PLUGINS_CORE_HOST_HUGE_PAGES_H_
#define STOF_PLUGINS_CORE_HOST_HUGE_PAGES_H_

#include <cstddef>
#include <memory>
#include <new>

#include "plugins/core/host/platform.h"

namespace stof {

constexpr size_t kHugePage = size_t{1} << 21;

struct FreeHugePages {
  void operator()(void* memory) const { ::operator delete[](memory, std::align_val_t(kHugePage)); }
};
// nullptr: there is no memory.
template <typename T>
using HugePageArray = std::unique_ptr<T[], FreeHugePages>;

// Bytes at a multiple of kHugePage, of which the whole huge pages are advised to be such. nullptr: there is no memory.
inline void* AllocateHugePages(size_t bytes) {
  void* const memory = ::operator new[](bytes, std::align_val_t(kHugePage), std::nothrow);
  if (memory != nullptr) AdviseHugePages(memory, bytes / kHugePage * kHugePage);
  return memory;
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_HOST_HUGE_PAGES_H_
