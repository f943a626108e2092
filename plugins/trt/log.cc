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
  std::fprintf(stderr, "stof: %s%s%s\n", node.c_str(), node.empty() ? "" : ": ", message.c_str());
}

}  // namespace stof::trt
