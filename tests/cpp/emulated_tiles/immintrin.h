// SPDX-License-Identifier: Apache-2.0
// Stands for the compiler's header where kernels for AMX are compiled for tests: its tile instructions are emulated, as
// Intel's manual defines them, on machines that have none. What a processor refuses ends the program. Other
// instructions are the machine's own.
#ifndef STOF_TESTS_CPP_EMULATED_TILES_IMMINTRIN_H_
#define STOF_TESTS_CPP_EMULATED_TILES_IMMINTRIN_H_

#if defined(__x86_64__)
#include_next <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace stof::test {
namespace {

struct EmulatedTiles {
  static constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;
  bool is_configured = false;
  int rows[kTiles] = {}, bytes[kTiles] = {};
  alignas(64) unsigned char data[kTiles][kMostRows][kMostBytes] = {};
};
inline EmulatedTiles& TilesOfThread() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

inline void ExpectOfTiles(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "emulated tiles: %s\n", what);
  std::abort();
}

inline void LoadTileConfig(const void* memory) {
  const auto* const from = static_cast<const unsigned char*>(memory);
  EmulatedTiles& tiles = TilesOfThread();
  ExpectOfTiles(!tiles.is_configured, "configured twice");
  ExpectOfTiles(from[0] == 1 && from[1] == 0, "palette 1 begins with row 0");
  for (int i = 2; i < 16; ++i) ExpectOfTiles(from[i] == 0, "reserved bytes are 0");
  tiles = EmulatedTiles();
  for (int t = 0; t < 16; ++t) {
    uint16_t bytes = 0;
    std::memcpy(&bytes, from + 16 + 2 * t, 2);
    if (t >= EmulatedTiles::kTiles) {
      ExpectOfTiles(bytes == 0 && from[48 + t] == 0, "there are 8 tiles");
      continue;
    }
    tiles.bytes[t] = bytes, tiles.rows[t] = from[48 + t];
    ExpectOfTiles(tiles.bytes[t] <= EmulatedTiles::kMostBytes && tiles.rows[t] <= EmulatedTiles::kMostRows,
                  "a tile has at most 16 rows of 64 bytes");
  }
  tiles.is_configured = true;
}
inline void ReleaseTiles() { TilesOfThread() = EmulatedTiles(); }

inline void ExpectTile(int tile) {
  const EmulatedTiles& tiles = TilesOfThread();
  ExpectOfTiles(tiles.is_configured && tile < EmulatedTiles::kTiles && tiles.rows[tile] > 0,
                "a tile is not configured");
}
inline void ZeroTile(int tile) {
  ExpectTile(tile);
  std::memset(TilesOfThread().data[tile], 0, sizeof TilesOfThread().data[tile]);
}
inline void LoadTile(int tile, const void* base, int64_t step) {
  ZeroTile(tile);
  EmulatedTiles& tiles = TilesOfThread();
  for (int r = 0; r < tiles.rows[tile]; ++r) {
    std::memcpy(tiles.data[tile][r], static_cast<const char*>(base) + r * step, static_cast<size_t>(tiles.bytes[tile]));
  }
}
inline void StoreTile(int tile, void* base, int64_t step) {
  ExpectTile(tile);
  const EmulatedTiles& tiles = TilesOfThread();
  for (int r = 0; r < tiles.rows[tile]; ++r) {
    std::memcpy(static_cast<char*>(base) + r * step, tiles.data[tile][r], static_cast<size_t>(tiles.bytes[tile]));
  }
}

// Subnormal numbers count as 0.
inline float FlushOfTiles(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0.0f : x; }
inline float Bf16OfTile(const unsigned char* at) {
  uint16_t half = 0;
  std::memcpy(&half, at, 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x = 0;
  std::memcpy(&x, &bits, 4);
  return FlushOfTiles(x);
}
inline void ExpectFactors(int sum, int left, int right) {
  ExpectTile(sum), ExpectTile(left), ExpectTile(right);
  const EmulatedTiles& tiles = TilesOfThread();
  ExpectOfTiles(sum != left && sum != right && left != right, "the tiles of a product differ");
  ExpectOfTiles(tiles.rows[sum] == tiles.rows[left] && tiles.bytes[sum] == tiles.bytes[right] &&
                    tiles.bytes[left] == 4 * tiles.rows[right],
                "the sizes of a product's tiles do not go together");
}
inline void MultiplyBf16Tiles(int sum, int left, int right) {
  ExpectFactors(sum, left, right);
  EmulatedTiles& tiles = TilesOfThread();
  for (int m = 0; m < tiles.rows[sum]; ++m) {
    for (int n = 0; n < tiles.bytes[sum] / 4; ++n) {
      float even = 0, odd = 0, total = 0;
      for (int k = 0; k < tiles.rows[right]; ++k) {
        const unsigned char* const a = tiles.data[left][m] + 4 * k;
        const unsigned char* const b = tiles.data[right][k] + 4 * n;
        even = FlushOfTiles(std::fma(Bf16OfTile(a), Bf16OfTile(b), even));
        odd = FlushOfTiles(std::fma(Bf16OfTile(a + 2), Bf16OfTile(b + 2), odd));
      }
      unsigned char* const to = tiles.data[sum][m] + 4 * n;
      std::memcpy(&total, to, 4);
      total = FlushOfTiles(FlushOfTiles(total) + FlushOfTiles(even + odd));
      std::memcpy(to, &total, 4);
    }
  }
}
// Of unsigned bytes on the left and signed ones on the right. Sums wrap around, as those of the processor.
inline void MultiplyByteTiles(int sum, int left, int right) {
  ExpectFactors(sum, left, right);
  EmulatedTiles& tiles = TilesOfThread();
  for (int m = 0; m < tiles.rows[sum]; ++m) {
    uint32_t totals[EmulatedTiles::kMostBytes / 4];
    std::memcpy(totals, tiles.data[sum][m], sizeof totals);
    for (int k = 0; k < tiles.rows[right]; ++k) {
      const unsigned char* const a = tiles.data[left][m] + 4 * k;
      int8_t b[EmulatedTiles::kMostBytes];
      std::memcpy(b, tiles.data[right][k], sizeof b);
      for (int n = 0; n < tiles.bytes[sum] / 4; ++n) {
        const int32_t four = a[0] * b[4 * n] + a[1] * b[4 * n + 1] + a[2] * b[4 * n + 2] + a[3] * b[4 * n + 3];
        totals[n] += static_cast<uint32_t>(four);
      }
    }
    std::memcpy(tiles.data[sum][m], totals, static_cast<size_t>(tiles.bytes[sum]));
  }
}

}  // namespace
}  // namespace stof::test

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadconfig(memory) ::stof::test::LoadTileConfig(memory)
#define _tile_release() ::stof::test::ReleaseTiles()
#define _tile_zero(tile) ::stof::test::ZeroTile(tile)
#define _tile_loadd(tile, base, step) ::stof::test::LoadTile(tile, base, step)
#define _tile_stored(tile, base, step) ::stof::test::StoreTile(tile, base, step)
#define _tile_dpbf16ps(sum, left, right) ::stof::test::MultiplyBf16Tiles(sum, left, right)
#define _tile_dpbusd(sum, left, right) ::stof::test::MultiplyByteTiles(sum, left, right)

#endif  // STOF_TESTS_CPP_EMULATED_TILES_IMMINTRIN_H_
