// SPDX-License-Identifier: Apache-2.0
// Key columns (plugins/core/mask/columns/key_columns.h) in device memory. The structs are plain C++ for kernels.
#ifndef STOF_CUDA_MASK_DEVICE_COLUMNS_H_
#define STOF_CUDA_MASK_DEVICE_COLUMNS_H_

#include <cstdint>
#include <memory>

#include "plugins/core/base/status.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/mask/columns/key_columns.h"

namespace stof {
namespace cuda {

// The columns of each KV head, or of all where lists is 1.
struct DeviceColumns {
  const int32_t* list = nullptr;    // [lists, stride] ascending: columns, or the KV tiles that hold some
  const int32_t* below = nullptr;   // [lists, tiles + 1]: entries of the list whose keys lie before a KV tile
  const uint32_t* words = nullptr;  // [lists, tiles, 2]: bit i of word w of tile t: key 64 t + 32 w + i is a column
  int32_t lists = 0;                // 0: there are no columns
  int32_t stride = 0, tiles = 0;
  int32_t gathers = 0;  // 1: the list has columns, not tiles
};

// One upload; owns the memory.
class DeviceColumnsEntry {
 public:
  DeviceColumnsEntry() = default;
  DeviceColumnsEntry(const DeviceColumnsEntry&) = delete;
  DeviceColumnsEntry& operator=(const DeviceColumnsEntry&) = delete;
  ~DeviceColumnsEntry();
  Status Upload(const KeyColumns& columns, int device);
  const DeviceColumns& view() const { return view_; }
  int device() const { return device_; }

 private:
  DeviceColumns view_;
  void* memory_ = nullptr;
  int device_ = -1;
};

// The columns on the current device. The first call uploads them and waits for that. While the stream is captured an
// absent entry stays nullptr, and the keeper holds one that is there. The entry lives as long as `columns`, too.
Status GetDeviceColumns(const KeyColumns& columns, const RunContext& context,
                        std::shared_ptr<const DeviceColumnsEntry>* entry);

// The host's form of a DeviceColumns, in one array of words at the offsets that view's pointers would have. For Upload
// and tests.
struct ColumnImage {
  DeviceColumns view;  // without pointers
  std::vector<int32_t> list, below;
  std::vector<uint32_t> words;
};
ColumnImage MakeColumnImage(const KeyColumns& columns);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_DEVICE_COLUMNS_H_
