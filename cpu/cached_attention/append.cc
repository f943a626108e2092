// SPDX-License-Identifier: Apache-2.0
// The append step on the CPU: checks lengths and positions, moves rows of the cache, and distributes the new tokens
// among threads.
#include "cpu/cached_attention/append.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/cached_attention/pages.h"
#include "cpu/kernel_table.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/contract/attention_limits.h"

namespace stof {
namespace {

using cpu::AppendProblem;
using cpu::CacheStep;

static_assert(cpu::kLargestHead >= AttentionLimits::kLargestHeadSize, "a row of a head has to fit");

// Bytes that are worth a thread of their own.
constexpr int64_t kBytesPerWorker = 64 << 10;

std::string LengthText(const CacheAppendArgs& args, int64_t b) {
  return "seqlens_k[" + std::to_string(b) + "] is " + std::to_string(args.seqlens[b]);
}

// How many of n positions the cache holds: all, or of a sliding-window cache the last ones.
int64_t RowsHeld(const CacheAppendArgs& args, int64_t n) {
  if (args.sliding_window == 0 || n <= args.capacity) return n;
  const int64_t block = args.capacity - args.sliding_window + 1;  // positions that are dropped at once
  return n - block * CeilDiv(n - args.capacity, block);
}

CacheStep MakeStep(const CacheAppendArgs& args, int64_t b) {
  CacheStep step;
  const int64_t total = int64_t{args.seqlens[b]} + 1;
  step.past = args.is_first_prompt ? 0 : total - args.S;
  step.tokens = args.is_first_prompt ? total : args.S;
  step.held = RowsHeld(args, step.past);
  step.dropped = step.held + step.tokens - RowsHeld(args, total);
  step.first_row = args.staging_key != nullptr ? step.held : step.held - step.dropped;
  return step;
}

// Rows that staging has to hold, 0 where present keeps every row that a query attends.
int64_t StagingRows(const CacheAppendArgs& args, const CacheStep& step) {
  const int64_t first = step.past - step.held;  // position of row 0 of the past cache
  const int64_t wanted = std::max<int64_t>(0, step.past - args.sliding_window + 1);
  return first + step.dropped > wanted ? step.held + step.tokens : 0;
}

}  // namespace

Status cpu::CheckAppendSizes(const CacheAppendArgs& args) {
  if (!IsFloat(args.dtype)) return Status::Error("the CPU kernel takes fp32, fp16 and bf16");
  const bool is_quantized = IsQuantized(CacheType(args));
  if (!is_quantized && CacheType(args) != args.dtype) {
    return Status::Error("the CPU kernel takes caches of the type of query, int8 and fp8 e4m3fn");
  }
  if (is_quantized && (args.key_scale.data == nullptr || args.value_scale.data == nullptr)) {
    return Status::Error("quantized caches need k_scale and v_scale");
  }
  if (args.D < 1 || args.D > AttentionLimits::kLargestHeadSize) {
    return Status::Error("the head size is " + std::to_string(args.D) + ", expected 1 to " +
                         std::to_string(AttentionLimits::kLargestHeadSize));
  }
  if (args.B < 0 || args.S < 0 || args.H < 1 || args.G < 1 || args.H % args.G != 0 || args.capacity < 0) {
    return Status::Error("H must be a multiple of G, and sizes not negative");
  }
  const bool rotates =
      args.transform.cos != nullptr || args.transform.query_norm != nullptr || args.transform.key_norm != nullptr;
  if (rotates && args.rotated_query == nullptr && args.B > 0 && args.S > 0) {
    return Status::Error("there is no memory for the rotated queries");
  }
  if (args.transform.cos != nullptr &&
      (args.transform.sin == nullptr || args.transform.rotary_size % 2 != 0 || args.transform.rotary_size < 2 ||
       args.transform.rotary_offset + args.transform.rotary_size > args.D || args.transform.rotary_rows < 1)) {
    return Status::Error("cos_cache rotates " + std::to_string(args.transform.rotary_size) + " elements of a head of " +
                         std::to_string(args.D) + ", expected an even number up to that, and at least one row");
  }
  if (args.sliding_window < 0 || (args.sliding_window > 0 && args.capacity < args.sliding_window)) {
    return Status::Error("sliding_window_cache is " + std::to_string(args.sliding_window) +
                         ", but the cache holds only " + std::to_string(args.capacity) + " rows");
  }
  const bool shared = args.past_key != nullptr && args.past_key == args.present_key;
  if ((shared || (args.sliding_window > 0 && args.past_key != nullptr)) && args.past_capacity != args.capacity) {
    return Status::Error("past_key holds " + std::to_string(args.past_capacity) + " rows and present_key " +
                         std::to_string(args.capacity) + ", expected as many");
  }
  if (shared != (args.past_value != nullptr && args.past_value == args.present_value)) {
    return Status::Error("past and present share a buffer for keys or values alone, expected both or none");
  }
  const PageBounds& bounds = args.page_bounds;
  if (!bounds.given()) return Status();
  if (!AttentionLimits::IsPageRows(bounds.rows) || bounds.pages * bounds.rows < args.capacity ||
      (bounds.past_pages > 0 && bounds.past_pages * bounds.rows < args.past_capacity)) {
    return Status::Error("the key bounds of pages are not those of the caches");
  }
  if (is_quantized || args.sliding_window > 0) {
    return Status::Error("quantized and sliding-window caches have no key bounds of pages");
  }
  return Status();
}

namespace {

Status CheckLength(const CacheAppendArgs& args, int64_t b) {
  const int64_t total = int64_t{args.seqlens[b]} + 1;
  if (args.is_first_prompt) {
    if (total >= 1 && total <= args.S) {
      if (args.sliding_window > 0 || total <= args.capacity) return Status();
      return Status::Error(LengthText(args, b) + ": " + std::to_string(total) + " keys, but present_key holds " +
                           std::to_string(args.capacity));
    }
    return Status::Error(LengthText(args, b) + ", expected 0 to " + std::to_string(args.S - 1) +
                         ", since the first prompt has " + std::to_string(args.S) + " tokens");
  }
  if (total < args.S || total < 1) {
    return Status::Error(LengthText(args, b) + ", expected at least " +
                         std::to_string(std::max<int64_t>(args.S, 1) - 1) + ", since this step adds " +
                         std::to_string(args.S) + " tokens");
  }
  const int64_t past = total - args.S;
  if (past > 0 && args.past_key == nullptr) {
    return Status::Error(LengthText(args, b) + ": " + std::to_string(past) +
                         " keys before this step, but there is no past_key");
  }
  if (args.sliding_window > 0) return Status();
  if (past > 0 && past > args.past_capacity) {
    return Status::Error(LengthText(args, b) + ": " + std::to_string(past) +
                         " keys before this step, but past_key holds " + std::to_string(args.past_capacity));
  }
  if (total <= args.capacity) return Status();
  return Status::Error(LengthText(args, b) + ": " + std::to_string(total) + " keys, but present_key holds " +
                       std::to_string(args.capacity));
}

Status CheckPositions(const CacheAppendArgs& args, int64_t b, const CacheStep& step) {
  if (args.transform.cos == nullptr) return Status();
  const std::string table = "cos_cache has " + std::to_string(args.transform.rotary_rows) + " rows";
  if (args.transform.position_ids == nullptr) {
    const int64_t last = step.past + step.tokens - 1;
    if (last < args.transform.rotary_rows) return Status();
    return Status::Error(LengthText(args, b) + ": position " + std::to_string(last) + ", but " + table);
  }
  for (int64_t i = 0; i < step.tokens; ++i) {
    const int64_t position = args.transform.position_ids[b * args.S + i];
    if (position >= 0 && position < args.transform.rotary_rows) continue;
    return Status::Error("position_ids[" + std::to_string(b) + ", " + std::to_string(i) + "] is " +
                         std::to_string(position) + ", but " + table);
  }
  return Status();
}

// A loop over items, which workers fetch from an atomic counter in steps.
template <typename Work>
struct ItemLoop {
  const Work& work;
  int64_t count, step;
  std::atomic<int64_t> next{0};

  static void Run(void* user, size_t) {
    ItemLoop& loop = *static_cast<ItemLoop*>(user);
    for (;;) {
      const int64_t first = loop.next.fetch_add(loop.step, std::memory_order_relaxed);
      if (first >= loop.count) return;
      loop.work(first, std::min(loop.count, first + loop.step));
    }
  }
};

// Calls work(first, last) over [0, count) on several threads. bytes: about what an item moves.
template <typename Work>
void ForEach(int64_t count, int64_t bytes, const Parallel& parallel, const Work& work) {
  if (count <= 0) return;
  const int64_t step = std::max<int64_t>(1, kBytesPerWorker / std::max<int64_t>(1, bytes));
  const int64_t workers = std::min<int64_t>(std::max(1, parallel.threads), CeilDiv(count, step));
  if (workers <= 1 || parallel.run == nullptr) return work(0, count);
  ItemLoop<Work> loop{work, count, step};
  parallel.run(parallel.self, ItemLoop<Work>::Run, static_cast<size_t>(workers), &loop);
}

// The caches that MoveRows copies between.
struct RowMove {
  const void* from_key;
  const void* from_value;
  int64_t from_capacity;
  void* to_key;
  void* to_value;
  int64_t to_capacity;
};
// Moves rows of each sequence, of keys and of values, to row 0 on. rows_of(b): the first row, and their number.
template <typename RowsOf>
void MoveRows(const CacheAppendArgs& args, const RowMove& move, const Parallel& parallel, const RowsOf& rows_of) {
  const int64_t row = args.D * SizeOf(CacheType(args));
  int64_t most = 0;
  for (int64_t b = 0; b < args.B; ++b) most = std::max(most, rows_of(b).second);
  if (most == 0) return;
  ForEach(2 * args.B * args.G, most * row, parallel, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t head = item / 2;
      const auto [from, rows] = rows_of(head / args.G);
      if (rows <= 0) continue;
      const char* source = static_cast<const char*>(item % 2 == 0 ? move.from_key : move.from_value);
      char* target = static_cast<char*>(item % 2 == 0 ? move.to_key : move.to_value);
      std::memmove(target + head * move.to_capacity * row, source + (head * move.from_capacity + from) * row,
                   static_cast<size_t>(rows * row));
    }
  });
}

}  // namespace

int64_t CpuCacheStagingRows(const CacheAppendArgs& args) {
  int64_t rows = 0;
  if (args.sliding_window <= 0 || args.capacity < args.sliding_window) return 0;
  for (int64_t b = 0; b < args.B; ++b) {
    if (CheckLength(args, b).ok()) rows = std::max(rows, StagingRows(args, MakeStep(args, b)));
  }
  if (rows == 0) return 0;
  for (int64_t b = 0; b < args.B; ++b) {  // one sequence needs staging: all take it
    if (!CheckLength(args, b).ok()) continue;
    const CacheStep step = MakeStep(args, b);
    rows = std::max(rows, step.held + step.tokens);
  }
  return rows;
}

void CpuFindFirstRows(const CacheAppendArgs& args) {
  for (int64_t b = 0; b < args.B; ++b) {
    if (CheckLength(args, b).ok()) args.first_row[b] = static_cast<int32_t>(MakeStep(args, b).first_row);
  }
}

Status CpuAppendToCache(const CacheAppendArgs& args, const Parallel& parallel) {
  return cpu::AppendToCache(args, BestCpuIsa(), parallel);
}

void cpu::AppendTokens(const AppendProblem& problem, CpuIsa isa, const Parallel& parallel) {
  const CacheAppendArgs& args = *problem.args;
  const int64_t token_bytes = (args.rotated_query != nullptr ? args.H + 2 * args.G : 2 * args.G) * args.D * 4;
  const AppendKernels& kernels = *KernelsOf(isa).append;
  ForEach(args.B * args.S, token_bytes, parallel,
          [&](int64_t first, int64_t last) { kernels.append(problem, first, last); });
}

Status cpu::AppendToCache(const CacheAppendArgs& args, CpuIsa isa, const Parallel& parallel) {
  STOF_RETURN_IF_ERROR(CheckAppendSizes(args));
  std::vector<CacheStep> steps(static_cast<size_t>(args.B));
  for (int64_t b = 0; b < args.B; ++b) {
    STOF_RETURN_IF_ERROR(CheckLength(args, b));
    CacheStep& step = steps[static_cast<size_t>(b)];
    step = MakeStep(args, b);
    STOF_RETURN_IF_ERROR(CheckPositions(args, b, step));
    if (args.staging_key != nullptr && step.held + step.tokens > args.staging_capacity) {
      return Status::Error("staging holds " + std::to_string(args.staging_capacity) + " rows, expected " +
                           std::to_string(step.held + step.tokens));
    }
    if (args.first_row != nullptr) args.first_row[b] = static_cast<int32_t>(step.first_row);
  }
  const auto step_of = [&steps](int64_t b) -> const CacheStep& { return steps[static_cast<size_t>(b)]; };
  const bool staged = args.staging_key != nullptr;
  AppendProblem problem;
  problem.args = &args;
  problem.steps = steps.data();
  problem.key = staged ? args.staging_key : args.present_key;
  problem.value = staged ? args.staging_value : args.present_value;
  problem.capacity = staged ? args.staging_capacity : args.capacity;
  if (args.past_key != nullptr) {
    const bool in_place = !staged && args.past_key == args.present_key;
    const RowMove move = {args.past_key, args.past_value, args.past_capacity,
                          problem.key,   problem.value,   problem.capacity};
    MoveRows(args, move, parallel, [&](int64_t b) {
      const CacheStep& step = step_of(b);
      const int64_t from = staged ? 0 : step.dropped;
      return std::pair<int64_t, int64_t>(from, in_place && from == 0 ? 0 : std::max<int64_t>(0, step.held - from));
    });
  }
  AppendTokens(problem, isa, parallel);
  if (staged) {
    const RowMove move = {args.staging_key, args.staging_value, args.staging_capacity,
                          args.present_key, args.present_value, args.capacity};
    MoveRows(args, move, parallel, [&](int64_t b) {
      const CacheStep& step = step_of(b);
      return std::pair<int64_t, int64_t>(step.dropped, step.held + step.tokens - step.dropped);
    });
  }
  if (args.page_bounds.given()) UpdatePageBounds(args, steps.data(), isa, parallel);
  return Status();
}

}  // namespace stof
