// SPDX-License-Identifier: Apache-2.0
// The sparse MLP on the CPU: blocks of tokens, the list of active neurons, and the work of each thread.
#include "cpu/sparse_mlp/sparse_mlp.h"

#include <algorithm>
#include <atomic>

#include "cpu/kernel_table.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace {

using cpu::DotProblem;
using cpu::kMlpNeurons;
using cpu::kMlpPadding;
using cpu::kMlpTokens;
using cpu::MlpBlock;
using cpu::NeuronRows;
using cpu::SparseMlpKernels;

constexpr int64_t kMostWorkers = 64;
constexpr int64_t kWorthAWorker = 64 << 10;  // bytes of weights, or values that are selected: a few us
constexpr int64_t kLeastPiece = 256;         // bytes of a down row that a thread reads

// Memory of a run, in one workspace.
class Layout {
 public:
  explicit Layout(const SparseMlpArgs& a) {
    const int64_t tokens = std::min(a.T, kMlpTokens);
    const bool reads_input = a.gate_weight.data != nullptr || a.up_weight.data != nullptr;
    is_copied = reads_input && (a.dtype != DType::kF32 || a.K % kMlpPadding != 0);
    x_stride = is_copied ? RoundUp(a.K, kMlpPadding) : a.K;
    rank_stride = RoundUp(a.R, kMlpPadding);
    x = Take(is_copied ? tokens * x_stride : 0, sizeof(float));
    projected = Take(a.selection == SparseMlpSelection::kPredictor ? tokens * rank_stride : 0, sizeof(float));
    values = Take(tokens * a.F, sizeof(float));
    masks = Take(a.F, sizeof(uint64_t));
    neurons = Take(a.F, sizeof(int32_t));
    hidden = Take(tokens * a.F, sizeof(float));
    sums = Take(a.dtype == DType::kF32 ? 0 : tokens * a.N, sizeof(float));
  }
  bool is_copied = false;
  int64_t x_stride = 0, rank_stride = 0;
  size_t x = 0, projected = 0, values = 0, masks = 0, neurons = 0, hidden = 0, sums = 0;
  size_t bytes = 0;

 private:
  size_t Take(int64_t count, size_t size) {
    const size_t at = bytes;
    bytes += (static_cast<size_t>(count) * size + 63) / 64 * 64;
    return at;
  }
};

struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

// Runs function(i) for i in [0, count). A worker has consecutive numbers, so that it prefetches what it reads next, and
// then takes those of others.
template <typename Function>
void RunShares(const Parallel& parallel, int64_t count, int64_t workers, const Function& function) {
  workers = std::min({workers, count, kMostWorkers, static_cast<int64_t>(std::max(1, parallel.threads))});
  if (workers <= 1 || parallel.run == nullptr) {
    for (int64_t i = 0; i < count; ++i) function(i);
    return;
  }
  struct Job {
    const Function* function;
    int64_t workers;
    Share shares[kMostWorkers];
  } job;
  job.function = &function;
  job.workers = workers;
  for (int64_t w = 0; w < workers; ++w) {
    job.shares[w].next = count * w / workers;
    job.shares[w].end = count * (w + 1) / workers;
  }
  parallel.run(
      parallel.self,
      [](void* user, size_t worker) {
        auto* const j = static_cast<Job*>(user);
        for (int64_t w = 0; w < j->workers; ++w) {
          Share& share = j->shares[(static_cast<int64_t>(worker) + w) % j->workers];
          for (int64_t i = share.next.fetch_add(1); i < share.end; i = share.next.fetch_add(1)) (*j->function)(i);
        }
      },
      static_cast<size_t>(workers), &job);
}

NeuronRows RowsOf(const SparseMlpArgs& a, const SparseMlpWeight& weight, int64_t size, bool is_down) {
  NeuronRows rows;
  rows.data = static_cast<const char*>(weight.data);
  rows.size = size;
  rows.dtype = a.dtype;
  rows.stride = size * SizeOf(a.dtype);
  if (weight.scales == nullptr) return rows;
  rows.bits = a.bits, rows.block = a.block_size;
  rows.scales = static_cast<const char*>(weight.scales);
  rows.zero_points = static_cast<const uint8_t*>(weight.zero_points);
  rows.stride = is_down ? CeilDiv(size * a.bits, 8) : CeilDiv(size, a.block_size) * a.block_size * a.bits / 8;
  return rows;
}

NeuronRows PlainRows(const void* data, DType dtype, int64_t size) {
  NeuronRows rows;
  rows.data = static_cast<const char*>(data);
  rows.size = size;
  rows.dtype = dtype;
  rows.stride = size * SizeOf(dtype);
  return rows;
}

class Runner {
 public:
  Runner(const SparseMlpArgs& args, CpuIsa isa, void* workspace, const Parallel& parallel)
      : a_(args),
        kernels_(*cpu::KernelsOf(isa).sparse_mlp),
        parallel_(parallel),
        layout_(args),
        workspace_(static_cast<char*>(workspace)) {
    b_.args = &a_;
    b_.values = At<float>(layout_.values);
    b_.masks = At<uint64_t>(layout_.masks);
    b_.neurons = At<int32_t>(layout_.neurons);
    b_.hidden = At<float>(layout_.hidden);
    b_.gate_dots.rows = RowsOf(a_, a_.gate_weight, a_.K, false);
    b_.up_dots.rows = RowsOf(a_, a_.up_weight, a_.K, false);
    b_.down = RowsOf(a_, a_.down_weight, a_.N, true);
  }

  // Tokens [first, last), at most kMlpTokens.
  void Run(int64_t first, int64_t last) {
    const int64_t item = SizeOf(a_.dtype);
    b_.tokens = last - first;
    b_.output = static_cast<char*>(a_.output) + first * a_.N * item;
    b_.sums = a_.dtype == DType::kF32 ? reinterpret_cast<float*>(b_.output) : At<float>(layout_.sums);
    b_.gate = a_.gate == nullptr ? nullptr : static_cast<const char*>(a_.gate) + first * a_.F * item;
    if (b_.gate_dots.rows.data != nullptr || b_.up_dots.rows.data != nullptr) {
      LoadTokens(static_cast<const char*>(a_.input) + first * a_.K * item);
    }
    if (a_.selection == SparseMlpSelection::kPredictor) Predict();
    Select();
    MakeList();
    RunShares(parallel_, CeilDiv(b_.count, kMlpNeurons), WorthOf(HiddenBytes()),
              [this](int64_t i) { kernels_.hidden(b_, i * kMlpNeurons, std::min(b_.count, (i + 1) * kMlpNeurons)); });
    Down();
  }

 private:
  template <typename T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(workspace_ + offset);
  }
  static int64_t WorthOf(int64_t bytes) { return 1 + bytes / kWorthAWorker; }
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
    for (DotProblem* dots : {&b_.gate_dots, &b_.up_dots}) {
      dots->x = x_, dots->x_stride = layout_.x_stride;
      dots->tokens = b_.tokens;
      dots->neurons = b_.neurons, dots->masks = b_.masks;
    }
  }

  // values[t, j] = a predictor's scores.
  void Predict() {
    float* const projected = At<float>(layout_.projected);
    std::fill(projected, projected + b_.tokens * layout_.rank_stride, 0.0f);
    DotProblem down;
    down.rows = PlainRows(a_.predictor_down, a_.dtype, a_.K);
    down.x = x_, down.x_stride = layout_.x_stride;
    down.tokens = b_.tokens, down.count = a_.R;
    RunDots(down, projected, 1, layout_.rank_stride);
    DotProblem up;
    up.rows = PlainRows(a_.predictor_up, a_.dtype, a_.R);
    up.x = projected, up.x_stride = layout_.rank_stride;
    up.tokens = b_.tokens, up.count = a_.F;
    RunDots(up, b_.values, 1, a_.F);
  }

  void RunDots(const DotProblem& problem, float* out, int64_t row_stride, int64_t token_stride) {
    RunShares(parallel_, CeilDiv(problem.count, kMlpNeurons), WorthOf(problem.count * problem.rows.stride),
              [&](int64_t i) {
                const int64_t first = i * kMlpNeurons;
                kernels_.dots(problem, first, std::min(problem.count, first + kMlpNeurons), out + first * row_stride,
                              row_stride, token_stride);
              });
  }

  void Select() {
    RunShares(parallel_, CeilDiv(a_.F, cpu::kMlpSelected), WorthOf(a_.F * b_.tokens), [this](int64_t i) {
      kernels_.select(b_, i * cpu::kMlpSelected, std::min(a_.F, (i + 1) * cpu::kMlpSelected));
    });
  }

  void MakeList() {
    int64_t count = 0;
    for (int64_t j = 0; j < a_.F; ++j) {
      // An idle neuron is overwritten by the next one: no branch to mispredict.
      const uint64_t mask = b_.masks[j];
      b_.neurons[count] = static_cast<int32_t>(j);
      b_.masks[count] = mask;
      count += mask != 0 ? 1 : 0;
    }
    b_.count = b_.gate_dots.count = b_.up_dots.count = count;
  }

  void Down() {
    const int64_t row =
        std::max<int64_t>(1, CeilDiv(a_.N * (b_.down.bits > 0 ? b_.down.bits : 8 * SizeOf(a_.dtype)), 8));
    const int64_t workers = std::min<int64_t>(WorthOf(b_.count * row + b_.tokens * a_.N * 4), kMostWorkers);
    const int64_t most = std::max<int64_t>(1, row / kLeastPiece);
    int64_t pieces = std::min({workers, most, static_cast<int64_t>(std::max(1, parallel_.threads))});
    const int64_t columns = RoundUp(CeilDiv(a_.N, pieces), 64);
    pieces = CeilDiv(a_.N, columns);
    RunShares(parallel_, pieces, workers,
              [this, columns](int64_t i) { kernels_.down(b_, i * columns, std::min(a_.N, (i + 1) * columns)); });
  }

  const SparseMlpArgs& a_;
  const SparseMlpKernels& kernels_;
  const Parallel& parallel_;
  const Layout layout_;
  char* const workspace_;
  const float* x_ = nullptr;
  MlpBlock b_;
};

}  // namespace

size_t CpuSparseMlpWorkspace(const SparseMlpArgs& args) { return Layout(args).bytes; }

void CpuSparseMlp(const SparseMlpArgs& args, CpuIsa isa, void* workspace, const Parallel& parallel) {
  Runner runner(args, isa, workspace, parallel);
  for (int64_t t = 0; t < args.T; t += kMlpTokens) runner.Run(t, std::min(args.T, t + kMlpTokens));
}

}  // namespace stof
