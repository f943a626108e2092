// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstddef>
#include <iterator>

#include "plugins/core/host/environment.h"
#include "plugins/core/host/fork_guard.h"
#include "plugins/core/ops/attention.h"
#include "plugins/core/ops/cached_attention/cached_attention.h"
#include "plugins/core/ops/chain.h"
#include "plugins/core/ops/gemm/gemm.h"
#include "plugins/core/ops/paged_attention/paged_attention.h"
#include "plugins/core/ops/quantized_attention/quantized_attention.h"
#include "plugins/core/ops/sparse_mlp/sparse_mlp.h"

namespace stof {
namespace {

using Describe = const OpDescription* (*)();
constexpr Describe kOps[] = {
    AttentionDescription, CachedAttentionDescription, PagedAttentionDescription,    ChainDescription,
    GemmDescription,      SparseMlpDescription,       QuantizedAttentionDescription};
constexpr size_t kOpCount = std::size(kOps);

}  // namespace

const OpDescription* const* AllOps(int* count) {
  using Ops = std::array<const OpDescription*, kOpCount>;
  static ProcessWide<const Ops> all;
  const Ops& ops = all.Get([] {
    Ops made{};
    for (size_t i = 0; i < kOpCount; ++i) made[i] = kOps[i]();
    return made;
  });
  *count = static_cast<int>(kOpCount);
  return ops.data();
}

Status CreateOp(const OpDescription& description, const AttributeReader& attributes, std::unique_ptr<Op>* op) {
  STOF_RETURN_IF_ERROR(CheckEnvironment());
  return description.create(attributes, op);
}

}  // namespace stof
