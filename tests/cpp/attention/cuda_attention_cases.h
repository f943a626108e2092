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

// self: std::vector<void*>, which keeps what is to be freed.
void* Allocate(void* self, size_t bytes);
void* OnDevice(std::vector<void*>* blocks, const void* from, size_t bytes);

// A kernel that the selector has to take until this goes; -1: its own choice.
struct Chosen {
  explicit Chosen(int kernel) { cuda::TakeKernel(kernel); }
  ~Chosen() { cuda::TakeKernel(-1); }
  Chosen(const Chosen&) = delete;
  Chosen& operator=(const Chosen&) = delete;
};

// The CPU kernels' table as kernels for halves take it, and every head size that one is written for.
std::vector<Case> CudaCases();

// Scores of every size, of half types or of fp32, on all paths.
std::vector<Case> CudaLargeScoreCases(bool halves);

// Each case by each of these kernels (-1: the selector's choice), so many times with equal bits. STOF_CASE=its number
// takes one, STOF_SAMPLE=n every n-th.
void RunCudaCases(const std::vector<Case>& cases, const std::vector<int>& kernels, int repeats = 2);

// Every tenth case, by the kernel that the operator's attribute names, for runs that are compared so many times.
constexpr int kRepeats = 50;
std::vector<Case> EveryTenth(const std::vector<Case>& all, const char* kernel);

// Cases of TF32 so far whose outputs are not those without allow_tf32.
extern int64_t rounded_otherwise;

// The numbers of a list's first kernels, or the one that STOF_CUDA_KERNEL says.
std::vector<int> FirstKernels(int count);

}  // namespace stof::test::attention
#endif  // STOF_TESTS_CPP_ATTENTION_CUDA_ATTENTION_CASES_H_
