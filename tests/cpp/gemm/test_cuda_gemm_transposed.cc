// SPDX-License-Identifier: Apache-2.0
// GEMMs on a device whose right operand is [N, K]: every kernel against fp64. StofGemm has no such operand: the tests
// call RunGemm. Guard bands and the gaps between rows of b hold NaN: what reads them shows it.
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/gemm/choose.h"
#include "cuda/gemm/cublaslt_gemm.h"
#include "cuda/gemm/gemm.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/forced_kernel.h"
#include "tests/cpp/gemm/device_gemm.h"
#include "tests/cpp/gemm/gemm_cases.h"

namespace stof::test {
namespace {

using namespace gemm;

// [K, N] as [N, K], rows `stride` elements apart, gaps of poison.
std::vector<char> Transposed(const Host& b, int64_t N, int64_t K, int64_t stride) {
  std::vector<char> bytes(static_cast<size_t>(2 * N * stride), kPoison);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t k = 0; k < K; ++k) std::memcpy(&bytes[2 * (n * stride + k)], &b.bytes[2 * (k * N + n)], 2);
  }
  return bytes;
}

// Whether the library runs 9.0 kernels here.
bool IsSm90() {
  static const bool is_sm90 = [] {
    int device = 0, major = 0, minor = 0;
    CHECK_CUDA(cudaGetDevice(&device));
    CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CHECK_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    const char* const most = std::getenv("STOF_CUDA_CAPABILITY");
    if (most != nullptr && std::atoi(most) >= 80 && std::atoi(most) < 90) return false;
    return major == 9 && minor == 0 && cuda::FindGemmSm90(cuda::GemmProblem()).size() > 0;
  }();
  return is_sm90;
}

int SmCount() {
  int device = 0, count = 0;
  CHECK_CUDA(cudaGetDevice(&device));
  CHECK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// The kernels that may be forced for args by name, and "", the library's choice; where STOF_CUDA_GEMM is set, "" alone.
std::vector<std::string> KernelsFor(const GemmArgs& args, bool reads_vectors) {
  std::vector<std::string> kernels = {""};
  if (std::getenv("STOF_CUDA_GEMM") != nullptr) return kernels;
  kernels.emplace_back("sm80");
  if (!reads_vectors) return kernels;
  if (IsSm90()) {
    cuda::GemmProblem problem;
    problem.dtype = args.dtype, problem.is_b_transposed = args.is_b_transposed;
    for (const cuda::GemmKernelEntry& kernel : cuda::FindGemmSm90(problem)) kernels.push_back(KernelName(kernel));
  }
  if (cuda::CanUseCublasLt(args)) kernels.emplace_back("cublaslt");
  return kernels;
}

// A problem on the device. c.pair is 0.
class DeviceProblem {
 public:
  // stride: of b's rows, elements. is_b_transposed false: the same problem with b as [K, N], whose rows are N apart.
  // workspace: GemmArgs::most_workspace.
  DeviceProblem(const Case& c, int64_t stride, bool is_b_transposed, size_t workspace = kGemmWorkspace)
      : problem_(Make(c)),
        shift_(c.shifted ? 2 : 0),
        output_(static_cast<size_t>(2 * c.M() * c.N), shift_),
        workspace_(workspace),
        name_(" stride " + std::to_string(stride) + (is_b_transposed ? " [N, K]" : " [K, N]")) {
    args_.M = c.M(), args_.N = c.N, args_.K = c.K, args_.dtype = c.dtype, args_.activation = c.activation;
    args_.is_b_transposed = is_b_transposed;
    args_.stride = is_b_transposed ? stride : c.N;
    args_.most_workspace = workspace;
    const Host& b = problem_.inputs[1];
    args_.a = Place(problem_.inputs[0].bytes);
    args_.b0 = Place(is_b_transposed ? Transposed(b, c.N, c.K, stride) : b.bytes);
    args_.bias0 = Optional(Part::kBias0), args_.scale = Optional(Part::kScale), args_.row = Optional(Part::kRow);
    args_.residual = Optional(Part::kResidual);
    args_.output = output_.data();
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  DeviceProblem(const DeviceProblem&) = delete;
  DeviceProblem& operator=(const DeviceProblem&) = delete;
  ~DeviceProblem() { cudaStreamDestroy(stream_); }
  GemmArgs& args() { return args_; }

  // By the kernel that is forced. repeats: further runs, whose bits must be the first one's.
  void Run(int repeats) {
    CheckRuns(problem_, name_, repeats, &output_, &workspace_, stream_,
              [&](const RunContext& context) { return cuda::RunGemmAndGetPlan(args_, context, &plan_); });
  }
  // Of the last run.
  const cuda::GemmPlan& plan() const { return plan_; }
  bool RanCublasLt() const { return plan_.family == &cuda::kGemmCublasLtFamily; }

  // By every kernel that reads such operands.
  void RunAll(int repeats, bool reads_vectors) {
    for (const std::string& kernel : KernelsFor(args_, reads_vectors)) {
      const ForcedKernel forced(cuda::GemmRequests(), kernel);
      Run(repeats);
      if (!reads_vectors) CHECK(plan_.family == &cuda::kGemmSm80Family, Name());
      const bool is_taken = kernel.empty() || kernel == plan_.family->name || kernel == KernelName(*plan_.kernel);
      CHECK(is_taken, Name(), kernel, " was forced, and ", Print(plan_), " ran");
    }
  }

  std::string Name() const { return RunName(problem_, name_); }

 private:
  void* Place(const std::vector<char>& bytes) {
    inputs_.push_back(std::make_unique<GuardedMemory>(bytes.size(), shift_));
    inputs_.back()->Write(bytes);
    return inputs_.back()->data();
  }
  void* Optional(Part::Kind part) {
    if (!problem_.c.has[part]) return nullptr;
    return Place(problem_.inputs[static_cast<size_t>(problem_.place[part])].bytes);
  }

  const Problem problem_;
  const size_t shift_;
  std::vector<std::unique_ptr<GuardedMemory>> inputs_;
  GuardedMemory output_, workspace_;
  cudaStream_t stream_ = nullptr;
  const std::string name_;
  GemmArgs args_;
  cuda::GemmPlan plan_;
};

Case CaseOf(uint64_t seed, int64_t M, int64_t N, int64_t K) {
  Case c;
  c.seed = seed;
  c.dtype = seed / 6 % 2 == 0 ? DType::kF16 : DType::kBF16;  // SetEpilogue takes seeds by 6
  c.lead = {M};
  c.N = N, c.K = K;
  return c;
}

// None, bias, bias with ReLU, bias with residual, GELU by tanh, and all at once: cuBLASLt has all but the last.
void SetEpilogue(Case* c, uint64_t which) {
  const uint64_t kind = which % 6;
  c->has[Part::kBias0] = kind != 0 && kind != 4;
  c->has[Part::kResidual] = kind == 3 || kind == 5;
  c->has[Part::kScale] = c->has[Part::kRow] = kind == 5;
  if (kind == 2) c->activation = Activation::kRelu;
  if (kind == 4) c->activation = Activation::kGeluTanh;
  if (kind == 5) c->activation = Activation::kSilu;
}

constexpr int64_t kRowCounts[] = {1, 17, 63, 64, 65, 129, 300};

// Sizes around the tiles' edges, by all kernels that read 16 bytes at a time.
TEST(CudaTransposedGemmSizes) {
  uint64_t seed = 0;
  for (const int64_t M : kRowCounts) {
    int64_t gap = 0;
    for (const auto& [N, K] : std::vector<std::pair<int64_t, int64_t>>{
             {8, 8}, {64, 64}, {120, 200}, {136, 56}, {200, 72}, {256, 320}, {264, 328}, {520, 456}, {1032, 136}}) {
      Case c = CaseOf(++seed, M, N, K);
      gap = gap == 0 ? 8 : gap == 8 ? 64 : 0;
      if (!IsSampled(seed)) continue;
      SetEpilogue(&c, seed);
      DeviceProblem(c, K + gap, true).RunAll(1, true);
    }
  }
}

// Rows that are not read 16 bytes at a time, by their length, distance or address; and a K of 0.
TEST(CudaTransposedGemmWithoutVectors) {
  struct Size {
    int64_t N, K, gap;
    bool shifted;
  };
  uint64_t seed = 1000;
  for (const int64_t M : kRowCounts) {
    for (const Size& size : {Size{1, 1, 0, false}, Size{72, 0, 0, false}, Size{7, 65, 3, false}, Size{65, 7, 0, false},
                             Size{128, 129, 0, false}, Size{129, 32, 0, false}, Size{250, 100, 4, false},
                             Size{301, 131, 1, false}, Size{136, 72, 1, false}, Size{136, 72, 8, true}}) {
      Case c = CaseOf(++seed, M, size.N, size.K);
      if (!IsSampled(seed)) continue;
      SetEpilogue(&c, seed);
      c.shifted = size.shifted;
      DeviceProblem(c, size.K + size.gap, true).RunAll(1, false);
    }
  }
}

// More tiles than a device holds at once, an odd number of them for some CTAs, with fewer steps than stages and more.
TEST(CudaTransposedGemmWaves) {
  uint64_t seed = 2000;
  for (const int64_t M : {2600, 5200}) {
    for (const int64_t K : {8, 64, 200, 320, 328, 776}) {
      Case c = CaseOf(++seed, M, 1544, K);
      if (!IsSampled(seed)) continue;
      SetEpilogue(&c, seed);
      DeviceProblem(c, K + (K == 328 ? 8 : 0), true).RunAll(3, true);
    }
  }
}

// Few rows of a wide matrix, and many rows of a narrow one.
TEST(CudaTransposedGemmWide) {
  uint64_t seed = 3000;
  for (const auto& [M, N] : std::vector<std::pair<int64_t, int64_t>>{{17, 16384}, {128, 16384}, {4096, 1024}}) {
    Case c = CaseOf(++seed, M, N, 1024);
    if (!IsSampled(seed)) continue;
    SetEpilogue(&c, seed);
    DeviceProblem(c, 1024, true).RunAll(2, true);
  }
}

// b of both layouts, of one shape and stride: what is kept about a problem tells them apart.
TEST(CudaTransposedGemmBothLayouts) {
  for (const bool may_wait : {false, true}) {
    Case c = CaseOf(4000, 200, 512, 512);
    c.has[Part::kBias0] = true;
    for (const bool is_b_transposed : {false, true, false, true}) {
      DeviceProblem problem(c, 512, is_b_transposed);
      problem.args().may_wait = may_wait;
      problem.Run(2);
      if (!may_wait) problem.RunAll(1, true);
    }
  }
}

// cuBLASLt goes first where the caller asks, with the memory that the caller gives, at a size for which the model
// chooses a 9.0 kernel.
TEST(CudaTransposedGemmPrefersCublasLt) {
  constexpr size_t kWorkspace = size_t{32} << 20;
  if (std::getenv("STOF_CUDA_GEMM") != nullptr) return;  // it would come first
  uint64_t seed = 5000;
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const bool is_b_transposed : {false, true}) {
      Case c = CaseOf(++seed, 512, 4096, 2048);
      if (!IsSampled(seed)) continue;
      c.dtype = dtype;
      DeviceProblem problem(c, 2048, is_b_transposed, kWorkspace);
      problem.Run(1);
      // With fewer SMs the tiles of the 9.0 kernels need a second wave, and the model chooses cuBLASLt.
      if (IsSm90() && SmCount() >= 132) {
        CHECK(problem.plan().family == &cuda::kGemmSm90Family, problem.Name(), Print(problem.plan()));
      }
      problem.args().prefers_cublaslt = true;
      problem.Run(2);
      if (cuda::CanUseCublasLt(problem.args())) CHECK(problem.RanCublasLt(), problem.Name());
      problem.args().may_wait = true;  // all kernels are timed
      problem.Run(1);
    }
  }
  // cuBLASLt does not have this epilogue.
  Case c = CaseOf(++seed, 300, 520, 456);
  if (!IsSampled(seed)) return;
  SetEpilogue(&c, 5);
  DeviceProblem problem(c, 456, true, kWorkspace);
  problem.args().prefers_cublaslt = true;
  problem.Run(1);
  CHECK(!problem.RanCublasLt(), problem.Name());
}

TEST(CudaTransposedGemmPlansWorkspace) {
  for (const size_t most : {size_t{0}, size_t{1} << 20, kGemmWorkspace, size_t{32} << 20}) {
    GemmArgs args;
    args.M = args.N = args.K = args.stride = 64;
    args.is_b_transposed = true;
    args.most_workspace = most;
    size_t workspace = 1;
    CHECK(cuda::PlanGemmWorkspace(args, &workspace).ok() && workspace == most, workspace, " for ", most);
  }
}

TEST(CudaTransposedGemmRefusesPairs) {
  GemmArgs args;
  args.M = args.N = args.K = args.stride = 64;
  args.is_b_transposed = true;
  args.a = args.b0 = args.b1 = args.output = reinterpret_cast<void*>(4096);  // never read
  RunContext context;
  context.on_cuda = true;
  size_t workspace = 0;
  for (const Status& status : {cuda::RunGemm(args, context), cuda::PlanGemmWorkspace(args, &workspace)}) {
    CHECK(!status.ok() && status.message().find("transposed") != std::string::npos, status.message());
  }
  cuda::GemmProblem problem;
  problem.is_pair = problem.is_b_transposed = true;
  CHECK(!cuda::CanUseCublasLt(args) && cuda::FindGemmSm90(problem).size() == 0);
  CHECK(cuda::FindGemmSm80(false, true, true, true) == nullptr);
  args.b1 = nullptr;
  CHECK(cuda::PlanGemmWorkspace(args, &workspace).ok() && workspace == kGemmWorkspace);
}

}  // namespace
}  // namespace stof::test
