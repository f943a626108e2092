// SPDX-License-Identifier: Apache-2.0
// Plugins on a GPU, without TensorRT: every kernel that can be a tactic, sizes of every kernel, capture and replay,
// contexts on streams of their own, one workspace for layer after layer, and that enqueue waits for nothing.
#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "cuda/attention/decode/api.h"
#include "cuda/mask/build/mask_builder.h"
#include "plugins/core/contract/cuda_backend.h"
#include "tests/trt/trial.h"

namespace stof::test {
namespace {

void Expect(cudaError_t error, const char* what) { CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error)); }

class Stream {
 public:
  Stream() { Expect(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

Case Plain(DType dtype, int64_t size, int mask) {
  Case c;
  c.H = 4, c.G = mask % 2 == 0 ? 4 : 2;
  c.D = c.Dv = size;
  c.dtype = dtype;
  c.mask = mask;
  if (mask == kPadInOr) c.pad = 2;
  Random random(3);
  for (int64_t i = 0; i < kTableHeads * kTableKeys; ++i) c.table.push_back(random.OneIn(3) ? 1 : 0);
  return c;
}

// A context of a plugin that came out of an engine file, with workspace for shapes up to `most`.
struct Context {
  Held held;
  Memory workspace;
  std::vector<int32_t> tactics;

  static Context Make(const Case& c, const Sizes& most) {
    Random random(5);
    const Attributes attributes = AttributesOf(c, &random);
    Held built = Create(attributes);
    CHECK(built.plugin != nullptr);
    std::vector<int32_t> tactics;
    const size_t bytes = Build(c, most, most, &built, &tactics);
    const Held loaded = Loaded(attributes);
    return {Held(loaded.runtime->attachToContext(nullptr)), Memory(bytes), tactics};
  }
};

void RunOnce(const Case& c, const Sizes& n, Context* context, int32_t tactic, uint64_t seed) {
  const Trial trial(c, n, seed);
  cudaStream_t stream = ThreadStream();
  CHECK(context->held.runtime->setTactic(tactic) == 0);
  trial.Shape(context->held.runtime);
  for (int run = 0; run < 2; ++run) {
    trial.Poison(stream);
    trial.Enqueue(context->held.runtime, context->workspace, stream);
    trial.Check(stream);
  }
  context->workspace.Download(stream);
  CountCases(2);
}

std::string Labelled(const Failure& failure, const char* what, int64_t number) {
  return Text(failure.message, ", ", what, " ", number).substr(2);
}

constexpr DType kTypes[] = {DType::kF16, DType::kBF16, DType::kF32};

}  // namespace

// Every tactic that a device offers, at lengths beside the edges of tiles.
TEST(TrtTactics) {
  int64_t most = 0;
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int64_t size : {64, 128}) {
      for (int mask = 0; mask < kMasks; ++mask) {
        Case c = Plain(dtype, size, mask == kTableMask ? 1 : mask);
        if (mask % 3 == 2) c.pad = 0;
        c.empty_rows = static_cast<EmptyRows>(mask % 4);
        const Sizes n = {2, 193 + 64 * (mask % 2), 257 + mask};
        Context context = Context::Make(c, n);
        most = std::max(most, static_cast<int64_t>(context.tactics.size()));
        for (const int32_t tactic : context.tactics) {
          try {
            RunOnce(c, n, &context, tactic, static_cast<uint64_t>(100 + mask));
          } catch (const Failure& failure) {
            throw Failure{Labelled(failure, "tactic", tactic)};
          }
        }
      }
    }
  }
  CHECK(most > 1, "this device offers no tactics");
}

// Sizes of heads that have kernels of their own, few and many queries, in every type, and shapes that change.
TEST(TrtKernels) {
  for (const DType dtype : kTypes) {
    for (const int64_t size : {32, 64, 96, 128, 160, 192, 256}) {
      for (const int mask : {0, 2, kDocuments, kLengths}) {
        Case c = Plain(dtype, size, mask);
        c.offset = mask != kDocuments;
        c.layouts[mask == 2 ? 0 : 3] = "BSHD";
        const Sizes most = {2, 210, 300};
        Context context = Context::Make(c, most);
        RunOnce(c, most, &context, 0, 1);
        RunOnce(c, {1, 1, 299}, &context, 0, 2);
        RunOnce(c, {2, 16, 64}, &context, 0, 3);
        RunOnce(c, most, &context, 0, 4);
      }
    }
  }
}

// A graph of one run gives right outputs for numbers, padding and vectors that it did not see when it was captured. The
// strictest mode: an allocation by any thread would end the capture.
TEST(TrtCaptureAndReplay) {
  for (const DType dtype : kTypes) {
    for (int mask = 0; mask < kMasks; ++mask) {
      for (const Sizes& n : {Sizes{2, 150, 180}, Sizes{2, 2, 700}}) {
        if (mask == kTableMask && n.T > kTableKeys) continue;
        Case c = Plain(dtype, 64, mask);
        c.offset = true;
        if (mask % 2 == 0) c.pad = 3;
        c.empty_rows = static_cast<EmptyRows>(mask % 4);
        Context context = Context::Make(c, n);
        const Stream stream;
        Trial trial(c, n, 1);
        trial.Shape(context.held.runtime);
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t replay = nullptr;
        Expect(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
        trial.Enqueue(context.held.runtime, context.workspace, stream);
        Expect(cudaStreamEndCapture(stream, &graph), "capture");
        size_t count = 0;
        Expect(cudaGraphGetNodes(graph, nullptr, &count), "nodes");
        std::vector<cudaGraphNode_t> nodes(count);
        Expect(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes");
        for (const cudaGraphNode_t node : nodes) {
          cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
          Expect(cudaGraphNodeGetType(node, &type), "node");
          CHECK(type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemset, "a node of type ",
                static_cast<int>(type), " in the graph of mask ", mask);
        }
        Expect(cudaGraphInstantiate(&replay, graph, 0), "instantiation");
        for (uint64_t seed = 1; seed <= 3; ++seed) {
          trial.Draw(seed, stream);
          trial.Poison(stream);
          Expect(cudaGraphLaunch(replay, stream), "replay");
          trial.Check(stream);
          CountCases(1);
        }
        cudaGraphExecDestroy(replay);
        cudaGraphDestroy(graph);
      }
    }
  }
}

// Runs on the same memory, which the plugin keeps as graphs: other numbers, padding and vectors each time, alternating
// memory, more of it than there are graphs, and shapes that change and come back.
TEST(TrtRunsAgain) {
  for (const int mask : {1, 2, kDocuments, kLengths, kPadInOr}) {
    Case c = Plain(kTypes[mask % 3], 64, mask);
    if (mask != kDocuments && mask != kLengths) c.pad = 2;
    c.lse = mask % 2 == 0;
    c.empty_rows = static_cast<EmptyRows>(mask % 4);
    const Sizes most = {2, 180, 200}, less = {1, 33, 65};
    Context context = Context::Make(c, most);
    const Stream stream;
    std::vector<std::unique_ptr<Trial>> trials;
    for (uint64_t i = 0; i < 6; ++i) trials.push_back(std::make_unique<Trial>(c, i == 5 ? less : most, i));
    const auto run = [&](size_t which, uint64_t seed) {
      trials[which]->Draw(seed, stream);
      trials[which]->Poison(stream);
      trials[which]->Enqueue(context.held.runtime, context.workspace, stream);
      trials[which]->Check(stream);
      CountCases(1);
    };
    trials[0]->Shape(context.held.runtime);
    for (uint64_t seed = 10; seed < 15; ++seed) run(0, seed);
    for (uint64_t seed = 15; seed < 21; ++seed) run(seed % 2, seed);
    for (size_t which = 1; which < 5; ++which) {
      for (uint64_t seed = 21; seed < 24; ++seed) run(which, seed);
    }
    for (size_t which = 0; which < 5; ++which) run(which, 30 + which);
    trials[5]->Shape(context.held.runtime);
    for (uint64_t seed = 40; seed < 44; ++seed) run(5, seed);
    trials[0]->Shape(context.held.runtime);
    for (uint64_t seed = 50; seed < 54; ++seed) run(0, seed);
  }
}

// Two contexts of one engine, each with a workspace and a stream, queue many runs at once.
TEST(TrtTwoStreams) {
  for (const int mask : {1, 2, kDocuments, kPadInOr}) {
    Case c = Plain(DType::kF16, 64, mask);
    c.empty_rows = EmptyRows::kMean;
    if (mask < 3) c.pad = 0;
    const Sizes most = {2, 260, 260}, other = {1, 131, 190};
    Context first = Context::Make(c, most), second = Context::Make(c, most);
    const Stream streams[2];
    Trial trials[2] = {{c, most, 1}, {c, other, 2}};
    trials[0].Shape(first.held.runtime);
    trials[1].Shape(second.held.runtime);
    std::thread beside([&] {
      for (int run = 0; run < 40; ++run) trials[1].Enqueue(second.held.runtime, second.workspace, streams[1]);
    });
    for (int run = 0; run < 40; ++run) trials[0].Enqueue(first.held.runtime, first.workspace, streams[0]);
    beside.join();
    trials[0].Check(streams[0]);
    trials[1].Check(streams[1]);
    CountCases(80);
  }
}

// TensorRT gives the same memory to layer after layer.
TEST(TrtOneWorkspace) {
  std::vector<Case> cases;
  for (const int mask : {kDocuments, 2, kLengths, 1, kPadInOr}) {
    Case c = Plain(kTypes[cases.size() % 3], 64, mask);
    c.pad = 0;
    c.empty_rows = cases.size() % 2 == 0 ? EmptyRows::kAll : EmptyRows::kZero;
    cases.push_back(c);
  }
  const Sizes n = {2, 200, 200};
  std::vector<Context> contexts;
  std::vector<std::unique_ptr<Trial>> trials;
  const Memory* largest = nullptr;
  size_t most = 0;
  for (const Case& c : cases) {
    Random random(5);
    Held built = Create(AttributesOf(c, &random));
    const size_t bytes = Build(c, n, n, &built);
    contexts.push_back({Held(built.runtime->attachToContext(nullptr)), Memory(bytes), {}});
    trials.push_back(std::make_unique<Trial>(c, n, cases.size() + trials.size()));
    trials.back()->Shape(contexts.back().held.runtime);
    if (bytes > most) most = bytes;
  }
  const Memory shared(most);
  largest = &shared;
  const Stream stream;
  for (int run = 0; run < 3; ++run) {
    for (const auto& trial : trials) trial->Poison(stream);
    for (size_t i = 0; i < cases.size(); ++i) trials[i]->Enqueue(contexts[i].held.runtime, *largest, stream);
    for (const auto& trial : trials) trial->Check(stream);
    CountCases(static_cast<int64_t>(cases.size()));
  }
  shared.Download(stream);
}

// enqueue comes back while the stream is held up. Not the first one of a process: CUDA loads a kernel when it is first
// launched, and may wait for the device then.
TEST(TrtEnqueueDoesNotWait) {
  for (int mask = 0; mask < kMasks; ++mask) {
    Case c = Plain(DType::kF16, 64, mask == kTableMask ? 1 : mask);
    if (mask % 2 == 0) c.pad = 0;
    const Sizes n = {2, 300, 300};
    Context context = Context::Make(c, n);
    const Stream stream;
    const Trial trial(c, n, 9);
    trial.Shape(context.held.runtime);
    trial.Enqueue(context.held.runtime, context.workspace, stream);
    trial.Check(stream);
    struct Gate {
      std::atomic<bool> open{false};
      std::atomic<bool> given_up{false};
    } gate;
    // Calls that wait for the stream would wait for ever: the gate gives up after a time that no call takes.
    const auto hold = [](void* given) {
      Gate& held = *static_cast<Gate*>(given);
      const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
      while (!held.open && !held.given_up) {
        std::this_thread::yield();
        if (std::chrono::steady_clock::now() > end) held.given_up = true;
      }
    };
    Expect(cudaLaunchHostFunc(stream, hold, &gate), "host function");
    for (int run = 0; run < 3; ++run) trial.Enqueue(context.held.runtime, context.workspace, stream);
    const bool waited = gate.given_up;
    gate.open = true;
    trial.Check(stream);  // the host function reads the gate
    CHECK(!waited, "a call waited while the stream was held up, mask ", mask);
    CountCases(3);
  }
}

// The planned workspace of a mask that is made on the device is at least what its kernels ask for. Needs no GPU.
TEST(TrtPlannedMaskMemory) {
  static const std::vector<std::string> kTexts = {
      "segment_q[b, q] == segment_k[b, k]", "k < lengths[b] and (q + h) % 3 != 0",
      "segment_k[b, k] <= q and (k <= q or pad[b, k]) and h != 1", "lengths[0] > k - q"};
  Random random(11);
  for (int i = 0; i < 4000; ++i) {
    AttentionArgs args;
    const int64_t scale = random.Pick(std::vector<int64_t>{20, 300, 3000, 40000});
    args.shape.B = random.Range(1, 20), args.shape.H = args.shape.G = random.Range(1, 40);
    args.shape.S = random.Range(1, scale), args.shape.T = random.Range(1, scale);
    args.shape.D = args.shape.Dv = 64;
    args.shape.dtype = kTypes[random.Range(0, 2)];
    const std::string& text = random.Pick(kTexts);
    std::shared_ptr<const AttentionMask> mask;
    Status status = MakeAttentionMask(text, {}, &mask);
    CHECK(status.ok(), status.message());
    static char data[8];
    const auto vector = [](std::initializer_list<int64_t> dims, DType dtype, void* at) {
      Tensor tensor;
      tensor.data = at, tensor.dtype = dtype, tensor.rank = static_cast<int32_t>(dims.size());
      std::copy(dims.begin(), dims.end(), tensor.dims);
      return tensor;
    };
    const auto operands = [&](void* at) {
      return Tables{{"segment_q", vector({args.shape.B, args.shape.S}, DType::kI32, at)},
                    {"segment_k", vector({args.shape.B, args.shape.T}, DType::kI64, at)},
                    {"lengths", vector({args.shape.B}, DType::kI64, at)},
                    {"pad", vector({args.shape.B, args.shape.T}, DType::kBool, at)}};
    };
    const ExprSizes sizes = {args.shape.B, args.shape.H, args.shape.S, args.shape.T, 0};
    size_t planned = 0, fixed = 0;
    const AttentionMask none;
    CHECK(PlanCudaAttention(args, false, none, sizes, {}, &fixed).ok());
    status = PlanCudaAttention(args, false, *mask, sizes, operands(nullptr), &planned);
    CHECK(status.ok(), text, ": ", status.message());
    cuda::MaskProgram program;
    status = cuda::CompileMask(mask->parts.fixed, mask->parts.dynamic, sizes, operands(data), &program);
    CHECK(status.ok(), text, ": ", status.message());
    cuda::MaskCuts cuts(program, sizes, cuda::MaskTile(), cuda::kMostMaskBytes);
    cuda::MaskBuild build;
    build.program = &program, build.sizes = sizes;
    build.sm_count = 132;
    CHECK(cuts.Next(&build.part));  // the largest
    const bool few = args.shape.S <= cuda::kDecodeQueries && args.shape.dtype != DType::kF32;
    for (const int m : {64, 128, 192, 256}) {
      for (const int n : {64, 96, 128, 160, 192, 256}) {
        if (few && (m > 64 || n > 64)) continue;
        for (const bool fragments : {false, true}) {
          build.tile = {m, n, fragments};
          const size_t bytes = cuda::MaskBytes(build);
          CHECK(bytes + 64 <= planned - fixed, text, ", B ", args.shape.B, " H ", args.shape.H, " S ", args.shape.S,
                " T ", args.shape.T, " tile ", m, " x ", n, fragments ? " in fragments: " : ": ", bytes,
                " bytes, planned ", planned - fixed);
        }
      }
    }
    CountCases(1);
  }
}

}  // namespace stof::test
