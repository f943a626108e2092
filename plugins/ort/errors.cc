// SPDX-License-Identifier: Apache-2.0
#include "plugins/ort/errors.h"

namespace stof::ort {

bool Failed(const OrtApi* api, OrtStatus* status) {
  if (status == nullptr) return false;
  api->ReleaseStatus(status);
  return true;
}

OrtStatus* ToOrt(const OrtApi* api, const std::string& node, const Status& status) {
  if (status.ok()) return nullptr;
  return api->CreateStatus(ORT_INVALID_ARGUMENT, (node + ": " + status.message()).c_str());
}

OrtStatus* OfInput(const OrtApi* api, const std::string& node, size_t input, OrtStatus* status) {
  if (status == nullptr) return nullptr;
  const std::string message = node + ": input " + std::to_string(input) + " " + api->GetErrorMessage(status);
  const OrtErrorCode code = api->GetErrorCode(status);
  api->ReleaseStatus(status);
  return api->CreateStatus(code, message.c_str());
}

OrtStatus* TooMany(const OrtApi* api, const std::string& node, size_t count, const char* what, int most) {
  const std::string message = node + ": has " + std::to_string(count) + " " + what + ", expected at most " +
                              std::to_string(most) + ": leave out those that nothing reads";
  return api->CreateStatus(ORT_INVALID_ARGUMENT, message.c_str());
}

}  // namespace stof::ort
