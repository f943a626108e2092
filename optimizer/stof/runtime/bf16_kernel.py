# SPDX-License-Identifier: Apache-2.0
"""Which CPU kernels compute attention and GEMMs in bf16."""

from __future__ import annotations

from stof.runtime.library import EARLIER, LibraryError, ask_name


def cpu_bf16_kernel() -> str:
    """The instruction set whose kernels nodes with ``allow_bf16`` take on this machine.

    It is ``avx512_bf16``, ``amx_bf16`` or ``neon_bf16``, and empty where there is none: such nodes compute in fp32. On Linux
    this process asks for the permission to use the tile registers of AMX, where the processor has them.

    Raises:
        LibraryError: without a library, and for one of an earlier version, which ignores the attribute.
    """
    name = ask_name("stof_cpu_bf16_kernel")
    if name is None:
        raise LibraryError(f"the plugin library has no attention in bf16 (stof_cpu_bf16_kernel): {EARLIER}")
    return name


def cpu_bf16_gemm_kernel() -> str:
    """The instruction set whose kernels compute StofGemm with ``allow_bf16`` on this machine, as :func:`cpu_bf16_kernel`.

    Empty also for a library of an earlier version.

    Raises:
        LibraryError: without a library.
    """
    return ask_name("stof_cpu_bf16_gemm_kernel") or ""
