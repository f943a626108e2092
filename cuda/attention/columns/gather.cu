// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "cuda/attention/columns/gather.h"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256, kRowsOfCta = 64;
constexpr int kZeroRows = 256;  // the most keys of a KV tile

// A CTA copies kRowsOfCta rows of the keys, or of the values, of one KV head. All offsets of a thread's loads are
// independent, so that four are in flight.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) Gather(const __grid_constant__ GatherParams p) {
  const int which = blockIdx.z, head = blockIdx.y, b = head / p.G, g = head % p.G;
  const DeviceColumns& columns = p.columns;
  const int list = columns.lists == 1 ? 0 : g;
  const int32_t* const keys = columns.list + static_cast<int64_t>(list) * columns.stride;
  // In all keys: the columns are those of exactly p.keys keys.
  const int count = __ldg(columns.below + static_cast<int64_t>(list) * (columns.tiles + 1) + columns.tiles);
  const int end = (count + kZeroRows - 1) / kZeroRows * kZeroRows;
  const int units = static_cast<int>(p.row[which]);
  const Unit* const from = static_cast<const Unit*>(p.from[which]) + b * p.stride[which].b + g * p.stride[which].h;
  Unit* const to = static_cast<Unit*>(p.to[which]) + static_cast<int64_t>(head) * p.rows * units;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kRowsOfCta;
  const int rows = static_cast<int>(p.rows - row0 < kRowsOfCta ? p.rows - row0 : kRowsOfCta);
#pragma unroll 4
  for (int at = threadIdx.x; at < rows * units; at += kThreads) {
    const int64_t row = row0 + at / units;
    const int unit = at % units;
    int64_t key = row - p.packed;
    if (key < 0) {
      if (row >= end) continue;
      key = row < count ? __ldg(keys + row) : -1;
    }
    to[row * units + unit] = key < 0 ? Unit() : from[key * p.stride[which].s + unit];
  }
}

}  // namespace

int LaunchGather(const GatherParams& params, void* stream) {
  const dim3 grid(static_cast<unsigned>((params.rows + kRowsOfCta - 1) / kRowsOfCta),
                  static_cast<unsigned>(params.B * params.G), 2);
  const auto own = static_cast<cudaStream_t>(stream);
  if (params.unit == 16) {
    Gather<uint4><<<grid, kThreads, 0, own>>>(params);
  } else if (params.unit == 4) {
    Gather<uint32_t><<<grid, kThreads, 0, own>>>(params);
  } else {
    Gather<uint16_t><<<grid, kThreads, 0, own>>>(params);
  }
  return static_cast<int>(cudaGetLastError());
}

}  // namespace cuda
}  // namespace stof
