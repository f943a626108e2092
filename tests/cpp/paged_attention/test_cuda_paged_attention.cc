// SPDX-License-Identifier: Apache-2.0
// StofPagedAttention on a GPU: outputs and caches against the definition in double precision, hostile lengths, blocks
// and slots, captured graphs. A test runs all of its cases and names those that fail.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/cpp/check.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/paged_attention/paged_problem.h"

namespace stof::test::paged {
namespace {

namespace in = paged_input;

// Failures of a test's cases, reported together.
class Failures {
 public:
  template <typename Function>
  void Collect(Function function) {
    try {
      function();
      ++passed_;
    } catch (const Failure& failure) {
      if (messages_.size() < 12) messages_.push_back(failure.message);
      ++failed_;
    }
  }
  void Report() const {
    std::string all;
    for (const std::string& message : messages_) all += "\n  " + message;
    CHECK(failed_ == 0, failed_, " of ", failed_ + passed_, " cases fail:", all);
  }

 private:
  int64_t passed_ = 0, failed_ = 0;
  std::vector<std::string> messages_;
};

// One node on the device, and its tensors. attention_metadata stays on the host.
class Node {
 public:
  explicit Node(Problem* problem, size_t arena = 0) : memory(arena), op(problem->MakeOp()) {
    inputs = problem->Inputs();
    const Tensor host_cache[2] = {inputs[in::kKeyCache], inputs[in::kValueCache]};
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].dtype == DType::kUndefined || i == in::kMetadata) continue;
      inputs[i].data = memory.Upload(inputs[i].data, Bytes(inputs[i]));
    }
    Tensor output = TensorOfShape(problem->c.dtype, {problem->N(), problem->c.H * problem->c.D});
    output.data = memory.Take(Bytes(output));
    outputs.push_back(output);
    for (int i = 0; i < 2; ++i) {
      Tensor cache = host_cache[i];
      cache.data =
          problem->c.is_shared ? inputs[static_cast<size_t>(in::kKeyCache + i)].data : memory.Take(Bytes(cache));
      outputs.push_back(cache);
    }
    CHECK_CUDA(cudaMemset(output.data, 0x3c, Bytes(output)));  // a number, so that NaN must be written
    const Status status = op->Prepare(inputs.data(), static_cast<int>(inputs.size()));
    CHECK(status.ok(), Describe(problem->c), ": ", status.message());
  }
  static size_t Bytes(const Tensor& tensor) { return static_cast<size_t>(tensor.Elements() * SizeOf(tensor.dtype)); }

  // Replaces inputs and caches by those of a problem of the same shapes.
  void Load(Problem* problem) {
    const std::vector<Tensor> host = problem->Inputs();
    for (size_t i = 0; i < host.size(); ++i) {
      if (host[i].dtype == DType::kUndefined || i == in::kMetadata) continue;
      CHECK(Bytes(host[i]) == Bytes(inputs[i]), "input ", i, " changes its size");
      CopyToDevice(inputs[i].data, host[i].data, Bytes(host[i]));
    }
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
  static Buffer Download(const void* from, DType dtype, int64_t count) {
    Buffer buffer(dtype, count);
    CHECK_CUDA(cudaMemcpy(buffer.data(), from, buffer.bytes().size(), cudaMemcpyDeviceToHost));
    return buffer;
  }

  void Check(const Problem& problem, const std::string& where, const std::set<int64_t>& illegal = {},
             bool is_batch_illegal = false) {
    const Case& c = problem.c;
    const Buffer key = Download(outputs[1].data, c.dtype, outputs[1].Elements());
    const Buffer value = Download(outputs[2].data, c.dtype, outputs[2].Elements());
    const Buffer output = Download(outputs[0].data, c.dtype, outputs[0].Elements());
    if (is_batch_illegal) {
      CHECK(key.bytes() == problem.key_cache.bytes() && value.bytes() == problem.value_cache.bytes(), where,
            ": a cache changed");
      return problem.CheckOutput(output, key, value, nullptr, nullptr, true, where, illegal);
    }
    problem.CheckCaches(key, value, where, illegal);
    // In the op's order: first rows, ends of keys, legality, queries.
    int64_t S = c.most_tokens();
    if (c.metadata != Metadata::kNone) S = std::min<int64_t>(problem.metadata[0], problem.N());
    const Buffer queries = Download(memory.workspace()[3], c.dtype, c.B() * c.H * S * c.D);
    problem.CheckOutput(
        output, key, value, &queries, [&](int64_t b, int64_t h, int64_t i) { return ((b * c.H + h) * S + i) * c.D; },
        true, where, illegal);
  }

  DeviceMemory memory;
  std::unique_ptr<Op> op;
  std::vector<Tensor> inputs, outputs;
};

void RunCase(const Case& c, uint64_t seed) {
  if (!cached_attention::IsSampled(seed)) return;
  const std::string where = Text("seed ", seed, " ", Describe(c));
  Problem problem(c, seed);
  Node node(&problem);
  const Status status = node.Queue(nullptr);
  CHECK(status.ok(), where, ": ", status.message());
  const cudaError_t error = cudaDeviceSynchronize();
  CHECK(error == cudaSuccess, where, ": ", cudaGetErrorString(error));
  node.Check(problem, where);
  CountCases(1);
}

TEST(CudaPagedAttentionOfFewQueries) {
  Random random(42);
  Failures failures;
  uint64_t seed = 0;
  for (const int64_t S : {1, 3, 16}) {
    for (const int64_t past : {0, 1, 517}) {
      for (const int64_t block : {16, 64, 256}) {
        for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
          for (int i = 0; i < Cases(3); ++i) {
            const Case c = DrawCase(S, past, block, dtype, &random);
            failures.Collect([&] { RunCase(c, seed); });
            ++seed;
          }
        }
      }
    }
  }
  failures.Report();
}

TEST(CudaPagedAttentionOfChunks) {
  Random random(43);
  Failures failures;
  uint64_t seed = 0;
  for (const int64_t S : {17, 70, 300}) {
    for (const int64_t past : {0, 1, 517}) {
      for (const int64_t block : {16, 64, 256}) {
        for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
          const Case c = DrawCase(S, past, block, dtype, &random);
          failures.Collect([&] { RunCase(c, seed); });
          ++seed;
        }
      }
    }
  }
  failures.Report();
}

// Rows that are not aligned to 16 bytes take the gathered path with few queries, too.
TEST(CudaPagedAttentionOfUnalignedHeads) {
  Random random(44);
  Failures failures;
  uint64_t seed = 0;
  for (const int64_t S : {1, 5, 40}) {
    for (const int64_t D : {1, 6, 33}) {
      for (const int mask : {0, 1, 4}) {
        Case c = DrawCase(S, 90, 16, DType::kF32, &random);
        c.D = D, c.rotary = D == 6 ? 4 : 0, c.rotary_offset = 0, c.mask = mask, c.ring = 0, c.frees_blocks = false;
        failures.Collect([&] { RunCase(c, seed); });
        ++seed;
      }
    }
  }
  failures.Report();
}

// Many sequences, most of them short, under loose bounds; and one without tokens.
TEST(CudaPagedAttentionOfManySequences) {
  Failures failures;
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    for (const int mask : {0, 2, 4}) {
      for (const Metadata metadata : {Metadata::kNone, Metadata::kLoose}) {
        Case c;
        c.H = 8, c.G = 2, c.D = 128, c.dtype = dtype, c.mask = mask, c.metadata = metadata, c.rotary = 128;
        for (int64_t b = 0; b < 65; ++b) {
          c.past.push_back(b % 9 == 0 ? 700 : b % 5 * 30);
          c.tokens.push_back(b == 7 ? 0 : 1);
        }
        failures.Collect([&] { RunCase(c, seed); });
        ++seed;
      }
    }
  }
  failures.Report();
}

// ---- hostile values: the sequences they belong to are NaN, the others are right ----
struct Hostile {
  const char* name;
  std::set<int64_t> illegal;
  std::function<void(Problem*)> change;
  bool is_batch_illegal = false;
};

void RunHostile(const Case& c, const Hostile& hostile, uint64_t seed) {
  const std::string where = Text(hostile.name, " ", Describe(c));
  Problem legal(c, seed), changed(c, seed);
  hostile.change(&changed);
  Node node(&changed);
  const Status status = node.Queue(nullptr);
  CHECK(status.ok(), where, ": ", status.message());
  const cudaError_t error = cudaDeviceSynchronize();
  CHECK(error == cudaSuccess, where, ": ", cudaGetErrorString(error));
  node.Check(legal, where, hostile.illegal, hostile.is_batch_illegal);
  CountCases(1);
}

TEST(CudaPagedAttentionMarksHostileValues) {
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min(), kMost = std::numeric_limits<int32_t>::max();
  std::vector<Hostile> all;
  for (const int32_t value : {kLeast, -1, 1, kMost}) {
    all.push_back({"first cumulative length", {0, 1, 2, 3}, [=](Problem* p) { p->cumulative[0] = value; }, true});
  }
  for (const int32_t value : {kLeast, -1, 0, kMost}) {
    all.push_back({"cumulative length", {0, 1, 2, 3}, [=](Problem* p) { p->cumulative[2] = value; }, true});
    all.push_back({"last cumulative length", {0, 1, 2, 3}, [=](Problem* p) { p->cumulative[4] = value; }, true});
  }
  for (const int32_t value : {kLeast, -1, 5000, kMost - 1, kMost}) {
    all.push_back({"past length", {1}, [=](Problem* p) { p->past[1] = value; }});
  }
  for (const int32_t value : {kLeast, -1, 1 << 20, kMost}) {
    all.push_back({"block", {2}, [=](Problem* p) { p->table[static_cast<size_t>(2 * p->columns + 1)] = value; }});
    all.push_back({"new block", {0}, [=](Problem* p) { p->table[static_cast<size_t>(30 / p->c.block)] = value; }});
  }
  Failures failures;
  uint64_t seed = 0;
  for (const int64_t S : {1, 3, 40}) {
    for (const int mask : {0, 4}) {
      for (const Metadata metadata : {Metadata::kNone, Metadata::kExact}) {
        Case c;
        c.dtype = DType::kF16, c.mask = mask, c.metadata = metadata, c.rotary = 32;
        c.past = {30, 7, 59, 0}, c.tokens = {S, S, S, S};
        for (const Hostile& hostile : all) {
          failures.Collect([&] { RunHostile(c, hostile, seed); });
          ++seed;
        }
        Case slots = c;
        slots.has_slots = true;
        for (const int32_t value : {kLeast, -2, 1 << 20, kMost}) {
          const Hostile hostile = {"slot", {3}, [=](Problem* p) { p->slots[static_cast<size_t>(3 * S)] = value; }};
          failures.Collect([&] { RunHostile(slots, hostile, seed); });
          ++seed;
        }
      }
      // Bounds that sequence 2 exceeds.
      Case c;
      c.dtype = DType::kF16, c.mask = mask, c.metadata = Metadata::kExact;
      c.past = {30, 7, 59, 0}, c.tokens = {S, S, S, S};
      c.bounds = {static_cast<int32_t>(S), static_cast<int32_t>(S + 58), 0};
      failures.Collect([&] { RunHostile(c, {"bound on keys", {2}, [](Problem*) {}}, seed); });
      if (S == 1) continue;
      c.tokens = {1, 1, S, 1};
      c.bounds = {static_cast<int32_t>(S - 1), 200, 0};
      failures.Collect([&] { RunHostile(c, {"bound on tokens", {2}, [](Problem*) {}}, seed); });
    }
  }
  failures.Report();
}

// A token beyond the rotary table: its sequence is NaN.
TEST(CudaPagedAttentionMarksPositionsBeyondTheRotaryTable) {
  Case c;
  c.dtype = DType::kF16, c.rotary = 64, c.past = {10, 950}, c.tokens = {2, 2};
  Problem problem(c, 1);
  Node node(&problem);
  CHECK(node.Queue(nullptr).ok());
  CHECK_CUDA(cudaDeviceSynchronize());
  const Buffer output = Node::Download(node.outputs[0].data, c.dtype, node.outputs[0].Elements());
  for (int64_t i = 0; i < output.count(); ++i) {
    CHECK(std::isnan(output.Get(i)) == (i >= 2 * c.H * c.D), "element ", i, " is ", output.Get(i));
  }
}

// One captured graph, many steps: lengths, blocks and caches change between them, shapes and bounds stay.
TEST(CudaPagedAttentionInACapturedGraph) {
  Failures failures;
  for (const int64_t S : {1, 4, 20}) {
    for (const int mask : {0, 1, 4}) {
      for (const bool has_bounds : {true, false}) {
        failures.Collect([&] {
          Random random(50);
          const auto draw = [&] {
            Case c;
            c.H = 8, c.G = 2, c.D = 128, c.dtype = DType::kF16, c.mask = mask, c.rotary = 64;
            c.metadata = has_bounds ? Metadata::kLoose : Metadata::kNone;
            c.bounds = {static_cast<int32_t>(S), 400, 0};
            c.least_columns = 40, c.least_blocks = 120;
            c.padding = 3 * S;
            for (int b = 0; b < 3; ++b) {
              c.past.push_back(random.Range(0, 350));
              c.tokens.push_back(random.Range(0, S));
              c.padding -= c.tokens.back();
            }
            return c;
          };
          Case first = draw();
          first.tokens = {S, S, S}, first.padding = 0;
          Problem problem(first, 0);
          Node node(&problem, size_t{64} << 20);
          cudaStream_t stream = nullptr;
          CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
          CHECK(node.Queue(stream).ok());  // loads the kernels
          CHECK_CUDA(cudaStreamSynchronize(stream));
          cudaGraph_t graph = nullptr;
          cudaGraphExec_t executable = nullptr;
          CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
          const Status status = node.Queue(stream);
          CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
          CHECK(status.ok(), status.message());
          CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
          for (int i = 1; i < 20; ++i) {
            Problem step(draw(), static_cast<uint64_t>(i));
            // Without bounds a captured run has those of the shapes.
            if (!has_bounds) step.c.metadata = Metadata::kLoose, step.metadata[0] = static_cast<int32_t>(step.N());
            node.Load(&step);
            CHECK_CUDA(cudaGraphLaunch(executable, stream));
            CHECK_CUDA(cudaStreamSynchronize(stream));
            node.Check(step, Text("S ", S, " mask ", mask, " bounds ", has_bounds, " step ", i, Describe(step.c)));
            CountCases(1);
          }
          CHECK_CUDA(cudaGraphExecDestroy(executable));
          CHECK_CUDA(cudaGraphDestroy(graph));
          CHECK_CUDA(cudaStreamDestroy(stream));
        });
      }
    }
  }
  failures.Report();
}

}  // namespace
}  // namespace stof::test::paged
