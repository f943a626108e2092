// SPDX-License-Identifier: Apache-2.0
// Into how many parts the keys of a few queries are cut.
#include "cuda/attention/decode/api.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

constexpr int kMultiprocessors = 132;

int Splits(int64_t tiles, int64_t blocks, int ctas = 3, int size = 128) {
  cuda::DecodeKernel kernel;
  kernel.ctas = ctas;
  cuda::AttentionParams params;
  params.D = params.Dv = size;
  return cuda::ChooseSplits(kernel, params, 2, tiles, blocks, kMultiprocessors).splits;
}

cuda::DecodeChoice Choose(int64_t tiles, int64_t blocks, const int (&clusters)[cuda::kClusterSizes], int size = 128,
                          int only = -1) {
  cuda::DecodeKernel kernel;
  kernel.ctas = size == 128 ? 3 : 4;
  cuda::AttentionParams params;
  params.D = params.Dv = size;
  return cuda::ChooseDecode(kernel, params, 2, tiles, blocks, kMultiprocessors, 2, clusters, only);
}

}  // namespace

TEST(DecodeSplitsLeaveAlonePartsThatFillTheDevice) {
  CHECK(Splits(2048, 396) == 1, Splits(2048, 396));
  CHECK(Splits(2048, 3960) == 1, Splits(2048, 3960));
}

TEST(DecodeSplitsLeaveShortRowsAlone) {
  // Joining costs more than a handful of tiles.
  CHECK(Splits(1, 8) == 1, Splits(1, 8));
  CHECK(Splits(2, 8) == 1, Splits(2, 8));
  CHECK(Splits(0, 8) == 1, Splits(0, 8));
}

TEST(DecodeSplitsFillTheDeviceWithLongRows) {
  for (const int64_t blocks : {2, 8, 16, 40, 100}) {
    for (const int64_t tiles : {2048, 16384}) {
      const int64_t splits = Splits(tiles, blocks), ctas = splits * blocks, slots = 3 * kMultiprocessors;
      const auto where = [&] { return Text(blocks, " blocks of ", tiles, " tiles: ", splits); };
      CHECK(splits <= cuda::kMostSplits && splits <= tiles, where());
      // At least a third of the places are taken, or as many as there may be, and the last round is no short one.
      CHECK(3 * ctas >= slots || splits == cuda::kMostSplits, where());
      const int64_t rounds = (ctas + slots - 1) / slots;
      CHECK(4 * ctas >= 3 * rounds * slots || rounds == 1, where());
    }
  }
}

TEST(DecodeSplitsNeverExceedTheTiles) {
  for (int64_t tiles = 1; tiles < 64; ++tiles) CHECK(Splits(tiles, 1) <= tiles, tiles);
}

constexpr int kClusters[cuda::kClusterSizes] = {264, 128, 60, 28};  // of an H100

TEST(DecodeTakesClusters) {
  // Eight heads of keys: what was measured on an H100 to be faster, but for 256 tiles.
  for (const int64_t tiles : {16, 17, 32, 64, 128, 256, 512}) {
    const cuda::DecodeChoice chosen = Choose(tiles, 8, kClusters);
    CHECK(chosen.cluster && chosen.splits == 8, tiles, " tiles: ", chosen.splits,
          chosen.cluster ? " in a cluster" : "");
  }
  // Of 16 heads of half the size the long ones are not.
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
