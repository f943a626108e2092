// SPDX-License-Identifier: Apache-2.0
// Epilogues of matrix products: docs/reference/gemm-format.md is the contract. And what the core asks of kernels for
// them.
#ifndef STOF_PLUGINS_CORE_GEMM_GEMM_H_
#define STOF_PLUGINS_CORE_GEMM_GEMM_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "plugins/core/chain/chain.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/gemm/activation.h"

namespace stof {

enum class GemmPair : int32_t { kNone = 0, kHalves = 1, kTwo = 2 };

// act(p0 + bias0) [* (p1 + bias1)] * scale * row + residual. Inputs by their number in the description, -1: absent.
struct GemmForm {
  GemmActivation activation = GemmActivation::kNone;
  int bias0 = -1, bias1 = -1;  // [n]
  int scale = -1;              // [n]
  int row = -1;                // [m]
  int residual = -1;           // [m, n]
  bool swapped = false;        // p0 of this form is the description's x1

  std::string Text(bool pair) const;
};

// How the description reads an input.
enum class GemmRead : uint8_t { kUnused, kProduct, kMatrix, kColumns, kRows, kScalar };

struct GemmEpilogue {
  GemmPair pair = GemmPair::kNone;
  Chain chain;
  std::vector<GemmRead> reads;  // of x0, x1, ...
  bool has_form = false;
  GemmForm form;
  std::string why_not;  // where there is no form

  int products() const { return pair == GemmPair::kNone ? 1 : 2; }
  int weights() const { return pair == GemmPair::kTwo ? 2 : 1; }
  // The node's input that the description calls x`number`; number >= products().
  int InputOf(int number) const { return number - products() + 1 + weights(); }
};

// Errors name the line, what was found and what was expected.
Status ParseGemm(std::string_view text, int64_t pair, GemmEpilogue* epilogue);

// Bytes of partial sums that any product may ask for at most. Runtimes plan with it everywhere: what was planned for
// large sizes, on another machine or by a build without kernels, has to do.
constexpr size_t kGemmWorkspace = size_t{8} << 20;

// One product, row-major and dense; of CUDA all addresses are the device's.
struct GemmArgs {
  int64_t M = 0, N = 0, K = 0;
  DType dtype = DType::kF16;  // of every tensor
  const void* a = nullptr;    // [M, K]
  const void* b0 = nullptr;   // [K, N], rows `stride` elements apart
  const void* b1 = nullptr;   // the pair's other one, alike; nullptr: none
  int64_t stride = 0;
  void* output = nullptr;  // [M, N]
  GemmActivation activation = GemmActivation::kNone;
  const void* bias0 = nullptr;  // [N], nullptr where absent, as the next ones
  const void* bias1 = nullptr;
  const void* scale = nullptr;     // [N]
  const void* row = nullptr;       // [M]
  const void* residual = nullptr;  // [M, N]
  bool may_wait = false;           // the run may wait for the device, to time kernels
};

struct GemmBackend {
  Status (*run)(const GemmArgs& args, const RunContext& context);
  // Bytes that run asks RunContext::allocate for at most.
  Status (*plan)(const GemmArgs& args, size_t* workspace);
};
// nullptr in a build without CUDA kernels.
const GemmBackend* FindGemmBackend();

// ---- CPU (cpu/gemm/gemm.cc) ----
// product[m, n] = sum over k of a[m, k] b[k, n] in fp32, product dense. stride: of b, in elements. workspace:
// CpuGemmWorkspace bytes, 64-byte aligned.
size_t CpuGemmWorkspace(int threads);
void CpuGemm(CpuIsa isa, DType dtype, const void* a, const void* b, int64_t stride, int64_t M, int64_t N, int64_t K,
             float* product, void* workspace, const Parallel& parallel);

// GemmForm on the CPU, in fp32: act(p0 + bias0) [* (p1 + bias1)] * scale * row + residual; nullptr where absent.
struct CpuGemmEpilogue {
  GemmActivation activation = GemmActivation::kNone;
  const float *bias0 = nullptr, *bias1 = nullptr, *scale = nullptr;  // [N]
  const float* row = nullptr;                                        // [M]
  const float* residual = nullptr;                                   // [M, N]
};

struct CpuGemmArgs {
  int64_t M = 0;                              // at least 1
  const float* a = nullptr;                   // [M, K]
  float* output[2] = {};                      // [M, N] each; the second one is used without an epilogue alone
  const CpuGemmEpilogue* epilogue = nullptr;  // nullptr: the products themselves
};

// A constant factor in fp32, or a pair of them, copied in the order in which the kernels read it.
class CpuGemmFactor {
 public:
  // b0, b1: [K, N], rows `stride` elements apart; b1: nullptr where there is none. False where it is not worth it, or
  // there is no memory: then take CpuGemm.
  bool Pack(CpuIsa isa, const float* b0, const float* b1, int64_t stride, int64_t N, int64_t K);
  bool packed() const { return panels_ != nullptr; }
  int64_t N() const { return N_; }
  int64_t K() const { return K_; }

  // Bytes, 64-byte aligned.
  static size_t Workspace(int threads);
  void Run(const CpuGemmArgs& args, void* workspace, const Parallel& parallel) const;

 private:
  struct Free {
    void operator()(float* panels) const;
  };
  CpuIsa isa_ = CpuIsa::kPortable;
  int64_t N_ = 0, K_ = 0, products_ = 1;
  std::unique_ptr<float[], Free> panels_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_GEMM_GEMM_H_
