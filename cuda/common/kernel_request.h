// SPDX-License-Identifier: Apache-2.0
// Which kernel is asked for: by a test, a TensorRT tactic, the attribute `kernel`, or an environment variable.
#ifndef STOF_CUDA_COMMON_KERNEL_REQUEST_H_
#define STOF_CUDA_COMMON_KERNEL_REQUEST_H_

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "plugins/core/base/status.h"
#include "plugins/core/host/environment.h"

namespace stof {
namespace cuda {

// At most one of these is set. A request is a hint: where the kernel does not fit the problem, the library chooses.
struct KernelRequest {
  std::string name;  // of a kernel (KernelName), or of a family
  // Position in a table. Attention: in that of the scheduled kernels, and in that of the decode kernels: split-KV (0),
  // clusters (1); unlike a name it leaves the choice of the row-wise kernel to the model. GEMM: in the sm90 table.
  int number = -1;
  int tactic = 0;  // RunContext::kernel of an attention: 1 for the tiled kernel, then the scheduled ones

  bool is_empty() const { return name.empty() && number < 0 && tactic == 0; }
};
inline bool operator==(const KernelRequest& a, const KernelRequest& b) {
  return a.name == b.name && a.number == b.number && a.tactic == b.tactic;
}

// Parses a number of at most three digits or one of `names`; empty text is an empty request. `source` begins the error
// for other text, which lists the names.
Status ParseKernelRequest(const std::string& text, const std::string& source, const std::vector<std::string>& names,
                          KernelRequest* request);

// The one request that counts: of a test, of a tactic, of the attribute, of the environment, in this order.
KernelRequest ResolveKernelRequest(const KernelRequest& forced, int tactic, const char* attribute,
                                   const KernelRequest& environment);

// The requests for the kernels of one operator. Never destroyed: other threads may read it at the process's end.
class KernelRequests {
 public:
  using ListNames = std::vector<std::string> (*)();
  // variable: read at the first use. list_names: gives the names of all kernels in this build.
  KernelRequests(Variable variable, ListNames list_names) : variable_(variable), list_names_(list_names) {}
  KernelRequests(const KernelRequests&) = delete;
  KernelRequests& operator=(const KernelRequests&) = delete;

  // ResolveKernelRequest with what Force and the environment say. An error where the environment variable is invalid,
  // whether or not it counts.
  Status Get(const char* attribute, int tactic, KernelRequest* request);
  // For tests and measurements: requests the kernel of this name or number in all runs from now on, before any other
  // request. Empty text is no request. An error leaves the request as it was.
  Status Force(const std::string& text);
  // Ends the request of Force.
  void Release();

 private:
  const Variable variable_;
  const ListNames list_names_;
  std::once_flag read_;
  KernelRequest environment_;
  Status environment_status_;
  std::mutex mutex_;
  // The forced requests by their text; the one in force. None is freed: another thread may read it.
  std::map<std::string, KernelRequest> requests_ = {{"", KernelRequest()}};
  std::atomic<const KernelRequest*> forced_{&requests_[""]};
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_KERNEL_REQUEST_H_
