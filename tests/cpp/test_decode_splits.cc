// SPDX-License-Identifier: Apache-2.0
// Into how many parts the keys of a few queries are cut.
#include "cuda/attention_decode.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

constexpr int kMultiprocessors = 132;

int Splits(int64_t tiles, int64_t blocks, int ctas = 3, int size = 128) {
  cuda::DecodeKernel kernel;
  kernel.ctas = ctas;
  cuda::AttentionParams params;
  params.D = params.Dv = size;
  return cuda::ChooseSplits(kernel, params, 2, tiles, blocks, kMultiprocessors);
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

}  // namespace stof::test
