// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_CORE_SHOWN_H_
#define STOF_PLUGINS_CORE_SHOWN_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace stof {

// What was found in a file, fit for a message: short, and without characters that a terminal would obey, that end the
// text of a C API (NUL), or that are no UTF-8, which Python refuses in the place of the message.
inline std::string Shown(std::string_view text, size_t most = 24) {
  std::string shown = "'";
  for (char c : text.substr(0, most)) shown += c >= ' ' && c <= '~' ? c : '?';
  return shown + "'";
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_SHOWN_H_
