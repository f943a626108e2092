// SPDX-License-Identifier: Apache-2.0
#include "tests/trt/fake_backend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/mask/attention_mask.h"
#include "plugins/core/mask/block_mask_builder.h"
#include "tests/cpp/activation.h"
#include "tests/cpp/attention/reference.h"
#include "tests/trt/place.h"

namespace stof {
namespace test {

namespace {

void RunHere(void*, void (*fn)(void* user, size_t i), size_t count, void* user) {
  for (size_t i = 0; i < count; ++i) fn(user, i);
}

Status ToHost(const void* from, size_t bytes, void* to) {
  std::memcpy(to, from, bytes);
  return Status();
}

Status Device(int* id) {
  *id = 0;
  return Status();
}

// All that the kernels may ask for is asked for and written to: a workspace that is too small shows here.
Status UseWorkspace(size_t bytes, const RunContext& context) {
  if (bytes == 0) return Status();
  void* memory = context.allocate(context.self, bytes);
  if (memory == nullptr) return Status::Error("the workspace is too small");
  if (reinterpret_cast<uintptr_t>(memory) % 64 != 0) return Status::Error("the workspace is not aligned");
  std::memset(memory, 0xa5, bytes);
  LastSeen()->allocated = bytes;
  return Status();
}

bool NonZero(const Tensor& tensor, int64_t i) {
  switch (tensor.dtype) {
    case DType::kI32:
      return static_cast<const int32_t*>(tensor.data)[i] != 0;
    case DType::kI64:
      return static_cast<const int64_t*>(tensor.data)[i] != 0;
    case DType::kF32:
      return static_cast<const float*>(tensor.data)[i] != 0;
    case DType::kF16:
      return (static_cast<const uint16_t*>(tensor.data)[i] & 0x7fff) != 0;
    default:
      return static_cast<const uint8_t*>(tensor.data)[i] != 0;
  }
}

std::vector<uint8_t> PadBytes(const Tensor& pad, int64_t B, int64_t T) {
  std::vector<uint8_t> bytes;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t j = 0; j < T; ++j) bytes.push_back(NonZero(pad, (pad.dims[0] == 1 ? 0 : b) * T + j) ? 1 : 0);
  }
  return bytes;
}

Status Attention(const AttentionArgs& given, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                 const Tables& operands, const RunContext& context) {
  size_t bytes = 0;
  STOF_RETURN_IF_ERROR(PlanCudaAttention(given, pad != nullptr, mask, sizes, operands, &bytes));
  Seen& seen = *LastSeen();
  ++seen.attentions;
  seen.kernel = context.kernel;
  seen.stream = context.stream;
  STOF_RETURN_IF_ERROR(UseWorkspace(bytes, context));
  AttentionArgs args = given;
  std::vector<uint8_t> padding, read;
  if (pad != nullptr) {
    padding = PadBytes(*pad, args.shape.B, args.shape.T);
    args.mask.pad = padding.data();
  }
  std::unique_ptr<BoundDynamicMask> dynamic;
  if (!mask.parts.dynamic.empty()) {
    Tables vectors = operands;
    for (auto& [role, tensor] : vectors) {
      if (role != "pad") continue;
      read = PadBytes(tensor, args.shape.B, args.shape.T);
      tensor.data = read.data(), tensor.dtype = DType::kBool, tensor.dims[0] = args.shape.B;
    }
    STOF_RETURN_IF_ERROR(BoundDynamicMask::Make(mask.parts.dynamic, sizes, vectors, &dynamic));
    args.mask.dynamic = dynamic->view();
  }
  CpuAttentionConfig config = ChooseCpuAttention(args, 1);
  BlockMask blocks;
  if (!mask.parts.fixed.empty()) {
    STOF_RETURN_IF_ERROR(BuildBlockMask(mask.parts.fixed, sizes, config.m, config.n, &blocks));
    args.mask.fixed = StaticMask::OfBlocks(&blocks);
  }
  const size_t scratch = (CpuAttentionWorkspace(args, config, 1) + 63) / 64 * 64 + 64;
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(64, scratch), std::free);
  return CpuAttention(args, config, memory.get(), Parallel{RunHere, nullptr, 1});
}

int Kernels(const AttentionArgs&) { return kFakeKernels; }

Status Ready(const AttentionArgs&, const Tensor*, const AttentionMask&, const ExprSizes&, const Tables&,
             const RunContext&) {
  ++LastSeen()->readies;
  return Status();
}

std::unique_ptr<DeviceChain> MakeChainState() { return std::make_unique<DeviceChain>(); }

Status Chain(const stof::Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
             DeviceChain* kept, const RunContext& context) {
  if (kept == nullptr) return Status::Error("nothing is kept for the chain");
  LastSeen()->stream = context.stream;
  const auto program = CompileCpuChain(chain, bound, BestCpuIsa(), 1);
  const size_t bytes = (CpuChainWorkspace(*program, 1) + 63) / 64 * 64 + 64;
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(64, bytes), std::free);
  CpuChain({inputs, outputs}, *program, memory.get(), Parallel{RunHere, nullptr, 1});
  return Status();
}

Status PrepareChain(const stof::Chain&, const BoundChain&, DeviceChain* kept) {
  if (kept == nullptr) return Status::Error("nothing is kept for the chain");
  ++LastSeen()->readies;
  return Status();
}

Status Gemm(const GemmArgs& args, const RunContext& context) {
  if (args.is_b_transposed) return Status::Error("StofGemm never transposes b");
  LastSeen()->stream = context.stream;
  const int64_t size = SizeOf(args.dtype);
  const auto at = [&](const void* base, int64_t i) {
    return LoadFloat(args.dtype, static_cast<const char*>(base) + i * size);
  };
  const auto matmul = [&](const void* b, const void* bias, int64_t m, int64_t n) {
    double sum = bias == nullptr ? 0 : at(bias, n);
    for (int64_t k = 0; k < args.K; ++k) {
      sum += at(args.a, m * args.K + k) * at(b, k * args.stride + n);
    }
    return sum;
  };
  for (int64_t m = 0; m < args.M; ++m) {
    for (int64_t n = 0; n < args.N; ++n) {
      double y = test::Activate(args.activation, matmul(args.b0, args.bias0, m, n));
      if (args.b1 != nullptr) y *= matmul(args.b1, args.bias1, m, n);
      if (args.scale != nullptr) y *= at(args.scale, n);
      if (args.row != nullptr) y *= at(args.row, m);
      if (args.residual != nullptr) y += at(args.residual, m * args.N + n);
      StoreFloat(args.dtype, y, static_cast<char*>(args.output) + (m * args.N + n) * size);
    }
  }
  return Status();
}

Status PlanGemm(const GemmArgs&, size_t* workspace) {
  *workspace = 0;
  return Status();
}

// A graph of nothing: what was captured has run already.
Status Capture(Status (*queue)(void* self, const RunContext& context), void* self, const RunContext& context,
               void** graph) {
  if (!LastSeen()->can_capture) return Status::Error("no graphs here");
  *graph = nullptr;
  if (LastSeen()->busy) return Status();
  ++LastSeen()->captured;
  *graph = new char;
  return queue(self, context);
}
Status Replay(void*, void*) {
  if (!LastSeen()->can_replay) return Status::Error("no replays here");
  ++LastSeen()->replayed;
  return Status();
}
void Destroy(void* graph) {
  ++LastSeen()->dropped;
  delete static_cast<char*>(graph);
}
bool IsCapturing(void*) { return LastSeen()->is_capturing; }

// Only what plugins call.
CudaBackend Fake() {
  CudaBackend fake;
  fake.copy_to_host = ToHost;
  fake.current_device = Device;
  fake.attention.run = Attention;
  fake.attention.count_kernels = Kernels;
  fake.attention.prepare = Ready;
  fake.chain.run = Chain;
  fake.chain.make_state = MakeChainState;
  fake.chain.prepare = PrepareChain;
  fake.capture_graph = Capture;
  fake.replay_graph = Replay;
  fake.destroy_graph = Destroy;
  fake.is_capturing = IsCapturing;
  fake.gemm.run = Gemm;
  fake.gemm.plan_workspace = PlanGemm;
  return fake;
}

}  // namespace
}  // namespace test

const CudaBackend* FindCudaBackend() {
  static const CudaBackend fake = test::Fake();
  return &fake;
}

}  // namespace stof
