// SPDX-License-Identifier: Apache-2.0
// The number of splits of decode attention (split-KV), and the choice between its kernels.
#include <algorithm>

#include "cuda/attention/decode/api.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

constexpr int kSmCount = 132;
constexpr cuda::DeviceProperties kDevice = {90, kSmCount, 50 << 20, 3352};  // an H100

int Splits(int64_t tiles, int64_t blocks, int ctas = 3, int size = 128) {
  cuda::AttentionParams params;
  params.D = params.Dv = size;
  return cuda::ChooseSplits(ctas, params, 2, tiles, blocks, kDevice).splits;
}

cuda::DecodeChoice Choose(int64_t tiles, int64_t blocks, const int (&clusters)[cuda::kClusterSizes], int size = 128,
                          int only = -1) {
  cuda::AttentionParams params;
  params.D = params.Dv = size;
  return cuda::ChooseDecode(size == 128 ? 3 : 4, params, 2, tiles, blocks, kDevice, 2, clusters, only);
}

}  // namespace

TEST(DecodeSplitsNothingThatFillsTheDevice) {
  CHECK(Splits(2048, 396) == 1, Splits(2048, 396));
  CHECK(Splits(2048, 3960) == 1, Splits(2048, 3960));
}

TEST(DecodeSplitsLeaveShortRowsAlone) {
  // Combining costs more than a handful of tiles.
  CHECK(Splits(1, 8) == 1, Splits(1, 8));
  CHECK(Splits(2, 8) == 1, Splits(2, 8));
  CHECK(Splits(0, 8) == 1, Splits(0, 8));
}

TEST(DecodeSplitsFillTheDeviceWithLongRows) {
  for (const int64_t blocks : {2, 8, 16, 40, 100}) {
    for (const int64_t tiles : {2048, 16384}) {
      const int64_t splits = Splits(tiles, blocks), ctas = splits * blocks, slots = 3 * kSmCount;
      const auto where = [&] { return Text(blocks, " blocks of ", tiles, " tiles: ", splits); };
      CHECK(splits <= cuda::kMostDecodeSplits && splits <= tiles, where());
      // CTAs fill at least a third of the slots, or splits are at their limit, and the last wave is not short.
      CHECK(3 * ctas >= slots || splits == cuda::kMostDecodeSplits, where());
      const int64_t waves = (ctas + slots - 1) / slots;
      CHECK(4 * ctas >= 3 * waves * slots || waves == 1, where());
    }
  }
}

TEST(DecodeSplitsNeverExceedTheTiles) {
  for (int64_t tiles = 1; tiles < 64; ++tiles) CHECK(Splits(tiles, 1) <= tiles, tiles);
}

TEST(DecodeSplitsAreTheFastestOfAll) {
  for (const int size : {64, 96, 256}) {
    cuda::AttentionParams params;
    params.D = params.Dv = size;
    for (const int64_t blocks : {1, 3, 8, 32, 100, 395, 1024}) {
      for (int64_t tiles = 0; tiles < 700; tiles += tiles < 40 ? 1 : 13) {
        const cuda::DecodeChoice chosen = cuda::ChooseSplits(3, params, 2, tiles, blocks, kDevice);
        const int64_t most = std::min<int64_t>(std::max<int64_t>(tiles, 1), cuda::kMostDecodeSplits);
        for (int64_t splits = 1; splits <= most; ++splits) {
          const double time = cuda::EstimateSplits(3, params, 2, tiles, blocks, kDevice, splits);
          CHECK(time > chosen.nanoseconds || (time == chosen.nanoseconds && splits >= chosen.splits), splits, " of ",
                tiles, " tiles, ", blocks, " blocks: ", time, " instead of ", chosen.nanoseconds);
        }
      }
    }
  }
}

constexpr int kClusters[cuda::kClusterSizes] = {264, 128, 60, 28};  // of an H100

TEST(DecodeTakesClusters) {
  // Eight KV heads: measured on an H100 to be faster, except for 256 tiles.
  for (const int64_t tiles : {16, 17, 32, 64, 128, 256, 512}) {
    const cuda::DecodeChoice chosen = Choose(tiles, 8, kClusters);
    CHECK(chosen.cluster && chosen.splits == 8, tiles, " tiles: ", chosen.splits,
          chosen.cluster ? " in a cluster" : "");
  }
  // With 16 heads of half the size, long rows are not.
  for (const int64_t tiles : {16, 128}) CHECK(Choose(tiles, 16, kClusters, 64).cluster, tiles);
  CHECK(!Choose(2048, 16, kClusters, 64).cluster);
  // One tile needs no other CTA.
  CHECK(Choose(1, 8, kClusters).splits == 1, Choose(1, 8, kClusters).splits);
}

TEST(DecodeTakesTheKernelThatIsAskedFor) {
  constexpr int kNone[cuda::kClusterSizes] = {};
  for (const int64_t tiles : {1, 16, 512, 2048}) {
    CHECK(!Choose(tiles, 8, kClusters, 128, 0).cluster, tiles);
    CHECK(Choose(tiles, 16, kClusters, 64, 1).cluster, tiles);
    CHECK(!Choose(tiles, 8, kNone, 128, 1).cluster, tiles);
    CHECK(Choose(tiles, 8, kClusters, 128, 2).cluster == Choose(tiles, 8, kClusters).cluster, tiles);
  }
}

TEST(DecodeTakesNoClustersThatTheDeviceLacks) {
  constexpr int kNone[cuda::kClusterSizes] = {}, kSmall[cuda::kClusterSizes] = {264, 128, 0, 0};
  for (int64_t tiles = 0; tiles < 300; tiles += 7) {
    for (const int64_t blocks : {1, 8, 32, 500}) {
      CHECK(!Choose(tiles, blocks, kNone).cluster, tiles, " tiles of ", blocks);
      const cuda::DecodeChoice chosen = Choose(tiles, blocks, kSmall);
      CHECK(!chosen.cluster || chosen.splits <= 2, tiles, " tiles of ", blocks);
      CHECK(chosen.splits >= 1, tiles, " tiles of ", blocks);
    }
  }
}

}  // namespace stof::test
