// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/wide_heads.cuh"

namespace stof {
namespace cuda {
namespace sm90 {
namespace {

constexpr RowNs kRow{3000};
constexpr FullNs kFull{1390};
constexpr PartialNs kPartial{1480};
using Kernels = WideHeads<Head<256>, Tile<128, 64>, kRow.value, kFull.value, kPartial.value>;

}  // namespace
}  // namespace sm90

KernelTable FindSm90D256(const KernelProblem& problem) { return sm90::Kernels::Find(problem); }

}  // namespace cuda
}  // namespace stof
