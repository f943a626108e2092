// SPDX-License-Identifier: Apache-2.0
// The few functions of cuBLASLt that bench_gemm compares with, found at run time: neither header nor library is needed
// to build. Names and values are those of NVIDIA's documented C interface (cuBLAS 12 and 13).
#ifndef STOF_CUDA_CUBLAS_LT_H_
#define STOF_CUDA_CUBLAS_LT_H_

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stof {
namespace cuda {

class CublasLt {
 public:
  enum Epilogue : int32_t { kNothing = 1, kRelu = 2, kBias = 4, kReluBias = 6, kGelu = 32, kGeluBias = 36 };
  struct Algorithm {
    uint64_t opaque[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
  };
  // y[M, N] = a[M, K] b[K, N], row-major: y' = b' a' in the columns that cuBLAS counts in.
  struct Problem {
    void *operation = nullptr, *a = nullptr, *b = nullptr, *y = nullptr;
    std::vector<Algorithm> algorithms;
  };

  // path: of the library; nullptr: by its name.
  bool Open(const char* path) {
    for (const char* name : {path, "libcublasLt.so.13", "libcublasLt.so.12"}) {
      if (name != nullptr && library_ == nullptr) library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    return library_ != nullptr && Find("cublasLtCreate", &create_) &&
           Find("cublasLtMatmulDescCreate", &create_operation_) &&
           Find("cublasLtMatmulDescSetAttribute", &set_operation_) &&
           Find("cublasLtMatrixLayoutCreate", &create_layout_) &&
           Find("cublasLtMatmulPreferenceCreate", &create_preference_) &&
           Find("cublasLtMatmulPreferenceSetAttribute", &set_preference_) &&
           Find("cublasLtMatmulAlgoGetHeuristic", &heuristic_) && Find("cublasLtMatmul", &matmul_) &&
           create_(&handle_) == 0;
  }

  // Up to `most` algorithms, the library's own first choice first.
  bool Make(int64_t M, int64_t N, int64_t K, bool bf16, Epilogue epilogue, const void* bias, size_t workspace, int most,
            Problem* problem) {
    constexpr int kComputeF32 = 68, kF32 = 0;
    constexpr int kEpilogue = 7, kBiasPointer = 8, kMostWorkspace = 1;
    const int type = bf16 ? 14 : 2;
    void* preference = nullptr;
    if (create_operation_(&problem->operation, kComputeF32, kF32) != 0) return false;
    set_operation_(problem->operation, kEpilogue, &epilogue, sizeof epilogue);
    if (bias != nullptr) set_operation_(problem->operation, kBiasPointer, &bias, sizeof bias);
    create_layout_(&problem->b, type, static_cast<uint64_t>(N), static_cast<uint64_t>(K), N);
    create_layout_(&problem->a, type, static_cast<uint64_t>(K), static_cast<uint64_t>(M), K);
    create_layout_(&problem->y, type, static_cast<uint64_t>(N), static_cast<uint64_t>(M), N);
    create_preference_(&preference);
    set_preference_(preference, kMostWorkspace, &workspace, sizeof workspace);
    problem->algorithms.resize(static_cast<size_t>(most));
    int found = 0;
    if (heuristic_(handle_, problem->operation, problem->b, problem->a, problem->y, problem->y, preference, most,
                   problem->algorithms.data(), &found) != 0) {
      return false;
    }
    problem->algorithms.resize(static_cast<size_t>(found));
    return found > 0;
  }

  bool Run(const Problem& problem, size_t algorithm, const void* a, const void* b, void* y, void* workspace,
           cudaStream_t stream) {
    const float one = 1.0f, zero = 0.0f;
    const Algorithm& chosen = problem.algorithms[algorithm];
    return matmul_(handle_, problem.operation, &one, b, problem.b, a, problem.a, &zero, y, problem.y, y, problem.y,
                   chosen.opaque, workspace, chosen.workspace, stream) == 0;
  }

 private:
  template <typename F>
  bool Find(const char* name, F* function) {
    *function = reinterpret_cast<F>(dlsym(library_, name));
    return *function != nullptr;
  }

  void *library_ = nullptr, *handle_ = nullptr;
  int (*create_)(void**) = nullptr;
  int (*create_operation_)(void**, int compute, int scale) = nullptr;
  int (*set_operation_)(void*, int attribute, const void*, size_t) = nullptr;
  int (*create_layout_)(void**, int type, uint64_t rows, uint64_t columns, int64_t stride) = nullptr;
  int (*create_preference_)(void**) = nullptr;
  int (*set_preference_)(void*, int attribute, const void*, size_t) = nullptr;
  int (*heuristic_)(void*, void*, void*, void*, void*, void*, void*, int, Algorithm*, int*) = nullptr;
  int (*matmul_)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                 void*, void*, const void*, void*, size_t, cudaStream_t) = nullptr;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CUBLAS_LT_H_
