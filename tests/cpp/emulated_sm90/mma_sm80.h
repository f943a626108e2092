// SPDX-License-Identifier: Apache-2.0
// Further device functions on emulated CTAs, for the sm_80 attention kernel: cp.async, ldmatrix, and mma.sync in bf16
// and int8 with the fragments of the PTX ISA. Copies end where they are queued.
#pragma once
#include "tests/cpp/emulated_sm90/attention_device.h"

using std::isnan;
static inline int __syncthreads_or(bool x) {
  static std::atomic<int> any{0};
  __syncthreads();
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  if (x) any = 1;
  __syncthreads();
  return any;
}

namespace stof {
namespace cuda {

static inline void CopyAsync16(uint32_t to, const void* from, bool valid = true) {
  unsigned char* const memory = test::emulated_sm90::Current()->shared + to;
  std::memset(memory, 0, 16);
  if (valid) std::memcpy(memory, from, 16);
}
static inline void CopyAsync4(uint32_t to, const void* from) {
  std::memcpy(test::emulated_sm90::Current()->shared + to, from, 4);
}
static inline void CommitCopies() {}
template <int kPending>
static void WaitCopies() {}
template <int kCount>
static void LoadConstant(uint32_t (&r)[kCount], const uint32_t* from) {
  std::copy_n(from, kCount, r);
}
static inline void LoadShared(uint32_t (&r)[4], uint32_t address) {
  std::memcpy(r, test::emulated_sm90::Current()->shared + address, sizeof r);
}

// What each lane of the warp gives to a call. By turn: lanes may read one while others write the next.
template <typename T>
static const T* GatherLanes(const T& own) {
  static T given[2][32][32];  // by turn, warp and lane
  static thread_local unsigned turn = 0;
  T* const lanes = given[++turn % 2][threadIdx.x / 32];
  lanes[test::emulated_sm90::Lane()] = own;
  __syncwarp();
  return lanes;
}

// Matrix m has its rows where lanes 8 m to 8 m + 7 say. A lane gets word lane % 4 of row lane / 4.
static inline void LoadMatrix4(uint32_t (&r)[4], uint32_t address) {
  const uint32_t* const rows = GatherLanes(address);
  const unsigned lane = test::emulated_sm90::Lane();
  for (unsigned m = 0; m < 4; ++m) r[m] = ReadShared<uint32_t>(rows[8 * m + lane / 4] + lane % 4 * 4);
}
// A lane gets column lane / 4 of rows 2 (lane % 4) and the next.
static inline void LoadMatrix4Transposed(uint32_t (&r)[4], uint32_t address) {
  const uint32_t* const rows = GatherLanes(address);
  const unsigned lane = test::emulated_sm90::Lane();
  for (unsigned m = 0; m < 4; ++m) {
    r[m] = 0;
    for (unsigned i = 0; i < 2; ++i) {
      r[m] |= uint32_t{ReadShared<uint16_t>(rows[8 * m + lane % 4 * 2 + i] + lane / 4 * 2)} << 16 * i;
    }
  }
}

using WarpFragments = test::emulated::Fragments[32];
static inline const WarpFragments& GatherFragments(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  test::emulated::Fragments own;
  std::copy_n(a, 4, own.a);
  own.b[0] = b0, own.b[1] = b1;
  return *reinterpret_cast<const WarpFragments*>(GatherLanes(own));
}
template <typename T>
static void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const WarpFragments& warp = GatherFragments(a, b0, b1);
  test::emulated::MultiplyFragments(warp, static_cast<int>(test::emulated_sm90::Lane()), c);
}
// Row 8 r + g, column 16 c + 4 t + i of A is byte i of word 2 c + r of lane 4 g + t; row 16 r + 4 t + i, column g of B
// is byte i of word r of that lane.
static inline void MmaInt8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const WarpFragments& warp = GatherFragments(a, b0, b1);
  const auto lane = static_cast<int>(test::emulated_sm90::Lane());
  const auto byte = [](uint32_t word, int i) { return static_cast<int8_t>(word >> 8 * i & 0xff); };
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    int32_t sum = __float_as_int(c[e]);
    for (int k = 0; k < 32; ++k) {
      const auto& left = warp[row % 8 * 4 + k % 16 / 4];
      const auto& right = warp[column * 4 + k % 16 / 4];
      sum += byte(left.a[k / 16 * 2 + row / 8], k % 4) * byte(right.b[k / 16], k % 4);
    }
    std::memcpy(&c[e], &sum, sizeof sum);
  }
}

}  // namespace cuda
}  // namespace stof
