// SPDX-License-Identifier: Apache-2.0
// The list of CPU instruction sets: names, and which ones this machine has.
#include <cstring>
#include <iterator>
#include <string>

#include "cpu/isa.h"
#include "cpu/kernel_table.h"
#include "cpu/x86_features.h"
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
  CountCases(std::size(isas));
}

TEST(ASetOfAnotherArchitectureLimitsNothing) {
  const CpuIsa best = BestCpuIsaAtMost("");
  CHECK(IsCpuIsaSupported(best) && BestCpuIsaAtMost("portable") == CpuIsa::kPortable);
  CHECK(BestCpuIsaAtMost(CpuIsaName(best)) == best && BestCpuIsaAtMost("none") == best);
  const char* const x86[] = {"avx2", "avx512", "avx512_vnni", "avx512_vbmi"};
  const char* const arm[] = {"neon", "neon_dotprod"};
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
  STOF_SAME("avx512f");
  STOF_SAME("avx512dq");
  STOF_SAME("avx512bw");
  STOF_SAME("avx512vl");
  STOF_SAME("avx512vnni");
  STOF_SAME("avx512vbmi");
#undef STOF_SAME
  CHECK(!cpu::HasX86Feature("avx1024"));
  CountCases(8);
}
#endif

}  // namespace
}  // namespace stof::test
