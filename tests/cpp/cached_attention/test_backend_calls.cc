// SPDX-License-Identifier: Apache-2.0
// What StofCachedAttention hands to a device in a run with 8-bit operands, recorded by a backend in the place of
// CUDA's.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/attention/int8/precision.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/ops/cached_attention/cached_attention.h"
#include "tests/cpp/check.h"
#include "tests/cpp/map_attributes.h"

namespace stof {
namespace {

struct Recorded {
  std::vector<AttentionArgs> runs;
  std::vector<CacheAppendArgs> appends;
};
Recorded& recorded() {
  static Recorded all;
  return all;
}

}  // namespace

const CudaBackend* FindCudaBackend() {
  static const CudaBackend backend = [] {
    CudaBackend made;
    made.attention.run = [](const AttentionArgs& args, const Tensor*, const AttentionMask&, const ExprSizes&,
                            const Tables&, const RunContext&) {
      recorded().runs.push_back(args);
      return Check(args);
    };
    made.attention.upload_columns = [](const KeyColumns&, const RunContext&, bool* is_ready) {
      *is_ready = false;
      return Status();
    };
    made.cached_attention.append = [](const CacheAppendArgs& args, const RunContext&) {
      recorded().appends.push_back(args);
      return Status();
    };
    return made;
  }();
  return &backend;
}

namespace test {
namespace {

namespace in = cached_input;
constexpr int64_t kB = 2, kH = 4, kG = 2, kD = 64, kCapacity = 400;

// One run of a node on the device that is recorded.
struct Call {
  AttentionArgs attention;
  CacheAppendArgs append;
  std::vector<size_t> blocks;  // bytes of its workspace
};

Call RunNode(const char* precision, int64_t S, int32_t total, const char* mask, DType cache = DType::kF16) {
  MapAttributes attributes;
  attributes.ints = {{"num_heads", kH}, {"kv_num_heads", kG}};
  attributes.strings = {{"mask", mask}, {"precision", precision}};
  std::unique_ptr<Op> op;
  CHECK(CachedAttentionDescription()->create(attributes, &op).ok());
  // Nothing reads what tensors hold, but for the total.
  static std::vector<double> memory[8];
  std::vector<Tensor> inputs(in::kCount), outputs;
  const auto describe = [&](int number, DType dtype, const std::vector<int64_t>& dims) {
    Tensor tensor = TensorOfShape(dtype, dims);
    memory[number].resize(static_cast<size_t>(tensor.Elements()) / 2 + 8);
    const auto address = reinterpret_cast<uintptr_t>(memory[number].data());
    tensor.data = reinterpret_cast<void*>((address + 15) & ~uintptr_t{15});
    return tensor;
  };
  inputs[in::kQuery] = describe(0, DType::kF16, {kB, S, kH * kD});
  inputs[in::kKey] = describe(1, DType::kF16, {kB, S, kG * kD});
  inputs[in::kValue] = describe(2, DType::kF16, {kB, S, kG * kD});
  inputs[in::kPastKey] = describe(3, cache, {kB, kG, kCapacity, kD});
  inputs[in::kPastValue] = describe(4, cache, {kB, kG, kCapacity, kD});
  inputs[in::kSeqlens] = describe(5, DType::kI32, {kB});
  inputs[in::kTotal] = TensorOfShape(DType::kI32, {1});
  inputs[in::kTotal].data = &total;
  if (IsQuantized(cache)) {
    inputs[in::kKeyScale] = inputs[in::kValueScale] = describe(6, DType::kF32, {1});
  }
  outputs = {describe(7, DType::kF16, {kB, S, kH * kD}), inputs[in::kPastKey], inputs[in::kPastValue]};
  CHECK(op->Prepare(inputs.data(), static_cast<int>(inputs.size())).ok());
  Call call;
  RunContext context;
  context.on_cuda = true;
  context.self = &call.blocks;
  context.allocate = [](void* self, size_t bytes) -> void* {
    static std::vector<double> block(64);
    static_cast<std::vector<size_t>*>(self)->push_back(bytes);
    return block.data();
  };
  recorded() = Recorded();
  const Status status = op->Run(inputs.data(), static_cast<int>(inputs.size()), outputs.data(), 3, context);
  CHECK(status.ok(), status.message());
  CHECK(recorded().runs.size() == 1 && recorded().appends.size() == 1);
  call.attention = recorded().runs[0], call.append = recorded().appends[0];
  return call;
}

void CheckReduced(const Call& call, AttentionPrecision precision, const std::string& where) {
  const AttentionArgs& args = call.attention;
  CHECK(args.precision == precision && cuda::Int8PrecisionOf(args) == precision, where);
  CHECK(args.kv.key_ends != nullptr && args.kv.key_ends == call.append.key_ends, where);
  CHECK(args.key.stride.b == kG * kCapacity * kD && args.key.stride.h == kCapacity * kD && args.key.stride.s == kD,
        where);
  CountCases(1);
}

void CheckFull(const Call& call, const std::string& where) {
  CHECK(cuda::Int8PrecisionOf(call.attention) == AttentionPrecision::kFull, where);
  CHECK(call.attention.kv.key_ends == nullptr && call.append.key_ends == nullptr, where);
  CountCases(1);
}

TEST(CachedAttentionHandsItsKeysToKernelsWith8BitOperands) {
  for (const char* const mask : {"k <= q", "k <= q and q - k < 200", "k <= q and (k < 4 or q - k < 100)"}) {
    // A chunk behind a past, also with the capacity for the total as captured graphs have it, and a first prompt.
    for (const int32_t total : {300, 400, 64}) {
      const std::string where = Text("mask ", mask, " total ", total);
      const Call full = RunNode("", 64, total, mask), reduced = RunNode("int8", 64, total, mask);
      CheckFull(full, where);
      CHECK(full.attention.precision == AttentionPrecision::kFull, where);
      CheckReduced(reduced, AttentionPrecision::kInt8, where);
      CHECK(reduced.attention.shape.T == total, where);
      CheckReduced(RunNode("int8_fp8", 64, total, mask), AttentionPrecision::kInt8Fp8, where);
      // One block more, of a number for each sequence.
      std::vector<size_t> blocks = full.blocks;
      blocks.push_back(kB * sizeof(int32_t));
      CHECK(reduced.blocks == blocks, where);
    }
  }
}

TEST(CachedAttentionDecodesInFullPrecision) {
  for (const char* const precision : {"int8", "int8_fp8"}) {
    for (const int64_t S : {1, 16}) {
      // Steps that read a window need no number of keys.
      for (const char* const mask : {"k <= q", "k <= q and q - k < 200"}) {
        CheckFull(RunNode(precision, S, 300, mask), Text("S ", S, " mask ", mask));
      }
      // Others are given it, but run in full precision as well, heads that are packed as queries included.
      for (const char* const mask : {"k <= q and k % 2 == 0", "k <= q and (k == q or (k + h // 2) % 3 != 0)"}) {
        const Call call = RunNode(precision, S, 300, mask);
        CHECK(call.attention.mask.fixed.window() == nullptr, mask);
        CHECK(cuda::Int8PrecisionOf(call.attention) == AttentionPrecision::kFull, "S ", S, " mask ", mask);
        CountCases(1);
      }
    }
    // The shortest step in 8 bits.
    CheckReduced(RunNode(precision, 17, 300, "k <= q"),
                 precision == std::string("int8") ? AttentionPrecision::kInt8 : AttentionPrecision::kInt8Fp8, "S 17");
  }
}

TEST(QuantizedCachesAreAttendedInFullPrecision) {
  for (const DType cache : {DType::kI8, DType::kF8E4M3}) {
    const Call call = RunNode("int8_fp8", 64, 300, "k <= q", cache);
    CHECK(call.attention.precision == AttentionPrecision::kFull);
    CheckFull(call, "quantized");
  }
}

}  // namespace
}  // namespace test
}  // namespace stof
