// SPDX-License-Identifier: Apache-2.0
// The append step of a paged KV cache on the CPU: checks all lengths, blocks and slots before it writes a row.
#include "cpu/cached_attention/append.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/contract/paged_attention.h"

namespace stof {
namespace {

std::string At(const char* name, int64_t i, int64_t value) {
  return std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(value);
}

Status CheckLengths(const PagedAppendArgs& args) {
  const int64_t N = args.tokens.S;
  if (args.cumulative[0] != 0) {
    return Status::Error(At("cumulative_sequence_length", 0, args.cumulative[0]) + ", expected 0");
  }
  for (int64_t b = 0; b < args.B; ++b) {
    const int64_t begin = args.cumulative[b], end = args.cumulative[b + 1];
    if (end < begin || end > N) {
      return Status::Error(At("cumulative_sequence_length", b + 1, end) + ", expected " + std::to_string(begin) +
                           " (the entry before it) to " + std::to_string(N) + " (the number of tokens)");
    }
    const int64_t past = args.past[b], keys = past + end - begin;
    if (past < 0) return Status::Error(At("past_seqlens", b, past) + ", expected 0 or more");
    if (keys > args.rows_of_table()) {
      return Status::Error(At("past_seqlens", b, past) + ": with " + std::to_string(end - begin) + " new tokens " +
                           std::to_string(keys) + " keys, but block_table has " + std::to_string(args.pages.columns) +
                           " blocks of " + std::to_string(int64_t{1} << args.pages.shift) + " rows a sequence");
    }
    if (args.tokens.transform.cos != nullptr && end > begin && keys > args.tokens.transform.rotary_rows) {
      return Status::Error(At("past_seqlens", b, past) + ": position " + std::to_string(keys - 1) +
                           ", but cos_cache has " + std::to_string(args.tokens.transform.rotary_rows) + " rows");
    }
  }
  return Status();
}

// Copies the entries of the block table that kernels read, each of them a block of the cache.
Status CopyTable(const PagedAppendArgs& args, PagedStep* step) {
  int64_t columns = 1;
  for (int64_t b = 0; b < args.B; ++b) {
    const int64_t last = int64_t{step->key_ends[static_cast<size_t>(b)]} - 1;
    columns = std::max(columns, (last >> args.pages.shift) + 1);
  }
  step->columns = columns;
  step->table.assign(static_cast<size_t>(args.B * columns), 0);
  for (int64_t b = 0; b < args.B; ++b) {
    const int64_t end = step->key_ends[static_cast<size_t>(b)];
    if (args.cumulative[b + 1] == args.cumulative[b]) continue;  // no query reads its keys
    for (int64_t c = args.FirstKey(args.past[b]) >> args.pages.shift; c << args.pages.shift < end; ++c) {
      const int32_t block = args.pages.table[b * args.pages.columns + c];
      if (block < 0 || block >= args.pages.pages) {
        return Status::Error("block_table[" + std::to_string(b) + ", " + std::to_string(c) + "] is " +
                             std::to_string(block) + ", expected a block of the " + std::to_string(args.pages.pages) +
                             " of key_cache");
      }
      step->table[static_cast<size_t>(b * columns + c)] = block;
    }
  }
  return Status();
}

// Finds the row of each token in the cache.
Status FindSlots(const PagedAppendArgs& args, PagedStep* step) {
  const int64_t N = args.tokens.S, rows = args.pages.pages << args.pages.shift;
  step->slots.assign(static_cast<size_t>(N), -1);
  step->positions.assign(static_cast<size_t>(N), 0);
  std::vector<std::pair<int64_t, int64_t>> written;  // slot and token
  for (int64_t b = 0; b < args.B; ++b) {
    for (int64_t t = args.cumulative[b]; t < args.cumulative[b + 1]; ++t) {
      const int64_t position = args.past[b] + t - args.cumulative[b];
      const auto at = static_cast<size_t>(t);
      step->positions[at] = position;
      if (args.slot_mapping != nullptr) {
        const int64_t slot = args.slot_mapping[t];
        if (slot < -1 || slot >= rows) {
          return Status::Error(At("slot_mapping", t, slot) + ", expected -1 to " + std::to_string(rows - 1) +
                               ", the last row of key_cache");
        }
        step->slots[at] = slot;
      } else {
        const int64_t column = position >> args.pages.shift;
        const int64_t block = step->table[static_cast<size_t>(b * step->columns + column)];
        step->slots[at] = (block << args.pages.shift) + position - (column << args.pages.shift);
      }
      if (step->slots[at] >= 0) written.emplace_back(step->slots[at], t);
    }
  }
  std::sort(written.begin(), written.end());
  for (size_t i = 1; i < written.size(); ++i) {
    if (written[i].first != written[i - 1].first) continue;
    return Status::Error(std::string(args.slot_mapping != nullptr ? "slot_mapping" : "block_table") + " gives row " +
                         std::to_string(written[i].first) + " of the cache to tokens " +
                         std::to_string(written[i - 1].second) + " and " + std::to_string(written[i].second) +
                         ", expected a row of its own for each token");
  }
  return Status();
}

}  // namespace

Status CheckPagedStep(const PagedAppendArgs& args, PagedStep* step) {
  STOF_RETURN_IF_ERROR(CheckLengths(args));
  step->key_ends.clear();
  for (int64_t b = 0; b < args.B; ++b) {
    step->key_ends.push_back(args.past[b] + args.cumulative[b + 1] - args.cumulative[b]);
  }
  STOF_RETURN_IF_ERROR(CopyTable(args, step));
  return FindSlots(args, step);
}

Status CpuAppendToPages(const PagedAppendArgs& args, const PagedStep& step, const Parallel& parallel) {
  STOF_RETURN_IF_ERROR(cpu::CheckAppendSizes(args.tokens));
  CacheAppendArgs tokens = args.tokens;
  tokens.transform.position_ids = step.positions.data();
  cpu::AppendProblem problem;
  problem.args = &tokens;
  problem.slots = step.slots.data();
  problem.key = tokens.present_key;
  problem.value = tokens.present_value;
  problem.capacity = tokens.capacity;
  cpu::AppendTokens(problem, BestCpuIsa(), parallel);
  return Status();
}

}  // namespace stof
