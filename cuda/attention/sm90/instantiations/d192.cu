// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/wide_heads.cuh"

namespace stof {
namespace cuda {
namespace sm90 {
namespace {

constexpr RowNs kRow{3000};
constexpr FullNs kFull{1570};
constexpr PartialNs kPartial{1680};
using Kernels = WideHeads<Head<192>, Tile<128, 96>, kRow.value, kFull.value, kPartial.value>;

}  // namespace
}  // namespace sm90

KernelTable FindSm90D192(const KernelProblem& problem) { return sm90::Kernels::Find(problem); }

}  // namespace cuda
}  // namespace stof
