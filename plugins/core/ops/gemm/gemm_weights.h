// SPDX-License-Identifier: Apache-2.0
// The constant weights of a StofGemm node, packed for the CPU.
#ifndef STOF_PLUGINS_CORE_OPS_GEMM_GEMM_WEIGHTS_H_
#define STOF_PLUGINS_CORE_OPS_GEMM_GEMM_WEIGHTS_H_

#include <cstdint>
#include <optional>

#include "plugins/core/base/types.h"
#include "plugins/core/contract/gemm.h"
#include "plugins/core/gemm/gemm.h"

namespace stof {

class GemmWeights {
 public:
  // epilogue must outlive this object. allow_bf16: factors may be rounded to bf16.
  GemmWeights(const GemmEpilogue& epilogue, bool allow_bf16);

  // Packs constant inputs of a node, where kernels take them packed: fp32, and fp16 and bf16 where there are kernels in
  // bf16. Errors in them are left to runs.
  void Pack(const Tensor* inputs);
  // Whether they would be packed if they were constant.
  bool CanPack(const Tensor* inputs) const;
  // Whether a run of these sizes has the weights that were packed. A runtime that changes a weight after Prepare gets
  // results of the old one.
  bool IsPacked(DType dtype, int64_t N, int64_t K) const;
  // Whether they are packed in bf16; before they are packed, whether they would be.
  bool is_bf16() const { return packed_.is_packed() ? packed_.is_bf16() : bf16_.has_value(); }
  const CpuPackedWeights& packed() const { return packed_; }

 private:
  // b0 is nullptr where no weights can be packed.
  struct Factors {
    const void *b0 = nullptr, *b1 = nullptr;
    DType dtype = DType::kUndefined;
    int64_t stride = 0, N = 0, K = 0;
  };
  Factors Find(const Tensor* inputs) const;

  const GemmEpilogue& epilogue_;
  const std::optional<CpuIsa> bf16_;  // the set whose kernels round factors to bf16
  CpuPackedWeights packed_;
  DType dtype_ = DType::kUndefined;  // of what is packed
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_GEMM_GEMM_WEIGHTS_H_
