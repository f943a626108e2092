// SPDX-License-Identifier: Apache-2.0
// Choose pages in decode: a step of StofCachedAttention's kernels with all pages and with the best 5 %, both behind the
// append kernel. Calls in a captured graph, each on another cache, so that none is in the L2 cache; timed with events.
// 32 query heads on 8, heads of 128 and 64 elements, pages of 64 rows.
//
// bench_cuda_choose_pages [fp16 | bf16] [--batch B]... [--length T]... [--share PERCENT] [--rows R] [--tokens S]
//   B 1 and 8, T 32768 and 131072 where none is given
// A line: microseconds of the dense step and of the one that chooses; what append, scores, choice, and attention with
// its combine kernel add to the latter; the ratio; the goal, which is 15 us and the bytes at 80 % of the bandwidth.
// Dense and chosen are timed in turns on a warm device: what runs first would have a higher clock.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/attention/decode/key_range.h"
#include "cuda/bench/bench_graph.h"
#include "cuda/bench/bench_inputs.h"
#include "cuda/choose_pages/choose.h"
#include "cuda/common/device_properties.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/mask/attention_mask.h"

namespace {

constexpr int64_t kHeads = 32, kKeyHeads = 8;

struct Options {
  stof::DType dtype = stof::DType::kF16;
  std::vector<int64_t> batches, lengths;
  int64_t rows = 64, tokens = 1;
  double share = 0.05;
};

// Device memory for all calls of a case, freed at its end.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    for (void* block : blocks_) cudaFree(block);
  }
  void* Take(int64_t bytes) {
    void* block = nullptr;
    CHECK_CUDA(cudaMalloc(&block, static_cast<size_t>(bytes)));
    blocks_.push_back(block);
    return block;
  }
  template <typename T>
  T* Upload(const std::vector<T>& values) {
    auto* const block = static_cast<T*>(Take(static_cast<int64_t>(values.size() * sizeof(T))));
    CHECK_CUDA(cudaMemcpy(block, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return block;
  }

 private:
  std::vector<void*> blocks_;
};

// The workspace of a call: blocks of one arena.
class Arena {
 public:
  explicit Arena(Memory* memory) : begin_(static_cast<char*>(memory->Take(kBytes))) {}
  void Reset() { used_ = 0; }
  static void* Allocate(void* self, size_t bytes) {
    auto& own = *static_cast<Arena*>(self);
    if (own.used_ + bytes > kBytes) return nullptr;
    void* const block = own.begin_ + own.used_;
    own.used_ += (bytes + 255) / 256 * 256;
    return block;
  }

 private:
  static constexpr int64_t kBytes = int64_t{512} << 20;
  char* begin_;
  size_t used_ = 0;
};

// Random numbers on the device. They repeat: the host takes its time to draw them.
void* MakeNumbers(stof::DType dtype, int64_t count, std::mt19937* random, Memory* memory) {
  constexpr int64_t kDrawn = (int64_t{1} << 20) + 4099;
  std::normal_distribution<double> draw(0, 0.5);
  std::vector<uint16_t> values(static_cast<size_t>(std::min(count, kDrawn)));
  for (uint16_t& x : values) x = ToBits(dtype, draw(*random));
  auto* const to = static_cast<char*>(memory->Take(2 * count));
  const auto drawn = static_cast<int64_t>(values.size());
  CHECK_CUDA(cudaMemcpy(to, values.data(), static_cast<size_t>(2 * drawn), cudaMemcpyHostToDevice));
  for (int64_t at = drawn; at < count; at += at) {
    CHECK_CUDA(
        cudaMemcpy(to + 2 * at, to, static_cast<size_t>(2 * std::min(at, count - at)), cudaMemcpyDeviceToDevice));
  }
  return to;
}

// Key bounds [heads, pages, 2, D], which do not repeat: equal scores would be rare in a model.
void* MakeBounds(stof::DType dtype, int64_t pages, int64_t D, std::mt19937* random, Memory* memory) {
  std::vector<uint16_t> values(static_cast<size_t>(pages * 2 * D));
  size_t at = 0;
  for (int64_t page = 0; page < pages; ++page) {
    const double width = 1 + static_cast<double>((*random)() >> 8) * 0x1p-24;
    for (int64_t i = 0; i < 2 * D; ++i) {
      const double x = (static_cast<double>((*random)() >> 8) * 0x1p-24 + 0.5) * width;
      values[at++] = ToBits(dtype, i < D ? -x : x);
    }
  }
  return memory->Upload(values);
}

// A step on one cache.
struct Step {
  stof::CacheAppendArgs append;
  stof::AttentionArgs attention;
  stof::cuda::PageChoiceParams choose;
};

struct Problem {
  std::vector<Step> steps;
  std::shared_ptr<const stof::AttentionMask> mask;
  stof::ExprSizes sizes;
  int64_t chosen = 0;
  double bytes = 0;  // that a step reads: key bounds of pages, keys and values of those that it attends
};

void BindAttention(const stof::CacheAppendArgs& append, int64_t chosen, int64_t rows, void* bounds, void* output,
                   stof::AttentionArgs* args) {
  const int64_t H = append.H, G = append.G, S = append.S, D = append.D, T = append.capacity;
  args->shape = {append.B, H, G, S, T, D, D, append.dtype};
  args->query = {append.rotated_query, {H * S * D, S * D, D}};
  args->key = {append.present_key, {G * T * D, T * D, D}};
  args->value = {append.present_value, args->key.stride};
  args->output.data = output, args->output.stride = {S * H * D, D, H * D};
  args->scores.scale = 1 / std::sqrt(static_cast<float>(D));
  args->kv.is_invalid = append.is_invalid, args->kv.seqlens = append.seqlens;
  stof::CausalWindow window;
  window.first_rows = append.first_row;
  args->mask.fixed = stof::StaticMask::OfWindow(window);
  const int64_t pages = stof::cuda::CountPages(T, rows);
  args->kv.choice = {chosen, rows, bounds, G * pages * 2 * D, pages * 2 * D, 2 * D, true};
}

// What the decode family gives its kernels.
void BindChoice(const stof::AttentionArgs& args, Memory* memory, stof::cuda::PageChoiceParams* params) {
  const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
  const stof::AttentionShape& shape = args.shape;
  const stof::PageChoice& choice = args.kv.choice;
  params->B = narrow(shape.B), params->H = narrow(shape.H), params->G = narrow(shape.G), params->S = narrow(shape.S);
  params->T = narrow(shape.T), params->D = narrow(shape.D), params->dtype = shape.dtype;
  params->query = args.query.data, params->query_stride = args.query.stride;
  params->key = args.key.data, params->key_stride = args.key.stride;
  params->scale = args.scores.scale;
  params->first_rows = args.mask.fixed.window()->first_rows, params->is_invalid = args.kv.is_invalid;
  params->seqlens = args.kv.seqlens, params->window_left = stof::cuda::kNoWindow;
  params->bounds = choice.bounds, params->bounds_stride_b = choice.stride_b;
  params->bounds_stride_g = choice.stride_g, params->bounds_stride_page = choice.stride_page;
  params->shift = stof::cuda::PageShift(choice.rows);
  params->pages = narrow(stof::cuda::CountPages(shape.T, choice.rows)), params->chosen = narrow(choice.chosen);
  params->columns = narrow(stof::cuda::ListColumns(choice.chosen, params->pages));
  const stof::cuda::ChooseWorkspace workspace(shape.B * shape.G, params->pages, params->columns);
  auto* const space = static_cast<char*>(memory->Take(workspace.bytes));
  params->scores = reinterpret_cast<uint32_t*>(space + workspace.scores);
  params->list = reinterpret_cast<int32_t*>(space + workspace.list);
  params->left_out = reinterpret_cast<int32_t*>(space + workspace.left_out);
}

Step MakeStep(const Options& options, int64_t B, int64_t T, int64_t D, int64_t chosen, std::mt19937* random,
              Memory* memory) {
  const int64_t S = options.tokens;
  const auto numbers = [&](int64_t count) { return MakeNumbers(options.dtype, count, random, memory); };
  Step step;
  stof::CacheAppendArgs& a = step.append;
  a.B = B, a.H = kHeads, a.G = kKeyHeads, a.S = S, a.D = D, a.dtype = options.dtype;
  const int64_t width = (kHeads + 2 * kKeyHeads) * D;
  auto* const tokens = static_cast<char*>(numbers(B * S * width));
  a.query = tokens, a.key = tokens + 2 * kHeads * D, a.value = tokens + 2 * (kHeads + kKeyHeads) * D;
  a.query_stride = a.key_stride = a.value_stride = {S * width, D, width};
  a.present_key = numbers(B * kKeyHeads * T * D), a.present_value = numbers(B * kKeyHeads * T * D);
  a.past_key = a.present_key, a.past_value = a.present_value;
  a.past_capacity = a.capacity = a.most_keys = T;
  a.seqlens = memory->Upload(std::vector<int32_t>(static_cast<size_t>(B), static_cast<int32_t>(T - 1)));
  a.transform.cos = numbers(T * D / 2), a.transform.sin = numbers(T * D / 2);
  a.transform.rotary_rows = T, a.transform.rotary_size = D;
  a.rotated_query = memory->Take(2 * B * kHeads * S * D);
  a.first_row = static_cast<int32_t*>(memory->Take(4 * B)), a.is_invalid = static_cast<int32_t*>(memory->Take(4 * B));
  void* const bounds =
      MakeBounds(options.dtype, B * kKeyHeads * stof::cuda::CountPages(T, options.rows), D, random, memory);
  BindAttention(a, chosen, options.rows, bounds, memory->Take(2 * B * kHeads * S * D), &step.attention);
  BindChoice(step.attention, memory, &step.choose);
  return step;
}

Problem MakeProblem(const Options& options, int64_t B, int64_t T, int64_t D, Memory* memory) {
  constexpr double kBeyondL2 = 256e6;
  constexpr int64_t kMostSteps = 16;
  Problem problem;
  ExitUnlessOk(stof::MakeAttentionMask("k <= q", {}, &problem.mask));
  problem.sizes = {B, kHeads, options.tokens, T, 0};
  const int64_t pages = stof::cuda::CountPages(T, options.rows);
  problem.chosen = std::max<int64_t>(1, std::lround(static_cast<double>(pages) * options.share));
  const auto range =
      stof::cuda::MakePageRange(static_cast<int32_t>(T - options.tokens), static_cast<int32_t>(options.tokens),
                                static_cast<int32_t>(T), stof::cuda::kNoWindow, stof::cuda::PageShift(options.rows));
  const int64_t rows = range.Attended(static_cast<int32_t>(problem.chosen)) * options.rows;
  problem.bytes = static_cast<double>(B * kKeyHeads * D * 2 * 2 * (range.Candidates() + rows));
  std::mt19937 random(7);
  const auto steps = std::clamp<int64_t>(std::lround(kBeyondL2 / problem.bytes), 2, kMostSteps);
  for (int64_t i = 0; i < steps; ++i) {
    problem.steps.push_back(MakeStep(options, B, T, D, problem.chosen, &random, memory));
  }
  return problem;
}

enum class Part { kAppend, kScores, kChoice, kAll, kDense };

// Microseconds of the kernels of a step up to a part.
double Time(const Problem& problem, Part part, Arena* arena) {
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const stof::CudaBackend& backend = *stof::FindCudaBackend();
  size_t next = 0;
  const auto run = [&] {
    const Step& step = problem.steps[next++ % problem.steps.size()];
    stof::RunContext context;
    context.on_cuda = true;
    context.stream = stream;
    context.allocate = Arena::Allocate, context.self = arena;
    arena->Reset();
    ExitUnlessOk(backend.cached_attention.append(step.append, context));
    if (part == Part::kAll || part == Part::kDense) {
      stof::AttentionArgs args = step.attention;
      if (part == Part::kDense) args.kv.choice = stof::PageChoice();
      ExitUnlessOk(backend.attention.run(args, nullptr, *problem.mask, problem.sizes, {}, context));
      return;
    }
    if (part != Part::kAppend) CHECK_CUDA(static_cast<cudaError_t>(stof::cuda::LaunchPageScores(step.choose, stream)));
    if (part == Part::kChoice) CHECK_CUDA(static_cast<cudaError_t>(stof::cuda::LaunchPageChoice(step.choose, stream)));
  };
  const auto calls = static_cast<int>(problem.steps.size());
  double us = TimeGraph(stream, calls, run, 8);
  us = TimeGraph(stream, calls, run, static_cast<int>(std::clamp(2e5 / (us * calls), 8.0, 2000.0)));
  CHECK_CUDA(cudaStreamDestroy(stream));
  return us;
}

void Measure(const Options& options, int64_t B, int64_t T, int64_t D) {
  stof::cuda::DeviceProperties device;
  ExitUnlessOk(stof::cuda::GetDeviceProperties(&device));
  Memory memory;
  Arena arena(&memory);
  const Problem problem = MakeProblem(options, B, T, D, &memory);
  Time(problem, Part::kDense, &arena);  // warms up
  const double first = Time(problem, Part::kDense, &arena), second = Time(problem, Part::kAll, &arena);
  const double append = Time(problem, Part::kAppend, &arena), scores = Time(problem, Part::kScores, &arena),
               choice = Time(problem, Part::kChoice, &arena);
  const double third = Time(problem, Part::kAll, &arena), fourth = Time(problem, Part::kDense, &arena);
  const double dense = (first + fourth) / 2, chosen = (second + third) / 2;
  std::printf(
      "B%-2ld T%-6ld S%-2ld D%-3ld %ld of %ld pages  dense %8.1f us  chosen %7.1f us = append %.1f + scores %.1f + "
      "choice %.1f + attention %.1f  ratio %.2f  goal %.1f us (%.1f MB)\n",
      B, T, options.tokens, D, problem.chosen, stof::cuda::CountPages(T, options.rows), dense, chosen, append,
      scores - append, choice - scores, chosen - choice, dense / chosen,
      device.peak_bandwidth > 0 ? 15 + problem.bytes / (0.8 * device.peak_bandwidth) * 1e-3 : 0.0,
      problem.bytes * 1e-6);
  std::fflush(stdout);
}

bool Parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const double number = i + 1 < argc ? std::atof(argv[i + 1]) : 0;
    if (word == "fp16" || word == "bf16") {
      options->dtype = word == "fp16" ? stof::DType::kF16 : stof::DType::kBF16;
      continue;
    }
    if (!(number > 0)) return false;
    const auto count = static_cast<int64_t>(number);
    if (word == "--batch") {
      options->batches.push_back(count);
    } else if (word == "--length") {
      options->lengths.push_back(count);
    } else if (word == "--share") {
      options->share = number / 100;
    } else if (word == "--rows" && (count == 16 || count == 32 || count == 64 || count == 128)) {
      options->rows = count;
    } else if (word == "--tokens" && count <= stof::kMaxStepTokens) {
      options->tokens = count;
    } else {
      return false;
    }
    ++i;
  }
  if (options->batches.empty()) options->batches = {1, 8};
  if (options->lengths.empty()) options->lengths = {32768, 131072};
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!Parse(argc, argv, &options)) {
    std::fprintf(stderr,
                 "usage: bench_cuda_choose_pages [fp16 | bf16] [--batch B]... [--length T]... [--share PERCENT] "
                 "[--rows R] [--tokens S]\n");
    return 2;
  }
  for (const int64_t D : {128, 64}) {
    for (const int64_t B : options.batches) {
      for (const int64_t T : options.lengths) Measure(options, B, T, D);
    }
  }
  return 0;
}
