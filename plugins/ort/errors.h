// SPDX-License-Identifier: Apache-2.0
// Errors of ONNX Runtime's calls, and conversion of operators' errors to its own form.
#ifndef STOF_PLUGINS_ORT_ERRORS_H_
#define STOF_PLUGINS_ORT_ERRORS_H_

#include <onnxruntime_c_api.h>

#include <string>
#include <string_view>

#include "plugins/core/base/status.h"

namespace stof::ort {

#define STOF_ORT_RETURN(expr)                                \
  do {                                                       \
    if (OrtStatus* ort_status_ = (expr)) return ort_status_; \
  } while (0)

// Whether there was an error; frees it, for callers that go on with a default.
bool HasFailed(const OrtApi* api, OrtStatus* status);
// `node` is what LabelOf gives; the message may hold text of the model.
OrtStatus* Error(const OrtApi* api, OrtErrorCode code, const std::string& node, std::string_view message);
OrtStatus* ToOrt(const OrtApi* api, const std::string& node, const Status& status);
// Adds the input to an error of the runtime, which does not name it.
OrtStatus* OfInput(const OrtApi* api, const std::string& node, size_t input, OrtStatus* status);
OrtStatus* TooMany(const OrtApi* api, const std::string& node, size_t count, const char* what, int most);

}  // namespace stof::ort
#endif  // STOF_PLUGINS_ORT_ERRORS_H_
