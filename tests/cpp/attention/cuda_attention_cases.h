// SPDX-License-Identifier: Apache-2.0
// What tests of attention on a GPU share: cases, and how they are run and compared with the definition.
#ifndef STOF_TESTS_CPP_ATTENTION_CUDA_ATTENTION_CASES_H_
#define STOF_TESTS_CPP_ATTENTION_CUDA_ATTENTION_CASES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/attention/families.h"
#include "tests/cpp/attention/attention_problem.h"
#include "tests/cpp/check.h"
#include "tests/cpp/forced_kernel.h"

namespace stof::test::attention {

// self: std::vector<void*> of the blocks to free.
void* Allocate(void* self, size_t bytes);
void* OnDevice(std::vector<void*>* blocks, const void* from, size_t bytes);

// The vectors and tables that a case's mask may read, on the device.
Tables OperandsOnDevice(const Case& c, const MaskData& data, std::vector<void*>* blocks);

// The scheduled kernels of a device of compute capability 9.0; empty: there are none in this build.
cuda::KernelTable ScheduledKernels(int head_size);

// The CPU kernels' table of cases in fp16 and bf16, and every head size that a kernel is compiled for.
std::vector<Case> CudaCases();

// Large and small scores on all paths, in fp16 and bf16 or in fp32.
std::vector<Case> CudaLargeScoreCases(bool fp16_bf16);

// Runs each case by each of these kernels (ForcedKernel; "": the selector's choice), `repeats` times with equal bits.
// STOF_CASE=n runs case n alone, STOF_SAMPLE=n every n-th.
void RunCudaCases(const std::vector<Case>& cases, const std::vector<std::string>& kernels, int repeats = 2);

// Every tenth case by the named kernel, to be repeated kRepeats times.
constexpr int kRepeats = 50;
std::vector<Case> EveryTenth(const std::vector<Case>& all, const char* kernel);

// TF32 cases so far whose outputs differ from those without allow_tf32.
extern int64_t rounded_otherwise;

// The numbers of the first `count` kernels of a table, or the one in STOF_CUDA_KERNEL.
std::vector<std::string> FirstKernels(int count);

}  // namespace stof::test::attention
#endif  // STOF_TESTS_CPP_ATTENTION_CUDA_ATTENTION_CASES_H_
