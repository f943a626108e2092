// SPDX-License-Identifier: Apache-2.0
// GEMMs with an epilogue: the arguments of their kernels, and the entry points of cpu/ and cuda/. All matrices are
// row-major.
#ifndef STOF_PLUGINS_CORE_CONTRACT_GEMM_H_
#define STOF_PLUGINS_CORE_CONTRACT_GEMM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "plugins/core/base/activation.h"
#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"

namespace stof {

struct RunContext;  // plugins/core/contract/op.h

// ---- CPU ----
// output[m, n] = sum over k of a[m, k] b[k, n], without an epilogue.
struct CpuGemmArgs {
  int64_t M = 0, N = 0, K = 0;
  DType dtype = DType::kF32;  // of a and b
  const void* a = nullptr;    // [M, K]
  const void* b = nullptr;    // [K, N], rows `stride` elements apart
  int64_t stride = 0;
  float* output = nullptr;  // [M, N]
};
size_t CpuGemmWorkspace(int threads);
// workspace: CpuGemmWorkspace bytes, 64-byte aligned, contents arbitrary.
void CpuGemm(const CpuGemmArgs& args, CpuIsa isa, void* workspace, const Parallel& parallel);

// The set whose kernels compute GEMMs by constant weights with factors in bf16, where `isa` is the best that may run,
// as IsaOfBf16Kernels of bf16_kernels.h says it of attention. None: they are computed in fp32.
std::optional<CpuIsa> IsaOfBf16Gemm(CpuIsa isa);

// A constant weight, or a pair of them, copied in the order in which the kernels read it.
class CpuPackedWeights {
 public:
  // Whether packing pays, on which Pack depends.
  static bool DoesPay(CpuIsa isa, int64_t N, int64_t K);
  // b0, b1: [K, N], rows `stride` elements apart; b1: nullptr where there is none. is_bf16: they are rounded to bf16,
  // for the kernels of a set of IsaOfBf16Gemm, which round the other factor as well. False where packing does not pay,
  // or there is no memory: then take CpuGemm.
  bool Pack(CpuIsa isa, bool is_bf16, const float* b0, const float* b1, int64_t stride, int64_t N, int64_t K);
  // The same of fp16 and bf16 weights, for the kernels in bf16: fp16 is rounded, bf16 copied.
  bool PackNarrow(CpuIsa isa, DType dtype, const uint16_t* b0, const uint16_t* b1, int64_t stride, int64_t N,
                  int64_t K);
  bool is_packed() const { return panels_ != nullptr; }
  bool is_bf16() const { return is_bf16_; }
  CpuIsa isa() const { return isa_; }
  int64_t N() const { return N_; }
  int64_t K() const { return K_; }
  // 2 for a pair.
  int64_t count() const { return count_; }
  // floats, or bf16.
  const void* panels() const { return panels_.get(); }

 private:
  struct Free {
    void operator()(char* panels) const;
  };
  bool Allocate(int64_t bytes);
  struct Factors {
    const void *b0, *b1;
    DType dtype;
    int64_t stride;
  };
  bool PackFactors(CpuIsa isa, bool is_bf16, const Factors& factors, int64_t N, int64_t K);
  template <typename Kernels, typename T, typename PackPanel>
  bool PackPanels(const Kernels& kernels, const Factors& factors, int64_t depth, const PackPanel& pack);
  CpuIsa isa_{};
  bool is_bf16_ = false;
  int64_t N_ = 0, K_ = 0, count_ = 1;
  std::unique_ptr<char[], Free> panels_;
};

// act(p0 + bias0) [* (p1 + bias1)] * scale * row + residual in fp32, p0 and p1 the matmuls; nullptr where absent.
template <typename T>
struct CpuGemmEpilogueOf {
  Activation activation = Activation::kNone;
  const T *bias0 = nullptr, *bias1 = nullptr, *scale = nullptr;  // [N]
  const T* row = nullptr;                                        // [M]
  const T* residual = nullptr;                                   // [M, N]
};
using CpuGemmEpilogue = CpuGemmEpilogueOf<float>;

// fp16 or bf16 operands in the place of fp32 ones, for weights in bf16 alone.
struct CpuNarrowOperands {
  DType dtype = DType::kF32;                              // kF32: there are none
  const uint16_t* a = nullptr;                            // [M, K]
  const CpuGemmEpilogueOf<uint16_t>* epilogue = nullptr;  // nullptr: the matmuls themselves, in fp32
  uint16_t* output = nullptr;                             // [M, N], of an epilogue; rounded to nearest even
};

struct CpuPackedGemmArgs {
  int64_t M = 0;             // at least 1
  const float* a = nullptr;  // [M, K]
  // [M, N] each; the second one is used for a pair without an epilogue alone.
  float* output[2] = {};
  const CpuGemmEpilogue* epilogue = nullptr;  // nullptr: the matmuls themselves
  CpuNarrowOperands narrow;
};
size_t CpuPackedGemmWorkspace(int threads);
// The same of weights in bf16.
size_t CpuBf16GemmWorkspace(int threads, int64_t M, int64_t K);
// workspace: as many bytes, 64-byte aligned, contents arbitrary.
void CpuPackedGemm(const CpuPackedGemmArgs& args, const CpuPackedWeights& weights, void* workspace,
                   const Parallel& parallel);

// ---- CUDA ----
// Bytes of workspace that a GEMM may ask for, unless its caller gives more (GemmArgs::most_workspace). Runtimes plan
// with it everywhere: what was planned for large sizes, on another machine or by a build without kernels, has to do.
constexpr size_t kGemmWorkspace = size_t{8} << 20;

// act(a b0 + bias0) [* (a b1 + bias1)] * scale * row + residual. With is_b_transposed, b0^T takes the place of b0. All
// addresses are the device's.
struct GemmArgs {
  int64_t M = 0, N = 0, K = 0;
  DType dtype = DType::kF16;  // of every tensor
  const void* a = nullptr;    // [M, K]
  const void* b0 = nullptr;   // [K, N], rows `stride` elements apart
  const void* b1 = nullptr;   // [K, N] like b0, of a pair; nullptr: none
  int64_t stride = 0;
  bool is_b_transposed = false;  // b0 is [N, K], rows `stride` elements apart; not for a pair
  void* output = nullptr;        // [M, N]
  Activation activation = Activation::kNone;
  const void* bias0 = nullptr;  // [N], nullptr where absent, as the next ones
  const void* bias1 = nullptr;
  const void* scale = nullptr;     // [N]
  const void* row = nullptr;       // [M]
  const void* residual = nullptr;  // [M, N]
  bool may_wait = false;           // the run may wait for the device, to time kernels
  // cuBLASLt is the first choice where it computes the GEMM, unless kernels were timed.
  bool prefers_cublaslt = false;
  size_t most_workspace = kGemmWorkspace;  // bytes that the run may ask for
};

struct GemmBackend {
  Status (*run)(const GemmArgs& args, const RunContext& context) = nullptr;
  // Bytes that `run` asks RunContext::allocate for at most.
  Status (*plan_workspace)(const GemmArgs& args, size_t* workspace) = nullptr;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_GEMM_H_
