// SPDX-License-Identifier: Apache-2.0
// The sparse MLP on the CPU: blocks of tokens, the list of active neurons, and the parallel loops.
#include "cpu/sparse_mlp/sparse_mlp.h"

#include <algorithm>
#include <optional>

#include "cpu/isa_of_kernels.h"
#include "cpu/kernel_table.h"
#include "cpu/sparse_mlp/sparse_mlp_bf16.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/base/parallel_for.h"

namespace stof {
namespace {

using cpu::DotProblem;
using cpu::kMlpNeurons;
using cpu::kMlpPadding;
using cpu::kMlpTokens;
using cpu::MlpBlock;
using cpu::SparseMlpKernels;

constexpr int64_t kTaskBytes = 64 << 10;   // of weights that a task reads, or values that it selects: a few us
constexpr int kPredictorBits = 8;          // of a quantized predictor
constexpr int64_t kLeastPieceBytes = 256;  // bytes of a down row that a thread reads

// Whether a gate or up weight is rounded: where kernels for it run, they multiply it by rounded tokens.
bool ReadsBf16Tokens(const SparseMlpArgs& a) {
  return a.gate_weight.rounded != nullptr || a.up_weight.rounded != nullptr;
}

// The kernels that multiply rounded weights in bf16; nullptr where the instruction set has none, or no weight is
// rounded.
const cpu::SparseMlpBf16Kernels* FindBf16Kernels(const SparseMlpArgs& a, CpuIsa isa) {
  if (a.T < cpu::kLeastBf16Tokens || (!ReadsBf16Tokens(a) && a.down_weight.rounded == nullptr)) return nullptr;
  const std::optional<CpuIsa> found = cpu::FindIsaOfKernels(isa, &cpu::KernelTable::sparse_mlp_bf16);
  return found ? cpu::KernelsOf(*found).sparse_mlp_bf16 : nullptr;
}

// Whether tokens in fp32 are multiplied by a gate or up weight, or by the predictor. rounds_tokens: rounded weights are
// multiplied by rounded tokens.
bool ReadsFp32Tokens(const SparseMlpArgs& a, bool rounds_tokens) {
  if (a.predictor_down.data != nullptr && a.predictor_down.scales == nullptr) return true;
  if (a.bits > 0 && a.accuracy_level == 4) return false;
  const auto is_fp32 = [=](const SparseMlpWeight& weight) {
    return weight.data != nullptr && (!rounds_tokens || weight.rounded == nullptr);
  };
  return is_fp32(a.gate_weight) || is_fp32(a.up_weight);
}

// The buffers of a call, in one workspace. has_bf16_kernels: FindBf16Kernels found some.
class Layout {
 public:
  Layout(const SparseMlpArgs& a, bool has_bf16_kernels) {
    const int64_t tokens = std::min(a.T, kMlpTokens);
    const bool reads_input = a.gate_weight.data != nullptr || a.up_weight.data != nullptr;
    is_copied = reads_input && (a.dtype != DType::kF32 || a.K % kMlpPadding != 0 || tokens > 2);
    // Tokens a multiple of 4 KiB apart would share cache sets.
    x_stride = is_copied ? RoundUp(a.K, kMlpPadding) + kMlpPadding : a.K;
    rank_stride = RoundUp(a.R, kMlpPadding) + kMlpPadding;
    is_int8 = reads_input && a.bits > 0 && a.accuracy_level == 4;
    x_sums_stride = is_int8 ? RoundUp(CeilDiv(a.K, a.block_size), cpu::kInt8SumPadding) : 0;
    x_int8_stride = is_int8 ? RoundUp(a.K, cpu::kInt8TokenPadding) : 0;
    x_scales_stride = a.bits > 0 ? x_int8_stride / (32 / a.bits) : 0;
    x_int8 = Take(tokens * x_int8_stride, sizeof(int8_t));
    x_scales = Take(tokens * x_scales_stride, sizeof(float));
    x_sums = Take(tokens * x_sums_stride, sizeof(float));
    const int64_t longest = a.predictor_down.scales != nullptr ? std::max(a.K, a.R) : 0;
    predictor_int8_stride = RoundUp(longest, cpu::kInt8TokenPadding);
    predictor_sums_stride = RoundUp(CeilDiv(longest, cpu::kPredictorBlock), cpu::kInt8SumPadding);
    predictor_int8 = Take(tokens * predictor_int8_stride, sizeof(int8_t));
    predictor_scales = Take(tokens * predictor_int8_stride / (32 / kPredictorBits), sizeof(float));
    predictor_sums = Take(tokens * predictor_sums_stride, sizeof(float));
    x = Take(is_copied ? tokens * x_stride : 0, sizeof(float));
    const int64_t panel_tokens = tokens >= cpu::kManyTokens ? RoundUp(tokens, cpu::kPanelTokens) : 0;
    static_assert(cpu::kManyTokens >= cpu::kLeastBf16Tokens, "blocks that have panels are rounded where kernels are");
    const bool has_panels = reads_input && ReadsFp32Tokens(a, has_bf16_kernels);
    x_panels = Take(has_panels ? panel_tokens * a.K : 0, sizeof(float));
    projected_panels = Take(panel_tokens * a.R, sizeof(float));
    projected = Take(a.selection == SparseMlpSelection::kPredictor ? tokens * rank_stride : 0, sizeof(float));
    const bool has_bf16_tokens = has_bf16_kernels && ReadsBf16Tokens(a);
    x_bf16 =
        Take(has_bf16_tokens ? CeilDiv(tokens, cpu::kPanelTokens) * cpu::Bf16PanelValues(a.K) : 0, sizeof(uint16_t));
    x_rounded = Take(has_bf16_tokens ? tokens * x_stride : 0, sizeof(float));
    values = Take(tokens * a.F, sizeof(float));
    masks = Take(a.F, sizeof(uint64_t));
    list_masks = Take(a.F, sizeof(uint64_t));
    neurons = Take(a.F, sizeof(int32_t));
    hidden = Take(tokens * a.F, sizeof(float));
    sums_stride = RoundUp(a.N, kMlpPadding) + kMlpPadding;
    const int64_t sums_tokens = tokens >= cpu::kManyTokens ? cpu::PanelSumsStride(tokens) : tokens;
    sums = Take(cpu::kMlpParts * sums_tokens * sums_stride, sizeof(float));
  }
  bool is_copied = false, is_int8 = false;
  int64_t x_stride = 0, rank_stride = 0, x_sums_stride = 0, x_int8_stride = 0, x_scales_stride = 0, sums_stride = 0;
  int64_t predictor_int8_stride = 0, predictor_sums_stride = 0;
  size_t predictor_int8 = 0, predictor_scales = 0, predictor_sums = 0;
  size_t x_int8 = 0, x_scales = 0, x_sums = 0, x = 0, x_panels = 0, projected_panels = 0, projected = 0, values = 0,
         masks = 0, list_masks = 0, neurons = 0, hidden = 0, sums = 0, x_bf16 = 0, x_rounded = 0;
  size_t bytes = 0;

 private:
  size_t Take(int64_t count, size_t size) {
    const size_t at = bytes;
    bytes += (static_cast<size_t>(count) * size + 63) / 64 * 64;
    return at;
  }
};

void SetBlock(int64_t block, NeuronRows* rows) {
  rows->block = block;
  rows->block_shift = __builtin_ctzll(static_cast<uint64_t>(block));
  rows->blocks = CeilDiv(rows->size, block);
}

NeuronRows RowsOf(const SparseMlpArgs& a, const SparseMlpWeight& weight, int64_t size, bool is_down) {
  NeuronRows rows;
  rows.data = static_cast<const char*>(weight.data);
  rows.size = size;
  rows.dtype = a.dtype;
  if (weight.rounded != nullptr) {
    rows.data = reinterpret_cast<const char*>(weight.rounded);
    rows.dtype = DType::kBF16;
  }
  rows.stride = size * SizeOf(rows.dtype);
  if (weight.scales == nullptr) return rows;
  rows.bits = a.bits;
  SetBlock(a.block_size, &rows);
  rows.scales = static_cast<const char*>(weight.scales);
  rows.zero_points = static_cast<const uint8_t*>(weight.zero_points);
  rows.stride = is_down ? CeilDiv(size * a.bits, 8) : CeilDiv(size, a.block_size) * a.block_size * a.bits / 8;
  return rows;
}

// A factor of the predictor.
NeuronRows PredictorRows(const SparseMlpArgs& a, const SparseMlpWeight& factor, int64_t size) {
  NeuronRows rows;
  rows.data = static_cast<const char*>(factor.data);
  rows.size = size;
  rows.dtype = a.dtype;
  rows.stride = size * SizeOf(a.dtype);
  if (factor.scales == nullptr) return rows;
  rows.bits = kPredictorBits;
  SetBlock(cpu::kPredictorBlock, &rows);
  rows.scales = static_cast<const char*>(factor.scales);
  rows.has_row_scales = true;
  rows.stride = RoundUp(size, cpu::kPredictorBlock);
  return rows;
}

class Runner {
 public:
  Runner(const SparseMlpArgs& args, CpuIsa isa, void* workspace, const Parallel& parallel)
      : a_(args),
        kernels_(*cpu::KernelsOf(isa).sparse_mlp),
        bf16_(FindBf16Kernels(args, isa)),
        parallel_(parallel),
        layout_(args, bf16_ != nullptr),
        workspace_(static_cast<char*>(workspace)) {
    b_.args = &a_;
    b_.values = At<float>(layout_.values);
    b_.masks = At<uint64_t>(layout_.masks);
    b_.list_masks = At<uint64_t>(layout_.list_masks);
    b_.neurons = At<int32_t>(layout_.neurons);
    b_.hidden = At<float>(layout_.hidden);
    b_.sums = At<float>(layout_.sums);
    b_.sums_stride = layout_.sums_stride;
    b_.gate_dots.rows = RowsOf(a_, a_.gate_weight, a_.K, false);
    b_.up_dots.rows = RowsOf(a_, a_.up_weight, a_.K, false);
    b_.down = RowsOf(a_, a_.down_weight, a_.N, true);
  }

  // Tokens [first, last), at most kMlpTokens.
  void Run(int64_t first, int64_t last) {
    const int64_t item = SizeOf(a_.dtype);
    b_.tokens = last - first;
    is_bf16_ = bf16_ != nullptr && b_.tokens >= cpu::kLeastBf16Tokens;
    b_.rounds_hidden = is_bf16_ && a_.down_weight.rounded != nullptr;
    b_.output = static_cast<char*>(a_.output) + first * a_.N * item;
    b_.gate = a_.gate == nullptr ? nullptr : static_cast<const char*>(a_.gate) + first * a_.F * item;
    if (b_.gate_dots.rows.data != nullptr || b_.up_dots.rows.data != nullptr) {
      LoadTokens(static_cast<const char*>(a_.input) + first * a_.K * item);
    }
    if (a_.selection == SparseMlpSelection::kPredictor) Predict();
    Select();
    MakeList();
    ParallelFor(parallel_, CeilDiv(b_.count, kMlpNeurons), TasksFor(HiddenBytes()),
                [this](int64_t i, int64_t /*task*/) {
                  kernels_.hidden(b_, i * kMlpNeurons, std::min(b_.count, (i + 1) * kMlpNeurons));
                });
    Down();
  }

 private:
  template <typename T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(workspace_ + offset);
  }
  static int64_t TasksFor(int64_t bytes) { return 1 + bytes / kTaskBytes; }
  int64_t HiddenBytes() const {
    return b_.count * ((b_.gate_dots.rows.data != nullptr ? b_.gate_dots.rows.stride : 0) +
                       (b_.up_dots.rows.data != nullptr ? b_.up_dots.rows.stride : 0) + b_.tokens * 8);
  }

  void LoadTokens(const char* input) {
    x_ = reinterpret_cast<const float*>(input);
    if (layout_.is_copied) {
      float* const to = At<float>(layout_.x);
      for (int64_t t = 0; t < b_.tokens; ++t) {
        kernels_.load(input + t * a_.K * SizeOf(a_.dtype), a_.dtype, a_.K, layout_.x_stride, to + t * layout_.x_stride);
      }
      x_ = to;
    }
    auto* const values = At<int8_t>(layout_.x_int8);
    auto *const scales = At<float>(layout_.x_scales), *const sums = At<float>(layout_.x_sums);
    for (int64_t t = 0; t < b_.tokens && layout_.is_int8; ++t) {
      kernels_.quantize(x_ + t * layout_.x_stride, a_.K, a_.bits, a_.block_size, values + t * layout_.x_int8_stride,
                        scales + t * layout_.x_scales_stride, sums + t * layout_.x_sums_stride);
    }
    x_panels_ = nullptr;
    const bool has_bf16_tokens = is_bf16_ && ReadsBf16Tokens(a_);
    if (has_bf16_tokens) RoundTokens();
    if (ReadsFp32Tokens(a_, is_bf16_)) {
      x_panels_ = FillPanels(x_, layout_.x_stride, a_.K, At<float>(layout_.x_panels));
    }
    for (DotProblem* dots : {&b_.gate_dots, &b_.up_dots}) {
      dots->x = x_, dots->x_stride = layout_.x_stride, dots->x_panels = x_panels_;
      dots->x_bf16 = nullptr, dots->bf16 = nullptr;
      if (has_bf16_tokens && dots->rows.dtype == DType::kBF16) {
        dots->x = At<float>(layout_.x_rounded), dots->x_panels = nullptr;
        dots->x_bf16 = At<uint16_t>(layout_.x_bf16), dots->bf16 = bf16_;
      }
      if (layout_.is_int8) {
        dots->x_int8 = values, dots->x_scales = scales, dots->x_sums = sums;
        dots->x_int8_stride = layout_.x_int8_stride, dots->x_scales_stride = layout_.x_scales_stride,
        dots->x_sums_stride = layout_.x_sums_stride;
      }
      dots->tokens = b_.tokens;
      dots->neurons = b_.neurons, dots->masks = b_.list_masks;
    }
  }

  // Tokens rounded to bf16: in panels, and as rows in fp32.
  void RoundTokens() {
    auto* const panels = At<uint16_t>(layout_.x_bf16);
    float* const rounded = At<float>(layout_.x_rounded);
    const int64_t stride = layout_.x_stride;
    ParallelFor(parallel_, CeilDiv(b_.tokens, cpu::kPanelTokens), TasksFor(b_.tokens * a_.K * 4),
                [=](int64_t i, int64_t /*task*/) {
                  const int64_t first = i * cpu::kPanelTokens;
                  bf16_->fill_panel(x_ + first * stride, stride, std::min(cpu::kPanelTokens, b_.tokens - first), a_.K,
                                    panels + i * cpu::Bf16PanelValues(a_.K), rounded + first * stride);
                });
  }

  // Many tokens in panels, else nullptr.
  const float* FillPanels(const float* x, int64_t stride, int64_t size, float* panels) {
    if (b_.tokens < cpu::kManyTokens) return nullptr;
    ParallelFor(parallel_, CeilDiv(b_.tokens, cpu::kPanelTokens), TasksFor(b_.tokens * size * 4),
                [=](int64_t i, int64_t /*task*/) {
                  const int64_t first = i * cpu::kPanelTokens;
                  kernels_.fill_panel(x + first * stride, stride, std::min(cpu::kPanelTokens, b_.tokens - first), size,
                                      panels + first * size);
                });
    return panels;
  }

  // values[t, j] = the predictor's score of neuron j.
  void Predict() {
    float* const projected = At<float>(layout_.projected);
    std::fill(projected, projected + b_.tokens * layout_.rank_stride, 0.0f);
    DotProblem down = PredictorDots(a_.predictor_down, x_, layout_.x_stride, a_.K, a_.R);
    if (down.rows.bits == 0) down.x_panels = x_panels_;
    RunDots(down, projected, 1, layout_.rank_stride);
    if (a_.has_predictor_relu) {
      const int64_t values = b_.tokens * layout_.rank_stride;
      for (int64_t i = 0; i < values; ++i) projected[i] = projected[i] < 0.0f ? 0.0f : projected[i];  // NaN stays
    }
    DotProblem up = PredictorDots(a_.predictor_up, projected, layout_.rank_stride, a_.R, a_.F);
    if (up.rows.bits == 0) {
      up.x_panels = FillPanels(projected, layout_.rank_stride, a_.R, At<float>(layout_.projected_panels));
    }
    RunDots(up, b_.values, 1, a_.F);
  }

  // Dot products of x with the rows of a factor of the predictor; x is quantized where the factor is.
  DotProblem PredictorDots(const SparseMlpWeight& factor, const float* x, int64_t x_stride, int64_t size,
                           int64_t count) {
    DotProblem dots;
    dots.rows = PredictorRows(a_, factor, size);
    dots.x = x, dots.x_stride = x_stride;
    dots.tokens = b_.tokens, dots.count = count;
    if (dots.rows.bits == 0) return dots;
    auto* const values = At<int8_t>(layout_.predictor_int8);
    auto *const scales = At<float>(layout_.predictor_scales), *const sums = At<float>(layout_.predictor_sums);
    dots.x_int8 = values, dots.x_scales = scales, dots.x_sums = sums;
    dots.x_int8_stride = layout_.predictor_int8_stride;
    dots.x_scales_stride = layout_.predictor_int8_stride / (32 / kPredictorBits);
    dots.x_sums_stride = layout_.predictor_sums_stride;
    for (int64_t t = 0; t < b_.tokens; ++t) {
      kernels_.quantize(x + t * x_stride, size, kPredictorBits, dots.rows.block, values + t * dots.x_int8_stride,
                        scales + t * dots.x_scales_stride, sums + t * dots.x_sums_stride);
    }
    return dots;
  }

  void RunDots(const DotProblem& problem, float* out, int64_t row_stride, int64_t token_stride) {
    ParallelFor(parallel_, CeilDiv(problem.count, kMlpNeurons), TasksFor(problem.count * problem.rows.stride),
                [&](int64_t i, int64_t /*task*/) {
                  const int64_t first = i * kMlpNeurons;
                  kernels_.dots(problem, first, std::min(problem.count, first + kMlpNeurons), out + first * row_stride,
                                row_stride, token_stride);
                });
  }

  void Select() {
    ParallelFor(parallel_, CeilDiv(a_.F, cpu::kMlpSelected), TasksFor(a_.F * b_.tokens),
                [this](int64_t i, int64_t /*task*/) {
                  kernels_.select(b_, i * cpu::kMlpSelected, std::min(a_.F, (i + 1) * cpu::kMlpSelected));
                });
  }

  void MakeList() {
    const uint64_t* const masks = At<uint64_t>(layout_.masks);
    const int64_t block = std::max(cpu::kMlpPartBlock, a_.block_size);
    int64_t count = 0;
    for (int64_t part = 0; part < cpu::kMlpParts; ++part) {
      b_.part_begin[part] = count;
      for (int64_t first = part * block; first < a_.F; first += cpu::kMlpParts * block) {
        const int64_t last = std::min(a_.F, first + block);
        for (int64_t j = first; j < last; ++j) {
          // An idle neuron is overwritten by the next one: no branch to mispredict.
          b_.neurons[count] = static_cast<int32_t>(j);
          b_.list_masks[count] = masks[j];
          count += masks[j] != 0 ? 1 : 0;
        }
      }
    }
    b_.part_begin[cpu::kMlpParts] = count;
    b_.count = b_.gate_dots.count = b_.up_dots.count = count;
  }

  // Whether down adds every listed row to all tokens: so many of the pairs are needed that dense tiles are faster
  // (docs/design/sparse-mlp-cpu.md).
  bool IsDownDense() const {
    constexpr int64_t kFp32Percent = 45, kBf16Percent = 30;
    if (b_.down.bits > 0 && a_.accuracy_level == 4) return false;
    if (!b_.rounds_hidden && b_.tokens < cpu::kManyTokens) return false;
    const int64_t pairs = cpu::CountPairs(b_.list_masks, b_.count);
    return 100 * pairs > (b_.rounds_hidden ? kBf16Percent : kFp32Percent) * b_.count * b_.tokens;
  }

  void Down() {
    const bool is_dense = IsDownDense();
    const bool is_bf16 = is_dense && b_.rounds_hidden;
    b_.has_panel_sums = is_dense && !is_bf16;
    const int64_t row = CeilDiv(a_.N * (b_.down.bits > 0 ? b_.down.bits : 8 * SizeOf(b_.down.dtype)), 8);
    const int64_t tasks = TasksFor(b_.count * row + b_.tokens * a_.N * 4);
    // Whole rows for each thread, where there are as many parts as threads.
    const int64_t pieces = std::clamp<int64_t>(std::min<int64_t>(tasks, parallel_.threads) / cpu::kMlpParts, 1,
                                               std::max<int64_t>(1, row / kLeastPieceBytes));
    const int64_t columns = RoundUp(CeilDiv(a_.N, pieces), cpu::kColumnUnit);
    const int64_t count = CeilDiv(a_.N, columns);
    ParallelFor(parallel_, count * cpu::kMlpParts, tasks, [this, columns, count, is_bf16](int64_t i, int64_t /*task*/) {
      const int64_t first = i % count * columns, last = std::min(a_.N, first + columns);
      (is_bf16 ? bf16_->down : kernels_.down)(b_, i / count, first, last);
    });
    constexpr int64_t kFinishColumns = 256;
    ParallelFor(parallel_, CeilDiv(a_.N, kFinishColumns), TasksFor(b_.tokens * a_.N * 4),
                [this](int64_t i, int64_t /*task*/) {
                  kernels_.finish(b_, i * kFinishColumns, std::min(a_.N, (i + 1) * kFinishColumns));
                });
  }

  const SparseMlpArgs& a_;
  const SparseMlpKernels& kernels_;
  const cpu::SparseMlpBf16Kernels* const bf16_;
  const Parallel& parallel_;
  const Layout layout_;
  char* const workspace_;
  const float *x_ = nullptr, *x_panels_ = nullptr;
  bool is_bf16_ = false;  // rounded weights are multiplied by rounded factors
  MlpBlock b_;
};

}  // namespace

size_t CpuSparseMlpWorkspace(const SparseMlpArgs& args, CpuIsa isa) {
  return Layout(args, FindBf16Kernels(args, isa) != nullptr).bytes;
}

int64_t CpuMlpLeastBf16Tokens(CpuIsa isa) {
  return cpu::FindIsaOfKernels(isa, &cpu::KernelTable::sparse_mlp_bf16) ? cpu::kLeastBf16Tokens : 0;
}

void CpuRoundMlpWeight(CpuIsa isa, const float* from, int64_t count, uint16_t* to) {
  cpu::KernelsOf(isa).sparse_mlp->round(from, count, to);
}

void CpuSparseMlp(const SparseMlpArgs& args, CpuIsa isa, void* workspace, const Parallel& parallel) {
  Runner runner(args, isa, workspace, parallel);
  for (int64_t t = 0; t < args.T; t += kMlpTokens) runner.Run(t, std::min(args.T, t + kMlpTokens));
}

}  // namespace stof
