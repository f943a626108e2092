// SPDX-License-Identifier: Apache-2.0
#include "cpu/tile_permission.h"

#include <cstdint>

#include "plugins/core/host/fork_guard.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace stof {
namespace cpu {
namespace {

// Of asm/prctl.h, where older headers lack them.
constexpr int kGetPermission = 0x1022, kRequestPermission = 0x1023;  // ARCH_GET_XCOMP_PERM, ARCH_REQ_XCOMP_PERM
constexpr uint64_t kTileData = 18;                                   // XFEATURE_XTILEDATA

long CallArchPrctl([[maybe_unused]] int code, [[maybe_unused]] uint64_t argument) {
#if defined(__x86_64__) && defined(__linux__)
  return syscall(SYS_arch_prctl, code, argument);
#else
  return -1;
#endif
}

}  // namespace

bool AskForTiles(ArchPrctl arch_prctl) {
  uint64_t permitted = 0;
  if (arch_prctl(kGetPermission, reinterpret_cast<uintptr_t>(&permitted)) == 0 && (permitted >> kTileData & 1) != 0)
    return true;
  return arch_prctl(kRequestPermission, kTileData) == 0;
}

bool MayUseTiles() {
  static ProcessWide<const bool> may;
  return may.Get([] { return AskForTiles(CallArchPrctl); });
}

}  // namespace cpu
}  // namespace stof
