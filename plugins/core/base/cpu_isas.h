// SPDX-License-Identifier: Apache-2.0
// The one list of the instruction sets of CPU kernels. Dispatch (cpu/isa.h), the values of STOF_CPU_ISA, the tests and
// the page of environment variables are made of it.
#ifndef STOF_PLUGINS_CORE_BASE_CPU_ISAS_H_
#define STOF_PLUGINS_CORE_BASE_CPU_ISAS_H_

// What the processor must have. cpu/isa.cc defines STOF_HAS_X86 for x86-64 and STOF_HAS_ARM for AArch64.
#define STOF_HAS_AVX2 STOF_HAS_X86("avx2") && STOF_HAS_X86("fma") && STOF_HAS_X86("f16c")
#define STOF_HAS_AVX_VNNI STOF_HAS_X86("avxvnni") && STOF_HAS_AVX2
#define STOF_HAS_AVX512 \
  STOF_HAS_X86("avx512f") && STOF_HAS_X86("avx512bw") && STOF_HAS_X86("avx512dq") && STOF_HAS_X86("avx512vl")
#define STOF_HAS_AVX512_VNNI STOF_HAS_X86("avx512vnni") && STOF_HAS_AVX512
#define STOF_HAS_AVX512_VBMI STOF_HAS_X86("avx512vbmi") && STOF_HAS_AVX512_VNNI
#define STOF_HAS_AVX512_BF16 STOF_HAS_X86("avx512bf16") && STOF_HAS_AVX512_VBMI
#define STOF_HAS_AMX_INT8 STOF_HAS_X86("amx-tile") && STOF_HAS_X86("amx-int8") && STOF_HAS_AVX512_BF16
#define STOF_HAS_AMX_BF16 STOF_HAS_X86("amx-bf16") && STOF_HAS_AMX_INT8
#define STOF_HAS_NEON STOF_HAS_ARM("neon")
#define STOF_HAS_NEON_DOTPROD STOF_HAS_ARM("dotprod")
#define STOF_HAS_NEON_BF16 STOF_HAS_ARM("bf16") && STOF_HAS_NEON_DOTPROD

// A row for each set, ISA(enumerator, name, whether the processor has it): the sets of x86-64, then those of AArch64,
// each from the least to the best. A set includes the features of the sets of its architecture before it, except that
// avx512 and later do not include avx_vnni: many servers have AVX-512 without it.
// stof_cpu_isa of CMakeLists.txt says which kernels are compiled for a set, and with which flags: none for a set of
// another architecture. Of an operator without kernels of its own, a set runs those of the best set before it.
#define STOF_CPU_ISAS(ISA)                               \
  ISA(kPortable, portable, true)                         \
  ISA(kAvx2, avx2, STOF_HAS_AVX2)                        \
  ISA(kAvxVnni, avx_vnni, STOF_HAS_AVX_VNNI)             \
  ISA(kAvx512, avx512, STOF_HAS_AVX512)                  \
  ISA(kAvx512Vnni, avx512_vnni, STOF_HAS_AVX512_VNNI)    \
  ISA(kAvx512Vbmi, avx512_vbmi, STOF_HAS_AVX512_VBMI)    \
  ISA(kAvx512Bf16, avx512_bf16, STOF_HAS_AVX512_BF16)    \
  ISA(kAmxInt8, amx_int8, STOF_HAS_AMX_INT8)             \
  ISA(kAmxBf16, amx_bf16, STOF_HAS_AMX_BF16)             \
  ISA(kNeon, neon, STOF_HAS_NEON)                        \
  ISA(kNeonDotprod, neon_dotprod, STOF_HAS_NEON_DOTPROD) \
  ISA(kNeonBf16, neon_bf16, STOF_HAS_NEON_BF16)

#endif  // STOF_PLUGINS_CORE_BASE_CPU_ISAS_H_
