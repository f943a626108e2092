# SPDX-License-Identifier: Apache-2.0
"""What a target and its runtime allow of fused chains, as named options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import onnx

from stof.symbolic import Symbolic

# From an epilogue's description and its number of matmuls (FusedGemm.pair): the kernel's form, and the reason where it is "".
EpilogueForms = Callable[[str, int], tuple[str, str]]
Matmuls = Sequence[onnx.NodeProto]
# Whether matmuls of one tensor become one; the last argument tells whether a chain has to split the result again.
MergeDecider = Callable[[onnx.ModelProto, Symbolic, Matmuls, bool], bool]


@dataclass(frozen=True)
class ChainPolicy:
    """How fused chains are looked for and written. The default fuses no matmul, for ONNX Runtime."""

    # Kernels for epilogues. None: matmuls stay with the runtime.
    epilogue_forms: EpilogueForms | None = None
    # Decides which matmuls of one tensor become one. None: none do.
    merge_decider: MergeDecider | None = None
    # A bias of Gemm becomes an Add, which a chain or an epilogue may take.
    splits_gemm_bias: bool = False
    # StofAttention reads heads inside of a wider tensor (attribute ``packed``) rather than the output of Split.
    reads_packed_heads: bool = False
    # Matmuls are fp32 by constant weights, and also worth a kernel without an epilogue: the CPU's packed GEMM.
    has_cpu_gemm: bool = False
    # These matmuls may be fp16 and bf16 as well: they are written for kernels that round factors to bf16.
    has_16_bit_cpu_gemm: bool = False
    # Chains become TensorRT plugins.
    uses_tensorrt_plugins: bool = False


class ShapeReads(Enum):
    """How operators count that read a tensor only for the shapes, axes and bounds that it holds.

    A chain takes its sizes from its inputs, so such operators are gone once all their readers are parts of chains.
    """

    ASSUME_FUSED = "as if every memory-bound operator became part of a chain"
    AS_IN_GRAPH = "as the graph reads them now"
