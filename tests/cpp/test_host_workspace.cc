// SPDX-License-Identifier: Apache-2.0
// What Op::PlanHost says that a run on the CPU allocates, against what runs allocate.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/contract/op.h"
#include "plugins/core/host/thread_pool.h"
#include "plugins/core/ops/cached_attention/cached_attention.h"
#include "plugins/core/ops/sparse_mlp/sparse_mlp.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/map_attributes.h"
#include "tests/cpp/paged_attention/paged_problem.h"

namespace stof::test {
namespace {

// Memory of a run, and the number of its bytes.
struct CountedMemory {
  Memory memory;
  size_t bytes = 0;
  static void* Allocate(void* self, size_t bytes) {
    auto& own = *static_cast<CountedMemory*>(self);
    own.bytes += bytes;
    return Memory::Allocate(&own.memory, bytes);
  }
};

// A node with its tensors. Inputs whose data a plan sees are those of `is_constant`.
class Node {
 public:
  explicit Node(const std::string& op) : op_(op) {}

  MapAttributes attributes;

  // A tensor of random numbers.
  void AddInput(DType dtype, const std::vector<int64_t>& dims, bool is_constant = false) {
    Tensor tensor = TensorOfShape(dtype, dims);
    tensor.data = Memory::Allocate(&data_, static_cast<size_t>(tensor.Elements() * SizeOf(dtype)) + 64);
    auto* const bytes = static_cast<char*>(tensor.data);
    for (int64_t i = 0; i < tensor.Elements() && IsFloat(dtype); ++i) {
      const float value = random_.Unit();
      uint32_t bits = 0;
      std::memcpy(&bits, &value, 4);
      const auto upper = static_cast<uint16_t>(bits >> 16);  // bf16
      if (dtype == DType::kF32) std::memcpy(bytes + 4 * i, &value, 4);
      if (dtype == DType::kBF16) std::memcpy(bytes + 2 * i, &upper, 2);
    }
    Add(tensor, is_constant);
  }
  void AddIntegers(const std::vector<int64_t>& dims, const std::vector<int32_t>& values, bool is_constant = false) {
    AddInput(DType::kI32, dims);
    std::memcpy(inputs_.back().data, values.data(), 4 * values.size());
    is_constant_.back() = is_constant;
  }
  void AddAbsent() { Add(Tensor(), false); }
  void Add(const Tensor& tensor, bool is_constant) {
    inputs_.push_back(tensor);
    is_constant_.push_back(is_constant);
  }

  void Check(const std::string& where) {
    int count = 0;
    const OpDescription* const* ops = AllOps(&count);
    for (int i = 0; i < count; ++i) {
      std::unique_ptr<Op> op;
      if (op_ != ops[i]->name) continue;
      const Status status = CreateOp(*ops[i], attributes, &op);
      CHECK(status.ok(), where, ": ", status.message());
      CheckOp(op.get(), where);
      return;
    }
    CHECK(false, op_);
  }
  void CheckOp(Op* op, const std::string& where) {
    std::vector<Tensor> shapes = inputs_;
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (!is_constant_[i]) shapes[i].data = nullptr;
    }
    const auto count = static_cast<int>(inputs_.size());
    Status status = op->Prepare(shapes.data(), count);
    CHECK(status.ok(), where, ": ", status.message());
    std::vector<Tensor> outputs(static_cast<size_t>(op->OutputCount()));
    status = op->InferOutputs(inputs_.data(), count, outputs.data(), op->OutputCount());
    CHECK(status.ok(), where, ": ", status.message());
    for (Tensor& output : outputs) {
      output.data = Memory::Allocate(&data_, static_cast<size_t>(output.Elements() * SizeOf(output.dtype)) + 64);
    }
    for (const int threads : {1, 3}) {
      if (kIsThreadSanitizer && threads == 1) continue;
      size_t planned = 1;
      status = op->PlanHost(shapes.data(), count, threads, &planned);
      CHECK(status.ok(), where, ": ", status.message());
      ThreadPool pool(threads);
      CountedMemory memory;
      RunContext context;
      context.parallel = pool.view();
      context.allocate = CountedMemory::Allocate;
      context.self = &memory;
      status = op->Run(inputs_.data(), count, outputs.data(), op->OutputCount(), context);
      CHECK(status.ok(), where, ": ", status.message());
      CHECK(is_bound_ ? planned >= memory.bytes : planned == memory.bytes, where, " on ", threads, " threads: planned ",
            planned, " bytes, a run takes ", memory.bytes);
      total_ += planned;
      CountCases(1);
    }
  }
  size_t total() const { return total_; }
  // Runs may take less than what is planned.
  void PlansBound() { is_bound_ = true; }

 private:
  std::string op_;
  std::vector<Tensor> inputs_;
  std::vector<bool> is_constant_;
  Memory data_;  // aligned as that of a runtime: the kernels pack values that are not
  Random random_{11};
  size_t total_ = 0;  // bytes of all checks
  bool is_bound_ = false;
};

TEST(WorkspaceOfGemms) {
  struct Form {
    const char* body;
    int pair;
  };
  size_t total = 0;
  // A fused epilogue, one that no packed kernel has, and pairs.
  for (const Form form : {Form{"relu(x0[m, n] + x1[n])", 0}, Form{"tanh(x0[m, n]) + x1[n]", 0},
                          Form{"gelu(x0[m, n]) * x1[m, n] + x2[n]", 1}, Form{"tanh(x0[m, n]) * x1[m, n] + x2[n]", 2}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool is_constant : {true, false}) {
        for (const int64_t M : {1, 64, 1200}) {  // 1200 rows: a whole block of 1024, and a shorter one
          const int64_t K = 24, N = 1024;
          Node node("StofGemm");
          const char* const type = dtype == DType::kF32 ? "f32" : "bf16";
          const std::string text = Text("axes m = x0.0, n = x0.1; out y0 ", type, " [m, n] = ", form.body).substr(2);
          node.attributes.strings["epilogue"] = text;
          node.attributes.ints["pair"] = form.pair;
          node.AddInput(dtype, {M, K});
          node.AddInput(dtype, {K, form.pair == 1 ? 2 * N : N}, is_constant);
          if (form.pair == 2) node.AddInput(dtype, {K, N}, is_constant);
          node.AddInput(dtype, {N});
          node.Check(text);
          total += node.total();
        }
      }
    }
  }
  CHECK(total > 0);
}

TEST(WorkspaceOfChains) {
  size_t total = 0;
  for (const char* const text :
       {"axes m = x0.0, n = x0.1; out y0 f32 [m, n] = x0[m, n] * sigmoid(x1[n])",
        "axes m = x0.0, n = x0.1; let c = x0[m, n] - mean(x0[m, n]); "
        "out y0 f32 [m, n] = c * rsqrt(mean(c * c) + 1) * x1[n]; out y1 f32 [m, 1] = sum(c)"}) {
    for (const int64_t M : {0, 1, 37}) {
      for (const int64_t N : {1, 100, 5000}) {
        Node node("StofChain");
        node.attributes.strings["chain"] = text;
        node.AddInput(DType::kF32, {M, N});
        node.AddInput(DType::kF32, {N});
        node.Check(Text(text, ", M = ", M, ", N = ", N));
        total += node.total();
      }
    }
  }
  CHECK(total > 0);
}

TEST(WorkspaceOfSparseMlps) {
  namespace in = sparse_mlp_input;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool has_up : {false, true}) {
      for (const int64_t T : {1, 3, 70}) {
        const int64_t K = 40, F = 96, N = 50;
        std::vector<std::vector<int64_t>> dims(in::kCount);
        dims[in::kInput] = {T, K};
        dims[in::kGate] = {T, F};
        if (has_up) dims[in::kUpWeight] = {F, K};
        dims[in::kDownWeight] = {F, N};
        Node node("StofSparseMLP");
        node.attributes.strings["activation"] = "relu";
        node.attributes.strings["selection"] = "nonzero";
        for (const std::vector<int64_t>& shape : dims) {
          shape.empty() ? node.AddAbsent() : node.AddInput(dtype, shape, shape[0] == F);
        }
        node.Check(Text(TypeText(dtype), ", up = ", has_up, ", T = ", T));
        CHECK(node.total() > 0);
      }
    }
  }
}

// One step of StofCachedAttention. lengths: keys of each sequence; plans see them or take the longest.
TEST(WorkspaceOfChosenBlocks) {
  for (const char* const mask : {"", "k <= q", "q - k < 300 and k <= q", "pad[b, k]", "k < lengths[b]"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t S : {100, 128, 400, 1500}) {
        const std::string text = mask, role = text == "pad[b, k]" ? "pad" : "lengths";
        Node node("StofAttention");
        node.attributes.strings["mask"] = mask;
        node.attributes.floats["block_threshold"] = 0.1f;
        node.AddInput(dtype, {2, 4, S, 32});
        for (int i = 0; i < 2; ++i) node.AddInput(dtype, {2, 2, 1500, 32});
        if (text.find('[') != std::string::npos) {
          node.attributes.strings["operands"] = role;
          role == "pad" ? node.AddIntegers({2, 1500}, std::vector<int32_t>(3000, 1))
                        : node.AddIntegers({2}, {900, 1500});
        }
        node.Check(Text(mask, ", S = ", S));
        CHECK(node.total() > 0);
      }
    }
  }
}

struct CachedCase {
  const char* mask;
  int64_t S, past, window;
  std::vector<int32_t> lengths;
  bool are_lengths_known;
  float block_threshold = 0;
};

TEST(WorkspaceOfCachedAttention) {
  const int64_t H = 4, G = 2, D = 32;
  for (const CachedCase& c : std::vector<CachedCase>{
           {"", 1, 300, 0, {301, 301}, false},                       // one token behind a full cache
           {"", 70, 0, 0, {70, 70}, false},                          // a first prompt
           {"", 9, 2100, 0, {2109, 2109, 2109}, false},              // split-KV
           {"q - k < 40", 130, 200, 0, {330, 330}, false},           // tile rows
           {"q - k < 40", 1, 4000, 0, {4001, 4001}, false},          // a window lists runs of key tiles
           {"q - k < 48", 12, 64, 48, {76, 76}, false},              // a sliding-window cache is staged
           {"q - k < 8 or k % 64 == 0", 1, 3000, 0, {3001}, false},  // key columns are gathered
           {"", 1, 3000, 0, {17, 2900}, true},                       // lengths differ
           {"q - k < 40", 40, 500, 0, {100, 540}, true},
           {"", 300, 700, 0, {1000, 1000}, false, 0.1f},  // blocks are chosen
           {"q - k < 400", 200, 700, 0, {900, 900}, false, 0.1f},
           {"", 200, 0, 0, {200, 200}, false, 0.1f},
           {"", 130, 700, 0, {830, 400}, true, 0.1f},
       }) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool has_norm : {false, true}) {
        const auto B = static_cast<int64_t>(c.lengths.size());
        Node node("StofCachedAttention");
        node.attributes.strings["mask"] = c.mask;
        node.attributes.floats["block_threshold"] = c.block_threshold;
        node.attributes.ints = {{"num_heads", H}, {"kv_num_heads", G}, {"sliding_window_cache", c.window}};
        node.AddInput(dtype, {B, c.S, H * D});
        for (int i = 0; i < 2; ++i) node.AddInput(dtype, {B, c.S, G * D});
        for (int i = 0; i < 2; ++i) c.past == 0 ? node.AddAbsent() : node.AddInput(dtype, {B, G, c.past, D});
        std::vector<int32_t> seqlens = c.lengths;
        int32_t total = 0;
        for (int32_t& length : seqlens) total = std::max(total, length--);
        node.AddIntegers({B}, seqlens, c.are_lengths_known);
        node.AddIntegers({1}, {total}, c.are_lengths_known);
        for (int i = cached_input::kCos; i < cached_input::kQueryNorm; ++i) node.AddAbsent();
        for (int i = 0; i < 2 && has_norm; ++i) node.AddInput(dtype, {D}, true);
        node.Check(Text(c.mask, ", S = ", c.S, ", past = ", c.past, ", norm = ", has_norm));
        CHECK(node.total() > 0);
      }
    }
  }
}

TEST(WorkspaceOfChosenPages) {
  const int64_t H = 4, G = 2, D = 32, B = 2, past = 3000;
  for (const int64_t rows : {16, 32, 64, 128}) {
    for (const int64_t chosen : {1, 5, 300}) {  // 300: all pages
      for (const int64_t S : {1, 9, 40}) {
        for (const char* const mask : {"", "q - k < 1500", "q - k < 40 or k // 32 % 2 == h % 2"}) {
          Node node("StofCachedAttention");
          node.attributes.strings["mask"] = mask;
          node.attributes.ints = {{"num_heads", H}, {"kv_num_heads", G}, {"chosen_pages", chosen}, {"page_rows", rows}};
          node.AddInput(DType::kF32, {B, S, H * D});
          for (int i = 0; i < 2; ++i) node.AddInput(DType::kF32, {B, S, G * D});
          for (int i = 0; i < 2; ++i) node.AddInput(DType::kF32, {B, G, past, D});
          const auto total = static_cast<int32_t>(past + S);
          node.AddIntegers({B}, {total - 1, total - 1}, true);
          node.AddIntegers({1}, {total}, true);
          for (int i = cached_input::kCos; i < cached_input::kPageBounds; ++i) node.AddAbsent();
          node.AddInput(DType::kF32, {B, G, 0, 2, D});
          // Two pages of one tile may be chosen, or pages of two, and pages that a mask allows in part.
          if (rows < 32 || mask[0] != '\0') node.PlansBound();
          node.Check(Text("rows ", rows, ", chosen ", chosen, ", S = ", S, ", mask ", mask));
        }
      }
    }
  }
}

TEST(WorkspaceOfCachedAttentionNeedsTables) {
  Node node("StofCachedAttention");
  const OpDescription* const description = CachedAttentionDescription();
  MapAttributes attributes;
  attributes.strings["mask"] = "table0[k] == 1";
  attributes.ints = {{"num_heads", 2}, {"kv_num_heads", 2}};
  std::unique_ptr<Op> op;
  CHECK(CreateOp(*description, attributes, &op).ok());
  std::vector<Tensor> inputs(cached_input::kTables + 1);
  for (int i = 0; i < 3; ++i) inputs[static_cast<size_t>(i)] = TensorOfShape(DType::kF32, {1, 1, 32});
  inputs[cached_input::kSeqlens] = inputs[cached_input::kTotal] = TensorOfShape(DType::kI32, {1});
  std::vector<uint8_t> table = {1, 0, 1, 1};
  inputs[cached_input::kTables] = TensorOfShape(DType::kU8, {4});
  size_t bytes = 1;
  Status status = op->PlanHost(inputs.data(), static_cast<int>(inputs.size()), 1, &bytes);
  CHECK(!status.ok() && status.message().find("table0 has no data") != std::string::npos, status.message());
  inputs[cached_input::kTables].data = table.data();
  status = op->PlanHost(inputs.data(), static_cast<int>(inputs.size()), 1, &bytes);
  CHECK(status.ok() && bytes > 0, status.message());
  CountCases(2);
}

void CheckPaged(const paged::Case& c, bool are_lengths_known, uint64_t seed) {
  namespace in = paged_input;
  paged::Problem problem(c, seed);
  Node node("StofPagedAttention");
  const std::vector<Tensor> inputs = problem.Inputs();
  for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
    const bool is_length = i == in::kCumulative || i == in::kPast || i == in::kBlockTable || i == in::kSlots;
    node.Add(inputs[static_cast<size_t>(i)], is_length && are_lengths_known);
  }
  node.CheckOp(problem.MakeOp().get(), Text("seed ", seed, " ", paged::Describe(c)));
}

TEST(WorkspaceOfPagedAttention) {
  Random random(5);
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const int64_t S = random.Pick(std::vector<int64_t>{1, 5, 300});
    paged::Case c = paged::DrawCase(S, 517, random.Pick(std::vector<int64_t>{16, 64}), DType::kF32, &random);
    c.is_shared = false;
    CheckPaged(c, true, seed);
  }
  // Full rows of the block table, and equally many tokens: what a plan without lengths counts with.
  for (const int64_t S : {1, 4, 96}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t rotary : {0, 32}) {
        paged::Case c;
        c.dtype = dtype;
        c.past = {512 - S, 512 - S};
        c.tokens = {S, S};
        c.rotary = rotary;
        c.is_shared = false;
        uint64_t seed = 0;
        while (paged::Problem(c, seed).columns * c.block != 512) ++seed;  // most tables have blocks to spare
        CheckPaged(c, false, seed);
      }
    }
  }
}

TEST(WorkspaceOfQuantizedAttention) {
  float scale = 0.1f;
  int8_t zero = 3;
  for (const int64_t S : {1, 40, 300}) {
    for (const int64_t T : {1, 65, 20000}) {
      for (int form = 0; form < 8; ++form) {
        const bool has_pad = form % 2 == 1, has_rounding = form / 2 % 2 == 1, is_constant = form / 4 == 1;
        Node node("StofQuantizedAttention");
        std::string roles = "query_scale key_scale key_zero_point value_scale weight_scale";
        roles += std::string(has_rounding ? " score_scale" : "") + (has_pad ? " pad" : "");
        node.attributes.strings["operands"] = roles;
        node.attributes.strings["mask"] = has_pad ? "abs(q - k) <= 40 and pad[b, k]" : "";
        node.AddInput(DType::kU8, {2, 2, S, 20});
        node.AddInput(DType::kI8, {2, 1, T, 20});
        node.AddInput(DType::kI8, {2, 1, T, 36});
        for (int i = 0; i < (has_rounding ? 6 : 5); ++i) {
          Tensor scalar = TensorOfShape(i == 2 ? DType::kI8 : DType::kF32, {});
          scalar.data = i == 2 ? static_cast<void*>(&zero) : &scale;
          node.Add(scalar, is_constant);
        }
        if (has_pad) node.AddInput(DType::kBool, {2, T});
        node.Check(Text("S ", S, ", T ", T, ", form ", form));
      }
    }
  }
}

}  // namespace
}  // namespace stof::test
