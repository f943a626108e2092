// SPDX-License-Identifier: Apache-2.0
// Packs key padding masks into bits, and clears flags of query rows that do not exist.
#include <cuda_runtime.h>

#include "cuda/attention/params.h"

namespace stof {
namespace cuda {

namespace {

template <typename T>
struct NonZero {
  static __device__ bool Test(T x) { return x != T(0); }
};
struct Bits16 {
  uint16_t bits;
};
template <>
struct NonZero<Bits16> {
  static __device__ bool Test(Bits16 x) { return (x.bits & 0x7fff) != 0; }
};

// One warp packs one word of 32 keys. Warps stride over the words, so that any grid size covers any number of batches.
template <typename T>
__global__ void PadBits(const T* pad, int64_t batch_stride, int32_t keys, int32_t words, int64_t all_words,
                        uint32_t* bits, int32_t* cleared, int64_t zeros) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < zeros; i += threads) cleared[i] = 0;
  for (int64_t at = first / 32; at < all_words; at += threads / 32) {
    const int64_t b = at / words;
    const int64_t key = 32 * (at - b * words) + threadIdx.x % 32;
    const bool on = key < keys && NonZero<T>::Test(pad[b * batch_stride + key]);
    const uint32_t found = __ballot_sync(~0u, on);
    if (threadIdx.x % 32 == 0) bits[at] = found;
  }
}

template <typename T>
int Run(const void* pad, int64_t batches, int64_t B, int64_t keys, uint32_t* bits, int32_t* cleared, int64_t zeros,
        void* stream) {
  constexpr int kThreads = 256;
  constexpr int64_t kMostBlocks = 1 << 16;
  auto words = static_cast<int32_t>((keys + kTileKeys - 1) / kTileKeys * (kTileKeys / 32));
  int64_t all_words = B * words;
  const int64_t blocks = (all_words + kThreads / 32 - 1) / (kThreads / 32);
  const auto* from = static_cast<const T*>(pad);
  int64_t stride = batches == 1 ? 0 : keys;
  auto count = static_cast<int32_t>(keys);
  void* arguments[] = {&from, &stride, &count, &words, &all_words, &bits, &cleared, &zeros};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(PadBits<T>),
                                           dim3(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks)),
                                           dim3(kThreads), arguments, 0, static_cast<cudaStream_t>(stream)));
}

// One warp looks at the flags of 64 rows.
__global__ void ClearFlags(const float* existence_bias, int64_t stride, int64_t B, int64_t H, int64_t S,
                           int32_t* flags) {
  const int64_t of_head = (S + kRowsPerFlag - 1) / kRowsPerFlag, all = B * of_head;
  const int64_t warps = int64_t{gridDim.x} * blockDim.x / 32;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  for (int64_t at = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32; at < all; at += warps) {
    const int64_t b = at / of_head, row_group = at % of_head;
    bool any = false;
    for (int64_t row = row_group * kRowsPerFlag + lane; row < S && row < (row_group + 1) * kRowsPerFlag; row += 32) {
      any = any || existence_bias[b * stride + row] == 0.0f;
    }
    if (__any_sync(~0u, any)) continue;
    for (int64_t h = lane; h < H; h += 32) flags[(b * H + h) * of_head + row_group] = 0;
  }
}

}  // namespace

int LaunchClearFlags(const float* existence_bias, int64_t stride, int64_t B, int64_t H, int64_t S, int32_t* flags,
                     void* stream) {
  if (B == 0 || H == 0 || S == 0) return 0;
  constexpr int kThreads = 256;
  constexpr int64_t kMostBlocks = 1 << 16;
  const int64_t blocks = (B * ((S + kRowsPerFlag - 1) / kRowsPerFlag) + kThreads / 32 - 1) / (kThreads / 32);
  void* arguments[] = {&existence_bias, &stride, &B, &H, &S, &flags};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(ClearFlags),
                                           dim3(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks)),
                                           dim3(kThreads), arguments, 0, static_cast<cudaStream_t>(stream)));
}

int LaunchPadBits(const void* pad, DType dtype, int64_t batches, int64_t B, int64_t T, uint32_t* bits, int32_t* cleared,
                  int64_t zeros, void* stream) {
  if (B == 0 || T == 0) return 0;
  switch (dtype) {
    case DType::kBool:
    case DType::kU8:
      return Run<uint8_t>(pad, batches, B, T, bits, cleared, zeros, stream);
    case DType::kI32:
      return Run<int32_t>(pad, batches, B, T, bits, cleared, zeros, stream);
    case DType::kI64:
      return Run<int64_t>(pad, batches, B, T, bits, cleared, zeros, stream);
    case DType::kF32:
      return Run<float>(pad, batches, B, T, bits, cleared, zeros, stream);
    case DType::kF16:
      return Run<Bits16>(pad, batches, B, T, bits, cleared, zeros, stream);
    default:
      return static_cast<int>(cudaErrorInvalidValue);
  }
}

}  // namespace cuda
}  // namespace stof
