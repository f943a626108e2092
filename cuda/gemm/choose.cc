// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/choose.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "cuda/common/device_properties.h"
#include "cuda/common/status.h"
#include "cuda/common/stream_memory.h"
#include "cuda/gemm/autotune.h"
#include "cuda/gemm/cublaslt_gemm.h"
#include "plugins/core/host/environment.h"

namespace stof {
namespace cuda {
namespace {

// A new architecture adds its family here.
const GemmFamily* const kFamilies[] = {&kGemmSm90Family, &kGemmCublasLtFamily, &kGemmSm80Family};

std::vector<std::string> ListNames() {
  std::vector<std::string> names;
  for (const GemmFamily* family : kFamilies) family->list_names(&names);
  return names;
}

bool IsAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Whether the rows of every matrix and vector [N] can be read 16 bytes at a time: K, N and stride are multiples of 8,
// addresses are multiples of 16 bytes.
bool HasVectors(const GemmArgs& args) {
  return args.K % 8 == 0 && args.N % 8 == 0 && args.stride % 8 == 0 && IsAligned(args.a) && IsAligned(args.b0) &&
         IsAligned(args.b1) && IsAligned(args.output) && IsAligned(args.bias0) && IsAligned(args.bias1) &&
         IsAligned(args.scale) && IsAligned(args.residual);
}

double CountFlops(const GemmProblem& p) {
  return 2.0 * static_cast<double>(p.M) * static_cast<double>(p.N) * static_cast<double>(p.K);
}

bool IsRequested(const GemmPlan& plan, const GemmProblem& problem, const KernelRequest& request) {
  if (request.number >= 0) {
    return plan.family == &kGemmSm90Family && plan.kernel == FindGemmSm90(problem).begin() + request.number;
  }
  return request.name == plan.family->name || request.name == KernelName(*plan.kernel);
}

// What the models do not know is a tenth or two.
constexpr double kNear = 1.3;
// Below this rate of the best sm90 kernel (of 132 SMs), as predicted, cuBLASLt is the first choice: few tiles with a
// long K are divided along K there, and nowhere here. docs/design/gemm.md has the times behind it.
constexpr double kCublasLtBelow = 450e12;

// The plans of all kernels that can compute the GEMM, by family.
struct Candidates {
  std::vector<GemmPlan> sm90, cublaslt, sm80;
};
Status ListCandidates(const GemmArgs& args, const GemmProblem& problem, Candidates* candidates) {
  STOF_RETURN_IF_ERROR(kGemmSm90Family.plan(args, problem, &candidates->sm90));
  STOF_RETURN_IF_ERROR(kGemmCublasLtFamily.plan(args, problem, &candidates->cublaslt));
  return kGemmSm80Family.plan(args, problem, &candidates->sm80);
}

// The requested ones; empty: there is none.
std::vector<GemmPlan> FindRequested(const Candidates& candidates, const GemmProblem& problem,
                                    const KernelRequest& request) {
  std::vector<GemmPlan> requested;
  for (const std::vector<GemmPlan>* plans : {&candidates.sm90, &candidates.cublaslt, &candidates.sm80}) {
    for (const GemmPlan& plan : *plans) {
      if (IsRequested(plan, problem, request)) requested.push_back(plan);
    }
  }
  return requested;
}

// All plans in the order of the models. are_timed: with all that may be the fastest; else with the first of a family.
std::vector<GemmPlan> OrderByModels(Candidates candidates, const GemmProblem& problem, bool are_timed) {
  std::vector<GemmPlan> plans = std::move(candidates.sm90);
  std::stable_sort(plans.begin(), plans.end(),
                   [](const GemmPlan& a, const GemmPlan& b) { return a.nanoseconds < b.nanoseconds; });
  while (plans.size() > 1 && (!are_timed || plans.back().nanoseconds > kNear * plans.front().nanoseconds)) {
    plans.pop_back();
  }
  std::vector<GemmPlan>& cublaslt = candidates.cublaslt;
  if (!cublaslt.empty()) {
    const bool is_first = plans.empty() || problem.prefers_cublaslt ||
                          CountFlops(problem) < kCublasLtBelow * 1e-9 * plans.front().nanoseconds;
    plans.insert(is_first ? plans.begin() : plans.end(), cublaslt.front());
    if (are_timed) plans.insert(plans.end(), cublaslt.begin() + 1, cublaslt.end());
  }
  plans.insert(plans.end(), candidates.sm80.begin(), candidates.sm80.end());
  return plans;
}

// ---- plans that were timed ----
struct TimedPlans {
  std::mutex mutex;
  std::unordered_map<GemmProblem, GemmPlan, KeyHash> fastest;
};
// Sizes that change with every run must not be timed forever.
constexpr size_t kMostTimed = 64;

bool IsTimingAllowed() {
  static const bool is_allowed = ReadVariableOr(Variable::kGemmTiming, true);
  return is_allowed;
}

}  // namespace

Status FindTimedGemm(const GemmArgs& args, const GemmProblem& problem, const RunContext& context, GemmPlan* plan) {
  static auto* const timed = new TimedPlans;
  if (!IsTimingAllowed()) return Status();
  const std::lock_guard<std::mutex> lock(timed->mutex);
  const auto known = timed->fastest.find(problem);
  if (known != timed->fastest.end()) {
    *plan = known->second;
    return Status();
  }
  if (!args.may_wait || timed->fastest.size() >= kMostTimed || IsCapturing(context.stream)) return Status();
  Candidates candidates;
  STOF_RETURN_IF_ERROR(ListCandidates(args, problem, &candidates));
  std::vector<GemmPlan> plans = OrderByModels(std::move(candidates), problem, true);
  if (plans.size() <= 2) return Status();  // nothing to choose: the sm80 kernel is there for what no other one takes
  plans.pop_back();
  // Memory comes in the order of the context's stream, which is waited for before another one uses it. Without it, the
  // plans that need it cannot be taken.
  if (context.allocate != nullptr) (void)context.allocate(context.self, CublasLtWorkspace(args));
  const auto queue = [&](int index, const RunContext& of_timing, bool* done) {
    const GemmPlan& candidate = plans[static_cast<size_t>(index)];
    return candidate.family->run(args, problem, candidate, of_timing, done);
  };
  int best = 0;
  // What no model knows takes at least as long as at 500 TFLOPS.
  const double at_least = CountFlops(problem) * (problem.is_pair ? 2 : 1) / 5e14;
  const double seconds = std::max({1e-9 * plans[0].nanoseconds, 1e-9 * plans[1].nanoseconds, 1e-6, at_least});
  // Where timing fails, the model's choice runs, or says why it cannot. It is kept, too: timing waits for the device,
  // and runs that do so each time would be worse than a choice that is not the best.
  if (!FindFastest(static_cast<int>(plans.size()), queue, context, seconds, &best).ok()) cudaGetLastError();
  std::rotate(plans.begin(), plans.begin() + std::max(best, 0), plans.end());
  PrintChoiceOf(problem, plans);
  *plan = plans.front();
  timed->fastest.emplace(problem, *plan);
  return Status();
}

KernelRequests& GemmRequests() {
  static auto* const requests = new KernelRequests(Variable::kCudaGemm, ListNames);
  return *requests;
}

uint64_t GemmProblem::Hash() const {
  const auto flags = static_cast<uint64_t>((is_pair ? 1 : 0) | (is_b_transposed ? 2 : 0) | (has_vectors ? 4 : 0) |
                                           (prefers_cublaslt ? 8 : 0));
  return HashWords({static_cast<uint64_t>(device), static_cast<uint64_t>(capability), static_cast<uint64_t>(dtype),
                    static_cast<uint64_t>(activation), static_cast<uint64_t>(epilogue), flags, cublaslt_alignment,
                    workspace, static_cast<uint64_t>(M), static_cast<uint64_t>(N), static_cast<uint64_t>(K),
                    static_cast<uint64_t>(stride)});
}

bool operator==(const GemmProblem& a, const GemmProblem& b) {
  return a.device == b.device && a.capability == b.capability && a.dtype == b.dtype && a.activation == b.activation &&
         a.epilogue == b.epilogue && a.is_pair == b.is_pair && a.is_b_transposed == b.is_b_transposed &&
         a.has_vectors == b.has_vectors && a.prefers_cublaslt == b.prefers_cublaslt &&
         a.cublaslt_alignment == b.cublaslt_alignment && a.workspace == b.workspace && a.M == b.M && a.N == b.N &&
         a.K == b.K && a.stride == b.stride;
}

std::string Print(const GemmProblem& problem) {
  std::string text = "GEMM M " + std::to_string(problem.M) + ", N " + std::to_string(problem.N) + ", K " +
                     std::to_string(problem.K) + (problem.dtype == DType::kBF16 ? ", bf16" : ", fp16");
  if (problem.is_pair) text += ", pair";
  if (problem.is_b_transposed) text += ", transposed b";
  if (problem.activation != Activation::kNone) {
    text += std::string(", ") + kActivationNames[static_cast<int>(problem.activation)];
  }
  if ((problem.epilogue & kHasResidual) != 0) text += ", residual";
  if (!problem.has_vectors) text += ", unaligned rows";
  return text + ", compute capability " + std::to_string(problem.capability / 10) + "." +
         std::to_string(problem.capability % 10);
}

Status DescribeGemm(const GemmArgs& args, bool allows_workspace, GemmProblem* problem) {
  DeviceProperties properties;
  STOF_RETURN_IF_ERROR(GetDeviceProperties(&properties));
  problem->device = properties.device, problem->capability = properties.capability;
  problem->dtype = args.dtype, problem->activation = args.activation;
  problem->epilogue = EpilogueOf(args).has;
  problem->is_pair = args.b1 != nullptr, problem->is_b_transposed = args.is_b_transposed;
  problem->has_vectors = HasVectors(args);
  problem->prefers_cublaslt = args.prefers_cublaslt;
  problem->cublaslt_alignment = problem->has_vectors ? CublasLtAlignment(args) : 0;
  problem->workspace = allows_workspace ? CublasLtWorkspace(args) : 0;
  problem->M = args.M, problem->N = args.N, problem->K = args.K, problem->stride = args.stride;
  return Status();
}

Status ListGemmPlans(const GemmArgs& args, const GemmProblem& problem, const KernelRequest& request,
                     std::vector<GemmPlan>* plans) {
  Candidates candidates;
  STOF_RETURN_IF_ERROR(ListCandidates(args, problem, &candidates));
  plans->clear();
  if (!request.is_empty()) *plans = FindRequested(candidates, problem, request);
  const std::vector<GemmPlan> by_models = OrderByModels(std::move(candidates), problem, false);
  plans->insert(plans->end(), by_models.begin(), by_models.end());
  PrintChoiceOf(problem, *plans);
  return Status();
}

}  // namespace cuda
}  // namespace stof
