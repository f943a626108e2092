// SPDX-License-Identifier: Apache-2.0
// The environment variables that the libraries read: one table of their names, types, values and meanings, and the
// getters for every reader. A wrong value is one error everywhere: it names the variable, the value and the right ones.
// docs/reference/environment.md is made of the table (tools/environment_page.py). environment.cc needs no other source
// file than that of the platform (platform.h): libraries that link nothing else of stof use it, too.
#ifndef STOF_PLUGINS_CORE_HOST_ENVIRONMENT_H_
#define STOF_PLUGINS_CORE_HOST_ENVIRONMENT_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "plugins/core/base/status.h"

namespace stof {

enum class Variable : int {
  kTrtLibrary,
  kCpuIsa,
  kMlpHotMb,
  kSkipScores,
  kChainCache,
  kChainKernels,
  kNvrtc,
  kCublasLt,
  kGemmTiming,
  kCudaKernel,
  kTrtLog,
  kCudaCapability,
  kCudaMultiprocessors,
  kCudaSharedKib,
  kCudaSm80Rows,
  kCudaFp32Rows,
  kCudaHalves,
  kCudaCold,
  kCudaGemm,
  kCudaSparseMlp,
  kCudaPrintPlans,
};
constexpr int kVariables = static_cast<int>(Variable::kCudaPrintPlans) + 1;

enum class VariableType {
  kWord,     // one of `words`
  kInteger,  // from `least` to `most`, or one of `words`
  kPath,     // any text, or one of `words`
  kName,     // of something that its reader lists, or one of `words`; the reader checks it
};

// A row of the table. Methods give the row with more of it set.
struct VariableDescription {
  Variable id;
  const char* name;
  const char* help;
  VariableType type = VariableType::kWord;
  const char* words = "";  // separated by blanks
  int64_t least = 0, most = 0;
  const char* unset = "";  // what holds where the variable is unset, if `help` does not say it
  const char* reader = "the library";
  bool is_for_users = true;  // else for tests and measurements
  // A process with raised privileges (setuid) does not read paths from an environment that is somebody else's.
  bool is_read_in_setuid = true;

  constexpr VariableDescription(Variable which, const char* its_name, const char* its_help)
      : id(which), name(its_name), help(its_help) {}
  constexpr VariableDescription Words(const char* all) const {
    VariableDescription row = *this;
    row.words = all;
    return row;
  }
  constexpr VariableDescription Integer(int64_t first, int64_t last) const {
    VariableDescription row = *this;
    row.type = VariableType::kInteger, row.least = first, row.most = last;
    return row;
  }
  constexpr VariableDescription Path() const {
    VariableDescription row = *this;
    row.type = VariableType::kPath, row.is_read_in_setuid = false;
    return row;
  }
  constexpr VariableDescription Name() const {
    VariableDescription row = *this;
    row.type = VariableType::kName;
    return row;
  }
  constexpr VariableDescription Unset(const char* text) const {
    VariableDescription row = *this;
    row.unset = text;
    return row;
  }
  constexpr VariableDescription ReadBy(const char* who) const {
    VariableDescription row = *this;
    row.reader = who;
    return row;
  }
  constexpr VariableDescription ForTests() const {
    VariableDescription row = *this;
    row.is_for_users = false;
    return row;
  }
};

const VariableDescription& DescribeVariable(Variable variable);

// The text of a variable; nullptr where it is unset or empty, or is not read in a process with raised privileges.
// Allocates nothing.
const char* ReadVariable(Variable variable) noexcept;

// Whether a text is a value of the variable. `value` of an integer; unchanged for a word. Allocates nothing.
bool ParseVariable(Variable variable, std::string_view text, int64_t* value) noexcept;
// The same as an error: "the environment variable STOF_X is 'found', expected one or two".
Status CheckVariable(Variable variable, std::string_view text);

// The values of the environment. They leave `value` as it is where the variable is unset.
Status GetVariable(Variable variable, int64_t* value);
Status GetVariable(Variable variable, std::string_view* word);
// Words 0 and 1.
Status GetVariable(Variable variable, bool* value);
// The value; `otherwise` where the variable is unset or wrong. For readers that can return no error: CheckEnvironment
// refuses what is wrong.
template <typename T>
T ReadVariableOr(Variable variable, T otherwise) {
  (void)GetVariable(variable, &otherwise);
  return otherwise;
}

// Checks all variables, once a process: a wrong value is an error of whoever makes the first operator, also where its
// reader comes later or can return none.
Status CheckEnvironment();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_HOST_ENVIRONMENT_H_
