// SPDX-License-Identifier: Apache-2.0
// Kernel requests: their parsing, their order, what they choose; the choice by the model. Needs no device.
#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/attention/families.h"
#include "cuda/attention/select.h"
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
  cuda::KernelChoice choice;
  const Status status = cuda::ChooseKernel(request, problem, selection, &choice);
  return status.ok() ? cuda::KernelName(*choice.kernel) : status.message();
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

}  // namespace
}  // namespace stof::test
