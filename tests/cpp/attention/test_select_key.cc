// SPDX-License-Identifier: Apache-2.0
// Keys of remembered kernel choices: every field counts for equality, hash and text. Needs no GPU.
#include <functional>
#include <string>
#include <vector>

#include "cuda/attention/select_key.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

using cuda::RowwiseKey;
using cuda::SelectKey;

template <typename Key>
void CheckFields(const Key& key, const std::vector<std::function<void(Key*)>>& changes, size_t printed) {
  CHECK(key == Key(key) && cuda::SelectionKeyHash()(key) == cuda::SelectionKeyHash()(Key(key)));
  for (size_t i = 0; i < changes.size(); ++i) {
    Key other = key;
    changes[i](&other);
    CHECK(!(other == key) && Hash(other) != Hash(key), "field ", i, " of ", Print(key));
    CHECK((Print(other) != Print(key)) == (i < printed), "field ", i, " of ", Print(key));
  }
  CountCases(static_cast<int64_t>(changes.size()));
}

// Fields of the problem, then the key's own; the kernel's address comes last and is not printed.
template <typename Key>
std::vector<std::function<void(Key*)>> ProblemChanges() {
  return {[](Key* k) { ++k->problem.mask_hash; }, [](Key* k) { ++k->problem.sizes.B; },
          [](Key* k) { ++k->problem.sizes.H; },   [](Key* k) { ++k->problem.sizes.S; },
          [](Key* k) { ++k->problem.sizes.T; },   [](Key* k) { ++k->problem.sizes.P; },
          [](Key* k) { ++k->problem.sm_count; }};
}

const cuda::KernelEntry* Address(uintptr_t at) { return reinterpret_cast<const cuda::KernelEntry*>(at); }

TEST(SelectKeysDifferByEveryField) {
  auto changes = ProblemChanges<SelectKey>();
  changes.push_back([](SelectKey* k) { ++k->l2_heads; });
  changes.push_back([](SelectKey* k) { ++k->kv_bytes; });
  changes.push_back([](SelectKey* k) { k->kernels = Address(64); });
  CheckFields<SelectKey>({Address(32), {7, {1, 2, 3, 4, 5}, 132}, 6, 8}, changes, changes.size() - 1);
}

TEST(RowwiseKeysDifferByEveryField) {
  auto changes = ProblemChanges<RowwiseKey>();
  changes.push_back([](RowwiseKey* k) { ++k->head_bytes; });
  changes.push_back([](RowwiseKey* k) { k->fp32 = true; });
  changes.push_back([](RowwiseKey* k) { k->kernel = Address(64); });
  CheckFields<RowwiseKey>({Address(32), {7, {1, 2, 3, 4, 5}, 132}, 128, false}, changes, changes.size() - 1);
}

}  // namespace
}  // namespace stof::test
