// SPDX-License-Identifier: Apache-2.0
// From the operator to the kernels of chains: the one that was made for a chain, else the one that interprets all.
#include "cuda/chain/run.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <limits>
#include <mutex>
#include <string_view>

#include "cuda/chain/codegen.h"
#include "cuda/chain/kernel_cache.h"
#include "cuda/chain/params.h"
#include "cuda/common/status.h"
#include "cuda/common/stream_memory.h"
#include "plugins/core/host/environment.h"
#include "plugins/core/host/quoted.h"

namespace stof {
namespace cuda {
namespace {

// A chain with the shapes of a run, on one device, with tensors of one alignment.
struct PreparedChain {
  int device = 0;
  std::vector<uint8_t> alignment;
  void* kernel = nullptr;  // nullptr: the interpreter
  ChainPlan plan;          // its text is dropped
};

class KeptLaunches final : public DeviceChain {
 public:
  std::mutex mutex;
  std::vector<std::shared_ptr<const PreparedChain>> launches;  // the one that was used last first
};
constexpr size_t kMostLaunches = 8;

// STOF_CHAIN_KERNELS, for tests: "interpret" makes no kernel, "made" is an error where none was made.
enum class Wanted { kAny, kInterpret, kMade };
Wanted ReadWantedKernels() {
  static const Wanted wanted = [] {
    const std::string_view word = ReadVariableOr(Variable::kChainKernels, std::string_view());
    return word == "interpret" ? Wanted::kInterpret : word == "made" ? Wanted::kMade : Wanted::kAny;
  }();
  return wanted;
}

void WarnOnce(const std::string& why) {
  static std::atomic<bool> warned{false};
  if (warned.exchange(true)) return;
  std::fprintf(stderr, "stof: a StofChain runs by interpretation, which is slow: %s\n", EscapeMessage(why).c_str());
}

Status Interpret(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                 int sm_count, void* stream) {
  ChainParams params;
  if (!MakeChainParams(chain, bound, inputs, outputs, sm_count, &params)) {
    return Status::Error("the chain has more than " + std::to_string(kChainReads) + " reads, or more than " +
                         std::to_string(kChainParts) +
                         " remainders and quotients in indices, which no CUDA kernel takes");
  }
  const RelaxedCapture relaxed;  // the first launch loads the kernel
  return ToStatus(static_cast<cudaError_t>(LaunchChain(params, stream)), "launch of the kernel of chains");
}

std::vector<uint8_t> AlignmentOf(const Chain& chain, const void* const* inputs, void* const* outputs) {
  std::vector<uint8_t> alignment;
  for (int i = 0; i < chain.inputs; ++i) {
    alignment.push_back(static_cast<uint8_t>(reinterpret_cast<uintptr_t>(inputs[i]) % 16));
  }
  for (size_t i = 0; i < chain.outputs.size(); ++i) {
    alignment.push_back(static_cast<uint8_t>(reinterpret_cast<uintptr_t>(outputs[i]) % 16));
  }
  return alignment;
}

Status CountSms(int device, int* count) {
  return ToStatus(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device), "number of SMs");
}

// *launch: with a kernel, or none where only the interpreter takes the chain. *lasting: it will be so in later runs.
Status MakeLaunch(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                  bool make, PreparedChain* launch, bool* lasting) {
  int sm_count = 0;
  STOF_RETURN_IF_ERROR(CountSms(launch->device, &sm_count));
  ChainLayout layout;
  *lasting = true;
  std::string why = "rows without elements";
  if (ReadWantedKernels() == Wanted::kInterpret) return Status();
  if (MakeChainLayout(chain, bound, inputs, outputs, sm_count, &layout)) {
    MakeChainPlan(chain, layout, sm_count, &launch->plan);
    if (launch->plan.ctas > std::numeric_limits<int32_t>::max() || launch->plan.words.size() > 500) return Status();
    launch->kernel = FindChainKernel(launch->plan.kernel, launch->device, make, &why);
    launch->plan.kernel.clear();
    launch->plan.kernel.shrink_to_fit();
    if (launch->kernel == nullptr) {
      *lasting = make;
      WarnOnce(why);
      if (ReadWantedKernels() == Wanted::kMade) return Status::Error("no kernel was made for a chain: " + why);
    }
  }
  return Status();
}

Status GetLaunch(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                 bool captured, KeptLaunches* kept, std::shared_ptr<const PreparedChain>* launch) {
  auto made = std::make_shared<PreparedChain>();
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&made->device), "current device"));
  made->alignment = AlignmentOf(chain, inputs, outputs);
  const std::lock_guard<std::mutex> lock(kept->mutex);
  for (const auto& one : kept->launches) {
    if (one->device != made->device || one->alignment != made->alignment) continue;
    *launch = one;
    return Status();
  }
  bool lasting = false;
  STOF_RETURN_IF_ERROR(MakeLaunch(chain, bound, inputs, outputs, !captured, made.get(), &lasting));
  if (lasting) {
    if (kept->launches.size() == kMostLaunches) kept->launches.pop_back();
    kept->launches.insert(kept->launches.begin(), made);
  }
  *launch = std::move(made);
  return Status();
}

}  // namespace

std::unique_ptr<DeviceChain> MakeDeviceChain() { return std::make_unique<KeptLaunches>(); }

Status RunChain(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                DeviceChain* kept, const RunContext& context) {
  if (bound.rows == 0) return Status();
  std::shared_ptr<const PreparedChain> launch;
  STOF_RETURN_IF_ERROR(
      GetLaunch(chain, bound, inputs, outputs, IsCapturing(context.stream), static_cast<KeptLaunches*>(kept), &launch));
  if (launch->kernel == nullptr) {
    int sm_count = 0;
    STOF_RETURN_IF_ERROR(CountSms(launch->device, &sm_count));
    return Interpret(chain, bound, inputs, outputs, sm_count, context.stream);
  }
  std::vector<int64_t> words = launch->plan.words;
  for (const ChainPlan::Address& address : launch->plan.addresses) {
    const void* data = address.output ? outputs[address.index] : inputs[address.index];
    words[static_cast<size_t>(address.word)] = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data)) + address.offset;
  }
  return LaunchChainKernel(launch->kernel, launch->plan.ctas, launch->plan.threads, words, context.stream);
}

Status ReadyChain(const Chain& chain, const BoundChain& bound, DeviceChain* kept) {
  if (bound.rows == 0) return Status();
  const void* inputs[kChainMostInputs] = {};
  void* outputs[kChainMostOutputs] = {};
  std::shared_ptr<const PreparedChain> launch;
  return GetLaunch(chain, bound, inputs, outputs, false, static_cast<KeptLaunches*>(kept), &launch);
}

}  // namespace cuda
}  // namespace stof
