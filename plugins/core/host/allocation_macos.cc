// SPDX-License-Identifier: Apache-2.0
// new and delete of the library alone. Those of a libc++ that is linked in would be exported, and take the place of the
// host program's, or the host's their place: memory of one would be freed by the other. CMakeLists.txt compiles this
// file with hidden operators.
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

void* Allocate(std::size_t bytes, std::size_t alignment) noexcept {
  if (bytes == 0) bytes = 1;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes);
  void* memory = nullptr;
  return posix_memalign(&memory, alignment, bytes) == 0 ? memory : nullptr;
}

void* AllocateOrThrow(std::size_t bytes, std::size_t alignment) {
  for (;;) {
    if (void* memory = Allocate(bytes, alignment)) return memory;
    const std::new_handler handler = std::get_new_handler();
    if (handler == nullptr) throw std::bad_alloc();
    handler();
  }
}

void* AllocateOrNull(std::size_t bytes, std::size_t alignment) noexcept {
  try {
    return AllocateOrThrow(bytes, alignment);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

constexpr std::size_t kUsual = alignof(std::max_align_t);
std::size_t ToSize(std::align_val_t alignment) { return static_cast<std::size_t>(alignment); }

}  // namespace

void* operator new(std::size_t n) { return AllocateOrThrow(n, kUsual); }
void* operator new[](std::size_t n) { return AllocateOrThrow(n, kUsual); }
void* operator new(std::size_t n, const std::nothrow_t&) noexcept { return AllocateOrNull(n, kUsual); }
void* operator new[](std::size_t n, const std::nothrow_t&) noexcept { return AllocateOrNull(n, kUsual); }
void* operator new(std::size_t n, std::align_val_t a) { return AllocateOrThrow(n, ToSize(a)); }
void* operator new[](std::size_t n, std::align_val_t a) { return AllocateOrThrow(n, ToSize(a)); }
void* operator new(std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return AllocateOrNull(n, ToSize(a));
}
void* operator new[](std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return AllocateOrNull(n, ToSize(a));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t, const std::nothrow_t&) noexcept { std::free(p); }
