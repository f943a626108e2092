// SPDX-License-Identifier: Apache-2.0
// Choose blocks, the contract that kernels share: the least estimate that chooses, the attribute, which calls choose.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/c_api/c_api.h"
#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/contract/chosen_blocks.h"
#include "plugins/core/ops/attention.h"
#include "plugins/core/ops/cached_attention/cached_attention.h"
#include "plugins/core/ops/paged_attention/paged_attention.h"
#include "tests/cpp/check.h"
#include "tests/cpp/map_attributes.h"

namespace stof::test::attention {
namespace {
constexpr float kInf = std::numeric_limits<float>::infinity();

Status Create(const OpDescription& op, float threshold) {
  MapAttributes attributes;
  attributes.ints = {{"num_heads", 2}, {"kv_num_heads", 2}};
  attributes.strings["mask"] = "k <= q";
  attributes.floats["block_threshold"] = threshold;
  std::unique_ptr<Op> made;
  return op.create(attributes, &made);
}
}  // namespace

TEST(TheLeastChosenEstimateIsALogarithmBelowTheLargestOne) {
  for (const float threshold : {1e-30f, 1e-3f, 0.5f, 1.0f}) {
    for (const float max_estimate : {-300.0f, -1.0f, 0.0f, 25.5f, 1e6f}) {
      const double wanted = static_cast<double>(max_estimate) + std::log(static_cast<double>(threshold));
      const auto found = static_cast<double>(LeastChosenEstimate(max_estimate, threshold));
      CHECK(std::abs(found - wanted) <= 1e-6 * (1 + std::abs(wanted)), "threshold ", threshold, " max_estimate ",
            max_estimate);
      CHECK(!(max_estimate < LeastChosenEstimate(max_estimate, threshold)), "the largest estimate of ", max_estimate,
            " does not choose");
      CountCases(1);
    }
  }
  // Where there is no estimate, -inf does not choose; beside +inf nothing finite does.
  CHECK(-kInf < LeastChosenEstimate(-kInf, 0.5f) && LeastChosenEstimate(-kInf, 0.5f) > -kInf);
  CHECK(LeastChosenEstimate(kInf, 1e-30f) == kInf);
  CHECK(!(std::nanf("") < LeastChosenEstimate(3.0f, 0.5f)));
}

TEST(BlockThresholdsOutsideTheirRangeAreRefused) {
  const std::vector<std::pair<float, const char*>> wrong = {
      {-1.0f, "-1"}, {1.5f, "1.5"}, {kInf, "inf"}, {std::nanf(""), "nan"}, {-1e-30f, "-1e-30"}};
  for (const OpDescription* const op :
       {AttentionDescription(), CachedAttentionDescription(), PagedAttentionDescription()}) {
    for (const auto& [value, text] : wrong) {
      const Status status = Create(*op, value);
      CHECK(!status.ok(), op->name, " takes ", text);
      for (const char* const part : {"block_threshold", text, "0 to 1"}) {
        CHECK(status.message().find(part) != std::string::npos, op->name, ": ", status.message(), " without ", part);
      }
      CountCases(1);
    }
    for (const float value : {0.0f, 1e-30f, 1.0f}) {
      const Status status = Create(*op, value);
      CHECK(status.ok(), op->name, " ", value, ": ", status.message());
    }
  }
  AttentionArgs args;
  args.shape = {1, 1, 1, 1, 1, 8, 8};
  for (const float value : {std::nanf(""), 1.5f, -1.0f}) {
    args.scores.block_threshold = value;
    CHECK(!Check(args).ok(), value);
  }
}

TEST(CallsThatChooseBlocks) {
  AttentionArgs usual;
  usual.shape = {1, 1, 1, 128, 300, 8, 8};
  usual.scores.block_threshold = 0.5f;
  CHECK(ChoosesBlocks(usual));
  const float number = 0;
  const DynamicMask dynamic;
  const auto fails = [&usual](auto change) {
    AttentionArgs args = usual;
    change(&args);
    CHECK(!ChoosesBlocks(args));
    CountCases(1);
  };
  fails([](AttentionArgs* args) { args->scores.block_threshold = 0; });
  fails([](AttentionArgs* args) { args->shape.S = 127; });
  fails([&](AttentionArgs* args) { args->scores.bias.data = &number; });
  fails([&](AttentionArgs* args) { args->scores.relative_bias.table = &number; });
  fails([&](AttentionArgs* args) { args->scores.relative_key[0].data = &number; });
  fails([&](AttentionArgs* args) { args->scores.relative_query.data = &number; });
  fails([&](AttentionArgs* args) { args->relative_value.data = &number; });
  fails([&](AttentionArgs* args) { args->mask.dynamic = &dynamic; });
  fails([](AttentionArgs* args) { args->mask.empty_rows = EmptyRows::kAll; });
  usual.mask.empty_rows = EmptyRows::kMean;
  CHECK(ChoosesBlocks(usual));
  const std::string limits = stof_op_limits();
  CHECK(limits.find("\"chooses_blocks\": true") != std::string::npos, limits);
  CHECK(AttentionLimits::ChoosesBlocks(Target::kCpu) && AttentionLimits::ChoosesBlocks(Target::kCuda));
  CHECK(AttentionLimits::ChoosesBlocksOfPages(Target::kCpu) && !AttentionLimits::ChoosesBlocksOfPages(Target::kCuda));
}

}  // namespace stof::test::attention
