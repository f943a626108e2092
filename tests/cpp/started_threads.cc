// SPDX-License-Identifier: Apache-2.0
// Counts the threads of the process: std::thread and ThreadPool find this pthread_create before that of the system.
#include <atomic>

#include "tests/cpp/check.h"

namespace stof::test {
namespace {
std::atomic<int64_t> started{0};
}

int64_t StartedThreads() { return started.load(); }

}  // namespace stof::test

#if defined(STOF_COUNTS_THREADS)
#include <dlfcn.h>
#include <pthread.h>

#include <cstring>

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) {
  void* const address = dlsym(RTLD_NEXT, "pthread_create");
  decltype(&pthread_create) next = nullptr;
  std::memcpy(&next, &address, sizeof next);
  ++stof::test::started;
  return next(thread, attributes, run, argument);
}
#endif
