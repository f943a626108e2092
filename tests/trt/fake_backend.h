// SPDX-License-Identifier: Apache-2.0
// Stands for the CUDA backend where there is no GPU: "device" pointers are the host's, and the CPU kernels compute.
#ifndef STOF_TESTS_TRT_FAKE_BACKEND_H_
#define STOF_TESTS_TRT_FAKE_BACKEND_H_

namespace stof::test {

constexpr int kFakeKernels = 3;

}  // namespace stof::test
#endif  // STOF_TESTS_TRT_FAKE_BACKEND_H_
