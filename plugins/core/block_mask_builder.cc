// SPDX-License-Identifier: Apache-2.0
// Interval arithmetic decides whole boxes of tiles at once (a quad-tree descent); only undecided single tiles are
// evaluated element by element.
#include "plugins/core/block_mask_builder.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "plugins/core/expr_eval.h"
#include "plugins/core/hash.h"

namespace stof {
namespace {

constexpr int32_t kFull = -1;                       // as bits_id
constexpr int32_t kEmpty = -2;                      // only in what is remembered
constexpr int64_t kMostEntries = int64_t{1} << 25;  // half a gibibyte while it is built
constexpr size_t kMostRemembered = 1 << 16;         // tiles by signature

struct Entry {
  int32_t key_tile;
  int32_t bits_id;
};

struct WordsHash {
  size_t operator()(const std::vector<int64_t>& words) const {
    return HashBytes(words.data(), words.size() * sizeof(int64_t), 0);
  }
};

class Builder {
 public:
  Builder(const MaskExpr& expr, const ExprSizes& sizes, int m, int n, BlockMask* mask)
      : sizes_(sizes),
        evaluator_(expr, sizes, std::vector<ExprBinding>(expr.operands().size())),
        mask_(*mask),
        m_(m),
        n_(n),
        words_(static_cast<size_t>(m) * static_cast<size_t>(n) / 32),
        tile_(words_),
        rows_(static_cast<size_t>(mask->rows)) {}

  bool TooMany() const { return entries_ > kMostEntries; }

  // The table of one (b, h), appended unless an equal one is there already; returns its number.
  int32_t Table(int64_t b, int64_t h) {
    b_ = b;
    h_ = h;
    for (auto& row : rows_) row.clear();
    Descend(0, mask_.rows, 0, (sizes_.T + n_ - 1) / n_);
    uint64_t hash = 0;
    for (const auto& row : rows_) hash = HashBytes(row.data(), row.size() * sizeof(Entry), hash);
    const auto [begin, end] = tables_.equal_range(hash);
    const auto found = std::find_if(begin, end, [this](const auto& known) { return Equal(known.second); });
    if (found != end) return found->second;
    const auto table = static_cast<int32_t>(tables_.size());
    entries_ += mask_.rows;  // its pointers take memory as tiles do
    if (TooMany()) return 0;
    tables_.emplace(hash, table);
    for (const auto& row : rows_) {
      Append(row, false);
      mask_.full_begin.push_back(static_cast<int32_t>(mask_.key_tile.size()));
      Append(row, true);
      mask_.row_ptr.push_back(static_cast<int32_t>(mask_.key_tile.size()));
    }
    return table;
  }

 private:
  void Append(const std::vector<Entry>& row, bool full) {
    for (const Entry& entry : row) {
      if ((entry.bits_id == kFull) != full) continue;
      mask_.key_tile.push_back(entry.key_tile);
      mask_.bits_id.push_back(entry.bits_id);
    }
  }

  bool Equal(int32_t table) const {
    for (size_t r = 0; r < rows_.size(); ++r) {
      const size_t at = static_cast<size_t>(table) * rows_.size() + r;
      auto partial = static_cast<size_t>(mask_.row_ptr[at]);
      auto full = static_cast<size_t>(mask_.full_begin[at]);
      if (static_cast<size_t>(mask_.row_ptr[at + 1]) - partial != rows_[r].size()) return false;
      for (const Entry& entry : rows_[r]) {
        size_t& next = entry.bits_id == kFull ? full : partial;
        if (next == mask_.key_tile.size()) return false;
        if (mask_.key_tile[next] != entry.key_tile || mask_.bits_id[next] != entry.bits_id) return false;
        ++next;
      }
    }
    return true;
  }

  // Tile rows [r0, r1) × tile columns [c0, c1). Depth is at most log2 of the tiles along each side. Visits the columns
  // of each row in ascending order.
  void Descend(int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
    if (r0 >= r1 || c0 >= c1 || TooMany()) return;
    const int64_t q_end = std::min(r1 * m_, sizes_.S);
    const int64_t k_end = std::min(c1 * n_, sizes_.T);
    const Verdict verdict =
        evaluator_.Classify({b_, b_, h_, h_, sizes_.P + r0 * m_, sizes_.P + q_end - 1, c0 * n_, k_end - 1});
    if (verdict == Verdict::kNone) return;
    if (verdict == Verdict::kAll) return AllowAll(r0, r1, c0, c1);
    if (r1 - r0 == 1 && c1 - c0 == 1) {
      ++entries_;
      return Undecided(r0, c0);
    }
    const int64_t rm = r1 - r0 > 1 ? (r0 + r1) / 2 : r1;
    const int64_t cm = c1 - c0 > 1 ? (c0 + c1) / 2 : c1;
    Descend(r0, rm, c0, cm);
    Descend(r0, rm, cm, c1);
    Descend(rm, r1, c0, cm);
    Descend(rm, r1, cm, c1);
  }

  void AllowAll(int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
    entries_ += (r1 - r0) * (c1 - c0);
    if (TooMany()) return;
    const bool ragged = c1 * n_ > sizes_.T;  // the last column of tiles reaches beyond T: partial
    for (int64_t r = r0; r < r1; ++r) {
      for (int64_t c = c0; c < c1 - (ragged ? 1 : 0); ++c) Emit(r, c, kFull);
      if (ragged) Emit(r, c1 - 1, Evaluate(r, c1 - 1));
    }
  }

  // A single tile, of which Classify has just been asked. Tiles of one signature are evaluated once.
  void Undecided(int64_t r, int64_t c) {
    if ((r + 1) * m_ > sizes_.S || (c + 1) * n_ > sizes_.T) return Emit(r, c, Evaluate(r, c));
    evaluator_.Signature(&signature_);
    const auto found = remembered_.find(signature_);
    if (found != remembered_.end()) return Emit(r, c, found->second);
    const int32_t bits_id = Evaluate(r, c);
    if (remembered_.size() < kMostRemembered) remembered_.emplace(signature_, bits_id);
    Emit(r, c, bits_id);
  }

  void Emit(int64_t r, int64_t c, int32_t bits_id) {
    if (bits_id != kEmpty) rows_[static_cast<size_t>(r)].push_back({static_cast<int32_t>(c), bits_id});
  }

  int32_t Evaluate(int64_t r, int64_t c) {
    const int64_t rows = std::min<int64_t>(m_, sizes_.S - r * m_);
    const int64_t keys = std::min<int64_t>(n_, sizes_.T - c * n_);
    std::fill(tile_.begin(), tile_.end(), 0u);
    const int64_t ones = evaluator_.Tile(b_, h_, sizes_.P + r * m_, c * n_, rows, keys, n_ / 32, tile_.data());
    if (ones == 0) return kEmpty;
    if (ones == rows * n_) return kFull;
    const uint64_t hash = HashBytes(tile_.data(), words_ * sizeof(uint32_t), 0);
    const auto [begin, end] = bits_.equal_range(hash);
    for (auto it = begin; it != end; ++it) {
      const uint32_t* known = &mask_.bits[static_cast<size_t>(it->second) * words_];
      if (std::memcmp(known, tile_.data(), words_ * sizeof(uint32_t)) == 0) return it->second;
    }
    const auto id = static_cast<int32_t>(mask_.bits.size() / words_);
    mask_.bits.insert(mask_.bits.end(), tile_.begin(), tile_.end());
    bits_.emplace(hash, id);
    return id;
  }

  ExprSizes sizes_;
  ExprEvaluator evaluator_;
  BlockMask& mask_;
  int64_t m_;
  int64_t n_;
  size_t words_;  // of a bit tile
  std::vector<uint32_t> tile_;
  std::vector<std::vector<Entry>> rows_;
  std::vector<int64_t> signature_;
  std::unordered_map<std::vector<int64_t>, int32_t, WordsHash> remembered_;
  std::unordered_multimap<uint64_t, int32_t> bits_;    // bit tiles by hash
  std::unordered_multimap<uint64_t, int32_t> tables_;  // row tables by hash
  int64_t entries_ = 0;
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
  std::vector<ExprBinding> none(expr.operands().size());
  STOF_RETURN_IF_ERROR(expr.Check(sizes, &none));
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
      if (builder.TooMany())
        return Status::Error("more than 2^25 tiles in a block mask: S × T is too large for this mask");
    }
  }
  return Status();
}

}  // namespace stof
