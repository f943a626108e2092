// SPDX-License-Identifier: Apache-2.0
// Attribute precision of the attention operators: what they take, and that CPU kernels compute in full precision.
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/c_api/c_api.h"
#include "plugins/core/ops/attention.h"
#include "plugins/core/ops/cached_attention/cached_attention.h"
#include "plugins/core/ops/paged_attention/paged_attention.h"
#include "tests/cpp/check.h"
#include "tests/cpp/map_attributes.h"

namespace stof::test {
namespace {

Status Create(const OpDescription& op, const char* precision, std::unique_ptr<Op>* made) {
  MapAttributes attributes;
  attributes.ints = {{"num_heads", 2}, {"kv_num_heads", 2}};
  attributes.strings = {{"mask", "k <= q"}, {"precision", precision}};
  return op.create(attributes, made);
}

bool Lists(const OpDescription& op, const std::string& name) {
  for (const AttributeDescription& attribute : op.attributes) {
    if (attribute.name == name) return true;
  }
  return false;
}

TEST(AttributePrecisionHasOneForm) {
  for (const OpDescription* const op : {AttentionDescription(), CachedAttentionDescription()}) {
    CHECK(Lists(*op, "precision"), op->name);
    std::unique_ptr<Op> made;
    for (const char* const value : {"", "int8", "int8_fp8"}) {
      const Status status = Create(*op, value, &made);
      CHECK(status.ok(), op->name, " '", value, "': ", status.message());
    }
    for (const std::string value : {"fp8", "INT8", "int4", "int8 "}) {
      const Status status = Create(*op, value.c_str(), &made);
      const std::string wanted = "attribute precision is '" + value + "', expected nothing, int8 or int8_fp8";
      CHECK(!status.ok() && status.message() == wanted, op->name, ": ", status.message());
    }
    CountCases(7);
  }
}

TEST(PagedAttentionRefusesAPrecision) {
  CHECK(!Lists(*PagedAttentionDescription(), "precision"));
  std::unique_ptr<Op> made;
  CHECK(Create(*PagedAttentionDescription(), "", &made).ok());
  const Status status = Create(*PagedAttentionDescription(), "int8", &made);
  CHECK(status.message() == "attribute precision is 'int8', expected nothing: no kernel over pages has 8-bit operands",
        status.message());
  CountCases(1);
}

// A prompt of 20 tokens over a cache of fp32, and what the CPU computes.
std::vector<float> RunPrompt(const char* precision) {
  constexpr int64_t kTokens = 20, kColumns = 2 * 64;
  std::unique_ptr<Op> op;
  CHECK(Create(*CachedAttentionDescription(), precision, &op).ok());
  Random random(5);
  std::vector<float> tokens[3], output(kTokens * kColumns), present[2];
  std::vector<Tensor> inputs(cached_input::kTotal + 1), outputs;
  for (size_t i = 0; i < 3; ++i) {
    for (int64_t at = 0; at < kTokens * kColumns; ++at) tokens[i].push_back(random.Unit());
    inputs[i] = TensorOfShape(DType::kF32, {1, kTokens, kColumns});
    inputs[i].data = tokens[i].data();
  }
  int32_t last = kTokens - 1, total = kTokens;
  inputs[cached_input::kSeqlens] = TensorOfShape(DType::kI32, {1});
  inputs[cached_input::kSeqlens].data = &last;
  inputs[cached_input::kTotal] = TensorOfShape(DType::kI32, {1});
  inputs[cached_input::kTotal].data = &total;
  outputs.push_back(TensorOfShape(DType::kF32, {1, kTokens, kColumns}));
  outputs[0].data = output.data();
  for (std::vector<float>& cache : present) {
    cache.resize(output.size());
    outputs.push_back(TensorOfShape(DType::kF32, {1, 2, kTokens, 64}));
    outputs.back().data = cache.data();
  }
  CHECK(op->Prepare(inputs.data(), static_cast<int>(inputs.size())).ok());
  std::vector<std::unique_ptr<char[]>> memory;
  RunContext context;
  context.self = &memory;
  context.allocate = [](void* self, size_t bytes) -> void* {
    auto* const blocks = static_cast<std::vector<std::unique_ptr<char[]>>*>(self);
    blocks->push_back(std::make_unique<char[]>(bytes + 64));
    char* const block = blocks->back().get();
    return block + (-reinterpret_cast<uintptr_t>(block) & 63u);
  };
  const Status status = op->Run(inputs.data(), static_cast<int>(inputs.size()), outputs.data(), 3, context);
  CHECK(status.ok(), status.message());
  return output;
}

TEST(CpuKernelsOfCachesIgnoreAPrecision) {
  const std::vector<float> full = RunPrompt("");
  CHECK(RunPrompt("int8") == full && RunPrompt("int8_fp8") == full);
  CountCases(2);
}

}  // namespace
}  // namespace stof::test
