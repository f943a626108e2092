// SPDX-License-Identifier: Apache-2.0
// Kernel requests: their parsing, their order, what they choose; the choice by the model. Needs no device.
#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/attention/families.h"
#include "cuda/attention/fp32/api.h"
#include "cuda/attention/select.h"
#include "cuda/attention/sm80/api.h"
#include "cuda/attention/workspace_bounds.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

cuda::KernelProblem Problem(int head_size, cuda::ScoreMod score_mod = cuda::ScoreMod::kNone, int capability = 90) {
  cuda::KernelProblem problem;
  problem.capability = capability;
  problem.head_size = head_size;
  problem.queries = 512;
  problem.has_softcap_or_bias = score_mod != cuda::ScoreMod::kNone;
  problem.has_full_bias = score_mod == cuda::ScoreMod::kFullBias;
  return problem;
}

cuda::KernelTable Kernels(cuda::KernelRole role, const cuda::KernelProblem& problem) {
  cuda::KernelTable kernels;
  cuda::FindFamily(role, problem, &kernels);
  return kernels;
}

cuda::KernelTable Scheduled(int head_size, cuda::ScoreMod score_mod = cuda::ScoreMod::kNone) {
  return Kernels(cuda::KernelRole::kScheduled, Problem(head_size, score_mod));
}

cuda::KernelRequest Named(const std::string& name) {
  cuda::KernelRequest request;
  request.name = name;
  return request;
}
cuda::KernelRequest Numbered(int number) {
  cuda::KernelRequest request;
  request.number = number;
  return request;
}
cuda::KernelRequest OfTactic(int tactic) {
  cuda::KernelRequest request;
  request.tactic = tactic;
  return request;
}

// The name of the chosen kernel, or the error.
std::string Choose(const cuda::KernelRequest& request, const cuda::KernelProblem& problem,
                   const MaskExpr* mask = nullptr) {
  cuda::SelectionProblem selection;
  selection.mask = mask;
  selection.hash = mask == nullptr ? 0 : mask->Hash();
  selection.sizes = {1, 16, problem.queries, problem.queries, 0};
  selection.head_bytes = problem.head_size * (problem.dtype == DType::kF32 ? 4 : 2);
  selection.is_fp32 = problem.dtype == DType::kF32;
  selection.sm_count = 132;
  cuda::AttentionPlan plan;
  const Status status = cuda::ChooseKernel(request, problem, selection, &plan);
  return status.ok() ? cuda::KernelName(*plan.kernel) : status.message();
}

TEST(KernelChoiceParsesRequests) {
  const std::vector<std::string> names = {"sm80", "rows", "sm90-128x64x2"};
  constexpr char kExpected[] = "', expected a number or one of sm80 rows sm90-128x64x2";
  const auto parse = [&names](const std::string& text, cuda::KernelRequest* request) {
    return cuda::ParseKernelRequest(text, "the variable", names, request);
  };
  cuda::KernelRequest request;
  CHECK(parse("", &request).ok() && request.is_empty());
  for (const int number : {0, 7, 999}) {
    CHECK(parse(std::to_string(number), &request).ok() && request == Numbered(number), number);
  }
  for (const std::string& name : names) CHECK(parse(name, &request).ok() && request == Named(name), name);
  for (const char* wrong : {"-1", "4a", "SM80", "sm90", "sm90-1x1x1", "1000", " "}) {
    const Status status = parse(wrong, &request);
    CHECK(!status.ok() && request.is_empty(), wrong);
    CHECK(status.message() == "the variable is '" + std::string(wrong) + kExpected, status.message());
  }
  CountCases(14);
}

// A test's request, then a tactic, the attribute, the environment.
TEST(KernelChoiceOrdersRequests) {
  const cuda::KernelRequest none, forced = Named("rows"), environment = Numbered(3);
  CHECK(cuda::ResolveKernelRequest(none, 0, "", none).is_empty());
  CHECK(cuda::ResolveKernelRequest(none, 0, "", environment) == environment);
  CHECK(cuda::ResolveKernelRequest(none, 0, "sm80", environment) == Named("sm80"));
  CHECK(cuda::ResolveKernelRequest(none, 2, "sm80", environment) == OfTactic(2));
  CHECK(cuda::ResolveKernelRequest(forced, 2, "sm80", environment) == forced);
  CountCases(5);
}

TEST(KernelChoiceTakesForcedKernelsFirst) {
  cuda::KernelRequest request;
  CHECK(cuda::AttentionRequests().Force("rows").ok());
  CHECK(cuda::AttentionRequests().Get("sm80", 2, &request).ok() && request == Named("rows"));
  // An error leaves the request as it was, and lists the names.
  const Status status = cuda::AttentionRequests().Force("row");
  CHECK(!status.ok() && status.message().find("the forced kernel is 'row'") == 0, status.message());
  for (const std::string& name : cuda::ListAllKernelNames()) {
    CHECK(status.message().find(" " + name) != std::string::npos, name, ": ", status.message());
  }
  CHECK(cuda::AttentionRequests().Get("sm80", 0, &request).ok() && request == Named("rows"));
  CHECK(cuda::AttentionRequests().Force("5").ok());
  CHECK(cuda::AttentionRequests().Get("sm80", 0, &request).ok() && request == Numbered(5));
  cuda::AttentionRequests().Release();
  CHECK(cuda::AttentionRequests().Get("sm80", 0, &request).ok() && request == Named("sm80"));
  CountCases(5);
}

TEST(KernelChoiceNamesAreUnique) {
  const std::vector<std::string> names = cuda::ListAllKernelNames();
  CHECK(std::set<std::string>(names.begin(), names.end()).size() == names.size());
  for (const char* name : {"sm80", "rows", "fp32", "decode-splitkv", "decode-cluster"}) {
    CHECK(std::count(names.begin(), names.end(), name) == 1, name);
  }
  int64_t cases = 0;
  for (const int head_size : {64, 128, 192, 256}) {
    for (const cuda::ScoreMod score_mod :
         {cuda::ScoreMod::kNone, cuda::ScoreMod::kRelativeBias, cuda::ScoreMod::kFullBias}) {
      std::set<std::string> own;
      for (const cuda::KernelEntry& kernel : Scheduled(head_size, score_mod)) {
        const std::string name = cuda::KernelName(kernel);
        CHECK(own.insert(name).second && std::count(names.begin(), names.end(), name) == 1, name);
        CHECK(kernel.head_size == head_size && kernel.is_scheduled && kernel.code != nullptr, name);
        ++cases;
      }
    }
  }
  CountCases(cases);
}

// A request that does not fit leaves the choice to the library.
TEST(KernelChoiceTakesWhatFits) {
  const cuda::KernelProblem plain = Problem(64);
  MaskExpr causal, scattered;
  CHECK(MaskExpr::Parse("k <= q", {}, &causal).ok() && MaskExpr::Parse("(q - k) % 128 == 0", {}, &scattered).ok());
  CHECK(Choose(Named("sm80"), plain) == "sm80" && Choose(Named("rows"), plain) == "rows");
  CHECK(Choose(Named("sm90-1x1x1"), Problem(64, cuda::ScoreMod::kNone, 80)) == "sm80");
  CHECK(Choose(Named("sm80"), Problem(300)) == "no CUDA kernel for head size 300");
  // Few queries: a decode kernel, unless the row-wise one is named.
  cuda::KernelProblem few = plain;
  few.queries = few.packed_queries = 1;
  CHECK(Choose({}, few).find("decode-") == 0 && Choose(Named("sm80"), few).find("decode-") == 0);
  CHECK(Choose(Named("rows"), few) == "rows");
  const cuda::KernelTable decode = Kernels(cuda::KernelRole::kDecode, few);
  CHECK(cuda::FindRequested(decode, Numbered(1)) == &decode[1] && cuda::FindRequested(decode, Numbered(2)) == nullptr);
  CHECK(cuda::FindRequested(decode, Named("decode-cluster")) == &decode[1]);
  // fp32: rows that cannot be read 16 bytes at a time leave the fp32 kernel alone.
  cuda::KernelProblem fp32 = plain;
  fp32.dtype = DType::kF32;
  CHECK(Choose({}, fp32) == "fp32" && Choose(Named("sm80"), fp32) == "fp32" && Choose(Named("rows"), fp32) == "rows");
  fp32.has_aligned_rows = false;
  CHECK(Choose(Named("rows"), fp32) == "fp32");
  // A name or a tactic excludes the row-wise kernel, a number does not.
  cuda::KernelProblem sm80 = Problem(64, cuda::ScoreMod::kNone, 80);
  sm80.queries = 4096;
  CHECK(Choose({}, sm80, &scattered) == "rows" && Choose(Numbered(0), sm80, &scattered) == "rows");
  CHECK(Choose(Named("sm80"), sm80, &scattered) == "sm80" && Choose(OfTactic(1), sm80, &scattered) == "sm80");
  CHECK(Choose({}, sm80, &causal) == "sm80");
  const cuda::KernelTable scheduled = Scheduled(64);
  for (int i = 0; i < scheduled.size(); ++i) {
    const std::string name = cuda::KernelName(scheduled[i]);
    CHECK(Choose(Numbered(i), plain) == name && Choose(Named(name), plain) == name, name);
    CHECK(Choose(OfTactic(2 + i), plain, &scattered) == name && Choose(Named(name), plain, &scattered) == name, name);
  }
  if (scheduled.size() > 0) {
    const std::string free = Choose({}, plain, &causal);
    CHECK(free.find("sm90-") == 0, free);
    CHECK(Choose(OfTactic(1), plain, &causal) == "sm80");
    for (const cuda::KernelRequest& other :
         {Numbered(99), OfTactic(99), Named("sm90-1x1x1"), Named("decode-cluster")}) {
      CHECK(Choose(other, plain, &causal) == free, other.name);
    }
  }
  CountCases(16 + scheduled.size());
}

// The choice is the first kernel of least predicted time, although most predictions are skipped.
TEST(KernelChoiceIsTheLeastPredicted) {
  int64_t cases = 0;
  std::set<const cuda::KernelEntry*> chosen;
  for (const char* text : {"k <= q", "abs(q - k) <= 45", "abs(q - k) <= 45 or k < 45 or q < 45",
                           "k <= q and (q // 64 - k // 64 < 4 or (k // 64 + h) % 8 == 0)",
                           "(37 * (q // 128) + 25 * (k // 128) + 7 * (q // 128) * (k // 128)) % 61 < 7"}) {
    MaskExpr expr;
    CHECK(MaskExpr::Parse(text, {}, &expr).ok(), text);
    for (const auto& [B, H] : {std::pair<int64_t, int64_t>(1, 12), {8, 12}, {1, 32}, {3, 5}}) {
      for (const int64_t length : {64, 200, 512, 1024, 2048}) {
        for (const int64_t size : {64, 128}) {
          const cuda::KernelTable kernels = Scheduled(static_cast<int>(size));
          if (kernels.size() == 0) continue;
          cuda::SelectionProblem problem;
          problem.mask = &expr;
          problem.hash = static_cast<uint64_t>(++cases);
          problem.sizes = {B, H, length, length, 0};
          problem.l2_heads = std::max<int64_t>(1, (int64_t{25} << 20) / (4 * length * size));
          problem.kv_bytes = 4 * B * H * length * size;
          problem.sm_count = 132;
          const cuda::KernelEntry* best = nullptr;
          int64_t least = std::numeric_limits<int64_t>::max();
          for (const cuda::KernelEntry& kernel : kernels) {
            int64_t nanoseconds = 0;
            CHECK(cuda::Predict(kernel, problem, &nanoseconds).ok(), text);
            if (nanoseconds < least) least = nanoseconds, best = &kernel;
          }
          const cuda::KernelEntry* selected = nullptr;
          CHECK(cuda::Select(kernels, problem, &selected).ok() && selected == best, text, " B ", B, " H ", H, " S ",
                length, " D ", size, ": ", cuda::KernelName(*selected), ", the least is ", cuda::KernelName(*best));
          chosen.insert(selected);
        }
      }
    }
  }
  CHECK(cases == 0 || chosen.size() >= 6, chosen.size(), " kernels are chosen");
  CountCases(cases);
}

cuda::DeviceProperties Device(int cta_kib, int sm_kib) {
  cuda::DeviceProperties device;
  device.capability = 90, device.sm_count = 132;
  device.cta_shared_bytes = 1024 * cta_kib, device.sm_shared_bytes = 1024 * sm_kib;
  return device;
}

// "64 rows, 2 stages" of a CTA, or "none".
std::string PrintSize(const cuda::AttentionPlan& plan, bool has_one) {
  return has_one ? std::to_string(plan.rows) + " rows, " + std::to_string(plan.stages) + " stages" : "none";
}

std::string Sm80Size(int head_size, int heads, const cuda::DeviceProperties& device,
                     cuda::ScoreMod score_mod = cuda::ScoreMod::kNone, bool has_relative_terms = false,
                     bool has_parts = false) {
  cuda::KernelProblem problem = Problem(head_size, score_mod);
  problem.has_relative_terms = has_relative_terms;
  const cuda::KernelTable kernels = Kernels(cuda::KernelRole::kTiled, problem);
  cuda::AttentionPlan plan;
  plan.kernel = kernels.begin();
  cuda::AttentionParams params;
  params.B = 1, params.H = heads, params.S = 512;  // four tiles a head
  return PrintSize(plan, cuda::ChooseSm80Size(params, has_parts, device, &plan));
}

// Only the tiled kernels have relative terms, whatever the problem.
TEST(KernelChoiceOfRelativeTerms) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (const int head_size : {8, 64, 128, 160, 256}) {
      for (const int64_t queries : {1, 700}) {
        cuda::KernelProblem problem = Problem(head_size);
        problem.dtype = dtype, problem.capability = 90;
        problem.queries = problem.packed_queries = queries;
        problem.has_relative_terms = true;
        cuda::KernelTable kernels;
        for (const auto role : {cuda::KernelRole::kDecode, cuda::KernelRole::kScheduled, cuda::KernelRole::kRowwise}) {
          CHECK(cuda::FindFamily(role, problem, &kernels) == nullptr);
        }
        CHECK(cuda::FindFamily(cuda::KernelRole::kTiled, problem, &kernels) != nullptr && kernels.size() == 1);
        const std::string name = cuda::KernelName(kernels[0]);
        CHECK(name == (dtype == DType::kF32 ? "fp32" : "sm80"), name);
        CHECK(kernels[0].head_size >= head_size);
      }
    }
  }
  CountCases(30);
}

TEST(KernelChoicePicksSizesOfCtas) {
  const cuda::DeviceProperties large = Device(227, 228), small = Device(99, 100);
  // Few tiles an SM: CTAs of half a tile.
  CHECK(Sm80Size(64, 99, large) == "64 rows, 2 stages", Sm80Size(64, 99, large));
  CHECK(Sm80Size(64, 100, large) == "128 rows, 2 stages", Sm80Size(64, 100, large));
  CHECK(Sm80Size(128, 33, large) == "64 rows, 2 stages", Sm80Size(128, 33, large));
  CHECK(Sm80Size(128, 34, large) == "128 rows, 1 stages", Sm80Size(128, 34, large));
  CHECK(Sm80Size(128, 999, large, cuda::ScoreMod::kRelativeBias) == "64 rows, 2 stages");
  // Large heads: two CTAs of half a tile where shared memory has room for them, else one of a tile.
  CHECK(Sm80Size(256, 999, large) == "64 rows, 1 stages", Sm80Size(256, 999, large));
  CHECK(Sm80Size(256, 1, small) == "128 rows, 0 stages", Sm80Size(256, 1, small));
  CHECK(Sm80Size(256, 1, Device(48, 48)) == "none", Sm80Size(256, 1, Device(48, 48)));

  // Relative terms: whole tiles of small heads alone, half tiles with parts of positions, and one CTA an SM where
  // memory is short.
  const auto relative_size = [](int head_size, int heads, const cuda::DeviceProperties& device,
                                bool has_parts = false) {
    return Sm80Size(head_size, heads, device, cuda::ScoreMod::kNone, true, has_parts);
  };
  CHECK(relative_size(64, 96, large) == "64 rows, 1 stages", relative_size(64, 96, large));
  CHECK(relative_size(64, 100, large) == "128 rows, 1 stages", relative_size(64, 100, large));
  CHECK(relative_size(64, 128, large) == "128 rows, 1 stages", relative_size(64, 128, large));
  CHECK(relative_size(64, 128, large, true) == "64 rows, 1 stages", relative_size(64, 128, large, true));
  CHECK(relative_size(96, 999, large) == "64 rows, 1 stages", relative_size(96, 999, large));
  CHECK(relative_size(256, 999, large) == "64 rows, 1 stages", relative_size(256, 999, large));
  CHECK(relative_size(256, 1, small) == "64 rows, 1 stages", relative_size(256, 1, small));
  CHECK(relative_size(256, 1, Device(48, 48)) == "none", relative_size(256, 1, Device(48, 48)));

  const auto fp32_size = [](int head_size, int heads, int T, bool has_score_mod, const cuda::DeviceProperties& device) {
    cuda::KernelProblem problem = Problem(head_size);
    problem.dtype = DType::kF32;
    const cuda::KernelTable kernels = Kernels(cuda::KernelRole::kTiled, problem);
    cuda::AttentionPlan plan;
    plan.kernel = kernels.begin();
    cuda::AttentionParams params;
    params.B = 1, params.H = heads, params.S = 512, params.T = T;
    return PrintSize(plan, cuda::ChooseFp32Size(params, has_score_mod, device, &plan));
  };
  // Many KV tiles and many CTAs: 128 rows.
  CHECK(fp32_size(64, 66, 64 * 24, false, large).find("128 rows") == 0, fp32_size(64, 66, 64 * 24, false, large));
  CHECK(fp32_size(64, 65, 64 * 24, false, large).find("64 rows") == 0, fp32_size(64, 65, 64 * 24, false, large));
  CHECK(fp32_size(64, 66, 64 * 23, false, large).find("64 rows") == 0, fp32_size(64, 66, 64 * 23, false, large));
  CHECK(fp32_size(64, 66, 64 * 24, true, large).find("64 rows") == 0, fp32_size(64, 66, 64 * 24, true, large));
  CHECK(fp32_size(256, 66, 64 * 24, false, large) == "64 rows, 1 stages", fp32_size(256, 66, 64 * 24, false, large));
  CHECK(fp32_size(256, 66, 64 * 24, false, small) == "32 rows, 0 stages", fp32_size(256, 66, 64 * 24, false, small));
  CHECK(fp32_size(256, 66, 64 * 24, false, Device(48, 48)) == "none");
  CountCases(20);
}

// Plans for runtimes hold what any run of the same sizes or smaller ones asks for.
TEST(KernelChoiceBoundsWorkspaces) {
  AttentionMask mask;
  int64_t cases = 0;
  Random random(7);
  for (int i = 0; i < 2000; ++i) {
    AttentionArgs args;
    args.shape.dtype = DType::kF32;
    args.shape.B = random.Range(1, 5), args.shape.G = random.Range(1, 4), args.shape.H = 2 * args.shape.G;
    args.shape.S = random.Range(1, 40), args.shape.T = random.Range(1, 9000);
    args.shape.D = random.Range(1, 256), args.shape.Dv = random.Range(1, 256);
    const AttentionShape& shape = args.shape;
    const int64_t tiles = shape.B * shape.G * ((shape.T + 63) / 64);
    cuda::KernelProblem problem;
    problem.dtype = DType::kF32;
    problem.head_size = static_cast<int>(std::max(shape.D, shape.Dv));
    const cuda::KernelEntry kernel = Kernels(cuda::KernelRole::kTiled, problem)[0];
    // Keys and values, high and low parts of fp16; a factor a key and one a value tile.
    const int64_t fp32 = tiles * (2 * 2 * 2 * 64 * kernel.head_size + 4 * 64 + 4);
    CHECK(cuda::BoundFp32Workspace(args, mask) == fp32, "head size ", problem.head_size);
    // Sums, states and flags of as many splits as there are KV tiles, up to 128 and 16 MiB, but at least one.
    const int64_t rows = shape.B * shape.H * std::min<int64_t>(shape.S, 16);
    const int64_t splits = std::min<int64_t>(128, (shape.T + 63) / 64);
    const int64_t one = rows * (4 * shape.Dv + 12), all = rows * (splits * (4 * shape.Dv + 8) + 4);
    CHECK(cuda::BoundDecodeWorkspace(args, mask) == std::max(one, std::min<int64_t>(all, 16 << 20)));
    ++cases;
  }
  CountCases(cases);
}

}  // namespace
}  // namespace stof::test
