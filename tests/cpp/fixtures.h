// SPDX-License-Identifier: Apache-2.0
// Set-up that several tests share.
#ifndef STOF_TESTS_CPP_FIXTURES_H_
#define STOF_TESTS_CPP_FIXTURES_H_

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/mask/block_mask_builder.h"
#include "tests/cpp/check.h"

namespace stof::test {

// Memory of one run.
struct Memory {
  std::vector<std::unique_ptr<char, void (*)(void*)>> blocks;
  static void* Allocate(void* self, size_t bytes) {
    void* block = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::memset(block, 0xa5, bytes);  // kernels may not rely on zeros
    static_cast<Memory*>(self)->blocks.emplace_back(static_cast<char*>(block), std::free);
    return block;
  }
};

// The block mask of an expression without tables.
inline BlockMask BuiltMask(const std::string& text, const ExprSizes& sizes, int m, int n) {
  MaskExpr expr;
  Status status = MaskExpr::Parse(text, {}, &expr);
  CHECK(status.ok(), text, ": ", status.message());
  BlockMask mask;
  status = BuildBlockMask(expr, sizes, m, n, &mask);
  CHECK(status.ok(), text, ": ", status.message());
  return mask;
}

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_FIXTURES_H_
