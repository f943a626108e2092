// SPDX-License-Identifier: Apache-2.0
#define WIN32_LEAN_AND_MEAN
#include <stdlib.h>
#include <windows.h>

#include "plugins/core/host/platform.h"

namespace stof {

// Windows has no fork().
void CallInForkedChild(void (*)()) {}

// Windows has no programs with the rights of another user than the one who starts them.
const char* GetTrustedVariable(const char* name) noexcept { return getenv(name); }

// Large pages need a privilege that users do not have.
void AdviseHugePages(void*, size_t) noexcept {}

// By the address of a function of it. Cannot fail: this code is running.
void KeepLibraryLoaded() noexcept {
  HMODULE library = nullptr;
  (void)GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_PIN | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS,
                           reinterpret_cast<const wchar_t*>(&KeepLibraryLoaded), &library);
}

}  // namespace stof
