// SPDX-License-Identifier: Apache-2.0
// Guards against CUDA in forked children: a context works only in the process that made it. In a child its calls may
// fail, hang or crash. Plain C++.
#ifndef STOF_CUDA_COMMON_ONE_PROCESS_H_
#define STOF_CUDA_COMMON_ONE_PROCESS_H_

#include "plugins/core/base/status.h"
#include "plugins/core/host/fork_guard.h"

namespace stof {
namespace cuda {

// Whether this process may use CUDA through this library: no process that it was forked from has done so.
inline bool IsCudaUsable() {
  static SingleProcess process;
  return process.Claim();
}

inline Status CheckCudaProcess() {
  if (IsCudaUsable()) return Status();
  return Status::Error(
      "CUDA was used before this process was forked, and a forked child cannot use it: start children with the method "
      "'spawn' or 'forkserver', or use CUDA in the children alone");
}

// kFunction with the check before it: InOneProcess<&Run>::Call.
template <auto kFunction>
struct InOneProcess;
template <typename... Arguments, Status (*kFunction)(Arguments...)>
struct InOneProcess<kFunction> {
  static Status Call(Arguments... arguments) {
    STOF_RETURN_IF_ERROR(CheckCudaProcess());
    return kFunction(arguments...);
  }
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_ONE_PROCESS_H_
