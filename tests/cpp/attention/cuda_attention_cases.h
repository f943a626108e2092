// SPDX-License-Identifier: Apache-2.0
// What tests of attention on a GPU share: cases, and how they are run and compared with the definition.
#ifndef STOF_TESTS_CPP_ATTENTION_CUDA_ATTENTION_CASES_H_
#define STOF_TESTS_CPP_ATTENTION_CUDA_ATTENTION_CASES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/attention/select.h"
#include "tests/cpp/attention/attention_problem.h"

namespace stof::test::attention {

// self: std::vector<void*> of the blocks to free.
void* Allocate(void* self, size_t bytes);
void* OnDevice(std::vector<void*>* blocks, const void* from, size_t bytes);

// Forces a kernel while it lives; -1: the choice is free.
struct Chosen {
  explicit Chosen(int kernel) { cuda::ForceKernel(kernel); }
  ~Chosen() { cuda::ForceKernel(-1); }
  Chosen(const Chosen&) = delete;
  Chosen& operator=(const Chosen&) = delete;
};

// The CPU kernels' table of cases in fp16 and bf16, and every head size that a kernel is compiled for.
std::vector<Case> CudaCases();

// Large and small scores on all paths, in fp16 and bf16 or in fp32.
std::vector<Case> CudaLargeScoreCases(bool fp16_bf16);

// Runs each case by each of these kernels (-1: the selector's choice), `repeats` times with equal bits. STOF_CASE=n
// runs case n alone, STOF_SAMPLE=n every n-th.
void RunCudaCases(const std::vector<Case>& cases, const std::vector<int>& kernels, int repeats = 2);

// Every tenth case by the named kernel, to be repeated kRepeats times.
constexpr int kRepeats = 50;
std::vector<Case> EveryTenth(const std::vector<Case>& all, const char* kernel);

// TF32 cases so far whose outputs differ from those without allow_tf32.
extern int64_t rounded_otherwise;

// The indices of the first `count` kernels of a list, or the one in STOF_CUDA_KERNEL.
std::vector<int> FirstKernels(int count);

}  // namespace stof::test::attention
#endif  // STOF_TESTS_CPP_ATTENTION_CUDA_ATTENTION_CASES_H_
