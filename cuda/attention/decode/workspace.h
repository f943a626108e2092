// SPDX-License-Identifier: Apache-2.0
// The workspace of the decode kernels. Plain C++.
#ifndef STOF_CUDA_ATTENTION_DECODE_WORKSPACE_H_
#define STOF_CUDA_ATTENTION_DECODE_WORKSPACE_H_

#include <cstdint>

namespace stof {
namespace cuda {

// Offsets in bytes of what a run keeps. rows: B * H * S; splits: of the split-KV kernel, 0 for the cluster kernel.
struct DecodeWorkspace {
  constexpr DecodeWorkspace(int64_t rows, int64_t splits, int64_t Dv)
      : output(8 * rows * splits), empty_rows(output + 4 * rows * splits * Dv), bytes(empty_rows + 4 * rows) {}
  int64_t stats = 0;   // DecodeParams::split_stats
  int64_t output;      // DecodeParams::split_output
  int64_t empty_rows;  // DecodeParams::empty_rows
  int64_t bytes;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_WORKSPACE_H_
