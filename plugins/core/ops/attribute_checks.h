// SPDX-License-Identifier: Apache-2.0
// Errors of attributes, and checks that several operators make of theirs.
#ifndef STOF_PLUGINS_CORE_OPS_ATTRIBUTE_CHECKS_H_
#define STOF_PLUGINS_CORE_OPS_ATTRIBUTE_CHECKS_H_

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>

#include "plugins/core/base/status.h"
#include "plugins/core/contract/attention_args.h"
#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/host/quoted.h"
#include "plugins/core/host/skip_scores.h"

namespace stof {

inline Status UnexpectedAttribute(const std::string& name, const std::string& found, const std::string& expected) {
  return Status::Error("attribute " + name + " is " + found + ", expected " + expected);
}
inline Status UnexpectedAttribute(const std::string& name, int64_t found, const std::string& expected) {
  return UnexpectedAttribute(name, std::to_string(found), expected);
}

// Reads an attribute that is 0 or 1; absent it is 0.
inline Status ParseFlag(const AttributeReader& attributes, const char* name, bool* value) {
  int64_t found = 0;
  attributes.Int(name, &found);
  if (found != 0 && found != 1) return UnexpectedAttribute(name, found, "0 or 1");
  *value = found == 1;
  return Status();
}

// Reads attribute skip_threshold of an attention. It is 0 where STOF_SKIP_SCORES turns skipping off.
inline Status ParseSkipThreshold(const AttributeReader& attributes, float* threshold) {
  float found = 0.0f;
  attributes.Float("skip_threshold", &found);
  if (!AttentionLimits::IsSkipThreshold(found)) {
    return UnexpectedAttribute("skip_threshold", PrintFloat(found), "0 to 4194304");
  }
  *threshold = AreScoresSkipped() ? found : 0.0f;
  return Status();
}

// Likewise attribute block_threshold.
inline Status ParseBlockThreshold(const AttributeReader& attributes, float* threshold) {
  float found = 0.0f;
  attributes.Float("block_threshold", &found);
  if (!AttentionLimits::IsBlockThreshold(found)) {
    return UnexpectedAttribute("block_threshold", PrintFloat(found), "0 to 1");
  }
  *threshold = AreScoresSkipped() ? found : 0.0f;
  return Status();
}

// Reads attribute precision of an attention.
inline Status ParsePrecision(const AttributeReader& attributes, AttentionPrecision* precision) {
  std::string text;
  attributes.String("precision", &text);
  static constexpr const char* kPrecisions[] = {"", "int8", "int8_fp8"};
  const auto* found = std::find(std::begin(kPrecisions), std::end(kPrecisions), text);
  if (found == std::end(kPrecisions)) {
    return UnexpectedAttribute("precision", Quote(text, kMostQuoted), "nothing, int8 or int8_fp8");
  }
  *precision = static_cast<AttentionPrecision>(found - std::begin(kPrecisions));
  return Status();
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_ATTRIBUTE_CHECKS_H_
