// SPDX-License-Identifier: Apache-2.0
// The legal combinations of the parts of AttentionArgs.
#include "plugins/core/contract/attention_args.h"

#include <string>

#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/host/quoted.h"
#include "plugins/core/mask/columns/key_columns.h"

namespace stof {
namespace {

Status CheckShape(const AttentionShape& shape) {
  for (const int64_t size : {shape.B, shape.H, shape.G, shape.S, shape.T, shape.D, shape.Dv}) {
    if (size < 0) return Status::Error("sizes must not be negative, found " + std::to_string(size));
  }
  if (shape.G < 1 || shape.H % shape.G != 0) {
    return Status::Error("H must be a multiple of G, found " + std::to_string(shape.H) + " and " +
                         std::to_string(shape.G));
  }
  if (!IsFloat(shape.dtype)) {
    return Status::Error("attention takes fp32, fp16 and bf16, found data type " + TypeText(shape.dtype));
  }
  return Status();
}

Status CheckScores(const ScoreArgs& scores) {
  if (scores.bias.data != nullptr && !IsFloat(scores.bias.dtype)) {
    return Status::Error("a bias is fp32, fp16 or bf16, found data type " + TypeText(scores.bias.dtype));
  }
  if (scores.relative_bias.table != nullptr && scores.relative_bias.size % 2 != 1) {
    return Status::Error("a relative bias has an odd number of entries, found " +
                         std::to_string(scores.relative_bias.size));
  }
  if (scores.relative_bias.factor != nullptr &&
      (scores.relative_bias.table == nullptr || !IsFloat(scores.relative_bias.factor_dtype))) {
    return Status::Error("factors of a relative bias are fp32, fp16 or bf16, and beside one");
  }
  if (scores.sink.data != nullptr && !IsFloat(scores.sink.dtype)) {
    return Status::Error("sinks are fp32, fp16 or bf16, found data type " + TypeText(scores.sink.dtype));
  }
  if (!AttentionLimits::IsSkipThreshold(scores.skip_threshold)) {
    return Status::Error("skip_threshold is " + PrintFloat(scores.skip_threshold) + ", expected 0 to 2^22");
  }
  if (!AttentionLimits::IsBlockThreshold(scores.block_threshold)) {
    return Status::Error("block_threshold is " + PrintFloat(scores.block_threshold) + ", expected 0 to 1");
  }
  return Status();
}

Status CheckExistingKeys(const AttentionArgs& args) {
  if (args.mask.existence_bias == nullptr) return Status();
  if (AttendsAllKeys(args.mask.empty_rows) &&
      (args.mask.empty_rows == EmptyRows::kMean || args.scores.bias.data == nullptr)) {
    return Status();
  }
  return Status::Error("existence_bias needs empty_rows mean or all; beside all, there is no attention bias");
}

Status CheckQuantized(const AttentionArgs& args) {
  const KvScale& key_scale = args.kv.key_scale;
  const KvScale& value_scale = args.kv.value_scale;
  if (args.shape.kv_dtype == DType::kUndefined) {
    if (key_scale.data == nullptr && value_scale.data == nullptr) return Status();
    return Status::Error("scales are given, expected none: keys and values are not quantized");
  }
  if (!IsQuantized(args.shape.kv_dtype) || key_scale.data == nullptr || value_scale.data == nullptr ||
      AttendsAllKeys(args.mask.empty_rows)) {
    return Status::Error("quantized keys and values are int8 or fp8 with scales, and attended by no fully masked row");
  }
  return Status();
}

Status CheckBlocks(const AttentionArgs& args) {
  const StaticMask& mask = args.mask.fixed;
  if (mask.blocks() == nullptr) return Status();
  // Packed sequences may be shorter than those that the mask was built for.
  const BlockMask& blocks = *mask.blocks();
  const bool has_queries = args.sequences.has_queries ? blocks.S >= args.shape.S : blocks.S == args.shape.S;
  const bool has_keys = args.sequences.given() ? blocks.T >= args.shape.T : blocks.T == args.shape.T;
  if (!has_queries || !has_keys) return Status::Error("the block mask was built for other sizes");
  if (blocks.left > 0 && mask.elements() == nullptr) {
    return Status::Error("a block mask with partial tiles without bits needs the conjuncts that evaluate them");
  }
  if (args.kv.key_ends != nullptr && !args.sequences.given())
    return Status::Error("sequences of own lengths go with no block mask");
  return Status();
}

Status CheckWindow(const AttentionArgs& args) {
  const CausalWindow* window = args.mask.fixed.window();
  if (window == nullptr) {
    if (args.kv.seqlens == nullptr) return Status();
    return Status::Error("seqlens are given, expected none without a causal window");
  }
  if (args.mask.dynamic != nullptr || args.mask.pad != nullptr || args.kv.columns != nullptr) {
    return Status::Error(
        "a causal window is for devices: dynamic conjuncts, padding bytes and columns in keys are not");
  }
  if (window->window_left < -1) {
    return Status::Error("window_left must be -1 or more, found " + std::to_string(window->window_left));
  }
  if (window->columns == nullptr) {
    if (window->window_block == 1) return Status();
    return Status::Error("window_block is " + std::to_string(window->window_block) + ", expected 1 without columns");
  }
  if (window->window_left < 0 || window->window_block < 1) {
    return Status::Error("a causal window with columns needs a window and a block of 1 or more");
  }
  if (window->columns->length() < args.shape.T) {
    return Status::Error("key columns of " + std::to_string(window->columns->length()) + " keys, expected those of " +
                         std::to_string(args.shape.T));
  }
  if (args.kv.pages.given() || args.scores.bias.data != nullptr || !IsLimitedToKeyRange(args)) {
    return Status::Error("a causal window with columns goes with few queries, without pages and an attention bias");
  }
  return Status();
}

// Columns in front of the keys, which the CPU gathers.
Status CheckColumns(const AttentionArgs& args) {
  if (args.kv.columns == nullptr) return Status();
  if (args.kv.columns->packed() > args.shape.T || args.mask.pad != nullptr || args.mask.dynamic != nullptr ||
      args.scores.bias.data != nullptr || args.scores.relative_bias.table != nullptr ||
      AttendsAllKeys(args.mask.empty_rows)) {
    return Status::Error(
        "gathered columns go with no padding, dynamic conjuncts, biases and rows that attend all keys");
  }
  return Status();
}

Status CheckPages(const AttentionArgs& args) {
  const KeyPages& pages = args.kv.pages;
  if (!pages.given()) return Status();
  if (args.kv.key_ends == nullptr) return Status::Error("pages need the number of keys of each sequence");
  if (args.key.stride.b != 0 || args.value.stride.b != 0 || pages.shift < 4) {
    return Status::Error("pages have 16 rows or more, and batch strides of key and value are 0");
  }
  if (args.shape.kv_dtype != DType::kUndefined || args.kv.columns != nullptr) {
    return Status::Error("keys and values in pages are not quantized, and no columns are gathered from them");
  }
  return Status();
}

Status CheckChoice(const AttentionArgs& args) {
  const PageChoice& choice = args.kv.choice;
  if (!choice.given()) return Status();
  if (!AttentionLimits::IsPageRows(choice.rows) || choice.chosen > AttentionLimits::kMostLength ||
      choice.bounds == nullptr) {
    return Status::Error("chosen pages have 16, 32, 64 or 128 rows, and key bounds");
  }
  if (args.shape.S > kMaxStepTokens || args.kv.pages.given() || args.kv.columns != nullptr || args.sequences.given() ||
      args.shape.kv_dtype != DType::kUndefined || AttendsAllKeys(args.mask.empty_rows)) {
    return Status::Error(
        "pages are chosen by at most 16 queries, without a block table, gathered columns, packed sequences, quantized "
        "keys and rows that attend all keys");
  }
  return Status();
}

Status CheckSequences(const AttentionArgs& args) {
  const PackedSequences& sequences = args.sequences;
  if (!sequences.given()) {
    if (!sequences.has_queries && sequences.first_positions == nullptr) return Status();
    return Status::Error("packed queries or first positions are given, expected none without packed sequences");
  }
  if (args.kv.key_ends == nullptr) return Status::Error("packed sequences need the number of keys of each sequence");
  if (args.kv.pages.given() || args.kv.columns != nullptr || args.mask.fixed.window() != nullptr) {
    return Status::Error("packed sequences go with no pages, gathered columns and causal windows");
  }
  if (args.output.lse != nullptr) return Status::Error("packed sequences have no log-sum-exp");
  return Status();
}

Status CheckRelativeTable(const RelativeTable& table, int64_t size, bool has_row_bias) {
  if (!table.given()) return Status();
  if (!IsFloat(table.dtype)) {
    return Status::Error("a relative table is fp32, fp16 or bf16, found data type " + TypeText(table.dtype));
  }
  const RelativeRows& index = table.index;
  if (table.columns != size && !(has_row_bias && table.columns == size + 1)) {
    return Status::Error("a relative table has " + std::to_string(table.columns) +
                         " columns, expected those of its vectors, " + std::to_string(size));
  }
  if (index.row == nullptr) return Status();  // not bound: only types and shapes are known
  if (index.count >= 1 && 0 <= index.first_row && index.first_row <= index.last_row && index.last_row < table.rows) {
    return Status();
  }
  return Status::Error("pairs name rows that a relative table does not have");
}

Status CheckRelative(const AttentionArgs& args) {
  const ScoreArgs& scores = args.scores;
  if (scores.relative_key[1].given() && !scores.relative_key[0].given()) {
    return Status::Error("a second table of keys is given, expected none without the first");
  }
  for (const RelativeTable* table : {&scores.relative_key[0], &scores.relative_key[1], &scores.relative_query}) {
    STOF_RETURN_IF_ERROR(CheckRelativeTable(*table, args.shape.D, true));
  }
  STOF_RETURN_IF_ERROR(CheckRelativeTable(args.relative_value, args.shape.Dv, false));
  if (!scores.has_relative_tables() && !args.relative_value.given()) return Status();
  if (args.kv.columns != nullptr || args.kv.pages.given() || args.shape.kv_dtype != DType::kUndefined ||
      args.mask.fixed.window() != nullptr || (args.kv.key_ends != nullptr && !args.sequences.given())) {
    return Status::Error("relative tables go with no KV cache, quantized keys, gathered columns and causal windows");
  }
  return Status();
}

}  // namespace

Status Check(const AttentionArgs& args) {
  STOF_RETURN_IF_ERROR(CheckShape(args.shape));
  STOF_RETURN_IF_ERROR(CheckScores(args.scores));
  STOF_RETURN_IF_ERROR(CheckExistingKeys(args));
  STOF_RETURN_IF_ERROR(CheckQuantized(args));
  STOF_RETURN_IF_ERROR(CheckBlocks(args));
  STOF_RETURN_IF_ERROR(CheckWindow(args));
  STOF_RETURN_IF_ERROR(CheckColumns(args));
  STOF_RETURN_IF_ERROR(CheckPages(args));
  STOF_RETURN_IF_ERROR(CheckChoice(args));
  STOF_RETURN_IF_ERROR(CheckSequences(args));
  return CheckRelative(args);
}

}  // namespace stof
