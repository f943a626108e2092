// SPDX-License-Identifier: Apache-2.0
// TensorRT's own logger changed between its major versions and is not used: messages go to stderr.
#ifndef STOF_PLUGINS_TRT_LOG_H_
#define STOF_PLUGINS_TRT_LOG_H_

#include <cstddef>
#include <string>

namespace stof::trt {

// By the environment variable STOF_TRT_LOG: 0 nothing, 1 (or unset) errors, 2 also what is built and loaded.
enum class LogLevel { kError = 1, kInfo = 2 };
void Log(LogLevel level, const std::string& node, const std::string& message) noexcept;
// The line of a message, cut to size with its NUL. Names in it come from a file and are escaped: see quoted.h.
void LogLine(const std::string& node, const std::string& message, char* line, size_t size) noexcept;

}  // namespace stof::trt
#endif  // STOF_PLUGINS_TRT_LOG_H_
