// SPDX-License-Identifier: Apache-2.0
// A work tile of the sm_90a kernels with 8-bit operands: scores in int8, and perhaps weights times values in fp8
// (docs/design/attention-8bit.md). Member functions of Attention; kernel.cuh includes this file behind the class.
#ifndef STOF_CUDA_ATTENTION_SM90_INT8_TILES_CUH_
#define STOF_CUDA_ATTENTION_SM90_INT8_TILES_CUH_

#include "cuda/attention/int8/convert.cuh"
#include "cuda/attention/sm90/kernel.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// Longer than 80 lines: the order of waits, wgmmas and softmax is the schedule, and is read as a whole. It is that of
// Compute16BitWorkTile. In fp8 the outputs are computed in parts of 64 columns, each added to the outputs in fp32 once
// a tile: the accumulator of fp8 wgmma holds about 14 bits.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::ComputeInt8WorkTile(const WorkTileInfo& info, int query,
                                                                         Ring<S::kStages>* keys,
                                                                         Ring<S::kStages>* values,
                                                                         Ring<S::kSlots>* slots) {
  float o[kOutputs], s[kScores], row_max[2], sum[2], products[S::kPartOutputs], query_scale[2], shift[2];
  uint32_t weights[kWeightWords], bits[S::kMaskWords];
  const AttentionParams& p = p_.attention;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) o[i] = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_max[r] = -INFINITY, sum[r] = 0.0f;
    const int row = info.row0 + row_ + 8 * r;
    const int64_t at = (static_cast<int64_t>(info.b) * p.H + info.h) * p.S + row;
    query_scale[r] = row < p.S ? p_.query_scales[at] : 1.0f;
    shift[r] = sink_or_lse_ && row < p.S ? p_.query_shifts[at] : 0.0f;
  }

  Wait(Barrier(kKeyFull, keys->at), keys->phase);
  int code = Uniform(Entries()[slots->at].code);
  int flags = Uniform(Entries()[slots->at].flags);
  int next = Uniform(Entries()[slots->at].next);
  while (MaySkip(LeadingSkips(code))) {
    SkipTile(keys, values, slots);
    Wait(Barrier(kKeyFull, keys->at), keys->phase);
    code = Uniform(Entries()[slots->at].code);
    flags = Uniform(Entries()[slots->at].flags);
    next = Uniform(Entries()[slots->at].next);
  }
  if (code == kEmpty) {
    Release(Barrier(kKeyEmpty, keys->at));
    Wait(Barrier(kValueFull, values->at), values->phase);
    Release(Barrier(kValueEmpty, values->at));
    ReleaseQueries(query);
    keys->Next();
    values->Next();
    slots->Next();
    StoreOutput(info, query, o, FinalizeRows(info, row_max, sum));
    return;
  }
  if (S::kPingPongEnds) PingPongWait();
  Int8Scores(query, keys->at, s);
  WgmmaCommit();
  if (S::kPingPongEnds) PingPongSignal();
  FetchBits(code, bits);
  TileScales scales = ReadTileScales(keys->at, query_scale);
  WgmmaWait<0>();
  PinRegisters(s);
  Release(Barrier(kKeyEmpty, keys->at));
  bool last = (flags & kLast) != 0 || MaySkip(TrailingSkips(next));
  if (last) ReleaseQueries(query);
  keys->Next();
  float factor[2];
  typename RowSoftmax::EagerWeights eager;
  if (code != kFull) ApplyMask(code, flags, slots->at, bits, s);
  FetchBits(next, bits);
  const float none[2] = {0.0f, 0.0f};
  Dequantize(scales, none, s);
  RowSoftmax::template RaiseMax<true>(1.0f, none, s, &eager, row_max, factor, sum);
  RowSoftmax::FinishWeights(&eager, s, sum);
  PackInt8Weights(s, weights);
  while (!last) {
    slots->Next();
    Wait(Barrier(kKeyFull, keys->at), keys->phase);
    PingPongWait();
    PinRegisters(o);
    PinRegisters(weights);
    Int8Scores(query, keys->at, s);
    WgmmaCommit();
    Wait(Barrier(kValueFull, values->at), values->phase);
    if constexpr (S::kFp8) {
      AddFp8Values(values->at, 0, weights, products);
    } else {
      WgmmaFence();
      AddValues(values->at, weights, o);
    }
    WgmmaCommit();
    PingPongSignal();
    // Of the values in flight, and for what is added to the outputs last.
    float promoted[2] = {scales.value, scales.value};
    code = next;
    int flags_and_next[2];  // flags and next of the entry, loaded now and used after the softmax
    LoadShared(flags_and_next, SharedAddress(&Entries()[slots->at].flags));
    scales = ReadTileScales(keys->at, query_scale);
    WgmmaWait<1>();
    PinRegisters(s);
    Release(Barrier(kKeyEmpty, keys->at));
    keys->Next();
    if (code != kFull) ApplyMask(code, Uniform(flags_and_next[0]), slots->at, bits, s);
    const float base[2] = {RowSoftmax::SubtractedMax(row_max[0]), RowSoftmax::SubtractedMax(row_max[1])};
    Dequantize(scales, base, s);
    RowSoftmax::FirstWork(s, &eager);
    if constexpr (S::kFp8) {
#pragma unroll
      for (int part = 1; part < S::kParts; ++part) {
        WgmmaWait<0>();
        PinRegisters(products);
        Promote(part - 1, promoted, products, o);
        AddFp8Values(values->at, part, weights, products);
        WgmmaCommit();
      }
    }
    if (__builtin_expect(RowSoftmax::MustRaiseMax(row_max, s, eager), 0)) {
      RowSoftmax::template RaiseMax<false>(1.0f, base, s, &eager, row_max, factor, sum);
      // Rows behind the last query are fully masked: with a row max of -inf they would come here with every tile.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (info.row0 + row_ + 8 * r >= p.S) row_max[r] = 0.0f;
      }
      if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f) != 0) {
        if constexpr (S::kFp8) {
#pragma unroll
          for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
#pragma unroll
          for (int r = 0; r < 2; ++r) promoted[r] *= factor[r];  // the products in flight have the old row max, too
        } else {
          RescaleOutput(factor, o);
        }
      }
    }
    WgmmaWait<0>();
    if constexpr (S::kFp8) {
      PinRegisters(products);
      Promote(S::kParts - 1, promoted, products, o);
    } else {
      PinRegisters(o);
    }
    PinRegisters(weights);
    RowSoftmax::FinishWeights(&eager, s, sum);
    PackInt8Weights(s, weights);
    Release(Barrier(kValueEmpty, values->at));
    values->Next();
    next = Uniform(flags_and_next[1]);
    last = (Uniform(flags_and_next[0]) & kLast) != 0 || MaySkip(TrailingSkips(next));
    if (last) ReleaseQueries(query);
    FetchBits(next, bits);
  }
  slots->Next();
  Wait(Barrier(kValueFull, values->at), values->phase);
  if (S::kPingPongEnds) PingPongWait();
  PinRegisters(o);
  PinRegisters(weights);
  if constexpr (S::kFp8) {
    const float promoted[2] = {scales.value, scales.value};
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      AddFp8Values(values->at, part, weights, products);
      WgmmaCommit();
      if (S::kPingPongEnds && part == S::kParts - 1) PingPongSignal();
      WgmmaWait<0>();
      PinRegisters(products);
      Promote(part, promoted, products, o);
    }
  } else {
    WgmmaFence();
    AddValues(values->at, weights, o);
    WgmmaCommit();
    if (S::kPingPongEnds) PingPongSignal();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) row_max[r] += shift[r];  // LSE and sink see the scores of the keys as they are
  const RowScales row_scales = FinalizeRows(info, row_max, sum);
  WgmmaWait<0>();
  PinRegisters(o);
  Release(Barrier(kValueEmpty, values->at));
  values->Next();
  StoreOutput(info, query, o, row_scales);
  while (MaySkip(TrailingSkips(next))) {
    Wait(Barrier(kKeyFull, keys->at), keys->phase);
    next = Uniform(Entries()[slots->at].next);
    SkipTile(keys, values, slots);
  }
}

// s = queries · keysᵀ, as floats that exceed kInt8ZeroFloat by it.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::Int8Scores(int query, int stage, float (&s)[kScores]) const {
  const uint32_t a = inner_ + query * (S::kQueryBytes / 16) + wg_ * (kHead / S::kInnerAtom * 64 * S::kInnerSpan / 16);
  const uint32_t b = inner_ + S::kKeys / 16 + stage * (S::kKeyBytes / 16);
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = kInt8ZeroFloat;
  PinRegisters(s);
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < kHead / 32; ++k) {
    WgmmaInt8(s, InnerOperand<S::kInnerSpan>(a + k * 32 / 16), InnerOperand<S::kInnerSpan>(b + k * 32 / 16));
  }
}

template <typename S, typename T>
__device__ __forceinline__ typename Sm90Attention<S, T>::TileScales Sm90Attention<S, T>::ReadTileScales(
    int stage, const float (&query_scale)[2]) const {
  const uint32_t from = base_ + S::kScales + stage * S::kScaleBytes;
  const float first = LoadSharedFloat(from + 4 * KeyGroupOf(lane_ % 4 * 2));
  const float others = LoadSharedFloat(from + 4 * KeyGroupOf(8 + lane_ % 4 * 2));
  TileScales scales;
#pragma unroll
  for (int r = 0; r < 2; ++r) scales.first[r] = query_scale[r] * first, scales.others[r] = query_scale[r] * others;
  scales.value = S::kFp8 ? LoadSharedFloat(from + 4 * kValueScale) : 1.0f;
  return scales;
}

// Sums of products, which kInt8ZeroFloat was added to, to scores in units of log2, less `base`.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::Dequantize(const TileScales& scales, const float (&base)[2],
                                                                float (&s)[kScores]) {
  float less[2][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    less[0][r] = scales.first[r] * kInt8ZeroFloat + base[r];
    less[1][r] = scales.others[r] * kInt8ZeroFloat + base[r];
  }
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int r = RowSoftmax::RowOf(i);
    s[i] = i < 4 ? s[i] * scales.first[r] - less[0][r] : s[i] * scales.others[r] - less[1][r];
  }
}

template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::PackInt8Weights(const float (&s)[kScores],
                                                                     uint32_t (&weights)[kWeightWords]) {
#pragma unroll
  for (int i = 0; i < kWeightWords; ++i) {
    if constexpr (S::kFp8) {
      const int at = i / 2 * 8 + i % 2 * 2;  // blocks 2 (i / 2) and the next, row i % 2: ValueColumnOf
      weights[i] = PackFp8(s[at], s[at + 1], s[at + 4], s[at + 5]);
    } else {
      weights[i] = cuda::Pack<T>(s[2 * i], s[2 * i + 1]);
    }
  }
}

// products = weights · values of 64 columns of the outputs.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::AddFp8Values(int stage, int part,
                                                                  const uint32_t (&weights)[kWeightWords],
                                                                  float (&products)[S::kPartOutputs]) const {
  const uint32_t b = inner_ + (S::kValues + stage * S::kValueBytes + part * 64 * 128) / 16;
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < S::kN / 32; ++k) {
    WgmmaFp8(products, weights + 4 * k, InnerOperand<128>(b + k * 32 / 16), k > 0);
  }
}

template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::Promote(int part, const float (&scale)[2],
                                                             const float (&products)[S::kPartOutputs],
                                                             float (&o)[kOutputs]) {
#pragma unroll
  for (int i = 0; i < S::kPartOutputs; ++i) o[part * S::kPartOutputs + i] += products[i] * scale[i / 2 % 2];
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_INT8_TILES_CUH_
