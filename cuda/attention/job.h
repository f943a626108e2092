// SPDX-License-Identifier: Apache-2.0
// One attention, from the operator's problem to the launches. Its members are in three files: cuda/attention/job.cc
// runs it, cuda/attention/job_choice.cc chooses the kernel, cuda/attention/job_memory.cc makes masks and takes memory.
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

// A mask that is made on the device, by run, and what its parts share.
struct DeviceBuild {
  MaskProgram program;
  int32_t* invalid = nullptr;  // in device memory; nullptr: the program is proven
  // Memory of a part by its use: parts come one after the other on the stream.
  struct Memory {
    int m, n;
    size_t bytes;
    void* data;
  };
  std::vector<Memory> memory;
};

// One attention on one stream, or a part of it.
class AttentionJob {
 public:
  // args and pad are the part's, sizes the whole problem's. build: the mask is made on the device; nullptr: it is
  // constant and cached.
  AttentionJob(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
               const Tables& operands, const MaskPart& part, DeviceBuild* build, const RunContext& context);

  Status Run();
  // The masks that Run would make; the keeper, if there is one, keeps them.
  Status Ready();
  // How many choices there are: the sm_80 kernel, then those for sm_90a.
  Status Count(int* kernels);

 private:
  // ---- cuda/attention/job.cc ----
  Status RunRows();
  Status RunDecode();
  Status RunFp32();
  Status RunSm80();
  Status LaunchSm80();

  // ---- cuda/attention/job_choice.cc ----
  // The sm_90a kernels that take the problem on this device; nullptr: none, only the sm_80 kernel does.
  Status First(const Sm90Kernel** first);
  // kernel nullptr: that for sm_80.
  Status Choose(const Sm90Kernel** kernel, Problem* problem);
  // What the kernels for 8.0 and for fp32 want.
  static MaskForm TilesForm();
  static MaskForm RowsForm();
  MaskForm DecodeForm() const;
  // Whether keys one by one are cheaper than tiles; never where a kernel was asked for, or the host does not see the
  // mask.
  Status PrefersRows(const Sm90Kernel* kernel, const Problem& problem, bool* rows) const;
  bool TakesDecode() const;
  // Whether rows can be read 16 bytes at a time, which Check has seen to where they are halves.
  bool ReadsVectors() const;

  // ---- cuda/attention/job_memory.cc ----
  // The mask for a kernel's tile; entry: that of the cache, nullptr where it is made on the device.
  Status GetMask(const MaskForm& form, AttentionParams* params, std::shared_ptr<const MaskEntry>* entry);
  // Memory for one use: of a tile, of 0, 0 for what fp32 needs, 0, 1 for padding, 0, 2 for sums, 0, 3 for parts of
  // rows. Parts have the same, one after the other.
  void* Held(int m, int n, size_t bytes);
  Status MakeMask(const MaskForm& form, AttentionParams* params);
  // Who takes which rows, and memory for those that are taken in parts.
  Status TakePlan(const Sm90Kernel& kernel, const MaskEntry& entry, Sm90Params* params);
  // Bits of the padding, and with `flags` a zero for every piece of rows.
  Status Prepare(bool flags, const uint32_t** pad_bits, int32_t** redo);

  const AttentionArgs& args_;
  const Tensor* const pad_;
  const AttentionMask& mask_;
  const ExprSizes& sizes_;
  const Tables& operands_;
  const MaskPart& part_;
  DeviceBuild* build_;
  DeviceBuild own_;
  const RunContext& context_;
  cudaStream_t const stream_;
  AttentionParams params_;
  DeviceFacts facts_;
  bool extras_ = false, bf16_ = false, all_keys_ = false, keep_ = false;
  int size_ = 0;
};

// The names of the kernels that a tuner may ask for: CudaBackend::kernel_names.
Status KernelNames(int64_t head_size, DType dtype, std::string* names);

// Zeros; nothing where kernels are only loaded, for memory is none then.
Status Clear(void* memory, size_t bytes, cudaStream_t stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_JOB_H_
