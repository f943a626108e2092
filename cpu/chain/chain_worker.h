// SPDX-License-Identifier: Apache-2.0
// One worker of a chain: runs the steps of a program over its rows and pieces.
// row_offsets.h has the offsets of rows, elements.h the loads and stores of elements. Only chain.cc includes them, in
// an unnamed namespace, so that compilers know all callers and inline them.
#ifndef STOF_CPU_CHAIN_CHAIN_WORKER_H_
#define STOF_CPU_CHAIN_CHAIN_WORKER_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/chain/chain.h"
#include "cpu/simd/prefetch.h"

namespace stof {
namespace cpu {
namespace {

constexpr int64_t kColumns = 4096;
constexpr int64_t kLongRow = 16;  // elements; longer rows are used in place, with gaps between them

struct Job {
  const ChainProgram* program;
  const ChainKernels* kernels;
  const void* const* inputs;
  void* const* outputs;
  char* workspace;
  size_t workspace_each;
  int64_t pieces;  // of batches of rows, or of columns of a row
  int64_t pieces_each;
  std::atomic<int64_t> next{0};
};

int64_t FloorDiv(int64_t x, int64_t by) { return x >= 0 ? x / by : -((-x + by - 1) / by); }

// Places of a batch's rows: elements from the begin of each read's input and of each output.
struct Places {
  int64_t* read;    // [reads, batch]
  int64_t* output;  // [outputs, batch]
  uint8_t* valid;   // [reads, batch]: the row is one that is read
  int64_t* index;   // [axes, batch]
};

size_t PlaceBytes(const ChainProgram& p) {
  const size_t each = p.bound.reads.size() * 9 + p.bound.outputs.size() * 8 + static_cast<size_t>(p.bound.axes) * 8;
  return (each * static_cast<size_t>(p.batch) + 63) / 64 * 64;
}
size_t PointerBytes(const ChainProgram& p) {
  return (p.registers.size() * (sizeof(float*) + sizeof(int64_t)) + 63) / 64 * 64;
}
int64_t BatchesOfRun(const ChainProgram& p) { return (p.run + p.batch - 1) / p.batch; }
size_t SumBytes(const ChainProgram& p) {
  return (p.reductions.size() * static_cast<size_t>(p.batch) * sizeof(double) + 63) / 64 * 64;
}

class ChainWorker {
 public:
  ChainWorker(Job* job, char* memory) : job_(*job), p_(*job->program), k_(*job->kernels) {
    const auto take = [&memory](size_t bytes) {
      char* at = memory;
      memory += bytes;
      return at;
    };
    pointer_ = reinterpret_cast<float**>(take(PointerBytes(p_)));
    pitch_ = reinterpret_cast<int64_t*>(pointer_ + p_.registers.size());
    sums_ = reinterpret_cast<double*>(take(SumBytes(p_)));
    char* places = take(PlaceBytes(p_));
    const auto batch = static_cast<size_t>(p_.batch);
    places_.read = reinterpret_cast<int64_t*>(places);
    places_.output = places_.read + p_.bound.reads.size() * batch;
    places_.index = places_.output + p_.bound.outputs.size() * batch;
    places_.valid = reinterpret_cast<uint8_t*>(places_.index + static_cast<size_t>(p_.bound.axes) * batch);
    floats_ = reinterpret_cast<float*>(memory);
    for (size_t i = 0; i < p_.registers.size(); ++i) {
      const ChainRegister& r = p_.registers[i];
      pointer_[i] = r.kind == ChainRegister::Kind::kConstant ? const_cast<float*>(&r.value) : floats_ + r.offset;
    }
    n_ = p_.bound.n;
    outer_ = p_.bound.axes - 1;
    for (size_t i = 0; i < p_.registers.size(); ++i) {
      const auto kind = p_.registers[i].kind;
      const bool whole = kind == ChainRegister::Kind::kWhole || kind == ChainRegister::Kind::kFixed;
      pitch_[i] = whole ? n_ : kNoPitch;
    }
  }

  void Work() {
    bool first = true;
    for (;;) {
      const int64_t begin = job_.next.fetch_add(job_.pieces_each, std::memory_order_relaxed);
      if (begin >= job_.pieces) return;
      if (first && !p_.fixed.empty()) RunFixed();
      first = false;
      const int64_t end = std::min(begin + job_.pieces_each, job_.pieces);
      if (p_.columns) {
        const int64_t pieces = (n_ + kColumns - 1) / kColumns;
        for (int64_t i = begin; i < end; ++i) {
          Locate(i / pieces, 1);
          const int64_t column = i % pieces * kColumns;
          Rows(column, std::min(column + kColumns, n_));
        }
      } else {
        for (int64_t i = begin; i < end; ++i) {
          const Batch batch = BatchOf(i);
          Locate(batch.first, batch.count);
          if (!p_.prefetches.empty() && i + 1 < end) QueuePrefetch(BatchOf(i + 1));
          Rows(0, n_);
        }
      }
    }
  }

 private:
  // Runs the steps that are the same for all rows, once.
  void RunFixed() {
    count_ = 1;
    Locate(0, 1);
    for (int64_t column = 0; column < n_; column += p_.strip) {
      column_ = column;
      width_ = std::min(p_.strip, n_ - column);
      Point();
      for (const ChainStep& step : p_.fixed) Step(step);
    }
    for (size_t i = 0; i < p_.registers.size(); ++i) {
      const ChainRegister& r = p_.registers[i];
      if (r.kind != ChainRegister::Kind::kFixed) continue;
      float* whole = floats_ + r.offset;
      pointer_[i] = whole;
      for (int row = 1; row < p_.batch; ++row) std::memcpy(whole + row * n_, whole, static_cast<size_t>(n_) * 4);
    }
  }

  struct Batch {
    int64_t first;
    int count;
  };
  Batch BatchOf(int64_t piece) const {
    const int64_t batches = BatchesOfRun(p_), of_run = piece % batches * p_.batch;
    return {piece / batches * p_.run + of_run, static_cast<int>(std::min<int64_t>(p_.batch, p_.run - of_run))};
  }

  // ---- cpu/chain/row_offsets.h ----
  void Index(int64_t row, int64_t* index) const;
  void QueuePrefetch(const Batch& batch);
  void Locate(int64_t first, int count);
  // Of a row of the batch: what has a pitch is known of the first one alone.
  int64_t ReadPlace(size_t r, int row) const { return Place(places_.read, r, p_.read_pitch[r], row); }
  int64_t OutputPlace(size_t o, int row) const { return Place(places_.output, o, p_.output_pitch[o], row); }
  int64_t Place(const int64_t* places, size_t which, int64_t pitch, int row) const {
    const int64_t* place = places + static_cast<int64_t>(which) * p_.batch;
    return pitch == kNoPitch ? place[row] : place[0] + row * pitch;
  }
  bool IsValid(size_t r, int row) const {
    return places_.valid[static_cast<int64_t>(r) * p_.batch + (p_.read_pitch[r] == kNoPitch ? row : 0)] != 0;
  }
  void LocateRead(size_t r, int row, const int64_t* index) const;
  int64_t ReadPlace(const BoundRead& read, const int64_t* index, bool linear) const;
  int64_t Affine(const ChainIndex& index, const int64_t* outer, int64_t column) const;
  int64_t Value(const ChainIndex& index, const int64_t* outer, int64_t column) const;

  // ---- the walk ----
  void Rows(int64_t begin, int64_t end) {
    for (size_t phase = 0; phase < p_.phases.size(); ++phase) {
      for (const ChainStep& step : p_.phases[phase].row) RowStep(step);
      for (size_t r = 0; r < p_.reductions.size(); ++r) {
        if (p_.reductions[r].phase == static_cast<int>(phase)) Clear(r);
      }
      for (const ChainPiece& piece : p_.phases[phase].pieces) {
        if (piece.element.empty()) continue;
        const int64_t last = std::min(end, piece.end);
        for (column_ = std::max(begin, piece.begin); column_ < last; column_ += width_) {
          width_ = std::min(p_.strip, last - column_);
          Point();
          for (const ChainStep& step : piece.element) {
            prefetch_.Fetch(lines_per_step_);
            Step(step);
          }
        }
      }
      for (size_t r = 0; r < p_.reductions.size(); ++r) {
        if (p_.reductions[r].phase == static_cast<int>(phase)) Finish(r);
      }
    }
    for (const ChainStep& step : p_.last) RowStep(step);
  }

  // Registers of all elements of the row, and of outputs, at the strip.
  void Point() {
    for (const int16_t i : p_.moving) {
      const ChainRegister& r = p_.registers[static_cast<size_t>(i)];
      if (r.kind == ChainRegister::Kind::kWhole || r.kind == ChainRegister::Kind::kFixed) {
        pointer_[i] = floats_ + r.offset + column_;
      } else {
        const int64_t* place = places_.output + r.output * p_.batch;
        pitch_[i] = PitchOf(place, p_.output_pitch[static_cast<size_t>(r.output)]);
        const bool there = pitch_[i] != kNoPitch;
        pointer_[i] = there ? static_cast<float*>(job_.outputs[r.output]) + place[0] + column_ : floats_ + r.offset;
      }
    }
  }
  // Elements between rows of the batch where they can be used as they lie, else kNoPitch.
  int64_t PitchOf(const int64_t* place, int64_t known) const {
    if (count_ == 1) return width_;
    if (known == kNoPitch) {
      for (int row = 1; row < count_; ++row) {
        if (place[row] != place[0] + row * width_) return kNoPitch;
      }
      return width_;
    }
    // Of short rows, most of the vectors would not be full.
    return known == width_ || width_ >= kLongRow ? known : kNoPitch;
  }
  int64_t Pitch(int reg) const { return reg < 0 || pitch_[reg] == kNoPitch ? width_ : pitch_[reg]; }
  // f of a strip; as one row where nothing lies between rows.
  void Apply(const ChainStep& step) {
    const ChainFunction f = k_.function[step.op][step.mask];
    ChainRows rows;
    rows.count = count_;
    rows.dst = Pitch(step.dst);
    rows.a = (step.mask & 1) != 0 ? width_ : Pitch(step.a);
    rows.b = (step.mask & 2) != 0 ? width_ : Pitch(step.b);
    rows.c = (step.mask & 4) != 0 ? width_ : Pitch(step.c);
    if (count_ == 1 || (rows.dst == width_ && rows.a == width_ && rows.b == width_ && rows.c == width_)) {
      return f(pointer_[step.dst], At(step.a), At(step.b), At(step.c), count_ * width_, ChainRows());
    }
    f(pointer_[step.dst], At(step.a), At(step.b), At(step.c), width_, rows);
  }

  // ---- steps over the elements of a strip ----
  void Step(const ChainStep& step) {
    switch (step.kind) {
      case ChainStep::Kind::kCompute:
        return Apply(step);
      case ChainStep::Kind::kRead:
        return Read(step);
      case ChainStep::Kind::kIndex: {
        float* dst = pointer_[step.dst];
        for (int row = 0; row < count_; ++row) {
          for (int64_t i = 0; i < width_; ++i) *dst++ = static_cast<float>(column_ + i);
        }
        return;
      }
      case ChainStep::Kind::kExpand: {
        float* dst = pointer_[step.dst];
        const float* from = pointer_[step.a];
        for (int row = 0; row < count_; ++row) {
          k_.function[kFusedCopy][1](dst + row * width_, from + row, nullptr, nullptr, width_, ChainRows());
        }
        return;
      }
      case ChainStep::Kind::kReduce:
        return Reduce(step);
      case ChainStep::Kind::kStore:
        return Store(step);
      default:
        return;
    }
  }
  const float* At(int reg) const { return reg < 0 ? nullptr : pointer_[reg]; }

  // ---- cpu/chain/elements.h ----
  void Read(const ChainStep& step);
  bool IsAllRead(const BoundRead& read, size_t r) const;
  void ReadRow(size_t r, int row, float* to);
  void Gather(const BoundRead& read, int64_t place, int64_t column, int64_t stride, int64_t count, float* to) const;
  void Pieces(const BoundRead& read, int row, int64_t place, int64_t first, int64_t end, float* to) const;
  void Store(const ChainStep& step);
  void Scatter(const float* from, DType dtype, int64_t count, int64_t stride, char* target) const;

  // ---- reductions ----
  void Clear(size_t r) {
    const ChainOp op = p_.reductions[r].op;
    const double inf = std::numeric_limits<double>::infinity();
    const double start = op == ChainOp::kMaxOf ? -inf : op == ChainOp::kMinOf ? inf : 0.0;
    std::fill_n(sums_ + static_cast<int64_t>(r) * p_.batch, count_, start);
  }
  void Reduce(const ChainStep& step) {
    double* sums = sums_ + static_cast<int64_t>(step.which) * p_.batch;
    for (int row = 0; row < count_; ++row) {
      const float* a = pointer_[step.a] + row * Pitch(step.a);
      double& sum = sums[row];
      switch (static_cast<ChainOp>(step.op)) {
        case ChainOp::kMaxOf: {
          const double value = k_.max(a, width_);
          if (value > sum || value != value) sum = value;  // nothing is larger than a NaN
          break;
        }
        case ChainOp::kMinOf: {
          const double value = k_.min(a, width_);
          if (value < sum || value != value) sum = value;
          break;
        }
        default:
          sum += step.b < 0 ? k_.sum(a, width_) : k_.dot(a, pointer_[step.b] + row * Pitch(step.b), width_);
      }
    }
  }
  void Finish(size_t r) {
    const ChainReduction& reduction = p_.reductions[r];
    const double* sums = sums_ + static_cast<int64_t>(r) * p_.batch;
    float* to = pointer_[reduction.row];
    const double by = reduction.op == ChainOp::kMean ? static_cast<double>(n_) : 1.0;
    for (int row = 0; row < count_; ++row) to[row] = static_cast<float>(sums[row] / by);
  }

  // ---- steps over the rows of a batch ----
  void RowStep(const ChainStep& step) {
    switch (step.kind) {
      case ChainStep::Kind::kCompute:
        k_.function[step.op][step.mask](pointer_[step.dst], At(step.a), At(step.b), At(step.c), count_, ChainRows());
        return;
      case ChainStep::Kind::kReadRow: {
        const auto r = static_cast<size_t>(step.which);
        for (int row = 0; row < count_; ++row) {
          float* to = pointer_[step.dst] + row;
          *to = 0.0f;
          if (IsValid(r, row)) Gather(p_.bound.reads[r], ReadPlace(r, row), 0, 0, 1, to);
        }
        return;
      }
      case ChainStep::Kind::kAxis:
        for (int row = 0; row < count_; ++row) {
          pointer_[step.dst][row] = static_cast<float>(places_.index[step.which * p_.batch + row]);
        }
        return;
      case ChainStep::Kind::kStoreRow: {
        const auto o = static_cast<size_t>(step.which);
        const DType dtype = p_.bound.outputs[o].dtype;
        auto* base = static_cast<char*>(job_.outputs[step.which]);
        for (int row = 0; row < count_; ++row) {
          k_.store(pointer_[step.a] + (step.mask != 0 ? 0 : row), dtype, 1, base + OutputPlace(o, row) * SizeOf(dtype));
        }
        return;
      }
      default:
        return;
    }
  }

  Job& job_;
  const ChainProgram& p_;
  const ChainKernels& k_;
  float** pointer_ = nullptr;
  int64_t* pitch_ = nullptr;  // elements between rows of each register; kNoPitch: as many as a row has
  double* sums_ = nullptr;
  Places places_ = {};
  float* floats_ = nullptr;
  int64_t n_ = 0;
  int outer_ = 0;
  PrefetchQueue prefetch_;
  int64_t lines_per_step_ = 0;  // cache lines to prefetch after each step
  int count_ = 0;               // rows of the batch
  int64_t column_ = 0;          // of the strip
  int64_t width_ = 0;
};

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_CHAIN_CHAIN_WORKER_H_
