// SPDX-License-Identifier: Apache-2.0
// Packed sequences of StofAttention beside the padded call. Tensors end with their memory, so that a sanitizer sees
// what is read or written outside. tests/runtime/test_packed_sequences.py compares with the definition.
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cuda/packed_sequences/sequence_rows.h"
#include "plugins/core/host/thread_pool.h"
#include "plugins/core/ops/attention_padded_copies.h"
#include "plugins/core/ops/attention_shapes.h"
#include "tests/cpp/attention/packed_cases.h"
#include "tests/cpp/fixtures.h"

namespace stof::test::attention {
namespace {

void Run(const PackedCase& c, const std::string& operands, const std::vector<Tensor>& inputs, Array* output) {
  const std::unique_ptr<Op> op = MakePackedOp(c, operands, inputs);
  Memory memory;
  ThreadPool pool(c.threads);
  const RunContext context = {pool.view(), Memory::Allocate, &memory};
  const Status status = op->Run(inputs.data(), static_cast<int>(inputs.size()), &output->tensor, 1, context);
  CHECK(status.ok(), status.message());
}

bool AttendsAll(const PackedCase& c) { return AttendsAllKeys(static_cast<EmptyRows>(c.empty_rows)); }

// Packed inputs have NaN in rows behind the last sequence, and the output has zeros.
void CheckSpareRows(const PackedCase& c, const Array& found) {
  if (!c.has_queries) return;
  for (int64_t i = c.tokens() * c.H * c.Dv; i < found.tensor.Elements(); ++i) {
    CHECK(found.Get(i) == 0.0f, "element ", i, " behind the last sequence is ", found.Get(i));
  }
}

void RunCase(const PackedCase& c, Random* random) {
  PackedTensors tensors(c, random);
  Array wanted(c.dtype, {c.B, c.S, c.H * c.Dv}), found = PackedOutput(c);
  Run(c, tensors.padded_operands, tensors.PaddedInputs(), &wanted);
  Run(c, tensors.packed_operands, tensors.PackedInputs(c), &found);
  CheckSpareRows(c, found);
  if (AttendsAll(c)) return;  // over all keys, not those that exist
  ComparePacked(c, found, c.has_queries ? Packed(c, &wanted, 0.0f) : wanted);
}

template <typename Function>
void ForEachCase(int count, uint64_t seed, const Function& run) {
  for (int i = 0; i < count; ++i) {
    Random random(static_cast<uint64_t>(i) + seed);
    const PackedCase c = DrawPacked(&random);
    try {
      run(c, &random);
    } catch (const Failure& failure) {
      CHECK(false, "case ", i, " ", Describe(c), failure.message);
    }
    CountCases(1);
  }
}

// ---- what a device does, on the host ----
int64_t Elements(const SequenceRows& tensor, int64_t head, int64_t row) {
  return row * tensor.packed_stride.s + head * tensor.packed_stride.h;
}

template <typename Visit>
void ForEachRow(const DeviceSequences& sequences, const Visit& visit) {
  const bool is_legal = cuda::HasLegalStarts(sequences, 0, 1);
  for (int64_t b = 0; b < sequences.B; ++b) {
    const cuda::SequenceSpan span = cuda::SpanOf(sequences, is_legal, b);
    for (int64_t t = 0; t < sequences.positions; ++t) {
      visit(b, t, t >= span.first && t < span.first + span.length ? span.begin + t - span.first : -1, span);
    }
  }
}

// Sequences that have keys, of which the key padding mask keeps none.
std::vector<char> FindWholeSequences(const DeviceSequences& sequences, const KeyExistence& keys) {
  std::vector<char> is_whole(static_cast<size_t>(sequences.B), keys.keeps_whole_sequences ? 1 : 0);
  const auto* const given = static_cast<const uint8_t*>(keys.given.data);
  ForEachRow(sequences, [&](int64_t b, int64_t t, int64_t row, const cuda::SequenceSpan& span) {
    if (span.length == 0 || (row >= 0 && given[b * sequences.positions + t] != 0)) is_whole[static_cast<size_t>(b)] = 0;
  });
  return is_whole;
}

// fp32, or bf16: the upper half of fp32.
float GetElement(const void* data, DType dtype, int64_t i) {
  const int64_t size = SizeOf(dtype);
  float value = 0;
  std::memcpy(reinterpret_cast<char*>(&value) + 4 - size, static_cast<const char*>(data) + i * size,
              static_cast<size_t>(size));
  return value;
}

// Puts the mean of a sequence's rows in the place of padded ones.
void AverageOnHost(const DeviceSequences& sequences, const SequenceRows& tensor, const KeyExistence& keys) {
  const std::vector<char> is_whole = FindWholeSequences(sequences, keys);
  const int64_t item = SizeOf(tensor.dtype);
  ForEachRow(sequences, [&](int64_t b, int64_t t, int64_t row, const cuda::SequenceSpan& span) {
    if (keys.keeps_whole_sequences ? is_whole[static_cast<size_t>(b)] == 0 : row >= 0) return;
    for (int64_t head = 0; head < tensor.heads; ++head) {
      for (int64_t i = 0; i < tensor.size; ++i) {
        double sum = 0;
        for (int64_t r = span.begin; r < span.begin + span.length; ++r) {
          sum += GetElement(tensor.packed, tensor.dtype, Elements(tensor, head, r) + i);
        }
        const auto mean = static_cast<float>(sum / static_cast<double>(std::max<int64_t>(span.length, 1)));
        const int64_t at = ((b * tensor.heads + head) * sequences.positions + t) * tensor.size + i;
        std::memcpy(static_cast<char*>(tensor.padded) + at * item, reinterpret_cast<const char*>(&mean) + 4 - item,
                    static_cast<size_t>(item));
      }
    }
  });
}

Status MoveOnHost(const DeviceSequences& sequences, const SequenceRows& tensor, bool unpacks) {
  const auto size = static_cast<size_t>(tensor.size * SizeOf(tensor.dtype));
  ForEachRow(sequences, [&](int64_t b, int64_t t, int64_t row, const cuda::SequenceSpan& span) {
    const int64_t begin = span.first / tensor.tile * tensor.tile;
    const int64_t end = (span.first + span.length + tensor.tile - 1) / tensor.tile * tensor.tile;
    const bool is_near = tensor.tile >= sequences.positions || (span.length > 0 && t >= begin && t < end);
    for (int64_t head = 0; head < tensor.heads; ++head) {
      const int64_t at = ((b * tensor.heads + head) * sequences.positions + t) * tensor.size;
      char* const padded = static_cast<char*>(tensor.padded) + at * SizeOf(tensor.dtype);
      if (row < 0) {
        if (unpacks) std::memset(padded, is_near ? 0 : 0xff, size);  // what is not written may be NaN
        continue;
      }
      char* const packed = static_cast<char*>(tensor.packed) + Elements(tensor, head, row) * SizeOf(tensor.dtype);
      std::memcpy(unpacks ? padded : packed, unpacks ? packed : padded, size);
    }
  });
  for (int64_t row = sequences.starts[sequences.B]; !unpacks && row < sequences.rows; ++row) {
    for (int64_t head = 0; head < tensor.heads; ++head) {
      std::memset(static_cast<char*>(tensor.packed) + Elements(tensor, head, row) * SizeOf(tensor.dtype), 0, size);
    }
  }
  return Status();
}
void MarkOnHost(const DeviceSequences& sequences, const KeyExistence& keys) {
  const auto* const given = static_cast<const uint8_t*>(keys.given.data);
  const std::vector<char> is_whole = FindWholeSequences(sequences, keys);
  ForEachRow(sequences, [&](int64_t b, int64_t t, int64_t row, const cuda::SequenceSpan& span) {
    const int64_t at = b * sequences.positions + t;
    keys.pad[at] = row >= 0 && (given[at] != 0 || is_whole[static_cast<size_t>(b)] != 0) ? 1 : 0;
    if (keys.bias != nullptr) {
      keys.bias[at] = row >= 0 || span.length == 0 ? 0.0f : -std::numeric_limits<float>::infinity();
    }
  });
}
Status UnpackOnHost(const DeviceSequences& sequences, const SequenceRows* tensors, int count, const KeyExistence& keys,
                    const RunContext&) {
  for (int i = 0; i < count; ++i) {
    STOF_RETURN_IF_ERROR(MoveOnHost(sequences, tensors[i], true));
    if (tensors[i].means != nullptr) AverageOnHost(sequences, tensors[i], keys);
  }
  MarkOnHost(sequences, keys);
  return Status();
}
Status PackOnHost(const DeviceSequences& sequences, const SequenceRows& tensor, const RunContext&) {
  return MoveOnHost(sequences, tensor, false);
}

// Runs the padded copies of a case through the kernel of padded batches; the mask is that of pad alone, whether the
// copies know it or not.
void RunCopies(const PackedCase& c, const PackedTensors& tensors, bool is_pad_alone, Array* output) {
  AttentionAttributes attributes;
  Status status = ParseAttention(PackedAttributes(c, tensors.packed_operands), &attributes);
  CHECK(status.ok(), status.message());
  const std::vector<Tensor> inputs = tensors.PackedInputs(c);
  AttentionArgs args;
  status = BindQueryKeyValue(attributes, inputs.data(), static_cast<int>(inputs.size()), &args);
  CHECK(status.ok(), status.message());
  PaddedCopies copies;
  status = copies.Bind(attributes, inputs.data(), &args);
  CHECK(status.ok(), status.message());
  args.output.data = output->tensor.data;
  const PackedSequencesBackend backend = {UnpackOnHost, PackOnHost};
  Memory memory;
  ThreadPool pool(c.threads);
  const RunContext context = {pool.view(), Memory::Allocate, &memory};
  const Tensor* pad = &tensors.pad.tensor;
  status = copies.Allocate(is_pad_alone, context, &args, &pad);
  CHECK(status.ok(), status.message());
  // The plan counts the same blocks.
  PaddedCopies planned;
  AttentionArgs plan;
  CHECK(BindQueryKeyValue(attributes, inputs.data(), static_cast<int>(inputs.size()), &plan).ok());
  CHECK(planned.Bind(attributes, inputs.data(), &plan).ok());
  size_t bytes = 0;
  const Tensor* planned_pad = &tensors.pad.tensor;
  CHECK(PlanPaddedCopies(is_pad_alone, &planned, &plan, &planned_pad, &bytes).ok());
  CHECK(bytes > 0 || c.B == 0, "the plan asks for nothing");
  CHECK(copies.Unpack(backend, context).ok());
  args.mask.pad = static_cast<const uint8_t*>(pad->data);
  if (args.mask.existence_bias != nullptr && args.mask.empty_rows == EmptyRows::kAll) {
    args.scores.bias = {args.mask.existence_bias, DType::kF32, args.shape.T, 0, 0, 1};
    args.mask.existence_bias = nullptr;
  }
  const CpuAttentionConfig config = ChooseCpuAttention(args, c.threads);
  void* workspace = nullptr;
  CHECK(context.Allocate(CpuAttentionWorkspace(args, config, c.threads), &workspace).ok());
  status = CpuAttention(args, config, workspace, context.parallel);
  CHECK(status.ok(), status.message());
  CHECK(copies.Pack(backend, context).ok());
}

}  // namespace

// With STOF_TEST_ALL=1 10^5 draws, a fifth of them under a sanitizer.
TEST(AttentionOfPackedSequences) {
  const char* const all = std::getenv("STOF_TEST_ALL");
  const bool is_long = all != nullptr && std::strcmp(all, "1") == 0;
  ForEachCase(Cases(is_long ? 100000 : 600), 5400, RunCase);
}

// A device runs over padded copies: their order, sizes and marks, without a device.
TEST(AttentionOfPaddedCopies) {
  ForEachCase(Cases(200), 5500, [](PackedCase c, Random* random) {
    c.mask = 0;  // pad alone
    PackedTensors tensors(c, random);
    Array wanted = PackedOutput(c), found = PackedOutput(c);
    Run(c, tensors.packed_operands, tensors.PackedInputs(c), &wanted);
    if (found.tensor.Elements() > 0) RunCopies(c, tensors, random->OneIn(2), &found);
    CheckSpareRows(c, found);
    ComparePacked(c, found, wanted);
  });
}

// The plan for a device needs none. It counts the padded copies, and says what no kernel takes.
TEST(PackedSequencesArePlannedForADevice) {
  PackedCase c;
  c.B = 2, c.H = 2, c.T = c.S = 24, c.D = c.Dv = 64;
  c.length = {10, 24}, c.first = {14, 0};
  Random random(1);
  const auto plan = [&](const std::string& operands, std::vector<Tensor> shapes, DevicePlan* planned) {
    for (Tensor& shape : shapes) shape.data = nullptr;
    std::unique_ptr<Op> op;
    MapAttributes attributes = PackedAttributes(c, operands);
    if (operands.find("pad") == std::string::npos) attributes.strings["mask"] = "";
    CHECK(AttentionDescription()->create(attributes, &op).ok());
    CHECK(op->Prepare(shapes.data(), static_cast<int>(shapes.size())).ok());
    return op->PlanDevice(shapes.data(), static_cast<int>(shapes.size()), planned);
  };
  const PackedTensors tensors(c, &random);
  const std::vector<Tensor> shapes = tensors.PackedInputs(c);
  DevicePlan planned;
  const Status status = plan(tensors.packed_operands, shapes, &planned);
  CHECK(status.ok(), status.message());
  const auto copies = static_cast<size_t>(4 * (4 * c.B * c.T * c.H * c.D));  // query, key, value and output, fp32
  CHECK(planned.workspace >= copies && planned.runs_several_kernels, planned.workspace, " bytes");
  const auto refuses = [&](const std::string& operands, const std::vector<Tensor>& inputs, const char* message) {
    const Status refused = plan(operands, inputs, &planned);
    CHECK(!refused.ok() && refused.message().find(message) != std::string::npos, "'", refused.message(), "'");
    CountCases(1);
  };
  refuses("cumulative_sequence_length", {shapes[0], shapes[1], shapes[2], tensors.cumulative.tensor},
          "no operand says how long a padded sequence is");
  c.empty_rows = static_cast<int>(EmptyRows::kAll);
  std::vector<Tensor> biased = shapes;
  biased.push_back(TensorOfShape(DType::kF32, std::vector<int64_t>{24, 24}));
  refuses(tensors.packed_operands + " bias", biased, "expected zero, nan or mean beside bias");
}

TEST(PackedSequencesOfAnyNumbersStayInside) {
  Random random(5600);
  const int cases = Cases(20000);
  for (int i = 0; i < cases; ++i) {
    const int64_t B = random.Range(1, 6), rows = random.Range(0, 20), positions = random.Range(1, 12);
    const auto any = [&] {
      const std::vector<int64_t> extremes = {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
      return static_cast<int32_t>(random.OneIn(8) ? random.Pick(extremes) : random.Range(-2, 22));
    };
    std::vector<int32_t> starts, first;
    for (int64_t b = 0; b <= B; ++b) starts.push_back(any());
    for (int64_t b = 0; b < B; ++b) first.push_back(any());
    const DeviceSequences sequences = {starts.data(), random.OneIn(2) ? first.data() : nullptr, B, rows, positions};
    for (int64_t b = 0; b < B; ++b) {
      const cuda::SequenceSpan span = cuda::SpanOf(sequences, true, b);
      CHECK(span.begin >= 0 && span.length >= 0 && span.begin + span.length <= rows, "rows of sequence ", b);
      CHECK(span.first >= 0 && span.first + span.length <= positions, "positions of sequence ", b);
      CHECK(span.is_legal || span.length == 0, "an illegal sequence has rows");
    }
    // Where starts are legal, each row below the last of them is of one sequence.
    if (!cuda::HasLegalStarts(sequences, 0, 1)) continue;
    CHECK(starts.back() <= rows, "the last sequence ends behind the rows");
    for (int64_t row = 0; row < starts.back(); ++row) {
      int64_t owners = 0;
      for (int64_t b = 0; b < B; ++b) {
        const auto at = static_cast<size_t>(b);
        owners += row >= starts[at] && row < starts[at + 1] ? 1 : 0;
      }
      CHECK(owners == 1, owners, " sequences own row ", row);
    }
    CountCases(1);
  }
}

// Without a sequence all rows are behind the last one; the number behind starts[0] says nothing.
TEST(PackedRowsOfNoSequence) {
  for (const int32_t start : {0, 1, -1}) {
    const std::vector<int32_t> starts = {start, 2};
    const DeviceSequences sequences = {starts.data(), nullptr, 0, 3, 5};
    CHECK(cuda::HasLegalStarts(sequences, 0, 1) == (start == 0), "start ", start);
    CountCases(1);
  }
}

}  // namespace stof::test::attention
