// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/families.h"

#include <algorithm>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/fp32/api.h"
#include "cuda/attention/rowwise/api.h"
#include "cuda/attention/sm80/api.h"
#include "cuda/attention/sm90/api.h"

namespace stof {
namespace cuda {
namespace {

// A new architecture adds its family here. Among families of one role the first that fits is taken.
const KernelFamily* const kFamilies[] = {&kSm80Family, &kRowwiseFamily, &kSm90Family, &kFp32Family, &kDecodeFamily};

void AddNames(KernelTable kernels, std::vector<std::string>* names) {
  for (const KernelEntry& kernel : kernels) {
    const std::string name = KernelName(kernel);
    if (std::find(names->begin(), names->end(), name) == names->end()) names->push_back(name);
  }
}

}  // namespace

const KernelFamily* FindFamily(KernelRole role, const KernelProblem& problem, KernelTable* kernels) {
  for (const KernelFamily* family : kFamilies) {
    if (family->role != role) continue;
    *kernels = FindKernels(*family, problem);
    if (kernels->size() > 0) return family;
  }
  *kernels = KernelTable();
  return nullptr;
}

std::vector<std::string> ListKernelNames(const KernelProblem& problem) {
  std::vector<std::string> names;
  for (const KernelFamily* family : kFamilies) {
    if (family->role != KernelRole::kDecode) AddNames(FindKernels(*family, problem), &names);
  }
  return names;
}

std::vector<std::string> ListAllKernelNames() {
  std::vector<std::string> names;
  for (const KernelFamily* family : kFamilies) {
    for (int head_size = 32; head_size <= 256; head_size += 32) {
      for (const ScoreMod score_mod : {ScoreMod::kNone, ScoreMod::kRelativeBias, ScoreMod::kFullBias}) {
        KernelProblem problem;
        problem.capability = family->least_capability;
        problem.dtype = family->takes_16_bit ? DType::kF16 : DType::kF32;
        problem.head_size = head_size;
        problem.has_softcap_or_bias = score_mod != ScoreMod::kNone;
        problem.has_full_bias = score_mod == ScoreMod::kFullBias;
        AddNames(FindKernels(*family, problem), &names);
      }
    }
  }
  return names;
}

KernelRequests& AttentionRequests() {
  static auto* const requests = new KernelRequests(Variable::kCudaKernel, ListAllKernelNames);
  return *requests;
}

const KernelEntry* FindRequested(KernelTable kernels, const KernelRequest& request) {
  if (request.number >= 0 && request.number < kernels.size()) return kernels.begin() + request.number;
  if (request.name.empty()) return nullptr;
  for (const KernelEntry& kernel : kernels) {
    if (KernelName(kernel) == request.name) return &kernel;
  }
  return nullptr;
}

}  // namespace cuda
}  // namespace stof
