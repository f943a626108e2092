// SPDX-License-Identifier: Apache-2.0
#include "plugins/trt/log.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace stof::trt {

void Log(LogLevel level, const std::string& node, const std::string& message) noexcept {
  static std::atomic<int> known{-1};  // nothing may be thrown here, and a value made twice is the same
  int most = known.load(std::memory_order_relaxed);
  if (most < 0) {
    const char* text = std::getenv("STOF_TRT_LOG");
    most = text == nullptr ? 1 : std::max(0, std::atoi(text));
    known.store(most, std::memory_order_relaxed);
  }
  if (static_cast<int>(level) > most) return;
  char line[4096];  // nothing may be thrown here
  LogLine(node, message, line, sizeof line);
  std::fprintf(stderr, "%s\n", line);
}

void LogLine(const std::string& node, const std::string& message, char* line, size_t size) noexcept {
  size_t at = 0;
  const auto put = [&](const char* text) {
    for (; *text != '\0' && at + 1 < size; ++text) {
      line[at++] = static_cast<unsigned char>(*text) < ' ' || *text == '\x7f' ? '?' : *text;
    }
  };
  put("stof: ");
  put(node.c_str());
  if (!node.empty()) put(": ");
  put(message.c_str());
  line[at] = '\0';
}

}  // namespace stof::trt
