// SPDX-License-Identifier: Apache-2.0
// One StofCachedAttention node on a GPU with random inputs, NaN in every row of a cache that holds no key, and the
// comparison with the definition in double precision.
#ifndef STOF_TESTS_CPP_CACHED_ATTENTION_CUDA_NODE_H_
#define STOF_TESTS_CPP_CACHED_ATTENTION_CUDA_NODE_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/contract/op.h"
#include "plugins/core/ops/cached_attention/cached_attention.h"
#include "tests/cpp/cached_attention/append_problem.h"
#include "tests/cpp/check.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/int8_attention/fp8_device.h"
#include "tests/cpp/int8_attention/int8_reference.h"
#include "tests/cpp/map_attributes.h"

namespace stof::test::cached_attention {

namespace in = cached_input;

// Masks of the op by text, with what they mean beside k <= q.
struct Mask {
  const char* text;
  bool (*is_allowed)(int64_t h, int64_t q, int64_t k);
  bool is_of_distances;
};
inline constexpr Mask kMasks[] = {
    {"k <= q", [](int64_t, int64_t, int64_t) { return true; }, true},
    {"k <= q and q - k < 16", [](int64_t, int64_t q, int64_t k) { return q - k < 16; }, true},
    {"k <= q and q - k < 200", [](int64_t, int64_t q, int64_t k) { return q - k < 200; }, true},
    {"q - k < 4 or k % 3 == 0", [](int64_t, int64_t q, int64_t k) { return q - k < 4 || k % 3 == 0; }, false},
    {"k <= q and (k % 4 != h % 4 or k == q)", [](int64_t h, int64_t q, int64_t k) { return k % 4 != h % 4 || k == q; },
     false},
    // With key columns: single keys, per KV head of groups of 1, 2 and 4; strided blocks; sinks.
    {"q - k < 20 or k % 37 == 0", [](int64_t, int64_t q, int64_t k) { return q - k < 20 || k % 37 == 0; }, false},
    {"k <= q and (q - k < 70 or (k + 5 * (h // 4)) % 23 == 0)",
     [](int64_t h, int64_t q, int64_t k) { return q - k < 70 || (k + 5 * (h / 4)) % 23 == 0; }, false},
    {"k <= q and (q - k < 128 or (k // 64 + h // 4) % 4 == 0)",
     [](int64_t h, int64_t q, int64_t k) { return q - k < 128 || (k / 64 + h / 4) % 4 == 0; }, false},
    {"k <= q and (q - k < 40 or (k // 48 + h // 4) % 3 == 0)",
     [](int64_t h, int64_t q, int64_t k) { return q - k < 40 || (k / 48 + h / 4) % 3 == 0; }, false},
    // Heads of a group are alike; relative strides are no columns.
    {"k <= q and (q - k < 16 or (q // 8 - k // 8 + h // 4) % 5 == 0)",
     [](int64_t h, int64_t q, int64_t k) { return q - k < 16 || (q / 8 - k / 8 + h / 4) % 5 == 0; }, false},
    {"k <= q and (k < 4 or q - k < 33)", [](int64_t, int64_t q, int64_t k) { return k < 4 || q - k < 33; }, false},
    // Windows of blocks: S2, and blocks that are no KV tiles.
    {"k <= q and (q // 64 - k // 64 < 2 or (k // 64 + h // 4) % 4 == 0)",
     [](int64_t h, int64_t q, int64_t k) { return q / 64 - k / 64 < 2 || (k / 64 + h / 4) % 4 == 0; }, false},
    {"k <= q and (q // 48 <= k // 48 + 1 or k % 37 == 0)",
     [](int64_t, int64_t q, int64_t k) { return q / 48 <= k / 48 + 1 || k % 37 == 0; }, false},
};
constexpr int kFirstColumnMask = 5, kColumnMasks = 8;

// An append problem, and what the op computes with it.
struct Step {
  Case c;
  int mask = 0;
  int64_t total = 0;  // total_sequence_length
  float softcap = 0;
  bool has_sink = false, has_bias = false;
  const char* kernel = "";     // forced
  const char* precision = "";  // the attribute
  // Of decoding, softcap, and first prompts that gather the keys of key columns: with a precision, too.
  bool may_stay_full = false;
};

inline std::string Describe(const Step& step) {
  return Text(Describe(step.c), " mask ", kMasks[step.mask].text, " total ", step.total, " softcap ", step.softcap,
              " sink ", step.has_sink, " bias ", step.has_bias, " kernel '", step.kernel, "' precision '",
              step.precision, "'");
}

inline std::unique_ptr<Op> MakeOp(const Step& step) {
  const Case& c = step.c;
  MapAttributes attributes;
  attributes.ints = {{"num_heads", c.H},
                     {"kv_num_heads", c.G},
                     {"do_rotary", c.rotary > 0 ? 1 : 0},
                     {"rotary_interleaved", c.is_interleaved ? 1 : 0},
                     {"sliding_window_cache", c.window}};
  attributes.floats = {{"softcap", step.softcap}, {"qk_norm_epsilon", 1e-5f}};
  attributes.strings = {{"mask", kMasks[step.mask].text}, {"precision", step.precision}};
  std::unique_ptr<Op> op;
  const Status status = CachedAttentionDescription()->create(attributes, &op);
  CHECK(status.ok(), status.message());
  return op;
}

inline Tensor Describe(void* data, DType dtype, const std::vector<int64_t>& dims) {
  Tensor tensor = TensorOfShape(dtype, dims);
  tensor.data = data;
  return tensor;
}

// Attention of one sequence with 8-bit operands by its definition: [H, S, D]. KV tiles rise, where kernels may take
// them in another order: with fp8 that changes which weights are rounded up, not how far.
inline std::vector<double> AttendIn8Bits(const Dense& dense, DType dtype, bool fp8) {
  int8::Dense p;
  p.H = dense.H, p.G = dense.G, p.S = dense.S, p.T = dense.T, p.D = dense.D, p.scale = dense.scale;
  p.query = dense.query, p.key = dense.key, p.value = dense.value, p.sink = dense.sink;
  p.allowed.assign(dense.allowed.begin(), dense.allowed.end());
  p.exists.assign(static_cast<size_t>(p.T), 1), p.keys = {p.T};
  std::vector<int32_t> order;
  for (int64_t first = 0; first < p.T; first += int8::kTile) order.push_back(static_cast<int32_t>(order.size()));
  const std::vector<std::vector<int32_t>> orders(static_cast<size_t>(p.H * p.S), order);
  const auto round = [&](double weight) { return fp8 ? RoundToFloat8(weight) : Rounded(dtype, weight); };
  return int8::AttendQuantized(p, fp8, orders, round).output;
}

// One node on the device, and its tensors.
class Node {
 public:
  Node(const Step& step, uint64_t seed, size_t arena = 0)
      : step_(step), c_(step_.c), run(c_, seed), memory(arena), op(MakeOp(step_)) {
    for (int64_t h = 0; h < c_.H; ++h) sink.push_back(Rounded(c_.dtype, run.random.Unit()));
    for (int64_t i = 0; i < c_.B * c_.H * c_.S * step_.total && step_.has_bias; ++i) {
      bias.push_back(Rounded(c_.dtype, 2 * run.random.Unit()));
    }
    PoisonRowsWithoutKeys();
    before_key = run.present_key, before_value = run.present_value;
    inputs.resize(in::kCount);
    SetTokens();
    const auto upload = [this](Buffer& buffer) { return memory.Upload(buffer.data(), buffer.bytes().size()); };
    void* const present[2] = {upload(run.present_key), upload(run.present_value)};
    if (c_.has_past) {
      const std::vector<int64_t> dims = {c_.B, c_.G, Run::past_rows(c_), c_.D};
      inputs[in::kPastKey] = Describe(c_.is_shared ? present[0] : upload(run.past_key), c_.dtype, dims);
      inputs[in::kPastValue] = Describe(c_.is_shared ? present[1] : upload(run.past_value), c_.dtype, dims);
    }
    inputs[in::kSeqlens] =
        Describe(memory.Upload(run.seqlens.data(), run.seqlens.size() * sizeof(int32_t)), DType::kI32, {c_.B});
    total_ = static_cast<int32_t>(step_.total);
    inputs[in::kTotal] = Describe(&total_, DType::kI32, {1});
    if (c_.rotary > 0) {
      inputs[in::kCos] = Describe(upload(run.cos), c_.dtype, {kRotaryRows, c_.rotary / 2});
      inputs[in::kSin] = Describe(upload(run.sin), c_.dtype, {kRotaryRows, c_.rotary / 2});
      if (c_.has_positions) {
        inputs[in::kPositions] = Describe(memory.Upload(run.positions.data(), run.positions.size() * sizeof(int64_t)),
                                          DType::kI64, {c_.B, c_.S});
      }
    }
    if (c_.has_norm) {
      inputs[in::kQueryNorm] = Describe(upload(run.query_norm), c_.dtype, {c_.D});
      inputs[in::kKeyNorm] = Describe(upload(run.key_norm), c_.dtype, {c_.D});
    }
    if (step_.has_sink) inputs[in::kSink] = UploadFloats(sink, {c_.H});
    if (step_.has_bias) inputs[in::kBias] = UploadFloats(bias, {c_.B, c_.H, c_.S, step_.total});
    const int64_t bytes = c_.B * c_.S * c_.H * c_.D * SizeOfFloat(c_.dtype);
    outputs.push_back(Describe(memory.Take(static_cast<size_t>(bytes)), c_.dtype, {c_.B, c_.S, c_.H * c_.D}));
    for (void* cache : present) outputs.push_back(Describe(cache, c_.dtype, {c_.B, c_.G, c_.capacity, c_.D}));
    CHECK_CUDA(cudaMemset(outputs[0].data, 0xff, static_cast<size_t>(bytes)));
    const Status status = op->Prepare(inputs.data(), static_cast<int>(inputs.size()));
    CHECK(status.ok(), Describe(step_), ": ", status.message());
  }

  // The new tokens in the form of the op's inputs.
  void SetTokens() {
    const int64_t N = c_.H + 2 * c_.G, item = SizeOfFloat(c_.dtype);
    const char* const all = static_cast<const char*>(run.tokens.data());
    const auto set = [&](int input, int64_t head, int64_t heads) {
      std::vector<char> part;
      for (int64_t row = 0; row < c_.B * c_.S; ++row) {
        const char* const from = all + (row * N + head) * c_.D * item;
        part.insert(part.end(), from, from + heads * c_.D * item);
      }
      Tensor& tensor = inputs[static_cast<size_t>(input)];
      if (tensor.data == nullptr) {
        tensor = Describe(memory.Take(part.size()), c_.dtype, {c_.B, c_.S, heads * c_.D});
      }
      CopyToDevice(tensor.data, part.data(), part.size());
    };
    if (is_packed) return set(in::kQuery, 0, N);
    set(in::kQuery, 0, c_.H), set(in::kKey, c_.H, c_.G), set(in::kValue, c_.H + c_.G, c_.G);
  }
  // Another step over the same caches, with new tokens, lengths and output in memory of their own: it may be queued
  // behind others that have not run. Select makes it the step that Queue and Check mean.
  struct OneStep {
    std::vector<int64_t> past;
    Buffer tokens;
    std::vector<int32_t> seqlens;
    std::vector<Tensor> inputs, outputs;
  };
  OneStep MakeStep(const std::vector<int64_t>& past) {
    OneStep step = {past, run.tokens, run.seqlens, inputs, outputs};
    step.tokens.Draw(&run.random);
    for (size_t b = 0; b < past.size(); ++b) step.seqlens[b] = static_cast<int32_t>(past[b] + c_.S - 1);
    for (const int input : {in::kQuery, in::kKey, in::kValue}) step.inputs[static_cast<size_t>(input)] = Tensor();
    step.inputs[in::kSeqlens].data = memory.Upload(step.seqlens.data(), step.seqlens.size() * sizeof(int32_t));
    const auto bytes = static_cast<size_t>(c_.B * c_.S * c_.H * c_.D * SizeOfFloat(c_.dtype));
    step.outputs[0].data = memory.Take(bytes);
    CHECK_CUDA(cudaMemset(step.outputs[0].data, 0xff, bytes));
    Select(step);
    SetTokens();
    step.inputs = inputs;
    return step;
  }
  void Select(const OneStep& step) {
    step_.c.past = step.past;
    run.tokens = step.tokens, run.seqlens = step.seqlens, inputs = step.inputs, outputs = step.outputs;
  }
  // Another step over the caches on the device: its lengths before it, and new tokens.
  void Advance(const std::vector<int64_t>& past) {
    step_.c.past = past;
    run.tokens.Draw(&run.random);
    for (size_t b = 0; b < past.size(); ++b) run.seqlens[b] = static_cast<int32_t>(past[b] + c_.S - 1);
    SetTokens(), SetLengths();
    const int64_t count = c_.B * c_.G * c_.capacity * c_.D;
    run.past_key = before_key = Download(outputs[1].data, count);
    run.past_value = before_value = Download(outputs[2].data, count);
  }
  void SetLengths() {
    CopyToDevice(inputs[in::kSeqlens].data, run.seqlens.data(), run.seqlens.size() * sizeof(int32_t));
  }

  Status Queue(cudaStream_t stream) {
    memory.ResetArena();
    RunContext context;
    context.on_cuda = true;
    context.stream = stream;
    context.allocate = DeviceMemory::Allocate;
    context.self = &memory;
    return op->Run(inputs.data(), static_cast<int>(inputs.size()), outputs.data(), static_cast<int>(outputs.size()),
                   context);
  }

  Buffer Download(const void* from, int64_t count) const {
    Buffer buffer(c_.dtype, count);
    CHECK_CUDA(cudaMemcpy(buffer.data(), from, buffer.bytes().size(), cudaMemcpyDeviceToHost));
    return buffer;
  }

  // Queries behind norm and rotary embedding, for a step whose workspace a later one has overwritten.
  Buffer RotatedQueries() const {
    Buffer rotated(c_.dtype, c_.B * c_.H * c_.S * c_.D);
    for (int64_t b = 0; b < c_.B; ++b) {
      for (int64_t h = 0; h < c_.H; ++h) {
        for (int64_t i = 0; i < c_.S; ++i) {
          const int64_t position =
              c_.has_positions ? run.positions[static_cast<size_t>(b * c_.S + i)] : c_.past[static_cast<size_t>(b)] + i;
          const bool is_legal = position >= 0 && position < kRotaryRows;
          const std::vector<double> x =
              Transformed(c_, run.tokens, run.token(c_, b, h, i), c_.has_norm ? &run.query_norm : nullptr, run.cos,
                          run.sin, is_legal ? position : 0);
          for (int64_t d = 0; d < c_.D; ++d)
            rotated.Set(((b * c_.H + h) * c_.S + i) * c_.D + d, x[static_cast<size_t>(d)]);
        }
      }
    }
    return rotated;
  }
  // The caches, then attention over what the device holds: errors of rounding are those of attention alone. Sequences
  // other than `illegal` are checked, that one is NaN. is_last: no run has overwritten the workspace of this one.
  void Check(const std::string& where, int64_t illegal = -1, bool is_last = true) {
    difference_ = size_ = rounding_ = from_definition_ = 0;
    const int64_t staged = c_.window > 0 && c_.S > 1 ? Run::past_rows(c_) + c_.S : 0;
    const int64_t capacity = staged > 0 ? staged : c_.capacity;
    // In the op's order: first_row, is_invalid, rotated queries if any, staging if any, then others.
    const std::vector<void*>& workspace = memory.workspace();
    const bool is_rotated = c_.rotary > 0 || c_.has_norm;
    const size_t staging = is_rotated ? 3 : 2;
    std::vector<int32_t> first(static_cast<size_t>(c_.B));
    if (!is_last) {
      for (size_t b = 0; b < first.size(); ++b) first[b] = static_cast<int32_t>(c_.past[b]);
    } else {
      CHECK_CUDA(cudaMemcpy(first.data(), workspace[0], first.size() * sizeof(int32_t), cudaMemcpyDeviceToHost));
    }
    const int64_t count = c_.B * c_.G * capacity * c_.D;
    const Buffer key = Download(staged > 0 ? workspace[staging] : outputs[1].data, count);
    const Buffer value = Download(staged > 0 ? workspace[staging + 1] : outputs[2].data, count);
    const Buffer output = Download(outputs[0].data, c_.B * c_.S * c_.H * c_.D);
    const Buffer rotated = !is_rotated ? Buffer(c_.dtype, 0)
                           : is_last   ? Download(workspace[2], output.count())
                                       : RotatedQueries();
    for (int64_t b = 0; b < c_.B; ++b) {
      if (b == illegal) {
        for (int64_t i = 0; i < c_.S * c_.H * c_.D; ++i) {
          CHECK(std::isnan(output.Get(b * c_.S * c_.H * c_.D + i)), where, ": element ", i,
                " of an illegal sequence is ", output.Get(b * c_.S * c_.H * c_.D + i));
        }
        continue;
      }
      CheckSequence(b, first[static_cast<size_t>(b)], key, value, capacity, rotated, output, where);
    }
    if (!is_reduced()) return;
    // What rounding operands to 8 bits costs is measured on these inputs: scores that spread wider cost more.
    const double expected = std::sqrt(rounding_ / size_), own = std::sqrt(from_definition_ / size_);
    CHECK(error() < 1.2 * expected, where, ": relative RMS ", error(), ", of the definition ", expected);
    if (step_.may_stay_full && error() < expected / 4) return;
    CHECK(error() > expected / 1.2, where, ": relative RMS ", error(), ", of the definition ", expected);
    CHECK(has_fp8() || own < 0.006, where, ": relative RMS ", own, " from the definition");
  }
  // The relative RMS error of the sequences that were checked last.
  double error() const { return std::sqrt(difference_ / size_); }
  bool is_reduced() const { return *step_.precision != '\0'; }
  bool has_fp8() const { return std::string(step_.precision) == "int8_fp8" && int8::HasFp8(); }
  // No row of the caches of a sequence has changed.
  void CheckUnchanged(const std::string& where, int64_t b) const {
    const int64_t count = c_.G * c_.capacity * c_.D, all = c_.B * count;
    CHECK(Download(outputs[1].data, all).Equals(b * count, before_key, b * count, count), where, ": keys of ", b);
    CHECK(Download(outputs[2].data, all).Equals(b * count, before_value, b * count, count), where, ": values of ", b);
  }
  void CheckCaches(const std::string& where) {
    const int64_t count = c_.B * c_.G * c_.capacity * c_.D;
    CheckCache(c_, run, before_key, before_value, Download(outputs[1].data, count), Download(outputs[2].data, count),
               where);
  }

 private:
  Tensor UploadFloats(const std::vector<double>& values, const std::vector<int64_t>& dims) {
    Buffer buffer(c_.dtype, static_cast<int64_t>(values.size()));
    for (int64_t i = 0; i < buffer.count(); ++i) buffer.Set(i, values[static_cast<size_t>(i)]);
    return Describe(memory.Upload(buffer.data(), buffer.bytes().size()), c_.dtype, dims);
  }

  // NaN in all rows that hold no key.
  void PoisonRowsWithoutKeys() {
    const auto poison = [this](Buffer* buffer, int64_t rows, bool keeps_past) {
      const auto row = static_cast<size_t>(c_.D * SizeOfFloat(c_.dtype));
      auto* const bytes = static_cast<char*>(buffer->data());
      for (int64_t head = 0; head < c_.B * c_.G; ++head) {
        const auto held = static_cast<int64_t>(Held(c_, c_.past[static_cast<size_t>(head / c_.G)]).size());
        for (int64_t r = keeps_past ? held : 0; r < rows; ++r) {
          std::memset(bytes + static_cast<size_t>(head * rows + r) * row, 0xff, row);
        }
      }
    };
    if (!c_.is_shared)
      poison(&run.past_key, Run::past_rows(c_), true), poison(&run.past_value, Run::past_rows(c_), true);
    const bool keeps_past = c_.has_past && c_.is_shared;
    poison(&run.present_key, c_.capacity, keeps_past), poison(&run.present_value, c_.capacity, keeps_past);
  }

  void CheckSequence(int64_t b, int64_t first, const Buffer& key, const Buffer& value, int64_t capacity,
                     const Buffer& rotated, const Buffer& output, const std::string& where) {
    const int64_t tokens = c_.tokens_of(b), past = c_.past[static_cast<size_t>(b)], origin = past - first;
    Dense dense;
    dense.H = c_.H, dense.G = c_.G, dense.S = tokens, dense.T = first + tokens, dense.D = dense.Dv = c_.D;
    dense.scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(c_.D)));
    dense.softcap = static_cast<double>(step_.softcap);
    if (step_.has_sink) dense.sink = sink;
    double largest = 0;
    for (int64_t h = 0; h < c_.H; ++h) {
      for (int64_t i = 0; i < tokens; ++i) {
        for (int64_t d = 0; d < c_.D; ++d) {
          dense.query.push_back(rotated.count() > 0 ? rotated.Get(((b * c_.H + h) * c_.S + i) * c_.D + d)
                                                    : run.tokens.Get(run.token(c_, b, h, i) + d));
        }
        for (int64_t k = 0; k < dense.T; ++k) {
          const int64_t position = k + origin;
          dense.allowed.push_back(k <= first + i && kMasks[step_.mask].is_allowed(h, past + i, position) ? 1 : 0);
          if (step_.has_bias) {
            dense.bias.push_back(bias[static_cast<size_t>(((b * c_.H + h) * c_.S + i) * step_.total + k)]);
          }
        }
      }
    }
    for (int64_t g = 0; g < c_.G; ++g) {
      for (int64_t at = 0; at < dense.T * c_.D; ++at) {
        dense.key.push_back(key.Get((b * c_.G + g) * capacity * c_.D + at));
        dense.value.push_back(value.Get((b * c_.G + g) * capacity * c_.D + at));
        largest = std::max(largest, std::abs(dense.value.back()));
      }
    }
    const Answer answer = Attend(dense);
    const std::vector<double> definition = is_reduced() ? AttendIn8Bits(dense, c_.dtype, has_fp8()) : answer.output;
    for (int64_t h = 0; h < c_.H; ++h) {
      for (int64_t i = 0; i < c_.S; ++i) {
        for (int64_t d = 0; d < c_.D; ++d) {
          const double got = output.Get(((b * c_.S + i) * c_.H + h) * c_.D + d);
          const auto place = [&] { return Text(where, ": b ", b, " h ", h, " row ", i, " d ", d); };
          if (i >= tokens) {
            CHECK(!std::isnan(got), place(), " of padding is NaN");
            continue;
          }
          const int64_t row = h * tokens + i;
          const auto at = static_cast<size_t>(row * c_.D + d);
          const double want = answer.output[at], in_8_bits = definition[at];
          difference_ += (got - want) * (got - want), size_ += want * want;
          rounding_ += (in_8_bits - want) * (in_8_bits - want),
              from_definition_ += (got - in_8_bits) * (got - in_8_bits);
          if (is_reduced()) continue;
          const double magnitude = answer.magnitude[static_cast<size_t>(row)];
          const double tolerance = Tolerance(c_.dtype, magnitude, dense.T, largest, want) +
                                   CudaTolerance(c_.dtype, magnitude, dense.T, largest);
          CHECK(std::abs(got - want) <= tolerance, place(), ": ", got, ", expected ", want, " ± ", tolerance);
        }
      }
    }
  }

  Step step_;
  const Case& c_;
  int32_t total_ = 0;
  // Sums of squares: outputs less attention, attention, the definition with 8-bit operands less attention, and outputs
  // less that definition.
  double difference_ = 0, size_ = 0, rounding_ = 0, from_definition_ = 0;

 public:
  Run run;
  DeviceMemory memory;
  std::unique_ptr<Op> op;
  bool is_packed = run.random.OneIn(2);
  std::vector<double> sink, bias;
  std::vector<Tensor> inputs, outputs;
  Buffer before_key = run.present_key, before_value = run.present_value;
};

}  // namespace stof::test::cached_attention
#endif  // STOF_TESTS_CPP_CACHED_ATTENTION_CUDA_NODE_H_
