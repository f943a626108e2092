// SPDX-License-Identifier: Apache-2.0
// Moves elements of a strip between tensors and registers: in place, gathered, or in runs of columns.
#ifndef STOF_CPU_CHAIN_ELEMENTS_H_
#define STOF_CPU_CHAIN_ELEMENTS_H_

#include <algorithm>
#include <cstdint>

#include "cpu/chain/chain_worker.h"

namespace stof {
namespace cpu {
namespace {

inline void ChainWorker::Read(const ChainStep& step) {
  const auto r = static_cast<size_t>(step.which);
  const BoundRead& read = p_.bound.reads[r];
  const int64_t* place = places_.read + static_cast<int64_t>(r) * p_.batch;
  const int64_t size = SizeOf(read.dtype), stride = read.stride[outer_];
  const auto* base = static_cast<const char*>(job_.inputs[read.input]);
  const ChainRegister& reg = p_.registers[static_cast<size_t>(step.dst)];
  if (p_.linear[r] != 0 && stride == 1 && IsAllRead(read, r)) {
    const int64_t pitch = PitchOf(place, p_.read_pitch[r]);
    const char* from = base + (place[0] + column_) * size;
    if (pitch != kNoPitch && read.dtype == DType::kF32 && reg.kind == ChainRegister::Kind::kStrip) {
      pointer_[step.dst] = reinterpret_cast<float*>(const_cast<char*>(from));  // only read through it
      pitch_[step.dst] = pitch;
      return;
    }
    if (pitch == width_ && reg.kind == ChainRegister::Kind::kStrip) {
      pointer_[step.dst] = floats_ + reg.offset;
      pitch_[step.dst] = width_;
      return k_.load(from, read.dtype, count_ * width_, pointer_[step.dst]);
    }
  }
  if (reg.kind == ChainRegister::Kind::kStrip) {
    pointer_[step.dst] = floats_ + reg.offset;
    pitch_[step.dst] = width_;
  }
  for (int row = 0; row < count_; ++row) ReadRow(r, row, pointer_[step.dst] + row * Pitch(step.dst));
}

// No element of the strip stands on the other side of a select.
inline bool ChainWorker::IsAllRead(const BoundRead& read, size_t r) const {
  if (read.never) return false;
  if (!read.guarded) return true;
  if (read.first[outer_] > column_ || read.last[outer_] < column_ + width_ - 1) return false;
  if (p_.read_pitch[r] != kNoPitch) return IsValid(r, 0);
  const uint8_t* valid = places_.valid + static_cast<int64_t>(r) * p_.batch;
  return std::all_of(valid, valid + count_, [](uint8_t one) { return one != 0; });
}

inline void ChainWorker::ReadRow(size_t r, int row, float* to) {
  const BoundRead& read = p_.bound.reads[r];
  const int64_t place = ReadPlace(r, row);
  int64_t first = column_, end = column_ + width_;
  if (read.guarded) {
    first = std::max(first, read.first[outer_]);
    end = std::min(end, read.last[outer_] + 1);
  }
  if (!IsValid(r, row) || first >= end) first = end = column_ + width_;
  std::fill(to, to + (first - column_), 0.0f);
  if (end > first) {
    if (p_.linear[r] != 0) {
      Gather(read, place, first, read.stride[outer_], end - first, to + (first - column_));
    } else {
      Pieces(read, row, place, first, end, to + (first - column_));
    }
  }
  std::fill(to + (end - column_), to + width_, 0.0f);
}

inline void ChainWorker::Gather(const BoundRead& read, int64_t place, int64_t column, int64_t stride, int64_t count,
                                float* to) const {
  const auto* from = static_cast<const char*>(job_.inputs[read.input]) + (place + column * stride) * SizeOf(read.dtype);
  if (stride == 1 || count == 1) return k_.load(from, read.dtype, count, to);
  if (stride == 0) {
    k_.load(from, read.dtype, 1, to);
    std::fill(to + 1, to + count, to[0]);
    return;
  }
  if (read.dtype == DType::kF32) {
    const auto* floats = reinterpret_cast<const float*>(from);
    for (int64_t i = 0; i < count; ++i) to[i] = floats[i * stride];
    return;
  }
  const auto* halves = reinterpret_cast<const uint16_t*>(from);
  constexpr int64_t kBlock = 64;
  for (int64_t i = 0; i < count; i += kBlock) {
    uint16_t block[kBlock];
    const int64_t some = std::min(kBlock, count - i);
    for (int64_t k = 0; k < some; ++k) block[k] = halves[(i + k) * stride];
    k_.load(block, read.dtype, some, to + i);
  }
}

// Columns in runs along which every remainder and quotient is a straight line.
inline void ChainWorker::Pieces(const BoundRead& read, int row, int64_t place, int64_t first, int64_t end,
                                float* to) const {
  int64_t outer[kChainMostAxes] = {};
  for (int axis = 0; axis < outer_; ++axis) outer[axis] = places_.index[axis * p_.batch + row];
  for (int64_t column = first; column < end;) {
    int64_t count = end - column, stride = read.stride[outer_];
    auto at = static_cast<uint64_t>(place) + static_cast<uint64_t>(column) * static_cast<uint64_t>(stride);
    for (const BoundRead::Part& part : read.parts) {
      const int64_t step = part.index.coefficient[outer_], by = part.index.divisor;
      const int64_t affine = Affine(part.index, outer, column);
      const int64_t quotient = FloorDiv(affine, by), rest = affine - quotient * by;
      if (step > 0) count = std::min(count, (by - rest + step - 1) / step);
      if (step < 0) count = std::min(count, rest / -step + 1);
      const bool modulo = part.index.kind == ChainIndex::Kind::kModulo;
      at += static_cast<uint64_t>(modulo ? rest : quotient) * static_cast<uint64_t>(part.stride);
      if (modulo) stride += step * part.stride;
    }
    // Of a run of one element the stride is not used, and may be anything.
    const auto begin = static_cast<int64_t>(at);
    if (count == 1) stride = 0;
    Gather(read, begin, 0, stride, count, to);
    to += count;
    column += count;
  }
}

inline void ChainWorker::Store(const ChainStep& step) {
  const auto o = static_cast<size_t>(step.which);
  const BoundOutput& output = p_.bound.outputs[o];
  const int64_t size = SizeOf(output.dtype), stride = output.stride[outer_];
  const int64_t* place = places_.output + static_cast<int64_t>(o) * p_.batch;
  auto* base = static_cast<char*>(job_.outputs[step.which]);
  const float* from = pointer_[step.a];
  const int64_t pitch = Pitch(step.a);
  if (stride == 1) {
    char* to = base + (place[0] + column_) * size;
    if (to == reinterpret_cast<const char*>(from)) return;  // computed in place
    if (count_ == 1 || (pitch == width_ && PitchOf(place, p_.output_pitch[o]) == width_)) {
      return k_.store(from, output.dtype, count_ * width_, to);
    }
    for (int row = 0; row < count_; ++row) {
      k_.store(from + row * pitch, output.dtype, width_, base + (OutputPlace(o, row) + column_) * size);
    }
    return;
  }
  for (int row = 0; row < count_; ++row) {
    char* to = base + (OutputPlace(o, row) + column_ * stride) * size;
    Scatter(from + row * pitch, output.dtype, width_, stride, to);
  }
}

inline void ChainWorker::Scatter(const float* from, DType dtype, int64_t count, int64_t stride, char* target) const {
  if (dtype == DType::kF32) {
    auto* to = reinterpret_cast<float*>(target);
    for (int64_t i = 0; i < count; ++i) to[i * stride] = from[i];
    return;
  }
  auto* to = reinterpret_cast<uint16_t*>(target);
  constexpr int64_t kBlock = 64;
  for (int64_t i = 0; i < count; i += kBlock) {
    uint16_t block[kBlock];
    const int64_t some = std::min(kBlock, count - i);
    k_.store(from + i, dtype, some, block);
    for (int64_t k = 0; k < some; ++k) to[(i + k) * stride] = block[k];
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_CHAIN_ELEMENTS_H_
