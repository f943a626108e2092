// SPDX-License-Identifier: Apache-2.0
// Which attention kernel is asked for: by a test, a TensorRT tactic, the attribute `kernel`, or STOF_CUDA_KERNEL.
#ifndef STOF_CUDA_ATTENTION_KERNEL_REQUEST_H_
#define STOF_CUDA_ATTENTION_KERNEL_REQUEST_H_

#include <string>
#include <vector>

#include "cuda/attention/kernel_table.h"
#include "plugins/core/base/status.h"

namespace stof {
namespace cuda {

// At most one of these is set. A request is a hint: where the kernel does not fit the problem, the library chooses.
struct KernelRequest {
  std::string name;  // KernelName
  // Position in the table of the scheduled kernels, and in that of the decode kernels: split-KV (0), clusters (1).
  // Unlike a name it leaves the choice of the row-wise kernel to the model.
  int number = -1;
  int tactic = 0;  // RunContext::kernel: 1 for the tiled kernel, then the scheduled ones

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

// ResolveKernelRequest with what ForceKernel and STOF_CUDA_KERNEL say. An error where STOF_CUDA_KERNEL is invalid,
// whether or not it counts.
Status GetKernelRequest(const char* attribute, int tactic, KernelRequest* request);

// For tests and measurements: requests the kernel of this name or number in all runs from now on, before any other
// request. Empty text is no request. An error leaves the request as it was.
Status ForceKernel(const std::string& text);
// Ends the request of ForceKernel.
void ReleaseKernel();

// The kernel of a table that is requested by name or number; nullptr: it has none.
const KernelEntry* FindRequested(KernelTable kernels, const KernelRequest& request);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_KERNEL_REQUEST_H_
