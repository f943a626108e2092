// SPDX-License-Identifier: Apache-2.0
// Errors of ONNX Runtime's calls, and those of operators as ONNX Runtime wants them.
#ifndef STOF_PLUGINS_ORT_ERRORS_H_
#define STOF_PLUGINS_ORT_ERRORS_H_

#include <onnxruntime_c_api.h>

#include <string>
#include <string_view>

#include "plugins/core/contract/status.h"

namespace stof::ort {

#define STOF_ORT_RETURN(expr)                                \
  do {                                                       \
    if (OrtStatus* ort_status_ = (expr)) return ort_status_; \
  } while (0)

// Frees an error that we answer by a default, and says whether there was one.
bool Failed(const OrtApi* api, OrtStatus* status);
// `node` is what LabelOf gives; the message may hold text of the model.
OrtStatus* Error(const OrtApi* api, OrtErrorCode code, const std::string& node, std::string_view message);
OrtStatus* ToOrt(const OrtApi* api, const std::string& node, const Status& status);
// An error that does not say where it was met, for the runtime that does not either.
OrtStatus* OfInput(const OrtApi* api, const std::string& node, size_t input, OrtStatus* status);
OrtStatus* TooMany(const OrtApi* api, const std::string& node, size_t count, const char* what, int most);

}  // namespace stof::ort
#endif  // STOF_PLUGINS_ORT_ERRORS_H_
