// SPDX-License-Identifier: Apache-2.0
// The tile registers of AMX as attention and GEMMs use them, where a source is compiled for them. The configuration is
// of one thread: who configures tiles releases them before it returns to its caller.
#ifndef STOF_CPU_SIMD_TILES_H_
#define STOF_CPU_SIMD_TILES_H_

#include <cstdint>

#if defined(STOF_BF16_MATMULS) && (defined(__AMX_BF16__) || defined(STOF_EMULATED_TILES))
#define STOF_TILES
#include <immintrin.h>
#endif

namespace stof {
namespace cpu {
namespace {

#if defined(STOF_TILES)
constexpr bool kHasTiles = true;

// Tiles 0 to 3: sums, 16 rows of 16 floats. 4 and 5: factors, 16 rows of 32 bf16. 6 and 7: factors of half the depth,
// 16 rows of 16 bf16 and 8 rows of 16 pairs; with LastTiles::kWholeDepth factors like 4 and 5.
constexpr int kSumRows = 16, kSumColumns = 16, kTileDepth = 32;

// The intrinsics of some compilers do not say that they read memory: what was stored before must be there.
#define STOF_STORE_FOR_TILES() __asm__ volatile("" ::: "memory")

// Numbers of tiles are parts of the intrinsics' names: they cannot be parameters.
template <int kBlock>
inline void ZeroSumTiles() {
  static_assert(kBlock >= 1 && kBlock <= 4);
  _tile_zero(0);
  if constexpr (kBlock > 1) _tile_zero(1);
  if constexpr (kBlock > 2) _tile_zero(2);
  if constexpr (kBlock > 3) _tile_zero(3);
}

// Adds the products of 16 rows and kBlock blocks of 16 columns over a depth of 32. Steps are bytes: between rows, rows
// of pairs, blocks.
template <int kBlock>
inline void AddTileProducts(const void* left, int64_t left_step, const void* right, int64_t right_step,
                            int64_t block_step) {
  const char* block = static_cast<const char*>(right);
  _tile_loadd(4, left, left_step);
  _tile_loadd(5, block, right_step);
  _tile_dpbf16ps(0, 4, 5);
  if constexpr (kBlock > 1) {
    _tile_loadd(5, block + block_step, right_step);
    _tile_dpbf16ps(1, 4, 5);
  }
  if constexpr (kBlock > 2) {
    _tile_loadd(5, block + 2 * block_step, right_step);
    _tile_dpbf16ps(2, 4, 5);
  }
  if constexpr (kBlock > 3) {
    _tile_loadd(5, block + 3 * block_step, right_step);
    _tile_dpbf16ps(3, 4, 5);
  }
}

// Likewise over a depth of 16.
template <int kBlock>
inline void AddHalfTileProducts(const void* left, int64_t left_step, const void* right, int64_t right_step,
                                int64_t block_step) {
  const char* block = static_cast<const char*>(right);
  _tile_loadd(6, left, left_step);
  _tile_loadd(7, block, right_step);
  _tile_dpbf16ps(0, 6, 7);
  if constexpr (kBlock > 1) {
    _tile_loadd(7, block + block_step, right_step);
    _tile_dpbf16ps(1, 6, 7);
  }
  if constexpr (kBlock > 2) {
    _tile_loadd(7, block + 2 * block_step, right_step);
    _tile_dpbf16ps(2, 6, 7);
  }
  if constexpr (kBlock > 3) {
    _tile_loadd(7, block + 3 * block_step, right_step);
    _tile_dpbf16ps(3, 6, 7);
  }
}

// Adds the products of kRows blocks of 16 rows and kBlock blocks of 16 columns, each 1 or 2, over a depth of 32: sums
// of row block i and column block j are in tile 2 i + j. A factor's block is 1 KiB that lies together; its blocks are
// so many bytes apart.
template <int kRows, int kBlock>
inline void AddTileGrid(const void* left, int64_t left_block, const void* right, int64_t right_block) {
  const char *const a = static_cast<const char*>(left), *const b = static_cast<const char*>(right);
  _tile_loadd(4, a, 64);
  _tile_loadd(6, b, 64);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kBlock > 1) {
    _tile_loadd(7, b + right_block, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (kRows > 1) {
    _tile_loadd(5, a + left_block, 64);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kBlock > 1) _tile_dpbf16ps(3, 5, 7);
  }
}

template <int kBlock>
inline void StoreSumTiles(float* to, int64_t step, int64_t block_step) {
  char* const block = reinterpret_cast<char*>(to);
  _tile_stored(0, block, step);
  if constexpr (kBlock > 1) _tile_stored(1, block + block_step, step);
  if constexpr (kBlock > 2) _tile_stored(2, block + 2 * block_step, step);
  if constexpr (kBlock > 3) _tile_stored(3, block + 3 * block_step, step);
}

// Stores what AddTileGrid has summed. step: bytes between rows.
template <int kRows, int kBlock>
inline void StoreTileGrid(float* to, int64_t step) {
  char* const at = reinterpret_cast<char*>(to);
  _tile_stored(0, at, step);
  if constexpr (kBlock > 1) _tile_stored(1, at + 4 * kSumColumns, step);
  if constexpr (kRows > 1) _tile_stored(2, at + kSumRows * step, step);
  if constexpr (kRows > 1 && kBlock > 1) _tile_stored(3, at + kSumRows * step + 4 * kSumColumns, step);
}
#else
constexpr bool kHasTiles = false;
#endif

// What tiles 6 and 7 are.
enum class LastTiles { kHalfDepth, kWholeDepth };

// Tiles are configured as long as it lives. Without tiles it does nothing.
class ConfiguredTiles {
 public:
  explicit ConfiguredTiles([[maybe_unused]] LastTiles last = LastTiles::kHalfDepth) {
#if defined(STOF_TILES)
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 32, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
    } config;
    static_assert(sizeof(config) == 64);
    if (last == LastTiles::kWholeDepth) config.row_bytes[6] = 64, config.rows[7] = 16;
    _tile_loadconfig(&config);
#endif
  }
  ~ConfiguredTiles() {
#if defined(STOF_TILES)
    _tile_release();
#endif
  }
  ConfiguredTiles(const ConfiguredTiles&) = delete;
  ConfiguredTiles& operator=(const ConfiguredTiles&) = delete;
};

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_TILES_H_
