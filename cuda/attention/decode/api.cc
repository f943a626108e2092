// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/api.h"

namespace stof {
namespace cuda {

DecodeKernel FindDecodeF16(int head_size, int64_t rows);
DecodeKernel FindDecodeBF16(int head_size, int64_t rows);
DecodeKernel FindDecodeF32(int head_size, int64_t rows);
ClusterKernel FindClusterF16(int head_size, int64_t rows);
ClusterKernel FindClusterBF16(int head_size, int64_t rows);
ClusterKernel FindClusterF32(int head_size, int64_t rows);

DecodeKernel FindDecode(DType dtype, int head_size, int64_t rows) {
  if (dtype == DType::kF16) return FindDecodeF16(head_size, rows);
  if (dtype == DType::kBF16) return FindDecodeBF16(head_size, rows);
  return FindDecodeF32(head_size, rows);
}

ClusterKernel FindCluster(DType dtype, int head_size, int64_t rows) {
  if (dtype == DType::kF16) return FindClusterF16(head_size, rows);
  if (dtype == DType::kBF16) return FindClusterBF16(head_size, rows);
  return FindClusterF32(head_size, rows);
}

}  // namespace cuda
}  // namespace stof
