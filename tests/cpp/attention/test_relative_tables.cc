// SPDX-License-Identifier: Apache-2.0
// Attention with relative tables on the CPU: the kernels of every instruction set of this machine against
// the definition, and packed sequences beside the padded call.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/kernel_table.h"
#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/attention/packed_cases.h"
#include "tests/cpp/attention/relative_problem.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test::attention {
namespace {

void RunCase(const RelativeCase& drawn, CpuIsa isa, uint64_t seed, const Parallel& team) {
  const Case& c = drawn.base;
  const std::string where = Text("seed ", seed, " ", Describe(drawn));
  Random random(seed);
  const MaskData data = DrawMask(c, &random);
  BiasTensor bias = DrawBias(c, &random);
  const FactoredBias factored = DrawFactored(drawn, &random, &bias.dense);
  Dense dense = DrawDense(c, data, bias, &random);
  if (c.sink) dense.sink = DrawSink(c, &random);
  std::vector<char> sink(static_cast<size_t>(c.H * SizeOfFloat(c.dtype)));
  for (size_t h = 0; h < dense.sink.size(); ++h) {
    StoreFloat(c.dtype, dense.sink[h], &sink[h * static_cast<size_t>(SizeOfFloat(c.dtype))]);
  }
  Strided query(c, 0, c.H, c.S, c.D), key(c, 1, c.G, c.T, c.D), value(c, 2, c.G, c.T, c.Dv);
  Strided output(c, 3, c.H, c.S, c.Dv);
  query.Fill(dense.query), key.Fill(dense.key), value.Fill(dense.value);
  AttentionArgs args = MakeArgs(c, query, key, value, output);
  const BoundTables tables(drawn, &random, &dense, &args);
  if (c.pad != Pad::kNone && c.mask != 12) args.mask.pad = data.pad.data();
  if (c.bias != Bias::kNone) {
    args.scores.bias = {bias.bytes.data(), bias.dtype, bias.stride[0], bias.stride[1], bias.stride[2], bias.stride[3]};
  }
  if (c.relative > 0) {
    args.scores.relative_bias = {factored.table.data(), c.relative, c.relative_shared ? 0 : c.relative,
                                 c.offset ? c.T - c.S : 0};
    args.scores.relative_bias.factor = drawn.factor != 0 ? factored.factor.data() : nullptr;
    args.scores.relative_bias.factor_dtype = DType::kF32;
    args.scores.relative_bias.factor_stride_b = factored.stride_b;
    args.scores.relative_bias.factor_stride_h = factored.stride_h;
  }
  if (c.sink) args.scores.sink = {sink.data(), c.dtype};
  CpuAttentionConfig config = ChooseCpuAttention(args, team.threads);
  config.isa = isa;
  if (c.m > 0) config.m = c.m;
  if (c.n > 0) config.n = c.n;
  BoundMask bound;
  BindMask(c, data, config, &bound, &args);
  const Answer answer = Attend(dense);
  std::vector<char> first;
  Lse lse(c);
  for (const int threads : {1, 2}) {
    output.Reset();
    lse.Reset();
    args.output.lse = threads == 1 || seed % 2 == 0 ? lse.values.data() : nullptr;
    args.output.lse_stride_b = lse.stride_b, args.output.lse_stride_h = lse.stride_h;
    // NaN in one run and ordinary numbers in the other: the old content must not matter.
    const auto workspace = MakeWorkspace(CpuAttentionWorkspace(args, config, threads), threads == 1 ? 0xff : 0x3f);
    const Status status = CpuAttention(args, config, workspace.get(), threads == 1 ? Parallel{} : team);
    CHECK(status.ok(), where, ": ", status.message());
    if (threads == 1) first = output.bytes;
    CHECK(first == output.bytes, where, ": 2 threads give other bits than 1");
    Compare(c, dense, answer, &output, Text(where, " threads ", threads));
    if (args.output.lse != nullptr) lse.Compare(c, answer, Text(where, " threads ", threads));
  }
}

void RunTable(CpuIsa isa) {
  ThreadPool pool(2);
  std::vector<RelativeCase> cases = ListedRelativeCases();
  const std::vector<RelativeCase> drawn = DrawnRelativeCases(Cases(300));
  cases.insert(cases.end(), drawn.begin(), drawn.end());
  for (size_t i = 0; i < cases.size(); ++i) {
    RunCase(cases[i], isa, i, pool.view());
    CountCases(1);
    if (cpu::KernelsOf(isa).attention_bf16 == nullptr || i % 3 != 0) continue;
    cases[i].base.bf16 = true;
    RunCase(cases[i], isa, i, pool.view());
    CountCases(1);
  }
}

// ---- packed sequences ----
void Run(const PackedCase& c, const std::string& operands, const std::string& index, const std::vector<Tensor>& inputs,
         Array* output) {
  MapAttributes attributes = PackedAttributes(c, operands);
  attributes.strings["relative_index"] = index;
  std::unique_ptr<Op> op;
  Status status = AttentionDescription()->create(attributes, &op);
  CHECK(status.ok(), status.message());
  const auto count = static_cast<int>(inputs.size());
  status = op->Prepare(inputs.data(), count);
  CHECK(status.ok(), status.message());
  ThreadPool pool(c.threads);
  // Later runs take rows that earlier ones left.
  for (int i = 0; i < 2; ++i) {
    stof::test::Memory memory;
    std::fill(output->bytes.begin(), output->bytes.end(), static_cast<char>(0xff));
    status = op->Run(inputs.data(), count, &output->tensor, 1, {pool.view(), stof::test::Memory::Allocate, &memory});
    CHECK(status.ok(), status.message());
  }
}

void RunPacked(const PackedCase& c, Random* random) {
  PackedTensors tensors(c, random);
  const RowSizes sizes = {c.S, c.T, 0};
  std::string roles, index;
  std::vector<RelativeOperand> operands;
  std::vector<Tensor> further;
  operands.reserve(4);
  for (int i = 0; i < 4; ++i) {
    if (i == 1 || (i != 0 && random->OneIn(2))) continue;
    TableCase table;
    table.naming = random->Pick(kNamings), table.rows = random->Pick<int64_t>({0, 1, 17, 60});
    table.is_shared = random->OneIn(2), table.has_row_bias = i < 3 && random->OneIn(2);
    table.shift = static_cast<int>(random->Range(0, 3));
    operands.push_back(DrawOperand(table, sizes, c.H, i == 3 ? c.Dv : c.D, c.dtype, i, random));
    const RelativeOperand& drawn = operands.back();
    roles += std::string(" ") + kRelativeRoles[i];
    further.push_back(drawn.table());
    for (const auto& [name, entries] : drawn.operands()) {
      roles += " " + name;
      further.push_back(entries);
    }
    index += (index.empty() ? "" : "; ") + std::string(kRelativeRoles[i]) + ": " + drawn.index;
  }
  Array bias(DType::kF32, {c.H, 2 * c.T - 1}), factor(c.dtype, {c.B, 1, c.S});
  for (Array* const array : {&bias, &factor}) {
    for (int64_t i = 0; i < array->tensor.Elements(); ++i) array->Set(i, random->Unit());
  }
  if (random->OneIn(2)) {
    roles += " relative_bias relative_bias_factor";
    further.push_back(bias.tensor), further.push_back(factor.tensor);
  }
  const auto with = [&further](std::vector<Tensor> inputs) {
    inputs.insert(inputs.end(), further.begin(), further.end());
    return inputs;
  };
  Array wanted(c.dtype, {c.B, c.S, c.H * c.Dv}), found = PackedOutput(c);
  Run(c, tensors.padded_operands + roles, index, with(tensors.PaddedInputs()), &wanted);
  Run(c, tensors.packed_operands + roles, index, with(tensors.PackedInputs(c)), &found);
  if (AttendsAllKeys(static_cast<EmptyRows>(c.empty_rows))) return;  // over all keys, not those that exist
  ComparePacked(c, found, c.has_queries ? Packed(c, &wanted, 0.0f) : wanted);
}

// Registers the tests of each instruction set of this machine.
const bool registered = [] {
#define STOF_TESTS(id, name, is_supported) {{"AttentionWithRelativeTables[" #name "]", [] { RunTable(CpuIsa::id); }}},
  static constexpr Test kRows[][1] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  return RegisterByIsa(&cpu::KernelTable::attention, kRows);
}();

}  // namespace

TEST(PackedSequencesWithRelativeTables) {
  const int count = Cases(400);
  for (int i = 0; i < count; ++i) {
    Random random(static_cast<uint64_t>(i) + 5590);
    const PackedCase c = DrawPacked(&random);
    try {
      RunPacked(c, &random);
    } catch (const Failure& failure) {
      CHECK(false, "case ", i, " ", Describe(c), failure.message);
    }
    CountCases(1);
  }
}

}  // namespace stof::test::attention
