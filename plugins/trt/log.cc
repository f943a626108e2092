// SPDX-License-Identifier: Apache-2.0
#include "plugins/trt/log.h"

#include <atomic>
#include <cstdio>

#include "plugins/core/host/environment.h"
#include "plugins/core/host/quoted.h"

namespace stof::trt {

void Log(LogLevel level, const std::string& node, const std::string& message) noexcept {
  static std::atomic<int> known{-1};  // no allocation, no exception; two threads find the same value
  int most = known.load(std::memory_order_relaxed);
  if (most < 0) {
    int64_t found = 1;  // also where the value is wrong, which is an error of whoever makes an operator
    if (const char* text = ReadVariable(Variable::kTrtLog)) (void)ParseVariable(Variable::kTrtLog, text, &found);
    most = static_cast<int>(found);
    known.store(most, std::memory_order_relaxed);
  }
  if (static_cast<int>(level) > most) return;
  char line[4096];  // no allocation: nothing may be thrown here
  LogLine(node, message, line, sizeof line);
  std::fprintf(stderr, "%s\n", line);
}

void LogLine(const std::string& node, const std::string& message, char* line, size_t size) noexcept {
  if (size == 0) return;
  size_t at = 0;
  bool full = false;
  const auto put = [&](std::string_view piece) {
    full = full || piece.size() >= size - at;
    if (!full) at += piece.copy(line + at, piece.size());
  };
  put("stof: ");
  constexpr size_t kMostName = 192;  // a longer one would leave no room for the message
  Escape(std::string_view(node).substr(0, kMostName), put);
  if (!node.empty()) put(node.size() > kMostName ? "...: " : ": ");
  Escape(message, put);
  line[at] = '\0';
}

}  // namespace stof::trt
