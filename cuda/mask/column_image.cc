// SPDX-License-Identifier: Apache-2.0
// The arrays of key columns as kernels read them. Plain C++.
#include <algorithm>

#include "cuda/mask/device_columns.h"

namespace stof {
namespace cuda {

ColumnImage MakeColumnImage(const KeyColumns& columns) {
  ColumnImage image;
  const int64_t tiles = columns.word_count();
  std::vector<std::vector<int32_t>> lists;
  for (int64_t at = 0; at < columns.lists(); ++at) {
    const uint64_t* words = columns.words(at);
    std::vector<int32_t> list;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      image.below.push_back(static_cast<int32_t>(list.size()));
      const uint64_t word = words[tile];
      image.words.push_back(static_cast<uint32_t>(word));
      image.words.push_back(static_cast<uint32_t>(word >> 32));
      if (!columns.are_sparse()) {
        if (word != 0) list.push_back(static_cast<int32_t>(tile));
        continue;
      }
      for (uint64_t left = word; left != 0; left &= left - 1) {
        list.push_back(static_cast<int32_t>(KeyColumns::kTile * tile + __builtin_ctzll(left)));
      }
    }
    image.below.push_back(static_cast<int32_t>(list.size()));
    lists.push_back(std::move(list));
  }
  size_t stride = 1;
  for (const auto& list : lists) stride = std::max(stride, list.size());
  for (auto& list : lists) {
    list.resize(stride, 0);
    image.list.insert(image.list.end(), list.begin(), list.end());
  }
  image.view.lists = static_cast<int32_t>(columns.lists());
  image.view.stride = static_cast<int32_t>(stride);
  image.view.tiles = static_cast<int32_t>(tiles);
  image.view.gathers = columns.are_sparse() ? 1 : 0;
  return image;
}

}  // namespace cuda
}  // namespace stof
