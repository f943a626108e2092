// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "plugins/core/host/platform.h"

namespace stof {

// Fails without memory for it, and then nothing else works either.
void CallInForkedChild(void (*function)()) { (void)pthread_atfork(nullptr, nullptr, function); }

const char* GetTrustedVariable(const char* name) noexcept { return issetugid() != 0 ? nullptr : getenv(name); }

// Pages are 16 KiB on Apple silicon, and memory of malloc cannot have larger ones.
void AdviseHugePages(void*, size_t) noexcept {}

}  // namespace stof
