// SPDX-License-Identifier: Apache-2.0
// The families of GEMM kernels: sm90, cuBLASLt, sm80. What they can compute, their kernels, how they are run. Plain
// C++.
#ifndef STOF_CUDA_GEMM_KERNEL_TABLE_H_
#define STOF_CUDA_GEMM_KERNEL_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/common/kernel_plan.h"
#include "cuda/common/kernel_request.h"
#include "cuda/gemm/params.h"
#include "plugins/core/contract/gemm.h"

namespace stof {
namespace cuda {

// What decides which kernels can compute a GEMM and how fast they are: the key of what is remembered about it.
struct GemmProblem {
  int device = 0;
  int capability = 0;  // 10 * major + minor
  DType dtype = DType::kF16;
  Activation activation = Activation::kNone;
  int32_t epilogue = 0;  // GemmHas of its operands
  bool is_pair = false;
  bool is_b_transposed = false;
  bool has_vectors = false;         // every row can be read 16 bytes at a time
  bool prefers_cublaslt = false;    // GemmArgs::prefers_cublaslt
  uint32_t cublaslt_alignment = 0;  // CublasLtAlignment; 0 without has_vectors
  size_t workspace = 0;             // bytes that a run may ask for
  int64_t M = 0, N = 0, K = 0;
  int64_t stride = 0;  // of b0 and b1, elements

  uint64_t Hash() const;
};
bool operator==(const GemmProblem& a, const GemmProblem& b);
// "GEMM M 512, N 768, K 3072, fp16, gelu"
std::string Print(const GemmProblem& problem);

// On the current device. allows_workspace: the run may ask for memory.
Status DescribeGemm(const GemmArgs& args, bool allows_workspace, GemmProblem* problem);

// "sm90-128x256x1", "sm90-128x128x1-cluster2x1-pingpong", "cublaslt-0", "sm80": rows, columns and CTAs an SM of the
// sm90 kernels; the number of an algorithm of cuBLASLt.
std::string KernelName(const GemmKernelEntry& kernel);

struct GemmFamily;
using GemmPlan = KernelPlan<GemmFamily, GemmKernelEntry>;

// A line in choose.cc.
struct GemmFamily {
  const char* name = "";
  // Adds a plan for each kernel that can compute the GEMM, in the order of the table.
  Status (*plan)(const GemmArgs& args, const GemmProblem& problem, std::vector<GemmPlan>* plans) = nullptr;
  // Queues the GEMM on the context's stream. *done is false where that turns out to be impossible, and nothing was
  // queued.
  Status (*run)(const GemmArgs& args, const GemmProblem& problem, const GemmPlan& plan, const RunContext& context,
                bool* done) = nullptr;
  // The names of all its kernels.
  void (*list_names)(std::vector<std::string>* names) = nullptr;
};
extern const GemmFamily kGemmSm90Family, kGemmCublasLtFamily, kGemmSm80Family;

// The epilogue's parameters.
GemmEpilogueParams EpilogueOf(const GemmArgs& args);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_KERNEL_TABLE_H_
