// SPDX-License-Identifier: Apache-2.0
// StofPagedAttention on the CPU: outputs and caches against the definition in double precision, and every error at the
// boundary.
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/paged_attention/paged_problem.h"

namespace stof::test::paged {
namespace {

namespace in = paged_input;

// Memory of a run in blocks of their own, filled with NaN.
class Workspace {
 public:
  static void* Allocate(void* self, size_t bytes) {
    auto& own = *static_cast<Workspace*>(self);
    own.blocks_.emplace_back(bytes + 64, static_cast<char>(0xff));
    void* memory = own.blocks_.back().data();
    size_t space = bytes + 64;
    return std::align(64, bytes, memory, space) == nullptr ? nullptr : own.Keep(memory);
  }
  const std::vector<void*>& pointers() const { return pointers_; }

 private:
  void* Keep(void* memory) {
    pointers_.push_back(memory);
    return memory;
  }
  std::vector<std::vector<char>> blocks_;
  std::vector<void*> pointers_;
};

struct CpuRun {
  explicit CpuRun(Problem* problem)
      : output(problem->c.dtype, problem->N() * problem->c.H * problem->c.D),
        key(problem->key_cache),
        value(problem->value_cache),
        inputs(problem->Inputs()),
        op(problem->MakeOp()) {
    output.Poison();
    outputs.push_back(View(&output, {problem->N(), problem->c.H * problem->c.D}, problem->c.dtype));
    const std::vector<int64_t> dims = {problem->blocks, problem->c.block, problem->c.G, problem->c.D};
    outputs.push_back(View(&key, dims, problem->c.dtype));
    outputs.push_back(View(&value, dims, problem->c.dtype));
    if (problem->c.is_shared) {
      inputs[in::kKeyCache].data = key.data();
      inputs[in::kValueCache].data = value.data();
    } else {
      key.Poison(), value.Poison();
    }
  }
  static Tensor View(Buffer* buffer, const std::vector<int64_t>& dims, DType dtype) {
    Tensor tensor = TensorOfShape(dtype, dims);
    tensor.data = buffer->data();
    return tensor;
  }
  Status Run(int threads) {
    Status status = op->Prepare(inputs.data(), static_cast<int>(inputs.size()));
    if (!status.ok()) return status;
    ThreadPool pool(threads);
    RunContext context;
    context.parallel = pool.view();
    context.allocate = Workspace::Allocate;
    context.self = &workspace;
    return op->Run(inputs.data(), static_cast<int>(inputs.size()), outputs.data(), static_cast<int>(outputs.size()),
                   context);
  }

  Buffer output, key, value;
  std::vector<Tensor> inputs, outputs;
  std::unique_ptr<Op> op;
  Workspace workspace;
};

void RunCase(const Case& c, uint64_t seed) {
  Problem problem(c, seed);
  CpuRun run(&problem);
  const std::string where = Text("seed ", seed, " ", Describe(c));
  const Status status = run.Run(static_cast<int>(seed % 3) + 1);
  CHECK(status.ok(), where, ": ", status.message());
  problem.CheckCaches(run.key, run.value, where);
  Buffer rotated(c.dtype, problem.N() * c.H * c.D);
  if (c.has_query_copy() && rotated.count() > 0) {
    std::memcpy(rotated.data(), run.workspace.pointers()[0], rotated.bytes().size());
  }
  problem.CheckOutput(
      run.output, run.key, run.value, c.has_query_copy() ? &rotated : nullptr,
      [&](int64_t b, int64_t h, int64_t i) {
        return ((problem.cumulative[static_cast<size_t>(b)] + i) * c.H + h) * c.D;
      },
      false, where);
  CountCases(1);
}

TEST(PagedAttentionEqualsTheDefinition) {
  Random random(41);
  uint64_t seed = 0;
  for (const int64_t S : {1, 3, 16, 300}) {
    for (const int64_t past : {0, 1, 517}) {
      for (const int64_t block : {16, 64, 256}) {
        for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
          const uint64_t step = kIsThreadSanitizer ? 7 : S == 300 && Effort() < 1 ? 5 : 1;
          if (seed % step != 0) {
            ++seed;
            continue;
          }
          for (int i = 0; i < (S == 300 ? 1 : 2); ++i) RunCase(DrawCase(S, past, block, dtype, &random), seed++);
        }
      }
    }
  }
}

// A change of an input, and what the error says.
struct Wrong {
  const char* message;
  std::function<void(Problem*, CpuRun*)> change;
};

void CheckRefused(const Case& c, const Wrong& wrong) {
  Problem problem(c, 7);
  CpuRun run(&problem);
  wrong.change(&problem, &run);
  const Buffer key = run.key, value = run.value;
  const Status status = run.Run(1);
  CHECK(!status.ok(), wrong.message, " was accepted");
  CHECK(status.message().find(wrong.message) != std::string::npos, status.message(), "; expected ", wrong.message);
  CHECK(run.key.bytes() == key.bytes() && run.value.bytes() == value.bytes(), wrong.message, ": a cache changed");
  CountCases(1);
}

Case Plain() {
  Case c;
  c.past = {40, 3, 70}, c.tokens = {2, 0, 5};
  c.rotary = 64;
  return c;
}

TEST(PagedAttentionRefusesHostileValues) {
  const auto least = std::numeric_limits<int32_t>::min(), most = std::numeric_limits<int32_t>::max();
  const Wrong cases[] = {
      {"cumulative_sequence_length[0] is 1, expected 0", [](Problem* p, CpuRun*) { p->cumulative[0] = 1; }},
      {"cumulative_sequence_length[2] is 1, expected 2", [](Problem* p, CpuRun*) { p->cumulative[2] = 1; }},
      {"cumulative_sequence_length[3] is 8, expected 2", [](Problem* p, CpuRun*) { p->cumulative[3] = 8; }},
      {"cumulative_sequence_length[1] is -2147483648", [=](Problem* p, CpuRun*) { p->cumulative[1] = least; }},
      {"past_seqlens[0] is -1", [](Problem* p, CpuRun*) { p->past[0] = -1; }},
      {"past_seqlens[2] is 2147483647", [=](Problem* p, CpuRun*) { p->past[2] = most; }},
      {"past_seqlens[2] is 2147483643", [=](Problem* p, CpuRun*) { p->past[2] = most - 4; }},
      {"block_table[0, 1] is -1, expected a block", [](Problem* p, CpuRun*) { p->table[1] = -1; }},
      {"block_table[2, 4] is ",
       [](Problem* p, CpuRun*) {
         p->table[static_cast<size_t>(2 * p->columns + 4)] = static_cast<int32_t>(p->blocks);
       }},
      {"gives row", [](Problem* p, CpuRun*) { p->table[static_cast<size_t>(2 * p->columns + 4)] = p->table[2]; }},
  };
  for (const Wrong& wrong : cases) {
    Case c = Plain();
    if (std::string(wrong.message) == "gives row") c.past = {40, 3, 72}, c.tokens = {2, 0, 5};
    CheckRefused(c, wrong);
  }
  Case slots = Plain();
  slots.has_slots = true;
  CheckRefused(slots, {"slot_mapping[1] is -2", [](Problem* p, CpuRun*) { p->slots[1] = -2; }});
  CheckRefused(slots, {"slot_mapping[6] is ",
                       [](Problem* p, CpuRun*) { p->slots[6] = static_cast<int32_t>(p->blocks * p->c.block); }});
  CheckRefused(slots, {"slot_mapping gives row 5 of the cache to tokens 0 and 4",
                       [](Problem* p, CpuRun*) { p->slots[0] = p->slots[4] = 5; }});
  CheckRefused(Plain(), {"past_seqlens[0] is 40: position 41, but cos_cache has 41 rows", [](Problem*, CpuRun* run) {
                           run->inputs[in::kCos].dims[0] = run->inputs[in::kSin].dims[0] = 41;
                         }});
}

TEST(PagedAttentionRefusesWrongInputs) {
  const auto set = [](int input, int axis, int64_t size) {
    return [=](Problem*, CpuRun* run) { run->inputs[static_cast<size_t>(input)].dims[axis] = size; };
  };
  const auto type = [](int input, DType dtype) {
    return [=](Problem*, CpuRun* run) { run->inputs[static_cast<size_t>(input)].dtype = dtype; };
  };
  const auto rank = [](int input, int size) {
    return [=](Problem*, CpuRun* run) { run->inputs[static_cast<size_t>(input)].rank = size; };
  };
  const Wrong cases[] = {
      {"query has shape", rank(in::kQuery, 1)},
      {"query has shape", set(in::kQuery, 1, 255)},
      {"key has shape", set(in::kKey, 1, 64)},
      {"value is missing", type(in::kValue, DType::kUndefined)},
      {"key_cache has shape", set(in::kKeyCache, 1, 24)},
      {"key_cache has shape", set(in::kKeyCache, 1, 8)},
      {"key_cache has shape", set(in::kKeyCache, 2, 1)},
      {"key_cache has shape", type(in::kKeyCache, DType::kF16)},
      {"key_cache has shape", type(in::kKeyCache, DType::kI8)},
      {"value_cache has shape", set(in::kValueCache, 0, 2)},
      {"cumulative_sequence_length has shape", set(in::kCumulative, 0, 3)},
      {"past_seqlens has shape", type(in::kPast, DType::kI64)},
      {"block_table has shape", set(in::kBlockTable, 0, 2)},
      {"block_table has shape", rank(in::kBlockTable, 1)},
      {"cos_cache has shape", set(in::kCos, 1, 40)},
      {"sin_cache has shape", set(in::kSin, 0, 7)},
      {"cos_cache is missing", type(in::kCos, DType::kUndefined)},
      {"k_scale is given", type(in::kKeyScale, DType::kF32)},
      {"key_cache_out has", [](Problem*, CpuRun* run) { run->outputs[1].dims[0] = 1; }},
      {"key_cache and value_cache_out overlap",
       [](Problem*, CpuRun* run) { run->outputs[2].data = run->inputs[in::kKeyCache].data; }},
  };
  for (const Wrong& wrong : cases) {
    Case c = Plain();
    c.is_shared = std::string(wrong.message) != "key_cache and value_cache_out overlap";
    CheckRefused(c, wrong);
  }
  Case metadata = Plain();
  metadata.metadata = Metadata::kExact;
  CheckRefused(metadata, {"attention_metadata[1] is -5", [](Problem* p, CpuRun*) { p->metadata[1] = -5; }});
  CheckRefused(metadata, {"attention_metadata has shape", set(in::kMetadata, 0, 4)});
}

}  // namespace
}  // namespace stof::test::paged
