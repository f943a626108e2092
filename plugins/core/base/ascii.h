// SPDX-License-Identifier: Apache-2.0
// Characters and words of texts in ASCII. Streams and <cctype> ask the locale, which a program may change: a library
// whose C++ runtime keeps a table of the first one then finds no blanks.
#ifndef STOF_PLUGINS_CORE_BASE_ASCII_H_
#define STOF_PLUGINS_CORE_BASE_ASCII_H_

#include <string>
#include <string_view>
#include <vector>

namespace stof {

constexpr bool IsLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
constexpr bool IsDigit(char c) { return c >= '0' && c <= '9'; }
constexpr bool IsLetterOrDigit(char c) { return IsLetter(c) || IsDigit(c); }
constexpr bool IsBlank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// What stands between blanks.
inline std::vector<std::string> SplitWords(std::string_view text) {
  std::vector<std::string> words;
  for (size_t end = 0, begin = 0; begin < text.size(); begin = end) {
    for (end = begin; end < text.size() && !IsBlank(text[end]);) ++end;
    if (end > begin) words.emplace_back(text.substr(begin, end - begin));
    if (end == begin) ++end;
  }
  return words;
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_BASE_ASCII_H_
