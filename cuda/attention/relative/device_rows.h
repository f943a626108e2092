// SPDX-License-Identifier: Apache-2.0
// Which row of a table each pair names (plugins/core/contract/relative_table.h), in device memory.
#ifndef STOF_CUDA_ATTENTION_RELATIVE_DEVICE_ROWS_H_
#define STOF_CUDA_ATTENTION_RELATIVE_DEVICE_ROWS_H_

#include <cstdint>
#include <memory>

#include "plugins/core/base/status.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/contract/relative_table.h"

namespace stof {
namespace cuda {

// One upload; owns the memory.
class DeviceRowsEntry {
 public:
  DeviceRowsEntry() = default;
  DeviceRowsEntry(const DeviceRowsEntry&) = delete;
  DeviceRowsEntry& operator=(const DeviceRowsEntry&) = delete;
  ~DeviceRowsEntry();
  // queries, keys: of the whole problem.
  Status Upload(const RelativeRows& rows, int64_t queries, int64_t keys, int device);
  const int32_t* row() const { return row_; }                 // [count]
  const int32_t* key_part() const { return key_part_; }       // [keys]; nullptr: the rows are of distances
  const int32_t* query_part() const { return query_part_; }   // [queries]; nullptr likewise
  int64_t query_position() const { return query_position_; }  // of entry 0 of query_part
  int device() const { return device_; }

 private:
  const int32_t *row_ = nullptr, *key_part_ = nullptr, *query_part_ = nullptr;
  int64_t query_position_ = 0;
  void* memory_ = nullptr;
  int device_ = -1;
};

// The rows on the current device. The first call uploads them and waits for that. While the stream is captured an
// absent entry stays nullptr, and the keeper holds one that is there. The entry lives as long as what `rows` points to,
// too.
Status GetDeviceRows(const RelativeRows& rows, int64_t queries, int64_t keys, const RunContext& context,
                     std::shared_ptr<const DeviceRowsEntry>* entry);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_RELATIVE_DEVICE_ROWS_H_
