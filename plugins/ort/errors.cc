// SPDX-License-Identifier: Apache-2.0
#include "plugins/ort/errors.h"

#include <exception>

#include "plugins/core/host/quoted.h"

namespace stof::ort {

bool HasFailed(const OrtApi* api, OrtStatus* status) {
  if (status == nullptr) return false;
  api->ReleaseStatus(status);
  return true;
}

OrtStatus* ToOrt(const OrtApi* api, const std::string& node, const Status& status) {
  if (status.ok()) return nullptr;
  return Error(api, ORT_INVALID_ARGUMENT, node, status.message());
}

OrtStatus* Error(const OrtApi* api, OrtErrorCode code, const std::string& node, std::string_view message) {
  try {
    return api->CreateStatus(code, (node + ": " + EscapeMessage(message)).c_str());
  } catch (const std::exception&) {  // no memory for the words: this is called where there was none for something else
    return api->CreateStatus(ORT_FAIL, "stof: out of memory");
  }
}

OrtStatus* OfInput(const OrtApi* api, const std::string& node, size_t input, OrtStatus* status) {
  if (status == nullptr) return nullptr;
  const std::string message = "input " + std::to_string(input) + " " + api->GetErrorMessage(status);
  const OrtErrorCode code = api->GetErrorCode(status);
  api->ReleaseStatus(status);
  return Error(api, code, node, message);
}

OrtStatus* TooMany(const OrtApi* api, const std::string& node, size_t count, const char* what, int most) {
  return Error(api, ORT_INVALID_ARGUMENT, node,
               "has " + std::to_string(count) + " " + what + ", expected at most " + std::to_string(most) +
                   ": leave out those that nothing reads");
}

}  // namespace stof::ort
