// SPDX-License-Identifier: Apache-2.0
// How many CTAs share the keys of the same rows. Plain C++.
#include <algorithm>
#include <limits>

#include "cuda/attention_decode.h"

namespace stof {
namespace cuda {

int ChooseSplits(const DecodeKernel& kernel, const AttentionParams& params, int item_bytes, int64_t tiles,
                 int64_t blocks, int multiprocessors) {
  // Nanoseconds and bytes. A multiprocessor's share of the memory's bandwidth; how long a load takes; the second kernel
  // and one step of its loop over splits. A CTA has two buffers of 16 keys a warp under way, part of the time.
  constexpr double kBandwidth = 22, kLatency = 800, kCombine = 3000, kStep = 45, kBusy = 0.4;
  constexpr int64_t kWarps = 4, kLargestBuffer = 8192;
  const int64_t key_bytes = int64_t{params.D + params.Dv} * item_bytes;
  const auto tile = static_cast<double>(kTileKeys * key_bytes);
  const double under_way = kBusy * static_cast<double>(2 * kWarps * std::min(8 * key_bytes, kLargestBuffer));
  const int64_t slots = int64_t{kernel.ctas} * multiprocessors;
  int best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t splits = 1; splits <= std::min<int64_t>(std::max<int64_t>(tiles, 1), kMostSplits); ++splits) {
    const int64_t ctas = blocks * splits, waves = (ctas + slots - 1) / slots;
    const auto active = static_cast<double>(std::min(ctas, slots));
    const double each = std::max(tile * active / (kBandwidth * multiprocessors), tile / under_way * kLatency);
    double time = static_cast<double>(waves) * (kLatency + static_cast<double>((tiles + splits - 1) / splits) * each);
    if (splits > 1) time += kCombine + kStep * static_cast<double>(splits);
    if (time < least) least = time, best = static_cast<int>(splits);
  }
  return best;
}

}  // namespace cuda
}  // namespace stof
