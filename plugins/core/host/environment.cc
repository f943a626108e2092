// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/host/environment.h"

#include <charconv>
#include <cstdlib>
#include <iterator>

#include "plugins/core/base/cpu_isas.h"
#include "plugins/core/host/fork_guard.h"
#include "plugins/core/host/platform.h"
#include "plugins/core/host/quoted.h"

namespace stof {
namespace {

constexpr const char* kCuda = "the library (CUDA)";

#define STOF_NAME(id, name, is_supported) " " #name
constexpr const char* kCpuIsas = &(STOF_CPU_ISAS(STOF_NAME))[1];  // from behind the first blank
#undef STOF_NAME

// In the order of the page. Help is Markdown for docs/reference, from which its links lead.
constexpr VariableDescription kTable[] = {
    VariableDescription(Variable::kTrtLibrary, "STOF_TRT_LIBRARY",
                        "the TensorRT plugin library, instead of the package's or the one beside it")
        .Path()
        .ReadBy("`libstof_trt_autoreg*.so`"),
    VariableDescription(Variable::kCpuIsa, "STOF_CPU_ISA",
                        "at most this instruction set; one of another architecture limits nothing")
        .Words(kCpuIsas),
    VariableDescription(Variable::kMlpHotMb, "STOF_MLP_HOT_MB",
                        "MiB of sparse MLPs' weights that a process reads when sessions are made "
                        "([memory](sparse-mlp.md#memory))")
        .Integer(0, int64_t{1} << 30)
        .Unset("0"),
    VariableDescription(Variable::kSkipScores, "STOF_SKIP_SCORES",
                        "`0`: attention computes every key tile, whatever `skip_threshold`, `block_threshold` and "
                        "`chosen_pages` say ([skip by score](operators.md#skip-by-score), [choose "
                        "blocks](operators.md#choose-blocks), [choose pages](cached-attention.md#choose-pages))")
        .Words("0 1")
        .Unset("`1`"),
    VariableDescription(Variable::kChainCache, "STOF_CHAIN_CACHE", "the folder of compiled chains; `off` for none")
        .Path()
        .Words("off")
        .Unset("`~/.cache/stof/chains`")
        .ReadBy(kCuda),
    VariableDescription(Variable::kChainKernels, "STOF_CHAIN_KERNELS",
                        "`interpret`: compile no chain; `made`: an error where none was compiled")
        .Words("interpret made")
        .ReadBy(kCuda),
    VariableDescription(Variable::kNvrtc, "STOF_NVRTC", "NVRTC, which compiles chains; `off` for none")
        .Path()
        .Words("off")
        .ReadBy(kCuda),
    VariableDescription(Variable::kCublasLt, "STOF_CUBLASLT", "cuBLASLt; `0` for none").Path().Words("0").ReadBy(kCuda),
    VariableDescription(Variable::kGemmTiming, "STOF_GEMM_TIMING", "`0`: never time GEMMs at their first run")
        .Words("0 1")
        .Unset("`1`")
        .ReadBy(kCuda),
    VariableDescription(Variable::kCudaKernel, "STOF_CUDA_KERNEL",
                        "an attention kernel's name or number, for nodes that name none "
                        "([design](../design/attention-cuda.md#choosing-a-kernel))")
        .Name()
        .ReadBy(kCuda),
    VariableDescription(Variable::kTrtLog, "STOF_TRT_LOG", "0 nothing, 1 errors, 2 also what is created and configured")
        .Integer(0, 2)
        .Unset("1")
        .ReadBy("the TensorRT plugin"),
    VariableDescription(Variable::kCudaCapability, "STOF_CUDA_CAPABILITY",
                        "at most this compute capability, 10 × major + minor")
        .Integer(80, 999)
        .ForTests()
        .ReadBy(kCuda),
    VariableDescription(Variable::kCudaMultiprocessors, "STOF_CUDA_MULTIPROCESSORS", "at most this number of SMs")
        .Integer(1, 1024)
        .ForTests()
        .ReadBy(kCuda),
    VariableDescription(Variable::kCudaSharedKib, "STOF_CUDA_SHARED_KIB",
                        "at most this much shared memory of a CTA, in KiB")
        .Integer(1, 1024)
        .ForTests()
        .ReadBy(kCuda),
    VariableDescription(Variable::kCudaSm80Rows, "STOF_CUDA_SM80_ROWS",
                        "query rows of a tile in the 8.0 kernel, where it has both")
        .Words("64 128")
        .ForTests()
        .ReadBy(kCuda),
    VariableDescription(Variable::kCudaFp32Rows, "STOF_CUDA_FP32_ROWS",
                        "query rows of a tile in the fp32 kernel, where it has both")
        .Words("64 128")
        .ForTests()
        .ReadBy(kCuda),
    VariableDescription(Variable::kCudaHalves, "STOF_CUDA_HALVES", "`0`: no half tiles")
        .Words("0 1")
        .Unset("`1`")
        .ForTests()
        .ReadBy(kCuda),
    VariableDescription(Variable::kCudaCold, "STOF_CUDA_COLD", "`1`: treat the L2 cache as cold")
        .Words("0 1")
        .Unset("`0`")
        .ForTests()
        .ReadBy(kCuda),
    VariableDescription(Variable::kCudaGemm, "STOF_CUDA_GEMM",
                        "name of a GEMM kernel or of a family (`sm90`, `cublaslt`, `sm80`), or its number in the sm90 "
                        "table ([design](../design/gemm.md#choosing-a-kernel))")
        .Name()
        .ForTests()
        .ReadBy(kCuda),
    VariableDescription(
        Variable::kCudaSparseMlp, "STOF_CUDA_SPARSE_MLP",
        "how sparse MLPs are computed where both are possible: from lists of active neurons, or by GEMMs "
        "of all neurons")
        .Words("lists gemms")
        .ForTests()
        .ReadBy(kCuda),
    VariableDescription(Variable::kCudaPrintPlans, "STOF_CUDA_PRINT_PLANS",
                        "`1`: write each choice of a CUDA kernel to the error stream, with the predicted times and the "
                        "runners-up")
        .Words("0 1")
        .Unset("`0`")
        .ForTests()
        .ReadBy(kCuda),
};

constexpr bool IsInOrder() {
  for (int i = 0; i < kVariables; ++i) {
    if (static_cast<int>(kTable[i].id) != i) return false;
  }
  return true;
}
static_assert(std::size(kTable) == kVariables && IsInOrder(), "a row for each variable, in the order of the enum");

// Calls fn(word) for each of some words until it returns false.
template <typename Fn>
void ForEachWord(std::string_view words, Fn fn) {
  while (!words.empty()) {
    const size_t end = words.find(' ');
    if (!fn(words.substr(0, end))) return;
    words = end == std::string_view::npos ? std::string_view() : words.substr(end + 1);
  }
}

// The word of the table, which lives as long as the program; empty: the text is none of them.
std::string_view FindWord(const VariableDescription& row, std::string_view text) {
  std::string_view found;
  ForEachWord(row.words, [&](std::string_view word) {
    if (word == text) found = word;
    return found.empty();
  });
  return found;
}

// "0, 1 or 2", "an integer from 0 to 9 or lt"
std::string PrintValues(const VariableDescription& row) {
  std::string values;
  if (row.type == VariableType::kInteger) {
    values = "an integer from " + std::to_string(row.least) + " to " + std::to_string(row.most);
  }
  ForEachWord(row.words, [&](std::string_view word) {
    const bool is_last = word.data() + word.size() == std::string_view(row.words).end();
    values += values.empty() ? "" : is_last ? " or " : ", ";
    values += word;
    return true;
  });
  return values;
}

Status CheckAll() {
  for (const VariableDescription& row : kTable) {
    const char* const text = ReadVariable(row.id);
    if (text != nullptr) STOF_RETURN_IF_ERROR(CheckVariable(row.id, text));
  }
  return Status();
}

}  // namespace

const VariableDescription& DescribeVariable(Variable variable) { return kTable[static_cast<int>(variable)]; }

const char* ReadVariable(Variable variable) noexcept {
  const VariableDescription& row = DescribeVariable(variable);
  const char* const text = row.is_read_in_setuid ? std::getenv(row.name) : GetTrustedVariable(row.name);
  return text == nullptr || *text == '\0' ? nullptr : text;
}

bool ParseVariable(Variable variable, std::string_view text, int64_t* value) noexcept {
  const VariableDescription& row = DescribeVariable(variable);
  if (row.type == VariableType::kPath || row.type == VariableType::kName) return true;
  if (!FindWord(row, text).empty()) return true;
  if (row.type != VariableType::kInteger) return false;
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || rest != end || number < row.least || number > row.most) return false;
  *value = number;
  return true;
}

Status CheckVariable(Variable variable, std::string_view text) {
  int64_t value = 0;
  if (ParseVariable(variable, text, &value)) return Status();
  const VariableDescription& row = DescribeVariable(variable);
  return Status::Error(std::string("the environment variable ") + row.name + " is " + Quote(text, 64) + ", expected " +
                       PrintValues(row));
}

Status GetVariable(Variable variable, int64_t* value) {
  const char* const text = ReadVariable(variable);
  return text == nullptr || ParseVariable(variable, text, value) ? Status() : CheckVariable(variable, text);
}

Status GetVariable(Variable variable, std::string_view* word) {
  const char* const text = ReadVariable(variable);
  if (text == nullptr) return Status();
  STOF_RETURN_IF_ERROR(CheckVariable(variable, text));
  *word = FindWord(DescribeVariable(variable), text);
  return Status();
}

Status GetVariable(Variable variable, bool* value) {
  std::string_view word = *value ? "1" : "0";
  STOF_RETURN_IF_ERROR(GetVariable(variable, &word));
  *value = word == "1";
  return Status();
}

Status CheckEnvironment() {
  static ProcessWide<const Status> status;
  return status.Get(CheckAll);
}

}  // namespace stof
