// SPDX-License-Identifier: Apache-2.0
// A warp's ring of asynchronous copies of weights to shared memory: bytes in flight without registers.
#ifndef STOF_CUDA_SPARSE_MLP_RING_CUH_
#define STOF_CUDA_SPARSE_MLP_RING_CUH_

#include "cuda/sparse_mlp/list.cuh"

namespace stof {
namespace cuda {
namespace mlp {

// Shared memory of a warp. Four CTAs fit an SM of 228 KiB: two of the hidden kernel, and two of the down kernel, whose
// copies start before the hidden values are ready.
constexpr int kRingBytes = 6 << 10;
constexpr int kRingsBytes = kRingBytes * kMlpWarps;
constexpr int kCopyBytes = 16;

__device__ __forceinline__ void LoadShared(uint32_t* words, uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}

// A slot has kCopies copies of 16 bytes of each lane. A lane reads only its own copies, so that it needs no barrier to
// wait for them. Each step commits a group, even an empty one: Wait counts groups.
template <int kCopies>
class CopyRing {
 public:
  static constexpr int kSlots = kRingBytes / (kCopies * 32 * kCopyBytes);
  static_assert(kSlots >= 2, "slots to wait for and to fill");

  __device__ __forceinline__ explicit CopyRing(void* shared)
      : base_(SharedAddress(shared) + threadIdx.x / 32 * kRingBytes + threadIdx.x % 32 * kCopyBytes) {}

  // Copy i of the slot filled next; zeros, and nothing is read, where not `valid`.
  __device__ __forceinline__ void Copy(int i, const void* from, bool valid) {
    CopyAsync16(base_ + filled_ + i * 32 * kCopyBytes, from, valid);
  }
  __device__ __forceinline__ void Commit() {
    CommitCopies();
    Advance(&filled_);
  }
  // Waits for the slot that is read next. The caller has committed all slots: kSlots groups are open.
  __device__ __forceinline__ void Wait() { WaitCopies<kSlots - 1>(); }
  __device__ __forceinline__ void Read(int i, uint32_t* words) const {
    LoadShared(words, base_ + read_ + i * 32 * kCopyBytes);
  }
  __device__ __forceinline__ void Release() { Advance(&read_); }

 private:
  static __device__ __forceinline__ void Advance(uint32_t* slot) {
    *slot = *slot == (kSlots - 1) * kCopies * 32 * kCopyBytes ? 0 : *slot + kCopies * 32 * kCopyBytes;
  }
  const uint32_t base_;
  uint32_t filled_ = 0, read_ = 0;
};

// Entries of the list that one warp takes: kConsecutive from position first on, as many from first + step on, ...,
// below end. A lane holds one of 32 entries, and one of the next 32.
template <int kConsecutive = 1>
class WarpEntries {
 public:
  __device__ __forceinline__ WarpEntries(const ActiveList& list, int32_t first, int32_t end, int32_t step)
      : list_(list), first_(first), step_(step), count_(Count(first, end, step)) {
    current_ = Load(0), next_ = Load(32);
  }
  __device__ int32_t count() const { return count_; }
  __device__ int32_t PositionOf(int32_t k) const { return first_ + k / kConsecutive * step_ + k % kConsecutive; }

  // Entry k is read next; a multiple of 32 moves to the next ones.
  __device__ __forceinline__ void MoveTo(int32_t k) {
    if (k % 32 != 0 || k == 0) return;
    begin_ = k;
    current_ = next_, next_ = Load(k + 32);
  }
  // Of entry k, which is one of the current 32 or of the next 32. All lanes call it, with entries of the same 32, since
  // a lane passes on the one that it holds.
  __device__ __forceinline__ int32_t NeuronOf(int32_t k) const {
    return __shfl_sync(kAllLanes, k - begin_ < 32 ? current_.neuron : next_.neuron, k % 32);
  }
  __device__ __forceinline__ uint64_t MaskOf(int32_t k) const {
    return __shfl_sync(kAllLanes, static_cast<unsigned long long>(k - begin_ < 32 ? current_.mask : next_.mask),
                       k % 32);
  }
  // The entries that this lane holds.
  __device__ const ListEntry& current() const { return current_; }
  __device__ const ListEntry& next() const { return next_; }

 private:
  static __device__ __forceinline__ int32_t Count(int32_t first, int32_t end, int32_t step) {
    if (first >= end) return 0;
    const int32_t before = (end - first - 1) / step;  // the last entries may be fewer than kConsecutive
    return before * kConsecutive + min(kConsecutive, end - first - before * step);
  }
  __device__ __forceinline__ ListEntry Load(int32_t begin) const {
    const int32_t k = begin + static_cast<int32_t>(threadIdx.x % 32);
    return k < count_ ? list_.At(PositionOf(k)) : ListEntry();
  }
  const ActiveList& list_;
  const int32_t first_, step_, count_;
  int32_t begin_ = 0;
  ListEntry current_, next_;
};

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_RING_CUH_
