// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/cublaslt.h"

#include <dlfcn.h>

namespace stof {
namespace cuda {
namespace {

// Values of the documented enumerations.
constexpr int kComputeF32 = 68, kF32 = 0, kF16 = 2, kBf16 = 14;
constexpr int kTransposeA = 3, kEpilogueOf = 7, kBiasPointer = 8;      // attributes of an operation
constexpr int kMostWorkspace = 1, kReductions = 3, kAlignmentOfA = 5;  // of a preference; B, C, D follow A
constexpr uint32_t kInFp32 = 2;                                        // partial sums in memory are of fp32
constexpr int32_t kTranspose = 1;                                      // of an operand; 0, the default: none

}  // namespace

void CublasLt::Problem::Free() {
  if (library_ == nullptr) return;
  if (operation_ != nullptr) library_->destroy_operation_(operation_);
  for (void* layout : {a_, b_, y_}) {
    if (layout != nullptr) library_->destroy_layout_(layout);
  }
  operation_ = a_ = b_ = y_ = nullptr;
  library_ = nullptr;
}

template <typename F>
bool CublasLt::Find(const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library_, name));
  return *function != nullptr;
}

bool CublasLt::FindAll() {
  return Find("cublasLtCreate", &create_) && Find("cublasLtMatmulDescCreate", &create_operation_) &&
         Find("cublasLtMatmulDescSetAttribute", &set_operation_) &&
         Find("cublasLtMatmulDescDestroy", &destroy_operation_) &&
         Find("cublasLtMatrixLayoutCreate", &create_layout_) && Find("cublasLtMatrixLayoutDestroy", &destroy_layout_) &&
         Find("cublasLtMatmulPreferenceCreate", &create_preference_) &&
         Find("cublasLtMatmulPreferenceSetAttribute", &set_preference_) &&
         Find("cublasLtMatmulPreferenceDestroy", &destroy_preference_) &&
         Find("cublasLtMatmulAlgoGetHeuristic", &heuristic_) && Find("cublasLtMatmul", &matmul_);
}

bool CublasLt::Open(const char* path) {
  // The version of the toolkit that this was built with first, where none is loaded.
  static constexpr const char* kNames[] = {CUDART_VERSION >= 13000 ? "libcublasLt.so.13" : "libcublasLt.so.12",
                                           CUDART_VERSION >= 13000 ? "libcublasLt.so.12" : "libcublasLt.so.13"};
  if (path != nullptr) {
    library_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  } else {
    for (int flags : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
      for (const char* name : kNames) {
        if (library_ == nullptr) library_ = dlopen(name, flags);
      }
    }
  }
  return library_ != nullptr && FindAll();
}

bool CublasLt::HandleOf(int device, void** handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  void*& known = handles_[device];
  if (known == nullptr && create_(&known) != 0) known = nullptr;
  *handle = known;
  return known != nullptr;
}

bool CublasLt::Make(const Shape& shape, const void* bias, int most, Problem* problem) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || !HandleOf(device, &problem->handle_)) return false;
  problem->Free();
  problem->library_ = this;
  const int type = shape.bf16 ? kBf16 : kF16;
  const auto M = static_cast<uint64_t>(shape.M), N = static_cast<uint64_t>(shape.N), K = static_cast<uint64_t>(shape.K);
  if (create_operation_(&problem->operation_, kComputeF32, kF32) != 0 ||
      set_operation_(problem->operation_, kEpilogueOf, &shape.epilogue, sizeof shape.epilogue) != 0 ||
      (shape.is_b_transposed &&
       set_operation_(problem->operation_, kTransposeA, &kTranspose, sizeof kTranspose) != 0) ||
      (bias != nullptr && set_operation_(problem->operation_, kBiasPointer, &bias, sizeof bias) != 0) ||
      create_layout_(&problem->b_, type, shape.is_b_transposed ? K : N, shape.is_b_transposed ? N : K, shape.stride) !=
          0 ||
      create_layout_(&problem->a_, type, K, M, shape.K) != 0 ||
      create_layout_(&problem->y_, type, N, M, shape.N) != 0) {
    return false;
  }
  void* preference = nullptr;
  if (create_preference_(&preference) != 0) return false;
  bool right = set_preference_(preference, kMostWorkspace, &shape.workspace, sizeof shape.workspace) == 0;
  for (int i = 0; i < 4; ++i) {
    right = right && set_preference_(preference, kAlignmentOfA + i, &shape.alignment, sizeof shape.alignment) == 0;
  }
  if (shape.in_order) right = right && set_preference_(preference, kReductions, &kInFp32, sizeof kInFp32) == 0;
  problem->algorithms.resize(static_cast<size_t>(most));
  int found = 0;
  right = right && heuristic_(problem->handle_, problem->operation_, problem->b_, problem->a_, problem->y_, problem->y_,
                              preference, most, problem->algorithms.data(), &found) == 0;
  destroy_preference_(preference);
  problem->algorithms.resize(right ? static_cast<size_t>(found) : 0);
  return !problem->algorithms.empty() && problem->algorithms[0].status == 0;
}

bool CublasLt::Run(const Problem& problem, size_t algorithm, const Operands& operands, cudaStream_t stream) const {
  const float one = 1.0f, beta = operands.c == nullptr ? 0.0f : 1.0f;
  const void* const c = operands.c == nullptr ? operands.y : operands.c;
  const Algorithm& chosen = problem.algorithms[algorithm];
  if (operands.bias != nullptr &&
      set_operation_(problem.operation_, kBiasPointer, &operands.bias, sizeof operands.bias) != 0) {
    return false;
  }
  return matmul_(problem.handle_, problem.operation_, &one, operands.b, problem.b_, operands.a, problem.a_, &beta, c,
                 problem.y_, operands.y, problem.y_, chosen.opaque, operands.workspace, chosen.workspace, stream) == 0;
}

}  // namespace cuda
}  // namespace stof
