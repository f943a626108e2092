// SPDX-License-Identifier: Apache-2.0
// Parses the attributes of StofSparseMLP.
#include <iterator>
#include <string>

#include "plugins/core/contract/sparse_mlp_limits.h"
#include "plugins/core/host/quoted.h"
#include "plugins/core/ops/attribute_checks.h"
#include "plugins/core/ops/sparse_mlp/sparse_mlp.h"

namespace stof {
namespace {

using Limits = SparseMlpLimits;

// The index of an attribute's value among its words; an absent attribute is the first one.
template <int kWords>
Status ParseWord(const AttributeReader& attributes, const char* name, const char* const (&words)[kWords], int* index) {
  std::string text = words[0];
  attributes.String(name, &text);
  std::string expected;
  for (int i = 0; i < kWords; ++i) {
    if (text == words[i]) {
      *index = i;
      return Status();
    }
    expected += (i == 0 ? "" : ", ") + std::string(words[i]);
  }
  return UnexpectedAttribute(name, Quote(text), "one of " + expected);
}

}  // namespace

Status ParseSparseMlp(const AttributeReader& attributes, SparseMlpAttributes* parsed) {
  SparseMlpAttributes& a = *parsed;
  int activation = 0, selection = 0, predictor_activation = 0;
  int64_t id = 0;
  const Status activation_status = ParseWord(attributes, "activation", kActivationNames, &activation);
  const Status selection_status = ParseWord(attributes, "selection", kSparseMlpSelections, &selection);
  const Status predictor_status =
      ParseWord(attributes, "predictor_activation", kSparseMlpPredictorActivations, &predictor_activation);
  attributes.Int("bits", &a.bits);
  attributes.Int("block_size", &a.block_size);
  attributes.Int("accuracy_level", &a.accuracy_level);
  attributes.Int("hot_neurons", &a.hot_neurons);
  attributes.Int("mlp_id", &id);
  const Status allow_bf16_status = ParseFlag(attributes, "allow_bf16", &a.allow_bf16);
  STOF_RETURN_IF_ERROR(attributes.CheckTypes());
  STOF_RETURN_IF_ERROR(activation_status);
  STOF_RETURN_IF_ERROR(selection_status);
  STOF_RETURN_IF_ERROR(predictor_status);
  STOF_RETURN_IF_ERROR(allow_bf16_status);
  a.activation = static_cast<Activation>(activation);
  a.selection = static_cast<SparseMlpSelection>(selection);
  a.has_predictor_relu = predictor_activation != 0;
  if (a.has_predictor_relu && a.selection != SparseMlpSelection::kPredictor) {
    return Status::Error("attribute predictor_activation is \"relu\", expected \"none\" with selection = " +
                         std::string(kSparseMlpSelections[selection]));
  }
  if (a.bits != 0 && a.bits != 4 && a.bits != 8) return UnexpectedAttribute("bits", a.bits, "0, 4 or 8");
  const bool is_power = a.block_size > 0 && (a.block_size & (a.block_size - 1)) == 0;
  if (a.bits == 0 && a.block_size != 0) {
    return UnexpectedAttribute("block_size", a.block_size, "0, as attribute bits is 0: no weight is quantized");
  }
  if (a.bits != 0 && (!is_power || a.block_size < Limits::kSmallestBlock || a.block_size > Limits::kLargestBlock)) {
    return UnexpectedAttribute("block_size", a.block_size,
                               "a power of two from " + std::to_string(Limits::kSmallestBlock) + " to " +
                                   std::to_string(Limits::kLargestBlock));
  }
  if (a.accuracy_level < 0 || a.accuracy_level > Limits::kMostAccuracyLevel) {
    return UnexpectedAttribute("accuracy_level", a.accuracy_level,
                               "0 to " + std::to_string(Limits::kMostAccuracyLevel));
  }
  if (a.hot_neurons < 0) return UnexpectedAttribute("hot_neurons", a.hot_neurons, "0 or more");
  return Status();
}

}  // namespace stof
