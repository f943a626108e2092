// SPDX-License-Identifier: Apache-2.0
// Chooses the number of splits of decode attention, and between the split-KV and the cluster kernel. Plain C++.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/attention/decode/api.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {

namespace {

// The constants below were measured on an H100 of this peak bandwidth, bytes a nanosecond.
constexpr double kMeasuredPeak = 3352;

double BandwidthFactor(const DeviceProperties& device) {
  return device.peak_bandwidth > 0.0 ? device.peak_bandwidth / kMeasuredPeak : 1.0;
}

}  // namespace

double EstimateSplits(int ctas_per_sm, const AttentionParams& params, int item_bytes, int64_t tiles, int64_t blocks,
                      const DeviceProperties& device, int64_t splits) {
  // In nanoseconds and bytes: the bandwidth of all SMs, the latency of a load, the combine kernel, and its time for
  // each split and value. A CTA has two buffers of 16 keys a warp, which are in flight for a share kBusy of the time.
  const double bandwidth = 2904 * BandwidthFactor(device);
  constexpr double kLatency = 800, kCombine = 3000, kStep = 0.5, kBusy = 0.5;
  constexpr double kStart = 5000;
  constexpr int64_t kWarps = 4, kLargestBuffer = 8192;
  const int64_t key_bytes = int64_t{params.D + params.Dv} * item_bytes;
  const auto tile = static_cast<double>(kTileKeys * key_bytes);
  const double in_flight = kBusy * static_cast<double>(2 * kWarps * std::min(8 * key_bytes, kLargestBuffer));
  const int64_t slots = int64_t{ctas_per_sm} * device.sm_count;
  const int64_t ctas = blocks * splits;
  const auto active = static_cast<double>(std::min(ctas, slots));
  // An SM with one CTA more than others ends later: the mean of an even share and that of the fullest SM.
  const double fullest = std::ceil(active / device.sm_count) * device.sm_count;
  const double each = std::max(tile * (active + fullest) / 2 / bandwidth, tile / in_flight * kLatency);
  const double cta_time = kLatency + static_cast<double>(CeilDiv(tiles, splits)) * each;
  const double time = kStart + static_cast<double>(CeilDiv(ctas, slots)) * cta_time;
  return splits > 1 ? time + kCombine + kStep * static_cast<double>(params.Dv * splits) : time;
}

DecodeChoice ChooseSplits(int ctas_per_sm, const AttentionParams& params, int item_bytes, int64_t tiles, int64_t blocks,
                          const DeviceProperties& device) {
  DecodeChoice best;
  best.nanoseconds = std::numeric_limits<double>::infinity();
  const int64_t most = std::min<int64_t>(std::max<int64_t>(tiles, 1), kMostDecodeSplits);
  // Of the numbers that leave a CTA as many tiles the least is the fastest: the others are not estimated, since the
  // host does this in every run.
  for (int64_t splits = 1; splits <= most;) {
    const double time = EstimateSplits(ctas_per_sm, params, item_bytes, tiles, blocks, device, splits);
    if (time < best.nanoseconds) best = {false, static_cast<int>(splits), time};
    const int64_t tiles_per_split = CeilDiv(tiles, splits);
    splits = tiles_per_split > 1 ? CeilDiv(tiles, tiles_per_split - 1) : most + 1;
  }
  return best;
}

DecodeChoice ChooseDecode(int ctas_per_sm, const AttentionParams& params, int item_bytes, int64_t tiles, int64_t blocks,
                          const DeviceProperties& device, int tiles_at_once, const int (&clusters)[kClusterSizes],
                          int only) {
  // The cluster kernel, in nanoseconds. kStart: up to the end of the first step of 64 keys times `tiles_at_once`.
  // kStep: each further step. Both again for fp32. The bandwidth of all CTAs is lower where keys and values have fewer
  // than 512 bytes. Clusters of several CTAs gain less by an H200's bandwidth than single CTAs.
  constexpr double kStart = 5400, kCombineTime = 1900, kStep = 1430, kStart32 = 8000, kStep32 = 5000;
  constexpr double kBandwidth = 2950, kNarrowBandwidth = 2650;
  const double measured = int64_t{params.D + params.Dv} * item_bytes >= 512 ? kBandwidth : kNarrowBandwidth;
  const double factor = BandwidthFactor(device);
  const double start = item_bytes == 4 ? kStart32 : kStart, step = item_bytes == 4 ? kStep32 : kStep;
  DecodeChoice best = ChooseSplits(ctas_per_sm, params, item_bytes, tiles, blocks, device);
  if (only == kSplitKv) return best;
  if (only == kCluster) best.nanoseconds = std::numeric_limits<double>::infinity();
  const auto bytes = static_cast<double>(blocks * tiles * kTileKeys * (params.D + params.Dv) * item_bytes);
  for (int i = 0; i < kClusterSizes; ++i) {
    if (clusters[i] == 0) continue;
    const int64_t ctas = int64_t{1} << i, waves = (blocks + clusters[i] - 1) / clusters[i];
    const int64_t steps = std::max<int64_t>(1, (tiles + ctas * tiles_at_once - 1) / (ctas * tiles_at_once));
    const double own = static_cast<double>(waves) * (start + step * static_cast<double>(steps - 1));
    const double bandwidth = measured * (ctas == 1 ? factor : std::sqrt(factor));
    const double time = std::max(own, start + bytes / bandwidth) + (ctas > 1 ? kCombineTime : 0.0);
    if (time < best.nanoseconds) best = {true, static_cast<int>(ctas), time};
  }
  return best;
}

}  // namespace cuda
}  // namespace stof
