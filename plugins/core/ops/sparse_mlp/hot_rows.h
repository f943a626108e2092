// SPDX-License-Identifier: Apache-2.0
// Reads the weights of hot neurons before the first run does. Runtimes map weights: a page that nothing has read is on
// disk.
#ifndef STOF_PLUGINS_CORE_OPS_SPARSE_MLP_HOT_ROWS_H_
#define STOF_PLUGINS_CORE_OPS_SPARSE_MLP_HOT_ROWS_H_

#include <cstdint>

#include "plugins/core/contract/op.h"

namespace stof {

// The rows of one node's weights that were read. All nodes of a process together read as many MiB as STOF_MLP_HOT_MB
// says, and none without it. What a node has read counts until it is destroyed.
class HotRows {
 public:
  HotRows() = default;
  HotRows(const HotRows&) = delete;
  HotRows& operator=(const HotRows&) = delete;
  ~HotRows();

  // Reads the first rows of a weight, as far as the bound allows. Its memory is not changed.
  void Read(const Tensor& weight, int64_t rows);

 private:
  int64_t bytes_ = 0;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_SPARSE_MLP_HOT_ROWS_H_
