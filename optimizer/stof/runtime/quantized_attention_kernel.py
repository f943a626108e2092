# SPDX-License-Identifier: Apache-2.0
"""Which CPU kernels compute attention over codes of 8 bits."""

from __future__ import annotations

from stof.runtime.library import ask_name


def cpu_quantized_attention_kernel() -> str:
    """The instruction set whose kernels StofQuantizedAttention takes on this machine.

    Empty for a library of an earlier version. On Linux this process asks for the permission to use the tile registers of AMX,
    where the processor has them; where it is refused, the set is the one before ``amx_int8``.

    Raises:
        LibraryError: without a library.
    """
    return ask_name("stof_cpu_quantized_attention_kernel") or ""
