// SPDX-License-Identifier: Apache-2.0
// The sparse MLP on a device: parameters of its kernels, their workspace and launches.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "cuda/common/device_properties.h"
#include "cuda/common/status.h"
#include "cuda/sparse_mlp/params.h"
#include "cuda/sparse_mlp/run.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/contract/sparse_mlp_limits.h"

namespace stof {
namespace cuda {
namespace {

constexpr int kDownCtasOfAnSm = 2;
constexpr int64_t kLeastSplit = 8;  // neurons
// Of T * F, and what is planned with: offsets of the workspace stay far from overflow.
constexpr int64_t kMostBytes = std::numeric_limits<int64_t>::max() / 64;

bool IsAligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

int ShiftOf(int64_t power_of_two) {
  int shift = 0;
  while (int64_t{1} << shift < power_of_two) ++shift;
  return shift;
}

int64_t ChunkBytes(const SparseMlpArgs& a, int bits) {
  return bits == 0 ? std::min<int64_t>(16, 8 * SizeOf(a.dtype)) : bits;
}

// A gate or up weight.
MlpRows RowsOf(const SparseMlpArgs& a, const SparseMlpWeight& weight) {
  MlpRows rows;
  rows.data = weight.data, rows.scales = weight.scales;
  rows.zero_points = static_cast<const uint8_t*>(weight.zero_points);
  rows.size = a.K, rows.stride = a.K * SizeOf(a.dtype);
  if (weight.scales != nullptr) {
    rows.bits = a.bits, rows.block_shift = ShiftOf(a.block_size);
    rows.blocks = CeilDiv(a.K, a.block_size);
    rows.stride = rows.blocks * a.block_size * a.bits / 8;
    rows.zero_bytes = CeilDiv(rows.blocks * a.bits, 8);
  }
  rows.is_vectorized =
      a.K % kMlpChunk == 0 && IsAligned(a.input, 16) && IsAligned(weight.data, ChunkBytes(a, rows.bits));
  return rows;
}

MlpRows DownRowsOf(const SparseMlpArgs& a) {
  MlpRows rows;
  const SparseMlpWeight& weight = a.down_weight;
  rows.data = weight.data, rows.scales = weight.scales;
  rows.zero_points = static_cast<const uint8_t*>(weight.zero_points);
  rows.size = a.N, rows.stride = a.N * SizeOf(a.dtype);
  if (weight.scales != nullptr) {
    rows.bits = a.bits, rows.block_shift = ShiftOf(a.block_size);
    rows.stride = CeilDiv(a.N * a.bits, 8);
  }
  rows.is_vectorized = a.N % kMlpChunk == 0 && IsAligned(weight.data, ChunkBytes(a, rows.bits)) &&
                       IsAligned(weight.scales, 16) && IsAligned(weight.zero_points, 8);
  return rows;
}

// A factor of the predictor. Quantized rows are padded, and have one scale.
MlpRows FactorOf(const SparseMlpArgs& a, const SparseMlpWeight& factor, int64_t size, bool are_tokens_vectorized) {
  MlpRows rows;
  rows.data = factor.data, rows.scales = factor.scales;
  rows.size = size, rows.stride = size * SizeOf(a.dtype);
  if (factor.scales != nullptr) {
    rows.bits = 8, rows.block_shift = 62, rows.blocks = 1;
    rows.stride = RoundUp(size, SparseMlpLimits::kPredictorMultiple);
  }
  rows.is_vectorized = are_tokens_vectorized && (rows.bits != 0 || size % kMlpChunk == 0) &&
                       IsAligned(factor.data, ChunkBytes(a, rows.bits));
  return rows;
}

// Memory of a run, in one workspace.
class Layout {
 public:
  Layout(const SparseMlpArgs& a, const DeviceProperties& device) {
    const int64_t tokens = std::min<int64_t>(a.T, kMlpTokens);
    segment = std::max<int64_t>(kMlpLeastSegment, RoundUp(CeilDiv(a.F, kMlpMostSegments), kMlpLeastSegment));
    segments = CeilDiv(a.F, segment);
    slices = CeilDiv(a.N, kMlpSliceColumns);
    group_tokens = tokens == 1 ? 1 : tokens <= 4 ? 4 : 8;
    token_groups = CeilDiv(tokens, group_tokens);
    splits = std::clamp<int64_t>(kDownCtasOfAnSm * device.sm_count / std::max<int64_t>(1, slices * token_groups), 1,
                                 std::max<int64_t>(1, std::min<int64_t>(kMlpMostSplits, a.F / kLeastSplit)));
    projected_stride = RoundUp(a.R, kMlpChunk);
    const bool has_predictor = a.selection == SparseMlpSelection::kPredictor;
    projected = Take(has_predictor ? tokens : 0, projected_stride * 4);
    counts = Take(segments, sizeof(int32_t));
    neurons = Take(segments * segment, sizeof(int32_t));
    masks = Take(segments * segment, sizeof(uint64_t));
    const bool has_hidden = a.gate_weight.data != nullptr || a.up_weight.data != nullptr;
    hidden = Take(has_hidden ? tokens : 0, a.F * 4);
    partials = Take(splits > 1 ? splits * tokens : 0, a.N * 4);
    finished = Take(slices * token_groups, sizeof(int32_t));
  }
  int64_t segment = 0, segments = 0, slices = 0, splits = 0, token_groups = 0, group_tokens = 0, projected_stride = 0;
  int64_t projected = 0, counts = 0, neurons = 0, masks = 0, hidden = 0, partials = 0, finished = 0;
  int64_t bytes = 0;

 private:
  int64_t Take(int64_t count, int64_t size) {
    const int64_t at = bytes;
    bytes += RoundUp(count * size, 64);
    return at;
  }
};

Status CheckSizes(const SparseMlpArgs& a) {
  int64_t read = 0;
  if (std::max({a.K, a.F, a.N, a.R}) > SparseMlpLimits::kMostSize ||
      __builtin_mul_overflow(a.T, std::max({a.K, a.F, a.N, a.R}), &read) || read > kMostBytes) {
    return Status::Error("T, K, F, N and R of " + std::to_string(a.T) + ", " + std::to_string(a.K) + ", " +
                         std::to_string(a.F) + ", " + std::to_string(a.N) + " and " + std::to_string(a.R) +
                         " are too large for the CUDA kernels");
  }
  return Status();
}

const MlpKernels& KernelsOf(DType dtype) {
  if (dtype == DType::kF16) return MlpKernelsF16();
  return dtype == DType::kBF16 ? MlpKernelsBf16() : MlpKernelsF32();
}

// The parameters of a run of all tokens; the first launch computes those of the first kMlpTokens.
MlpParams ParamsOf(const SparseMlpArgs& a, const Layout& layout, void* workspace) {
  MlpParams p;
  p.K = a.K, p.F = a.F, p.N = a.N, p.R = a.R;
  p.activation = a.activation, p.selection = a.selection;
  p.input = a.input, p.gate = a.gate, p.output = a.output;
  if (a.gate_weight.data != nullptr) p.gate_rows = RowsOf(a, a.gate_weight);
  if (a.up_weight.data != nullptr) p.up_rows = RowsOf(a, a.up_weight);
  if (a.gate_weight.data != nullptr && a.up_weight.data != nullptr) {
    p.gate_rows.is_vectorized = p.up_rows.is_vectorized = p.gate_rows.is_vectorized && p.up_rows.is_vectorized;
  }
  p.down_rows = DownRowsOf(a);
  if (a.selection == SparseMlpSelection::kPredictor) {
    p.predictor_down = FactorOf(a, a.predictor_down, a.K, a.K % kMlpChunk == 0 && IsAligned(a.input, 16));
    p.predictor_up = FactorOf(a, a.predictor_up, a.R, true);
  }
  p.gate_bias = a.gate_bias, p.up_bias = a.up_bias, p.down_bias = a.down_bias;
  p.threshold = a.threshold, p.threshold_stride = a.threshold_stride;
  auto* const base = static_cast<char*>(workspace);
  p.projected = reinterpret_cast<float*>(base + layout.projected), p.projected_stride = layout.projected_stride;
  p.segment = layout.segment, p.segments = static_cast<int32_t>(layout.segments);
  p.counts = reinterpret_cast<int32_t*>(base + layout.counts);
  p.neurons = reinterpret_cast<int32_t*>(base + layout.neurons);
  p.masks = reinterpret_cast<uint64_t*>(base + layout.masks);
  p.hidden = reinterpret_cast<float*>(base + layout.hidden);
  p.partials = reinterpret_cast<float*>(base + layout.partials);
  p.finished = reinterpret_cast<int32_t*>(base + layout.finished);
  p.splits = static_cast<int32_t>(layout.splits), p.slices = static_cast<int32_t>(layout.slices);
  p.group_tokens = static_cast<int32_t>(layout.group_tokens);
  return p;
}

Status Launch(const MlpKernels& kernels, const MlpParams& p, const DeviceProperties& device, void* stream) {
  const auto checked = [](int error, const char* what) { return ToStatus(static_cast<cudaError_t>(error), what); };
  const bool has_hidden = p.gate_rows.data != nullptr || p.up_rows.data != nullptr;
  if (p.selection == SparseMlpSelection::kPredictor) {
    if (p.R > 0) STOF_RETURN_IF_ERROR(checked(kernels.project(p, stream), "launch of a predictor's projection"));
    STOF_RETURN_IF_ERROR(checked(kernels.score(p, stream), "launch of a predictor's scores"));
  } else {
    STOF_RETURN_IF_ERROR(checked(kernels.select(p, stream), "launch of the selection of neurons"));
  }
  if (has_hidden) {
    STOF_RETURN_IF_ERROR(
        checked(kernels.hidden(p, 2 * device.sm_count, stream), "launch of the hidden values of an MLP"));
  }
  return checked(kernels.down(p, stream), "launch of the output of an MLP");
}

}  // namespace

Status RunSparseMlp(const SparseMlpArgs& args, const RunContext& context) {
  STOF_RETURN_IF_ERROR(CheckSizes(args));
  DeviceProperties device;
  STOF_RETURN_IF_ERROR(GetDeviceProperties(&device));
  const Layout layout(args, device);
  void* workspace = nullptr;
  STOF_RETURN_IF_ERROR(context.Allocate(static_cast<size_t>(layout.bytes), &workspace));
  MlpParams p = ParamsOf(args, layout, workspace);
  const int64_t item = SizeOf(args.dtype);
  const auto advance = [item](const void* from, int64_t elements) {
    return from == nullptr ? nullptr : static_cast<const char*>(from) + elements * item;
  };
  for (int64_t t = 0; t < args.T; t += kMlpTokens) {
    p.T = static_cast<int32_t>(std::min<int64_t>(kMlpTokens, args.T - t));
    p.token_groups = static_cast<int32_t>(CeilDiv(p.T, p.group_tokens));
    p.input = advance(args.input, t * args.K), p.gate = advance(args.gate, t * args.F);
    p.output = static_cast<char*>(args.output) + t * args.N * item;
    p.is_list_early = p.gate_rows.data != nullptr || p.up_rows.data != nullptr;
    STOF_RETURN_IF_ERROR(Launch(KernelsOf(args.dtype), p, device, context.stream));
  }
  return Status();
}

Status PlanSparseMlpWorkspace(const SparseMlpArgs& args, size_t* bytes) {
  STOF_RETURN_IF_ERROR(CheckSizes(args));
  // Engines are built on machines with another device, or none: as many SMs as any device has.
  DeviceProperties device;
  device.sm_count = 512;
  SparseMlpArgs some = args;
  int64_t most = 0;
  // Fewer tokens may have more splits.
  for (some.T = 1; some.T <= std::min<int64_t>(args.T, kMlpTokens); ++some.T) {
    most = std::max(most, Layout(some, device).bytes);
  }
  *bytes = static_cast<size_t>(most);
  return Status();
}

}  // namespace cuda
}  // namespace stof
