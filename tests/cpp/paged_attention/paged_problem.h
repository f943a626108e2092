// SPDX-License-Identifier: Apache-2.0
// Random problems of StofPagedAttention, and its definition in docs/reference/paged-attention.md in double precision.
// For the kernels of all devices. Rows of the cache that hold no key are NaN, and entries of the block table that
// nothing may read lie outside of the cache.
#ifndef STOF_TESTS_CPP_PAGED_ATTENTION_PAGED_PROBLEM_H_
#define STOF_TESTS_CPP_PAGED_ATTENTION_PAGED_PROBLEM_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "plugins/core/contract/op.h"
#include "plugins/core/ops/paged_attention/paged_attention.h"
#include "tests/cpp/cached_attention/append_problem.h"
#include "tests/cpp/check.h"

namespace stof::test::paged {

using cached_attention::Buffer;

// Masks of the op by text, with what they mean beside k <= q.
struct Mask {
  const char* text;
  bool (*is_allowed)(int64_t h, int64_t q, int64_t k);
  int64_t window;  // 0: not a window alone
};
inline constexpr Mask kMasks[] = {
    {"k <= q", [](int64_t, int64_t, int64_t) { return true; }, 0},
    {"k <= q and q - k < 16", [](int64_t, int64_t q, int64_t k) { return q - k < 16; }, 16},
    {"k <= q and q - k < 200", [](int64_t, int64_t q, int64_t k) { return q - k < 200; }, 200},
    {"q - k < 4 or k % 3 == 0", [](int64_t, int64_t q, int64_t k) { return q - k < 4 || k % 3 == 0; }, 0},
    {"k <= q and (q // 16 - k // 16 < 3 or (k // 16 + h) % 4 == 0)",
     [](int64_t h, int64_t q, int64_t k) { return q / 16 - k / 16 < 3 || (k / 16 + h) % 4 == 0; }, 0},
    {"k + 40 < q", [](int64_t, int64_t q, int64_t k) { return k + 40 < q; }, 0},  // fully masked rows
};
constexpr int kMaskCount = sizeof(kMasks) / sizeof(kMasks[0]);

enum class Metadata { kNone, kExact, kLoose };

struct Case {
  int64_t H = 4, G = 2, D = 64, block = 16;
  DType dtype = DType::kF32;
  std::vector<int64_t> past, tokens;  // of each sequence
  int64_t padding = 0;                // tokens behind all sequences
  int mask = 0;
  int64_t ring = 0;           // blocks of a sequence, which its row of the table repeats; 0: a block for every position
  bool frees_blocks = false;  // entries of blocks before the window are illegal
  bool has_slots = false, is_shared = true, is_packed = false, has_sink = false, has_norm = false;
  int64_t rotary = 0, rotary_offset = 0;
  bool is_interleaved = false;
  float softcap = 0;
  Metadata metadata = Metadata::kNone;
  // Of the table and the cache at least, and bounds in attention_metadata: for runs of equal shapes.
  int64_t least_columns = 0, least_blocks = 0;
  std::vector<int32_t> bounds;

  int64_t B() const { return static_cast<int64_t>(past.size()); }
  int64_t keys_of(int64_t b) const { return past[static_cast<size_t>(b)] + tokens[static_cast<size_t>(b)]; }
  int64_t most_tokens() const;
  int64_t most_keys() const;
  bool has_query_copy() const { return rotary > 0 || has_norm; }
};
std::string Describe(const Case& c);

// A case of sequences with up to S new tokens behind up to `past` keys.
Case DrawCase(int64_t S, int64_t past, int64_t block, DType dtype, Random* random);

struct Problem {
  Problem(const Case& c, uint64_t seed);

  std::unique_ptr<Op> MakeOp() const;
  // All inputs of the op, in host memory. Caches are those of `key_cache` and `value_cache`.
  std::vector<Tensor> Inputs();
  int64_t N() const { return static_cast<int64_t>(slots.size()); }
  // The row of the cache at a position, or -1 where no row holds it any more.
  int64_t RowOf(int64_t b, int64_t position) const;

  // The caches after a step; rows of tokens of illegal sequences are as before.
  void CheckCaches(const Buffer& key, const Buffer& value, const std::string& where,
                   const std::set<int64_t>& illegal = {}) const;
  // The output of a step that left these caches. query_at: the index in `queries`, rotated ones, of a token's head;
  // nullptr: queries are as given.
  void CheckOutput(const Buffer& output, const Buffer& key, const Buffer& value, const Buffer* queries,
                   const std::function<int64_t(int64_t b, int64_t h, int64_t i)>& query_at, bool is_cuda,
                   const std::string& where, const std::set<int64_t>& illegal = {}) const;

  Case c;
  Random random;
  Buffer query, key, value;  // [N, H, D] or packed [N, H + 2 G, D]; [N, G, D]
  Buffer key_cache, value_cache, cos, sin, query_norm, key_norm, sink;
  std::vector<int32_t> cumulative, past, table, slots, metadata;
  int64_t columns = 0, blocks = 0;

 private:
  // The elements of head `head` (queries, keys, values) of a token, as buffer and index.
  std::pair<const Buffer*, int64_t> Token(int64_t head, int64_t t) const;
  void FillTable();
  void FillCaches();
  void CheckSequence(int64_t b, const Buffer& output, const Buffer& keys, const Buffer& values, const Buffer* queries,
                     const std::function<int64_t(int64_t b, int64_t h, int64_t i)>& query_at, bool is_cuda,
                     const std::string& where) const;
};

}  // namespace stof::test::paged
#endif  // STOF_TESTS_CPP_PAGED_ATTENTION_PAGED_PROBLEM_H_
