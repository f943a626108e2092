// SPDX-License-Identifier: Apache-2.0
// Stands for the CUDA backend where there is no GPU: "device" pointers are the host's, and the CPU kernels compute.
#ifndef STOF_TESTS_TRT_FAKE_BACKEND_H_
#define STOF_TESTS_TRT_FAKE_BACKEND_H_

#include <cstddef>
#include <cstdint>

namespace stof::test {

constexpr int kFakeKernels = 3;

// What the backend was last asked for, by the calling thread.
struct Seen {
  int attentions = 0;
  int readies = 0;
  int kernel = -1;
  void* stream = nullptr;
  size_t allocated = 0;
};
Seen& LastSeen();

}  // namespace stof::test
#endif  // STOF_TESTS_TRT_FAKE_BACKEND_H_
