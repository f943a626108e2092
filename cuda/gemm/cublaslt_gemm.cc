// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/cublaslt_gemm.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "cuda/common/status.h"
#include "cuda/gemm/cublaslt.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/host/environment.h"

namespace stof {
namespace cuda {
namespace {

// nullptr: there is none. Looked for once, and never unloaded.
CublasLt* Library() {
  static CublasLt* const library = []() -> CublasLt* {
    const char* const given = ReadVariable(Variable::kCublasLt);
    if (given != nullptr && std::strcmp(given, "0") == 0) return nullptr;
    auto found = std::make_unique<CublasLt>();
    return found->Open(given) ? found.release() : nullptr;
  }();
  return library;
}

// Its GELU is the form by tanh. GELU by erf and SiLU it has not.
bool EpilogueOf(const GemmArgs& args, CublasLt::Epilogue* epilogue) {
  if (args.b1 != nullptr || args.scale != nullptr || args.row != nullptr) return false;
  const bool bias = args.bias0 != nullptr;
  switch (args.activation) {
    case Activation::kNone:
      *epilogue = bias ? CublasLt::kBias : CublasLt::kNothing;
      return true;
    case Activation::kRelu:
      *epilogue = bias ? CublasLt::kReluBias : CublasLt::kRelu;
      break;
    case Activation::kGeluTanh:
      *epilogue = bias ? CublasLt::kGeluBias : CublasLt::kGelu;
      break;
    case Activation::kRelu2:
    case Activation::kGelu:
    case Activation::kSilu:
      return false;
  }
  // What it adds to the matmul is within the activation.
  return args.residual == nullptr;
}

// What was asked of cuBLASLt, by everything that its answer depends on.
using Key = std::tuple<int, DType, CublasLt::Epilogue, size_t, uint32_t, bool, int64_t, int64_t, int64_t, int64_t>;
struct Answers {
  std::mutex mutex;
  std::map<Key, CublasLt::Problem> known;  // without an algorithm where there is none
};
constexpr size_t kMostAnswers = 4096;  // sizes that change with every run must not fill the memory
constexpr int kAlgorithms = 8;

Answers& AllAnswers() {
  static auto* const answers = new Answers;  // stays, as its library does
  return *answers;
}

// The answers' mutex is held. nullptr: there is no algorithm.
CublasLt::Problem* Ask(CublasLt* library, const GemmArgs& args, bool workspace, int device) {
  CublasLt::Shape shape;
  if (library == nullptr || !EpilogueOf(args, &shape.epilogue)) return nullptr;
  shape.M = args.M, shape.N = args.N, shape.K = args.K, shape.stride = args.stride;
  shape.bf16 = args.dtype == DType::kBF16, shape.is_b_transposed = args.is_b_transposed;
  shape.alignment = LtAlignment(args);
  shape.workspace = workspace ? LtWorkspace(args) : 0;
  shape.in_order = true;
  auto& known = AllAnswers().known;
  if (known.size() > kMostAnswers) known.clear();
  const Key key(device, args.dtype, shape.epilogue, shape.workspace, shape.alignment, shape.is_b_transposed, shape.M,
                shape.N, shape.K, shape.stride);
  const auto [place, is_new] = known.try_emplace(key);
  CublasLt::Problem& problem = place->second;
  if (is_new && !library->Make(shape, args.bias0, kAlgorithms, &problem)) problem.algorithms.clear();
  return problem.algorithms.empty() ? nullptr : &problem;
}

}  // namespace

uint32_t LtAlignment(const GemmArgs& args) {
  uintptr_t bits = 0;
  for (const void* p : {args.a, args.b0, args.bias0, args.residual, static_cast<const void*>(args.output)}) {
    bits |= reinterpret_cast<uintptr_t>(p);
  }
  return bits % 256 == 0 ? 256 : 16;
}

size_t LtWorkspace(const GemmArgs& args) {
  // Only GEMMs of few tiles are divided along K.
  const auto most = static_cast<int64_t>(args.most_workspace / 16);
  return args.M > most / std::max<int64_t>(1, args.N) ? 0 : args.most_workspace;
}

bool LtFits(const GemmArgs& args) {
  CublasLt::Epilogue epilogue;
  return EpilogueOf(args, &epilogue) && Library() != nullptr;
}

int LtAlgorithms(const GemmArgs& args, bool workspace, int device) {
  const RelaxedCapture relaxed;
  const std::lock_guard<std::mutex> lock(AllAnswers().mutex);
  const CublasLt::Problem* const problem = Ask(Library(), args, workspace, device);
  return problem == nullptr ? 0 : static_cast<int>(problem->algorithms.size());
}

Status RunLt(const GemmArgs& args, const RunContext& context, int device, int algorithm, bool* done) {
  *done = false;
  CublasLt* const library = Library();
  const RelaxedCapture relaxed;  // the first call for a shape may load code
  const std::lock_guard<std::mutex> lock(AllAnswers().mutex);
  const CublasLt::Problem* const problem = Ask(library, args, context.allocate != nullptr, device);
  if (problem == nullptr || static_cast<size_t>(algorithm) >= problem->algorithms.size()) return Status();
  CublasLt::Operands operands;
  operands.a = args.a, operands.b = args.b0, operands.bias = args.bias0, operands.c = args.residual;
  operands.y = args.output;
  if (const size_t bytes = problem->algorithms[static_cast<size_t>(algorithm)].workspace; bytes > 0) {
    operands.workspace = context.allocate(context.self, bytes);
    if (operands.workspace == nullptr) return Status();
  }
  *done = library->Run(*problem, static_cast<size_t>(algorithm), operands, static_cast<cudaStream_t>(context.stream));
  return Status();
}

}  // namespace cuda
}  // namespace stof
