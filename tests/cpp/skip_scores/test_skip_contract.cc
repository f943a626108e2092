// SPDX-License-Identifier: Apache-2.0
// Skip by score, the contract that kernels share: its distance, its attribute, its counts.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/c_api/c_api.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/skip_distance.h"
#include "plugins/core/host/skip_scores.h"
#include "plugins/core/ops/attention.h"
#include "plugins/core/ops/cached_attention/cached_attention.h"
#include "plugins/core/ops/paged_attention/paged_attention.h"
#include "tests/cpp/check.h"
#include "tests/cpp/map_attributes.h"

namespace stof::test::attention {
namespace {
constexpr float kInf = std::numeric_limits<float>::infinity();
}  // namespace

TEST(SkipDistanceIsTheLogarithmOfKeysByThreshold) {
  for (const float threshold : {1e-6f, 0.5f, 3.0f, 1000.0f}) {
    for (const int64_t keys : {int64_t{1}, int64_t{2}, int64_t{999}, int64_t{1000}, int64_t{4194304}}) {
      const double wanted = std::max(0.0, std::log(static_cast<double>(keys) / static_cast<double>(threshold)));
      const auto found = static_cast<double>(SkipDistance(threshold, keys));
      CHECK(std::abs(found - wanted) <= 1e-6 * (1 + wanted), "threshold ", threshold, " keys ", keys, ": ", found);
      CountCases(1);
    }
  }
  CHECK(SkipDistance(1.0f, 0) == 0.0f);
  CHECK(SkipDistance(std::numeric_limits<float>::denorm_min(), 4194304) == kInf);
}

TEST(SkipThresholdsOutsideTheirRangeAreRefused) {
  const std::vector<std::pair<float, const char*>> wrong = {
      {-1.0f, "-1"}, {4194305.0f, "4194305"}, {kInf, "inf"}, {std::nanf(""), "nan"}, {-1e-30f, "-1e-30"}};
  for (const OpDescription* const op :
       {AttentionDescription(), CachedAttentionDescription(), PagedAttentionDescription()}) {
    for (const auto& [value, text] : wrong) {
      MapAttributes attributes;
      attributes.ints = {{"num_heads", 2}, {"kv_num_heads", 2}};
      attributes.strings["mask"] = "k <= q";
      attributes.floats["skip_threshold"] = value;
      std::unique_ptr<Op> made;
      const Status status = op->create(attributes, &made);
      CHECK(!status.ok(), op->name, " takes ", text);
      for (const char* const part : {"skip_threshold", text, "0 to 4194304"}) {
        CHECK(status.message().find(part) != std::string::npos, op->name, ": ", status.message(), " without ", part);
      }
      CountCases(1);
    }
    for (const float value : {0.0f, 1e-30f, 4194304.0f}) {
      MapAttributes attributes;
      attributes.ints = {{"num_heads", 2}, {"kv_num_heads", 2}};
      attributes.strings["mask"] = "k <= q";
      attributes.floats["skip_threshold"] = value;
      std::unique_ptr<Op> made;
      const Status status = op->create(attributes, &made);
      CHECK(status.ok(), op->name, " ", value, ": ", status.message());
    }
  }
  AttentionArgs args;
  args.shape = {1, 1, 1, 1, 1, 8, 8};
  args.scores.skip_threshold = std::nanf("");
  CHECK(!Check(args).ok());
}

TEST(SkipCountsAreReadAndReset) {
  stof_reset_skip_counts();
  uint64_t counts[2] = {7, 7};
  stof_skip_counts(counts);
  CHECK(counts[0] == 0 && counts[1] == 0);
  AddSkipCounts({30, 20});
  AddSkipCounts({3, 2});
  stof_skip_counts(counts);
  CHECK(counts[0] == 33 && counts[1] == 22);
  stof_skip_counts(nullptr);
  stof_reset_skip_counts();
  stof_skip_counts(counts);
  CHECK(counts[0] == 0 && counts[1] == 0);
  const std::string limits = stof_op_limits();
  CHECK(limits.find("\"skips_scores\": true") != std::string::npos, limits);
}

}  // namespace stof::test::attention
