// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/kernel_request.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

#include "cuda/attention/families.h"
#include "plugins/core/host/environment.h"

namespace stof {
namespace cuda {
namespace {

// STOF_CUDA_KERNEL, read once.
struct EnvironmentRequest {
  KernelRequest request;
  Status status;
};
const EnvironmentRequest& Environment() {
  static const auto* environment = [] {
    const char* const text = ReadVariable(Variable::kCudaKernel);
    auto* const parsed = new EnvironmentRequest;
    if (text != nullptr) {
      parsed->status =
          ParseKernelRequest(text, "the environment variable STOF_CUDA_KERNEL", ListAllKernelNames(), &parsed->request);
    }
    return parsed;
  }();
  return *environment;
}

// The requests of ForceKernel by their text; the one in force. None is freed: another thread may read it.
struct ForcedRequests {
  std::mutex mutex;
  std::map<std::string, KernelRequest> requests = {{"", KernelRequest()}};
  std::atomic<const KernelRequest*> current{&requests[""]};
};
ForcedRequests& Forced() {
  static auto* const forced = new ForcedRequests;
  return *forced;
}

}  // namespace

Status ParseKernelRequest(const std::string& text, const std::string& source, const std::vector<std::string>& names,
                          KernelRequest* request) {
  *request = KernelRequest();
  if (text.empty()) return Status();
  if (text.size() <= 3 && text.find_first_not_of("0123456789") == std::string::npos) {
    request->number = std::atoi(text.c_str());
    return Status();
  }
  if (std::find(names.begin(), names.end(), text) != names.end()) {
    request->name = text;
    return Status();
  }
  std::string list;
  for (const std::string& name : names) list += " " + name;
  return Status::Error(source + " is '" + text.substr(0, 64) + "', expected a number or one of" + list);
}

KernelRequest ResolveKernelRequest(const KernelRequest& forced, int tactic, const char* attribute,
                                   const KernelRequest& environment) {
  if (!forced.is_empty()) return forced;
  KernelRequest request;
  if (tactic > 0) {
    request.tactic = tactic;
  } else if (*attribute != '\0') {
    request.name = attribute;
  } else {
    return environment;
  }
  return request;
}

Status GetKernelRequest(const char* attribute, int tactic, KernelRequest* request) {
  STOF_RETURN_IF_ERROR(Environment().status);
  *request = ResolveKernelRequest(*Forced().current.load(), tactic, attribute, Environment().request);
  return Status();
}

Status ForceKernel(const std::string& text) {
  KernelRequest request;
  STOF_RETURN_IF_ERROR(ParseKernelRequest(text, "the forced kernel", ListAllKernelNames(), &request));
  ForcedRequests& forced = Forced();
  const std::lock_guard<std::mutex> lock(forced.mutex);
  forced.current.store(&forced.requests.emplace(text, request).first->second);
  return Status();
}

void ReleaseKernel() {
  ForcedRequests& forced = Forced();
  const std::lock_guard<std::mutex> lock(forced.mutex);
  forced.current.store(&forced.requests[""]);
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
