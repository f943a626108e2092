// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_CORE_BASE_STATUS_H_
#define STOF_PLUGINS_CORE_BASE_STATUS_H_

#include <string>
#include <utility>

namespace stof {

// The result of anything that can fail. No exception crosses a library border; adapters turn a Status into the
// runtime's own form.
class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status Error(std::string message) { return Status(std::move(message)); }
  // The request exceeds a bound on memory or time; the same call fails again. Some callers have a fallback.
  static Status TooLarge(std::string message) {
    Status status(std::move(message));
    status.too_large_ = true;
    return status;
  }
  bool ok() const { return ok_; }
  bool too_large() const { return too_large_; }
  const std::string& message() const { return message_; }

 private:
  explicit Status(std::string message) : ok_(false), message_(std::move(message)) {}
  bool ok_ = true;
  bool too_large_ = false;
  std::string message_;
};

#define STOF_RETURN_IF_ERROR(expr)               \
  do {                                           \
    ::stof::Status stof_status_ = (expr);        \
    if (!stof_status_.ok()) return stof_status_; \
  } while (0)

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_BASE_STATUS_H_
