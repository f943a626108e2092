// SPDX-License-Identifier: Apache-2.0
// Foreign text in messages: readable, of one line, of bounded length, and UTF-8.
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "plugins/core/c_api/c_api.h"
#include "plugins/core/host/quoted.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

using namespace std::string_view_literals;

// Whether a terminal only prints it: no byte of a control, no character of a mark of direction or a separator of lines.
bool IsPlain(std::string_view text) {
  for (char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return false;
  }
  for (const char* hidden :
       {"\xc2\x85", "\xc2\x9b", "\xe2\x80\xa8", "\xe2\x80\xa9", "\xe2\x80\xae", "\xe2\x81\xa6", "\xef\xbb\xbf"}) {
    if (text.find(hidden) != std::string_view::npos) return false;
  }
  return IsUtf8(text);
}

TEST(QuotedEscapes) {
  struct Case {
    std::string_view text;
    const char* shown;
  };
  const Case cases[] = {
      {"", "''"},
      {"layers.0/attn", "'layers.0/attn'"},
      {"größer 猫 🐈", "'größer 猫 🐈'"},
      {"a\x1b[31mb", "'a\\x1b[31mb'"},
      {"a\r\n\tb", "'a\\r\\n\\tb'"},
      {"a\0b"sv, "'a\\x00b'"},
      {"\x7f", "'\\x7f'"},
      {"\xc2\x9b"
       "31m",
       "'\\x9b31m'"},                                           // C1: the one-character form of ESC [
      {"\xe2\x80\xae\xe2\x81\xa6", "'\\u202e\\u2066'"},         // marks of direction
      {"\xe2\x80\xa8\xe2\x80\xa9", "'\\u2028\\u2029'"},         // separators of lines
      {"\xf3\xa0\x81\x81", "'\\U000e0041'"},                    // a tag
      {"\xff\xfe", "'\\xff\\xfe'"},                             // no UTF-8 at all
      {"\xc3", "'\\xc3'"},                                      // cut short
      {"\xc0\xaf\xe0\x80\xaf", "'\\xc0\\xaf\\xe0\\x80\\xaf'"},  // longer than needed
      {"\xed\xa0\x80", "'\\xed\\xa0\\x80'"},                    // a surrogate
      {"\xf4\x90\x80\x80", "'\\xf4\\x90\\x80\\x80'"},           // beyond Unicode
  };
  for (const Case& one : cases) CHECK(Quote(one.text, 64) == one.shown, Quote(one.text, 64), " for ", one.shown);
  CountCases(static_cast<int64_t>(std::size(cases)));
}

TEST(QuotedIsBounded) {
  CHECK(Quote(std::string(30, 'a')) == "'" + std::string(24, 'a') + "...'");
  CHECK(Quote(std::string(24, 'a')) == "'" + std::string(24, 'a') + "'");
  CHECK(Escape("aaaäbbbäccc", 4, 4) == "aaa...ccc", "no character is cut: ", Escape("aaaäbbbäccc", 4, 4));
  CHECK(Escape("0123456789", 3, 2) == "012...89");
  const std::string message = EscapeMessage("begin" + std::string(1 << 20, '\x01') + "end");
  CHECK(message.size() < 4 * 3072 + 4 && message.substr(0, 5) == "begin", message.size());
  CHECK(message.substr(message.size() - 3) == "end", message.substr(message.size() - 9));
  CountCases(6);
}

// Bytes, characters and pieces of escape sequences in any order.
TEST(QuotedRandomBytes) {
  static const std::vector<std::string> kPieces = {"a",        "é",        "\x1b[2J",      "\xe2\x80\xae", "\xff", "\n",
                                                   "\xc2\x85", "\xc2\x9b", "\xf0\x9f\x90", "\x80",         "\\"};
  const int count = Cases(20000);
  for (int i = 0; i < count; ++i) {
    Random random(static_cast<uint64_t>(i));
    std::string text;
    for (int64_t n = random.Range(0, 40); n > 0; --n) {
      text += random.OneIn(2) ? random.Pick(kPieces) : std::string(1, static_cast<char>(random.Next()));
    }
    const auto head = static_cast<size_t>(random.Range(0, 48)), tail = static_cast<size_t>(random.Range(0, 16));
    const std::string shown = Escape(text, head, tail);
    CHECK(IsPlain(shown), "seed ", i, ": ", shown);
    CHECK(shown.size() <= 4 * (head + tail) + 3, "seed ", i, ": ", shown.size());
    CHECK(Escape(shown, shown.size()) == shown, "seed ", i, " is escaped twice: ", shown);
    if (IsPlain(text) && text.size() <= head) CHECK(shown == text, "seed ", i, ": ", shown);
  }
  CountCases(count);
}

// Every float in a message is read back as itself.
TEST(PrintedNumbersAreFaithful) {
  CHECK(PrintFloat(1e-31f) == "1e-31", PrintFloat(1e-31f));
  CHECK(PrintFloat(0.1f) == "0.1" && PrintFloat(-2.5f) == "-2.5" && PrintFloat(3e38f) == "3e+38");
  CHECK(PrintFloat(std::numeric_limits<float>::infinity()) == "inf");
  const int count = Cases(20000);
  for (int i = 0; i < count; ++i) {
    Random random(static_cast<uint64_t>(i));
    const auto bits = static_cast<uint32_t>(random.Next());
    float number = 0;
    std::memcpy(&number, &bits, sizeof number);
    if (number != number) continue;
    CHECK(std::strtof(PrintFloat(number).c_str(), nullptr) == number, PrintFloat(number));
  }
  CountCases(count);
}

// Messages of the C ABI about foreign text, in buffers of any size.
TEST(CApiMessagesArePlain) {
  const std::string type = "St\x1b[31m\xff\xe2\x80\xae\nof\xc3\xa9";
  for (size_t size = 1; size < 100; ++size) {
    std::vector<char> error(size, 'X');
    stof_op* op = nullptr;
    CHECK(stof_op_create(type.c_str(), nullptr, 0, &op, error.data(), size) == 1);
    CHECK(std::memchr(error.data(), '\0', size) != nullptr, size);
    CHECK(IsPlain(error.data()), error.data());
  }
  char error[256];
  stof_op* op = nullptr;
  stof_op_create(type.c_str(), nullptr, 0, &op, error, sizeof error);
  CHECK(std::string(error) == "there is no operator 'St\\x1b[31m\\xff\\u202e\\nofé'", error);
  stof_mask* mask = nullptr;
  const stof_operand operand = {"table\n0", {nullptr, 0, 9, {}}};
  CHECK(stof_mask_create("k <= q", &operand, 1, &mask, error, sizeof error) == 1 && IsPlain(error), error);
  CHECK(stof_mask_create("k <= q or \xc3\xb6", nullptr, 0, &mask, error, sizeof error) == 1);
  CHECK(std::strstr(error, "unexpected 'ö'") != nullptr, error);
  CountCases(102);
}

TEST(CApiNumbersAreFaithful) {
  char error[256];
  stof_op* op = nullptr;
  const stof_attribute softcap = {"softcap", 1, 0, 1e-31, nullptr};
  CHECK(stof_op_create("StofAttention", &softcap, 1, &op, error, sizeof error) == 1);
  CHECK(std::strstr(error, "attribute softcap is 1e-31, expected 0 or 1e-30 to 1e30") != nullptr, error);
}

}  // namespace
}  // namespace stof::test
