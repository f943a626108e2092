// SPDX-License-Identifier: Apache-2.0
// Key bounds of the pages of a KV cache behind an append step: those before the first new row are copied where past and
// present are two buffers, the others are computed from the keys of the cache. A CTA takes a page of a KV head at a
// time.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/choose_pages/page_bounds.cuh"
#include "cuda/choose_pages/update.h"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostCtas = 1 << 16;

struct UpdateParams {
  PageBounds bounds;
  const void* key = nullptr;  // [B, G, capacity, D], dense
  int64_t capacity = 0;
  int64_t all_pages = 0;  // of all KV heads
  int32_t G = 0, D = 0;
  const int32_t* seqlens = nullptr;
  const int32_t* first_row = nullptr;
  const int32_t* is_invalid = nullptr;
};

template <typename T, int kElements>
class Update {
  using Bounds = PageBoundsOf<T, kElements, kThreads>;

 public:
  using Shared = typename Bounds::Shared;

  // The key bounds of a page of a KV head, b * G + g. All threads of the CTA call it.
  static __device__ void Run(const UpdateParams& params, int64_t head, int64_t page, Shared& shared) {
    const PageBounds& bounds = params.bounds;
    const int64_t b = head / params.G, first_key = page * bounds.rows, left = params.seqlens[b] + 1 - first_key;
    if (params.is_invalid[b] != 0 || left <= 0) return;
    T* const to = static_cast<T*>(bounds.present) + (head * bounds.pages + page) * 2 * params.D;
    if (page < FirstComputedPage(bounds, params.first_row[b]) && page < bounds.past_pages) {
      if (bounds.past == bounds.present) return;
      const T* const from = static_cast<const T*>(bounds.past) + (head * bounds.past_pages + page) * 2 * params.D;
      for (int i = threadIdx.x; i < 2 * params.D; i += kThreads) to[i] = from[i];
      return;
    }
    const T* const rows = static_cast<const T*>(params.key) + (head * params.capacity + first_key) * params.D;
    Bounds::Compute(rows, params.D, static_cast<int>(left < bounds.rows ? left : bounds.rows), params.D, to, shared);
    __syncthreads();  // the next page takes the same shared memory
  }
};

template <typename T, int kElements>
__global__ void __launch_bounds__(kThreads) UpdateBounds(const __grid_constant__ UpdateParams params) {
  __shared__ typename Update<T, kElements>::Shared shared;
  WaitForPrevious();
  LetNextStart();
  for (int64_t at = blockIdx.x; at < params.all_pages; at += gridDim.x) {
    Update<T, kElements>::Run(params, at / params.bounds.pages, at % params.bounds.pages, shared);
  }
}

template <typename T, int kElements>
int Launch(const UpdateParams& params, void* stream) {
  constexpr auto kKernel = UpdateBounds<T, kElements>;
  return LaunchKernel<UpdateParams, kKernel>(params, static_cast<unsigned>(std::min(params.all_pages, kMostCtas)),
                                             kThreads, 0, stream, CanStartEarly<UpdateParams, kKernel>());
}

template <typename T>
int LaunchFor(const UpdateParams& params, void* stream) {
  constexpr int kMost = 16 / static_cast<int>(sizeof(T));
  const bool is_aligned = params.D % kMost == 0 && reinterpret_cast<uintptr_t>(params.key) % 16 == 0;
  return is_aligned ? Launch<T, kMost>(params, stream) : Launch<T, 1>(params, stream);
}

}  // namespace

int LaunchUpdateBounds(const CacheAppendArgs& args, void* stream) {
  UpdateParams params;
  params.bounds = args.page_bounds;
  params.key = args.present_key, params.capacity = args.capacity;
  params.G = static_cast<int32_t>(args.G), params.D = static_cast<int32_t>(args.D);
  params.seqlens = args.seqlens, params.first_row = args.first_row, params.is_invalid = args.is_invalid;
  params.all_pages = args.B * args.G * args.page_bounds.pages;
  if (params.all_pages == 0) return 0;
  switch (args.dtype) {
    case DType::kF16:
      return LaunchFor<__half>(params, stream);
    case DType::kBF16:
      return LaunchFor<__nv_bfloat16>(params, stream);
    default:
      return LaunchFor<float>(params, stream);
  }
}

}  // namespace cuda
}  // namespace stof
