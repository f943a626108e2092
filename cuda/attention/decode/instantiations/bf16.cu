// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/cluster_launch.cuh"

namespace stof {
namespace cuda {

DecodeKernel FindDecodeBF16(int head_size, int64_t rows) { return FindDecodeOf<__nv_bfloat16>(head_size, rows); }
ClusterKernel FindClusterBF16(int head_size, int64_t rows) { return FindClusterOf<__nv_bfloat16>(head_size, rows); }

}  // namespace cuda
}  // namespace stof
