// SPDX-License-Identifier: Apache-2.0
// Choose blocks in the sm90 family: which calls choose, by which kernel they attend, and how the chosen tiles reach it.
#ifndef STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_CHOOSE_H_
#define STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_CHOOSE_H_

#include <cstddef>

#include "cuda/attention/job.h"

namespace stof {
namespace cuda {

// The kernel by which a call attends the blocks that it chooses: the cheapest one whose tiles suit, or the requested
// one. nullptr: the call computes every block. planned: the family's choice. find: its tables.
const KernelEntry* FindChoosingKernel(const AttentionJob& job, const KernelEntry& planned,
                                      KernelTable (*find)(const KernelProblem& problem));

// The form of the mask that the chosen tiles are taken from: without a tile schedule, which the device would undo.
MaskForm ChoosingMaskForm(const KernelEntry& kernel, const AttentionJob& job);

// Bytes of workspace.
size_t CountChoosingBytes(const KernelEntry& kernel, const AttentionJob& job);

// Queues the choice on the job's stream. attention: with mask and padding; its mask becomes the chosen tiles. It stays
// as it is, so that every block is computed, where there is no memory or the driver has no TMA.
Status ChooseBlocks(AttentionJob* job, const KernelEntry& kernel, AttentionParams* attention);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_CHOOSE_H_
