// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/cluster_launch.cuh"

namespace stof {
namespace cuda {

DecodeKernel FindDecodeF32(int head_size, int64_t rows) { return FindDecodeOf<float>(head_size, rows); }
ClusterKernel FindClusterF32(int head_size, int64_t rows) { return FindClusterOf<float>(head_size, rows); }

}  // namespace cuda
}  // namespace stof
