// SPDX-License-Identifier: Apache-2.0
// Key bounds of the pages of a cache on the CPU: which ones a step computes, and their distribution among threads.
#include "cpu/cached_attention/pages.h"

#include <algorithm>
#include <cstring>

#include "cpu/kernel_table.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/base/parallel_for.h"

namespace stof {
namespace {

// Bytes that are worth a thread of their own.
constexpr int64_t kBytesPerWorker = 64 << 10;
// Pages whose scores are one item: their key bounds pass by once for each four rows of queries.
constexpr int64_t kPagesPerItem = 64;

}  // namespace

void cpu::UpdatePageBounds(const CacheAppendArgs& args, const CacheStep* steps, CpuIsa isa, const Parallel& parallel) {
  const PageBounds& bounds = args.page_bounds;
  const PagesKernels& kernels = *KernelsOf(isa).pages;
  const int64_t heads = args.B * args.G, row = args.D * SizeOf(args.dtype), page = 2 * row;
  const auto first_of = [&](int64_t b) { return FirstComputedPage(bounds, steps[b].past); };
  const auto end_of = [&](int64_t b) { return steps[b].past + steps[b].tokens; };
  int64_t most_taken = 0, most_computed = 0;
  for (int64_t b = 0; b < args.B; ++b) {
    most_taken = std::max(most_taken, first_of(b));
    most_computed = std::max(most_computed, CeilDiv(end_of(b), bounds.rows) - first_of(b));
  }
  const auto past = static_cast<const char*>(bounds.past);
  const auto present = static_cast<char*>(bounds.present);
  if (past != present && most_taken > 0) {
    ParallelFor(parallel, heads, heads * most_taken * page / kBytesPerWorker, [&](int64_t head, int64_t) {
      std::memcpy(present + head * bounds.pages * page, past + head * bounds.past_pages * page,
                  static_cast<size_t>(first_of(head / args.G) * page));
    });
  }
  const auto keys = static_cast<const char*>(args.present_key);
  const int64_t count = heads * most_computed;
  ParallelFor(parallel, count, count * bounds.rows * row / kBytesPerWorker, [&](int64_t item, int64_t) {
    const int64_t head = item / most_computed, b = head / args.G, at = first_of(b) + item % most_computed;
    const int64_t rows = std::min(bounds.rows, end_of(b) - at * bounds.rows);
    if (rows <= 0) return;
    kernels.find_bounds(keys + (head * args.capacity + at * bounds.rows) * row, args.dtype, rows, args.D,
                        present + (head * bounds.pages + at) * page);
  });
}

void CpuScorePages(const AttentionArgs& args, const PageSpan* spans, int64_t pages, float* scores,
                   const Parallel& parallel) {
  const cpu::PagesKernels& kernels = *cpu::KernelsOf(BestCpuIsa()).pages;
  const int64_t G = args.shape.G, chunks = CeilDiv(pages, kPagesPerItem);
  int64_t scored = 0;
  for (int64_t head = 0; head < args.shape.B * G; ++head) scored += spans[head].last - spans[head].first;
  const int64_t bytes = scored * 2 * args.shape.D * SizeOf(args.shape.dtype);
  ParallelFor(parallel, args.shape.B * G * chunks, bytes / kBytesPerWorker, [&](int64_t item, int64_t) {
    const int64_t head = item / chunks, from = item % chunks * kPagesPerItem;
    const int64_t first = std::max<int64_t>(spans[head].first, from);
    const int64_t last = std::min<int64_t>(spans[head].last, from + kPagesPerItem);
    if (first < last) kernels.score(args, head / G, head % G, first, last, scores + head * pages);
  });
}

}  // namespace stof
