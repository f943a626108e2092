// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/kernel_request.h"

#include <algorithm>

namespace stof {
namespace cuda {

Status ParseKernelRequest(const std::string& text, const std::string& source, const std::vector<std::string>& names,
                          KernelRequest* request) {
  *request = KernelRequest();
  if (text.empty()) return Status();
  if (text.size() <= 3 && text.find_first_not_of("0123456789") == std::string::npos) {
    request->number = 0;
    for (const char digit : text) request->number = 10 * request->number + (digit - '0');
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

Status KernelRequests::Get(const char* attribute, int tactic, KernelRequest* request) {
  std::call_once(read_, [this] {
    const char* const text = ReadVariable(variable_);
    if (text == nullptr) return;
    environment_status_ =
        ParseKernelRequest(text, std::string("the environment variable ") + DescribeVariable(variable_).name,
                           list_names_(), &environment_);
  });
  STOF_RETURN_IF_ERROR(environment_status_);
  *request = ResolveKernelRequest(*forced_.load(), tactic, attribute, environment_);
  return Status();
}

Status KernelRequests::Force(const std::string& text) {
  KernelRequest request;
  STOF_RETURN_IF_ERROR(ParseKernelRequest(text, "the forced kernel", list_names_(), &request));
  const std::lock_guard<std::mutex> lock(mutex_);
  forced_.store(&requests_.emplace(text, request).first->second);
  return Status();
}

void KernelRequests::Release() {
  const std::lock_guard<std::mutex> lock(mutex_);
  forced_.store(&requests_[""]);
}

}  // namespace cuda
}  // namespace stof
