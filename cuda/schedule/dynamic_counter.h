// SPDX-License-Identifier: Apache-2.0
// Atomic tile counters in device memory. Dynamic tile scheduling: CTAs fetch the index of their next work tile from
// one.
#ifndef STOF_CUDA_SCHEDULE_DYNAMIC_COUNTER_H_
#define STOF_CUDA_SCHEDULE_DYNAMIC_COUNTER_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "plugins/core/base/status.h"
#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {

// The tile counters of one schedule. A counter is 0 before and after every kernel that uses it. Kernels of one stream
// run one after the other and share a counter.
//
// A captured launch gets a counter of its own, since its graph may run on any stream. The keeper holds it; without a
// keeper it is never freed. Instances of one graph share the counter and must not run at the same time, which their
// common outputs forbid anyway.
class TileCounters {
 public:
  // Streams whose counter needs no allocation, and int32 elements from one counter to the next.
  static constexpr size_t kStreams = 32, kStride = 8;

  TileCounters() = default;
  TileCounters(const TileCounters&) = delete;
  TileCounters& operator=(const TileCounters&) = delete;
  ~TileCounters();
  // zeros: kStreams * kStride of them in device memory, which outlive this. The first counters lie there.
  void SetMemory(int32_t* zeros) { zeros_ = zeros; }
  // The counter of a launch on this stream. nullptr while kernels are only loaded.
  Status Get(cudaStream_t stream, Keeper* keeper, int32_t** counter) const;

 private:
  int32_t* zeros_ = nullptr;
  mutable std::mutex mutex_;
  mutable std::map<unsigned long long, int32_t*> of_streams_;
  mutable std::vector<int32_t*> more_;  // of streams beyond kStreams
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SCHEDULE_DYNAMIC_COUNTER_H_
