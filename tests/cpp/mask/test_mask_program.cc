// SPDX-License-Identifier: Apache-2.0
// Masks as programs for the device, run on the host: bit steps of each kind, what the compiler proves and refuses.
// test_mask_evaluators.cc has random expressions. Needs no GPU.
#include <algorithm>
#include <limits>

#include "cuda/mask/program/program_cache.h"
#include "plugins/core/mask/attention_mask.h"
#include "tests/cpp/mask/host_program.h"

namespace stof::test {
namespace {

using cuda::BitStep;
using cuda::CompileMask;
using cuda::MaskBox;
using cuda::MaskOperand;
using cuda::MaskProgram;

// Whether the bit program gives the expression in a box. The number of its steps of each kind is added to `kinds`.
void CheckBits(const MaskProgram& program, const RandomMask& mask, const MaskBox& box, std::vector<int>* kinds) {
  CHECK(!program.bit_steps.empty(), mask.text);
  for (const BitStep& step : program.bit_steps) ++(*kinds)[step.kind];
  const HostProgram on_host(program, mask.sizes.T - 1);
  const Pattern want = PatternByDefinition(mask, box);
  CheckPattern("bits", on_host.ByBits(box), want, mask, box);
  bool ok = true, narrow = true;
  const cuda::MaskCan can = on_host.Decide<true>(box, &ok, &narrow);
  CHECK(ok && (can.zero || can.one), mask.text);
  const auto ones = std::count(want.begin(), want.end(), 1);
  CHECK(ones == 0 || can.one, mask.text, " has ones in b ", box.b, " h ", box.h, " q ", box.q_lo, " k ", box.k_lo);
  CHECK(ones == Queries(box) * Keys(box) || can.zero, mask.text, " has zeros in b ", box.b, " h ", box.h, " q ",
        box.q_lo, " k ", box.k_lo);
}

// Every comparison of lines, distances and rests, with constants around where something changes.
TEST(BitStepsOfLinesAndRests) {
  int cases = 0;
  std::vector<int> kinds(BitStep::kPairs + 1);
  for (const char* op : {"<", "<=", ">", ">=", "==", "!="}) {
    std::vector<std::string> texts;
    for (const int c : {-130, -64, -32, -1, 0, 1, 31, 32, 33, 64, 130}) {
      for (const char* left :
           {"abs(q - k)", "q - k", "k + 3 * h", "q + 2 * k", "abs(3 * k - 2 * q)", "2 * q", "q - 70"}) {
        texts.push_back(std::string(left) + " " + op + " " + std::to_string(c));
      }
    }
    for (const int m : {1, 2, 3, 5, 31, 32, 33, 64, 100}) {
      for (const int c : {-1, 0, 1, m / 2, m - 1, m}) {
        for (const char* left : {"(q - k)", "(k - 2 * q + h)", "(q * 5 + k - 1000)"}) {
          texts.push_back(std::string(left) + " % " + std::to_string(m) + " " + op + " " + std::to_string(c));
        }
      }
    }
    for (const std::string& text : texts) {
      RandomMask mask;
      mask.text = text, mask.sizes = {1, 2, 170, 150, 5};
      Status status = MaskExpr::Parse(text, {}, &mask.expr);
      CHECK(status.ok(), text, ": ", status.message());
      MaskProgram program;
      status = CompileMask(mask.expr, MaskExpr(), mask.sizes, {}, &program);
      CHECK(status.ok() && program.bit_steps.size() == 1, text, ": ", status.message());
      CheckBits(program, mask, {0, 1, 60, 75, 0, 149}, &kinds);
      CheckBits(program, mask, {0, 0, 140, 141, 32, 95}, &kinds);
      ++cases;
    }
  }
  CHECK(kinds[BitStep::kRange] > 500 && kinds[BitStep::kLinear] > 100 && kinds[BitStep::kAbs] > 50 &&
        kinds[BitStep::kMod] == 2 * 6 * 9 * 6 * 3);
  CountCases(cases);
}

Tensor Vector(std::vector<int64_t>* values, std::initializer_list<int64_t> dims) {
  Tensor tensor;
  tensor.data = values->data();
  tensor.dtype = DType::kI64;
  tensor.rank = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), tensor.dims);
  return tensor;
}

Status Compile(const std::string& text, const ExprSizes& sizes, const cuda::MaskInputs& inputs, MaskProgram* program) {
  MaskExpr expr;
  STOF_RETURN_IF_ERROR(MaskExpr::Parse(text, {}, &expr));
  return CompileMask(MaskExpr(), expr, sizes, inputs, program);
}

// Boolean tables in the order of keys, and vectors with the extreme numbers of their type.
TEST(BitStepsOfTablesAndVectors) {
  Random random(7);
  std::vector<uint8_t> bytes(2 * 40 * 150);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.OneIn(2) ? random.Range(1, 255) : 0);
  std::vector<int64_t> segment_q(40), segment_k(150), lengths = {1};
  Tensor table;
  table.data = bytes.data(), table.dtype = DType::kBool, table.rank = 3;
  table.dims[0] = 2, table.dims[1] = 40, table.dims[2] = 150;
  const std::vector<std::pair<std::string, Tensor>> tables = {{"table0", table}};
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  int cases = 0;
  std::vector<int> kinds(BitStep::kPairs + 1);
  for (const char* text : {"table0[h, q, k]", "not table0[h, q, k] and k <= q", "segment_q[b, q] == segment_k[b, k]",
                           "segment_q[b, q] < segment_k[b, k] or k <= q", "segment_k[b, k] <= segment_q[b, q]",
                           "k < segment_q[b, q]", "segment_q[b, q] - 0 != k", "q >= segment_k[b, k]", "k < lengths[b]",
                           "lengths[b] <= k - q", "q - k > segment_q[b, q]"}) {
    for (const int64_t far : {int64_t{60}, int64_t{1} << 29, int64_t{1} << 40, kMost}) {
      for (int64_t& x : segment_q)
        x = random.OneIn(9) ? (random.OneIn(2) ? far : far == kMost ? kLeast : -far) : random.Range(-3, 50);
      for (int64_t& x : segment_k)
        x = random.OneIn(9) ? (random.OneIn(2) ? far : far == kMost ? kLeast : -far) : random.Range(-3, 50);
      lengths[0] = random.OneIn(2) ? far : -far;
      RandomMask mask;
      mask.text = text, mask.sizes = {1, 2, 40, 150, 0};
      Status status = MaskExpr::Parse(text, tables, &mask.expr);
      CHECK(status.ok(), text, ": ", status.message());
      mask.operands.tables = tables;
      mask.operands.runtime = {{"segment_q", Vector(&segment_q, {1, 40})},
                               {"segment_k", Vector(&segment_k, {1, 150})},
                               {"lengths", Vector(&lengths, {1})}};
      mask.bindings = Bind(mask.expr, mask.operands.runtime);
      MaskProgram program;
      status = CompileMask(MaskExpr(), mask.expr, mask.sizes, AllInputs(mask.operands), &program);
      CHECK(status.ok(), text, ": ", status.message());
      if (!program.proven) continue;
      for (const int64_t q : {0, 7, 39}) CheckBits(program, mask, {0, q % 2, q, q, 0, 149}, &kinds);
      CheckBits(program, mask, {0, 1, 3, 9, 32, 100}, &kinds);
      ++cases;
    }
  }
  CHECK(kinds[BitStep::kBytes] == 32 && kinds[BitStep::kOuter] > 40 && kinds[BitStep::kPairs] < 40,
        kinds[BitStep::kBytes], " ", kinds[BitStep::kOuter], " ", kinds[BitStep::kPairs]);
  CountCases(cases);
}

// Vectors whose numbers no host has seen: what is right for all of them, for some, for none.
TEST(MaskProgramsTellWhatVectorsMayBreak) {
  const ExprSizes sizes = {2, 1, 8, 8, 0};
  std::vector<int64_t> keys(16, 3), lengths = {8, 5};
  const cuda::MaskInputs inputs = {{"segment_k", Vector(&keys, {2, 8})}, {"lengths", Vector(&lengths, {2})}};
  MaskProgram program;
  for (const char* text : {"k < lengths[b]", "segment_k[b, k] == lengths[b]", "not (segment_k[b, k] != 3) or k <= q"}) {
    const Status status = Compile(text, sizes, inputs, &program);
    CHECK(status.ok() && program.proven, text, ": ", status.message());
  }
  for (const char* text : {"k + lengths[b] > 9", "segment_k[b, lengths[b] - 1] == 3", "abs(lengths[b]) > k"}) {
    const Status status = Compile(text, sizes, inputs, &program);
    CHECK(status.ok() && !program.proven, text, ": ", status.message());
  }
  for (const char* text : {"segment_k[b, k + 1] == 3", "segment_q[b, q] == 3", "lengths[k] == 3"}) {
    const Status status = Compile(text, sizes, inputs, &program);
    CHECK(!status.ok(), text, " must be an error");
  }
  // An index beyond its table and a sum beyond 2^61 are seen where they happen.
  const auto ok = [&](const char* text) {
    const Status status = Compile(text, sizes, inputs, &program);
    CHECK(status.ok(), text, ": ", status.message());
    const HostProgram on_host(program, sizes.T - 1);
    cuda::MaskIntervals intervals(on_host.view());
    intervals.Run({0, 0, 0, 7, 0, 7});
    return intervals.ok();
  };
  CHECK(ok("segment_k[b, lengths[b] - 1] == 3"));
  lengths[0] = 9;
  CHECK(!ok("segment_k[b, lengths[b] - 1] == 3"));
  lengths[0] = 0;
  CHECK(!ok("segment_k[b, lengths[b] - 1] == 3"));
  lengths[0] = std::numeric_limits<int64_t>::min();
  CHECK(!ok("k - lengths[b] > 9"));
  CHECK(!ok("-lengths[b] > 9"));
  CHECK(ok("k > lengths[b]"));
  lengths[0] = int64_t{1} << 40;
  CHECK(!ok("lengths[b] * lengths[b] > 9"));
  CHECK(ok("lengths[b] * 3 > k"));
  CountCases(15);
}

// Which masks depend on the distance from query to key alone.
TEST(MaskProgramsByDistance) {
  const ExprSizes sizes = {2, 3, 200, 300, 40};
  int cases = 0;
  for (const auto& [text, by_distance] : std::initializer_list<std::pair<const char*, bool>>{
           {"k <= q", true},
           {"abs(q - k) <= 128 and (k - q) % 3 != b", true},
           {"(2 * q - h - 2 * k) // 7 % 2 == 0 and not q - k == 3", true},
           {"q - k < S // 2 or h == 1", true},
           {"abs(q - k) <= 128 or k < 16", false},
           {"q // 64 == k // 64", false},
           {"q - 2 * k > 0", false},
           {"q + k > 100", false},
           {"k < lengths[b]", false},
           {"k <= q and segment_k[b, k] == 1", false},
           // Look-ups of one index are decided by boxes as everything else; of several, some smaller boxes are not.
           {"table0[max(min(q - k, 9), 0)] == 1", true},
           {"table0[q - k + T] == 1", true},
           {"table1[h, q - k + T] == 1", true},
           {"table1[h, max(min(q - k, 9), 0)] == 1", false},
           {"table0[q] == 1", false}}) {
    std::vector<int64_t> ones(3 * 700, 1);
    const cuda::MaskInputs inputs = {{"lengths", Vector(&ones, {2})},
                                     {"segment_k", Vector(&ones, {2, 300})},
                                     {"table0", Vector(&ones, {700})},
                                     {"table1", Vector(&ones, {3, 700})}};
    MaskProgram program;
    MaskExpr expr;
    Status status = MaskExpr::Parse(text, {inputs[2], inputs[3]}, &expr);
    CHECK(status.ok(), text, ": ", status.message());
    status = CompileMask(MaskExpr(), expr, sizes, inputs, &program);
    CHECK(status.ok() && program.diagonal == by_distance, text, ": ", status.message());
    ++cases;
  }
  CountCases(cases);
}

// Long and deep expressions: the stack of a program grows with the logarithm of what is balanced only.
TEST(MaskProgramsOfLongExpressions) {
  const ExprSizes sizes = {1, 2, 70, 70, 0};
  std::string chain = "k <= q";
  for (int i = 0; i < 400; ++i) chain += " and (q * " + std::to_string(i + 2) + " + k) % 7 != 3";
  std::string nested = "q % 3";
  for (int i = 0; i < 20; ++i) nested = "(k % " + std::to_string(i + 2) + " - (" + nested + ") % 5)";
  for (const std::string& text : {chain, nested + " > 0"}) {
    RandomMask mask;
    mask.text = text, mask.sizes = sizes;
    Status status = MaskExpr::Parse(text, {}, &mask.expr);
    CHECK(status.ok(), status.message());
    MaskProgram program;
    status = CompileMask(mask.expr, MaskExpr(), sizes, {}, &program);
    CHECK(status.ok(), status.message());
    const MaskBox box = {0, 1, 0, 69, 0, 69};
    CheckPattern("numbers", HostProgram(program, sizes.T - 1).ByNumbers<int32_t>(box), PatternByDefinition(mask, box),
                 mask, box);
  }
  CountCases(2);
}

// A long expression has a bound of its work as on the CPU.
TEST(MaskProgramsOfTooManyPairs) {
  std::string text = "q - k != 0";
  for (int i = 1; i < 30; ++i) text += " and q - k != " + std::to_string(i);
  std::shared_ptr<const AttentionMask> mask;
  CHECK(MakeAttentionMask(text, {}, &mask).ok());
  MaskProgram program;
  for (const int64_t length : {int64_t{16384}, MaskExpr::kMaxSize}) {
    const Status status = CompileMask(mask->parts.fixed, mask->parts.dynamic, {1, 1, length, length, 0}, {}, &program);
    CHECK(status.ok() == (length == 16384), status.message());
    CHECK(status.ok() || status.message().find("2^38 nodes for all pairs") != std::string::npos, status.message());
  }
  CountCases(2);
}

// A remembered program is that of this run's sizes, types, shapes and addresses.
TEST(MaskProgramsAreRemembered) {
  std::shared_ptr<const AttentionMask> mask;
  const std::string text = "segment_q[b, q - P] == segment_k[b, k] and k < lengths[b] and (q + k) % 3 != 1";
  CHECK(MakeAttentionMask(text, {}, &mask).ok());
  std::vector<char> memory(64);
  const auto input = [&](const char* role, DType dtype, std::vector<int64_t> dims, int64_t at) {
    Tensor tensor;
    tensor.data = memory.data() + at, tensor.dtype = dtype, tensor.rank = static_cast<int32_t>(dims.size());
    std::copy(dims.begin(), dims.end(), tensor.dims);
    return std::pair<std::string, Tensor>(role, tensor);
  };
  Random random(11);
  MaskProgram program, direct;
  for (int i = 0; i < 400; ++i) {
    const ExprSizes sizes = {random.Range(1, 2), 2, random.Range(5, 6), random.Range(6, 7), random.Range(0, 1)};
    const DType ids = random.OneIn(2) ? DType::kI32 : DType::kI64;
    const int64_t rows = random.OneIn(3) ? 1 : sizes.B;
    // Two of them may share their memory.
    cuda::MaskInputs inputs = {input("segment_q", ids, {rows, sizes.S}, random.Range(0, 3)),
                               input("bias", DType::kF32, {1, 1, sizes.S, sizes.T}, 0),
                               input("segment_k", ids, {sizes.B, sizes.T}, random.Range(0, 3)),
                               input("lengths", DType::kI64, {sizes.B}, random.Range(0, 3))};
    if (random.OneIn(2)) std::swap(inputs[0], inputs[2]);
    if (random.OneIn(9)) inputs[3].second.data = nullptr;
    const Status expected = CompileMask(mask->parts.fixed, mask->parts.dynamic, sizes, inputs, &direct);
    const Status status = cuda::GetMaskProgram(*mask, sizes, inputs, &program);
    CHECK(status.ok() == expected.ok() && status.message() == expected.message(), status.message(), " and ",
          expected.message());
    if (!status.ok()) continue;
    CHECK(program.operands.size() == 3 && direct.operands.size() == 3);
    for (size_t at = 0; at < 3; ++at) {
      const MaskOperand &a = program.operands[at], &b = direct.operands[at];
      CHECK(a.data == b.data && a.dtype == b.dtype && a.count == b.count && std::equal(a.dims, a.dims + 4, b.dims));
    }
    CHECK(program.steps.size() == direct.steps.size() && program.uses_b == direct.uses_b &&
          program.pairs == direct.pairs && program.affines.size() == direct.affines.size());
    for (size_t at = 0; at < program.affines.size(); ++at) {
      CHECK(program.affines[at].constant == direct.affines[at].constant &&
            program.affines[at].q == direct.affines[at].q);
    }
  }
  CountCases(400);
}

}  // namespace
}  // namespace stof::test
