// SPDX-License-Identifier: Apache-2.0
// One attention on a device, from the operator's problem to the launches. job.cc runs the kernels, job_choice.cc
// chooses one, job_memory.cc gets masks and workspace.
#ifndef STOF_CUDA_ATTENTION_JOB_H_
#define STOF_CUDA_ATTENTION_JOB_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/attention/params.h"
#include "cuda/attention/select.h"
#include "cuda/attention/sm90/api.h"
#include "cuda/common/device_properties.h"
#include "cuda/mask/build/mask_builder.h"
#include "cuda/mask/device_mask.h"
#include "cuda/mask/program/mask_program.h"
#include "plugins/core/mask/attention_mask.h"

namespace stof {
namespace cuda {

// A mask that a run builds on the device, and what the parts of the run share. A part has some heads or batches.
struct DeviceBuild {
  MaskProgram program;
  int32_t* invalid = nullptr;  // in device memory; nullptr: the program cannot fail
  // Workspace by use: parts run one after the other on the stream and share it.
  struct Memory {
    int m, n;
    size_t bytes;
    void* data;
  };
  std::vector<Memory> memory;
};

// One attention on one stream, or one part of it.
class AttentionJob {
 public:
  // args and pad are of the part, sizes of the whole problem. build: the mask is built on the device; nullptr: it is
  // constant and cached.
  AttentionJob(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
               const Tables& operands, const MaskPart& part, DeviceBuild* build, const RunContext& context);

  Status Run();
  // Makes the masks that Run needs. The keeper, if there is one, holds them.
  Status Ready();
  // The number of kernels to choose from: the sm_80 kernel, then those for sm_90a; 0: there is no choice.
  Status Count(int* kernels);

 private:
  // ---- cuda/attention/job.cc ----
  Status RunRowwise();
  Status RunDecode();
  Status RunFp32();
  Status RunSm80();
  Status LaunchSm80();

  // ---- cuda/attention/job_choice.cc ----
  // The list of sm_90a kernels for the problem on this device; nullptr: there are none.
  Status First(const Sm90Kernel** first);
  // Leaves *kernel nullptr for the sm_80 kernel.
  Status Choose(const Sm90Kernel** kernel, SelectionProblem* problem);
  // The block masks of the sm_80 and fp32 kernels, the row-wise and the decode kernels.
  static MaskForm TiledForm();
  static MaskForm RowwiseForm();
  MaskForm DecodeForm() const;
  // Whether the row-wise kernel is faster by the model; false where a kernel is named, or only the device knows the
  // mask.
  Status PrefersRowwise(const Sm90Kernel* kernel, const SelectionProblem& problem, bool* rowwise) const;
  bool PrefersDecode() const;
  // Whether rows can be read 16 bytes at a time. CheckCudaAttention ensures it for fp16 and bf16.
  bool CanReadVectors() const;

  // ---- cuda/attention/job_memory.cc ----
  // The block mask of this form. entry: of the cache; nullptr where the mask is built on the device.
  Status GetMask(const MaskForm& form, AttentionParams* params, std::shared_ptr<const MaskEntry>* entry);
  // Workspace for one use: the mask of m x n tiles, or with m = 0 by n: split fp32 operands (0), padding (1), decode
  // splits (2), splits of tile rows (3). The parts of a run share it.
  void* GetWorkspace(int m, int n, size_t bytes);
  Status MakeMask(const MaskForm& form, AttentionParams* params);
  // Sets the tile schedule, and workspace for split rows.
  Status SetSchedule(const Sm90Kernel& kernel, const MaskEntry& entry, Sm90Params* params);
  // Packs the key padding mask; with `flags` also clears a flag for every kRowsPerFlag query rows.
  Status PreparePadding(bool flags, const uint32_t** pad_bits, int32_t** empty_flags);

  const AttentionArgs& args_;
  const Tensor* const pad_;
  const AttentionMask& mask_;
  const ExprSizes& sizes_;
  const Tables& operands_;
  const MaskPart& part_;
  DeviceBuild* build_;
  DeviceBuild own_build_;
  const RunContext& context_;
  cudaStream_t const stream_;
  AttentionParams params_;
  DeviceProperties device_;
  bool score_mod_ = false, bf16_ = false, empty_rows_attend_all_ = false, pins_mask_ = false;
  int head_size_ = 0;
};

// The names of the kernels that a tuner may time: CudaBackend::kernel_names.
Status KernelNames(int64_t head_size, DType dtype, std::string* names);

// Sets memory to zeros, but not while kernels are only loaded: the address then names no memory.
Status Clear(void* memory, size_t bytes, cudaStream_t stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_JOB_H_
