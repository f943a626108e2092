// SPDX-License-Identifier: Apache-2.0
// The table type of all families of attention kernels: what a family supports, its compiled kernels, how they are run.
// Plain C++.
#ifndef STOF_CUDA_ATTENTION_KERNEL_TABLE_H_
#define STOF_CUDA_ATTENTION_KERNEL_TABLE_H_

#include <cstdint>
#include <limits>
#include <string>

#include "cuda/attention/params.h"
#include "cuda/attention/workspace_bounds.h"
#include "cuda/common/device_properties.h"
#include "cuda/common/kernel_plan.h"
#include "cuda/schedule/tile_schedule.h"
#include "plugins/core/base/status.h"
#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {

class AttentionJob;

// What a kernel does to scores before the mask: nothing but a positive scale; softcap, a relative bias and any scale;
// or these and a bias of every query-key pair.
enum class ScoreMod { kNone, kRelativeBias, kFullBias };

// What decides which compiled kernels can compute a problem.
struct KernelProblem {
  int capability = 80;  // of the device: 10 * major + minor
  DType dtype = DType::kF16;
  DType kv_dtype = DType::kUndefined;  // of quantized keys and values; else kUndefined
  int head_size = 0;                   // the larger of D and Dv
  int64_t queries = 0;                 // S
  int64_t packed_queries = 0;          // decode kernels: query rows of all heads that a CTA packs
  bool has_softcap_or_bias = false;    // softcap, a relative or a full bias
  bool has_full_bias = false;
  bool has_positive_scale = true;
  bool allows_tf32 = false;         // fp32: matmuls may have the error of TF32
  bool has_aligned_rows = true;     // query, key and value can be read 16 bytes at a time
  bool has_aligned_bias = true;     // TMA can read the full bias, if there is one
  bool has_relative_terms = false;  // products by tables of relative positions, or a factor of the relative bias
  bool skips_scores = false;        // key tiles may be left out by their scores
  AttentionPrecision precision = AttentionPrecision::kFull;  // where kernels with 8-bit operands fit

  bool has_int8_operands() const { return precision != AttentionPrecision::kFull && score_mod() == ScoreMod::kNone; }
  ScoreMod score_mod() const {
    if (has_full_bias) return ScoreMod::kFullBias;
    return has_softcap_or_bias || !has_positive_scale ? ScoreMod::kRelativeBias : ScoreMod::kNone;
  }
};

// Whether rows of query, key and value can be read 16 bytes at a time. CheckCudaAttention ensures it for fp16 and bf16.
inline bool HasAlignedRows(const AttentionArgs& args) {
  if (args.shape.dtype != DType::kF32) return true;
  bool aligned = args.shape.D % 4 == 0 && args.shape.Dv % 4 == 0;
  for (const Strides* stride : {&args.query.stride, &args.key.stride, &args.value.stride}) {
    aligned = aligned && stride->b % 4 == 0 && stride->h % 4 == 0 && stride->s % 4 == 0;
  }
  for (const void* base : {args.query.data, args.key.data, args.value.data}) {
    aligned = aligned && reinterpret_cast<uintptr_t>(base) % 16 == 0;
  }
  return aligned;
}

// The functions that launch a kernel. Each family derives its own type. Launchers give a CUDA error code, 0 for none.
struct KernelCode {};
// The code of families with one launcher.
template <typename Params>
struct LaunchCode : KernelCode {
  using Function = int (*)(const Params& params, void* stream);
  constexpr explicit LaunchCode(Function function) : launch(function) {}
  Function launch;
};

// One size of the CTAs that a row of a table has: a whole tile of the block mask, or a part of one. What its launches
// need of the device.
struct CtaSize {
  static constexpr int kMostStages = 2;
  int rows = 0;                            // query rows; 0: this size is not compiled
  int ctas_per_sm = 1;                     // that the registers allow
  int most_stages = 0;                     // buffers for keys and for values
  int shared_bytes[kMostStages + 1] = {};  // of a CTA with so many stages; with 0, keys and values share a buffer
};
// Whether so many CTAs with so many stages fit the shared memory of an SM.
inline bool FitsSharedMemory(const CtaSize& size, int stages, int ctas, const DeviceProperties& device) {
  const int bytes = size.shared_bytes[stages];
  return bytes <= device.cta_shared_bytes && ctas * (bytes + kReservedSharedBytes) <= device.sm_shared_bytes;
}

// One compiled kernel: a row of a family's table.
struct KernelEntry {
  const char* name = "";   // of the kernel; where is_scheduled, of its family, and KernelName adds the tile
  int head_size = 0;       // elements of a head in its tiles; D and Dv fit it
  int rows = 0, keys = 0;  // of a tile
  int ctas_per_sm = 1;
  bool is_scheduled = false;  // it runs a tile schedule, by which its time is predicted
  bool skips_scores = false;  // it leaves out key tiles by their scores
  TileCost cost;              // where is_scheduled
  const KernelCode* code = nullptr;

  template <typename Code>
  const Code& code_as() const {
    return static_cast<const Code&>(*code);
  }
};
using KernelTable = ArrayView<KernelEntry>;

// The name in plans, in the attribute `kernel` and in STOF_CUDA_KERNEL: "sm80", or with the tile: "sm90-128x64x2" has
// 128 query rows, 64 keys and 2 CTAs an SM.
inline std::string KernelName(const KernelEntry& kernel) {
  if (!kernel.is_scheduled) return kernel.name;
  return std::string(kernel.name) + "-" + std::to_string(kernel.rows) + "x" + std::to_string(kernel.keys) + "x" +
         std::to_string(kernel.ctas_per_sm);
}

// When a family is considered (ChooseKernel).
enum class KernelRole {
  kDecode,     // few queries
  kScheduled,  // persistent CTAs with a tile schedule: the fastest one where some fit
  kTiled,      // one CTA for each tile row: where no other kernel fits
  kRowwise,    // sparse masks of scattered keys
};

struct KernelFamily;
// The decision of one attention. rows: of a CTA, which may have a part of a tile of the block mask.
using AttentionPlan = KernelPlan<KernelFamily, KernelEntry>;

// A family of kernels: a folder of cuda/attention/, and a line in families.cc.
struct KernelFamily {
  KernelRole role = KernelRole::kTiled;

  // ---- what it supports ----
  int least_capability = 80, most_capability = std::numeric_limits<int>::max();
  bool takes_16_bit = false;  // fp16 and bf16
  bool takes_fp32 = false;
  bool takes_quantized = false;  // keys and values, beside 16-bit queries
  int least_head_size = 1, most_head_size = 256;
  int64_t most_queries = std::numeric_limits<int64_t>::max();
  bool needs_aligned_rows = false, needs_aligned_bias = false;
  bool takes_relative_terms = false;

  // ---- its kernels ----
  // The table for the problem's dtype, head size and score modification; empty: there is none. The device and the
  // limits above are checked by FindKernels.
  KernelTable (*find)(const KernelProblem& problem) = nullptr;
  // Completes a plan of this family: makes the block mask of the run, and decides by it. May replace plan->kernel by
  // another one of the family.
  Status (*plan)(AttentionJob* job, AttentionPlan* plan) = nullptr;
  // Queues the planned run on the job's stream.
  Status (*run)(AttentionJob* job, const AttentionPlan& plan) = nullptr;
  // Makes the block masks that a run needs.
  Status (*prepare)(AttentionJob* job, const KernelEntry& kernel) = nullptr;
  // An upper bound of AttentionPlan::workspace for these arguments and smaller ones, without a device; nullptr: a run
  // needs none (workspace_bounds.h).
  WorkspaceBound workspace_bound = nullptr;
};

// The kernels of a family that can compute the problem.
inline KernelTable FindKernels(const KernelFamily& family, const KernelProblem& problem) {
  const bool fits = problem.capability >= family.least_capability && problem.capability <= family.most_capability &&
                    (problem.dtype == DType::kF32 ? family.takes_fp32 : family.takes_16_bit) &&
                    (family.takes_quantized || !IsQuantized(problem.kv_dtype)) &&
                    problem.head_size >= family.least_head_size && problem.head_size <= family.most_head_size &&
                    problem.queries <= family.most_queries &&
                    (problem.has_aligned_rows || !family.needs_aligned_rows) &&
                    (problem.has_aligned_bias || !family.needs_aligned_bias) &&
                    (family.takes_relative_terms || !problem.has_relative_terms);
  return fits ? family.find(problem) : KernelTable();
}

// Tables by head size, in rising order: the one of the first size that holds the problem's.
struct HeadSizeTable {
  int head_size;
  KernelTable (*find)(const KernelProblem& problem);
};
template <int kCount>
KernelTable FindByHeadSize(const HeadSizeTable (&tables)[kCount], const KernelProblem& problem) {
  for (const HeadSizeTable& table : tables) {
    if (problem.head_size <= table.head_size) return table.find(problem);
  }
  return KernelTable();
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_KERNEL_TABLE_H_
