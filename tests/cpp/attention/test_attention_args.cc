// SPDX-License-Identifier: Apache-2.0
// Which combinations of the parts of AttentionArgs are legal.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/contract/attention.h"
#include "plugins/core/mask/columns/key_columns.h"
#include "tests/cpp/check.h"

namespace stof::test::attention {
namespace {

// What arguments may point to. Check reads nothing of it but sizes.
struct Pointees {
  float number = 0;
  uint8_t byte = 0;
  int32_t counts[2] = {};
  BlockMask blocks;
  DynamicMask elements;
  std::shared_ptr<const KeyColumns> columns;

  Pointees() {
    blocks.S = 4, blocks.T = 1024;
    MaskExpr expr;
    CHECK(MaskExpr::Parse("k % 256 == 0", {}, &expr).ok());
    CHECK(KeyColumns::Make(expr, 4, 2, 1024, &columns).ok());
  }
};

AttentionArgs Plain() {
  AttentionArgs args;
  args.shape = {2, 4, 2, 4, 1024, 64, 64};
  return args;
}

using Change = std::function<void(Pointees*, AttentionArgs*)>;

// ---- what makes a kind of problem ----
void Quantize(Pointees* to, AttentionArgs* args) {
  args->shape.kv_dtype = DType::kI8;
  args->kv.key_scale.data = args->kv.value_scale.data = &to->number;
}
void UseBlocks(Pointees* to, AttentionArgs* args) { args->mask.fixed = StaticMask::OfBlocks(&to->blocks); }
void UseWindow(Pointees* to, AttentionArgs* args) { args->mask.fixed = StaticMask::OfWindow({to->counts, 16}); }
void UseColumnWindow(Pointees* to, AttentionArgs* args) {
  args->mask.fixed = StaticMask::OfWindow({to->counts, 16, to->columns.get(), 8});
}
void GatherColumns(Pointees* to, AttentionArgs* args) { args->kv.columns = to->columns.get(); }
void UsePages(Pointees* to, AttentionArgs* args) {
  args->kv.pages.table = to->counts, args->kv.pages.shift = 4;
  args->kv.key_ends = to->counts;
}

void PackSequences(Pointees* to, AttentionArgs* args) { args->sequences.starts = args->kv.key_ends = to->counts; }

RelativeTable TableOf(const Pointees& to, int64_t columns) {
  RelativeTable table;
  table.data = &to.number, table.dtype = DType::kF32;
  table.rows = 2, table.columns = columns;
  table.index.row = to.counts, table.index.count = 2, table.index.last_row = 1;
  return table;
}
void UseTable(Pointees* to, AttentionArgs* args) { args->scores.relative_key[0] = TableOf(*to, args->shape.D); }
void UseValueTable(Pointees* to, AttentionArgs* args) { args->relative_value = TableOf(*to, args->shape.Dv); }

struct IllegalCase {
  const char* name;
  void (*kind)(Pointees*, AttentionArgs*);  // legal; nullptr: Plain()
  Change change;                            // makes it illegal
  const char* error;
};

std::vector<IllegalCase> IllegalCases() {
  return {
      {"negative size", nullptr, [](Pointees*, AttentionArgs* a) { a->shape.S = -1; }, "sizes must not be negative"},
      {"no KV heads", nullptr, [](Pointees*, AttentionArgs* a) { a->shape.G = 0; }, "H must be a multiple of G"},
      {"uneven groups", nullptr, [](Pointees*, AttentionArgs* a) { a->shape.G = 3; }, "H must be a multiple of G"},
      {"type", nullptr, [](Pointees*, AttentionArgs* a) { a->shape.dtype = DType::kI32; }, "attention takes fp32"},
      {"bias without type", nullptr, [](Pointees* to, AttentionArgs* a) { a->scores.bias.data = &to->number; },
       "a bias is fp32"},
      {"even relative bias", nullptr,
       [](Pointees* to, AttentionArgs* a) { a->scores.relative_bias = {&to->number, 4}; }, "an odd number of entries"},
      {"sink without type", nullptr, [](Pointees* to, AttentionArgs* a) { a->scores.sink.data = &to->number; },
       "sinks are fp32"},
      {"scales without quantization", nullptr,
       [](Pointees* to, AttentionArgs* a) { a->kv.value_scale.data = &to->number; }, "scales are given, expected none"},
      {"quantized without scale", Quantize, [](Pointees*, AttentionArgs* a) { a->kv.key_scale.data = nullptr; },
       "int8 or fp8 with scales"},
      {"quantized type", Quantize, [](Pointees*, AttentionArgs* a) { a->shape.kv_dtype = DType::kI32; },
       "int8 or fp8 with scales"},
      {"mean of quantized values", Quantize, [](Pointees*, AttentionArgs* a) { a->mask.empty_rows = EmptyRows::kMean; },
       "attended by no fully masked row"},
      {"blocks of other sizes", UseBlocks, [](Pointees*, AttentionArgs* a) { a->shape.T = 1000; },
       "built for other sizes"},
      {"blocks without bits", UseBlocks, [](Pointees* to, AttentionArgs*) { to->blocks.left = 1; },
       "partial tiles without bits"},
      {"blocks and lengths", UseBlocks, [](Pointees* to, AttentionArgs* a) { a->kv.key_ends = to->counts; },
       "go with no block mask"},
      {"seqlens without window", nullptr, [](Pointees* to, AttentionArgs* a) { a->kv.seqlens = to->counts; },
       "without a causal window"},
      {"window and padding bytes", UseWindow, [](Pointees* to, AttentionArgs* a) { a->mask.pad = &to->byte; },
       "is for devices"},
      {"window and dynamic part", UseWindow, [](Pointees* to, AttentionArgs* a) { a->mask.dynamic = &to->elements; },
       "is for devices"},
      {"window and gathered columns", UseWindow, GatherColumns, "is for devices"},
      {"negative window", nullptr,
       [](Pointees* to, AttentionArgs* a) { a->mask.fixed = StaticMask::OfWindow({to->counts, -2}); },
       "window_left must be -1 or more"},
      {"block without columns", nullptr,
       [](Pointees* to, AttentionArgs* a) { a->mask.fixed = StaticMask::OfWindow({to->counts, 16, nullptr, 8}); },
       "expected 1 without columns"},
      {"columns beside all keys", nullptr,
       [](Pointees* to, AttentionArgs* a) {
         a->mask.fixed = StaticMask::OfWindow({to->counts, -1, to->columns.get()});
       },
       "needs a window and a block"},
      {"columns of fewer keys", UseColumnWindow, [](Pointees*, AttentionArgs* a) { a->shape.T = 1025; },
       "key columns of 1024 keys, expected those of 1025"},
      {"column window of many queries", UseColumnWindow, [](Pointees*, AttentionArgs* a) { a->shape.S = 300; },
       "goes with few queries"},
      {"column window and bias", UseColumnWindow,
       [](Pointees* to, AttentionArgs* a) { a->scores.bias = {&to->number, DType::kF32}; }, "goes with few queries"},
      {"column window over pages", UseColumnWindow, UsePages, "goes with few queries"},
      {"more columns than keys", GatherColumns, [](Pointees*, AttentionArgs* a) { a->shape.T = 100; },
       "gathered columns go with"},
      {"gathered columns and padding", GatherColumns, [](Pointees* to, AttentionArgs* a) { a->mask.pad = &to->byte; },
       "gathered columns go with"},
      {"gathered columns and dynamic part", GatherColumns,
       [](Pointees* to, AttentionArgs* a) { a->mask.dynamic = &to->elements; }, "gathered columns go with"},
      {"gathered columns and bias", GatherColumns,
       [](Pointees* to, AttentionArgs* a) { a->scores.bias = {&to->number, DType::kF32}; }, "gathered columns go with"},
      {"gathered columns and relative bias", GatherColumns,
       [](Pointees* to, AttentionArgs* a) { a->scores.relative_bias = {&to->number, 3}; }, "gathered columns go with"},
      {"gathered columns and rows that attend all", GatherColumns,
       [](Pointees*, AttentionArgs* a) { a->mask.empty_rows = EmptyRows::kAll; }, "gathered columns go with"},
      {"pages without lengths", UsePages, [](Pointees*, AttentionArgs* a) { a->kv.key_ends = nullptr; },
       "pages need the number of keys"},
      {"pages of few rows", UsePages, [](Pointees*, AttentionArgs* a) { a->kv.pages.shift = 3; }, "16 rows or more"},
      {"pages with batch stride", UsePages, [](Pointees*, AttentionArgs* a) { a->value.stride.b = 64; },
       "batch strides of key and value are 0"},
      {"quantized pages", UsePages, Quantize, "in pages are not quantized"},
      {"columns of pages", UsePages, GatherColumns, "no columns are gathered"},
      {"packed queries alone", nullptr, [](Pointees*, AttentionArgs* a) { a->sequences.has_queries = true; },
       "expected none without packed sequences"},
      {"first positions alone", nullptr,
       [](Pointees* to, AttentionArgs* a) { a->sequences.first_positions = to->counts; },
       "expected none without packed sequences"},
      {"packed sequences without lengths", PackSequences, [](Pointees*, AttentionArgs* a) { a->kv.key_ends = nullptr; },
       "need the number of keys of each sequence"},
      {"packed sequences in pages", PackSequences, UsePages, "go with no pages"},
      {"packed sequences and gathered columns", PackSequences, GatherColumns, "go with no pages"},
      {"packed sequences and a window", PackSequences, UseWindow, "go with no pages"},
      {"lse of packed sequences", PackSequences, [](Pointees* to, AttentionArgs* a) { a->output.lse = &to->number; },
       "have no log-sum-exp"},
      {"packed sequences longer than the blocks", PackSequences,
       [](Pointees* to, AttentionArgs* a) {
         UseBlocks(to, a);
         a->shape.T = 1025;
       },
       "built for other sizes"},
      {"packed keys and blocks of more queries", PackSequences,
       [](Pointees* to, AttentionArgs* a) {
         UseBlocks(to, a);
         a->shape.S = 3;
       },
       "built for other sizes"},
      {"factor without relative bias", nullptr,
       [](Pointees* to, AttentionArgs* a) {
         a->scores.relative_bias.factor = &to->number, a->scores.relative_bias.factor_dtype = DType::kF32;
       },
       "and beside one"},
      {"second table alone", nullptr,
       [](Pointees* to, AttentionArgs* a) { a->scores.relative_key[1] = TableOf(*to, a->shape.D); },
       "expected none without the first"},
      {"table type", UseTable, [](Pointees*, AttentionArgs* a) { a->scores.relative_key[0].dtype = DType::kI32; },
       "is fp32, fp16 or bf16"},
      {"table of other columns", UseTable, [](Pointees*, AttentionArgs* a) { a->scores.relative_key[0].columns += 2; },
       "66 columns, expected"},
      {"table of values with a row bias", UseValueTable,
       [](Pointees*, AttentionArgs* a) { a->relative_value.columns += 1; }, "65 columns, expected"},
      {"rows behind a table", UseTable,
       [](Pointees*, AttentionArgs* a) { a->scores.relative_key[0].index.last_row = 2; }, "does not have"},
      {"table and quantized keys", UseTable, Quantize, "go with no KV cache"},
      {"table and gathered columns", UseValueTable, GatherColumns, "go with no KV cache"},
      {"table and pages", UseTable, UsePages, "go with no KV cache"},
      {"table and a window", UseTable, UseWindow, "go with no KV cache"},
      {"table and lengths", UseTable, [](Pointees* to, AttentionArgs* a) { a->kv.key_ends = to->counts; },
       "go with no KV cache"},
  };
}

TEST(AttentionArgsRefuseIllegalCombinations) {
  for (const IllegalCase& c : IllegalCases()) {
    Pointees to;
    AttentionArgs args = Plain();
    if (c.kind != nullptr) c.kind(&to, &args);
    const Status before = Check(args);
    CHECK(before.ok(), c.name, ": ", before.message());
    c.change(&to, &args);
    const Status status = Check(args);
    CHECK(!status.ok() && status.message().find(c.error) != std::string::npos, c.name, ": '", status.message(),
          "', expected '", c.error, "'");
    CountCases(1);
  }
}

TEST(AttentionArgsTakeLegalCombinations) {
  const std::vector<std::vector<Change>> legal = {
      {Quantize, UseWindow},
      {Quantize, UseColumnWindow},
      {UsePages, UseWindow},
      {GatherColumns, UseBlocks},
      {UseWindow, [](Pointees* to, AttentionArgs* a) { a->kv.seqlens = a->kv.is_invalid = to->counts; }},
      {[](Pointees* to, AttentionArgs* a) {
        to->blocks.left = 3;
        a->mask.fixed = StaticMask::OfBlocks(&to->blocks, &to->elements);
      }},
      {PackSequences, UseBlocks,
       [](Pointees* to, AttentionArgs* a) {
         a->sequences = {to->counts, true, to->counts};
         a->shape.S = 3, a->shape.T = 1000;
       }},
      {PackSequences, [](Pointees* to, AttentionArgs* a) { a->mask.pad = &to->byte; }},
      {UseTable, UseValueTable, PackSequences},
      {UseTable, UseBlocks,
       [](Pointees* to, AttentionArgs* a) {
         a->scores.relative_key[1] = a->scores.relative_query = TableOf(*to, a->shape.D + 1);
         a->output.lse = &to->number;
       }},
      {UsePages, [](Pointees* to, AttentionArgs* a) { a->mask.fixed = StaticMask::OfElements(&to->elements); }},
      {[](Pointees* to, AttentionArgs* a) {
        a->mask.pad = &to->byte, a->mask.dynamic = &to->elements, a->mask.empty_rows = EmptyRows::kMean;
        a->scores.bias = {&to->number, DType::kF32}, a->scores.relative_bias = {&to->number, 3};
        a->scores.sink = {&to->number, DType::kF16};
      }}};
  for (size_t i = 0; i < legal.size(); ++i) {
    Pointees to;
    AttentionArgs args = Plain();
    for (const Change& change : legal[i]) change(&to, &args);
    const Status status = Check(args);
    CHECK(status.ok(), i, ": ", status.message());
    CountCases(1);
  }
}

}  // namespace
}  // namespace stof::test::attention
