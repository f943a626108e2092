// SPDX-License-Identifier: Apache-2.0
// One attention on a device, from the operator's problem to the launches. job_choice.cc chooses a kernel, its family
// runs it (KernelFamily::run), job_memory.cc gets masks and workspace.
#ifndef STOF_CUDA_ATTENTION_JOB_H_
#define STOF_CUDA_ATTENTION_JOB_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/attention/kernel_table.h"
#include "cuda/attention/params.h"
#include "cuda/attention/relative/terms.h"
#include "cuda/attention/select.h"
#include "cuda/common/device_properties.h"
#include "cuda/common/kernel_request.h"
#include "cuda/mask/build/mask_builder.h"
#include "cuda/mask/device_columns.h"
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
  // Runs a decode kernel, whatever kernel is requested among others: by the causal window, where
  // IsLimitedToKeyRange(args) holds, or over pages, where CanReadPages(args) does.
  Status RunDecode();
  // Makes the masks that Run needs. The keeper, if there is one, holds them.
  Status Prepare();
  // The number of kernels that RunContext::kernel chooses from: the tiled one, then the scheduled ones; 0: there is no
  // choice.
  Status CountKernels(int* kernels);

  // ---- for KernelFamily::plan, ::run and ::prepare ----
  const AttentionArgs& args() const { return args_; }
  bool is_bf16() const { return args_.shape.dtype == DType::kBF16; }
  const AttentionMask& mask() const { return mask_; }
  // Of the whole problem, and this part of it.
  const ExprSizes& sizes() const { return sizes_; }
  const MaskPart& part() const { return part_; }
  // What decides which kernels fit.
  const KernelProblem& problem() const { return problem_; }
  // What decides how fast they are.
  const SelectionProblem& selection() const { return selection_; }
  const KernelRequest& request() const { return request_; }
  const DeviceProperties& device() const { return device_; }
  cudaStream_t stream() const { return stream_; }
  Keeper* keeper() const { return context_.keeper; }
  // The parameters that all kernels share. PreparePadding and GetMask complete them.
  const AttentionParams& params() const { return params_; }
  // The block mask of the last GetMask; nullptr: there is no mask, or the device builds it.
  const MaskEntry* mask_entry() const { return mask_entry_.get(); }
  // The rows of GetRelativeRows.
  const RelativeRowsOnDevice& relative_rows() const { return relative_rows_; }
  // The key columns of GetColumns; nullptr: none.
  const DeviceColumnsEntry* columns() const { return columns_.get(); }

  // Runs the tiled kernel, which computes any problem.
  Status RunTiled();
  // RunTiled for the fully masked rows alone, which attend all keys. A scheduled kernel has flagged them.
  Status RunTiledForEmptyRows(const uint32_t* pad_bits, int32_t* empty_flags);
  // Makes the block mask of RunTiled.
  Status PrepareTiled();
  bool empty_rows_attend_all() const;
  // Whether a second pass over fully masked rows, which attend all keys, may find some. Call GetMask first.
  bool NeedsEmptyRowPass() const;

  // ---- cuda/attention/job_memory.cc ----
  // Key columns of args.shape.T keys or more on the device; an error where the stream is captured and they are not
  // there.
  Status GetColumns(const KeyColumns& columns);
  // The rows that relative terms name on the device; an error where the stream is captured and they are not there.
  Status GetRelativeRows();
  // Sets the block mask of this form in params(), and mask_entry().
  Status GetMask(const MaskForm& form);
  // Workspace for one use: the mask of m x n tiles, or with m = 0 by n: split fp32 operands (0), padding (1), decode
  // splits (2), splits of tile rows (3), relative terms (4), chosen blocks or pages (5), 8-bit operands (6). All of one
  // call share it.
  void* GetWorkspace(int m, int n, size_t bytes);
  // Packs the key padding mask; with `flags` also clears a flag for every kRowsPerFlag query rows.
  Status PreparePadding(bool flags, const uint32_t** pad_bits, int32_t** empty_flags);
  // Packs it for params(), unless that is done.
  Status PreparePadding();

 private:
  // ---- cuda/attention/job_choice.cc ----
  // Sets problem_, selection_ and device_. An error where no kernel runs on the device.
  Status Describe();
  // Also sets request_.
  Status Choose(AttentionPlan* plan);
  // Completes the plan and runs it.
  Status RunPlan(AttentionPlan* plan);
  // Writes the plan and the other kernels with their predicted times, where STOF_CUDA_PRINT_PLANS asks for that.
  Status PrintPlan(const AttentionPlan& plan) const;
  // Chooses the kernel, and binds MaskArgs::existence_bias where it computes rows without an allowed key itself.
  Status ChooseForExistingKeys(AttentionPlan* plan);
  // Takes MaskArgs::existence_bias for the bias; false: no row needs it.
  bool BindExistenceBias();

  // ---- cuda/attention/job_memory.cc ----
  Status MakeMask(const MaskForm& form);

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
  KernelProblem problem_;
  SelectionProblem selection_;
  KernelRequest request_;
  std::shared_ptr<const MaskEntry> mask_entry_;
  std::shared_ptr<const DeviceColumnsEntry> columns_;
  RelativeRowsOnDevice relative_rows_;
  bool pins_mask_ = false;
};

// The names of the kernels that a tuner may time: CudaBackend::kernel_names.
Status ListKernels(int64_t head_size, DType dtype, std::string* names);

// The error of a kernel launch that gave this CUDA error code; 0 is none.
Status CheckLaunch(int error);

// Sets memory to zeros, but not while kernels are only loaded: the address then names no memory.
Status Clear(void* memory, size_t bytes, cudaStream_t stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_JOB_H_
