// SPDX-License-Identifier: Apache-2.0
// The table of environment variables: values, errors, and what it repeats of other lists.
#include <cstdlib>
#include <string>
#include <string_view>

#include "cpu/isa.h"
#include "plugins/core/c_api/c_api.h"
#include "plugins/core/host/environment.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

// "portable, avx2 or avx512"
std::string ListInstructionSets() {
#define STOF_NAME(id, name, is_supported) #name,
  constexpr const char* kNames[] = {STOF_CPU_ISAS(STOF_NAME)};
#undef STOF_NAME
  std::string list;
  for (const char* name : kNames) list += std::string(list.empty() ? "" : ", ") + name;
  const size_t last = list.rfind(", ");
  return list.substr(0, last) + " or " + list.substr(last + 2);
}

std::string Refusal(Variable variable, std::string_view text) { return CheckVariable(variable, text).message(); }

TEST(EnvironmentRefusesWrongValues) {
  const std::string begin = "the environment variable ";
  CHECK(Refusal(Variable::kCpuIsa, "avx3") == begin + "STOF_CPU_ISA is 'avx3', expected " + ListInstructionSets(),
        Refusal(Variable::kCpuIsa, "avx3"));
  CHECK(Refusal(Variable::kCudaCold, "yes") == begin + "STOF_CUDA_COLD is 'yes', expected 0 or 1");
  CHECK(Refusal(Variable::kCudaSharedKib, "0") ==
        begin + "STOF_CUDA_SHARED_KIB is '0', expected an integer from 1 to 1024");
  CHECK(Refusal(Variable::kCudaSparseMlp, "list") == begin + "STOF_CUDA_SPARSE_MLP is 'list', expected lists or gemms");
  for (const char* wrong : {"banana", "1x", " 1", "-1", "1e3", "99999999999999999999", ""}) {
    CHECK(!CheckVariable(Variable::kMlpHotMb, wrong).ok(), wrong);
  }
  CHECK(!CheckVariable(Variable::kCudaSm80Rows, "64 128").ok() && !CheckVariable(Variable::kCudaSm80Rows, "6").ok());
  CHECK(Refusal(Variable::kCpuIsa, "a\nb").find("'a\\nb'") != std::string::npos);
  CountCases(13);
}

TEST(EnvironmentTakesRightValues) {
  for (int i = 0; i < kVariables; ++i) {
    const VariableDescription& row = DescribeVariable(static_cast<Variable>(i));
    const std::string words = row.words;
    for (size_t at = 0; at < words.size();) {
      const size_t end = std::min(words.find(' ', at), words.size());
      CHECK(CheckVariable(row.id, words.substr(at, end - at)).ok(), row.name);
      at = end + 1;
    }
    const bool is_integer = row.type == VariableType::kInteger;
    CHECK(!is_integer || (CheckVariable(row.id, std::to_string(row.least)).ok() &&
                          CheckVariable(row.id, std::to_string(row.most)).ok() &&
                          !CheckVariable(row.id, std::to_string(row.least - 1)).ok() &&
                          !CheckVariable(row.id, std::to_string(row.most + 1)).ok()),
          row.name);
    CHECK(row.type == VariableType::kWord ? !words.empty() : true, row.name);
    CHECK(row.is_read_in_setuid == (row.type != VariableType::kPath), row.name);
  }
  CHECK(CheckVariable(Variable::kNvrtc, "/any/path").ok());
  CountCases(kVariables);
}

// Variables of kernels that this program does not run.
TEST(EnvironmentIsRead) {
  int64_t rows = 7;
  CHECK(GetVariable(Variable::kCudaSharedKib, &rows).ok() && rows == 7);  // unset
  setenv("STOF_CUDA_SHARED_KIB", "99", 1);
  setenv("STOF_CUDA_HALVES", "0", 1);
  setenv("STOF_CHAIN_KERNELS", "made", 1);
  bool halves = true;
  std::string_view kernels;
  CHECK(GetVariable(Variable::kCudaSharedKib, &rows).ok() && rows == 99);
  CHECK(GetVariable(Variable::kCudaHalves, &halves).ok() && !halves);
  CHECK(GetVariable(Variable::kChainKernels, &kernels).ok() && kernels == "made");
  setenv("STOF_CUDA_SHARED_KIB", "all", 1);
  setenv("STOF_CUDA_HALVES", "", 1);  // as if unset
  rows = 7, halves = true;
  CHECK(GetVariable(Variable::kCudaSharedKib, &rows).message() ==
        "the environment variable STOF_CUDA_SHARED_KIB is 'all', expected an integer from 1 to 1024");
  CHECK(rows == 7 && GetVariable(Variable::kCudaHalves, &halves).ok() && halves);
  for (const char* name : {"STOF_CUDA_SHARED_KIB", "STOF_CUDA_HALVES", "STOF_CHAIN_KERNELS"}) unsetenv(name);
  CountCases(6);
}

TEST(EnvironmentNamesTheInstructionSets) {
#define STOF_NAME(id, name, is_supported) " " #name
  const std::string names = STOF_CPU_ISAS(STOF_NAME);
#undef STOF_NAME
  CHECK(" " + std::string(DescribeVariable(Variable::kCpuIsa).words) == names, names);
  CHECK(stof_environment() == stof_environment() && stof_environment_check(nullptr, 0) == 0);
  CountCases(2);
}

}  // namespace
}  // namespace stof::test
