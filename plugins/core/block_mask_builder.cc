// SPDX-License-Identifier: Apache-2.0
// Interval arithmetic decides whole boxes of tiles at once (a quad-tree descent); only undecided single tiles are
// evaluated element by element.
#include "plugins/core/block_mask_builder.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace stof {
namespace {

enum : uint8_t { kEmpty = 0, kFull = 1, kPartial = 2 };

struct Entry {
  int32_t key_tile;
  int32_t bits_id;  // -1: full
};

uint64_t HashWords(const uint32_t* words, size_t count) {
  uint64_t hash = 14695981039346656037ull;
  for (size_t i = 0; i < count; ++i) hash = (hash ^ words[i]) * 1099511628211ull;
  return hash;
}

class Builder {
 public:
  Builder(const MaskExpr& expr, const ExprSizes& sizes, int m, int n, BlockMask* mask)
      : sizes_(sizes),
        evaluator_(expr, sizes, std::vector<ExprBinding>(expr.operands().size())),
        mask_(*mask),
        m_(m),
        n_(n),
        words_(static_cast<size_t>(m) * n / 32),
        tile_(words_),
        rows_(static_cast<size_t>(mask->rows)) {}

  bool TooMany() const { return entries_ > kMostEntries; }

  // The table of one (b, h), appended unless an equal one is there already; returns its number.
  int32_t Table(int64_t b, int64_t h) {
    b_ = b;
    h_ = h;
    for (auto& row : rows_) row.clear();
    const int64_t columns = (sizes_.T + n_ - 1) / n_;
    Descend(0, mask_.rows, 0, columns);
    uint64_t hash = 0;
    for (auto& row : rows_) {
      std::sort(row.begin(), row.end(), [](const Entry& x, const Entry& y) {
        if ((x.bits_id < 0) != (y.bits_id < 0)) return y.bits_id < 0;  // partial ones first
        return x.key_tile < y.key_tile;
      });
      for (const Entry& entry : row) {
        hash = (hash ^ static_cast<uint32_t>(entry.key_tile)) * 1099511628211ull;
        hash = (hash ^ static_cast<uint32_t>(entry.bits_id)) * 1099511628211ull;
      }
      hash = (hash ^ 0xffffffffu) * 1099511628211ull;
    }
    for (auto [it, end] = tables_.equal_range(hash); it != end; ++it) {
      if (Equal(it->second)) return it->second;
    }
    const int32_t table = static_cast<int32_t>(tables_.size());
    tables_.emplace(hash, table);
    for (const auto& row : rows_) {
      const auto full = std::find_if(row.begin(), row.end(), [](const Entry& entry) { return entry.bits_id < 0; });
      mask_.full_begin.push_back(static_cast<int32_t>(mask_.key_tile.size() + (full - row.begin())));
      for (const Entry& entry : row) {
        mask_.key_tile.push_back(entry.key_tile);
        mask_.bits_id.push_back(entry.bits_id);
      }
      mask_.row_ptr.push_back(static_cast<int32_t>(mask_.key_tile.size()));
    }
    return table;
  }

 private:
  bool Equal(int32_t table) const {
    for (size_t r = 0; r < rows_.size(); ++r) {
      const size_t at = static_cast<size_t>(table) * rows_.size() + r;
      const size_t begin = static_cast<size_t>(mask_.row_ptr[at]);
      if (static_cast<size_t>(mask_.row_ptr[at + 1]) - begin != rows_[r].size()) return false;
      for (size_t i = 0; i < rows_[r].size(); ++i) {
        if (mask_.key_tile[begin + i] != rows_[r][i].key_tile || mask_.bits_id[begin + i] != rows_[r][i].bits_id) {
          return false;
        }
      }
    }
    return true;
  }

  // Tile rows [r0, r1) × tile columns [c0, c1). Depth is at most log2 of the tiles along each side.
  void Descend(int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
    if (r0 >= r1 || c0 >= c1 || TooMany()) return;
    const int64_t q_end = std::min(r1 * m_, sizes_.S);
    const int64_t k_end = std::min(c1 * n_, sizes_.T);
    const ExprBox box = {b_, b_, h_, h_, sizes_.P + r0 * m_, sizes_.P + q_end - 1, c0 * n_, k_end - 1};
    const Verdict verdict = evaluator_.Classify(box);
    if (verdict == Verdict::kNone) return;
    const bool single = r1 - r0 == 1 && c1 - c0 == 1;
    if (verdict == Verdict::kAll) {
      entries_ += (r1 - r0) * (c1 - c0);
      if (entries_ > kMostEntries) return;
      const bool ragged = c1 * n_ > sizes_.T;  // the last column of tiles reaches beyond T: partial
      for (int64_t r = r0; r < r1; ++r) {
        for (int64_t c = c0; c < c1 - (ragged ? 1 : 0); ++c) rows_[r].push_back({static_cast<int32_t>(c), -1});
      }
      for (int64_t r = r0; ragged && r < r1; ++r) Tile(r, c1 - 1);
      return;
    }
    if (single) {
      ++entries_;
      return Tile(r0, c0);
    }
    const int64_t rm = r1 - r0 > 1 ? (r0 + r1) / 2 : r1;
    const int64_t cm = c1 - c0 > 1 ? (c0 + c1) / 2 : c1;
    Descend(r0, rm, c0, cm);
    Descend(r0, rm, cm, c1);
    Descend(rm, r1, c0, cm);
    Descend(rm, r1, cm, c1);
  }

  void Tile(int64_t r, int64_t c) {
    const int64_t rows = std::min<int64_t>(m_, sizes_.S - r * m_);
    const int64_t keys = std::min<int64_t>(n_, sizes_.T - c * n_);
    std::fill(tile_.begin(), tile_.end(), 0u);
    int64_t allowed_count = 0;
    uint8_t allowed[ExprEvaluator::kRun];
    for (int64_t i = 0; i < rows; ++i) {
      uint32_t* words = &tile_[static_cast<size_t>(i) * (n_ / 32)];
      for (int64_t k = 0; k < keys; k += ExprEvaluator::kRun) {
        const int count = static_cast<int>(std::min<int64_t>(ExprEvaluator::kRun, keys - k));
        evaluator_.Row(b_, h_, sizes_.P + r * m_ + i, c * n_ + k, count, allowed);
        for (int j = 0; j < count; ++j) {
          words[(k + j) / 32] |= static_cast<uint32_t>(allowed[j]) << ((k + j) % 32);
          allowed_count += allowed[j];
        }
      }
    }
    if (allowed_count == 0) return;
    if (allowed_count == rows * n_) {
      rows_[r].push_back({static_cast<int32_t>(c), -1});
      return;
    }
    rows_[r].push_back({static_cast<int32_t>(c), Bits()});
  }

  int32_t Bits() {
    const uint64_t hash = HashWords(tile_.data(), words_);
    for (auto [it, end] = known_.equal_range(hash); it != end; ++it) {
      if (std::memcmp(&mask_.bits[it->second * words_], tile_.data(), words_ * 4) == 0) return it->second;
    }
    const int32_t id = static_cast<int32_t>(mask_.bits.size() / words_);
    mask_.bits.insert(mask_.bits.end(), tile_.begin(), tile_.end());
    known_.emplace(hash, id);
    return id;
  }

  static constexpr int64_t kMostEntries = int64_t{1} << 28;  // 2 GiB of entries
  int64_t entries_ = 0;
  ExprSizes sizes_;
  ExprEvaluator evaluator_;
  BlockMask& mask_;
  int64_t m_;
  int64_t n_;
  size_t words_;  // of a bit tile
  std::vector<uint32_t> tile_;
  std::vector<std::vector<Entry>> rows_;
  std::unordered_multimap<uint64_t, int32_t> known_;   // bit tiles by hash
  std::unordered_multimap<uint64_t, int32_t> tables_;  // row tables by hash
  int64_t b_ = 0;
  int64_t h_ = 0;
};

}  // namespace

Status BuildBlockMask(const MaskExpr& expr, const ExprSizes& sizes, int m, int n, BlockMask* mask) {
  if (m < 1 || m > 1024 || n < 32 || n > 1024 || n % 32 != 0) {
    return Status::Error("a tile of " + std::to_string(m) + " × " + std::to_string(n) +
                         ", expected at most 1024 × 1024 and a multiple of 32 keys");
  }
  if (expr.UsesRuntime()) return Status::Error("a block mask holds only what does not depend on run-time operands");
  STOF_RETURN_IF_ERROR(expr.Check(sizes, std::vector<ExprBinding>(expr.operands().size())));
  *mask = BlockMask();
  mask->S = sizes.S;
  mask->T = sizes.T;
  mask->P = sizes.P;
  mask->m = m;
  mask->n = n;
  mask->rows = static_cast<int32_t>((sizes.S + m - 1) / m);
  mask->layout_b = expr.Uses(ExprOp::kB) ? static_cast<int32_t>(sizes.B) : 1;
  mask->layout_h = expr.Uses(ExprOp::kH) ? static_cast<int32_t>(sizes.H) : 1;
  mask->row_ptr.push_back(0);
  Builder builder(expr, sizes, m, n, mask);
  for (int64_t b = 0; b < mask->layout_b; ++b) {
    for (int64_t h = 0; h < mask->layout_h; ++h) {
      mask->layout.push_back(builder.Table(b, h));
      if (builder.TooMany()) return Status::Error("more than 2^28 tiles in a block mask");
    }
  }
  return Status();
}

}  // namespace stof
