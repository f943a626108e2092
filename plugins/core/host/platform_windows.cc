// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>

#include "plugins/core/host/platform.h"

namespace stof {

// Windows has no fork().
void CallInForkedChild(void (*)()) {}

// Windows has no programs with the rights of another user than the one who starts them.
const char* GetTrustedVariable(const char* name) noexcept { return getenv(name); }

// Large pages need a privilege that users do not have.
void AdviseHugePages(void*, size_t) noexcept {}

}  // namespace stof
