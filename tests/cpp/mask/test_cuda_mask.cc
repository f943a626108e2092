// SPDX-License-Identifier: Apache-2.0
// Block masks on the device: those that its kernels make, bit by bit against the host's evaluation; the cache of those
// that the host made; captured graphs, missing memory, vectors that break a mask.
// Over 500 lines: a list of cases.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>

#include "cuda/attention/families.h"
#include "cuda/common/graph_capture.h"
#include "cuda/mask/build/mask_builder.h"
#include "cuda/mask/device_mask.h"
#include "cuda/mask/fragments.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/mask/expr_eval.h"
#include "tests/cpp/forced_kernel.h"
#include "tests/cpp/mask/random_expr.h"

namespace stof::test {
namespace {

#define CHECK_CUDA(call)                                                \
  do {                                                                  \
    const cudaError_t cuda_error_ = (call);                             \
    CHECK(cuda_error_ == cudaSuccess, cudaGetErrorString(cuda_error_)); \
  } while (0)

// Device memory of a test.
class Blocks {
 public:
  Blocks() = default;
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;
  ~Blocks() {
    for (void* block : blocks_) cudaFree(block);
  }
  // Filled with a pattern that no kernel may take for something.
  void* Take(size_t bytes) {
    void* block = nullptr;
    CHECK_CUDA(cudaMalloc(&block, std::max<size_t>(bytes, 16)));
    blocks_.push_back(block);
    CHECK_CUDA(cudaMemset(block, 0xa5, std::max<size_t>(bytes, 16)));
    return block;
  }
  void* Copy(const void* from, size_t bytes) {
    void* block = Take(bytes);
    CHECK_CUDA(cudaMemcpy(block, from, bytes, cudaMemcpyHostToDevice));
    return block;
  }
  static void* Allocate(void* self, size_t bytes) { return static_cast<Blocks*>(self)->Take(bytes); }

 private:
  std::vector<void*> blocks_;
};

template <typename T>
std::vector<T> ToHost(const T* from, size_t count) {
  std::vector<T> values(count);
  CHECK_CUDA(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

int64_t ItemSize(DType dtype) { return dtype == DType::kI64 ? 8 : dtype == DType::kI32 ? 4 : 1; }

// Tables and vectors of a random mask, on the device; vectors sometimes as int32.
cuda::MaskInputs OnDevice(const Operands& operands, Random* random, Blocks* blocks) {
  cuda::MaskInputs inputs;
  for (const auto* list : {&operands.tables, &operands.runtime}) {
    for (const auto& [name, tensor] : *list) {
      Tensor moved = tensor;
      const auto count = static_cast<size_t>(tensor.Elements());
      if (list == &operands.runtime && tensor.dtype == DType::kI64 && random->OneIn(2)) {
        const auto* wide = static_cast<const int64_t*>(tensor.data);
        const std::vector<int32_t> narrow(wide, wide + count);
        moved.dtype = DType::kI32;
        moved.data = blocks->Copy(narrow.data(), 4 * count);
      } else {
        moved.data = blocks->Copy(tensor.data, count * static_cast<size_t>(ItemSize(tensor.dtype)));
      }
      inputs.emplace_back(name, moved);
    }
  }
  return inputs;
}

// The words of a tile by row in the order of fragments.h.
std::vector<uint32_t> InFragments(const std::vector<uint32_t>& rows, int m, int n) {
  const int words = n / 32;
  std::vector<uint32_t> fragments;
  for (int group = 0; group < m; group += 64) {
    for (int w = 0; w < words; w += 2) {
      for (int thread = 0; thread < 128; ++thread) {
        const uint32_t* row = rows.data() + (group + thread / 32 * 16 + thread % 32 / 4) * words + w;
        const bool high = w + 1 < words;
        fragments.push_back(
            cuda::FragmentWord(row[0], high ? row[1] : 0, row[8 * words], high ? row[8 * words + 1] : 0, thread % 4));
      }
    }
  }
  return fragments;
}

// A part's mask as the device made it, in memory that ends at `end_of_memory`, against the host's evaluation of every
// tile. Gives the number of partial tiles that share their bits with another one.
int CompareMask(const RandomMask& mask, const cuda::MaskBuild& build, const cuda::DeviceMask& view,
                const unsigned char* end_of_memory, const std::string& where) {
  const cuda::MaskPart& part = build.part;
  const int m = build.tile.m, n = build.tile.n, words = n / 32;
  const int64_t rows = (part.rows + m - 1) / m, columns = (mask.sizes.T + n - 1) / n;
  const auto tables = static_cast<size_t>(view.layout_b) * static_cast<size_t>(view.layout_h);
  const auto all = tables * static_cast<size_t>(rows);
  CHECK(view.rows == rows, where);
  const auto layout = ToHost(view.layout, tables), begin = ToHost(view.row_ptr, all), end = ToHost(view.row_end, all);
  const auto full = ToHost(view.full_begin, all), order = ToHost(view.order, all);
  const size_t entries = all * static_cast<size_t>(columns);
  const auto tiles = ToHost(view.key_tile, entries), ids = ToHost(view.bits_id, entries);
  const int tile_words = build.tile.fragments ? m * 2 * cuda::FragmentWords(n) : m * words;
  const auto bits =
      ToHost(view.bits, static_cast<size_t>(end_of_memory - reinterpret_cast<const unsigned char*>(view.bits)) / 4);
  CHECK(bits.size() <= entries * static_cast<size_t>(tile_words) + 31, where, ": more bits than tiles");
  std::set<int32_t> used;
  int shared = 0;
  ExprEvaluator evaluator(mask.expr, mask.sizes, mask.bindings);
  std::vector<uint32_t> want(static_cast<size_t>(m * words));
  for (int64_t b = 0; b < view.layout_b; ++b) {
    for (int64_t h = 0; h < view.layout_h; ++h) {
      const int32_t table = layout[static_cast<size_t>(b * view.layout_h + h)];
      std::vector<int64_t> costs;
      for (int64_t r = 0; r < rows; ++r) {
        const auto at = static_cast<size_t>(table * rows + r);
        const std::string place = Text(where, " b ", part.b + b, " h ", part.h + h, " row ", r);
        int32_t partial = begin[at], whole = full[at];
        for (int64_t c = 0; c < columns; ++c) {
          const int64_t queries = std::min<int64_t>(m, part.rows - r * m),
                        keys = std::min<int64_t>(n, mask.sizes.T - c * n);
          std::fill(want.begin(), want.end(), 0u);
          const int64_t ones = evaluator.Tile(part.b + b, part.h + h, mask.sizes.P + part.row + r * m, c * n, queries,
                                              keys, words, want.data());
          if (ones == 0) continue;
          if (ones == queries * n) {
            CHECK(whole < end[at] && tiles[static_cast<size_t>(whole)] == c, place, " tile ", c, " is full");
            ++whole;
            continue;
          }
          CHECK(partial < full[at] && tiles[static_cast<size_t>(partial)] == c, place, " tile ", c, " is partial");
          const std::vector<uint32_t> stored = build.tile.fragments ? InFragments(want, m, n) : want;
          const auto first = static_cast<size_t>(ids[static_cast<size_t>(partial)]) * stored.size();
          shared += used.insert(ids[static_cast<size_t>(partial)]).second ? 0 : 1;
          CHECK(first + stored.size() <= bits.size() &&
                    std::equal(stored.begin(), stored.end(), bits.begin() + static_cast<std::ptrdiff_t>(first)),
                place, " tile ", c, ": other bits");
          ++partial;
        }
        CHECK(partial == full[at] && whole == end[at], place, ": more tiles than there are");
        costs.push_back(3 * (end[at] - begin[at]) - (end[at] - full[at]));
      }
      std::vector<bool> seen(static_cast<size_t>(rows), false);
      for (int64_t r = 0; r < rows; ++r) {
        const int32_t row = order[static_cast<size_t>(table * rows + r)];
        CHECK(row >= 0 && row < rows && !seen[static_cast<size_t>(row)], where, ": the order is no permutation");
        seen[static_cast<size_t>(row)] = true;
        const int32_t before = r == 0 ? row : order[static_cast<size_t>(table * rows + r) - 1];
        CHECK(costs[static_cast<size_t>(before)] >= costs[static_cast<size_t>(row)], where, ": not by falling cost");
      }
    }
  }
  return shared;
}

// Makes the mask of every part and compares it; the number of parts. shared: tiles that share bits.
int BuildAndCompare(const RandomMask& mask, const cuda::MaskInputs& inputs, const cuda::MaskTile& tile, int64_t most,
                    int* shared = nullptr) {
  const std::string where =
      Text(mask.text, " S ", mask.sizes.S, " T ", mask.sizes.T, " P ", mask.sizes.P, " tile ", tile.m, "x", tile.n);
  cuda::MaskProgram program;
  const Status status = cuda::CompileMask(MaskExpr(), mask.expr, mask.sizes, inputs, &program);
  CHECK(status.ok(), where, ": ", status.message());
  cuda::MaskCuts cuts(program, mask.sizes, tile, most);
  cuda::MaskBuild build;
  build.program = &program, build.sizes = mask.sizes, build.tile = tile, build.sm_count = 4;
  Blocks blocks;
  build.invalid = static_cast<int32_t*>(blocks.Take(4));
  CHECK_CUDA(cudaMemset(build.invalid, 0, 4));
  int parts = 0;
  int64_t covered = 0;
  while (cuts.Next(&build.part)) {
    const size_t bytes = cuda::MaskBytes(build);
    auto* memory = static_cast<unsigned char*>(blocks.Take(bytes + 256));  // 256: a guard
    cuda::DeviceMask view;
    CHECK_CUDA(static_cast<cudaError_t>(cuda::LaunchMaskBuild(build, memory, nullptr, &view)));
    CHECK_CUDA(cudaDeviceSynchronize());
    const int found = CompareMask(mask, build, view, memory + bytes, where);
    if (shared != nullptr) *shared += found;
    for (const unsigned char byte : ToHost(memory + bytes, 256)) CHECK(byte == 0xa5, where, ": written beyond its end");
    covered += build.part.batches * build.part.heads * build.part.rows;
    ++parts;
  }
  CHECK(covered == mask.sizes.B * mask.sizes.H * mask.sizes.S, where, ": parts leave something out");
  CHECK(ToHost(build.invalid, 1)[0] == 0, where, ": taken for broken");
  return parts;
}

const std::vector<cuda::MaskTile> kTiles = {{128, 64}, {256, 64},       {128, 128},      {192, 64},       {128, 160},
                                            {64, 32},  {128, 64, true}, {64, 128, true}, {128, 160, true}};

TEST(CudaMasksEqualTheHosts) {
  int cases = 0, cut = 0;
  for (int seed = 0; seed < Cases(250); ++seed) {
    Random random(static_cast<uint64_t>(seed));
    const RandomMask mask = MakeRandomMask(&random, RandomSizes(&random, seed % 8 == 0 ? 1500 : 400), seed % 3 != 0);
    Blocks blocks;
    const cuda::MaskInputs inputs = OnDevice(mask.operands, &random, &blocks);
    const int64_t most = random.OneIn(3) ? 6000 : int64_t{1} << 27;
    cut += BuildAndCompare(mask, inputs, random.Pick(kTiles), most) > 1 ? 1 : 0;
    ++cases;
  }
  CHECK(cut * 10 > cases, cut, " of ", cases, " were cut");
  CountCases(cases);
}

// Segments, lengths, windows of the sizes that are used, and a program that needs more than a launch carries.
TEST(CudaMasksOfUsualForms) {
  std::string chain = "k <= q";
  for (int i = 0; i < 300; ++i) chain += " and (q * " + std::to_string(i + 2) + " + k) % 997 != 3";
  const char* const texts[] = {"segment_q[b, q - P] == segment_k[b, k] and k <= q",
                               "segment_q[b, q - P] == segment_k[b, k] and abs(q - k) <= 128",
                               "k < lengths[b] and q < lengths[b]",
                               "k <= q and (k < 3 or pad[b, k])",
                               "segment_k[b, min(k, lengths[b])] == 3 and k % 3 != h",
                               "abs(q - k) <= 128 or k < 16 or q < 16",
                               chain.c_str()};
  int cases = 0;
  for (const char* text : texts) {
    for (const int64_t length : {1, 64, 1000, 2048}) {
      Random random(static_cast<uint64_t>(length));
      RandomMask mask;
      mask.text = text, mask.sizes = {2, 2, length, length + 37, 37};
      Status status = MaskExpr::Parse(text, {}, &mask.expr);
      CHECK(status.ok(), status.message());
      std::vector<int64_t> segment_q, segment_k, lengths = {length / 2 + 1, length};
      std::vector<uint8_t> pad;
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t k = 0, id = 0; k < length + 37; ++k) {
          if (random.OneIn(150)) ++id;
          segment_k.push_back(id);
          if (k >= 37) segment_q.push_back(id);
          pad.push_back(k > 50 * b ? 1 : 0);
        }
      }
      auto& runtime = mask.operands.runtime;
      const auto add = [&runtime](const char* name, void* data, DType dtype, std::initializer_list<int64_t> dims) {
        Tensor tensor;
        tensor.data = data, tensor.dtype = dtype, tensor.rank = static_cast<int32_t>(dims.size());
        std::copy(dims.begin(), dims.end(), tensor.dims);
        runtime.emplace_back(name, tensor);
      };
      add("segment_q", segment_q.data(), DType::kI64, {2, length});
      add("segment_k", segment_k.data(), DType::kI64, {2, length + 37});
      add("lengths", lengths.data(), DType::kI64, {2});
      add("pad", pad.data(), DType::kBool, {2, length + 37});
      mask.bindings = Bind(mask.expr, runtime);
      status = mask.expr.Check(mask.sizes, &mask.bindings);
      CHECK(status.ok(), text, ": ", status.message());
      Blocks blocks;
      const cuda::MaskInputs inputs = OnDevice(mask.operands, &random, &blocks);
      BuildAndCompare(mask, inputs, kTiles[static_cast<size_t>(cases) % kTiles.size()], int64_t{1} << 27);
      ++cases;
    }
  }
  CountCases(cases);
}

// Where the distance alone counts, tiles along a diagonal have their bits in one place, but for those that are cut off.
TEST(CudaMasksByDistance) {
  const char* const texts[] = {"(q - k) % 5 != 0",
                               "abs(q - k) <= 256 and (q - k) % 2 == 0",
                               "k <= q and (k - q) % 6 != 4 - h",
                               "q - k == 3 * h or k - q > 1000",
                               "table0[max(min(q - k, 200), 0)] != b and q - k < 900",
                               "(3 * q - 3 * k) // 64 % 2 == 0 or b == 1"};
  int cases = 0, shared = 0, cut = 0;
  for (const char* text : texts) {
    for (const int64_t length : {1, 130, 640, 1000}) {
      for (const cuda::MaskTile& tile : kTiles) {
        Random random(static_cast<uint64_t>(cases));
        RandomMask mask;
        mask.text = text;
        mask.sizes = {2, 2, length, length + random.Range(-length / 2, 300), random.Range(0, 70)};
        std::vector<int64_t> near(201);
        for (int64_t& x : near) x = random.Range(0, 3);
        Tensor tensor;
        tensor.data = near.data(), tensor.dtype = DType::kI64, tensor.rank = 1, tensor.dims[0] = 201;
        if (std::strstr(text, "table0") != nullptr) mask.operands.tables.emplace_back("table0", tensor);
        Status status = MaskExpr::Parse(text, mask.operands.tables, &mask.expr);
        CHECK(status.ok(), text, ": ", status.message());
        mask.bindings = Bind(mask.expr, mask.operands.runtime);
        status = mask.expr.Check(mask.sizes, &mask.bindings);
        CHECK(status.ok(), text, ": ", status.message());
        Blocks blocks;
        const cuda::MaskInputs inputs = OnDevice(mask.operands, &random, &blocks);
        const int64_t most = random.OneIn(3) ? 20000 : int64_t{1} << 27;
        cut += BuildAndCompare(mask, inputs, tile, most, &shared) > 1 ? 1 : 0;
        ++cases;
      }
    }
  }
  CHECK(shared > 2000, shared, " tiles share their bits with another one");
  CHECK(cut * 10 > cases, cut, " of ", cases, " were cut");
  CountCases(cases);
}

// By distance a long mask comes in one piece; another one is cut, and no piece exceeds what was asked for.
TEST(MaskMemoryByDistance) {
  constexpr int64_t kMost = int64_t{128} << 20;
  const ExprSizes sizes = {1, 1, 131072, 131072, 0};
  for (const auto& [text, pieces] : {std::pair<const char*, int>("(q - k) % 5 != 0", 1), {"(q + k) % 5 != 0", 17}}) {
    MaskExpr expr;
    CHECK(MaskExpr::Parse(text, {}, &expr).ok(), text);
    cuda::MaskProgram program;
    CHECK(cuda::CompileMask(MaskExpr(), expr, sizes, {}, &program).ok(), text);
    cuda::MaskBuild build;
    build.program = &program, build.sizes = sizes;
    cuda::MaskCuts cuts(program, sizes, build.tile, kMost);
    int found = 0;
    int64_t rows = 0, most = 0;
    while (cuts.Next(&build.part)) {
      most = std::max(most, static_cast<int64_t>(cuda::MaskBytes(build)));
      rows += build.part.rows;
      ++found;
    }
    // Lists of rows, and room to align, come on top.
    CHECK(found == pieces && rows == sizes.S && most <= kMost + (1 << 20), text, ": ", found, " pieces, ", most,
          " bytes");
  }
  CountCases(2);
}

// ---- the operator's side ----
// A small attention whose values are all 1, so that every row with a key gives 1.
struct Small {
  Blocks blocks;
  AttentionArgs args;
  ExprSizes sizes;
  RunContext context;
  std::shared_ptr<const AttentionMask> mask;

  Small(const std::string& text, int64_t B, int64_t H, int64_t S, int64_t T) {
    args.shape = {B, H, H, S, T, 64, 64, DType::kF16};
    CHECK(Check(args).ok(), Check(args).message());
    args.scores.scale = 0.125f;
    const auto fill = [&](int64_t rows, uint16_t bits) {
      const std::vector<uint16_t> values(static_cast<size_t>(B * H * rows * 64), bits);
      return blocks.Copy(values.data(), 2 * values.size());
    };
    args.query.data = fill(S, 0x3800), args.key.data = fill(T, 0x3400), args.value.data = fill(T, 0x3c00);
    args.output.data = fill(S, 0xffff);
    args.query.stride = args.output.stride = {H * S * 64, S * 64, 64};
    args.key.stride = args.value.stride = {H * T * 64, T * 64, 64};
    sizes = {B, H, S, T, 0};
    const Status status = MakeAttentionMask(text, {}, &mask);
    CHECK(status.ok(), text, ": ", status.message());
    context.on_cuda = true;
    context.allocate = Blocks::Allocate;
    context.self = &blocks;
  }
  Status Run(const Tensor* pad, const Tables& operands) {
    return FindCudaBackend()->attention.run(args, pad, *mask, sizes, operands, context);
  }
  std::vector<uint16_t> Output() {
    CHECK_CUDA(cudaDeviceSynchronize());
    return ToHost(static_cast<const uint16_t*>(args.output.data),
                  static_cast<size_t>(args.shape.B * args.shape.H * args.shape.S * 64));
  }
  void ClearOutput() {
    CHECK_CUDA(
        cudaMemset(args.output.data, 0xff, static_cast<size_t>(args.shape.B * args.shape.H * args.shape.S * 128)));
    CHECK_CUDA(cudaDeviceSynchronize());  // streams of runs wait neither for this nor for copies of operands before it
  }
};

Tensor Vector(void* data, DType dtype, std::initializer_list<int64_t> dims) {
  Tensor tensor;
  tensor.data = data, tensor.dtype = dtype, tensor.rank = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), tensor.dims);
  return tensor;
}

bool AllOf(const std::vector<uint16_t>& values, uint16_t bits) {
  return std::all_of(values.begin(), values.end(), [bits](uint16_t x) { return x == bits; });
}

// Vectors that would have been an error on the host make the output NaN; others do not.
TEST(CudaVectorsThatBreakAMask) {
  int cases = 0;
  for (const int64_t length : {3, 200}) {
    for (const int64_t last : {int64_t{0}, length - 1, length, int64_t{-1}, int64_t{1} << 61}) {
      Small small("segment_k[b, lengths[b]] == 3 and segment_k[b, k] == 3", 2, 3, length, length);
      const std::vector<int64_t> keys(static_cast<size_t>(2 * length), 3), lengths = {0, last};
      const Tables operands = {
          {"segment_k", Vector(small.blocks.Copy(keys.data(), 8 * keys.size()), DType::kI64, {2, length})},
          {"lengths", Vector(small.blocks.Copy(lengths.data(), 16), DType::kI64, {2})}};
      const Status status = small.Run(nullptr, operands);
      CHECK(status.ok(), status.message());
      const bool right = last >= 0 && last < length;
      const std::vector<uint16_t> output = small.Output();
      CHECK(AllOf(output, right ? 0x3c00 : 0x7fff), "length ", length, " index ", last, ": begins with ",
            output.front(), ", ends with ", output.back());
      ++cases;
    }
  }
  Small small("k < lengths[b]", 2, 2, 100, 100);
  Status status = small.Run(nullptr, {});
  CHECK(!status.ok() && status.message().find("lengths") != std::string::npos, status.message());
  const std::vector<float> wrong(2, 1.0f);
  status = small.Run(nullptr, {{"lengths", Vector(small.blocks.Copy(wrong.data(), 8), DType::kF32, {2})}});
  CHECK(!status.ok() && status.message().find("int32 or int64") != std::string::npos, status.message());
  CountCases(cases + 2);
}

// Without any key all rows are zeros, whatever the mask and the policy say.
TEST(CudaWithoutKeys) {
  int cases = 0;
  for (const EmptyRows policy : {EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}) {
    for (const int64_t S : {5, 100}) {
      for (const std::string text : {"", "k <= q", "k < lengths[b]"}) {
        Small small(text, 2, 3, S, 0);
        small.args.mask.empty_rows = policy;
        const std::vector<int64_t> lengths = {0, 0};
        Tables operands;
        if (text == "k < lengths[b]") {
          operands = {{"lengths", Vector(small.blocks.Copy(lengths.data(), 16), DType::kI64, {2})}};
        }
        const Status status = small.Run(nullptr, operands);
        CHECK(status.ok(), text, ": ", status.message());
        CHECK(AllOf(small.Output(), 0), text, " S ", S, " policy ", static_cast<int>(policy));
        ++cases;
      }
    }
  }
  CountCases(cases);
}

// A graph that is captured before anything ran holds the kernels that make the mask, and follows the vectors.
TEST(CudaMasksInCapturedGraphs) {
  int cases = 0;
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const char* text : {"k < lengths[b]", "abs(q - k) <= 7 and k < 150"}) {
    for (const EmptyRows policy : {EmptyRows::kNan, EmptyRows::kMean}) {
      Small small(text, 2, 2, 333, 200);
      small.args.mask.empty_rows = policy;
      small.context.stream = stream;
      std::vector<int64_t> lengths = {200, 100};
      auto* data = static_cast<int64_t*>(small.blocks.Copy(lengths.data(), 16));
      std::vector<uint8_t> ones(400, 1);
      auto* pad_data = static_cast<uint8_t*>(small.blocks.Copy(ones.data(), 400));
      const Tensor pad = Vector(pad_data, DType::kBool, {2, 200});
      // The workspace comes from before the capture, as an arena's does.
      void* spare = small.blocks.Take(8 << 20);
      struct Arena {
        char* next;
      } arena{static_cast<char*>(spare)};
      small.context.self = &arena;
      small.context.allocate = [](void* self, size_t bytes) -> void* {
        char*& next = static_cast<Arena*>(self)->next;
        char* block = next;
        next += (bytes + 255) / 256 * 256;
        return block;
      };
      {  // another length, so that the kernels are loaded and the mask is not there
        Small other(text, 2, 2, 334, 200);
        other.args.mask.empty_rows = policy;
        const Status status = other.Run(&pad, {{"lengths", Vector(data, DType::kI64, {2})}});
        CHECK(status.ok(), text, ": ", status.message());
        CHECK_CUDA(cudaDeviceSynchronize());
      }
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
      const Status status = small.Run(&pad, {{"lengths", Vector(data, DType::kI64, {2})}});
      CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
      CHECK(status.ok(), text, ": ", status.message());
      CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
      for (const int64_t length : {200, 0, 1, 64}) {
        lengths = {length, 200 - length};
        CHECK_CUDA(cudaMemcpy(data, lengths.data(), 16, cudaMemcpyHostToDevice));
        small.ClearOutput();
        CHECK_CUDA(cudaGraphLaunch(executable, stream));
        CHECK_CUDA(cudaStreamSynchronize(stream));
        const auto output = small.Output();
        for (size_t i = 0; i < output.size(); ++i) {
          const int64_t row = static_cast<int64_t>(i) / 64 % 333, b = static_cast<int64_t>(i) / 64 / 333 / 2;
          const bool empty = text[0] == 'k' ? lengths[static_cast<size_t>(b)] == 0 : row > 156;
          const bool is_nan = (output[i] & 0x7fff) > 0x7c00;
          CHECK(empty && policy == EmptyRows::kNan ? is_nan : output[i] == 0x3c00, text, " length ", length, " b ", b,
                " row ", row, ": ", output[i]);
        }
        ++cases;
      }
      CHECK_CUDA(cudaGraphExecDestroy(executable));
      CHECK_CUDA(cudaGraphDestroy(graph));
    }
  }
  CHECK_CUDA(cudaStreamDestroy(stream));
  CountCases(cases);
}

TEST(CudaRunsWithoutMemoryAreErrors) {
  const std::vector<int64_t> lengths = {50};
  const std::vector<uint8_t> ones(100, 1);
  int cases = 0;
  for (const char* text : {"k < lengths[b]", "k <= q", ""}) {
    Small small(text, 1, 1, 100, 100);
    const Tensor pad = Vector(small.blocks.Copy(ones.data(), 100), DType::kBool, {1, 100});
    const Tables operands = {{"lengths", Vector(small.blocks.Copy(lengths.data(), 8), DType::kI64, {1})}};
    small.context.allocate = [](void*, size_t) -> void* { return nullptr; };
    const Status status = small.Run(&pad, operands);
    CHECK(!status.ok() && status.message().find("no device memory for") != std::string::npos, text, ": ",
          status.message());
    CHECK(AllOf(small.Output(), 0xffff), text, ": written all the same");
    ++cases;
  }
  CHECK(cudaGetLastError() == cudaSuccess);
  CountCases(cases);
}

// More batches than one side of a grid has.
TEST(CudaPaddingOfManyBatches) {
  constexpr int64_t kBatches = 70000;
  Small small("", kBatches, 1, 1, 40);
  std::vector<uint8_t> pad(kBatches * 40, 1);
  for (int64_t b = 0; b < kBatches; b += 3) std::fill_n(pad.begin() + 40 * b, 40, static_cast<uint8_t>(0));
  const Tensor given = Vector(small.blocks.Copy(pad.data(), pad.size()), DType::kU8, {kBatches, 40});
  const Status status = small.Run(&given, {});
  CHECK(status.ok(), status.message());
  const auto output = small.Output();
  for (size_t i = 0; i < output.size(); ++i) {
    CHECK(output[i] == (i / 64 % 3 == 0 ? 0 : 0x3c00), "batch ", i / 64, ": ", output[i]);
  }
  CountCases(kBatches);
}

TEST(CudaMaskCacheForgetsTheOldest) {
  cuda::DeviceMaskCache cache(200000);
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::shared_ptr<const AttentionMask> mask;
  CHECK(MakeAttentionMask("(q * 7 + k * k) % 11 < 5", {}, &mask).ok());
  const auto get = [&](int64_t length, bool* missing) {
    std::shared_ptr<const cuda::MaskEntry> entry;
    const Status status = cache.Get(mask->parts.fixed, mask->fixed_hash, {1, 1, length, length, 0}, cuda::MaskForm(),
                                    stream, nullptr, false, &entry, missing);
    CHECK(status.ok(), status.message());
    return entry;
  };
  const auto captured = [&](int64_t length) {
    bool missing = false;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    const auto entry = get(length, &missing);
    cudaGraph_t graph = nullptr;
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK(missing == (entry == nullptr));
    return entry;
  };
  bool missing = false;
  const auto first = get(512, &missing);  // about 32 tiles of 1 KiB
  const int64_t each = first->bytes();
  CHECK(each > 30000 && 6 * each < 260000, each);
  CHECK(captured(512) == first && captured(400) == nullptr);
  auto stats = cache.GetStats();
  CHECK(stats.entries == 0 && stats.bytes == 0 && stats.pinned_entries == 1 && stats.pinned_bytes == each);
  // Pinned masks do not take the room of others.
  const auto second = get(513, &missing);
  const int64_t more = second->bytes();
  for (int64_t length = 514; length < 514 + 200000 / more - 1; ++length) get(length, &missing);
  CHECK(get(513, &missing) == second);
  stats = cache.GetStats();
  CHECK(stats.bytes <= 200000 && stats.entries >= 200000 / more - 1, stats.bytes, " ", stats.entries);
  // 513 is now the youngest: 514 goes first, and pinned ones never.
  for (int64_t length = 600; length < 602; ++length) get(length, &missing);
  CHECK(captured(514) == nullptr);
  CHECK(captured(513) == second && captured(512) == first);
  // One that exceeds the capacity by itself is kept while it is the youngest.
  CHECK(get(9000, &missing) != nullptr && cache.GetStats().entries == 1);
  CHECK_CUDA(cudaStreamDestroy(stream));
  CountCases(8);
}

// Masks of keepers do not count, are found as long as a keeper lives, and are freed with the last one.
TEST(CudaMaskCacheLetsGoWithItsKeepers) {
  cuda::DeviceMaskCache cache(200000);
  std::shared_ptr<const AttentionMask> mask;
  CHECK(MakeAttentionMask("(q * 7 + k * k) % 11 < 5", {}, &mask).ok());
  const auto get = [&](int64_t length, Keeper* keeper) {
    std::shared_ptr<const cuda::MaskEntry> entry;
    bool missing = false;
    const Status status = cache.Get(mask->parts.fixed, mask->fixed_hash, {1, 1, length, length, 0}, cuda::MaskForm(),
                                    nullptr, keeper, keeper != nullptr, &entry, &missing);
    CHECK(status.ok() && !missing, status.message());
    return std::weak_ptr<const cuda::MaskEntry>(entry);
  };
  auto first = std::make_unique<Keeper>(), second = std::make_unique<Keeper>();
  const auto kept = get(512, first.get());
  const auto shared = get(513, nullptr);
  CHECK(!kept.expired() && !shared.expired());
  CHECK(get(513, first.get()).lock() == shared.lock() && get(513, second.get()).lock() == shared.lock());
  auto stats = cache.GetStats();
  CHECK(stats.entries == 0 && stats.bytes == 0 && stats.pinned_entries == 2, stats.entries, " ", stats.pinned_entries);
  for (int64_t length = 600; length < 612; ++length) get(length, nullptr);  // more than the cache holds
  CHECK(get(512, nullptr).lock() == kept.lock() && get(513, nullptr).lock() == shared.lock());
  first.reset();
  CHECK(kept.expired() && !shared.expired());
  CHECK(cache.GetStats().pinned_entries == 1);
  second.reset();
  CHECK(shared.expired() && cache.GetStats().pinned_entries == 0 && cache.GetStats().pinned_bytes == 0);
  CHECK(!get(513, nullptr).expired() && cache.GetStats().bytes <= 200000);  // made again, as others are
  CountCases(5);
}

// Capturing a run to have its kernels loaded finds its mask, and holds nothing.
TEST(CudaMasksAreNotHeldForLoading) {
  struct Loader {
    cuda::DeviceMaskCache cache{200000};
    std::shared_ptr<const AttentionMask> mask;
    int runs = 0;
    Status Get(cudaStream_t stream, bool* missing) {
      std::shared_ptr<const cuda::MaskEntry> entry;
      return cache.Get(mask->parts.fixed, mask->fixed_hash, {1, 1, 512, 512, 0}, cuda::MaskForm(), stream, nullptr,
                       false, &entry, missing);
    }
    static Status Queue(void* self, const RunContext& context) {
      auto& loader = *static_cast<Loader*>(self);
      ++loader.runs;
      bool missing = false;
      STOF_RETURN_IF_ERROR(loader.Get(static_cast<cudaStream_t>(context.stream), &missing));
      return missing || !cuda::IsOnlyLoading() ? Status::Error("not found") : Status();
    }
  } loader;
  CHECK(MakeAttentionMask("(q * 7 + k * k) % 11 < 5", {}, &loader.mask).ok());
  bool missing = false;
  CHECK(loader.Get(nullptr, &missing).ok());
  for (int i = 0; i < 2; ++i) {
    const Status status = cuda::LoadKernels(0x5eed, Loader::Queue, &loader, RunContext());
    CHECK(status.ok(), status.message());
  }
  CHECK(loader.runs == 1 && !cuda::IsOnlyLoading());
  CHECK(loader.cache.GetStats().pinned_entries == 0 && loader.cache.GetStats().entries == 1);
  CountCases(2);
}

// Non-finite inputs. Every kernel: NaN in a query stays in its row; keys that nobody may attend may hold anything;
// their values may where a whole tile of every kernel is forbidden (640 keys here).
TEST(CudaNonFiniteInputsStayWhereTheyAre) {
  int cases = 0;
  for (const char* kernel : {"", "0", "1", "2"}) {
    const ForcedKernel forced(cuda::AttentionRequests(), kernel);
    for (const bool dynamic : {false, true}) {
      Small small(dynamic ? "k < lengths[b]" : "k < 640", 1, 2, 300, 1280);
      const std::vector<int64_t> lengths = {640};
      const Tables operands = {{"lengths", Vector(small.blocks.Copy(lengths.data(), 8), DType::kI64, {1})}};
      std::vector<uint16_t> key(2 * 1280 * 64, 0x3400), value(2 * 1280 * 64, 0x3c00), query(2 * 300 * 64, 0x3800);
      for (size_t i = 0; i < key.size(); ++i) {
        if (i / 64 % 1280 < 640) continue;
        key[i] = i % 3 == 0 ? 0x7e00 : i % 3 == 1 ? 0x7c00 : 0xfc00;
        value[i] = i % 2 == 0 ? 0x7e00 : 0x7c00;
      }
      for (size_t i = 0; i < query.size(); ++i) {
        const size_t row = i / 64 % 300;
        if (row == 17) query[i] = 0x7e00;
        if (row == 18 && i % 64 == 5) query[i] = 0x7c00;  // every score +inf
        if (row == 19 && i % 64 == 5) query[i] = 0xfc00;  // every score -inf
      }
      small.args.key.data = small.blocks.Copy(key.data(), 2 * key.size());
      small.args.value.data = small.blocks.Copy(value.data(), 2 * value.size());
      small.args.query.data = small.blocks.Copy(query.data(), 2 * query.size());
      const Status status = small.Run(nullptr, operands);
      CHECK(status.ok(), status.message());
      const auto output = small.Output();
      for (size_t i = 0; i < output.size(); ++i) {
        const size_t row = i / 64 % 300;
        if (row == 19) {  // all scores are -inf: taken for a row without keys
          CHECK(output[i] == 0, "kernel '", kernel, "' dynamic ", dynamic, " row 19: ", output[i]);
          continue;
        }
        const bool is_nan = (output[i] & 0x7fff) > 0x7c00;
        CHECK(row == 17 || row == 18 ? is_nan : output[i] == 0x3c00, "kernel '", kernel, "' dynamic ", dynamic, " row ",
              row, ": ", output[i]);
      }
      ++cases;
    }
  }
  CountCases(cases);
}

}  // namespace
}  // namespace stof::test
