// SPDX-License-Identifier: Apache-2.0
// Block masks that kernels make on the device, queued on a stream: for masks that read run-time vectors. Nothing is
// read back by the host. Therefore memory is sized for bits in every tile (or every diagonal, where the mask depends on
// the distance alone), and large problems are cut into parts. Plain C++.
#ifndef STOF_CUDA_MASK_BUILD_MASK_BUILDER_H_
#define STOF_CUDA_MASK_BUILD_MASK_BUILDER_H_

#include <cstddef>
#include <cstdint>

#include "cuda/mask/mask_params.h"
#include "cuda/mask/program/mask_program.h"

namespace stof {
namespace cuda {

// A part of a problem: a range of batches, heads and rows.
struct MaskPart {
  int64_t b = 0, batches = 1;
  int64_t h = 0, heads = 1;
  int64_t row = 0, rows = 0;
};

// The tile of the kernel that will read the mask. m is a multiple of 64, n of 32, both at most 256.
struct MaskTile {
  int m = kTileRows, n = kTileKeys;
  bool fragments = false;  // bits in the order of fragments.h
};

// The mask of a part, with one table for each batch and head that the program distinguishes.
struct MaskBuild {
  const MaskProgram* program = nullptr;
  ExprSizes sizes;  // of the whole problem
  MaskPart part;
  MaskTile tile;
  int sm_count = 1;
  int32_t* invalid = nullptr;  // becomes 1 where the program cannot be evaluated; nullptr: it is proven
};

// Cuts a problem into parts whose masks take at most `most` bytes each, unless a part is a single row of tiles. Parts
// are in the order of batches, heads and rows.
class MaskCuts {
 public:
  MaskCuts(const MaskProgram& program, const ExprSizes& sizes, const MaskTile& tile, int64_t most);
  bool Next(MaskPart* part);

 private:
  ExprSizes sizes_;
  MaskPart next_;
  int64_t batches_, heads_, rows_;  // of a part
};

// Whether 32 bits can number the tiles; they can for parts of MaskCuts.
bool IsCountable(const MaskBuild& build);
// Bytes of device memory that a build needs.
size_t MaskBytes(const MaskBuild& build);
// Queues the kernels; returns a CUDA error code, 0 for none. `memory` is aligned to 64 bytes and belongs to the build
// until the kernels that read the mask have ended.
int LaunchMaskBuild(const MaskBuild& build, void* memory, void* stream, DeviceMask* mask);

// Sets every element of an output [B, H, S, Dv] of floats of `size` bytes, 2 or 4, to NaN where *invalid is not 0.
// is_by_batch: invalid[b] counts for batch b.
int LaunchInvalidate(const int32_t* invalid, bool is_by_batch, void* output, int64_t size, const Strides& stride,
                     int64_t B, int64_t H, int64_t S, int64_t Dv, void* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_BUILD_MASK_BUILDER_H_
