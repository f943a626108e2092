// SPDX-License-Identifier: Apache-2.0
// Block masks against the definition of their expression, and the cache under concurrent use.
#include <algorithm>
#include <atomic>
#include <thread>

#include "plugins/core/mask/block_mask_builder.h"
#include "plugins/core/mask/block_mask_cache.h"
#include "tests/cpp/mask/random_expr.h"

namespace stof::test {
namespace {

// Rules that hold for every block mask, whatever the expression.
void CheckStructure(const BlockMask& mask, const std::string& where) {
  const auto size = [](const auto& v) { return static_cast<int64_t>(v.size()); };
  const int64_t tables = *std::max_element(mask.layout.begin(), mask.layout.end()) + 1;
  const int64_t columns = (mask.T + mask.n - 1) / mask.n;
  CHECK(mask.rows == (mask.S + mask.m - 1) / mask.m, where);
  CHECK(size(mask.layout) == int64_t{mask.layout_b} * mask.layout_h, where);
  CHECK(size(mask.full_begin) == tables * mask.rows && size(mask.row_ptr) == tables * mask.rows + 1, where);
  CHECK(size(mask.key_tile) == mask.row_ptr.back() && size(mask.bits_id) == mask.row_ptr.back(), where);
  const int64_t words = int64_t{mask.m} * mask.n / 32;
  CHECK(size(mask.bits) % words == 0, where);
  for (size_t r = 0; r < mask.full_begin.size(); ++r) {
    for (int32_t e = mask.row_ptr[r]; e < mask.row_ptr[r + 1]; ++e) {
      const auto at = static_cast<size_t>(e);
      const bool full = e >= mask.full_begin[r];
      const bool first = e == (full ? mask.full_begin[r] : mask.row_ptr[r]);
      CHECK(mask.key_tile[at] >= 0 && mask.key_tile[at] < columns, where);
      CHECK(first || mask.key_tile[at - 1] < mask.key_tile[at], where, ": not ascending");
      CHECK(full ? mask.bits_id[at] == -1 : mask.bits_id[at] >= 0 && mask.bits_id[at] < size(mask.bits) / words, where);
      CHECK(!full || (mask.key_tile[at] + 1) * int64_t{mask.n} <= mask.T, where, ": a full tile beyond T");
    }
  }
}

void CheckStructureOfLists(const BlockMask& mask) {
  for (size_t r = 0; r < mask.full_begin.size(); ++r) {
    CHECK(mask.row_ptr[r] <= mask.full_begin[r] && mask.full_begin[r] <= mask.row_ptr[r + 1], r);
    for (int32_t e = mask.row_ptr[r] + 1; e < mask.full_begin[r]; ++e) {
      CHECK(mask.key_tile[static_cast<size_t>(e) - 1] < mask.key_tile[static_cast<size_t>(e)], r);
    }
  }
}

// Expands one table to [rows * m, columns * n] bytes.
std::vector<uint8_t> Dense(const BlockMask& mask, int32_t table) {
  const int64_t width = (mask.T + mask.n - 1) / mask.n * mask.n;
  std::vector<uint8_t> dense(static_cast<size_t>(mask.rows * int64_t{mask.m} * width), 0);
  for (int64_t r = 0; r < mask.rows; ++r) {
    const auto row = static_cast<size_t>(table * int64_t{mask.rows} + r);
    for (int32_t e = mask.row_ptr[row]; e < mask.row_ptr[row + 1]; ++e) {
      const auto at = static_cast<size_t>(e);
      for (int64_t i = 0; i < mask.m; ++i) {
        for (int64_t j = 0; j < mask.n; ++j) {
          const int64_t word = (int64_t{mask.bits_id[at]} * mask.m + i) * (mask.n / 32) + j / 32;
          const bool on = mask.bits_id[at] < 0 || (mask.bits[static_cast<size_t>(word)] >> (j % 32) & 1) != 0;
          dense[static_cast<size_t>((r * mask.m + i) * width + mask.key_tile[at] * int64_t{mask.n} + j)] = on;
        }
      }
    }
  }
  return dense;
}

ONE_THREAD_TEST(BlockMasksEqualTheDefinition) {
  static const std::vector<std::pair<int, int>> kTiles = {{1, 32}, {4, 32}, {8, 64}, {32, 64}, {64, 64}, {5, 96}};
  int64_t pairs = 0;
  for (int i = 0, count = Cases(1500); i < count; ++i) {
    Random random(static_cast<uint64_t>(i));
    const ExprSizes s = RandomSizes(&random, random.OneIn(5) ? 400 : 90);
    const RandomMask mask = MakeRandomMask(&random, s, false);
    const auto [m, n] = random.Pick(kTiles);
    const std::string where = Text("seed ", i, " ", mask.text, " tile ", m, " ", n, " S ", s.S, " T ", s.T, " P ", s.P);
    BlockMask block;
    const Status status = BuildBlockMask(mask.expr, s, m, n, &block);
    CHECK(status.ok(), where, status.message());
    CheckStructure(block, where);
    const int64_t width = (s.T + n - 1) / n * n;
    for (int r = 0; r < 3; ++r) {
      const int64_t b = random.Range(0, s.B - 1);
      const int64_t h = random.Range(0, s.H - 1);
      const std::vector<uint8_t> dense = Dense(block, block.TableOf(b, h));
      for (int64_t q = 0; q < s.S; ++q) {
        for (int64_t k = 0; k < width; ++k) {
          const bool want = k < s.T && Allowed(mask.expr, s, mask.bindings, b, h, s.P + q, k);
          CHECK((dense[static_cast<size_t>(q * width + k)] != 0) == want, where, " q ", q, " k ", k);
        }
      }
      pairs += s.S * s.T;
    }
  }
  CountCases(pairs);
}

// Masks that are a table, whose rows may be read as they lie: elements of all bytes, positions behind others, tiles
// that end with the keys or before, axes of one element, and look-ups that are no rows.
ONE_THREAD_TEST(BlockMasksOfTables) {
  constexpr int64_t kB = 2, kH = 3, kS = 70, kT = 203, kP = 9;
  struct Form {
    const char* text;
    std::vector<int64_t> dims;
    std::vector<int64_t> (*index)(int64_t b, int64_t h, int64_t q, int64_t k);
  };
  const std::vector<Form> forms = {
      {"table0[q, k]", {kP + kS, kT}, [](int64_t, int64_t, int64_t q, int64_t k) { return std::vector{q, k}; }},
      {"table0[q, k + 5]", {kP + kS, kT + 5}, [](auto, auto, auto q, auto k) { return std::vector{q, k + 5}; }},
      {"table0[q, k - q + 100]",
       {kP + kS, kT + 100},
       [](auto, auto, auto q, auto k) { return std::vector{q, k - q + 100}; }},
      {"table0[h, q - P, k]", {kH, kS, kT}, [](auto, auto h, auto q, auto k) { return std::vector{h, q - kP, k}; }},
      {"table0[b, h, k]", {1, kH, kT}, [](auto, auto h, auto, auto k) { return std::vector<int64_t>{0, h, k}; }},
      {"table0[b, h, k]", {kB, kH, kT}, [](auto b, auto h, auto, auto k) { return std::vector{b, h, k}; }},
      {"table0[k]", {kT}, [](auto, auto, auto, auto k) { return std::vector{k}; }},
      {"table0[k, q]", {kT, kP + kS}, [](auto, auto, auto q, auto k) { return std::vector{k, q}; }},
      {"table0[q, 2 * k]", {kP + kS, 2 * kT}, [](auto, auto, auto q, auto k) { return std::vector{q, 2 * k}; }},
      {"table0[q, q]", {kP + kS, kP + kS}, [](auto, auto, auto q, auto) { return std::vector{q, q}; }},
  };
  Random random(11);
  int64_t pairs = 0;
  for (const Form& form : forms) {
    Tensor tensor;
    tensor.dtype = DType::kBool;
    int64_t count = 1;
    for (const int64_t dim : form.dims) tensor.dims[tensor.rank++] = dim, count *= dim;
    std::vector<uint8_t> data(static_cast<size_t>(count));
    // Any byte but 0 is true.
    for (uint8_t& x : data) x = random.OneIn(2) ? 0 : static_cast<uint8_t>(random.Range(1, 255));
    tensor.data = data.data();
    MaskExpr expr;
    CHECK(MaskExpr::Parse(form.text, {{"table0", tensor}}, &expr).ok(), form.text);
    for (const auto& [m, n] : {std::pair(16, 32), {64, 64}, {33, 128}, {7, 160}, {128, 224}, {1, 1024}}) {
      const std::string where = Text(form.text, " tile ", m, " ", n);
      BlockMask block;
      const Status status = BuildBlockMask(expr, {kB, kH, kS, kT, kP}, m, n, &block);
      CHECK(status.ok(), where, status.message());
      CheckStructure(block, where);
      const int64_t width = (kT + n - 1) / n * n;
      for (int64_t bh = 0; bh < kB * kH; ++bh) {
        const int64_t b = bh / kH, h = bh % kH;
        const std::vector<uint8_t> dense = Dense(block, block.TableOf(b, h));
        for (int64_t q = 0; q < kS; ++q) {
          for (int64_t k = 0; k < width; ++k) {
            bool want = false;
            if (k < kT) {
              int64_t at = 0;
              const std::vector<int64_t> index = form.index(b, h, kP + q, k);
              for (size_t axis = 0; axis < index.size(); ++axis) at = at * form.dims[axis] + index[axis];
              want = data[static_cast<size_t>(at)] != 0;
            }
            CHECK((dense[static_cast<size_t>(q * width + k)] != 0) == want, where, " b ", b, " h ", h, " q ", q, " k ",
                  k);
          }
        }
        pairs += kS * kT;
      }
    }
  }
  CountCases(pairs);
}

TEST(BlockMasksShareWhatIsEqual) {
  const auto build = [](const char* text, const ExprSizes& sizes, int m, int n) {
    MaskExpr expr;
    CHECK(MaskExpr::Parse(text, {}, &expr).ok(), text);
    BlockMask mask;
    CHECK(BuildBlockMask(expr, sizes, m, n, &mask).ok(), text);
    CheckStructure(mask, text);
    return mask;
  };
  const ExprSizes sizes = {2, 4, 1024, 1024, 0};
  BlockMask mask = build("abs(q - k) <= 64", sizes, 32, 64);
  CHECK(mask.layout.size() == 1 && mask.bits.size() / (32 * 2) <= 4, "distinct ", mask.bits.size() / 64);
  mask = build("abs(q - k) <= 16 * (h // 2)", sizes, 32, 64);
  CHECK(mask.layout_h == 4 && mask.layout_b == 1 && mask.layout == (std::vector<int32_t>{0, 0, 1, 1}));
  mask = build("k <= q", {1, 1, 100, 100, 0}, 32, 32);  // ragged at both ends
  CHECK(mask.row_ptr.back() == 10);
  mask = build("True", {1, 1, 33, 64, 0}, 32, 64);
  CHECK(mask.bits.empty() && mask.key_tile.size() == 2);
  mask = build("False", sizes, 32, 64);
  CHECK(mask.key_tile.empty());
  mask = build("k <= q", {1, 1, 0, 10, 0}, 32, 64);
  CHECK(mask.rows == 0 && mask.key_tile.empty());
  mask = build("k <= q", {1, 1, 10, 0, 0}, 32, 64);
  CHECK(mask.rows == 1 && mask.key_tile.empty());
  CountCases(7);
}

ONE_THREAD_TEST(BlockMaskBuilderRefuses) {
  MaskExpr expr;
  BlockMask mask;
  CHECK(MaskExpr::Parse("k <= q", {}, &expr).ok());
  CHECK(!BuildBlockMask(expr, {1, 1, 64, 64, 0}, 32, 48, &mask).ok());
  CHECK(!BuildBlockMask(expr, {1, 1, 64, 64, 0}, 0, 64, &mask).ok());
  CHECK(!BuildBlockMask(expr, {1, 1, 64, 64, 0}, 32, 4096, &mask).ok());
  CHECK(!BuildBlockMask(expr, {1, 1, 64, (int64_t{1} << 22) + 1, 0}, 32, 64, &mask).ok());
  CHECK(MaskExpr::Parse("True", {}, &expr).ok());
  CHECK(!BuildBlockMask(expr, {1, 1, 1 << 22, 1 << 22, 0}, 32, 64, &mask).ok());  // 2^33 tiles
  CHECK(MaskExpr::Parse("pad[b, k]", {}, &expr).ok());
  CHECK(!BuildBlockMask(expr, {1, 1, 64, 64, 0}, 32, 64, &mask).ok());
  // One tile in each of 2^20 tables of 2^17 rows each.
  CHECK(MaskExpr::Parse("q == h and k == b", {}, &expr).ok());
  CHECK(!BuildBlockMask(expr, {1 << 10, 1 << 10, 1 << 22, 1 << 22, 0}, 32, 64, &mask).ok());
  CountCases(7);
}

int64_t BitTiles(const BlockMask& mask) {
  return static_cast<int64_t>(mask.bits.size()) * 32 / (int64_t{mask.m} * mask.n);
}

// Element masks beyond their bytes are left out; tiles that have some have the same, and equal ones still share them.
TEST(BlockMasksLeaveTilesToTheKernel) {
  MaskExpr expr;
  CHECK(MaskExpr::Parse("(q * k) % 7919 < 4000 and q != k", {}, &expr).ok());
  const ExprSizes sizes = {1, 1, 500, 700, 0};
  BlockMask whole;
  CHECK(BuildBlockMask(expr, sizes, 32, 64, &whole).ok());
  CHECK(whole.left == 0);
  const auto tiles = static_cast<int64_t>(whole.key_tile.size());
  for (const int64_t room : {int64_t{0}, int64_t{1}, tiles / 2, tiles}) {
    BlockMaskBounds bounds;
    bounds.leaves_tiles = true;
    bounds.element_bytes = room * (32 * 64 / 8 + 64);
    BlockMask mask;
    CHECK(BuildBlockMask(expr, sizes, 32, 64, &mask, bounds).ok());
    CHECK(mask.key_tile == whole.key_tile && mask.row_ptr == whole.row_ptr && mask.full_begin == whole.full_begin);
    CHECK(BitTiles(mask) == std::min(room, BitTiles(whole)), room, " gave ", BitTiles(mask));
    int64_t left = 0;
    for (size_t at = 0; at < mask.bits_id.size(); ++at) {
      const bool partial = whole.bits_id[at] >= 0;
      if (partial && mask.bits_id[at] < 0) ++left;
      if (!partial || mask.bits_id[at] < 0) continue;
      const auto bits = [&](const BlockMask& of) { return of.bits.begin() + of.bits_id[at] * (32 * 64 / 32); };
      CHECK(std::equal(bits(mask), bits(mask) + 32 * 64 / 32, bits(whole)), room, " tile ", at);
    }
    CHECK(left == mask.left && (room == tiles) == (left == 0), room, " left ", left, " and ", mask.left);
  }
  // A window has few element masks: the same ones as without bounds, in every table.
  CHECK(MaskExpr::Parse("abs(q - k) <= 40 + h // 2", {}, &expr).ok());
  BlockMaskBounds bounds;
  bounds.leaves_tiles = true;
  bounds.element_bytes = 40 * (32 * 64 / 8 + 64);
  BlockMask mask;
  CHECK(BuildBlockMask(expr, {1, 4, 2048, 2048, 0}, 32, 64, &whole).ok());
  CHECK(BuildBlockMask(expr, {1, 4, 2048, 2048, 0}, 32, 64, &mask, bounds).ok());
  CHECK(mask.left == 0 && mask.bits == whole.bits && mask.bits_id == whole.bits_id && mask.layout == whole.layout);
  CountCases(5);
}

// However many operations and tables: what is not classified in time is left, and tables of nothing else are one.
TEST(BlockMaskBuilderStopsInTime) {
  MaskExpr expr;
  CHECK(MaskExpr::Parse("(q * k + h) % 7919 < 4000", {}, &expr).ok());
  BlockMaskBounds bounds;
  bounds.leaves_tiles = true;
  bounds.operations = 1 << 20;
  BlockMask mask;
  CHECK(BuildBlockMask(expr, {1, 1 << 16, 4096, 4096, 0}, 32, 64, &mask, bounds).ok());
  const int64_t tables = *std::max_element(mask.layout.begin(), mask.layout.end()) + 1;
  CHECK(mask.layout.size() == 1 << 16 && tables == 2, tables);
  CHECK(mask.key_tile.size() == 2 * 128 * 64 && mask.left > mask.row_ptr.back() / 2);
  CheckStructureOfLists(mask);
  bounds.leaves_tiles = false;
  const Status status = BuildBlockMask(expr, {1, 1 << 16, 4096, 4096, 0}, 32, 64, &mask, bounds);
  CHECK(status.too_large(), status.message());
  CountCases(2);
}

// Keys are equal where all fields are; the hash follows them, and the text names them.
TEST(BlockMaskKeysAreByField) {
  BlockMaskKey key;
  key.expression = 7, key.sizes = {1, 2, 3, 4, 5}, key.m = 64, key.n = 128;
  const auto change = [&key](int field) {
    BlockMaskKey other = key;
    int64_t* const sizes[] = {&other.sizes.B, &other.sizes.H, &other.sizes.S, &other.sizes.T, &other.sizes.P};
    if (field < 5) ++*sizes[field];
    if (field == 5) ++other.expression;
    if (field == 6) ++other.m;
    if (field == 7) ++other.n;
    if (field == 8) other.leaves_tiles = true;
    return other;
  };
  for (int field = 0; field < 9; ++field) {
    const BlockMaskKey other = change(field);
    CHECK(!(other == key) && other.Hash() != key.Hash() && other.Print() != key.Print(), other.Print());
  }
  CHECK(change(9) == key && change(9).Hash() == key.Hash());
  CHECK(key.Print() == "expression 7 B 1 H 2 S 3 T 4 P 5 tile 64x128", key.Print());
  CountCases(10);
}

// A mask beyond its bytes is refused with the size that it would have, soon and with little memory.
TEST(BlockMaskBuilderSaysWhatAMaskWouldTake) {
  MaskExpr expr;
  CHECK(MaskExpr::Parse("(q * k) % 7919 < 4000", {}, &expr).ok());
  BlockMaskBounds bounds;
  bounds.bytes = bounds.element_bytes = 1 << 20;
  BlockMask mask;
  const Status status = BuildBlockMask(expr, {1, 1, 65536, 65536, 0}, 64, 64, &mask, bounds);
  CHECK(status.too_large());
  for (const char* part : {"S = 65536", "T = 65536", "up to 521 MiB", "tiles of 64 × 64", "at most 1 MiB"}) {
    CHECK(status.message().find(part) != std::string::npos, part, " is not in: ", status.message());
  }
  CHECK(mask.Bytes() <= 2 << 20, mask.Bytes());
  // Lists alone, where no tile has bits.
  CHECK(MaskExpr::Parse("k < T", {}, &expr).ok());
  bounds.leaves_tiles = true;
  CHECK(BuildBlockMask(expr, {1, 1, 1 << 22, 1 << 22, 0}, 64, 64, &mask, bounds).too_large());
  CHECK(MaskExpr::Parse("k < T + b * h", {}, &expr).ok());
  CHECK(BuildBlockMask(expr, {1 << 22, 1 << 22, 64, 64, 0}, 64, 64, &mask, bounds).too_large());
  CountCases(3);
}

TEST(CacheServesManyThreads) {
  constexpr int kThreads = 4;
  const int rounds = Cases(1500);
  BlockMaskCache cache(512 << 10);
  MaskExpr exprs[2];
  CHECK(MaskExpr::Parse("abs(q - k) <= 40", {}, &exprs[0]).ok());
  CHECK(MaskExpr::Parse("k <= q and (k + h) % 8 < 3", {}, &exprs[1]).ok());
  std::atomic<int64_t> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Random random(static_cast<uint64_t>(t / 2));  // pairs of threads ask for the same at the same time
      for (int i = 0; i < rounds; ++i) {
        const MaskExpr& expr = exprs[random.Range(0, 1)];
        const ExprSizes s = {1, 2, random.Range(9, 200), random.Range(1, 200), 0};
        std::shared_ptr<const BlockMask> mask;
        if (!cache.Get(expr, expr.Hash(), s, 8, 32, &mask).ok() || mask->S != s.S || mask->T != s.T) ++wrong;
        // Reads an entry that may have been evicted meanwhile.
        if (mask != nullptr && static_cast<int64_t>(mask->key_tile.size()) != mask->row_ptr.back()) ++wrong;
        if (t == 3 && random.OneIn(200)) cache.Clear();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0, wrong.load(), " wrong answers");
  CHECK(cache.GetStats().bytes <= 512 << 10, cache.GetStats().bytes);
  CountCases(int64_t{kThreads} * rounds);
}

// Nodes keep masks up to half of the capacity, each mask once; the rest is theirs for a run. Bytes count all of them.
TEST(CacheLimitsWhatNodesKeep) {
  constexpr int64_t kCapacity = 40 << 10;
  BlockMaskCache cache(kCapacity);
  MaskExpr expr;
  CHECK(MaskExpr::Parse("abs(q - k) <= 40", {}, &expr).ok());
  const auto keep = [&](int64_t T) {
    std::shared_ptr<const BlockMask> mask;
    const Status status = cache.GetToKeep(expr, expr.Hash(), {1, 1, 512, T, 0}, 32, 64, BlockMaskBounds(), &mask);
    CHECK(status.ok(), status.message());
    return mask;
  };
  std::vector<std::shared_ptr<const BlockMask>> kept;
  int refused = 0;
  for (int64_t T = 600; T < 640; ++T) {
    const auto mask = keep(T);
    refused += mask == nullptr ? 1 : 0;
    if (mask == nullptr) continue;
    kept.push_back(mask);
    const auto again = keep(T);
    CHECK(again == mask, "another node gets the same");
  }
  CHECK(kept.size() > 1 && refused > 1, kept.size(), " kept, ", refused, " refused");
  BlockMaskCache::Stats stats = cache.GetStats();
  CHECK(stats.kept_bytes > kCapacity / 4 && stats.kept_bytes <= kCapacity / 2, stats.kept_bytes);
  CHECK(stats.bytes <= kCapacity && stats.bytes >= stats.kept_bytes, stats.bytes);
  kept.clear();
  CHECK(cache.GetStats().kept_bytes == 0 && keep(700) != nullptr);
  CountCases(40);
}

// That a mask is too large is known from then on; those who evaluate tiles themselves get one of their own.
TEST(CacheKnowsWhatIsTooLarge) {
  BlockMaskCache cache;
  MaskExpr expr;
  CHECK(MaskExpr::Parse("(q * k) % 7919 < 4000", {}, &expr).ok());
  const ExprSizes sizes = {1, 1, 1024, 1024, 0};
  BlockMaskBounds bounds;
  bounds.bytes = bounds.element_bytes = 1 << 16;
  std::shared_ptr<const BlockMask> mask;
  for (int i = 0; i < 3; ++i) {
    CHECK(cache.Get(expr, expr.Hash(), sizes, 64, 64, bounds, &mask).too_large() && mask == nullptr);
    CHECK(cache.GetStats().misses == 1 && cache.GetStats().builds == 0);
  }
  bounds.leaves_tiles = true;
  bounds.element_bytes = 1 << 15;
  CHECK(cache.Get(expr, expr.Hash(), sizes, 64, 64, bounds, &mask).ok() && mask->left > 0);
  CHECK(mask->Bytes() <= 1 << 16, mask->Bytes());
  CountCases(4);
}

TEST(CacheBuildsOnceAndForgetsTheOldest) {
  BlockMaskCache cache(40 << 10);
  MaskExpr expr;
  CHECK(MaskExpr::Parse("abs(q - k) <= 40", {}, &expr).ok());
  std::shared_ptr<const BlockMask> first;
  std::shared_ptr<const BlockMask> again;
  const ExprSizes s = {1, 1, 512, 512, 0};
  CHECK(cache.Get(expr, expr.Hash(), s, 32, 64, &first).ok());
  CHECK(cache.Get(expr, expr.Hash(), {7, 3, 512, 512, 0}, 32, 64, &again).ok());  // neither b nor h in the mask
  CHECK(first == again && cache.GetStats().builds == 1 && cache.GetStats().hits == 1);
  std::shared_ptr<const BlockMask> other;
  const auto crowd = [&] {
    for (int64_t T = 600; T < 640; ++T) CHECK(cache.Get(expr, expr.Hash(), {1, 1, 512, T, 0}, 32, 64, &other).ok());
    CHECK(cache.GetStats().bytes <= 40 << 10 && cache.GetStats().entries >= 1, cache.GetStats().bytes);
  };
  crowd();
  CHECK(cache.Get(expr, expr.Hash(), s, 32, 64, &again).ok());
  CHECK(first == again && cache.GetStats().builds == 41, "what somebody reads stays, and counts");
  first.reset(), again.reset();
  crowd();
  CHECK(cache.Get(expr, expr.Hash(), s, 32, 64, &again).ok());
  CHECK(cache.GetStats().builds > 41 + 1, "the oldest that nobody reads is gone");
  CHECK(!cache.Get(expr, expr.Hash(), s, 32, 63, &again).ok() && !cache.Get(expr, expr.Hash(), s, 32, 63, &again).ok());
  CountCases(44);
}

}  // namespace
}  // namespace stof::test
