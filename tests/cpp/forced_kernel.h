// SPDX-License-Identifier: Apache-2.0
// A kernel that a test forces, in place of the library's choice.
#ifndef STOF_TESTS_CPP_FORCED_KERNEL_H_
#define STOF_TESTS_CPP_FORCED_KERNEL_H_

#include <string>

#include "cuda/common/kernel_request.h"
#include "tests/cpp/check.h"

namespace stof::test {

// Forces a kernel by name or number while it lives; "": the library chooses.
class ForcedKernel {
 public:
  // requests: of the operator, as cuda::AttentionRequests().
  ForcedKernel(cuda::KernelRequests& requests, const std::string& kernel) : requests_(requests) {
    const Status status = requests.Force(kernel);
    CHECK(status.ok(), status.message());
  }
  ForcedKernel(const ForcedKernel&) = delete;
  ForcedKernel& operator=(const ForcedKernel&) = delete;
  ~ForcedKernel() { requests_.Release(); }

 private:
  cuda::KernelRequests& requests_;
};

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_FORCED_KERNEL_H_
