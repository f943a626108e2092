// SPDX-License-Identifier: Apache-2.0
// The units that copies of rows move: 16 bytes where rows are aligned so, else one element.
#ifndef STOF_CUDA_PACKED_SEQUENCES_COPY_UNITS_CUH_
#define STOF_CUDA_PACKED_SEQUENCES_COPY_UNITS_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

namespace stof {
namespace cuda {

constexpr int64_t kMostCtas = std::numeric_limits<int32_t>::max();

// All bits set are NaN of every type.
template <typename Unit>
__device__ __forceinline__ Unit NanOf() {
  return static_cast<Unit>(~Unit{});
}
template <>
__device__ __forceinline__ uint4 NanOf<uint4>() {
  return make_uint4(~0u, ~0u, ~0u, ~0u);
}

inline bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(uint4) == 0; }

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_PACKED_SEQUENCES_COPY_UNITS_CUH_
