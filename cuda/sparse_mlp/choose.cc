// SPDX-License-Identifier: Apache-2.0
#include "cuda/sparse_mlp/choose.h"

#include <algorithm>
#include <utility>

#include "cuda/sparse_mlp/params.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {
namespace {

constexpr MlpFamily kLists = {"lists", MlpFamilyKind::kLists};
constexpr MlpFamily kGemms = {"gemms", MlpFamilyKind::kGemms};
constexpr MlpKernelEntry kListKernels[] = {{"lists-1", 1}, {"lists-4", 4}, {"lists-8", 8}, {"lists-16", 16}};
constexpr MlpKernelEntry kGemmKernel = {"gemms", 0};

constexpr int kDownCtasPerSm = 2;
constexpr int64_t kLeastSplit = 8;  // neurons
// More tokens than these together need most neurons.
constexpr int64_t kMostSparseTokens = 16;
constexpr int64_t kMostOfGemm = int64_t{1} << 27;  // of K, F, N and R: 32 bits count CTAs

std::vector<std::string> ListNames() { return {kLists.name, kGemms.name}; }

MlpPlan PlanLists(const SparseMlpProblem& p) {
  const int64_t tokens = std::min<int64_t>(p.T, kMlpTokens);
  const int kernel = tokens == 1 ? 0 : tokens <= 4 ? 1 : tokens <= 8 || !p.is_down_tiled ? 2 : 3;
  MlpPlan plan;
  plan.family = &kLists, plan.kernel = &kListKernels[kernel];
  plan.rows = plan.kernel->group_tokens;
  const int64_t ctas = CeilDiv(p.N, kMlpSliceColumns) * CeilDiv(tokens, plan.rows);
  const int64_t most = std::max<int64_t>(1, std::min<int64_t>(kMlpMostSplits, p.F / kLeastSplit));
  plan.splits =
      static_cast<int>(std::clamp<int64_t>(int64_t{kDownCtasPerSm} * p.sm_count / std::max<int64_t>(1, ctas), 1, most));
  return plan;
}

bool CanUseGemms(const SparseMlpProblem& p) {
  return p.dtype != DType::kF32 && p.F > 0 && (p.K > 0 || !p.has_rows) && std::max({p.K, p.F, p.N, p.R}) <= kMostOfGemm;
}

}  // namespace

KernelRequests& MlpRequests() {
  static auto* const requests = new KernelRequests(Variable::kCudaSparseMlp, ListNames);
  return *requests;
}

std::vector<MlpPlan> ListMlpPlans(const SparseMlpProblem& problem, const KernelRequest& request) {
  std::vector<MlpPlan> plans = {PlanLists(problem)};
  if (!CanUseGemms(problem)) return plans;
  MlpPlan gemms;
  gemms.family = &kGemms, gemms.kernel = &kGemmKernel;
  plans.push_back(gemms);
  const bool are_gemms_first =
      request.name.empty() ? problem.T > kMostSparseTokens : request.name == plans[1].family->name;
  if (are_gemms_first) std::swap(plans[0], plans[1]);
  return plans;
}

uint64_t SparseMlpProblem::Hash() const {
  return HashWords({static_cast<uint64_t>(T), static_cast<uint64_t>(K), static_cast<uint64_t>(F),
                    static_cast<uint64_t>(N), static_cast<uint64_t>(R), static_cast<uint64_t>(dtype),
                    static_cast<uint64_t>((has_rows ? 1 : 0) | (is_down_tiled ? 2 : 0)),
                    static_cast<uint64_t>(sm_count)});
}

bool operator==(const SparseMlpProblem& a, const SparseMlpProblem& b) {
  return a.T == b.T && a.K == b.K && a.F == b.F && a.N == b.N && a.R == b.R && a.dtype == b.dtype &&
         a.has_rows == b.has_rows && a.is_down_tiled == b.is_down_tiled && a.sm_count == b.sm_count;
}

std::string Print(const SparseMlpProblem& problem) {
  std::string text = "sparse MLP";
  const std::pair<const char*, int64_t> sizes[] = {
      {"T", problem.T}, {"K", problem.K}, {"F", problem.F}, {"N", problem.N}, {"R", problem.R}};
  for (const auto& [name, size] : sizes) {
    text += std::string(text.back() == 'P' ? " " : ", ") + name + " " + std::to_string(size);
  }
  text += problem.dtype == DType::kF32 ? ", fp32" : problem.dtype == DType::kF16 ? ", fp16" : ", bf16";
  return text + ", " + std::to_string(problem.sm_count) + " SMs";
}

}  // namespace cuda
}  // namespace stof
