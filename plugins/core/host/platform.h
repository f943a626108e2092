// SPDX-License-Identifier: Apache-2.0
// What the library asks of the operating system beyond the C++ library. One source for each system: platform_linux.cc,
// platform_macos.cc, platform_windows.cc. They need no other source, so that small libraries can do without the core.
#ifndef STOF_PLUGINS_CORE_HOST_PLATFORM_H_
#define STOF_PLUGINS_CORE_HOST_PLATFORM_H_

#include <cstddef>

namespace stof {

// Has the children of fork() call a function before fork() returns there, while they have one thread. Nothing happens
// where processes do not fork.
void CallInForkedChild(void (*function)());

// The value of an environment variable; null where it is not set, and in a process with more rights than its user.
const char* GetTrustedVariable(const char* name) noexcept;

// Says that pages of 2 MiB pay for this memory. A hint: nothing depends on it.
void AdviseHugePages(void* memory, size_t bytes) noexcept;

#if defined(_WIN32)
// Keeps the code of this library in memory until the process ends, for threads that nobody waits for.
void KeepLibraryLoaded() noexcept;
#endif

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_HOST_PLATFORM_H_
