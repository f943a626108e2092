// SPDX-License-Identifier: Apache-2.0
// The list of CPU instruction sets: names, and which ones this machine has.
#include <cstdio>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>

#include "cpu/attention/bf16_kernels.h"
#include "cpu/isa.h"
#include "cpu/isa_of_kernels.h"
#include "cpu/kernel_table.h"
#include "cpu/tile_permission.h"
#include "cpu/x86_features.h"
#include "plugins/core/c_api/c_api.h"
#include "plugins/core/contract/quantized_attention.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

TEST(CpuIsasByName) {
#define STOF_ID(id, name, is_supported) CpuIsa::id,
  const CpuIsa isas[] = {STOF_CPU_ISAS(STOF_ID)};
#undef STOF_ID
  for (const CpuIsa isa : isas) {
    CpuIsa found = CpuIsa::kPortable;
    CHECK(FindCpuIsa(CpuIsaName(isa), &found) && found == isa, CpuIsaName(isa));
    const cpu::KernelTable& kernels = cpu::KernelsOf(isa);
    CHECK(kernels.attention != nullptr && kernels.append != nullptr && kernels.chain != nullptr &&
          kernels.gemm != nullptr && kernels.packed_gemm != nullptr && kernels.sparse_mlp != nullptr);
    // CMakeLists.txt compiles something for each set of this machine, or there is no reason to list it.
    if (isa == CpuIsa::kPortable || !IsCpuIsaSupported(isa)) continue;
    const cpu::KernelTable& before = cpu::KernelsOf(static_cast<CpuIsa>(static_cast<int>(isa) - 1));
    CHECK(std::memcmp(&kernels, &before, sizeof(kernels)) != 0, CpuIsaName(isa));
  }
  CpuIsa kept = CpuIsa::kAvx2;
  CHECK(!FindCpuIsa("avx", &kept) && !FindCpuIsa("", &kept) && kept == CpuIsa::kAvx2);
  CHECK(std::string(CpuIsaName(CpuIsa::kAvx512)) == "avx512");
  CHECK(IsCpuIsaSupported(CpuIsa::kPortable) && IsCpuIsaSupported(BestCpuIsa()));
  std::printf("  the best set of this machine: %s\n", CpuIsaName(BestCpuIsa()));
  CountCases(std::size(isas));
}

// Servers have AVX-512 without AVX-VNNI: no set takes kernels from avx_vnni.
TEST(NoOtherSetRunsKernelsOfAvxVnni) {
#define STOF_ID(id, name, is_supported) CpuIsa::id,
  const CpuIsa isas[] = {STOF_CPU_ISAS(STOF_ID)};
#undef STOF_ID
  const auto* const own = cpu::KernelsOf(CpuIsa::kAvxVnni).quantized_attention;
#if defined(__x86_64__)
  const bool is_compiled = true;
#else
  const bool is_compiled = false;
#endif
  CHECK((own != cpu::KernelsOf(CpuIsa::kAvx2).quantized_attention) == is_compiled);
  for (const CpuIsa isa : isas) {
    if (!is_compiled || isa == CpuIsa::kAvxVnni) continue;
    CHECK(cpu::KernelsOf(isa).quantized_attention != own, CpuIsaName(isa));
  }
  CountCases(std::size(isas));
}

TEST(ASetOfAnotherArchitectureLimitsNothing) {
  const CpuIsa best = BestCpuIsaAtMost("");
  CHECK(IsCpuIsaSupported(best) && BestCpuIsaAtMost("portable") == CpuIsa::kPortable);
  CHECK(BestCpuIsaAtMost(CpuIsaName(best)) == best && BestCpuIsaAtMost("none") == best);
  const char* const x86[] = {"avx2",        "avx_vnni",    "avx512",   "avx512_vnni",
                             "avx512_vbmi", "avx512_bf16", "amx_int8", "amx_bf16"};
  const char* const arm[] = {"neon", "neon_dotprod", "neon_bf16"};
#if defined(__x86_64__)
  for (const char* name : arm) CHECK(BestCpuIsaAtMost(name) == best, name);
  const char* const least = x86[0];
#elif defined(__aarch64__)
  for (const char* name : x86) CHECK(BestCpuIsaAtMost(name) == best, name);
  const char* const least = arm[0];
#else
  const char* const least = "portable";
#endif
  CpuIsa limit = CpuIsa::kPortable;
  CHECK(FindCpuIsa(least, &limit));
  CHECK(BestCpuIsaAtMost(least) == (IsCpuIsaSupported(limit) ? limit : CpuIsa::kPortable));
  CountCases(std::size(x86) + std::size(arm));
}

#if defined(__x86_64__)
TEST(X86FeaturesAsTheCompilerKnowsThem) {
#define STOF_SAME(name) CHECK(cpu::HasX86Feature(name) == (__builtin_cpu_supports(name) != 0), name)
  STOF_SAME("fma");
  STOF_SAME("f16c");
  STOF_SAME("avx2");
  STOF_SAME("avxvnni");
  STOF_SAME("avx512f");
  STOF_SAME("avx512dq");
  STOF_SAME("avx512bw");
  STOF_SAME("avx512vl");
  STOF_SAME("avx512vnni");
  STOF_SAME("avx512vbmi");
  STOF_SAME("avx512bf16");
#undef STOF_SAME
  CHECK(!cpu::HasX86Feature("avx1024"));
  CountCases(11);
}
#endif

// What the kernel would answer about tile registers, and the requests it got.
bool has_permission = false, gives_permission = false;
int requests = 0;
long AnswerArchPrctl(int code, uint64_t argument) {
  if (code == 0x1022) {  // ARCH_GET_XCOMP_PERM: x87, SSE and AVX-512 always, data of tiles with a permission
    const uint64_t features = has_permission ? 0x600e7 : 0x2e7;
    std::memcpy(reinterpret_cast<void*>(static_cast<uintptr_t>(argument)), &features, sizeof features);
    return 0;
  }
  ++requests;
  CHECK(code == 0x1023 && argument == 18, code, " ", argument);
  return gives_permission ? 0 : -1;
}
long RefuseArchPrctl(int /*code*/, uint64_t /*argument*/) { return -1; }

TEST(TilesNeedAPermission) {
  has_permission = gives_permission = false, requests = 0;
  CHECK(!cpu::AskForTiles(AnswerArchPrctl) && requests == 1);
  gives_permission = true;
  CHECK(cpu::AskForTiles(AnswerArchPrctl) && requests == 2);
  has_permission = true, gives_permission = false;
  CHECK(cpu::AskForTiles(AnswerArchPrctl) && requests == 2, "a process that has it does not ask again");
  CHECK(!cpu::AskForTiles(RefuseArchPrctl), "a container may forbid the call");
  CountCases(4);
}

TEST(Bf16KernelsOfEachSet) {
  int kernels = 0;
  for (int i = 0; i <= static_cast<int>(CpuIsa::kNeonBf16); ++i) {
    const auto isa = static_cast<CpuIsa>(i);
    const bool has_tiles = cpu::NeedsTilePermission(isa);
    if (!IsCpuIsaSupported(isa) && !has_tiles) continue;
    const std::optional<CpuIsa> found = IsaOfBf16Kernels(isa);
    CHECK(found.has_value() == (cpu::KernelsOf(isa).attention_bf16 != nullptr), CpuIsaName(isa));
    if (!found.has_value()) continue;
    ++kernels;
    // Without the permission for tiles the set before them runs.
    const bool runs_own = !has_tiles || (isa == CpuIsa::kAmxBf16 && cpu::MayUseTiles());
    CHECK(*found == (runs_own ? isa : CpuIsa::kAvx512Bf16), CpuIsaName(isa), ": ", CpuIsaName(*found));
  }
  const std::optional<CpuIsa> best = IsaOfBf16Kernels(BestCpuIsa());
  CHECK(std::string(stof_cpu_bf16_kernel()) == (best.has_value() ? CpuIsaName(*best) : ""));
  CountCases(kernels + 1);
}

TEST(QuantizedAttentionKernelsOfEachSet) {
  const auto kernels_of = [](CpuIsa isa) { return cpu::KernelsOf(isa).quantized_attention; };
  for (int i = 0; i <= static_cast<int>(CpuIsa::kNeonBf16); ++i) {
    const auto isa = static_cast<CpuIsa>(i);
    const bool has_tiles = cpu::NeedsTilePermission(isa);
    if (!IsCpuIsaSupported(isa) && !has_tiles) continue;
    const CpuIsa found = IsaOfQuantizedAttention(isa);
    // Without the permission for tiles, those of avx512_bf16 run, which are those of avx512_vbmi.
    const CpuIsa expected = has_tiles && !cpu::MayUseTiles() ? CpuIsa::kAvx512Bf16 : isa;
    CHECK(found <= isa && kernels_of(found) == kernels_of(expected), CpuIsaName(isa), ": ", CpuIsaName(found));
    CHECK(kernels_of(found) != nullptr && IsaOfQuantizedAttention(found) == found);
  }
  const bool has_own = kernels_of(CpuIsa::kAmxInt8) != kernels_of(CpuIsa::kAvx512Bf16);
  CHECK(has_own == (kernels_of(CpuIsa::kAvx512Vbmi) != kernels_of(CpuIsa::kAvx512Vnni)), "compiled where AVX-512 is");
  CHECK(kernels_of(CpuIsa::kAmxBf16) == kernels_of(CpuIsa::kAmxInt8));
  CHECK(std::string(stof_cpu_quantized_attention_kernel()) == CpuIsaName(IsaOfQuantizedAttention(BestCpuIsa())));
  CountCases(static_cast<int>(CpuIsa::kNeonBf16) + 1);
}

}  // namespace
}  // namespace stof::test
