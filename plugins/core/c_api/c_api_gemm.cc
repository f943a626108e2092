// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <optional>

#include "cpu/isa.h"
#include "plugins/core/c_api/internal.h"
#include "plugins/core/contract/gemm.h"
#include "plugins/core/gemm/gemm.h"

namespace {

stof::Status FormOf(const char* epilogue, int pair, const char* other, char* form, size_t form_size) {
  if (epilogue == nullptr) return stof::Status::Error("no epilogue");
  stof::GemmEpilogue parsed;
  STOF_RETURN_IF_ERROR(stof::ParseGemm(epilogue, pair, &parsed));
  if (!parsed.has_form) return stof::Status::Error(other != nullptr ? other : parsed.why_not);
  const std::string text = parsed.form.Text(parsed.pair != stof::GemmPair::kNone);
  if (form != nullptr && form_size > 0) std::snprintf(form, form_size, "%s", text.c_str());
  return stof::Status();
}

}  // namespace

extern "C" int stof_gemm_form(const char* epilogue, int pair, char* form, size_t form_size, char* error,
                              size_t error_size) {
  return stof::RunGuarded(error, error_size, [&] { return FormOf(epilogue, pair, nullptr, form, form_size); });
}

extern "C" int stof_gemm_cpu_form(const char* epilogue, int pair, char* form, size_t form_size, char* error,
                                  size_t error_size) {
  constexpr const char* kOther = "the CPU's kernels apply another epilogue after the product, as a chain would";
  return stof::RunGuarded(error, error_size, [&] { return FormOf(epilogue, pair, kOther, form, form_size); });
}

extern "C" const char* stof_cpu_bf16_gemm_kernel(void) {
  const std::optional<stof::CpuIsa> isa = stof::IsaOfBf16Gemm(stof::BestCpuIsa());
  return isa.has_value() ? stof::CpuIsaName(*isa) : "";
}
