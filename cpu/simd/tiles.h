// SPDX-License-Identifier: Apache-2.0
// The tile registers of AMX as attention and GEMMs use them, where a source is compiled for them: with
// STOF_BF16_MATMULS factors are bf16 and sums fp32, with STOF_INT8_MATMULS the left factor is uint8, the right one int8
// and sums are int32. The configuration is of one thread: who configures tiles releases them before it returns to its
// caller.
#ifndef STOF_CPU_SIMD_TILES_H_
#define STOF_CPU_SIMD_TILES_H_

#include <cstdint>

#if defined(STOF_BF16_MATMULS) && (defined(__AMX_BF16__) || defined(STOF_EMULATED_TILES))
#define STOF_TILES
#define STOF_MULTIPLY_TILES(sum, left, right) _tile_dpbf16ps(sum, left, right)
#elif defined(STOF_INT8_MATMULS) && (defined(__AMX_INT8__) || defined(STOF_EMULATED_INT8_TILES))
#define STOF_TILES
#define STOF_MULTIPLY_TILES(sum, left, right) _tile_dpbusd(sum, left, right)
#endif
#if defined(STOF_TILES)
#include <immintrin.h>
#endif

namespace stof {
namespace cpu {
namespace {

#if defined(STOF_TILES)
constexpr bool kHasTiles = true;

// The tile registers. K is the axis that a product sums over; a register has 64 bytes of it.
//   0 to 3  sums    [16 rows, 16 columns] of 4 bytes
//   4       left    [16 rows, 64 bytes of K]
//   5       right   [16 groups of 4 bytes of K, 16 columns]
//   6, 7    as 4 and 5, with last_depth_bytes of K (ConfiguredTiles)
constexpr int kSumRows = 16, kSumColumns = 16;
#if defined(STOF_BF16_MATMULS)
constexpr int kTileDepth = 32;  // elements of K in 64 bytes
#else
constexpr int kTileDepth = 64;
#endif

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

// Adds the products of 16 rows and kBlock blocks of 16 columns over kTileDepth elements of K. Steps are bytes: between
// rows, groups of K, blocks.
template <int kBlock>
inline void AddTileProducts(const void* left, int64_t left_step, const void* right, int64_t right_step,
                            int64_t block_step) {
  const char* block = static_cast<const char*>(right);
  _tile_loadd(4, left, left_step);
  _tile_loadd(5, block, right_step);
  STOF_MULTIPLY_TILES(0, 4, 5);
  if constexpr (kBlock > 1) {
    _tile_loadd(5, block + block_step, right_step);
    STOF_MULTIPLY_TILES(1, 4, 5);
  }
  if constexpr (kBlock > 2) {
    _tile_loadd(5, block + 2 * block_step, right_step);
    STOF_MULTIPLY_TILES(2, 4, 5);
  }
  if constexpr (kBlock > 3) {
    _tile_loadd(5, block + 3 * block_step, right_step);
    STOF_MULTIPLY_TILES(3, 4, 5);
  }
}

// Likewise over last_depth_bytes of K.
template <int kBlock>
inline void AddLastTileProducts(const void* left, int64_t left_step, const void* right, int64_t right_step,
                                int64_t block_step) {
  const char* block = static_cast<const char*>(right);
  _tile_loadd(6, left, left_step);
  _tile_loadd(7, block, right_step);
  STOF_MULTIPLY_TILES(0, 6, 7);
  if constexpr (kBlock > 1) {
    _tile_loadd(7, block + block_step, right_step);
    STOF_MULTIPLY_TILES(1, 6, 7);
  }
  if constexpr (kBlock > 2) {
    _tile_loadd(7, block + 2 * block_step, right_step);
    STOF_MULTIPLY_TILES(2, 6, 7);
  }
  if constexpr (kBlock > 3) {
    _tile_loadd(7, block + 3 * block_step, right_step);
    STOF_MULTIPLY_TILES(3, 6, 7);
  }
}

// Adds the products of kRows blocks of 16 rows and kBlock blocks of 16 columns, each 1 or 2, over kTileDepth elements
// of K. Sums of row block i and column block j are in tile 2 i + j. Tiles 6 and 7 need all 64 bytes of K. A factor's
// block is 1 KiB that lies together, or on the left rows left_step bytes apart; its blocks are so many bytes apart.
template <int kRows, int kBlock>
inline void AddTileGrid(const void* left, int64_t left_block, const void* right, int64_t right_block,
                        int64_t left_step = 64) {
  const char *const a = static_cast<const char*>(left), *const b = static_cast<const char*>(right);
  _tile_loadd(4, a, left_step);
  _tile_loadd(6, b, 64);
  STOF_MULTIPLY_TILES(0, 4, 6);
  if constexpr (kBlock > 1) {
    _tile_loadd(7, b + right_block, 64);
    STOF_MULTIPLY_TILES(1, 4, 7);
  }
  if constexpr (kRows > 1) {
    _tile_loadd(5, a + left_block, left_step);
    STOF_MULTIPLY_TILES(2, 5, 6);
    if constexpr (kBlock > 1) STOF_MULTIPLY_TILES(3, 5, 7);
  }
}

template <int kBlock>
inline void StoreSumTiles(void* to, int64_t step, int64_t block_step) {
  char* const block = static_cast<char*>(to);
  _tile_stored(0, block, step);
  if constexpr (kBlock > 1) _tile_stored(1, block + block_step, step);
  if constexpr (kBlock > 2) _tile_stored(2, block + 2 * block_step, step);
  if constexpr (kBlock > 3) _tile_stored(3, block + 3 * block_step, step);
}

// Loads sums that AddTileGrid adds to. step: bytes between rows.
template <int kRows, int kBlock>
inline void LoadTileGrid(const float* from, int64_t step) {
  const char* const at = reinterpret_cast<const char*>(from);
  _tile_loadd(0, at, step);
  if constexpr (kBlock > 1) _tile_loadd(1, at + 4 * kSumColumns, step);
  if constexpr (kRows > 1) _tile_loadd(2, at + kSumRows * step, step);
  if constexpr (kRows > 1 && kBlock > 1) _tile_loadd(3, at + kSumRows * step + 4 * kSumColumns, step);
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

// Bytes of K in a tile register.
constexpr int kHalfDepthBytes = 32, kWholeDepthBytes = 64;

// Tiles are configured as long as it lives. Without tiles it does nothing.
class ConfiguredTiles {
 public:
  // last_depth_bytes: of K in tiles 6 and 7, a multiple of 4.
  explicit ConfiguredTiles([[maybe_unused]] int last_depth_bytes = kHalfDepthBytes) {
#if defined(STOF_TILES)
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 0, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 0};
    } config;
    static_assert(sizeof(config) == 64);
    config.row_bytes[6] = static_cast<uint16_t>(last_depth_bytes);
    config.rows[7] = static_cast<uint8_t>(last_depth_bytes / 4);
    STOF_STORE_FOR_TILES();
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
