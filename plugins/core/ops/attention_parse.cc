// SPDX-License-Identifier: Apache-2.0
// Parses the attributes of StofAttention.
#include <algorithm>
#include <cmath>

#include "plugins/core/base/ascii.h"
#include "plugins/core/host/quoted.h"
#include "plugins/core/ops/attention.h"
#include "plugins/core/ops/attention_sequences.h"
#include "plugins/core/ops/attribute_checks.h"

namespace stof {
namespace {

using Limits = AttentionLimits;

Status ParseLayouts(const std::string& text, std::array<TensorLayout, 4>* layouts) {
  const std::vector<std::string> words = SplitWords(text);
  if (words.size() != 1 && words.size() != 4) {
    return Status::Error("attribute layout is " + Quote(text, kMostQuoted) + ", expected one token or four");
  }
  for (size_t i = 0; i < 4; ++i) {
    const std::string& word = words[words.size() == 1 ? 0 : i];
    const auto* found = std::find(std::begin(kLayoutNames), std::end(kLayoutNames), word);
    if (found == std::end(kLayoutNames)) {
      return Status::Error("attribute layout has " + Quote(word, kMostQuoted) + ", expected BHSD, BSHD or BSN");
    }
    (*layouts)[i] = static_cast<TensorLayout>(found - std::begin(kLayoutNames));
  }
  return Status();
}

bool IsKnown(const std::string& role, const AttentionRoles& known) {
  return std::find(known.names.begin(), known.names.end(), role) != known.names.end() ||
         (role.size() >= 6 && role.size() <= 9 && role.compare(0, 5, "table") == 0 &&
          role.find_first_not_of("0123456789", 5) == std::string::npos);
}

Status CheckRoles(const std::vector<std::string>& roles, const AttentionRoles& known) {
  if (roles.size() > static_cast<size_t>(known.most)) {
    return Status::Error("attribute operands has " + std::to_string(roles.size()) + " roles, expected at most " +
                         std::to_string(known.most));
  }
  for (size_t i = 0; i < roles.size(); ++i) {
    if (!IsKnown(roles[i], known)) {
      return Status::Error("attribute operands has role " + Quote(roles[i], kMostQuoted) +
                           ", which this build does not know; a newer stof library may");
    }
    if (roles[i] != "unused" && std::find(roles.begin(), roles.begin() + i, roles[i]) != roles.begin() + i) {
      return Status::Error("attribute operands names " + Quote(roles[i], kMostQuoted) + " twice");
    }
  }
  return Status();
}

// [first, total] of query, key and value.
Status ParsePacked(const AttributeReader& attributes, AttentionAttributes* parsed) {
  std::vector<int64_t> numbers;
  if (!attributes.Ints("packed", &numbers)) return Status();
  if (numbers.size() != 2 * parsed->packed.size()) {
    return Status::Error("attribute packed has " + std::to_string(numbers.size()) +
                         " numbers, expected 6: the first head and the number of heads of query, key and value");
  }
  for (size_t i = 0; i < parsed->packed.size(); ++i) {
    const PackedHeads packed = {numbers[2 * i], numbers[2 * i + 1]};
    const auto wrong = [&](const std::string& expected) {
      return Status::Error("attribute packed has first head " + std::to_string(packed.first) + " of " +
                           std::to_string(packed.total) + " for " + kTensorNames[i] + ", expected " + expected);
    };
    if (packed.first < 0 || packed.total < 1 || packed.total > Limits::kMostHeads || packed.first >= packed.total) {
      return wrong("a head of 1 to " + std::to_string(Limits::kMostHeads) + ", counted from 0");
    }
    const bool bsn = parsed->layout[i] == TensorLayout::kBSN;
    if (!bsn && packed.first != 0) {
      return wrong("0 for layout " + std::string(kLayoutNames[static_cast<int>(parsed->layout[i])]) +
                   ": only BSN has others beside its own");
    }
    const int64_t heads = i == 0 ? parsed->num_heads : parsed->kv_num_heads;
    if (heads > 0 && packed.total - packed.first < heads) {
      return wrong(std::to_string(heads) + " heads from the first one on");
    }
    parsed->packed[i] = packed;
  }
  return Status();
}

}  // namespace

Status ParseAttention(const AttributeReader& attributes, AttentionAttributes* parsed, const AttentionRoles& roles) {
  AttentionAttributes& a = *parsed;
  std::string text;
  attributes.String("mask", &a.mask);
  float scale = 0.0f;
  if (attributes.Float("scale", &scale)) a.scale = scale;
  if (!std::isfinite(scale)) return Status::Error("attribute scale is not finite");
  attributes.Float("softcap", &a.softcap);
  if (!(a.softcap >= 0.0f) || !std::isfinite(a.softcap)) {
    return Status::Error("attribute softcap is " + PrintFloat(a.softcap) + ", expected 0 or more");
  }
  // The kernels multiply by these two and log2(e).
  constexpr float kMost = 1e30f, kLeast = 1e-30f;
  if (a.softcap > 0.0f && (a.softcap > kMost || a.softcap < kLeast || std::fabs(scale / a.softcap) > kMost)) {
    return Status::Error("attribute softcap is " + PrintFloat(a.softcap) +
                         ", expected 0 or 1e-30 to 1e30, and no more than 1e30 times smaller than scale");
  }
  text = "BHSD";
  attributes.String("layout", &text);
  STOF_RETURN_IF_ERROR(ParseLayouts(text, &a.layout));
  attributes.Int("num_heads", &a.num_heads);
  attributes.Int("kv_num_heads", &a.kv_num_heads);
  for (int64_t heads : {a.num_heads, a.kv_num_heads}) {
    if (heads < 0 || heads > Limits::kMostHeads) {
      return Status::Error("a number of heads of " + std::to_string(heads) + ", expected 0 to " +
                           std::to_string(Limits::kMostHeads));
    }
  }
  STOF_RETURN_IF_ERROR(ParsePacked(attributes, &a));
  STOF_RETURN_IF_ERROR(ParseFlag(attributes, "query_offset", &a.query_offset));
  STOF_RETURN_IF_ERROR(ParseFlag(attributes, "allow_tf32", &a.allow_tf32));
  STOF_RETURN_IF_ERROR(ParsePrecision(attributes, &a.precision));
  STOF_RETURN_IF_ERROR(ParseFlag(attributes, "allow_bf16", &a.allow_bf16));
  STOF_RETURN_IF_ERROR(ParseSkipThreshold(attributes, &a.skip_threshold));
  STOF_RETURN_IF_ERROR(ParseBlockThreshold(attributes, &a.block_threshold));
  text = "zero";
  attributes.String("empty_rows", &text);
  static constexpr const char* kPolicies[] = {"zero", "nan", "mean", "all"};
  const auto* policy = std::find(std::begin(kPolicies), std::end(kPolicies), text);
  if (policy == std::end(kPolicies)) {
    return Status::Error("attribute empty_rows is " + Quote(text, kMostQuoted) + ", expected zero, nan, mean or all");
  }
  a.empty_rows = static_cast<EmptyRows>(policy - std::begin(kPolicies));
  attributes.String("kernel", &a.kernel);
  text.clear();
  attributes.String("results", &text);
  const std::vector<std::string> results = SplitWords(text);
  a.lse = results.size() == 1 && results[0] == "lse";
  if (!results.empty() && !a.lse) {
    return Status::Error("attribute results is " + Quote(text, kMostQuoted) + ", expected nothing or 'lse'");
  }
  text.clear();
  attributes.String("operands", &text);
  a.operands = SplitWords(text);
  text.clear();
  attributes.String("relative_index", &text);
  STOF_RETURN_IF_ERROR(attributes.CheckTypes());
  STOF_RETURN_IF_ERROR(CheckRoles(a.operands, roles));
  STOF_RETURN_IF_ERROR(ParseRelativeIndex(text, &a));
  STOF_RETURN_IF_ERROR(ParseSequences(&a));
  if (a.empty_rows != EmptyRows::kZero && std::find(a.operands.begin(), a.operands.end(), "sink") != a.operands.end()) {
    return Status::Error("attribute empty_rows is " + Quote(kPolicies[static_cast<int>(a.empty_rows)], kMostQuoted) +
                         ", expected zero: beside a sink a row without keys is 0");
  }
  return Status();
}

}  // namespace stof
