// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/select.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/attention/rowwise/api.h"
#include "cuda/schedule/rowwise_cost.h"
#include "plugins/core/mask/block_mask_cache.h"

namespace stof {
namespace cuda {
namespace {

constexpr size_t kMostRemembered = 4096;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// STOF_CUDA_KERNEL, read once.
const KernelChoice& Environment() {
  static const auto* choice = [] {
    const char* text = std::getenv("STOF_CUDA_KERNEL");
    return new KernelChoice(ReadKernelChoice(text == nullptr ? "" : text));
  }();
  return *choice;
}

// What TakeKernel was told, at first by the environment.
std::atomic<int>& Taken() {
  static std::atomic<int> taken{Environment().number};
  return taken;
}

// Every name that some head size has.
std::vector<std::string> AllNames() {
  std::vector<std::string> names = {kSm80Name, kRowsName};
  for (const int head_size : {64, 128, 192, 256}) {
    for (const Extras extras : {Extras::kNone, Extras::kDistances, Extras::kPairs}) {
      for (const Sm90Kernel* kernel = FindSm90(head_size, false, extras); kernel->launch != nullptr; ++kernel) {
        const std::string name = NameOf(*kernel);
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      }
    }
  }
  return names;
}

const Sm90Kernel* Asked(const Sm90Kernel* kernels) {
  int index = TakenKernel();
  if (index < 0) return nullptr;
  for (const Sm90Kernel* kernel = kernels; kernel->launch != nullptr; ++kernel) {
    if (index-- == 0) return kernel;
  }
  return nullptr;
}

// By how much the row-wise kernel has to be faster by the model, and the least pairs that a tile skips for each it has.
constexpr double kRowsMargin = 0.9;
constexpr int64_t kFewestSkipped = 8;

}  // namespace

std::string NameOf(const Sm90Kernel& kernel) {
  return "sm90-" + std::to_string(kernel.rows) + "x" + std::to_string(kernel.keys) + "x" +
         std::to_string(kernel.workers);
}

const Sm90Kernel* Named(const Sm90Kernel* kernels, const char* name) {
  if (*name == '\0') return nullptr;
  for (const Sm90Kernel* kernel = kernels; kernel->launch != nullptr; ++kernel) {
    if (NameOf(*kernel) == name) return kernel;
  }
  return nullptr;
}

KernelChoice ReadKernelChoice(const std::string& text) {
  KernelChoice choice;
  if (text.empty()) return choice;
  if (text.size() <= 3 && text.find_first_not_of("0123456789") == std::string::npos) {
    choice.number = std::atoi(text.c_str());
    return choice;
  }
  const std::vector<std::string> names = AllNames();
  if (std::find(names.begin(), names.end(), text) != names.end()) {
    choice.name = text;
    return choice;
  }
  std::string list;
  for (const std::string& name : names) list += " " + name;
  choice.status = Status::Error("the environment variable STOF_CUDA_KERNEL is '" + text.substr(0, 64) +
                                "', expected a number or one of" + list);
  return choice;
}

Status NamedByEnvironment(const char** name) {
  *name = Environment().name.c_str();
  return Environment().status;
}

void TakeKernel(int index) { Taken().store(index, std::memory_order_relaxed); }

int TakenKernel() { return Taken().load(std::memory_order_relaxed); }

MaskForm FormOf(const Sm90Kernel& kernel, const Problem& problem) {
  // For tests of rows that are few, and would all be halved.
  static const bool halves = [] {
    const char* const text = std::getenv("STOF_CUDA_HALVES");
    return text == nullptr || std::strcmp(text, "0") != 0;
  }();
  MaskForm form;
  form.m = kernel.rows, form.n = kernel.keys;
  form.workers = kernel.workers * problem.multiprocessors;
  form.section = problem.section;
  form.sharing = problem.sharing;
  form.cost = kernel.cost;
  if (!halves) form.cost.half = 0;
  form.fragments = true;
  return form;
}

namespace {

// That of the plan.
Status PredictRowsOfTiles(const MaskForm& form, const Problem& problem, int64_t* nanoseconds) {
  const ExprSizes& sizes = problem.sizes;
  if (problem.mask == nullptr) {
    const int64_t rows = sizes.B * sizes.H * CeilDiv(sizes.S, form.m), rounds = CeilDiv(rows, form.workers);
    *nanoseconds = rounds * (form.cost.row + form.cost.full * CeilDiv(CeilDiv(sizes.T, form.n), form.cost.split));
    if (AreHalved(form.cost, rows, form.workers)) *nanoseconds = *nanoseconds * form.cost.half / 100;
    return Status();
  }
  std::shared_ptr<const BlockMask> mask;
  STOF_RETURN_IF_ERROR(BlockMaskCache::Global().Get(*problem.mask, problem.hash, sizes, form.m, form.n, &mask));
  if (IsPlanned(*mask, sizes.B, sizes.H)) {
    *nanoseconds =
        TimeOf(PlanWork(*mask, WalkOf(*mask), sizes.B, sizes.H, form.workers, form.section, form.cost), form.cost);
    return Status();
  }
  const auto rows = static_cast<int64_t>(mask->full_begin.size());  // of all tables
  int64_t partial = 0;
  for (size_t at = 0; at < mask->full_begin.size(); ++at) partial += mask->full_begin[at] - mask->row_ptr[at];
  const int64_t all = static_cast<int64_t>(mask->key_tile.size());
  const double each = static_cast<double>(form.cost.row) +
                      static_cast<double>(form.cost.partial * partial + form.cost.full * (all - partial)) /
                          static_cast<double>(std::max<int64_t>(1, rows));
  const double items = static_cast<double>(sizes.B) * static_cast<double>(sizes.H) * mask->rows;
  *nanoseconds = static_cast<int64_t>(each * items / form.workers);
  return Status();
}

// Never more than Predict says.
Status PredictAtLeast(const Sm90Kernel& kernel, const Problem& problem, int64_t* nanoseconds) {
  *nanoseconds = 0;
  if (problem.mask == nullptr) return Status();
  const MaskForm form = FormOf(kernel, problem);
  const ExprSizes& sizes = problem.sizes;
  std::shared_ptr<const BlockMask> mask;
  STOF_RETURN_IF_ERROR(BlockMaskCache::Global().Get(*problem.mask, problem.hash, sizes, form.m, form.n, &mask));
  if (!IsPlanned(*mask, sizes.B, sizes.H)) return Status();
  *nanoseconds =
      LeastOfPlan(*mask, sizes.B, sizes.H, form.workers, form.cost) + form.cost.reread * (problem.bytes >> 20);
  return Status();
}

}  // namespace

Status Predict(const Sm90Kernel& kernel, const Problem& problem, int64_t* nanoseconds) {
  const MaskForm form = FormOf(kernel, problem);
  STOF_RETURN_IF_ERROR(PredictRowsOfTiles(form, problem, nanoseconds));
  *nanoseconds += form.cost.reread * (problem.bytes >> 20);
  return Status();
}

Status SelectRows(const Problem& problem, const Sm90Kernel* kernel, int head_bytes, bool fp32, bool* rows) {
  using Key = std::tuple<const Sm90Kernel*, uint64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int, bool, int>;
  static std::mutex mutex;
  static auto* remembered = new std::map<Key, bool>;
  const ExprSizes& sizes = problem.sizes;
  const Key key{kernel,  problem.hash, sizes.B,    sizes.H, sizes.S,
                sizes.T, sizes.P,      head_bytes, fp32,    problem.multiprocessors};
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = remembered->find(key);
    if (found != remembered->end()) {
      *rows = found->second;
      return Status();
    }
  }
  *rows = false;
  const int m = kernel == nullptr ? kTileRows : kernel->rows, n = kernel == nullptr ? kTileKeys : kernel->keys;
  std::shared_ptr<const BlockMask> tiled;
  STOF_RETURN_IF_ERROR(BlockMaskCache::Global().Get(*problem.mask, problem.hash, sizes, m, n, &tiled));
  const MaskCounts counts = CountPairs(*tiled, sizes.B, sizes.H);
  // With this many pairs in a tile no time for a key is short enough; the exact count is only made below it.
  if (counts.pairs * kFewestSkipped < counts.tiles * m * n) {
    double tiles_take = 0;
    if (kernel != nullptr) {
      int64_t nanoseconds = 0;
      STOF_RETURN_IF_ERROR(Predict(*kernel, problem, &nanoseconds));
      tiles_take = static_cast<double>(nanoseconds);
    } else {
      tiles_take = PredictSm80(counts, head_bytes, fp32, problem.multiprocessors);
    }
    std::shared_ptr<const BlockMask> fine;
    const Status status = BlockMaskCache::Global().Get(*problem.mask, problem.hash, sizes, kRowsTile, kRowsTile, &fine);
    if (!status.too_large()) {  // else it stays with the larger tiles
      STOF_RETURN_IF_ERROR(status);
      const double taken = PredictRows(CountPairs(*fine, sizes.B, sizes.H), sizes.B * sizes.H * sizes.S, head_bytes,
                                       problem.multiprocessors);
      *rows = taken < kRowsMargin * tiles_take;
    }
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (remembered->size() >= kMostRemembered) remembered->clear();
  remembered->emplace(key, *rows);
  return Status();
}

const Sm90Kernel* SelectUnseen(const Sm90Kernel* kernels) {
  if (const Sm90Kernel* asked = Asked(kernels)) return asked;
  // Of a row of eight tiles, half of them partial.
  const auto pair = [](const Sm90Kernel& k) {
    return static_cast<double>(k.cost.row + 4 * k.cost.full + 4 * k.cost.partial) /
           static_cast<double>(k.rows * k.keys * k.workers * k.cost.split);
  };
  const Sm90Kernel* best = kernels;
  for (const Sm90Kernel* kernel = kernels; kernel->launch != nullptr; ++kernel) {
    if (kernel->keys < best->keys || (kernel->keys == best->keys && pair(*kernel) < pair(*best))) best = kernel;
  }
  return best;
}

Status Select(const Sm90Kernel* kernels, const Problem& problem, const Sm90Kernel** selected) {
  using Key =
      std::tuple<const Sm90Kernel*, uint64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int>;
  static std::mutex mutex;
  static auto* remembered = new std::map<Key, const Sm90Kernel*>;  // never destroyed, as the device's cache is not
  *selected = Asked(kernels);
  if (*selected != nullptr) return Status();
  const ExprSizes& sizes = problem.sizes;
  const Key key{kernels, problem.hash, sizes.B,         sizes.H,       sizes.S,
                sizes.T, sizes.P,      problem.section, problem.bytes, problem.multiprocessors};
  if (problem.mask != nullptr) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = remembered->find(key);
    if (found != remembered->end()) {
      *selected = found->second;
      return Status();
    }
  }
  // Those that may need least first: then most plans need not be made.
  std::vector<std::pair<int64_t, const Sm90Kernel*>> candidates;
  for (const Sm90Kernel* kernel = kernels; kernel->launch != nullptr; ++kernel) {
    candidates.emplace_back(0, kernel);
    STOF_RETURN_IF_ERROR(PredictAtLeast(*kernel, problem, &candidates.back().first));
  }
  std::sort(candidates.begin(), candidates.end());
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const auto& [bound, kernel] : candidates) {
    if (bound > least) break;
    int64_t nanoseconds = 0;
    STOF_RETURN_IF_ERROR(Predict(*kernel, problem, &nanoseconds));
    if (nanoseconds < least || (nanoseconds == least && kernel < *selected)) least = nanoseconds, *selected = kernel;
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
