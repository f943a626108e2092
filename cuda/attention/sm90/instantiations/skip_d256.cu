// SPDX-License-Identifier: Apache-2.0
// Kernels for wide heads that leave out key tiles by their scores. Their costs are those of the kernels that compute
// all tiles.
#include "cuda/attention/sm90/wide_heads.cuh"

namespace stof {
namespace cuda {
namespace sm90 {
namespace {

using D192 = WideHeads<Head<192>, Tile<128, 96>, 3000, 1570, 1680, kSkipByScore>;
using D256 = WideHeads<Head<256>, Tile<128, 64>, 3000, 1390, 1480, kSkipByScore>;

}  // namespace
}  // namespace sm90

KernelTable FindSm90SkipD192(const KernelProblem& problem) { return sm90::D192::Find(problem); }
KernelTable FindSm90SkipD256(const KernelProblem& problem) { return sm90::D256::Find(problem); }

}  // namespace cuda
}  // namespace stof
