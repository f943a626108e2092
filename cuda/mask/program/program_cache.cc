// SPDX-License-Identifier: Apache-2.0
#include "cuda/mask/program/program_cache.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace stof {
namespace cuda {
namespace {

struct Compiled {
  ExprSizes sizes;
  MaskInputs inputs;         // without data
  MaskProgram program;       // likewise
  std::vector<size_t> from;  // [operands] index of the input
};

bool SameInput(const MaskInputs::value_type& a, const MaskInputs::value_type& b) {
  return a.second.dtype == b.second.dtype && a.second.rank == b.second.rank &&
         std::equal(a.second.dims, a.second.dims + a.second.rank, b.second.dims) && a.first == b.first;
}

bool Suits(const Compiled& compiled, const ExprSizes& s, const MaskInputs& inputs) {
  return compiled.sizes == s && compiled.inputs.size() == inputs.size() &&
         std::equal(inputs.begin(), inputs.end(), compiled.inputs.begin(), SameInput);
}

// Compiles with numbers in place of addresses: an operand's number is that of its input.
Status Compile(const AttentionMask& mask, const ExprSizes& sizes, const MaskInputs& inputs, Compiled* compiled) {
  compiled->sizes = sizes;
  compiled->inputs = inputs;
  uintptr_t number = 0;
  for (auto& input : compiled->inputs) input.second.data = reinterpret_cast<void*>(++number);
  STOF_RETURN_IF_ERROR(CompileMask(mask.parts.fixed, mask.parts.dynamic, sizes, compiled->inputs, &compiled->program));
  for (const MaskOperand& operand : compiled->program.operands) {
    compiled->from.push_back(reinterpret_cast<uintptr_t>(operand.data) - 1);
  }
  return Status();
}

}  // namespace

Status GetMaskProgram(const AttentionMask& mask, const ExprSizes& sizes, const MaskInputs& inputs,
                      MaskProgram* program) {
  auto compiled = std::static_pointer_cast<const Compiled>(mask.compiled.Get());
  if (compiled == nullptr || !Suits(*compiled, sizes, inputs)) {
    auto made = std::make_shared<Compiled>();
    STOF_RETURN_IF_ERROR(Compile(mask, sizes, inputs, made.get()));
    mask.compiled.Set(made);
    compiled = std::move(made);
  }
  *program = compiled->program;
  for (size_t i = 0; i < compiled->from.size(); ++i) {
    const auto& [name, tensor] = inputs[compiled->from[i]];
    if (tensor.data == nullptr) return Status::Error(name + " has no data");
    program->operands[i].data = tensor.data;
  }
  return Status();
}

}  // namespace cuda
}  // namespace stof
