// SPDX-License-Identifier: Apache-2.0
// A test program without a framework: TEST(Name) { CHECK(...); }, a count of cases, and a random source whose seed
// stands in every failure.
#ifndef STOF_TESTS_CPP_CHECK_H_
#define STOF_TESTS_CPP_CHECK_H_

#include <cstdint>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace stof::test {

struct Test {
  const char* name;
  void (*run)();
  bool has_one_thread = false;  // ThreadSanitizer has nothing to find, and leaves it out
};
constexpr bool kOneThread = true;  // for Test::has_one_thread
std::vector<Test>& AllTests();
struct Registrar {
  explicit Registrar(const Test& test) { AllTests().push_back(test); }
};

// GCC has a macro, Clang a feature.
#if defined(__SANITIZE_THREAD__)
#define STOF_THREAD_SANITIZER
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define STOF_THREAD_SANITIZER
#endif
#endif
#if defined(STOF_THREAD_SANITIZER)
constexpr bool kIsThreadSanitizer = true;
#else
constexpr bool kIsThreadSanitizer = false;
#endif
// Threads that this process has started; 0 in builds without STOF_COUNTS_THREADS.
int64_t StartedThreads();

// Thrown by CHECK, caught by the program's main loop.
struct Failure {
  std::string message;
};

// Adds to the number of cases that the running test reports.
void CountCases(int64_t cases);
// 1, or less under a sanitizer: multiplies the number of random cases.
double Effort();
inline int Cases(int count) { return static_cast<int>(count * Effort()) + 1; }

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}
  uint64_t Next() {
    uint64_t x = (state_ += 0x9e3779b97f4a7c15u);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  int64_t Range(int64_t low, int64_t high) {  // both included
    return low + static_cast<int64_t>(Next() % static_cast<uint64_t>(high - low + 1));
  }
  bool OneIn(int n) { return Next() % static_cast<uint64_t>(n) == 0; }
  float Unit() { return static_cast<float>(Next() >> 40) * 0x1p-23f - 1.0f; }  // [-1, 1)
  template <typename T>
  const T& Pick(const std::vector<T>& values) {
    return values[static_cast<size_t>(Next() % values.size())];
  }

 private:
  uint64_t state_;
};

[[noreturn]] inline void Fail(const char* file, int line, const std::string& what) {
  std::ostringstream text;
  text << file << ":" << line << ": " << what;
  throw Failure{text.str()};
}

#define STOF_TEST_CONCAT2(a, b) a##b
#define STOF_TEST_CONCAT(a, b) STOF_TEST_CONCAT2(a, b)
#define STOF_REGISTER_TEST(name, has_one_thread)                                                           \
  static void name();                                                                                      \
  static const ::stof::test::Registrar STOF_TEST_CONCAT(registrar_, name)({#name, &name, has_one_thread}); \
  static void name()
#define TEST(name) STOF_REGISTER_TEST(name, false)
// For tests that take long and start no thread: ThreadSanitizer leaves them out. They fail where threads are counted
// and one is started.
#define ONE_THREAD_TEST(name) STOF_REGISTER_TEST(name, ::stof::test::kOneThread)
// CHECK(condition, parts of the message...): the parts are streamed, and only where the check fails.
#define CHECK(condition, ...)                                                                               \
  do {                                                                                                      \
    if (!(condition)) ::stof::test::Fail(__FILE__, __LINE__, #condition + ::stof::test::Text(__VA_ARGS__)); \
  } while (0)

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  if constexpr (sizeof...(parts) > 0) (text << ": " << ... << parts);
  return text.str();
}

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_CHECK_H_
