// SPDX-License-Identifier: Apache-2.0
// Block masks that kernels make on the device, queued on a stream: for masks that read vectors of a run. Nothing of it
// comes back to the host, so memory is for the case that every tile needs bits (by distance: every diagonal), and large
// problems are cut. Plain C++.
#ifndef STOF_CUDA_MASK_BUILD_MASK_BUILDER_H_
#define STOF_CUDA_MASK_BUILD_MASK_BUILDER_H_

#include <cstddef>
#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/mask/program/mask_program.h"

namespace stof {
namespace cuda {

// A part of a problem: some batches, heads and rows.
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

// The mask of a part, with one table for each batch that the program tells apart and each head.
struct MaskBuild {
  const MaskProgram* program = nullptr;
  ExprSizes sizes;  // of the whole problem
  MaskPart part;
  MaskTile tile;
  int multiprocessors = 1;
  int32_t* invalid = nullptr;  // becomes 1 where the program cannot be evaluated; nullptr: it is proven
};

// Cuts a problem so that no part's mask takes more than `most` bytes, if it has more than one row of tiles; parts come
// in the order of batches, heads and rows.
class MaskCuts {
 public:
  MaskCuts(const MaskProgram& program, const ExprSizes& sizes, const MaskTile& tile, int64_t most);
  bool Next(MaskPart* part);

 private:
  ExprSizes sizes_;
  MaskPart next_;
  int64_t batches_, heads_, rows_;  // of a part
};

// Whether tiles can be numbered; those of parts that MaskCuts gives can.
bool IsCountable(const MaskBuild& build);
// Bytes of device memory that a build needs.
size_t MaskBytes(const MaskBuild& build);
// Queues the kernels; gives a CUDA error code, 0 for none. `memory` is aligned to 64 bytes and belongs to the build
// until the stream has done with what reads the mask.
int LaunchMaskBuild(const MaskBuild& build, void* memory, void* stream, DeviceMask* mask);

// Sets every element of an output [B, H, S, Dv] of floats of `size` bytes, 2 or 4, to NaN where *invalid is not 0.
int LaunchInvalidate(const int32_t* invalid, void* output, int64_t size, const Strides& stride, int64_t B, int64_t H,
                     int64_t S, int64_t Dv, void* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_BUILD_MASK_BUILDER_H_
