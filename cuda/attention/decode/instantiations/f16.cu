// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/cluster_launch.cuh"

namespace stof {
namespace cuda {

DecodeKernel FindDecodeF16(int head_size, int64_t rows) { return FindDecodeOf<__half>(head_size, rows); }
ClusterKernel FindClusterF16(int head_size, int64_t rows) { return FindClusterOf<__half>(head_size, rows); }

}  // namespace cuda
}  // namespace stof
