// SPDX-License-Identifier: Apache-2.0
// stof_tests [PART | I/N]: runs the tests whose name contains PART, or test I and every N-th after it (0 <= I < N).
// Processes share all tests so. ThreadSanitizer leaves out each ONE_THREAD_TEST.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "tests/cpp/check.h"

namespace stof::test {
namespace {
int64_t case_count = 0;
}

std::vector<Test>& AllTests() {
  static std::vector<Test> tests;
  return tests;
}

void CountCases(int64_t cases) { case_count += cases; }

namespace {
double EffortOfBuild() {
#if defined(STOF_THREAD_SANITIZER)  // it looks for races, which every case has; numbers are the other builds' part
  return 0.04;
#elif defined(__SANITIZE_ADDRESS__) || !defined(__OPTIMIZE__)
  return 0.2;
#else
  return 1.0;
#endif
}

// STOF_EFFORT is for emulators, which take about a hundred times as long.
double EffortOfRun() {
  const char* const text = std::getenv("STOF_EFFORT");
  if (text == nullptr) return EffortOfBuild();
  char* end = nullptr;
  const double effort = std::strtod(text, &end);
  if (*text == '\0' || *end != '\0' || !(effort > 0.0 && effort <= 1.0)) {
    std::fprintf(stderr, "STOF_EFFORT is \"%s\", expected a number above 0 and at most 1\n", text);
    std::exit(2);
  }
  return effort < EffortOfBuild() ? effort : EffortOfBuild();
}
}  // namespace

double Effort() {
  static const double effort = EffortOfRun();
  return effort;
}

namespace {

bool Run(const Test& test) {
  case_count = 0;
  const int64_t threads = StartedThreads();
  const auto begin = std::chrono::steady_clock::now();
  std::string error;
  try {
    test.run();
  } catch (const Failure& failure) {
    error = failure.message;
  } catch (const std::exception& e) {
    error = std::string("threw ") + e.what();
  }
  if (test.has_one_thread && StartedThreads() > threads && error.empty()) {
    error = "it starts threads, and ThreadSanitizer would leave it out: register it without has_one_thread, by TEST";
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%-44s %9lld cases %7.2f s  %s\n", test.name, static_cast<long long>(case_count), seconds,
              error.empty() ? "ok" : "FAILED");
  if (!error.empty()) std::printf("  %s\n", error.c_str());
  std::fflush(stdout);
  return error.empty();
}

}  // namespace
}  // namespace stof::test

int main(int argc, char** argv) {
  unsigned first = 0;
  unsigned share = 1;
  char end = 0;
  const bool shared = argc > 1 && std::sscanf(argv[1], "%u/%u%c", &first, &share, &end) == 2;
  if (share == 0 || first >= share) {
    std::fprintf(stderr, "%s: I/N needs I < N\n", argv[1]);
    return 2;
  }
  unsigned number = 0;
  int run = 0;
  int failed = 0;
  int left_out = 0;
  for (const auto& test : stof::test::AllTests()) {
    if (stof::test::kIsThreadSanitizer && test.has_one_thread) {
      ++left_out;
      continue;
    }
    if (shared ? number++ % share != first : argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    ++run;
    failed += stof::test::Run(test) ? 0 : 1;
  }
  std::printf("%d tests, %d failed", run, failed);
  if (left_out > 0) std::printf("; %d of one thread left out", left_out);
  std::printf("\n");
  return failed == 0 && run > 0 ? 0 : 1;
}
