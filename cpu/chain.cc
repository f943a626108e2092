// SPDX-License-Identifier: Apache-2.0
// Runs the programs of chain_compile.cc: hands rows out to workers, finds where rows lie, and walks the steps.
#include "cpu/chain.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#define STOF_ISA portable  // as this file is compiled
#include "cpu/ahead.h"

namespace stof {
namespace cpu {

const ChainKernels& ChainKernelsOf(CpuIsa isa) {
#if defined(__x86_64__)
  if (isa == CpuIsa::kAvx512) return avx512::kChainKernels;
  if (isa == CpuIsa::kAvx2) return avx2::kChainKernels;
#endif
  (void)isa;
  return portable::kChainKernels;
}

namespace {

constexpr int64_t kColumns = 4096;
constexpr int64_t kLongRow = 16;        // from here on rows are used where they lie, with gaps between them
constexpr double kWorthAThread = 60e3;  // simple operations: some 10 us

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

class Worker {
 public:
  Worker(Job* job, char* memory) : job_(*job), p_(*job->program), k_(*job->kernels) {
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
      if (first && !p_.fixed.empty()) Fixed();
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
          if (!p_.ahead.empty() && i + 1 < end) LookAhead(BatchOf(i + 1));
          Rows(0, n_);
        }
      }
    }
  }

 private:
  // What is the same for all rows, once.
  void Fixed() {
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
  // The places of a row along the axes.
  void Index(int64_t row, int64_t* index) const {
    for (int axis = outer_; axis-- > 0;) {
      index[axis] = row % p_.bound.size[axis];
      row /= p_.bound.size[axis];
    }
  }
  void LookAhead(const Batch& batch) {
    int64_t index[kChainMostAxes] = {};
    Index(batch.first, index);
    ahead_.Clear();
    for (const ChainAhead& a : p_.ahead) {
      const auto which = static_cast<size_t>(a.which);
      int64_t place = a.first, pitch = 0, size = 0;
      const char* base = nullptr;
      if (a.output) {
        const BoundOutput& output = p_.bound.outputs[which];
        for (int axis = 0; axis < outer_; ++axis) place += index[axis] * output.stride[axis];
        base = static_cast<const char*>(job_.outputs[which]);
        pitch = p_.output_pitch[which], size = SizeOf(output.dtype);
      } else {
        const BoundRead& read = p_.bound.reads[which];
        place += ReadPlace(read, index, true);  // as all reads of a straight program are
        base = static_cast<const char*>(job_.inputs[read.input]);
        pitch = p_.read_pitch[which], size = SizeOf(read.dtype);
      }
      ahead_.Add(base + place * size, pitch * size, batch.count, a.count * size);
    }
    fetch_ = (ahead_.lines() + p_.steps - 1) / p_.steps;
  }

  // Where rows first to first + count - 1 lie.
  void Locate(int64_t first, int count) {
    count_ = count;
    const BoundChain& b = p_.bound;
    int64_t index[kChainMostAxes] = {};
    Index(first, index);
    for (int row = 0; row < count; ++row) {
      for (int axis = 0; axis < outer_; ++axis) places_.index[axis * p_.batch + row] = index[axis];
      for (size_t r = 0; r < b.reads.size(); ++r) {
        if (row == 0 || p_.read_pitch[r] == kNoPitch) LocateRead(r, row, index);
      }
      for (size_t o = 0; o < b.outputs.size(); ++o) {
        if (row > 0 && p_.output_pitch[o] != kNoPitch) continue;
        int64_t at = 0;
        for (int axis = 0; axis < outer_; ++axis) at += index[axis] * b.outputs[o].stride[axis];
        places_.output[static_cast<int64_t>(o) * p_.batch + row] = at;
      }
      if (p_.straight) return;
      for (int axis = outer_; axis-- > 0;) {
        if (++index[axis] < b.size[axis]) break;
        index[axis] = 0;
      }
    }
  }
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
  void LocateRead(size_t r, int row, const int64_t* index) const {
    const BoundRead& read = p_.bound.reads[r];
    const int64_t slot = static_cast<int64_t>(r) * p_.batch + row;
    bool valid = !read.never;
    if (read.guarded) {
      for (int axis = 0; axis < outer_; ++axis) {
        valid = valid && index[axis] >= read.first[axis] && index[axis] <= read.last[axis];
      }
    }
    places_.read[slot] = ReadPlace(read, index, p_.linear[r] != 0);
    places_.valid[slot] = valid ? 1 : 0;
  }
  // Elements from the begin of its input; not linear: without what depends on the column.
  int64_t ReadPlace(const BoundRead& read, const int64_t* index, bool linear) const {
    auto at = static_cast<uint64_t>(read.constant);
    for (int axis = 0; axis < outer_; ++axis) {
      at += static_cast<uint64_t>(index[axis]) * static_cast<uint64_t>(read.stride[axis]);
    }
    for (size_t i = 0; linear && i < read.parts.size(); ++i) {
      const BoundRead::Part& part = read.parts[i];
      at += static_cast<uint64_t>(Value(part.index, index, 0)) * static_cast<uint64_t>(part.stride);
    }
    return static_cast<int64_t>(at);
  }
  int64_t Affine(const ChainIndex& index, const int64_t* outer, int64_t column) const {
    auto sum = static_cast<uint64_t>(index.constant);
    for (int axis = 0; axis < outer_; ++axis) {
      sum += static_cast<uint64_t>(index.coefficient[axis]) * static_cast<uint64_t>(outer[axis]);
    }
    return static_cast<int64_t>(sum + static_cast<uint64_t>(index.coefficient[outer_]) * static_cast<uint64_t>(column));
  }
  int64_t Value(const ChainIndex& index, const int64_t* outer, int64_t column) const {
    const int64_t affine = Affine(index, outer, column);
    if (index.kind == ChainIndex::Kind::kPlain) return affine;
    const int64_t quotient = FloorDiv(affine, index.divisor);
    return index.kind == ChainIndex::Kind::kQuotient ? quotient : affine - quotient * index.divisor;
  }

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
            ahead_.Fetch(fetch_);
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

  void Read(const ChainStep& step) {
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
  bool IsAllRead(const BoundRead& read, size_t r) const {
    if (read.never) return false;
    if (!read.guarded) return true;
    if (read.first[outer_] > column_ || read.last[outer_] < column_ + width_ - 1) return false;
    if (p_.read_pitch[r] != kNoPitch) return IsValid(r, 0);
    const uint8_t* valid = places_.valid + static_cast<int64_t>(r) * p_.batch;
    return std::all_of(valid, valid + count_, [](uint8_t one) { return one != 0; });
  }

  void ReadRow(size_t r, int row, float* to) {
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

  void Gather(const BoundRead& read, int64_t place, int64_t column, int64_t stride, int64_t count, float* to) const {
    const auto* from =
        static_cast<const char*>(job_.inputs[read.input]) + (place + column * stride) * SizeOf(read.dtype);
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
  void Pieces(const BoundRead& read, int row, int64_t place, int64_t first, int64_t end, float* to) const {
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

  void Store(const ChainStep& step) {
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
  void Scatter(const float* from, DType dtype, int64_t count, int64_t stride, char* target) const {
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
  portable::Ahead ahead_;
  int64_t fetch_ = 0;   // lines at a time
  int count_ = 0;       // rows of the batch
  int64_t column_ = 0;  // of the strip
  int64_t width_ = 0;
};

int64_t PiecesOf(const ChainProgram& p) {
  if (p.columns) return p.bound.rows * ((p.bound.n + kColumns - 1) / kColumns);
  return p.bound.rows / p.run * BatchesOfRun(p);
}

size_t WorkerBytes(const ChainProgram& p) {
  const size_t bytes = PointerBytes(p) + SumBytes(p) + PlaceBytes(p) + static_cast<size_t>(p.floats) * 4;
  return (bytes + 127) / 64 * 64;
}

int WorkersOf(const ChainProgram& p, int threads) {
  const double work = p.cost * static_cast<double>(p.bound.rows) * static_cast<double>(std::max<int64_t>(1, p.bound.n));
  const auto worth = static_cast<int64_t>(std::min(work / kWorthAThread, 1e6)) + 1;
  return static_cast<int>(std::max<int64_t>(1, std::min({static_cast<int64_t>(threads), worth, PiecesOf(p)})));
}

}  // namespace

size_t ChainWorkspace(const ChainProgram& program, int threads) {
  return WorkerBytes(program) * static_cast<size_t>(WorkersOf(program, threads));
}

void RunChain(const ChainProgram& program, CpuIsa isa, const void* const* inputs, void* const* outputs, void* workspace,
              const Parallel& parallel) {
  Job job{};
  job.program = &program;
  job.kernels = &ChainKernelsOf(isa);
  job.inputs = inputs;
  job.outputs = outputs;
  job.workspace = static_cast<char*>(workspace);
  job.workspace_each = WorkerBytes(program);
  job.pieces = PiecesOf(program);
  const int workers = WorkersOf(program, parallel.threads);
  // Some turns for each worker, so that none waits for a slow one.
  job.pieces_each = std::max<int64_t>(1, job.pieces / (workers == 1 ? 1 : 8 * workers));
  const auto work = [](void* user, size_t i) {
    auto* own = static_cast<Job*>(user);
    Worker(own, own->workspace + i * own->workspace_each).Work();
  };
  if (workers == 1) {
    work(&job, 0);
  } else {
    parallel.run(parallel.self, work, static_cast<size_t>(workers), &job);
  }
}

}  // namespace cpu
}  // namespace stof
