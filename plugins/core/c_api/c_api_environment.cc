// SPDX-License-Identifier: Apache-2.0
// The environment variables that the libraries read, and which are set.
#include <string>
#include <string_view>

#include "plugins/core/c_api/internal.h"
#include "plugins/core/host/environment.h"
#include "plugins/core/host/fork_guard.h"
#include "plugins/core/host/quoted.h"

namespace {

using stof::Variable;
using stof::VariableDescription;
using stof::VariableType;

std::string Quote(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : stof::IsUtf8(text) ? text : "not UTF-8") {
    const bool is_control = static_cast<unsigned char>(c) < 0x20;
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += is_control ? '?' : c;
  }
  return quoted + "\"";
}

const char* NameOf(VariableType type) {
  switch (type) {
    case VariableType::kWord:
      return "word";
    case VariableType::kInteger:
      return "integer";
    case VariableType::kPath:
      return "path";
    case VariableType::kName:
      return "name";
  }
  return "";
}

std::string PrintVariable(Variable variable) {
  const VariableDescription& row = stof::DescribeVariable(variable);
  std::string text = "{\"name\": " + Quote(row.name) + ", \"type\": " + Quote(NameOf(row.type));
  if (row.type == VariableType::kInteger) {
    text += ", \"least\": " + std::to_string(row.least) + ", \"most\": " + std::to_string(row.most);
  }
  text += ", \"words\": " + Quote(row.words) + ", \"default\": " + Quote(row.unset);
  text += ", \"reader\": " + Quote(row.reader) + ", \"help\": " + Quote(row.help);
  text += std::string(", \"for_users\": ") + (row.is_for_users ? "true" : "false");
  text += std::string(", \"read_in_setuid\": ") + (row.is_read_in_setuid ? "true" : "false");
  const char* const value = stof::ReadVariable(variable);
  return text + (value == nullptr ? "" : ", \"value\": " + Quote(value)) + "}";
}

std::string PrintEnvironment() {
  std::string text;
  for (int i = 0; i < stof::kVariables; ++i) {
    text += (i == 0 ? "[" : ",\n ") + PrintVariable(static_cast<Variable>(i));
  }
  return text + "]";
}

}  // namespace

extern "C" {

const char* stof_environment(void) {
  static stof::ProcessWide<const std::string> environment;
  return environment.Get(PrintEnvironment).c_str();
}

int stof_environment_check(char* error, size_t error_size) {
  return stof::RunGuarded(error, error_size, [] { return stof::CheckEnvironment(); });
}

}  // extern "C"
