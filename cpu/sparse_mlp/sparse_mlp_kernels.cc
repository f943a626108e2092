// SPDX-License-Identifier: Apache-2.0
// The sparse MLP: which neurons are active, their hidden values, and the output.
#include "cpu/kernel_table.h"
#include "cpu/simd/activation.h"
#include "cpu/sparse_mlp/dots.h"
#include "cpu/sparse_mlp/dots_int8.h"
#include "cpu/sparse_mlp/dots_many_tokens.h"
#include "cpu/sparse_mlp/down.h"
#include "cpu/sparse_mlp/down_int8.h"
#include "cpu/sparse_mlp/down_panels.h"

namespace stof {
namespace cpu {
namespace {

inline void Dots(const DotProblem& p, int64_t first, int64_t last, float* out, int64_t row_stride,
                 int64_t token_stride) {
  return p.x_int8 != nullptr ? DotsInt8(p, first, last, out, row_stride, token_stride)
                             : DotsFp32(p, first, last, out, row_stride, token_stride);
}

template <typename Function>
void ActivateAll(int64_t count, float* x) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) Simd::Store(x + i, Function::Of(Simd::Load(x + i)));
  if (i == count) return;
  float rest[kWidth] = {};
  Copy(x + i, x + count, rest);
  Simd::Store(rest, Function::Of(Simd::Load(rest)));
  Copy(rest, rest + (count - i), x + i);
}

inline void Activate(Activation activation, int64_t count, float* x) {
  if (activation == Activation::kNone) return;
  WithActivation(activation, [&](auto function) { ActivateAll<decltype(function)>(count, x); });
}

inline void Select(const MlpBlock& b, int64_t first, int64_t last) {
  const SparseMlpArgs& a = *b.args;
  const int64_t count = last - first;
  uint64_t* const masks = b.masks + first;
  Fill(masks, masks + count, uint64_t{0});
  for (int64_t t = 0; t < b.tokens; ++t) {
    float* const x = b.values + t * a.F + first;
    if (b.gate != nullptr) {
      ToFloats(b.gate + (t * a.F + first) * SizeOf(a.dtype), a.dtype, count, x);
      Activate(a.activation, count, x);
    }
    // NaN makes a neuron active.
    if (a.selection == SparseMlpSelection::kNonzero) {
      for (int64_t i = 0; i < count; ++i) masks[i] |= static_cast<uint64_t>(x[i] != 0.0f) << t;
      continue;
    }
    const bool is_magnitude = a.selection == SparseMlpSelection::kMagnitude;
    for (int64_t i = 0; i < count; ++i) {
      const float found = is_magnitude && x[i] < 0.0f ? -x[i] : x[i];
      const bool is_idle = found <= a.threshold[(first + i) * a.threshold_stride];
      masks[i] |= static_cast<uint64_t>(!is_idle) << t;
    }
  }
}

// x[i, t] += bias of active neuron first + i.
inline void AddBias(const MlpBlock& b, const void* bias, int64_t first, int64_t count, float* x) {
  if (bias == nullptr) return;
  for (int64_t i = 0; i < count; ++i) {
    const float y = ToFloat(bias, b.args->dtype, b.neurons[first + i]);
    for (int64_t t = 0; t < b.tokens; ++t) x[i * b.tokens + t] += y;
  }
}

// Sets the hidden values of tokens that do not need their neuron to 0.
inline void SetIdleToZero(const MlpBlock& b, int64_t first, int64_t last) {
  const uint64_t all = BitsOfTokens(b.tokens);
  for (int64_t i = first; i < last; ++i) {
    for (uint64_t idle = all & ~b.list_masks[i]; idle != 0; idle &= idle - 1) {
      b.hidden[i * b.tokens + __builtin_ctzll(idle)] = 0.0f;
    }
  }
}

// Rounds x to bf16, kept in fp32: the down kernel packs the upper 16 bits. Subnormal numbers stay, while the
// instructions by which other kernels round make them 0: a result may have either.
inline void RoundInPlace(int64_t count, float* x) {
  constexpr int64_t kStep = 256;
  uint16_t rounded[kStep];
  for (int64_t i = 0; i < count; i += kStep) {
    const int64_t some = Min(kStep, count - i);
    FromFloats(x + i, DType::kBF16, some, rounded);
    ToFloats(rounded, DType::kBF16, some, x + i);
  }
}

inline void Hidden(const MlpBlock& b, int64_t first, int64_t last) {
  const SparseMlpArgs& a = *b.args;
  const int64_t count = last - first, values = count * b.tokens;
  float gate[kMlpNeurons * kMlpTokens];
  float* const hidden = b.hidden + first * b.tokens;
  if (b.gate == nullptr) {
    Fill(gate, gate + values, 0.0f);  // tokens that do not need a neuron have no dot product
    Dots(b.gate_dots, first, last, gate, b.tokens, 1);
    AddBias(b, a.gate_bias, first, count, gate);
    Activate(a.activation, values, gate);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t t = 0; t < b.tokens; ++t) gate[i * b.tokens + t] = b.values[t * a.F + b.neurons[first + i]];
    }
  }
  if (b.up_dots.rows.data == nullptr) {
    Copy(gate, gate + values, hidden);
    if (b.rounds_hidden) RoundInPlace(values, hidden);
    return SetIdleToZero(b, first, last);
  }
  Fill(hidden, hidden + values, 0.0f);
  Dots(b.up_dots, first, last, hidden, b.tokens, 1);
  AddBias(b, a.up_bias, first, count, hidden);
  for (int64_t i = 0; i < values; ++i) hidden[i] *= gate[i];
  if (b.rounds_hidden) RoundInPlace(values, hidden);
  SetIdleToZero(b, first, last);
}

inline void Down(const MlpBlock& b, int64_t part, int64_t begin, int64_t end) {
  if (b.down.bits > 0 && b.args->accuracy_level == 4) return DownInt8(b, part, begin, end);
  return b.has_panel_sums ? DownPanels(b, part, begin, end) : DownTokens(b, part, begin, end);
}

inline void Finish(const MlpBlock& b, int64_t begin, int64_t end) {
  const SparseMlpArgs& a = *b.args;
  constexpr int64_t kColumns = 64;
  alignas(64) float y[kMlpTokens * kColumns];
  for (int64_t n = begin; n < end; n += kColumns) {
    const int64_t count = Min(kColumns, end - n);
    b.has_panel_sums ? SumPanels<kColumns>(b, n, n + count, y) : SumTokens<kColumns>(b, n, n + count, y);
    for (int64_t t = 0; t < b.tokens; ++t) {
      float* const x = y + t * kColumns;
      for (int64_t i = 0; i < count; ++i) x[i] += 0.0f;  // -0, where all terms underflow, becomes 0
      if (a.down_bias != nullptr) {
        for (int64_t i = 0; i < count; ++i) x[i] += ToFloat(a.down_bias, a.dtype, n + i);
      }
      FromFloats(x, a.dtype, count, b.output + (t * a.N + n) * SizeOf(a.dtype));
    }
  }
}

inline void LoadTokens(const void* from, DType dtype, int64_t count, int64_t padded, float* to) {
  ToFloats(from, dtype, count, to);
  Fill(to + count, to + padded, 0.0f);
}

inline void RoundValues(const float* from, int64_t count, uint16_t* to) { FromFloats(from, DType::kBF16, count, to); }

}  // namespace

STOF_EXPORT_KERNELS(SparseMlpKernels, sparse_mlp) = {
    LoadTokens, RoundValues, FillPanel, QuantizeToken, Dots, Select, Hidden, Down, Finish,
};

}  // namespace cpu
}  // namespace stof
