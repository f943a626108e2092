// SPDX-License-Identifier: Apache-2.0
// The sparse MLP on a device: parameters of its kernels, their workspace and launches.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cuda/common/device_properties.h"
#include "cuda/common/status.h"
#include "cuda/gemm/gemm.h"
#include "cuda/sparse_mlp/choose.h"
#include "cuda/sparse_mlp/params.h"
#include "cuda/sparse_mlp/run.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/contract/sparse_mlp_limits.h"

namespace stof {
namespace cuda {
namespace {

constexpr int64_t kDenseTokens = 4096;  // that GEMMs of all neurons compute at a time
// Of a tensor: offsets of the workspace stay far from overflow.
constexpr int64_t kMostElements = std::numeric_limits<int64_t>::max() / 64;

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
NeuronRows RowsOf(const SparseMlpArgs& a, const SparseMlpWeight& weight) {
  NeuronRows rows;
  rows.dtype = a.dtype;
  rows.data = static_cast<const char*>(weight.data), rows.scales = static_cast<const char*>(weight.scales);
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

NeuronRows DownRowsOf(const SparseMlpArgs& a) {
  NeuronRows rows;
  rows.dtype = a.dtype;
  const SparseMlpWeight& weight = a.down_weight;
  rows.data = static_cast<const char*>(weight.data), rows.scales = static_cast<const char*>(weight.scales);
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
NeuronRows FactorOf(const SparseMlpArgs& a, const SparseMlpWeight& factor, int64_t size, bool are_tokens_vectorized) {
  NeuronRows rows;
  rows.dtype = a.dtype;
  rows.data = static_cast<const char*>(factor.data), rows.scales = static_cast<const char*>(factor.scales);
  rows.size = size, rows.stride = size * SizeOf(a.dtype);
  if (factor.scales != nullptr) {
    rows.bits = 8, rows.has_row_scales = true;
    rows.blocks = 1, rows.block_shift = 62;  // every index of a value is in block 0
    rows.stride = RoundUp(size, SparseMlpLimits::kPredictorMultiple);
  }
  rows.is_vectorized = are_tokens_vectorized && (rows.bits != 0 || size % kMlpChunk == 0) &&
                       IsAligned(factor.data, ChunkBytes(a, rows.bits));
  return rows;
}

// Whether tensor cores compute the output of a launch: all tokens at once, from hidden values in the workspace.
bool IsDownTiled(const SparseMlpArgs& a, int64_t tokens) {
  const NeuronRows rows = DownRowsOf(a);
  return TakesTiles(tokens) && a.dtype != DType::kF32 && rows.bits == 0 && rows.is_vectorized;
}

// The address of an element of a tensor; nullptr of one that is absent.
const void* ElementOf(const void* tensor, DType dtype, int64_t element) {
  return tensor == nullptr ? nullptr : static_cast<const char*>(tensor) + element * SizeOf(dtype);
}
void* ElementOf(void* tensor, DType dtype, int64_t element) {
  return static_cast<char*>(tensor) + element * SizeOf(dtype);
}

// The buffers of a call, in one workspace.
class Layout {
 public:
  Layout(const SparseMlpArgs& a, const MlpPlan& plan) {
    const int64_t tokens = std::min<int64_t>(a.T, kMlpTokens);
    segment = std::max<int64_t>(kMlpLeastSegment, RoundUp(CeilDiv(a.F, kMlpMostSegments), kMlpLeastSegment));
    segments = CeilDiv(a.F, segment);
    slices = CeilDiv(a.N, kMlpSliceColumns);
    group_tokens = plan.rows;
    splits = plan.splits;
    projected_stride = RoundUp(a.R, kMlpChunk);
    const bool has_predictor = a.selection == SparseMlpSelection::kPredictor;
    projected = Take(has_predictor ? tokens : 0, projected_stride * 4);
    counts = Take(segments, sizeof(int32_t));
    neurons = Take(segments * segment, sizeof(int32_t));
    masks = Take(segments * segment, sizeof(uint64_t));
    // Without gate and up weights, tensor cores alone read hidden values: in the last launch, which may have few
    // tokens.
    const bool has_weights = a.gate_weight.data != nullptr || a.up_weight.data != nullptr;
    const int64_t last_tokens = a.T % kMlpTokens;
    hidden = Take(has_weights ? tokens : IsDownTiled(a, last_tokens) ? last_tokens : 0, a.F * 4);
    partials = Take(splits > 1 ? splits * tokens : 0, a.N * 4);
    // For groups of 8 tokens: a plan does not know addresses, and groups of 16 need aligned ones.
    finished = Take(slices * CeilDiv(tokens, 8), sizeof(int32_t));
  }
  int64_t segment = 0, segments = 0, slices = 0, splits = 0, group_tokens = 0, projected_stride = 0;
  int64_t projected = 0, counts = 0, neurons = 0, masks = 0, hidden = 0, partials = 0, finished = 0;
  int64_t bytes = 0;

 private:
  int64_t Take(int64_t count, int64_t size) {
    const int64_t at = bytes;
    bytes += RoundUp(count * size, 64);
    return at;
  }
};

SparseMlpProblem Describe(const SparseMlpArgs& a, int sm_count) {
  SparseMlpProblem problem;
  problem.T = a.T, problem.K = a.K, problem.F = a.F, problem.N = a.N, problem.R = a.R;
  problem.dtype = a.dtype;
  problem.has_rows = a.gate_weight.data != nullptr || a.up_weight.data != nullptr;
  problem.is_down_tiled = IsDownTiled(a, std::min<int64_t>(a.T, kMlpTokens));
  problem.sm_count = sm_count;
  return problem;
}

Status CheckSizes(const SparseMlpArgs& a) {
  int64_t read = 0;
  if (std::max({a.K, a.F, a.N, a.R}) > SparseMlpLimits::kMostSize ||
      __builtin_mul_overflow(a.T, std::max({a.K, a.F, a.N, a.R}), &read) || read > kMostElements ||
      __builtin_mul_overflow(a.F, std::max(a.K, a.N), &read) || read > kMostElements) {
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

// The kernels' parameters for all tokens of a call; the first launch computes the first kMlpTokens of them.
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
    p.has_predictor_relu = a.has_predictor_relu;
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
  if (p.selection == SparseMlpSelection::kPredictor) {
    if (p.R > 0) STOF_RETURN_IF_ERROR(checked(kernels.project(p, stream), "launch of a predictor's projection"));
    STOF_RETURN_IF_ERROR(checked(kernels.score(p, stream), "launch of a predictor's scores"));
  } else {
    STOF_RETURN_IF_ERROR(checked(kernels.select(p, stream), "launch of the selection of neurons"));
  }
  if (p.runs_hidden_kernel) {
    STOF_RETURN_IF_ERROR(
        checked(kernels.hidden(p, 2 * device.sm_count, stream), "launch of the hidden values of an MLP"));
  }
  return checked(kernels.down(p, stream), "launch of the output of an MLP");
}

// ---- many tokens: GEMMs of all neurons ----
// K is split so that up to so many CTAs project the tokens: two an SM of an H100. A plan does not know the device.
constexpr int64_t kMostProjectCtas = 264;
constexpr int64_t kLeastSplitValues = 256;
int64_t CountProjectTiles(const SparseMlpArgs& a, int64_t tokens) {
  return CeilDiv(tokens, int64_t{kManyTokens}) * CeilDiv(a.R, int64_t{kManyRows});
}

// cuBLASLt divides the down matmul of a few hundred tokens along F, which needs more than what GEMMs have elsewhere.
constexpr size_t kMlpGemmWorkspace = size_t{32} << 20;

class DenseLayout {
 public:
  explicit DenseLayout(const SparseMlpArgs& a) {
    const int64_t tokens = std::min(a.T, kDenseTokens), item = SizeOf(a.dtype);
    const bool has_gate = a.gate_weight.data != nullptr, has_up = a.up_weight.data != nullptr;
    gate_matmul = Take(has_gate ? tokens : 0, a.F * item);
    up_matmul = Take(has_up ? tokens : 0, a.F * item);
    hidden = has_gate ? gate_matmul : has_up ? up_matmul : Take(tokens, a.F * item);
    // The factors of the predictor use this buffer first, then the weights, one after the other.
    predictor_up_offset = RoundUp(a.R * a.K * item, 256);
    const int64_t weight_bytes = a.bits > 0 ? a.F * std::max(a.K, a.N) * item : 0;
    const int64_t factor_bytes = a.predictor_down.scales == nullptr ? 0 : predictor_up_offset + a.F * a.R * item;
    dequantized = Take(std::max(weight_bytes, factor_bytes), 1);
    if (has_gate) {
      projected_stride = RoundUp(a.R, kMlpChunk);
      // Enough for any number of splits: a tile of fp32 sums for each CTA.
      partials = Take(std::max(kMostProjectCtas, CountProjectTiles(a, tokens)), int64_t{kManyTokens} * kManyRows * 4);
      terms = Take(kMostTerms * tokens, projected_stride * item);
      inverse_scales = Take(tokens, 4);
      mask_words = CeilDiv(a.F, int64_t{32});
      masks = Take(tokens, mask_words * 4);
    }
    gemm = Take(1, static_cast<int64_t>(kMlpGemmWorkspace));
  }
  int64_t gate_matmul = 0, up_matmul = 0, hidden = 0, dequantized = 0, predictor_up_offset = 0, partials = 0, terms = 0,
          inverse_scales = 0, masks = 0, gemm = 0;
  int64_t projected_stride = 0, mask_words = 0;
  int64_t bytes = 0;

 private:
  int64_t Take(int64_t count, int64_t size) {
    const int64_t at = bytes;
    bytes += RoundUp(count * size, 256);
    return at;
  }
};

// A run of up to kDenseTokens tokens.
class DenseRun {
 public:
  DenseRun(const SparseMlpArgs& args, const DenseLayout& layout, char* workspace, const DeviceProperties& device,
           const RunContext& context)
      : a_(args),
        layout_(layout),
        base_(workspace),
        device_(device),
        context_(context),
        kernels_(KernelsOf(args.dtype)) {
    gemm_context_ = context;
    gemm_context_.self = base_ + layout.gemm;
    gemm_context_.allocate = [](void* self, size_t bytes) { return bytes <= kMlpGemmWorkspace ? self : nullptr; };
  }

  Status Run() {
    MlpMaskedHiddenParams p;
    p.T = a_.T, p.F = a_.F;
    p.activation = a_.activation, p.selection = a_.selection;
    p.gate = a_.gate, p.gate_bias = a_.gate_bias, p.up_bias = a_.up_bias;
    p.threshold = a_.threshold, p.threshold_stride = a_.threshold_stride;
    p.hidden = base_ + layout_.hidden;
    if (a_.gate_weight.data != nullptr) {
      STOF_RETURN_IF_ERROR(Predict());
      p.masks = Masks(), p.mask_words = layout_.mask_words;
      p.gate = base_ + layout_.gate_matmul;
      STOF_RETURN_IF_ERROR(Multiply(a_.gate_weight, base_ + layout_.gate_matmul));
    }
    if (a_.up_weight.data != nullptr) {
      p.up_matmul = base_ + layout_.up_matmul;
      STOF_RETURN_IF_ERROR(Multiply(a_.up_weight, base_ + layout_.up_matmul));
    }
    p.is_vectorized =
        a_.F % kMlpChunk == 0 && IsAligned(p.gate, 16) && IsAligned(p.gate_bias, 16) && IsAligned(p.up_bias, 16);
    STOF_RETURN_IF_ERROR(CheckMlpLaunch(kernels_.masked_hidden(p, context_.stream)));
    GemmArgs g;
    g.M = a_.T, g.N = g.stride = a_.N, g.K = a_.F, g.dtype = a_.dtype;
    PreferCublasLt(&g);
    g.a = p.hidden, g.b0 = a_.down_weight.data, g.bias0 = a_.down_bias, g.output = a_.output;
    if (a_.down_weight.scales != nullptr) STOF_RETURN_IF_ERROR(DequantizeWeight(DownRowsOf(a_), true, &g.b0));
    return RunGemm(g, gemm_context_);
  }

 private:
  static Status CheckMlpLaunch(int error) {
    return ToStatus(static_cast<cudaError_t>(error), "launch of an MLP of many tokens");
  }

  // The number of tokens changes with each prompt, so that timing the kernels of each would cost more than it saves.
  static void PreferCublasLt(GemmArgs* g) { g->prefers_cublaslt = true, g->most_workspace = kMlpGemmWorkspace; }

  uint32_t* Masks() const { return reinterpret_cast<uint32_t*>(base_ + layout_.masks); }

  // The masks of a predictor.
  Status Predict() {
    MlpSelectManyParams p;
    p.T = a_.T, p.K = a_.K, p.F = a_.F, p.R = a_.R;
    p.input = a_.input, p.predictor_down = a_.predictor_down.data, p.predictor_up = a_.predictor_up.data;
    p.threshold = a_.threshold, p.threshold_stride = a_.threshold_stride;
    p.has_predictor_relu = a_.has_predictor_relu;
    if (a_.predictor_down.scales != nullptr) {
      p.down_scales = a_.predictor_down.scales, p.up_scales = a_.predictor_up.scales;
      STOF_RETURN_IF_ERROR(DequantizeFactor(a_.predictor_down, a_.R, a_.K, 0, &p.predictor_down));
      STOF_RETURN_IF_ERROR(DequantizeFactor(a_.predictor_up, a_.F, a_.R, layout_.predictor_up_offset, &p.predictor_up));
    }
    p.is_down_vectorized = a_.K % kMlpChunk == 0 && IsAligned(a_.input, 16) && IsAligned(p.predictor_down, 16);
    p.is_up_vectorized = a_.R % kMlpChunk == 0 && IsAligned(p.predictor_up, 16);
    const int64_t tiles = std::max<int64_t>(1, CountProjectTiles(a_, a_.T));
    const int64_t splits =
        std::clamp<int64_t>(kMostProjectCtas / tiles, 1, CeilDiv(std::max<int64_t>(1, a_.K), kLeastSplitValues));
    p.split_values = RoundUp(CeilDiv(a_.K, splits), kMlpChunk), p.splits = static_cast<int32_t>(splits);
    p.projected_stride = layout_.projected_stride;
    p.partials = reinterpret_cast<float*>(base_ + layout_.partials);
    p.terms = base_ + layout_.terms;
    p.inverse_scales = reinterpret_cast<float*>(base_ + layout_.inverse_scales);
    p.masks = Masks(), p.mask_words = layout_.mask_words;
    return CheckMlpLaunch(kernels_.select_many(p, context_.stream));
  }

  // *values: a factor without its scales. int8 values are exact in fp16 and bf16.
  Status DequantizeFactor(const SparseMlpWeight& factor, int64_t count, int64_t size, int64_t offset,
                          const void** values) {
    MlpDequantizeParams p;
    const bool are_results_aligned = size % kMlpChunk == 0;
    p.rows = FactorOf(a_, factor, size, are_results_aligned), p.count = count;
    p.applies_scales = false;
    return Dequantize(p, offset, values);
  }

  Status DequantizeWeight(const NeuronRows& rows, bool is_down, const void** weight) {
    MlpDequantizeParams p;
    p.rows = rows, p.count = a_.F, p.is_down = is_down;
    return Dequantize(p, 0, weight);
  }

  Status Dequantize(MlpDequantizeParams p, int64_t offset, const void** weight) {
    p.weight = base_ + layout_.dequantized + offset;
    *weight = p.weight;
    return CheckMlpLaunch(kernels_.dequantize(p, 8 * device_.sm_count, context_.stream));
  }

  // to[T, F] = input · weight^T.
  Status Multiply(const SparseMlpWeight& weight, void* to) {
    GemmArgs g;
    g.M = a_.T, g.N = a_.F, g.K = g.stride = a_.K, g.dtype = a_.dtype;
    g.is_b_transposed = true;
    PreferCublasLt(&g);
    g.a = a_.input, g.b0 = weight.data, g.output = to;
    if (weight.scales != nullptr) STOF_RETURN_IF_ERROR(DequantizeWeight(RowsOf(a_, weight), false, &g.b0));
    return RunGemm(g, gemm_context_);
  }

  const SparseMlpArgs& a_;
  const DenseLayout& layout_;
  char* const base_;
  const DeviceProperties& device_;
  const RunContext& context_;
  const MlpKernels& kernels_;
  RunContext gemm_context_;
};

Status RunDense(const SparseMlpArgs& args, const DeviceProperties& device, const RunContext& context) {
  const DenseLayout layout(args);
  void* workspace = nullptr;
  STOF_RETURN_IF_ERROR(context.Allocate(static_cast<size_t>(layout.bytes), &workspace));
  for (int64_t t = 0; t < args.T; t += kDenseTokens) {
    SparseMlpArgs some = args;
    some.T = std::min(kDenseTokens, args.T - t);
    some.input = ElementOf(args.input, args.dtype, t * args.K),
    some.gate = ElementOf(args.gate, args.dtype, t * args.F);
    some.output = ElementOf(args.output, args.dtype, t * args.N);
    STOF_RETURN_IF_ERROR(DenseRun(some, layout, static_cast<char*>(workspace), device, context).Run());
  }
  return Status();
}

}  // namespace

Status RunSparseMlp(const SparseMlpArgs& args, const RunContext& context) {
  STOF_RETURN_IF_ERROR(CheckSizes(args));
  DeviceProperties device;
  STOF_RETURN_IF_ERROR(GetDeviceProperties(&device));
  KernelRequest request;
  STOF_RETURN_IF_ERROR(MlpRequests().Get("", 0, &request));
  const SparseMlpProblem problem = Describe(args, device.sm_count);
  const std::vector<MlpPlan> plans = ListMlpPlans(problem, request);
  PrintChoiceOf(problem, plans);
  const MlpPlan& plan = plans.front();
  if (plan.family->kind == MlpFamilyKind::kGemms) return RunDense(args, device, context);
  const Layout layout(args, plan);
  void* workspace = nullptr;
  STOF_RETURN_IF_ERROR(context.Allocate(static_cast<size_t>(layout.bytes), &workspace));
  MlpParams p = ParamsOf(args, layout, workspace);
  for (int64_t t = 0; t < args.T; t += kMlpTokens) {
    p.T = static_cast<int32_t>(std::min<int64_t>(kMlpTokens, args.T - t));
    p.token_groups = static_cast<int32_t>(CeilDiv(p.T, p.group_tokens));
    p.input = ElementOf(args.input, args.dtype, t * args.K), p.gate = ElementOf(args.gate, args.dtype, t * args.F);
    p.output = ElementOf(args.output, args.dtype, t * args.N);
    p.runs_hidden_kernel = p.gate_rows.data != nullptr || p.up_rows.data != nullptr || IsDownTiled(args, p.T);
    STOF_RETURN_IF_ERROR(Launch(KernelsOf(args.dtype), p, device, context.stream));
  }
  return Status();
}

Status PlanSparseMlpWorkspace(const SparseMlpArgs& args, size_t* bytes) {
  STOF_RETURN_IF_ERROR(CheckSizes(args));
  // Engines are built on machines with another device, or none: as many SMs as any device has.
  constexpr int kMostSms = 512;
  KernelRequest request;
  STOF_RETURN_IF_ERROR(MlpRequests().Get("", 0, &request));
  SparseMlpArgs some = args;
  int64_t most = 0;
  const auto add = [&] {
    const MlpPlan plan = ListMlpPlans(Describe(some, kMostSms), request).front();
    const bool are_gemms = plan.family->kind == MlpFamilyKind::kGemms;
    most = std::max(most, are_gemms ? DenseLayout(some).bytes : Layout(some, plan).bytes);
  };
  // Fewer tokens may have more splits. More than these have a layout of as many tokens with the same last launch.
  for (some.T = 1; some.T <= std::min<int64_t>(args.T, 2 * kMlpTokens); ++some.T) add();
  some.T = args.T;
  add();
  *bytes = static_cast<size_t>(most);
  return Status();
}

}  // namespace cuda
}  // namespace stof
