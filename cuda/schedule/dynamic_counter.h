// SPDX-License-Identifier: Apache-2.0
// Where the workers of a kernel count the rows that they draw at run time.
#ifndef STOF_CUDA_SCHEDULE_DYNAMIC_COUNTER_H_
#define STOF_CUDA_SCHEDULE_DYNAMIC_COUNTER_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "plugins/core/contract/op.h"
#include "plugins/core/contract/status.h"

namespace stof {
namespace cuda {

// Counts in device memory for the kernels that draw from one plan. Each is 0 whenever no kernel uses it: every kernel
// leaves it so. Kernels of one stream follow each other and share one. A captured launch gets one of its own, for its
// graph may run on any stream: the keeper holds it, and where there is none it stays for ever. Instances of one
// captured graph share it, and must not run at the same time, no more than they may write the same outputs.
class DrawCounts {
 public:
  // How many streams have a count without an allocation, and how many numbers each takes of memory.
  static constexpr size_t kStreams = 32, kApart = 8;

  DrawCounts() = default;
  DrawCounts(const DrawCounts&) = delete;
  DrawCounts& operator=(const DrawCounts&) = delete;
  ~DrawCounts();
  // zeros: kStreams * kApart of them, which live as long as this.
  void Begin(int32_t* zeros) { zeros_ = zeros; }
  Status Get(cudaStream_t stream, Keeper* keeper, int32_t** count) const;

 private:
  int32_t* zeros_ = nullptr;
  mutable std::mutex mutex_;
  mutable std::map<unsigned long long, int32_t*> of_streams_;
  mutable std::vector<int32_t*> more_;  // of streams beyond kStreams
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SCHEDULE_DYNAMIC_COUNTER_H_
