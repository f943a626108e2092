// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "plugins/core/host/platform.h"

namespace stof {

// Fails without memory for it, and then nothing else works either.
void CallInForkedChild(void (*function)()) { (void)pthread_atfork(nullptr, nullptr, function); }

const char* GetTrustedVariable(const char* name) noexcept { return secure_getenv(name); }

void AdviseHugePages(void* memory, size_t bytes) noexcept { (void)madvise(memory, bytes, MADV_HUGEPAGE); }

}  // namespace stof
