// SPDX-License-Identifier: Apache-2.0
// Relative tables: the relative terms that they add to scores, and rows that weights multiply.
// docs/design/attention-cpu.md has the algorithm.
#ifndef STOF_CPU_ATTENTION_RELATIVE_H_
#define STOF_CPU_ATTENTION_RELATIVE_H_

#include <cstdint>

#include "cpu/attention/attention_worker.h"
#include "cpu/attention/scores.h"

namespace stof {
namespace cpu {
namespace {

// ---- packing, once a call ----
// Row `row` of the table of one head, counted as RelativeRows does.
inline const char* TableRow(const RelativeTable& table, int64_t head, int64_t row) {
  const int64_t at = table.index.is_reversed ? table.rows - 1 - row : row;
  return static_cast<const char*>(table.data) + SizeOf(table.dtype) * (head * table.stride_h + at * table.columns);
}

// Packs kPanel rows of a table as its kind has them. data, row_bias: of the head. floats: scratch for the rows in fp32.
inline void PackTablePanel(const AttentionProblem& problem, const PackedTable& packed, int64_t head, int64_t panel,
                           float* data, float* row_bias, float* floats) {
  const RelativeTable& table = *packed.table;
  const int64_t first = packed.first + panel * kPanel, count = Min(kPanel, table.rows - first);
  const int64_t size = packed.is_value ? problem.args->shape.Dv : problem.args->shape.D;
  const int64_t ld = RoundUp(packed.ld, kPanel);
  const float scale = problem.args->scores.scale;
  if (packed.RowBiasStride() > 0) {
    float* const to = row_bias + panel * kPanel;
    for (int64_t j = 0; j < kPanel; ++j) {
      to[j] = j < count ? scale * ToFloat(TableRow(table, head, first + j), table.dtype, size) : 0.0f;
    }
  }
  const bool is_float = table.dtype == DType::kF32;
  const float* from = reinterpret_cast<const float*>(TableRow(table, head, first));
  int64_t stride = table.index.is_reversed ? -table.columns : table.columns;
  if (!is_float) {
    for (int64_t j = 0; j < count; ++j) ToFloats(TableRow(table, head, first + j), table.dtype, size, floats + j * ld);
    from = floats, stride = ld;
  }
  float* to = data;
  if (packed.is_panels) return PackPanel(from, stride, count, size, to + panel * kPanel * size);
  to += panel * kPanel * packed.ld;
  const float factor = packed.is_value ? 1.0f : scale;
  const V vector = Simd::Set1(factor);
  for (int64_t j = 0; j < kPanel; ++j, to += packed.ld) {
    int64_t d = 0;
    for (; j < count && d + kWidth <= size; d += kWidth) {
      Simd::Store(to + d, Simd::Mul(vector, Simd::Load(from + j * stride + d)));
    }
    for (; d < packed.ld; ++d) to[d] = j < count && d < size ? factor * from[j * stride + d] : 0.0f;
  }
}

// ---- the products of queries ----
template <bool kInPlace>
void AttentionWorker<kInPlace>::BeginRelative() {
  const RelativeTables& relative = *problem_.relative;
  const int64_t strips = (rows_ + kRows - 1) / kRows;
  for (int term = 0; term < 2; ++term) {
    for (int64_t i = 0; i < strips * relative.key[term].capacity; ++i) scratch_.panels_of[term][i] = -1;
  }
  PackOwnTables();
  const int64_t head = b_ * args_.shape.H + h_;
  if (!relative.query.keeps_products || *scratch_.kept_of == head) return;
  *scratch_.kept_of = head;
  for (int64_t i = 0; i < 2 * CountKeyBlocks(problem_); ++i) scratch_.kept_rows[i] = 0;
}

template <bool kInPlace>
void AttentionWorker<kInPlace>::PackOwnTables() const {
  if (*scratch_.tables_of == h_) return;
  *scratch_.tables_of = h_;
  const RelativeTables& relative = *problem_.relative;
  const PackedTable* const all[] = {&relative.key[0], &relative.key[1], &relative.query, &relative.value};
  for (int i = 0; i < 4; ++i) {
    for (int64_t panel = 0; all[i]->is_own && panel < all[i]->rows / kPanel; ++panel) {
      PackTablePanel(problem_, *all[i], h_, panel, scratch_.own_tables[i], scratch_.own_row_bias[i],
                     scratch_.table_rows);
    }
  }
}

// The packed table of the head: its rows, and their row biases or nullptr.
template <bool kInPlace>
inline typename AttentionWorker<kInPlace>::HeadTable AttentionWorker<kInPlace>::TableOfHead(const PackedTable& table,
                                                                                            int number) const {
  if (table.is_own) {
    return {scratch_.own_tables[number], table.RowBiasStride() > 0 ? scratch_.own_row_bias[number] : nullptr};
  }
  const int64_t head = table.heads == 1 ? 0 : h_;
  return {table.data + head * table.stride_h,
          table.row_bias == nullptr ? nullptr : table.row_bias + head * table.RowBiasStride()};
}

// Scores of up to six rows with `panels` panels, as many as a block has at most.
template <bool kInPlace>
inline void AttentionWorker<kInPlace>::PanelScores(int rows, const float* q, int64_t ldq, const float* keys, int panels,
                                                   const float* start, float* s, int64_t lds) const {
  const int64_t size = args_.shape.D, stride = size * kPanel;
  if constexpr (kBlockPanels == 1) {
    for (int c = 0; c < kPanel; c += kVectors * kWidth) {
      StripScores<kVectors>(rows, q, ldq, size, keys + c, stride, start, s + c, lds);
    }
  } else {
    if (panels == 4) StripScores<4>(rows, q, ldq, size, keys, stride, start, s, lds);
    if (panels == 3) StripScores<3>(rows, q, ldq, size, keys, stride, start, s, lds);
    if (panels == 2) StripScores<2>(rows, q, ldq, size, keys, stride, start, s, lds);
    if (panels == 1) StripScores<1>(rows, q, ldq, size, keys, stride, start, s, lds);
  }
}

// Has the ring of a strip hold the products with panels [first, last) of a table. A strip keeps them for later key
// tiles: neighbours share most of their rows.
template <bool kInPlace>
void AttentionWorker<kInPlace>::FillRing(int term, int row, int64_t first, int64_t last) const {
  const PackedTable& table = problem_.relative->key[term];
  const HeadTable packed = TableOfHead(table, term);
  const int64_t ld = RingStride(table);
  int32_t* const tags = scratch_.panels_of[term] + row / kRows * table.capacity;
  float* const ring = scratch_.products[term] + row * ld;
  const int rows = static_cast<int>(Min(kRows, rows_ - row));
  for (int64_t p = first; p < last;) {
    const int64_t slot = p & (table.capacity - 1);
    int run = 0;  // panels that are missing, one behind the other
    while (run < kBlockPanels + 2 && p + run < last && slot + run < table.capacity && tags[slot + run] != p + run)
      ++run;
    if (run == 0) {
      ++p;
      continue;
    }
    // As in PackedScores: five panels are three and two.
    const int count =
        run == kBlockPanels + 1 && kBlockPanels > 2 ? kBlockPanels - 1 : static_cast<int>(Min(run, kBlockPanels));
    for (int i = 0; i < count; ++i) tags[slot + i] = static_cast<int32_t>(p + i);
    const int64_t at = p * kPanel - table.first;
    float* const to = ring + slot * kPanel;
    for (int r = 0; r < rows; r += kStrip) {
      PanelScores(rows - r, scratch_.q + (row + r) * scratch_.ldq, scratch_.ldq, packed.rows + at * args_.shape.D,
                  count, kNoStart, to + r * ld, ld);
    }
    const float* const row_bias = packed.row_bias == nullptr ? nullptr : packed.row_bias + at;
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < count * kPanel && row_bias != nullptr; c += kWidth) {
        Simd::Store(to + r * ld + c, Simd::Add(Simd::Load(to + r * ld + c), Simd::Load(row_bias + c)));
      }
      // Loads of neighbouring rows may begin in the last slot and end in the first one.
      for (int c = 0; c < kPanel && slot == 0; c += kWidth) {
        Simd::Store(to + r * ld + table.capacity * kPanel + c, Simd::Load(to + r * ld + c));
      }
    }
    p += count;
  }
}

// Distances j - i whose neighbours name equal or neighbouring rows: 16 keys in order name 16 rows at most.
template <bool kInPlace>
void AttentionWorker<kInPlace>::AddDistanceProducts(int term, const Strip& strip, float* s, int64_t key0) const {
  const PackedTable& table = problem_.relative->key[term];
  const RelativeRows& index = table.table->index;
  const int64_t ld = RingStride(table), mask = table.capacity * kPanel - 1;
  const int rows = static_cast<int>(Min(kRows, rows_ - strip.row));
  const int64_t query = index.QueryPart(query_position_ + row0_ + strip.row), key = key_position_ + key0;
  for (int i = 0; i < strip.run_count; ++i) {
    const int first = strip.runs[i].first, last = static_cast<int>(RoundUp(strip.runs[i].last, kPanel));
    const int32_t* const named = index.row + (key - query - index.low);  // of key 0 of the tile and the first query
    FillRing(term, strip.row, named[first - (rows - 1)] / kPanel, named[last - 1] / kPanel + 1);
    for (int r = 0; r < rows; ++r) {
      const float* const ring = scratch_.products[term] + (strip.row + r) * ld;
      float* const to = s + r * problem_.n;
      if (index.is_linear) {
        for (int c = first; c < last; c += kWidth) {
          const float* const from = ring + (named[c - r] & mask);
          Simd::Store(to + c, Simd::Add(Simd::Load(to + c), Simd::Load(from)));
        }
        continue;
      }
      for (int c = first; c < last; c += kWidth) {
        const int32_t* const at = named + c - r;
        Simd::Store(to + c, Simd::Add(Simd::Load(to + c), Simd::Pick(ring + (at[0] & mask), at, at[0])));
      }
    }
  }
}

// Any rows: look-ups one by one, except where a vector of keys names neighbouring rows for each query (grids).
template <bool kInPlace>
void AttentionWorker<kInPlace>::AddAnyProducts(int term, const Strip& strip, float* s, int64_t key0) const {
  const PackedTable& table = problem_.relative->key[term];
  const RelativeRows& index = table.table->index;
  const int64_t ld = RingStride(table), mask = table.capacity * kPanel - 1;
  const int rows = static_cast<int>(Min(kRows, rows_ - strip.row));
  const int32_t* const tags = scratch_.panels_of[term] + strip.row / kRows * table.capacity;
  const auto need = [&](int64_t low, int64_t high) {
    for (int64_t p = low / kPanel; p <= high / kPanel; ++p) {
      if (tags[p & (table.capacity - 1)] != p) FillRing(term, strip.row, p, p + 1);
    }
  };
  for (int i = 0; i < strip.run_count; ++i) {
    for (int c = strip.runs[i].first; c < strip.runs[i].last; c += kWidth) {
      int32_t part[kWidth], least = 0, span = 0;
      for (int l = 0; l < kWidth; ++l) {
        part[l] = static_cast<int32_t>(index.KeyPart(key_position_ + key0 + c + l));
        least = l == 0 || part[l] < least ? part[l] : least;
      }
      for (const int32_t one : part) span = one - least > span ? one - least : span;
      const bool is_vector = index.is_linear && span < kWidth;
      for (int r = 0; r < rows; ++r) {
        const int32_t* const named = index.row - index.low - index.QueryPart(query_position_ + row0_ + strip.row + r);
        const float* const ring = scratch_.products[term] + (strip.row + r) * ld;
        float* const to = s + r * problem_.n + c;
        if (is_vector) {
          need(named[least], named[least + span]);
          Simd::Store(to, Simd::Add(Simd::Load(to), Simd::Pick(ring + (named[least] & mask), part, least)));
          continue;
        }
        for (int l = 0; l < kWidth; ++l) {
          const int64_t row = named[part[l]];
          need(row, row);
          to[l] += ring[row & mask];
        }
      }
    }
  }
}

// ---- the products of keys ----
// Fills scratch_.key_terms with the products of the keys of a tile and the rows that each query of the row tile names.
template <bool kInPlace>
void AttentionWorker<kInPlace>::KeyProducts(int64_t key0, int keys, const Packed* packed) const {
  const PackedTable& table = problem_.relative->query;
  const RelativeRows& index = table.table->index;
  const bool is_distance = index.IsStepwiseByKey();
  // Each key of a block is multiplied with the rows of all its keys: two panels do where accumulators hold four, and
  // few queries take one.
  const int size = table.keeps_products || !is_distance ? kKeyBlock
                   : rows_ <= kPanel                    ? kPanel
                                                        : static_cast<int>(Min(kBlockPanels, 2)) * kPanel;
  for (int c = 0; c < keys; c += size) {
    // The rows of a block: those of strips that attend one of its keys.
    int first = -1, last = 0;
    for (int row = 0; row < rows_; row += kRows) {
      Strip strip;
      strip.row = row;
      FindPanels(keys, &strip);
      if ((strip.active >> (c / kPanel) & ((1u << size / kPanel) - 1u)) == 0) continue;
      if (first < 0) first = row;
      last = static_cast<int>(Min(row + kRows, rows_));
    }
    if (first < 0) continue;
    const int count = static_cast<int>(Min(size, RoundUp(keys, kPanel) - c));
    const Packed* const packed_block = packed + c / kPanel * PackedKeySize(args_.shape.D) * kPanel;
    const float* const block = AsFloats(packed_block, count / kPanel, args_.shape.D, scratch_.unpacked_keys);
    if (is_distance) {
      DistanceKeyProducts(first, last, key0 + c, count, block, scratch_.key_terms + c);
    } else {
      AnyKeyProducts(first, last, key0 + c, count, block, scratch_.key_terms + c);
    }
  }
}

// Products of rows [row, row + count) of the table and a block of packed keys. Also writes the rest of the last strip.
template <bool kInPlace>
void AttentionWorker<kInPlace>::RowProducts(int64_t row, int count, int keys, const float* packed, float* to) const {
  const PackedTable& table = problem_.relative->query;
  const HeadTable own = TableOfHead(table, 2);
  const int64_t at = row - table.first;
  const float* const rows = own.rows + at * table.ld;
  const float* const row_bias = own.row_bias == nullptr ? nullptr : own.row_bias + at;
  for (int r = 0; r < count; r += kStrip) {
    float start[kStrip] = {};
    for (int i = 0; i < kStrip && row_bias != nullptr; ++i) start[i] = row_bias[r + i];
    for (int p = 0; p < keys / kPanel; p += kBlockPanels) {
      PanelScores(count - r, rows + r * table.ld, table.ld, packed + p * args_.shape.D * kPanel,
                  static_cast<int>(Min(kBlockPanels, keys / kPanel - p)), start, to + r * kKeyBlock + p * kPanel,
                  kKeyBlock);
    }
  }
}

// Products of rows [first, last) and a block of keys, those of row `first` in front. Kept ones are extended.
template <bool kInPlace>
inline const float* AttentionWorker<kInPlace>::BlockProducts(int64_t first, int64_t last, int64_t key0, int keys,
                                                             const float* packed) const {
  const PackedTable& table = problem_.relative->query;
  if (!table.keeps_products) {
    RowProducts(first, static_cast<int>(last - first), keys, packed, scratch_.key_products);
    return scratch_.key_products;
  }
  // Blocks begin with each tile.
  const int64_t n = problem_.n, block = key0 / n * ((n + kKeyBlock - 1) / kKeyBlock) + key0 % n / kKeyBlock;
  float* const kept = scratch_.key_products + (block * table.KeptStride() - table.first) * kKeyBlock;
  int32_t* const range = scratch_.kept_rows + 2 * block;
  const auto extend = [&](int64_t begin, int64_t end) {
    if (begin < end) RowProducts(begin, static_cast<int>(end - begin), keys, packed, kept + begin * kKeyBlock);
  };
  if (range[0] == range[1]) range[0] = range[1] = static_cast<int32_t>(first);
  extend(first, range[0]);
  extend(range[1], last);
  range[0] = static_cast<int32_t>(Min(range[0], first)), range[1] = static_cast<int32_t>(Max(range[1], last));
  return kept + first * kKeyBlock;
}

// Lane l of the result: lane l of row (l / kUnit) % 4 of the four.
template <int kUnit, typename Row>
inline V PickLanes(const Row& row) {
  // Bit l of mask j: whether lane l is of row j.
  constexpr auto kMask = [](int j) {
    uint32_t bits = 0;
    for (int l = 0; l < kWidth; ++l) bits |= (l / kUnit % 4 == j ? 1u : 0u) << l;
    return bits;
  };
  constexpr uint32_t kMasks[] = {kMask(1), kMask(2), kMask(3)};
  V x = row(0);
  if constexpr (kMasks[0] != 0) x = Simd::Where(kMasks[0], row(1), x);
  if constexpr (kMasks[1] != 0) x = Simd::Where(kMasks[1], row(2), x);
  if constexpr (kMasks[2] != 0) x = Simd::Where(kMasks[2], row(3), x);
  return x;
}

// Writes `count` diagonals, `step` floats from each other: lane l of diagonal i is lane l of row at[i + l]. Rows are
// kKeyBlock floats. Four lanes are gathered for each row first, then four of these: six blends for 16 lanes. All that
// later diagonals need again stays in registers.
inline void StoreDiagonals(int count, const float* rows, const int32_t* at, float* to, int64_t step) {
  constexpr int kAhead = kWidth - 4;
  V row[4], gathered[kWidth];
  const auto load = [&](int i) { return Simd::Load(rows + at[i] * kKeyBlock); };
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) row[i] = load(i);
#pragma GCC unroll 16
  for (int i = 0; i < kAhead; ++i) {
    row[(i + 3) % 4] = load(i + 3);
    gathered[i] = PickLanes<1>([&](int j) { return row[(i + j) % 4]; });
  }
  for (at += kAhead + 3;; at += kWidth) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      if (count-- == 0) return;
      row[(i + kAhead + 3) % 4] = load(i);
      gathered[(i + kAhead) % kWidth] = PickLanes<1>([&](int j) { return row[(i + kAhead + j) % 4]; });
      Simd::Store(to, PickLanes<4>([&](int j) { return gathered[(i + 4 * j) % kWidth]; }));
      to += step;
    }
  }
}

// A query reads the diagonal of the products: those of key c with the row of distance c - r.
template <bool kInPlace>
void AttentionWorker<kInPlace>::DistanceKeyProducts(int first, int last, int64_t key0, int keys, const float* packed,
                                                    float* to) const {
  const RelativeRows& index = problem_.relative->query.table->index;
  // Of the least distance: the first key of the block and the last query.
  const int32_t* const named =
      index.row + (key_position_ + key0 - index.QueryPart(query_position_ + row0_) - index.low) - (last - 1);
  const int64_t low = named[0], high = named[keys + last - first - 2];
  const float* const block = BlockProducts(low, high + 1, key0, keys, packed) - low * kKeyBlock;
  for (int c = 0; c < keys; c += kWidth) {
    StoreDiagonals(last - first, block + c, named + c, to + (last - 1) * int64_t{problem_.n} + c, -problem_.n);
  }
}

// Rows one by one; groups of four are computed together and kept while they last.
template <bool kInPlace>
void AttentionWorker<kInPlace>::AnyKeyProducts(int first, int last, int64_t key0, int keys, const float* packed,
                                               float* to) const {
  const RelativeRows& index = problem_.relative->query.table->index;
  for (int i = 0; i < kKeyGroups; ++i) scratch_.key_tags[i] = -1;
  for (int r = first; r < last; ++r) {
    const int32_t* const named = index.row - index.low - index.QueryPart(query_position_ + row0_ + r);
    for (int c = 0; c < keys; ++c) {
      const int32_t row = named[index.KeyPart(key_position_ + key0 + c)], group = row / kGroupRows;
      const int slot = group % kKeyGroups;
      float* const products = scratch_.key_products + slot * kGroupRows * kKeyBlock;
      if (scratch_.key_tags[slot] != group) {
        scratch_.key_tags[slot] = group;
        RowProducts(group * int64_t{kGroupRows}, kGroupRows, keys, packed, products);
      }
      to[r * problem_.n + c] = products[row % kGroupRows * kKeyBlock + c];
    }
  }
}

template <bool kInPlace>
void AttentionWorker<kInPlace>::AddRelativeProducts(const Strip& strip, float* s, int64_t key0) const {
  const RelativeTables& relative = *problem_.relative;
  for (int term = 0; term < 2; ++term) {
    const RelativeTable* const table = relative.key[term].table;
    if (table == nullptr) continue;
    if (table->index.IsStepwiseByKey()) {
      AddDistanceProducts(term, strip, s, key0);
    } else {
      AddAnyProducts(term, strip, s, key0);
    }
  }
  if (relative.query.table == nullptr) return;
  const int rows = static_cast<int>(Min(kRows, rows_ - strip.row));
  for (int r = 0; r < rows; ++r) {
    const float* const terms = scratch_.key_terms + (strip.row + r) * problem_.n;
    ForEachVector(strip, s + r * problem_.n, [&](float* at, int column) {
      Simd::Store(at, Simd::Add(Simd::Load(at), Simd::Load(terms + column)));
    });
  }
}

// ---- rows that weights multiply ----
// Adds the weights of a strip to the sum of their rows: w[query][row of the table].
template <bool kInPlace>
void AttentionWorker<kInPlace>::AddRowWeights(const Strip& strip, const float* p, int64_t key0) const {
  const PackedTable& table = problem_.relative->value;
  const RelativeRows& index = table.table->index;
  const bool is_distance = index.IsStepwiseByKey();
  const int rows = static_cast<int>(Min(kRows, rows_ - strip.row));
  for (int r = 0; r < rows; ++r) {
    float* const w = scratch_.row_weights + (strip.row + r) * table.WeightStride() - table.first;
    const int64_t query = index.QueryPart(query_position_ + row0_ + strip.row + r);
    const int32_t* const named = index.row - index.low - query;
    for (int i = 0; i < strip.run_count; ++i) {
      for (int c = strip.runs[i].first; c < strip.runs[i].last; c += kWidth) {
        const float* const weight = p + r * problem_.n + c;
        const int64_t key = key_position_ + key0 + c;
        if (is_distance) {
          const int32_t low = named[key], high = named[key + kWidth - 1];
          if (high - low == kWidth - 1) {
            Simd::Store(w + low, Simd::Add(Simd::Load(w + low), Simd::Load(weight)));
            continue;
          }
          if (high == low) {
            w[low] += Simd::ReduceAdd(Simd::Load(weight));
            continue;
          }
        }
        for (int l = 0; l < kWidth; ++l) w[named[index.KeyPart(key + l)]] += weight[l];
      }
    }
  }
}

// Adds the rows times the sums of their weights to row r of the output. A row without weight is not read: it may hold
// NaN.
template <bool kInPlace>
void AttentionWorker<kInPlace>::AddRowValues(int r, float* to) const {
  const PackedTable& table = problem_.relative->value;
  const float* const w = scratch_.row_weights + r * table.WeightStride();
  const float* values = TableOfHead(table, 3).rows;
  for (int64_t i = 0; i < table.rows; ++i, values += table.ld) {
    if (w[i] == 0.0f) continue;
    const V weight = Simd::Set1(w[i]);
    for (int64_t d = 0; d < table.ld; d += kWidth) {
      Simd::Store(to + d, Simd::Fma(weight, Simd::Load(values + d), Simd::Load(to + d)));
    }
  }
}

// The mean of all values and of the rows that query r names for their keys.
template <bool kInPlace>
const float* AttentionWorker<kInPlace>::AddMeanRowValues(int r) const {
  const PackedTable& table = problem_.relative->value;
  const RelativeRows& index = table.table->index;
  float* const w = scratch_.row_weights + r * table.WeightStride();
  for (int64_t i = 0; i < table.rows; ++i) w[i] = 0.0f;
  const int32_t* const named = index.row - index.low - index.QueryPart(query_position_ + row0_ + QueryOf(r));
  for (int64_t k = 0; k < key_end_; ++k) w[named[index.KeyPart(key_position_ + k)] - table.first] += 1.0f;
  for (int64_t i = 0; i < table.rows; ++i) w[i] /= static_cast<float>(key_end_);
  for (int64_t d = 0; d < scratch_.ldo; ++d) scratch_.row[d] = d < args_.shape.Dv ? scratch_.mean[d] : 0.0f;
  AddRowValues(r, scratch_.row);
  return scratch_.row;
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_RELATIVE_H_
