// SPDX-License-Identifier: Apache-2.0
// Interval arithmetic decides whole boxes of tiles at once (a quad-tree descent); only undecided single tiles are
// evaluated element by element.
#include "plugins/core/mask/block_mask_builder.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "plugins/core/base/integers.h"
#include "plugins/core/host/hash.h"
#include "plugins/core/mask/expr_eval.h"

namespace stof {
namespace {

constexpr int32_t kFull = -1;   // as bits_id
constexpr int32_t kEmpty = -2;  // only in remembered_
constexpr int32_t kLeft = -3;   // partial, without bits
constexpr int64_t kMostSignatureBytes = int64_t{16} << 20;
constexpr int64_t kNodeBytes = 64;       // of an entry of a hash table, about
constexpr int64_t kBoxOperations = 8;    // a node of an expression over a box, in nodes over one element
constexpr int64_t kMostUnplaced = 4096;  // tiles that are evaluated after the element masks have filled their bytes

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
  Builder(const MaskExpr& expr, const ExprSizes& sizes, int m, int n, const BlockMaskBounds& bounds, BlockMask* mask)
      : sizes_(sizes),
        evaluator_(expr, sizes, std::vector<ExprBinding>(expr.operands().size())),
        bounds_(bounds),
        mask_(*mask),
        nodes_(static_cast<int64_t>(expr.nodes().size())),
        m_(m),
        n_(n),
        columns_(CeilDiv(sizes.T, n)),
        words_(static_cast<size_t>(m) * static_cast<size_t>(n) / 32),
        tile_(words_),
        rows_(static_cast<size_t>(mask->rows)) {}

  // Whether the mask has outgrown its bounds, so that the build is in vain.
  bool IsTooLarge() const {
    if (!bounds_.leaves_tiles && (operations_ > bounds_.operations || unplaced_ > 0)) return true;
    const auto listed = static_cast<int64_t>(mask_.key_tile.size()) + entries_;
    const auto rows = static_cast<int64_t>(mask_.full_begin.size()) + mask_.rows;
    const auto fixed =
        static_cast<int64_t>(mask_.layout.size() * sizeof(int32_t) + mask_.bits.size() * sizeof(uint32_t));
    return fixed + 8 * (listed + rows) > bounds_.bytes;
  }

  // The table of one (b, h), appended unless an equal one is there already; returns its number.
  int32_t Table(int64_t b, int64_t h) {
    const bool whole_left = operations_ > bounds_.operations;
    if (whole_left && left_table_ >= 0) return left_table_;
    b_ = b;
    h_ = h;
    entries_ = 0;
    operations_ += mask_.rows;
    for (auto& row : rows_) row.clear();
    Descend(0, mask_.rows, 0, columns_);
    if (IsTooLarge()) return 0;
    const int32_t table = AddTable();
    if (whole_left) left_table_ = table;
    return table;
  }

 private:
  // Appends the table in rows_ unless an equal one exists; its number.
  int32_t AddTable() {
    uint64_t hash = 0;
    for (const auto& row : rows_) hash = HashBytes(row.data(), row.size() * sizeof(Entry), hash);
    const auto [begin, end] = tables_.equal_range(hash);
    const auto found = std::find_if(begin, end, [this](const auto& known) { return Equal(known.second); });
    if (found != end) return found->second;
    const auto table = static_cast<int32_t>(tables_.size());
    tables_.emplace(hash, table);
    for (const auto& row : rows_) {
      Append(row, false);
      mask_.full_begin.push_back(static_cast<int32_t>(mask_.key_tile.size()));
      Append(row, true);
      mask_.row_ptr.push_back(static_cast<int32_t>(mask_.key_tile.size()));
    }
    return table;
  }

  static int32_t StoredBits(int32_t bits_id) { return std::max(bits_id, -1); }

  void Append(const std::vector<Entry>& row, bool full) {
    for (const Entry& entry : row) {
      if ((entry.bits_id == kFull) != full) continue;
      mask_.key_tile.push_back(entry.key_tile);
      mask_.bits_id.push_back(StoredBits(entry.bits_id));
      if (entry.bits_id == kLeft) ++mask_.left;
    }
  }

  bool Equal(int32_t table) const {
    for (size_t r = 0; r < rows_.size(); ++r) {
      const size_t at = static_cast<size_t>(table) * rows_.size() + r;
      auto partial = static_cast<size_t>(mask_.row_ptr[at]);
      auto full = static_cast<size_t>(mask_.full_begin[at]);
      if (static_cast<size_t>(mask_.row_ptr[at + 1]) - partial != rows_[r].size()) return false;
      for (const Entry& entry : rows_[r]) {
        const bool is_full = entry.bits_id == kFull;
        size_t& next = is_full ? full : partial;
        if (next == static_cast<size_t>(is_full ? mask_.row_ptr[at + 1] : mask_.full_begin[at])) return false;
        if (mask_.key_tile[next] != entry.key_tile || mask_.bits_id[next] != StoredBits(entry.bits_id)) return false;
        ++next;
      }
    }
    return true;
  }

  // Tile rows [r0, r1) × tile columns [c0, c1). Depth is at most log2 of the tiles along each side. Visits the columns
  // of each row in ascending order.
  void Descend(int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
    if (r0 >= r1 || c0 >= c1 || IsTooLarge()) return;
    if (operations_ > bounds_.operations) return EmitAll(r0, r1, c0, c1, kLeft);
    const int64_t q_end = std::min(r1 * m_, sizes_.S);
    const int64_t k_end = std::min(c1 * n_, sizes_.T);
    operations_ += kBoxOperations * nodes_;
    const Verdict verdict =
        evaluator_.Classify({b_, b_, h_, h_, sizes_.P + r0 * m_, sizes_.P + q_end - 1, c0 * n_, k_end - 1});
    if (verdict == Verdict::kNone) return;
    if (verdict == Verdict::kAll) return AllowAll(r0, r1, c0, c1);
    if (r1 - r0 == 1 && c1 - c0 == 1) return Emit(r0, c0, EvaluateUndecided(r0, c0));
    const int64_t rm = r1 - r0 > 1 ? (r0 + r1) / 2 : r1;
    const int64_t cm = c1 - c0 > 1 ? (c0 + c1) / 2 : c1;
    Descend(r0, rm, c0, cm);
    Descend(r0, rm, cm, c1);
    Descend(rm, r1, c0, cm);
    Descend(rm, r1, cm, c1);
  }

  void AllowAll(int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
    if (c1 * n_ <= sizes_.T) return EmitAll(r0, r1, c0, c1, kFull);
    for (int64_t r = r0; r < r1 && !IsTooLarge(); ++r) {  // the last column of tiles reaches beyond T: partial
      EmitAll(r, r + 1, c0, c1 - 1, kFull);
      Emit(r, c1 - 1, Evaluate(r, c1 - 1));
    }
  }

  // Evaluates a single tile, the box of the last Classify. Tiles of one signature are evaluated once.
  int32_t EvaluateUndecided(int64_t r, int64_t c) {
    if ((r + 1) * m_ > sizes_.S || (c + 1) * n_ > sizes_.T) return Evaluate(r, c);
    evaluator_.Signature(&signature_);
    const auto found = remembered_.find(signature_);
    if (found != remembered_.end()) return found->second;
    const int32_t bits_id = Evaluate(r, c);
    signature_bytes_ += kNodeBytes + static_cast<int64_t>(signature_.size() * sizeof(int64_t));
    if (signature_bytes_ <= kMostSignatureBytes) remembered_.emplace(signature_, bits_id);
    return bits_id;
  }

  void EmitAll(int64_t r0, int64_t r1, int64_t c0, int64_t c1, int32_t bits_id) {
    entries_ += (r1 - r0) * (c1 - c0);
    operations_ += (r1 - r0) * (c1 - c0);
    if (IsTooLarge()) return;
    for (int64_t r = r0; r < r1; ++r) {
      for (int64_t c = c0; c < c1; ++c) rows_[static_cast<size_t>(r)].push_back({static_cast<int32_t>(c), bits_id});
    }
  }
  void Emit(int64_t r, int64_t c, int32_t bits_id) {
    if (bits_id != kEmpty) EmitAll(r, r + 1, c, c + 1, bits_id);
  }

  int32_t Evaluate(int64_t r, int64_t c) {
    if (unplaced_ >= kMostUnplaced || operations_ > bounds_.operations) return kLeft;
    const int64_t rows = std::min<int64_t>(m_, sizes_.S - r * m_);
    const int64_t keys = std::min<int64_t>(n_, sizes_.T - c * n_);
    operations_ += rows * keys * nodes_;
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
    const auto count = static_cast<int64_t>(bits_.size());
    if ((count + 1) * (static_cast<int64_t>(words_ * sizeof(uint32_t)) + kNodeBytes) > bounds_.element_bytes) {
      ++unplaced_;
      return kLeft;
    }
    mask_.bits.insert(mask_.bits.end(), tile_.begin(), tile_.end());
    bits_.emplace(hash, static_cast<int32_t>(count));
    return static_cast<int32_t>(count);
  }

  ExprSizes sizes_;
  ExprEvaluator evaluator_;
  const BlockMaskBounds& bounds_;
  BlockMask& mask_;
  int64_t nodes_;
  int64_t m_;
  int64_t n_;
  int64_t columns_;
  size_t words_;  // of a bit tile
  std::vector<uint32_t> tile_;
  std::vector<std::vector<Entry>> rows_;
  std::vector<int64_t> signature_;
  std::unordered_map<std::vector<int64_t>, int32_t, WordsHash> remembered_;
  int64_t signature_bytes_ = 0;
  std::unordered_multimap<uint64_t, int32_t> bits_;    // bit tiles by hash
  std::unordered_multimap<uint64_t, int32_t> tables_;  // row tables by hash
  int64_t entries_ = 0;                                // in rows_
  int64_t operations_ = 0;
  int64_t unplaced_ = 0;     // evaluated tiles whose element masks found no room
  int32_t left_table_ = -1;  // the table of which every tile is left
  int64_t b_ = 0;
  int64_t h_ = 0;
};

std::string InMebibytes(double bytes) { return std::to_string(static_cast<int64_t>(bytes / (1 << 20)) + 1) + " MiB"; }

Status TooLarge(const BlockMask& mask, const BlockMaskBounds& bounds) {
  const double tables = static_cast<double>(mask.layout_b) * mask.layout_h;
  const double pairs = static_cast<double>(mask.S) * static_cast<double>(mask.T) * tables;
  std::string text =
      "the block mask of S = " + std::to_string(mask.S) + " queries and T = " + std::to_string(mask.T) + " keys";
  if (tables > 1)
    text += ", up to " + std::to_string(int64_t{mask.layout_b} * mask.layout_h) + " times for batches and heads,";
  return Status::TooLarge(
      text + " would take up to " + InMebibytes(pairs / 8 + 8 * pairs / mask.m / mask.n) + " in tiles of " +
      std::to_string(mask.m) + " × " + std::to_string(mask.n) + ", expected at most " +
      InMebibytes(static_cast<double>(bounds.bytes) - 1) +
      " and few tiles that have to be evaluated one by one: shorten S or T, or choose a mask that is"
      " more regular");
}

}  // namespace

Status BuildBlockMask(const MaskExpr& expr, const ExprSizes& sizes, int m, int n, BlockMask* mask,
                      const BlockMaskBounds& bounds) {
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
  mask->rows = static_cast<int32_t>(CeilDiv(sizes.S, m));
  mask->layout_b = expr.Uses(ExprOp::kB) ? static_cast<int32_t>(sizes.B) : 1;
  mask->layout_h = expr.Uses(ExprOp::kH) ? static_cast<int32_t>(sizes.H) : 1;
  const auto most = static_cast<double>(bounds.bytes) / 4;
  if (static_cast<double>(mask->layout_b) * mask->layout_h > most || mask->rows > most) return TooLarge(*mask, bounds);
  mask->row_ptr.push_back(0);
  Builder builder(expr, sizes, m, n, bounds, mask);
  for (int64_t b = 0; b < mask->layout_b; ++b) {
    for (int64_t h = 0; h < mask->layout_h; ++h) {
      mask->layout.push_back(builder.Table(b, h));
      if (builder.IsTooLarge()) return TooLarge(*mask, bounds);
    }
  }
  mask->key_tile.shrink_to_fit();
  mask->bits_id.shrink_to_fit();
  mask->bits.shrink_to_fit();
  return Status();
}

}  // namespace stof
