// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/cublaslt_gemm.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/common/status.h"
#include "cuda/gemm/cublaslt.h"
#include "cuda/gemm/kernel_table.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/host/environment.h"

namespace stof {
namespace cuda {
namespace {

// nullptr: there is none. Looked for once, and never unloaded.
CublasLt* GetLibrary() {
  static CublasLt* const library = []() -> CublasLt* {
    const char* const given = ReadVariable(Variable::kCublasLt);
    if (given != nullptr && std::strcmp(given, "0") == 0) return nullptr;
    auto found = std::make_unique<CublasLt>();
    return found->Open(given) ? found.release() : nullptr;
  }();
  return library;
}

// The epilogue with each activation, without a bias; std::nullopt: cuBLASLt lacks it.
constexpr std::optional<CublasLt::Epilogue> kEpilogues[] = {
#define STOF_EPILOGUE(function, name, gives_zeros, chain_op, cublaslt, ...) cublaslt,
    STOF_ACTIVATIONS(STOF_EPILOGUE)
#undef STOF_EPILOGUE
};

CublasLt::Epilogue AddBias(CublasLt::Epilogue epilogue) {
  if (epilogue == CublasLt::kNothing) return CublasLt::kBias;
  return static_cast<CublasLt::Epilogue>(epilogue | CublasLt::kBias);
}

bool FindEpilogue(const GemmArgs& args, CublasLt::Epilogue* epilogue) {
  if (args.b1 != nullptr || args.scale != nullptr || args.row != nullptr) return false;
  // What it adds to the matmul is within the activation.
  if (args.activation != Activation::kNone && args.residual != nullptr) return false;
  const auto& found = kEpilogues[static_cast<int>(args.activation)];
  if (!found.has_value()) return false;
  *epilogue = args.bias0 != nullptr ? AddBias(*found) : *found;
  return true;
}

// What was asked of cuBLASLt. Where the epilogue has no function there, nothing is asked.
struct Answers {
  std::mutex mutex;
  std::unordered_map<GemmProblem, CublasLt::Problem, KeyHash> known;  // without an algorithm where there is none
};
constexpr size_t kMostAnswers = 4096;  // sizes that change with every run must not fill the memory
constexpr int kAlgorithms = 8;

Answers& AllAnswers() {
  static auto* const answers = new Answers;  // stays, as its library does
  return *answers;
}

// The answers' mutex is held. nullptr: there is no algorithm.
CublasLt::Problem* Ask(CublasLt* library, const GemmArgs& args, const GemmProblem& problem) {
  CublasLt::Shape shape;
  if (library == nullptr || !FindEpilogue(args, &shape.epilogue)) return nullptr;
  auto& known = AllAnswers().known;
  if (known.size() > kMostAnswers) known.clear();
  const auto [entry, is_new] = known.try_emplace(problem);
  CublasLt::Problem& answer = entry->second;
  if (is_new) {
    shape.M = args.M, shape.N = args.N, shape.K = args.K, shape.stride = args.stride;
    shape.bf16 = args.dtype == DType::kBF16, shape.is_b_transposed = args.is_b_transposed;
    shape.alignment = problem.cublaslt_alignment;
    shape.workspace = problem.workspace;
    shape.in_order = true;
    if (!library->Make(shape, args.bias0, kAlgorithms, &answer)) answer.algorithms.clear();
  }
  return answer.algorithms.empty() ? nullptr : &answer;
}

}  // namespace

uint32_t CublasLtAlignment(const GemmArgs& args) {
  uintptr_t bits = 0;
  for (const void* p : {args.a, args.b0, args.bias0, args.residual, static_cast<const void*>(args.output)}) {
    bits |= reinterpret_cast<uintptr_t>(p);
  }
  return bits % 256 == 0 ? 256 : 16;
}

size_t CublasLtWorkspace(const GemmArgs& args) {
  // Only GEMMs of few tiles are divided along K.
  const auto most = static_cast<int64_t>(args.most_workspace / 16);
  return args.M > most / std::max<int64_t>(1, args.N) ? 0 : args.most_workspace;
}

bool CanUseCublasLt(const GemmArgs& args) {
  CublasLt::Epilogue epilogue;
  return FindEpilogue(args, &epilogue) && GetLibrary() != nullptr;
}

namespace {

constexpr GemmKernelEntry MakeKernel(int algorithm) {
  GemmKernelEntry kernel;
  kernel.name = "cublaslt", kernel.algorithm = algorithm;
  return kernel;
}
constexpr GemmKernelEntry kKernels[kAlgorithms] = {MakeKernel(0), MakeKernel(1), MakeKernel(2), MakeKernel(3),
                                                   MakeKernel(4), MakeKernel(5), MakeKernel(6), MakeKernel(7)};

Status Plan(const GemmArgs& args, const GemmProblem& problem, std::vector<GemmPlan>* plans) {
  if (!problem.has_vectors || problem.K == 0) return Status();
  const RelaxedCapture relaxed;
  const std::lock_guard<std::mutex> lock(AllAnswers().mutex);
  const CublasLt::Problem* const answer = Ask(GetLibrary(), args, problem);
  for (size_t i = 0; answer != nullptr && i < answer->algorithms.size(); ++i) {
    GemmPlan plan;
    plan.family = &kGemmCublasLtFamily, plan.kernel = &kKernels[i];
    plan.workspace = answer->algorithms[i].workspace;
    plans->push_back(plan);
  }
  return Status();
}

Status Run(const GemmArgs& args, const GemmProblem& problem, const GemmPlan& plan, const RunContext& context,
           bool* done) {
  *done = false;
  CublasLt* const library = GetLibrary();
  const auto algorithm = static_cast<size_t>(plan.kernel->algorithm);
  const RelaxedCapture relaxed;  // the first call for a shape may load code
  const std::lock_guard<std::mutex> lock(AllAnswers().mutex);
  const CublasLt::Problem* const answer = Ask(library, args, problem);
  if (answer == nullptr || algorithm >= answer->algorithms.size()) return Status();
  CublasLt::Operands operands;
  operands.a = args.a, operands.b = args.b0, operands.bias = args.bias0, operands.c = args.residual;
  operands.y = args.output;
  if (const size_t bytes = answer->algorithms[algorithm].workspace; bytes > 0) {
    operands.workspace = context.allocate(context.self, bytes);
    if (operands.workspace == nullptr) return Status();
  }
  *done = library->Run(*answer, algorithm, operands, static_cast<cudaStream_t>(context.stream));
  return Status();
}

void ListNames(std::vector<std::string>* names) {
  names->push_back("cublaslt");
  for (const GemmKernelEntry& kernel : kKernels) names->push_back(KernelName(kernel));
}

}  // namespace

const GemmFamily kGemmCublasLtFamily = {"cublaslt", Plan, Run, ListNames};

}  // namespace cuda
}  // namespace stof
