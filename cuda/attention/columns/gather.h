// SPDX-License-Identifier: Apache-2.0
// Prefill under a mask with key columns: keys and values of the columns are gathered in front of a copy of all keys and
// values, and any kernel attends that longer axis under the gathered mask (plugins/core/mask/columns/key_columns.h).
#ifndef STOF_CUDA_ATTENTION_COLUMNS_GATHER_H_
#define STOF_CUDA_ATTENTION_COLUMNS_GATHER_H_

#include <memory>

#include "cuda/mask/device_columns.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/mask/attention_mask.h"

namespace stof {
namespace cuda {

// An attention over the longer axis.
struct GatheredAttention {
  std::shared_ptr<const ColumnSource::Gathered> columns;
  AttentionArgs args;  // key and value are those of the whole axis, once GatherColumns has run
  ExprSizes sizes;
  const AttentionMask& mask() const { return *columns->mask; }
};

// Whether gathering pays, and what attention then is. Strides are set, addresses are not.
bool ChooseGathered(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                    GatheredAttention* gathered);
// Allocates the keys and values of the axis and queues the kernel that fills them. args.key stays nullptr where there
// is no memory for them.
Status GatherColumns(const AttentionArgs& args, const DeviceColumns& columns, const RunContext& context,
                     GatheredAttention* gathered);

// Copies rows of keys or values to [B, G, packed + keys, size], dense: first those of the columns, then all `keys`. Of
// the packed rows behind the columns those in a KV tile with some become zeros, the others stay as they are.
struct GatherParams {
  const void* from[2] = {};  // keys, values
  void* to[2] = {};
  Strides stride[2];    // of from, in units
  int64_t row[2] = {};  // units of a row
  int64_t rows = 0;     // packed + keys
  int32_t packed = 0, keys = 0;
  int32_t B = 0, G = 0;
  int32_t unit = 0;  // bytes: 16, 4 or 2
  DeviceColumns columns;
};
int LaunchGather(const GatherParams& params, void* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_COLUMNS_GATHER_H_
