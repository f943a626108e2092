// SPDX-License-Identifier: Apache-2.0
// The key tiles that some rows visit, and the bits of the keys that they may attend.
#ifndef STOF_CPU_QUANTIZED_ATTENTION_TILES_H_
#define STOF_CPU_QUANTIZED_ATTENTION_TILES_H_

#include <cstdint>
#include <cstring>

#include "cpu/quantized_attention/scratch.h"

namespace stof {
namespace cpu {
namespace {

// The rows of a tile row of a query head.
struct TileRows {
  int64_t b = 0, h = 0, g = 0, row = 0, first = 0, count = 0;
};

inline TileRows RowsOfItem(const QuantizedProblem& p, int64_t item) {
  const AttentionShape& shape = p.args->attention.shape;
  TileRows rows;
  rows.row = item % p.tile_rows;
  rows.h = item / p.tile_rows % shape.H;
  rows.b = item / p.tile_rows / shape.H;
  rows.g = rows.h / (shape.H / shape.G);
  rows.first = rows.row * p.m;
  rows.count = Min(p.m, shape.S - rows.first);
  return rows;
}

// Lists tiles into a scratch: those of the mask, or all of them.
class KeyTileList {
 public:
  KeyTileList(const QuantizedProblem& p, const TileRows& rows, const RowScratch& s) : p_(p), rows_(rows), s_(s) {}

  // Returns how many tiles the rows visit.
  int64_t OfMask() {
    const MaskArgs& mask = p_.args->attention.mask;
    const QuantizedBlocks& blocks = p_.blocks;
    if (blocks.row_ptr == nullptr) {
      for (int64_t tile = 0; tile < p_.key_tiles; ++tile) Add(tile, nullptr, mask.fixed.elements(), mask.dynamic, true);
      return visited_;
    }
    const int64_t b = blocks.layout_b == 1 ? 0 : rows_.b, h = blocks.layout_h == 1 ? 0 : rows_.h;
    const int64_t row = int64_t{blocks.layout[b * blocks.layout_h + h]} * blocks.rows + rows_.row;
    for (int64_t i = blocks.row_ptr[row]; i < blocks.row_ptr[row + 1]; ++i) {
      const bool is_full = i >= blocks.full_begin[row], has_bits = !is_full && blocks.bits_id[i] >= 0;
      const uint32_t* const bits =
          has_bits ? blocks.bits + int64_t{blocks.bits_id[i]} * p_.m * (kTileKeys / 32) : nullptr;
      Add(blocks.key_tile[i], bits, is_full || has_bits ? nullptr : mask.fixed.elements(), mask.dynamic, true);
    }
    return visited_;
  }

  // All keys that exist, for the rows of `rows` alone, a bit for each.
  int64_t OfAll(uint64_t rows) {
    for (int64_t tile = 0; tile < p_.key_tiles; ++tile) {
      const uint64_t existing = Existing(tile);
      uint64_t* const allowed = s_.allowed + visited_ * s_.padded_m;
      for (int64_t i = 0; i < s_.padded_m; ++i) allowed[i] = (rows >> i & 1) != 0 ? existing : 0;
      s_.tiles[visited_++] = static_cast<int32_t>(tile);
    }
    return visited_;
  }

 private:
  uint64_t Existing(int64_t tile) const {
    const int64_t left = p_.args->attention.shape.T - tile * kTileKeys;
    return left >= kTileKeys ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
  }
  // Clears what a conjunct forbids; false where it forbids the tile.
  bool Apply(const DynamicMask* mask, int64_t tile, uint64_t* allowed) const {
    if (mask == nullptr) return true;
    const int found = mask->tile(mask->self, rows_.b, rows_.h, rows_.first, tile * kTileKeys, p_.m, kTileKeys, s_.bits);
    if (found == 1) And(s_.bits, allowed);
    return found != 0;
  }
  void And(const uint32_t* bits, uint64_t* allowed) const {
    for (int64_t i = 0; i < rows_.count; ++i) allowed[i] &= bits[2 * i] | uint64_t{bits[2 * i + 1]} << 32;
  }
  void Add(int64_t tile, const uint32_t* bits, const DynamicMask* first, const DynamicMask* second, bool has_pad) {
    uint64_t existing = Existing(tile);
    if (has_pad && p_.key_bits != nullptr) existing &= p_.key_bits[rows_.b * p_.key_tiles + tile];
    if (existing == 0) return;
    uint64_t* const allowed = s_.allowed + visited_ * s_.padded_m;
    for (int64_t i = 0; i < s_.padded_m; ++i) allowed[i] = i < rows_.count ? existing : 0;
    if (bits != nullptr) And(bits, allowed);
    if (!Apply(first, tile, allowed) || !Apply(second, tile, allowed)) return;
    uint64_t any = 0;
    for (int64_t i = 0; i < rows_.count; ++i) any |= allowed[i];
    if (any != 0) s_.tiles[visited_++] = static_cast<int32_t>(tile);
  }

  const QuantizedProblem& p_;
  const TileRows& rows_;
  const RowScratch& s_;
  int64_t visited_ = 0;
};

// The keys of a tile that one of Int8::kRows rows may attend.
inline uint64_t KeysOfStrip(const uint64_t* allowed) {
  uint64_t any = 0;
  for (int r = 0; r < Int8::kRows; ++r) any |= allowed[r];
  return any;
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_QUANTIZED_ATTENTION_TILES_H_
