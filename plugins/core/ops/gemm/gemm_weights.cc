// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/gemm/gemm_weights.h"

#include <utility>

#include "plugins/core/ops/gemm/gemm_limits.h"

namespace stof {

GemmWeights::GemmWeights(const GemmEpilogue& epilogue, bool allow_bf16)
    : epilogue_(epilogue), bf16_(allow_bf16 ? IsaOfBf16Gemm(BestCpuIsa()) : std::nullopt) {}

void GemmWeights::Pack(const Tensor* inputs) {
  const Factors found = Find(inputs);
  if (found.b0 == nullptr) return;
  dtype_ = found.dtype;
  if (dtype_ == DType::kF32) {
    packed_.Pack(bf16_.value_or(BestCpuIsa()), bf16_.has_value(), static_cast<const float*>(found.b0),
                 static_cast<const float*>(found.b1), found.stride, found.N, found.K);
  } else {
    packed_.PackNarrow(*bf16_, dtype_, static_cast<const uint16_t*>(found.b0), static_cast<const uint16_t*>(found.b1),
                       found.stride, found.N, found.K);
  }
}

bool GemmWeights::CanPack(const Tensor* inputs) const {
  const Factors found = Find(inputs);
  return found.b0 != nullptr && CpuPackedWeights::DoesPay(BestCpuIsa(), found.N, found.K);
}

bool GemmWeights::IsPacked(DType dtype, int64_t N, int64_t K) const {
  return packed_.is_packed() && dtype == dtype_ && packed_.N() == N && packed_.K() == K;
}

GemmWeights::Factors GemmWeights::Find(const Tensor* inputs) const {
  const Tensor &b0 = inputs[1], &b1 = inputs[epilogue_.weights()];
  for (const Tensor* b : {&b0, &b1}) {
    int64_t count = 0;
    const bool is_taken = b->dtype == DType::kF32 || (IsFloat(b->dtype) && bf16_.has_value());
    if (b->data == nullptr || !is_taken || b->rank != 2 || !CountGemmElements(*b, "b", &count).ok()) return {};
  }
  const bool is_halved = epilogue_.pair == GemmPair::kHalves;
  const int64_t K = b0.dims[0], stride = b0.dims[1], N = is_halved ? stride / 2 : stride;
  const bool are_alike = b1.dtype == b0.dtype && b1.dims[0] == K && b1.dims[1] == stride;
  if (!are_alike || N * epilogue_.products() != stride * epilogue_.weights()) return {};
  const auto* first = static_cast<const char*>(b0.data);
  const char* second = is_halved ? first + N * SizeOf(b0.dtype) : nullptr;
  if (epilogue_.pair == GemmPair::kTwo) second = static_cast<const char*>(b1.data);
  if (epilogue_.form.swapped) std::swap(first, second);
  return {first, second, b0.dtype, stride, N, K};
}

}  // namespace stof
