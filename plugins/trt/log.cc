// SPDX-License-Identifier: Apache-2.0
#include "plugins/trt/log.h"

#include <cstdio>
#include <cstdlib>

namespace stof::trt {

void Log(LogLevel level, const std::string& node, const std::string& message) noexcept {
  static const int most = [] {
    const char* text = std::getenv("STOF_TRT_LOG");
    return text == nullptr ? 1 : std::atoi(text);
  }();
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
