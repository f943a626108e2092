// SPDX-License-Identifier: Apache-2.0
// The few functions of cuBLASLt that stof's GEMM uses, found at run time: neither header nor library is needed to
// build. Names and values are those of NVIDIA's documented C interface (cuBLAS 12 and 13).
#ifndef STOF_CUDA_GEMM_CUBLASLT_H_
#define STOF_CUDA_GEMM_CUBLASLT_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
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
  struct Shape {
    int64_t M = 0, N = 0, K = 0;
    int64_t stride = 0;  // of b
    bool bf16 = false;
    Epilogue epilogue = kNothing;
    uint32_t alignment = 16;       // of every address, bytes
    size_t workspace = 0;          // bytes at most
    bool is_b_transposed = false;  // b is [N, K]
    bool in_order = false;         // partial sums, where there are any, are of fp32 and added in one order
  };
  // y[M, N] = epilogue(a[M, K] b[K, N] + c), row-major. cuBLAS is column-major: it reads b as its operand A = b^T and
  // computes y^T = A a^T + c^T. With is_b_transposed, b is [N, K], and TRANSA makes that y^T = b a^T + c^T.
  struct Operands {
    const void *a = nullptr, *b = nullptr, *bias = nullptr;
    const void* c = nullptr;  // [M, N]; nullptr: none
    void *y = nullptr, *workspace = nullptr;
  };
  // What is asked of the library once for a shape. One thread at a time runs it.
  class Problem {
   public:
    Problem() = default;
    Problem(const Problem&) = delete;
    Problem& operator=(const Problem&) = delete;
    ~Problem() { Free(); }
    std::vector<Algorithm> algorithms;

   private:
    friend class CublasLt;
    void Free();
    const CublasLt* library_ = nullptr;
    void *handle_ = nullptr, *operation_ = nullptr, *a_ = nullptr, *b_ = nullptr, *y_ = nullptr;
  };

  // path: of the library; nullptr: the one that the process has loaded, or else by its names. It is never unloaded.
  bool Open(const char* path);
  // For the current device: up to `most` algorithms, the library's own first choice first.
  bool Make(const Shape& shape, const void* bias, int most, Problem* problem);
  bool Run(const Problem& problem, size_t algorithm, const Operands& operands, cudaStream_t stream) const;

 private:
  bool FindAll();
  template <typename F>
  bool Find(const char* name, F* function);
  bool HandleOf(int device, void** handle);

  void* library_ = nullptr;
  std::mutex mutex_;
  std::map<int, void*> handles_;  // by device, never destroyed: that may come after the driver's end
  int (*create_)(void**) = nullptr;
  int (*create_operation_)(void**, int compute, int scale) = nullptr;
  int (*set_operation_)(void*, int attribute, const void*, size_t) = nullptr;
  int (*destroy_operation_)(void*) = nullptr;
  int (*create_layout_)(void**, int type, uint64_t rows, uint64_t columns, int64_t stride) = nullptr;
  int (*destroy_layout_)(void*) = nullptr;
  int (*create_preference_)(void**) = nullptr;
  int (*set_preference_)(void*, int attribute, const void*, size_t) = nullptr;
  int (*destroy_preference_)(void*) = nullptr;
  int (*heuristic_)(void*, void*, void*, void*, void*, void*, void*, int, Algorithm*, int*) = nullptr;
  int (*matmul_)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                 void*, void*, const void*, void*, size_t, cudaStream_t) = nullptr;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_CUBLASLT_H_
