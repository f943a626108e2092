// SPDX-License-Identifier: Apache-2.0
// Whether this process may use tile registers (AMX). Linux keeps them for processes that ask: a thread that uses one
// has 8 KiB more of state, and signal frames grow by as much.
#ifndef STOF_CPU_TILE_PERMISSION_H_
#define STOF_CPU_TILE_PERMISSION_H_

#include <cstdint>

namespace stof {
namespace cpu {

// arch_prctl: 0, or another number where it fails.
using ArchPrctl = long (*)(int code, uint64_t argument);

// Asks for the permission, unless the process has it. False where it is refused: by a container's seccomp filter, or
// where a thread has an alternate signal stack that the larger frames would not fit.
bool AskForTiles(ArchPrctl arch_prctl);

// The answer for this process, which is asked for once. Threads and forked processes inherit the permission.
bool MayUseTiles();

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_TILE_PERMISSION_H_
