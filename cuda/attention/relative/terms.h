// SPDX-License-Identifier: Apache-2.0
// Relative terms of an attention: the kernels that prepare their tables, and the parameters of the attention kernel.
#ifndef STOF_CUDA_ATTENTION_RELATIVE_TERMS_H_
#define STOF_CUDA_ATTENTION_RELATIVE_TERMS_H_

#include <memory>

#include "cuda/attention/relative/device_rows.h"
#include "cuda/attention/relative/layout.h"
#include "cuda/attention/relative/params.h"
#include "plugins/core/base/status.h"
#include "plugins/core/contract/attention_args.h"

namespace stof {
namespace cuda {

// Of each term; nullptr: it is not given, or kernels are only loaded.
struct RelativeRowsOnDevice {
  std::shared_ptr<const DeviceRowsEntry> terms[kRelativeTerms];
};

// Queues what fills the workspace, of layout.bytes, and sets the parameters. stream is a cudaStream_t.
Status PrepareRelative(const AttentionArgs& args, const RelativeLayout& layout, const RelativeRowsOnDevice& rows,
                       void* workspace, void* stream, RelativeParams* params);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_RELATIVE_TERMS_H_
