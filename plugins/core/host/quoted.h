// SPDX-License-Identifier: Apache-2.0
// Escapes foreign text for messages: names and attributes of a model, messages of other libraries. A terminal obeys
// control characters, bidirectional controls reorder text, a NUL ends the text of a C API, and Python drops a message
// that is not UTF-8. Such bytes and characters become \x1b, \n, \u202e. Header only: libraries that link nothing else
// of stof use it, too.
#ifndef STOF_PLUGINS_CORE_HOST_QUOTED_H_
#define STOF_PLUGINS_CORE_HOST_QUOTED_H_

#include <charconv>
#include <cstddef>
#include <string>
#include <string_view>

namespace stof {

// The character at the beginning of a text that is not empty: its size in bytes and its code point. 0: not UTF-8, and
// no code point.
inline size_t ReadUtf8(std::string_view text, char32_t* code) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  *code = first;
  if (first < 0x80) return 1;
  const size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < size) return 0;
  *code = first & (0x7fu >> size);
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    *code = *code << 6 | (byte(i) & 0x3f);
  }
  if (size == 3 && (*code < 0x800 || (*code >= 0xd800 && *code <= 0xdfff))) return 0;
  if (size == 4 && (*code < 0x10000 || *code > 0x10ffff)) return 0;
  return size;
}

inline bool IsUtf8(std::string_view text) {
  char32_t code = 0;
  for (size_t size = 0; !text.empty(); text.remove_prefix(size)) {
    if ((size = ReadUtf8(text, &code)) == 0) return false;
  }
  return true;
}

// Characters that have no shape of their own: controls (C0, DEL, C1), marks of direction, separators of lines, joiners,
// tags.
inline bool IsInvisible(char32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0xad || code == 0x61c ||
         (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2060 && code <= 0x206f) || code == 0xfeff || (code >= 0xfff9 && code <= 0xfffb) ||
         (code >= 0xe0000 && code <= 0xe0fff);
}

// Calls put(std::string_view) for each character or escape, which a buffer must not cut. Allocates nothing.
template <typename Put>
void Escape(std::string_view text, Put put) {
  constexpr char kDigits[] = "0123456789abcdef";
  while (!text.empty()) {
    char32_t code = 0;
    size_t size = ReadUtf8(text, &code);
    const bool is_utf8 = size > 0;
    if (!is_utf8) code = static_cast<unsigned char>(text[0]), size = 1;
    if (is_utf8 && !IsInvisible(code)) {
      put(text.substr(0, size));
    } else if (code == '\n' || code == '\r' || code == '\t') {
      put(code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t");
    } else {
      const int digits = code < 0x100 ? 2 : code < 0x10000 ? 4 : 8;
      char escape[10] = {'\\', digits == 2 ? 'x' : digits == 4 ? 'u' : 'U'};
      for (int i = 0; i < digits; ++i) escape[2 + i] = kDigits[code >> (4 * (digits - 1 - i)) & 15];
      put(std::string_view(escape, static_cast<size_t>(2 + digits)));
    }
    text.remove_prefix(size);
  }
}

// The first `head` bytes of the text and the last `tail`; "..." stands for what is left out.
inline std::string Escape(std::string_view text, size_t head, size_t tail = 0) {
  std::string shown;
  const auto put = [&shown](std::string_view piece) { shown += piece; };
  if (text.size() <= head + tail) {
    Escape(text, put);
    return shown;
  }
  const auto inside = [text](size_t at) { return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80; };
  size_t end = head, begin = text.size() - tail;
  for (int i = 0; i < 3 && end > 0 && inside(end); ++i) --end;
  for (int i = 0; i < 3 && begin < text.size() && inside(begin); ++i) ++begin;
  Escape(text.substr(0, end), put);
  shown += "...";
  Escape(text.substr(begin), put);
  return shown;
}

constexpr size_t kMostQuoted = 64;  // bytes of an attribute in a message

// A found text in quotes, escaped and cut.
inline std::string Quote(std::string_view text, size_t most = 24) { return "'" + Escape(text, most) + "'"; }

// A whole message, in which names may be very long: its beginning says what is wrong and its end what to do.
inline std::string EscapeMessage(std::string_view text) { return Escape(text, 2048, 1024); }

// The shortest decimal number that is read back as this one.
inline std::string PrintFloat(float number) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof text, number).ptr);
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_HOST_QUOTED_H_
