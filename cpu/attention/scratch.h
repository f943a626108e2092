// SPDX-License-Identifier: Apache-2.0
// The memory of one worker of the attention kernel, and what is copied or packed into it.
#ifndef STOF_CPU_ATTENTION_SCRATCH_H_
#define STOF_CPU_ATTENTION_SCRATCH_H_

#include <cstddef>
#include <cstdint>

#include "cpu/attention/attention.h"
#include "cpu/attention/packed_type.h"
#include "cpu/attention/red_zone.h"
#include "cpu/attention/register_block.h"
#include "cpu/simd/quantized.h"

namespace stof {
namespace cpu {
namespace {

constexpr float kInf = __builtin_inff();
// Groups of rows of a relative table whose products with keys are kept where rows are named in any order.
constexpr int kGroupRows = 4, kKeyGroups = 64;

// The memory of one worker.
struct Scratch {
  // base: nullptr asks for the size alone.
  Scratch(const AttentionProblem& problem, void* base)
      : is_sized_alone_(base == nullptr), bytes_(static_cast<char*>(base)) {
    const AttentionArgs& args = *problem.args;
    const int64_t rows = RoundUp(problem.m * problem.packed_heads, problem.in_place ? kInPlaceStrip : kStripRows);
    const int64_t words = problem.n / 32;
    ldq = RoundUp(args.shape.D, kPanel);
    ldo = RoundUp(args.shape.Dv, kPanel);
    mean_of = Take<int64_t>(1);
    ring_of = Take<int64_t>(problem.ring_tiles);
    ring = Take<Packed>(problem.ring_tiles * problem.n * PackedKeySize(args.shape.D));
    ring_values = Take<Packed>(problem.pack_values ? problem.ring_tiles * problem.n * ldo : 0);
    q = Take<float>(rows * ldq);
    o = Take<float>(rows * ldo);
    s = Take<float>((problem.in_place ? kInPlaceStrip : kStripsPerPass * kStripRows) * static_cast<int64_t>(problem.n));
    if (kRoundsToBf16) TakeRounded(problem, rows);
    max = Take<float>(rows);
    start = Take<float>(rows);
    top = Take<float>(args.scores.skip_threshold > 0.0f ? rows : 0);
    skip_counts = Take<uint64_t>(CountsPairs(problem) ? 2 : 0);
    sum = Take<float>(rows * kWidth);
    bias = Take<float>(problem.n);
    row = Take<float>(ldo);
    mean = Take<float>(ldo);
    empty = Take<uint8_t>(rows);
    words_combined = Take<uint32_t>(problem.m * words);
    words_dynamic = Take<uint32_t>(problem.m * words);
    words_tail = Take<uint32_t>(words);
    elements_of = Take<int64_t>(problem.element_slots);
    elements_kind = Take<uint8_t>(problem.element_slots);
    elements = Take<uint32_t>(problem.element_slots * problem.m * words);
    const DynamicMask* const elements_of_mask = args.mask.fixed.elements();
    has_runs = elements_of_mask != nullptr && elements_of_mask->runs != nullptr;
    runs = Take<KeyTileRun>(has_runs ? problem.key_tiles : 0);
    const bool is_float = KvType(args.shape) == DType::kF32;
    const bool is_converted_as_loaded = is_float || IsQuantized(KvType(args.shape));
    copy_values =
        problem.in_place && (!is_converted_as_loaded || args.shape.Dv % kWidth != 0 || problem.has_short_pages);
    copy_keys = problem.in_place && (!is_converted_as_loaded || args.shape.D % kWidth != 0 || problem.has_short_pages);
    values = Take<float>(copy_values ? problem.n * ldo : 0);
    keys = Take<float>(copy_keys ? problem.n * ldq : is_float ? 0 : kPanel * ldq);
    if (problem.chooses_blocks) TakePooled(problem);
    if (problem.relative != nullptr) TakeRelative(problem, rows);
    size = static_cast<size_t>(bytes_ - reinterpret_cast<char*>(base));
  }

  int64_t ldq, ldo;
  int64_t* mean_of;  // b * G + g of the values whose mean is in `mean`, or -1
  int64_t* ring_of;  // (b * G + g) * key_tiles + tile of the packed keys in a slot of the ring, or -1
  Packed *ring, *ring_values;
  float *q, *o, *s, *max, *start, *sum, *bias, *row, *mean, *values, *keys;
  float* top;             // with a skip threshold: the largest score of each row so far; `max` lags behind
  uint64_t* skip_counts;  // pairs that were scored, and skipped
  // Of matmuls in bf16.
  Bf16 *rounded_q = nullptr, *rounded_p = nullptr;  // queries, not times scale: [rows, PackedKeySize]; weights, as s
  Bf16* rounded_rows = nullptr;                     // rows of keys or values that are being packed
  float* converted_row = nullptr;
  float* unpacked_keys = nullptr;  // [D, kPanel] of each panel of a block of kKeyBlock keys
  // Of blocks that are chosen.
  float* pooled_queries = nullptr;  // [kPooledQueriesOfBlock, whole strips, ldq]
  float* pooling_rows = nullptr;    // [kPanel + 1, ldq]
  float* block_max =
      nullptr;  // [kPooledQueriesOfBlock, key_tiles], the largest estimate of a pooled query in a key block
  uint8_t* choices = nullptr;    // [key_tiles], BlockChoice of the blocks of a query block
  int64_t* chosen_of = nullptr;  // which query block that is, or -1, and how many of its key blocks are chosen
  uint8_t* empty;
  uint32_t *words_combined, *words_dynamic, *words_tail;
  // Of tiles that StaticMask::elements gave: which one a slot holds, what it is, and its element mask.
  int64_t* elements_of;
  uint8_t* elements_kind;
  uint32_t* elements;
  KeyTileRun* runs;  // of the rows that are attended
  // Of relative tables.
  float* products[2] = {};        // products of queries: [rows, RingStride]
  int32_t* panels_of[2] = {};     // [strips, capacity], the panels that slots hold, or -1
  float* key_terms = nullptr;     // [rows, n], products of keys that the queries of a row tile name
  float* key_products = nullptr;  // [rows of the table, kKeyBlock]
  int32_t* kept_rows = nullptr;   // [key blocks, 2], the rows whose products are kept: from, to
  int64_t* kept_of = nullptr;     // b * H + h of those
  int32_t* key_tags = nullptr;    // [kKeyGroups]
  float* table_rows = nullptr;    // rows of a panel in fp32
  float* own_tables[4] = {};      // of PackedTable::is_own: keys' two, queries', values'
  float* own_row_bias[4] = {};
  int64_t* tables_of = nullptr;  // the head of those, or -1
  float* row_weights = nullptr;  // [rows, WeightStride], sums of the weights by the rows that they multiply
  bool copy_values, copy_keys, has_runs;
  size_t size;

 private:
  void TakeRounded(const AttentionProblem& problem, int64_t rows) {
    const AttentionShape& shape = problem.args->shape;
    const int64_t size = PackedKeySize(shape.D);
    rounded_q = Take<Bf16>(rows * size);
    rounded_p = Take<Bf16>(kStripsPerPass * kStripRows * static_cast<int64_t>(problem.n));
    rounded_rows = Take<Bf16>(Max(kPanel * size, 4 * ldo));
    converted_row = Take<float>(Max(ldq, ldo));
    const bool has_key_terms = problem.relative != nullptr && problem.relative->query.table != nullptr;
    unpacked_keys = Take<float>(has_key_terms ? kKeyBlock * shape.D : 0);
  }
  void TakePooled(const AttentionProblem& problem) {
    pooled_queries = Take<float>(RoundUp(kPooledQueriesOfBlock, kStrip) * ldq);
    pooling_rows = Take<float>((kPanel + 1) * ldq);
    block_max = Take<float>(kPooledQueriesOfBlock * problem.key_tiles);
    choices = Take<uint8_t>(problem.key_tiles);
    chosen_of = Take<int64_t>(2);
  }
  void TakeRelative(const AttentionProblem& problem, int64_t rows) {
    const RelativeTables& tables = *problem.relative;
    table_rows = Take<float>(kPanel * Max(ldq, ldo));
    tables_of = Take<int64_t>(1);
    const PackedTable* const all[] = {&tables.key[0], &tables.key[1], &tables.query, &tables.value};
    for (int i = 0; i < 4; ++i) {
      if (!all[i]->is_own) continue;
      own_tables[i] = Take<float>(all[i]->stride_h);
      own_row_bias[i] = Take<float>(all[i]->RowBiasStride());
    }
    for (int term = 0; term < 2; ++term) {
      const PackedTable& table = tables.key[term];
      if (table.table == nullptr) continue;
      products[term] = Take<float>(rows * (table.capacity + 1) * kPanel);
      panels_of[term] = Take<int32_t>(rows / kStripRows * table.capacity);
    }
    if (tables.query.table != nullptr) {
      key_terms = Take<float>(rows * problem.n);
      const int64_t some = Max(kKeyGroups * kGroupRows, rows + kKeyBlock + kStrip);
      const int64_t blocks = tables.query.keeps_products ? CountKeyBlocks(problem) : 0;
      key_products = Take<float>(Max(some, blocks * tables.query.KeptStride()) * kKeyBlock);
      kept_rows = Take<int32_t>(2 * blocks);
      kept_of = Take<int64_t>(1);
      key_tags = Take<int32_t>(kKeyGroups);
    }
    if (tables.value.table != nullptr) row_weights = Take<float>(rows * tables.value.WeightStride());
  }
  template <typename T>
  T* Take(int64_t count) {
    T* result = reinterpret_cast<T*>(bytes_);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    bytes_ += RoundUp(bytes, 64) + kRedZone;
    if (kRedZone > 0 && !is_sized_alone_) {
      char* const end = reinterpret_cast<char*>(result) + bytes;
      ForbidAccess(end, bytes_ - end);
    }
    return result;
  }
  const bool is_sized_alone_;
  char* bytes_;
};

// Bits of the first `count` keys of a tile.
inline void FillTailWords(int64_t count, int64_t words, uint32_t* bits) {
  for (int64_t w = 0; w < words; ++w) {
    const int64_t keys = count - 32 * w;
    bits[w] = keys >= 32 ? ~0u : keys <= 0 ? 0u : (1u << keys) - 1u;
  }
}

inline void CopyRows(const char* from, DType dtype, int64_t stride, int64_t rows, int64_t size, int64_t ld, float* to) {
  for (int64_t i = 0; i < rows; ++i) {
    KvToFloats(from + i * stride * SizeOf(dtype), dtype, size, to + i * ld);
    for (int64_t d = size; d < ld; ++d) to[i * ld + d] = 0.0f;
  }
}

// Rows of keys or values, one behind the other or in pages.
struct Rows {
  const char* data = nullptr;       // of the first row; with pages: of row 0 of the head on page 0
  int64_t stride = 0;               // between rows of a piece, in elements
  int64_t item_size = 0;            // bytes of an element
  const KeyPages* pages = nullptr;  // nullptr: all rows are one piece
  int64_t b = 0, first = 0;         // with pages: the sequence, and the position of the first row

  // The address of a row.
  const char* At(int64_t row) const {
    int64_t offset = row * stride;
    if (pages != nullptr) {
      const int64_t at = first + row, page = at >> pages->shift;
      offset = pages->table[b * pages->columns + page] * pages->stride + (at - (page << pages->shift)) * stride;
    }
    return data + item_size * offset;
  }
  // How many of `count` rows from `row` on lie one behind the other.
  int64_t PieceFrom(int64_t row, int64_t count) const {
    if (pages == nullptr) return count;
    const int64_t page = int64_t{1} << pages->shift;
    return Min(count, page - ((first + row) & (page - 1)));
  }
  // The rows without the first `count`.
  Rows From(int64_t count) const {
    Rows rest = *this;
    if (pages == nullptr) {
      rest.data = At(count);
    } else {
      rest.first += count;
    }
    return rest;
  }
};
// All rows of a key or value head. head: of row 0, with pages of that on page 0.
inline Rows RowsOfHead(const AttentionArgs& args, const char* head, int64_t stride, int64_t b) {
  return {head, stride, SizeOf(KvType(args.shape)), args.kv.pages.given() ? &args.kv.pages : nullptr, b};
}
// Rows of the keys, or of the values, of a tile of KV head g: gathered columns come first. head: of row 0 of that head.
inline Rows RowsOfTile(const AttentionProblem& problem, const char* head, int64_t stride, const char* columns,
                       int64_t size, int64_t b, int64_t g, int64_t tile) {
  const AttentionArgs& args = *problem.args;
  const int64_t item = SizeOf(KvType(args.shape)), n = problem.n;
  if (tile < problem.column_tiles) {
    return {columns + item * size * n * ((b * args.shape.G + g) * problem.column_tiles + tile), size, item};
  }
  return RowsOfHead(args, head, stride, b).From(n * (tile - problem.column_tiles));
}

inline void CopyRows(const Rows& from, DType dtype, int64_t rows, int64_t size, int64_t ld, float* to) {
  for (int64_t done = 0; done < rows;) {
    const int64_t count = from.PieceFrom(done, rows - done);
    CopyRows(from.At(done), dtype, from.stride, count, size, ld, to + done * ld);
    done += count;
  }
}

// Applies the scales of quantized keys of a KV head to a query or a key, or those of values to an output.
inline void ScaleRow(const KvScale& scale, int64_t g, int64_t size, float* row) {
  const float* const own = scale.data + g * scale.stride_g;
  for (int64_t d = 0; d < size; ++d) row[d] *= own[d * scale.stride_d];
}

// Packs one panel of `count` keys, which lies on one page.
inline void PackKeys(const Rows& from, int64_t count, const AttentionArgs& args, const Scratch& scratch, float* to) {
  const DType dtype = KvType(args.shape);
  if (dtype == DType::kF32) {
    PackPanel(reinterpret_cast<const float*>(from.At(0)), from.stride, count, args.shape.D, to);
  } else {
    CopyRows(from, dtype, count, args.shape.D, scratch.ldq, scratch.keys);
    PackPanel(scratch.keys, scratch.ldq, count, args.shape.D, to);
  }
}

// Values of `count` keys, as floats with rows of ldo.
inline void CopyValues(const Rows& from, int64_t count, const AttentionArgs& args, int64_t ldo, float* to) {
  CopyRows(from, KvType(args.shape), count, args.shape.Dv, ldo, to);
}
inline void PackValues(const Rows& from, int64_t count, const AttentionArgs& args, const Scratch& scratch, float* to) {
  CopyValues(from, count, args, scratch.ldo, to);
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_SCRATCH_H_
