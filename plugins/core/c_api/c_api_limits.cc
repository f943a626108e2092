// SPDX-License-Identifier: Apache-2.0
// What the operators take, for callers that choose before they make a node.
#include <optional>
#include <string>

#include "cpu/isa.h"
#include "plugins/core/base/activation.h"
#include "plugins/core/c_api/c_api.h"
#include "plugins/core/contract/bf16_kernels.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/contract/quantized_attention.h"
#include "plugins/core/host/fork_guard.h"

namespace {

using stof::DType;
using stof::OpDescription;
using stof::Target;

// "a, b, c" of what `print` makes of each item. Names are C identifiers: nothing is escaped.
template <typename List, typename Print>
std::string Join(const List& items, Print print) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ", ") + print(item);
  return text;
}

std::string Quote(const std::string& name) { return "\"" + name + "\""; }
std::string Member(const std::string& name, const std::string& value) { return Quote(name) + ": " + value; }
std::string Object(const std::string& members) { return "{" + members + "}"; }

std::string TargetOf(const OpDescription& op, Target target) {
  if (op.is_variadic) return Object("");
  const auto limits_of = [&](DType dtype) {
    std::string limits;
    if (op.limits != nullptr) {
      limits = Join(op.limits(target, dtype),
                    [](const stof::OpLimit& limit) { return Member(limit.name, std::to_string(limit.value)); });
    }
    return Member(stof::TypeText(dtype), Object(limits));
  };
  std::string members = Member("types", Object(Join(op.TypesOn(target), limits_of)));
  const auto add_flag = [&](const char* name, bool (*has)(Target)) {
    if (has != nullptr && has(target)) members += ", " + Member(name, "true");
  };
  add_flag("skips_scores", op.skips_scores);
  add_flag("chooses_blocks", op.chooses_blocks);
  add_flag("chooses_pages", op.chooses_pages);
  return Object(members);
}

std::string LimitsOf(const OpDescription& op) {
  const std::string attributes = Join(op.attributes, [](const auto& attribute) { return Quote(attribute.name); });
  const std::string roles = Join(op.roles, [](const char* role) { return Quote(role); });
  const std::string storage = Join(op.storage_types, [](DType dtype) { return stof::TypeText(dtype); });
  std::string activations, with_zeros;
  for (int i = 0; i < stof::kActivations && op.has_activation; ++i) {
    const std::string name = Quote(stof::kActivationNames[i]);
    activations += (activations.empty() ? "" : ", ") + name;
    if (stof::kActivationGivesZeros[i]) with_zeros += (with_zeros.empty() ? "" : ", ") + name;
  }
  std::string targets;
  for (const Target target : {Target::kCpu, Target::kCuda, Target::kTensorRt}) {
    targets += targets.empty() ? "" : ", ";
    targets += Member(stof::kTargetNames[static_cast<int>(target)], TargetOf(op, target));
  }
  return Member(op.name,
                Object(Member("activations", "[" + activations + "]") + ", " +
                       Member("activations_with_zeros", "[" + with_zeros + "]") + ", " +
                       Member("attributes", "[" + attributes + "]") + ", " + Member("roles", "[" + roles + "]") + ", " +
                       Member("storage_types", "[" + storage + "]") + ", " + Member("targets", Object(targets))));
}

std::string AllLimits() {
  int count = 0;
  const OpDescription* const* ops = stof::AllOps(&count);
  std::string text;
  for (int i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + LimitsOf(*ops[i]);
  return Object(text);
}

}  // namespace

extern "C" const char* stof_op_limits(void) {
  static stof::ProcessWide<const std::string> limits;
  return limits.Get(AllLimits).c_str();
}

extern "C" const char* stof_cpu_bf16_kernel(void) {
  const std::optional<stof::CpuIsa> isa = stof::IsaOfBf16Kernels(stof::BestCpuIsa());
  return isa.has_value() ? stof::CpuIsaName(*isa) : "";
}

extern "C" const char* stof_cpu_quantized_attention_kernel(void) {
  return stof::CpuIsaName(stof::IsaOfQuantizedAttention(stof::BestCpuIsa()));
}
