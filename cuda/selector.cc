// SPDX-License-Identifier: Apache-2.0
#include "cuda/selector.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "plugins/core/block_mask_cache.h"

namespace stof {
namespace cuda {
namespace {

constexpr size_t kMostRemembered = 4096;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

const Sm90Kernel* Asked(const Sm90Kernel* kernels) {
  const char* text = std::getenv("STOF_CUDA_KERNEL");
  if (text == nullptr || *text == '\0') return nullptr;
  int index = std::atoi(text);
  for (const Sm90Kernel* kernel = kernels; kernel->launch != nullptr; ++kernel) {
    if (index-- == 0) return kernel;
  }
  return nullptr;
}

}  // namespace

MaskForm FormOf(const Sm90Kernel& kernel, const Problem& problem) {
  const int64_t items = problem.sizes.B * problem.sizes.H * CeilDiv(problem.sizes.S, kernel.rows);
  MaskForm form;
  form.m = kernel.rows, form.n = kernel.keys;
  form.workers = static_cast<int>(std::min<int64_t>(int64_t{kernel.workers} * problem.multiprocessors, items));
  form.section = problem.section;
  form.cost = kernel.cost;
  form.fragments = true;
  return form;
}

Status Predict(const Sm90Kernel& kernel, const Problem& problem, int64_t* nanoseconds) {
  const ExprSizes& sizes = problem.sizes;
  const MaskForm form = FormOf(kernel, problem);
  if (problem.mask == nullptr) {
    const int64_t rounds = CeilDiv(sizes.B * sizes.H * CeilDiv(sizes.S, form.m), std::max(1, form.workers));
    *nanoseconds = rounds * (form.cost.row + form.cost.full * CeilDiv(CeilDiv(sizes.T, form.n), form.cost.split));
    return Status();
  }
  std::shared_ptr<const BlockMask> mask;
  STOF_RETURN_IF_ERROR(BlockMaskCache::Global().Get(*problem.mask, problem.hash, sizes, form.m, form.n, &mask));
  *nanoseconds = PlanWork(*mask, sizes.B, sizes.H, form.workers, form.section, form.cost).longest;
  return Status();
}

Status Select(const Sm90Kernel* kernels, const Problem& problem, const Sm90Kernel** selected) {
  using Key = std::tuple<const Sm90Kernel*, uint64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int>;
  static std::mutex mutex;
  static auto* remembered = new std::map<Key, const Sm90Kernel*>;  // never destroyed, as the device's cache is not
  *selected = Asked(kernels);
  if (*selected != nullptr) return Status();
  const ExprSizes& sizes = problem.sizes;
  const Key key{kernels,         problem.hash,           sizes.B, sizes.H, sizes.S, sizes.T, sizes.P,
                problem.section, problem.multiprocessors};
  if (problem.mask != nullptr) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = remembered->find(key);
    if (found != remembered->end()) {
      *selected = found->second;
      return Status();
    }
  }
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const Sm90Kernel* kernel = kernels; kernel->launch != nullptr; ++kernel) {
    int64_t nanoseconds = 0;
    STOF_RETURN_IF_ERROR(Predict(*kernel, problem, &nanoseconds));
    if (nanoseconds < least) least = nanoseconds, *selected = kernel;
  }
  if (problem.mask != nullptr) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (remembered->size() >= kMostRemembered) remembered->clear();
    remembered->emplace(key, *selected);
  }
  return Status();
}

}  // namespace cuda
}  // namespace stof
