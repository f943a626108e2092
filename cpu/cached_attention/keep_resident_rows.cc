// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "plugins/core/contract/cached_attention.h"

namespace stof {

void CpuKeepResidentRows(const CacheKeepArgs& args) {
  const auto row_bytes = static_cast<size_t>(args.D * SizeOf(args.dtype));
  for (int64_t b = 0; b < args.B; ++b) {
    const int64_t end = args.first_row[b] + args.S;
    // A prompt's padding stands behind the valid keys.
    const int64_t keys = int64_t{args.seqlens[b]} + 1;
    const int64_t staged = std::min(end, keys);
    const int64_t kept = std::min(ResidentRows(keys, args.capacity, args.sliding_window), staged);
    for (int64_t g = 0; g < args.G; ++g) {
      const int64_t head = b * args.G + g;
      const auto from = static_cast<size_t>(head * args.staged_rows + staged - kept) * row_bytes;
      const auto to = static_cast<size_t>(head * args.capacity) * row_bytes;
      const auto bytes = static_cast<size_t>(kept) * row_bytes;
      std::memcpy(static_cast<char*>(args.present_key) + to, static_cast<const char*>(args.staged_key) + from, bytes);
      std::memcpy(static_cast<char*>(args.present_value) + to, static_cast<const char*>(args.staged_value) + from,
                  bytes);
    }
  }
}

}  // namespace stof
